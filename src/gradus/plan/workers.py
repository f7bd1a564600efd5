"""Runs a function in a process of its own, under a limit of time and memory: what is planned there can be ended, and blocks nobody else."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gradus import limits
from gradus.errors import UserError


class Fault(Exception):
    """What went wrong in a worker, as text."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Worker:
    """A process that does one thing after another. It ends with this process, however that ended, and where it is asked in vain.

    fork: a copy of this process, which has imported all that it needs, and which prints nothing. memory: bytes that it may have.
    """

    def __init__(self, fork: bool = False, memory: int | None = None):
        context = multiprocessing.get_context("fork" if fork else "spawn")  # a fork may wait for a lock that a thread here has
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.pipe if fork else None, memory), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that are there: none that is needed there
            self.process.start()
        theirs.close()

    def ask(self, function: Callable, argument: Any, seconds: float, gone: Callable[[], bool] = lambda: False) -> Any:
        """function(argument); both, and what is returned, can be pickled. Raises UserError as the function does, Fault for any other
        exception; and, the process ended, TimeoutError, Gone where `gone()`, EOFError where it had ended."""
        end, data = time.monotonic() + seconds, ForkingPickler.dumps((function, argument))
        threading.Thread(target=self._send, args=(data,), daemon=True).start()  # a pipe that nobody reads is soon full
        try:
            while not self.pipe.poll(max(0.0, min(0.1, end - time.monotonic()))):
                if time.monotonic() > end:
                    raise TimeoutError(f"not ready within {seconds:.0f} s")
                if gone():
                    raise Gone
            error, found = self.pipe.recv()
        except (EOFError, OSError, Gone) as e:
            self.process.join(5 * isinstance(e, EOFError))
            self.end()
            why = f"the planning process ended (exit code {self.process.exitcode})"
            raise (e if isinstance(e, TimeoutError | Gone) else EOFError(why)) from None
        if error is not None:
            raise error(found)
        return found

    def _send(self, data: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(data)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Workers:
    """At most `most` processes, started when they are needed and kept; one that takes longer than `seconds` is ended."""

    def __init__(self, seconds: float = limits.PLANNING, most: int = limits.PLANNERS):
        self.seconds, self.waiting = seconds, 0
        self.slots, self.idle = threading.Semaphore(most), []

    def run(self, function: Callable, argument: Any, gone: Callable[[], bool] = lambda: False) -> Any:
        """As `Worker.ask`; None where nobody waits any more. Raises UserError also where it takes too long or too much memory, and where
        all workers are taken for too long."""
        self.waiting += 1
        free = self.slots.acquire(timeout=self.seconds)
        self.waiting -= 1
        if not free:
            raise UserError("the page is busy with other plans. Try again in a minute, or run the command in a terminal.")
        worker = None
        try:
            if gone():
                return None
            worker = self.idle.pop() if self.idle else Worker(memory=limits.PLANNING_MEMORY)
            return worker.ask(function, argument, self.seconds, lambda: bool(self.waiting) and gone())
        except Gone:
            return None
        except TimeoutError:
            why = f"stopped after {self.seconds:g} s, the longest that the page waits"
        except EOFError as e:
            why = f"{e}: too much memory?"
        finally:
            if worker is not None and worker.process.is_alive():
                self.idle.append(worker)
            self.slots.release()
        raise UserError(f"{why}. Run the command in a terminal.")

    def end(self) -> None:
        """End what is idle; what works ends with this process."""
        for worker in self.idle:
            worker.end()


def _work(pipe: Any, other_end: Any, memory: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, whose end is this one's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if other_end is not None:
        other_end.close()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
    if memory:
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, argument = pipe.recv()
            try:
                answer = (None, function(argument))
            except UserError as e:
                answer = (UserError, str(e))
            except MemoryError:
                answer = (UserError, f"more than {memory or 0:,} bytes of memory to plan this. Run the command in a terminal.")
            except Exception as e:
                traceback.print_exc()
                sys.stderr.flush()
                answer = (Fault, f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:200]}")
            pipe.send(answer)
    os._exit(0)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
