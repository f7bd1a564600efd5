"""`gradus predict` and `evaluate`: transformers' numbers on the same folders, the run's own numbers on its data."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from gradus import models, tasks
from gradus import recipe as recipes
from gradus.cli import main, parse
from gradus.data import tokenizer_files, tokenizers
from gradus.data.tokenizers import ByteTokenizer
from gradus.errors import UserError
from gradus.infer import find, grid
from gradus.infer.predict import evaluate, open_evaluation, predict, prepared, read_images, rows_of, texts_of
from gradus.infer.sidecar import image_processor
from gradus.models import loading
from gradus.recipe.schema import BertConfig, GPTConfig, T5Config, ViTConfig
from gradus.train.run import train
from gradus.train.session import open_session

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "movie", "very", "!", "##s"]
TEXTS = ["a very good film !", "bad", "a bad movie"]
TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32}
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
}


def run(*words, capsys=None) -> list[str]:
    return list(predict(parse(["predict", *map(str, words)])))


def fails(*words, capsys) -> str:
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


def shake(model, size: float = 0.3):
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=size)
    return model.eval()


def theirs(kind: str, folder, **config):
    """A BERT that transformers made and wrote, with a vocabulary beside it."""
    transformers = pytest.importorskip("transformers")
    model = shake(getattr(transformers, kind)(transformers.BertConfig(**SIZES, **config)))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return model


def rows(text: str) -> torch.Tensor:
    """By hand: [CLS] words [SEP]."""
    return torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])


# ---------------------------------------------------------------- folders in the Hugging Face layout


def test_labels_and_probabilities_of_a_hugging_face_folder(tmp_path):
    model = theirs(
        "BertForSequenceClassification", tmp_path, id2label={0: "sad", 1: "neutral", 2: "happy"}, label2id={"sad": 0, "neutral": 1, "happy": 2}
    )
    lines = run(tmp_path, *TEXTS, "--to", tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == len(TEXTS) + 1
    for text, line, record in zip(TEXTS, lines, records):
        with torch.no_grad():
            p = model(rows(text)).logits.softmax(-1)[0]
        order = p.argsort(descending=True).tolist()
        names = [("sad", "neutral", "happy")[i] for i in order]
        assert [t["label"] for t in record["top"]] == names
        assert [t["probability"] for t in record["top"]] == pytest.approx([float(p[i]) for i in order], abs=1e-5)
        assert (record["input"], record["label"]) == (text, names[0])
        assert line.startswith(f"{names[0]} {float(p[order[0]]):.4f}, {names[1]}") and text in line
    assert all(len(line.split(",")) == 1 for line in run(tmp_path, *TEXTS, "--top", "1"))


SIGMOID, IDENTITY = (f"torch.nn.modules.{name}" for name in ("activation.Sigmoid", "linear.Identity"))


@pytest.mark.parametrize(
    ("about", "n", "made"),
    [
        ({"problem_type": "regression"}, 1, None),
        ({}, 1, None),
        ({"sbert_ce_default_activation_function": IDENTITY}, 1, None),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, 1, torch.sigmoid),
        ({"problem_type": "multi_label_classification"}, 3, torch.sigmoid),
        ({"problem_type": "regression"}, 3, None),
        ({"problem_type": "single_label_classification", "classifier_dropout": 0.4}, 3, lambda x: x.softmax(-1)),
    ],
)
def test_outputs_are_scores_labels_or_classes_as_the_published_files_say(about, n, made, tmp_path):
    names = dict(enumerate(("toxic", "rude", "kind")[:n]))
    model = theirs("BertForSequenceClassification", tmp_path, id2label=names, label2id={name: i for i, name in names.items()}, **about)
    with torch.no_grad():
        expected = model(rows(TEXTS[0])).logits[0]
    expected = dict(zip(names.values(), (expected if made is None else made(expected)).tolist()))
    for folder in (tmp_path, tmp_path / "again"):
        line = run(folder, TEXTS[0], "--to", tmp_path / "out.jsonl")[0]
        record = json.loads((tmp_path / "out.jsonl").read_text())
        found = record["scores"] if made is None else {guess["label"]: guess["probability"] for guess in record["top"]}
        assert found == pytest.approx(expected, abs=1e-5) and ("top" in record) == (made is not None)
        assert all(name in line for name in names.values())
        models.save(models.load(tmp_path), tmp_path / "again")
        shutil.copy(tmp_path / "vocab.txt", tmp_path / "again")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "activation_fn=torch.nn.modules.activation.Tanh is not"),
        ({"problem_type": "ranking"}, "problem_type=ranking is not supported"),
        ({"id2label": {"1": "bad", "2": "good"}}, "id2label has the keys 1, 2; they must count from 0"),
    ],
)
def test_what_is_not_known_of_outputs_is_refused(about, said, tmp_path, capsys):
    theirs("BertForSequenceClassification", tmp_path, num_labels=1)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | about))
    assert said in fails("predict", tmp_path, "a film", capsys=capsys)


@pytest.mark.parametrize("order", [("happy", "sad"), ("SAD", "Happy")])
def test_an_evaluation_goes_by_the_names_of_the_head(order, tmp_path, capsys):
    """The same weights with their outputs in another order, under the same names, are as good."""
    table = "".join(json.dumps({"text": f"a {('bad', 'good')[i % 2]} film", "label": ("sad", "happy")[i % 2]}) + "\n" for i in range(40))
    (tmp_path / "t.jsonl").write_text(table)
    model = theirs("BertForSequenceClassification", tmp_path, id2label=dict(enumerate(order)), label2id={order[0]: 0, order[1]: 1})
    said = ["model.preset=null", "model.init=null", "model.family=bert", *(f"model.{k}={v}" for k, v in TINY.items()), "model.n_classes=null"]
    said += ["task.classes=null", f"tokenizer.path={tmp_path}", f"data.path={tmp_path / 't.jsonl'}", f"data.cache={tmp_path / 'cache'}", "layout.device=cpu"]
    found = evaluate("sst2-bert", said, "valid", str(tmp_path))
    truth = {name.lower(): i for i, name in enumerate(order)}
    with torch.no_grad():
        logits = torch.cat([model(rows(f"a {word} film")).logits for word in ("bad", "good")])
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([truth["sad"], truth["happy"]]))
    assert found["valid/loss"] == pytest.approx(float(expected), abs=1e-4)
    assert ("note: classes: the data's happy, sad are the head's" in capsys.readouterr().err) == (order[0] == "SAD")
    (tmp_path / "r.yaml").write_text(f"task: {{name: classification}}\nmodel: {{init: {tmp_path}}}\ndata: {{kind: labelled, path: {tmp_path / 't.jsonl'}, text: text, label: label}}\n"
                                     "optimizer: {name: adamw, lr: 1.0e-3}\nschedule: {name: constant}\nbatch: {samples: 4}\ntrain: {steps: 1}\ntokenizer: {kind: file}\n")  # fmt: skip
    assert evaluate(str(tmp_path / "r.yaml"), [], "valid", str(tmp_path)) == found, "a recipe that starts from the same weights"
    hf = json.loads((tmp_path / "config.json").read_text())
    for names, said_of in ((("good", "bad"), r"the weights' head has the classes good, bad; the data has happy, sad"), (("LABEL_0", "LABEL_1"), "have no names")):
        (tmp_path / "config.json").write_text(json.dumps(hf | {"id2label": dict(enumerate(names))}))
        if names[0] == "good":
            with pytest.raises(UserError, match=said_of):
                evaluate("sst2-bert", said, "valid", str(tmp_path))
        else:
            evaluate("sst2-bert", said, "valid", str(tmp_path))
            assert said_of in capsys.readouterr().err


def test_texts_from_standard_input(tmp_path, monkeypatch):
    theirs("BertForSequenceClassification", tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("a good film\n\nbad\n"))
    assert run(tmp_path) == run(tmp_path, "a good film", "bad")


def test_a_text_longer_than_the_model_is_cut_and_it_is_said(tmp_path, capsys):
    theirs("BertForSequenceClassification", tmp_path)
    long = run(tmp_path, "good " * 50)[0]
    assert "cut to the first 18 of its 50 tokens" in capsys.readouterr().err
    assert long.split("←")[0] == run(tmp_path, "good " * 18)[0].split("←")[0]


def test_files_of_texts(tmp_path, monkeypatch, capsys):
    """A table's rows, and the lines of a text file, are answered as the same texts by themselves."""
    monkeypatch.chdir(tmp_path)
    theirs("BertForSequenceClassification", tmp_path)
    (tmp_path / "a.csv").write_text("label,text\n" + "".join(f'0,"{text}"\n' for text in TEXTS))
    (tmp_path / "a b.jsonl").write_text("".join(json.dumps({"review": text}) + "\n" for text in TEXTS))
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "notes.md").write_text("bad")
    (tmp_path / "bad").mkdir()
    (tmp_path / "good").write_text("a movie")
    texts = run(tmp_path, *TEXTS)
    for file in ("a.csv", "a b.jsonl", "a.txt", tmp_path / "a.csv"):
        assert run(tmp_path, file) == texts
    assert run(tmp_path, "bad", "./a.txt") == [texts[1], *texts]
    assert run(tmp_path, "good")[0].endswith("←  good"), "a word that is the name of a file too"
    for wrong, error in {
        "gone.csv": "gone.csv: no such file. Did you mean a.csv?", "a bd.jsonl": "no such file. Did you mean a b.jsonl?", "./bad": "./bad: no such file.",
        "notes.md": "notes.md: unsupported file type (.md).",
    }.items():  # fmt: skip
        assert f"error: {error}" in fails("predict", tmp_path, "bad", wrong, capsys=capsys).replace("error: a bd.jsonl: ", "error: ")
    for told in ("reviews.cvs", "/reviews"):
        run(tmp_path, told)
        assert capsys.readouterr().err == f"note: read as a text, since there is no such file: {told}\n"
    run(tmp_path, "good and/or bad", "A film.Very good", "bad.")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "column"), [("sst2-bert", "text"), ("wikitext2-bert", "text"), ("multi30k-seq2seq", "source")])
def test_the_column_of_texts_is_the_recipes(tmp_path, recipe, column):
    (tmp_path / "a.csv").write_text("id,words,text\n1,a film,wrong\n")
    source = SimpleNamespace(recipe=recipes.load(recipe, [f"data.{column}=words"], configure=None))
    assert list(texts_of(source, str(tmp_path / "a.csv"))) == ["a film"]


@pytest.mark.parametrize("marker", ["[MASK]", "<mask>"])
def test_masked_words(tmp_path, marker):
    model = theirs("BertForMaskedLM", tmp_path)
    lines = run(tmp_path, f"a {marker} film {marker} !", "--top", "3")[0].splitlines()
    ids = rows("a [MASK] film [MASK] !")
    with torch.no_grad():
        p = model(ids).logits[0].softmax(-1)
    for place, line in zip((2, 4), lines[1:]):
        values, guesses = p[place].topk(3)
        name = lambda i: {"[PAD]": "[PAD]"}.get(WORDS[i], WORDS[i])  # noqa: E731
        assert line.split(": ")[1] == "; ".join(f"{name(i)} {v:.4f}" for i, v in zip(guesses.tolist(), values.tolist()))
    assert run(tmp_path, "a [MASK]", "--top", "100")[0].splitlines()[1].count(";") == len(WORDS) - 1, "all that there are"
    best = [WORDS[i] for i in (int(p[2].argmax()), int(p[4].argmax()))]
    filled = tokenizer_files.load(tmp_path).decode([5, WORDS.index(best[0]), 8, WORDS.index(best[1]), 11])
    assert lines[0] == filled


def picture(path, size: int, seed: int = 0):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def test_images_of_a_hugging_face_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    names = {0: "cat", 1: "dog", 2: "bird"}
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4, id2label=names, label2id={v: k for k, v in names.items()}
    )  # fmt: skip
    model = shake(transformers.ViTForImageClassification(config))
    model.save_pretrained(tmp_path)
    pixels = picture(tmp_path / "a.png", 16)
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        run(tmp_path, tmp_path / "a.png")
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    run(tmp_path, tmp_path / "a.png", "--to", tmp_path / "o.jsonl")
    with torch.no_grad():
        inputs = torch.from_numpy((pixels / 255 - mean) / std).float().permute(2, 0, 1)[None]
        p = model(inputs).logits.softmax(-1)[0]
    record = json.loads((tmp_path / "o.jsonl").read_text())
    assert [t["label"] for t in record["top"]] == [names[i] for i in p.argsort(descending=True).tolist()]
    assert record["probability"] == pytest.approx(float(p.max()), abs=1e-5)
    picture(tmp_path / "large.png", 40, 1)  # another size is scaled
    assert len(run(tmp_path, tmp_path / "large.png", tmp_path / "a.png")) == 2
    with pytest.raises(UserError, match=r"Did you mean a\.png"):
        run(tmp_path, tmp_path / "aa.png")


PROCESSORS = {
    "ViT": {"size": {"height": 16, "width": 16}, "resample": 0}, "DeiT": {"size": {"height": 19, "width": 18}, "crop_size": {"height": 16, "width": 16}},
    "CLIP": {"size": {"shortest_edge": 17}, "resample": 1, "crop_size": {"height": 16, "width": 16}},
    "ConvNext": {"size": {"shortest_edge": 16}, "do_rescale": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", PROCESSORS)
def test_training_predicting_evaluating_and_an_export_prepare_pictures_as_the_published_folder_says(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**PROCESSORS[kind], image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    models.save(models.build(ViTConfig(image_size=16, patch_size=4, n_classes=2, **TINY)), tmp_path / "weights")
    processor.save_pretrained(tmp_path / "weights")
    rng = np.random.default_rng(0)
    for i in range(20):
        file = tmp_path / "data" / "ab"[i % 2] / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 255, (18 + i, 40 - i, 3), dtype=np.uint8))
        (image.convert("L") if kind == "ViT" else image).save(file)
    recipe = {
        "task": {"name": "classification"}, "data": {"kind": "images", "path": str(tmp_path / "data")}, "model": {"init": str(tmp_path / "weights")},
        "optimizer": {"name": "adamw", "lr": 1e-2}, "batch": {"samples": 8}, "train": {"steps": 1},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    task = open_session(recipes.load(tmp_path / "r.yaml")).task
    files = sorted((tmp_path / "data" / "a").iterdir())[:9] + sorted((tmp_path / "data" / "b").iterdir())[:9]  # of each class the tenth is held out

    def pixels(processor):
        return torch.cat([processor(Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"] for file in files])

    def trained(task):
        return task.to_device(task.collate([task.splits["train"][i] for i in range(18)]), torch.device("cpu"))["images"]

    expected = pixels(processor)
    off = {"atol": 1e-5 * float(expected.abs().max()), "rtol": 0}
    torch.testing.assert_close(trained(task), expected, **off)
    source = find(str(tmp_path / "weights"))
    torch.testing.assert_close(prepared(source, read_images(source, list(map(str, files))), torch.device("cpu")), expected, **off)
    source.recipe = task.resolved(task.recipe)
    torch.testing.assert_close(prepared(source, read_images(source, list(map(str, files))), torch.device("cpu")), expected, **off)
    torch.testing.assert_close(pixels(transformers.CLIPImageProcessorPil(**image_processor(source))), expected, **off)
    recipe["model"] = {"family": "vit", "image_size": 8, "patch_size": 4, **TINY}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    session = open_evaluation(str(tmp_path / "r.yaml"), [], "valid", checkpoint=str(tmp_path / "weights"))[1]
    torch.testing.assert_close(trained(session.task), expected, **off)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A few steps on the digits; its summary says what the last step, which is the best one, reached."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    recipe = recipes.load(
        "digits-vit", [f"log.dir={folder}", "train.epochs=null", "schedule.name=constant", "schedule.warmup_steps=1", "evaluate.samples=0"],
        model={"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}, train={"steps": 12}, evaluate={"every": 12, "test": True},
        layout={"device": "cpu"}, data={"crop": 1},
    )  # fmt: skip
    return folder, train(recipe).summary["metrics"]


def test_evaluate_gives_the_runs_own_numbers_whatever_the_batch(digits):
    folder, metrics = digits
    for split in ("valid", "test"):
        expected = {k: v for k, v in metrics.items() if k.startswith(split)}
        assert expected
        assert evaluate(str(folder), [], split) == pytest.approx(expected, rel=1e-5)
        assert evaluate(str(folder), ["evaluate.batch=7", "layout.attention=naive"], split) == pytest.approx(expected, rel=1e-5)
    assert evaluate("digits-vit", ["layout.device=cpu"], "test", str(folder)) == pytest.approx(
        {k: v for k, v in metrics.items() if k.startswith("test")}, rel=1e-5
    )


def test_evaluate_counts_a_training_split_once(digits):
    folder, _ = digits
    found = evaluate(str(folder), ["layout.device=cpu"], "train")
    session = open_session(recipes.load(folder))
    data = session.task.splits["train"]
    model = models.load(folder).eval()
    batch = session.task.to_device(session.task.collate([data[i] for i in range(len(data))]), torch.device("cpu"))
    with torch.no_grad():
        logits = model(batch["images"])
    assert found["train/accuracy"] == pytest.approx(float((logits.argmax(-1) == batch["labels"]).float().mean()))
    assert found["train/loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch["labels"])), rel=1e-4)


@pytest.mark.parametrize("override", ["optimizer.lr=1", "model.n_layers=3", "train.seed=4"])
def test_evaluate_changes_no_model(digits, override, capsys):
    assert "another model" in fails("evaluate", digits[0], override, capsys=capsys) or "model" in override


def test_evaluate_needs_weights_of_the_family(digits, tmp_path, capsys):
    assert "--checkpoint DIR" in fails("evaluate", "digits-vit", capsys=capsys)
    assert "a vit, and recipe copy-task is for seq2seq" in fails("evaluate", "copy-task", "--checkpoint", digits[0], capsys=capsys)


def test_a_runs_split_with_right_and_wrong(digits, tmp_path):
    folder, _ = digits
    lines = run(folder, "--split", "test", "--n", "20", "--to", tmp_path / "o.jsonl", "--grid", tmp_path / "o.svg")
    session = open_session(recipes.load(folder))
    data, model = session.task.splits["test"], models.load(folder).eval()
    with torch.no_grad():
        batch = session.task.to_device(session.task.collate([data[i] for i in range(20)]), torch.device("cpu"))
        guesses = model(batch["images"]).argmax(-1).tolist()
    truths = [data[i]["label"] for i in range(20)]
    right = [g == t for g, t in zip(guesses, truths)]
    assert 0 < sum(right) < 20, "both are needed"
    assert f"{sum(right)} of 20 right" in lines
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(r["label"], r["truth"], r["right"]) for r in records] == [(str(g), str(t), ok) for g, t, ok in zip(guesses, truths, right)]
    svg = (tmp_path / "o.svg").read_text()
    assert [svg.count(colour) for colour in (grid.RIGHT, grid.WRONG)] == [sum(right), 20 - sum(right)]
    texts = re.findall("<text[^>]*>([^<]*)</text>", svg)
    assert f"{sum(right)} of 20 right" in texts and [t for t in texts if t.startswith("it is")] == [f"it is {t}" for t, ok in zip(truths, right) if not ok]
    shown = [Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall("base64,([^\"]*)", svg)]
    for i, picture in enumerate(shown):
        assert np.array_equal(np.asarray(picture)[..., :3], np.broadcast_to(data[i]["image"], (3, 8, 8)).transpose(1, 2, 0))
    assert len(shown) == 20


def test_predictions_that_an_evaluation_keeps(digits, tmp_path, capsys):
    """Of each image once, by the loss that PyTorch computes of it; scikit-learn makes the run's metrics of them."""
    metrics = pytest.importorskip("sklearn.metrics")
    folder = tmp_path / "run"
    shutil.copytree(digits[0], folder, symlinks=True)
    found = evaluate(str(folder), [], "test", keep=True)
    assert found == pytest.approx({k: v for k, v in digits[1].items() if k.startswith("test")}, rel=1e-5)
    records = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    truth, labels = ([record[key] for record in records] for key in ("truth", "label"))
    assert metrics.accuracy_score(truth, labels) == pytest.approx(found["test/accuracy"])
    assert metrics.f1_score(truth, labels, average="macro") == pytest.approx(found["test/macro_f1"])
    session = open_session(recipes.load(folder))
    data, model = session.task.splits["test"], models.load(folder).eval()
    order = [int(record["input"].removeprefix("test ")) for record in records]
    assert sorted(order) == list(range(len(data)))
    with torch.no_grad():
        batch = session.task.to_device(session.task.collate([data[i] for i in order]), torch.device("cpu"))
        losses = torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")
    assert [record["loss"] for record in records] == pytest.approx(losses.tolist(), rel=1e-3) == sorted(losses.tolist(), reverse=True)
    assert [record["pixels"] for record in records[:16]] == [data[i]["image"].tolist() for i in order[:16]]
    assert not any("pixels" in record for record in records[16:])
    assert "holds neither a run" in fails("evaluate", "digits-vit", "--checkpoint", folder, "--report", tmp_path, capsys=capsys)


def test_of_a_text_the_windows_with_the_largest_loss_are_kept(tmp_path):
    (tmp_path / "t.txt").write_text("".join(f"line {i} of {i % 7} texts\n" for i in range(120)))
    recipe = recipes.load(
        "shakespeare-char-gpt", [f"data.path={tmp_path}/t.txt", f"log.dir={tmp_path}/run", "data.limit_valid=null", "train.epochs=null"],
        model={"n_layers": 1, "d_model": 16, "n_heads": 2, "seq_len": 8}, schedule={"warmup_steps": 1}, train={"steps": 3},
        evaluate={"samples": 0}, layout={"device": "cpu"},
    )  # fmt: skip
    train(recipe)
    evaluate(str(tmp_path / "run"), [], "valid", keep=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    task, model = open_session(recipes.load(tmp_path / "run"), tasks.load_tokenizers(models.locate(str(tmp_path / "run")))).task, models.load(tmp_path / "run").eval()
    losses = []
    for window in map(task.splits["valid"].__getitem__, range(len(task.splits["valid"]))):
        ids = torch.tensor(window["ids"])[None]
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        losses.append((float(loss), task.tokenizer.decode(ids[0].tolist())))
    worst = sorted(losses, reverse=True)[:16]
    assert len(losses) > 20 and [record["loss"] for record in records] == pytest.approx([loss for loss, _ in worst], rel=1e-4)
    assert [record["input"] for record in records] == [text for _, text in worst]


def test_the_images_of_a_folder(digits, tmp_path, capsys):
    data = open_session(recipes.load(digits[0])).task.splits["test"]
    (tmp_path / "some" / "more").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(data[i]["image"][0]).save(tmp_path / "some" / f"{i}.png")
    (tmp_path / "some" / "notes.txt").write_text("no image")
    files = [tmp_path / "some" / f"{i}.png" for i in range(3)]
    assert run(digits[0], tmp_path / "some") == run(digits[0], *files)
    assert run(digits[0], files[1], tmp_path / "some") == run(digits[0], files[1], *files)
    assert "more: no such image file, and no folder with one." in fails("predict", digits[0], tmp_path / "some" / "more", capsys=capsys)


def test_an_image_file_is_read_as_in_training(digits, tmp_path):
    folder, _ = digits
    data = open_session(recipes.load(folder)).task.splits["test"]
    for i in range(4):
        Image.fromarray(data[i]["image"][0]).save(tmp_path / f"{i}.png")
    alone = run(folder, *(tmp_path / f"{i}.png" for i in range(4)))
    split = run(folder, "--split", "test", "--n", "4")
    assert [line.split("  ")[0] for line in alone] == [line.split("  ")[0] for line in split[:4]]


def test_images_without_the_data_that_they_were_normalised_by(digits, tmp_path, capsys):
    shutil.copytree(digits[0], tmp_path / "run", symlinks=True)
    file = tmp_path / "run" / "recipe.yaml"
    from PIL import Image

    text = file.read_text()
    picture(tmp_path / "a.png", 8)
    Image.open(tmp_path / "a.png").convert("L").save(tmp_path / "a.png")
    expected = run(tmp_path / "run", tmp_path / "a.png")
    text = text.replace("source: digits", f"path: {tmp_path}/gone")
    file.write_text(text)  # a run's recipe has the classes and what was measured, so that the data may be gone
    assert run(tmp_path / "run", tmp_path / "a.png") == expected
    file.write_text(re.sub(r"  (mean|std): .*\n", "", text))
    assert "data.mean and data.std" in fails("predict", tmp_path / "run", tmp_path / "a.png", capsys=capsys)


def small_bpe() -> dict:
    return {"kind": "bpe", "vocab_size": 300}


def test_a_labelled_run(tmp_path):
    for split, n in (("train", 12), ("valid", 6)):
        (tmp_path / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(f"a {'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(n)))
    recipe = recipes.load(
        "sst2-bert", [f"data.path={tmp_path}", f"data.cache={tmp_path}/cache", f"log.dir={tmp_path}/run", "model.init=null", "model.preset=null", "train.epochs=null"],
        model={"family": "bert", **TINY, "seq_len": 24}, tokenizer={"kind": "byte"}, data={"max_len": 24}, schedule={"warmup_steps": 0}, train={"steps": 3},
        evaluate={"samples": 0}, layout={"device": "cpu"},
    )  # fmt: skip
    metrics = train(recipe).summary["metrics"]
    assert evaluate(str(tmp_path / "run"), [], "valid") == pytest.approx(metrics, rel=1e-5)
    split = run(tmp_path / "run", "--split", "valid", "--n", "6")
    texts = run(tmp_path / "run", *(f"a {'good' if i % 2 else 'bad'} film {i}" for i in range(6)))
    assert [line.split("  ")[0] for line in split[:6]] == [line.split("  ")[0] for line in texts]
    assert all("positive" in line and "negative" in line for line in texts)
    right = round(metrics["valid/accuracy"] * 6)
    assert split[6] == f"{right} of 6 right"


def named_run(tmp_path, kind) -> list[str]:
    """A run of two classes in tmp_path/run; returns inputs of it."""
    from PIL import Image

    names, inputs = ("airy", "heavy"), []
    if kind == "text":
        rows = [f"a {'light' if i % 2 else 'leaden'} film {i},{names[i % 2]}" for i in range(40)]
        (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows))
        inputs, more = ["a light film", "leaden"], {"tokenizer": {"kind": "bpe", "vocab_size": 300}, "model": {"family": "bert", **TINY, "seq_len": 24}}
        data = {"kind": "labelled", "path": str(tmp_path / "data.csv")}
    else:
        rng = np.random.default_rng(0)
        for i in range(24):
            file = tmp_path / "data" / names[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 100 + 100 * (i % 2), (16, 16, 3), dtype=np.uint8)).save(file)
            inputs = [str(file), *inputs][:2]
        data, more = {"kind": "images", "path": str(tmp_path / "data")}, {"model": {"family": "vit", **TINY, "image_size": 16, "patch_size": 4}}
    recipe = {
        "task": {"name": "classification"}, "data": data, **more, "optimizer": {"name": "adamw", "lr": 1e-2}, "batch": {"samples": 8},
        "train": {"steps": 6}, "log": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    train(recipes.load("named", text=json.dumps(recipe)))
    return inputs


@pytest.mark.parametrize("kind", ["text", "images"])
def test_class_names_go_from_the_data_to_transformers(tmp_path, kind, capsys):
    transformers = pytest.importorskip("transformers")
    inputs, names = named_run(tmp_path, kind), {0: "airy", 1: "heavy"}
    run_lines = run(tmp_path / "run", *inputs)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    for folder in (tmp_path / "run/checkpoints/best", tmp_path / "run/checkpoints/step-00000006", tmp_path / "out"):
        config = transformers.AutoConfig.from_pretrained(folder)
        assert config.id2label == names and config.label2id == {"airy": 0, "heavy": 1}
    assert run(tmp_path / "out", *inputs) == run_lines and run_lines[0].split()[0] in ("airy", "heavy")
    if kind == "text":
        model, pipe = transformers.AutoModelForSequenceClassification, "text-classification"
        beside = {"tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path / "out")}
    else:
        model, pipe = transformers.AutoModelForImageClassification, "image-classification"
        beside = {"image_processor": transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", use_fast=False)}
    theirs = transformers.pipeline(pipe, model=model.from_pretrained(tmp_path / "out"), **beside)
    for line, text in zip(run_lines, inputs):
        best = theirs(text)[0]
        assert line.startswith(best["label"]) and float(line.split(",")[0].split()[1]) == pytest.approx(best["score"], abs=2e-4)


def test_a_translation_run(tmp_path):
    german, english = ["ein Hund läuft", "eine Katze schläft", "zwei Hunde"] * 4, ["a dog runs", "a cat sleeps", "two dogs"] * 4
    for split in ("train", "valid"):
        (tmp_path / f"{split}.de").write_text("\n".join(german) + "\n")
        (tmp_path / f"{split}.en").write_text("\n".join(english) + "\n")
    recipe = recipes.load(
        "multi30k-seq2seq", [f"data.path={tmp_path}", f"data.cache={tmp_path}/cache", f"log.dir={tmp_path}/run", "train.epochs=null", "data.test=null"],
        model={**TINY, "seq_len": 40}, tokenizer=small_bpe(), schedule={"warmup_steps": 50}, train={"steps": 4}, evaluate={"samples": 0, "test": False},
        layout={"device": "cpu"}, data={"max_len": None},
    )  # fmt: skip
    outcome = train(recipe)
    found = evaluate(str(tmp_path / "run"), [], "valid")
    assert found == pytest.approx(outcome.summary["metrics"], rel=1e-5)
    assert "valid/bleu" in found
    session, task = outcome.trainer, outcome.trainer.task

    def translated(texts: list[str]) -> list[str]:
        rows = [task.tokenizer.with_special_tokens(ids[: task.source_room]) for ids in task.tokenizer.encode_batch(texts)]
        return task.translate(session.model, rows, task.recipe.evaluate.max_new)

    session.model.eval()
    expected = translated(german[:3])
    lines = run(tmp_path / "run", *german[:3])
    assert [line.splitlines()[1].split("→")[1].strip() for line in lines] == [e.strip() for e in expected]
    evaluate(str(tmp_path / "run"), [], "valid", keep=True)
    worst = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    pairs = dict(zip(german, zip(english, expected)))
    assert len(worst) == 12 and all((each["truth"], each["answer"]) == pairs[each["input"]] for each in worst)
    assert [each["loss"] for each in worst] == sorted((each["loss"] for each in worst), reverse=True)
    assert "  ".join(task.examples(session.model, 1)) == f"source     {german[0]}  reference  {english[0]}  ours       {expected[0]}  "
    both = ["da", german[1]]
    # an answer that does not end has a limit: of the row, not of its batch
    task.eos_id, task.target_tokenizer = 10**6, types.SimpleNamespace(decode=list)
    assert translated(both) == [translated([text])[0] for text in both]
    split = run(tmp_path / "run", "--split", "valid", "--n", "3")
    assert [line.splitlines()[2].split("it is")[1].strip() for line in split[:3]] == english[:3]


def test_a_copy_run(tmp_path, capsys):
    recipe = recipes.load(
        "copy-task", [f"log.dir={tmp_path}/run"], model={"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32},
        train={"steps": 2}, schedule={"warmup_steps": 1}, data={"n_train": 100, "n_valid": 5}, layout={"device": "cpu"},
    )  # fmt: skip
    outcome = train(recipe)
    expected = outcome.trainer.task.decode(outcome.trainer.model.eval(), [list(range(1, 11))])[0]
    line = run(tmp_path / "run", "1 2 3 4 5 6 7 8 9 10")[0].splitlines()
    assert line[1].split("→")[1].split() == [str(i) for i in expected]
    for text in ("1 2 hello", "9" * 5000):
        assert "copies numbers from 1 to 10" in fails("predict", tmp_path / "run", text, capsys=capsys)
    assert "gradus predict" in fails("generate", tmp_path / "run", "1 2", capsys=capsys)
    assert evaluate(str(tmp_path / "run"), [], "valid", keep=True) == pytest.approx(outcome.summary["metrics"], rel=1e-5)
    kept = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    data = outcome.trainer.task.splits["valid"]
    sources = [" ".join(map(str, data[i]["source"].tolist())) for i in range(5)]
    assert sorted(each["truth"] for each in kept) == sorted(sources)
    answers = [line.splitlines()[1].split("→")[1].split() for line in run(tmp_path / "run", *(each["input"] for each in kept))[:5]]
    assert answers == [each["answer"].split() for each in kept]


# ---------------------------------------------------------------- what cannot be


def test_options_without_effect_and_models_without_a_head(tmp_path, capsys):
    models.save(models.build(GPTConfig(vocab_size=len(WORDS), seq_len=20, **TINY)), tmp_path / "gpt")
    models.save(models.build(BertConfig(vocab_size=len(WORDS), seq_len=20, **TINY)), tmp_path / "bert")
    models.save(models.build(BertConfig(vocab_size=len(WORDS), seq_len=20, head="masked_lm", **TINY)), tmp_path / "masked")
    models.save(models.build(ViTConfig(image_size=8, patch_size=4, n_classes=2, **TINY)), tmp_path / "vit")
    for name in ("bert", "masked"):
        (tmp_path / name / "vocab.txt").write_text("\n".join(WORDS))
    cases = [
        (["gpt", "text"], "gradus generate"),
        (["bert", "text"], "no head"),
        (["masked", "a film"], "no [MASK]"),
        (["masked", "a [MASK]" + " film" * 30], "more than the 20"),
        (["bert", "text", "--split", "valid"], "leave out 'text'"),
        (["bert", "--split", "valid"], "belongs to no run"),
        (["masked", "a [MASK]", "--to", "x.npy"], ".jsonl"),
        (["masked", "a [MASK]", "--to", f"{tmp_path}/no/folder/x.jsonl"], "cannot be written"),
        (["masked", "a [MASK]", "--top", "0"], "--top=0"),
        (["vit", f"{tmp_path}/none.png"], "no such image file"),
        (["vit", f"{tmp_path}/none.png", "--grid", "x.png"], "saved as .svg"),
        (["masked", "a [MASK]", "--grid", "x.svg"], "--to RUN/predictions.jsonl, which gradus report RUN shows"),
    ]
    for (name, *words), said in cases:
        message = fails("predict", tmp_path / name, *words, capsys=capsys)
        assert said in message and message.count("\n") == 1, message


# ---------------------------------------------------------------- line by line


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(5)
    tokenizer = tokenizers.ByteTokenizer()
    tokenizer.around(tokenizer.bos_id, tokenizer.eos_id)
    config = BertConfig(**TINY, vocab_size=tokenizer.vocab_size, seq_len=32, head="classification", n_classes=2)
    models.save(shake(models.build(config)), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def test_lines_of_standard_input_are_answered_as_they_come_and_a_closed_pipe_is_quiet(classifier):
    """An answer is read before the next line is written: one that waited for all lines, or in a buffer, would hang here."""
    lines = [line for text in TEXTS for line in (text, "")]
    expected = run(classifier, *lines)
    pid, stdin, stdout, stderr = forked(["predict", str(classifier), "-"])
    for text, answer in zip(lines, expected):
        stdin.write(f"{text}\n")
        label, _, name = answer.partition("  ←  ")
        said, _, its = stdout.readline().rstrip("\n").partition("  ←  ")
        assert its == name and numbers(said) == pytest.approx(numbers(label), abs=2e-4)
    stdout.close()
    stdin.write("one more\nand another\n")
    stdin.close()
    assert (stderr.read(), os.waitpid(pid, 0)[1]) == ("", 0)


def forked(words: list[str]) -> tuple[int, io.TextIOWrapper, io.TextIOWrapper, io.TextIOWrapper]:
    """A command in a copy of this process, which has imported what it needs; its pid, and the other ends of its standard streams."""
    pipes = [os.pipe() for _ in range(3)]
    ours, theirs = (pipes[0][1], pipes[1][0], pipes[2][0]), (pipes[0][0], pipes[1][1], pipes[2][1])
    if (pid := os.fork()) == 0:
        code = 1
        try:
            for number, end in enumerate(theirs):
                os.dup2(end, number)
            for end in (*ours, *theirs):
                os.close(end)
            sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", encoding="utf-8", buffering=1 if n == 2 else -1) for n in range(3))  # noqa: SIM115
            code = main(words)
            sys.stdout.flush()  # as at the end of any process
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    for end in theirs:
        os.close(end)
    return pid, open(ours[0], "w", encoding="utf-8", buffering=1), open(ours[1], encoding="utf-8"), open(ours[2], encoding="utf-8")


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"0\.\d+", line)]


def test_a_dash_reads_the_model_once_and_writes_its_records(classifier, monkeypatch, tmp_path):
    loads = []
    monkeypatch.setattr(loading, "load", lambda *a, load=models.load, **k: loads.append(a) or load(*a, **k))
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in TEXTS)))
    lines = run(classifier, "-", "--to", tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(loads) == 1 and [r["input"] for r in records] == TEXTS and len(lines) == 4
    with pytest.raises(UserError, match="given alone"):
        run(classifier, "-", "a film")


def by_line(folder, text: str, monkeypatch, capsys) -> tuple[int, list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, told = main(["predict", str(folder), "-"]), capsys.readouterr()
    return code, told.out.splitlines(), told.err


def test_every_line_has_its_answer(tmp_path, monkeypatch, capsys):
    """The empty ones too; what cannot be read is told in its place, and the rest goes on."""
    theirs("BertForMaskedLM", tmp_path / "masked")
    code, lines, err = by_line(tmp_path / "masked", "a [MASK]\n\nbad\n[MASK] film\n", monkeypatch, capsys)
    assert code == 2 and [line.split(" ")[0] for line in lines if not line.startswith("  ")][1:3] == ["error:", "error:"] and len(lines) == 6
    assert "no [MASK] or <mask> in 'bad'" in lines[3] and "2 of 4 lines could not be read, line 2 first" in err
    models.save(shake(models.build(T5Config(vocab_size=270, d_head=8, **TINY)), 0.1), tmp_path / "t5")
    bpe = tokenizers.train_bpe(TEXTS, 270)
    bpe.around(None, bpe.eos_id)
    bpe.save(tmp_path / "t5")
    code, lines, err = by_line(tmp_path / "t5", "a film\n\nbad\n", monkeypatch, capsys)
    assert (code, err) == (0, "") and lines == [*run(tmp_path / "t5", "a film")[0].splitlines(), "", "  →         ", *run(tmp_path / "t5", "bad")[0].splitlines()]
    both = ["bad", "a very good film !"]  # answers of another length than their batch's: of twice the source and 10
    assert run(tmp_path / "t5", *both) == [run(tmp_path / "t5", text)[0] for text in both]


def test_an_engine_is_opened_once_for_all_lines(classifier, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\nc\n"))
    assert main(["predict", str(classifier), "-", "--precision", "bf16"]) == 0
    assert capsys.readouterr().err.count("engine torch bf16 computes in bf16") == 1


def test_a_word_of_any_length_is_cut_before_it_is_encoded(classifier, tmp_path, monkeypatch, capsys):
    read = []
    encode = tokenizers.ByteTokenizer.encode
    monkeypatch.setattr(tokenizers.ByteTokenizer, "encode", lambda self, text: read.append(len(text)) or encode(self, text))
    word = "x" * 1_000_000
    line = run(classifier, word)[0]
    assert "cut to the first 30 of its more than 8192 tokens" in capsys.readouterr().err and read == [32 * 256]
    assert line.split("←")[0] == run(classifier, "x" * 30)[0].split("←")[0]
    models.save(models.build(GPTConfig(vocab_size=260, seq_len=20, **TINY)), tmp_path / "gpt")
    tokenizers.ByteTokenizer().save(tmp_path / "gpt")
    said = fails("generate", tmp_path / "gpt", word, capsys=capsys)
    assert "has 1,000,000 characters, more than fit into 20 tokens" in said and said.count("\n") == 1


def test_a_reader_who_has_enough_is_no_error():
    told = subprocess.run(f"{sys.executable} -m gradus keys | head -n 1", shell=True, capture_output=True, text=True)
    assert told.stderr == "" and told.stdout.startswith("# recipe")


@pytest.mark.parametrize(("max_len", "longest"), [(None, 24), (8, 8), (40, 24)])
def test_texts_are_cut_to_the_runs_length_and_to_the_models(max_len, longest, capsys):
    source = SimpleNamespace(config=SimpleNamespace(seq_len=24), recipe=SimpleNamespace(data=SimpleNamespace(max_len=max_len)))
    short, cut = rows_of(source, ByteTokenizer(), ["abc", "x" * 60])
    assert len(cut) == longest and len(short) < 8 and "cut to the first" in capsys.readouterr().err
