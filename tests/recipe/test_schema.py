"""What the schema types, and what it says of values that it does not take."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.recipe import Recipe, load, resolve, schema

sys.path.insert(0, str(Path(__file__).parent))
from recipe_texts import COPY, problems


def test_a_file_is_typed_by_the_schema(write):
    r = load(write(COPY))
    assert isinstance(r, Recipe) and r.name == "r"
    assert r.optimizer == schema.Adam(lr=1e-4, betas=(0.9, 0.98), eps=1e-9)  # 1e-4 without a dot is a number
    assert r.train.epochs == 2.0 and r.evaluate == schema.Evaluate() and r.tokenizer is None


def test_empty_sections_and_nulls_are_defaults(write):
    r = load(write(COPY + "evaluate:\nlayout: {micro_batch: null}\ntokenizer:\n"))
    assert r.evaluate == schema.Evaluate() and r.layout.micro_batch is None and r.tokenizer is None


def test_overrides_are_typed_by_the_schema(write):
    r = load(write(COPY), ["optimizer.lr=3e-4", "optimizer.betas=[0.8, 0.9]", "batch.samples=16", "layout.micro_batch=4", "evaluate.at_start=true"])
    assert r.optimizer.lr == 3e-4 and r.optimizer.betas == (0.8, 0.9) and r.layout.micro_batch == 4 and r.evaluate.at_start is True
    assert load(write(COPY), ["log={every: 5, tensorboard: true}"]).log == schema.Log(every=5, tensorboard=True)
    assert load(write(COPY), ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize("junk", ["[a]", "{a: b}", "3", "null"])
def test_a_kind_that_is_no_word(write, junk):
    lines = problems(write(COPY.replace("name: adam", f"name: {junk}")))
    assert len(lines) == 1 and re.match(r"r\.yaml: optimizer\.name: (missing|no such optimizer)", lines[0])
    lines = problems(write(COPY.replace("family: seq2seq", f"preset: {junk}")))
    assert re.match(r"r\.yaml: model\.(preset: 3: unknown preset|family: missing)", lines[0])
    lines = problems(write(COPY), optimizer={"name": ["sgd"]})
    assert len(lines) == 1 and lines[0].startswith("argument: optimizer.name: no such optimizer: ['sgd'].")


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


@pytest.mark.parametrize(("multiplier", "d_ff"), [(1e-300, "0"), (1e12, "2,800,000,000,000,000")])
def test_a_width_that_follows_from_a_factor_is_one_that_could_be_meant(multiplier, d_ff):
    with pytest.raises(ValueError, match=f"d_ff={d_ff} follows from ffn_multiplier"):
        schema.LlamaConfig(n_layers=1, d_model=1050, n_heads=1, ffn_multiplier=multiplier)
