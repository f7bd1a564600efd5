"""Small recipes, and the lines of what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.recipe import load

COPY = """
model: {family: seq2seq, n_layers: 2, d_model: 64, n_heads: 4, d_ff: 128}
task: {name: copy}
data: {kind: synthetic}
optimizer: {name: adam, lr: 1e-4, betas: [0.9, 0.98], eps: 1.0e-9}
schedule: {name: noam, warmup_steps: 400}
batch: {samples: 80}
train: {epochs: 2}
"""
GPT = """
model: {family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64}
task: {name: causal_lm}
data: {kind: text}
tokenizer: {kind: bpe, vocab_size: 1000}
optimizer: {name: adamw, lr: 1e-3, betas: [0.9, 0.95]}
schedule: {name: cosine, warmup_steps: 10, final: 0.1}
batch: {samples: 8}
train: {steps: 100}
"""
BERT = """
model: {preset: bert-base-cased, init: bert-base-cased, head: classification, n_classes: 2, dropout: 0.2}
task: {name: classification}
data: {kind: labelled, max_len: 512}
tokenizer: {kind: file}
optimizer: {name: adamw, lr: 5e-5}
batch: {samples: 16}
train: {epochs: 2}
"""


def problems(path, overrides=(), **more) -> list[str]:
    """The lines of the error, with the folder of the file taken off."""
    with pytest.raises(UserError) as e:
        load(path, overrides, **more)
    return [line.replace(f"{Path(path).parent}/", "") for line in str(e.value).splitlines()]
