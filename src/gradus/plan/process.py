"""One process of a plan, as data: its stages, and what it holds of the model. What it does is said above: `compose` its
operations, `peak` its memory, `traffic` what it sends."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

from gradus.plan.case import Case
from gradus.plan.profiles import Weight
from gradus.plan.stage import Stage
from gradus.recipe.schema import Layout

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclasses.dataclass
class Memory:
    """Of the rank that needs most, in bytes."""

    components: dict[str, int]  # as work.COMPONENTS, at the peak; they sum to `allocated`
    allocated: int  # the peak of live tensors
    reserved: int  # what the caching allocator has taken for them
    framework: int  # of a GPU: CUDA context, libraries' workspaces, communicators; of a CPU: as `outside` says
    rank: int
    at: str  # what was going on at the peak
    state: dict[str, int]  # weights, gradients and optimizer state that the rank holds, live at the peak or not
    parameters: int
    notes: list[str]
    outside: tuple[str, dict[str, float]] = ("", {})  # of a CPU: `framework` as a formula, and what stands in it

    @property
    def device_total(self) -> int:
        """What the device shows as taken."""
        return self.reserved + self.framework


@dataclasses.dataclass
class Process:
    """One rank along the pipeline."""

    case: Case
    rank: int  # along the pipeline
    stages: list[Stage]
    tail: list[Stage]  # the same for a smaller last micro-batch; [] where there is none
    holders: dict[str, set[int]]  # parameter of an end of the model → the ranks that have it
    n_micro_batches: int
    n_whole: int  # of these, those before a smaller last one
    weights: list[tuple[Weight, int]]  # (trained parameter, how often) in the model's order, but for repeated blocks'
    largest: int  # elements of the usual width that it holds of one of these, at most
    stepped_elements: int  # that it steps; of replicas that step a part each, that which steps most
    param_bytes: int  # of the trained parameters that it holds
    frozen_bytes: int  # of the parameters and buffers that are not trained
    optimizer_bytes: float

    @property
    def layout(self) -> Layout:
        return self.case.layout

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return bytes_per_weight(self.layout)

    @classmethod
    def of(cls, case: Case, rank: int, stages: list[Stage], tail: list[Stage], holders: dict[str, set[int]]) -> Process:
        layout, optimizer = case.layout, case.recipe.optimizer
        weights, frozen = list(_in_order(stages)), _in_order(stages, frozen=True)
        width, replicas = bytes_per_weight(layout), case.shape["replicate"]
        micro = case.n_micro_batches
        local = [(local_bytes(w, layout) // width, times) for w, times in weights]
        every = [size for size, times in local for _ in range(times)]
        param_bytes = width * sum(every)
        shared = layout.shard_optimizer and replicas > 1
        stepped = max(assign_owners(every, replicas)) if shared else sum(every)
        tensors = len(every) / (replicas if layout.shard_optimizer else 1)
        counts = 4 * tensors if optimizer.name != "sgd" else 0  # of steps
        outer = 1 + (layout.diloco.outer_momentum > 0) if layout.diloco else 0  # copies: anchors, momentum
        return cls(
            case, rank, stages, tail, holders, micro, case.batches.count - 1 if tail else micro,
            weights=weights,
            largest=max(every, default=0),
            stepped_elements=stepped,
            param_bytes=param_bytes,
            frozen_bytes=sum(local_bytes(w, layout) * n for w, n in frozen),
            optimizer_bytes=stepped * momenta(optimizer) * width + counts + outer * param_bytes,
        )  # fmt: skip


def momenta(optimizer: Any) -> int:
    """Optimizer states of a parameter (Adam: 2, SGD with momentum: 1). optimizer: a recipe's section."""
    return {"adamw": 2, "adam": 2, "sgd": 1 if getattr(optimizer, "momentum", 0) else 0}[optimizer.name]


def assign_owners(elements: list[int], replicas: int) -> list[int]:
    """Elements that each replica steps: whole parameters, the largest first, each to whom has least
    (parallel.shard.OptimizerShards)."""
    load = [(0, r) for r in range(replicas)]
    for size in sorted(elements, reverse=True):
        least, r = load[0]
        heapq.heapreplace(load, (least + size, r))
    return [size for size, _ in load]


def _in_order(stages: list[Stage], frozen: bool = False) -> Iterator[tuple[Weight, int]]:
    """(parameter, how often) of a process, in the model's order but for the repeated blocks'."""
    # what stands in the place of a parameter that another stage of the process has is not there
    seen = {name for stage in stages for name in stage.ends} if frozen else set()
    for stage in stages:
        for unit, trained, others, times in stage.units:
            for name, w in (others if frozen else trained).items():
                if unit or name not in seen:
                    seen.add(name)
                    yield w, times


def stages_of(rank: int, rank_of: list[int]) -> list[int]:
    """The stages of a process of the pipeline. rank_of: the process that has each stage."""
    return [s for s, r in enumerate(rank_of) if r == rank]


# ---------------------------------------------------------------- what a process holds of a parameter


def reduces_each(layout: Layout) -> bool:
    """Whether gradients are reduced after every micro-batch, not after the last one alone."""
    return layout.pipeline > 1 or layout.shard_with == "simple"


def sharded_over(layout: Layout, expert: bool) -> int:
    """Processes over which FSDP2 shards a parameter. expert: of experts that are split, each group of processes has its
    own."""
    if layout.shard == 1:
        return 1
    return layout.shard if expert else layout.shard * layout.expert * layout.context


def padded(w: Weight, k: int) -> int:
    """Elements of a parameter that FSDP2 cuts into k parts: along its first dimension, filled up; of experts along any
    that k divides."""
    if not w.shape:
        return k
    if w.across and any(size % k == 0 for size in w.shape):
        return w.size
    return -(-w.shape[0] // k) * k * math.prod(w.shape[1:])


def transposed_shards(weights: Iterable[Weight], k: int) -> list[Weight]:
    """Those that FSDP2 cuts along another dimension than the first, which takes it a copy each time
    (`parallel.shard._across`)."""
    return [w for w in weights if w.across and w.shape[0] % k and any(size % k == 0 for size in w.shape[1:])]


def bytes_per_weight(layout: Layout) -> int:
    return 2 if layout.precision.startswith("pure_") else 4


def width_of(w: Weight, layout: Layout) -> int:
    """Bytes of an element that a process holds."""
    return w.computed if layout.precision.startswith("pure_") else w.width


def local_bytes(w: Weight, layout: Layout) -> int:
    """Bytes of it that a process holds."""
    k = 1 if w.buffer else sharded_over(layout, w.expert)
    return (padded(w, k) // k if k > 1 else w.size) * width_of(w, layout)


def fsdp_widths(layout: Layout) -> tuple[int, int]:
    """Bytes of an element as FSDP2 computes with it, and as it sums its gradient."""
    computed = WIDTH[layout.param_dtype] if layout.param_dtype else bytes_per_weight(layout)
    return computed, WIDTH[layout.reduce_dtype or "fp32"] if layout.reduce_dtype or layout.param_dtype else computed


@dataclasses.dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers at a time (torch.distributed.fsdp.fully_shard). Split experts are a unit of their own."""

    ranks: int  # over which it is sharded
    expert: bool
    elements: int  # that are trained
    full: int  # elements that are trained, filled up so that the ranks divide them
    gathered: float  # bytes of all its parameters
    cast: float  # bytes read and written where those that are not trained are computed in another type
    moved: list[Weight]  # those whose shards are cut along another dimension than the first

    @classmethod
    def of(cls, layout: Layout, trained: dict[str, Weight], frozen: dict[str, Weight]) -> Unit:
        expert = any(w.expert for w in (*trained.values(), *frozen.values()))
        ranks = sharded_over(layout, expert)
        full = sum(padded(w, ranks) for w in trained.values())
        others = [(w, padded(w, ranks)) for w in frozen.values() if not w.buffer]
        return cls(
            ranks, expert, sum(w.size for w in trained.values()), full,
            gathered=full * fsdp_widths(layout)[0] + sum(elements * w.computed for w, elements in others),
            cast=sum(elements * (w.computed + w.width) for w, elements in others if w.computed != w.width),
            moved=transposed_shards(trained.values(), ranks),
        )  # fmt: skip
