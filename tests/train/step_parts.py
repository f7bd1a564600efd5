"""Packaged recipes made tiny, and a trainer of one."""

from __future__ import annotations

from gradus import recipe as recipes
from gradus.train.loop import Trainer
from gradus.train.session import open_session

TINY = {
    "copy-task": ["model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=2"],
}


def small(name: str, text, tmp_path) -> list[str]:
    """Overrides that make a packaged recipe tiny, without dropout, on the test's own text."""
    cache = f"data.cache={tmp_path / 'cache'}"
    size = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.dropout=0.0", "layout.precision=fp32"]
    return {
        "copy-task": [*TINY["copy-task"], "model.dropout=0.0"],
        "shakespeare-char-gpt": [*size, f"data.path={text}", "model.seq_len=16", cache, "data.limit_valid=4"],
        "wikitext2-bert": [*size, "model.d_ff=32", f"data.path={text}", "data.pack=documents", "tokenizer.vocab_size=300", "model.seq_len=32", "evaluate.test=false", cache],
        "wikitext2-t5": [*size, "model.d_head=8", "model.d_ff=32", f"data.path={text}", "data.pack=documents", "tokenizer.vocab_size=400", "model.seq_len=32", "evaluate.test=false", cache],
        "sst2-bert": ["model.init=null", "model.preset=null", "model.family=bert", *size, "model.d_ff=32", "model.seq_len=32", "data.max_len=32",
                      "tokenizer.kind=bpe", "tokenizer.vocab_size=300", f"data.path={text / 'labelled'}", "data.text=sentence", cache],
    }[name]  # fmt: skip


def trainer(name: str, text, tmp_path, *more: str) -> Trainer:
    extra = ["batch.tokens=null"] if name == "multi30k-seq2seq" else []
    recipe = recipes.load(
        name,
        [
            *small(name, text, tmp_path),
            *extra,
            "batch.samples=12",
            "layout.device=cpu",
            "train.steps=8",
            "schedule.name=constant",
            "schedule.warmup_steps=0",
            *more,
        ],
    )
    session = open_session(recipe)
    return Trainer(session, session.build(), tmp_path / "run")


NAMES = ["copy-task", "shakespeare-char-gpt", "wikitext2-bert", "wikitext2-t5", "sst2-bert"]
