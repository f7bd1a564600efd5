"""One honest clock: every second of a run belongs to exactly one kind, and a resume goes on counting."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gradus.train.machine import release_freed_memory

KINDS = ("train", "data", "evaluate", "checkpoint")


class Clock:
    """Seconds of wall time by kind (`train`: steps; `data`: waiting for batches; `evaluate`; `checkpoint`)."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, dict.fromkeys(KINDS, 0.0)

    def synchronise(self) -> None:
        """Wait until the device has done what was asked of it, so that its time is not counted to the next kind."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @contextlib.contextmanager
    def count(self, kind: str, wait: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
            if wait:
                self.synchronise()
        finally:
            self.seconds[kind] += time.perf_counter() - start


_earlier: dict[torch.device, int] = {}  # GPU → its peak before PyTorch's count was begun anew


_runs = itertools.count()  # that this process has begun


def begin_run() -> bool:
    """Of a second run in one process: what the first has left goes back to the system, and peaks are counted from here
    on. Returns whether they are: only Linux counts the peak of a process anew."""
    if next(_runs) == 0:
        return True
    gc.collect()
    release_freed_memory()
    _earlier.clear()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again (proc_pid_clear_refs(5))
        return True
    return False


def peak_memory(device: torch.device) -> int:
    """Peak bytes since `begin_run`: of PyTorch's allocator on a GPU, of this process's resident set on a CPU."""
    if device.type == "cuda":
        return max(_earlier.get(device, 0), torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# memory/NAME → its name in texts and summary.json
MEASURES = {"allocated": "tensors", "reserved": "reserved", "process": "process"}


def peaks(device: torch.device) -> dict[str, int]:
    """Peak bytes, by what was measured. On a GPU `allocated`: what PyTorch's tensors hold, and `reserved`: what its
    allocator has taken for them; elsewhere `process`: the resident memory of this process, libraries and the
    allocator's free blocks included."""
    if device.type == "cuda":
        return {"allocated": peak_memory(device), "reserved": torch.cuda.max_memory_reserved(device)}
    return {"process": peak_memory(device)}


def begin_peak(device: torch.device) -> None:
    """Restart PyTorch's peak count here; `peak_memory` still includes the peak before."""
    _earlier[device] = peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
