"""What the machine could do at most, measured by the fastest that PyTorch has for it: reading memory, and products."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradus.train.machine import large_pages

REPEAT = 5


def bandwidth(device: torch.device) -> float:
    """Bytes/s read from matrices that no cache holds."""
    read, n_bytes = reader(device)
    return n_bytes / _fastest(read, device)


def reader(device: torch.device) -> tuple[Callable[[], object], int]:
    """(what reads matrices of (4, 256, 65,536) in fp32 once, their bytes). Of a sum and a product with one row, which
    both read at the memory's speed, the faster one here. On a CPU they lie in large pages, as an engine's weights."""
    on_cpu = device.type == "cpu"
    memory = large_pages(1 << 28).view(torch.float32) if on_cpu else torch.empty(1 << 26, device=device)
    matrices, row = memory.view(4, 256, 1 << 16).normal_(), torch.randn(1, 256, device=device)
    ways = (lambda: [row @ m for m in matrices], lambda: [m.sum() for m in matrices])
    return min(ways, key=lambda way: _fastest(way, device)), matrices.nbytes


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices: of 1,024, on a GPU of 8,192."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: a @ b, device)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def last_cache() -> int:
    """Bytes of the processor's last cache, as Linux tells; 0: not known."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * {"K": 1 << 10, "M": 1 << 20}[s[-1]] for s in sizes), default=0)
