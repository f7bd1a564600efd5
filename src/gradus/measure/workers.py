"""Processes of this machine that can meet and do one thing together: what each of them returned, or what went wrong
first."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

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
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([function.__module__])  # torch is imported once, not once a process
    port = worlds.free_port()
    processes, pipes = [], {}
    try:
        for rank in range(n):
            mine, theirs = context.Pipe(duplex=False)
            here = World(rank, n, rank, n, "gradus", "127.0.0.1", port) if n > 1 else World()
            process = context.Process(target=_work, args=(theirs, str(log), here, function, args))
            process.start()
            processes.append(process)
            theirs.close()
            pipes[mine] = rank
        answers = _gather(pipes, processes, log)
        for process in processes:
            process.join(GRACE)
        return answers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextlib.contextmanager
def ended_with_this() -> Iterator[None]:
    """SIGTERM ends this process by way of every `finally`, so that what was started here is ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _work(pipe: connection.Connection, log: str, here: World, function: Callable, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends all
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        answer = ("done", function(*args, here))
    except UserError as e:
        answer = ("mistake", str(e))
    except torch.OutOfMemoryError as e:
        text = f"the memory is full ({str(e).splitlines()[0]}). Set a smaller layout.micro_batch."
        answer = ("mistake", f"rank {here.rank} of {here.size}: {text}")
    except BaseException:
        answer = ("failed", traceback.format_exc())
    pipe.send(answer)
    worlds.leave(0 if answer[0] == "done" else 1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _gather(pipes: dict[connection.Connection, int], processes: list, log: Path) -> list[Any]:
    answers, failures, end = {}, {}, None
    while pipes:
        ready = connection.wait(list(pipes), None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(1.0)
                kind, value = "died", processes[rank].exitcode
            if kind == "done":
                answers[rank] = value
            else:
                failures[rank] = (kind, value)
                end = end or time.monotonic() + GRACE
    if not failures:
        return [answers[rank] for rank in range(len(processes))]
    n = len(processes)
    for _, (kind, value) in sorted(failures.items()):
        if kind == "mistake" and not status.speaks_of_peers(value):
            raise UserError(value)
    for rank, (kind, value) in sorted(failures.items()):
        if kind == "died" and value != status.LOST:
            how = f"killed by {signal.Signals(-value).name}" if value and value < 0 else f"ended with exit code {value}"
            raise UserError(f"rank {rank} of {n} was {how}. What the processes wrote is in {log}.")
    told = {rank: str(value) for rank, (_, value) in failures.items()}
    rank = min(told, key=lambda r: (status.speaks_of_peers(told[r]), r))  # who only lost another is no cause
    raise RuntimeError(f"rank {rank} of {n} ({log} has more):\n{told[rank]}")
