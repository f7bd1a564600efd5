"""PT2: machine code made by torch.export and AOTInductor, for PyTorch's C++ and Python runtimes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.errors import UserError
from gradus.infer.exported import GraphEngine
from gradus.infer.graphs import Graph
from gradus.parallel.apply import has_compiler
from gradus.parallel.device import pick_device
from gradus.torch_private import compile_ahead, load_ahead


class Pt2(GraphEngine):
    """The compiled model, on the kind of device that it was compiled for: an NVIDIA GPU where there is one, else the
    CPU, whose instructions it may need."""

    name = "pt2"

    @property
    def device(self) -> torch.device:
        return torch.device(next(iter(self.graphs.values()))["device"])

    @classmethod
    def write(cls, graph: Graph, folder: Path, **options: Any) -> dict[str, Any]:
        device, module = pick_device("auto"), graph.module
        if device.type != "cpu":
            module = copy.deepcopy(module).to(device)  # the model that it is checked against stays where it is
        program = torch.export.export(
            module, tuple(x.to(device) for x in graph.inputs.values()), dynamic_shapes=graph.dynamic,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
        if device.type == "cpu" and not has_compiler():
            raise UserError("--as pt2: AOTInductor finds no C++ compiler here. Install g++, or use --as onnx.")
        try:
            print(f"compiling {graph.name}: a minute or more", file=sys.stderr, flush=True)
            # Without asserts of what held for the example: a `past` of 0 is as good.
            packed = compile_ahead(program, {"scalar_asserts": False})
        except RuntimeError as e:  # of its many kinds, e.g. no compiler
            why = next(iter(str(e).strip().splitlines()), type(e).__name__)
            raise UserError(f"--as pt2: AOTInductor cannot compile it ({why}). Use --as onnx.") from None
        (folder / f"{graph.name}.pt2").write_bytes(packed)
        return {"file": f"{graph.name}.pt2", "device": device.type}

    def open(self, paths: dict[str, Path]) -> None:
        if self.device.type != "cpu" and not torch.accelerator.is_available():
            raise UserError(f"--engine pt2: it was compiled for {self.device}, and there is none here. Export it here.")
        self.loaded = {name: load_ahead(str(path)) for name, path in paths.items()}

    def call(self, graph: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        return self.loaded[graph](*inputs)
