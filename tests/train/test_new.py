"""`gradus new` and one's own data: every kind makes a recipe that trains; classes come from the data."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from new_parts import TINY, pictures, recipe_of, reviews, table

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import UserError
from gradus.recipe.schema import BertConfig, GPTConfig, ViTConfig
from gradus.tasks import open_task
from gradus.train import resolve
from gradus.train.session import open_session

pytestmark = pytest.mark.usefixtures("no_plan", "here")
QUICK = ["train.steps=2", "schedule.warmup_steps=1", "evaluate.every=2", "evaluate.max_new=3"]


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


def test_stars_from_1_to_5_are_five_classes(tmp_path, capsys):
    table(tmp_path / "r.csv", [(f"film {i} is good", i % 5 + 1) for i in range(100)], ("review", "stars"))
    assert main(["new", "x.yaml", "--data", "r.csv"]) == 0
    assert "classes    5: 1 20, 2 20, 3 20, 4 20, 5 20" in capsys.readouterr().out
    recipe = open_session(resolve.load("x.yaml", [])[0]).recipe
    assert recipe.train.steps % 10 == 0 and recipe.schedule.warmup(recipe.train.steps) == recipe.train.steps // 10
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


def test_pictures_of_several_sizes_one_of_them_cut_short(tmp_path, capsys):
    """Said in the same words by every verb, before any step."""
    from PIL import Image

    path = pictures(tmp_path / "p")
    with Image.open(path / "ant" / "0.png") as image:
        image.resize((30, 20)).save(path / "bee" / "last.jpg")
    whole = (path / "bee" / "last.jpg").read_bytes()
    assert main(["new", "r.yaml", "--data", "p"]) == 0
    assert "3 channels, several sizes: scaled and cut to one" in capsys.readouterr().out
    (path / "bee" / "last.jpg").write_bytes(whole[:-100])
    for words in (["new", "again.yaml", "--data", "p"], ["train", "r.yaml"], ["check", "r.yaml"], ["plan", "r.yaml"]):
        code, said = main(words), " ".join("".join(capsys.readouterr()).split())  # `check` wraps its lines
        assert code and f"{path}/bee/last.jpg: not a readable image (image file is truncated" in said, words
        assert "Traceback" not in said and "step 1" not in said


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


def test_names_survive_what_a_configuration_goes_through():
    config = ViTConfig(image_size=8, patch_size=4, n_classes=2, **TINY).named(["a", "b"])
    assert config.model_copy(update={"n_classes": 3}).classes == () and config.model_copy().classes == ("a", "b")


def test_without_its_labels_a_table_is_text_to_continue(tmp_path):
    data = str(table(tmp_path / "reviews.csv", reviews()))
    assert main(["new", "a.yaml", "--data", data, "--no-label"]) == 0 and main(["new", "b.yaml", "--data", data]) == 0
    assert [recipes.load(str(tmp_path / f"{name}.yaml")).task.name for name in "ab"] == ["causal_lm", "classification"]


def test_a_length_holds_most_texts_whole_and_a_batch_divides(tmp_path, capsys):
    """Nineteen texts of twenty have 200 words, one has 900; a word that stands alone is a token of a trained BPE."""
    words = ["river", "house", "green", "quickly", "slowly", "film", "plot", "actor", "story", "scene"]
    rows = [(i, " ".join(words[(i + j) % 10] for j in range(900 if i % 20 == 0 else 200)), "ab"[i % 2]) for i in range(47)]
    path = table(tmp_path / "long.csv", rows, ("id", "text", "label"))
    assert main(["new", str(tmp_path / "r.yaml"), "--data", str(path), "--text", "text"]) == 0
    recipe, out = yaml.safe_load((tmp_path / "r.yaml").read_text()), capsys.readouterr().out
    length = recipe["model"]["seq_len"]
    assert length % 8 == 0 and 200 < length < 900 and recipe["batch"]["samples"] == 24
    assert f"3 of 47 texts are longer than {length - 2} tokens and truncated" in out
    rows = [(i, " ".join(words[(i + j) % 10] for j in range(700)), "ab"[i % 2]) for i in range(20)]
    table(path, rows, ("id", "text", "label"))
    assert main(["new", str(tmp_path / "s.yaml"), "--data", str(path), "--text", "text"]) == 0
    assert 700 < yaml.safe_load((tmp_path / "s.yaml").read_text())["model"]["seq_len"] < 720


def test_a_class_of_two_is_trained_on_and_held_out(tmp_path):
    rows = [(i, f"text {i}", "spam" if i in (5, 77) else "lonely" if i == 9 else "ham") for i in range(200)]
    splits = open_task(recipe_of(tmp_path, table(tmp_path / "mine.csv", rows, ("id", "text", "label")))).splits
    assert splits["train"].classes == ["ham", "lonely", "spam"]
    assert [np.bincount(splits[s].labels, minlength=3).tolist() for s in ("train", "valid")] == [[178, 1, 1], [19, 0, 1]]
