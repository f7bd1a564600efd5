"""The plan of a run: written before it, proved after it, refusing what will not fit, and never in the way of a training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from gradus import recipe as recipes
from gradus.cli import main
from gradus.data.loader import Loader
from gradus.data.loader import Plan as Order
from gradus.errors import UserError
from gradus.launch import local
from gradus.parallel import status
from gradus.parallel.world import World
from gradus.plan import batches
from gradus.proof import memory_budget, predict, prove
from gradus.proof.predict import Planner
from gradus.proof.prove import Proof, StepTime, TimeMark, step_seconds
from gradus.rows import Row, read_rows
from gradus.signals import uninterrupted
from gradus.text import size
from gradus.train import machine
from gradus.train.run import train
from gradus.train.session import open_session

TINY = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 16, "train.steps": 12, "evaluate.samples": 0, "layout.device": "cpu", "layout.threads": 1}  # fmt: skip


def words(**more) -> list[str]:
    return ["copy-task", *(f"{k}={v}" for k, v in {**TINY, **more}.items())]


def by_name(folder, name: str) -> dict:
    return {r["name"]: r for r in read_rows(folder / name) if name != "plan.jsonl" or r.get("step")}


BOTH = """
import sys
from gradus import cli
code = cli.main(sys.argv[2:])
print("without a plan", flush=True)
import json
from gradus import recipe
from gradus.train.run import train
train(recipe.load("copy-task", **json.loads(sys.argv[1])))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run; beside it `out`, what it printed, and `plain`, the same training without a plan, afterwards in its process (what a plan
    would leave behind there is not seen)."""
    folder = tmp_path_factory.mktemp("prove") / "run"
    train = ["train", *words(**{"log.dir": folder, "log.every": 4})]
    plain = json.dumps({**TINY, "log.dir": str(folder.with_name("plain"))})
    command = [sys.executable, "-c", BOTH, plain, *train]  # a process of its own: others' tensors would be measured too
    folder.with_name("out").write_text(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return folder


# ------------------------------------------------------------ a run


def test_memory_of_the_third_step_is_what_the_plan_said(run):
    said, seen = by_name(run, "plan.jsonl"), by_name(run, "proof.jsonl")
    for name in ("weights", "gradients", "optimizer", "rest", "allocated"):
        p, m = said[f"memory/{name}"], seen[f"memory/{name}"]
        assert p["kind"] == "predicted" and m["kind"] == "measured" and p["step"] == m["step"] == 3
        assert p["value"] == pytest.approx(m["value"], rel=0.0 if name in ("weights", "gradients", "optimizer") else 0.02)
    parts = [seen[f"memory/{name}"]["value"] for name in ("weights", "gradients", "optimizer", "rest")]
    assert sum(parts) == seen["memory/allocated"]["value"], "the rest is the difference"
    n = sum(p.numel() for p in open_session(recipes.load("copy-task", **TINY)).build().parameters())
    assert seen["memory/weights"]["value"] == seen["memory/gradients"]["value"] == 4 * n
    assert seen["time/step"]["median_of"] == 12 - prove.FIRST_STEPS and 0 < seen["time/step"]["fastest"] <= seen["time/step"]["value"]


def test_the_plan_is_of_the_largest_batch_and_of_this_machine(run):
    largest = {r["name"]: r for r in read_rows(run / "plan.jsonl") if not r.get("step")}
    assert largest["memory/capacity"]["value"] == memory_budget.capacity(torch.device("cpu")) > largest["memory/process"]["value"]
    assert largest["memory/process"]["value"] - largest["memory/allocated"]["value"] > 5e7, "the process itself counts"
    assert all(r["kind"] == "predicted" for r in largest.values())


def test_summary_and_prove_have_the_same_figures(run, capsys):
    proof = json.loads((run / "summary.json").read_text())["proof"]
    assert {"memory/weights", "memory/allocated", "time/step"} <= proof.keys()
    assert proof["memory/weights"]["error"] == 0
    assert main(["prove", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["the", "plan", "predicted", "measured", "error"] and "tensors at the peak" in out and "+0.0%" in out
    assert main(["prove", str(run), "--json"]) == 0
    rows = {r["name"]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["proof/memory/allocated"]["predicted"] == proof["memory/allocated"]["predicted"]


@pytest.mark.slow
def test_tensors_and_process_are_told_apart_from_the_plan_to_the_proof(run):
    """Both measures, by the same words, planned and measured, with both errors; one of them never stands for the other."""
    folder, out = run, run.with_name("out").read_text().partition("without a plan")[0]
    rows = read_rows(folder / "plan.jsonl")
    tensors = next(r["value"] for r in rows if r["name"] == "memory/allocated" and not r.get("step"))
    process = next(r for r in rows if r["name"] == "memory/process")
    assert f"plan: tensors {size(tensors)}, process {size(process['value'])} of " in out
    before = process["how"]["inputs"]["before the model"]
    assert process["value"] == (before + 100_000_000 + round(1.4 * tensors) if machine.has_glibc() else before + tensors) and "memory/device" not in {r["name"] for r in rows}
    live = re.findall(r"^step \d+/12 .* process (\d+\.\d\d) GB", out, re.M)
    assert len(live) == 3 and not re.search(r"(?<!process )\b\d+\.\d\d GB  ETA", out), out
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["memory_process_per_rank"]) == 1 and "memory_per_rank" not in summary and "memory_tensors_per_rank" not in summary
    for name, label in (("memory/allocated", "tensors at the peak"), ("memory/process", "process at the peak")):
        pair = summary["proof"][name]
        assert pair["error"] == pytest.approx(pair["predicted"] / pair["measured"] - 1)
        line = next(line for line in out.splitlines() if line.strip().startswith(label))
        assert line.split(label)[1].split() == [*size(pair["predicted"]).split(), *size(pair["measured"]).split(), f"{pair['error']:+.1%}"]
    measured = {r["name"]: r["value"] for r in read_rows(folder / "metrics.jsonl")}
    assert "memory/peak" not in measured and measured["memory/process"] <= summary["proof"]["memory/process"]["measured"]
    assert summary["proof"]["memory/process"]["measured"] > 10 * summary["proof"]["memory/allocated"]["measured"], "a process is more than its tensors"


def test_several_runs_are_one_table(run, tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 0.8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("")
        prove.write(tmp_path / name / "plan.jsonl", [Row("memory/allocated", 100.0 * factor, "bytes", 3, {"kind": "predicted"})])
        prove.write(tmp_path / name / "proof.jsonl", [Row("memory/allocated", 100.0, "bytes", 3, {"kind": "measured"})])
    assert main(["prove", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].endswith("+0.0%") and out[2].endswith("-20.0%") and out[3].split() == ["median", "10.0%"] and out[4].split() == ["largest", "20.0%"]


def test_prove_says_what_is_missing(tmp_path, capsys):
    assert main(["prove", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("")
    assert main(["prove", str(tmp_path)]) == 2
    assert "no plan.jsonl" in capsys.readouterr().err
    (tmp_path / "plan.jsonl").write_text('{"name": "memory/allocated", "value": 1, "unit": "bytes", "step": 1}\n')
    assert main(["prove", str(tmp_path)]) == 2
    assert "no proof.jsonl" in capsys.readouterr().err
    (tmp_path / "proof.jsonl").write_text('{"a":' * 500)  # one line, cut short
    assert main(["prove", str(tmp_path)]) == 2
    assert "proof.jsonl has no row of a plan" in capsys.readouterr().err
    (tmp_path / "plan.jsonl").write_text('{"name": "another", "value": 1}\n')
    assert main(["prove", str(tmp_path)]) == 2
    assert "plan.jsonl has no row of a plan" in capsys.readouterr().err
    for value in ("[1]", "{}", "null", f"1{'0' * 400}"):
        (tmp_path / "plan.jsonl").write_text(f'{{"name": "memory/allocated", "value": {value}}}\n')
        assert main(["prove", str(tmp_path)]) == 2
        assert re.match("error: .*plan.jsonl.* value .*\n$", capsys.readouterr().err), value


@pytest.mark.slow
def test_training_is_the_same_with_and_without_the_plan(run):
    plain = run.with_name("plain")
    without, with_plan = (json.loads((folder / "summary.json").read_text()) for folder in (plain, run))
    assert without["train_loss"] == with_plan["train_loss"], "measuring changes no number"
    assert not (plain / "plan.jsonl").exists()


# ------------------------------------------------------------ what will not fit


def test_a_plan_that_fails_does_not_stop_a_training(tmp_path, capsys, monkeypatch):
    def fails(case):
        raise ZeroDivisionError("no such thing\nsecond line")

    monkeypatch.setattr(predict, "predict", fails)
    monkeypatch.setenv("GRADUS_FAULTS", str(tmp_path / "faults"))  # not that for which every test fails
    assert main(["train", *words(**{"log.dir": tmp_path / "run"})]) == 0
    out = capsys.readouterr().out
    assert "note: no plan (ZeroDivisionError: no such thing)" in out and "predicted" not in out
    assert (tmp_path / "faults").read_text() == "ZeroDivisionError: no such thing\n"
    assert not (tmp_path / "run" / "plan.jsonl").exists()
    assert "memory/allocated" in by_name(tmp_path / "run", "proof.jsonl"), "what was measured stays"


def test_data_that_no_plan_can_read_stop_the_run_before_its_first_step(tmp_path, capsys, monkeypatch):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            raise UserError("a.png: not a readable image. Replace it")

    def fails(case):
        return next(Loader(Broken(), Order(4, 0, batch_samples=2), list).steps(0))

    monkeypatch.setattr(predict, "predict", fails)
    assert main(["train", *words(**{"log.dir": tmp_path / "run"}), "--force"]) == 2
    assert capsys.readouterr().err.strip() == "error: a.png: not a readable image. Replace it"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ------------------------------------------------------------ which step


def test_the_batch_that_is_traced_is_the_one_that_is_measured(tmp_path, monkeypatch):
    seen, real = [], prove.memory_of_step
    monkeypatch.setattr(prove, "memory_of_step", lambda trainer, batches: seen.append(batches) or real(trainer, batches))
    recipe = recipes.load("copy-task", **{**TINY, "log.dir": str(tmp_path / "run")})
    with Proof() as proof:
        train(recipe, plan=proof)
    expected = predict.batches_of(open_session(recipe), (0, 0))[1]
    assert torch.equal(seen[0][0]["source"], expected[0]["source"])


def test_a_finished_run_that_is_resumed_keeps_its_proof(run, tmp_path, capsys):
    folder = tmp_path / "again"
    shutil.copytree(run, folder, symlinks=True)
    before = {name: (folder / name).read_bytes() for name in ("plan.jsonl", "proof.jsonl")}
    assert main(["train", str(folder), "--resume"]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before
    proofs = [json.loads((f / "summary.json").read_text())["proof"] for f in (run, folder)]
    assert proofs[0] == proofs[1] and "  tensors at the peak " in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_is_planned_from_where_it_stands(tmp_path, monkeypatch):
    folder, positions, real = tmp_path / "run", [], predict.batches_of
    monkeypatch.setattr(predict, "batches_of", lambda session, position: positions.append(position) or real(session, position))
    recipe = recipes.load("copy-task", **{**TINY, "schedule.name": "constant", "train.checkpoint_every": 5, "log.dir": str(folder)})
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(Proof, "logged", interrupt)
        with Proof() as proof:
            train(recipe, plan=proof)
    with Proof() as proof:
        train(recipes.load(folder), plan=proof, resume=folder)
    assert positions == [(0, 0), (1, 1)], "five steps of four an epoch"
    assert by_name(folder, "proof.jsonl")["memory/allocated"]["step"] == 3


def interrupt(self, trainer, *_):
    if trainer.progress.step >= 8:
        raise KeyboardInterrupt


# ------------------------------------------------------------ several processes


WORKER = """
import contextlib, gc, json, os, pathlib, sys
from gradus.parallel.processes import end_with_parent
end_with_parent()
from gradus import cli
from gradus.parallel import world
from gradus.proof import prove
planner = prove.Planner() if os.environ["RANK"] == "0" else None  # of all trainings: it begins before the processes meet
prove.Planner = lambda: contextlib.nullcontext(planner)
for folder, words in json.loads(sys.argv[1]).items():
    with open(f"{folder}.out-{os.environ['RANK']}", "w") as out, contextlib.redirect_stdout(out):
        code = cli.run(["train", *words, f"log.dir={folder}"])
    if code:
        break
    gc.collect()
world.leave(code)
"""
WAYS = {"plain": {}, "diloco": {"layout.diloco.every": 4, "evaluate.every": 8}, "without momentum": {"layout.diloco": "{every: 2, outer_momentum: 0}"}}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A folder with the runs of WAYS and `pipeline`, and with what they printed: two processes train one after another, as starting them takes the longest."""
    folder = tmp_path_factory.mktemp("two")
    rows = [f"{'a good film ' * (1 + 5 * (i % 7))},{'yes' if i % 2 else 'no'}" for i in range(40)]
    (folder / "table.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    assert main(["new", str(folder / "mine.yaml"), "--data", str(folder / "table.csv")]) == 0
    small = {"model.n_layers": 2, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 32, "batch.samples": 4, "train.steps": 4, "layout.threads": 1}
    of_texts = {**small, "layout.pipeline": 2, "schedule.warmup_steps": 0, "layout.device": "cpu"}
    trainings = {str(folder / name): [*words(**{"train.steps": 8, **more}), "--auto-resume"] for name, more in WAYS.items()}
    trainings[str(folder / "pipeline")] = [str(folder / "mine.yaml"), *(f"{k}={v}" for k, v in of_texts.items())]
    for run in trainings:
        status.clear(Path(run))  # as whoever starts the processes of one run does
    assert local.run(2, [json.dumps(trainings)], folder=folder / "workers", timeout=60, command=(sys.executable, "-c", WORKER)) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_planned_apart_and_measured(way, of_two):
    """As a job starts them: with --auto-resume the processes meet early, to find the run."""
    out = (of_two / f"{way}.out-0").read_text()
    assert "plan: " in out and " sent per step" in out and "no plan" not in out, out
    said, seen = by_name(of_two / way, "plan.jsonl"), by_name(of_two / way, "proof.jsonl")
    assert said["traffic/all_reduce"]["value"] == pytest.approx(seen["traffic/all_reduce"]["value"], rel=0.001)
    for name in ("weights", "gradients", "optimizer"):
        assert said[f"memory/{name}"]["value"] == pytest.approx(seen[f"memory/{name}"]["value"], rel=0.001)
    assert said["memory/allocated"]["value"] == pytest.approx(seen["memory/allocated"]["value"], rel=0.03)


@pytest.mark.slow
def test_traffic_is_planned_and_counted_of_the_step_that_is_measured(of_two):
    """A pipeline sends hidden states, as many as the batch has tokens: of texts of unequal length each step another number."""
    said, seen = (by_name(of_two / "pipeline", name) for name in ("plan.jsonl", "proof.jsonl"))
    assert said["traffic/send"]["value"] == pytest.approx(seen["traffic/send"]["value"], rel=0.001)


def test_others_do_not_wait_for_a_late_plan_until_they_give_up(monkeypatch):
    """With several processes the wait is a part of layout.timeout; by oneself it is not."""
    asked = []
    monkeypatch.setattr(Planner, "plan", lambda self, case, seconds: asked.append(seconds) or (_ for _ in ()).throw(TimeoutError("late")))
    monkeypatch.setattr(prove.worlds, "from_first", lambda value: value)
    session = open_session(recipes.load("copy-task", **{**TINY, "layout.timeout": 20}))
    for n in (1, 2):
        session.mesh.world = dataclasses.replace(session.mesh.world, size=n, local_size=n)
        plan = Proof()
        with plan:
            plan.before(session, (0, 0))
    assert asked == [prove.PATIENCE, 20 * prove.WAIT] and prove.WAIT <= 0.25


def test_an_interrupt_waits_for_the_end_of_a_trace():
    reached, mask = [], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(True)
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


BEGUN = """
import os, pathlib, signal, sys, time
from multiprocessing import forkserver
from gradus.parallel import processes

def connect(fds, begin=forkserver.connect_to_new_process, begun=[]):
    ends = begin(fds)
    if begun:  # the server is there, as it has started one; the second waits for what it shall do
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    begun.append(ends)
    return ends

forkserver.connect_to_new_process = connect
try:
    processes.run_group(2, print, log=pathlib.Path(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked from a server there")
def test_an_interrupt_while_workers_are_started_leaves_no_traceback(tmp_path):
    command = [sys.executable, "-c", BEGUN, str(tmp_path / "log")]
    p = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=100)
    assert (p.returncode, p.stderr) == (130, "")


DEEP = ["model.n_layers=12", "layout.micro_batch=1"]  # planned for some seconds


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("processes", "number", "group", "code"),
    [
        (1, signal.SIGINT, True, 130),
        (1, signal.SIGTERM, False, -signal.SIGTERM),  # as SIGKILL: a planner ends with its run, however that ended
        (2, signal.SIGINT, True, 130),
        (2, signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_run_that_is_stopped_while_it_is_planned(processes, number, group, code, tmp_path):
    more = ["--processes", "2"] if processes == 2 else []
    command = [sys.executable, "-m", "gradus", "train", *words(**{"log.dir": tmp_path / "run"}), *DEEP, *more]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as p:
        try:
            while not (line := p.stdout.readline()).startswith("learning rate"):
                assert line
            (os.killpg if group else os.kill)(p.pid, number)
            assert "plan:" not in p.stdout.read()
            assert p.wait(10) == code
            end = time.monotonic() + 5
            while left(p.pid):
                assert time.monotonic() < end, "a process is left"
                time.sleep(0.05)
        finally:
            for pid in left(p.pid):
                os.kill(pid, signal.SIGKILL)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def left(session: int) -> list[int]:
    """The processes of a session, and of those that torchrun's agent gave sessions of their own, that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            parent = f"GRADUS_PARENT={session}".encode() in (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (int(of) == session or parent) and state != "Z":
            found.append(int(stat.parent.name))
    return found


# ------------------------------------------------------------ figures


def test_times_without_the_first_steps_and_the_measured_one():
    times = [StepTime(i, 1.0 if i <= 5 else 0.1 + 0.001 * i, 100) for i in range(1, 16)]
    middle, low, high, count = step_seconds(times, 0, 3)
    assert count == 10 and low == pytest.approx(0.106) and high == pytest.approx(0.115) and middle == pytest.approx(0.1105)
    resumed = [StepTime(i + 40, s, n) for i, s, n in times]
    assert step_seconds(resumed, 40, 3) == step_seconds(times, 0, 3)
    assert step_seconds([StepTime(1, 0.5, 10), StepTime(2, 0.2, 10), StepTime(3, 9.0, 10)], 0, 3) == (0.2, 0.2, 0.2, 1)
    assert step_seconds([], 0, None) is None


def test_of_steps_between_two_waits_the_mean_is_known():
    marks = [(40, 1.0, 100), (41, 1.5, 110), (41, 1.75, 110), (45, 3.75, 150)]
    assert list(prove.times_of([TimeMark(*mark) for mark in marks])) == [(41, 0.5, 10.0), *((step, 0.5, 10.0) for step in (42, 43, 44, 45))]


def test_times_of_unequal_batches_are_those_like_the_measured_one():
    times = [StepTime(i, 0.1 if i % 2 else 0.3, 100 if i % 2 else 300) for i in range(1, 20)]
    assert step_seconds(times, 0, 3)[0] == pytest.approx(0.1)
    assert step_seconds(times, 0, 4)[0] == pytest.approx(0.3)
    alone = [StepTime(i, 0.01 * i, 10 * i) for i in range(1, 9)]  # no batch is like another, each token takes as long
    assert step_seconds(alone, 0, 3) == pytest.approx((0.03, 0.03, 0.03, 3))


@pytest.mark.parametrize(
    ("others", "seconds", "notes"),
    [
        (2.0, 1.0, ["a step takes 1 s, 10 × its plan: other programs use 2.0 of the 2 processors"]),
        (0.1, 1.0, ["a step takes 1 s, 10 × its plan: gradus profile runs/it shows where the time goes"]),
        (2.0, 0.4, []),
    ],
)
def test_steps_that_take_many_times_their_plan_are_told_once(others, seconds, notes, monkeypatch, capsys):
    monkeypatch.setattr(prove.OtherPrograms, "share", lambda self: others)
    monkeypatch.setattr("gradus.limits.cores", lambda: 2)
    proof = Proof()
    proof._watch_others()
    proof.step, proof.predicted = 3, types.SimpleNamespace(rows=[Row("time/step", 0.1, "s")])
    clock, progress = types.SimpleNamespace(seconds={"train": 0.0, "data": 0.0}), types.SimpleNamespace(step=0, tokens=0)
    trainer = types.SimpleNamespace(clock=clock, progress=progress, start_step=0, device=torch.device("cpu"), folder=Path("runs/it"), synced=True, say=print)
    proof._mark_time(trainer)
    for step in range(1, 65):
        clock.seconds["train"], progress.step, progress.tokens = step * seconds, step, 100 * step
        proof.after_step(trainer, types.SimpleNamespace(step=step))
    assert capsys.readouterr().out == "".join(f"note: {note}\n" for note in notes)


def test_who_else_uses_the_processors_is_told_before_step_0_and_kept(tmp_path, capsys, monkeypatch, no_plan):
    monkeypatch.setattr(prove.OtherPrograms, "share", lambda self: 1.87)
    monkeypatch.setattr("gradus.limits.cores", lambda: 2)
    assert main(["train", *words(**{"log.dir": tmp_path / "run", "train.steps": 2, "schedule.warmup_steps": 0})]) == 0
    out = capsys.readouterr().out
    assert out.index("note: other programs use 1.9 of the 2 processors\n") < out.index("step 2/2")
    load = json.loads((tmp_path / "run/summary.json").read_text())["load"]
    assert load == {"processors": 2, "before": 1.87, "during": 1.87}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"ids": torch.zeros(16, 24)}, "16 × 24 tokens"),
        ({"source": torch.zeros(4, 7), "target": torch.zeros(4, 9)}, "4 × 7 + 9 tokens"),
        ({"images": torch.zeros(8, 3, 4, 4), "labels": torch.zeros(8)}, "8 images"),
    ],
)
def test_a_batch_is_said_by_its_shape(batch, words):
    assert batches.describe_largest([{k: v[:1] for k, v in batch.items()}, batch]) == words


def test_a_replica_that_comes_to_a_run_keeps_no_planner(monkeypatch):
    """It plans nothing, and the planner is a process."""
    open_planners: list[int] = []

    @contextlib.contextmanager
    def planner():
        open_planners.append(1)
        yield
        open_planners.clear()

    monkeypatch.setattr(prove, "Planner", planner)
    trainer = types.SimpleNamespace(clock=types.SimpleNamespace(seconds={"train": 1.0, "data": 0.0}), progress=types.SimpleNamespace(step=7, tokens=0), synced=True)
    trainer.device, trainer.parallel = torch.device("cpu"), types.SimpleNamespace(mesh=types.SimpleNamespace(world=World(1, 2, 1, 2)))
    with Proof() as proof:
        assert open_planners
        proof.start(trainer)
        assert not open_planners


def test_energy_counts_stretches_of_training_alone():
    import types

    class Metered:
        def __init__(self):
            self.told = iter([0.0, 10.0, 50.0, 60.0])

        def read(self):
            return next(self.told)

    plan, seconds = Proof(), {"evaluate": 0.0, "checkpoint": 0.0}
    plan.meter = Metered()
    trainer = types.SimpleNamespace(clock=types.SimpleNamespace(seconds=seconds), progress=types.SimpleNamespace(step=0))
    for step, evaluated in ((10, 0.0), (20, 0.0), (30, 2.0), (40, 2.0)):
        trainer.progress.step, seconds["evaluate"] = step, evaluated
        plan._read_meter(trainer)
    assert (plan.energy.joules, plan.energy.steps) == (20.0, 20), "the stretch with an evaluation is left out"


def test_unknown_run_folder():
    with pytest.raises(UserError, match="no run here"):
        list(prove.prove(["nowhere"]))
