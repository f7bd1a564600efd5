"""Published sizes in a recipe: what they fill, and what wins over them."""

from __future__ import annotations

import sys
from pathlib import Path

from gradus.recipe import load

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import BERT, GPT, problems


def test_preset_fills_what_is_not_said(write):
    r = load(write(BERT))
    assert (r.model.n_layers, r.model.vocab_size, r.model.dropout, r.model.head) == (12, 28996, 0.2, "classification")
    r = load(
        write(GPT.replace("family: gpt, n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64", "preset: llama3.1-8b, n_layers: 2, rope_scaling: null"))
    )
    assert (r.model.n_layers, r.model.n_kv_heads, r.model.d_ff, r.model.rope_scaling) == (2, 8, 14336, None)


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
