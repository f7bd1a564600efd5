"""Ten steps of every family against losses kept in full precision. After a change that is meant to move them:

python tests/train/test_golden.py        writes tests/train/golden.json anew
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from gradus import recipe as recipes
from gradus.train.loop import Trainer
from gradus.train.session import open_session

GOLDEN = Path(__file__).with_name("golden.json")
SIZE = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", "layout.precision=fp32", "layout.device=cpu", "batch.samples=8",
        "train.steps=10", "schedule.name=constant", "schedule.warmup_steps=0"]  # fmt: skip
TEXT = ["model.seq_len=24", "tokenizer.kind=byte", "tokenizer.vocab_size=null", "evaluate.test=false"]
FAMILIES = {
    "seq2seq": ("copy-task", ["model.d_ff=64", "model.dropout=0.1", "optimizer.lr=1e-3", "model.share_embeddings=true", "model.tie_output=true"]),
    "gpt": ("shakespeare-char-gpt", [*TEXT, "model.dropout=0.1", "optimizer.lr=1e-3"]),
    "llama": ("shakespeare-char-gpt", [*TEXT, "model.family=llama", "model.n_kv_heads=2", "model.bias=null", "optimizer.lr=1e-3"]),
    "bert": ("wikitext2-bert", [*TEXT, "model.d_ff=64", "data.pack=documents"]),
    "t5": ("wikitext2-t5", [*TEXT, "model.d_ff=64", "model.d_head=8", "data.pack=documents", "tokenizer.kind=bpe", "tokenizer.vocab_size=400"]),
    "vit": (
        "digits-vit",
        ["model.d_ff=64", "model.dropout=0.1", "model.pool=mean", "data.crop=1", "data.mixup=0.5", "optimizer.lr=2e-3", "evaluate.test=false"],
    ),
}


def losses(family: str, folder: Path) -> list[float]:
    """Ten losses on a text made by arithmetic, so that no file is needed."""
    torch.set_num_threads(1)
    words = [f"{(i * i) % 97} and {(7 * i) % 31} make {((i * i) % 97) + (7 * i) % 31}." for i in range(300)]
    (folder / "train.txt").write_text("\n\n".join(words))
    (folder / "valid.txt").write_text("\n\n".join(words[:30]))
    name, more = FAMILIES[family]
    text = [f"data.path={folder}", f"data.cache={folder / 'cache'}"] if name not in ("copy-task", "digits-vit") else []
    session = open_session(recipes.load(name, [*SIZE, *more, *text]))
    trainer = Trainer(session, session.build(), folder / "run")
    torch.manual_seed(0)
    found = []
    for _, step in zip(range(10), trainer.loader.steps(0)):
        found.append(trainer.step(step.micro_batches)[0].item())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_the_golden_ones(family, tmp_path):
    """To 1e-5 relative: other processors round otherwise; a change of the mathematics moves the first digits."""
    assert losses(family, tmp_path) == pytest.approx(json.loads(GOLDEN.read_text())[family], rel=1e-5)


if __name__ == "__main__":
    made = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            made[family] = losses(family, Path(folder))
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
