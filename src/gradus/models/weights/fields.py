"""The fields that a config.json and a configuration of ours share: one table of names a family, read both ways."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradus import files
from gradus.errors import UserError, some
from gradus.models.weights import Rule
from gradus.recipe.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


def names() -> dict[str, dict[str, Any]]:
    """Tables of names by family: names.yaml, whose head says what each of them is."""
    return files.packaged("models/weights/names.yaml")


def read(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields, of a table ours → [theirs, default], or theirs alone. Raises KeyError for one without a default that
    is absent."""
    return {our: hf[their] if isinstance(their, str) else hf.get(*their) for our, their in fields.items()}


def theirs(fields: Mapping[str, Any]) -> dict[str, str]:
    """Ours → their name alone."""
    return {our: their if isinstance(their, str) else their[0] for our, their in fields.items()}


def written(config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Their fields."""
    return {their: getattr(config, our) for our, their in theirs(fields).items()}


def as_ours(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """A config.json for a model that Hugging Face does not have; `from_ours` reads it."""
    stated = config.model_dump(mode="json", exclude={"preset", "init"})
    return {"model_type": model_type, "architectures": [architecture], **stated}


def from_ours(hf: Mapping[str, Any]) -> dict[str, Any]:
    others = (
        "model_type", "architectures", "dtype", "id2label", "label2id", "problem_type", "sentence_transformers",
        "gradus",
    )  # fmt: skip
    return {k: v for k, v in hf.items() if k not in others}


def labels(config: ModelConfig) -> dict[str, dict]:
    """The names of a classifier's classes, or those that transformers gives to classes without names."""
    names = config.classes or [f"LABEL_{i}" for i in range(config.n_classes)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": dict(zip(names, range(len(names))))}


def n_classes(hf: Mapping[str, Any]) -> int:
    return len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)


def activation(family: str, name: str, value: Any) -> str:
    known = names()[family]["activations"]
    return known[one_of(family, name, value, known)]


def their_activation(config: ModelConfig) -> str:
    known = names()[config.family]["activations"]
    return next(theirs for theirs, ours in known.items() if ours == config.activation)


def layers(names: Mapping[str, str], kinds: Collection[str] = ("weight", "bias")) -> list[Rule]:
    """Rules for the parameters of layers, ours → theirs."""
    return [Rule(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in names.items() for kind in kinds]


def blocks(n: int, ours: str, theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Names of the layers in n blocks, ours → theirs; parts: those in one."""
    return {f"{ours}.{i}.{our}": f"{theirs}.{i}.{their}" for i in range(n) for our, their in parts.items()}


def fused(ours: Sequence[str], theirs: str) -> Rule:
    """A tensor of theirs that is several of ours, one below the other."""
    return Rule(tuple(ours), theirs, lambda whole: whole.chunk(len(ours)), joined)


def joined(*parts: Tensor) -> Tensor:
    import torch

    return torch.cat(parts)


# ---------------------------------------------------------------- a classifier's outputs

PROBLEMS = {"none": "regression", "sigmoid": "multi_label_classification"}  # ModelConfig.outputs → problem_type


def outputs(family: str, hf: Mapping[str, Any], n_classes: int) -> str:
    """How a classifier's outputs are read, as in ModelConfig.outputs: by `problem_type`, or for one
    output, a score, by the activation that sentence-transformers keeps. Raises UserError for one that is not known."""
    own = (hf.get("sentence_transformers") or hf).get("activation_fn", hf.get("sbert_ce_default_activation_function"))
    name, value = ("activation_fn", own) if n_classes == 1 and own else ("problem_type", hf.get("problem_type"))
    known = names()["classifier"][name]
    return known[one_of(family, name, value, known)]


# ---------------------------------------------------------------- what a family does not have


class Fields(dict[str, Any]):
    """A config.json that knows which of its fields a reader has asked for."""

    def __init__(self, hf: Mapping[str, Any]):
        super().__init__(hf)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)

    def items(self) -> ItemsView[str, Any]:
        self.used.update(self)
        return super().items()


def unknown(hf: Fields, without_effect: Collection[str]) -> str:
    """The fields that the reader does not use and that may change what a model computes: all but those in names.yaml
    and in the reader's WITHOUT_EFFECT. Empty values (null, {}, []) are ignored, and so are names that begin with an
    underscore, which libraries use for their own notes."""
    known = {*names()["all"]["without effect"], *without_effect, *hf.used}
    left = [n for n in hf if n not in known and not n.startswith("_") and hf[n] not in (None, {}, [])]
    return some([f"{name}={hf[name]!r:.60}" if i == 0 else name for i, name in enumerate(left)])


def refuse_unknown(hf: Fields, without_effect: Collection[str], what: str) -> None:
    """Raises UserError where there are `unknown` ones."""
    if fields := unknown(hf, without_effect):
        raise UserError(
            f"config.json: {fields}: unknown for {what}, so the model may compute something else. "
            "If a field changes no output, remove it from config.json; of quantized weights, give the original ones"
        )


def unsupported(family: str, name: str, value: object, way_out: str) -> UserError:
    return UserError(f"config.json: {name}={value} is not supported by family {family}{way_out}")


def one_of(family: str, name: str, value: Any, known: Collection) -> Any:
    """The value. Raises UserError where it is not one of these."""
    if value not in known:
        raise unsupported(family, name, value, f"; known are {some(sorted(map(str, known)))}")
    return value


def architecture(family: str, hf: Mapping[str, Any], known: Collection[str]) -> str:
    """The first of `architectures`, or where there is none the first known. Raises UserError for an unknown one."""
    return one_of(family, "architectures", (hf.get("architectures") or list(known))[0], known)


def only(family: str, hf: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises UserError for a field that has another value than the one that the family has."""
    for name, value in fixed.items():
        if hf.get(name, value) != value:
            raise unsupported(family, name, hf[name], f" (only {value} is)")
