"""Gradus: plan it, train it, prove it. Six transformer families, one recipe grammar, one exact trainer."""

import os
import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_ROOMS = ("recipe", "rows", "layers", "models", "data", "tasks", "parallel", "train", "measure", "infer", "api")

# How long a thread without work spins before it sleeps: a variable of each OpenMP library, read when torch is loaded.
# libgomp: turns of a loop, by default 300,000, 7 to 14 ms. libiomp and libomp: ms, by default 200. Where other programs
# use the processors, a thread that spins keeps the one that it waits for from running: benchmarks/busy.py.
SPIN = {"GOMP_SPINCOUNT": "500", "KMP_BLOCKTIME": "1"}
TORCH_SPINS = "torch" in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", *SPIN}  # it was imported before
if "OMP_WAIT_POLICY" not in os.environ:
    for _name, _value in SPIN.items():
        os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:  # rooms load on first use: `import gradus` loads no torch
    if name in _ROOMS:
        return import_module(f"gradus.{name}")
    raise AttributeError(f"module 'gradus' has no attribute {name!r}")
