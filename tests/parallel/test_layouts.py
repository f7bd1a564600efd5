"""One layout of each axis against one process: loss and gradient norm of each step; all families, axes and precisions: test_pairs; twenty steps: test_context,
test_pipeline."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch

from gradus.parallel.apply import apply
from gradus.parallel.mesh import DATA, Mesh
from gradus.parallel.precision import Precision
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402

reference = functools.cache(common.reference)


def curve(world, family: str, layout: dict, accumulation: int = 1, steps: int = 6, scale: float | None = None, **changes) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, through the engine that the trainer uses. scale: of fp16's loss at first; None: PyTorch's. changes: to the model."""
    made = Layout(**layout)
    mesh, precision = Mesh.make(made, world), Precision(made.precision, torch.device("cpu"))
    if precision.scaler and scale:
        precision.scaler = torch.amp.GradScaler("cpu", scale)
        precision.scaled(torch.zeros(()))
    start = common.deferred(family, **changes)
    parallel = apply(precision.cast(start.model), made, mesh, device=torch.device("cpu"), values=start.values)
    trained = [p for _, p in parallel.trained()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True) if trained else None  # which knows of `found_inf`
    n, place = mesh.size(*DATA), mesh.rank(*DATA)
    found = []
    for step in range(steps):
        batch = common.batch(family, step)
        cuts = [8 * (place * accumulation + i) // (n * accumulation) for i in range(accumulation + 1)]
        mine = [precision.cast_batch(common.rows_of(family, batch, lo, hi)) for lo, hi in itertools.pairwise(cuts)]

        def loss_of(model, part, counts=batch["counts"]):
            with precision.autocast():
                return sum(value / counts[kind] for kind, value in common.losses(family, model, part).items())

        loss = parallel.forward_backward(mine, loss_of, precision.scaled)
        if optimizer:
            precision.unscale(optimizer, parallel)
        norm = parallel.norm()
        if optimizer:
            torch.nn.utils.clip_grads_with_norm_([p for p in trained if p.grad is not None], 1.0, norm)
            precision.step(optimizer, torch.zeros(()))
        parallel.after_step()
        parallel.zero_grad()
        found.append((float(loss), float(norm)))
    return found


def curves(world, cases: list[tuple]) -> list:
    return [curve(world, *case) for case in cases]


def check(n: int, cases: list[tuple], tolerance: float = 1e-5, told: list | None = None) -> None:
    told = told or run(n, curves, cases)
    for i, (family, *case) in enumerate(cases):
        for rank in range(n):
            worst = max(abs(a - b) / abs(b) for pair, right in zip(told[rank][i], reference(family)) for a, b in zip(pair, right))
            assert worst < tolerance, f"{family} {case} rank {rank} of {n}: {worst:.1e} from one process"


STEM = {"patches": "stem", "patch_size": 4}
QUICK = [("gpt", layout) for layout in ({}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2})]
STEMS = [{}, {"shard": 2}, {"context": 2}]
NORMS = {"qk_norm": True, "d_head": 12}  # of heads, of which a process of a tensor layout sees some: its gradient is a part of a sum
HEADS = [{"tensor": 2}, {"tensor": 2, "sequence_parallel": False}, {"shard": 2}, {"pipeline": 2}, {"context": 2}]
SHARED = {"qk_norm": True, "n_experts": 4, "d_expert": 24, "d_shared": 40, "norm_top_k": False, "experts_every": 2, "qkv_bias": True}
MIXTURES = [{"shard": 2}, {"expert": 2}]
BOTH = [{"tensor": 2}, {"tensor": 2, "sequence_parallel": False}, {"shard": 2}, {"pipeline": 2}, {"context": 2, "context_method": "ulysses"}]
VARIANTS = [("vit", STEM, STEMS), ("llama", NORMS, HEADS), ("llama", SHARED, MIXTURES), ("gemma", {}, BOTH)]


def quick(world) -> tuple[list, list]:
    variants = [[curve(world, family, layout, steps=3, **changes) for layout in layouts] for family, changes, layouts in VARIANTS]
    return [curve(world, *case, steps=5) for case in QUICK], variants


@pytest.fixture(scope="module")
def on_two():
    return run(2, quick)


def test_one_layout_of_each_axis(on_two):
    check(2, QUICK, told=[curves for curves, _ in on_two])


@pytest.mark.parametrize("i", range(len(VARIANTS)), ids=["a convolutional stem", "norms of heads", "a shared expert", "windows and four norms a block"])
def test_variants_of_a_family(on_two, i):
    family, changes, layouts = VARIANTS[i]
    expected = common.reference(family, 3, **changes)
    for _, variants in on_two:
        for layout, found in zip(layouts, variants[i], strict=True):
            assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0), layout


WINDOWED = {"n_layers": 4, "window": 3, "full_every": 2}
WINDOWS = [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2, "context_method": "ulysses"}, {"checkpointing": "full", "attention": "chunked", "chunk": 4}]


def windowed(world) -> list:
    return [curve(world, "llama", layout, steps=3, **WINDOWED) for layout in WINDOWS]


@pytest.mark.slow
def test_a_window_in_every_other_layer():
    """A stage's layers keep their windows, which follow their numbers in the model."""
    expected = common.reference("llama", 3, **WINDOWED)
    assert not torch.allclose(torch.tensor(expected), torch.tensor(common.reference("llama", 3, n_layers=4)), rtol=1e-4, atol=0)
    for found in run(2, windowed):
        for layout, one in zip(WINDOWS, found, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(expected), rtol=1e-5, atol=0), layout


@pytest.mark.slow
def test_in_bf16_the_curve_is_near():
    told = run(2, curves, [("gpt", {"precision": "bf16"}), ("gpt", {"shard": 2, "param_dtype": "bf16"}), ("gpt", {"compress": "bf16"})])
    for curve, tolerance in zip(told[0], (1e-2, 1e-2, 1e-2)):
        assert all(abs(a - b) / b < tolerance for (a, _), (b, _) in zip(curve, reference("gpt")))
        assert any(a != b for (a, _), (b, _) in zip(curve, reference("gpt"))), "bf16 rounds"
