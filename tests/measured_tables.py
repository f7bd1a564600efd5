"""Devices with measured tables whose every figure is known, and operations that are looked up in them."""

from __future__ import annotations

import itertools

from gradus.hardware import Device
from gradus.plan.work import Op

SIDES = (16, 64, 256)


def device(kind: str = "cpu", dispatch: dict | None = None, skip: tuple = ()) -> Device:
    """Tables of a machine that does 1e9 operations/s and moves 1e9 bytes/s, whatever the size; weight gradients take twice as long."""
    products = [
        f"{name} {dtype} {layout} {b} {m} {n} {k} {2 * b * m * n * k / 1e9 * slow:.9e} 0.01"
        for name, b in (("mm", 1), ("bmm", 8))
        for dtype, (layout, slow) in itertools.product(("fp32", "bf16"), (("nt", 1), ("nn", 1), ("tn", 2)))
        for m, n, k in itertools.product(SIDES, repeat=3)
        if (m, n, k) not in skip
    ]
    fused = [
        f"{direction} fp32 {causal} 2 4 {s} {s} {d} {2 * 4 * s * s * d * each / 1e9:.9e} 0.01"
        for (direction, each), (causal, part) in itertools.product((("forward", 4), ("backward", 10)), (("full", 1), ("causal", 0.5)))
        for each in (each * part,)
        for s, d in itertools.product((64, 256), (32, 128))
    ]
    bound = [f"{name} {dtype} {b} {b / 1e9 * slow:.9e} 0.01" for name, slow in (("add", 1), ("gelu", 3)) for dtype in ("fp32", "bf16") for b in (1000, 4000)]
    measured = {
        "matmul": "\n".join(products),
        "attention": "\n".join(fused),
        "memory": "\n".join(bound),
        "dispatch": dispatch or {},
        "date": "2026-01-01",
        "torch": "2.13",
        "threads": 1,
    }
    return Device("x", {"fp32": 1e9}, 2**30, 1e9, kind=kind, measured=measured)


def product(m: int, n: int, k: int, phase: str = "forward", name: str = "mm", dtype: str = "fp32", layout: str = "", batch: int = 1) -> Op:
    return Op("matmul", name, dtype, phase, 2.0 * batch * m * n * k, 4.0, (batch, m, n, k), layout=layout)


def memory(name: str, n_bytes: float, dtype: str = "fp32", phase: str = "forward", launches: float = 1) -> Op:
    return Op("memory", name, dtype, phase, 0.0, n_bytes, launches=launches)
