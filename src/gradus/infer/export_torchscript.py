"""TorchScript, by trace: PyTorch has stopped working on it and points to torch.export (pt2)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.errors import UserError
from gradus.infer.exported import GraphEngine
from gradus.infer.graphs import Graph


class TorchScript(GraphEngine):
    """Traces of a model's graphs: their sizes come from the inputs' shapes, which a trace keeps as operations."""

    name = "torchscript"

    @classmethod
    def write(cls, graph: Graph, folder: Path, **options: Any) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its age, and of Python numbers that our checks compare
            traced = torch.jit.trace(graph.module, tuple(graph.inputs.values()), check_trace=False)
            buffer = io.BytesIO()  # PyTorch ends the process where it writes to a full disk itself
            torch.jit.save(torch.jit.freeze(traced), buffer)
        (folder / f"{graph.name}.pt").write_bytes(buffer.getbuffer())
        return {"file": f"{graph.name}.pt"}

    def open(self, paths: dict[str, Path]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.loaded = {name: torch.jit.load(path) for name, path in paths.items()}
            except RuntimeError as e:
                why = str(e).splitlines()[0]
                raise UserError(f"{next(iter(paths.values()))}: not a TorchScript file ({why})") from None

    def call(self, graph: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        return self.loaded[graph](*inputs)
