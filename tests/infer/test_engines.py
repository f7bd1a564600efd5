"""Engines: one interface, and one clear line for what cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus import models
from gradus.errors import UserError
from gradus.infer import engines, find
from gradus.recipe.schema import BertConfig

sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.parametrize("name, precision, said", [("compild", "fp32", "Did you mean.*compiled"), ("torch", "int8", "Use --precision fp32 or bf16 or fp16")])
def test_what_cannot_be_is_one_line(source, name, precision, said):
    with pytest.raises(UserError, match=said):
        engines.open(source, name, precision)


def test_encoders_have_no_one_row(tmp_path):
    models.save(models.build(BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)), tmp_path / "bert")
    with pytest.raises(UserError, match="not for encoders"):
        engines.open(find(str(tmp_path / "bert")), "compiled", "int8")
