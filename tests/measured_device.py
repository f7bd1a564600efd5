"""A measured device whose every figure is known, and operations that are looked up in it."""

from __future__ import annotations

from gradus.hardware import Device
from gradus.plan.work import Op


def device(kind: str = "cpu", dispatch: dict | None = None) -> Device:
    """A machine that does 1e9 operations/s and moves 1e9 bytes/s, in bf16 half of it; a launch takes 1 us, and a product halves its rate at a k of 64."""
    fits = {f"{of} {dtype}": [1e-6, rate, *lengths] for dtype, rate in (("fp32", 1e9), ("bf16", 5e8))
            for of, lengths in (("matmul", (0.0, 0.0, 64.0)), ("attention", ()), ("memory", ()))}  # fmt: skip
    measured = {"fits": fits, "dispatch": dispatch or {}, "date": "2026-01-01", "torch": "2.13", "threads": 1}
    return Device("x", {"fp32": 1e9}, 2**30, 1e9, kind=kind, measured=measured)


def product(m: int, n: int, k: int, dtype: str = "fp32", batch: int = 1) -> Op:
    return Op("matmul", "mm", dtype, "forward", 2.0 * batch * m * n * k, 4.0, (batch, m, n, k))


def memory(name: str, n_bytes: float, dtype: str = "fp32", phase: str = "forward", launches: float = 1) -> Op:
    return Op("memory", name, dtype, phase, 0.0, n_bytes, launches=launches)
