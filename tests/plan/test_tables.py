"""The measured tables: what is read out of them at, between and beyond their points."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.plan import tables
from gradus.plan.work import Op

sys.path[:0] = [str(Path(__file__).parents[1])]

from measured_tables import device, memory, product  # noqa: E402


@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 30, 77), (4096, 300, 16), (1000, 2000, 3000)])
def test_matmul_of_constant_rate_is_exact_at_between_and_beyond_points(shape):
    assert tables.seconds(product(*shape), device()) == pytest.approx(2 * math.prod(shape) / 1e9, rel=1e-6)


def test_matmul_narrower_than_the_grid_costs_as_the_narrowest():
    assert tables.seconds(product(64, 3, 64), device()) == pytest.approx(2 * 64 * 16 * 64 / 1e9, rel=1e-6)


def test_a_point_too_large_to_measure_takes_the_rate_below_it():
    short = device(skip=((256, 256, 256), (256, 64, 256)))
    assert tables.seconds(product(256, 256, 256), short) == pytest.approx(2 * 256**3 / 1e9, rel=1e-6)


def test_layout_is_the_traces_or_follows_from_phase_and_shape():
    whole = 2 * 64 * 64 * 256 / 1e9
    assert tables.seconds(product(64, 64, 256, "backward"), device()) == pytest.approx(2 * whole, rel=1e-6)  # sums over the tokens: a weight's gradient
    assert tables.seconds(product(256, 64, 64, "backward"), device()) == pytest.approx(whole, rel=1e-6)
    assert tables.seconds(product(64, 64, 256, "backward", layout="nn"), device()) == pytest.approx(whole, rel=1e-6)
    assert tables.layout_of(product(64, 64, 256, "recompute")) == "nt"


def test_batched_products_have_their_own_table_and_other_products_the_plain_one():
    d = device()
    assert tables.seconds(product(64, 64, 64, name="bmm", batch=3), d) == pytest.approx(3 * 2 * 64**3 / 1e9, rel=1e-6)
    lines = d.measured["matmul"].splitlines()
    d.measured["matmul"] = "\n".join(line for line in lines if line.startswith("mm")) + "\nbmm fp32 nt 1 16 16 16 1.0 0.0"
    assert tables.seconds(product(16, 16, 16, name="bmm"), d) == pytest.approx(1.0)
    assert tables.seconds(product(64, 64, 64, name="convolution"), d) == pytest.approx(2 * 64**3 / 1e9, rel=1e-6)


@pytest.mark.parametrize(("causal", "name", "per_score"), [(1.0, "sdpa", 4), (0.5, "sdpa", 4), (1.0, "sdpa_backward", 10), (0.5, "sdpa_backward", 10)])
def test_attention_full_causal_forward_backward(causal, name, per_score):
    shape = (3, 5, 100, 100, 50)
    flops = per_score * math.prod(shape) * causal
    op = Op("attention", name, "fp32", "backward" if per_score == 10 else "forward", flops, 1.0, shape)
    assert tables.seconds(op, device()) == pytest.approx(flops / 1e9, rel=1e-6)


def test_memory_bound_by_bytes_and_the_stated_rules():
    d = device()
    assert tables.seconds(memory("gelu", 2000), d) == pytest.approx(6e-6, rel=1e-6)
    assert tables.seconds(memory("gelu", 40_000), d) == pytest.approx(1.2e-4, rel=1e-6)  # beyond: as the bytes
    assert tables.seconds(memory("gelu", 8), d) == pytest.approx(3e-6, rel=1e-6)  # below: as the smallest
    assert tables.seconds(memory("never_measured", 2000), d) == pytest.approx(2e-6, rel=1e-6)  # as add
    assert tables.seconds(memory("gelu", 2000, "fp16"), d) == pytest.approx(6e-6, rel=1e-6)  # as bf16


def test_the_frameworks_time_adds_on_a_cpu_and_hides_behind_a_gpu():
    dispatch = {"forward": 1e-5, "backward": 2e-5}
    op = memory("add", 4000, phase="backward")
    assert tables.seconds(op, device(dispatch=dispatch)) == pytest.approx(4e-6 + 2e-5, rel=1e-6)
    assert tables.seconds(op, device("gpu", dispatch)) == pytest.approx(2e-5, rel=1e-6)
    assert tables.seconds(memory("add", 4e6), device("gpu", dispatch)) == pytest.approx(4e-3, rel=1e-6)


@pytest.mark.parametrize("measured", [{}, {"threads": "x", "matmul": [1]}, {"matmul": None}, {"matmul": "", "dispatch": 5}])
def test_what_is_no_table_is_one_line(measured):
    with pytest.raises(UserError, match=r"measured\.matmul: no table\. Run gradus calibrate again"):
        tables.seconds(product(64, 64, 64), dataclasses.replace(device(), measured=measured))


def test_a_broken_table_is_an_error_that_says_what_to_do():
    d = device()
    d.measured["memory"] = "add fp32 1000"
    with pytest.raises(UserError, match="gradus calibrate"):
        tables.seconds(memory("add", 2000), d)
    d.measured["attention"] = ""
    with pytest.raises(UserError, match="nothing for sdpa"):
        tables.seconds(Op("attention", "sdpa", "fp32", "forward", 1.0, 1.0, (1, 1, 64, 64, 64)), d)
