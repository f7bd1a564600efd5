"""Verbs that take a recipe or a model elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradus.cli.verb import RECIPE, add_command, load_recipe, verb
from gradus.launch import modal, slurm, ssh
from gradus.options import option, real, whole


def _places(p: Any) -> None:
    places = p.add_subparsers(dest="place", metavar="PLACE", required=True)
    for place in (slurm, ssh, modal):
        text = " ".join(place.__doc__.partition(": ")[2].split())
        add_command(places, place.__name__.rpartition(".")[2], text, place.OPTIONS)


@verb(
    "on Slurm, over ssh, on Modal", "gradus launch slurm copy-task --nodes 2 --gpus 4 --dry-run", "launch", _places
)  # fmt: skip
def launch(args) -> int:
    """run a recipe elsewhere: as a Slurm job, on a rented machine over ssh, on Modal"""
    if args.place == "slurm":
        return slurm.launch(args)
    return ssh.launch(args) if args.place == "ssh" else modal.launch(args)


@verb(
    "for Hugging Face, ONNX, ...", "gradus export runs/copy-task/latest --to exported", "export",
    option("model RUN_OR_CHECKPOINT", "a run folder (its best, else newest checkpoint) or a checkpoint"),
    option("--to DIR", "folder to write", required=True),
    option(
        "--as", "Hugging Face's layout (default), graphs, or llama.cpp's GGUF",
        dest="kind", default="hf", choices=["hf", "onnx", "pt2", "torchscript", "tensorrt", "gguf"],
    ),
    option(
        "--precision", "of weights and arithmetic (default: hf as stored, else fp32); norms of graphs stay in fp32",
        choices=["fp32", "bf16", "fp16"],
    ),
    option(
        "--merge",
        "of a run with an adapter: whole weights, merged in fp32 (default for hf: the adapter alone, as PEFT does)",
    ),
    option("--type TYPE", "of GGUF's matrices: f32, f16, bf16, q8_0, q4_0; llama-quantize makes others (default f16)"),
    option("--opset N", "ONNX opset (default: what the exporter writes)", whole(99)),
    option("--shard-gb GB", "largest file (default 5)", real(above=0, most=1e6), default=5.0),
)  # fmt: skip
def export(args) -> Iterable[str]:
    """write a checkpoint, of any layout, as files that other engines load, and check them"""
    from gradus.infer.export import export

    to = Path(args.to)
    return export(args.model, to, args.shard_gb, args.kind, args.precision, args.opset, args.merge, args.type)


@verb(
    "for a machine without internet", "gradus fetch copy-task --to staged", "launch",
    *RECIPE,
    option("--to DIR", "folder to fill", required=True),
    pasted=True,
)  # fmt: skip
def fetch(args) -> Iterable[str]:
    """stage tokenizer, weights and data for a machine without internet"""
    from gradus.train.fetch import fetch

    words = [args.recipe, *args.overrides, *(["--json_file", args.json_file] if args.json_file else [])]
    return fetch(load_recipe(args), Path(args.to), words)
