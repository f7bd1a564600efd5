"""Ten processes killed at random instants: every run ends as the one that nobody disturbed. (Two hundred: benchmarks/kills.py.)"""

# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]  # also in the processes that a test starts
import kills as bench


@pytest.mark.slow
def test_two_kills(tmp_path, monkeypatch, capsys):
    """By the command of the pages."""
    monkeypatch.setattr(sys, "argv", ["kills.py", "--kills", "2", "--processes", "2", "--seed", "1", "--folder", str(tmp_path)])
    code, said = bench.main(), capsys.readouterr().out
    assert code == 0 and said.splitlines()[-1].startswith("2 of 2 runs ended with bitwise the weights"), said


@pytest.mark.slow
def test_kills_that_go_on_in_another_layout(tmp_path):
    said: list[str] = []
    fine = bench.kills(1, 2, ["layout.shard=2"], resume_processes=1, resume_overrides=["layout.shard=1"], folder=tmp_path, seed=2, say=said.append)
    assert fine == 1, "\n".join(said)


@pytest.mark.slow
def test_a_kill_through_the_launcher_that_starts_again_by_itself(tmp_path):
    said: list[str] = []
    assert bench.kills(0, 2, launcher=1, folder=tmp_path, seed=3, say=said.append) == 1, "\n".join(said)


@pytest.mark.slow
def test_a_difference_is_found(tmp_path):
    """The comparison fails where one weight differs in its last bit, and where a step stands twice."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    setup = bench.Setup([], 1, [], 1, tmp_path)
    for name in ("undisturbed", "other"):
        bench.Processes(1, setup.argv(tmp_path / name), tmp_path / f"{name}.log").must_finish()
    other = tmp_path / "other"
    assert bench.compare(setup, other) == 0.0
    rows = (other / "metrics.jsonl").read_text()
    again = next(line for line in rows.splitlines() if json.loads(line)["name"] == "train/loss")
    (other / "metrics.jsonl").write_text(rows + again + "\n")
    with pytest.raises(AssertionError, match=r"the steps in metrics\.jsonl are"):
        bench.compare(setup, other)
    (other / "metrics.jsonl").write_text(rows)
    file = other / "checkpoints" / "step-00000030" / "training.safetensors"
    tensors = load_file(file)
    name = next(k for k in tensors if k.startswith("exp_avg."))
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(torch.inf))
    save_file(tensors, file)
    with pytest.raises(AssertionError, match=r"1 of \d+ tensors differ"):
        bench.compare(setup, other)
