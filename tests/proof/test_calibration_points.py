"""The operands of a calibration."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gradus.proof import calibrate, calibration_points


def test_operands_are_never_the_same_twice_in_a_row():
    pool = calibration_points.Pool(torch.device("cpu"), 2**20)
    a, b = pool.take(100, 10), pool.take(100, 10)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize(("of", "kind"), [("products", "matmul"), ("attentions", "attention"), ("memory_bound", "memory")])
def test_every_point_is_one_operation_of_its_kind_to_the_trace(of, kind):
    pool = calibration_points.Pool(torch.device("cpu"), 2**24)
    points = [p for p in getattr(calibration_points, of)(pool, torch.bfloat16) if sum(x.numel() for x in p.make_operands() if hasattr(x, "numel")) < 2**20]
    with torch.no_grad():
        ops = [calibrate.traced(p) for p in points]
    assert len(ops) >= 8 and {(op.kind, op.dtype) for op in ops} == {(kind, "bf16")}


@pytest.mark.parametrize(("batch", "m", "n", "k"), [((), 8, 16, 24), ((3,), 5, 7, 11)])
def test_the_operations_of_a_product_are_those_that_pytorch_counts(batch, m, n, k):
    a, b = torch.ones(*batch, m, k), torch.ones(*batch, k, n)
    with FlopCounterMode(display=False) as counter:
        a @ b
    op = calibrate.traced(calibration_points.Point(lambda: (a, b), torch.matmul))
    assert op.flops == counter.get_total_flops() and op.shape == (*(batch or (1,)), m, n, k)
