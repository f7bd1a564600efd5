"""What the parts of a recipe must agree on: each mistake with its fix, and the derived values that are clamped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.recipe import load, schema
from gradus.recipe.check import with_warmup_below

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import BERT, COPY, GPT, problems


@pytest.mark.parametrize(("steps", "warmup"), [(60, 6), (10, 1), (4, 1), (1, 0)])
def test_a_warm_up_longer_than_a_shortened_run_becomes_a_tenth_of_it(write, steps, warmup):
    notes: list[str] = []
    path = write(GPT.replace("warmup_steps: 10", "warmup_steps: 100"))
    r = load(path, [f"train.steps={steps}"], notes=notes)
    assert r.schedule == schema.Schedule(name="cosine", warmup_steps=warmup, final=0.1)
    to_fit = f"to fit train.steps={steps} on the command line"
    assert notes == [f"{path}: schedule.warmup_steps={warmup} instead of 100, {to_fit}"]
    # both in one place contradict each other
    assert "Set schedule.warmup_steps" in problems(path, [f"train.steps={steps}", "schedule.warmup_steps=99"])[0]


def test_a_micro_batch_larger_than_a_later_layers_batch_becomes_that_batch(write):
    notes: list[str] = []
    path = write(GPT + "layout: {micro_batch: 4}\n")
    assert load(path, ["batch.samples=2"], notes=notes).layout.micro_batch == 2
    assert notes == [f"{path}: layout.micro_batch=2 instead of 4, to fit batch.samples=2 on the command line"]
    assert problems(path, ["layout.micro_batch=9"]) == [  # the later layer contradicts the earlier one: nothing gives way
        "command line: layout.micro_batch: 9 is more than batch.samples=8. Set at most 8. (batch.samples=8 in r.yaml)"
    ]
    assert problems(path, ["layout.micro_batch=9", "batch.samples=3"]) == [
        "command line: layout.micro_batch: 9 is more than batch.samples=3. Set at most 3."
    ]


@pytest.mark.parametrize(
    ("base", "overrides", "line"),
    [
        (COPY, ["task.name=translation"], "data.kind: task translation needs pairs, not synthetic. synthetic is for task.name=copy."),
        (COPY, ["data.kind=pairs"], "data.kind: task copy needs synthetic, not pairs. pairs is for task.name=translation."),
        (GPT, ["task.name=masked_lm"], "model.family: task masked_lm needs bert, not gpt. gpt is for task.name=causal_lm or chat."),
        (GPT, ["task.name=span_corruption"], "model.family: task span_corruption needs t5, not gpt. gpt is for task.name=causal_lm or chat."),
        (BERT, ["data.kind=images", "data.max_len=null", "tokenizer=null"],
         "model.family: task classification of images needs vit, not bert. bert is for task.name=masked_lm or classification."),
        (BERT, ["model.head=masked_lm"],
         "model.head: task classification trains classification, not masked_lm. Set model.head=classification or leave it out."),
        (BERT, ["model.pooler=false"], "model.pooler: head classification reads the pooler. Set model.pooler=true."),
        (BERT, ["data.max_len=1024"], "data.max_len: 1024 is more than model.seq_len=512. Set data.max_len=512 or a longer model.seq_len."),
        (BERT, ["tokenizer.shared=true"], "tokenizer.shared: cannot take effect with labelled data. It is for pairs."),
        (GPT, ["tokenizer=null"], "tokenizer: missing. text data needs one, such as tokenizer.kind=byte, or tokenizer.path=FOLDER with kind=file."),
        (GPT, ["tokenizer.kind=file"], "tokenizer.path: missing. kind=file needs a path where there is no model.init to lie beside."),
        (COPY, ["tokenizer.kind=byte"], "tokenizer: cannot take effect with synthetic data. Leave it out."),
        (COPY, ["task.length=1000"], "task.length: 1000 is more than model.seq_len=512. Set model.seq_len=1000."),
        (COPY, ["model.vocab_size=5"], "model.vocab_size: 5 is less than task.n_symbols=11. Leave it out."),
        (COPY, ["layout.micro_batch=81"], "layout.micro_batch: 81 is more than batch.samples=80. Set at most 80."),
        (COPY, ["layout.chunk=256"], "layout.chunk: cannot take effect with layout.attention=sdpa. Set layout.attention=chunked or leave it out."),
        (COPY, ["data.prefetch=2"], "data.prefetch: cannot take effect with data.workers=0. Set data.workers=2, say, or leave it out."),
        (COPY, ["data.persistent=true"], "data.persistent: cannot take effect with data.workers=0. Set data.workers=2, say, or leave it out."),
        (COPY, ["evaluate.test=true"], "evaluate.test: cannot take effect with task copy: made data has no test split. Leave it out."),
        (COPY, ["evaluate.max_new=9"], "evaluate.max_new: cannot take effect with task copy. It is for translation, causal_lm and chat."),
        (GPT, ["evaluate.max_new=9"], "evaluate.max_new: cannot take effect with evaluate.samples=0. Set evaluate.samples=1, say."),
        (COPY, ["schedule.factor=1", "schedule.name=constant"], "schedule.factor: cannot take effect with schedule.name=constant. It is for noam."),
        (GPT, ["schedule.warmup_steps=500", "train.steps=10"],
         "schedule.warmup_steps: is 500, not below train.steps=10. Set schedule.warmup_steps=1, say, or a larger train.steps."),
        (GPT, ["schedule.warmup_steps=0", "schedule.warmup_ratio=0.5", "train.steps=100", "schedule.end_step=50"],
         "schedule.warmup_ratio: is 50 steps of train.steps=100, not below schedule.end_step=50. Set a smaller one or a larger schedule.end_step."),
        (GPT, ["schedule.warmup_steps=5", "schedule.end_step=5"],
         "schedule.warmup_steps: is 5, not below schedule.end_step=5. Set schedule.warmup_steps=1, say, or a larger schedule.end_step."),
        (GPT, ["batch.tokens=32"], "batch.tokens: 32 is less than one row of 64 tokens. Set batch.tokens=64 or more, or a shorter data.max_len."),
        (GPT, ["data.source=stdlib", "data.path=x"], "data.path: cannot take effect with data.source=stdlib. Set data.source=path or leave it out."),
        (GPT, ["data.valid=v", "data.valid_fraction=0.1"], "data.valid_fraction: cannot take effect with data.valid=v. Leave one of the two out."),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_named_with_the_fix(write, base, overrides, line):
    assert load(write(base)) is not None
    found = problems(write(base), overrides)
    assert [re.sub(r" \(\S+=\S+ (in r\.yaml|on the command line)\)$", "", p.split(": ", 1)[1]) for p in found] == [line]


def test_a_ratio_is_held_against_the_end_of_the_schedule_where_epochs_say_the_steps(write):
    r = load(write(GPT), ["schedule.warmup_steps=0", "schedule.warmup_ratio=0.5", "train.steps=null", "train.epochs=2", "schedule.end_step=50"])
    assert with_warmup_below(r, 98) == r
    with pytest.raises(UserError, match=r"schedule\.warmup_ratio: is 50 steps of train\.steps=99, not below schedule\.end_step=50"):
        with_warmup_below(r, 99)


def test_what_only_looks_wrong_is_accepted(write):
    load(write(GPT), ["schedule.warmup_steps=0", "schedule.warmup_ratio=0.9", "train.steps=1"])
    load(write(COPY), ["train.steps=400"])  # noam with the warm-up as long as the run: the copy task as coded
    load(write(GPT), ["train.steps=5", "schedule.end_step=1000"])  # the beginning of a longer schedule
    load(write(BERT.replace("head: classification, ", "")))  # the task chooses the head
    load(write(COPY), ["layout.attention=chunked", "layout.chunk=64"])
    load(write(COPY), ["data.workers=2", "data.prefetch=4"])
    t5 = GPT.replace("family: gpt, n_layers: 2", "family: t5, d_ff: 64, n_layers: 2")
    load(write(t5), ["task.name=span_corruption", "data.max_len=4096"])  # relative positions set no limit


@pytest.mark.parametrize(("std", "fine"), [(0.5, True), (0.0, False), (-0.5, False)])
def test_images_are_divided_by_what_is_positive(std, fine):
    words = ["data.mean=[0.5]", f"data.std=[{std}]"]
    if fine:
        load("digits-vit", words)
    else:
        with pytest.raises(UserError, match=r"data\.std: the images are divided by it"):
            load("digits-vit", words)
