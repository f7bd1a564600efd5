"""The families: build one from its configuration, load and save it in the Hugging Face layout, count it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gradus import files, hub, limits
from gradus.errors import UserError, did_you_mean
from gradus.models import weights
from gradus.models.family import Family, Stack, families, lookup, register
from gradus.models.weights import checksums
from gradus.patch import replaced
from gradus.recipe import schema

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn

    from gradus.models.values import Deferred

__all__ = [
    "Family", "Stack", "build", "config_of", "convert", "count", "deferred", "families", "load", "load_deferred",
    "load_start", "load_weights", "locate",
    "lookup", "register", "save", "to_config_json", "weights",
]  # fmt: skip


def build(config: schema.ModelConfig, device: str | torch.device = "cpu", seed: int | None = None) -> nn.Module:
    """Build a model with the initialisation of its paper, drawn from `seed` (None: one from torch's global generator).
    On "meta" nothing is allocated.

    Raises UserError where the configuration is not complete, e.g. without vocab_size; TypeError where the family's
    description is not.
    """
    import torch

    if str(device) != "meta":
        return deferred(config, seed).on(device)
    family = lookup(config.family)
    if config.reads == "text" and config.vocab_size is None:
        raise UserError("model.vocab_size: not known. Set it, or give a tokenizer.")
    with torch.device("meta"), _undrawn():
        model = family.model(config)
    if lacks := list(family.lacks(model)):
        raise TypeError(f"family {family.name}: {'; '.join(lacks)}")
    if config.adapter or config.freeze:
        from gradus.models.adapt import adapt

        with torch.device("meta"), _undrawn():
            adapt(model, config, family)
    return model


def whole(config: schema.ModelConfig) -> nn.Module:
    """The model on the meta device with every weight as it is, whatever adapter.base says. Errors as in `build`."""
    return build(config.as_it_is(), "meta")


@contextmanager
def _undrawn() -> Iterator[None]:
    """PyTorch's own initial values are not drawn where there is no memory: the family's are, later (`values.drawn`).
    Modules that another thread makes meanwhile, with memory, are not touched."""
    from torch import nn

    def unless_meta(draw: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        return lambda module: None if module.weight.is_meta else draw(module)

    with ExitStack() as stack:
        for kind in (nn.Linear, nn.Embedding):
            stack.enter_context(replaced(kind, "reset_parameters", unless_meta(kind.reset_parameters)))
        yield


def deferred(config: schema.ModelConfig, seed: int | None) -> Deferred:
    """The same before it has memory. Errors as in `build`."""
    from gradus.models.values import Deferred, drawn, stored_small

    model = build(config, "meta")
    return Deferred(model, stored_small(model, drawn(whole(config), seed)))


def count(config: schema.ModelConfig) -> dict[str, int]:
    """Count the parameters by component, each shared one once, and their `total`. Allocates nothing.

    embeddings: tokens, types, positions (T5's relative ones too), patches, class token. attention, feedforward, norms:
    as named, wherever they are; what else a block has counts as attention. head: everything else, all of which reads
    the last norm's output (pooler, classifier, an untied output projection).
    """
    return dict(_counted(config))


COMPONENTS = "embeddings", "attention", "feedforward", "norms", "head"


def component(name: str, modules: dict[str, nn.Module]) -> str:
    """What a parameter counts as. name: its own; modules: the model's, by name."""
    from torch import nn

    from gradus.layers import Attention, Block, FeedForward, GatedFeedForward, MixtureOfExperts

    parts = name.split(".")[:-1]
    # from the model's child down to the owner
    path = [modules[".".join(parts[: i + 1])] for i in range(len(parts))]
    if any(isinstance(m, Attention) for m in path):
        return "attention"
    if any(isinstance(m, FeedForward | GatedFeedForward | MixtureOfExperts) for m in path):
        return "feedforward"
    if path and isinstance(path[-1], nn.LayerNorm | nn.RMSNorm):
        return "norms"
    if any(isinstance(m, Block) for m in path):
        return "attention"
    entry = not path or any(isinstance(m, nn.Embedding) or hasattr(m, "n_patches") for m in path)
    return "embeddings" if entry else "head"


@functools.lru_cache(maxsize=64)
def _counted(config: schema.ModelConfig) -> dict[str, int]:
    model = whole(config)
    modules = dict(model.named_modules())
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        counts[component(name, modules)] += parameter.numel()
    return {**counts, "total": sum(counts.values())}


# ---------------------------------------------------------------- where weights lie


def locate(name_or_path: str | Path, weights_too: bool = True) -> Path:
    """The local file or folder that holds a model: a llama2.c .bin, a folder in the Hugging Face or Meta layout, the
    best or else the newest checkpoint of a Gradus run, or the local copy of a hub name (weights_too=False: only its
    config.json).

    Raises UserError where there is none.
    """
    path = Path(os.path.expanduser(name_or_path))
    if path.is_file():
        if path.suffix in (".bin", ".pth", ".pt", ".safetensors") and (path.suffix == ".bin" or _is_vit(path)):
            return path
        raise UserError(
            f"{path}: weights alone do not say what model they are. Give the folder that holds config.json too"
        )
    if not path.exists():
        if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name_or_path)):
            return _from_hub(str(name_or_path), weights_too)
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder.{did_you_mean(path.name, siblings) if siblings else ''}")
    runs = path / "checkpoints"
    for folder in (path, runs / "best", *reversed(files.numbered(runs, "step-"))):
        if (folder / "config.json").is_file() or (folder / "params.json").is_file():
            return folder
    if runs.is_dir():
        raise UserError(
            f"{path}: a run without a checkpoint yet. Let it reach one (train.checkpoint_every), or give another folder"
        )
    holds = weights.some(sorted(p.name for p in path.iterdir())) or "nothing"
    raise UserError(
        f"{path}: neither config.json (Hugging Face), nor params.json (Meta), nor checkpoints/ (a Gradus run) in it; "
        f"it holds {holds}"
    )


def _is_vit(path: Path) -> bool:
    from gradus.models.weights import vit_names

    try:
        return vit_names.knows(weights.read_tensors(path))
    except UserError:  # damaged, or no weights
        return False


def _from_hub(name: str, weights_too: bool) -> Path:
    """A repository in Hugging Face's layout, or else in Meta's, whose sizes are in its weights too."""
    description = ["*.json", "*.txt", "*.model"]
    meta = [*description, "consolidated.*.pth"]
    whole = [[*description, "*.safetensors"], [*description, "pytorch_model*.bin"], meta]
    patterns = whole if weights_too else [["config.json"], meta]

    def enough(folder: Path) -> bool:
        kinds = ("*.safetensors", "pytorch_model*.bin") if weights_too else ("config.json",)
        return (folder / "config.json").is_file() and any(any(folder.glob(kind)) for kind in kinds)

    folder = hub.download(name, patterns, enough, name)
    if not any((folder / file).is_file() for file in ("config.json", "params.json")):
        raise UserError(
            f"{name}: the local copy of the hub has neither config.json nor params.json. "
            "`gradus fetch` it where there is internet, then give the folder"
        )
    return folder


def _open(path: Path, weights_too: bool) -> tuple[schema.ModelConfig, dict[str, weights.Stored]]:
    """(configuration, tensors under Hugging Face's names; none of them unless weights_too)."""
    if path.is_file() and path.suffix == ".bin":
        from gradus.models.weights import llama2c

        return llama2c.read(path)
    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        from gradus.models.weights import meta_llama

        with one_line(path / "params.json"):
            return meta_llama.read(path)
    hf: dict[str, Any] = {}
    if path.is_dir():
        small = (".json", ".txt", ".model")
        checksums.verify(path, lambda name: not name.startswith("training.") and (weights_too or name.endswith(small)))
        hf = limits.read_object(path / "config.json")
    if path.is_file() or ("model_type" not in hf and str(hf.get("architecture", "")).startswith("vit_")):  # timm's
        from gradus.models.weights import vit_names

        with one_line(path):
            return vit_names.read(weights.read_tensors(path), path)
    config = _from_config_json(hf, path / "config.json")
    if weights_too and (path / "sharded").is_dir():  # a checkpoint of several processes
        from gradus.models.weights import sharded

        model = {k.removeprefix("model."): v for k, v in sharded.read(path).items() if k.startswith("model.")}
        return config, weights.theirs(build(config, "meta"), model)
    return config, weights.read_tensors(path) if weights_too else {}


# ---------------------------------------------------------------- config.json


def _from_config_json(hf: dict[str, Any], file: Path) -> schema.ModelConfig:
    ours = hf.pop("gradus", {})
    if not isinstance(ours, dict):
        raise UserError(f"{file}: gradus: expected an object, got {ours!r:.60}")
    with one_line(file):
        config = weights.rules_of(weights.family_of(hf, file)).config_from_hf(hf)
        names = {int(i): str(name) for i, name in (hf.get("id2label") or {}).items()}
        if ours:
            config = type(config)(**{**config.model_dump(exclude={"preset", "init"}), **ours})
    if any(name != f"LABEL_{i}" for i, name in names.items()):  # transformers writes LABEL_i where nobody named a class
        config = config.named([names[i] for i in sorted(names)])
    return config


def _write_config(config: schema.ModelConfig) -> dict:
    """The configuration as Hugging Face writes it. Fields that Hugging Face does not have (a training length, a way to
    cut patches) stand under `gradus`."""
    table = weights.rules_of(config.family)
    hf = table.config_to_hf(config)
    understood = table.config_from_hf(dict(hf))
    ours = config.model_dump(mode="json", exclude={"preset", "init"})
    extra = {k: v for k, v in ours.items() if v != understood.model_dump(mode="json")[k]}
    if config.classes:
        hf |= {
            "id2label": {str(i): name for i, name in enumerate(config.classes)},
            "label2id": {name: i for i, name in enumerate(config.classes)},
        }
    return {**hf, "gradus": extra} if extra else hf


def to_config_json(config: schema.ModelConfig, dtype: torch.dtype) -> dict:
    """What config.json says beside weights of this dtype."""
    return {**_write_config(config), "dtype": str(dtype).removeprefix("torch.")}


def _override(config: schema.ModelConfig, fields: dict[str, Any], where: object) -> schema.ModelConfig:
    if not fields:
        return config
    known = type(config).model_fields
    for key in fields:
        if key not in known or key in ("family", "preset", "init"):
            suggestion = did_you_mean(key, set(known) - {"family", "preset", "init"})
            raise UserError(f"{where}: {key} is not a field of a {config.family} model.{suggestion}")
    with one_line(where):
        changed = type(config)(**{**config.model_dump(), **fields}).named(config.classes)
    return changed.trained(config.adapter, config.freeze)


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


def config_of(name_or_path: str | Path) -> schema.ModelConfig:
    """The configuration that lies beside weights; the weights are not read. Raises UserError as `load`."""
    return _open(locate(name_or_path, weights_too=False), weights_too=False)[0]


# ---------------------------------------------------------------- load and save


def load(
    name_or_path: str | Path, *, strict: bool = True, dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu", **overrides: Any,
) -> nn.Module:  # fmt: skip
    """Load a model with its weights from a local folder (Hugging Face's or Meta's layout, or a Gradus run: its best or
    newest checkpoint), a llama2.c .bin, or the Hugging Face hub. It is in training mode, as `build` gives it.

    strict: every tensor must fit. strict=False leaves tensors that are missing, or a head of another size, freshly
    initialised and ignores extra ones; `model.load_report` (weights.LoadReport) names them. dtype: float32 unless
    given. overrides replace fields of the configuration (dropout=0.0, head="classification", n_classes=2, ...).

    Beside the model, memory holds one tensor at a time. Raises UserError for anything absent, damaged or refused, and
    for what does not fit.
    """
    import torch

    loaded = load_deferred(name_or_path, strict=strict, **overrides)
    loaded.model.to(dtype or torch.float32)
    return loaded.on(device)


def load_deferred(
    name_or_path: str | Path, *, strict: bool = True, seed: int | None = None, **overrides: Any
) -> Deferred:
    """As `load`, before the model has memory. seed: of what is freshly initialised, as in `build`."""
    path = locate(name_or_path)
    stored, tensors = _open(path, weights_too=True)
    return _fitted(_override(stored, overrides, "load"), stored, tensors, path, strict, seed)


def load_start(config: schema.ModelConfig, seed: int | None) -> Deferred:
    """What training starts from, before it has memory: the weights that config.init names, and what they lack as in
    `deferred`; without any, all as there."""
    if config.init is None:
        return deferred(config, seed)
    path = locate(config.init)
    stored, tensors = _open(path, weights_too=True)
    return _fitted(config.model_copy(update={"preset": None, "init": None}), stored, tensors, path, False, seed)


def _fitted(
    config: schema.ModelConfig, stored: schema.ModelConfig, stored_tensors: dict[str, weights.Stored], path: Path,
    strict: bool, seed: int | None,
) -> Deferred:  # fmt: skip
    """The model of a configuration with the values of stored tensors, those of the configuration `stored`."""
    from gradus.models.values import Deferred, drawn, stored_small

    if config.family != stored.family:
        raise UserError(f"{path}: a {stored.family}, not a {config.family}. Set model.family={stored.family}")
    wanted, has = (getattr(c, "patches", None) for c in (config, stored))
    if "stem" in (wanted, has) and wanted != has:  # the other ways to make tokens have one weight for all
        what = f"{'a' if has == 'stem' else 'no'} convolutional stem. Set patches={has}"
        raise UserError(f"{path}: patches={wanted} does not fit these weights, which have {what}")
    model, tensors = whole(config), stored_tensors
    if getattr(config, "image_size", None) != getattr(stored, "image_size", None):
        from gradus.models.weights import vit_names

        tensors = vit_names.resized(stored, config, tensors)
    rules, report = weights.match(model, tensors, strict, path)
    report.stored = stored
    values = weights.ours(model, rules, tensors, path)
    if tensors is not stored_tensors:
        report.resized.append(f"positions from images of {stored.image_size} to {config.image_size} pixels")
    if report.new:
        values = drawn(model, seed) | values
    model = build(config, "meta")
    return Deferred(model, stored_small(model, values), report)


def load_weights(model: nn.Module, name_or_path: str | Path) -> weights.LoadReport:
    """Copy weights into a model that is there already (any device and dtype), every tensor. Errors as in `load`."""
    from gradus.models.values import fill, held, stored_small

    path = locate(name_or_path)
    _, tensors = _open(path, weights_too=True)
    like = whole(model.config)
    rules, report = weights.match(like, tensors, True, path)
    fill(held(model), stored_small(model, weights.ours(like, rules, tensors, path)))
    return report


def save(model: nn.Module, folder: str | Path, max_shard_bytes: float = weights.SHARD) -> None:
    """Write config.json and safetensors as Hugging Face does, in shards above max_shard_bytes, each stored tensor once.

    Memory holds one shard at a time; a kill at any instant leaves no folder that looks whole and is not. Raises
    UserError where the disk refuses.
    """
    config = to_config_json(model.config, next(model.parameters()).dtype)
    weights.write(weights.to_hf(model), config, folder, max_shard_bytes)


def convert(
    name_or_path: str | Path, folder: str | Path, max_shard_bytes: float = weights.SHARD,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a model that `load` can read in Hugging Face's layout, without building it: one stored tensor at a time is
    read, and memory holds one shard of the result. dtype: of all tensors; None: values and dtype stay as they are
    stored. Errors as in `load` and `save`."""
    path = locate(name_or_path)
    config, tensors = _open(path, weights_too=True)
    model = build(config, device="meta")
    rules, _ = weights.match(model, tensors, True, path)
    stored = weights.theirs(model, weights.ours(model, rules, tensors, path))
    dtype, as_stored = dtype or tensors[next(iter(rules))].read().dtype, dtype is None
    written = ((name, tensor.read() if as_stored else tensor.read().to(dtype)) for name, tensor in stored.items())
    weights.write(written, to_config_json(config, dtype), folder, max_shard_bytes)
