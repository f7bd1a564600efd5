"""`gradus new` and one's own data: every kind makes a recipe that trains; classes come from the data."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.data.readers import read_rows
from gradus.errors import UserError
from gradus.models.weights import LoadReport
from gradus.recipe.schema import BertConfig, GPTConfig, ViTConfig
from gradus.tasks import open_task
from gradus.train import inspect_data, resolve
from gradus.train.new import look
from gradus.train.run import weights_line
from gradus.train.session import open_session

pytestmark = pytest.mark.usefixtures("no_plan")
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16}
QUICK = ["train.steps=2", "schedule.warmup_steps=1", "evaluate.every=2", "evaluate.max_new=3"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(path, rows, header=("id", "review", "sentiment")):
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def reviews(n=60, classes=("bad", "good", "fair")):
    return [(i, f"film {i % 7} was {classes[i % len(classes)]} !", classes[i % len(classes)]) for i in range(n)]


def pictures(folder, classes=("ant", "bee", "cat"), n=12, size=8):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def english(n=40):
    return [f"the {('red', 'blue', 'green')[i % 3]} house number {i}" for i in range(n)]


def make(kind, tmp_path):
    """(what to pass to --data, the task, the model's family)."""
    match kind:
        case "csv" | "tsv":
            return [table(tmp_path / f"reviews.{kind}", reviews())], "classification", "bert"
        case "jsonl":
            lines = (json.dumps({"body": text, "stars": i % 2, "when": f"day {i}"}) for i, text, _ in reviews())
            (tmp_path / "reviews.jsonl").write_text("\n".join(lines))
            return [tmp_path / "reviews.jsonl"], "classification", "bert"
        case "parquet":
            datasets = pytest.importorskip("datasets")
            features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
            columns = {"text": [text for _, text, _ in reviews()], "label": [i % 2 for i in range(60)]}
            datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(
                str(tmp_path / "reviews.parquet")
            )
            return [tmp_path / "reviews.parquet"], "classification", "bert"
        case "splits":
            (tmp_path / "reviews").mkdir()
            for split in ("train", "valid", "test"):
                table(tmp_path / "reviews" / f"{split}.csv", reviews(30))
            return [tmp_path / "reviews"], "classification", "bert"
        case "text":
            (tmp_path / "book.txt").write_text("\n".join(english(60)))
            return [tmp_path / "book.txt"], "causal_lm", "gpt"
        case "images":
            return [pictures(tmp_path / "pictures")], "classification", "vit"
        case "pair":
            for language in ("en", "de"):
                (tmp_path / f"short.{language}").write_text("\n".join(english()) + "\n")
            return [tmp_path / "short.en", tmp_path / "short.de"], "translation", "seq2seq"


KINDS = [
    "csv",
    "jsonl",
    "parquet",
    "text",
    "images",
    "pair",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tsv", "splits")),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_becomes_a_recipe_that_shows_and_trains(tmp_path, capsys, kind):
    paths, task, family = make(kind, tmp_path)
    assert main(["new", "mine.yaml", "--data", *(str(p.relative_to(tmp_path)) for p in paths)]) == 0
    told, written = capsys.readouterr().out, (tmp_path / "mine.yaml").read_text()
    assert "found" in told and "splits" in told and "two CPU cores" in told and "gradus check mine.yaml" in told
    assert "held out" in told or kind == "splits"
    sections = yaml.safe_load(written)
    assert sections["task"]["name"] == task and sections["model"]["family"] == family
    comments = [line for line in written.splitlines() if line.startswith("# ")]
    assert len(comments) >= len(sections) and max(map(len, comments)) < 120
    assert main(["show", "mine.yaml"]) == 0 and f"family: {family}" in capsys.readouterr().out
    assert (
        main(
            [
                "train",
                "mine.yaml",
                *[q for q in QUICK if "max_new" not in q or task in ("causal_lm", "translation")],
                "log.dir=run",
            ]
        )
        == 0
    )
    assert (tmp_path / "run" / "summary.json").is_file()
    if task == "classification":
        classes = recipes.load("run").task.classes
        assert all(f" {name} " in told for name in classes) and recipes.load("run").model.n_classes == len(classes)
        assert models.config_of("run").classes == tuple(classes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "text", "images", "pair"])
def test_every_kind_of_data_becomes_a_recipe_that_checks(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("gradus.proof.check.WAIT", 1.0)  # whether this machine loads data fast enough is no matter of the recipe
    paths, _, _ = make(kind, tmp_path)
    assert main(["new", "mine.yaml", "--data", *map(str, paths)]) == 0
    assert main(["check", "mine.yaml"]) == 0


def test_columns_are_chosen_where_one_is_possible_and_can_be_named(tmp_path, capsys):
    rows = [(i, f"the title {i}", f"a much longer text about film {i}", i % 2, i % 3) for i in range(60)]
    path = str(table(tmp_path / "r.csv", rows, ("id", "head", "words", "odd", "kind")))
    assert main(["new", "a.yaml", "--data", path]) == 2
    assert "which column is the text? 'head' and 'words' hold text. Name one" in capsys.readouterr().err
    assert main(["new", "a.yaml", "--data", path, "--text", "words"]) == 2
    assert "which column is the label, 'odd' (2 values) or 'kind' (3 values)?" in capsys.readouterr().err
    assert main(["new", "b.yaml", "--data", path, "--text", "head", "--label", "kind"]) == 0
    assert "classes    3: 0 20, 1 20, 2 20" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "b.yaml").read_text())["data"] | {"path": ""} == {
        "kind": "labelled",
        "path": "",
        "text": "head",
        "label": "kind",
    }
    assert main(["new", "c.yaml", "--data", path, "--label", "kinds"]) == 2
    assert "--label kinds: " in (err := capsys.readouterr().err) and "Did you mean kind?" in err
    one = table(tmp_path / "one.csv", [(i, text, label) for i, text, label in reviews()], ("id", "words", "kind"))
    said = look([str(one)]).lines
    assert "column 'words': the only one that holds text" in said[1] and said[2].startswith("label      column 'kind': the only one")


SCORE = [(f"film {i} is good", i / 7) for i in range(60)]


@pytest.mark.parametrize(
    "header, rows, options, words",
    [
        ("id,question1,question2,is_duplicate", [(i, f"what is {i}?", f"where is {i}?", i % 2) for i in range(60)], [],
         "'question1' and 'question2' hold text. Name one, such as --text question1"),
        ("en,de", [(f"the house {i}", f"das Haus {i}") for i in range(60)], [], "two files, NAME.en and NAME.de"),
        ("text,text2,label", [(f"film {i} is", f"film {i} was", i % 2) for i in range(60)], [], "'text' and 'text2' hold text"),
        ("review,score", SCORE, [], "column 'score' holds 60 different numbers, such as "),
        ("review,score", SCORE, [], "--no-label"),
        ("review,points", SCORE, [], "It is a score, and only classes can be learned"),
        ("review,label", SCORE, ["--label", "label"], "It is a score, and only classes can be learned"),
        ("review,points", [(text, i * 37 % 50) for i, (text, _) in enumerate(SCORE)], [],
         "holds 50 different numbers, such as 37. Is it a score? Only classes can be learned. If each number is a class: --label points"),
        ("text,intent", [(text, f"intent {i % 25}") for i, (text, _) in enumerate(SCORE)], [], "If each is a class: --label intent"),
        ("text,category,rating", [(text, "ab"[i % 2], i % 3) for i, (text, _) in enumerate(SCORE)], [],
         "which column is the label, 'category' (2 values) or 'rating' (3 values)?"),
        ("film 1 was bad !,bad", [r[1:] for r in reviews()], [], "the first row (film 1 was bad !, bad) looks like data"),
        ("0,film 1 was bad !", [r[:2] for r in reviews()], [], "If these are the names: --text COLUMN"),
        ("a film that was very good", [(f"a film that was {i}",) for i in range(60)], [], "Put a row of names above it"),
        ("text,text,label", [("a b", "c d", i % 2) for i in range(60)], [], "names the column 'text' twice"),
        ("text,label", [(text, "good") for text, _ in SCORE], [], "every sample is of one class (good)"),
        ("text,label", [r[1:] for r in reviews()], ["--text", "label", "--label", "label"], "one column cannot be both"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_or_no_class_is_asked_about(tmp_path, capsys, header, rows, options, words):
    table(tmp_path / "r.csv", rows, header.split(","))
    assert main(["new", "x.yaml", "--data", "r.csv", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert not (tmp_path / "x.yaml").exists()


def test_what_was_asked_about_can_be_answered(tmp_path):
    table(tmp_path / "r.csv", SCORE, ("review", "score"))
    assert look(["r.csv"], label=False).data == {"kind": "text", "path": str(tmp_path / "r.csv"), "text": "review"}
    table(tmp_path / "q.csv", [(i, f"what is {i}?", f"where is {i}?", i % 2) for i in range(60)], ("id", "q1", "q2", "same"))
    assert look(["q.csv"], "q2").data | {"path": ""} == {"kind": "labelled", "path": "", "text": "q2", "label": "same"}
    table(tmp_path / "h.csv", [r[1:] for r in reviews()], ("film 1 was bad !", "bad"))
    assert look(["h.csv"], "film 1 was bad !").data["label"] == "bad"
    table(tmp_path / "i.csv", [(i, f"film {i} is") for i in range(60)], ("number", "words"))
    assert look(["i.csv"]).data["kind"] == "text"  # the number of a row is no score
    table(tmp_path / "d.csv", [(f"2024-01-{i % 9 + 1:02}", f"film {i} is") for i in range(60)], ("when", "words"))
    assert look(["d.csv"]).data["kind"] == "text"  # nor are days classes
    (tmp_path / "b.txt").write_text("a b\n" * 50)
    assert main(["new", "x.yaml", "--data", "r.csv", "--label", "score", "--no-label"]) == 2
    with pytest.raises(UserError, match=r"--no-label: b.txt has no columns \(running text\)"):
        look(["b.txt"], label=False)
    with pytest.raises(UserError, match=r"--label : b.txt has no columns"):
        look(["b.txt"], label="")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_csv_may_have_semicolons_or_tabs(tmp_path, delimiter):
    lines = [f'"film {i}{delimiter} and, ""more"""{delimiter}{"ab"[i % 2]}' for i in range(30)]
    (tmp_path / "r.csv").write_text("\n".join([f"text{delimiter}label", *lines]))
    found = look(["r.csv"])
    assert found.data["text"] == "text" and "2 values in the first 30 rows" in found.lines[2]
    assert next(read_rows(tmp_path / "r.csv")) == {"text": f'film 0{delimiter} and, "more"', "label": "a"}


def test_stars_from_1_to_5_are_five_classes(tmp_path, capsys):
    table(tmp_path / "r.csv", [(f"film {i} is good", i % 5 + 1) for i in range(100)], ("review", "stars"))
    assert main(["new", "x.yaml", "--data", "r.csv"]) == 0
    assert "classes    5: 1 20, 2 20, 3 20, 4 20, 5 20" in capsys.readouterr().out
    recipe = open_session(resolve.load("x.yaml", [])[0]).recipe
    assert recipe.train.steps % 10 == 0 and recipe.schedule.warmup_steps == recipe.train.steps // 10
    assert recipe.model.n_classes == 5 and recipe.task.classes == ["1", "2", "3", "4", "5"]


def test_a_full_disk_leaves_nothing_and_the_next_try_works(tmp_path, monkeypatch, capsys):
    table(tmp_path / "r.csv", reviews())

    def full(path, *args, **kwargs):
        if "x.yaml" not in path.name:
            return write_text(path, *args, **kwargs)
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    before, write_text = sorted(tmp_path.iterdir()), Path.write_text
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert main(["new", "x.yaml", "--data", "r.csv"]) == 74
    err = capsys.readouterr().err
    assert "x.yaml: the disk is full" in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert main(["new", "x.yaml", "--data", "r.csv"]) == 0


def test_of_a_wide_or_large_table_few_rows_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_data, "CHARACTERS", 10_000)
    wide = [f"c{i}" for i in range(300)]
    table(tmp_path / "w.csv", [("a film", "ab"[i % 2], *"x" * 300) for i in range(100)], ("text", "label", *wide))
    found = look(["w.csv"])
    assert found.lines[0].endswith("c16, c17, ... (302 in all)")
    assert "2 values in the first 17 rows" in found.lines[2], "2 characters for each cell with its delimiter"


def test_what_lies_in_a_folder_is_found(tmp_path):
    for name in ("book", "both"):
        (tmp_path / name).mkdir()
    (tmp_path / "book" / "any.txt").write_text("a\n" * 50)
    assert look(["book"]).data == {"kind": "text", "path": str(tmp_path / "book" / "any.txt")}
    for language in ("en", "fr"):
        with gzip.open(tmp_path / "both" / f"train.{language}.gz", "wt") as file:
            file.write("a\n")
    assert look(["both"]).data == {"kind": "pairs", "path": str(tmp_path / "both"), "source": "en", "target": "fr"}
    rows = [(f"text {i}", "same", i % 3) for i in range(30)]  # sorted by class, so that the first rows have one
    assert look([str(table(tmp_path / "sorted.csv", rows, ("text", "label", "rating")))]).data["label"] == "label"


def test_what_stands_in_the_way_is_one_line_and_nothing_is_written(tmp_path, capsys):
    table(tmp_path / "r.csv", reviews())
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "r.xlsx").write_bytes(b"PK")
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "a.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    models.save(models.build(GPTConfig(vocab_size=300, **TINY)), tmp_path / "gpt")
    models.save(models.build(BertConfig(vocab_size=300, seq_len=32, **TINY)), tmp_path / "exported")
    (tmp_path / "exported" / "model.safetensors").rename(tmp_path / "exported" / "model.onnx")
    (tmp_path / "exported" / "checksums.json").unlink(missing_ok=True)
    pictures(tmp_path / "one", ("ant",))
    cases = {
        ("there.yaml", "r.csv"): "there is such a file already",
        ("x.json", "r.csv"): "Name it x.yaml",
        ("x.yaml", "r.xlsx"): "unsupported file type (.xlsx)",
        ("x.yaml", "r.cvs"): "Did you mean r.csv?",
        ("x.yaml", "loose"): "Put them into a folder per class",
        ("x.yaml", "empty"): "no file for the train split",
        ("x.yaml", "r.csv", "r.xlsx"): "NAME.en and NAME.de",
        ("x.yaml", "r.csv", "--init", ""): "--init=: an empty path",
        ("x.yaml", "r.csv", "--init", "gpt"): "a gpt, and texts with a label are for bert",
        ("x.yaml", "r.csv", "--init", "exported"): "exported: no weights: neither model.safetensors",
        ("x\ny.yaml", "r.csv"): "a line break",
        ("x.yaml", "one"): "every sample is of one class (ant), so there is nothing to learn. Put images",
    }
    for (file, *rest), words in cases.items():
        assert main(["new", file, "--data", *rest]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, err
    assert (tmp_path / "there.yaml").read_text() == "mine" and not (tmp_path / "x.yaml").exists()


def test_weights_to_fine_tune_bring_their_tokenizer_and_a_small_rate(tmp_path, capsys, shared_data):
    folder = tmp_path / "bert"
    models.save(models.build(BertConfig(vocab_size=30_522, seq_len=64, head="masked_lm", **TINY)), folder)
    shutil.copy(shared_data / "tokenizers/bert-base-uncased/vocab.txt", folder)
    table(tmp_path / "r.csv", reviews())
    assert main(["new", "tune.yaml", "--data", "r.csv", "--init", "bert"]) == 0
    sections = yaml.safe_load((tmp_path / "tune.yaml").read_text())
    assert (
        sections["model"] == {"init": "bert"}
        and sections["tokenizer"] == {"kind": "file"}
        and sections["optimizer"]["lr"] == 3e-4
    )
    capsys.readouterr()
    assert main(["train", "tune.yaml", *QUICK[:3], "log.dir=run"]) == 0
    told = capsys.readouterr().out
    assert "weights from " in told and "classifier.weight, classifier.bias" in told
    assert models.config_of("run").classes == ("bad", "fair", "good")


# ---------------------------------------------------------------- how many classes, and how they are called


def recipe_of(tmp_path, path, **more):
    model = {"family": "bert", **TINY, "seq_len": 32}
    sections = {
        "task": {"name": "classification"}, "model": model, "data": {"kind": "labelled", "path": str(path)},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 1},
    }  # fmt: skip
    for section, keys in more.items():
        sections[section] = (
            keys
            if keys is None or (section == "model" and {"preset", "init"} & set(keys))
            else sections[section] | keys
        )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(sections))
    return resolve.load(str(tmp_path / "r.yaml"), [])[0]


def test_a_preset_has_as_many_outputs_as_the_data_has_classes(tmp_path):
    path = pictures(tmp_path / "p")
    recipe = recipe_of(
        tmp_path, path, model={"preset": "vit-ti16"}, data={"kind": "images", "path": str(path)}, tokenizer=None
    )
    assert recipe.model.n_classes is None
    assert open_session(recipe).recipe.model.n_classes == 3


@pytest.mark.parametrize("stated", [2, 4, 1000])
@pytest.mark.parametrize("kind", ["names", "numbers", "images"])
def test_another_number_of_classes_than_the_datas_is_an_error_that_shows_both(tmp_path, kind, stated):
    if kind == "images":
        path = pictures(tmp_path / "p")
        model = {"family": "vit", **TINY, "image_size": 8, "patch_size": 4, "n_classes": stated}
        recipe = recipe_of(
            tmp_path, path, model={"preset": None, **model}, data={"kind": "images", "path": str(path)}, tokenizer=None
        )
    else:
        classes = ("bad", "good", "fair") if kind == "names" else (0, 1, 2)
        path = table(tmp_path / "train.csv", reviews(60, classes), ("id", "text", "label"))
        recipe = recipe_of(tmp_path, path, model={"n_classes": stated})
    with pytest.raises(UserError) as e:
        open_session(recipe)
    if kind == "numbers" and stated == 2:  # then a row is named
        assert "train.csv: row 3: label 2 is not one of the 2 classes (0, 1)" in str(e.value)
    else:
        assert f"model.n_classes={stated}: the data has 3 classes" in str(e.value)


def test_names_of_the_recipe_order_the_classes_and_may_name_what_has_no_rows(tmp_path):
    path = table(tmp_path / "train.csv", reviews(), ("id", "text", "label"))
    task = open_session(recipe_of(tmp_path, path, task={"classes": ["good", "fair", "bad", "none"]})).task
    assert task.classes == ["good", "fair", "bad", "none"] and task.recipe.model.n_classes == 4
    assert [task.classes[i] for i in task.splits["train"].dataset.labels[:3]] == ["bad", "good", "fair"]
    with pytest.raises(UserError, match=r"task\.classes=bad, bad, x: 3 names; the data has 3 classes: .* Name each once"):
        open_session(recipe_of(tmp_path, path, task={"classes": ["bad", "bad", "x"]}))


def test_one_class_is_nothing_to_learn(tmp_path):
    path = table(tmp_path / "train.csv", reviews(60, ("good",)), ("id", "text", "label"))
    with pytest.raises(UserError, match=r"train\.csv: every sample is of one class \(good\), so there is nothing to learn\. Name another label"):
        open_session(recipe_of(tmp_path, path))


def test_class_folders_have_the_order_of_the_recipes_names(tmp_path):
    path = pictures(tmp_path / "p")
    model = {"preset": None, "family": "vit", **TINY, "image_size": 8, "patch_size": 4}
    data = {"kind": "images", "path": str(path)}
    recipe = recipe_of(
        tmp_path,
        path,
        model=model,
        data=data,
        tokenizer=None,
        task={"name": "classification", "classes": ["cat", "bee", "ant"]},
    )
    task = open_session(recipe).task
    assert task.classes == ["cat", "bee", "ant"] and task.splits["train"].labels[0] == 2  # the first folder is ant's


def test_a_tenth_of_each_class_is_held_out_and_no_row_is_in_both(tmp_path):
    path = table(tmp_path / "mine.csv", reviews(), ("id", "text", "label"))
    splits = open_task(recipe_of(tmp_path, path)).splits
    assert np.bincount(splits["valid"].labels).tolist() == [2, 2, 2] and np.bincount(
        splits["train"].labels
    ).tolist() == [18, 18, 18]
    assert sorted([*splits["train"].indices, *splits["valid"].indices]) == list(range(60))


def test_every_tenth_pair_is_held_out_with_its_text(tmp_path):
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").write_text("".join(f"{language} {i}\n" for i in range(1, 31)))
    model = {"preset": None, "family": "seq2seq", **TINY, "seq_len": 32}
    data = {"kind": "pairs", "path": str(tmp_path), "source": "en", "target": "de"}
    task = open_task(recipe_of(tmp_path, tmp_path, model=model, data=data, task={"name": "translation"}))
    assert [list(side) for side in task.corpora["valid"]] == [[f"{x} {i}" for i in (10, 20, 30)] for x in ("en", "de")]
    assert len(task.splits["train"]) == 27 and "en 10" not in list(task.corpora["train"][0])
    assert task.tokenizer.decode(task.splits["valid"][1]["source"].tolist()) == "en 20"


def test_a_head_of_another_size_starts_afresh_and_it_is_said(tmp_path):
    for classes in (2, 3):
        config = BertConfig(vocab_size=300, seq_len=32, head="classification", n_classes=classes, **TINY)
        models.save(models.build(config.named(["up", "down", "still"][:classes])), tmp_path / f"w{classes}")
    path = table(tmp_path / "train.csv", reviews(), ("id", "text", "label"))
    session = open_session(recipe_of(tmp_path, path, model={"init": str(tmp_path / "w2")}))
    assert session.recipe.model.n_classes == 3
    model = session.build()
    assert model.classifier.weight.shape[0] == 3 and model.config.classes == ("bad", "fair", "good")
    said = weights_line(session.recipe, model.load_report)
    assert (
        "new: classifier.weight, classifier.bias" in said
        and "a new head for 3 classes: that of the weights has 2" in said
    )
    session = open_session(recipe_of(tmp_path, path, model={"init": str(tmp_path / "w3")}))
    assert "its head was trained for up, down, still, and learns bad, fair, good" in weights_line(
        session.recipe, LoadReport(stored=models.config_of(tmp_path / "w3"))
    )


# ---------------------------------------------------------------- relative paths


def test_a_relative_path_is_looked_for_here_then_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    table(tmp_path / "a" / "train.csv", reviews(), ("id", "text", "label"))
    recipe_of(tmp_path, "train.csv")
    (tmp_path / "r.yaml").rename(tmp_path / "a" / "r.yaml")
    monkeypatch.chdir(tmp_path / "b")
    beside = resolve.load("../a/r.yaml", [])[0]
    assert beside.data.path == str(
        tmp_path / "a" / "train.csv"
    )  # what the resolved recipe says, wherever the run goes on
    shutil.copy(tmp_path / "a" / "train.csv", tmp_path / "b")
    assert resolve.load("../a/r.yaml", [])[0].data.path == str(tmp_path / "b" / "train.csv")
    missing = resolve.load("../a/r.yaml", ["data.path=trian.csv"])[0]
    with pytest.raises(UserError) as e:
        open_session(missing)
    assert f"looked for {tmp_path / 'b' / 'trian.csv'} and {tmp_path / 'a' / 'trian.csv'}" in str(
        e.value
    ) and "Did you mean train.csv?" in str(e.value)
    images = recipe_of(
        tmp_path, "x", model={"preset": "vit-ti16"}, data={"kind": "images", "path": "no-such"}, tokenizer=None
    )
    with pytest.raises(UserError, match=f"looked for {tmp_path / 'b' / 'no-such'} and {tmp_path / 'no-such'}"):
        open_session(images)


def test_a_run_goes_on_from_another_folder(tmp_path, monkeypatch, capsys):
    table(tmp_path / "train.csv", reviews(), ("id", "text", "label"))
    recipe_of(tmp_path, "train.csv", train={"steps": 2, "checkpoint_every": 1})
    assert main(["train", "r.yaml", "log.dir=run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    capsys.readouterr()
    assert main(["train", str(tmp_path / "run"), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().out


def test_a_pair_in_two_folders_is_told_where_to_lie(tmp_path):
    (tmp_path / "x").mkdir()
    for file in ("short.en", "x/short.de"):
        (tmp_path / file).write_text("a\n")
    with pytest.raises(UserError, match=r"must lie in one folder as NAME\.en and NAME\.de"):
        look(["short.en", "x/short.de"])


def test_names_survive_what_a_configuration_goes_through():
    config = ViTConfig(image_size=8, patch_size=4, n_classes=2, **TINY).named(["a", "b"])
    assert config.model_copy(update={"n_classes": 3}).classes == () and config.model_copy().classes == ("a", "b")
