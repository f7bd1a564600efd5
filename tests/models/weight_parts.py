"""What the tests of weights share: small models with random weights, ours and transformers'."""

from __future__ import annotations

import torch

from gradus import models
from gradus.recipe.schema import (
    LlamaConfig,
)

LLAMA = LlamaConfig(vocab_size=31, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24, seq_len=32)


def random_model(config):
    """Every tensor random, so that a norm or bias that is left out shows."""
    model = models.build(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model.eval()
