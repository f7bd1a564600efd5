"""The machine as found: operating system, processor, memory, GPUs, links, versions, what can start and join processes.

What is not there, or cannot be read, is absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import math
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gradus import __version__, limits
from gradus.parallel.world import LARGE_PAGES

KERNEL_CACHES = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}  # shapes; 1 to 2 MB each
LARGE_PAGE = 1 << 21  # bytes
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "transformers", "mpi4py", "nvidia-ml-py")
LAUNCHERS = ("torchrun", "mpirun", "srun")
CPU_FLAGS = (  # of x86, then of ARM: what matrix products run faster with
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "sve", "sve2", "i8mm", "bf16"),
)
GROUP_FILES = (  # of a control group, of version 2 and of version 1: its limit, what it has; of that, files not in use
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
# what lies between two GPUs (NVML's nvmlGpuTopologyLevel_t)
PATHS = {0: "same board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "PCIe host bridge",
         40: "same NUMA node", 50: "between NUMA nodes"}  # fmt: skip


def describe() -> dict[str, Any]:
    """What this machine is, as plain values that JSON can hold. Bytes, °C, W and % (0..100), by the names that
    nvidia-smi has for them."""
    memory, limit = memory_bytes()
    facts: dict[str, Any] = {
        "gradus": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "os": _os_name(),
        "host": socket.gethostname(),
        "versions": _versions(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "cpus_allowed": limits.processors(),
        "cpu_flags": cpu_flags(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "memory_limit_bytes": limit,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "torch_cuda": torch.version.cuda,
        "torch_gpus": torch.cuda.device_count(),
        "backends": _backends(),
        "launchers": _launchers(),
        **_nvidia(),
    }
    return {k: v for k, v in facts.items() if v not in (None, {}, [], 0)}


def tune_memory() -> None:
    """Where the C library is glibc, this process keeps the memory that it frees: malloc would return pieces of 32 MB
    and more to the system, which must clear their pages again in every step, 4 kB at a time: an eighth of the time of a
    small GPT's. Where PyTorch asks for pages of 2 MB (LARGE_PAGES), pieces of 8 MB and more do go back: they are fast
    to clear, and kept they leave gaps that no gathered weight fits. What PyTorch and oneDNN keep for every shape that a
    product in bf16 has had is bounded, before the first of them."""
    for name, kernels in KERNEL_CACHES.items():
        os.environ.setdefault(name, kernels)
    if has_glibc():
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        if os.environ.get(LARGE_PAGES) == "1":
            mallopt(-3, 1 << 23)  # M_MMAP_THRESHOLD
        else:
            mallopt(-4, 0)  # M_MMAP_MAX


def release_freed_memory() -> None:
    """What this process keeps of freed memory goes back to the system: other shapes follow, which it may not suit."""
    if has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """What a training process keeps of freed memory (`tune_memory`) goes back to the system where it no longer suits
    the batches: ahead of the largest so far, and where the process has grown by GROWN since the last release."""

    GROWN = 1.05

    def __init__(self):
        self.largest, self.level, self.released = 0, 0, False

    def before_step(self, elements: int) -> None:
        """elements: of the step's largest micro-batch."""
        own = resident() - resident(of_files=True)  # pages of files that are mapped come and go
        if self.released:  # before the last step: so much does a step need
            self.level, self.released = max(self.level, own), False
        if elements > self.largest or own > self.GROWN * self.level:
            self.largest, self.released = max(self.largest, elements), True
            release_freed_memory()


def has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def large_pages(size: int) -> torch.Tensor:
    """So many bytes, in pages of 2 MB where Linux has them: what reads them all looks up fewer, and is faster."""
    memory = torch.empty(size + LARGE_PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % LARGE_PAGE :][:size]
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), 14)  # MADV_HUGEPAGE; may be refused
    return memory


def cpu_flags() -> list[str]:
    """Of CPU_FLAGS those that this processor has. Linux."""
    return [flag for flag in CPU_FLAGS if flag in _cpuinfo("flags", "Features").split()]


def bf16_units() -> bool | None:
    """Whether this processor has instructions for bf16: without them a product may take tens of times as long as in
    fp32. None where the system does not tell."""
    flags = set(cpu_flags())
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & flags) if flags else None


def cpu_name() -> str:
    """The processor's name as the system has it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(*names: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(names):
                return line.split(":", 1)[1].strip()
    return ""


def _os_name() -> str | None:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def memory_bytes() -> tuple[int | None, int | None]:
    """(bytes of memory, bytes that this container may use where that is less)."""
    memory = limits.memory()
    if memory == math.inf:
        return None, None
    limit = min((limit for limit, _ in _group_memory()), default=memory)
    return memory, limit if limit < memory else None


def free_bytes() -> int | None:
    """Bytes that programs may still take now, of this host or of this container or job where that is less; memory of
    files, which the system gives up, counts as free. None where the system does not tell (only Linux does)."""
    with contextlib.suppress(OSError, TypeError):  # TypeError: a kernel older than 3.14
        free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
        return max(0, min([free, *(limit - used for limit, used in _group_memory())]))
    return None


def _group_memory() -> Iterator[tuple[int, int]]:
    """(bytes that it may take, bytes that it has less those of files not in use) of each control group that has a
    limit."""
    for folder in limits.control_groups("memory"):
        for limit, used, files in GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # ValueError: `max`, no limit
                limited, taken = (int((folder / name).read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limited, taken - int(stat.get(files, 0))


def resident(of_files: bool = False) -> int:
    """Bytes of this process in memory now; of_files: those that are of files. 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1 + of_files]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _backends() -> list[str]:
    """The collective back ends that can be used here. mpi counts where there are mpi4py and an mpirun; the library
    itself is not loaded."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    has = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
        "mpi": importlib.util.find_spec("mpi4py") is not None and "mpirun" in _launchers(),
    }
    return [name for name, there in has.items() if there]


def _launchers() -> dict[str, str]:
    """Launcher → its path: on PATH, or beside this Python."""
    search_path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    return {name: path for name in LAUNCHERS if (path := shutil.which(name, path=search_path))}


def open_nvml() -> tuple[ModuleType | None, str | None]:
    """(NVIDIA's management library, opened: end with its nvmlShutdown(); None), else (None, why a driver that is there
    does not answer). (None, None) where there is no driver, or no package nvidia-ml-py to ask it with."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None, None
    except pynvml.NVMLError as e:
        return None, str(e)
    return pynvml, None


def read(library: ModuleType, function: str, *args: Any) -> Any:
    """One figure of NVML's; None where this GPU, driver or user does not have it."""
    try:
        return getattr(library, function)(*args)
    except library.NVMLError:
        return None


def _nvidia() -> dict[str, Any]:
    """Driver, CUDA, each GPU and what lies between them, as NVML tells."""
    library, error = open_nvml()
    if library is None:
        return {"nvml_error": error}  # reported, not raised: a run on the CPU need not end for it
    gpus, handles = [], {}
    try:
        for i in range(read(library, "nvmlDeviceGetCount") or 0):
            try:
                handles[i] = library.nvmlDeviceGetHandleByIndex(i)
                gpus.append({"index": i, **_gpu(library, handles[i])})
            except library.NVMLError as e:
                gpus.append({"index": i, "error": str(e)})
        cuda = read(library, "nvmlSystemGetCudaDriverVersion_v2")
        return {
            "driver": read(library, "nvmlSystemGetDriverVersion"),
            "driver_cuda": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": gpus,
            "gpu_links": list(_links(library, handles)),
        }
    finally:
        library.nvmlShutdown()


def _gpu(library: ModuleType, gpu: Any) -> dict[str, Any]:
    def ask(what: str, *args: Any) -> Any:
        return read(library, f"nvmlDeviceGet{what}", gpu, *args)

    pci, memory, use, ecc, mig = map(ask, ("PciInfo", "MemoryInfo", "UtilizationRates", "EccMode", "MigMode"))
    power, cap, mode, state = map(ask, ("PowerUsage", "EnforcedPowerLimit", "ComputeMode", "PerformanceState"))
    generation, width = (f"{ask(f'CurrPcieLink{of}')} of {ask(f'MaxPcieLink{of}')}" for of in ("Generation", "Width"))
    facts = {
        "name": ask("Name"),
        "temperature_c": ask("Temperature", library.NVML_TEMPERATURE_GPU),
        "performance_state": None if state is None or state == library.NVML_PSTATE_UNKNOWN else f"P{state}",
        "persistence_mode": _on(ask("PersistenceMode")),
        "power_w": power and power / 1000,
        "power_cap_w": cap and cap / 1000,
        "bus_id": pci and pci.busId,
        "display_active": _on(ask("DisplayActive")),
        "memory_used_bytes": memory and memory.used,
        "memory_bytes": memory and memory.total,
        "ecc_mode": ecc and _on(ecc[0]),
        "ecc_errors": ask("TotalEccErrors", library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC),
        "utilisation": use and use.gpu,
        "memory_utilisation": use and use.memory,
        "compute_mode": None if mode is None else COMPUTE_MODES[mode],
        "mig_mode": mig and _on(mig[0]),
        "pcie": None if "None" in generation + width else f"generation {generation}, {width} lanes",
        "nvlinks": _nvlinks(library, gpu),
    }
    return {k: v for k, v in facts.items() if v is not None}


def _on(value: int | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _nvlinks(library: ModuleType, gpu: Any) -> str | None:
    """For example `18, version 4`: the NVLinks that are up."""
    up = [i for i in range(library.NVML_NVLINK_MAX_LINKS) if read(library, "nvmlDeviceGetNvLinkState", gpu, i)]
    if not up:
        return None
    version = read(library, "nvmlDeviceGetNvLinkVersion", gpu, up[0])
    return str(len(up)) + (f", version {version}" if version else "")


def _links(library: ModuleType, gpus: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """What lies between each two GPUs: NVLink, or the way over PCIe."""
    for (i, a), (j, b) in itertools.combinations(gpus.items(), 2):
        nvlink = read(library, "nvmlDeviceGetP2PStatus", a, b, library.NVML_P2P_CAPS_INDEX_NVLINK)
        if nvlink == library.NVML_P2P_STATUS_OK:
            yield {"gpus": [i, j], "path": "NVLink"}
        elif (level := read(library, "nvmlDeviceGetTopologyCommonAncestor", a, b)) is not None:
            yield {"gpus": [i, j], "path": PATHS.get(level, f"topology level {level}")}


def gpu_handle(library: ModuleType, device: torch.device) -> Any:
    """NVML's handle of PyTorch's GPU, found by its unique id (the two number GPUs differently); None where NVML does
    not know it."""
    uuid = re.sub(r"^(GPU|MIG)-", "", str(torch.cuda.get_device_properties(device).uuid))
    by_id = "nvmlDeviceGetHandleByUUID"
    return read(library, by_id, f"GPU-{uuid}") or read(library, by_id, f"MIG-{uuid}")
