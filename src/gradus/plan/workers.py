"""Functions run in processes of their own, under limits of time and memory: a plan can be ended and blocks no other."""

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


class WorkerError(Exception):
    """An exception in a worker, as text."""


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class Worker:
    """A process that runs one function after another. It ends with this process, however that ended.

    fork: a copy of this process, with all its imports; it prints nothing. memory: the most bytes that it may have.
    """

    def __init__(self, fork: bool = False, memory: int | None = None):
        # spawn: a fork may wait for a lock that a thread here has
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self.pipe, worker_end = context.Pipe()
        arguments = (worker_end, self.pipe if fork else None, memory)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads: the fork needs none
            self.process.start()
        worker_end.close()

    def call(
        self, function: Callable, argument: Any, seconds: float, abandoned: Callable[[], bool] = lambda: False
    ) -> Any:
        """Return function(argument); both, and the result, can be pickled.

        Raises UserError as the function does and WorkerError for any other exception. Ends the process and raises
        TimeoutError after so many seconds, Abandoned where `abandoned()`, EOFError where the process has ended.
        """
        end, data = time.monotonic() + seconds, ForkingPickler.dumps((function, argument))
        threading.Thread(target=self._send, args=(data,), daemon=True).start()  # a pipe that nobody reads is soon full
        try:
            while not self.pipe.poll(max(0.0, min(0.1, end - time.monotonic()))):
                if time.monotonic() > end:
                    raise TimeoutError(f"not ready within {seconds:.0f} s")
                if abandoned():
                    raise Abandoned
            error, result = self.pipe.recv()
        except (EOFError, OSError, Abandoned) as e:
            self.process.join(5 * isinstance(e, EOFError))
            self.end()
            why = f"the planning process ended (exit code {self.process.exitcode})"
            raise (e if isinstance(e, TimeoutError | Abandoned) else EOFError(why)) from None
        if error is not None:
            raise error(result)
        return result

    def _send(self, data: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(data)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class WorkerPool:
    """At most `most` workers, started when they are needed and kept; one that takes longer than `seconds` is ended."""

    def __init__(self, seconds: float = limits.PLANNING, most: int = limits.PLANNERS):
        self.seconds, self.waiting = seconds, 0
        self.slots, self.idle = threading.Semaphore(most), []

    def run(self, function: Callable, argument: Any, abandoned: Callable[[], bool] = lambda: False) -> Any:
        """As `Worker.call`; None where nobody waits any more.

        Raises UserError also where it takes too long or too much memory, and where all workers are busy for too long.
        """
        self.waiting += 1
        free = self.slots.acquire(timeout=self.seconds)
        self.waiting -= 1
        if not free:
            advice = "Try again in a minute, or run the command in a terminal."
            raise UserError(f"the page is busy with other plans. {advice}")
        worker = None
        try:
            if abandoned():
                return None
            worker = self.idle.pop() if self.idle else Worker(memory=limits.PLANNING_MEMORY)
            return worker.call(function, argument, self.seconds, lambda: bool(self.waiting) and abandoned())
        except Abandoned:
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
        """End the idle workers; busy ones end with this process."""
        for worker in self.idle:
            worker.end()


def _serve(pipe: Any, parent_end: Any, memory: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and this process ends with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if parent_end is not None:
        parent_end.close()
        null = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(null, number)
    if memory:
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_answer(*pipe.recv(), memory))
    os._exit(0)


def _answer(function: Callable, argument: Any, memory: int | None) -> tuple[type[Exception] | None, Any]:
    """(None, the result) or (kind of the exception, its text)."""
    try:
        return None, function(argument)
    except UserError as e:
        return UserError, str(e)
    except MemoryError:
        return UserError, f"more than {memory or 0:,} bytes of memory to plan this. Run the command in a terminal."
    except Exception as e:
        traceback.print_exc()
        sys.stderr.flush()
        return WorkerError, f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:200]}"


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
