"""What a process computes in a step: the operations of its stages, of all micro-batches, and those that sharding, sums
of gradients and the optimizer take, by arithmetic. What is alive meanwhile is `plan.peak`'s, what is sent
`plan.traffic`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from gradus.plan.process import Process, Unit, fsdp_widths, padded, reduces_each, width_of
from gradus.plan.profiles import N
from gradus.plan.work import Op, OpCounts, OpKey, TransferCounts, add_counts, memory_op, op_of
from gradus.recipe.schema import Layout

SCALAR = 64  # bytes of what is done with single numbers


def operations(p: Process) -> tuple[OpCounts, TransferCounts]:
    """(operations, transfers) of all micro-batches, of what the pieces do themselves."""
    ops: OpCounts = {}
    sent: TransferCounts = {}
    anew = gradients_anew(p.layout)
    for stages, micro, first in ((p.stages, p.n_whole, 1), (p.tail, p.n_micro_batches - p.n_whole, 0)):
        new = micro if anew else first  # micro-batches that add to no gradients
        for stage, (later, many) in itertools.product(stages, ((False, new), (True, micro - new))):
            if many:
                for total, counts in zip((ops, sent), stage.counts(later)):
                    add_counts(total, counts, many)
    return ops, sent


def gradients_anew(layout: Layout) -> bool:
    """Whether every micro-batch makes its gradients anew: FSDP2 has summed the last one's, or keeps them in another
    type."""
    computed, reduced = fsdp_widths(layout)
    return layout.shard > 1 and (reduces_each(layout) or computed != reduced)


def sharding_copies(p: Process) -> OpCounts:
    """The copies that FSDP2 and DDP make in all micro-batches."""
    layout = p.layout
    out: OpCounts = {}
    if layout.shard > 1:
        for stage in p.stages:
            for name, trained, frozen, times in stage.units:
                again = layout.reshard and (bool(trained) or name in stage.backward_units)
                for key, count in _fsdp_copies(p, Unit.of(layout, trained, frozen), again):
                    add_counts(out, {key: count}, times)
    elif p.case.ddp:
        own = p.param_bytes
        half = layout.compress in ("bf16", "fp16") and p.width == 4
        copies = [("copy", (5.5 if half else 6) * own), ("div", 2 * own), *([("to_copy", 1.5 * own)] if half else [])]
        for name, nbytes in copies:
            add_counts(out, {memory_op(name, p.width, "backward", nbytes): 1})
    return {key: count for key, count in out.items() if key.bytes}


def _fsdp_copies(p: Process, unit: Unit, backward: bool) -> Iterator[tuple[OpKey, float]]:
    """(copy, how often) of a unit's parameters. backward: whether they are gathered for the backward pass too."""
    computed, reduced = fsdp_widths(p.layout)
    scatters = p.n_micro_batches if reduces_each(p.layout) else 1
    k, full, elements = unit.ranks, unit.full, unit.elements
    cast = unit.cast + full * (computed + p.width) * (computed != p.width)
    for phase in ("forward", "backward") if backward else ("forward",):
        yield memory_op("split_with_sizes_copy", computed, phase, 2 * unit.gathered), p.n_micro_batches
        yield memory_op("foreach_copy", computed, phase, cast / k), p.n_micro_batches
        for w in unit.moved:
            yield memory_op("cat", computed, phase, 3 * w.size * computed), p.n_micro_batches
    # gradients stay whole, in the type that they are summed in
    summed_whole = p.n_micro_batches > scatters and reduced != computed
    if summed_whole:
        yield memory_op("to_copy", computed, "backward", elements * (computed + reduced)), 1
        yield memory_op("add", reduced, "backward", elements * (2 * reduced + computed)), p.n_micro_batches - 1
    if scatters > 1:
        yield memory_op("add", reduced, "backward", 3 * full / k * p.width), scatters - 1
    width = reduced if summed_whole else computed
    for w in unit.moved:
        yield memory_op("cat", computed, "backward", 2 * w.size * width), scatters
    if full:
        yield memory_op("chunk_cat", width, "backward", elements * width + full * reduced), scatters


# ---------------------------------------------------------------- the optimizer's step


def optimizer_ops(p: Process) -> list[Op]:
    """Norm, clipping and step, of the parameters that this process steps: the profile's of a stage that has any, by
    elements and number of tensors; and the copies of sums after the backward pass."""
    profile = max((stage.profile for stage in p.stages), key=lambda profile: profile.stepped[1] > 0)
    traced, nbytes = profile.stepped
    # where nothing is trained, nothing grows with it
    scale = p.param_bytes / nbytes if nbytes else 1.0
    tensors = sum(times for _, times in p.weights) / traced if traced else 1.0
    share = p.param_bytes / (p.stepped_elements * p.width) if p.stepped_elements else 1.0
    dtype = "fp32" if p.width == 4 else "bf16"
    out = []
    for key, count in profile.optimizer.ops.items():
        name, moved = key.name, key.bytes
        if name in ("cat", "copy"):
            continue
        if name.startswith(("fused", "foreach", "stack")):  # all tensors at once
            nbytes = moved * scale / (share if name.startswith("fused") else 1)
        elif moved <= SCALAR:
            nbytes = moved
        else:  # one tensor after the other
            owners = share if name == "mul" else 1
            nbytes, count = moved * scale / tensors, count * tensors / owners
        out.append(Op(key.kind, name, dtype, "optimizer", key.flops, nbytes, key.shape, count))
    for name, nbytes, count in _summing(p, share):
        out.append(Op("memory", name, dtype, "optimizer", 0.0, nbytes, (), count))
    prepare = profile.prepare.items()
    return out + [op_of(key, count * p.case.batches.parts, phase="optimizer") for key, count in prepare]


def _summing(p: Process, share: float) -> Iterator[tuple[str, float, float]]:
    """(name, bytes, how often) of what is done with gradients and weights to send them."""
    layout, own = p.layout, p.param_bytes
    replicas = p.case.shape["replicate"]
    weights = ((w, times) for stage in p.stages for _, unit, _, times in stage.units for w in unit.values())
    partial = p.width * sum(w.size * times for w, times in weights if w.partial)
    local = (layout.local_sgd or layout.diloco) if replicas > 1 else None
    server = layout.replicate == "parameter_server"
    copied = [partial if layout.shard == 1 else 0, *summed_gradients(p), own if share > 1 else 0]
    copied += [own / local.every] if local else []
    copied += [own, own] if server and replicas > 1 else []
    for nbytes in filter(None, copied):
        yield "cat", 2 * nbytes, 1
        yield "copy", 3 * nbytes, 1
    if server:
        yield "add", 3 * own, replicas - 1
    if local:  # the mean of the weights; or the change of the weights, an outer step (with momentum or not), and back
        passes = 2 if not layout.diloco else 19 if layout.diloco.outer_momentum else 11
        yield "div", passes * own / local.every, 1
    for nbytes, sends in tied_gradients(p):
        yield "copy", 3 * nbytes, 1
        if p.rank == 0:
            yield "add", 3 * nbytes, sends


# ---------------------------------------------------------------- gradients that are summed, and what is left


def tied_gradients(p: Process) -> Iterator[tuple[float, int]]:
    """(bytes, sends) of gradients of parameters that several processes of the pipeline have: the first adds up and
    gives back."""
    shard = p.layout.shard
    own = {name: w for stage in p.stages for name, w in stage.ends.items()}
    for name, w in own.items():
        holders = p.holders[name]
        if len(holders) > 1:
            size = padded(w, shard) // shard if shard > 1 else w.size
            yield float(size * p.width), len(holders) - 1 if p.rank == min(holders) else 1


def summed_gradients(p: Process) -> list[float]:
    """Bytes of gradients that are put together, summed over processes and copied back after the backward pass, by group
    of processes."""
    layout, shape = p.layout, p.case.shape
    elsewhere = layout.shard > 1 or p.case.ddp or layout.replicate in ("manual", "parameter_server")
    if elsewhere or layout.local_sgd or layout.diloco:
        return []
    out = []
    for expert in (False, True):
        if shape["replicate"] * layout.context * (1 if expert else layout.expert) == 1:
            continue
        weights = ((w, n) for stage in p.stages for _, unit, _, n in stage.units for w in unit.values())
        out.append(float(sum(w.size * width_of(w, layout) * n for w, n in weights if w.expert == expert)))
    return out


def left_by_forward(p: Process) -> float:
    """Bytes that forward passes leave for backward passes, at least: with 1F1B of as many micro-batches as there are
    stages from this one on."""
    at_once = p.layout.pipeline - p.rank if p.layout.schedule == "1f1b" else 1
    runs = [stage.run("forward", later=True) for stage in p.stages]
    return min(at_once, p.n_micro_batches) * float(sum(np.dot(run.times, run.net[:, :N].sum(1)) for run in runs))
