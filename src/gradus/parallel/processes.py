"""Other processes of this machine: how they are started, stopped, and end with the one that started them.

    run_group     n processes that can meet and do one thing together
    Worker, Pool  a process that does one thing after another, under limits of time and memory; some of them, kept
    Programs      other programs, which end together; run_program: one, to its end

Torch is imported where a group needs it, since a program's first act is to ask for its end (`end_with_parent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError
from gradus.parallel import status
from gradus.signals import STOPS, handling, uninterrupted

PASSED_ON = (*STOPS, signal.SIGHUP, signal.SIGQUIT)  # to programs
GRACE = 5.0  # seconds in which the other processes of a group can say what they know of a failure
SILENT = 5.0  # seconds after a signal in which nobody asks what is waited for


# ---------------------------------------------------------------- the end


def end_with_parent() -> None:
    """End this process when the one that started it ends, however that ended; nothing where none of this file did."""
    parent = multiprocessing.parent_process()
    started_by = os.environ.get(status.PARENT)
    if parent is not None:
        _end_after(parent.join)
    elif started_by is not None:
        if sys.platform == "linux":
            pr_set_pdeathsig = 1  # prctl(2)
            ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        else:
            _end_after(lambda: _until_orphaned(int(started_by)))
        if os.getppid() != int(started_by):  # it ended before this was asked for
            os._exit(1)


def _end_after(wait: Callable[[], Any]) -> None:
    def end() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)


def _begin(output: Path | str | None) -> None:
    """In a process of multiprocessing: Ctrl-C reaches the parent too, which ends all. output: None for the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        utf8 = {"encoding": "utf-8", "errors": "backslashreplace"}
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False, **utf8)  # noqa: SIM115  (as long as the process)
        sys.stderr = open(2, "w", buffering=1, closefd=False, **utf8)  # noqa: SIM115


# ---------------------------------------------------------------- a group


def run_group(n: int, function: Callable, *args: Any, log: Path) -> list[Any]:
    """What `function(*args, world)` returned in each of n processes that can meet, in the order of their ranks.

    What they print goes to `log`. They end when this returns or raises, or when this process ends, however it ended.
    Raises UserError for a mistake that one of them found, or when one was killed.
    """
    import torch.multiprocessing as mp

    from gradus.parallel.world import free_port

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":  # torch is imported once, not once a process
        multiprocessing.get_context(method).set_forkserver_preload([function.__module__])
    with tempfile.TemporaryDirectory(prefix="gradus-workers-") as folder:
        files = [Path(folder) / str(rank) for rank in range(n)]
        words = (n, free_port(), files, log, function, args)
        first, others = None, multiprocessing.active_children()
        try:
            with uninterrupted():  # a worker that was begun would say that its beginning is missing
                group = mp.start_processes(_member, words, n, join=False, start_method=method)
            while not group.join(grace_period=GRACE):
                pass
        except mp.ProcessExitedException as e:
            first = e.error_index
        finally:
            for process in set(multiprocessing.active_children()).difference(others):
                process.kill()
                process.join()
        answers = {r: pickle.loads(f.read_bytes()) for r, f in enumerate(files) if f.exists()}
    if first is None:
        return [answers[rank][1] for rank in range(n)]
    codes = [process.exitcode for process in group.processes]
    ends = {rank: answers.get(rank, ("died", "")) for rank in range(n) if codes[rank]}
    raise _failure({rank: end for rank, end in ends.items() if end[0] != "done"}, first, codes, log)


def _member(rank: int, n: int, port: int, files: list[Path], log: Path, function: Callable, args: tuple) -> None:
    import torch

    from gradus.parallel.world import World, leave

    _begin(log)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    world = World(rank, n, rank, n, "gradus", "127.0.0.1", port) if n > 1 else World()
    try:
        answer = ("done", function(*args, world))
    except UserError as e:
        answer = ("mistake", str(e))
    except torch.OutOfMemoryError as e:
        text = f"the memory is full ({str(e).splitlines()[0]}). Set a smaller layout.micro_batch."
        answer = ("mistake", f"rank {rank} of {n}: {text}")
    except BaseException:
        answer = ("failed", traceback.format_exc())
    files[rank].write_bytes(pickle.dumps(answer))
    leave(0 if answer[0] == "done" else 1)


def _failure(failed: dict[int, tuple[str, str]], first: int, codes: list[int], log: Path) -> Exception:
    """The cause: who only lost another is none; else a mistake before anything else, and what came first."""

    def order(rank: int) -> tuple:
        kind, text = failed[rank]
        return status.speaks_of_peers(text) or codes[rank] == status.LOST, kind != "mistake", rank != first, rank

    rank = min(failed, key=order)
    (kind, text), n, code = failed[rank], len(codes), codes[rank]
    if kind == "died":
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return UserError(f"rank {rank} of {n} was {how}. What the processes wrote is in {log}.")
    return UserError(text) if kind == "mistake" else RuntimeError(f"rank {rank} of {n} ({log} has more):\n{text}")


# ---------------------------------------------------------------- one thing after another


class Fault(Exception):
    """What went wrong in a worker, as text."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Worker:
    """A process that does one thing after another. It ends with this process, and where it is asked in vain.

    fork: a copy of this process, which has imported all that it needs, and which prints nothing. memory: bytes that it
    may have.
    """

    def __init__(self, fork: bool = False, memory: int | None = None):
        # a fork may wait for a lock that a thread of this process has
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self.pipe, theirs = context.Pipe()
        words = (theirs, self.pipe if fork else None, memory)
        self.process = context.Process(target=_serve, args=words, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that are there: none is needed in it
            self.process.start()
        theirs.close()

    def ask(
        self, function: Callable, argument: Any, seconds: float, gone: Callable[[], bool] = lambda: False
    ) -> Any:
        """function(argument); both, and what is returned, can be pickled. Raises UserError as the function does, Fault
        for any other exception; and, the process ended, TimeoutError, Gone where `gone()`, EOFError where it had
        ended."""
        end, data = time.monotonic() + seconds, ForkingPickler.dumps((function, argument))
        threading.Thread(target=self._send, args=(data,), daemon=True).start()  # a pipe that nobody reads is soon full
        try:
            while not self.pipe.poll(max(0.0, min(0.1, end - time.monotonic()))):
                if time.monotonic() > end:
                    raise TimeoutError(f"not ready within {seconds:g} s")
                if gone():
                    raise Gone
            error, answer = self.pipe.recv()
        except (EOFError, OSError, Gone) as e:
            self.process.join(5 * isinstance(e, EOFError))
            self.end()
            why = f"the planning process ended (exit code {self.process.exitcode})"
            raise (e if isinstance(e, TimeoutError | Gone) else EOFError(why)) from None
        if error is not None:
            raise error(answer)
        return answer

    def _send(self, data: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(data)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, other_end: Any, memory: int | None) -> None:
    _begin(os.devnull if other_end is not None else None)
    if other_end is not None:
        other_end.close()
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
                answer = (type(e), str(e))
            except MemoryError:
                text = f"more than {memory or 0:,} bytes of memory to plan this. Run the command in a terminal."
                answer = (UserError, text)
            except Exception as e:
                traceback.print_exc()
                sys.stderr.flush()
                first = (str(e).strip().splitlines() or [""])[0][:200]
                answer = (Fault, f"{type(e).__name__}: {first}")
            pipe.send(answer)
    os._exit(0)


class Pool:
    """At most `most` workers, started when they are needed and kept; one that takes longer than `seconds` is ended."""

    def __init__(self, seconds: float = limits.PLANNING, most: int = limits.PLANNERS):
        self.seconds, self.waiting = seconds, 0
        self.slots, self.idle = threading.Semaphore(most), []

    def run(self, function: Callable, argument: Any, gone: Callable[[], bool] = lambda: False) -> Any:
        """As `Worker.ask`; None where nobody waits any more. Raises UserError also where it takes too long or too much
        memory, and where all workers are taken for too long."""
        self.waiting += 1
        free = self.slots.acquire(timeout=self.seconds)
        self.waiting -= 1
        if not free:
            why = "the page is busy with other plans"
            raise UserError(f"{why}. Try again in a minute, or run the command in a terminal.")
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


# ---------------------------------------------------------------- programs


class Programs:
    """A group of programs, each in a session of its own: signals are passed on to all, and all end together.

    seconds: that they have to end after a signal. grace: after a second one, and to the others once one of them has
    failed. stopping: is printed at the first signal. waiting: says what is waited for, SILENT seconds after it.
    signals: those that came. killed: whether some had not ended in time.
    """

    def __init__(
        self, seconds: float = math.inf, grace: float = math.inf, stopping: str = "",
        waiting: Callable[[], str] | None = None,
    ):  # fmt: skip
        self.seconds, self.grace, self.stopping, self.waiting = seconds, grace, stopping, waiting
        self.processes: list[subprocess.Popen] = []
        self.signals: list[int] = []
        self.deadline, self.patient, self.killed = math.inf, math.inf, False

    def passing_on_signals(self) -> contextlib.AbstractContextManager[None]:
        """A hang-up that this process ignores, as nohup has it do, is nobody's."""
        hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        return handling(set(PASSED_ON) - ({signal.SIGHUP} if hangup_ignored else set()), self._pass_on)

    def _pass_on(self, number: int, frame: object) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            self.patient = time.monotonic() + SILENT
            if self.stopping:
                print(f"\n{self.stopping}", file=sys.stderr, flush=True)
        self._send(number)

    def _send(self, number: int) -> None:
        self.deadline = time.monotonic() + (self.seconds if len(self.signals) == 1 else self.grace)
        for process in self.processes:
            _signal_program(process, number)

    @contextlib.contextmanager
    def running(self, starts: Iterable[Callable[[], subprocess.Popen]]) -> Iterator[list[subprocess.Popen]]:
        """The programs that these calls of `start_program` start; what is left of them at the end is killed. A signal
        that comes before all are started reaches all."""
        processes: list[subprocess.Popen] = []
        self.deadline = math.inf
        try:
            processes += (start() for start in starts)
            self.processes = processes
            if self.signals:
                self._send(self.signals[0])
            yield processes
        finally:
            self.processes = []
            for process in processes:
                _signal_program(process, signal.SIGKILL)
                process.wait(30)

    def wait(self, hopeless: Callable[[], bool] = lambda: False) -> dict[int, int | None]:
        """Exit codes, once all have ended or the time of those that have not (None) is over, or `hopeless()`."""
        while True:
            codes = {i: process.poll() for i, process in enumerate(self.processes)}
            if any(codes.values()):
                self.deadline = min(self.deadline, time.monotonic() + self.grace)
            self.killed = None in codes.values() and time.monotonic() >= self.deadline
            if None not in codes.values() or self.killed or hopeless():
                return codes
            if self.waiting and len(self.signals) == 1 and time.monotonic() >= self.patient:
                self.patient = math.inf
                print(f"\n{self.waiting()}", file=sys.stderr, flush=True)
            time.sleep(0.05)


def start_program(command: Sequence[str], environment: Mapping[str, str] | None = None, **streams: Any):
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def run_program(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *,
    capture: bool = False, stopping: str = "", seconds: float = math.inf, hopeless: Callable[[], bool] = lambda: False,
) -> tuple[int, str]:  # fmt: skip
    """(exit code, standard error where `capture`) of a program.

    Signals that ask for a stop are passed on to it, and its end is waited for, however long it saves; `stopping` is
    printed meanwhile. Then they hold for this process: KeyboardInterrupt, SystemExit. Raises FileNotFoundError for no
    such program, TimeoutError where it takes longer than `seconds`, or once `hopeless()`.
    """
    programs = Programs(stopping=stopping)
    with tempfile.TemporaryFile() as errors, programs.passing_on_signals():
        streams = {"stdout": subprocess.DEVNULL, "stderr": errors} if capture else {}
        start = functools.partial(start_program, command, environment, stdin=subprocess.DEVNULL, **streams)
        with programs.running([start]):
            programs.deadline = min(programs.deadline, time.monotonic() + seconds)
            (code,) = programs.wait(hopeless).values()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if programs.signals:
        first = programs.signals[0]
        raise KeyboardInterrupt if first == signal.SIGINT else SystemExit(128 + first)
    if code is None:
        raise TimeoutError(f"not ready within {seconds:g} s")
    return code, text


def _signal_program(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a program in a session of its own, and to all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
