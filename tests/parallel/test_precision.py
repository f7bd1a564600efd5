"""Weights and arithmetic in half precision."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gradus import models
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.parallel.precision import Precision
from gradus.recipe.schema import GPTConfig, Layout

sys.path[:0] = [str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402


def tiny() -> torch.nn.Module:
    return models.build(GPTConfig(vocab_size=50, n_layers=2, d_model=16, n_heads=2, seq_len=16))


def test_pure_half_casts_the_weights():
    assert all(p.dtype == torch.bfloat16 for p in Precision("pure_bf16", torch.device("cpu")).cast(tiny()).parameters())


def overflows(world) -> list[tuple[bool, float]]:
    """(whether the step was taken, the scale after it), where the gradients of no process, of one and of both are not finite."""
    found = []
    for on in ((), (0,), (0, 1)):
        layout = Layout(precision="fp16", replicate="manual")
        parallel, precision = apply(tiny(), layout, Mesh.make(layout, world)), Precision("fp16", torch.device("cpu"))
        weight = parallel.local_parameters[0].local
        optimizer, before = torch.optim.AdamW([weight], lr=1.0, fused=True), weight.detach().clone()
        weight.grad = torch.full_like(weight, float("inf") if world.rank in on else 1.0)
        precision.unscale(optimizer, parallel)
        precision.step(optimizer, torch.zeros(()))
        found.append((not torch.equal(weight, before), precision.scaler.get_scale()))
    return found


def test_where_one_process_overflows_or_all_do_each_skips_the_step():
    assert run(2, overflows) == [[(True, 2.0**16), (False, 2.0**15), (False, 2.0**15)]] * 2


def unscaled(world) -> list[float]:
    """The gradients of all parameters, those that the other replica steps too, taken back from the scale that they were computed with."""
    layout = Layout(precision="fp16", replicate="manual", shard_optimizer=True)
    parallel, precision = apply(tiny(), layout, Mesh.make(layout, world)), Precision("fp16", torch.device("cpu"))
    for held in parallel.local_parameters:
        held.local.grad = torch.full_like(held.local, 3 * precision.scaler.get_scale())
    precision.unscale(torch.optim.AdamW([p for _, p in parallel.trained()], lr=1.0), parallel)
    assert len(parallel.trained()) < len(parallel.local_parameters)
    return sorted({float(value) for held in parallel.local_parameters for value in (held.local.grad.min(), held.local.grad.max())})


def test_gradients_that_another_replica_steps_are_unscaled_too():
    assert run(2, unscaled) == [[3.0]] * 2
