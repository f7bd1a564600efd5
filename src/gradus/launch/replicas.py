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

    def __init__(self, number: int, process: Popen):
        self.number, self.process = number, process
        self.deaths = 0  # in a row, without a step
        self.again: float | None = None  # when it is started again


def watch(
    programs: Programs, start: Callable[[int], Popen], folder: Path, store: Any, most: int
) -> None:  # fmt: skip
    """Start dead replicas again, until one of them ends well, by a user's mistake or in divergence, or a signal asks
    for an end, or none is left that has the weights. most: layout.max_deaths. store: of the quorum, told of each death.
    """
    from gradus.parallel.quorum import tell_gone

    replicas = [Replica(i, process) for i, process in enumerate(programs.processes)]
    while not programs.signals:
        for r in replicas:
            code = r.process.poll()
            if code is None:
                continue
            if code in (0, 2) or diverged(folder, r.number, code):
                return _let_end(programs)
            if r.again is None:
                name = f"{r.number}.{store.add(f'started/{r.number}', 0)}"
                tell_gone(store, name, f"ended with {_how(code)}")
                r.deaths = 1 if store.check([f"stepped/{name}"]) else r.deaths + 1
                wait = min(2.0 ** (r.deaths - 1), LONGEST)
                r.again = time.monotonic() + wait if r.deaths < most else float("inf")
                what = f"starting it again in {wait:g} s"
                if r.deaths >= most:
                    what = f"it died {r.deaths} times without a step (layout.max_deaths), and stays away"
                if sys.stderr.isatty():  # the line that rank 0 draws in place
                    sys.stderr.write("\r\x1b[K")
                say(f"{_death(folder, r.number, code)}; {what}", sys.stderr)
            elif time.monotonic() >= r.again:
                r.again = None
                r.process = programs.processes[r.number] = start(r.number)
        if store.check(["orphaned"]) or all(r.process.poll() is not None for r in replicas):
            return None
        time.sleep(0.05)
    return _let_end(programs)


def _let_end(programs: Programs) -> None:
    """Those who live end by themselves: a dead one's code is no reason to hurry them."""
    end = time.monotonic() + programs.seconds
    while any(p.poll() is None for p in programs.processes) and time.monotonic() < min(end, programs.deadline):
        time.sleep(0.05)


def diverged(folder: Path, number: int, code: int | None) -> bool:
    """Whether a replica came to the end of a run that has no weights of use."""
    record = status.read(folder, number)
    return code == 1 and record is not None and record.what == "done"


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _death(folder: Path, number: int, code: int) -> str:
    record = status.read(folder, number)
    at = "before its first step" if record is None or record.step is None else f"at step {record.step:,}"
    return f"replica {number} ended with {_how(code)} {at}"
