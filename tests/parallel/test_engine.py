"""A step through the engine, against plain PyTorch; which parameters it has, and along which axes they are cut and summed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradus import models
from gradus.parallel.apply import apply
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import fake_world
from gradus.parallel.mesh import Mesh
from gradus.recipe.schema import Layout

sys.path.insert(0, str(Path(__file__).parent))

import common


def test_micro_batches_are_summed_idle_ones_are_nothing_and_the_scale_is_the_gradients_alone():
    batch = common.batch("gpt", 0)

    def loss_of(model, part):
        return common.losses("gpt", model, part)["tokens"] / batch["counts"]["tokens"]

    plain = common.build("gpt")
    wanted = loss_of(plain, batch)
    (4 * wanted).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    parallel = apply(common.build("gpt"), Layout())
    parts = [common.rows_of("gpt", batch, 0, 3), common.rows_of("gpt", batch, 2, 6) | {"idle": True}, common.rows_of("gpt", batch, 3, 8)]
    loss = parallel.forward_backward(parts, loss_of, lambda share: 4 * share)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6) and parallel.norm().item() == pytest.approx(norm.item(), rel=1e-5)
    for own, (name, p) in zip(parallel.trainable, plain.named_parameters(), strict=True):
        assert own.name == name
        torch.testing.assert_close(own.local.grad, p.grad, rtol=1e-4, atol=1e-6)
    parallel.zero_grad()
    assert all(own.local.grad is None for own in parallel.local_parameters)


def test_what_is_frozen_is_held_and_not_trained():
    model = common.build("gpt")
    frozen, p = next(iter(model.named_parameters()))
    p.requires_grad_(False)
    parallel = apply(model, Layout())
    names = [name for name, _ in model.named_parameters()]
    assert [own.name for own in parallel.local_parameters] == names
    assert [name for name, _ in parallel.trained()] == [name for name in names if name != frozen]


@pytest.mark.parametrize(
    ("layout", "matrix", "norm", "summed"),
    [
        ({}, (), (), ()),  # four replicas: DDP sums
        ({"replicate": "manual"}, (), (), ("replicate",)),
        ({"shard": 2}, ("shard",), ("shard",), ()),  # FSDP sums, also over the two replicas
        ({"tensor": 2}, ("tensor",), (), ("replicate",)),
        ({"shard": 2, "tensor": 2}, ("shard", "tensor"), ("shard",), ()),
        ({"context": 2}, (), (), ()),
    ],
)
def test_axes_along_which_parameters_are_cut_and_gradients_are_still_to_be_summed(layout, matrix, norm, summed):
    with fake_world(4) as world:
        parallel = apply(models.build(common.CONFIGS["gpt"]), Layout(**layout), Mesh.make(Layout(**layout), world))
        own = {h.name: h for h in parallel.local_parameters}
        assert set(own["blocks.0.feedforward.up.weight"].norm_axes) == set(matrix)
        assert own["blocks.0.attention_norm.weight"].norm_axes == norm
        assert all(h.sum_axes == summed for h in own.values())


@pytest.mark.parametrize(("n", "axes"), [(2, ("shard",)), (4, ("replicate", "shard")), (6, ("replicate", "shard"))])
def test_replicas_of_shards_are_one_mesh_over_which_fsdp_sums(n, axes):
    with fake_world(n) as world:
        parallel = apply(models.build(common.CONFIGS["gpt"]), Layout(shard=2), Mesh.make(Layout(shard=2), world))
        assert {h.parameter.device_mesh.mesh_dim_names for h in parallel.local_parameters} == {axes}


def test_the_whole_model_is_itself_or_gathered():
    alone = apply(common.build("gpt"), Layout())
    with alone.whole() as whole:
        assert whole is alone.bare
    with fake_world(2) as world:
        layout = Layout(tensor=2)
        parallel = apply(common.build("gpt"), layout, Mesh.make(layout, world))
        parallel.bare.eval()
        with parallel.whole() as whole:
            assert whole is not parallel.bare and not whole.training
            assert {name: p.shape for name, p in whole.named_parameters()} == {name: p.shape for name, p in alone.bare.named_parameters()}


def test_warming_up_ddp_leaves_nothing_behind():
    """Neither gradients nor a number that dropout drew."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), []

    class Played(nn.parallel.DistributedDataParallel):
        def __init__(self):  # no other process
            nn.Module.__init__(self)

        def forward(self, x):
            return model(x)

    def loss_of(called, batch):
        seen.append(called(batch["x"]))
        return seen[-1].sum()

    parallel = Parallel(model, Layout(), Mesh.single())
    parallel.warm_up({}, loss_of)
    assert not seen, "without DDP there is nothing to order"
    parallel.replicas.model = Played()
    before = torch.get_rng_state()
    parallel.warm_up({"x": torch.ones(8, 4)}, loss_of)
    assert (seen[0] == 0).any() and torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
