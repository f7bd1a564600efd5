"""Processes killed at an instant or a step that is drawn: every run ends as the one that nobody disturbed. (Two hundred: benchmarks/kills.py.)"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]  # also in the processes that a test starts
import kills as bench  # noqa: E402


@pytest.mark.slow
def test_kills_and_a_difference(tmp_path, monkeypatch, capsys):
    """By the command of the pages, through the launcher, which starts again by itself. Then the comparison fails where one weight
    differs in its last bit, and where a step stands twice."""
    monkeypatch.setattr(sys, "argv", ["kills.py", "--kills", "0", "--launcher", "1", "--processes", "2", "--seed", "1", "--folder", str(tmp_path)])
    code, said = bench.main(), capsys.readouterr().out
    assert code == 0 and said.splitlines()[-1].startswith("1 of 1 runs ended with bitwise the weights"), said

    setup, other = bench.Setup([], 2, [], 2, tmp_path), tmp_path / "warm"
    rows = (other / "metrics.jsonl").read_text()
    again = next(line for line in rows.splitlines() if json.loads(line)["name"] == "train/loss")
    (other / "metrics.jsonl").write_text(rows + again + "\n")
    with pytest.raises(AssertionError, match=r"the steps in metrics\.jsonl are"):
        bench.compare(setup, other)
    (other / "metrics.jsonl").write_text(rows)
    file = other / "checkpoints" / "step-00000030" / "sharded" / "shard-00001.safetensors"
    tensors = load_file(file)
    name = next(k for k in tensors if k.startswith("exp_avg."))
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(torch.inf))
    save_file(tensors, file)
    with pytest.raises(AssertionError, match=r"1 of \d+ tensors differ"):
        bench.compare(setup, other)


@pytest.mark.slow
def test_kills_that_go_on_in_another_layout(tmp_path):
    said: list[str] = []
    fine = bench.kills(1, 2, ["layout.shard=2"], resume_processes=1, resume_overrides=["layout.shard=1"], folder=tmp_path, seed=2, say=said.append)
    assert fine == 1, "\n".join(said)
