"""Recipes as text: files, words of the command line, YAML and its mistakes, and back."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.recipe import Recipe, dump, load, resolve, schema

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import BERT, COPY, GPT, problems


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
