"""A step put together from profiles: any number of layers, stages, micro-batches, shards and replicas, by arithmetic.

The pieces of a micro-batch follow each other as they were traced, the middle block of a stack as often as there are such. What FSDP2 and
DDP add happens at their edges: gathering before a unit's forward and backward pass, reducing after its backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from gradus.parallel import pipeline
from gradus.plan.profiles import EACH, INDEX, NAMES, MiB, N, Part, Piece, Profile, Units, Weight, pool
from gradus.plan.work import Op
from gradus.recipe.axes import sizes, stages_per_process
from gradus.recipe.schema import Layout

if TYPE_CHECKING:
    from gradus.plan.engine import Process

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALAR = 64  # bytes of what is done with single numbers
SHOWN = 8  # blocks of a stack that are gone through one by one; each of the others changes what is alive as its neighbours do


def level(**components: float) -> np.ndarray:
    out = np.zeros(N + 3)
    for name, value in components.items():
        which, taken = pool(abs(value))
        out[INDEX[name]] = value
        out[N + which] += math.copysign(taken, value)
    return out


class Alive:
    """The bytes alive now, and when they were most."""

    def __init__(self, start: np.ndarray):
        self.now = self.most = start
        self.pools = start[N:]  # each at its own peak
        self.at, self.phase = "", "forward"
        self.gradients = start[INDEX["gradients"]]  # most of them

    def rise(self, by: np.ndarray) -> None:
        then = self.now + by
        self.pools = np.maximum(self.pools, then[N:])
        self.gradients = max(self.gradients, then[INDEX["gradients"]])
        if then[:N].sum() > self.most[:N].sum():
            self.most, self.at = then, self.phase

    @property
    def bytes(self) -> int:
        return round(self.most[:N].sum())

    @property
    def reserved(self) -> int:
        """What PyTorch's caching allocator has taken, if free blocks of a pool are always used again."""
        small, middle, large = (float(x) for x in self.pools)
        return int(-(-small // (2 * MiB)) * 2 * MiB + -(-middle // (20 * MiB)) * 20 * MiB + large)

    def add(self, **components: float) -> None:
        self.now = self.now + level(**components)
        self.rise(np.zeros(N + 3))


# ---------------------------------------------------------------- from few blocks to many


@dataclasses.dataclass(eq=False)
class Stage:
    """One stage of the process: its part of the model, and the profile of a small part like it."""

    part: Part
    profile: Profile

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        own = [own for _, own, _ in self.part.stacks if own]
        return dict(zip(self.profile.stacks, own))

    def groups(self, pieces: list[Piece]) -> Iterator[tuple[list[Piece], int]]:
        """The pieces of one block, or of what is in none, after the other, and how often."""
        counts = self.counts
        for (stack, number), found in itertools.groupby(pieces, lambda piece: self._place(piece.unit)):
            group = list(found)
            if number != 1 or counts[stack] <= EACH:
                yield group, 1
                continue
            middle = min(counts[stack], SHOWN) - 2
            for k in range(middle) if "forward" in group[0].edge else range(middle - 1, -1, -1):
                times = counts[stack] - SHOWN + 1 if k == middle // 2 and counts[stack] > SHOWN else 1
                yield [dataclasses.replace(p, unit=f"{p.unit}@{k}") for p in group], times

    def totals(self, pieces: list[Piece]) -> Iterator[tuple[Piece, int]]:
        """Each piece, and how often."""
        yield from ((piece, self._times(piece.unit, piece.edge)) for piece in pieces)

    def _times(self, unit: str, edge: str = "") -> int:
        """How many blocks a traced one stands for: the middle one of three for all but two, a single one for all; what comes after a single
        one is the end's."""
        stack, number = self._place(unit)
        if not stack or (number == 0 and edge.startswith("post") and unit.count(".") == stack.count(".") + 1):
            return 1
        own, traced = self.counts[stack], self.profile.stacks[stack][1]
        return own if traced == 1 else own - 2 if number == 1 else 1

    def casts(self) -> np.ndarray:
        """Of the blocks that were not traced: half copies of weights that autocast forgets at the end of the forward pass, since no backward
        pass gives them back."""
        kept = 0.0
        for pieces in self.profile.later.values():
            for piece, times in self.totals(pieces):
                kept += (times - 1) * piece.stretch.net[INDEX["gathered"]]
        return level(gathered=kept)

    def left(self) -> np.ndarray:
        """What a micro-batch leaves behind that is no gradient."""
        total = -self.casts()
        for pieces in self.profile.later.values():
            for piece, times in self.totals(pieces):
                total = total + times * piece.stretch.net
        return total

    def _place(self, unit: str) -> tuple[str, int]:
        """(stack, which of its traced blocks) of a unit; ("", -1) where blocks are not repeated."""
        for stack, (first, traced) in self.profile.stacks.items():
            if unit.startswith(f"{stack}.") and traced in (1, EACH):
                return stack, int(unit[len(stack) + 1 :].split(".")[0]) - first
        return "", -1

    def units(self, frozen: bool = False) -> Iterator[tuple[str, dict[str, Weight], int]]:
        """(name, what of it is trained or else frozen, how often)."""
        profile = self.profile
        for unit in {**profile.units, **profile.frozen}:
            yield unit, (profile.frozen if frozen else profile.units).get(unit, {}), self._times(unit)


def sharded_over(layout: Layout, expert: bool) -> int:
    """Processes over which FSDP2 shards a parameter. expert: of experts that are split, each group of processes has its own."""
    if layout.shard == 1:
        return 1
    return layout.shard if expert else layout.shard * layout.expert * layout.context


def size_of(weights: dict[str, Weight]) -> int:
    return sum(w.size for w in weights.values())


def padded(w: Weight, k: int) -> int:
    """Elements of a parameter that FSDP2 cuts into k parts: along its first dimension, filled up; of experts along any that k divides."""
    if not w.shape:
        return k
    if w.across and any(size % k == 0 for size in w.shape):
        return w.size
    return -(-w.shape[0] // k) * k * math.prod(w.shape[1:])


def turned(weights: Iterable[Weight], k: int) -> list[Weight]:
    """Those that FSDP2 cuts along another dimension than the first, which takes it a copy each time (`parallel.shard._across`)."""
    return [w for w in weights if w.across and w.shape[0] % k and any(size % k == 0 for size in w.shape[1:])]


def width_of(w: Weight, layout: Layout) -> int:
    """Bytes of an element that a process holds."""
    return w.computed if layout.precision.startswith("pure_") else w.width


def held(w: Weight, layout: Layout) -> int:
    """Bytes of it that a process holds."""
    k = 1 if w.buffer else sharded_over(layout, w.expert)
    return (padded(w, k) // k if k > 1 else w.size) * width_of(w, layout)


def gathered(frozen: Iterable[Weight], k: int) -> int:
    """Bytes of those that FSDP2 puts together, of k parts."""
    return sum(padded(w, k) * w.computed for w in frozen if not w.buffer)


def stages_of(rank: int, layout: Layout) -> list[int]:
    """The stages of a process of the pipeline."""
    return [s for s, r in enumerate(pipeline.ranks(layout)) if r == rank]


def tied(p: Process) -> Iterator[tuple[float, int]]:
    """(bytes, sends) of gradients of parameters that several processes of the pipeline have: the first adds up and gives back."""
    layout, where = p.recipe.layout, pipeline.ranks(p.recipe.layout)
    holders: dict[str, set[int]] = {}
    for s, stage in p.every.items():
        for name in stage.profile.units.get("", {}):
            holders.setdefault(name, set()).add(where[s])
    for name, w in {name: w for stage in p.stages for name, w in stage.profile.units.get("", {}).items()}.items():
        if len(holders[name]) > 1:
            size = padded(w, layout.shard) // layout.shard if layout.shard > 1 else w.size
            yield float(size * p.width), len(holders[name]) - 1 if p.rank == min(holders[name]) else 1


# ---------------------------------------------------------------- what holds the parameters


def widths(layout: Layout, width: int) -> tuple[int, int]:
    """Bytes of an element as FSDP2 computes with it, and as it sums its gradient."""
    computed = WIDTH[layout.param_dtype] if layout.param_dtype else width
    return computed, WIDTH[layout.reduce_dtype or "fp32"] if layout.reduce_dtype or layout.param_dtype else computed


class Whole:
    """Parameters and gradients as the profile has them: one process, or one whose gradients are summed after the backward pass."""

    def __init__(self, layout: Layout, shapes: Units, alive: Alive, width: int):
        self.layout, self.shapes, self.alive, self.width = layout, shapes, alive, width

    def of(self, unit: str) -> str:
        """The unit as the profile knows it."""
        return unit.partition("@")[0]

    def changed(self, v: np.ndarray) -> np.ndarray:
        return v

    def edge(self, unit: str, edge: str, last: bool) -> None:
        pass

    def end_micro(self, last: bool) -> None:
        pass


class Replicated(Whole):
    """DDP: gradients are views of its buckets, which are there all the time."""

    def changed(self, v: np.ndarray) -> np.ndarray:
        out = v.copy()
        out[INDEX["transient"]] += out[INDEX["gradients"]]
        out[INDEX["gradients"]] = 0
        return out


class Sharded(Whole):
    """FSDP2 (torch.distributed.fsdp.fully_shard)."""

    def __init__(self, layout: Layout, shapes: Units, alive: Alive, width: int, frozen: Units, on_host: bool):
        super().__init__(layout, shapes, alive, width)
        self.frozen, self.on_host = frozen, on_host
        self.computed, self.reduced = widths(layout, width)
        self.buffer = 0.0  # of the last gather, which is given back when the next one has been copied out
        self.order: list[str] = []  # of the forward passes
        self.open: set[str] = set()
        self.arriving: dict[str, float] = {}  # gathered, not yet copied out
        self.input = 0.0  # of the last reduce-scatter
        self.kept: set[str] = set()  # units whose gradients are there, in the type that they are summed in
        self.summed: set[str] = set()  # units whose sharded gradients are there

    def ranks(self, unit: str) -> int:
        """Over which the unit is sharded."""
        weights = *self.shapes.get(self.of(unit), {}).values(), *self.frozen.get(self.of(unit), {}).values()
        return sharded_over(self.layout, any(w.expert for w in weights))

    def turned(self, unit: str) -> list[Weight]:
        return turned(self.shapes.get(self.of(unit), {}).values(), self.ranks(unit))

    def full(self, unit: str) -> int:
        return sum(padded(w, self.ranks(unit)) for w in self.shapes.get(self.of(unit), {}).values())

    def whole(self, unit: str) -> float:
        """Bytes of it, gathered."""
        return self.full(unit) * self.computed + gathered(self.frozen.get(self.of(unit), {}).values(), self.ranks(unit))

    def gather(self, unit: str) -> None:
        nbytes = self.whole(unit)
        if unit in self.open or unit in self.arriving or not nbytes:
            return
        self.alive.add(transient=nbytes + (nbytes / self.ranks(unit) if self.computed != self.width else 0))
        if self.computed != self.width:
            self.alive.add(transient=-nbytes / self.ranks(unit))
        self.arriving[unit] = nbytes

    def wait(self, unit: str, forward: bool) -> None:
        if unit not in self.arriving:
            return
        nbytes = self.arriving.pop(unit)
        self.alive.add(gathered=nbytes)
        aside = sum(w.size for w in self.turned(unit)) * self.computed
        self.alive.add(transient=aside)
        self.alive.add(transient=-aside)
        self.open.add(unit)
        if forward:
            self._forget()
            self.buffer = nbytes
        else:
            self.alive.add(transient=-nbytes)

    def _forget(self) -> None:
        self.alive.add(transient=-self.buffer)
        self.buffer = 0.0

    def close(self, unit: str) -> None:
        if unit in self.open:
            self.open.discard(unit)
            self.alive.add(gathered=-self.whole(unit))

    def edge(self, unit: str, edge: str, last: bool) -> None:
        again = self.alive.phase == "backward"  # experts, in a block that is computed again: they stay for their backward pass
        if edge == "pre_forward":
            self.gather(unit)
            self.wait(unit, True)
        elif edge == "post_forward" and not again:
            if unit == "":
                self._forget()
            if self.layout.reshard:
                self.close(unit)
            self.order.append(unit)
        elif edge == "post_forward":
            self._forget()
        elif edge == "pre_backward":
            self.gather(unit)
            self.wait(unit, False)
            before = self.order[: self.order.index(unit)] if unit in self.order else []
            if before:
                self.gather(before[-1])
        elif edge == "post_backward":
            self.after(unit, last)

    def after(self, unit: str, last: bool) -> None:
        """The unit's backward pass has ended."""
        self.close(unit)
        elements = size_of(self.shapes.get(self.of(unit), {}))
        if self.reduced != self.computed and (not last or unit in self.kept):
            if unit not in self.kept:
                self.alive.add(gradients=elements * self.reduced)
            self.alive.add(gradients=-elements * self.computed)
            self.kept.add(unit)
        if not last:
            return
        self.alive.add(transient=-self.input)
        self.input = float(self.full(unit) * self.reduced)
        if not self.input:
            return
        part = self.input / self.ranks(unit)
        width = self.reduced if unit in self.kept else self.computed
        aside = float(sum(w.size for w in self.turned(unit)[-1:]) * width)  # its gradient is there still when the copy is
        self.alive.add(transient=self.input + aside)
        self.alive.add(transient=-aside)
        self.alive.add(gradients=-elements * width)
        self.alive.add(gradients=part)
        if self.reduced != self.width:
            self.alive.add(gradients=part * self.width / self.reduced)
            self.alive.add(gradients=-part)
        if unit in self.summed or self.on_host:
            self.alive.add(gradients=-part * self.width / self.reduced)
        self.summed.add(unit)

    def end_micro(self, last: bool) -> None:
        for unit in dict.fromkeys(u for u in reversed(self.order) if u in self.open):
            self.after(unit, last)
        for nbytes in self.arriving.values():  # of what has no backward pass
            self.alive.add(transient=-nbytes)
        self.order, self.arriving = [], {}
        self.alive.add(transient=-self.input)
        self.input = 0.0


# ---------------------------------------------------------------- the step


def actions(layout: Layout, micro: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """(pass, stage of the process, micro-batch) in the order in which a process of the pipeline runs them."""
    if layout.pipeline == 1 or layout.schedule == "gpipe":
        if layout.pipeline == 1:
            for i in range(micro):
                yield "forward", 0, i
                yield "backward", 0, i
            return
        yield from (("forward", 0, i) for i in range(micro))
        yield from (("backward", 0, i) for i in range(micro))
        return
    if layout.schedule == "1f1b":
        warm = min(micro, layout.pipeline - rank)
        yield from (("forward", 0, i) for i in range(warm))
        for i in range(micro):
            yield "backward", 0, i
            if warm + i < micro:
                yield "forward", 0, warm + i
        return
    if layout.schedule == "interleaved":
        yield from interleaved(layout.pipeline, stages_per_process(layout), micro, rank)
        return
    from gradus.torch_private import schedule_of

    order = list(schedule_of(layout.schedule, layout.pipeline, stages_per_process(layout), micro, rank))
    own = sorted({stage for _, stage, _ in order})
    split = any(kind == "weights" for kind, _, _ in order)
    late = {(stage, i) for kind, stage, i in order if kind == "weights"}
    for kind, stage, i in order:
        yield kind, own.index(stage), i
        if split and kind == "backward" and (stage, i) not in late:
            yield "weights", own.index(stage), i


def interleaved(processes: int, stages: int, micro: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """As `actions`: rounds of as many micro-batches as there are processes, through one stage after the other (Narayanan et al. 2021,
    section 2.2). What torch's schedule says, without importing its compiler."""
    each = micro // max(1, micro // processes)  # micro-batches of a round
    warm = min((stages - 1) * each + 2 * (processes - 1 - rank), micro * stages)

    def at(i: int) -> tuple[int, int]:
        return i // each % stages, i // (each * stages) * each + i % each

    for i in range(micro * stages + warm):
        if i < micro * stages:
            yield "forward", *at(i)
        if i >= warm:
            stage, number = at(i - warm)
            yield "backward", stages - 1 - stage, number


def peak(p: Process) -> Alive:
    """What a process has alive at most, and when."""
    layout, stages, micro, width = p.recipe.layout, p.stages, p.micro, p.width
    sharded, ddp = layout.shard > 1, p.replicated
    own = p.own
    start = level(weights=p.frozen) + stages[0].profile.batch * p.given.parts + micro * sum(stage.profile.buffers for stage in stages)
    handed = stages_of(p.rank, layout)
    for s, stage in zip(handed, stages):  # from stage to stage of the process nothing is received
        if s + 1 in handed:
            start = start - micro * level(**{NAMES[int(stage.profile.buffers[:N].argmax())]: 2 * stage.profile.sent["forward"]})
    on_host = layout.offload and p.target == "cuda"
    if not on_host:
        start = start + level(weights=own, optimizer=p.state)
    alive = Alive(start + level(gradients=own) if ddp else start)
    known = layout, stages[0].profile.units, alive, width
    holder = Sharded(*known, stages[0].profile.frozen, on_host) if sharded else (Replicated if ddp else Whole)(*known)
    _run(p, alive, holder, ddp)
    alive.phase = "optimizer"
    if ddp and micro > 1:  # what the earlier micro-batches' gradients were is in the buckets now
        alive.now = alive.now - level(transient=own)
    for flat, gradients in _flat(p):
        alive.rise(level(transient=flat) if gradients or ddp else level(transient=flat, gradients=-own))
    return alive


def _summed(p: Process) -> list[float]:
    """Bytes of gradients that are put together, summed over processes and copied back after the backward pass, by group of processes."""
    layout, shape = p.recipe.layout, sizes(p.recipe.layout, p.n)
    if layout.shard > 1 or p.replicated or layout.replicate in ("manual", "parameter_server") or layout.local_sgd or layout.diloco:
        return []
    found = [(w, times) for stage in p.stages for _, weights, times in stage.units() for w in weights.values()]
    over = {expert: shape["replicate"] * layout.context * (1 if expert else layout.expert) for expert in (False, True)}
    return [float(sum(w.size * width_of(w, layout) * times for w, times in found if w.expert == expert)) for expert, k in over.items() if k > 1]


def _flat(p: Process) -> Iterator[tuple[float, bool]]:
    """Bytes of what is put together for sending at a time, and whether the gradients are there then."""
    layout, own = p.recipe.layout, p.own
    replicas = sizes(layout, p.n)["replicate"]
    bucket = max(layout.bucket_mb * MiB, p.width * max(size for size, _ in p.elements))
    yield from ((min(bucket, summed), True) for summed in _summed(p))
    if replicas > 1 and layout.replicate == "parameter_server":
        yield min(replicas, 3) * own, True  # the server's own, one that comes, and the one before
    if replicas > 1 and (layout.local_sgd or layout.diloco):
        yield min(bucket, own) + (own if layout.diloco else 0), False
    if replicas > 1 and layout.shard_optimizer:
        yield min(2 * p.width * p.stepped, own), True


def _run(p: Process, alive: Alive, holder: Whole, ddp: bool) -> None:
    layout, stages = p.recipe.layout, p.stages
    micro = p.micro
    if layout.pipeline == 1 or layout.schedule == "1f1b":  # more leave nothing new
        micro = min(micro, 3 if layout.pipeline == 1 else layout.pipeline + 2)
    small = micro - 1 if layout.pipeline == 1 else p.given.count - 1  # from here on they are as long as the last; idle ones too
    order = list(actions(layout, micro, p.rank))
    split = any(kind == "weights" for kind, _, _ in order)
    left, casts, shared = [stage.left() for stage in stages], [stage.casts() for stage in stages], _shared(stages)
    due = np.zeros(N + 3)
    sends = layout.pipeline > 1 and layout.schedule in ("1f1b", "interleaved")  # the others keep what they send to the end
    own = stages_of(p.rank, layout)
    nearer = {i for i, s in enumerate(own) if s - 1 in own}  # what these send stays in the process
    done: set[tuple[str, int]] = set()
    for kind, s, i in order:
        last = i == micro - 1 or layout.pipeline > 1
        again = kind == "forward" or (not p.fresh and ((kind, s) in done or (ddp and last)))
        twice = shared[s] if kind == ("weights" if split else "backward") and (kind, s) not in done else 0
        done.add((kind, s))
        stage = p.tail[s] if p.tail and i >= small else stages[s]
        for group, times in stage.groups((stage.profile.later if again else stage.profile.first)[kind]):
            before = alive.now
            for piece in group:
                alive.phase = "loss" if piece.unit == "" and piece.edge == "post_forward" else "forward" if kind == "forward" else "backward"
                holder.edge(piece.unit, piece.edge, last)
                alive.rise(holder.changed(piece.stretch.rise))
                alive.now = alive.now + holder.changed(piece.stretch.net)
            if times > 1:
                alive.now = alive.now + (times - 1) * (alive.now - before)
        if kind == "forward":
            alive.now = alive.now - casts[s]
        alive.now = alive.now - level(gradients=twice * p.width)
        if kind == "backward":
            holder.end_micro(last)
            if sends:
                alive.now, due = alive.now - due, left[s]  # what was sent meanwhile
            elif s in nearer:
                alive.now = alive.now - left[s]


def _shared(stages: list[Stage]) -> list[int]:
    """Elements of each stage's parameters that an earlier stage of the process has too."""
    seen: set[str] = set()
    out = []
    for stage in stages:
        ends = stage.profile.units.get("", {})
        out.append(sum(w.size for name, w in ends.items() if name in seen))
        seen |= set(ends)
    return out


# ---------------------------------------------------------------- operations


def operations(stages: list[Stage], micro: int, fresh: bool = False, first: bool = True) -> tuple[dict[tuple, float], dict[tuple, float]]:
    """(operations, transfers) of all micro-batches, as Traced.ops and Traced.transfers, of what the pieces do themselves.
    fresh: each makes its gradients anew. first: one of them is the first."""
    ops: dict[tuple, float] = {}
    sent: dict[tuple, float] = {}
    for stage in stages:
        new = micro if fresh else int(first)  # micro-batches that add to no gradients
        for runs, many in ((stage.profile.first, new), (stage.profile.later, micro - new)):
            for pieces in runs.values() if many else ():
                for piece, times in stage.totals(pieces):
                    for total, counted in ((ops, piece.stretch.ops), (sent, piece.stretch.transfers)):
                        for key, count in counted.items():
                            total[key] = total.get(key, 0) + count * times * many
    return ops, sent


def holding(p: Process) -> dict[tuple, float]:
    """The copies that FSDP2 and DDP make, as Traced.ops."""
    layout, out = p.recipe.layout, {}

    def add(name: str, size: int, phase: str, nbytes: float, count: float) -> None:
        key = ("micro", "memory", name, "bf16" if size == 2 else "fp32", phase, 0.0, nbytes, ())
        if nbytes:
            out[key] = out.get(key, 0) + count

    if layout.shard > 1:
        computed, reduced = widths(layout, p.width)
        scatters = p.micro if layout.pipeline > 1 else 1
        for stage in p.stages:
            turns = {piece.unit for pieces in stage.profile.later.values() for piece in pieces if piece.edge == "pre_backward"}
            for unit, weights, times in stage.units():
                for expert in (False, True):
                    chosen = [w for w in weights.values() if w.expert == expert]
                    k = sharded_over(layout, expert)
                    full, elements = sum(padded(w, k) for w in chosen), sum(w.size for w in chosen)
                    still = [w for w in stage.profile.frozen.get(unit, {}).values() if w.expert == expert and not w.buffer]
                    cast = sum(padded(w, k) * (w.computed + w.width) for w in still if w.computed != w.width)
                    cast += full * (computed + p.width) if computed != p.width else 0
                    for phase in ("forward", "backward") if layout.reshard and (weights or unit in turns) else ("forward",):
                        add("split_with_sizes_copy", computed, phase, 2 * (full * computed + gathered(still, k)), times * p.micro)
                        add("foreach_copy", computed, phase, cast / k, times * p.micro)
                        for w in turned(chosen, k):
                            add("cat", computed, phase, 3 * w.size * computed, times * p.micro)
                    added = p.micro > 1 and layout.pipeline == 1 and reduced != computed  # gradients in the type that they are summed in
                    if added:
                        add("to_copy", computed, "backward", elements * (computed + reduced), times)
                        add("add", reduced, "backward", elements * (2 * reduced + computed), times * (p.micro - 1))
                    if scatters > 1:
                        add("add", reduced, "backward", 3 * full / k * p.width, times * (scatters - 1))
                    for w in turned(chosen, k):
                        add("cat", computed, "backward", 2 * w.size * (reduced if added else computed), times * scatters)
                    if full:
                        add("chunk_cat", reduced if added else computed, "backward", elements * (reduced if added else computed) + full * reduced, times * scatters)
    elif p.replicated:
        own = p.own
        half = layout.compress in ("bf16", "fp16") and p.width == 4
        add("copy", p.width, "backward", (5.5 if half else 6) * own, 1)
        if half:
            add("to_copy", p.width, "backward", 1.5 * own, 1)
        add("div", p.width, "backward", 2 * own, 1)
    return out


def optimizer(p: Process) -> list[Op]:
    """Norm, clipping and step, of the parameters that this process steps: the profile's, by elements and number of tensors; and the copies
    of sums after the backward pass."""
    layout = p.recipe.layout
    profile = p.stages[0].profile
    traced = [w for weights in profile.units.values() for w in weights.values()]
    own = p.own
    scale = own / sum(w.size * w.computed for w in traced)
    tensors = sum(times for _, times in p.elements) / len(traced)
    replicas = sizes(layout, p.n)["replicate"]
    share = replicas if layout.shard_optimizer else 1
    dtype = "fp32" if p.width == 4 else "bf16"
    out = []
    for (_, kind, name, _, _, flops, moved, shape), count in profile.optimizer.ops.items():
        if name in ("cat", "copy"):
            continue
        if name.startswith(("fused", "foreach", "stack")):
            out.append(Op(kind, name, dtype, "optimizer", flops, moved * scale / (share if name.startswith("fused") else 1), shape, count))
        elif name == "mul" and moved > SCALAR:
            out.append(Op(kind, name, dtype, "optimizer", flops, moved * scale / tensors, shape, count * tensors / share))
        elif moved <= SCALAR:
            out.append(Op(kind, name, dtype, "optimizer", flops, moved, shape, count))
        else:
            out.append(Op(kind, name, dtype, "optimizer", flops, moved * scale / tensors, shape, count * tensors))
    partial = p.width * sum(w.size * times for stage in p.stages for _, weights, times in stage.units() for w in weights.values() if w.partial)
    local = layout.local_sgd or layout.diloco
    every = local.every if local else 1
    copied = [partial if layout.shard == 1 else 0, *_summed(p), own if share > 1 else 0, own / every if local and replicas > 1 else 0]
    copied += [own, own] * (layout.replicate == "parameter_server" and replicas > 1)
    for nbytes in copied:
        if nbytes:
            out += [Op("memory", "cat", dtype, "optimizer", 0.0, 2 * nbytes), Op("memory", "copy", dtype, "optimizer", 0.0, 3 * nbytes)]
    if layout.replicate == "parameter_server":
        out.append(Op("memory", "add", dtype, "optimizer", 0.0, 3 * own, (), replicas - 1))
    if local and replicas > 1:  # the mean of the weights; or the change of the weights, an outer step, and back
        out.append(Op("memory", "div", dtype, "optimizer", 0.0, (19 if layout.diloco else 2) * own / every))
    for nbytes, sends in tied(p):
        out.append(Op("memory", "copy", dtype, "optimizer", 0.0, 3 * nbytes))
        if p.rank == 0:
            out.append(Op("memory", "add", dtype, "optimizer", 0.0, 3 * nbytes, (), sends))
    for (_, kind, name, of, _, flops, moved, shape), count in profile.prepare.items():
        out.append(Op(kind, name, of, "optimizer", flops, moved, shape, count * p.given.parts))
    return out
