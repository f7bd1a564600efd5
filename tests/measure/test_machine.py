"""The machine as found: this one for what every machine has, a stand-in for NVML (checked against the real module's names) for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types

import pynvml as real
import pytest
import torch

from gradus import cli
from gradus.measure.machine import lines
from gradus.train import log, machine, sampler

GIB = 2**30


class FakeNvml(types.ModuleType):
    """pynvml with its real constants and errors, two GPUs of our own, and `NotSupported` for all that `figures` does not name."""

    def __init__(self, figures: dict, start: Exception | None = None):
        super().__init__("pynvml")
        unknown = [name for name in figures if not hasattr(real, name)]
        assert not unknown, f"no such functions in nvidia-ml-py: {unknown}"
        self.opened, self.figures, self.start = 0, figures, start

    def __getattr__(self, name: str):
        value = getattr(real, name)  # AttributeError for a name that nvidia-ml-py does not have
        if not name.startswith("nvml"):
            return value

        def call(*args):
            assert self.opened > 0, f"{name} before nvmlInit"
            answer = self.figures.get(name, real.NVMLError_NotSupported())
            answer = answer(*args) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlInit(self):
        if self.start:
            raise self.start
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1


def a100(**changed) -> dict:
    space = types.SimpleNamespace
    return {
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": lambda i: f"gpu {i}",
        "nvmlDeviceGetHandleByUUID": lambda u: "gpu 1" if u == "GPU-1b" else real.NVMLError_NotFound(),
        "nvmlSystemGetDriverVersion": "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": 13000,
        "nvmlDeviceGetName": "NVIDIA A100 80GB PCIe",
        "nvmlDeviceGetTemperature": lambda gpu, sensor: {"gpu 0": 33, "gpu 1": 41}[gpu],
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetPowerUsage": 65_120,  # milliwatts
        "nvmlDeviceGetEnforcedPowerLimit": 300_000,
        "nvmlDeviceGetPciInfo": space(busId="00000000:00:06.0"),
        "nvmlDeviceGetDisplayActive": 0,
        "nvmlDeviceGetMemoryInfo": space(used=GIB, total=80 * GIB, free=79 * GIB),
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetUtilizationRates": space(gpu=97, memory=12),
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetTopologyCommonAncestor": 50,
        **changed,
    }


@pytest.fixture
def fake(monkeypatch):
    def install(figures: dict, start: Exception | None = None) -> FakeNvml:
        module = FakeNvml(figures, start)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


def test_this_machine():
    found = machine.describe()
    assert json.loads(json.dumps(found)) == found
    assert found["cpus"] == os.cpu_count() and found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "gloo" in found["backends"] and "torchrun" in found["launchers"]
    assert None not in found.values()
    with open("/proc/meminfo") as f:
        kib = int(f.readline().split()[1])
    assert found["memory_bytes"] == 1024 * kib
    before = log.environment(torch.device("cpu"))
    assert {k: found[k] for k in before if k != "device"} == {k: v for k, v in before.items() if k != "device"} | {"versions": found["versions"]}


def test_env_prints_what_is_there_and_nothing_else(capsys):
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    assert machine.cpu_name() in said and torch.__version__.partition("+")[0] in said
    assert "N/A" not in said and "None" not in said
    if not torch.cuda.is_available():
        assert "GPU " not in said and "nccl" not in said
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"] == machine.describe()["host"]


def test_gpus(fake):
    module = fake(a100())
    found = machine.describe()
    assert module.opened == 0
    assert found["driver"] == "580.65.06" and found["driver_cuda"] == "13.0"
    assert found["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA A100 80GB PCIe",
        "temperature_c": 41,
        "performance_state": "P0",
        "persistence_mode": "on",
        "power_w": 65.12,
        "power_cap_w": 300.0,
        "bus_id": "00000000:00:06.0",
        "display_active": "off",
        "memory_used_bytes": GIB,
        "memory_bytes": 80 * GIB,
        "ecc_mode": "on",
        "ecc_errors": 0,
        "utilisation": 97,
        "memory_utilisation": 12,
        "compute_mode": "default",
        "mig_mode": "off",
        "pcie": "generation 1 of 4, 16 of 16 lanes",
    }
    assert found["gpu_links"] == [{"gpus": [0, 1], "path": "between NUMA nodes"}]
    said = "\n".join(lines(found))
    for part in ("33 °C", "41 °C", "P0", "65 W", "300 W", "1.0 GiB", "80.0 GiB", "97 %", "GPU 0 - GPU 1", "580.65.06"):
        assert part in said
    assert json.loads(json.dumps(found)) == found


def test_what_a_gpu_does_not_tell_is_absent(fake):
    only = {k: v for k, v in a100().items() if k in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName")}
    fake(only)
    assert machine.describe()["gpus"][0] == {"index": 0, "name": "NVIDIA A100 80GB PCIe"}
    assert "gpu_links" not in machine.describe()


def test_nvlinks(fake):
    up = {"nvmlDeviceGetNvLinkState": lambda gpu, i: int(i < 12) if i < 18 else real.NVMLError_InvalidArgument()}
    fake(a100(**up, nvmlDeviceGetNvLinkVersion=4, nvmlDeviceGetP2PStatus=real.NVML_P2P_STATUS_OK))
    found = machine.describe()
    assert found["gpus"][0]["nvlinks"] == "12, version 4"
    assert found["gpu_links"] == [{"gpus": [0, 1], "path": "NVLink"}]


def test_a_lost_gpu_does_not_hide_the_others(fake):
    fake(a100(nvmlDeviceGetHandleByIndex=lambda i: f"gpu {i}" if i else real.NVMLError_GpuIsLost()))
    first, second = machine.describe()["gpus"]
    assert "lost" in first["error"].lower() and second["temperature_c"] == 41
    assert first["error"] in "\n".join(lines())


def test_no_driver_is_no_gpu_but_a_broken_one_is_told(fake, monkeypatch):
    fake({}, real.NVMLError_LibraryNotFound())
    assert not {"gpus", "driver", "nvml_error"} & machine.describe().keys()
    assert sampler.Sampler(torch.device("cuda")).gpus == {}
    fake({}, real.NVMLError_DriverNotLoaded())
    assert "Driver Not Loaded" in machine.describe()["nvml_error"]
    assert "Driver Not Loaded" in "\n".join(lines())
    assert sampler.Sampler(torch.device("cuda")).gpus == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the package is missing
    assert not {"gpus", "driver", "nvml_error"} & machine.describe().keys()


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


# ---------------------------------------------------------------- what is kept for every shape


SHAPES = """
import sys, torch
from gradus.train import machine
torch.set_num_threads(1)
machine.tune_memory()
layer = torch.nn.Linear(256, 1024).bfloat16()
for tokens in range(4000, 3000, -int(sys.argv[1])):  # the longest first
    layer(torch.zeros(tokens, 256, dtype=torch.bfloat16)).float().sum().backward()
    first = machine.resident() if tokens == 4000 else first
print(machine.resident() - first)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_kept_for_every_shape_in_bf16_is_bounded():
    """Against the same process with the caches of PyTorch and oneDNN as they are by default, which keep 1,024 shapes."""

    def growth(**env: str) -> int:
        command = [sys.executable, "-c", SHAPES, "5"]
        return int(subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout)

    unbounded = growth(LRU_CACHE_CAPACITY="1024", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
    if unbounded < 100e6:
        pytest.skip(f"200 shapes take {unbounded / 1e6:.0f} MB on this processor")
    assert growth() < 0.7 * unbounded
