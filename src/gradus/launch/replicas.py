"""Replicas on this machine (layout.elastic): one that dies is started again while the others go on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from gradus.parallel import status
from gradus.parallel.processes import Programs
from gradus.text import say

LONGEST = 30.0  # seconds before a replica is started again, which begin with 1 and double


class Replica:
    """One of them, as the launcher sees it."""

    def __init__(self, number: int, process: Popen, start: Callable[[int], Popen]):
        self.number, self.process, self.start = number, process, start
        self.deaths = 0  # in a row, without a step
        self.step: int | None = None  # that it was at when it died
        self.again: float | None = None  # when it is started again


def watch(
    programs: Programs, start: Callable[[int], Popen], folder: Path, store: Any, most: int
) -> None:  # fmt: skip
    """Start dead replicas again, until one of them ends well, by a user's mistake or in divergence, or a signal asks
    for an end, or none is left that has the weights. most: layout.max_deaths. store: of the quorum, told of each death.
    """
    from gradus.parallel.quorum import tell_gone

    replicas = [Replica(i, process, start) for i, process in enumerate(programs.processes)]
    while not programs.signals:
        for r in replicas:
            code = r.process.poll()
            if code is None:
                continue
            if code in (0, 2) or _done(folder, r.number):
                return
            if r.again is None:
                name = f"{r.number}.{store.add(f'started/{r.number}', 0)}"
                tell_gone(store, name, f"ended with {_how(code)}")
                record = status.read(folder, r.number)
                step = record.step if record else None
                r.deaths = 1 if step != r.step and step is not None else r.deaths + 1
                r.step = step
                wait = min(2.0 ** (r.deaths - 1), LONGEST)
                r.again = time.monotonic() + wait if r.deaths <= most else float("inf")
                what = f"starting it again in {wait:g} s"
                if r.deaths > most:
                    what = f"it died {r.deaths} times without a step (layout.max_deaths), and stays away"
                say(f"{_death(folder, r, code)}; {what}", sys.stderr)
            elif time.monotonic() >= r.again:
                r.again = None
                r.process = programs.processes[r.number] = start(r.number)
        if store.check(["orphaned"]) or all(r.process.poll() is not None for r in replicas):
            return
        time.sleep(0.05)


def _done(folder: Path, number: int) -> bool:
    record = status.read(folder, number)
    return record is not None and record.what == "done"


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _death(folder: Path, r: Replica, code: int) -> str:
    how = "gave its place up" if code == status.LOST else f"ended with {_how(code)}"
    return f"replica {r.number} {how}" + (f" at step {r.step:,}" if r.step is not None else " before its first step")
