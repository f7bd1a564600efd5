"""What a run says while it runs: one live line on a terminal, plain lines elsewhere, rows; and its folder, which has one owner."""

from __future__ import annotations

import datetime
import errno
import math
import os
import re
import signal
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import run_parts
from run_parts import losses
from terminals import Terminal

from gradus import recipe as recipes
from gradus.errors import EnvironmentFault, UserError
from gradus.recipe.schema import Log
from gradus.rows import Row
from gradus.text import visible
from gradus.train import folder as folders
from gradus.train import log as logs
from gradus.train.loop import Trainer
from gradus.train.run import train

TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=5",
    "batch.samples=16", "layout.micro_batch=8", "layout.device=cpu", "train.steps=12", "evaluate.every=5", "evaluate.samples=0", "log.every=1",
]  # fmt: skip
LINE = "step 120/2000  accumulation 240  loss 2.3456  lr 1.00e-04  123k tokens/s  MFU 41.2%  1.23M tokens  1.59 GB  ETA 12:34"


def drawn(text: str) -> list[str]:
    """Every state of the live line: they begin with its bar."""
    return [piece for piece in re.split(r"\r\x1b\[K|\r?\n", text) if piece.startswith("[")]


@pytest.mark.parametrize("columns", [80, 40])
def test_the_live_line_of_a_run_never_wraps(terminal, columns, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "TICK", 0.01)
    screen = terminal(columns)
    train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}"]))
    text = screen.close()
    lines = drawn(text)
    assert len(lines) >= 11 and max(map(len, lines)) < columns
    assert all(re.match(r"\[#*\.*\] \d+%  step \d+/12", line) for line in lines)
    assert {re.match(r"\[(#*)", line)[1] for line in lines} >= {"#", "##", "###", "####"}  # the bar grows
    assert any("ETA" in line for line in lines) and "\r\x1b[Kstep 12/12  accumulation 24" in text, "the last one stays, whole"
    assert re.search(r"\r\x1b\[Kstep 5  valid/loss [^\r\n]*\r\n(  [^\r\n]*\r\n)*\[", text), "an evaluation stays above it"
    kept = [line for line in re.split(r"\r\x1b\[K|\r?\n", text) if not line.startswith("[") and tmp_path.name not in line]
    assert len(kept) > 20 and all(visible(line) <= columns or len(line.split()) < 3 for line in kept), "no line is broken by the terminal"
    assert re.search(r"\r\n\x1b\[32mbest\s+valid/\w+\s+\d\.\d{4},\s+at\s+step\s+\d+\s+of\s+12\x1b\[0m\r\n", text)


@pytest.mark.parametrize("columns", [200, 120, 80, 60, 40, 20, 5])
@pytest.mark.parametrize("waited", [0.0, 75.0])
def test_a_line_is_shortened_to_the_width(columns, waited):
    line = logs.fitted(LINE, 0.06, waited, columns)
    assert len(line) < columns and line.startswith("[..."[: columns - 1])
    if columns >= 60:
        assert "step 120/2000" in line and line.endswith("ETA 12:34") and ("last step 75 s ago" in line) == (waited > 0)
    if columns == 200:
        assert line == f"[..........] 6%  {LINE.replace('/2000', '/2000  last step 75 s ago') if waited else LINE}"
    assert logs.fitted(LINE, 0.9999, 0.0, 80).startswith("[#########.] 99%  "), "not done before it is"


def test_a_slow_step_shows_the_seconds_since_the_last(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "TICK", 0.02)
    monkeypatch.setattr(logs, "SLOW", 0.1)
    screen = terminal(80)
    first, later = r"step 0/10  last step \d+ s ago", r"step 4/10  last step \d+ s ago  loss 1.0  ETA 0:06"
    log = logs.RunLog(tmp_path, Log(), {})
    log.stepped(0, 10)  # nothing is known yet but that it has begun
    screen.wait_for(first)
    log.line("step 4/10  loss 1.0  ETA 0:06", done=0.4)
    log.stepped(4, 10)
    Trainer.say(types.SimpleNamespace(hooks=[log]), "note: " + "word " * 20)
    log.line("step 4  valid/loss 2.0")
    screen.wait_for(later)
    log.close()
    assert not any(t.name == "live line" for t in threading.enumerate())
    text = screen.close()
    assert re.search(first, text) and re.search(later, text)
    assert re.search(r"\r\x1b\[Knote: [word ]{60,74}\r\n  [word ]+\r\n\[", text), "above the live line, within 80 columns"
    assert "step 4  valid/loss 2.0\r\n" in text and text.endswith("\r\n"), "what is printed next begins a line"


def test_elsewhere_lines_are_plain_and_no_thread_runs(tmp_path, capsys, monkeypatch):
    def told() -> str:
        log = logs.RunLog(tmp_path, Log(), {})
        assert not any(t.name == "live line" for t in threading.enumerate())
        log.stepped(1, 2)
        log.line("step 1/2  loss 1.0", done=0.5)
        log.close()

    told()
    assert capsys.readouterr().out == "step 1/2  loss 1.0\n"
    screen = Terminal(80)
    monkeypatch.setattr(sys, "stdout", screen.out)
    monkeypatch.setenv("TERM", "dumb")
    told()
    assert screen.close() == "step 1/2  loss 1.0\r\n"


@pytest.mark.parametrize(("given", "project"), [("true", "copy-task"), ("mine", "mine"), ("false", None)])
def test_the_project_of_wandb(given, project, tmp_path, monkeypatch):
    begun = []
    wandb = types.SimpleNamespace(init=lambda **how: begun.append(how["project"]) or types.SimpleNamespace(finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    recipe = recipes.load("copy-task", [f"log.wandb={given}"])
    logs.RunLog(tmp_path, recipe.log, recipe.model_dump(mode="json")).close()
    assert begun == ([project] if project else [])


def log_in(folder: Path):
    return logs.RunLog(folder, Log(), {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_rows_on_a_full_disk(tmp_path):
    """Which file, how much is free, what to do; and nothing is raised a second time at the close."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = log_in(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl: the disk is full \([\d.]+ GB free\): nothing up to the last .* --resume\.$"):
        log.write([Row("train/loss", 1.0, step=1)])
    log.close()


def test_a_tensorboard_on_a_full_disk(tmp_path, monkeypatch):
    class Board:
        def add_scalar(self, *_):
            raise OSError(errno.ENOSPC, "No space left on device")

        close = add_scalar

    log = log_in(tmp_path)
    log.board = Board()
    with pytest.raises(EnvironmentFault, match=r"tensorboard: the disk is full .* --resume\.$"):
        log.write([Row("train/loss", 1.0, step=1)])
    with pytest.raises(EnvironmentFault, match="tensorboard: the disk is full"):
        log.close()
    with pytest.raises(KeyError):  # is not replaced by what follows from it
        try:
            raise KeyError("x")
        finally:
            log.close()


@pytest.mark.slow
def test_tensorboard_gets_the_rows(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gradus.train.run import train

    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=2",
             "batch.samples=16", "train.steps=4", "layout.device=cpu", "log.every=1", "log.tensorboard=true", "evaluate.samples=0"]  # fmt: skip
    train(recipes.load("copy-task", [*small, f"log.dir={tmp_path / 'run'}"]))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert len(board.Scalars("train/loss")) == 4 and all(math.isfinite(e.value) for e in board.Scalars("train/loss"))


class OneSecond:
    """A clock that stands still: all names by the time are alike."""

    class datetime:
        @staticmethod
        def now():
            import datetime

            return datetime.datetime(2026, 1, 2, 3, 4, 5)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "datetime", OneSecond)
    together, found = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        with folders.run_folder(Log(), "mine") as folder:
            found.append(folder)
            (folder / "recipe.yaml").touch()
            together.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8 and {f.name for f in found} == {"20260102-030405", *(f"20260102-030405-{n}" for n in range(1, 8))}


@pytest.mark.parametrize(("place", "why"), [("runs", "runs is a link to /nowhere/at/all, which is not there"), ("runs/mine", "runs/mine is not a folder")])
def test_what_stands_where_runs_are_kept_is_named(place, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if place == "runs":
        Path(place).symlink_to("/nowhere/at/all")
    else:
        Path("runs").mkdir()
        Path(place).touch()
    with pytest.raises(UserError, match=rf"log.dir=runs/mine/.*: cannot write there \({why}\)"), folders.run_folder(Log(), "mine"):
        pass


def test_a_run_folder_has_one_owner_among_threads_too(tmp_path):
    """The system's lock is a process's."""
    config, refused = Log(dir=str(tmp_path / "run")), []

    def start() -> None:
        try:
            with folders.run_folder(config, "mine"):
                pass
        except UserError as e:
            refused.append(str(e))

    with folders.run_folder(config, "mine"):
        (thread := threading.Thread(target=start)).start()
        thread.join()
    assert len(refused) == 1 and "another run of this process writes there" in refused[0]
    start()
    assert len(refused) == 1, "afterwards it is free"


def in_that_second(out: Path, *words: str) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    folders.datetime = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda: now))
    os.chdir(out.parent)
    run_parts.gradus(out, *words)


@pytest.mark.slow
def test_two_processes_of_one_second_write_two_runs(tmp_path):
    words = ["train", "copy-task", *run_parts.TINY, "train.steps=12"]
    started = [run_parts.begun(tmp_path / f"out-{seed}", in_that_second, *words, f"train.seed={seed}") for seed in (0, 1)]
    for seed, process in enumerate(started):
        process.join()
        assert process.exitcode == 0, (tmp_path / f"out-{seed}").read_text()
    runs = sorted(run for run in (tmp_path / "runs" / "copy-task").iterdir() if not run.is_symlink())
    assert [f.name for f in runs] == ["20260102-030405", "20260102-030405-1"]
    assert {recipes.load(f).train.seed for f in runs} == {0, 1}
    assert all(set(losses(f)) == set(range(1, 13)) for f in runs)


def test_a_run_folder_has_one_owner_until_its_process_ends(tmp_path):
    """The owner is another process, and is killed: nothing that it leaves stands in the way."""
    run = tmp_path / "a" / "run"
    ready, wrote = os.pipe()
    child = os.fork()
    if not child:
        with folders.run_folder(Log(dir=str(run)), "mine"):
            os.write(wrote, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        for resume in (None, run):
            with pytest.raises(UserError, match=rf"{run}: another run writes there \(process {child} on "), folders.run_folder(Log(dir=str(run)), "mine", resume):
                pass
        with pytest.raises(UserError, match="another run writes there"):
            train(recipes.load("copy-task", [*run_parts.TINY, f"log.dir={run}"]))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [p.name for p in run.iterdir()] == [folders.LOCK]
    with folders.run_folder(Log(dir=str(run)), "mine") as folder:
        assert folder == run
        (folder / "recipe.yaml").touch()
    assert [p.name for p in run.iterdir()] == ["recipe.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_comes_to_nothing_leaves_nothing(tmp_path, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    if there:
        (tmp_path / "a" / "run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["log.dir=a/run"], ["log.dir=a/b/c"]):
        with pytest.raises(UserError, match="valid/nothing"):
            train(recipes.load("copy-task", [*run_parts.TINY, *more, "evaluate.best=valid/nothing"]))
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"log\.dir=file/x: cannot write there"):
        train(recipes.load("copy-task", [*run_parts.TINY, "log.dir=file/x"]))
