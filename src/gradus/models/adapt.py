"""Which parameters of a model are trained: frozen ones by pattern, and low-rank matrices beside frozen Linears.

A pattern matches a dotted name by one or more consecutive parts, in which * stands for anything: `head`, `blocks.0`,
`to_?`, `blocks.*.feedforward`; `all` matches every name. Of several the last that matches counts, and one that begins
with - takes back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.layers import Attention, Block, LoRALinear, SmallLinear, linears, small, use_linears
from gradus.layers.linears import within
from gradus.models.family import Family
from gradus.models.weights import first_names, in_head
from gradus.recipe.schema import Adapter, ModelConfig


def adapt(model: nn.Module, config: ModelConfig, family: Family) -> None:
    """Put config.adapter's matrices into the model, freeze what is not trained, and store frozen Linears of blocks as
    its `base` says, in place.

    Raises UserError for a pattern that matches nothing, a head as target, and where nothing is left to train.
    """
    frozen: set[str] = set()
    if adapter := config.adapter:
        frozen = {name for name, _ in model.named_parameters() if not trained_whole(config, name)}
        own = targets(model, adapter, family)

        def with_matrices(name: str, linear: nn.Linear) -> nn.Linear:
            if name not in own:
                return linear
            rank, alpha = own[name]
            return LoRALinear(linear, rank, alpha / (rank**0.5 if adapter.rslora else rank), adapter.dropout)

        use_linears(model, with_matrices)
    names: dict[str, list[str]] = {}  # a shared one has several
    for name, first in first_names(model).items():
        names.setdefault(first, []).append(name)
    frozen = chosen("train.freeze", config.freeze, names, frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if adapter and adapter.base:
        inside = within(model, Block)
        base = {name for name in adaptable(model) if name.startswith(inside) and f"{name}.weight" in frozen}
        use_linears(model, lambda name, linear: small(linear, adapter.base) if name in base else linear)
    if frozen.issuperset(names):
        some = next((name.split(".")[0] for name in names if in_head(name)), "blocks.0")
        raise UserError(f"train.freeze: every parameter is frozen. Leave some, as train.freeze=[all, -{some}] does")


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A model of its own in which the adapter's product is added to the weights, in fp32: it computes the same to
    rounding, and is saved as any other. One without an adapter comes back as it is."""
    if not model.config.adapter:
        return model
    plain, dtype = copy.deepcopy(model), next(model.parameters()).dtype

    def as_it_is(name: str, linear: nn.Linear) -> nn.Linear:
        if not isinstance(linear, LoRALinear | SmallLinear):
            return linear
        weight = linear.weight  # of a base that is stored small that with which it computes
        if isinstance(linear, LoRALinear):
            weight = weight.float() + linear.scale * linear.b.weight.float() @ linear.a.weight.float()
        whole = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        whole.weight, whole.bias = nn.Parameter(weight.to(dtype)), linear.bias
        return whole

    use_linears(plain, as_it_is)
    plain.config = model.config.trained(None).model_copy(update={"init": None})
    return plain.requires_grad_(True).train(model.training)


def trained_whole(config: ModelConfig, name: str) -> bool:
    """Whether a parameter is trained though there is an adapter: a classifier's head is new."""
    return getattr(config, "n_classes", None) is not None and in_head(name)


def adaptable(model: nn.Module) -> list[str]:
    """The names of all Linears, but those that choose experts and those that are an adapter's."""
    inside = within(model, LoRALinear)
    return [name for name in linears(model) if not name.startswith(inside)]


def matches(pattern: str, name: str) -> bool:
    return pattern == "all" or fnmatchcase(f".{name}.", f"*.{pattern}.*")


def words(names: Iterable[str]) -> set[str]:
    """What patterns for these names may hold."""
    return {part for name in names for part in name.split(".") if not part.isdigit()}


def chosen(
    key: str, patterns: Sequence[str], names: Mapping[str, Iterable[str]], start: Iterable[str] = ()
) -> set[str]:
    """Those that the patterns choose, beginning with `start`. names: of each all that it is called. Raises UserError
    for a pattern that matches none, and for one that takes back what is not chosen."""
    out = set(start)
    for pattern in patterns:
        bare = pattern.removeprefix("-")
        found = {name for name, aliases in names.items() if any(matches(bare, alias) for alias in aliases)}
        if not found:
            known = words(alias for aliases in names.values() for alias in aliases)
            raise UserError(f"{key}: {pattern} matches nothing here.{did_you_mean(bare, known)}")
        if bare != pattern and not found & out:
            raise UserError(f"{key}: {pattern} takes back nothing that stands before it. Leave it out.")
        out = out - found if bare != pattern else out | found
    return out


def targets(model: nn.Module, adapter: Adapter, family: Family) -> dict[str, tuple[int, float]]:
    """The names of the Linears that are adapted, each with its rank and alpha. Raises UserError as `adapt`."""
    every = adaptable(model)
    able = [name for name in every if not (in_head(name) or name == family.head)]
    kinds = {"all-linear": Block, "attention": Attention}
    out: dict[str, tuple[int, float]] = {}
    for target in adapter.targets:
        pattern, rank, alpha = _parsed(target, adapter)
        bare = pattern.removeprefix("-")
        if kind := kinds.get(bare):
            found = [name for name in able if name.startswith(within(model, kind))]
        else:
            heads = [name for name in every if name not in able and matches(bare, name)]
            found = [name for name in able if matches(bare, name)]
            if heads and not found:
                tied = first_names(model)[f"{heads[0]}.weight"] != f"{heads[0]}.weight"
                why = "its weight is the token embedding's too" if tied else "it is a head"
                near = did_you_mean(bare, words(able))
                raise UserError(f"adapter.targets: {target}: {heads[0]} cannot be adapted: {why}.{near}")
            chosen("adapter.targets", [bare], {name: [name] for name in able})
        if bare == pattern:
            out |= dict.fromkeys(found, (rank, alpha))
        else:
            out = {name: own for name, own in out.items() if name not in found}
    if not out:
        given = ", ".join(adapter.targets)
        raise UserError(f"adapter.targets=[{given}]: no Linear is left. Begin with some: [all-linear, -down]")
    return out


def _parsed(target: str, adapter: Adapter) -> tuple[str, int, float]:
    """(pattern, rank, alpha) of a target such as up, up:32 or up:32:64."""
    pattern, *own = target.split(":")
    try:
        rank, alpha = int(own.pop(0)) if own else adapter.rank, float(own.pop(0)) if own else adapter.alpha
        if not 1 <= rank <= limits.WIDTH or not 0 < alpha <= limits.REAL or own:
            raise ValueError
    except ValueError:
        raise UserError(
            f"adapter.targets: {target[:60]}: expected PATTERN, PATTERN:RANK or PATTERN:RANK:ALPHA, as to_q:16:32, "
            f"with a rank of at most {limits.WIDTH:,} and an alpha of at most {limits.REAL:g}"
        ) from None
    return pattern, rank, alpha
