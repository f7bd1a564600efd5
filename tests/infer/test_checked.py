"""An engine is compared with PyTorch in fp32 before its first use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus.infer import engines
from gradus.infer.checked import checked, compare

sys.path.insert(0, str(Path(__file__).parent))
from small_models import INPUTS


def test_an_engine_is_checked_once_and_told_each_time(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    checked(source, "torch", "bf16", INPUTS)
    first = capsys.readouterr().err
    assert "computes in bf16" in first and "of 48 greedy equal" in first
    monkeypatch.setattr("gradus.infer.checked.compare", lambda *_: pytest.fail("checked twice"))
    checked(source, "torch", "bf16", INPUTS)
    assert capsys.readouterr().err == first


def test_a_check_finds_what_is_wrong(source):
    right, wrong = engines.open(source), engines.open(source)
    found = {row.name: row.value for row in compare(right, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] == 0 and found["check/greedy"] == 1
    wrong.decode = lambda ids, positions: -type(right).decode(wrong, ids, positions)
    found = {row.name: row.value for row in compare(wrong, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] > 1 and found["check/cosine"] < 0 and found["check/greedy"] < 1
