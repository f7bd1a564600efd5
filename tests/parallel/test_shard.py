"""What FSDP2 gathers as one: blocks, large ends that nothing is tied to, and the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.parallel import gloo
from gradus.parallel.apply import apply
from gradus.parallel.fake import fake_world
from gradus.parallel.mesh import Mesh
from gradus.parallel.shard import ends
from gradus.parallel.traffic import Traffic
from gradus.recipe.schema import BertConfig, GPTConfig, Layout, LlamaConfig, Seq2SeqConfig, T5Config, ViTConfig

sys.path[:0] = [str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402

SIZE = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32}
TEXT = {**SIZE, "vocab_size": 50, "seq_len": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**TEXT), {"token_embedding", "head"}),
        (LlamaConfig(**TEXT, tie_output=True), set()),
        (GPTConfig(**TEXT), set()),
        (GPTConfig(**TEXT, tie_output=False), {"token_embedding", "head"}),
        (BertConfig(**TEXT, head="masked_lm"), set()),
        (BertConfig(**TEXT, head="classification", n_classes=3), {"word_embedding"}),
        (T5Config(**TEXT, tie_output=False), {"embedding", "head"}),
        (Seq2SeqConfig(**TEXT, share_embeddings=False, tie_output=True, target_vocab_size=60), {"source_embedding.tokens"}),
        (ViTConfig(**SIZE, image_size=8, patch_size=4, n_classes=3), set()),
    ],
    ids=lambda x: getattr(x, "family", None),
)
def test_ends(config, expected):
    model = models.build(config)
    names = {module: name for name, module in model.named_modules()}
    assert {names[m] for m in ends(model)} == expected


def test_an_end_is_whole_only_while_it_is_used():
    """Llama's token embedding while the blocks run: given back before the first, and the head not yet gathered."""
    whole = {}
    with fake_world(4) as world:
        mesh = Mesh.make(Layout(shard=4), world)
        model = models.build(LlamaConfig(**TEXT))
        apply(model, Layout(shard=4), mesh)
        units = {name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
        assert units == {"", "blocks.0", "blocks.1", "token_embedding", "head"}

        def look(*_) -> None:
            whole.update({name: not isinstance(p, DTensor) for name, p in model.named_parameters()})

        model.blocks[1].register_forward_pre_hook(look)
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert whole["blocks.1.attention.to_q.weight"] and whole["norm.weight"]
    assert not whole["token_embedding.weight"] and not whole["head.weight"]


def gathers_and_scatters(world) -> None:
    """Oracle: gloo's own collectives, which these replace; the same is counted as sent."""
    n, group = world.size, dist.group.WORLD
    gather, scatter = gloo.AllGather(), gloo.ReduceScatter()
    for size, dtype in ((5, torch.float32), (3000, torch.float32), (7, torch.bfloat16), (1, torch.float32)):
        own = torch.arange(size).to(dtype) + world.rank
        whole, expected = torch.empty(n * size, dtype=dtype), torch.empty(n * size, dtype=dtype)
        with Traffic() as ours:
            gather(whole, own, group)
        with Traffic() as theirs:
            dist.all_gather_into_tensor(expected, own)
        assert torch.equal(whole, expected) and ours.by_kind == theirs.by_kind
        whole += world.rank
        total, expected = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        before = whole.clone()
        with Traffic() as ours:
            scatter(total, whole, group, dist.ReduceOp.SUM)
        with Traffic() as theirs:
            dist.reduce_scatter_tensor(expected, whole.clone())
        assert torch.equal(whole, before) and ours.by_kind == theirs.by_kind
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("n", [2, 3])
def test_gathers_and_scatters_are_gloos(n):
    run(n, gathers_and_scatters)
