"""Adapters in PEFT's layout (LoRA): adapter_config.json, which names the base, and adapter_model.safetensors.

Keys: `base_model.model.<module>.lora_A.weight` (rank, in), `.lora_B.weight` (out, rank); what is trained whole
(`modules_to_save`) under its own name behind the same prefix.

A fused projection of theirs, of which ours are several, has A stacked and B block-diagonal: the same sum exactly, at
the sum of the ranks. Read, one A for all of them becomes a copy for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus import limits
from gradus.errors import UserError, some
from gradus.models.family import rules_of
from gradus.models.weights import Rule, Stored, family_of, fields, first_names, identity, in_head, table_of, transpose
from gradus.models.weights import read_tensors as read_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradus.layers import LoRALinear
    from gradus.recipe.schema import ModelConfig

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
OURS = "gradus_config.json"  # in place of config.json, by which transformers would look for whole weights
PREFIX = "base_model.model."
MISSING = f"missing, which {CONFIG} names. Copy or save both files again"


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    from gradus.layers import LoRALinear

    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def rules(model: nn.Module) -> Iterator[Rule]:
    """Of the two matrices of each adapted Linear. Raises UserError where theirs would be one module and only some of
    ours are adapted, or not alike."""
    own = adapted(model)
    for rule, names in _matrices(model.config):
        mine = [own[name] for name in names if name in own]
        if not mine:
            continue
        theirs = PREFIX + module_of(rule.theirs, model.config)
        if len(names) == 1:
            yield Rule(f"{names[0]}.a.weight", f"{theirs}.lora_A.weight", *_ordered(rule, 1))
            yield Rule(f"{names[0]}.b.weight", f"{theirs}.lora_B.weight", *_ordered(rule, 0))
            continue
        if len(mine) < len(names) or len({linear.scale for linear in mine}) > 1:
            raise UserError(
                f"adapter.targets: PEFT has {', '.join(names)} as one module ({rule.theirs.removesuffix('.weight')}): "
                "give all of them, with one rank and alpha, or none"
            )
        ranks, outs = [linear.a.out_features for linear in mine], [linear.out_features for linear in mine]
        a, b = (tuple(f"{name}.{x}.weight" for name in names) for x in "ab")
        yield Rule(a, f"{theirs}.lora_A.weight", methodcaller("split", ranks), fields.joined)
        yield Rule(b, f"{theirs}.lora_B.weight", partial(_blocks, outs, ranks), _diagonal)


def _ordered(rule: Rule, axis: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """(to_ours, to_theirs) of the matrix that has the features of this axis of the weight, 0 out and 1 in, in the
    order in which the base's rule has them."""
    if rule.to_theirs in (identity, transpose):
        return identity, identity
    return partial(_reordered, rule, axis, True), partial(_reordered, rule, axis, False)


def _reordered(rule: Rule, axis: int, back: bool, matrix: Tensor) -> Tensor:
    import torch

    numbers = torch.arange(matrix.shape[axis], device=matrix.device)
    order = rule.to_theirs(numbers.view((-1, 1) if axis == 0 else (1, -1))).flatten()
    return matrix.index_select(axis, order.argsort() if back else order)


def _matrices(config: ModelConfig) -> Iterator[tuple[Rule, list[str]]]:
    """The base's rules of weights, each with the names of our modules; of a module with several the first."""
    seen: set[tuple[str, ...]] = set()
    for rule in table_of(config):
        if rule.names in seen:
            continue
        seen.add(rule.names)
        if rule.index is None and all(name.endswith(".weight") for name in rule.names):
            yield rule, [name.removesuffix(".weight") for name in rule.names]


def _blocks(rows: list[int], columns: list[int], whole: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.split(columns, 1)[i] for i, part in enumerate(whole.split(rows)))


def _diagonal(*parts: Tensor) -> Tensor:
    import torch

    return torch.block_diag(*parts)


# ---------------------------------------------------------------- writing


def described(model: nn.Module, base: str, task: str | None) -> dict[str, Any]:
    """adapter_config.json of an adapted model. base: what names its base. task: PEFT's task_type."""
    config, own, table = model.config.adapter, adapted(model), table_of(model.config)
    modules, ranks, alphas, transposed = [], {}, {}, False
    for rule, names in _matrices(model.config):
        if names[0] not in own:
            continue
        module, rank = module_of(rule.theirs, model.config), sum(own[name].a.out_features for name in names)
        alpha = own[names[0]].scale * (rank**0.5 if config.rslora else rank)
        modules.append(module)
        transposed |= _transposed(rule)
        ranks |= {module: rank} if rank != config.rank else {}
        alphas |= {module: alpha} if abs(alpha - config.alpha) > 1e-9 * alpha else {}
    every = {module_of(rule.theirs, model.config) for rule in table}
    return {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": base, "inference_mode": True,
        "r": config.rank, "lora_alpha": config.alpha, "lora_dropout": config.dropout, "use_rslora": config.rslora,
        "use_dora": False, "bias": "none", "fan_in_fan_out": transposed, "init_lora_weights": True,
        "target_modules": short(modules, every), "rank_pattern": ranks, "alpha_pattern": alphas,
        "modules_to_save": trained_whole(model) or None,
    }  # fmt: skip


def trained_whole(model: nn.Module) -> list[str]:
    """The modules of theirs that are trained beside the matrices. Raises UserError where PEFT, which keeps a module
    with all that is in it, could not hold what is trained."""
    first, parameters = first_names(model), dict(model.named_parameters())
    trained = {name: parameters[one].requires_grad for name, one in first.items()}
    shared = {one for name, one in first.items() if name != one}
    table = [(f"{module_of(rule.theirs, model.config)}.", rule) for rule in table_of(model.config)]
    modules = sorted({  # of a head the whole, which may be several layers
        f"{module.partition('.')[0]}." if all(map(in_head, rule.names)) else module
        for module, rule in table if any(trained[name] for name in rule.names)
    })  # fmt: skip
    own = adapted(model)
    for module in modules:
        inside = [name for other, rule in table if other.startswith(module) for name in rule.names]
        one = next(name for name in inside if trained[name])
        if first[one] in shared:
            what = f"{one} is trained, but shared in the model, and PEFT would part it"
        elif other := next((name for name in inside if name.removesuffix(".weight") in own), None):
            what = f"{one} is trained and {other} adapted, and PEFT has one or the other of a module"
        elif other := next((name for name in inside if not trained[name]), None):
            what = f"{one} is trained and {other} is not, and PEFT keeps {module[:-1]} whole"
        else:
            continue
        raise UserError(f"train.freeze: {what}. Leave it frozen, or train the whole module without an adapter in it")
    return [m[:-1] for m in modules if not any(m != outer and m.startswith(outer) for outer in modules)]


def key(name: str, hf: Mapping[str, Any]) -> str:
    """The key of a tensor of the rules. hf: the model's config.json."""
    if name.startswith(PREFIX):
        return name
    module, _, kind = name.rpartition(".")
    return f"{PREFIX}{_in_memory(module, family_of(dict(hf), CONFIG))}.{kind}"


def _transposed(rule: Rule) -> bool:
    """Whether theirs is stored (in, out)."""
    import torch

    return rule.to_theirs(*(torch.empty(1, 7, device="meta") for _ in rule.names)).shape[0] == 7


def short(names: Iterable[str], every: Iterable[str]) -> list[str]:
    """The shortest ends of names that end none of the others of `every`."""
    names, others = list(names), {f".{name}" for name in every} - {f".{name}" for name in names}
    out = {}
    for name in names:
        free = (end for end in reversed(_ends(name)) if not any(other.endswith(f".{end}") for other in others))
        out[next(free)] = None
    return list(out)


# ---------------------------------------------------------------- reading


def check_config(about: Mapping[str, Any], file: Path) -> None:
    """Raises UserError for another kind of adapter, or a LoRA with what ours has not."""
    if about.get("peft_type") != "LORA":
        raise UserError(f"{file}: an adapter of type {about.get('peft_type')!r:.40}; only LORA is read")
    refused = fields.names()["peft"]["without"].items()
    if lacks := [f"{key}={about[key]!r:.40}" for key, none in refused if about.get(key) not in none]:
        raise UserError(f"{file}: {some(lacks)}: not supported. Merge it with PEFT (merge_and_unload) and give that")
    if not isinstance(about.get("use_rslora", False), bool | None):
        raise UserError(f"{file}: use_rslora={about['use_rslora']!r:.40}: expected true or false")
    if long := [key for key, value in about.items() if isinstance(value, list | dict) and len(value) > limits.MODULES]:
        raise UserError(f"{file}: {some(long)}: more than {limits.MODULES:,} entries. Is it the right file?")


def refuse_edited(model: nn.Module, about: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError where adapter_config.json, which PEFT reads, says something else than gradus_config.json, from
    which the model is."""
    others = ("task_type", "inference_mode", "base_model_name_or_path")  # which change no output
    for key, ours in described(model, "", None).items():
        if key not in others and about.get(key) != ours:
            both = f"{key}={about.get(key)!r:.60} in {CONFIG}, {ours!r:.60} by {OURS}"
            alone = f"delete {OURS} and checksums.json, and {CONFIG} is read as PEFT reads it"
            raise UserError(f"{folder}: {both}. Make them equal; or {alone}")


def module_of(theirs: str, config: ModelConfig) -> str:
    """The module of a tensor of theirs, as transformers calls it."""
    return _in_memory(theirs.rpartition(".")[0], config.family)


def _in_memory(name: str, family: str) -> str:
    for pattern, replacement in getattr(rules_of(family), "MODULES", {}).items():
        name = re.sub(pattern, replacement, name)
    return name


def read_tensors(folder: Path, config: ModelConfig) -> dict[str, Stored]:
    """Those of A and B under their names, the whole ones under the base's. config: the base's. Raises UserError for
    adapters of embeddings."""
    file = next((folder / name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: {CONFIG} without {WEIGHTS}. Copy the folder again")
    stored = read_file(file)
    if others := [name for name in stored if "lora_embedding" in name or "lora_magnitude" in name]:
        raise UserError(f"{folder}: {some(others)}: not supported. Merge it with PEFT (merge_and_unload) and give that")
    whole = {f"{module_of(r.theirs, config)}.{r.theirs.rpartition('.')[2]}": r.theirs for r in table_of(config)}
    out = {}
    for name, tensor in stored.items():
        module, dot, matrix = name.removeprefix(PREFIX).rpartition(".lora_")
        bare = name.removeprefix(PREFIX)
        out[f"{PREFIX}{module_of(f'{module}.', config)}{dot}{matrix}" if dot else whole.get(bare, bare)] = tensor
    return out


def targets(
    model: nn.Module, about: Mapping[str, Any], tensors: dict[str, Stored]
) -> tuple[list[str], dict[str, Stored]]:
    """(adapter.targets, tensors as `rules` has them) of a file of PEFT's own. model: the base. Raises UserError for
    what the base has not."""
    found: dict[str, tuple[int, float]] = {}
    tensors, rslora = dict(tensors), bool(about.get("use_rslora"))
    ranks = _by_module(about, "rank_pattern", about.get("r", 8))
    alphas = _by_module(about, "alpha_pattern", about.get("lora_alpha", 8))
    for rule, names in _matrices(model.config):
        module = module_of(rule.theirs, model.config)
        a, b = (tensors.get(f"{PREFIX}{module}.lora_{x}.weight") for x in "AB")
        if a is None or b is None or names[0] in found:
            continue
        stated = ranks(module)
        if a.shape[0] != stated:
            raise UserError(f"{module} has rank {a.shape[0]}, and {CONFIG} says {stated}. Copy both files again")
        rank, alpha = a.shape[0], float(alphas(module))
        scale = alpha / (rank**0.5 if rslora else rank)
        each = rank
        if len(names) > 1:
            outs = [model.get_submodule(name).out_features for name in names]
            whole, n = b.read(), len(names)
            if rank % n == 0 and whole.equal(_diagonal(*_blocks(outs, [rank // n] * n, whole))):
                each = rank // n
            else:  # one A for all
                copies = a.changed(methodcaller("repeat", n, 1), n * rank, a.shape[1])
                spread = b.changed(partial(_spread, outs), sum(outs), n * rank)
                tensors |= {f"{PREFIX}{module}.lora_A.weight": copies, f"{PREFIX}{module}.lora_B.weight": spread}
        own = scale * (each**0.5 if rslora else each)
        found |= dict.fromkeys(names, (each, own))
    matrices = ((rule.theirs, names) for rule, names in _matrices(model.config))
    known = {PREFIX + module_of(theirs, model.config) for theirs, names in matrices if names[0] in found}
    if extra := [name for name in tensors if ".lora_" in name and name.rpartition(".lora_")[0] not in known]:
        raise UserError(f"{some(extra)}: the base has no Linear there that can be adapted")
    if lacks := list(_lacking(model, about, tensors, known)):
        raise UserError(f"{some(lacks)} {MISSING}")
    usual = int(about.get("r", 8)), float(about.get("lora_alpha", 8))
    linears = [name for name, module in model.named_modules() if hasattr(module, "out_features")]
    if set(found.values()) == {usual}:
        return short(found, linears), tensors
    return [f"{name}:{rank}:{alpha!r}" for name, (rank, alpha) in found.items()], tensors


def _lacking(
    model: nn.Module, about: Mapping[str, Any], tensors: Mapping[str, Stored], known: set[str]
) -> Iterator[str]:
    """What target_modules and modules_to_save name and the file has not. known: what it adapts."""
    from torch import nn

    modules, config = dict(model.named_modules()), model.config
    targeted, excluded = (_named(about, key) for key in ("target_modules", "exclude_modules"))
    for rule, names in _matrices(config):
        module = module_of(rule.theirs, config)
        linear = all(isinstance(modules.get(name), nn.Linear) for name in names)
        both = (module, rule.theirs.rpartition(".")[0])  # an older name too
        asked = (_transformed(about, name) and targeted(name) and not excluded(name) for name in both)
        if linear and PREFIX + module not in known and any(asked) and not _saved(about, module):
            yield f"{PREFIX}{module}.lora_A.weight"
    yield from lacking_whole(config, about, tensors)


def lacking_whole(config: ModelConfig, about: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Iterator[str]:
    """What modules_to_save names and the file has not."""
    seen: set[tuple] = set()
    for rule in table_of(config):
        first = (rule.names, rule.index) not in seen
        if first and rule.theirs not in tensors and _saved(about, module_of(rule.theirs, config)):
            yield PREFIX + rule.theirs
        seen.add((rule.names, rule.index))


def _saved(about: Mapping[str, Any], module: str) -> bool:
    """Whether modules_to_save has a module, or one around it."""
    return any(f".{name}." in f".{module}." for name in about.get("modules_to_save") or ())


def _named(about: Mapping[str, Any], key: str) -> Callable[[str], bool]:
    """Whether a list of modules has one, as PEFT reads it: names or their ends, or an expression for the whole."""
    by = about.get(key) or ()
    if isinstance(by, str):
        return _expression(key, by)
    names = set(by)
    return lambda module: not names.isdisjoint(_ends(module))


def _transformed(about: Mapping[str, Any], module: str) -> bool:
    """Whether the layer that a module is in, if it is in one, is adapted."""
    layers, number = about.get("layers_to_transform"), re.match(r".*?\.[^.]*\.(\d+)\.", module)
    layers = [layers] if isinstance(layers, int) else layers
    return not layers or bool(number and int(number[1]) in layers)


def _spread(outs: list[int], b: Tensor) -> Tensor:
    return _diagonal(*b.split(outs))


def _by_module(about: Mapping[str, Any], key: str, usual: Any) -> Callable[[str], Any]:
    """The value of the first pattern that ends a module's name, as PEFT reads them: most are plain names."""
    names: dict[str, tuple[int, Any]] = {}
    others: list[tuple[Callable[[str], bool], tuple[int, Any]]] = []
    for entry in enumerate((about.get(key) or {}).items()):
        number, (pattern, value) = entry
        if plain := re.fullmatch(r"(\^?)((?:\w|\\?[.-])+)\$?", pattern):
            names.setdefault(plain[1] + plain[2].replace("\\", ""), (number, value))
        else:
            others.append((_expression(key, rf"(.*\.)?({pattern})"), (number, value)))
        if len(others) > limits.EXPRESSIONS:
            raise UserError(f"{CONFIG}: {key}: more than {limits.EXPRESSIONS} expressions. Write names of modules")

    def value_of(module: str) -> Any:
        hits = [names[end] for end in (f"^{module}", *_ends(module)) if end in names]
        hits += [hit for fits, hit in others if fits(module)]
        return min(hits, key=lambda hit: hit[0])[1] if hits else usual

    return value_of


def _ends(module: str) -> list[str]:
    """a.b.c, b.c and c."""
    parts = module.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


@lru_cache(maxsize=2 * limits.EXPRESSIONS)
def _expression(key: str, pattern: str) -> Callable[[str], bool]:
    """Whether an expression of adapter_config.json matches the whole of a name. pydantic's engine takes time linear in
    the name; Python's would take an exponential one where the pattern asks for it. Raises UserError for one that is
    broken, too long, or needs more than such an engine has (look-around, references to groups)."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    why = f"longer than {limits.EXPRESSION:,} characters" if len(pattern) > limits.EXPRESSION else None
    try:
        if not why:
            whole = core_schema.str_schema(pattern=f"^(?:{pattern})$", regex_engine="rust-regex")
            return SchemaValidator(whole).isinstance_python
    except SchemaError as e:
        why = str(e).strip().rpartition("rror: ")[2].rstrip(" .")
    raise UserError(f"{CONFIG}: {key}: {pattern!r:.60} cannot be matched ({why}). Write names of modules instead")
