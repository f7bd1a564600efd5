"""Rows of numbers in a file: JSON that any reader takes, and what a kill leaves of the last line."""

from __future__ import annotations

import json
import math

import pytest

from gradus.rows import Row, RowFile, read_rows


def strictly(line: str) -> dict:
    def no(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=no)


@pytest.mark.parametrize("value", [1.5, 3, "text", math.nan, math.inf, -math.inf])
def test_a_row_is_json_to_the_letter(value):
    row = strictly(Row("train/loss", value, "nats/token", 7, {"of": "one"}).json())
    known = value if not isinstance(value, float) or math.isfinite(value) else str(value)
    assert row == {"name": "train/loss", "value": known, "unit": "nats/token", "step": 7, "of": "one"}
    assert "step" not in strictly(Row("energy", 2.0).json())


def test_rows_after_a_position_are_dropped_and_a_line_that_was_cut_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path)
    file.write([Row("a", 1.0, step=1)])
    kept = file.position
    file.write([Row("a", 2.0, step=2)])
    file.close()
    with open(path, "a") as more:
        more.write('{"name": "a", "va')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    RowFile(path, kept).close()
    assert [row["step"] for row in read_rows(path)] == [1]
