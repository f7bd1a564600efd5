"""Meters of energy: a stand-in for NVML whose energy is known, a power capping tree in a folder."""

from __future__ import annotations

import pynvml as real
import pytest
import torch

from gradus.measure import energy
from gradus.measure.energy import Meter, rapl, total
from gradus.train import machine


class FakeNvml:
    """The functions of nvidia-ml-py that a meter calls; `answers`: name → value, exception, or list of both, taken one by one."""

    NVMLError = real.NVMLError

    def __init__(self, **answers):
        for name in answers:
            assert hasattr(real, name), f"nvidia-ml-py has no {name}"
        self.answers, self.closed = answers, 0

    def __getattr__(self, name):
        if not hasattr(real, name):
            raise AttributeError(name)

        def call(*args):
            answer = self.answers.get(name, real.NVMLError_NotSupported())
            if isinstance(answer, list):
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlShutdown(self):
        self.closed += 1


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpu_handle", lambda library, device: "gpu")
    return torch.device("cuda", 0)


def nvml(monkeypatch, **answers):
    library = FakeNvml(**answers)
    monkeypatch.setattr(machine, "open_nvml", lambda: (library, None))
    return library


def test_nvml_counts_millijoules(gpu, monkeypatch):
    library = nvml(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=[1_000_000, 1_002_500, 1_010_000])
    with Meter(gpu) as meter:
        assert meter.read() == 2.5
    assert meter.joules == 10.0 and meter.source == "NVML, energy counter" and library.closed == 1


def test_a_meter_that_falls_silent_has_nothing_to_tell(gpu, monkeypatch):
    nvml(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=[5, real.NVMLError_GpuIsLost()])
    with Meter(gpu) as meter:
        assert meter.read() is None
    assert meter.joules is None and meter.source is None


def test_no_gpu_meter_no_figure(gpu, monkeypatch):
    nvml(monkeypatch)
    with Meter(gpu) as meter:
        pass
    assert meter.joules is None and meter.source is None
    monkeypatch.setattr(machine, "open_nvml", lambda: (None, None))
    with Meter(gpu) as meter:
        pass
    assert meter.joules is None


def domain(root, place: str, name: str, energy_uj: int, wraps: int = 262_143_328_850):
    folder = root / f"intel-rapl:{place}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{wraps}\n")


def test_rapl_adds_packages_and_memory_and_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    for place, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")):
        domain(tmp_path, place, name, 1_000_000)
    assert len(rapl()) == 3
    with Meter("cpu") as meter:
        domain(tmp_path, "0", "package-0", 31_000_000)
        domain(tmp_path, "0:0", "core", 20_000_000)  # a part of its package
        domain(tmp_path, "0:1", "dram", 6_000_000)
        domain(tmp_path, "2", "psys", 90_000_000)  # all of it once more
    assert meter.joules == 30 + 5 and meter.source == "RAPL, whole machine"


def test_rapl_wraps_around(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    domain(tmp_path, "0", "package-0", 9_999_000, wraps=9_999_999)
    with Meter("cpu") as meter:
        domain(tmp_path, "0", "package-0", 1_999_999, wraps=9_999_999)
        assert meter.read() == pytest.approx(2.000999)
        domain(tmp_path, "0", "package-0", 999_999, wraps=9_999_999)  # round once more
    assert meter.joules == pytest.approx(2.000999 + 9.0)


def test_no_rapl_or_not_readable(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    for root in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(energy, "POWERCAP", root)
        with Meter("cpu") as meter:
            pass
        assert meter.joules is None and meter.source is None
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    domain(tmp_path, "0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    with Meter("cpu") as meter:
        pass
    assert meter.joules is None
    domain(tmp_path, "0", "package-0", 1)
    with Meter("cpu") as meter:
        (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules is None, "it stopped answering on the way"


def test_other_devices_have_no_meter():
    with Meter("mps") as meter:
        pass
    assert meter.joules is None


def test_meters_add_up_only_when_all_can_be_read():
    assert total([1.0, 2.5]) == 3.5 and total([1.0, None]) is None and total([]) is None
