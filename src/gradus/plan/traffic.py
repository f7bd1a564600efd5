"""All transfers outside the blocks, by arithmetic: of FSDP, DDP and ZeRO-1, between the stages of a pipeline, and of
scalars.

Transfers inside a block (along tensor, context and expert) are in its profile.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator

from gradus.plan.case import Case
from gradus.plan.compose import tied_gradients
from gradus.plan.process import Process, Unit, assign_owners, fsdp_widths, reduces_each, stages_of, width_of
from gradus.plan.profiles import MiB, Weight
from gradus.plan.stage import Stage
from gradus.plan.work import Transfer
from gradus.recipe.axes import DATA
from gradus.recipe.schema import Layout


def of_parameters(p: Process) -> list[Transfer]:
    """The transfers of one process in one step, but for those inside its blocks."""
    ways = _shards(p) if p.layout.shard > 1 else _replicas(p)
    every = itertools.chain(_pipeline(p), ways, _partial(p), _control(p))
    return [t for t in every if t.group > 1 and t.payload and t.calls]


def _pipeline(p: Process) -> Iterator[Transfer]:
    """Hidden states and their gradients; then the gradients of parameters that several processes have: the first adds
    up and gives back."""
    layout = p.layout
    rank_of = dict(enumerate(p.case.rank_of))
    group, spacing = layout.pipeline, p.case.stride["pipeline"]
    for s, stage in zip(stages_of(p.rank, p.case.rank_of), p.stages):
        for kind, neighbour in (("forward", s + 1), ("backward", s - 1)):
            if rank_of.get(neighbour, p.rank) != p.rank and kind in stage.profile.sent:
                yield Transfer("pipeline", "send", stage.profile.sent[kind], p.n_micro_batches, group, spacing, kind)
    for nbytes, calls in tied_gradients(p):
        yield Transfer("pipeline", "send", nbytes, calls, group, spacing, "optimizer")


# ---------------------------------------------------------------- shards


def _shards(p: Process) -> Iterator[Transfer]:
    layout, stride = p.layout, p.case.stride
    replicas = p.case.shape["replicate"], stride["replicate"]
    reduced = fsdp_widths(layout)[1]
    scatters = p.n_micro_batches if reduces_each(layout) else 1
    together = layout.shard_with == "fsdp2"  # else replicas' sums follow the last backward pass
    for stage in p.stages:
        for name, trained, frozen, times in _units(stage, layout):
            unit = Unit.of(layout, trained, frozen)
            group = unit.ranks, stride["shard"] if unit.expert else nearest(p.case)
            again = stage.backward_gathers(name, bool(trained), times) if layout.reshard else 0
            if not together:
                again *= next(iter({**trained, **frozen}.values())).read
            for phase, gathers in (("forward", times), ("backward", again)):
                whole, calls = unit.gathered, gathers * p.n_micro_batches
                yield Transfer("shard", "all_gather", whole, calls, *group, phase, phase)
            backward, calls = ("backward", "backward"), times * scatters
            yield Transfer("shard", "reduce_scatter", unit.full * reduced, calls, *group, *backward)
            sums = unit.full // unit.ranks * (reduced if together else p.width), calls if together else times
            yield Transfer("replicate", "all_reduce", *sums, *replicas, *backward)


def _units(stage: Stage, layout: Layout) -> Iterator[tuple[str, dict[str, Weight], dict[str, Weight], int]]:
    """What is gathered at a time: units of FSDP2; of SimpleFSDP every parameter is one."""
    for name, trained, frozen, times in stage.units:
        if layout.shard_with == "fsdp2":
            yield name, trained, frozen, times
            continue
        yield from ((name, {own: w}, {}, times) for own, w in trained.items())
        yield from ((name, {}, {own: w}, times) for own, w in frozen.items())


def nearest(case: Case, otherwise: str = "shard") -> int:
    """The distance between neighbours of those that have the same weights but experts: along context, else expert, else
    the axis named."""
    axis = "context" if case.layout.context > 1 else "expert" if case.layout.expert > 1 else otherwise
    return case.stride[axis]


# ---------------------------------------------------------------- replicas


def _replicas(p: Process) -> Iterator[Transfer]:
    replicas, spacing = p.case.shape["replicate"], p.case.stride["replicate"]
    weights = [w for w, times in p.weights for _ in range(times)]
    yield from _sums(p, weights, replicas, spacing)
    if p.layout.shard_optimizer and replicas > 1:
        for load in assign_owners([w.size for w in weights], replicas):
            yield Transfer("replicate", "broadcast", load * p.width, 1, replicas, spacing, "optimizer")


def _sums(p: Process, weights: list[Weight], replicas: int, distance: int) -> Iterator[Transfer]:
    """Of the weights' gradients, over all that have the same."""
    layout, limit = p.layout, p.layout.bucket_mb * MiB
    group, spacing = replicas * layout.context, p.case.stride["context"] if layout.context > 1 else distance
    axis = "replicate" if replicas > 1 else "context"
    bytes_of = [(w, w.size * width_of(w, layout)) for w in weights]
    every = [nbytes for _, nbytes in bytes_of]
    if local := layout.local_sgd or layout.diloco:
        call = Transfer("replicate", "all_reduce", 0, 1 / local.every, replicas, distance)
        yield from _after_backward(every, limit, call)
    elif layout.replicate == "manual":
        for w, times in p.weights:
            yield Transfer(axis, "all_reduce", w.size * width_of(w, layout), times, group, spacing, "optimizer")
    elif layout.replicate == "parameter_server":
        yield Transfer("replicate", "send", sum(every), group - 1, group, spacing, "optimizer")
    elif layout.tensor == layout.pipeline == layout.expert == 1:
        half = layout.compress in ("bf16", "fp16") and p.width == 4
        yield from _ddp(every, limit, Transfer(axis, "all_reduce", 0, 1, group, spacing), 0.5 if half else 1.0)
    else:
        for expert in (False, True):
            more = 1 if expert else layout.expert
            near = distance if expert else nearest(p.case, "replicate")
            call = Transfer("expert" if more > 1 else axis, "all_reduce", 0, 1, group * more, near)
            yield from _after_backward([nbytes for w, nbytes in bytes_of if w.expert == expert], limit, call)


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
    layout = p.layout
    partial = [(w.size, times) for w, times in p.weights if w.partial]
    if layout.shard == 1:
        nbytes = sum(size * times for size, times in partial) * p.width
        yield Transfer("tensor", "all_reduce", nbytes, 1, layout.tensor, 1, "optimizer")
        return
    computed, reduced = fsdp_widths(layout)
    width = computed if p.n_micro_batches == 1 or layout.pipeline > 1 else reduced  # added up in the type of the sum
    sums = p.n_micro_batches if layout.pipeline > 1 else 1
    for size, times in partial:
        yield Transfer("tensor", "all_reduce", size * width, times * sums, layout.tensor, 1, "backward")


# ---------------------------------------------------------------- single numbers


def _control(p: Process) -> Iterator[Transfer]:
    """The loss over all that have a part of it; the norm's squares over the axes along which parameters are cut. Each
    has 4 bytes."""
    layout, shape, stride = p.layout, p.case.shape, p.case.stride

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
