"""What goes on around the steps: the hooks of a run, each by itself, and one's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.mesh import Mesh
from gradus.parallel.status import Status, read
from gradus.parallel.world import World
from gradus.rows import Row, read_rows
from gradus.train import clock, machine
from gradus.train.checkpoint import Checkpoints
from gradus.train.hooks import Hook, UserHooks
from gradus.train.loop import Trainer
from gradus.train.metrics import Metrics
from gradus.train.run import train
from gradus.train.saving import Saving
from gradus.train.session import open_session
from gradus.train.signals import Cut, Stopped, StopSignals

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402
from hook_parts import TINY, taken  # noqa: E402


class Diary(Hook):
    """Writes down what is called."""

    def __init__(self):
        self.called: list[str] = []

    def start(self, trainer):
        self.called.append(f"start {trainer.start_step}")

    @contextlib.contextmanager
    def around_step(self, trainer, step):
        self.called.append(f"in {trainer.progress.step}")
        yield
        self.called.append(f"out {trainer.progress.step}")

    def after_step(self, trainer, taken):
        assert taken.step == trainer.progress.step and taken.loss.ndim == taken.norm.ndim == 0
        self.called.append(f"after {taken.step}")

    def rows(self, trainer):
        return [Row("mine/steps", trainer.progress.step, "", trainer.progress.step)]

    def logged(self, trainer, rows, line):
        self.called.append(f"logged {rows[0].name} {rows[0].step}")

    def end(self, trainer, summary):
        summary["mine"] = len(self.called)
        return ["the diary ends"]


def test_a_hook_of_ones_own_sees_the_run(tmp_path, capsys):
    diary, folder = Diary(), tmp_path / "run"
    train(recipes.load("copy-task", [*TINY, f"log.dir={folder}", "log.line={step:3d} of {steps} | {loss:.1f}"]), hooks=[diary])
    assert diary.called == [
        "start 0", "in 0", "out 0", "after 1", "in 1", "out 1", "logged train/loss 2", "after 2", "logged valid/loss 2",
        "in 2", "out 2", "after 3", "logged train/loss 3", "in 3", "out 3", "logged train/loss 4", "after 4", "logged valid/loss 4",
        "in 4", "out 4", "logged train/loss 5", "after 5", "logged valid/loss 5",
    ]  # fmt: skip
    assert [(r["step"], r["value"]) for r in read_rows(folder / "metrics.jsonl") if r["name"] == "mine/steps"] == [(n, n) for n in (2, 3, 4, 5)]
    assert json.loads((folder / "summary.json").read_text())["mine"] == len(diary.called)
    said = capsys.readouterr().out
    assert "the diary ends" in said and "\n  4 of 5 | " in said
    diary.called.clear()
    with pytest.raises(UserError, match="enough"):  # what a hook raises ends the run, which goes on from its last checkpoint
        train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'other'}"]), hooks=[diary, EndsAt(4)])
    assert "out 3" in diary.called and "in 4" not in diary.called
    train(recipes.load(tmp_path / "other"), resume=tmp_path / "other", hooks=[diary])
    assert "start 3" in diary.called
    assert read_rows(folder / "metrics.jsonl")[-1]["value"] == read_rows(tmp_path / "other" / "metrics.jsonl")[-1]["value"]


class EndsAt(Hook):
    def __init__(self, step: int):
        self.step = step

    def after_step(self, trainer, taken):
        if taken.step == self.step:
            raise UserError("enough")


@pytest.mark.parametrize(("where", "saved"), [("start", 0), ("around_step", 1), ("leaves_step", 1), ("rows", 2), ("logged", 2), ("end", 5)])
def test_what_a_users_hook_raises_is_kept_until_the_run_has_saved_itself(where, saved, tmp_path):
    """Wherever it is raised: nothing of the step is lost, and the hooks are not called again."""
    mine, calls = KeyboardInterrupt("mine"), []

    class Raises(Diary):
        @contextlib.contextmanager
        def leaves_step(self, trainer, step):
            yield
            fail()

    def fail(*_):
        calls.append(where)
        raise mine

    hook, folder = Raises(), tmp_path / "run"
    if where == "leaves_step":
        hook.around_step = hook.leaves_step
    else:
        setattr(hook, where, fail)
    user = UserHooks([hook, diary := Diary()])
    with contextlib.suppress(Stopped):
        train(recipes.load("copy-task", [*TINY, f"log.dir={folder}"]), hooks=[user])
    assert user.raised is mine and calls == [where] and (folder / "summary.json").exists() == (where == "end")
    assert Checkpoints(folder / "checkpoints", 1).latest().name == f"step-{saved:08d}"
    assert not any(line.startswith(f"after {saved + 1}") for line in diary.called)


# ------------------------------------------------------------ signals


def test_a_signal_is_noted_and_a_second_interrupt_stops_at_once():
    signals, before = StopSignals(single_process=True), signal.getsignal(signal.SIGINT)
    with signals.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop == signal.SIGTERM and signals.flags() == [0, 1, 0]
        with pytest.raises(Cut), signals.cutting():
            raise AssertionError("a signal that came before cuts at once")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before and not signals.asked


def test_several_processes_stop_at_the_signal_that_they_agreed_on():
    signals = StopSignals(single_process=False)
    signals.asked.append(signal.SIGUSR1)
    with signals.cutting():  # the others would wait
        assert signals.stop is None
    signals.agree([0, 0, 0])
    assert signals.stop is None
    signals.agree([0, 2, 1])
    signals.agree([1, 0, 0])
    assert signals.stop == signal.SIGTERM


# ------------------------------------------------------------ one hook at a time


def test_a_stop_saves_what_is_there(trainer):
    metrics = Metrics()
    saving, trainer.hooks = Saving(metrics), [metrics]
    metrics.start(trainer)
    trainer.progress.step = 3
    saving.after_step(trainer, taken(3, 1.0))
    assert trainer.checkpoints.latest().name == "step-00000003"
    trainer.progress.step = 4
    saving.after_step(trainer, taken(4, 1.0))
    trainer.signals.asked.append(signal.SIGUSR1)
    with pytest.raises(Stopped) as stop:
        saving.after_step(trainer, taken(4, 1.0))
    assert (stop.value.signal_number, stop.value.checkpoint.name) == (signal.SIGUSR1, "step-00000004")


def test_a_status_file_says_done_only_of_what_went_well(tmp_path):
    with pytest.raises(KeyError), Status(tmp_path, World(0, 2)) as status:
        status.at("reading data", 3)
        raise KeyError
    assert status.file is None and read(tmp_path, 0).what == "reading data"
    with Status(tmp_path, World(0, 2)) as status:
        pass
    assert status.file is None and read(tmp_path, 0).what == "done"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems count a peak once")
def test_the_peak_of_a_second_run_in_a_process_is_its_own():
    """400 MB of the first one, freed or kept by the C library, are none of the second's."""
    ((first, second),) = run(1, _peaks)
    assert 390e6 < first - second < 600e6


def _peaks(world: World) -> tuple[int, int]:
    machine.tune_memory()
    clock.begin_run()
    torch.ones(100_000_000)
    first = clock.peak_memory(torch.device("cpu"))
    clock.begin_run()
    return first, clock.peak_memory(torch.device("cpu"))


# ------------------------------------------------------------ several GPUs


class Played(torch.Tensor):
    """Pinned memory, which here goes nowhere."""

    def to(self, *_, **__):
        return self.as_subclass(torch.Tensor)


def test_totals_of_several_gpus_stay_there_and_come_a_step_late(trainer, monkeypatch):
    """With a device that is played: what a step needs at once is a tensor, what the host wants comes with the next step."""
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    plain, real = trainer.loader.steps(0), torch.tensor
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False: real(*a).as_subclass(Played))
    monkeypatch.setattr("gradus.train.step.dist.all_reduce", lambda sums: sums.mul_(2))  # another process with the same samples
    trainer.parallel.mesh = Mesh(World(0, 2), trainer.parallel.mesh.sizes)
    batches = next(plain).micro_batches
    trainer.device = torch.device("cuda")
    totals = trainer.totals(batches, [0, 1, 0, 0])
    assert totals.counts["tokens"].item() == 2 * batches[0]["counts"]["tokens"] and (totals.tokens, totals.flags) == (0, [0] * 4)
    totals = trainer.totals(batches, [0, 0, 0, 0])
    assert (totals.tokens, totals.flags) == (2 * batches[0]["n_tokens"], [0, 2, 0, 0])
    trainer.settle()
    assert trainer.progress.tokens == 2 * batches[0]["n_tokens"] and trainer.unread is None
    monkeypatch.undo()
    trainer.device, trainer.parallel.mesh = torch.device("cpu"), Mesh.single()
    half = trainer.step(batches, totals.counts)[0].item()
    session = open_session(trainer.recipe)
    assert Trainer(session, session.build(), trainer.folder).step(batches)[0].item() == pytest.approx(2 * half, rel=1e-6)
