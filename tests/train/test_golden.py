"""Ten steps of every family, and of every task, against losses kept in full precision. After a change that is meant to move them:

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
BPE = ["tokenizer.kind=bpe", "tokenizer.vocab_size=400"]
WHOLE = ["model.preset=null", "model.init=null", "model.family=bert"]
CURVES = {
    "seq2seq": ("copy-task", ["model.d_ff=64", "model.dropout=0.1", "optimizer.lr=1e-3", "model.share_embeddings=true", "model.tie_output=true"]),
    "gpt": ("shakespeare-char-gpt", [*TEXT, "model.dropout=0.1", "optimizer.lr=1e-3"]),
    "llama": ("shakespeare-char-gpt", [*TEXT, "model.family=llama", "model.n_kv_heads=2", "model.bias=null", "optimizer.lr=1e-3"]),
    "bert": ("wikitext2-bert", [*TEXT, "model.d_ff=64", "data.pack=documents"]),
    "t5": ("wikitext2-t5", [*TEXT, "model.d_ff=64", "model.d_head=8", "data.pack=documents", *BPE]),
    "vit": (
        "digits-vit",
        ["model.d_ff=64", "model.dropout=0.1", "model.pool=mean", "data.crop=1", "data.mixup=0.5", "optimizer.lr=2e-3", "evaluate.test=false"],
    ),
    "translation, seq2seq": ("multi30k-seq2seq", ["model.d_ff=64", "model.seq_len=32", "optimizer.lr=0.1", *BPE, "data.test=null", "evaluate.test=false"]),
    "sentence pairs, bert": (
        "wikitext2-bert",
        [*TEXT, "model.d_ff=64", "data.pack=documents", "task.next_sentence=true", "model.head=pretraining", "model.pooler=true"],
    ),
    "text classification, bert": ("sst2-bert", ["model.d_ff=64", "model.seq_len=24", "data.max_len=24", "optimizer.lr=1e-3", *WHOLE, *BPE]),
    "adapter, llama": (
        "shakespeare-char-gpt",
        [*TEXT, "model.family=llama", "model.n_kv_heads=2", "model.bias=null", "adapter.rank=4", "optimizer.lr=1e-2"],
    ),
    "experts, llama": (
        "shakespeare-char-gpt",
        [*TEXT, "model.family=llama", "model.n_kv_heads=2", "model.bias=null", "model.n_experts=4", "optimizer.lr=1e-3"],
    ),
}


def losses(curve: str, folder: Path) -> list[float]:
    """Ten losses on a text made by arithmetic, so that no file is needed."""
    torch.set_num_threads(1)
    words = [f"{(i * i) % 97} and {(7 * i) % 31} make {((i * i) % 97) + (7 * i) % 31}." for i in range(300)]
    (folder / "train.txt").write_text("\n\n".join(words))
    (folder / "valid.txt").write_text("\n\n".join(words[:30]))
    for split in ("train", "val"):
        (folder / f"{split}.de").write_text("\n".join(word.replace("make", "macht") for word in words))
        (folder / f"{split}.en").write_text("\n".join(words))
    name, more = CURVES[curve]
    if name == "sst2-bert":
        for split in ("train", "valid"):
            (folder / f"{split}.txt").unlink()
            (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(f"{word}\t{i % 2}\n" for i, word in enumerate(words)))
    text = [f"data.path={folder}", f"data.cache={folder / 'cache'}"] if name not in ("copy-task", "digits-vit") else []
    session = open_session(recipes.load(name, [*SIZE, *more, *text]))
    trainer = Trainer(session, session.build(), folder / "run")
    torch.manual_seed(0)
    found = []
    for _, step in zip(range(10), trainer.loader.steps(0)):
        found.append(trainer.step(step.micro_batches)[0].item())
    return found


@pytest.mark.parametrize("curve", CURVES)
def test_losses_are_the_golden_ones(curve, tmp_path):
    """To 1e-5 relative: other processors round otherwise; a change of the mathematics moves the first digits."""
    assert losses(curve, tmp_path) == pytest.approx(json.loads(GOLDEN.read_text())[curve], rel=1e-5)


if __name__ == "__main__":
    made = {}
    for curve in CURVES:
        with tempfile.TemporaryDirectory() as folder:
            made[curve] = losses(curve, Path(folder))
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
