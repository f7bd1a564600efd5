"""Steps timed in a process: warm-up apart, every step's time kept, and taken again where others used the processors.

A step's time goes by five names that add up to it, from the clocks of every process's main thread. computing: on a processor (data
excepted), the copies that collectives need included. communication: blocked, of the process that is blocked least in this step: it comes
last, so nobody keeps it waiting. waiting: blocked longer than that: for a process that comes later (where several meeting points have
different last processes, some of this counts as communication). data: making the batch, or waiting for it. other: ready to run while other
programs had the processor (Linux tells it), and what one process alone is blocked.

Collectives by name are profiled in steps of their own, after the timed ones: from when gloo's own threads begin with one until it is done,
the wait for the last process included. Some may be hidden behind computing.

On a GPU, which works by itself while the thread that the clocks see goes on, computing is the time in which any kernel but NCCL's runs,
communication that of NCCL's alone (the wait for others in it), of profiled steps; other is the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus import models
from gradus.measure.memory import Timeline
from gradus.measure.profile import endless
from gradus.parallel.traffic import collective
from gradus.parallel.world import World
from gradus.plan import batches
from gradus.proof.measured import alive, memory_of_step
from gradus.recipe.schema import Layout, Recipe
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.metrics import TrafficCount
from gradus.train.session import open_session

PARTS = ("computing", "communication", "waiting", "data", "other")
PROFILED = 3  # steps whose collectives are timed by name
OTHERS = 0.1  # share of a processor that others may take while steps are timed
RETAKES = 2  # how often steps are timed again because of others
SHORT = 0.5  # s below which the system's ticks are too coarse to tell


@dataclasses.dataclass(frozen=True)
class Window:
    """What one process times in one round. root: the process that started the study. collectives: also profile them by name. retakes: how
    often steps are timed again because of others. anew: of training, the timed steps begin with the first samples again, however often.
    seconds: go on until these have passed too, but not beyond ten times the steps or six times the seconds. round: from 1."""

    steps: int
    warm_up: int
    root: int
    collectives: bool = False
    retakes: int = RETAKES
    anew: bool = False
    seconds: float = 0.0
    round: int = 1

    def enough(self, steps: int, elapsed: float) -> bool:
        if not self.seconds:
            return steps >= self.steps
        done = steps >= self.steps and elapsed >= self.seconds
        return done or steps >= 10 * self.steps or (steps > 0 and elapsed >= 6 * self.seconds)


@dataclasses.dataclass
class Subject:
    """What is timed. step(batch()) is one step and returns its loss, or None; samples: seen since the start; memory: bytes at the peak of one
    more step, by name; ready: all processes of the configuration begin together; finish: adds to what was timed (values, planned, raw,
    facts)."""

    batch: Callable[[], Any]
    step: Callable[[Any], Any]
    samples: Callable[[], int]
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    memory: Callable[[], dict[str, int]] | None = None
    ready: Callable[[], Any] = lambda: None
    agree: Callable[[bool], bool] = lambda disturbed: disturbed  # on what one process found
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Timed, Window], None] = lambda timed, window: None

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclasses.dataclass
class Timed:
    """What one process found in one round. As JSON: dataclasses.asdict, and Timed(**record)."""

    warm_up: list[float]  # seconds of each step before the timed ones; the first is the first call, with compilation
    elapsed: float  # seconds of all timed steps
    spent: list[list[float]]  # (steps, 4) seconds of each step: data, computing, ready but not running, blocked
    samples: int  # of the global batches
    losses: list[float]  # of the first steps that were timed, where there are any
    memory: dict[str, int]  # bytes at the highest: process; and of one more step: allocated, and by component
    others: float | None  # share of a processor that others took; None: not known
    retaken: int  # times that the steps were timed before these, and given up because of others
    sent: dict[str, list[float]] | None = None  # collective → calls and bytes that this process sends, a step
    collectives: dict[str, list[float]] | None = None  # the same → calls and seconds, a step
    kernels: list[float] | None = None  # of a GPU: seconds a step that it computed, and that it did nothing but communicate
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # further figures: name → value, unit
    planned: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # the same, of what was foreseen of them
    raw: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # name → one of each step


def time_it(subject: Subject, window: Window) -> Timed:
    """Times a subject's steps. Collective where several processes share it."""
    warm_up, losses = [], []
    for _ in range(window.warm_up):
        began = time.perf_counter()
        subject.step(subject.batch())
        subject.synchronise()
        warm_up.append(time.perf_counter() - began)
    for attempt in range(window.retakes + 1):
        subject.ready()
        before, others, marks, taken = subject.samples(), Others(window.root), [_now()], []
        while not window.enough(len(taken), time.perf_counter() - marks[0][0]):
            batch = subject.batch()
            marks.append(_now())
            taken.append(subject.step(batch))
            marks.append(_now())
        subject.synchronise()
        elapsed, share = time.perf_counter() - marks[0][0], others.share()
        retaken, losses = attempt, losses or taken  # of the same steps, whether others disturbed them or not
        if not subject.agree(share is not None and share > OTHERS):
            break
    samples, process = subject.samples() - before, peak_memory(subject.device)
    wall, processor, ready = np.moveaxis(np.diff(np.array(marks), axis=0).reshape(-1, 2, 3), 2, 0)  # each (steps, 2: data, the rest)
    blocked = np.maximum(0.0, wall - processor - ready)  # the clocks differ by microseconds
    spent = np.stack([wall[:, 0], processor[:, 1], ready[:, 1], blocked[:, 1]], axis=1).tolist()
    found = [float(loss) for loss in losses if loss is not None]
    memory = {"process" if subject.device.type == "cpu" else "allocated": process}
    facts = {"device": subject.device.type, "threads": torch.get_num_threads(), **subject.facts}
    return Timed(warm_up, elapsed, spent, samples, found, memory, share, retaken, facts=facts)


def peak_of_one_more(subject: Subject) -> dict[str, int]:
    """Bytes of tensors at the peak of one more step of the subject, what was there before it included."""
    if subject.memory is not None:
        return subject.memory()
    batch = subject.batch()
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(subject.device)
        subject.step(batch)
        torch.cuda.synchronize(subject.device)
        return {"allocated": torch.cuda.max_memory_allocated(subject.device)}
    before = sum(alive([]).values())
    with Timeline() as timeline:
        subject.step(batch)
    return {"allocated": before + max((peak for *_, peak in timeline.phases()), default=0)}


# ------------------------------------------------------------ the training of a recipe


def train_steps(recipe: Recipe, window: Window, here: World) -> Timed:
    """Steps of the recipe's training, in one of `here.size` processes that all call this. Collective. Writes nothing."""
    session = open_session(recipe, None, here)
    parallel, traffic = session.lay_out(), TrafficCount()
    trainer = Trainer(session, parallel, Path(os.devnull), [traffic])
    source, (more, every) = endless(trainer.loader), whole_rounds(PROFILED, recipe.layout)

    def memory() -> dict[str, int]:
        largest = batches.micro_batches(session.recipe, here.size, task=session.task)
        with memory_of_step(trainer, largest) as found:
            trainer.step(largest)
        return found

    def ready() -> None:
        nonlocal source
        parallel.all_reduce([0])
        if window.anew:
            source = endless(trainer.loader)

    subject = Subject(
        batch=lambda: next(source), step=lambda step: trainer.take(step).loss, samples=lambda: trainer.progress.samples, device=session.device,
        memory=memory, ready=ready, agree=lambda disturbed: parallel.all_reduce([int(disturbed)])[0] > 0,
        facts={
            "precision": recipe.layout.precision, "parameters": models.count(session.recipe.model)["total"], "loss_unit": session.task.loss_unit,
        },
    )  # fmt: skip
    try:
        timed, counted = time_it(subject, window), traffic.counted
        cuda = session.device.type == "cuda"
        if window.collectives and (parallel.several or cuda):
            kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
            with torch.profiler.profile(activities=[kind]) as found:
                for _ in range(more):
                    trainer.take(next(source))
                subject.synchronise()
            events = [(e.name, e.time_range.start, e.time_range.end) for e in found.events()]
            if cuda:
                timed.kernels = by_kernel(events, more)
            else:
                timed.collectives = by_collective(events, more)
        timed.memory |= peak_of_one_more(subject)
    finally:
        trainer.loader.close()
    timed.sent = {name: [c.calls / every, c.sent / every] for name, c in counted.found.items()} if counted else None
    return timed


def load_steps(recipe: Recipe, window: Window, here: World) -> Timed:
    """Steps of the recipe's loader with nobody to train, what was fetched beforehand left out."""
    session = open_session(recipe, None, here)
    data, seen = session.recipe.data, [0]
    with contextlib.closing(session.loader(data)) as loader:
        source = endless(loader)

        def step(batch: Any) -> None:
            seen[0] += batch.samples

        for _ in range(1 + data.workers * data.prefetch):
            next(source)
        return time_it(Subject(lambda: next(source), step, lambda: seen[0]), window)


def whole_rounds(steps: int, layout: Layout) -> tuple[int, int]:
    """(at least `steps`, and a multiple of what follows; steps from one synchronisation of local updates to the next)."""
    local = layout.local_sgd or layout.diloco
    every = local.every if local else 1
    return -(-steps // every) * every, every


def by_collective(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, list[float]]:
    """[calls, seconds] a step from a profiler's events (name, start and end in µs).

    A collective goes by the name that it was called by: gloo does a reduce_scatter by an all_reduce. What was called first is done first, so
    the calls' order tells which is which.
    """
    called = [name for name, *_ in sorted(events, key=lambda e: e[1]) if name.startswith("c10d::")]
    names = (collective(name.removeprefix("c10d::")) for name in called)
    scattered = [name for name in names if name in ("all_reduce", "reduce_scatter")]
    done = sorted((start, end, name.removeprefix("gloo:")) for name, start, end in events if name.startswith("gloo:"))
    if len(scattered) == sum(name == "all_reduce" for *_, name in done):
        order = iter(scattered)
        done = [(start, end, next(order) if name == "all_reduce" else name) for start, end, name in done]
    times: dict[str, list[float]] = {}
    for begin, end, name in done:
        times.setdefault(name, []).append((end - begin) / 1e6)
    return {name: [len(t) / steps, sum(t) / steps] for name, t in sorted(times.items())}


def by_kernel(events: Sequence[tuple[str, float, float]], steps: int) -> list[float]:
    """[computing, communicating alone] seconds a step of a GPU, from its kernels (name, start and end in µs), which may overlap."""
    own = covered((start, end) for name, start, end in events if not name.startswith("nccl"))
    every = covered((start, end) for _, start, end in events)
    return [own / steps / 1e6, (every - own) / steps / 1e6]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the line these intervals cover."""
    total, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# ------------------------------------------------------------ clocks


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock; of this thread on a processor; of this thread ready to run while others were there."""
    ready = 0.0
    with contextlib.suppress(OSError):  # Linux: nanoseconds on a processor, and on its run queue
        ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), ready


class Others:
    """The processors that this process may use, since now: what was computed there that is not of `root` and the processes below it."""

    def __init__(self, root: int):
        self.root, self.began = root, time.perf_counter()
        self.before = self._seconds()

    def _seconds(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return (_busy() - sum(_own(self.root))) / os.sysconf("SC_CLK_TCK")
        return None

    def share(self) -> float | None:
        """Of one processor's time. None where the system does not tell, or too little time has passed."""
        elapsed, now = time.perf_counter() - self.began, self._seconds()
        if elapsed < SHORT or now is None or self.before is None:
            return None
        return max(0.0, now - self.before) / elapsed


def _busy() -> int:
    """Ticks of all that the processors of this process have done: /proc/stat's user, nice, system, irq, softirq, steal."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    own = {f"cpu{n}" for n in os.sched_getaffinity(0)}  # Linux, as the file is
    return sum(int(words[i]) for words in lines if words[0] in own for i in (1, 2, 3, 6, 7, 8))


def _own(root: int) -> Iterator[int]:
    """Ticks of a process, and of each that was started below it."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(folder.name))
                ticks[int(folder.name)] = sum(map(int, words[11:15]))  # user, system; of children that have ended too
    below = [root]
    while below:
        at = below.pop()
        yield ticks.get(at, 0)
        below += children.get(at, [])
