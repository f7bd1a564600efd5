"""The code of docs/python.md, run as it stands, and what its objects are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradus import api
from gradus.rows import read_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's code leaves, run in an empty folder; and the signal handlers and threads before it and after."""
    names, before = {}, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    folder, here = tmp_path_factory.mktemp("page"), os.getcwd()
    os.chdir(folder)
    try:
        for block in BLOCKS:
            exec(compile(block, "docs/python.md", "exec"), names)
    finally:
        os.chdir(here)
    names["_handlers"] = before, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return folder, names


@pytest.mark.docs
def test_the_code_of_the_page_trains_predicts_and_continues(page, monkeypatch):
    folder, names = page
    monkeypatch.chdir(folder)
    run = names["run"]
    assert run.finished and run.summary["steps"] == 40 and run.summary["metrics"]["valid/accuracy"] == 1.0
    assert repr(run) == f"Run('runs/reviews': best valid/accuracy 1.0000 at step {run.summary['best']['step']})"
    losses = [row["value"] for row in read_rows(run.folder / "metrics.jsonl") if row["name"] == "train/loss"]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]
    assert [answer["label"] for answer in names["answers"]] == ["good", "bad"] and names["answers"][0]["probability"] > 0.5
    assert names["metrics"]["valid/accuracy"] == run.summary["metrics"]["valid/accuracy"]
    assert names["plan"].fits is True and "124,439,808" in repr(names["plan"])
    assert len(api.generate(names["writer"], "to be", max_new=100, sliding_window=True)) == 105


@pytest.mark.docs
def test_a_custom_loop_of_ten_lines_learns(page):
    _, names = page
    block = next(block for block in BLOCKS if "loss.backward()" in block)
    loop = block[block.index("optimizer = ") :].splitlines()
    assert len(loop) <= 10 and sum(names["history"][-4:]) < 0.5 * sum(names["history"][:4])
    assert names["again"][0]["input"] == "a good story" and 0 < names["again"][0]["probability"] <= 1


@pytest.mark.docs
def test_a_hook_of_ten_lines_logs_beside_the_loss(page):
    folder, names = page
    block = next(block for block in BLOCKS if "(Hook)" in block)
    assert len(block.strip().splitlines()) <= 10
    norms = {row["step"]: row["value"] for row in read_rows(folder / names["watched"].folder / "metrics.jsonl") if row["name"] == "train/weight_norm"}
    assert list(norms) == [10, 20, 30] and all(value > 0 for value in norms.values())


@pytest.mark.docs
def test_training_leaves_no_signal_handler_and_no_thread(page):
    before, after = page[1]["_handlers"]
    assert before == after and not [t for t in threading.enumerate() if t.name == "live line"]


def test_the_six_functions_are_documented_and_quick_to_import():
    six = ("train", "plan", "load", "evaluate", "predict", "generate")
    assert set(six) <= set(api.__all__)
    for name in six:
        assert len(getattr(api, name).__doc__) > 150 and f"`{name}(" in PAGE
    code = "import sys, gradus.api; sys.exit(bool({'torch', 'pandas', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.docs
def test_rows_are_a_frame_where_pandas_is_and_dicts_where_it_is_not(page, monkeypatch):
    pandas = pytest.importorskip("pandas")
    run = api.Run(page[0] / "runs" / "reviews")
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rows = run.rows
    assert isinstance(rows, pandas.DataFrame) and len(rows) == len(records) and {"name", "value", "unit", "step"} <= set(rows.columns)
    assert isinstance(page[1]["plan"].rows, pandas.DataFrame)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.rows == records
