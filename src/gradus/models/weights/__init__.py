"""Weights in and out: one table of rules a family, and the machinery that reads, checks and writes.

`weights/<family>.py` says how Hugging Face names and stores a family's tensors:
    MODEL_TYPES            values of `model_type` in config.json that it reads
    config_from_hf(hf)     their config.json as our config; config_to_hf(config) the reverse
    rules(config)          a Rule for every tensor of theirs, under every name it may have: a tied tensor has one rule
                           a name; the first is written, any of them is read
    PREFIXES               optional: what keys of a body inside a model with a head begin with ("bert.", ...). It is
                           removed from the keys of the file and of the rules alike, so that a bare body matches too
    IGNORABLE              optional: ends of the names of buffers such as position_ids, which hold nothing learned
    BESIDE                 optional: what names of tensors of a further model in the same file begin with; a note tells
                           that they are not read
    WITHOUT_EFFECT         optional: fields of config.json that change nothing of what is computed. Those that
                           config_from_hf asks for are known too; any other is refused (`fields.refuse_unknown`)
    with_tensors(config, tensors)
                           optional: the configuration, of which the file's tensors say a part
    MODULES                optional: pattern → replacement, in turn, of tensors' names, where transformers calls its
                           modules otherwise than its files do; adapters are named after modules
    unknown_to_transformers(config)
                           of a family that config_to_hf may give a model_type "gradus-...": why, and what to set

names.yaml has tables of names for several of them (`fields.names`).

Nothing is unpickled freely: safetensors are memory-mapped, `.bin` and `.pth` are read with weights_only or refused.
Files are written aside and renamed, config.json last: a folder without config.json is not whole.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus import files, limits
from gradus.errors import UserError, did_you_mean, some
from gradus.models.family import rules_of
from gradus.models.weights import checksums, others
from gradus.models.weights.stored import Stacked, Stored, read_files
from gradus.recipe.schema import MODELS
from gradus.text import say

if TYPE_CHECKING:  # a configuration is read without torch
    from torch import Tensor, nn

    from gradus.recipe.schema import ModelConfig


def identity(tensor: Tensor) -> Tensor:
    return tensor


transpose = attrgetter("T")


@dataclass(frozen=True)
class Rule:
    """to_ours(tensor) turns `theirs` into `ours` (a tuple of tensors where `ours` is a tuple, as for a fused q, k, v);
    to_theirs(*tensors) turns it back. `ours` are names of the model's state_dict. to_theirs must also work on the meta
    device: the shape expected in a file is that of its result. index: `ours`, a single tensor, stacks several of
    theirs, and this rule is for the one at that index."""

    ours: str | tuple[str, ...]
    theirs: str
    to_ours: Callable[..., Any] = identity
    to_theirs: Callable[..., Any] = identity
    index: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def keys(self, first: Mapping[str, str]) -> list[tuple[str, int | None]]:
        """Equal for the same tensor, or the same slice of it, under any name. first: as `first_names`."""
        return [(first[name], self.index) for name in self.names]

    def shape(self, ours: Mapping[str, Tensor | Stored]) -> tuple[int, ...]:
        """The shape in which it is stored."""
        import torch

        parts = (ours[name].shape[0 if self.index is None else 1 :] for name in self.names)
        return tuple(self.to_theirs(*(torch.empty(part, device="meta") for part in parts)).shape)


@dataclass
class LoadReport:
    """What a load that was not strict left open: `new` are our tensors that kept their fresh initialisation, `unused`
    tensors of the file that the model has no place for, and dropouts that differ from the model's, `reshaped` tensors
    of the head whose size differs (also in `new`). `resized`: what was made to fit, in words. `stored`: the
    configuration beside the weights."""

    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    stored: ModelConfig | None = field(default=None, compare=False)


def model_types() -> dict[str, str]:
    """model_type in config.json → the family that reads it."""
    return {model_type: family for family in MODELS for model_type in rules_of(family).MODEL_TYPES}


def family_of(hf: dict, where: object) -> str:
    """The family that reads this config.json. Raises UserError for a model_type that no family reads."""
    kind, known = hf.get("model_type"), model_types()
    if kind is None:
        raise UserError(f"{where}: no model_type, so it is not known which family this is.{did_you_mean('', known)}")
    if not isinstance(kind, str) or kind not in known:
        if isinstance(kind, str) and kind in others.planned():
            plan = f"gradus plan hf:{where.parent}" if isinstance(where, Path) else "gradus plan hf:FOLDER"
            raise UserError(f"{where}: {others.not_trained(kind)}. Plan it: {plan}")
        raise UserError(f"{where}: {others.refused(kind, known)}")
    return known[kind]


def loads_in_transformers(config: ModelConfig) -> tuple[str | None, str]:
    """(class of transformers, ""): the class that computes what this configuration says and loads its saved weights;
    else (None, reason): why there is none, and what to set for a model that transformers knows."""
    table = rules_of(config.family)
    hf = table.config_to_hf(config)
    if hf["model_type"].startswith("gradus-"):
        return None, table.unknown_to_transformers(config)
    return hf["architectures"][0], ""


# ---------------------------------------------------------------- reading


def read_tensors(path: str | Path) -> dict[str, Stored]:
    """The tensors of a file (.safetensors, .bin, .pth, .pt) or a folder (model.safetensors or pytorch_model.bin, whole
    or in shards with an index). Headers only: values are read one by one.

    Raises UserError for a damaged file, one that weights_only refuses, or a folder without weights.
    """
    path = Path(path)
    if not (parts := files_of(path)):
        if kept := checkpoints(path, CHECKPOINTS[:1]):
            raise UserError(f"{path}: no weights but several checkpoints. Give one of {some([str(f) for f in kept])}")
        where = "whole or in shards with an index (graphs for engines and quantized folders have none: give their run)"
        raise UserError(f"{path}: no weights: neither model.safetensors nor pytorch_model.bin, {where}")
    tensors: dict[str, Stored] = {}
    for part in parts:
        tensors |= _read_file(part)
    if absent := [name for names in parts.values() for name in names if name not in tensors]:
        raise UserError(f"{path}: its index.json: {some(absent)} in none of its shards. Copy or download it again")
    return unwrapped(tensors, path)


# prefixes that DDP, torch.compile, FSDP and activation checkpointing add to the names of a wrapped module's tensors
WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(tensors: dict[str, Any], where: object, inside: bool = False) -> dict[str, Any]:
    """The tensors, their names without the prefixes of wrappers. inside: also without the name of the attribute that
    holds the model, where all begin with one. A note on standard error says so."""
    names = [WRAPPERS.sub("", name) for name in tensors]
    if inside and len({name.partition(".")[0] for name in names}) == 1:
        names = [name.partition(".")[2] for name in names]
    if names == [*tensors] or len({*names}) < len(names):
        return tensors
    change = f"{next(iter(tensors))} is read as {names[0]}, and so on"
    note(f"{where}: prefixes of wrappers are removed from the tensors' names: {change}")
    return dict(zip(names, tensors.values()))


@functools.cache
def note(text: str) -> None:
    """Printed once, however often a file is read."""
    say(f"note: {text}", sys.stderr)


CHECKPOINTS = (".ckpt", ".pt", ".pth")  # of which Lightning's are the first, nanoGPT's the second


def checkpoints(folder: Path, ends: Sequence[str] = CHECKPOINTS) -> list[Path]:
    """What training programs keep in a folder, or in `checkpoints` below it; not the parts of Meta's layout."""
    there = sorted((*folder.glob("[!.]*"), *folder.glob("checkpoints/[!.]*")))
    return [f for f in there if f.suffix in ends and not f.name.startswith("consolidated.")]


def files_of(path: Path) -> dict[Path, list[str]]:
    """The files that `read_tensors` opens, each with the tensors that an index puts into it; none in a folder without
    weights. Raises UserError for a shard that is missing."""
    if path.is_file():
        return {path: []}
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return {path / name: []}
        if (index := path / f"{name}.index.json").is_file():
            break
    else:
        kept = checkpoints(path, CHECKPOINTS[:1])
        return {kept[0]: []} if len(kept) == 1 else {}
    weight_map = limits.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: no weight_map. Copy or download it again")
    parts: dict[Path, list[str]] = {path / name: [] for name in sorted(set(weight_map.values()))}
    if absent := next((part for part in parts if not part.is_file()), None):
        raise UserError(f"{absent}: this shard is missing ({index.name} names it). Copy or download it")
    for tensor, name in weight_map.items():
        parts[path / name].append(tensor)
    return parts


def _read_file(file: Path) -> dict[str, Stored]:
    if file.suffix == ".safetensors":
        return read_files([file])
    return {name: Stored.of(tensor) for name, tensor in unpickle(file).items()}


def unpickle(file: Path) -> dict[str, Tensor]:
    """A flat dictionary of tensors from a .bin, .pt or .pth, or that of a training program's checkpoint: the state_dict
    of Lightning and others, nanoGPT's model. Raises UserError as `read_pickle`, and for anything but tensors."""
    import torch

    state = read_pickle(file)
    named = state.get("state_dict", state["model"] if "model_args" in state else state)
    if not isinstance(named, dict):
        named = {"state_dict": named}
    if other := [str(k) for k, v in named.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))]:
        raise UserError(
            f"{file}: not a flat dictionary of tensors: {some(other)}. "
            "Save model.state_dict() alone, best as safetensors"
        )
    return unwrapped(named, file, "state_dict" in state)


def read_pickle(file: Path) -> dict[Any, Any]:
    """What a .bin, .pt, .pth or .ckpt holds, its tensors memory-mapped where the format allows.

    Raises UserError where weights_only refuses the file, it is damaged, or it holds no dictionary.
    """
    import torch

    try:
        try:
            state = torch.load(limits.regular(file), map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            if "mmap can only be used" not in str(e):
                raise
            state = torch.load(file, map_location="cpu", weights_only=True)  # written before torch 1.6
    except UserError:
        raise
    except Exception:  # a damaged pickle raises nearly any
        raise UserError(
            f"{file}: refused: not a PyTorch file, or not a whole one, or a pickle that holds more than tensors and "
            "could run any code. Copy or download it again. Convert it where you trust its author: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=False), 'model.safetensors')"
        ) from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: not a dictionary of tensors. Save model.state_dict() alone, best as safetensors")
    return state


def table_of(config: ModelConfig) -> list[Rule]:
    """Those of a family."""
    return rules_of(config.family).rules(config)


def rules(model: nn.Module) -> list[Rule]:
    """Those of a model's family, and of its adapter. Raises UserError for an adapter that PEFT's layout cannot hold."""
    from gradus.models.weights import peft

    table = table_of(model.config)
    return [*table, *peft.rules(model)] if model.config.adapter else table


# ---------------------------------------------------------------- theirs → ours


def fitting(
    model: nn.Module, tensors: Mapping[str, Stored], where: object, strict: bool = True
) -> tuple[dict[str, Stored], LoadReport]:
    """The model's parameters by name (a tied one by its first), each made from theirs when it is read. Raises
    UserError as `match`; reading one raises it where tied tensors differ."""
    rules, report = match(model, tensors, strict, where)
    return _ours(model, rules, tensors, where), report


def match(
    model: nn.Module, tensors: Mapping[str, Stored], strict: bool, where: object
) -> tuple[dict[str, Rule], LoadReport]:
    """Find the rule for each tensor from names, shapes and types alone (the model may be on the meta device).

    strict: every tensor of the model must be there, and no others. Otherwise the report says which were not. Raises
    UserError that names missing, extra and misshapen tensors (misshapen ones always, except a head's when not strict).
    """
    table, known = rules_of(model.config.family), rules(model)
    ours, first = model.state_dict(keep_vars=True), first_names(model)
    prefixes = getattr(table, "PREFIXES", ())
    rule_prefix, stored_prefix = (
        next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), "")
        for names in ([rule.theirs for rule in known], tensors)
    )
    by_name = {rule.theirs.removeprefix(rule_prefix): rule for rule in known}
    assert len(by_name) == len(known), "two rules for one tensor"

    matched: dict[str, Rule] = {}
    report, misshapen = LoadReport(), []
    there: set[tuple[str, int | None]] = set()  # our tensors that have one of theirs, of whatever shape
    for name, tensor in tensors.items():
        rule = by_name.get(name.removeprefix(stored_prefix))
        if rule is None:
            if name.startswith(beside := getattr(table, "BESIDE", ())):
                part = next(filter(name.startswith, beside))
                note(f"{where}: {part}* is not read: family {model.config.family} has no such part")
            elif not name.endswith(getattr(table, "IGNORABLE", ())):
                report.unused.append(name)
            continue
        refuse_integers(name, tensor, where)
        shape = rule.shape(ours)
        if shape == tuple(tensor.shape):
            matched[name] = rule
        elif not strict and all(map(in_head, rule.names)):
            report.reshaped.append(name)
            continue
        else:
            misshapen.append(f"{name} {tuple(tensor.shape)} where the model has {shape}")
        there.update(rule.keys(first))
    absent: dict[tuple[str, int | None], str] = {}  # each under the first of its names
    for rule in known:
        for key in rule.keys(first):
            if key not in there:
                absent.setdefault(key, rule.theirs)
    lacking = {name for name, _ in absent}
    report.new = [name for name, _ in model.named_parameters() if name in lacking]
    if misshapen or (strict and (report.new or report.unused)):
        faults = {"missing": list(dict.fromkeys(absent.values())), "extra": report.unused} if strict else {}
        faults["misshapen"] = misshapen
        raise UserError(
            f"{where}: not the {model.config.family} that its configuration describes: "
            f"{'; '.join(f'{what} {some(names)}' for what, names in faults.items() if names)}. "
            "With strict=False missing tensors and a misshapen head start untrained, and extra ones are ignored"
        )
    if not matched:
        holds = some(list(tensors)) or "nothing"
        raise UserError(f"{where}: none of its tensors belongs to a {model.config.family}; it holds {holds}")
    return matched, report


# types of weights, as safetensors and as PyTorch call them
FLOATS = {"F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64"}


def refuse_integers(name: str, tensor: Tensor | Stored, where: object) -> None:
    """Raises UserError for a weight stored in a type that a plain conversion to floating point does not give back."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise UserError(
            f"{where}: {name} is stored as {dtype}: quantized checkpoints are not loaded. "
            "Convert it where it was made: save its weights in float32, float16 or bfloat16, and give that folder"
        )


def in_head(ours: str) -> bool:
    return ours.split(".")[0] in ("head", "classifier")


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter → its first: a tied one has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.state_dict(keep_vars=True).items()}


def shared(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Of these tensors (by Hugging Face's names) those that several modules share."""
    first, modules = first_names(model), {}
    for rule in (known := rules(model)):
        modules.setdefault(tuple(rule.keys(first)), set()).add(rule.theirs.rpartition(".")[0])
    return [r.theirs for r in known if r.theirs in names and len(modules[tuple(r.keys(first))]) > 1]


def _ours(
    model: nn.Module, rules: Mapping[str, Rule], tensors: Mapping[str, Stored], where: object
) -> dict[str, Stored]:
    mine, first = model.state_dict(keep_vars=True), first_names(model)

    @functools.lru_cache(maxsize=1)  # the parts of a fused tensor are asked for one after the other
    def converted(theirs: str) -> tuple[Tensor, ...]:
        parts = rules[theirs].to_ours(tensors[theirs].read())
        return parts if isinstance(parts, tuple) else (parts,)

    def one(sources: list[tuple[str, int]]) -> Tensor:
        (source, i), *others = sources
        tensor = converted(source)[i]
        for other, j in others:
            if not converted(other)[j].equal(tensor):
                raise UserError(
                    f"{where}: {other} and {source} differ, but the model ties them. Load with tie_output=False"
                )
        return tensor

    def stored(sources: list[tuple[str, int]], shape: tuple[int, ...]) -> Stored:
        source = sources[0][0]
        if len(sources) == 1 and rules[source].to_ours is identity:
            return tensors[source]
        return Stored(shape, partial(one, sources), dtype=tensors[source].dtype)

    of: dict[str, dict[int | None, list[tuple[str, int]]]] = {}
    for source, rule in rules.items():
        for i, name in enumerate(rule.names):
            of.setdefault(first[name], {}).setdefault(rule.index, []).append((source, i))
    values = {}
    for name, sources in of.items():
        shape = tuple(mine[name].shape)
        if None in sources:
            values[name] = stored(sources[None], shape)
        elif len(sources) == len(mine[name]):
            layers = [stored(sources[i], shape[1:]) for i in sorted(sources)]
            values[name] = Stacked(shape, None, dtype=layers[0].dtype, layers=layers)
    return values


# ---------------------------------------------------------------- ours → theirs


def theirs(model: nn.Module, ours: Mapping[str, Stored]) -> dict[str, Stored]:
    """Parameters of the model by name (a tied one by its first) as Hugging Face names and stores them, each once, made
    from ours when it is read. What no rule knows stays as it is."""
    first = first_names(model)
    renamed: dict[str, Stored] = {}
    taken: set[tuple[str, int | None]] = set()
    for rule in rules(model):
        if not all(name in first for name in rule.names):  # a weight of the base that is stored small
            continue
        keys = rule.keys(first)
        if taken.issuperset(keys) or not all(name in ours for name, _ in keys):
            continue
        taken.update(keys)
        parts = [ours[name] if index is None else ours[name].layer(index) for name, index in keys]
        if rule.to_theirs is not identity:
            shape = rule.shape({name: ours[first[name]] for name in rule.names})
            read = partial(lambda rule, parts: rule.to_theirs(*(part.read() for part in parts)), rule, parts)
            parts = [Stored(shape, read, dtype=parts[0].dtype)]
        renamed[rule.theirs] = parts[0]
    known = {name for name, _ in taken}
    return renamed | {name: stored for name, stored in ours.items() if name not in known}


def to_hf(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under Hugging Face's names, one at a time, each stored tensor once; with an adapter what is
    trained alone."""
    held = {name: p for name, p in model.named_parameters() if p.requires_grad or not model.config.adapter}
    ours = {name: Stored.of(p.detach()) for name, p in held.items()}
    return ((name, stored.read()) for name, stored in theirs(model, ours).items())


WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


SHARD = 5e9  # bytes of a file of weights, at most


def _shards(tensors: Iterable[tuple[str, Tensor]], most: float) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at most so many bytes, of which each has to be emptied before the next is asked for."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > most:
            yield shard
        shard[name] = tensor.cpu().contiguous()
    yield shard


def write(
    tensors: Iterable[tuple[str, Tensor]], config: dict, folder: str | Path, max_shard_bytes: float = SHARD,
    adapter: dict | None = None,
) -> None:  # fmt: skip
    """Write config.json and the tensors, in shards of at most max_shard_bytes (a larger tensor has its own shard).
    adapter: adapter_config.json, where the tensors are an adapter's: PEFT's layout then, one file.

    Memory holds one shard at a time. Everything is written aside first; then old weights go, the new ones are renamed
    into place, and config.json comes last. Raises UserError where the disk refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from gradus.models.weights import peft

    folder = Path(folder)
    aside = folder / ".writing"
    whole, described = ("model.safetensors", "config.json") if adapter is None else (peft.WEIGHTS, peft.OURS)
    if adapter is not None:
        tensors, max_shard_bytes = ((peft.key(name, config), x) for name, x in tensors), math.inf
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # left by a save that was killed
        aside.mkdir()
        contents, total = [], 0
        for shard in _shards(tensors, max_shard_bytes):
            save_file(shard, aside / f"{len(contents)}.safetensors", metadata={"format": "pt"})
            contents.append([*shard])
            total += sum(tensor.nbytes for tensor in shard.values())
            shard.clear()
        n = len(contents)
        names = [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)] if n > 1 else [whole]
        moves = {f"{i}.safetensors": name for i, name in enumerate(names)}
        notes: dict[str, dict] = {}
        if n > 1:
            weight_map = {tensor: name for name, inside in zip(names, contents) for tensor in inside}
            notes["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        if adapter is not None:
            notes[peft.CONFIG] = adapter
        for name, content in (notes | {described: config}).items():
            (aside / name).write_text(json.dumps(content, indent=2) + "\n")
            moves[name] = name
        (folder / checksums.FILE).unlink(missing_ok=True)  # of what lay here before
        (folder / "config.json").unlink(missing_ok=True)  # from here until the last rename the folder is not whole
        for old in folder.iterdir():
            if WEIGHT_FILES.fullmatch(old.name) or old.name in (peft.CONFIG, peft.WEIGHTS, peft.PICKLED, peft.OURS):
                old.unlink()
        for source, target in moves.items():
            files.appear(aside / source, folder / target)
        aside.rmdir()
    except (OSError, SafetensorError) as e:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot write the weights ({e}). Free space there or choose another folder"
        ) from None
