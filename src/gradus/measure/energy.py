"""Energy as a meter reads it: NVIDIA's own counter of a GPU, or RAPL's of the processor packages. Nothing is estimated:
no meter, no figure."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gradus.train import machine

POWERCAP = Path("/sys/class/powercap")
PERIOD = 0.1  # s between two samples of a GPU's power, where it has no counter of energy


class Meter:
    """Joules of what is done within `with Meter(device) as meter:`: `meter.joules`, None where nothing can be read;
    `meter.source` says what was.

    A CUDA device is read by NVML: its energy counter (Volta and newer; millijoules since the driver was loaded), else
    the power it tells ten times a second, integrated by the trapezoid rule. The CPU is read by RAPL (Linux's power
    capping framework, Intel's and AMD's; readable by root alone on most systems): all processor packages and their
    memory, so whatever else runs on the machine counts too. RAPL's counters start again at their end, at full power
    after some minutes at the earliest: call `read()` more often than that.

    library: NVML, opened (None: opened and closed here). root: of the power capping tree.
    """

    def __init__(self, device: torch.device | str = "cpu", *, library: Any = None, root: Path = POWERCAP):
        self.device, self.root = torch.device(device), root
        self.library, self._mine = library, library is None
        self.source: str | None = None
        self._joules, self._seconds = 0.0, 0.0

    def __enter__(self) -> Meter:
        self._gpu = self._sampled = None
        self._last: dict[Path, tuple[int, int]] = {}
        if self.device.type == "cuda":
            self._open_gpu()
        elif self.device.type == "cpu":
            self._last = rapl(self.root)
            self.source = "RAPL, whole machine" if self._last else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._sampled:
            self._sampled.stop()
        self.read()
        if self._mine and self.library is not None:
            self.library.nvmlShutdown()
        self.library = self._gpu = self._sampled = None
        self._last = {}

    @property
    def joules(self) -> float | None:
        """Up to the latest `read()`, or to the end."""
        return self._joules if self.source else None

    def read(self) -> float | None:
        """Joules so far; None where there is no meter, or it has stopped answering."""
        if self._sampled is not None:
            self._joules = self._sampled.joules
        elif self._gpu is not None:
            now = machine.read(self.library, "nvmlDeviceGetTotalEnergyConsumption", self._gpu)
            if now is None:
                self.source = None
            else:
                self._joules += (now - self._before) / 1e3
                self._before = now
        elif self._last:
            now = rapl(self.root)
            if now.keys() != self._last.keys():
                self.source = None
            else:
                self._joules += sum((value - self._last[p][0]) % (end + 1) for p, (value, end) in now.items()) / 1e6
                self._last = now
        return self.joules

    def _open_gpu(self) -> None:
        if self.library is None:
            self.library, _ = machine.open_nvml()
        if self.library is None:
            return
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        gpu = machine.gpu_handle(self.library, torch.device("cuda", index))
        if gpu is None:
            return
        self._before = machine.read(self.library, "nvmlDeviceGetTotalEnergyConsumption", gpu)
        if self._before is not None:
            self._gpu, self.source = gpu, "NVML, energy counter"
        elif machine.read(self.library, "nvmlDeviceGetPowerUsage", gpu) is not None:
            self._sampled, self.source = _Sampled(self.library, gpu), "NVML, sampled power"


def rapl(root: Path = POWERCAP) -> dict[Path, tuple[int, int]]:
    """Domain → (microjoules, where its counter starts again), of processor packages and their memory. Cores and
    graphics are parts of a package and `psys` is made of all, so they are left out. Empty where nothing can be read."""
    found = {}
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's too
        with contextlib.suppress(OSError, ValueError):
            if (folder / "name").read_text().strip().startswith(("package", "dram")):
                found[folder] = (
                    int((folder / "energy_uj").read_text()),
                    int((folder / "max_energy_range_uj").read_text()),
                )
    return found


def total(meters: Iterable[float | None]) -> float | None:
    """The sum of several meters' joules; None where one of them has nothing to tell."""
    found = list(meters)
    return None if not found or any(j is None for j in found) else sum(found)


class _Sampled:
    """The integral over time of the power that a GPU tells, taken in a thread of its own."""

    def __init__(self, library: Any, gpu: Any):
        self.joules = 0.0
        self.library, self.gpu, self._end = library, gpu, threading.Event()
        self._at, self._watts = time.monotonic(), machine.read(library, "nvmlDeviceGetPowerUsage", gpu) / 1e3
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(PERIOD):
            self._take()

    def _take(self) -> None:
        told = machine.read(self.library, "nvmlDeviceGetPowerUsage", self.gpu)
        if told is not None:
            now, watts = time.monotonic(), told / 1e3
            self.joules += (now - self._at) * (watts + self._watts) / 2
            self._at, self._watts = now, watts

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self._take()
