"""A recipe from its layers: a later one wins, weights bring the architecture, and every mistake gets its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.recipe import dump, load, schema
from gradus.train import resolve as command_line

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import BERT, COPY, GPT, problems


def test_a_run_folder_is_its_recipe(write, tmp_path):
    recipe = load(write(COPY))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    assert load(tmp_path / "run") == recipe
    assert load(str(tmp_path / "run"), ["name=again"]).name == "again"


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
        "r.yaml: optimizer.epss: unknown key. Known: lr, momentum, name, weight_decay. (optimizer.name=sgd on the command line)"
    ]


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
        "r.yaml: task: missing. It needs task.name: copy, translation, causal_lm, chat, masked_lm, span_corruption, classification.",
        "command line: evaluate.samples: expected a whole number ≥ 0, got -1.",
        "command line: data.sources: unknown key. Did you mean data.source?",
        "command line: log.every: not of the form section.key=value. Write log.every=VALUE.",
    ]


def test_a_section_that_holds_no_keys_is_told_beside_an_override_of_it(write):
    assert problems(write(COPY + "log: [[]]\n"), ["log.dir=x"]) == ["r.yaml: log: expected keys, got [[]]. It has the keys dir, every, line, tensorboard, wandb."]


def test_reading_recipes_loads_no_torch():
    code = "import sys, gradus.recipe as r; r.dump(r.load('copy-task')); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")}).returncode == 0


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
