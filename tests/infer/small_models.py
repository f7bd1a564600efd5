"""Small models of every family, saved and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.infer import Encoded
from gradus.recipe.schema import LlamaConfig, Model

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 24}
SIX = {
    "seq2seq": {"vocab_size": 40, "seq_len": 32}, "t5": {"vocab_size": 40, "d_head": 6},
    "bert": {"vocab_size": 40, "seq_len": 32, "head": "classification", "n_classes": 3},
    "gpt": {"vocab_size": 40, "seq_len": 32}, "llama": {"vocab_size": 40, "seq_len": 32, "n_kv_heads": 2, "d_head": 6, "qk_norm": True},
    "gemma": {"vocab_size": 40, "seq_len": 32, "n_kv_heads": 2, "d_head": 6, "window": 4, "full_every": 2},
    "vit": {"image_size": 8, "patch_size": 4, "n_classes": 3},
}  # fmt: skip
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6]]
LLAMA = LlamaConfig(vocab_size=64, n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, seq_len=48, qkv_bias=True)
INPUTS = Encoded([[3, 1, 4, 1, 5], [9]], None, None)


def saved(family: str, folder: Path, **more) -> torch.nn.Module:
    model = models.build(TypeAdapter(Model).validate_python({"family": family, **SMALL, **SIX[family], **more}), seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    models.save(model, folder)
    return model.eval()


def exported(family: str, folder: Path, *words: str, **more) -> tuple[torch.nn.Module, Path, dict]:
    model = saved(family, folder / "model", **more)
    assert main(["export", str(folder / "model"), "--to", str(folder / "out"), *words]) == 0
    return model, folder / "out", json.loads((folder / "out" / "export.json").read_text())


def needs_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra onnx brings it")


def flip(file: Path) -> None:
    """The signs of some weights: in all formats they begin at multiples of 4 bytes."""
    content = bytearray(file.read_bytes())
    at = len(content) // 8 * 4 + 3
    content[at : at + 400 : 4] = bytes(b ^ 0x80 for b in content[at : at + 400 : 4])
    file.write_bytes(content)


def predicted(model: Path, vit: Path, capsys, engine: str = "torchscript") -> tuple[int, str, str]:
    code, told = main(["predict", str(model), str(vit / "a.png"), "--engine", engine]), capsys.readouterr()
    return code, told.out, told.err
