"""Recipes from text: what is read, what overrides do, and that every mistake gets its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.recipe import Recipe, dump, load, resolve, schema
from gradus.train import resolve as command_line

COPY = """
model: {family: seq2seq, n_layers: 2, d_model: 64, n_heads: 4, d_ff: 128}
task: {name: copy}
data: {kind: synthetic}
optimizer: {name: adam, lr: 1e-4, betas: [0.9, 0.98], eps: 1.0e-9}
schedule: {name: noam, warmup_steps: 400}
batch: {samples: 80}
train: {epochs: 2}
"""
GPT = """
model: {family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64}
task: {name: causal_lm}
data: {kind: text}
tokenizer: {kind: bpe, vocab_size: 1000}
optimizer: {name: adamw, lr: 1e-3, betas: [0.9, 0.95]}
schedule: {name: cosine, warmup_steps: 10, final: 0.1}
batch: {samples: 8}
train: {steps: 100}
"""
BERT = """
model: {preset: bert-base-cased, init: bert-base-cased, head: classification, n_classes: 2, dropout: 0.2}
task: {name: classification}
data: {kind: labelled, max_len: 512}
tokenizer: {kind: file}
optimizer: {name: adamw, lr: 5e-5}
batch: {samples: 16}
train: {epochs: 2}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "r.yaml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def problems(path, overrides=(), **more) -> list[str]:
    """The lines of the error, with the folder of the file taken off."""
    with pytest.raises(UserError) as e:
        load(path, overrides, **more)
    return [line.replace(f"{Path(path).parent}/", "") for line in str(e.value).splitlines()]


# ---------------------------------------------------------------- reading


def test_a_file_is_typed_by_the_schema(write):
    r = load(write(COPY))
    assert isinstance(r, Recipe) and r.name == "r"
    assert r.optimizer == schema.Adam(lr=1e-4, betas=(0.9, 0.98), eps=1e-9)  # 1e-4 without a dot is a number
    assert r.train.epochs == 2.0 and r.evaluate == schema.Evaluate() and r.tokenizer is None


def test_words_stay_words_and_numbers_are_numbers(write):
    text = GPT.replace("data: {kind: text}", "data: {kind: text, path: 2024, cache: no, text: on, limit: 1e3}").replace("steps: 100", "steps: 1_000")
    r = load(
        write(text), ["layout.compile=none", "log.wandb=off", "log.dir=1e-4", "data.train=[a].txt", "log.tensorboard=yes", "layout.precision=bf16"]
    )
    assert (r.data.path, r.data.cache, r.data.text, r.data.limit, r.train.steps) == ("2024", "no", "on", 1000, 1000)
    assert (r.layout.compile, r.log.wandb, r.log.dir, r.data.train, r.log.tensorboard) == ("none", "off", "1e-4", "[a].txt", True)


def test_class_names_that_yaml_takes_for_truth_values_stay_names(write):
    r = load(write(BERT.replace("name: classification}", "name: classification, classes: [no, yes]}")))
    assert r.task.classes == ["no", "yes"]


def test_json_is_read_the_same_way(write):
    tree = yaml.safe_load(COPY)
    tree["optimizer"]["lr"] = 0.0001
    for text in (json.dumps(tree), json.dumps(tree, indent="\t")):
        assert load(write(text, "r.json")) == load(write(COPY))
    assert load(write(json.dumps({**tree, "name": "né 😀"}), "r.json")).name == "né 😀"


def test_a_run_folder_is_its_recipe(write, tmp_path):
    recipe = load(write(COPY))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    assert load(tmp_path / "run") == recipe
    assert load(str(tmp_path / "run"), ["name=again"]).name == "again"


def test_empty_sections_and_nulls_are_defaults(write):
    r = load(write(COPY + "evaluate:\nlayout: {micro_batch: null}\ntokenizer:\n"))
    assert r.evaluate == schema.Evaluate() and r.layout.micro_batch is None and r.tokenizer is None


def test_preset_fills_what_is_not_said(write):
    r = load(write(BERT))
    assert (r.model.n_layers, r.model.vocab_size, r.model.dropout, r.model.head) == (12, 28996, 0.2, "classification")
    r = load(
        write(GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: llama3.1-8b, n_layers: 2, rope_scaling: null"))
    )
    assert (r.model.n_layers, r.model.n_kv_heads, r.model.d_ff, r.model.rope_scaling) == (2, 8, 14336, None)


# ---------------------------------------------------------------- overrides


def test_overrides_are_typed_by_the_schema(write):
    r = load(write(COPY), ["optimizer.lr=3e-4", "optimizer.betas=[0.8, 0.9]", "batch.samples=16", "layout.micro_batch=4", "evaluate.at_start=true"])
    assert r.optimizer.lr == 3e-4 and r.optimizer.betas == (0.8, 0.9) and r.layout.micro_batch == 4 and r.evaluate.at_start is True
    assert load(write(COPY), ["log={every: 5, tensorboard: true}"]).log == schema.Log(every=5, tensorboard=True)
    assert load(write(COPY), ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_arguments_are_python_values_and_the_command_line_wins(write, tmp_path):
    more = {"train": {"seed": 3, "clip_norm": 1.0}, "log.dir": tmp_path, "evaluate.at_start": True}
    r = load(write(COPY), ["train.seed=4"], **more)
    assert (r.train.seed, r.train.clip_norm, r.log.dir, r.evaluate.at_start) == (4, 1.0, str(tmp_path), True)
    assert problems(write(COPY), **{"batch.samples": True}) == ["argument: batch.samples: expected a whole number ≥ 1, got true."]


def test_the_command_line_also_replaces_alternatives_and_kinds_of_arguments(write):
    notes: list[str] = []
    more = {"train.epochs": 5, "optimizer.name": "adamw", "optimizer.eps": 1e-6, "data": {"workers": 2, "prefetch": 3}}
    r = load(write(COPY), ["train.steps=7", "optimizer.name=sgd", "data.workers=0"], notes=notes, **more)
    assert (r.train.steps, r.train.epochs, r.optimizer) == (7, None, schema.SGD(lr=1e-4))
    assert len(notes) == 3 and all("left out" in note for note in notes)


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_unsets(write, null):
    path = write(COPY + "layout: {micro_batch: 4}\nevaluate: {samples: 3}\n")
    r = load(path, [f"layout.micro_batch={null}", f"optimizer.eps={null}", f"evaluate={null}"])
    assert r.layout.micro_batch is None and r.optimizer.eps == 1e-8 and r.evaluate == schema.Evaluate()
    assert problems(path, [f"optimizer.epps={null}"]) == ["command line: optimizer.epps: unknown key. Did you mean optimizer.eps?"]
    rope = load(
        write(GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: llama3.1-8b")), [f"model.rope_scaling={null}"]
    )
    assert rope.model.rope_scaling is None  # null wins over what a preset fills in


@pytest.mark.parametrize(("steps", "warmup"), [(60, 6), (10, 1), (4, 1)])
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


def test_a_value_that_a_later_layer_repeats_is_no_change(write):
    """What the file says beside it still counts, and what it contradicts is still the file's mistake."""
    notes: list[str] = []
    path = write(GPT.replace("family: gpt", "preset: gpt2-small"))
    assert load(path, ["model.preset=gpt2-small"], notes=notes).model.n_layers == 2 and notes == []
    path = write(COPY.replace("name: adam,", "name: sgd,"))
    assert problems(path, ["optimizer.name=sgd"])[0].startswith("r.yaml: optimizer.betas: unknown key with optimizer.name=sgd.")


def test_another_optimizer_takes_the_old_ones_settings_along_out(write):
    notes: list[str] = []
    path = write(COPY)
    r = load(path, ["optimizer.momentum=0.9", "optimizer.name=sgd"], notes=notes)
    assert r.optimizer == schema.SGD(lr=1e-4, momentum=0.9)
    beside = "no effect with optimizer.name=sgd on the command line"
    assert notes == [f"{path}: optimizer.betas=[0.9, 0.98], optimizer.eps=1.0e-9 left out: {beside}"]
    # what is asked for on the command line itself is not dropped
    assert problems(path, ["optimizer.name=sgd", "optimizer.eps=1e-8"]) == [
        "command line: optimizer.eps: unknown key with optimizer.name=sgd. It is for adamw, adam."
    ]
    # nor is a misspelt key of the file
    assert problems(write(COPY.replace(" eps:", " epss:")), ["optimizer.name=sgd"]) == [
        "r.yaml: optimizer.epss: unknown key. Known: lr, momentum, name, nesterov, weight_decay."
    ]


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (["tokenizer.kind=byte"], ["tokenizer.vocab_size=1000"]),
        (["schedule.name=constant"], ["schedule.final=0.1"]),
        (["schedule.name=noam"], ["schedule.final=0.1"]),
        (["model.family=llama"], ["model.bias=false"]),
        (["model.preset=gpt2-small"], ["model.family=gpt, model.n_layers=2, model.d_model=64, model.n_heads=4, model.seq_len=64, model.bias=false"]),
        (["train.epochs=2"], ["train.steps=100"]),
        (["batch.tokens=4096"], ["batch.samples=8"]),
        (["layout.attention=sdpa"], ["layout.chunk=64"]),
        (["data.workers=0"], ["data.prefetch=4"]),
        (["evaluate.samples=0"], ["evaluate.max_new=50"]),
        (["data.source=stdlib"], ["data.path=x"]),
        (["layout.shard=1"], ["layout.reshard=false"]),
    ],
)
def test_what_an_override_robs_of_its_effect_is_left_out_and_named(write, overrides, dropped):
    text = GPT.replace("seq_len: 64", "seq_len: 64, bias: false").replace("kind: text", "kind: text, path: x, workers: 2, prefetch: 4")
    text += "layout: {attention: chunked, chunk: 64, shard: 2, reshard: false}\nevaluate: {samples: 1, max_new: 50}\n"
    path, notes = write(text), []
    assert load(path) is not None
    load(path, overrides, notes=notes)
    assert [n.removeprefix(f"{path}: ").split(" left out: ")[0] for n in notes] == dropped


def test_a_preset_on_the_command_line_is_the_published_size(write):
    r = load(write(GPT.replace("seq_len: 64", "seq_len: 64, bias: false, dropout: 0.3")), ["model.preset=gpt2-small", "model.n_layers=3"])
    assert (r.model.n_layers, r.model.d_model, r.model.seq_len, r.model.bias, r.model.dropout) == (3, 768, 1024, True, 0.3)
    assert problems(write(GPT), ["model.preset=gtp2"]) == ["command line: model.preset: gtp2: unknown preset. Did you mean gpt2?"]
    assert problems(write(BERT), ["model.preset=bert-large-cased"]) == [
        "command line: model.preset: the recipe starts from model.init=bert-base-cased, which sets these keys."
        " Set model.init too, or model.init=null. (model.init=bert-base-cased in r.yaml)"
    ]
    assert load(write(BERT), ["model.preset=bert-large-cased", "model.init=null", "tokenizer.path=t"]).model.n_layers == 24


def test_a_preset_that_is_unset_leaves_other_layers_as_they_are(write):
    size = {"family": "bert", "n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 16, "seq_len": 512}
    notes: list[str] = []
    unset = ["model.preset=null", "model.init=null", "tokenizer.path=t"]
    r = load(write(BERT), unset, notes=notes, model=size)
    assert (r.model.n_layers, r.model.d_model, r.model.preset, r.model.head, notes) == (2, 8, None, "classification", [])


def test_family_on_the_command_line_leaves_a_preset_of_another_one(write):
    path = write(GPT.replace("family: gpt", "preset: gpt2"))
    notes: list[str] = []
    r = load(path, ["model.family=llama"], notes=notes)
    assert r.model.family == "llama" and r.model.preset is None and r.model.d_model == 64
    assert notes == [f"{path}: model.preset=gpt2 left out: no effect with model.family=llama on the command line"]


# ---------------------------------------------------------------- weights to start from

MINI = {
    "family": "bert",
    "vocab_size": 30522,
    "n_layers": 6,
    "d_model": 384,
    "n_heads": 12,
    "d_ff": 1536,
    "seq_len": 256,
    "dropout": 0.1,
    "head": "none",
}


def test_init_on_the_command_line_takes_the_presets_place(write):
    notes: list[str] = []
    path = write(BERT)
    r = load(path, ["model.init=folder"], notes=notes)  # touches no file
    assert r.model.init == "folder" and r.model.preset is None and r.model.head == "classification"
    assert notes == [f"{path}: model.preset=bert-base-cased left out: no effect with model.init=folder on the command line"]
    # the architecture is not known, so nothing is said about sizes
    assert load(write(BERT), ["model.init=folder", "data.max_len=1024"]).data.max_len == 1024


def test_configure_gives_the_architecture(write):
    asked = []

    def configure(init):
        asked.append(init)
        return MINI

    notes: list[str] = []
    path = write(BERT)
    r = load(path, ["model.init=folder", "data.max_len=200"], configure=configure, notes=notes)
    assert asked == ["folder"] and r.model.n_layers == 6 and r.model.dropout == 0.2 and r.model.n_classes == 2
    assert notes == [f"{path}: model.preset=bert-base-cased left out: no effect with model.init=folder on the command line"]
    assert problems(write(BERT), ["model.init=folder"], configure=configure)[0].startswith(
        "r.yaml: data.max_len: 512 is more than model.seq_len=256."
    )
    assert problems(write(BERT), ["model.init=folder", "model.n_layers=3", "data.max_len=9"], configure=configure) == [
        "command line: model.n_layers: cannot take effect: model.init=folder has 6. Leave it out."
    ]
    assert problems(write(BERT), ["model.init=folder", "model.n_lyers=6", "data.max_len=9"], configure=configure) == [
        "command line: model.n_lyers: unknown key. Did you mean model.n_layers?"
    ]
    bare = BERT.replace("preset: bert-base-cased, ", "").replace("max_len: 512", "max_len: 9")
    assert load(write(bare), configure=configure).model.d_ff == 1536  # a recipe need not say what its weights say
    assert load(write(BERT), configure=lambda init: None).model.n_layers == 12


SMALL = {"n_layers": 2, "d_model": 8, "n_heads": 2, "seq_len": 64}


@pytest.mark.parametrize("config", [schema.LlamaConfig(**SMALL, qkv_bias=True), schema.GPTConfig(**SMALL, bias=False)])
def test_defaults_of_a_configuration_are_asked_for_by_nobody(config):
    """Its top_k and balance have no effect without experts, and are no mistake; what the command line asks for in vain is one."""
    r = load("r", ["model.init=folder"], configure=lambda init: config.model_dump(), text=GPT)
    assert r.model == config.model_copy(update={"init": "folder"})
    with pytest.raises(UserError, match=r"model\.top_k: cannot take effect without experts"):
        load("r", ["model.init=folder", "model.top_k=2"], configure=lambda init: config.model_dump(), text=GPT)


def test_weights_that_are_not_there_are_one_problem_among_others(write):
    def configure(init):
        raise UserError(f"model.init={init}: no such file or folder.")

    assert problems(write(BERT), ["model.init=./x", "train.sed=1"], configure=configure) == [
        "command line: model.init: ./x: no such file or folder.",
        "command line: train.sed: unknown key. Did you mean train.seed?",
    ]


def test_a_preset_and_weights_are_one_too_many(write):
    asked = ["model.init=folder", "model.preset=bert-large-cased", "data.max_len=9"]
    assert problems(write(BERT), asked, configure=lambda init: MINI) == [
        "command line: model.preset: cannot take effect: model.init=folder has its own configuration. Leave it out."
    ]


def test_weights_of_another_family_keep_what_is_no_matter_of_size():
    text, notes = GPT.replace("family: gpt", "family: gpt, bias: false, dropout: 0.3"), []
    llama = schema.LlamaConfig(n_layers=1, d_model=8, n_heads=2, seq_len=64)
    r = load("r", ["model.init=folder"], configure=lambda init: llama.model_dump(), text=text, notes=notes)
    assert r.model == llama.model_copy(update={"init": "folder", "dropout": 0.3})
    sizes = "model.family=gpt, model.bias=false, model.n_layers=2, model.d_model=64, model.n_heads=4, model.seq_len=64"
    assert notes == [f"r: {sizes} left out: no effect with model.init=folder on the command line"]


# ---------------------------------------------------------------- mistakes


def test_all_problems_are_told_at_once_in_the_order_of_the_file(write):
    text = """
train: {lr: 3, steps: 1.5}
model: {family: gpt, n_layer: 2, d_model: 512, n_heads: 8, n_layers: 2, seq_len: 64}
data: {kind: text, path: x, max_len: 128}
optimizer: {name: adamw, lrr: 1, betas: [0.9, 1.5], eps: .nan}
schedule: {name: cosin, warmup_steps: -3}
batch: {samples: many}
layout: {compile: yes, micro_batch: none}
optimiser: {}
learning_rate: 1
"""
    assert problems(write(text), ["evaluate.samples=-1", "data.sources=x", "log.every"]) == [
        "r.yaml: train.lr: unknown key. It is optimizer.lr.",
        "r.yaml: train.steps: expected a whole number ≥ 1, got 1.5.",
        "r.yaml: model.n_layer: unknown key. Did you mean model.n_layers?",
        "r.yaml: data.max_len: 128 is more than model.seq_len=64. Set data.max_len=64 or a longer model.seq_len.",
        "r.yaml: optimizer.lrr: unknown key. Did you mean optimizer.lr?",
        "r.yaml: optimizer.betas: expected a list [a, b], each a number ≥ 0 and < 1, got [0.9, 1.5].",
        "r.yaml: optimizer.eps: must be a finite number, got nan.",
        "r.yaml: schedule.name: expected one of constant, linear, cosine, noam, got 'cosin'. Did you mean cosine?",
        "r.yaml: schedule.warmup_steps: expected a whole number ≥ 0, got -3.",
        "r.yaml: batch.samples: expected a whole number ≥ 1, got 'many'.",
        "r.yaml: layout.compile: expected one of none, default, reduce-overhead, max-autotune, got 'yes'.",
        "r.yaml: layout.micro_batch: expected a whole number ≥ 1, got 'none'. Use null to unset it.",
        "r.yaml: optimiser: unknown key. Did you mean optimizer?",
        "r.yaml: learning_rate: unknown key. It is optimizer.lr.",
        "r.yaml: task: missing. It needs task.name: copy, translation, causal_lm, masked_lm, span_corruption, classification.",
        "command line: evaluate.samples: expected a whole number ≥ 0, got -1.",
        "command line: data.sources: unknown key. Did you mean data.source?",
        "command line: log.every: not of the form section.key=value. Write log.every=VALUE.",
    ]


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
        (("d_ff: 128", "d_ff: 128, n_kv_heads: 2"), "model.n_kv_heads: unknown key with model.family=seq2seq. It is for llama."),
        (("d_ff: 128", "d_ff: 128, norm_frist: true"), "model.norm_frist: unknown key. Did you mean model.norm_first?"),
        (("d_ff: 128", "d_ff: 128, norm_first: maybe"), "model.norm_first: expected true or false, got 'maybe'."),
        (("d_ff: 128", "d_ff: 128, dropout: 1.0"), "model.dropout: expected a number ≥ 0 and < 1, got 1.0."),
        (("warmup_steps: 400", "warmup_steps: 400, final: 0.1"), "schedule.final: cannot take effect with schedule.name=noam. It is for linear and cosine."),
        (("{epochs: 2}", "{epochs: 2, seed: 1, seed: 2}"), "line 8, column 29: not valid YAML: seed is given twice. Keep one."),
        (("train:", "train: {epochs: 1}\ntrain:"), "line 9, column 1: not valid YAML: train is given twice. Keep one."),
        (("{epochs: 2}", "{epochs: 2}\ntrain.seed: 3"), "train.seed: unknown key. In a file, write it inside its section: train: {seed: ...}."),
        (("{epochs: 2}", "{epochs: 2, every: 3}"), "train.every: unknown key. It is evaluate.every or log.every."),
        (("{epochs: 2}", "{epochs: 2, zzz: 3}"),
         "train.zzz: unknown key. Known: checkpoint_every, clip_norm, epochs, keep, on_nonfinite, qat, seed, steps."),
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


@pytest.mark.parametrize("junk", ["[a]", "{a: b}", "3", "null"])
def test_a_kind_that_is_no_word(write, junk):
    lines = problems(write(COPY.replace("name: adam", f"name: {junk}")))
    assert len(lines) == 1 and re.match(r"r\.yaml: optimizer\.name: (missing|no such optimizer)", lines[0])
    lines = problems(write(COPY.replace("family: seq2seq", f"preset: {junk}")))
    assert re.match(r"r\.yaml: model\.(preset: 3: unknown preset|family: missing)", lines[0])
    lines = problems(write(COPY), optimizer={"name": ["sgd"]})
    assert len(lines) == 1 and lines[0].startswith("argument: optimizer.name: no such optimizer: ['sgd'].")


def test_nested_keys_have_their_path(write):
    text = GPT.replace("family: gpt", "family: llama, rope_scaling: {fator: 4}")
    assert problems(write(text)) == ["r.yaml: model.rope_scaling.fator: unknown key. Did you mean model.rope_scaling.factor?"]
    assert problems(write(text), ["model.rope_scaling={factor: -1}"])[-1] == "command line: model.rope_scaling.factor: expected a number > 0, got -1."
    assert problems(write(text.replace("{fator: 4}", "5"))) == [
        "r.yaml: model.rope_scaling: expected keys (factor, low_freq_factor, high_freq_factor, original_seq_len), got 5."
    ]


def test_a_section_that_holds_no_keys_is_told_beside_an_override_of_it(write):
    assert problems(write(COPY + "log: [[]]\n"), ["log.dir=x"]) == ["r.yaml: log: expected keys, got [[]]. It has the keys dir, every, line, tensorboard, wandb."]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file(write, text):
    assert len(lines := problems(write(text))) == 1
    assert re.match(r"r\.yaml: expected sections such as model, task and data, got nothing", lines[0])


def test_a_list_or_a_word_at_the_top(write):
    expected = "r.yaml: expected sections such as model, task and data, got "
    assert problems(write("- a\n- b\n")) == [expected + "a list."]
    assert problems(write("hello")) == [expected + "only 'hello'."]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {a: 1\ntask: 3\n", "r.yaml: line 2, column 5: not valid YAML: "),
        ("a: b: c\n", "r.yaml: line 1, column 5: not valid YAML: mapping values are not allowed here."),
        ("a:\n\tb: 1\n", "r.yaml: line 2, column 1: not valid YAML: "),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml: line 1, column 4: not valid YAML: the tag "),
        ("a: &x [*x]\n", "r.yaml: line 1, column 4: not valid YAML: found unconstructable recursive node."),
        ("? [a]\n: 1\n", "r.yaml: line 1, column 3: not valid YAML: a key must be a word."),
        ("a: 1\n---\nb: 2\n", "r.yaml: line 2, column 1: not valid YAML: "),
        ("a: \x00\n", "r.yaml: not valid YAML: special characters are not allowed."),
    ],
)
def test_a_syntax_error_is_one_line_with_its_place(write, text, line):
    lines = problems(write(text))
    assert len(lines) == 1 and lines[0].startswith(line)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"a: \xff\xfe")
    assert problems(tmp_path / "r.yaml") == ["r.yaml: not a text file in UTF-8 (byte 3)."]


def test_names_and_paths_that_are_not_there(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(COPY, "mine.yaml")
    for name, text in [
        ("copy-tsk", "copy-tsk: no such recipe. Did you mean copy-task? Give a packaged recipe, a .yaml, .yml or .json file, or a run folder."),
        ("mine", "mine: no such recipe. Did you mean mine.yaml? Give a packaged recipe, a .yaml, .yml or .json file, or a run folder."),
        ("minee.yaml", "minee.yaml: no such file. Did you mean mine.yaml?"),
        ("gpt2-smal", "gpt2-smal: no such recipe. Did you mean a recipe with model.preset=gpt2-small? Give a packaged recipe, a .yaml, .yml or .json file, or a run folder."),
        ("gpt2-small", "gpt2-small: the preset of a model, not a recipe: it has no task and no data. Give a recipe and model.preset=gpt2-small; "
         "gradus plan gpt2-small plans it."),
        (str(tmp_path), f"{tmp_path}: a folder without recipe.yaml is not a run. Give a packaged recipe, a .yaml, .yml or .json file, or a run folder."),
    ]:
        with pytest.raises(UserError) as e:
            load(name)
        assert str(e.value) == text
    write("x", "notes.txt")
    with pytest.raises(UserError, match=r"notes\.txt: not a recipe\. Give a packaged recipe, a \.yaml, \.yml or \.json file"):
        load("notes.txt")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--train.seed=3", "command line: --train.seed=3: not of the form section.key=value. Write train.seed=3."),
        ("train.seed", "command line: train.seed: not of the form section.key=value. Write train.seed=VALUE."),
        ("=3", "command line: =3: not of the form section.key=value."),
        ("optimizer=sgd", "command line: optimizer: expected keys, got 'sgd'. Did you mean optimizer.name=sgd?"),
        (
            "optimizer.betas=[0.9",
            "command line: optimizer.betas=[0.9: line 1, column 5: not valid YAML: expected ',' or ']', but got '<stream end>'.",
        ),
        ("optimizer.betas=0.9", "command line: optimizer.betas: expected a list [a, b], each a number ≥ 0 and < 1, got 0.9."),
        ("optimizer.lr.x=3", "command line: optimizer.lr: expected a number > 0, got {x: 3}."),
    ],
)
def test_a_mistake_on_the_command_line_says_so(write, override, line):
    assert problems(write(COPY), [override]) == [line]


# ---------------------------------------------------------------- what must agree


@pytest.mark.parametrize(
    ("base", "overrides", "line"),
    [
        (COPY, ["task.name=translation"], "data.kind: task translation needs pairs, not synthetic. synthetic is for task.name=copy."),
        (COPY, ["data.kind=pairs"], "data.kind: task copy needs synthetic, not pairs. pairs is for task.name=translation."),
        (GPT, ["task.name=masked_lm"], "model.family: task masked_lm needs bert, not gpt. gpt is for task.name=causal_lm."),
        (GPT, ["task.name=span_corruption"], "model.family: task span_corruption needs t5, not gpt. gpt is for task.name=causal_lm."),
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
        (COPY, ["evaluate.max_new=9"], "evaluate.max_new: cannot take effect with task copy. It is for translation and causal_lm."),
        (GPT, ["evaluate.max_new=9"], "evaluate.max_new: cannot take effect with evaluate.samples=0. Set evaluate.samples=1, say."),
        (COPY, ["schedule.factor=1", "schedule.name=constant"], "schedule.factor: cannot take effect with schedule.name=constant. It is for noam."),
        (GPT, ["schedule.warmup_steps=500", "train.steps=10"],
         "schedule.warmup_steps: is 500, not below train.steps=10. Set schedule.warmup_steps=1, say, or a larger train.steps."),
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


@pytest.mark.parametrize(
    ("base", "overrides", "line"),
    [
        (COPY, ["task.name=translation"], "r.yaml: data.kind: task translation needs pairs, not synthetic. synthetic is for task.name=copy."
         " (task.name=translation on the command line)"),
        (BERT, ["tokenizer.shared=true"], "command line: tokenizer.shared: cannot take effect with labelled data. It is for pairs."
         " (data.kind=labelled in r.yaml)"),
        (GPT, ["task.name=masked_lm"], "r.yaml: model.family: task masked_lm needs bert, not gpt. gpt is for task.name=causal_lm."
         " (task.name=masked_lm on the command line)"),
        (GPT, ["data.max_len=128"], "command line: data.max_len: 128 is more than model.seq_len=64. Set data.max_len=64 or a longer"
         " model.seq_len. (model.seq_len=64 in r.yaml)"),
        (GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: gpt2"), ["data.max_len=2048"],
         "command line: data.max_len: 2048 is more than model.seq_len=1024. Set data.max_len=1024 or a longer model.seq_len."
         " (model.preset=gpt2 in r.yaml)"),
        (COPY, ["layout.chunk=64"], "command line: layout.chunk: cannot take effect with layout.attention=sdpa. Set layout.attention=chunked"
         " or leave it out."),
        (GPT + "layout: {shard: 2}\n", ["layout.shard_optimizer=true"], "command line: layout.shard_optimizer: cannot be combined with"
         " layout.shard=2: sharding splits the optimizer's state already. Set layout.shard_optimizer=false. (layout.shard=2 in r.yaml)"),
    ],
)  # fmt: skip
def test_a_conflict_shows_both_places(write, base, overrides, line):
    assert problems(write(base), overrides) == [line]


def test_what_only_looks_wrong_is_accepted(write):
    load(write(COPY), ["train.steps=400"])  # noam with the warm-up as long as the run: the copy task as coded
    load(write(GPT), ["train.steps=5", "schedule.end_step=1000"])  # the beginning of a longer schedule
    load(write(BERT.replace("head: classification, ", "")))  # the task chooses the head
    load(write(COPY), ["layout.attention=chunked", "layout.chunk=64"])
    load(write(COPY), ["data.workers=2", "data.prefetch=4"])
    t5 = GPT.replace("family: gpt, n_layers: 2", "family: t5, d_ff: 64, n_layers: 2")
    load(write(t5), ["task.name=span_corruption", "data.max_len=4096"])  # relative positions set no limit


def test_everything_is_told_of_a_recipe_made_in_python(write):
    recipe = load(write(COPY))
    broken = recipe.model_copy(update={"layout": schema.Layout(micro_batch=99, chunk=64), "data": schema.TextData()})
    with pytest.raises(UserError) as e:
        resolve(broken.model_dump(), "r")
    assert str(e.value).splitlines() == [
        "r: data.kind: task copy needs synthetic, not text. text is for task.name=causal_lm or masked_lm or span_corruption.",
        "r: layout.micro_batch: 99 is more than batch.samples=80. Set at most 80.",
        "r: layout.chunk: cannot take effect with layout.attention=sdpa. Set layout.attention=chunked or leave it out.",
    ]


@pytest.mark.parametrize("line", ["{los}", "{step:9999d}", "{step:{loss}}", "{", "{0}", "{step.real}", "{step:s}", "{loss!r:x}"])
def test_a_line_of_the_log_holds_known_values(write, line):
    with pytest.raises(UserError, match=r"log\.line: "):
        load(write(COPY), [f"log.line='{line}'"])


def test_no_wording_of_the_libraries_comes_through(write):
    junk = ["model.n_layers=x", "model.dropout=-1", "task.length=[1]", "data.n_train=0", "optimizer.lr={a: 1}", "optimizer.betas=[a, b, c]",
            "schedule.name=1", "batch.samples=1.5", "train.clip_norm=inf", "evaluate.every=no", "layout.tf32=2",
            "log.every=null", "log.wandb=[a", "name="]  # fmt: skip
    text = "\n".join(problems(write(COPY), [*junk, "tokenizer=3"]))
    for word in ("Input should", "pydantic", "http", "type=", "Value error", "valid ", "adam,", "('", "seq2seq."):
        assert word not in text, text
    assert len(text.splitlines()) == len(junk) - 2  # log.every and name are unset, log.wandb takes any text


# ---------------------------------------------------------------- back to text


def test_dump_says_everything_and_reads_well(write):
    text = dump(load(write(COPY)))
    assert list(yaml.safe_load(text)) == ["name", "model", "task", "data", "optimizer", "schedule", "batch", "train", "evaluate", "layout", "log"]
    assert "  betas: [0.9, 0.98]\n  eps: 1.0e-09\n" in text and "model:\n  family: seq2seq\n" in text and "  precision: fp32\n" in text
    assert "chunk" not in text and "prefetch" not in text  # they have no effect here
    assert "chunk: 256" in dump(load(write(COPY), ["layout.attention=chunked"]))


@pytest.mark.parametrize("text", [COPY, GPT, BERT])
def test_dump_and_load_are_inverse(write, text):
    recipe = load(write(text))
    assert load(write(dump(recipe), "again.yaml")) == recipe
    assert resolve(recipe.model_dump()) == recipe


def test_a_null_that_wins_over_a_preset_survives(write):
    recipe = load(write(GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: llama3.2-1b, rope_scaling: null")))
    assert load(write(dump(recipe), "again.yaml")) == recipe and recipe.model.rope_scaling is None


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), min_size=1).filter(lambda s: s.strip() == s)
paths = words.filter(lambda s: not os.path.exists(os.path.expanduser(s)))  # one that is there becomes absolute
small = st.floats(min_value=1e-300, max_value=0.999, allow_nan=False)


@settings(max_examples=60)
@given(
    lr=st.floats(min_value=1e-320, max_value=1e12), eps=small, beta=small, name=words.map(schema.right_name), path=st.none() | paths,
    classes=st.lists(words, max_size=3) | st.sampled_from([["null", "no", "~", "1e3", "true"]]), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_any_recipe_round_trips(tmp_path_factory, lr, eps, beta, name, path, classes, seed):
    recipe = Recipe(
        name=name,
        model=schema.BertConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, init="x"),
        task=schema.ClassificationTask(classes=classes),
        data=schema.LabelledData(path=path),
        optimizer=schema.AdamW(lr=lr, eps=eps, betas=(beta, 0.5)),
        batch=schema.Batch(samples=2),
        train=schema.Train(steps=1, seed=seed),
        log=schema.Log(dir=name),
    )
    file = tmp_path_factory.mktemp("round") / "r.yaml"
    file.write_text(dump(recipe), encoding="utf-8", newline="")
    assert load(file) == recipe


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.text(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda s: st.lists(s) | st.dictionaries(st.text(max_size=8), s), max_leaves=12
    ).map(yaml.safe_dump)
)
def test_no_text_gets_through_as_anything_but_a_user_error(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("junk") / "r.yaml"
    file.write_bytes(text.encode("utf-8", "replace"))
    with pytest.raises(UserError) as e:
        load(file)
    assert str(e.value)


def test_reading_recipes_loads_no_torch():
    code = "import sys, gradus.recipe as r; r.dump(r.load('copy-task')); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")}).returncode == 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("name=../../x", "command line: name: '../../x' cannot be the name of a folder. Try 'x'."),
        ("name=/etc/x", "command line: name: '/etc/x' .* Try 'etc-x'."),
        ("name=a\nb", r"command line: name: 'a\\nb' .* Try 'a-b'."),
        ("name=a\x1b[31m", r"command line: name: .* Try 'a-\[31m'."),
        ("name=..", "command line: name: '\\.\\.' .* Try 'recipe'."),
        ("name=" + "x" * 101, f"command line: name: .* Try '{'x' * 100}'"),
        ("log.dir=a\nb", r"command line: log.dir: 'a\\nb': a folder has no line breaks or control characters in its name."),
        ("log.dir=a\0b", r"command line: log.dir: 'a\\x00b': "),
    ],
)
def test_a_name_and_a_folder_that_are_none(override, told):
    with pytest.raises(UserError, match=told) as e:
        load("copy-task", [override])
    assert "\n" not in str(e.value)


def test_names_and_folders_that_are_right(write):
    for name in ("copy-task", "my recipe", "ViT-B_16 (lr=1e-3, 2nd)", "Übung 3 😀", "$(x)", "a--b"):
        assert load("copy-task", [f"name={name}"]).name == name
    for folder in ("/tmp/a b/$x", "../runs/a", "~/runs"):
        assert load("copy-task", [f"log.dir={folder}"]).log.dir == folder
    path = write(COPY, "$(x) ../y`.yaml".replace("/", ":"))
    assert load(path).name == "$(x) ..:y`", "what a folder may be called"
    assert load(write(COPY, "-a\nb.yaml")).name == "a-b", "the nearest right name to the file's"


@given(st.text())
def test_the_nearest_right_name_is_one(text):
    name = schema.right_name(text)
    assert schema.right_name(name) == name and 0 < len(name.encode()) <= 100
    assert Path("runs", name).resolve().parent == Path("runs").resolve() and name.isprintable()
    assert schema._name(name) == name


def test_python_and_the_command_line_load_the_same_recipes(tmp_path, monkeypatch):
    """A recipe that says no more of its model than where the weights lie: the sizes are those of config.json beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    config = {"model_type": "bert", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 99,
              "max_position_embeddings": 40, "type_vocab_size": 2}  # fmt: skip
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text(
        "task: {name: classification}\nmodel: {init: ./weights, head: classification}\ndata: {kind: labelled, path: texts}\n"
        "optimizer: {name: adamw, lr: 1e-4}\nbatch: {samples: 4}\ntrain: {steps: 2}\n"
    )
    ours = load("mine.yaml")
    assert (ours.model.family, ours.model.d_model, ours.model.n_layers, ours.model.seq_len) == ("bert", 24, 3, 40)
    assert ours == command_line.load("mine.yaml", [])[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(ours))
    assert load(tmp_path / "run") == command_line.load("run", [])[0] and load("run").model == ours.model
    with pytest.raises(UserError, match=r"model.init: \./nowhere: no such file or folder|model.init=\./nowhere: no such file"):
        load("mine.yaml", ["model.init=./nowhere"])
