"""How long threads spin while they wait for each other. On a quiet machine as long as libgomp has it, some ms: to wake
one that sleeps takes as long as many of a model's operations. While other programs use the processors, threads hardly
spin: one that does keeps the one that it waits for from running.

libgomp reads its count once, as it is loaded, but cuts it to 100 turns while it manages more threads than there are
processors (GCC's manual of libgomp, GOMP_SPINCOUNT). So, on a busy machine, a thread of this module has a team of its
own that does nothing: what is computed stays as it is, with the same threads. `python benchmarks/busy.py` measures it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradus import limits
from gradus.errors import UserError

EVERY = 0.5  # s from one look to the next
MUCH, LITTLE = 0.2, 0.05  # s a second, of all threads together, for which they are ready and have no processor
USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # variables: where one of these is set, nothing is changed


_watched = 0  # pid of the process that is watched


def watch() -> bool:
    """Look from now on, in the background, whether this process's threads get processors; once in each process. False
    where PyTorch does not use libgomp, or Linux does not tell, or the user has set how long threads spin."""
    global _watched
    if _watched == os.getpid():  # a process that is forked has no thread but one
        return True
    library = _libgomp()
    if library is None or set(USERS) & os.environ.keys() or not Path("/proc/self/schedstat").exists():
        return False
    _watched = os.getpid()
    threading.Thread(target=_look, args=(library.GOMP_parallel,), name="gradus-spin", daemon=True).start()
    return True


def _look(parallel: Callable[..., None]) -> None:
    stop, held = threading.Event(), 0  # of spinning shortly, and with how many threads of PyTorch's
    before, began = _waited(), time.perf_counter()
    while True:
        time.sleep(EVERY)
        now, ended = _waited(), time.perf_counter()
        share = (now - before) / (ended - began)
        before, began = now, ended
        threads = _threads() if wanted(held > 0, share) else 0
        if threads != held:
            stop.set()
            stop, held = threading.Event(), threads
            if held:
                args = (parallel, held, stop)
                threading.Thread(target=hold, args=args, name="gradus-spin-team", daemon=True).start()


def wanted(short: bool, share: float) -> bool:
    """Whether to spin shortly. short: whether it is so now; then less is enough to stay. share: as MUCH."""
    return share > (LITTLE if short else MUCH)


def hold(parallel: Callable[..., None], threads: int, stop: threading.Event) -> None:
    """As a thread of its own: give libgomp more threads than processors until `stop` is set; they end with this one.
    threads: of PyTorch. Where so many cannot be started nothing is changed: libgomp would end the process."""
    count = max(2, limits.cores() - threads + 2)  # itself, and as many as are missing
    with contextlib.suppress(UserError):
        if threads > 1:
            limits.start_threads(limits.processors() + count, "a team")
            parallel(ctypes.CDLL(None).getpid, None, count, 0)  # a function that does nothing
    stop.wait()


def _threads() -> int:
    """PyTorch's threads now. In a thread that has asked before it is the number of then."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def _waited() -> float:
    """Seconds that this process's threads have been ready to run while others had the processors."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return total / 1e9


def _libgomp() -> ctypes.CDLL | None:
    """PyTorch's own, and no other that a program has loaded too."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        if hasattr(library, "GOMP_parallel") and not hasattr(library, "kmp_get_blocktime"):  # Intel's, LLVM's: both
            return library
    return None
