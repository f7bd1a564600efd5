"""What a process has alive at most in one step: its events, merged, and one cumulative sum over them.

An event changes the bytes of one component. The pieces of the profiles are events that come in the order of the
pipeline's schedule; FSDP2 adds its own at the pieces' edges (`Fsdp`): it gathers a unit before its forward and its
backward pass, and reduces its gradients afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gradus.plan.compose import gradients_anew, summed_gradients
from gradus.plan.process import Process, Unit, bytes_per_weight, fsdp_widths, reduces_each, stages_of
from gradus.plan.profiles import INDEX, NAMES, ROW, MiB, N, Units, pool
from gradus.plan.stage import Run, Stage
from gradus.recipe.schema import Layout

Event = tuple[int, str, float]  # before which piece, component, bytes


def level(**components: float) -> np.ndarray:
    """(components and pools): bytes, a tensor each."""
    return _rows([(0, name, value) for name, value in components.items()]).sum(0)


def _rows(events: list[Event]) -> np.ndarray:
    """(events, components and pools)."""
    rows = np.zeros((len(events), ROW))
    for row, (_, name, value) in zip(rows, events):
        which, taken = pool(abs(value))
        row[INDEX[name]] = value
        row[N + which] = math.copysign(taken, value)
    return rows


@dataclasses.dataclass(frozen=True)
class Peak:
    """components: bytes of each when all together are most. pools: of each of the allocator's pools, and gradients,
    when they are most by themselves. at: the phase of the peak."""

    components: np.ndarray
    pools: np.ndarray
    gradients: float
    at: str

    @property
    def bytes(self) -> int:
        return round(self.components.sum())

    @property
    def reserved(self) -> int:
        """What PyTorch's caching allocator has taken, if free blocks of a pool are always used again."""
        small, middle, large = (float(x) for x in self.pools)
        return int(-(-small // (2 * MiB)) * 2 * MiB + -(-middle // (20 * MiB)) * 20 * MiB + large)


@dataclasses.dataclass(frozen=True)
class Span(Peak):
    """The peak of a part of the step, over what was there before it, and what it leaves. alive: (rows, components), of
    which those between two repetitions are -inf; phases, widths: of each row its phase, and how many rows it is."""

    net: np.ndarray
    alive: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, N)))
    phases: Sequence[str] = ()
    widths: Sequence[int] = ()

    @classmethod
    def of(cls, peak: np.ndarray, net: np.ndarray, phases: Sequence[str], widths: Sequence[int] = ()) -> Span:
        """Of rows of changes, in order. peak: how much more is alive while each takes place."""
        alive = peak + net.cumsum(0) - net
        i = int(alive[:, :N].sum(1).argmax())
        most = alive[:, INDEX["gradients"]].max()
        own = alive[:, :N], phases, widths or [1] * len(phases)
        return cls(alive[i, :N], alive[:, N:].max(0), float(most), phases[i], net.sum(0), *own)

    @classmethod
    def change(cls, by: np.ndarray) -> Span:
        """A change of level that has no peak of its own."""
        nothing = np.full(ROW, -math.inf)
        return cls(nothing[:N], nothing[N:], -math.inf, "", by)


def joined(spans: list[Span]) -> Peak:
    """Of the spans one after the other."""
    before = np.zeros((len(spans), ROW))
    before[1:] = np.cumsum([span.net for span in spans[:-1]], axis=0)
    components = before[:, :N] + [span.components for span in spans]
    pools = (before[:, N:] + [span.pools for span in spans]).max(0)
    gradients = (before[:, INDEX["gradients"]] + [span.gradients for span in spans]).max()
    i = int(components.sum(1).argmax())
    return Peak(components[i], pools, float(gradients), spans[i].at)


# ---------------------------------------------------------------- FSDP2


class Fsdp:
    """The events of FSDP2 in a step, from edge to edge.

    A unit is sharded, arriving (gathered, not yet copied out), or open. One gather's buffer is freed when the next one
    has been copied out, a reduction's input when the next one begins. The copies that this takes are counted by
    `compose.sharding_copies`, what is sent by `traffic.of_parameters`.
    """

    def __init__(self, layout: Layout, trained: Units, frozen: Units, on_host: bool):
        self.layout, self.width, self.on_host = layout, bytes_per_weight(layout), on_host
        self.computed, self.reduced = fsdp_widths(layout)
        self.known = {
            unit: Unit.of(layout, trained.get(unit, {}), frozen.get(unit, {})) for unit in {**trained, **frozen}
        }
        self.nothing = Unit.of(layout, {}, {})
        self.buffer = 0.0  # bytes of the last gather
        self.reducing = 0.0  # bytes of the last reduction's input
        self.order: list[str] = []  # of the forward passes
        self.open: set[str] = set()
        self.arriving: dict[str, float] = {}
        self.unreduced: set[str] = set()  # units whose gradients are there, in the type that they are summed in
        self.summed: set[str] = set()  # units whose sharded gradients are there

    def state(self) -> tuple:
        """All that changes from edge to edge."""
        units = frozenset(self.open), frozenset(self.unreduced), frozenset(self.summed)
        return self.buffer, self.reducing, tuple(self.order), tuple(self.arriving.items()), *units

    def restore(self, state: tuple) -> None:
        self.buffer, self.reducing, order, arriving, *units = state
        self.order, self.arriving = list(order), dict(arriving)
        self.open, self.unreduced, self.summed = map(set, units)

    def unit(self, unit: str) -> Unit:
        return self.known.get(unit.partition("@")[0], self.nothing)

    def run(self, edges: list[tuple[str, str]], kind: str, last: bool) -> Iterator[Event]:
        """Of a pass of one micro-batch. last: whether gradients are reduced after it."""
        for i, (unit, edge) in enumerate(edges):
            yield from ((i, name, nbytes) for name, nbytes in self._edge(unit, edge, kind, last))
        if kind == "backward":
            yield from ((len(edges), name, nbytes) for name, nbytes in self._end(last))

    def _edge(self, unit: str, edge: str, kind: str, last: bool) -> Iterator[tuple[str, float]]:
        again = kind != "forward"  # experts, in a block that is computed again: they stay for their backward pass
        if edge == "pre_forward":
            yield from self._gather(unit)
            yield from self._copy_out(unit, forward=True)
        elif edge == "post_forward":
            if again or unit == "":
                yield from self._free_buffer()
            if not again:
                self.order.append(unit)
                if self.layout.reshard:
                    yield from self._reshard(unit)
        elif edge == "pre_backward":
            yield from self._gather(unit)
            yield from self._copy_out(unit, forward=False)
            at = self.order.index(unit) if unit in self.order else 0
            if at:  # the next one of the backward pass is on its way meanwhile
                yield from self._gather(self.order[at - 1])
        elif edge == "post_backward":
            yield from self._reduce(unit, last)

    def _gather(self, unit: str) -> Iterator[tuple[str, float]]:
        nbytes, ranks = self.unit(unit).gathered, self.unit(unit).ranks
        if unit in self.open or unit in self.arriving or not nbytes:
            return
        self.arriving[unit] = nbytes
        if self.computed == self.width:
            yield "transient", nbytes
        else:  # its own part is cast first
            yield "transient", nbytes + nbytes / ranks
            yield "transient", -nbytes / ranks

    def _copy_out(self, unit: str, forward: bool) -> Iterator[tuple[str, float]]:
        if unit not in self.arriving:
            return
        nbytes = self.arriving.pop(unit)
        self.open.add(unit)
        yield "gathered", nbytes
        moved = sum(w.size for w in self.unit(unit).moved) * self.computed
        yield "transient", moved
        yield "transient", -moved
        if forward:
            yield from self._free_buffer()
            self.buffer = nbytes
        else:
            yield "transient", -nbytes

    def _free_buffer(self) -> Iterator[tuple[str, float]]:
        yield "transient", -self.buffer
        self.buffer = 0.0

    def _reshard(self, unit: str) -> Iterator[tuple[str, float]]:
        if unit in self.open:
            self.open.discard(unit)
            yield "gathered", -self.unit(unit).gathered

    def _reduce(self, unit: str, last: bool) -> Iterator[tuple[str, float]]:
        """The unit's backward pass has ended."""
        yield from self._reshard(unit)
        own = self.unit(unit)
        if self.reduced != self.computed and (not last or unit in self.unreduced):
            if unit not in self.unreduced:
                yield "gradients", own.elements * self.reduced
            yield "gradients", -own.elements * self.computed
            self.unreduced.add(unit)
        if not last:
            return
        yield "transient", -self.reducing
        self.reducing = float(own.full * self.reduced)
        if not own.full:
            return
        width = self.reduced if unit in self.unreduced else self.computed
        moved = float(sum(w.size for w in own.moved[-1:]) * width)  # its gradient is there still when the copy is
        part = own.full / own.ranks
        yield "transient", self.reducing + moved
        yield "transient", -moved
        yield "gradients", -own.elements * width
        yield "gradients", part * self.reduced
        if self.reduced != self.width:
            yield "gradients", part * self.width
            yield "gradients", -part * self.reduced
        if unit in self.summed or self.on_host:
            yield "gradients", -part * self.width
        self.summed.add(unit)

    def _end(self, last: bool) -> Iterator[tuple[str, float]]:
        """The backward pass has ended."""
        for unit in dict.fromkeys(unit for unit in reversed(self.order) if unit in self.open):
            yield from self._reduce(unit, last)
        yield from (("transient", -nbytes) for nbytes in self.arriving.values())  # of what has no backward pass
        yield "transient", -self.reducing
        self.order, self.arriving, self.reducing = [], {}, 0.0


def in_buckets(rows: np.ndarray) -> np.ndarray:
    """With DDP, whose gradients are views of its buckets, which are there all the time."""
    rows = rows.copy()
    rows[:, INDEX["transient"]] += rows[:, INDEX["gradients"]]
    rows[:, INDEX["gradients"]] = 0
    return rows


# ---------------------------------------------------------------- the order of a step


def actions(layout: Layout, micro: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """(pass, stage of the process, micro-batch) in the order in which a process of the pipeline runs them."""
    if layout.pipeline == 1 or layout.schedule in ("gpipe", "1f1b"):
        ahead = 1 if layout.pipeline == 1 else micro if layout.schedule == "gpipe" else layout.pipeline - rank
        yield from (("forward", 0, i) for i in range(min(micro, ahead)))
        for i in range(micro):
            yield "backward", 0, i
            if ahead + i < micro:
                yield "forward", 0, ahead + i
        return
    if layout.schedule == "interleaved":
        yield from interleaved(layout.pipeline, layout.stages_per_process, micro, rank)
        return
    from gradus.torch_private import schedule_of

    order = list(schedule_of(layout.schedule, layout.pipeline, layout.stages_per_process, micro, rank))
    own = sorted({stage for _, stage, _ in order})
    split = any(kind == "weights" for kind, _, _ in order)
    late = {(stage, i) for kind, stage, i in order if kind == "weights"}
    for kind, stage, i in order:
        yield kind, own.index(stage), i
        if split and kind == "backward" and (stage, i) not in late:
            yield "weights", own.index(stage), i


def interleaved(processes: int, stages: int, micro: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """As `actions`: rounds of as many micro-batches as there are processes, through one stage after the other
    (Narayanan et al. 2021, section 2.2). What torch's schedule says, without importing its compiler."""
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


# ---------------------------------------------------------------- the step


def peak_of(p: Process) -> Peak:
    """What a process has alive at most, and when."""
    return joined(_spans(p))


@dataclasses.dataclass(frozen=True)
class Moment:
    """of: bytes of each component. at: how many pieces came before; pieces take no equal time."""

    at: int
    phase: str
    of: np.ndarray


def over_step(p: Process) -> list[Moment]:
    """What a process has alive as the step goes on: of each piece that `peak_of` looks at its fullest moment, and at
    last what is left. Between two repetitions of a block memory changes evenly."""
    at, before, out = 0, np.zeros(ROW), []
    for span in _spans(p):
        for alive, phase, width in zip(span.alive, span.phases, span.widths):
            if np.isfinite(alive).all():
                out.append(Moment(at, phase, before[:N] + alive))
            at += width
        before = before + span.net
    return [*out, Moment(at, "optimizer", before[:N])]


def _spans(p: Process) -> list[Span]:
    start = _start(p)
    spans = [Span.of(start[None], start[None], [""]), *_passes(p)]
    if p.case.ddp and p.n_micro_batches > 1:  # what the earlier micro-batches' gradients were is in the buckets now
        spans.append(Span.change(-level(transient=p.param_bytes)))
    for nbytes, with_gradients in _flat_buffers(p):
        buffer = level(transient=nbytes) if with_gradients else level(transient=nbytes, gradients=-p.param_bytes)
        spans.append(Span.of(buffer[None], np.zeros((1, ROW)), ["optimizer"]))
    return spans


def distinct(layout: Layout, micro: int) -> int:
    """How many micro-batches are looked at: further ones repeat the same peak."""
    enough = {"1f1b": layout.pipeline + 2, "interleaved": 4 * layout.pipeline}.get(layout.schedule, micro)
    return min(micro, 3 if layout.pipeline == 1 else enough)


def _on_host(p: Process) -> bool:
    """Whether weights and the optimizer's state are kept in the host's memory."""
    return p.layout.offload and p.case.target == "cuda"


def _start(p: Process) -> np.ndarray:
    stages, first = p.stages, p.stages[0].profile
    buffers = p.n_micro_batches * sum(stage.profile.buffers for stage in stages)
    start = level(weights=p.frozen_bytes) + first.batch * p.case.batches.parts + buffers
    numbers = stages_of(p.rank, p.case.rank_of)
    for s, stage in zip(numbers, stages):  # from stage to stage of the process nothing is received
        if s + 1 in numbers:
            hidden = NAMES[int(stage.profile.buffers[:N].argmax())]
            start = start - p.n_micro_batches * level(**{hidden: 2 * stage.profile.sent["forward"]})
    if not _on_host(p):
        start = start + level(weights=p.param_bytes, optimizer=p.optimizer_bytes)
    return start + level(gradients=p.param_bytes) if p.case.ddp else start


def _flat_buffers(p: Process) -> Iterator[tuple[float, bool]]:
    """Bytes of what is put together for sending at a time, and whether the gradients are there then."""
    layout, own = p.layout, p.param_bytes
    replicas = p.case.shape["replicate"]
    bucket = max(layout.bucket_mb * MiB, p.width * p.largest)
    yield from ((min(bucket, summed), True) for summed in summed_gradients(p))
    if replicas > 1 and layout.replicate == "parameter_server":
        yield min(replicas, 3) * own, True  # the server's own, one that comes, and the one before
    if replicas > 1 and (layout.local_sgd or layout.diloco):
        yield min(bucket, own) + (own if layout.diloco else 0), False
    if replicas > 1 and layout.shard_optimizer:
        yield min(2 * p.width * p.stepped_elements, own), True


def _passes(p: Process) -> Iterator[Span]:
    """All micro-batches, forward and backward."""
    layout, stages = p.layout, p.stages
    one_by_one, micro, anew = layout.pipeline == 1, distinct(layout, p.n_micro_batches), gradients_anew(layout)
    # from here on micro-batches are as long as the last; idle ones too
    smaller = micro - 1 if one_by_one else p.case.batches.count - 1
    profile = stages[0].profile
    fsdp = Fsdp(layout, profile.units, profile.frozen, _on_host(p)) if layout.shard > 1 else None
    copies = [level(gathered=stage.autocast_copies()) for stage in stages]
    forgotten = [Span.change(-nbytes) for nbytes in copies]
    left = [Span.change(nbytes - stage.left_behind()) for stage, nbytes in zip(stages, copies)]
    shared = [Span.change(-level(gradients=nbytes * p.width)) for nbytes in _shared_with_earlier(stages)]
    order = list(actions(layout, micro, p.rank))
    split = any(kind == "weights" for kind, _, _ in order)
    numbers = stages_of(p.rank, p.case.rank_of)
    from_own = {s for s, number in enumerate(numbers) if number - 1 in numbers}  # what these send stays in the process
    sends = not one_by_one and layout.schedule in ("1f1b", "interleaved")  # the others keep what they send to the end
    in_flight = Span.change(np.zeros(ROW))
    done: set[tuple[str, int]] = set()
    known: dict[tuple, tuple[Span, Any]] = {}  # a pass is as another that began alike
    for kind, s, i in order:
        reduces = i == micro - 1 or reduces_each(layout)
        # all backward passes but the first add to gradients that are there; DDP's last one to its buckets always
        later = kind == "forward" or (not anew and ((kind, s) in done or (p.case.ddp and reduces)))
        is_tail = bool(p.tail) and i >= smaller
        key = kind, s, later, reduces, is_tail, fsdp and fsdp.state()
        if key not in known:
            run = (p.tail[s] if is_tail else stages[s]).run(kind, later)
            known[key] = _pass(run, kind, reduces, p.case.ddp, fsdp), fsdp and fsdp.state()
        span, after = known[key]
        yield span
        if fsdp:
            fsdp.restore(after)
        if kind == "forward":
            yield forgotten[s]
        if kind == ("weights" if split else "backward") and (kind, s) not in done:
            yield shared[s]
        if kind == "backward" and sends:
            yield in_flight  # what was sent meanwhile
            in_flight = left[s]
        elif kind == "backward" and s in from_own:
            yield left[s]
        done.add((kind, s))


def _pass(run: Run, kind: str, reduces: bool, replicated: bool, fsdp: Fsdp | None) -> Span:
    """One pass of a micro-batch over a stage. reduces: whether gradients are reduced."""
    usual = "forward" if kind == "forward" else "backward"
    phases = ["loss" if edge == ("", "post_forward") else usual for edge in run.edges]
    peak, net, times = run.peak, run.net, np.array(run.times)
    if replicated and not fsdp:
        peak, net = in_buckets(peak), in_buckets(net)
    if events := list(fsdp.run(run.edges, kind, reduces)) if fsdp else []:
        before, changes = [at for at, *_ in events], _rows(events)
        of_next = np.minimum(before, len(phases) - 1)
        phases = np.insert(phases, before, np.array(phases)[of_next])
        times = np.insert(times, before, np.where(np.less(before, len(times)), times[of_next], 1))
        peak, net = np.insert(peak, before, changes, 0), np.insert(net, before, changes, 0)
    return Span.of(*_repeated(peak, net, list(phases), times))


def _repeated(
    peak: np.ndarray, net: np.ndarray, phases: list[str], times: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str], list[int]]:
    """The rows with those that follow each other several times: the first and the last time, and between them one row
    for the others; at last how many rows each is."""
    at, peaks, nets, names, widths = 0, [], [], [], []
    for many, group in itertools.groupby(times):
        begin, at = at, at + len(list(group))
        p, n, own = peak[begin:at], net[begin:at], phases[begin:at]
        between = np.full((1, ROW), -math.inf), (many - 2) * n.sum(0, keepdims=True), own[:1]
        for part in [(p, n, own), between, (p, n, own)][: 3 if many > 1 else 1]:
            peaks.append(part[0])
            nets.append(part[1])
            names += part[2]
            widths += [(many - 2) * len(p)] if part is between else [1] * len(p)
    return np.concatenate(peaks), np.concatenate(nets), names, widths


def _shared_with_earlier(stages: Iterable[Stage]) -> Iterator[int]:
    """Elements of each stage's parameters that an earlier stage of the process has too."""
    seen: set[str] = set()
    for stage in stages:
        yield sum(w.size for name, w in stage.ends.items() if name in seen)
        seen |= set(stage.ends)
