"""The machine as found, with a word on each figure; and under what anything is measured on it."""

from __future__ import annotations

import functools
import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradus import __version__, limits
from gradus.errors import how_to_install
from gradus.train.machine import cpu_flags, cpu_name, describe

# key of describe() → (label, a word on it)
MACHINE = {
    "host": ("host", "name of this machine"),
    "os": ("OS", "distribution"),
    "system": ("system", "kernel, architecture and C library"),
    "cpu": ("CPU", "the processor"),
    "cpus": ("cores", "CPUs that the system counts (hardware threads)"),
    "cpus_allowed": ("cores allowed", "of these, those that this process may use"),
    "threads": ("threads", "that PyTorch uses in one process"),
    "cpu_flags": ("instructions", "AVX: wide vectors; VNNI: int8; bf16, fp16: half precision; AMX: matrix tiles"),
    "torch_cpu": ("PyTorch uses", "the widest vectors its own CPU kernels are built for here"),
    "memory_bytes": ("RAM", "main memory"),
    "memory_limit_bytes": ("RAM allowed", "limit of this container"),
}
SOFTWARE = {"gradus": ("gradus", "this program"), "python": ("python", "the interpreter")}
PACKAGES = {
    "torch": "tensors, kernels, processes",
    "numpy": "the loader's arrays",
    "safetensors": "weights on disk",
    "tokenizers": "text to ids",
    "pydantic": "the recipe's types",
    "transformers": "only the tests' reference",
    "mpi4py": "MPI from Python",
    "nvidia-ml-py": "reads the figures of NVIDIA's GPUs",
}
BACKENDS = {
    "gloo": "collectives between CPUs, over TCP",
    "nccl": "collectives between NVIDIA GPUs",
    "mpi": "mpi4py and mpirun are here",
}
LAUNCHERS = {
    "torchrun": "PyTorch's launcher, with restarts",
    "mpirun": "starts MPI programs",
    "srun": "starts a step of a Slurm job",
}
DRIVER = {
    "driver": ("driver", "NVIDIA's kernel driver"),
    "driver_cuda": ("CUDA of driver", "the newest CUDA that this driver can run"),
    "torch_cuda": ("CUDA of PyTorch", "the CUDA that it was built with: not newer than the driver's major version"),
    "torch_gpus": ("GPUs for PyTorch", "GPUs that PyTorch sees here (CUDA_VISIBLE_DEVICES hides some)"),
    "nvml_error": ("NVML", "the driver's management library is installed but does not respond"),
}
GPU = {
    "error": ("error", "what NVML reports instead of figures"),
    "name": ("name", "the model"),
    "temperature_c": ("temperature", "of the chip; too hot, it lowers its clock"),
    "performance_state": ("performance state", "P0 is the fastest; P8 and above are idle"),
    "persistence_mode": ("persistence mode", "on: the driver stays loaded between programs, which then start sooner"),
    "power_w": ("power", "drawn now: not what training draws, unless it trains now"),
    "power_cap_w": ("power cap", "to stay below this it lowers its clock"),
    "bus_id": ("bus id", "domain:bus:device.function on PCIe"),
    "display_active": ("display", "on: it drives a screen, which takes memory and time"),
    "memory_used_bytes": ("memory used", "now, by all processes and the driver"),
    "memory_bytes": ("memory", "in total"),
    "ecc_mode": ("ECC", "error correction of the memory"),
    "ecc_errors": ("ECC errors", "not corrected, since the driver was loaded; more than 0: drain this GPU"),
    "utilisation": ("utilisation", "share of the last second or less in which some kernel ran, however small"),
    "memory_utilisation": ("memory utilisation", "share of it in which memory was read or written"),
    "compute_mode": ("compute mode", "default: many processes may use it; exclusive process: one; prohibited: none"),
    "mig_mode": ("MIG", "on: partitioned into several smaller GPUs"),
    "pcie": ("PCIe", "the link to the host now, and at most; when idle it slows down to save power"),
    "nvlinks": ("NVLinks up", "direct links to other GPUs"),
}
# the end of a key → how its figure is written
WRITTEN = {"temperature_c": "{} °C", "power_w": "{:.0f} W", "power_cap_w": "{:.0f} W", "utilisation": "{} %"}


def lines(facts: dict[str, Any] | None = None) -> Iterator[str]:
    """The description (train.machine.describe) as text: a line a figure, its value and a word on it. What is absent has
    no line."""
    facts = describe() if facts is None else facts
    sections = {
        "machine": _figures(MACHINE, facts),
        "software": [*_figures(SOFTWARE, facts), *((k, v, PACKAGES[k]) for k, v in facts.get("versions", {}).items())],
        "several processes": [(name, "yes", BACKENDS[name]) for name in facts.get("backends", [])]
        + [(name, path, LAUNCHERS[name]) for name, path in facts.get("launchers", {}).items()],
        "GPUs": _figures(DRIVER, facts),
        **{f"GPU {gpu['index']}": _figures(GPU, gpu) for gpu in facts.get("gpus", [])},
        "links": [
            ("GPU {} - GPU {}".format(*link["gpus"]), link["path"], "the path between them")
            for link in facts.get("gpu_links", [])
        ],
    }
    for title, figures in sections.items():
        width = min(48, max((len(value) for _, value, _ in figures), default=0))
        yield from [title] if figures else []
        yield from (f"  {label:18}  {value:{width}}  {word}" for label, value, word in figures)
    if facts.get("torch_gpus") and "gpus" not in facts and "nvml_error" not in facts:
        yield f"\nFor the GPUs' figures: {how_to_install('gpu')}"


def _figures(words: dict[str, tuple[str, str]], facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(label, _written(key, facts[key]), word) for key, (label, word) in words.items() if key in facts]


def _written(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    shape = next((shape for end, shape in WRITTEN.items() if key.endswith(end)), "{}")
    return ", ".join(value) if isinstance(value, list) else shape.format(value)


def env(args) -> int:
    """The verb: the machine as text, or as JSON."""
    if args.json:
        print(json.dumps(describe(), indent=1, ensure_ascii=False))
        return 0
    for line in lines():
        print(line)
    return 0


def conditions() -> dict[str, Any]:
    """Of every row that is measured here."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cpus": limits.processors(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # what else the machine is doing
        "versions": {"gradus": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


@functools.cache
def commit() -> str | None:
    """Of the checkout that this program runs from; with + where files differ from it. None: it was installed."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        inside = subprocess.run([*git[:3], "ls-files", Path(__file__).name], capture_output=True, text=True, timeout=10)
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if inside.stdout.strip() else None
