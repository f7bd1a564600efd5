"""A run folder as a report reads it."""

from __future__ import annotations

import shutil

import pytest
from report_parts import variant

from gradus.report.report import compared
from gradus.report.runs import by_recipe, read


@pytest.mark.parametrize("x", ["tokens", "seconds"])
def test_every_evaluation_has_its_tokens_and_seconds(folders, x):
    """Also those between two logged steps: evaluations come every 3 steps there, log lines every 2."""
    run = read([str(folders / "long")])[0]
    assert [at for at, _ in run.points("valid/loss", "step")] == [3, 6, 8] and [at for at, _ in run.points("train/loss", "step")] == [2, 4, 6, 8]
    evaluated, logged = [at for at, _ in run.points("valid/loss", x)], [at for at, _ in run.points("train/loss", x)]
    assert 0 < logged[0] < evaluated[0] < logged[1] < logged[2] <= evaluated[1] < logged[3] <= evaluated[2]
    if x == "tokens":
        assert evaluated == [step * run.last("train/tokens") / 8 for step in (3, 6, 8)]


def test_runs_of_one_name_are_told_apart(folders, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folders / "short", tmp_path / name / "1")
    assert [run.name for run in read([str(tmp_path / "a/1"), str(tmp_path / "b/1")])] == ["a/1", "b/1"]


def test_a_run_of_another_model_has_no_speed_up(folders, tmp_path):
    wider = variant(folders / "long", tmp_path / "wider", {"model.d_ff": 64})
    (group,) = by_recipe(read([str(folders / "short"), str(wider), str(folders / "long")]))
    speed, _ = compared(group)
    assert speed.rows[1][7:] == ["–", "–"] and speed.rows[2][7] != "–" and "a run of another model" in speed.caption
