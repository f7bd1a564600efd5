"""Runs a function in a process of its own, under a limit of time and memory: what the page plans can be ended, and blocks nobody else."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from gradus import limits
from gradus.errors import UserError


class Fault(Exception):
    """What went wrong in a worker, as text; its trace stands on standard error already."""


class Here:
    """The same without a process and without limits: one call at a time (tracing has one process-wide fake world)."""

    def __init__(self):
        self.locks: dict[Any, threading.Lock] = {}

    def run(self, function: Callable, argument: Any, gone: Callable[[], bool] = lambda: False) -> Any:
        with self.locks.setdefault(getattr(function, "func", function), threading.Lock()):
            return None if gone() else function(argument)

    def end(self) -> None:
        """Nothing to end."""


class Workers:
    """At most `most` processes, started when they are needed and kept; one that takes longer than `seconds` is ended."""

    def __init__(self, seconds: float = limits.PLANNING, most: int = limits.PLANNERS):
        self.seconds, self.waiting = seconds, 0
        self.slots, self.idle = threading.Semaphore(most), []
        self.processes = multiprocessing.get_context("spawn")  # a fork of a process with threads may wait for a lock that nobody has

    def run(self, function: Callable, argument: Any, gone: Callable[[], bool] = lambda: False) -> Any:
        """function(argument); both, and what is returned, can be pickled. gone: whether nobody waits for it any more; then None.

        Raises UserError as the function does, where it takes too long or too much memory, and where all workers are taken for too long;
        Fault for any other exception.
        """
        self.waiting += 1
        found = self.slots.acquire(timeout=self.seconds)
        self.waiting -= 1
        if not found:
            raise UserError("the page is planning for others just now. Ask again in a minute, or run the command in a terminal.")
        try:
            if gone():
                return None
            worker = self.idle.pop() if self.idle else self._start()
            kind, *value = self._ask(*worker, function, argument, gone)
            if kind in ("value", "user", "fault"):
                self.idle.append(worker)
        finally:
            self.slots.release()
        if kind == "value":
            return value[0]
        if kind == "gone":
            return None
        raise {"fault": Fault}.get(kind, UserError)(value[0])

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self.processes.Pipe()
        process = self.processes.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _ask(self, process: Any, pipe: Any, function: Callable, argument: Any, gone: Callable[[], bool]) -> tuple:
        end = time.monotonic() + self.seconds
        try:
            pipe.send((function, argument))
            while not pipe.poll(0.1):
                late = time.monotonic() > end
                if late or (self.waiting and gone()):
                    process.kill()
                    process.join()
                    pipe.close()
                    why = f"ended after {self.seconds:g} s: it takes longer than a page waits for. Run the command in a terminal."
                    return ("late", why) if late else ("gone",)
            return pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            return "dead", f"the process that planned this has ended (exit code {process.exitcode}): too much memory? Run the command in a terminal."

    def end(self) -> None:
        """End what is idle; what works ends with this process."""
        for process, pipe in self.idle:
            process.kill()
            pipe.close()


def _work(pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that serves
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limits.PLANNING_MEMORY, limits.PLANNING_MEMORY))
    while True:
        try:
            function, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("value", function(argument))
        except UserError as e:
            answer = ("user", str(e))
        except MemoryError:
            answer = ("user", f"more than {limits.PLANNING_MEMORY / limits.GB:g} GB of memory to plan this. Run the command in a terminal.")
        except Exception as e:
            traceback.print_exc()
            sys.stderr.flush()
            answer = ("fault", f"{type(e).__name__}: {e}")
        pipe.send(answer)
