"""What the machine could do at most, measured by the fastest that PyTorch has for it: reading memory, and products."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradus.train.machine import large_pages

REPEAT = 5


def bandwidth(device: torch.device) -> float:
    """Bytes/s read, by products of one row with matrices that no cache holds (256 MiB)."""
    matrices = large_matrices() if device.type == "cpu" else torch.randn(4, 256, 1 << 16, device=device)
    row = torch.randn(1, 256, device=device)
    return sum(m.nbytes for m in matrices) / _fastest(lambda: [row @ m for m in matrices], device)


def large_matrices() -> torch.Tensor:
    """(4, 256, 65,536) in fp32, 256 MiB, in large pages as an engine's weights."""
    return large_pages(1 << 28).view(torch.float32).view(4, 256, 1 << 16).normal_()


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices: of 1,024, on a GPU of 8,192."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: a @ b, device)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    found = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def last_cache() -> int:
    """Bytes of the processor's last cache, as Linux tells; 0: not known."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * {"K": 1 << 10, "M": 1 << 20}[s[-1]] for s in sizes), default=0)
