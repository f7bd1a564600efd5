"""The operands of a calibration."""

from __future__ import annotations

import torch

from gradus.proof import calibration_points


def test_operands_are_never_the_same_twice_in_a_row():
    pool = calibration_points.Pool(torch.device("cpu"), 2**20)
    a, b = pool.take(100, 10), pool.take(100, 10)
    assert a.data_ptr() != b.data_ptr()
    changed = pool.take(2**19, to_change=True)
    before = pool.kept[torch.float32].clone()
    changed.fill_(7.0)
    assert torch.equal(pool.kept[torch.float32], before)
