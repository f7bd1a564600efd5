"""Gradus: plan it, train it, prove it. Six transformer families, one recipe grammar, one exact trainer."""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_ROOMS = ("recipe", "rows", "layers", "models", "data", "tasks", "parallel", "train", "measure", "infer", "api")

# How long a thread without work spins before it sleeps, in ms, where PyTorch has Intel's or LLVM's OpenMP library, that
# reads it as it is loaded; by default 200. Of libgomp, which PyTorch's wheels for Linux have, see gradus.spin.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("KMP_BLOCKTIME", "1")


def __getattr__(name: str) -> Any:  # rooms load on first use: `import gradus` loads no torch
    if name in _ROOMS:
        return import_module(f"gradus.{name}")
    raise AttributeError(f"module 'gradus' has no attribute {name!r}")
