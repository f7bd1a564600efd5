"""The families: build one from its configuration, load and save it in the Hugging Face layout, count it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gradus import files, hub, limits
from gradus.errors import UserError, did_you_mean
from gradus.models import weights
from gradus.models.family import Family, Stack, families, lookup, register
from gradus.models.finite import finite, not_finite, weights_not_finite
from gradus.models.weights import checksums, fields, peft
from gradus.patch import replaced
from gradus.recipe import schema

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn

    from gradus.models.values import Deferred

__all__ = [
    "Family", "Stack", "adapter_config", "build", "config_of", "convert", "count", "deferred", "families", "load",
    "load_deferred", "load_start", "load_weights", "locate", "lookup", "register", "save", "tensors_of",
    "to_config_json", "trainable", "weights",
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


def _as_stored(config: schema.ModelConfig, like: nn.Module) -> nn.Module:
    """The model of a configuration, of which `like` is `whole`: the same unless adapter.base stores it small."""
    return like if config.as_it_is() is config else build(config, "meta")


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

    like = whole(config)
    model = _as_stored(config, like)
    return Deferred(model, stored_small(model, drawn(like, seed)))


def count(config: schema.ModelConfig) -> dict[str, int]:
    """Count the parameters by component, each shared one once, and their `total`. Allocates nothing.

    embeddings: tokens, types, positions (T5's relative ones too), patches, class token. attention, feedforward, norms:
    as named, wherever they are; what else a block has counts as attention. head: everything else, all of which reads
    the last norm's output (pooler, classifier, an untied output projection).
    """
    return dict(_counted(config))


@functools.lru_cache(maxsize=64)
def trainable(config: schema.ModelConfig) -> int:
    """The number of parameters that are trained, each shared one once. Allocates nothing."""
    return sum(p.numel() for p in build(config, "meta").parameters() if p.requires_grad)


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
    """The local file or folder that holds a model: a llama2.c .bin, nanoGPT's ckpt.pt, a folder in the Hugging Face or
    Meta layout (also by its one file of weights), the best or else the newest checkpoint of a Gradus run, or the local
    copy of a hub name (weights_too=False: only its config.json).

    Raises UserError where there is none.
    """
    path = Path(os.path.expanduser(name_or_path))
    if path.is_file():
        described = (path.parent / "config.json").is_file()
        if described and [*weights.files_of(path.parent)] == [path]:
            return path.parent
        of_training = described and path.suffix in weights.CHECKPOINTS
        if path.suffix == ".bin" or of_training or _is_nanogpt(path) or _is_vit(path):
            return path
        raise UserError(
            f"{path}: weights alone do not say what model they are. Give a folder that holds them and config.json"
        )
    if not path.exists():
        if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name_or_path)):
            return _from_hub(str(name_or_path), weights_too)
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file or folder.{did_you_mean(path.name, siblings) if siblings else ''}")
    runs = path / "checkpoints"
    for folder in (path, runs / "best", *reversed(files.numbered(runs, "step-"))):
        if any((folder / file).is_file() for file in ("config.json", "params.json", peft.CONFIG)):
            if folder == runs / "best" and folder.resolve().parent != runs.resolve():
                raise UserError(
                    f"{folder}: a link to {folder.resolve()}, outside of the run. Give that folder itself, or link "
                    "one of the run's own"
                )
            return folder
        if folder.name == "best" and (kept := [p.name for p in runs.glob("best*")]):
            raise UserError(
                f"{folder}: the run's best weights are not there, and others do not stand for them "
                f"({weights.some(sorted(kept))}). Copy the run again, or give one of the folders in {runs}."
            )
    if kept := weights.checkpoints(path):
        if len(kept) > 1:
            raise UserError(f"{path}: several checkpoints: {weights.some(list(map(str, kept)))}. Give one of them")
        return locate(kept[0], weights_too)
    if runs.is_dir():
        raise UserError(
            f"{path}: a run without a checkpoint yet. Let it reach one (train.checkpoint_every), or give another folder"
        )
    holds = weights.some(sorted(p.name for p in path.iterdir())) or "nothing"
    raise UserError(
        f"{path}: neither config.json (Hugging Face), nor params.json (Meta), nor checkpoints/ (a Gradus run) in it; "
        f"it holds {holds}"
    )


def _is_nanogpt(path: Path) -> bool:
    return path.suffix in (".pt", ".pth") and "model_args" in weights.read_pickle(path)


def _is_vit(path: Path) -> bool:
    from gradus.models.weights import vit_names

    try:
        return vit_names.knows(weights.read_tensors(path))
    except UserError:  # damaged, or no weights
        return False


def _from_hub(name: str, weights_too: bool) -> Path:
    """A repository in Hugging Face's layout, or else in Meta's, whose sizes are in its weights too."""
    description = ["*.json", "*.txt", "*.model", "*.jinja"]
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
    if path.is_dir():
        _verify(path, weights_too)
        if is_adapter(path):
            return _open_adapter(path, weights_too)
    file = (path if path.is_dir() else path.parent) / "config.json"
    alone = not (path.is_dir() or (path.suffix in weights.CHECKPOINTS and file.is_file()))
    hf = {} if alone else limits.read_object(file)
    if alone or ("model_type" not in hf and str(hf.get("architecture", "")).startswith("vit_")):  # timm's
        from gradus.models.weights import gpt, vit_names

        with one_line(path):
            if _is_nanogpt(path):
                return gpt.from_nanogpt(path)
            return vit_names.read(weights.read_tensors(path), path)
    config = _from_config_json(hf, file)
    if (with_tensors := getattr(weights.rules_of(config.family), "with_tensors", None)) and weights.files_of(path):
        config = with_tensors(config, weights.read_tensors(path))
    if weights_too and (path / "sharded").is_dir():  # a checkpoint of several processes
        from gradus.models.weights import sharded

        return config, weights.theirs(build(config, "meta"), sharded.model(path))
    return config, weights.read_tensors(path) if weights_too else {}


def _verify(folder: Path, weights_too: bool) -> None:
    """Raises UserError where a folder has checksums and what is read of it is not what they are of."""
    if not os.path.lexists(folder / checksums.FILE):
        return
    ours = (folder / peft.OURS).is_file()  # then adapter_config.json, where the base is set, is compared by itself

    def wanted(name: str) -> bool:
        if name.startswith("training.") or (ours and name == peft.CONFIG):
            return False
        return weights_too or name.endswith((".json", ".txt", ".model", ".jinja"))

    read = [name for name in ("config.json", peft.OURS, "params.json") if (folder / name).is_file()]
    parts = weight_files(folder) if weights_too else []
    checksums.verify(folder, wanted, [*read, *(os.path.relpath(part, folder) for part in parts)])


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter: PEFT's files, or a checkpoint of several processes."""
    if (folder / peft.CONFIG).is_file() or not (folder / "config.json").is_file():
        return (folder / peft.CONFIG).is_file()
    ours = limits.read_object(folder / "config.json").get("gradus")
    return isinstance(ours, dict) and "adapter" in ours


def _open_adapter(path: Path, weights_too: bool) -> tuple[schema.ModelConfig, dict[str, weights.Stored]]:
    """The same of an adapter's folder: the configuration names the base in `init`, and the tensors are the base's with
    the adapter's in their place. Ours has a file with all that the recipe said; PEFT's own its sizes alone."""
    file = next((path / name for name in (peft.OURS, "config.json") if (path / name).is_file()), None)
    hf = limits.read_object(file) if file else {}
    own = _ours(hf, file)
    about = peft.read_config(path) if (path / peft.CONFIG).is_file() else {}  # none in one of several processes
    key = f"base_model_name_or_path in {peft.CONFIG}" if about else "gradus.base in config.json"
    base = _named_base(path, key, about.get("base_model_name_or_path") if about else own.get("base"), weights_too)
    stored, tensors = _open(base, weights_too)
    if "adapter" in own:
        config, known = _from_config_json(hf, file), own.get("base_digest")
        if weights_too and known is not None and known != digest(base) and known != _digest_of_all(base):
            raise UserError(
                f"{base}: not the weights that the adapter in {path} was trained on (their digest differs). "
                f"Put those back, or set {key} to where they are"
            )
    if (path / "sharded").is_dir():
        if not weights_too:
            return config.model_copy(update={"init": str(base)}), {}
        from gradus.models.weights import sharded

        adapter = weights.theirs(whole(config), sharded.model(path))
    else:
        adapter = peft.read_tensors(path, stored)
    if "adapter" not in own:
        try:
            with one_line(path / peft.CONFIG):
                config, adapter = _of_peft(stored, about, adapter)
        except UserError as e:
            raise UserError(f"{path}: {str(e).removeprefix(f'{path}/')}") from None
    config = config.model_copy(update={"init": str(base)})
    if not weights_too:
        return config, {}
    prefixes = getattr(weights.rules_of(config.family), "PREFIXES", ())

    def bare(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)

    tensors = _resized(stored, config, tensors)
    model, taken = whole(config), {bare(name) for name in adapter}
    if about and "adapter" in own:
        peft.refuse_edited(model, about, path)
        if lacks := list(peft.lacking_whole(config, about, adapter)):
            raise UserError(f"{path}: {weights.some(lacks)} {peft.MISSING}")
    used, _ = weights.match(model, tensors, False, base)
    kept = {n: t for n, t in tensors.items() if n in used and bare(n) not in taken} | adapter
    if getattr(config, "tie_output", True) != getattr(stored, "tie_output", True):
        embedding = f"{lookup(config.family).tokens[0]}.weight"
        kept.setdefault("lm_head.weight", next(tensors[n] for n, rule in used.items() if rule.ours == embedding))
    return config, kept


def _named_base(path: Path, key: str, named: Any, weights_too: bool) -> Path:
    """The base that the adapter in `path` names by `key`. Raises UserError where there is none."""
    if not isinstance(named, str) or not named.strip():
        raise UserError(f"{path}: {key}: expected the folder or name of the base, got {named!r:.40}")
    here = Path(os.path.expanduser(named)).exists()
    try:
        base = locate(path / named if not here and (path / named).exists() else named, weights_too)
    except UserError as e:
        raise UserError(f"{path}: its base: {e} Set {key} to where it is.") from None
    if base.is_dir() and is_adapter(base):
        if base.samefile(path):
            raise UserError(f"{path}: its base {named} is the adapter itself. Set {key} to the model that it is for")
        raise UserError(f"{path}: its base {base} is an adapter itself. Merge that: gradus export {base} --merge")
    return base


def _of_peft(
    base: schema.ModelConfig, about: dict[str, Any], tensors: dict[str, weights.Stored]
) -> tuple[schema.ModelConfig, dict[str, weights.Stored]]:
    """(configuration, tensors) of an adapter that PEFT wrote."""
    whole = {name: stored for name, stored in tensors.items() if ".lora_" not in name}
    ends = (".classifier.weight", ".classifier.out_proj.weight")  # RoBERTa's head has a dense layer too
    heads = [tensor for name, tensor in whole.items() if f".{name}".endswith(ends)]
    config = base
    if heads and hasattr(base, "n_classes"):
        head = {"head": "classification", "pooler": True} if hasattr(base, "head") else {}
        config = base.changed(**head, n_classes=heads[0].shape[0])
    if not about.get("ensure_weight_tying"):
        config = _untied(config, whole)
    model, table = build(config, "meta"), weights.rules_of(config.family).rules(config)
    targets, tensors = peft.targets(model, about, tensors)
    adapter = schema.Adapter(
        rank=about.get("r", 8), alpha=about.get("lora_alpha", 8), rslora=bool(about.get("use_rslora")),
        dropout=about.get("lora_dropout", 0.0), targets=targets,
    )  # fmt: skip
    saved = {name for rule in table if rule.theirs in whole for name in rule.names}
    names = sorted({name.rpartition(".")[0] for name in saved if not weights.in_head(name)})
    return config.trained(adapter, [f"-{name}" for name in names]), tensors


def _untied(base: schema.ModelConfig, saved: Iterable[str]) -> schema.ModelConfig:
    """The base's configuration where some of its tensors are saved beside an adapter. Of two that are tied PEFT copies
    the saved one, and the other keeps the base's values. Raises UserError where our model cannot untie it."""
    config = base
    if getattr(base, "tie_output", False) and weights.shared(build(base, "meta"), saved):
        scale = {"scale_output": base.scales} if hasattr(base, "scales") else {}
        config = base.changed(**scale, tie_output=False)
    if parted := weights.shared(build(config, "meta"), saved):
        raise UserError(
            f"modules_to_save: {weights.some(parted)}: tied in the model, and PEFT unties it. Merge the adapter with "
            "PEFT (merge_and_unload) and give the merged model"
        )
    return config


def weight_files(path: Path) -> list[Path]:
    """The files from which `load` reads the weights of what `locate` gives; of an adapter its own. Raises UserError for
    a shard that is missing."""
    if (path / "sharded").is_dir():
        return sorted((path / "sharded").glob("*.safetensors"))
    if (path / peft.CONFIG).is_file():
        return [file for file in (path / peft.WEIGHTS, path / peft.PICKLED) if file.is_file()][:1]
    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        return sorted(path.glob("consolidated.*.pth"))
    return list(weights.files_of(path))


def digest(base: Path) -> str:
    """SHA-256 of the files that hold a model's weights. They are read once and not again while their dates stay."""
    return _digest(weight_files(base))


def _digest(paths: Iterable[Path]) -> str:
    try:
        known = (files.remembered(path, "sha256", 0, files.content_hash) for path in paths)
        return hashlib.sha256(b"".join(map(bytes.fromhex, known))).hexdigest()
    except OSError as e:
        raise UserError(f"{e.filename}: cannot be read ({e.strerror}). Copy or download it again") from None


def _digest_of_all(base: Path) -> str:
    """As earlier versions had it: of everything below a folder that could hold weights."""
    kinds = (".safetensors", ".bin", ".pth", ".pt")
    return _digest(sorted(f for f in base.rglob("*") if f.suffix in kinds and "training" not in f.name and f.is_file()))


# ---------------------------------------------------------------- config.json


ABOUT_ADAPTER = ("adapter", "freeze", "base", "base_digest")  # beside fields of the configuration


def _ours(hf: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """What only Gradus says in a config.json."""
    ours = hf.get("gradus", {})
    if not isinstance(ours, dict):
        raise UserError(f"{file}: gradus: expected an object, got {ours!r:.60}")
    return ours


def _from_config_json(hf: dict[str, Any], file: Path) -> schema.ModelConfig:
    ours = _ours(hf, file)
    with one_line(file):
        table, known = weights.rules_of(weights.family_of(hf, file)), fields.Fields(hf)
        config = table.config_from_hf(known)
        fields.refuse_unknown(known, getattr(table, "WITHOUT_EFFECT", ()), f"model_type={hf.get('model_type')}")
        names = {int(i): str(name) for i, name in (hf.get("id2label") or {}).items()}
        outputs = fields.outputs(config.family, hf, n) if (n := getattr(config, "n_classes", None)) else "softmax"
        adapter = schema.Adapter(**ours["adapter"]) if "adapter" in ours else None
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
    if config.outputs != "softmax":
        hf["problem_type"] = fields.PROBLEMS[config.outputs]
    return {**hf, "gradus": extra} if extra else hf


def to_config_json(config: schema.ModelConfig, dtype: torch.dtype) -> dict:
    """What config.json says beside weights of this dtype; of an adapter also what it is and its base."""
    hf = {**_write_config(config), "dtype": str(dtype).removeprefix("torch.")}
    if config.adapter:
        base = base_of(config)
        about = {"adapter": config.adapter.model_dump(mode="json"), "freeze": list(config.freeze), "base": str(base)}
        hf["gradus"] = {**hf.get("gradus", {}), **about, "base_digest": digest(base)}
    return hf


def base_of(config: schema.ModelConfig) -> Path:
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


def _override(config: schema.ModelConfig, fields: dict[str, Any], where: object) -> schema.ModelConfig:
    if not fields:
        return config
    known = type(config).model_fields
    for key in fields:
        if key not in known or key in ("family", "preset", "init"):
            suggestion = did_you_mean(key, set(known) - {"family", "preset", "init"})
            raise UserError(f"{where}: {key} is not a field of a {config.family} model.{suggestion}")
    with one_line(where):
        return config.changed(**fields)


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


def tensors_of(name_or_path: str | Path) -> dict[str, weights.Stored]:
    """The weights under Hugging Face's names, read on demand. Raises UserError as `load`."""
    return _open(locate(name_or_path), weights_too=True)[1]


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


def load_plain(
    name_or_path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """As `load`, of an adapter its base with the product of its matrices added, in fp32 whatever the dtype."""
    from gradus.models.adapt import merged

    if config_of(name_or_path).adapter:
        return merged(load(name_or_path)).to(device, dtype)
    return load(name_or_path, dtype=dtype, device=device)


def beside(base: nn.Module, folder: str | Path) -> nn.Module:
    """The adapted model of an adapter's folder, around the parameters of a loaded base, which it shares: several
    adapters of one base take little more memory than one. Raises UserError as `load`, and where it is another base's.
    """
    import torch

    from gradus.models.values import fill

    path = locate(folder)
    config, tensors = _open(path, weights_too=True)
    if not config.adapter:
        raise UserError(f"{path}: no adapter: it has no {peft.CONFIG}")
    if config.adapter.base:
        kind = config.adapter.base
        raise UserError(f"{path}: trained beside weights in {kind}. Give it as the model, without --adapter")
    model, own = build(config, "meta"), dict(base.named_parameters(remove_duplicate=False))
    rules, _ = weights.match(model, tensors, True, path)
    values, like = weights.ours(model, rules, tensors, path), next(base.parameters())
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{module_name}.{name}".lstrip(".")
            if parameter.requires_grad:
                new = torch.nn.Parameter(torch.empty_like(parameter, device=like.device, dtype=like.dtype))
                fill({full: new}, values)
            elif full not in own or own[full].shape != parameter.shape:
                raise UserError(f"{path}: an adapter of another base: {full} is not in the one given")
            else:
                new = own[full]
            setattr(module, name, new)
    return model


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
    if stored.adapter:
        raise UserError(
            f"model.init={config.init}: an adapter beside other weights. Merge it (gradus export {config.init} --merge "
            "--to FOLDER) and give that folder."
        )
    if (modules := path / "modules.json").is_file():  # of sentence-transformers
        weights.note(f"{modules}: the encoder alone is read, not what stands behind it (pooling, normalisation)")
    start = {"preset": None, "init": str(path.absolute()) if config.adapter else None}
    fitted = _fitted(config.model_copy(update=start), stored, tensors, path, False, seed)
    _refuse_unfit(fitted.model, fitted.report, config.init)
    hf = limits.read_object(file) if (file := path / "config.json").is_file() else {}
    dropouts = [n for n in hf if n.endswith(("dropout", "_prob", "pdrop")) and "classif" not in n]
    other = [n for n in dropouts if hf[n] not in (None, config.dropout)]
    fitted.report.unused += [f"{n}={hf[n]} (config.json)" for n in other]
    frozen = {name for name, p in fitted.model.named_parameters() if not p.requires_grad}
    if left := [name for name in fitted.report.new if name in frozen]:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in left))
        raise UserError(
            f"model.init={config.init}: {weights.some(left)} not in it, and frozen, so never trained. "
            f"Set train.freeze=[{', '.join([*config.freeze, *(f'-{name}' for name in modules)])}]."
        )
    adapter_config(fitted.model)  # raises for what could not be kept
    return fitted


def _refuse_unfit(model: nn.Module, report: weights.LoadReport, where: str) -> None:
    """Raises UserError for a start that lacks more than the head of a classifier: random values among
    trained weights spoil them."""
    config = model.config
    stacks = lookup(config.family).stacks if getattr(config, "n_classes", None) else ()
    own, heads = (".a.weight", ".b.weight"), {name for stack in stacks for name in stack.heads}  # own: an adapter's
    if new := [n for n in report.new if n.split(".")[0] not in heads and not n.endswith(own)]:
        there = f", which has {weights.some(report.unused)} instead" if report.unused else ""
        raise UserError(
            f"model.init={where}: {len(new)} of the model's {len(model.state_dict())} tensors are not in it{there}: "
            f"{weights.some(new)} would start from random values. Give weights of the whole model, with the head that "
            "the task needs, under Hugging Face's names."
        )


def _resized(
    stored: schema.ModelConfig, config: schema.ModelConfig, tensors: dict[str, weights.Stored]
) -> dict[str, weights.Stored]:
    """The tensors, with positions for images of the size that `config` has."""
    if getattr(config, "image_size", None) == getattr(stored, "image_size", None):
        return tensors
    from gradus.models.weights import vit_names

    return vit_names.resized(stored, config, tensors)


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
    model, tensors = whole(config), _resized(stored, config, stored_tensors)
    rules, report = weights.match(model, tensors, strict, path)
    report.stored = stored
    values = weights.ours(model, rules, tensors, path)
    if tensors is not stored_tensors:
        report.resized.append(f"positions from images of {stored.image_size} to {config.image_size} pixels")
    if report.new:
        values = drawn(model, seed) | values
    model = _as_stored(config, model)
    return Deferred(model, stored_small(model, values), report)


def load_weights(model: nn.Module, name_or_path: str | Path) -> weights.LoadReport:
    """Copy weights into a model that is there already (any device and dtype), every tensor. Errors as in `load`."""
    from gradus.models.values import fill, held, stored_small

    path = locate(name_or_path)
    _, tensors = _open(path, weights_too=True)
    like = model if model.config.as_it_is() is model.config else whole(model.config)
    rules, report = weights.match(like, tensors, True, path)
    fill(held(model), stored_small(model, weights.ours(like, rules, tensors, path)))
    return report


def save(model: nn.Module, folder: str | Path, max_shard_bytes: float = weights.SHARD) -> None:
    """Write config.json and safetensors as Hugging Face does, in shards above max_shard_bytes, each stored tensor once;
    of an adapted model the adapter, as PEFT does.

    Memory holds one shard at a time; a kill at any instant leaves no folder that looks whole and is not. Raises
    UserError where the disk refuses.
    """
    config = to_config_json(model.config, next(model.parameters()).dtype)
    weights.write(weights.to_hf(model), config, folder, max_shard_bytes, adapter_config(model))


def convert(
    name_or_path: str | Path, folder: str | Path, max_shard_bytes: float = weights.SHARD,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a model that `load` can read in Hugging Face's layout, without building it: one stored tensor at a time is
    read, and memory holds one shard of the result. dtype: of all tensors; None: values and dtype stay as they are
    stored. Errors as in `load` and `save`; NotFinite for values that are not finite."""
    path = locate(name_or_path)
    config, tensors = _open(path, weights_too=True)
    model = whole(config)
    rules, _ = weights.match(model, tensors, True, path)
    values = weights.ours(model, rules, tensors, path)
    if config.adapter:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        values = {name: value for name, value in values.items() if name in trained}
    stored = weights.theirs(model, values)
    dtype, as_stored = dtype or tensors[next(iter(rules))].read().dtype, dtype is None

    def read(tensor: weights.Stored) -> torch.Tensor:
        whole = tensor.read()
        if not finite(whole):
            where = weights_not_finite((name, value.read()) for name, value in values.items())
            raise not_finite(str(name_or_path), path, where)
        return whole if as_stored else whole.to(dtype)

    written = ((name, read(tensor)) for name, tensor in stored.items())
    weights.write(written, to_config_json(config, dtype), folder, max_shard_bytes, adapter_config(model))
