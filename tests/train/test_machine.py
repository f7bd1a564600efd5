"""The machine as found: this one for what every machine has, a stand-in for NVML (checked against the real module's names) for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pynvml as real
import pytest
import torch
from nvml_parts import GIB, a100

from gradus import limits
from gradus.measure.machine import lines
from gradus.train import log, machine, sampler


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


def test_freed_memory_goes_back_ahead_of_the_largest_batch_and_where_the_process_has_grown(monkeypatch):
    held, released = 0, []
    monkeypatch.setattr(machine, "resident", lambda of_files=False: 7 if of_files else held + 7)
    monkeypatch.setattr(machine, "release_freed_memory", lambda: released.append(step))
    freed = machine.FreedMemory()
    # a step's batch, and bytes before it
    steps = [(10, 100), (10, 200), (10, 205), (30, 205), (20, 300), (30, 310), (10, 330), (10, 250), (30, 340), (30, 345)]
    for step, (elements, held) in enumerate(steps):  # noqa: B007
        freed.before_step(elements)
    # first; a larger batch; 330 > 1.05 × 300, which the largest took, though less is held after it: 250; and again
    assert released == [0, 3, 6, 8] and freed.level == 345


def test_training_gives_freed_memory_back_ahead_of_its_largest_batch(tmp_path, monkeypatch):
    from gradus import recipe as recipes
    from gradus.train import run

    sizes, released = [], []
    before = machine.FreedMemory.before_step
    monkeypatch.setattr(machine, "release_freed_memory", lambda: released.append(max(sizes)))
    monkeypatch.setattr(machine.FreedMemory, "before_step", lambda self, n: (sizes.append(n), before(self, n)))
    monkeypatch.setattr(machine.FreedMemory, "GROWN", 1e9)
    small = ["layout.device=cpu", "model.d_model=16", "model.n_layers=1", "model.d_ff=16", "train.steps=3", "evaluate.samples=0", "data.n_train=12", "batch.samples=8"]
    run.train(recipes.load("copy-task", [*small, "data.n_valid=4", f"log.dir={tmp_path / 'run'}"]))
    assert len(sizes) == 3 and sizes[0] == sizes[2] > sizes[1], "an epoch's last batch is smaller"
    assert released.count(sizes[0]) >= 1 and sizes[1] not in released


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


@pytest.mark.parametrize(
    "names",
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_memory_of_a_job_in_a_control_group(monkeypatch, tmp_path, names):
    """The least of the host's and of each group's, as Slurm nests them; files that are not in use can be given up."""
    version1 = "limit" in names[0]
    (tmp_path / "groups").write_text("4:memory:/job/step\n" if version1 else "0::/job/step\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    root = tmp_path / ("memory" if version1 else "")
    for folder, limit, used, files in (("job", 3 * 10**8, 2 * 10**8, 10**8), ("job/step", 4 * 10**8, 10**8, 0)):
        (root / folder).mkdir(parents=True)
        for name, text in zip(names, (limit, used, f"{names[2]} {files}\nanon 5\n")):
            (root / folder / ("memory.stat" if name == names[2] else name)).write_text(str(text))
    assert machine.memory_bytes() == (limits.memory(), 3 * 10**8)
    assert machine.free_bytes() == 2 * 10**8
    (root / "job/memory.stat").unlink()
    assert machine.free_bytes() == 3 * 10**8, "a group that does not tell all is left out"
    (tmp_path / "groups").unlink()
    assert 0 < machine.free_bytes() <= limits.memory() and machine.memory_bytes() == (limits.memory(), None)
