"""`gradus demo`: the commands that it shows are those that run, up to the first that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradus import cli
from gradus import demo as demos
from gradus.demo import demo
from gradus.proof import check

SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=16", "batch.samples=16", "train.steps=12"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradus", "demo"])


def shown(out: str) -> list[str]:
    return [line.split()[2] for line in out.splitlines() if line.startswith("$ gradus ")]


@pytest.mark.slow
def test_the_journey(monkeypatch, capsys):
    monkeypatch.setattr(check, "WAIT", 1.0)  # whether this machine loads data fast enough is another's matter
    for n in (1, 2):  # the second time in the same folder, without plan and check, which begin no run
        assert demo(cli.run if n == 1 else lambda words: 0 if words[0] in ("plan", "check") else cli.run(words), SMALL) == 0
        out = capsys.readouterr().out
        assert shown(out) == ["plan", "check", "train", "prove", "report"]
        runs = [folder for folder in Path("runs/copy-task").iterdir() if not folder.is_symlink()]
        newest = Path("runs/copy-task/latest").resolve()
        assert len(runs) == n and newest == max(runs).resolve() and f"Everything is in runs/copy-task/{newest.name};" in out
        assert f"$ gradus train copy-task {' '.join(SMALL)}\n" in out and " predicted  measured " in out.split("$ gradus prove")[1]
        assert (newest / "report" / "report.html").is_file()


@pytest.mark.parametrize("failing", ["plan", "check", "train", "prove", "report"])
def test_it_ends_at_the_first_command_that_fails(failing, capsys):
    def gradus(words: list[str]) -> int:
        Path("runs/copy-task/latest").mkdir(parents=True, exist_ok=True)
        return 7 if words[0] == failing else 0

    assert demo(gradus) == 7
    out = capsys.readouterr().out
    assert shown(out)[-1] == failing and "What next?" not in out


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (2, 2), (-9, 137), (-2, 130)])
def test_a_command_that_a_signal_ended_has_the_code_that_a_shell_gives_it(ended, code, monkeypatch):
    monkeypatch.setattr(demos, "run_program", lambda words: (ended, ""))
    assert demos.run(["plan"]) == code


INTERRUPTED = """
import sys
from gradus.demo import demo, run
sys.exit(demo(lambda words: run(words) if words[0] == "train" else 0, sys.argv[1:]))  # the verbs before it would each start a process
"""


@pytest.mark.slow
def test_an_interrupt_ends_it():
    """Ctrl-C reaches every process of the terminal: the training saves and ends as it does by itself, and the demo with it."""
    command = [sys.executable, "-u", "-c", INTERRUPTED, "train.steps=100000", *SMALL[:-1]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 10/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    seen.append(process.communicate(timeout=120)[0])
    assert process.returncode == 130, "".join(seen)
    assert "Traceback" not in "".join(seen) and "Resume with: gradus train" in "".join(seen) and "What next?" not in "".join(seen)
