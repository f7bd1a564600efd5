"""One and two processes compared: figures that agree with each other and with what is known, and no process left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import UserError
from gradus.parallel import processes
from gradus.parallel.world import World
from gradus.proof import harness, runs, scale, timing
from gradus.rows import read_rows
from gradus.train.schedule import learning_rate

TINY = {"model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 32, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 4, "batch.samples": 8, "train.steps": 8, "evaluate.samples": 0, "layout.device": "cpu"}  # fmt: skip


def tiny(**more):
    return recipes.load("copy-task", **{**TINY, **more})


# ------------------------------------------------------------ one and two processes, strong


def run(folder: Path, *words: str, **more) -> tuple[str, list[dict]]:
    """What `gradus scale` prints, and its rows."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["scale", "copy-task", *(f"{k}={v}" for k, v in {**TINY, **more}.items()), *words, "--to", str(folder)]) == 0
    return told.getvalue(), read_rows(folder / "rows.jsonl")


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale") / "strong"
    text, rows = run(folder, "--processes", "1,2", "--steps", "4", "--warmup", "2", "--repeat", "1")
    return folder, text, {(r["name"], r["processes"]): r for r in rows if r["kind"] == "measured"}


def value(found, name: str, n: int) -> float:
    return found[name, n]["value"]


@pytest.mark.slow
def test_figures_agree_with_each_other(tmp_path):
    _, rows = run(tmp_path / "strong", "--processes", "1,2", "--steps", "4", "--warmup", "2", "--repeat", "3")  # of an odd number the middle one is the median
    found = {(r["name"], r["processes"]): r for r in rows if r["kind"] == "measured"}
    for n in (1, 2):
        rates = found["samples_per_s", n]["samples"]
        assert len(rates) == 3 and value(found, "samples_per_s", n) == statistics.median(rates)
        assert value(found, "samples_per_s", n) == pytest.approx(8 / value(found, "time/step", n))
        parts = {name: value(found, f"time/step/{name}", n) for name in timing.PARTS}
        assert sum(parts.values()) == pytest.approx(value(found, "time/step", n))
        assert 0 < parts["computing"] < value(found, "time/step", n) and parts["data"] > 0
        assert 5e7 < value(found, "memory/process", n) < 5e9
    ratio = value(found, "samples_per_s", 2) / value(found, "samples_per_s", 1)
    assert value(found, "speed_up", 2) == pytest.approx(ratio) and value(found, "efficiency", 2) == pytest.approx(ratio / 2)
    assert value(found, "speed_up", 1) == value(found, "efficiency", 1) == 1
    assert value(found, "time/step/communication", 1) == value(found, "time/step/waiting", 1) == 0 <= value(found, "time/step/communication", 2)
    assert sum(value(found, f"lost/{name}", 2) for name in timing.PARTS) == pytest.approx(1 - ratio / 2)


def test_two_processes_train_as_one_and_send_their_gradients(strong):
    _, _, found = strong
    assert value(found, "loss", 2) == pytest.approx(value(found, "loss", 1), rel=1e-5) and value(found, "deviation/loss", 2) < 1e-5
    n_bytes = 4 * models.count(tiny(**{"model.vocab_size": 11}).model)["total"]
    assert found["traffic/sent", 2]["parameters"] == n_bytes / 4
    assert ("traffic/sent", 1) not in found and n_bytes <= value(found, "traffic/sent", 2) <= n_bytes + 16, "an all-reduce between two sends it once"
    reduced = found["collective/all_reduce", 2]
    assert reduced["calls"] == 3 and reduced["value"] > 0, "the counts, one bucket of gradients, the loss"


def test_conditions_and_table(strong):
    _, text, found = strong
    r = found["samples_per_s", 2]
    assert r["recipe"] == "copy-task" and r["threads"] == 1 and {"cpu", "cpus", "versions", "layout", "steps", "warm_up", "precision", "device"} <= set(r)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("configuration") and "samples/s" in line)
    assert lines[at + 1].startswith("1 process ") and lines[at + 2].startswith("2 processes ")
    assert f"{value(found, 'speed_up', 2):.4g}" in lines[at + 2].split() and f"{value(found, 'efficiency', 2):.4g}" in lines[at + 2].split()
    assert "all_reduce" in text and "lost against 1 process, in % of the step" in text


def test_a_folder_with_all_samples_is_only_read(strong, monkeypatch):
    folder, _, found = strong
    monkeypatch.setattr(harness, "run_group", lambda *args, **more: pytest.fail("measured twice"))
    _, rows = run(folder, "--processes", "1,2", "--steps", "4", "--warmup", "2", "--repeat", "1")
    again = {(r["name"], r["processes"]): r["value"] for r in rows if r["kind"] == "measured"}
    assert again == {key: r["value"] for key, r in found.items()}
    assert main(["scale", "copy-task", "layout.device=cpu", "--processes", "1,2", "--to", str(folder)]) == 2, "another study"


# ------------------------------------------------------------ weak, to the end


@pytest.mark.slow
def test_weak_takes_a_batch_for_every_process_and_scales_the_rate(tmp_path, monkeypatch):
    start = runs.run_program  # a process for the training of one, and workers for that of two
    monkeypatch.setattr(runs, "run_program", lambda words, **more: (main(words[3:]), "") if "--processes" in words else start(words, **more))
    text, rows = run(tmp_path / "weak", "--processes", "1,2", "--steps", "2", "--warmup", "2", "--repeat", "1", "--weak", "--scale-lr")
    found = {(r["name"], r["configuration"]): r["value"] for r in rows}
    names = {1: "1 process", 2: "2 processes"}
    one, two = (recipes.load(tmp_path / "weak/runs" / f"{name.replace(' ', '-')}--to-the-end-1") for name in names.values())
    assert (one.batch.samples, one.train.steps, one.optimizer.lr) == (8, 8, tiny().optimizer.lr)
    assert (two.batch.samples, two.train.steps, two.optimizer.lr) == (16, 4, 2 * tiny().optimizer.lr)
    assert (two.schedule.warmup_steps, two.layout.threads) == (2, 1)
    for n, name in names.items():
        whole = f"{name}, to the end"
        assert found["valid/loss", whole] > 0 and 0 <= found["valid/accuracy", whole] <= 1
        assert found["samples_per_s", name] == pytest.approx(8 * n / found["time/step", name])
    times = [found["time/run", f"{name}, to the end"] for name in names.values()]
    assert found["speed_up", "2 processes, to the end"] == pytest.approx(times[0] / times[1])
    heads = [line for line in text.splitlines() if (line.startswith("configuration") and "speed-up" in line) or "valid/" in line]
    assert any("training loss" in line for line in heads) and any("valid/accuracy" in line for line in heads), text


def test_a_training_with_mpi_is_started_by_mpirun(tmp_path):
    r = tiny(**{"layout.replicate": "manual", "layout.transport": "mpi"})
    assert runs.command(r, 2, None, tmp_path / "run")[:5] == ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def test_what_weak_leaves_and_changes():
    r = tiny(**{"train.checkpoint_every": 4, "evaluate.every": 6, "schedule.end_step": 8})
    kept = scale.recipe_for(r, 4, weak=True)
    assert (kept.batch.samples, kept.optimizer.lr, kept.train.steps, kept.train.checkpoint_every) == (32, r.optimizer.lr, 2, 1)
    assert (kept.evaluate.every, kept.schedule.end_step, kept.schedule.warmup_steps) == (2, 2, 1)
    assert scale.recipe_for(r, 4).model_copy(update={"layout": r.layout}) == r, "strong: nothing but the layout"
    tensor = r.model_copy(update={"layout": r.layout.model_copy(update={"tensor": 2})})
    assert scale.recipe_for(tensor, 4, weak=True).batch.samples == 16, "two of four see samples of their own"


@pytest.mark.parametrize("name", ["noam", "cosine", "constant"])
def test_weak_has_the_rate_of_one_process_at_the_same_sample(name):
    r = recipes.load("copy-task", **{"schedule.name": name, "schedule.warmup_steps": 40, "train.steps": 200})
    for scale_lr, times in ((False, 1), (True, 4)):
        w = scale.recipe_for(r, 4, weak=True, scale_lr=scale_lr)
        for step in (2, 10, 30, 50):
            alone = learning_rate(r.schedule, r.optimizer.lr, 4 * step, 200, 128)
            assert learning_rate(w.schedule, w.optimizer.lr, step, w.train.steps, 128) == pytest.approx(times * alone)


def test_one_replica_leaves_out_what_replicas_do():
    r = tiny(**{"layout.replicate": "ddp", "layout.shard_optimizer": True})
    one, two = (found.recipe.layout for found in scale.configurations_of(r, [1, 2], weak=False, scale_lr=False))
    assert (one.replicate, one.shard_optimizer) == ("auto", False) and (two.replicate, two.shard_optimizer) == ("ddp", True)
    assert (one.threads, two.threads) == (1, 1)


# ------------------------------------------------------------ how figures are made


def timed(spent: list[float], elapsed: float, device: str = "cpu") -> timing.Timed:
    return timing.Timed([], elapsed, [spent], 8, [], {}, None, 0, facts={"device": device})


def test_parts_of_a_step():
    """Rank 0 computes 6 and is blocked 4; rank 1 computes 8 of which others took 1, and is blocked 1: that is communication."""
    ranks = [timed([0.5, 5.5, 0.0, 4.0], 10.0), timed([0.5, 7.5, 1.0, 1.0], 10.0)]
    assert scale.parts_of(ranks) == pytest.approx({"computing": 6.5, "communication": 1.0, "waiting": 1.5, "data": 0.5, "other": 0.5})
    alone = [timed([1.0, 16.0, 2.0, 1.0], 20.0)]
    assert scale.parts_of(alone) == pytest.approx({"computing": 16.0, "communication": 0.0, "waiting": 0.0, "data": 1.0, "other": 3.0})
    gone = scale.losses(ranks, alone)
    assert gone == pytest.approx({"computing": -0.15, "communication": 0.1, "waiting": 0.15, "data": 0.0, "other": -0.1})
    weak = [dataclasses.replace(t, samples=16) for t in ranks]  # each has as many as the one alone
    assert sum(scale.losses(weak, alone).values()) == pytest.approx(1 - 20 / 10) and sum(gone.values()) == pytest.approx(1 - 20 / 2 / 10)
    gpu = timed([0.1, 0.0, 0.0, 0.0], 1.0, "cuda")
    assert scale.parts_of([gpu]) is None
    gpu.kernels = [0.6, 0.2]
    assert scale.parts_of([gpu]) == pytest.approx({"computing": 0.6, "communication": 0.2, "waiting": 0.0, "data": 0.1, "other": 0.1})


# ------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "1,x"], "'x' is not a whole number from 1 to"),
        (["--processes", "1,,2"], "an empty entry is not a whole number from 1 to"),
        (["--processes", "0,2"], "'0' is not a whole number from 1 to"),
        (["--processes", "1,3"], "3 processes: copy-task: batch.samples=128 does not divide among 3 processes"),
        (["--processes", "1,2", "layout.shard=2"], "--processes 1: this layout needs a multiple of 2"),
        (["--processes", "1,2", "--scale-lr"], "--scale-lr"),
        (["--processes", "1,2", "--warmup", "1"], "--warmup 1: must be at least 2"),
        (["--processes", "1,2", "--repeat", "0"], "--repeat=0: must be at least 1"),
        (["--processes", "1,2", "log.dir=x"], "log.dir cannot take effect"),
        (["--processes", "1,2", "layout.replicate=manual", "layout.transport=mpi"], "layout.transport=mpi"),
        (["--processes", "1,2", "layout.replicate=none"], "2 processes: copy-task: layout.replicate=none"),
        (["--processes", "1,2", "--stepps", "3"], "Did you mean --steps?"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["scale", "copy-task", "layout.device=cpu", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("error:") and "\n" not in error
    assert not list(tmp_path.iterdir()), "nothing was started"


WORKERS = """
import os, signal
from gradus.errors import UserError

def mistaken(here):
    raise UserError("sample 3: no such file")

def killed(here):
    if here.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

def failed(here):
    if here.rank == 0:
        raise RuntimeError("[gloo] Connection closed by peer")
    raise KeyError("the cause")
"""


@pytest.mark.slow
def test_what_goes_wrong_in_a_worker_is_told(tmp_path, monkeypatch):
    (tmp_path / "bad_workers.py").write_text(WORKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "GRACE", 3.0)
    bad = importlib.import_module("bad_workers")
    for function, kind, said in (
        (bad.mistaken, UserError, "^sample 3: no such file$"),
        (bad.killed, UserError, "rank 1 of 2 was killed by SIGKILL"),
        (bad.failed, RuntimeError, "rank 1 of 2(.|\n)*the cause"),
    ):
        with pytest.raises(kind, match=said):
            processes.run_group(2, function, log=tmp_path / "log")
    assert processes.run_group(1, World.__eq__, World(), log=tmp_path / "log") == [True], "the last argument is the worker's place"


# ------------------------------------------------------------ no process is left


def session(number: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == number and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("number", "group", "code"), [(signal.SIGINT, True, 130), (signal.SIGKILL, False, -signal.SIGKILL)])
def test_nothing_is_left_when_it_is_stopped(number, group, code, tmp_path):
    words = [f"{k}={v}" for k, v in TINY.items()]
    command = [sys.executable, "-m", "gradus", "scale", "copy-task", *words, "--processes", "2", "--steps", "1000000", "--to", str(tmp_path / "out")]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        try:
            wait_for(lambda: len(session(p.pid)) >= 5, 60)  # it, two that multiprocessing has, two workers
            time.sleep(0.5)
            (os.killpg if group else os.kill)(p.pid, number)
            _, error = p.communicate(timeout=30)
            assert p.returncode == code and "Traceback" not in error
            wait_for(lambda: not session(p.pid), 10)
        finally:
            for pid in session(p.pid):
                os.kill(pid, signal.SIGKILL)


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_noise_is_named_as_noise():
    """What is smaller than the rounds differ among themselves is no finding."""

    def rows(n: int, steps: tuple[float, float, float], ratio: tuple[float, float, float], lost: float):
        c = {"configuration": f"{n} process{'es' * (n > 1)}", "kind": "measured", "against": "1 process"}
        low, middle, high = steps
        yield {**c, "name": "time/step", "value": middle, "low": low, "high": high, "samples": list(steps), "unit": "s"}
        yield {**c, "name": "efficiency", "value": ratio[1] / n}
        yield {**c, "name": "time/step/data", "value": 0.001}
        if n > 1:
            low, middle, high = ratio
            yield {**c, "name": "ratio", "value": middle, "low": low, "high": high, "samples": list(ratio)}
            yield from ({**c, "name": f"lost/{part}", "value": lost if part == "data" else 0.3} for part in ("data", "computing"))

    told = [*rows(1, (0.98, 1.0, 1.02), (1.0, 1.0, 1.0), 0.0), *rows(2, (0.99, 1.0, 1.01), (0.97, 1.01, 1.03), 0.015), *rows(4, (0.5, 0.5, 0.5), (1.9, 2.0, 2.1), 0.04)]
    lines = list(scale.lines(told))
    table = {line.split("  ")[0]: line.split() for line in lines[next(i for i, line in enumerate(lines) if line.startswith("\nlost against")) :]}
    assert "noise" in table["2 processes"] and "+30.0" in table["2 processes"] and "noise" not in table["4 processes"] and "+4.0" in table["4 processes"]
    assert "noise: less than the rounds differ among themselves (1 process ±2.0, 2 processes ±2.0, 4 processes ±2.0)" in lines
    assert "2 processes against 1 process: 1.01 [0.97, 1.03] times the samples/s: noise, no difference" in lines
    assert not any("4 processes against" in line for line in lines)
