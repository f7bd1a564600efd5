"""One label a text or image: the classes that the data have, [CLS] text [SEP], mixed images with two labels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gradus import recipe as recipes
from gradus import tasks
from gradus.data.splits import Part
from gradus.data.tokenizers import train_bpe
from gradus.errors import UserError
from gradus.recipe.schema import BertConfig
from gradus.tasks.classification import by_name
from gradus.train.evaluation import _add, _on_host

TEXTS = {"good": "a good film", "bad": "a bad film, far too long for what it is", "fair": "fair"}
SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32"]


def of_texts(tmp_path, *more: str, classes=tuple(TEXTS)):
    lines = "".join(json.dumps({"text": TEXTS[c], "label": c}) + "\n" for c in classes * 12)
    (tmp_path / "train.jsonl").write_text(lines)
    words = [*SMALL, "model.preset=null", "model.family=bert", "model.init=null", "model.n_classes=null", "model.seq_len=16", "task.classes=null"]
    words += [f"data.path={tmp_path}", f"data.cache={tmp_path / 'cache'}", "data.max_len=12", "tokenizer={kind: bpe, vocab_size: 270}", *more]
    return tasks.open_task(recipes.load("sst2-bert", words), {"": train_bpe(TEXTS.values(), 270)})


class Fixed(torch.nn.Module):
    """Gives the same scores whatever it is given."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.tensor(scores))

    def forward(self, inputs, **more):
        return self.scores


def test_a_text_that_only_ends_in_a_token(tmp_path):
    bpe = train_bpe(TEXTS.values(), 270)
    bpe.around(None, bpe.eos_id)
    task = tasks.open_task(of_texts(tmp_path).recipe, {"": bpe})
    row = task.row(task.splits["train"][0]["ids"])
    assert row.dtype == np.int64 and row.tolist() == bpe.with_special_tokens(task.splits["train"][0]["ids"].tolist())
    bpe = train_bpe(TEXTS.values(), 270)
    bpe.before, bpe.after = [bpe.bos_id] * 2, [bpe.eos_id]
    with pytest.raises(UserError, match="it adds 3 special tokens to a text, and text classification allows two"):
        tasks.open_task(task.recipe, {"": bpe})


def test_a_text_stands_between_its_first_and_last_token(tmp_path):
    task = of_texts(tmp_path)
    data, t = task.splits["train"], task.tokenizer
    batch = task.collate([data[i] for i in range(3)])
    for i, row in enumerate(batch["ids"].tolist()):
        ids = t.encode(TEXTS[task.classes[batch["labels"][i]]])[:10]
        assert row == [*task.before, *ids, *task.after] + [t.pad_id] * (12 - 2 - len(ids)), "cut to data.max_len, padded to the longest"
        assert batch["keep"][i].tolist() == [True] * (len(ids) + 2) + [False] * (10 - len(ids))
    assert batch["n_tokens"] == int(batch["keep"].sum()) and batch["counts"] == {"samples": 3}
    assert "keep" not in task.collate([data[0]]), "nothing is padded"


def test_the_model_gets_the_classes_of_the_data(tmp_path):
    task = of_texts(tmp_path)
    model = task.complete(task.recipe.model)
    assert task.classes == ["bad", "fair", "good"] and (model.n_classes, model.head, model.pooler) == (3, "classification", True)
    assert task.resolved(task.recipe).task.classes == task.classes
    renamed = of_texts(tmp_path, "task.classes=[poor, middling, fine]")
    renamed.complete(renamed.recipe.model)
    assert renamed.classes == ["poor", "middling", "fine"], "names in place of the data's"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("task.classes=[poor, fine]", "2 names; the data has 3 classes: bad, fair, good"),
        ("task.classes=[poor, poor, fine]", "Name each once"),
        ("model.n_classes=4", "model.n_classes=4: the data has 3 classes"),
    ],
)
def test_classes_that_the_data_do_not_have(tmp_path, more, says):
    with pytest.raises(UserError, match=says):
        task = of_texts(tmp_path, more)
        task.complete(task.recipe.model)


def test_classes_are_found_by_name_then_whatever_the_case_and_numbers_by_place():
    assert by_name(["bad", "good"], ["good", "bad"]) == [1, 0]
    assert by_name(["bad", "good"], ["GOOD", "Bad"]) == [1, 0]
    assert by_name(["a", "A"], ["A", "a"]) == [1, 0] and by_name(["a", "b"], ["A", "a"]) is None
    assert by_name(["0", "1"], ["1", "0"]) == [1, 0], "numbers can be names"
    assert by_name(["0", "1"], ["bad", "good"]) == [0, 1] and by_name(["1", "2"], ["bad", "good"]) is None
    assert by_name(["bad", "good"], ["bad", "good", "fair"]) is None and by_name(["0", "1"], ["1", "2"]) is None


def test_labels_are_numbered_as_the_heads(tmp_path):
    task = of_texts(tmp_path)
    named = [[task.classes[i] for i in data.labels] for data in task.splits.values()]
    head = BertConfig(vocab_size=270, n_layers=1, d_model=16, n_heads=2, d_ff=32, head="classification", n_classes=3)
    for names in (["good", "fair", "bad"], ["FAIR", "BAD", "GOOD"]):
        task.complete(head.named(names))
        assert task.classes == names
        for data, before in zip(task.splits.values(), named):
            assert [names[i].lower() for i in data.labels] == before
            assert [names[data[i]["label"]].lower() for i in range(len(data))] == before
    for config, says in (
        (head.named(["good", "fair", "poor"]), "head has the classes good, fair, poor; the data has FAIR, BAD, GOOD"),
        (head.model_copy(update={"n_classes": 4}).named(["good", "fair", "bad", "poor"]), "good, fair, bad, poor; the data has FAIR, BAD, GOOD"),
        (head.named([], "sigmoid"), "the weights' head predicts several labels per sample"),
        (head.named([], "none"), "the weights' head predicts a score"),
    ):
        with pytest.raises(UserError, match=says):
            task.complete(config)


def test_one_class_is_nothing_to_learn(tmp_path):
    task = of_texts(tmp_path, classes=("good",))
    with pytest.raises(UserError, match=r"every sample is of one class \(good\).* Name another label column"):
        task.complete(task.recipe.model)


def of_images(*more: str):
    return tasks.open_task(recipes.load("digits-vit", [*SMALL, *more]), None)


def test_a_mixed_image_has_two_labels_by_their_share():
    task = of_images("data.mixup=0.5", "task.label_smoothing=0.0")
    scores = torch.randn(4, 10)
    batch = {"images": torch.zeros(4, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 3]), "other_labels": torch.tensor([3, 3, 5, 9])}
    batch["share"] = torch.tensor([1.0, 0.0, 0.25, 0.5])
    got = task.losses(Fixed(scores.tolist()), batch)["samples"]
    logs = torch.log_softmax(scores, -1)
    own, other = (logs[range(4), batch[k]] for k in ("labels", "other_labels"))
    torch.testing.assert_close(got.detach(), -(batch["share"] * own + (1 - batch["share"]) * other).sum())


def test_a_loss_and_an_accuracy_are_sums_over_the_batch():
    task = of_images()
    scores = torch.full((3, 10), -5.0)
    for row, label in enumerate((7, 1, 4)):
        scores[row, label] = 5.0
    batch = {"images": torch.zeros(3, 1, 8, 8), "labels": torch.tensor([7, 1, 0])}
    sums = task.evaluate(Fixed(scores.tolist()), batch)
    assert sums["accuracy"][0] == 2 and sums["accuracy"][1] == sums["loss"][1] == 3
    assert float(sums["loss"][0].detach()) == pytest.approx(-float(torch.log_softmax(scores, -1)[range(3), [7, 1, 0]].sum()))


def test_images_keep_what_they_were_normalised_by():
    task = of_images()
    data = task.resolved(task.recipe).data
    every = np.stack([task.splits["train"][i]["image"] for i in range(len(task.splits["train"]))])
    assert data.mean == pytest.approx([every.mean() / 255]) and data.std == pytest.approx([every.std() / 255])
    with pytest.raises(UserError, match=r"model\.n_channels=3: the images have 1"):
        task.complete(task.recipe.model.model_copy(update={"n_channels": 3}))


@torch.no_grad()
def test_macro_f1_over_ragged_batches_is_scikit_learns():
    from sklearn.metrics import f1_score

    task = of_images()
    rng = torch.Generator().manual_seed(0)
    labels, scores = torch.randint(8, (40,), generator=rng), torch.randn(40, 10, generator=rng)
    scores[:, 9] = -9.0  # neither a label nor chosen: not in the mean
    sums = {}
    for part in torch.arange(40).split([17, 3, 20]):
        batch = {"images": torch.zeros(len(part), 1, 8, 8), "labels": labels[part]}
        _add(sums, {name: (_on_host(value), n) for name, (value, n) in task.evaluate(Fixed(scores[part].tolist()), batch).items()})
    found = task.metrics({name: total / n for name, (total, n) in sums.items()}, "valid")
    assert found["macro_f1"] == pytest.approx(f1_score(labels, scores.argmax(-1), average="macro"))
    assert found["accuracy"] == pytest.approx(float((labels == scores.argmax(-1)).double().mean()))


def test_class_weights_are_pytorchs_and_balanced_ones_scikit_learns(tmp_path):
    from sklearn.utils.class_weight import compute_class_weight

    task = of_texts(tmp_path, "task.class_weights=balanced", classes=("good", "good", "good", "bad", "fair"))
    task.complete(task.recipe.model)
    labels = task.splits["train"].labels
    assert task.weights == pytest.approx(compute_class_weight("balanced", classes=np.unique(labels), y=labels))
    batch, scores = task.collate([task.splits["train"][i] for i in range(7)]), torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    found = task.losses(Fixed(scores.tolist()), batch)["samples"]
    wanted = torch.nn.functional.cross_entropy(scores, batch["labels"], torch.tensor(task.weights), reduction="sum")
    torch.testing.assert_close(found.detach(), wanted)
    parts = [task.collate([task.splits["train"][i] for i in part]) for part in (range(2), range(2, 7))]
    in_parts = sum(task.losses(Fixed(s.tolist()), b)["samples"] for s, b in zip(scores.split([2, 5]), parts))
    torch.testing.assert_close(in_parts, found)  # a sum over the samples, however they are split
    # The divisor is the number of samples, not the sum of their weights as in PyTorch's mean: parts of a batch then add up.
    assert batch["counts"] == {"samples": 7}
    mean = torch.nn.functional.cross_entropy(scores, batch["labels"], torch.tensor(task.weights))
    torch.testing.assert_close(found.detach() / 7, mean * sum(task.weights[i] for i in batch["labels"].tolist()) / 7)
    assert sum(task.weights[i] for i in labels.tolist()) == pytest.approx(len(labels)), "balanced: over all data the two are one"
    wrong = of_texts(tmp_path, "task.class_weights=[1, 2]")
    with pytest.raises(UserError, match="2 numbers for 3 classes: bad, fair, good"):
        wrong.complete(wrong.recipe.model)


def test_what_metrics_do_not_show_is_said(tmp_path):
    """By hand: 'bad' has more tokens than the 10 that a row holds beside its first and last; of 'fair' a row in 40."""
    task = of_texts(tmp_path, classes=(*["good"] * 39, "fair", *["bad"] * 20))
    n = len(task.tokenizer.encode(TEXTS["bad"]))
    assert n > 10
    notes = list(task.notes())
    cut = f"240 of 720 texts are longer than 10 tokens and truncated: of such a text {10 / n:.0%} is kept (median)"
    assert len(notes) == 2 and cut in notes[0] and "uneven classes (fair 11, good 422)" in notes[1]
    [of_valid] = task.notes("valid")
    assert "(held out): " in of_valid or "of 720 texts are longer" in of_valid, "an evaluation says what it evaluates"
    weighted = of_texts(tmp_path, "task.class_weights=balanced", classes=(*["good"] * 39, "fair"))
    weighted.complete(weighted.recipe.model)
    [note] = weighted.notes()
    assert note.endswith("macro_f1 weighs all classes alike."), "what is set already is not proposed"
    alone = of_texts(tmp_path, classes=("good", "fair"))
    alone.splits["valid"] = Part(alone.splits["train"], np.flatnonzero(alone.splits["train"].labels == 0))
    (note,) = alone.notes()
    assert note == "the validation split has no sample of good: all are of one class, and an accuracy of 1 says nothing."
    alone.splits["test"] = alone.splits["valid"]
    assert list(alone.notes("test")) == [note.replace("validation", "test")] and list(alone.notes("train")) == []
    assert list(alone.notes()) == [note, note.replace("validation", "test")]
