"""The plan drawn: memory of a device by component, memory over a step, and what a pipeline's processes do when."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradus import pictures
from gradus.parallel import stages as pipelines
from gradus.pictures import Picture
from gradus.plan import engine
from gradus.plan import peak as peaks
from gradus.plan.process import Memory, Process, stages_of
from gradus.plan.profiles import INDEX
from gradus.plan.step import bubble_share
from gradus.plan.work import COMPONENTS
from gradus.recipe.schema import Layout
from gradus.text import size

if TYPE_CHECKING:
    from gradus.plan.request import Answer

WIDTH = 960  # pixels
MOMENTS = 600  # of a step that are drawn
ROWS, UNITS, ACTIONS = 16, 200, 200_000  # of a schedule: processes and time that are drawn, passes that are counted


def draw(answer: Answer) -> Picture:
    """All of it."""
    found, layout = answer.plan.processes, answer.recipe.layout
    memories = [engine.memory_of([p]) for p in found]
    fullest = max(found, key=lambda p: peaks.peak_of(p).bytes)
    shown = [part for part in COMPONENTS if any(memory.components[part] for memory in memories)]
    head = Picture(WIDTH, 0, "", "", "\n".join(" ".join(line.split()) for line in answer.headline[1:]))
    drawn = [head, device(answer, found, memories, shown), step(fullest, shown)]
    drawn += [schedule(layout, fullest.n_micro_batches)] if layout.pipeline > 1 else []
    return pictures.beside(drawn, answer.headline[0], "All of it is planned, nothing measured.", columns=1)


# ---------------------------------------------------------------- memory

KEPT = "kept free"
PASSES = {"forward": "forward pass", "backward": "backward pass", "loss": "loss", "optimizer": "optimizer's step"}


def parts(memory: Memory, shown: Sequence[str]) -> dict[str, int]:
    """Bytes that a device shows as taken, by component; what PyTorch's allocator and other programs take last."""
    more = {KEPT: memory.reserved - memory.allocated, "framework": memory.framework}
    return {part: memory.components[part] for part in shown} | {part: n for part, n in more.items() if n}


def device(answer: Answer, found: list[Process], memories: list[Memory], shown: Sequence[str]) -> Picture:
    """A bar for each process that was looked at."""
    several = answer.recipe.layout.pipeline > 1
    names = [f"process {p.rank}" if several else "each device" for p in found]
    most, capacity = max(m.device_total for m in memories), answer.value("memory/capacity")
    one, unit = pictures.bytes_in(most)
    values = {name: {part: n / one for part, n in parts(m, shown).items()} for name, m in zip(names, memories)}
    limit = ("usable", capacity / one) if capacity and capacity < 4 * most else None
    words = f"Memory by component at the peak: {size(most)} at most{f' of {size(capacity)}' if capacity else ''}."
    if several and len(found) < answer.recipe.layout.pipeline:
        words += f" Of {answer.recipe.layout.pipeline} processes of the pipeline those that may need most are drawn."
    if any(KEPT in bar for bar in values.values()):
        words += f" {KEPT.capitalize()}: what the caching allocator holds beyond the tensors."
    words += " Framework: what is no tensor."
    return pictures.bars(values, "memory per device", words, unit=unit, width=WIDTH, limit=limit)


def step(p: Process, shown: Sequence[str]) -> Picture:
    """Tensors of the process that needs most, from piece to piece of its step."""
    moments, layout, peak = peaks.over_step(p), p.layout, peaks.peak_of(p)
    every = -(-len(moments) // MOMENTS)
    groups = (moments[i : i + every] for i in range(0, len(moments), every))
    drawn = [max(of, key=lambda m: m.of.sum()) for of in groups]
    one, unit = pictures.bytes_in(peak.bytes)
    series = {part: [m.of[INDEX[part]] / one for m in drawn] for part in shown}
    title = f"tensors over a step{f' of process {p.rank}' if layout.pipeline > 1 else ''}"
    axis = "pieces of the step (a block's forward or backward pass is a few), in their order; they take no equal time"
    fullest = PASSES.get(peak.at, "start of the step")
    words = f"Tensors over a step: the peak, {size(peak.bytes)}, is in the {fullest}."
    looked, micro = peaks.distinct(layout, p.n_micro_batches), p.n_micro_batches
    if looked < micro:
        words += f" The first {looked} of {micro:,} micro-batches are drawn: the others repeat them."
    if every > 1:
        words += f" Of every {every} moments the fullest is drawn."
    at, spans = [m.at for m in drawn], _phases(moments)
    return pictures.area(series, at, title, words, x=axis, unit=unit, spans=spans, width=WIDTH)


def _phases(moments: list[peaks.Moment]) -> list[tuple[float, float, str]]:
    found = [(phase, next(of).at) for phase, of in itertools.groupby(moments, lambda m: m.phase)]
    return [(begin, end, phase) for (phase, begin), (_, end) in itertools.pairwise(found) if phase]


# ---------------------------------------------------------------- the schedule


@dataclasses.dataclass(frozen=True)
class Action:
    """A pass of a micro-batch over a stage; start, stop: in forward passes of a stage."""

    kind: str  # forward, backward, weights
    stage: int
    micro_batch: int
    start: float
    stop: float


def timed(layout: Layout, micro: int) -> list[list[Action]]:
    """Of each process of the pipeline its passes in its schedule's order, each as early as what it waits for allows:
    the stage before (forward), behind (backward), and the process's own last pass. A backward pass takes as long as two
    forward ones or, split into inputs and weights, each part as long as one; sending takes no time."""
    orders = []
    for rank in range(layout.pipeline):
        own = stages_of(rank, pipelines.ranks(layout))
        orders.append([(kind, own[s], i) for kind, s, i in peaks.actions(layout, micro, rank)])
    split = layout.schedule == "zero_bubble"
    lengths = {"forward": 1.0, "backward": 1.0 if split else 2.0, "weights": 1.0}
    last = layout.pipeline * layout.stages_per_process - 1
    ended: dict[tuple[str, int, int], float] = {}
    done: list[list[Action]] = [[] for _ in orders]
    waiting = True
    while waiting:
        waiting = False
        for order, own in zip(orders, done):
            while len(own) < len(order):
                kind, stage, i = order[len(own)]
                before = stage - 1 if kind == "forward" else stage + 1
                needs = (kind, before, i) if kind != "weights" and 0 <= before <= last else None
                if needs and needs not in ended:
                    break
                start = max(own[-1].stop if own else 0.0, ended[needs] if needs else 0.0)
                own.append(Action(kind, stage, i, start, start + lengths[kind]))
                ended[kind, stage, i] = own[-1].stop
                waiting = True
    assert all(len(own) == len(order) for own, order in zip(done, orders)), "a schedule that waits for itself"
    return done


def idle(done: list[list[Action]]) -> float:
    """Idle time by the time of the work, as `step.bubble_share`."""
    end = max(own[-1].stop for own in done)
    busy = sum(action.stop - action.start for own in done for action in own)
    return (len(done) * end - busy) / busy


def schedule(layout: Layout, micro: int) -> Picture:
    """micro: micro-batches of a step. Large ones are cut, and the description says so."""
    p, virtual, counted = layout.pipeline, layout.stages_per_process, micro
    while 3 * p * virtual * counted > ACTIONS and pipelines.needed(layout, counted // 2) < counted:
        counted = pipelines.needed(layout, counted // 2)
    done = timed(layout, counted)
    end = max(own[-1].stop for own in done)
    ranks = list(range(p)) if p <= ROWS else [*range(ROWS // 2), *range(p - ROWS // 2, p)]
    rows = {f"process {rank}": [_box(a, layout) for a in done[rank] if a.start < UNITS] for rank in ranks}
    title = f"the pipeline's schedule: {layout.schedule}, {p} processes, {counted:,} micro-batches"
    share, assumed = idle(done), bubble_share(layout.schedule, p, virtual, counted)
    backward = "and so does each half of a backward pass" if layout.schedule == "zero_bubble" else "a backward pass two"
    busy = sum(a.stop - a.start for a in done[0])
    words = [
        "The schedule in the order in which training runs it; the numbers are micro-batches. A forward pass of a stage "
        f"takes one unit of time, {backward}, sending none. A step takes {end:,.0f}, of which a process works "
        f"{busy:,.0f} and idles {end - busy:,.0f}: {share:.1%} of the work. The plan takes {assumed:.1%}."
    ]
    if counted < micro:
        words.append(f"Counted for {counted:,} of {micro:,} micro-batches.")
    if len(ranks) < p:
        words.append(f"The first and the last {ROWS // 2} of {p:,} processes are drawn.")
    if end > UNITS:
        words.append(f"The first {UNITS} of {end:,.0f} units are drawn.")
    return pictures.gantt(rows, title, " ".join(words), unit="forward passes of a stage", width=WIDTH)


def _box(a: Action, layout: Layout) -> tuple[float, float, str, str]:
    """As `pictures.gantt` takes it; of two stages of a process each has its colours."""
    rank_of = pipelines.ranks(layout)
    own = stages_of(rank_of[a.stage], rank_of)
    which = f", {('first', 'second')[own.index(a.stage)]} stage" if len(own) == 2 else ""
    return a.start, a.stop, a.kind + which, f"{a.micro_batch + 1}"
