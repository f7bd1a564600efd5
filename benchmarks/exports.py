"""The largest difference from PyTorch in fp32 of six small models in each format, as a table of Markdown:

    python benchmarks/exports.py [FORMAT ...]      default: onnx torchscript pt2
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.recipe.schema import Model

SMALL = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128}
SIX = {
    "seq2seq": {"vocab_size": 500, "seq_len": 64},
    "bert": {"vocab_size": 500, "seq_len": 64, "head": "masked_lm"},
    "gpt": {"vocab_size": 500, "seq_len": 64},
    "t5": {"vocab_size": 500, "d_head": 16},
    "llama": {"vocab_size": 500, "seq_len": 64, "n_kv_heads": 2},
    "vit": {"image_size": 32, "patch_size": 8, "n_classes": 10},
}


def difference(folder: Path, kind: str) -> str:
    to = folder / kind
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err := io.StringIO()):
        code = main(["export", str(folder), "--to", str(to), "--as", kind])
    if code:
        raise SystemExit(err.getvalue().strip().splitlines()[-1])
    rows = json.loads((to / "export.json").read_text())["check"]
    return rows if isinstance(rows, str) else f"{max(row['max_abs_delta'] for row in rows):.1e}"


def table(kinds: list[str]) -> None:
    print("| family |", " | ".join(kinds), "|")
    print("|---" * (len(kinds) + 1) + "|")
    for family, sizes in SIX.items():
        with tempfile.TemporaryDirectory() as name:
            model = models.build(TypeAdapter(Model).validate_python({"family": family, **SMALL, **sizes}), seed=0)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.02)
            models.save(model, name)
            print(f"| {family} |", " | ".join(difference(Path(name), kind) for kind in kinds), "|", flush=True)


if __name__ == "__main__":
    table(sys.argv[1:] or ["onnx", "torchscript", "pt2"])
