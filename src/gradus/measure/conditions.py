"""Under what anything is measured on this machine."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch

from gradus import __version__, limits
from gradus.train.machine import cpu_name


def conditions() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpus": limits.processors(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # what else the machine is doing
        "versions": {"gradus": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }
