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

    library: NVML, opened (None: opened and closed here). root: of the power capping tree.
    """

    def __init__(self, device: torch.device | str = "cpu", *, library: Any = None, root: Path = POWERCAP):
        self.device, self.root = torch.device(device), root
        self.library, self._mine = library, library is None
        self.source: str | None = None
        self._joules = 0.0

    def __enter__(self) -> Meter:
        self._gpu, name = None, "RAPL, whole machine"
        if self.device.type == "cuda":
            name = "NVML, energy counter"
            if self.library is None:
                self.library, _ = machine.open_nvml()
            if self.library is not None:
                index = torch.cuda.current_device() if self.device.index is None else self.device.index
                self._gpu = machine.gpu_handle(self.library, torch.device("cuda", index))
        self._last = self._counters()
        self.source = name if self._last else None
        return self

    def __exit__(self, *error: Any) -> None:
        self.read()
        if self._mine and self.library is not None:
            self.library.nvmlShutdown()
        self.library, self._last = None, {}

    @property
    def joules(self) -> float | None:
        """Up to the latest `read()`, or to the end."""
        return self._joules if self.source else None

    def read(self) -> float | None:
        """Joules so far; None where there is no meter, or it has stopped answering."""
        if self._last:
            now = self._counters()
            if now.keys() != self._last.keys():
                self.source, self._last = None, {}
            else:
                self._joules += sum((value - self._last[p][0]) % (end + 1) for p, (value, end) in now.items()) / 1e6
                self._last = now
        return self.joules

    def _counters(self) -> Counters:
        if self.device.type == "cpu":
            return rapl(self.root)
        told = self._gpu and machine.read(self.library, "nvmlDeviceGetTotalEnergyConsumption", self._gpu)
        return {} if told is None else {"gpu": (1000 * told, 2**64)}


def rapl(root: Path = POWERCAP) -> Counters:
    """The domains of processor packages and their memory. Cores and graphics are parts of a package and `psys` is made
    of all, so they are left out. Empty where nothing can be read."""
    found = {}
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's too
        with contextlib.suppress(OSError, ValueError):
            if (folder / "name").read_text().strip().startswith(("package", "dram")):
                value, end = (int((folder / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
                found[folder] = value, end
    return found


def total(meters: Iterable[float | None]) -> float | None:
    """The sum of several meters' joules; None where one of them has nothing to tell."""
    found = list(meters)
    return None if not found or any(j is None for j in found) else sum(found)
