"""Predicted beside measured: what has a line, and the promise of the largest batch."""

from __future__ import annotations

import pytest

from gradus.proof.pairs import Pair, pairs_of_run, table


def test_what_was_not_measured_has_no_line():
    predicted = [{"name": "memory/allocated", "value": 110.0, "unit": "bytes", "step": 3}, {"name": "energy/step", "value": 5.0, "unit": "J", "step": 3}]
    found = pairs_of_run(predicted, [{"name": "memory/allocated", "value": 100.0, "unit": "bytes"}, {"name": "time/step", "value": 2.0, "unit": "s"}])
    assert [f.name for f in found] == ["memory/allocated", "time/step"]
    assert found[0].error == pytest.approx(0.1) and found[1].error is None and found[1].predicted is None
    assert [line.split()[-1] for line in table(found)] == ["error", "+10.0%", "-"]
    assert Pair("x", "s", 1.0, 0.0).error is None


def test_the_promise_stands_beside_the_step_that_was_measured(tmp_path, capsys):
    """Of the largest batch 68 MB were said before the run; the step that was measured had a shorter one."""
    promise = {"name": "memory/allocated", "value": 68e6, "unit": "bytes", "batch": "16 × 48 tokens"}
    step = {"name": "memory/allocated", "value": 50e6, "unit": "bytes", "step": 3, "batch": "16 × 24 tokens"}
    measured = [{"name": "memory/allocated", "value": 50e6, "unit": "bytes"}]
    lines = [line.split("  ") for line in table(pairs_of_run([promise, step], measured))[1:]]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["tensors at the peak (step 3: 16 × 24 tokens)", "50 MB", "50 MB", "+0.0%"],
        ["tensors with the largest batch (16 × 48 tokens)", "68 MB", "-", "-"],
    ]
    alike = table(pairs_of_run([promise | {"value": 50e6}, step], measured))
    assert len(alike) == 2 and "tokens" not in alike[1], "of one batch: one row"


def test_rows_of_the_largest_batch_are_not_proved_by_another():
    assert pairs_of_run([{"name": "memory/allocated", "value": 9.0, "unit": "bytes"}], [{"name": "memory/allocated", "value": 5.0, "unit": "bytes"}]) == []
