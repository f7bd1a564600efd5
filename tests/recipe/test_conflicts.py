"""What cannot be combined: what falls away for a later layer, and what is an error that shows both places."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus.recipe import load

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import BERT, COPY, GPT, problems


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


@pytest.mark.parametrize(
    ("base", "overrides", "line"),
    [
        (COPY, ["task.name=translation"], "r.yaml: data.kind: task translation needs pairs, not synthetic. synthetic is for task.name=copy."
         " (task.name=translation on the command line)"),
        (BERT, ["tokenizer.shared=true"], "command line: tokenizer.shared: cannot take effect with labelled data. It is for pairs."
         " (data.kind=labelled in r.yaml)"),
        (GPT, ["task.name=masked_lm"], "r.yaml: model.family: task masked_lm needs bert, not gpt. gpt is for task.name=causal_lm or chat."
         " (task.name=masked_lm on the command line)"),
        (GPT, ["data.max_len=128"], "command line: data.max_len: 128 is more than model.seq_len=64. Set data.max_len=64 or a longer"
         " model.seq_len. (model.seq_len=64 in r.yaml)"),
        (GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: gpt2"), ["data.max_len=2048"],
         "command line: data.max_len: 2048 is more than model.seq_len=1024. Set data.max_len=1024 or a longer model.seq_len."
         " (model.preset=gpt2 in r.yaml)"),
        (COPY, ["layout.chunk=64"], "command line: layout.chunk: cannot take effect with layout.attention=sdpa. Set layout.attention=chunked"
         " or leave it out."),
        (GPT, ["model.family=t5"], "r.yaml: model.d_ff: missing. Give a whole number ≥ 1. (model.family=t5 on the command line)"),
        (GPT.replace("kind: text", "kind: pairs, source: de, target: en"), ["data.kind=text"],
         "r.yaml: data.source: expected one of path, stdlib, got 'de'. (data.kind=text on the command line)"),
        (GPT + "layout: {shard: 2}\n", ["layout.shard_optimizer=true"], "command line: layout.shard_optimizer: cannot be combined with"
         " layout.shard=2: sharding splits the optimizer's state already. Set layout.shard_optimizer=false. (layout.shard=2 in r.yaml)"),
    ],
)  # fmt: skip
def test_a_conflict_shows_both_places(write, base, overrides, line):
    assert problems(write(base), overrides) == [line]


def test_one_cause_has_one_note(write):
    """Also where one key is unknown to the new kind, and another takes no effect with it."""
    notes: list[str] = []
    path = write(GPT.replace("kind: text", "kind: text, valid_fraction: 0.2"))
    load(path, ["data.kind=synthetic", "task.name=copy", "model.family=seq2seq", "model.d_ff=64"], notes=notes)
    assert notes == [
        f"{path}: data.valid_fraction=0.2, tokenizer={{kind: 'bpe', vocab_size: 1000}} left out: no effect with data.kind=synthetic on the command line"
    ]
