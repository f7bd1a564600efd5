"""Replicas on this machine (layout.elastic): one that dies is started again while the others go on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from gradus.errors import FAULT
from gradus.parallel import status
from gradus.parallel.processes import Programs
from gradus.text import say

LONGEST = 30.0  # seconds before a replica is started again, which begin with 1 and double


class Replica:
    """One of them, as the launcher sees it: its processes end and start together."""

    def __init__(self, number: int, ranks: range):
        self.number, self.ranks = number, ranks
        self.deaths = 0  # in a row, without a step
        self.again: float | None = None  # when it is started again


def watch(
    programs: Programs, start: Callable[[int], Popen], folder: Path, store: Any, most: int, parts: int = 1
) -> None:  # fmt: skip
    """Start dead replicas again, until one of them ends well, by a user's mistake or in divergence, or a signal asks
    for an end, or none is left that has the weights. most: layout.max_deaths. store: of the quorum, told of each death.
    parts: processes of a replica.
    """
    from gradus.parallel.quorum import place_of, tell_gone

    processes = programs.processes
    replicas = [Replica(i, range(i * parts, (i + 1) * parts)) for i in range(len(processes) // parts)]
    while not programs.signals:
        for r in replicas:
            codes = {rank: code for rank in r.ranks if (code := processes[rank].poll()) is not None}
            if not codes:
                continue
            if 2 in codes.values() and all(_step(folder, rank) is None for rank in range(len(processes))):
                return None  # the others may wait for it, and are ended as those of any run
            if any(code in (0, 2) or diverged(folder, rank, code) for rank, code in codes.items()):
                return _let_end(programs)
            if r.again is None:
                rank = min(codes, key=lambda rank: codes[rank] == FAULT)  # who ends so has lost the other, perhaps
                places = [place_of(rank, parts) for rank in r.ranks]
                names = [f"{place}.{store.add(f'started/{place}', 0)}" for place in places]
                for other, name in zip(r.ranks, names):
                    if processes[other].poll() is None:
                        processes[other].kill()
                        processes[other].wait()
                    tell_gone(store, name, f"ended with {_how(codes[rank])}")
                r.deaths = 1 if any(store.check([f"stepped/{name}"]) for name in names) else r.deaths + 1
                wait = min(2.0 ** (r.deaths - 1), LONGEST)
                r.again = time.monotonic() + wait if r.deaths < most else float("inf")
                what = f"starting it again in {wait:g} s"
                if r.deaths >= most:
                    what = f"it died {r.deaths} times without a step (layout.max_deaths), and stays away"
                if sys.stderr.isatty():  # the line that rank 0 draws in place
                    sys.stderr.write("\r\x1b[K")
                say(f"{_death(folder, r.number, rank, codes[rank])}; {what}", sys.stderr)
            elif time.monotonic() >= r.again:
                r.again = None
                for rank in r.ranks:
                    processes[rank] = start(rank)
        if store.check(["orphaned"]) or all(p.poll() is not None for p in processes):
            return None
        time.sleep(0.05)
    return _let_end(programs)


def _let_end(programs: Programs) -> None:
    """Those who live end by themselves: a dead one's code is no reason to hurry them."""
    end = time.monotonic() + programs.seconds
    while any(p.poll() is None for p in programs.processes) and time.monotonic() < min(end, programs.deadline):
        time.sleep(0.05)


def diverged(folder: Path, rank: int, code: int | None) -> bool:
    """Whether a process came to the end of a run that has no weights of use."""
    record = status.read(folder, rank)
    return code == 1 and record is not None and record.what == "done"


def _step(folder: Path, rank: int) -> int | None:
    """Which it was in; None: it had not begun one."""
    record = status.read(folder, rank)
    return record and record.step


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _death(folder: Path, number: int, rank: int, code: int) -> str:
    step = _step(folder, rank)
    at = "before its first step" if step is None else f"at step {step:,}"
    return f"replica {number} ended with {_how(code)} {at}"
