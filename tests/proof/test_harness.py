"""The harness: what is measured is kept, alternates, is planned, and is measured once."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import UserError
from gradus.proof import (
    harness,
    memory_budget,
    results,
    runs,
    study,
    timing,
)
from gradus.proof.predict import Planner
from gradus.rows import read_rows

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import OWN, TINY, written  # noqa: E402

TINY_RUN = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 16, "train.steps": 12, "evaluate.samples": 0, "layout.device": "cpu", "layout.threads": 1}  # fmt: skip
SMALL = {"model.n_layers": 1, "batch.samples": 12}


def of_two(recipe, **more) -> study.Study:
    return study.Study("two", [study.Configuration("2 processes", recipe, processes=2, **more)])


def test_a_runner_of_ones_own_is_timed_and_compared(own):
    _, folder, rows = own
    assert rows["samples_per_s", "slow"]["value"] < 20.1 and rows["samples_per_s", "fast"]["value"] < 401  # a sleep may be longer, not shorter
    ratio = rows["ratio", "fast"]
    by_round = [f / s for f, s in zip(rows["samples_per_s", "fast"]["samples"], rows["samples_per_s", "slow"]["samples"])]
    assert ratio["against"] == "slow" and ratio["samples"] == pytest.approx(by_round)
    assert ratio["value"] == pytest.approx(statistics.median(by_round)) and ratio["value"] > 1
    assert ("ratio", "slow") not in rows and rows["deviation/loss", "fast"]["value"] == 0
    samples = read_rows(folder / "samples.jsonl")
    assert [(s["round"], s["configuration"]) for s in samples] == [(1, "slow"), (1, "fast"), (2, "slow"), (2, "fast")], "rounds alternate"
    assert all(len(s["ranks"][0]["spent"]) == 3 and len(s["ranks"][0]["warm_up"]) == 1 for s in samples), "every step is kept"


def test_what_was_stopped_goes_on_and_nothing_is_measured_twice(own, tmp_path):
    file, folder, _ = own
    lines = (folder / "samples.jsonl").read_text().splitlines()
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "study.json").write_bytes((folder / "study.json").read_bytes())
    (cut / "samples.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])  # killed while it wrote the last one
    assert main(["study", str(file), "--to", str(cut)]) == 0
    again = (cut / "samples.jsonl").read_text().splitlines()
    assert again[:3] == lines[:3] and len(again) == 4 and json.loads(again[3])["configuration"] == "fast"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sends signals to a group")
def test_a_study_that_is_killed_keeps_its_samples(tmp_path):
    file = written(tmp_path, OWN.replace("rounds: 2", "rounds: 500"))
    command = [sys.executable, "-m", "gradus", "study", str(file), "--to", str(tmp_path / "out")]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        end = time.monotonic() + 60
        while not ((tmp_path / "out/samples.jsonl").exists() and (tmp_path / "out/samples.jsonl").read_text().count("\n") > 1):
            assert time.monotonic() < end and p.poll() is None
            time.sleep(0.05)
        os.killpg(p.pid, 2)
        assert p.wait(30) == 130 and "Traceback" not in p.stderr.read()
    assert len(read_rows(tmp_path / "out/samples.jsonl")) >= 2


@pytest.mark.slow
def test_a_grid_of_trainings_planned_measured_and_against_an_axis(tmp_path, capsys):
    file = written(tmp_path, f"""
recipe: copy-task
set: {json.dumps(TINY)}
steps: 3
rounds: 1
grid:
  batch: {{whole: , halves: {{set: [layout.micro_batch=4]}}}}
  processes: {{one: , two: {{processes: 2}}}}
against: whole
""")
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 2, "no such page"
    (tmp_path / "page.md").write_text("before\n<!-- some -->\nold\n<!-- end of some -->\nafter\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n<!-- some -->\n| configuration |") and "old" not in page and page.endswith("<!-- end of some -->\nafter\n")
    rows = read_rows(tmp_path / "out/rows.jsonl")
    measured = {(r["configuration"], r["name"]): r for r in rows if r["kind"] == "measured"}
    assert measured["halves · two", "ratio"]["against"] == "whole · two" and ("whole · two", "ratio") not in measured
    assert measured["halves · two", "deviation/loss"]["value"] < 1e-5, "the layout changes nothing"
    table = results.Table(rows)
    for name in table.names:
        planned, peak = table.planned[name, "memory/allocated"]["value"], measured[name, "memory/allocated"]["value"]
        assert planned == pytest.approx(peak, rel=0.03)
    assert "tensors: planned with a median error of" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_are_whole_trainings(tmp_path, monkeypatch, no_plan):
    monkeypatch.setattr(runs, "run_program", lambda words, **_: (main(words[3:]), ""))  # here: test_scale.py starts processes for it
    file = written(tmp_path, f"recipe: copy-task\nset: {json.dumps(TINY)}\nrunner: train\nseeds: [0, 1]\nconfigurations: {{one: }}\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 0
    rows = {r["name"]: r for r in read_rows(tmp_path / "out/rows.jsonl") if r["kind"] == "measured"}
    loss = rows["valid/loss"]
    assert len(set(loss["samples"])) == 2 and loss["value"] == pytest.approx(sum(loss["samples"]) / 2) and loss["std"] > 0
    assert "±" in results.shown("valid/loss", loss)


def test_what_a_configuration_fails_of_is_told_in_its_row(tmp_path, capsys):
    more = "  broken: {runner: own.py:nothing}\n  raising: {}\n"  # the last without its option
    file = written(tmp_path, OWN.replace("rounds: 2", "rounds: 1") + more)
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--only", "broken,raising"]) == 0
    failed = {r["configuration"]: r["value"] for r in read_rows(tmp_path / "out/rows.jsonl") if r["name"] == "failed"}
    assert failed == {
        "broken": "runner=own.py:nothing: the file has no nothing.",
        "raising": "does not run here (KeyError: 'seconds'). The study's workers.log has the traceback.",
    }
    assert "broken: runner=" in capsys.readouterr().out and 'options["seconds"]' in (tmp_path / "out/workers.log").read_text()


def test_it_fails_where_every_configuration_did(unmeasured, own, tmp_path, capsys):
    file = written(tmp_path, OWN)
    assert main(["study", str(file), "--to", str(tmp_path / "out"), "--json"]) == 1
    assert {json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()} == {"nothing is measured here"}
    more = written(tmp_path, OWN.replace("rounds: 2", "rounds: 3"))  # without samples: the folder is free
    assert main(["study", str(more), "--to", str(tmp_path / "out")]) == 1
    lines = (own[1] / "samples.jsonl").read_text().splitlines()
    half = tmp_path / "half"
    half.mkdir()
    (half / "study.json").write_bytes((own[1] / "study.json").read_bytes())
    (half / "samples.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["configuration"] == "slow"))
    assert main(["study", str(own[0]), "--to", str(half)]) == 0, "one was measured"


CHILD = """#!{python}
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    time.sleep(0.6)  # longer than a program that only waits gives it
    Path({folder!r}, "saved").write_text(str(number))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
Path({folder!r}, "started").touch()
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a script as a program")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_saves_itself_first(number, tmp_path, monkeypatch):
    child = tmp_path / "python"
    child.write_text(CHILD.format(python=sys.executable, folder=str(tmp_path)))
    child.chmod(0o755)
    file = written(tmp_path, f"recipe: copy-task\nset: {json.dumps(TINY)}\nrunner: train\nplan: false\nconfigurations: {{one: }}\n")

    def stop():
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    monkeypatch.setattr(sys, "executable", str(child))
    if number == signal.SIGINT:
        assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 130
    else:
        with pytest.raises(SystemExit, match="143"):
            main(["study", str(file), "--to", str(tmp_path / "out")])
    assert (tmp_path / "saved").read_text() == str(int(number))


def test_a_study_ends_its_planning_when_it_is_stopped(tmp_path, monkeypatch):
    begun: list[Planner] = []

    def interrupted(self, case):
        begun.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "plan", interrupted)
    monkeypatch.setattr(harness, "run_group", lambda *args, **more: [10**8])
    with pytest.raises(KeyboardInterrupt):
        harness.planned(of_two(recipes.load("copy-task", **TINY_RUN)), tmp_path, print)
    assert len(begun) == 1 and not begun[0].process.is_alive()


@pytest.mark.slow
def test_a_study_refuses_what_will_not_fit_unless_forced(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_budget, "capacity", lambda device: 1_000_000)
    recipe, said = recipes.load("copy-task", **{**TINY_RUN, **SMALL}), []
    _, refused = harness.planned(of_two(recipe), tmp_path, said.append)
    assert re.match(r"the plan needs .*start fewer on this host\.", refused["2 processes"])
    assert harness.planned(of_two(recipe), tmp_path, said.append)[1] == refused, "when it goes on, too"
    (tmp_path / "plan.jsonl").unlink()
    rows, refused = harness.planned(of_two(recipe, force=True), tmp_path, said.append)
    assert rows and not refused and said[-1].startswith("2 processes, plan: ")


def test_a_study_on_a_busy_machine_says_so_once_with_what_helps(tmp_path, monkeypatch, capsys):
    facts = {"device": "cpu", "threads": 2}
    disturbed = timing.Timed([], 1.0, [[0.0, 1.0, 0.0, 0.0]], 8, [], {}, 1.9, 2, facts=facts)
    monkeypatch.setattr(harness, "run_group", lambda *_, log: [disturbed])
    monkeypatch.setattr("gradus.limits.cores", lambda: 2)
    assert main(["study", str(written(tmp_path, OWN)), "--to", str(tmp_path / "out")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    note = "note: other programs use 1.9 of the 2 processors; 1 thread (OMP_NUM_THREADS=1) may be faster. Delete "
    assert out.count(note) == 1, out


@pytest.mark.parametrize("about", [{}, {"configuration": 10**17, "kind": "predicted"}, {"configuration": "one", "kind": None}])
def test_a_plan_of_something_else_is_one_line(about, tmp_path):
    (tmp_path / "plan.jsonl").write_text(json.dumps({"name": "memory/process", "value": 1, **about}) + "\n")
    with pytest.raises(UserError, match=r"plan\.jsonl: not what gradus writes there\. Delete it"):
        harness.read_plan(tmp_path / "plan.jsonl")
