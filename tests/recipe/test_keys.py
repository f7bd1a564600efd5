"""`gradus keys`: nothing that a recipe takes is without a meaning, and what is misnamed is found."""

from __future__ import annotations

import inspect

import pytest

from gradus.cli import main
from gradus.errors import UserError
from gradus.recipe import fields, keys, schema


def test_every_key_of_every_section_and_kind_has_a_meaning():
    sections = [c for _, c in inspect.getmembers(schema, inspect.isclass) if issubclass(c, schema.Section)]
    kinds = {(c, fields.discriminator(s)) for s in filter(fields.is_section, schema.Recipe.model_fields) for c in fields.classes_of(s).values()}
    silent = [f"{c.__name__}.{key}" for c in sections for key in c.model_fields if (c, key) not in kinds and not keys.meaning(c, key)]
    assert len(sections) > 25 and silent == []


def test_every_key_is_listed_with_type_default_and_meaning(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # no terminal
    lines = keys.keys()
    named = {line.split()[0] for line in lines if line and line[0] not in "# "}
    expected = {
        f"{section}.{key}"
        for section in filter(fields.is_section, schema.Recipe.model_fields)
        for c in fields.classes_of(section).values()
        for key in c.model_fields
    }
    assert expected <= named and {"layout.local_sgd.every", "model.rope_scaling.factor", "name"} <= named
    assert "layout.precision  fp32  one of fp32, bf16, fp16, fp8, pure_bf16, pure_fp16: pure_: of weights too" in keys.keys("layout.precision")
    assert all(len(line) <= 100 for line in lines)
    for section in filter(fields.discriminator, filter(fields.is_section, schema.Recipe.model_fields)):
        (_, _, shared), *own = keys.groups(section)
        assert not {name for name, *_ in shared} & {entry[0] for _, _, entries in own for entry in entries if entry in shared}, "what all kinds have is listed once"
    text, entry = " ".join(" ".join(lines).split()), next(e for e in keys.entries("model", schema.LlamaConfig) if e[0] == "model.rope_scaling")
    assert entry[2] in text and len(entry[2]) > 100, "wrapped between words"


def test_a_kind_has_its_own_keys_and_its_own_defaults():
    def defaults(asked: str) -> dict[str, str]:
        return {line.split()[0]: line.split()[1] for line in keys.keys(asked) if line and line[0] not in "# "}

    assert defaults("model.gpt")["model.seq_len"] == "1024" and defaults("model.llama")["model.seq_len"] == "4096"
    assert "model.patch_size" in defaults("model.vit") and "model.patch_size" not in defaults("model.gpt")
    assert defaults("model.bert")["model.dropout"] == "0.1" and defaults("model.gpt")["model.d_model"] == "required"
    assert set(defaults("schedule.constant")) == {"schedule.name", "schedule.warmup_steps", "schedule.warmup_ratio"}
    assert [line for line in keys.keys("task") if line.startswith("# task.name=")][1].startswith("# task.name=translation: Source sequence")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("layot", "layout"), ("patch", "model.patch_size"), ("learning_rate", "optimizer.lr"), ("model.gtp", "model.gpt"),
     ("layout.precison", "layout.precision"), ("warmup", "schedule.warmup_steps")],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest(asked, meant):
    with pytest.raises(UserError, match=rf"^gradus keys {asked}: no such section or key. Did you mean {meant}\?$"):
        keys.keys(asked)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("exportt", "export"), ("trian", "train"), ("eval", "evaluate"), ("copy-task", "gradus train copy-task")],
)  # fmt: skip
def test_a_verb_under_another_name_is_found(word, meant, capsys):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error == f"error: gradus {word}: no such command. Did you mean {meant}? See gradus --help\n"


def test_a_choice_gets_the_nearest_one(capsys):
    assert main(["generate", "x", "--precision", "bf17"]) == 2
    assert capsys.readouterr().err == "error: gradus generate: --precision=bf17: not one of fp32, bf16, fp16, int8, int4. Did you mean bf16?\n"
