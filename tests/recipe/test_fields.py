"""Unknown keys: where they belong, what is nearest, and what other tools call them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.recipe import fields, load
from gradus.recipe.training_args import SAME

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import COPY, GPT, problems


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("lr: 1e-4", "lr: nan"), "optimizer.lr: must be a finite number, got nan."),
        (("lr: 1e-4", "lr: .inf"), "optimizer.lr: must be a finite number, got inf."),
        (("lr: 1e-4", "lr: 0"), "optimizer.lr: expected a number > 0, got 0."),
        (("lr: 1e-4, ", ""), "optimizer.lr: missing. Give a number > 0."),
        (("name: adam, ", ""), "optimizer.name: missing. Give one of adamw, adam, sgd."),
        (("name: adam,", "name: adamax,"), "optimizer.name: no such optimizer: 'adamax'. Did you mean adam?"),
        (("name: adam,", "name: lion,"), "optimizer.name: no such optimizer: 'lion'. Known: adam, adamw, sgd."),
        (("{samples: 80}", "80"), "batch: expected keys, got 80. It has the keys samples, tokens."),
        (("{samples: 80}", "{samples: true}"), "batch.samples: expected a whole number ≥ 1, got true."),
        (("{samples: 80}", "{samples: 80, tokens: 9}"), "batch: give exactly one of samples and tokens."),
        (("{samples: 80}", "{}"), "batch: give exactly one of samples and tokens."),
        (("batch: {samples: 80}", ""), "batch: missing. It has the keys samples, tokens."),
        (("d_model: 64", "d_model: 66"), "model: d_model=66 is not a multiple of n_heads=4."),
        (("d_model: 64", "d_model: [64]"), "model.d_model: expected a whole number ≥ 1, got [64]."),
        (("d_ff: 128", "d_ff: 128, n_kv_heads: 2"), "model.n_kv_heads: unknown key with model.family=seq2seq. It is for llama, gemma."),
        (("d_ff: 128", "d_ff: 128, norm_frist: true"), "model.norm_frist: unknown key. Did you mean model.norm_first?"),
        (("d_ff: 128", "d_ff: 128, norm_first: maybe"), "model.norm_first: expected true or false, got 'maybe'."),
        (("d_ff: 128", "d_ff: 128, dropout: 1.0"), "model.dropout: expected a number ≥ 0 and < 1, got 1.0."),
        (("warmup_steps: 400", "warmup_steps: 400, final: 0.1"), "schedule.final: cannot take effect with schedule.name=noam. It is for linear and cosine."),
        (("{epochs: 2}", "{epochs: 2, seed: 1, seed: 2}"), "line 8, column 29: not valid YAML: seed is given twice. Keep one."),
        (("train:", "train: {epochs: 1}\ntrain:"), "line 9, column 1: not valid YAML: train is given twice. Keep one."),
        (("{epochs: 2}", "{epochs: 2}\ntrain.seed: 3"), "train.seed: unknown key. In a file, write it inside its section: train: {seed: ...}."),
        (("{epochs: 2}", "{epochs: 2, every: 3}"), "train.every: unknown key. It is evaluate.every or log.every."),
        (("{epochs: 2}", "{epochs: 2, zzz: 3}"),
         "train.zzz: unknown key. Known: checkpoint_every, clip_norm, epochs, freeze, keep, on_nonfinite, patience, "
         "qat, seed, steps."),
        (("{epochs: 2}", "{epochs: 2, batch: 3}"), "train.batch: unknown key. It is evaluate.batch or batch."),
        (("name: copy", "name: copy, classes: a"), "task.classes: unknown key with task.name=copy. It is for classification."),
    ],
)  # fmt: skip
def test_a_mistake_gets_its_line(write, change, line):
    assert change[0] in COPY
    assert problems(write(COPY.replace(*change))) == [f"r.yaml: {line}"]


def test_a_misspelt_key_does_not_make_others_look_idle(write):
    text = COPY.replace("kind: synthetic", "kind: synthetic, workrs: 2, prefetch: 4")
    assert problems(write(text)) == ["r.yaml: data.workrs: unknown key. Did you mean data.workers?"]


def test_nested_keys_have_their_path(write):
    text = GPT.replace("family: gpt", "family: llama, rope_scaling: {fator: 4}")
    assert problems(write(text)) == ["r.yaml: model.rope_scaling.fator: unknown key. Did you mean model.rope_scaling.factor?"]
    assert problems(write(text), ["model.rope_scaling={factor: -1}"])[-1] == "command line: model.rope_scaling.factor: expected a number > 0, got -1."
    assert problems(write(text.replace("{fator: 4}", "5"))) == [
        "r.yaml: model.rope_scaling: expected keys (type, factor, original_seq_len, low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor), got 5."
    ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [("model.patch=8", "model.patch_size"), ("learning_rate=1", "optimizer.lr"), ("optimizer.learning_rate=1", "optimizer.lr"),
     ("model.hidden_size=8", "model.d_model"), ("model.num_hidden_layers=2", "model.n_layers"), ("train.batch_size=8", "batch.samples"),
     ("epochs=3", "train.epochs"), ("gradient_accumulation_steps=2", "layout.micro_batch"), ("train.fp16=true", "layout.precision"),
     ("model.num_labels=3", "model.n_classes"), ("data.max_length=9", "data.max_len"), ("train.warmup=9", "schedule.warmup_steps"),
     ("layout.mixed_precision=bf16", "layout.precision"), ("epohcs=3", "train.epochs"), ("num_train_epochs=3", "train.epochs")],
)  # fmt: skip
def test_a_key_under_another_name_is_found_by_its_meaning(override, meant):
    with pytest.raises(UserError, match=rf"unknown key\. (It is|Did you mean) {meant}(\.|\?)$"):
        load("digits-vit", [override])


def test_other_tools_names_lead_to_keys_that_exist():
    theirs = [word for words in fields.COMMON.values() for word in words.split()]
    assert len(theirs) == len(set(theirs)) and not set(theirs) & set(SAME)
    assert all(fields.fields_of(key) for key in [*fields.COMMON, *SAME.values()])


