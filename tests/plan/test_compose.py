"""The parts of which a step is put together: blocks that stand for many, FSDP2's padding, what forward passes leave; and many layers from few."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus import models
from gradus.plan.compose import left_by_forward
from gradus.plan.process import local_bytes, padded, transposed_shards
from gradus.plan.profiles import INDEX, N, Weight
from gradus.plan.stage import Run, _alike
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parent)]

import test_engine as whole  # noqa: E402


def weight(*shape: int, **more) -> Weight:
    return Weight(shape, **{"expert": False, "cut": False, "partial": False, "across": False, "width": 4, "computed": 4, **more})


# ---------------------------------------------------------------- blocks that stand for many


@given(st.lists(st.integers(0, 2), max_size=12))
def test_alike_blocks_are_all_there_and_the_ends_of_a_row_stand_for_themselves(blocks):
    found = list(_alike(blocks))
    assert [traced for _, traced, times in found for _ in range(times)] == blocks
    assert all(blocks[i] == traced for i, traced, _ in found)
    rows = [(traced, len(list(row))) for traced, row in itertools.groupby(blocks)]
    starts = itertools.accumulate((n for _, n in rows), initial=0)
    ends = {i for start, (_, n) in zip(starts, rows) for i in (start, start + n - 1)}
    assert ends <= {i for i, _, times in found if times == 1}
    assert len(found) <= 3 * len(rows)


# ---------------------------------------------------------------- what a process holds


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 9))
def test_fsdp_fills_up_the_first_dimension(shape, k):
    """Every process holds as much as the first of `torch.chunk`'s parts."""
    assert padded(weight(*shape), k) == k * torch.empty(shape, device="meta").chunk(k)[0].numel()


def test_experts_are_cut_where_the_processes_divide_them():
    experts = weight(4, 6, 16, across=True)
    assert padded(experts, 8) == experts.size < padded(weight(4, 6, 16), 8) == 2 * experts.size
    assert transposed_shards([experts, weight(4, 6, 16)], 8) == [experts] and not transposed_shards([experts], 4)
    assert padded(weight(4, 6, 15, across=True), 8) == 8 * 6 * 15


def test_a_process_holds_its_part_of_a_parameter():
    """Each process of a context, and of experts, has all that is no expert's: FSDP2 shards it over them too."""
    layout, w = Layout(shard=2, expert=2, context=2), weight(64, 8)
    assert local_bytes(w, layout) == 64 * 8 * 4 / 8
    assert local_bytes(weight(64, 8, expert=True), layout) == 64 * 8 * 4 / 2
    assert local_bytes(weight(64, 8, buffer=True), layout) == local_bytes(w, Layout(expert=2)) == 64 * 8 * 4
    half = weight(64, 8, computed=2)
    assert local_bytes(half, Layout(precision="pure_bf16")) == 64 * 8 * 2 and local_bytes(half, Layout(precision="bf16")) == 64 * 8 * 4


@pytest.mark.parametrize(("rank", "micro", "schedule", "times"), [(0, 8, "1f1b", 4), (3, 8, "1f1b", 1), (0, 3, "1f1b", 3), (0, 8, "gpipe", 1)])
def test_forward_passes_leave_as_many_micro_batches_as_are_under_way(rank, micro, schedule, times):
    """With 1F1B those of this stage and of all later ones; of other schedules at least one."""
    net = np.zeros((3, N + 3))
    net[:, INDEX["activations"]], net[1, INDEX["gathered"]], net[:, N] = (10, 100, 0), -30, 512  # the allocator's pools do not count
    stage = SimpleNamespace(run=lambda kind, later: {("forward", True): Run([], [1, 5, 1], net, net)}[kind, later])
    layout = Layout(pipeline=4, schedule=schedule)
    process = SimpleNamespace(layout=layout, rank=rank, n_micro_batches=micro, stages=[stage, stage])
    assert left_by_forward(process) == times * 2 * (10 + 5 * (100 - 30))


# ---------------------------------------------------------------- layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "n", "way", "layout"),
    [
        ("bert", 1, ("bf16", "selective", "cpu"), {}),
        ("llama", 2, ("fp32", "none", "cpu"), {"shard": 2, "micro_batch": 1}),
    ],
    ids=["bert bf16 selective", "llama shard=2"],
)
def test_layers_are_extended_exactly(monkeypatch, tmp_path, family, n, way, layout):
    """To the byte, but for four bytes a parameter that Adam counts its steps in, and the sums of the losses."""
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    case = whole.case_of(family, way, n, 2, 12, None, "adamw", layout)
    tensors = len(list(models.build(case.recipe.model).parameters()))
    for _, what, composed, traced in whole.compared(case):
        if what == "memory":
            assert 0 <= traced - composed <= 4 * (tensors + 4)
        elif what != "optimizer":
            assert whole.off(composed, traced) <= 1e-9, (what, composed, traced)
