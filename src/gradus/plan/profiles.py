"""Profiles: what a process's part of a model does in one training step, as pieces, and which blocks are traced for it.

A piece begins where a unit (a block, or an end that FSDP gathers by itself) begins or ends its forward or its backward
pass. `plan.tracing` reads profiles off the very modules; `plan.compose` puts the pieces together for any number of
layers, stages, shards, replicas and micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gradus import models
from gradus.plan.work import COMPONENTS, OpCounts, OpKey, TransferCounts, TransferKey
from gradus.recipe.schema import Layout, ModelConfig, Recipe

MiB = 2**20
NAMES = list(COMPONENTS)
INDEX = {name: i for i, name in enumerate(NAMES)}
N = len(NAMES)
ROW = N + 3  # numbers in a row of memory: of each component, then of each pool of PyTorch's allocator (see `pool`)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, or a buffer, as a process holds it before it is sharded."""

    shape: tuple[int, ...]
    expert: bool  # one of experts that are split over processes
    cut: bool  # along layout.tensor or layout.expert
    partial: bool  # its gradient is still to be summed along layout.tensor
    across: bool  # FSDP2 may cut it along any dimension: see parallel.shard
    width: int  # bytes of an element, as the model was built
    computed: int  # the same in the trace, where weights may have been cast
    buffer: bool = False
    read: bool = True  # by the backward pass, or by what is computed again for it

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Units = dict[str, dict[str, Weight]]  # unit → name of a parameter → what it is, in the model's order
Edge = Literal[
    "pre_forward", "post_forward", "pre_backward", "post_backward", "forward", "backward", "weights", "idle", "end"
]


def pool(nbytes: float) -> tuple[int, float]:
    """(pool, bytes taken) of one tensor in PyTorch's caching allocator: small ones in segments of 2 MiB, those up to
    10 MiB in segments of 20 MiB, both in units of 512 bytes; larger ones in segments of their own, in units of 2 MiB
    (c10/cuda/CUDACachingAllocator)."""
    rounded = -(-nbytes // 512) * 512
    if rounded <= MiB:
        return 0, rounded
    return (1, rounded) if rounded < 10 * MiB else (2, -(-rounded // (2 * MiB)) * 2 * MiB)


@dataclasses.dataclass
class Stretch:
    """Memory, operations and transfers between two edges. A row of memory: bytes of each component (work.COMPONENTS),
    then bytes taken in each of the allocator's pools (small, middle, large)."""

    peak: np.ndarray  # the highest rise above the level before, in sum; of each pool its own
    net: np.ndarray  # the level afterwards minus before
    ops: OpCounts
    transfers: TransferCounts


@dataclasses.dataclass
class Piece:
    """A stretch and the edge that it begins with. unit: "" is the root: all that is in no other unit."""

    unit: str
    edge: Edge
    stretch: Stretch


# ---------------------------------------------------------------- which blocks are traced


@functools.lru_cache(maxsize=64)
def block_kinds(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Of each stack the kind of each block. Blocks are of one kind where they have the same modules and parameters, the
    same of them frozen, where something is trained before all of them or before none, and where the family's `kind`
    says nothing else."""
    model, stacks = models.build(config, "meta"), models.lookup(config.family).stacks
    trained, kinds = False, []
    for stack in stacks:
        names = tuple(f"{name}." for name in (*stack.before, *stack.shared))
        trained |= any(p.requires_grad for name, p in model.named_parameters() if f"{name}.".startswith(names))
        kinds.append([])
        for i, block in enumerate(model.get_submodule(stack.blocks)):
            signature = repr((stack.signature(config, i, block), trained))
            kinds[-1].append(hashlib.sha256(signature.encode()).hexdigest()[:8])
            trained |= any(p.requires_grad for p in block.parameters())
    return tuple(map(tuple, kinds))


def representatives(kinds: Sequence[str], ends: bool = True) -> list[int]:
    """Which of these blocks are traced for all: one of each kind; with `ends` the first one and the last one too."""
    inner = range(1, len(kinds) - 1) if ends else range(len(kinds))
    first_of = {kinds[i]: i for i in reversed(inner)}
    return sorted({*first_of.values(), *({0, len(kinds) - 1} if ends and kinds else ())})


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive blocks of a model and the ends that go with them. stacks: of each (blocks before them, own ones,
    blocks after them). kinds: of each stack that of every block. ends: whether the first and the last block are traced
    by themselves, as memory needs it."""

    stacks: tuple[tuple[int, int, int], ...]
    kinds: tuple[tuple[str, ...], ...]
    ends: bool = True

    @classmethod
    def of(cls, kinds: tuple[tuple[str, ...], ...], begin: int, end: int) -> Part:
        """Of the blocks from `begin` on, before `end`, counted through all stacks."""
        stacks, start = [], 0
        for stack in kinds:
            size = len(stack)
            before, after = (min(max(at - start, 0), size) for at in (begin, end))
            stacks.append((before, after - before, size - after))
            start += size
        return cls(tuple(stacks), kinds)

    @classmethod
    def whole(cls, kinds: tuple[tuple[str, ...], ...]) -> Part:
        """All blocks of a model, one of each kind traced: enough for operations; `plan.cut` derives memory from it."""
        return cls(tuple((0, len(stack), 0) for stack in kinds), kinds, ends=False)

    @functools.cached_property
    def own_kinds(self) -> list[tuple[str, ...]]:
        return [kinds[before : before + own] for (before, own, _), kinds in zip(self.stacks, self.kinds)]

    @functools.cached_property
    def chosen(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each stack that are traced: own ones and a neighbour on each side; at an end of the model two
        on the other side, so that the small pipeline of `plan.tracing` has three stages."""
        one_sided = len(self.stacks) == 1 and 0 in (self.stacks[0][0], self.stacks[0][2])
        most, out = 2 if one_sided else 1, []
        for (before, own, after), kinds in zip(self.stacks, self.own_kinds):
            first, last = min(before, most), min(after, most)
            inner = [before + i for i in representatives(kinds, self.ends)]
            out.append((*range(before - first, before), *inner, *range(before + own, before + own + last)))
        return tuple(out)

    @functools.cached_property
    def small(self) -> Part:
        """Of the chosen blocks alone."""
        stacks = []
        for (before, own, _), chosen in zip(self.stacks, self.chosen):
            first, last = sum(i < before for i in chosen), sum(i >= before + own for i in chosen)
            stacks.append((first, len(chosen) - first - last, last))
        kinds = tuple(tuple(kinds[i] for i in chosen) for kinds, chosen in zip(self.kinds, self.chosen))
        return Part(tuple(stacks), kinds, self.ends)

    @property
    def mixed(self) -> bool:
        """Whether blocks differ in kind: a model that is built with fewer layers would then lack some."""
        return any(len(set(kinds)) > 1 for kinds in self.kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(sum, self.stacks))

    @property
    def bounds(self) -> list[int]:
        """The first block of each stage of the small pipeline (`plan.tracing`), and the number of all blocks."""
        first, own = sum(s[0] for s in self.stacks), sum(s[1] for s in self.stacks)
        inner = {1, first} if len(self.stacks) == 1 else {first}
        outer = {first + own, first + own + 1} if len(self.stacks) == 1 else {first + own}
        total = sum(self.sizes)
        return sorted({0, *(x for x in inner if x <= first), *(x for x in outer if x < total), total})

    @property
    def index(self) -> int:
        """Which stage of the small pipeline this part is."""
        return self.bounds.index(sum(s[0] for s in self.stacks))


# ---------------------------------------------------------------- a profile


@dataclasses.dataclass
class Profile:
    """first, later: the pieces of the first micro-batch and of any other, forward and backward; of a pipeline's stage
    also those of the weights' gradients, where the schedule makes them later."""

    first: dict[str, list[Piece]]
    later: dict[str, list[Piece]]
    prepare: OpCounts  # of a micro-batch, before the first forward pass
    optimizer: Stretch  # norm, clipping, step
    units: Units  # what is trained
    frozen: Units  # parameters that are not, and buffers
    sent: dict[str, float]  # bytes that a stage sends after its forward and its backward pass
    batch: np.ndarray  # alive for the whole step, for each micro-batch of data: its input
    buffers: np.ndarray  # likewise, for each micro-batch of the schedule: what a pipeline receives
    pure: bool  # whether weights were in half
    stacks: dict[str, tuple[int, int]]  # name of the blocks → (number of the first, how many)
    stepped: tuple[int, int]  # (tensors, their bytes) that the traced optimizer steps

    def block_of(self, unit: str) -> tuple[str, int]:
        """(stack, which of its traced blocks) that a unit is in; ("", -1) for what is in none."""
        for stack, (first, _) in self.stacks.items():
            if unit.startswith(f"{stack}."):
                return stack, int(unit[len(stack) + 1 :].partition(".")[0]) - first
        return "", -1


BLOCK_KEYS = {  # of a layout, what splits a block or changes what it computes
    "device", "precision", "tensor", "sequence_parallel", "vocab_parallel", "context", "context_method", "expert",
    "checkpointing", "attention", "chunk", "loss", "tf32",
}  # fmt: skip


def small_recipe(recipe: Recipe, small: Part, split_backward: bool = False) -> Recipe:
    """The recipe with as many blocks as are traced, and those keys of its layout that split a block or change what it
    computes."""
    sizes, layout, default = small.sizes, recipe.layout, Layout()
    kept = {*BLOCK_KEYS, "compile" if layout.precision == "fp8" else "precision"}  # a compiler fuses its casts
    update = {key: getattr(default, key) for key in Layout.model_fields if key not in kept}
    if layout.shard > 1 and layout.param_dtype in ("bf16", "fp16"):
        update["precision"] = f"pure_{layout.param_dtype}"
    stages = len(small.bounds) - 1
    if stages > 1:
        schedule = {"schedule": "zero_bubble", "stages": 1} if split_backward else {"schedule": "gpipe", "stages": None}
        update |= {"pipeline": stages, **schedule}
    layers = dict(zip(("n_layers", "n_decoder_layers"), sizes))
    model, layout = recipe.model.model_copy(update=layers), layout.model_copy(update=update)
    return recipe.model_copy(update={"model": model, "layout": layout})


# ---------------------------------------------------------------- kept on disk


def to_json(p: Profile) -> dict[str, Any]:
    """As JSON can hold it."""

    def stretch(s: Stretch) -> list:
        return [s.peak.tolist(), s.net.tolist(), list(s.ops.items()), list(s.transfers.items())]

    def passes(runs: dict[str, list[Piece]]) -> dict:
        return {kind: [[x.unit, x.edge, stretch(x.stretch)] for x in pieces] for kind, pieces in runs.items()}

    def weights(units: Units) -> dict:
        return {unit: {name: dataclasses.astuple(w) for name, w in own.items()} for unit, own in units.items()}

    return {
        "first": passes(p.first), "later": passes(p.later), "prepare": list(p.prepare.items()),
        "optimizer": stretch(p.optimizer), "units": weights(p.units), "frozen": weights(p.frozen), "sent": p.sent,
        "batch": p.batch.tolist(), "buffers": p.buffers.tolist(), "pure": p.pure, "stacks": p.stacks,
        "stepped": p.stepped,
    }  # fmt: skip


def from_json(plain: dict[str, Any]) -> Profile:
    def operations(rows: list) -> OpCounts:
        return {OpKey(*rest, tuple(shape)): count for (*rest, shape), count in rows}

    def stretch(peak: list, net: list, ops: list, transfers: list) -> Stretch:
        sent = {TransferKey(*key): calls for key, calls in transfers}
        return Stretch(np.array(peak), np.array(net), operations(ops), sent)

    def passes(runs: dict) -> dict[str, list[Piece]]:
        return {kind: [Piece(unit, edge, stretch(*s)) for unit, edge, s in pieces] for kind, pieces in runs.items()}

    def weights(units: dict) -> Units:
        return {
            unit: {name: Weight(tuple(shape), *rest) for name, (shape, *rest) in own.items()}
            for unit, own in units.items()
        }

    read = {
        "first": passes, "later": passes, "prepare": operations, "optimizer": lambda s: stretch(*s), "units": weights,
        "frozen": weights, "batch": np.array, "buffers": np.array,
        "stacks": lambda stacks: {name: tuple(numbers) for name, numbers in stacks.items()},
    }  # fmt: skip
    return Profile(**{name: read.get(name, lambda value: value)(value) for name, value in plain.items()})
