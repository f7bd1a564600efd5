"""Tensor parallelism follows one process's curve: every family, sequence and vocabulary parallel or not, alone and under FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gradus.layers import summed_cross_entropy
from gradus.models.decoding import complete
from gradus.parallel.apply import use_checkpointing
from gradus.parallel.check import fits
from gradus.parallel.shard import shard
from gradus.parallel.tensor import loss_context, sum_partial_gradients, tensor_parallel
from gradus.recipe.schema import Layout
from gradus.torch_private import FakeTensorMode, join_fake

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import common  # noqa: E402
import distributed  # noqa: E402

SMALL = {"n_layers": 2}
UNEVEN = {"vocab_size": 49, "d_ff": 63}  # 2 does not divide them
VARIANTS = [  # what the six of `common` leave out
    ("seq2seq", {"share_embeddings": False, "norm_first": True, "target_vocab_size": 50, "n_decoder_layers": 1}),
    ("seq2seq", {"share_embeddings": True, "tie_output": False, "output_bias": True}),
    ("t5", {"gated": True, "tie_output": False}),
    ("gpt", {"tie_output": False, "bias": False}),
    ("gpt", {**UNEVEN}),
    ("llama", {"tie_output": True, "qkv_bias": True, **UNEVEN}),
    ("llama", {"qk_norm": True, "d_head": 12}), ("llama", {"qk_norm": True}),
    ("vit", {"pool": "mean", "patches": "rearrange"}),
    ("vit", {"patches": "stem", "patch_size": 4}),
]


def build(mesh, family, layout, **changes):
    model = common.build(family, **changes)
    before = {name: p.shape for name, p in model.named_parameters()}
    tensor_parallel(model, mesh, layout)
    assert {name: p.shape for name, p in model.named_parameters()} == before  # names, whole shapes, and tied ones still once
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    return model


def norm_of(parameters) -> torch.Tensor:
    """The norm of the whole gradient, from each process's shards."""
    total = torch.zeros(())
    for p in parameters:
        assert p.grad.placements == p.placements
        square = p.grad.to_local().float().square().sum()
        for dim, placement in enumerate(p.placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=p.device_mesh.get_group(dim))
        total += square
    return total.sqrt()


def curve(model, family, layout, steps, lr=1e-3, clip=1.0, batch=common.batch, losses=common.losses, data=None):
    """As common.reference. `data`: a mesh axis along which the rows of a batch are split."""
    parameters = list(model.parameters())
    views = [p.to_local().detach() for p in parameters]
    optimizer = torch.optim.AdamW(views, lr=lr)
    found = []
    for step in range(steps):
        b = batch(family, step)
        counts, n = b["counts"], len(next(iter(b.values())))
        if data is not None:
            i, m = data.get_local_rank(), data.size()
            b = common.rows_of(family, b, i * n // m, (i + 1) * n // m)
        with loss_context(layout):
            loss = sum(value / counts[kind] for kind, value in losses(family, model, b).items())
            assert not isinstance(loss, DTensor)
            loss.backward()
        if data is not None:
            dist.all_reduce(total := loss.detach().clone(), group=data.get_group())
            loss = total
        sum_partial_gradients(model)
        norm = norm_of(parameters)
        for p, view in zip(parameters, views):
            view.grad = p.grad.to_local() * min(1.0, clip / (float(norm) + 1e-6))
        optimizer.step()
        model.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def same(found, reference, tolerance=1e-5):
    for step, (a, b) in enumerate(zip(found, reference)):
        assert a == pytest.approx(b, rel=tolerance), f"step {step}: (loss, norm) {a}, not {b}"


def layouts(n):
    return [Layout(tensor=n, sequence_parallel=s, vocab_parallel=v) for s in (True, False) for v in (True, False)]


# ---------------------------------------------------------------- on two processes


def families(world):
    """Every family in the two modes that test_pairs leaves out."""
    mesh = init_device_mesh("cpu", (2,))
    for family in common.CONFIGS:
        expected = common.reference(family, 2, **SMALL)
        for layout in layouts(2)[1:3]:
            same(curve(build(mesh, family, layout, **SMALL), family, layout, 2), expected)


def variants(world):
    mesh = init_device_mesh("cpu", (2,))
    for i, (family, changes) in enumerate(VARIANTS):
        layout = layouts(2)[i % 4]
        same(curve(build(mesh, family, layout, **SMALL, **changes), family, layout, 2), common.reference(family, 2, **SMALL, **changes))


def bert_heads(world):
    """Two kinds of targets, one of which reads the first token; and hidden states that come out whole."""
    mesh = init_device_mesh("cpu", (2,))

    def pretraining(family, model, b):
        words, pairs = model(b["ids"], keep=b["keep"], token_types=(b["ids"] > 20).long(), select=b["select"])
        return {"tokens": summed_cross_entropy(words, b["targets"]), "pairs": summed_cross_entropy(pairs, b["ids"][:, 0] % 2)}

    def classification(family, model, b):
        return {"pairs": summed_cross_entropy(model(b["ids"], keep=b["keep"]), b["ids"][:, 0] % 3)}

    def batch(family, step):
        b = common.batch(family, step)
        return b | {"counts": b["counts"] | {"pairs": len(b["ids"])}}

    for losses, changes in ((pretraining, {"head": "pretraining"}), (classification, {"head": "classification", "n_classes": 3})):
        expected = common.reference("bert", 2, losses=losses, batch=batch, **SMALL, **changes)
        for layout in (layouts(2)[0], layouts(2)[3]):
            same(curve(build(mesh, "bert", layout, **SMALL, **changes), "bert", layout, 2, batch=batch, losses=losses), expected)
    b = common.batch("bert", 0)
    with torch.no_grad():
        expected = common.build("bert", head="none", **SMALL)(b["ids"], keep=b["keep"])
        torch.testing.assert_close(build(mesh, "bert", layouts(2)[0], head="none", **SMALL)(b["ids"], keep=b["keep"]), expected)


def lengths_and_packing(world):
    """Sequences that the processes do not divide, down to fewer tokens than processes; packed documents; smoothed labels."""
    mesh = init_device_mesh("cpu", (world.size,))

    def packed(family, step):
        b = common.batch(family, step)
        place = torch.arange(16).expand(8, 16)
        b = b | {"segments": (place >= 7).long(), "positions": torch.where(place >= 7, place - 7, place)}
        seq = (15, 16, 13, 1)[step]
        b = {k: v[:, :seq] if isinstance(v, torch.Tensor) else v for k, v in b.items()}
        return b | {"counts": {"tokens": int((b["labels"] != common.IGNORE).sum())}}

    def smoothed(family, model, b):
        logits = model(b["ids"], segments=b["segments"], positions=b["positions"]).flatten(0, 1)
        return {"tokens": summed_cross_entropy(logits, b["labels"].flatten(), 0.1)}

    for family in ("gpt", "llama"):
        changes = SMALL | {"vocab_size": 49, "n_kv_heads": 4}
        if family == "gpt":
            changes.pop("n_kv_heads")
        expected = common.reference(family, 4, losses=smoothed, batch=packed, **changes)
        for layout in layouts(2) if world.size == 2 else layouts(4)[:1]:
            same(curve(build(mesh, family, layout, **changes), family, layout, 4, batch=packed, losses=smoothed), expected)


def evaluation(world):
    """Without gradients: plain logits equal to one process's, and decoding with and without a cache."""
    mesh = init_device_mesh("cpu", (2,))
    for family in common.CONFIGS:
        for layout in (layouts(2)[0], layouts(2)[3]):
            one, many = common.build(family, **SMALL).eval(), build(mesh, family, layout, **SMALL).eval()
            b = common.batch(family, 0)
            with torch.no_grad():
                if family == "vit":
                    expected, found = one(b["images"]), many(b["images"])
                elif family == "bert":
                    expected, found = one(b["ids"], keep=b["keep"], select=b["select"]), many(b["ids"], keep=b["keep"], select=b["select"])
                elif family in ("gpt", "llama"):
                    expected, found = one(b["ids"]), many(b["ids"])
                else:
                    expected, found = one(b["source"], b["target"], source_keep=b["keep"]), many(b["source"], b["target"], source_keep=b["keep"])
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, expected)
            assert torch.equal(found.argmax(-1), expected.argmax(-1))
            if family in ("bert", "vit"):
                continue
            sources = None if family in ("gpt", "llama") else [[5, 6, 7], [8, 9, 10, 11, 12]]
            for cache in (True, False):
                expected, found = (complete(m, [[3, 4, 5], [7]], max_new=3, sources=sources, cache=cache) for m in (one, many))
                assert found == expected


def dropout(world):
    """Masks: one for what is whole on every process, each its own for parts; the same again when recomputed."""
    mesh = init_device_mesh("cpu", (2,))
    for family in ("gpt", "t5", "seq2seq", "vit", "bert"):
        for layout in layouts(2)[::2]:
            changes = SMALL | {"dropout": 0.3} | ({"head": "classification", "n_classes": 3} if family == "bert" else {})
            found = []
            for mode in ("none", "full"):
                model = build(mesh, family, layout, **changes)
                use_checkpointing(model, mode)
                torch.manual_seed(5)
                b = common.batch(family, 0)
                with loss_context(layout):
                    if family == "bert":
                        loss = summed_cross_entropy(model(b["ids"], keep=b["keep"]), b["ids"][:, 0] % 3)
                    else:
                        (loss,) = common.losses(family, model, b).values()
                    loss.backward()
                sum_partial_gradients(model)
                found.append((loss.detach(), norm_of(model.parameters())))
            torch.testing.assert_close(found[0], found[1])
            state = torch.get_rng_state()  # as after the same number of draws
            for value in (*found[0], state.float()):
                everywhere = [torch.empty_like(value) for _ in range(2)]
                dist.all_gather(everywhere, value)
                assert torch.equal(*everywhere)


def masks(world):
    """Parts of a tensor are dropped by numbers of their own."""
    mesh = init_device_mesh("cpu", (2,))
    layout = layouts(2)[0]
    model = build(mesh, "gpt", layout, **SMALL, seq_len=16)
    model.dropout.p = 0.5
    seen = []
    model.dropout.register_forward_hook(lambda module, args, out: seen.append((out.to_local() == 0).float()))
    model(torch.ones(4, 16, dtype=torch.long))
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0].contiguous())
    assert 0.4 < seen[0].mean() < 0.6 and not torch.equal(*both)


# ---------------------------------------------------------------- on four


def with_shards(world):
    """tensor 2 × shard 2: FSDP2 over what tensor parallelism left, each pair of processes with half of the rows. (Even sizes, and the other families:
    test_pairs.)"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    layout = Layout(tensor=2, shard=2)
    for family in ("gpt", "llama"):
        model = build(mesh["tensor"], family, layout, **SMALL, **UNEVEN)
        shard(model, mesh["shard"], layout)
        same(curve(model, family, layout, 4, data=mesh["shard"]), common.reference(family, 4, **SMALL, **UNEVEN))


def four_ways(world):
    mesh = init_device_mesh("cpu", (4,))
    for family in common.CONFIGS:
        changes = SMALL | ({"n_kv_heads": 4} if family == "llama" else {})
        layout = layouts(4)[0]
        same(curve(build(mesh, family, layout, **changes), family, layout, 2), common.reference(family, 2, **changes))


def on_fake_processes(world):
    """One step of one of four processes that are not there, on tensors that hold nothing: what a plan is traced from."""
    join_fake(0, 4)
    mesh = init_device_mesh("cpu", (4,))
    layout = layouts(4)[0]
    with FakeTensorMode():
        model = build(mesh, "gpt", layout, **SMALL, dropout=0.1)
        ids = torch.ones(8, 16, dtype=torch.long)
        with loss_context(layout):
            summed_cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        sum_partial_gradients(model)
        views = [p.to_local().detach() for p in model.parameters()]
        for p, view in zip(model.parameters(), views):
            view.grad = p.grad.to_local()
        torch.optim.AdamW(views).step()
    assert model.blocks[0].feedforward.up.weight.to_local().shape == (32, 32)


def check(world, *names):
    for name in names:
        globals()[name](world)


@pytest.mark.slow
def test_one_curve_on_two_processes():
    distributed.run(2, check, "families", "variants", "bert_heads", "lengths_and_packing")


@pytest.mark.slow
def test_other_uses_on_two_processes():
    distributed.run(2, check, "evaluation", "dropout")


@pytest.mark.slow
def test_one_curve_on_four_processes():
    distributed.run(4, check, "with_shards", "four_ways", "lengths_and_packing")


def test_each_process_drops_by_numbers_of_its_own():
    distributed.run(2, check, "masks")


def test_fake_processes():
    distributed.run(1, check, "on_fake_processes")


@pytest.mark.parametrize(
    ("family", "changes", "tensor", "message"),
    [
        ("gpt", {}, 3, "layout.tensor=3 does not divide model.n_heads=4. Use 1, 2 or 4."),
        ("llama", {}, 4, "layout.tensor=4 does not divide model.n_kv_heads=2. Use 1 or 2."),
        ("llama", {"n_kv_heads": 1}, 2, "layout.tensor=2 does not divide model.n_kv_heads=1. Use 1."),
        ("gpt", {"d_ff": 5}, 4, "layout.tensor=4: model.d_ff=5 leaves the last process without a part. Use a smaller layout.tensor."),
        ("gpt", {"d_ff": 6}, 4, "layout.tensor=4: model.d_ff=6 leaves the last process without a part. Use a smaller layout.tensor."),
        ("vit", {"patches": "unfold"}, 2, "model.patches: cannot be combined with layout.tensor=2: DTensor does not support unfold. Set model.patches=rearrange or convolution: the same result."),
    ],
)
def test_what_cannot_be_split_is_told(family, changes, tensor, message):
    config = common.CONFIGS[family].model_copy(update=changes)
    assert list(fits(config, Layout(tensor=tensor))) == [message]
    assert not list(fits(config, Layout()))
