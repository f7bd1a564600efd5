"""All transfers outside the blocks, by arithmetic: of FSDP, DDP and ZeRO-1, between the stages of a pipeline, and of
scalars.

Transfers inside a block (along tensor, context and expert) are in its profile.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradus.parallel import stages as pipelines
from gradus.plan.compose import (
    Stage,
    fsdp_widths,
    gathered_bytes,
    padded,
    sharded_over,
    stages_of,
    tied_gradients,
    width_of,
)
from gradus.plan.profiles import MiB, Weight
from gradus.plan.work import Transfer
from gradus.recipe.axes import DATA, sizes, strides
from gradus.recipe.schema import Layout

if TYPE_CHECKING:
    from gradus.plan.engine import Process

Shape = dict[str, int]  # axis → processes along it, or the distance between neighbours


def of_parameters(p: Process) -> list[Transfer]:
    """The transfers of one process in one step, but for those inside its blocks."""
    shape, stride = sizes(p.recipe.layout, p.n), strides(p.recipe.layout, p.n)
    parts = _pipeline(p, stride), _shards(p, shape, stride), _replicas(p, shape, stride), _partial(p)
    every = [t for part in (*parts, _control(p, shape, stride)) for t in part]
    return [t for t in every if t.group > 1 and t.payload and t.calls]


def _pipeline(p: Process, stride: Shape) -> Iterator[Transfer]:
    """Hidden states and their gradients; then the gradients of parameters that several processes have: the first adds
    up and gives back."""
    layout = p.recipe.layout
    rank_of = dict(enumerate(pipelines.ranks(layout)))
    group, spacing = layout.pipeline, stride["pipeline"]
    for s, stage in zip(stages_of(p.rank, layout), p.stages):
        for kind, neighbour in (("forward", s + 1), ("backward", s - 1)):
            if rank_of.get(neighbour, p.rank) != p.rank and kind in stage.profile.sent:
                yield Transfer("pipeline", "send", stage.profile.sent[kind], p.n_micro_batches, group, spacing, kind)
    for nbytes, calls in tied_gradients(p):
        yield Transfer("pipeline", "send", nbytes, calls, group, spacing, "optimizer")


def in_order(stages: list[Stage], frozen: bool = False) -> Iterator[tuple[Weight, int]]:
    """(parameter, how often) of a process, in the model's order but for the repeated blocks'."""
    # what stands in the place of a parameter that another stage of the process has is not there
    seen = {name for stage in stages for name in stage.profile.units.get("", {})} if frozen else set()
    for stage in stages:
        for unit, trained, others, times in stage.units:
            for name, w in (others if frozen else trained).items():
                if unit or name not in seen:
                    seen.add(name)
                    yield w, times


# ---------------------------------------------------------------- shards


def _shards(p: Process, shape: Shape, stride: Shape) -> Iterator[Transfer]:
    layout = p.recipe.layout
    if layout.shard == 1:
        return
    computed, reduced = fsdp_widths(layout, p.width)
    scatters = p.n_micro_batches if layout.pipeline > 1 else 1  # a pipeline's stages reduce after every micro-batch
    for stage in p.stages:
        for unit, weights, others, times in stage.units:
            for expert in (False, True):  # split experts are a unit of their own
                k, spacing = sharded_over(layout, expert), stride["shard"] if expert else nearest(layout, stride)
                frozen = [w for w in others.values() if w.expert == expert]
                elements = sum(padded(w, k) for w in weights.values() if w.expert == expert)
                whole = elements * computed + gathered_bytes(frozen, k)
                again = stage.backward_gathers(unit, bool(weights), times) if layout.reshard else 0
                for phase, gathers in (("forward", times), ("backward", again)):
                    yield Transfer("shard", "all_gather", whole, gathers * p.n_micro_batches, k, spacing, phase, phase)
                backward, calls = ("backward", "backward"), times * scatters
                yield Transfer("shard", "reduce_scatter", elements * reduced, calls, k, spacing, *backward)
                replicas = shape["replicate"], stride["replicate"]
                yield Transfer("replicate", "all_reduce", elements // k * reduced, calls, *replicas, *backward)


def nearest(layout: Layout, stride: Shape) -> int:
    """The distance between neighbours of those that shard the weights."""
    return stride["context"] if layout.context > 1 else stride["expert"] if layout.expert > 1 else stride["shard"]


# ---------------------------------------------------------------- replicas


def _replicas(p: Process, shape: Shape, stride: Shape) -> Iterator[Transfer]:
    layout = p.recipe.layout
    if layout.shard > 1:
        return
    weights = p.weights
    bytes_of = [(w, w.size * width_of(w, layout)) for w, times in weights for _ in range(times)]
    replicas, spacing = shape["replicate"], stride["replicate"]
    yield from _sums(p, weights, bytes_of, shape, stride)
    if layout.shard_optimizer and replicas > 1:
        for load in assign_owners([w.size for w, times in weights for _ in range(times)], replicas):
            yield Transfer("replicate", "broadcast", load * p.width, 1, replicas, spacing, "optimizer")


def _sums(
    p: Process, weights: list[tuple[Weight, int]], bytes_of: list[tuple[Weight, int]], shape: Shape, stride: Shape
) -> Iterator[Transfer]:
    layout, limit = p.recipe.layout, p.recipe.layout.bucket_mb * MiB
    replicas, distance = shape["replicate"], stride["replicate"]
    group, spacing = replicas * layout.context, stride["context"] if layout.context > 1 else distance
    axis = "replicate" if replicas > 1 else "context"
    every = [nbytes for _, nbytes in bytes_of]
    if local := layout.local_sgd or layout.diloco:
        call = Transfer("replicate", "all_reduce", 0, 1 / local.every, replicas, distance)
        yield from _after_backward(every, limit, call)
    elif layout.replicate == "manual":
        for w, times in weights:
            yield Transfer(axis, "all_reduce", w.size * width_of(w, layout), times, group, spacing, "optimizer")
    elif layout.replicate == "parameter_server":
        yield Transfer("replicate", "send", sum(every), group - 1, group, spacing, "optimizer")
    elif layout.tensor == layout.pipeline == layout.expert == 1:
        half = layout.compress in ("bf16", "fp16") and p.width == 4
        yield from _ddp(every, limit, Transfer(axis, "all_reduce", 0, 1, group, spacing), 0.5 if half else 1.0)
    else:
        for expert in (False, True):
            more = 1 if expert else layout.expert
            along = "context" if layout.context > 1 else "expert" if layout.expert > 1 else "replicate"
            near = distance if expert else stride[along]
            call = Transfer("expert" if more > 1 else axis, "all_reduce", 0, 1, group * more, near)
            yield from _after_backward([nbytes for w, nbytes in bytes_of if w.expert == expert], limit, call)


def assign_owners(elements: list[int], replicas: int) -> list[int]:
    """Elements that each replica steps: whole parameters, the largest first, each to whom has least
    (parallel.shard.OptimizerShards)."""
    load = [(0, r) for r in range(replicas)]
    for size in sorted(elements, reverse=True):
        least, r = load[0]
        heapq.heapreplace(load, (least + size, r))
    return [size for size, _ in load]


def _ddp(gradients: list[int], limit: float, call: Transfer, wire: float) -> Iterator[Transfer]:
    """DDP closes a bucket that has reached its size, from the last parameter to the first; the last one has nothing to
    hide behind. gradients: bytes of each. wire: bytes sent for each byte."""
    buckets, filled = [], 0.0
    for nbytes in reversed(gradients):
        filled += nbytes
        if filled >= limit:
            buckets.append(filled)
            filled = 0.0
    buckets += [filled] if filled else []
    hidden = collections.Counter(buckets[:-1])
    for hidden_by, some in (("backward", hidden), ("", collections.Counter(buckets[-1:]))):
        for nbytes, n in some.items():
            yield dataclasses.replace(call, payload=nbytes * wire, calls=n, phase="backward", hidden_by=hidden_by)


def _after_backward(gradients: list[int], limit: float, call: Transfer) -> Iterator[Transfer]:
    """The sums after the backward pass close a bucket before it would go beyond its size
    (parallel.replicate.sum_in_buckets)."""
    filled, buckets = 0.0, collections.Counter[float]()
    for nbytes in (*gradients, 0):
        if filled and (not nbytes or filled + nbytes > limit):
            buckets[filled] += 1
            filled = 0.0
        filled += nbytes
    for payload, n in buckets.items():
        yield dataclasses.replace(call, payload=payload, calls=call.calls * n, phase="optimizer")


def _partial(p: Process) -> Iterator[Transfer]:
    """Gradients of what is whole on every process and applied to a part of the sequence: one call, or with FSDP2 one
    each."""
    layout = p.recipe.layout
    partial = [(w.size, times) for w, times in p.weights if w.partial]
    if layout.shard == 1:
        nbytes = sum(size * times for size, times in partial) * p.width
        yield Transfer("tensor", "all_reduce", nbytes, 1, layout.tensor, 1, "optimizer")
        return
    computed, reduced = fsdp_widths(layout, p.width)
    width = computed if p.n_micro_batches == 1 or layout.pipeline > 1 else reduced  # added up in the type of the sum
    sums = p.n_micro_batches if layout.pipeline > 1 else 1
    for size, times in partial:
        yield Transfer("tensor", "all_reduce", size * width, times * sums, layout.tensor, 1, "backward")


# ---------------------------------------------------------------- single numbers


def _control(p: Process, shape: Shape, stride: Shape) -> Iterator[Transfer]:
    """The loss over all that have a part of it; the norm's squares over the axes along which parameters are cut. Each
    has 4 bytes."""
    layout = p.recipe.layout

    def over(*axes: str) -> Transfer:
        wide = [axis for axis in axes if shape[axis] > 1]
        group = math.prod(shape[axis] for axis in wide)
        spacing = min((stride[axis] for axis in wide), default=1)
        return Transfer("control", "all_reduce", 4.0, 1, group, spacing, "optimizer")

    if layout.replicate == "parameter_server":
        yield dataclasses.replace(over("replicate"), kind="broadcast")
    if not (layout.local_sgd or layout.diloco):
        yield over(*DATA, "context", "pipeline")
    cuts = {tuple(axis for axis in _cut_along(w, layout) if shape[axis] > 1) for w, _ in p.weights}
    for axes in sorted(cuts):
        yield over(*axes)
    yield over("pipeline")


def _cut_along(w: Weight, layout: Layout) -> tuple[str, ...]:
    """The axes of the layout along which the parameter is cut."""
    shards = ("shard",) if w.expert else ("shard", "expert", "context")
    axes = shards if layout.shard > 1 else ()
    if w.expert:
        return (*axes, "expert")
    return (*axes, "tensor") if w.cut else axes
