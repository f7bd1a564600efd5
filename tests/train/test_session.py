"""What a recipe becomes before it is trained: steps, sizes, threads; and mistakes that only data can show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from step_parts import TINY, trainer

from gradus import recipe as recipes
from gradus.parallel.world import World
from gradus.recipe.schema import Layout
from gradus.train.loop import Trainer
from gradus.train.session import StepPlan, _open_device, open_session


@pytest.mark.parametrize(
    ("epochs", "n", "batch", "steps"), [(0.5, 60, 12, 3), (1.1, 120, 12, 11), (0.01, 60, 12, 1), (2.0, 61, 12, 12), (1e-9, 60, 12, 1)]
)
def test_part_of_an_epoch_is_the_same_number_of_steps_wherever_it_is_said(epochs, n, batch, steps):
    from gradus.train.session import derive

    noam = ["train.steps=null", f"train.epochs={epochs}", f"data.n_train={n}", f"batch.samples={batch}", "schedule.name=noam", "layout.device=cpu"]
    session = open_session(recipes.load("copy-task", [*TINY["copy-task"], *noam]))
    t = Trainer(session, session.build(), Path("nowhere"))
    assert derive(session)["steps"] == t.last_step == steps


@pytest.mark.parametrize(
    ("name", "more", "metric"),
    [
        ("wikitext2-bert", ["evaluate.best=valid/next_sentence_accuracy"], "next_sentence_accuracy"),
        ("shakespeare-char-gpt", ["evaluate.best=valid/bits_per_byte"], "bits_per_byte"),  # data.limit_valid: nobody counted the bytes
    ],
)
def test_a_best_metric_that_will_not_be_there_is_told_before_step_0(name, more, metric, text, tmp_path):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=f"evaluate.best=valid/{metric}: no such metric here"):
        trainer(name, text, tmp_path, *more)


def test_a_span_has_at_least_one_token(text, tmp_path):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=r"task\.mean_span: expected a number ≥ 1, got 0\.5"):
        trainer("wikitext2-t5", text, tmp_path, "task.mean_span=0.5")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.share_embeddings=false", "model.target_vocab_size=3"], "model.target_vocab_size=3: the data has 13 tokens"),
        (["evaluate.best=valid/bleu", "evaluate.decode=false"], "evaluate.best=valid/bleu: no such metric here"),
        (["evaluate.beams=14"], "evaluate.beams=14: more than the vocabulary's 13 tokens"),
        (
            ["tokenizer.kind=file", "tokenizer.path=.", "tokenizer.shared=false", "model.share_embeddings=false"],
            "tokenizer.shared=false has no effect",
        ),
    ],
)
def test_mistakes_in_translation_are_told_before_step_0(more, said, pairs):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=said):
        open_session(recipes.load("multi30k-seq2seq", [*pairs, *more]))


def test_t5_translates_rows_longer_than_its_training_length(pairs):
    size = ["model.family=t5", "model.d_head=8", "model.seq_len=2"]
    assert open_session(recipes.load("multi30k-seq2seq", [*pairs, *size])).task.splits["train"].lengths.max() == 2  # one of each, and their ends
    assert open_session(recipes.load("multi30k-seq2seq", [*pairs, *size, "data.max_len=16"])).task.splits["train"].lengths.max() == 8


@pytest.mark.parametrize(("threads", "local", "told"), [(4, 1, "layout.threads=4: "), (2, 2, "layout.threads=2 in each of 2 processes: "), (1, 2, None), (2, 1, None)])
def test_more_threads_than_processors_are_told(monkeypatch, capsys, threads, local, told):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("gradus.limits.cores", lambda: 8)
    monkeypatch.setattr("gradus.limits.cpu_quota", lambda: 2)
    _open_device(Layout(device="cpu", threads=threads), World(size=local, local_size=local))
    err = capsys.readouterr().err
    assert err.startswith(f"note: {told}more than the 2 processors allowed here") and err.endswith(f"Use {2 // local}.\n") if told else not err


@pytest.mark.parametrize(("micro", "processes", "expected"), [(3, 1, 6), (3, 2, 3), (8, 2, 1), (5, 2, 2), (None, 3, 1), (16, 4, 1)])
def test_a_last_micro_batch_that_is_smaller_counts(micro, processes, expected):
    recipe = recipes.load("copy-task", ["batch.samples=16", *([f"layout.micro_batch={micro}"] if micro else [])])
    order = SimpleNamespace(n=1000, steps_per_epoch=10, total_steps=lambda train: 7)
    plan = StepPlan.of(recipe, order, processes)
    assert (plan.accumulation, plan.samples, plan.total) == (expected, 16, 7)
