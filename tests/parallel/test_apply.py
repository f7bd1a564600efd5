"""What is applied to a model changes how fast it is and what it keeps, never what it computes."""

from __future__ import annotations

import shutil

import pytest
import torch

from gradus import models
from gradus.layers.lora import LoRALinear
from gradus.parallel.apply import apply
from gradus.recipe.schema import Adapter, GPTConfig, Layout

CONFIG = GPTConfig(vocab_size=50, n_layers=2, d_model=16, n_heads=2, seq_len=16)
ADAPTED = CONFIG.model_copy(update={"n_layers": 1}).trained(Adapter(rank=4))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler")
@pytest.mark.parametrize("config", [CONFIG, ADAPTED], ids=["plain", "adapter"])
def test_compiled_blocks_give_the_same_gradients(config):
    ids = torch.randint(50, (2, 16))
    grads = []
    for mode in ("none", "default"):
        torch.manual_seed(0)
        model = apply(models.build(config), Layout(compile=mode)).model
        assert list(model.state_dict()) == list(models.build(config).state_dict())
        for module in model.modules():
            if isinstance(module, LoRALinear):  # B is 0 at first
                torch.nn.init.normal_(module.b.weight, generator=torch.Generator().manual_seed(1))
        model(ids).square().mean().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_checkpointing_keeps_less():
    """Activations kept for the backward pass: none > selective > full, and attention alone in between."""
    kept = {}
    ids = torch.randint(50, (2, 16))
    for mode in ("none", "attention", "selective", "full"):
        model = apply(models.build(CONFIG), Layout(checkpointing=mode)).model
        seen: dict[int, int] = {}

        def pack(t, seen=seen):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids)
        kept[mode] = sum(size for place, size in seen.items() if place not in weights)
    assert kept["none"] > kept["attention"] > kept["full"]
    assert kept["none"] > kept["full"]
