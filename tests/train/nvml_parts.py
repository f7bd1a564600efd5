"""A stand-in for NVML with two GPUs."""

from __future__ import annotations

import types

import pynvml as real

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
