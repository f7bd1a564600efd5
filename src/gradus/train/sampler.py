"""How busy the machine is during a run: one row for each figure that can be read, at each call. No thread."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from gradus.rows import Row
from gradus.train import machine
from gradus.train.loop import Hook, Trainer

PROC = Path("/proc")
POWERCAP = Path("/sys/class/powercap")


class Sampler(Hook):
    """Utilisation, memory, power and temperature of this process's GPU (of `devices`, where NVML can be read),
    utilisation and power of the whole machine's CPUs, resident memory of this process. What cannot be read has no row.

    CPU figures are means since the call before; GPU figures are NVML's own, of the last second or less.
    """

    def __init__(self, *devices: torch.device):
        self.library, self.gpus = None, {}
        cuda = [d for d in devices if d.type == "cuda"]
        if cuda:
            # where it does not answer, machine.describe() tells why; training needs no figures
            self.library, _ = machine.open_nvml()
        for d in cuda if self.library else []:
            index = torch.cuda.current_device() if d.index is None else d.index
            handle = machine.gpu_handle(self.library, torch.device("cuda", index))
            if handle is not None:
                self.gpus[index] = handle
        self._jiffies = self._read_jiffies()
        self._energy, self._at = self._read_energy(), time.monotonic()

    def rows(self, trainer: Trainer) -> list[Row]:
        return self.read(trainer.progress.step)

    def read(self, step: int | None = None) -> list[Row]:
        """`gpuN/utilisation` (%), `gpuN/memory_used` (bytes, of all processes on it), `gpuN/power` (W),
        `gpuN/temperature` (°C); `cpu/utilisation` (%), `cpu/power` (W, the packages that RAPL counts),
        `memory/resident` (bytes)."""
        rows = [row for index, handle in self.gpus.items() for row in self._gpu(index, handle, step)]
        jiffies, self._jiffies = self._jiffies, self._read_jiffies()
        if jiffies and self._jiffies:
            busy, total = (after - before for after, before in zip(self._jiffies, jiffies))
            if total > 0:
                rows.append(Row("cpu/utilisation", 100.0 * busy / total, "%", step))
        if self._energy:
            rows += self._power(step)
        if taken := machine.resident():
            rows.append(Row("memory/resident", taken, "bytes", step))
        return rows

    def close(self) -> None:
        if self.library:
            self.library.nvmlShutdown()
        self.library, self.gpus = None, {}

    def _gpu(self, index: int, gpu, step: int | None) -> list[Row]:
        library = self.library
        asked = ("UtilizationRates", "MemoryInfo", "PowerUsage")
        use, memory, power = (machine.read(library, f"nvmlDeviceGet{what}", gpu) for what in asked)
        temperature = machine.read(library, "nvmlDeviceGetTemperature", gpu, library.NVML_TEMPERATURE_GPU)
        figures = (("utilisation", use and use.gpu, "%"), ("memory_used", memory and memory.used, "bytes"),
                   ("power", power and power / 1000, "W"), ("temperature", temperature, "°C"))  # fmt: skip
        return [Row(f"gpu{index}/{name}", value, unit, step) for name, value, unit in figures if value is not None]

    @staticmethod
    def _read_jiffies() -> tuple[int, int] | None:
        """(busy, all) ticks of all CPUs since boot; waiting for a disk counts as idle (proc(5))."""
        try:
            with open(PROC / "stat", encoding="ascii") as f:
                # user, nice, system, idle, iowait, irq, softirq, steal
                ticks = [int(n) for n in f.readline().split()[1:9]]
        except OSError:
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    @staticmethod
    def _read_energy() -> dict[Path, tuple[int, int]]:
        """Package → (microjoules, the value at which its counter starts again), from Linux's power capping framework,
        which on most machines only root can read."""
        counters = {}
        for folder in POWERCAP.glob("intel-rapl:*"):  # AMD's too
            with contextlib.suppress(OSError, ValueError):
                if (folder / "name").read_text().startswith("package"):
                    energy = int((folder / "energy_uj").read_text())
                    counters[folder] = (energy, int((folder / "max_energy_range_uj").read_text()))
        return counters

    def _power(self, step: int | None) -> list[Row]:
        (before, began), (self._energy, self._at) = (self._energy, self._at), (self._read_energy(), time.monotonic())
        if self._energy.keys() != before.keys() or self._at <= began:
            return []
        used = sum((now - before[p][0]) % (wraps + 1) for p, (now, wraps) in self._energy.items())
        return [Row("cpu/power", used / 1e6 / (self._at - began), "W", step)]
