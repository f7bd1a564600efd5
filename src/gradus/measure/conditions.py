"""Under what anything is measured on this machine."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch

from gradus import __version__
from gradus.train.machine import cpu_name


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conditions() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpus": processors(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # what else the machine is doing
        "versions": {"gradus": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }
