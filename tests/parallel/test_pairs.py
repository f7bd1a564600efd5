"""Families × layouts × precisions × checkpointing against plain PyTorch on one process: loss and gradient norm of two steps.

`make test-all` takes a list in which every pair that fits stands at least once, and each family in each layout in fp32, where rounding hides nothing
(pairs.txt); `make test-everything` takes all that fit.

python tests/parallel/test_pairs.py        writes the list anew, after a change of what is here or of what fits
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

from gradus.parallel.check import fits
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402
from test_layouts import curve  # noqa: E402

PAIRS = Path(__file__).with_name("pairs.txt")
STEPS = 2
FAMILIES = tuple(common.CONFIGS)
LAYOUTS = {  # name: (processes, micro-batches, layout)
    "replicas": (2, 1, {}),
    "accumulated": (2, 4, {}),
    "manual": (2, 1, {"replicate": "manual"}),
    "server": (2, 1, {"replicate": "parameter_server"}),
    "zero": (2, 1, {"shard_optimizer": True}),
    "shard": (2, 2, {"shard": 2}),
    "unfreed": (2, 1, {"shard": 2, "reshard": False}),
    "tensor": (2, 1, {"tensor": 2}),
    "whole": (2, 1, {"tensor": 2, "sequence_parallel": False, "vocab_parallel": False}),
    "pipeline": (2, 4, {"pipeline": 2}),
    "gpipe": (2, 2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved": (2, 2, {"pipeline": 2, "schedule": "interleaved"}),
    "bubble": (2, 2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "ring": (2, 1, {"context": 2}),
    "ulysses": (2, 1, {"context": 2, "context_method": "ulysses"}),
    "hybrid": (4, 1, {"shard": 2}),
    "shard-4": (4, 2, {"shard": 4}),
    "tensor-replicas": (4, 1, {"tensor": 2}),
    "tensor-shard": (4, 1, {"tensor": 2, "shard": 2}),
    "tensor-pipeline": (4, 2, {"tensor": 2, "pipeline": 2}),
    "shard-pipeline": (4, 2, {"shard": 2, "pipeline": 2}),
    "pipeline-replicas": (4, 2, {"pipeline": 2}),
    "ring-shard": (4, 1, {"context": 2, "shard": 2}),
    "ring-replicas": (4, 1, {"context": 2}),
    "ring-tensor": (4, 1, {"context": 2, "tensor": 2}),
}
PRECISIONS = {"fp32": (1e-5, 1e-5), "bf16": (2e-3, 0.03), "fp16": (1e-3, 0.03), "pure_bf16": (5e-3, 0.1)}  # how near loss and norm are, relative
SCALE = 1024.0  # of fp16's loss: at PyTorch's 65,536 the first steps of some are skipped, as it should be
CHECKPOINTING = ("none", "attention", "selective", "full")
Row = tuple[str, str, str, str]  # one of each


def layers_of(layout: str) -> int:
    return 4 if LAYOUTS[layout][2].get("schedule") in ("interleaved", "zero_bubble") else 2  # two stages a process


def layout_of(row: Row) -> Layout:
    return Layout(**LAYOUTS[row[1]][2], precision=row[2], checkpointing=row[3])


@functools.cache
def everything() -> list[Row]:
    rows = itertools.product(FAMILIES, LAYOUTS, PRECISIONS, CHECKPOINTING)
    return [row for row in rows if not list(fits(common.CONFIGS[row[0]].model_copy(update={"n_layers": layers_of(row[1])}), layout_of(row)))]


def pairs_of(row: Row) -> set[tuple]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(4), 2)} | ({row[:3]} if row[2] == "fp32" else set())


def chosen() -> list[Row]:
    """Few rows with every pair that fits: each next one is of those with the most pairs that no earlier one has."""
    left, rows = set().union(*map(pairs_of, everything())), []
    pool = random.Random(0).sample(everything(), len(everything()))
    while left:
        rows.append(max(pool, key=lambda row: len(left & pairs_of(row))))
        left -= pairs_of(rows[-1])
    return sorted(rows, key=everything().index)


def listed() -> list[Row]:
    return [tuple(line.split()) for line in PAIRS.read_text().splitlines()]


@functools.cache
def plain(family: str, precision: str, n_layers: int) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step, by PyTorch's own autocast and scaler on one process."""
    half = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    pure = precision.startswith("pure")
    model = common.build(family, n_layers=n_layers).to(half if pure else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", SCALE, enabled=precision == "fp16")
    found = []
    for step in range(STEPS):
        b = common.batch(family, step)
        b = {k: v.to(half) if pure and isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in b.items()}
        with torch.autocast("cpu", half, enabled=half is not None and not pure):
            loss = sum(value / b["counts"][kind] for kind, value in common.losses(family, model, b).items())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def curves(world, rows: list[Row]) -> list:
    found = []
    for row in rows:
        try:
            layout = LAYOUTS[row[1]][2] | {"precision": row[2], "checkpointing": row[3]}
            found.append(curve(world, row[0], layout, LAYOUTS[row[1]][1], STEPS, SCALE, n_layers=layers_of(row[1])))
        except Exception as e:
            raise AssertionError(" ".join(row)) from e
    return found


def check(rows: list[Row]) -> None:
    known = {of: torch.tensor(plain(*of)) for row in rows for of in ((row[0], row[2], layers_of(row[1])), (row[0], "fp32", layers_of(row[1])))}
    wrong = []
    for n in (2, 4):
        here = [row for row in rows if LAYOUTS[row[1]][0] == n]
        for rank, told in enumerate(run(n, curves, here) if here else ()):
            for row, found in zip(here, map(torch.tensor, told)):
                here_alone, in_fp32 = (known[row[0], precision, layers_of(row[1])] for precision in (row[2], "fp32"))
                apart = ((found - here_alone).abs() / here_alone.abs()).amax(0)  # of the losses, of the norms
                if not (apart < torch.tensor(PRECISIONS[row[2]])).all():
                    wrong.append(f"{' '.join(row)}, rank {rank}: loss and norm {apart.tolist()} from one process")
                elif row[2] != "fp32" and (((found - in_fp32).abs() / in_fp32.abs()).amax(0) < torch.tensor(PRECISIONS["fp32"])).all():
                    wrong.append(f"{' '.join(row)}, rank {rank}: nothing is rounded")
    assert not wrong, "\n".join(wrong)


def test_the_list_has_every_pair_that_fits():
    """What fits, or the list's axes, have changed where this fails: python tests/parallel/test_pairs.py writes it anew."""
    assert set().union(*map(pairs_of, everything())) == set().union(*map(pairs_of, listed())) and set(listed()) <= set(everything())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_pair(part):
    check(listed()[part::8])


@pytest.mark.slow
@pytest.mark.everything
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything(family, precision):
    check([row for row in everything() if row[0] == family and row[2] == precision])


if __name__ == "__main__":
    PAIRS.write_text("".join(" ".join(row) + "\n" for row in chosen()))
    print(f"wrote {len(listed())} of {len(everything())} that fit to {PAIRS}")
