"""TensorRT: the ONNX file in the type that the engine computes in, the recipe of the build, and the engine itself where
the package is. A plan runs on the kind of GPU and version that it was built with, the other two anywhere.

Networks are strongly typed: from 11 on there is no other kind, and no flag for a precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.errors import UserError
from gradus.infer import export_onnx, note
from gradus.infer.exported import GraphEngine
from gradus.infer.graphs import Graph

WORKSPACE = 4 << 30  # bytes
# Sizes that a profile takes: least, those it is fastest at, most. No graph has more tokens than its model.
SIZES = {
    "batch": (1, 1, 32), "seq": (1, 128, 2048), "past": (0, 128, 2048), "source": (1, 128, 2048),
    "total": (1, 256, 4096),
}  # fmt: skip


class OnnxOfPlan(export_onnx.Onnx):
    """The file that a plan is built from, in ONNX Runtime."""

    def open(self, paths: dict[str, Path]) -> None:
        super().open({name: path.with_suffix(".onnx") for name, path in paths.items()})


class TensorRT(GraphEngine):
    """A built plan, on an NVIDIA GPU."""

    name = "tensorrt"
    packages = ("tensorrt",)
    stand_in = OnnxOfPlan

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    @classmethod
    def write(cls, graph: Graph, folder: Path, precision: str, opset: int | None = None) -> dict[str, Any]:
        about = export_onnx.write(graph, folder, opset)
        about |= {"onnx": about["file"], "file": f"{graph.name}.plan"}
        recipe = build_recipe(graph, precision, about["onnx"], about["file"])
        (folder / f"{graph.name}.build.json").write_text(json.dumps(recipe, indent=1) + "\n")
        trt = package()
        if trt is None:
            note(f"{graph.name}: no TensorRT plan: the package tensorrt is not installed here. Where it is, run here: "
                 f"{recipe['command']}")  # fmt: skip
            return about
        (folder / about["file"]).write_bytes(build(trt, folder / about["onnx"], recipe))
        return about | {"tensorrt": trt.__version__}

    def open(self, paths: dict[str, Path]) -> None:
        trt = package()
        if trt is None or not all(path.is_file() for path in paths.values()):
            why = "the package tensorrt is not installed here" if trt is None else "the plan was not built"
            raise UserError(f"--engine tensorrt: {why}. pip install tensorrt where there is an NVIDIA GPU, and export.")
        runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self.contexts = {}
        for name, path in paths.items():
            plan = runtime.deserialize_cuda_engine(path.read_bytes())
            if plan is None:
                raise UserError(f"{path}: TensorRT {trt.__version__} does not load it. Export it again here.")
            self.contexts[name] = plan.create_execution_context()

    def call(self, graph: str, inputs: list[Tensor]) -> list[Tensor]:
        names, context, outputs = self.graphs[graph], self.contexts[graph], []
        for name, x in zip(names["inputs"], inputs):
            context.set_input_shape(name, tuple(x.shape))
            context.set_tensor_address(name, x.data_ptr())
        cached = list(self.graphs.values())[-1]["inputs"]  # keys and values come out as they go in
        for name in names["outputs"]:
            kind = cached.get(name.replace("present", "past_key_values"), ["float32"])[0]
            shape = tuple(context.get_tensor_shape(name))
            outputs.append(torch.empty(shape, dtype=getattr(torch, kind), device=self.device))
            context.set_tensor_address(name, outputs[-1].data_ptr())
        stream = torch.cuda.current_stream()
        if not context.execute_async_v3(stream.cuda_stream):
            raise UserError(f"--engine tensorrt: sizes outside the profile of {graph}.build.json. Export other sizes.")
        stream.synchronize()
        return outputs


def package() -> Any:
    try:
        import tensorrt
    except ImportError:
        return None
    return tensorrt


def build_recipe(graph: Graph, precision: str, onnx: str, plan: str) -> dict[str, Any]:
    """All that a plan is built from. The command is of TensorRT's own tool."""
    kinds = ("min", "opt", "max")
    profile = {
        name: {kind: sizes(graph, shape, i) for i, kind in enumerate(kinds)} for name, shape in graph.shapes.items()
    }
    shapes_of = {
        kind: ",".join(f"{name}:{'x'.join(map(str, shapes[kind]))}" for name, shapes in profile.items())
        for kind in kinds
    }
    return {
        "onnx": onnx, "plan": plan, "precision": precision, "strongly_typed": True, "workspace_bytes": WORKSPACE,
        "profile": profile,
        "command": (
            f"trtexec --onnx={onnx} --stronglyTyped --minShapes={shapes_of['min']} --optShapes={shapes_of['opt']} "
            f"--maxShapes={shapes_of['max']} --memPoolSize=workspace:{WORKSPACE >> 20}M --saveEngine={plan}"
        ),
    }  # fmt: skip


def sizes(graph: Graph, shape: list[int | str], which: int) -> list[int]:
    longest = graph.module.model.config.longest or SIZES["seq"][2]
    most = {"batch": SIZES["batch"][2]}
    return [n if isinstance(n, int) else min(SIZES[n][which], most.get(n, longest)) for n in shape]


def build(trt: Any, onnx: Path, recipe: dict[str, Any]) -> bytes:
    """The plan of a recipe. trt: the package, of 10.12 or later. Raises UserError with all that its parser found."""
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):  # by its path, for weights beside it
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise UserError(f"--as tensorrt: TensorRT {trt.__version__} does not read {onnx.name}: {errors}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, recipe["workspace_bytes"])
    profile = builder.create_optimization_profile()
    for name, shapes in recipe["profile"].items():
        profile.set_shape(name, shapes["min"], shapes["opt"], shapes["max"])
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError(f"--as tensorrt: TensorRT {trt.__version__} builds no plan of {onnx.name}; its log says why.")
    return bytes(plan)
