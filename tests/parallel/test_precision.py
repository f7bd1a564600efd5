"""Weights and arithmetic in half precision."""

from __future__ import annotations

import torch

from gradus import models
from gradus.parallel.precision import Precision
from gradus.recipe.schema import GPTConfig


def test_pure_half_casts_the_weights():
    model = Precision("pure_bf16", torch.device("cpu")).cast(models.build(GPTConfig(vocab_size=50, n_layers=2, d_model=16, n_heads=2, seq_len=16)))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
