"""A device whose figures are round, parameters without any loss, and operations whose time is a hand count."""

from __future__ import annotations

from gradus.hardware import Device, Link
from gradus.plan.roofline import Parameters
from gradus.plan.work import Op

DEVICE = Device("X1", {"bf16": 1e14, "fp32": 1e13}, 80e9, 1e12, link=Link("inside", 1e11, 1.0, 1e-6), network=Link("outside", 1e10, 1.0, 1e-6))
FIT = Parameters(matmul=1.0, depth=0.0, bandwidth=1.0, kernel=0.0, host=0.0, network=1.0, latency=0.0, overlap=1.0, contention=0.0, wait=0.0, attention=1.0)


def matmul(m: float, n: float, k: float, count: float = 1, phase: str = "forward") -> Op:
    return Op("matmul", "mm", "bf16", phase, 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), (1, m, n, k), count)


def memory(size: float, phase: str = "forward", launches: float = 1) -> Op:
    return Op("memory", "add", "bf16", phase, 0.0, size, launches=launches)
