"""Gradus: plan it, train it, prove it. Six transformer families, one recipe grammar, one exact trainer."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_ROOMS = ("recipe", "rows", "layers", "models", "data", "tasks", "parallel", "train", "measure", "infer", "api")


def __getattr__(name: str) -> Any:  # rooms load on first use: `import gradus` loads no torch
    if name in _ROOMS:
        return import_module(f"gradus.{name}")
    raise AttributeError(f"module 'gradus' has no attribute {name!r}")
