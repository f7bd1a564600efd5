"""The device on which a process computes."""

from __future__ import annotations

import os

import torch

from gradus import limits
from gradus.errors import UserError

if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > limits.cpu_quota():
    torch.set_num_threads(int(limits.cpu_quota()))  # PyTorch's choice knows no quota


def pick_device(name: str) -> torch.device:
    """`auto` takes the accelerator that is there, else the CPU. Raises UserError when the named one is absent."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        known = accelerator is not None and accelerator.type in ("cuda", "mps")
        return torch.device(accelerator.type) if known else torch.device("cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise UserError(f"layout.device={name}: there is none here. Use layout.device=auto.")
    return torch.device(name)


def enough_devices(name: str, n: int) -> None:
    """Raises UserError where this machine has fewer GPUs than one for each of n processes started here. name:
    layout.device."""
    if pick_device(name).type == "cuda" and n > torch.cuda.device_count():
        there, use = torch.cuda.device_count(), "each process needs its own. Use fewer, or layout.device=cpu."
        raise UserError(f"--processes {n}: GPUs here: {there}, and {use}")
