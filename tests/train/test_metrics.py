"""What is measured while a run trains: losses, steps that are not finite, what travels."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import Diverged, UserError
from gradus.parallel.world import World
from gradus.train import loop, metrics
from gradus.train.loop import Trainer
from gradus.train.metrics import Metrics, TrafficCount
from gradus.train.run import train
from gradus.train.session import open_session

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import hook_parts  # noqa: E402
from distributed import run  # noqa: E402
from hook_parts import Kept, taken  # noqa: E402
from run_parts import TINY, losses  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_plan")


def test_metrics_are_read_now_and_then_and_bad_steps_are_counted(trainer):
    metrics, kept = Metrics(flops_per_token=10.0, peak_flops=1e3), Kept()
    trainer.hooks = [metrics, kept]
    metrics.start(trainer)
    trainer.recipe.train.on_nonfinite = "skip"
    for step, loss in ((1, 4.0), (2, math.nan)):
        trainer.progress.step, trainer.progress.tokens = step, 10 * step
        trainer.clock.seconds["train"] += 1.0
        assert not kept.rows_logged
        metrics.after_step(trainer, taken(step, loss))
    values = {row.name: row.value for row in kept.rows_logged}
    assert math.isnan(values["train/loss"]) and values["train/mfu"] == pytest.approx(0.1, rel=0.1)
    assert trainer.progress.skipped == 1 and trainer.progress.loss_sum == 4.0
    trainer.recipe.train.on_nonfinite = "stop"
    with pytest.raises(UserError, match=r"step 4: the gradient norm is inf\. There is no checkpoint yet"):
        metrics.after_step(trainer, taken(4, 1.0, math.inf))
    assert kept.rows_logged[-1].name == "train/nonfinite"


def test_a_nonfinite_loss_stops_with_step_checkpoint_and_advice(tmp_path):
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", "optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant"])
    with pytest.raises(UserError, match=r"step \d+: the (loss|gradient norm) is (nan|inf)") as e:
        train(recipe)
    assert "optimizer.lr" in str(e.value) and "checkpoint" in str(e.value)


def test_skipping_ends_when_it_does_not_help(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "HOPELESS", 5)
    more = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant", "train.on_nonfinite=skip", "train.checkpoint_every=null"]
    with pytest.raises(UserError, match=r"the (loss|gradient norm) is"):
        train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", *more]))


def test_nonfinite_steps_are_skipped_and_counted_when_asked(tmp_path):
    more = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant", "train.on_nonfinite=skip", "train.steps=12"]
    run = tmp_path / "run"
    with pytest.raises(Diverged, match=r"its logits are not finite \(step 12, "):
        train(recipes.load("copy-task", [*TINY, f"log.dir={run}", *more]))
    assert 0 < json.loads((run / "summary.json").read_text())["skipped_steps"] < 12
    assert all(torch.isfinite(p).all() for p in models.load(run).parameters())


def test_an_eps_that_pure_fp16_rounds_away_is_refused_and_the_one_named_follows_fp32(tmp_path, capsys):
    words = [*TINY, "optimizer={name: adamw, lr: 0.001}", "schedule={name: constant}", "train.clip_norm=0.1", "train.steps=6", "train.checkpoint_every=null"]
    assert main(["train", "copy-task", *words, "layout.precision=pure_fp16", f"log.dir={tmp_path / 'no'}"]) == 2
    error = capsys.readouterr().err
    assert "optimizer.eps=1e-09: too small" in error and "optimizer.eps=0.0001" in error and not (tmp_path / "no/metrics.jsonl").exists()
    curves = []
    for more in ([], ["layout.precision=pure_fp16", "optimizer.eps=0.0001"]):
        train(recipes.load("copy-task", [*words, *more, "model.dropout=0", f"log.dir={tmp_path / str(len(more))}"]))
        curves.append(losses(tmp_path / str(len(more))))
    kept = [json.loads((tmp_path / f"{n}/checkpoints/best/config.json").read_text())["dtype"] for n in (0, 2)]
    assert kept == ["float32", "float16"], "of the weights as they are stored"
    assert max(abs(curves[0][step] - curves[1][step]) for step in curves[0]) < 0.05


def test_the_mean_loss_is_of_the_steps_that_were_taken(tmp_path, monkeypatch):
    run, real, bad = tmp_path / "run", loop.Trainer.step, {2: (1000.0, torch.inf), 5: (torch.nan, torch.nan), 8: (3000.0, torch.nan)}

    def step(self, *arguments):
        loss, norm = real(self, *arguments)
        return tuple(map(torch.tensor, bad.get(self.progress.step + 1, (float(loss), float(norm)))))

    monkeypatch.setattr(loop.Trainer, "step", step)
    train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=6", "train.on_nonfinite=skip"]))
    summary = train(recipes.load(run, ["train.steps=9"]), resume=run).summary
    taken = [value for at, value in losses(run).items() if at not in bad]
    assert summary["skipped_steps"] == 3 and len(taken) == 6
    assert summary["train_loss"] == pytest.approx(sum(taken) / 6, rel=1e-12)


def _local_steps(world: World, folder: str) -> tuple[list[int], list[dict[str, float]], int]:
    overrides = [*hook_parts.TINY, "layout.local_sgd={every: 2}", "train.checkpoint_every=4", "evaluate.every=4", f"log.dir={folder}"]
    session = open_session(recipes.load("copy-task", overrides), None, world)
    counted = TrafficCount()
    trainer = Trainer(session, session.lay_out(), Path(folder), [counted])
    tokens, sent = [], []
    assert trainer.hooks == [counted]
    for _, step in zip(range(4), itertools.chain(*map(trainer.loader.steps, (0, 1)))):
        trainer.take(step)
        tokens.append(trainer.progress.tokens)
        sent.append({row.name: row.value for row in counted.rows(trainer)})
        assert trainer.synced == (trainer.progress.step % 2 == 0)
    return tokens, sent, 4 * sum(p.numel() for p in trainer.model.parameters())


def test_workers_sync_every_so_many_steps_and_count_then(tmp_path):
    (tokens, sent, weights), other = run(2, _local_steps, str(tmp_path / "run"))
    assert tokens[0] == 0 and tokens[1] == tokens[2] == 2 * 16 * 20 and tokens[3] == 2 * tokens[1] and (tokens, sent, weights) == other
    assert [bool(rows) for rows in sent] == [False, True, False, True]
    assert sent[1]["traffic/sent"] == pytest.approx(weights / 2, rel=1e-3), "of a step, as it is planned: a ring of two sends the weights once in two steps"


def test_the_time_that_is_left_is_of_the_steps_of_this_start():
    """Ten steps in five seconds, after a resume at step 90: the ten that are left take five more."""
    metrics, trainer = Metrics.__new__(Metrics), SimpleNamespace(last_step=110, device=torch.device("cpu"))
    trainer.progress = SimpleNamespace(step=100, accumulations=100, tokens=0, samples=0)
    trainer.task = SimpleNamespace(counts_tokens=True)
    metrics.began, metrics.before = (900.0, 0, 0, 90), (905.0, 0, 0, 100)
    assert metrics._line(trainer, 1.0, 0.1, "1 token/s").endswith("ETA 0:05")
