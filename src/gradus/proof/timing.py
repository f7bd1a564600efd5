"""Steps timed in a process: warm-up apart, every step's time kept, and timed again where other programs used the
processors.

A step's time goes by five names that add up to it, from the clocks of every process's main thread:
- computing: on a processor (data excepted), the copies that collectives need included.
- communication: blocked, of the process that is blocked least in this step: it comes last, so nobody keeps it waiting.
- waiting: blocked longer than that, for a process that comes later. Where several meeting points have different last
  processes, some of this counts as communication.
- data: making the batch, or waiting for it.
- other: ready to run while other programs had the processor (Linux tells it), and what one process alone is blocked.

Collectives by name are profiled in steps of their own, after the timed ones: from when gloo's own threads begin with
one until it is done, the wait for the last process included. Some may be hidden behind computing.

A GPU works by itself while the thread that the clocks see goes on. There, computing is the time in which any kernel
but NCCL's runs, communication that of NCCL's alone (the wait for others in it), of profiled steps; other is the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus import limits
from gradus.proof.step_memory import allocated_storages, peak_memory_of
from gradus.train.clock import peak_memory

PARTS = ("computing", "communication", "waiting", "data", "other")
SPENT = ("data", "computing", "ready", "blocked")  # columns of Timed.spent
BUSY = 0.1  # share of a processor that other programs may take while steps are timed
TAKEN = 0.25  # share of a processor that they may take of those that this program's threads need
REPEATS_IF_BUSY = 2  # how often steps are timed again because of other programs
SHORT = 0.5  # s below which the system's ticks are too coarse to tell


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps that one process times in one round. root: the process that started the study. collectives: also
    profile them by name. repeats_if_busy: how often steps are timed again because of other programs. restart_data: of
    training, the timed steps begin with the first samples again, however often. seconds: go on until these have passed
    too, but not beyond ten times the steps or six times the seconds. round: from 1."""

    steps: int
    warm_up: int
    root: int
    collectives: bool = False
    repeats_if_busy: int = REPEATS_IF_BUSY
    restart_data: bool = False
    seconds: float = 0.0
    round: int = 1

    def enough(self, steps: int, elapsed: float) -> bool:
        if not self.seconds:
            return steps >= self.steps
        done = steps >= self.steps and elapsed >= self.seconds
        return done or steps >= 10 * self.steps or (steps > 0 and elapsed >= 6 * self.seconds)


@dataclasses.dataclass
class Subject:
    """The thing that is timed. step(batch()) is one step and returns its loss, or None. samples: seen since the start.
    memory: bytes at the peak of one more step, by name. ready: all processes of the configuration begin together.
    agree: the verdict of all on what one process found. finish: adds to what was timed (values, planned, raw,
    facts)."""

    batch: Callable[[], Any]
    step: Callable[[Any], Any]
    samples: Callable[[], int]
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    memory: Callable[[], dict[str, int]] | None = None
    ready: Callable[[], Any] = lambda: None
    agree: Callable[[bool], bool] = lambda busy: busy
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Timed, Window], None] = lambda timed, window: None

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclasses.dataclass
class Timed:
    """The measurement of one process in one round. As JSON: dataclasses.asdict, and Timed(**record)."""

    warm_up: list[float]  # seconds of each step before the timed ones; the first is with compilation
    elapsed: float  # seconds of all timed steps
    spent: list[list[float]]  # (steps, 4) seconds of each step by SPENT; ready: but not running
    samples: int  # of the global batches
    losses: list[float]  # of the first steps that were timed, where there are any
    memory: dict[str, int]  # bytes at the highest: process; and of one more step: allocated, and by component
    others: float | None  # share of a processor that others took; None: not known
    retaken: int  # times that the steps were timed before these, and given up because of other programs
    sent: dict[str, list[float]] | None = None  # collective → calls and bytes that this process sends, a step
    collectives: dict[str, list[float]] | None = None  # the same → calls and seconds, a step
    kernels: list[float] | None = None  # of a GPU: seconds a step computing, and only communicating
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # further figures: name → value, unit
    planned: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # the same, as predicted
    raw: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # name → one of each step

    def total(self, part: str) -> float:
        """Seconds of all steps by one of SPENT."""
        return sum(step[SPENT.index(part)] for step in self.spent)


def time_it(subject: Subject, window: Window) -> Timed:
    """Times a subject's steps. Collective where several processes share it."""
    warm_up, losses = [], []
    for _ in range(window.warm_up):
        began = time.perf_counter()
        subject.step(subject.batch())
        subject.synchronise()
        warm_up.append(time.perf_counter() - began)
    for retaken in range(window.repeats_if_busy + 1):  # noqa: B007
        subject.ready()
        samples_before, others, clocks, results = subject.samples(), OtherPrograms(window.root), [_clocks()], []
        while not window.enough(len(results), time.perf_counter() - clocks[0][0]):
            batch = subject.batch()
            clocks.append(_clocks())
            results.append(subject.step(batch))
            clocks.append(_clocks())
        subject.synchronise()
        elapsed, others_share = time.perf_counter() - clocks[0][0], others.share()
        losses = losses or results  # of the same steps, whether other programs disturbed them or not
        if not subject.agree(others_share is not None and others_share > BUSY):
            break
    samples, peak = subject.samples() - samples_before, peak_memory(subject.device)
    memory = {"process" if subject.device.type == "cpu" else "allocated": peak}
    facts = {"device": subject.device.type, "threads": torch.get_num_threads(), **subject.facts}
    losses = [float(loss) for loss in losses if loss is not None]
    spent = _spent(clocks)
    return Timed(warm_up, elapsed, spent, samples, losses, memory, others_share, retaken, facts=facts)


def _spent(clocks: list[tuple[float, float, float]]) -> list[list[float]]:
    """Seconds of each step by SPENT. clocks: before the first step, and of each step after its batch and at its end."""
    intervals = np.diff(np.array(clocks), axis=0).reshape(-1, 2, 3)  # (steps, 2: batch, step; 3 clocks)
    wall, processor, ready = np.moveaxis(intervals, 2, 0)
    blocked = np.maximum(0.0, wall - processor - ready)  # the clocks differ by microseconds
    return np.stack([wall[:, 0], processor[:, 1], ready[:, 1], blocked[:, 1]], axis=1).tolist()


def peak_of_one_more(subject: Subject) -> dict[str, int]:
    """Bytes of tensors at the peak of one more step of the subject, with those from before it."""
    if subject.memory is not None:
        return subject.memory()
    batch = subject.batch()
    with peak_memory_of(subject.device, allocated_storages([])) as memory:
        subject.step(batch)
    return {"allocated": memory["allocated"]}


# ------------------------------------------------------------ clocks


def _clocks() -> tuple[float, float, float]:
    """Seconds: of the clock; of this thread on a processor; of this thread ready to run while others had it."""
    ready = 0.0
    with contextlib.suppress(OSError):  # Linux: nanoseconds on a processor, and on its run queue
        ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), ready


class OtherPrograms:
    """The time since now that programs other than `root` (None: this process) and the processes below it took of the
    processors that this process may use."""

    def __init__(self, root: int | None = None):
        self.root, self.began = root or os.getpid(), time.perf_counter()
        self.before = self._seconds()

    def _seconds(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return (_busy_ticks() - sum(_ticks_below(self.root))) / os.sysconf("SC_CLK_TCK")
        return None

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def share(self) -> float | None:
        """Their share of one processor's time. None where the system does not tell, or too little time has passed."""
        elapsed, now = self.elapsed(), self._seconds()
        if elapsed < SHORT or now is None or self.before is None:
            return None
        return max(0.0, now - self.before) / elapsed


def taken(others: float | None, threads: int, processes: int = 1, key: str = "layout.threads=") -> str | None:
    """A line where other programs, at so many processors' time, leave too few of them for so many threads in each of
    these processes; with what helps: fewer, by that key."""
    cores = limits.cores()
    if others is None or threads * processes <= cores - others + TAKEN:
        return None
    fewer = max(1, round((cores - others) / processes))
    line = f"other programs use {min(others, cores):.1f} of the {cores} processors"
    line += f"; {fewer} thread{'s' * (fewer > 1)} ({key}{fewer}) may be faster" if fewer < threads else ""
    return line


def _busy_ticks() -> int:
    """Ticks of all that the processors of this process have done: /proc/stat's user, nice, system, irq, softirq,
    steal."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    own = {f"cpu{n}" for n in os.sched_getaffinity(0)}  # Linux, as the file is
    return sum(int(words[i]) for words in lines if words[0] in own for i in (1, 2, 3, 6, 7, 8))


def _ticks_below(root: int) -> Iterator[int]:
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
        process = below.pop()
        yield ticks.get(process, 0)
        below += children.get(process, [])
