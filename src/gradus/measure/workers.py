"""Processes of this machine that can meet and do one thing together: what each of them returned, or what went wrong
first."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from gradus.errors import UserError
from gradus.parallel import status
from gradus.parallel import world as worlds
from gradus.parallel.world import World

GRACE = 5.0  # seconds in which the other workers can say what they know of a failure


def start(n: int, function: Callable, *args: Any, log: Path) -> list[Any]:
    """What `function(*args, here)` returned in each of n processes that can meet, in the order of their ranks.

    What they print goes to `log`. They end when this returns or raises, or when this process ends, however it ended.
    Raises UserError for a mistake that one of them found, or when one was killed.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":  # torch is imported once, not once a process
        multiprocessing.get_context(method).set_forkserver_preload([function.__module__])
    with tempfile.TemporaryDirectory(prefix="gradus-workers-") as folder:
        files = [Path(folder) / str(rank) for rank in range(n)]
        words = (n, worlds.free_port(), files, log, function, args)
        first, others = None, multiprocessing.active_children()
        try:
            with uninterrupted():  # a worker that was begun would say that its beginning is missing
                started = mp.start_processes(_work, words, n, join=False, start_method=method)
            while not started.join(grace_period=GRACE):
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
    codes = [process.exitcode for process in started.processes]
    ends = {rank: answers.get(rank, ("died", "")) for rank in range(n) if codes[rank]}
    raise _failure({rank: end for rank, end in ends.items() if end[0] != "done"}, first, codes, log)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end of this, and never in a process that is started in it: around a trace, where it
    may come in a destructor or a hook in which PyTorch drops it or aborts, and around the start of workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is started here inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def ended_with_this() -> Iterator[None]:
    """SIGTERM ends this process by way of every `finally`, so that what was started here is ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _work(rank: int, n: int, port: int, files: list[Path], log: Path, function: Callable, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends all
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    here = World(rank, n, rank, n, "gradus", "127.0.0.1", port) if n > 1 else World()
    try:
        answer = ("done", function(*args, here))
    except UserError as e:
        answer = ("mistake", str(e))
    except torch.OutOfMemoryError as e:
        text = f"the memory is full ({str(e).splitlines()[0]}). Set a smaller layout.micro_batch."
        answer = ("mistake", f"rank {rank} of {n}: {text}")
    except BaseException:
        answer = ("failed", traceback.format_exc())
    files[rank].write_bytes(pickle.dumps(answer))
    worlds.leave(0 if answer[0] == "done" else 1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


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
