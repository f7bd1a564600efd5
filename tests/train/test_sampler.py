"""What a machine does while a run trains."""

from __future__ import annotations

import os
import time
import types

import pynvml as real
import pytest
import torch
from nvml_parts import GIB, a100

from gradus.train import sampler


def test_sampler_on_this_machine():
    asked = sampler.Sampler(torch.device("cpu"))
    end = time.monotonic() + 0.25
    while time.monotonic() < end:  # one CPU is busy
        pass
    block = torch.ones(32 * 2**20 // 4)
    rows = {r.name: r for r in asked.read(7)}
    assert not any(name.startswith("gpu") for name in rows)
    assert 80 / os.cpu_count() <= rows["cpu/utilisation"].value <= 100 and rows["cpu/utilisation"].unit == "%"
    assert all(r.step == 7 for r in rows.values())
    resident = rows["memory/resident"].value
    with open("/proc/self/status") as f:
        told = next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))
    assert abs(resident - told) < 8 * 2**20 and resident > block.nbytes
    spent = [_seconds(asked.read) for _ in range(50)]
    assert min(spent) < 1e-3


def _seconds(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def test_sampler_reads_the_gpu_of_this_process(fake, monkeypatch):
    module = fake(a100())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1b"))
    asked = sampler.Sampler(torch.device("cuda", 0))
    rows = {r.name: (r.value, r.unit) for r in asked.read(1) if r.name.startswith("gpu")}
    assert rows == {
        "gpu0/utilisation": (97, "%"),
        "gpu0/memory_used": (GIB, "bytes"),
        "gpu0/power": (65.12, "W"),
        "gpu0/temperature": (41, "°C"),  # that of NVML's second GPU, which is PyTorch's first
    }
    module.figures["nvmlDeviceGetPowerUsage"] = real.NVMLError_GpuIsLost()
    assert "gpu0/power" not in {r.name for r in asked.read(2)}
    asked.close()
    assert module.opened == 0 and not any(r.name.startswith("gpu") for r in asked.read(3))


def test_power_of_the_cpus(tmp_path, monkeypatch):
    def package(n: int, name: str, energy: int) -> None:
        folder = tmp_path / f"intel-rapl:{n}"
        folder.mkdir(exist_ok=True)
        for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", 999_999_999)):
            (folder / file).write_text(f"{text}\n")

    monkeypatch.setattr(sampler, "POWERCAP", tmp_path)
    clock = [100.0]
    monkeypatch.setattr(sampler, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    assert "cpu/power" not in {r.name for r in sampler.Sampler().read()}
    package(0, "package-0", 999_000_000)
    package(1, "package-1", 5_000_000)
    package(2, "psys", 7)  # the whole board: the packages are in it already
    asked = sampler.Sampler()
    package(0, "package-0", 59_000_000)  # round the corner: 60 J
    package(1, "package-1", 25_000_000)
    package(2, "psys", 900_000_000)
    clock[0] += 2.0
    assert {r.name: r.value for r in asked.read()}["cpu/power"] == pytest.approx(40.0)
    assert "cpu/power" not in {r.name for r in asked.read()}  # no time has passed
