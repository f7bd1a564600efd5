"""`gradus check`: right recipes pass, and every way to be wrong makes its own line fail."""

from __future__ import annotations

import json
import math
import types

import numpy as np
import pytest
import torch
from torch import nn

from gradus import recipe as recipes
from gradus.cli import main
from gradus.layers import attention
from gradus.proof import check as checking
from gradus.proof.check import SessionChecks, checks, is_empty, run, smoothed_floor
from gradus.train.session import open_session

COPY = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 16, "train.steps": 100, "layout.device": "cpu", "evaluate.samples": 0}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(checking, "LOADER", 0.1)


def looked(name: str = "copy-task", **more) -> SessionChecks:
    recipe = recipes.load(name, **{**(COPY if name == "copy-task" else {"layout.device": "cpu"}), **more})
    return SessionChecks(open_session(recipe), recipe)


def verdict(seen: SessionChecks, name: str):
    return run(name, getattr(seen, name))


# ------------------------------------------------------------ right ones


def test_a_right_recipe_passes_every_line(capsys, monkeypatch):
    monkeypatch.setattr(checking, "WAIT", 1.0)  # how fast this machine is does not matter: the loader is judged by times made up, below
    arguments = ["check", "copy-task", *(f"{k}={v}" for k, v in COPY.items())]
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["name"] for r in rows] == [f"check/{name}" for name in checking.NAMES]
    assert {r["value"] for r in rows} == {"pass"} and all(r["found"] and r["recipe"] == "copy-task" for r in rows)


def test_images_pass_and_lengths_are_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(checking, "WAIT", 1.0)  # the model is so small here that making its batches counts
    lines = {line.name: line for line in checks(recipes.load("digits-vit", **{"layout.device": "cpu", "model.n_layers": 1, "model.d_model": 32}))}
    assert [name for name, line in lines.items() if line.ok is False] == []
    assert lines["lengths"].ok is None and "one size" in lines["lengths"].text
    assert "after two steps" in lines["gradients"].text, "its head of zeros lets nothing through at the first"
    assert "label smoothing leaves" in lines["overfit"].text
    said = {"start": "at most 1 apart", "gradients": "finite, not zero, 1000 at most", "attention": "(0.01 is allowed)", "overfit": "it must fall to 1/2",
            "loader": "100% is allowed"}  # fmt: skip
    assert {name: text for name, text in said.items() if text not in lines[name].text} == {}, "each says by what it is judged"


def test_a_line_is_coloured_and_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    line = str(checking.Line("start", False, "a loss that is far away from what even odds would give it", "Look at the initialisation first."))
    assert line.splitlines() == ["\x1b[31mFAIL\x1b[0m  start        a loss that is far away from what even", " " * 19 + "odds would give it", " " * 19 + "Look at the initialisation first."]
    assert str(checking.Line("start", True, "fine")) == "\x1b[32mpass\x1b[0m  start        fine"
    monkeypatch.setenv("NO_COLOR", "1")
    assert str(checking.Line("start", True, "fine")) == "pass  start        fine"


# ------------------------------------------------------------ wrong ones


def test_a_recipe_that_cannot_be_opened_is_one_failed_line(capsys):
    assert main(["check", "shakespeare-char-gpt", "data.path=nowhere.txt"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  recipe") and "nowhere.txt" in out


class Broken:
    """A data set of which one sample is not as it should be."""

    def __init__(self, data, change, at: int = 0):
        self.data, self.change, self.at = data, change, at
        self.lengths = getattr(data, "lengths", None)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        sample = dict(self.data[i])
        return self.change(sample) if i == self.at else sample


def broken(change, **more) -> SessionChecks:
    seen = looked(**more)
    seen.task.splits["train"] = Broken(seen.task.splits["train"], change)
    return seen


def raises(sample):
    raise OSError("truncated file")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (raises, "train, sample 0: OSError: truncated file"),
        (lambda s: {**s, "source": np.array([], np.int64)}, "train 0"),
    ],
)
def test_data_that_is_corrupt_or_empty(change, said):
    line = verdict(broken(change), "data")
    assert line.ok is False and said in line.text


def test_blank_images_and_empty_texts_are_empty():
    assert is_empty({"image": np.zeros((1, 8, 8), np.uint8), "label": 3}) and is_empty({"ids": np.array([], np.int64)})
    assert not is_empty({"image": np.eye(8, dtype=np.uint8)[None], "label": 0}) and not is_empty({"ids": np.array([0])})


def test_ids_outside_the_vocabulary():
    line = verdict(broken(lambda s: {**s, "source": np.full_like(s["source"], 11)}), "vocabulary")
    assert line.ok is False and "source 11 to 11, the vocabulary has 11" in line.text and "vocab_size" in line.hint


def test_labels_out_of_range():
    line = verdict(broken(lambda s: {**s, "target_out": np.full_like(s["target_out"], 12)}), "vocabulary")
    assert line.ok is False and "labels 12 to 12, there are 11 classes" in line.text and "count from 0" in line.hint


def test_samples_without_targets():
    seen = looked()
    for split, data in seen.task.splits.items():
        seen.task.splits[split] = Broken(data, lambda s: {**s, "target_out": np.full_like(s["target_out"], -100)})
        seen.task.splits[split].__class__ = type("AllBroken", (Broken,), {"__getitem__": lambda self, i: self.change(dict(self.data[i]))})
    line = verdict(seen, "vocabulary")
    assert line.ok is False and "no sample has a target" in line.text


def test_a_head_that_does_not_fit_the_task():
    seen = looked()
    seen.model.head = nn.Linear(32, 13)
    line = verdict(seen, "shapes")
    assert line.ok is False and "there are 11 classes" in line.text


def test_a_loss_that_is_not_finite():
    seen = looked()
    with torch.no_grad():
        next(seen.model.parameters()).fill_(math.nan)
    for name in ("shapes", "start", "gradients"):
        assert verdict(seen, name).ok is False
    assert "not finite" in verdict(seen, "gradients").text
    first = next(iter(dict(seen.model.named_parameters()))).rpartition(".")[0]
    assert f"its logits are not finite (weights of module {first})" in verdict(seen, "shapes").text
    assert "before the first step" in verdict(seen, "overfit").hint


def test_memory_is_of_the_largest_batch_and_of_a_usual_step(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("text,label\n" + "\n".join(f"{'word ' * (1 if i % 100 else 60)}{i},{i % 2}" for i in range(400)))
    assert main(["new", str(tmp_path / "t.yaml"), "--data", str(tmp_path / "t.csv")]) == 0
    text = verdict(looked(str(tmp_path / "t.yaml"), **{"data.pad": "longest", "model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "data.workers": 0}), "memory").text
    assert "with the largest batch (" in text and "in a step of " in text and "None" not in text and "measured" not in text


def test_too_little_memory(monkeypatch):
    from gradus.proof import memory_budget

    monkeypatch.setattr(memory_budget, "capacity", lambda device: 1_000_000)
    line = verdict(looked(), "memory")
    assert line.ok is False and "1 MB" in line.text


def test_an_initialisation_that_is_too_large():
    seen = looked()
    with torch.no_grad():
        seen.model.head.weight.mul_(100)
    line = verdict(seen, "start")
    assert line.ok is False and "initialisation" in line.hint


def test_the_start_of_trained_weights_is_not_known(tmp_path):
    seen = looked()
    seen.recipe = seen.recipe.model_copy(update={"model": seen.recipe.model.model_copy(update={"init": "somewhere"})})
    line = verdict(seen, "start")
    assert line.ok is None and "somewhere" in line.text


def test_frozen_unused_zero_and_huge_gradients():
    seen = looked()
    frozen, first = next(iter(seen.model.named_parameters()))
    first.requires_grad_(False)
    line = verdict(seen, "gradients")
    assert line.ok is False and f"frozen: {frozen}" in line.text and "requires_grad" in line.hint

    seen = looked()
    seen.model.spare = nn.Linear(2, 2)
    assert "none: spare.weight, spare.bias" in verdict(seen, "gradients").text

    seen = looked()
    head = seen.model.head.weight
    head.register_hook(lambda grad: grad * 1e6)
    line = verdict(seen, "gradients")
    assert line.ok is False and "above 1000: head.weight" in line.text

    seen = looked()
    build = seen.session.build

    def blocked():
        model = build()
        model.head.bias.register_hook(torch.zeros_like)
        return model

    seen.session.build = blocked
    line = verdict(seen, "gradients")
    assert line.ok is False and "zero: head.bias" in line.text and "after two steps" in line.text


def test_attention_that_is_not_a_distribution(monkeypatch):
    seen = looked()
    assert verdict(seen, "attention").ok
    true = attention.naive
    monkeypatch.setattr(attention, "naive", lambda *a, **k: (lambda out, w: (out, w * 1.1))(*true(*a, **k)))
    assert verdict(seen, "attention").ok is False
    monkeypatch.setattr(attention, "naive", lambda *a, **k: (lambda out, w: (out, w * math.nan))(*true(*a, **k)))
    assert verdict(seen, "attention").ok is False


def test_short_sequences_that_fail(monkeypatch):
    seen = looked()
    true = seen.task.losses
    from gradus.tasks.copy import Copy

    def losses(self, model, batch):
        if batch["source"].shape[1] < 64:
            raise RuntimeError("positions do not match")
        return true(model, batch)

    monkeypatch.setattr(Copy, "losses", losses)
    line = verdict(seen, "lengths")
    assert line.ok is False and "positions do not match" in line.text


@pytest.mark.parametrize(("rate", "hint"), [(30.0, "too high"), (1e-9, "too small")])
def test_absurd_learning_rates(rate, hint):
    line = verdict(looked(**{"optimizer.lr": rate, "train.clip_norm": None}), "overfit")
    assert line.ok is False and hint in line.hint


def test_a_slow_loader():
    class Slow(Broken):
        def __getitem__(self, i):
            import time

            time.sleep(0.01)
            return dict(self.data[i])

    seen = looked()
    seen.task.splits["train"] = Slow(seen.task.splits["train"], None)
    line = verdict(seen, "loader")
    assert line.ok is False and "data.workers=2" in line.hint


@pytest.mark.parametrize(
    ("workers", "step_ms", "data_ms", "ok", "said"),
    [
        (0, 4, 0.5, True, "11% of the time is waiting, 10% is allowed, but no more than 2 ms per step, which more workers would hardly save"),
        (0, 4, 1.9, True, "32% of the time is waiting, 10% is allowed, but no more than 2 ms per step"),
        (0, 4, 2.1, False, "34% of the time is waiting, 10% is allowed"),
        (0, 100, 20, False, "17% of the time is waiting, 10% is allowed"),
        (0, 100, 10, True, "10.0 ms for the 16 samples of a step that takes 100 ms; 9% of the time is waiting, 10% is allowed"),
        (2, 4, 5, True, "20% of the time is waiting, 10% is allowed, but no more than 2 ms per step"),
        (2, 4, 12, False, "67% of the time is waiting, 10% is allowed"),
        (2, 100, 90, True, "90.0 ms for the 16 samples of a step that takes 100 ms; 0% of the time is waiting, 10% is allowed"),
    ],
)
def test_a_loader_is_judged_by_share_and_milliseconds(workers, step_ms, data_ms, ok, said, monkeypatch):
    seen = looked(**{"data.workers": workers})
    monkeypatch.setattr(seen, "step_seconds", lambda: (step_ms / 1e3, 16, ""))
    monkeypatch.setattr(checking, "loader_speed", lambda *_: 16 / (data_ms / 1e3))
    line = verdict(seen, "loader")
    assert line.ok is ok and said in line.text and ("but" in said or line.text.endswith(said))
    assert line.hint == ("" if ok else f"Set data.workers={max(2, 2 * workers)}, or prepare the data once.")


def test_a_disturbed_step_does_not_count(monkeypatch):
    """Of the steps that are timed the first may set things up, and others may be slow by chance; a slow one is not repeated for long."""
    for times, expected in (([1.0, 0.004, 0.1, 0.004, 0.003, 0.2, 0.004, 0.004], 0.004), ([1.5, 0.7, 9.0], 0.7), ([2.5, 9.0], 2.5)):
        seen, clock, coming = looked(), [0.0], iter(times)
        monkeypatch.setattr(checking, "time", types.SimpleNamespace(perf_counter=lambda clock=clock: clock[0]))
        seen.losses, seen.seconds = [1.0], 0.001

        def step(*_, clock=clock, coming=coming):
            clock[0] += next(coming, 0.004)

        monkeypatch.setattr(seen.trainer, "step", step)
        assert seen.step_seconds() == (pytest.approx(expected), 16, "")


def test_fewer_samples_of_a_slow_model_are_judged_by_their_own_count(monkeypatch):
    monkeypatch.setattr(checking, "SLOW", 0.0)
    seen = looked()
    assert verdict(seen, "start").ok and seen.few == checking.FEWEST


# ------------------------------------------------------------ figures


def test_what_label_smoothing_leaves_is_the_least_loss():
    logits = torch.log(torch.full((1, 7), 0.1 / 7) + 0.9 * nn.functional.one_hot(torch.tensor([2]), 7))
    least = nn.functional.cross_entropy(logits, torch.tensor([2]), label_smoothing=0.1)
    assert smoothed_floor(0.1, 7) == pytest.approx(float(least), rel=1e-6) and smoothed_floor(0.0, 7) == 0.0


def test_a_loader_that_is_held_up_once_is_as_fast_as_in_its_other_rounds(monkeypatch):
    clock, given = [0.0], []

    class Held:
        def steps(self, epoch):
            clock[0] += 0.5 if len(given) == 30 else 0.001
            given.append(epoch)
            yield types.SimpleNamespace(samples=16)

        def close(self): ...

    monkeypatch.setattr(checking, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    session = open_session(recipes.load("copy-task"))
    monkeypatch.setattr(session, "loader", Held())
    assert checking.loader_speed(session, 1.0) == pytest.approx(16_000)
    assert clock[0] == pytest.approx(1.0, abs=0.25), "for about as long as was asked"


@pytest.mark.parametrize(("trained", "ok"), [(["all", "-encoder"], True), (["all", "-encoder.norm"], None)])
def test_a_part_that_is_trained_is_not_asked_to_learn_all_by_heart(trained, ok):
    seen = looked(**{"train.freeze": trained, "optimizer.lr": 1e-3})
    line = verdict(seen, "overfit")
    assert line.ok is ok and "since a part of the model is trained" in line.text
