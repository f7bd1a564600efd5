"""A small run that is stopped and goes on, what it comes to, and how files of it are damaged."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import distributed  # noqa: E402

from gradus.rows import read_rows  # noqa: E402

# dropout is on: the generator's state must be part of what is saved
TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.dropout=0.1", "data.n_train=256", "data.n_valid=32",
    "schedule.warmup_steps=5", "batch.samples=16", "layout.micro_batch=8", "layout.device=cpu", "layout.threads=1", "train.steps=40",
    "train.checkpoint_every=3", "evaluate.every=7", "evaluate.batch=16", "evaluate.samples=0", "log.every=1",
]  # fmt: skip


def digest(run: Path) -> str:
    """Of the final weights and optimizer state."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert last.name == "step-00000040"
    return "".join(hashlib.sha256((last / name).read_bytes()).hexdigest() for name in ("model.safetensors", "training.safetensors"))


def losses(run: Path) -> dict[int, float]:
    rows = [r for r in read_rows(run / "metrics.jsonl") if r["name"] == "train/loss"]
    assert len({r["step"] for r in rows}) == len(rows), "a step stands twice in metrics.jsonl"
    return {r["step"]: r["value"] for r in rows}


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def begun(out: Path, function, *words: str):
    """The process of `function(out, *words)`: of its own, and with what takes seconds to import there already. Its processor
    seconds are in no test's price."""
    process = distributed.server().Process(target=function, args=(out, *words))
    process.start()
    return process


def gradus(out: Path, *words: str) -> None:
    """What `gradus WORDS > out 2>&1` does, without a plan."""
    from gradus import cli
    from gradus.proof import prove

    os.environ["OMP_NUM_THREADS"] = "1"
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    prove.Planner = None
    sys.exit(cli.main(list(words)))
