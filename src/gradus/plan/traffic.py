"""What holding the parameters sends in a step: gathers, reductions, broadcasts, by the arithmetic of the layout.

What a block sends itself (along tensor, context and expert) and what stages send to each other is in the profiles.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradus.parallel import pipeline
from gradus.plan.compose import Stage, gathered, padded, sharded_over, stages_of, tied, width_of, widths
from gradus.plan.profiles import Weight
from gradus.plan.work import Transfer
from gradus.recipe.axes import DATA, sizes, strides

if TYPE_CHECKING:
    from gradus.plan.engine import Process


def holding(p: Process) -> list[Transfer]:
    """Of one process in one step."""
    shape, stride = sizes(p.recipe.layout, p.n), strides(p.recipe.layout, p.n)
    found = itertools.chain(_pipeline(p, shape, stride), _shards(p, shape, stride), _replicas(p, shape, stride), _partial(p), _control(p, shape, stride))
    return [t for t in found if t.group > 1 and t.payload and t.calls]


def _pipeline(p: Process, shape, stride) -> Iterator[Transfer]:
    """Hidden states and their gradients; then the gradients of parameters that several processes have: the first adds up and gives back."""
    layout = p.recipe.layout
    where = dict(enumerate(pipeline.ranks(layout)))
    own = stages_of(p.rank, layout)
    for s, stage in zip(own, p.stages):
        for kind, other in (("forward", s + 1), ("backward", s - 1)):
            if where.get(other, p.rank) != p.rank and kind in stage.profile.sent:
                yield Transfer("pipeline", "send", stage.profile.sent[kind], p.micro, layout.pipeline, stride["pipeline"], kind)
    for nbytes, calls in tied(p):
        yield Transfer("pipeline", "send", nbytes, calls, layout.pipeline, stride["pipeline"], "optimizer")


def in_order(stages: list[Stage], frozen: bool = False) -> Iterator[tuple[Weight, int]]:
    """(parameter, how often) of a process, in the model's order but for the repeated blocks'."""
    # what stands in the place of a parameter that another stage of the process has is not there
    seen = {name for stage in stages for name in stage.profile.units.get("", {})} if frozen else set()
    for stage in stages:
        for unit, weights, times in stage.units(frozen):
            for name, w in weights.items():
                if unit or name not in seen:
                    seen.add(name)
                    yield w, times


def _shards(p: Process, shape, stride) -> Iterator[Transfer]:
    layout, micro = p.recipe.layout, p.micro
    if layout.shard == 1:
        return
    computed, reduced = widths(layout, p.width)
    scatters = micro if layout.pipeline > 1 else 1  # a pipeline's stages reduce after every micro-batch
    for stage in p.stages:
        for unit, weights, times in stage.units():
            for expert in (False, True):  # split experts are a unit of their own
                k, apart = sharded_over(layout, expert), stride["shard"] if expert else nearest(layout, stride)
                elements = sum(padded(w, k) for w in weights.values() if w.expert == expert)
                whole = elements * computed + gathered((w for w in stage.profile.frozen.get(unit, {}).values() if w.expert == expert), k)
                yield Transfer("shard", "all_gather", whole, times * micro, k, apart, "forward", "forward")
                if layout.reshard:
                    yield Transfer("shard", "all_gather", whole, times * micro, k, apart, "backward", "backward")
                yield Transfer("shard", "reduce_scatter", elements * reduced, times * scatters, k, apart, "backward", "backward")
                yield Transfer("replicate", "all_reduce", elements // k * reduced, times * scatters, shape["replicate"], stride["replicate"], "backward", "backward")


def nearest(layout, stride) -> int:
    """Between neighbours of those that shard the weights."""
    return stride["context"] if layout.context > 1 else stride["expert"] if layout.expert > 1 else stride["shard"]


def _replicas(p: Process, shape, stride) -> Iterator[Transfer]:
    layout, width = p.recipe.layout, p.width
    if layout.shard > 1:
        return
    weights = list(in_order(p.stages))
    bytes_of = [(w, w.size * width_of(w, layout)) for w, times in weights for _ in range(times)]
    group, apart = shape["replicate"] * layout.context, stride["context"] if layout.context > 1 else stride["replicate"]
    axis = "replicate" if shape["replicate"] > 1 else "context"
    limit = layout.bucket_mb * 2**20
    local = layout.local_sgd or layout.diloco
    if local:
        yield from _after([b for _, b in bytes_of], limit, "replicate", shape["replicate"], stride["replicate"], local.every)
    elif layout.replicate == "manual":
        for w, times in weights:
            yield Transfer(axis, "all_reduce", w.size * width_of(w, layout), times, group, apart, "optimizer")
    elif layout.replicate == "parameter_server":
        yield Transfer("replicate", "send", sum(b for _, b in bytes_of), group - 1, group, apart, "optimizer")
    elif layout.tensor == layout.pipeline == layout.expert == 1:
        yield from _ddp([b for _, b in bytes_of], limit, axis, group, apart, 0.5 if layout.compress in ("bf16", "fp16") and width == 4 else 1.0)
    else:
        for expert in (False, True):
            more, near = (1, stride["replicate"]) if expert else (layout.expert, stride["context"] if layout.context > 1 else stride["expert"] if layout.expert > 1 else stride["replicate"])
            yield from _after([b for w, b in bytes_of if w.expert == expert], limit, "expert" if more > 1 else axis, group * more, near, 1)
    if layout.shard_optimizer and shape["replicate"] > 1:
        for load in dealt([w.size for w, times in weights for _ in range(times)], shape["replicate"]):
            yield Transfer("replicate", "broadcast", load * width, 1, shape["replicate"], stride["replicate"], "optimizer")


def dealt(found: list[int], replicas: int) -> list[int]:
    """Elements that each replica steps: whole parameters, the largest first, each to whom has least (parallel.shard.OptimizerShards)."""
    load = [(0, r) for r in range(replicas)]
    for size in sorted(found, reverse=True):
        least, r = load[0]
        heapq.heapreplace(load, (least + size, r))
    return [size for size, _ in load]


def _ddp(found: list[int], limit: float, axis: str, group: int, apart: int, wire: float) -> Iterator[Transfer]:
    """DDP closes a bucket that has reached its size, from the last parameter to the first; the last one has nothing to hide behind."""
    buckets, filled = [], 0.0
    for nbytes in reversed(found):
        filled += nbytes
        if filled >= limit:
            buckets.append(filled)
            filled = 0.0
    buckets += [filled] if filled else []
    for i, nbytes in enumerate(buckets):
        yield Transfer(axis, "all_reduce", nbytes * wire, 1, group, apart, "backward", "backward" if i < len(buckets) - 1 else "")


def _after(found: list[int], limit: float, axis: str, group: int, apart: int, every: int) -> Iterator[Transfer]:
    """The sums after the backward pass close a bucket before it would go beyond its size (parallel.replicate.sum_in_buckets)."""
    filled = 0.0
    for nbytes in (*found, 0):
        if filled and (not nbytes or filled + nbytes > limit):
            yield Transfer(axis, "all_reduce", filled, 1 / every, group, apart, "optimizer")
            filled = 0.0
        filled += nbytes


def _partial(p: Process) -> Iterator[Transfer]:
    """Gradients of what is whole on every process and applied to a part of the sequence: one call, or with FSDP2 one each."""
    layout, width = p.recipe.layout, p.width
    found = [(w.size, times) for w, times in in_order(p.stages) if w.partial]
    if layout.shard > 1:
        computed, reduced = widths(layout, width)
        computed = computed if p.micro == 1 or layout.pipeline > 1 else reduced  # added up in the type of the sum
        sums = p.micro if layout.pipeline > 1 else 1
        for size, times in found:
            yield Transfer("tensor", "all_reduce", size * computed, times * sums, layout.tensor, 1, "backward")
    else:
        yield Transfer("tensor", "all_reduce", sum(size * times for size, times in found) * width, 1, layout.tensor, 1, "optimizer")


def _control(p: Process, shape, stride) -> Iterator[Transfer]:
    """The loss over all that have a part of it; the norm's squares over the axes along which parameters are cut. 4 bytes each."""
    layout = p.recipe.layout

    def over(*axes: str) -> Transfer:
        wide = [axis for axis in axes if shape[axis] > 1]
        k = math.prod(shape[axis] for axis in wide)
        return Transfer("control", "all_reduce", 4.0, 1, k, min((stride[axis] for axis in wide), default=1), "optimizer")

    if layout.replicate == "parameter_server":
        yield dataclasses.replace(over("replicate"), kind="broadcast")
    if not (layout.local_sgd or layout.diloco):
        yield over(*DATA, "context", "pipeline")
    cuts = set()
    for w, _ in in_order(p.stages):
        axes = ("shard",) if layout.shard > 1 and w.expert else ("shard", "expert", "context") if layout.shard > 1 else ()
        axes += ("expert",) if w.expert and "expert" not in axes else ()
        cuts.add(axes + (("tensor",) if w.cut and not w.expert else ()))
    for axes in sorted({tuple(a for a in axes if shape[a] > 1) for axes in cuts}):
        yield over(*axes)
    yield over("pipeline")
