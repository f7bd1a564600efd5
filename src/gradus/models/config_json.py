"""config.json, read and written: what Hugging Face says of a model in its fields, and what only Gradus says under
`gradus`: fields that Hugging Face does not have (a training length, a way to cut patches), an adapter and its base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gradus.errors import UserError
from gradus.models import weights
from gradus.models.building import whole
from gradus.models.family import lookup
from gradus.models.locating import digest, locate
from gradus.models.weights import fields, peft
from gradus.recipe.schema import Adapter, ModelConfig

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn

ABOUT_ADAPTER = ("adapter", "freeze", "base", "base_digest")  # beside fields of the configuration


@contextmanager
def one_line(where: object) -> Iterator[None]:
    """Turn the exceptions that an incomplete or contradictory configuration raises into a UserError."""
    try:
        yield
    except ValidationError as e:
        problems = [
            ": ".join(filter(None, (".".join(map(str, p["loc"])), p["msg"].removeprefix("Value error, "))))
            for p in e.errors()
        ]
        raise UserError(f"{where}: {'; '.join(problems)}") from None
    except KeyError as e:
        raise UserError(f"{where}: {e.args[0]} is missing, and the model cannot be built without it") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        raise UserError(
            f"{where}: a value of the wrong kind ({e}). Compare it with a published one of this family"
        ) from None


def own_fields(hf: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """What only Gradus says in a config.json."""
    ours = hf.get("gradus", {})
    if not isinstance(ours, dict):
        raise UserError(f"{file}: gradus: expected an object, got {ours!r:.60}")
    return ours


def read(hf: dict[str, Any], file: Path | None) -> ModelConfig:
    """The configuration that a config.json describes. Raises UserError for what no family of ours is."""
    ours = own_fields(hf, file)
    with one_line(file):
        table, known = weights.rules_of(weights.family_of(hf, file)), fields.Fields(hf)
        config = table.config_from_hf(known)
        fields.refuse_unknown(known, getattr(table, "WITHOUT_EFFECT", ()), f"model_type={hf.get('model_type')}")
        names = {int(i): str(name) for i, name in (hf.get("id2label") or {}).items()}
        outputs = fields.outputs(config.family, hf, n) if (n := getattr(config, "n_classes", None)) else "softmax"
        adapter = Adapter(**ours["adapter"]) if "adapter" in ours else None
        freeze = ours.get("freeze", ())
        if not all(isinstance(pattern, str) for pattern in freeze):
            raise ValueError(f"gradus.freeze={freeze!r:.40}")
        if own := {key: value for key, value in ours.items() if key not in ABOUT_ADAPTER}:
            config = config.changed(**own)
        config = config.trained(adapter, freeze)
        if config.reads == "text" and config.vocab_size is None:
            raise KeyError("vocab_size")
        if outputs != "none" and sorted(names) != list(range(len(names))):
            raise ValueError(f"id2label has the keys {', '.join(map(str, names))}; they must count from 0")
    # transformers writes LABEL_i where nobody named a class
    unnamed = all(name == f"LABEL_{i}" for i, name in names.items())
    return config.named([] if unnamed else [names[i] for i in sorted(names)], outputs)


def to_config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says beside weights of this dtype; of an adapter also what it is and its base."""
    table = weights.rules_of(config.family)
    hf = table.config_to_hf(config)
    understood = table.config_from_hf(dict(hf)).model_dump(mode="json")
    ours = config.model_dump(mode="json", exclude={"preset", "init"})
    own = {key: value for key, value in ours.items() if value != understood[key]}
    if config.classes:
        hf |= fields.labels(config)
    if config.outputs != "softmax":
        hf["problem_type"] = fields.PROBLEMS[config.outputs]
    hf |= ({"gradus": own} if own else {}) | {"dtype": str(dtype).removeprefix("torch.")}
    if config.adapter:
        base = base_of(config)
        about = config.adapter.model_dump(mode="json"), list(config.freeze), str(base), digest(base)
        hf["gradus"] = own | dict(zip(ABOUT_ADAPTER, about, strict=True))
    return hf


def base_of(config: ModelConfig) -> Path:
    """Where the weights beside an adapter are. Raises UserError where it has none."""
    if config.init is None:
        raise UserError("adapter: it is kept without the weights beside it, and these are new. Set model.init=FOLDER.")
    return locate(config.init).absolute()


def adapter_config(model: nn.Module) -> dict[str, Any] | None:
    """adapter_config.json of an adapted model; None for another."""
    config = model.config
    if not config.adapter:
        return None
    kinds = {"causal": "CAUSAL_LM", "cross": "SEQ_2_SEQ_LM", "both": None}
    text = config.reads == "text" and getattr(config, "n_classes", None)
    task = "SEQ_CLS" if text else kinds[lookup(config.family).attention]
    return peft.described(whole(config), str(base_of(config)), task)
