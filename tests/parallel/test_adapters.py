"""Models of which a part is trained: every layout gives the curve of one process, and what is frozen stays to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402
from test_layouts import curve  # noqa: E402

from gradus.recipe.schema import Adapter  # noqa: E402

STEPS = 4  # of an adapter the first gives b a value, the second a a gradient
LORA = {"adapter": Adapter(rank=4, alpha=8.0)}
PROBE = {"freeze": ("all", "-head")}  # linear probing; where the head is tied, the embedding is trained too
LAST = {"freeze": ("all", "-blocks.3", "-norm")}  # of a pipeline the first stage has nothing to train


def curves(world, cases: list[tuple]) -> list:
    return [curve(world, family, layout, accumulation, steps=STEPS, **changes) for family, layout, accumulation, changes in cases]


def check(n: int, cases: list[tuple], tolerance: float = 1e-5) -> None:
    told = run(n, curves, cases)
    for i, (family, layout, _, changes) in enumerate(cases):
        right = common.reference(family, STEPS, **changes)
        for rank in range(n):
            worst = max(abs(a - b) / abs(b) for pair, expected in zip(told[rank][i], right) for a, b in zip(pair, expected))
            assert worst < tolerance, f"{family} {layout} {changes} rank {rank} of {n}: {worst:.1e} from one process"


def test_one_layout_of_each_axis():
    check(2, [("gpt", layout, n, LORA) for layout, n in (({}, 2), ({"shard": 2}, 1), ({"tensor": 2}, 1), ({"pipeline": 2}, 1), ({"checkpointing": "selective"}, 1))])


def test_a_part_is_frozen():
    layouts = ({}, 2), ({"shard": 2}, 1), ({"tensor": 2}, 1), ({"pipeline": 2}, 1)
    check(2, [("gpt", layout, n, freeze) for layout, n in layouts for freeze in (PROBE, LAST)])


@pytest.mark.slow
@pytest.mark.parametrize("family", common.CONFIGS)
def test_every_family(family):
    layouts = ({"shard": 2}, 2), ({"tensor": 2, "sequence_parallel": family != "llama"}, 1), ({"pipeline": 2}, 1)
    more = [({"context": 2}, 1)] if family not in ("t5", "seq2seq") else []  # these need the whole sequence
    check(2, [(family, layout, n, LORA) for layout, n in (*layouts, *more)])


@pytest.mark.slow
def test_every_schedule():
    check(2, [("gpt", {"pipeline": 2, "schedule": s}, 4, c) for s in ("gpipe", "interleaved", "zero_bubble") for c in (LORA, LAST)])


@pytest.mark.slow
def test_axes_compose():
    check(4, [("llama", layout, 2, LORA) for layout in ({"tensor": 2, "shard": 2}, {"shard": 2, "pipeline": 2}, {"shard_optimizer": True})])


def test_at_first_it_is_the_base_and_the_base_stays():
    batch, plain, adapted = common.batch("gpt", 0), common.build("gpt"), common.build("gpt", **LORA)
    assert torch.equal(plain(batch["ids"]), adapted(batch["ids"]))
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    common.losses("gpt", adapted, batch)["tokens"].backward()
    optimizer.step()
    for name, p in adapted.named_parameters():
        # the gradient of a is 0 as long as b is
        assert p.equal(before[name]) == (not name.endswith(".b.weight")), name
        assert (p.grad is None) == (not name.endswith((".a.weight", ".b.weight"))), name
