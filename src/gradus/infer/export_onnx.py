"""ONNX: files for ONNX Runtime, TensorRT and others (docs/export.md)."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus import files
from gradus.errors import UserError, need
from gradus.infer.exported import GraphEngine
from gradus.infer.graphs import Graph

OLDEST = 18  # opset of PyTorch's exporter; conversions to older ones fail for operators of ours


class Onnx(GraphEngine):
    """ONNX Runtime, on CUDA where its build has it. It has no products of bf16 on a CPU. Its int8 is of encoders:
    products of integers, the inputs' ranges those of the batch."""

    name = "onnx"
    PRECISIONS = dict.fromkeys(("fp32", "fp16"), ("causal", "both", "cross")) | {"int8": ("both",)}
    packages = ("onnxruntime", "onnx", "onnxscript")

    @classmethod
    def write(cls, graph: Graph, folder: Path, precision: str, opset: int | None = None) -> dict[str, Any]:
        about = write(graph, folder, opset)
        if precision == "int8":
            quantize(folder / about["file"])
        return about

    def open(self, paths: dict[str, Path]) -> None:
        ort = need("onnxruntime", "onnx", "--engine onnx")
        if self.precision not in self.PRECISIONS:
            raise UserError(f"ONNX Runtime {ort.__version__} has no {self.precision} matrix products on a CPU")
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.log_severity_level = 3
        try:
            self.sessions = {
                name: ort.InferenceSession(path, settings, providers=[
                    p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in ort.get_available_providers()
                ])
                for name, path in paths.items()
            }  # fmt: skip
        except Exception as e:  # of its own kinds, for a file or an operator that this build does not run
            raise UserError(f"ONNX Runtime {ort.__version__} cannot run it here ({str(e).splitlines()[0]})") from None

    def call(self, graph: str, inputs: list[Tensor]) -> list[Tensor]:
        arrays = {name: x.detach().numpy() for name, x in zip(self.graphs[graph]["inputs"], inputs)}
        return [torch.from_numpy(out) for out in self.sessions[graph].run(None, arrays)]


def write(graph: Graph, folder: Path, opset: int | None = None) -> dict[str, Any]:
    """Write NAME.onnx, and above 2 GB its weights beside. Raises UserError for an opset that the exporter does not
    write, or a model that it cannot."""
    for package in ("onnx", "onnxscript"):
        need(package, "onnx", "writing ONNX")
    if opset is not None and opset < OLDEST:
        why = f"the exporter writes no operators older than {OLDEST}'s"
        raise UserError(f"--opset={opset}: {why}. Leave --opset out.")
    with quiet():
        program = torch.onnx.export(
            graph.module, tuple(graph.inputs.values()), dynamo=True, dynamic_shapes=graph.dynamic, verbose=False,
            input_names=list(graph.inputs), output_names=graph.outputs, opset_version=opset,
        )  # fmt: skip
    written = program.model.opset_imports[""]
    if opset is not None and written != opset:
        why = f"the exporter writes {written}, as it has no conversion of some operator"
        raise UserError(f"--opset={opset}: {why}. Leave --opset out.")
    program.save(folder / f"{graph.name}.onnx")
    return {"file": f"{graph.name}.onnx", "opset": written, "ir": program.model.ir_version}


def quantize(file: Path) -> None:
    """Quantize weights of matrix products and tables to int8 in place, by ONNX Runtime itself."""
    tools = need("onnxruntime.quantization", "onnx", "writing ONNX in int8")
    with quiet(), files.aside(file) as aside:
        kind = tools.QuantType.QInt8  # weights in 7 bits: AVX2 adds two products in 16
        options = {"op_types_to_quantize": ["MatMul", "Gemm", "Gather"], "weight_type": kind}
        tools.quantize_dynamic(file, aside, **options, per_channel=True, reduce_range=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's notes about packages of operators that no model of ours uses."""
    logs = {log: log.level for log in (logging.getLogger("torch.onnx"), logging.getLogger())}
    for log in logs:
        log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for log, level in logs.items():
                log.setLevel(level)
