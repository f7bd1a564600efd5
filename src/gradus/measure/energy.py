"""Energy as a meter reads it: NVIDIA's own counter of a GPU, or RAPL's of the processor packages. Nothing is estimated:
no meter, no figure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gradus.train import machine

POWERCAP = Path("/sys/class/powercap")
Counters = dict[Any, tuple[int, int]]  # what counts → (microjoules, where its counter starts again)


class Meter:
    """Joules of what is done within `with Meter(device) as meter:`: `meter.joules`, None where nothing can be read;
    `meter.source` says what was.

    A CUDA device is read by NVML: its energy counter (Volta and newer; millijoules since the driver was loaded). The
    CPU is read by RAPL (Linux's power capping framework, Intel's and AMD's; readable by root alone on most systems):
    all processor packages and their memory, so whatever else runs on the machine counts too. RAPL's counters start
    again at their end, at full power after some minutes at the earliest: call `read()` more often than that.
    """

    source: str | None = None
    joules: float | None = None  # up to the latest `read()`, or to the end

    def __init__(self, device: torch.device | str = "cpu"):
        self.device, self.library = torch.device(device), None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            self.library, _ = machine.open_nvml()
        self._last = self._counters()
        if self._last:
            self.source = "RAPL, whole machine" if self.device.type == "cpu" else "NVML, energy counter"
            self.joules = 0.0
        return self

    def __exit__(self, *error: Any) -> None:
        self.read()
        if self.library is not None:
            self.library.nvmlShutdown()
        self.library, self._last = None, {}

    def read(self) -> float | None:
        """Joules so far; None where there is no meter, or it has stopped answering."""
        if self._last:
            now, before = self._counters(), self._last
            self._last = now if now.keys() == before.keys() else {}
            if self._last:
                self.joules += sum((value - before[p][0]) % (end + 1) for p, (value, end) in now.items()) / 1e6
            else:
                self.source = self.joules = None
        return self.joules

    def _counters(self) -> Counters:
        if self.device.type == "cpu":
            return rapl()
        if self.library is None:
            return {}
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        gpu = machine.gpu_handle(self.library, torch.device("cuda", index))
        millijoules = gpu and machine.read(self.library, "nvmlDeviceGetTotalEnergyConsumption", gpu)
        return {} if millijoules is None else {"gpu": (1000 * millijoules, 2**64)}


def rapl() -> Counters:
    """The domains of processor packages and their memory. Cores and graphics are parts of a package and `psys` is made
    of all, so they are left out. Empty where nothing can be read."""
    counters = {}
    for folder in sorted(POWERCAP.glob("intel-rapl:*")):  # AMD's too
        with contextlib.suppress(OSError, ValueError):
            if (folder / "name").read_text().strip().startswith(("package", "dram")):
                value, end = (int((folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
                counters[folder] = value, end
    return counters


def total(meters: Iterable[float | None]) -> float | None:
    """The sum of several meters' joules; None where one of them has nothing to tell."""
    joules = list(meters)
    return None if not joules or any(j is None for j in joules) else sum(joules)
