"""The operands of a calibration."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gradus.proof import calibration_points


def test_operands_are_never_the_same_twice_in_a_row():
    pool = calibration_points.Pool(torch.device("cpu"), 2**20)
    a, b = pool.take(100, 10), pool.take(100, 10)
    assert a.data_ptr() != b.data_ptr()
    changed = pool.take(2**19, to_change=True)
    before = pool.kept[torch.float32].clone()
    changed.fill_(7.0)
    assert torch.equal(pool.kept[torch.float32], before)


@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 8, 8, 8), (3, 5, 7, 11)])
def test_the_operations_of_a_product_are_those_that_pytorch_counts(batch, m, n, k):
    with FlopCounterMode(display=False) as counter:
        torch.ones(batch, m, k) @ torch.ones(batch, k, n)
    assert calibration_points.ProductRow("matmul", "fp32", "nn", batch, m, n, k).operations == counter.get_total_flops()
