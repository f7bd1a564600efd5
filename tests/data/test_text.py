"""Sources, the cache and the data sets of text, on small files and on real ones."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from text_parts import ROWS, Untouchable, as_csv, build, error, write

from gradus import limits
from gradus.data.corpus import Corpus, TokenFile
from gradus.data.readers import read_rows
from gradus.data.splits import find_split
from gradus.data.text import DocumentsDataset, LabelledDataset, LMDataset, PairsDataset
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import ByteTokenizer


def test_data_sets_too_start_from_the_cache(tmp_path):
    table = write(tmp_path / "train.csv", as_csv(ROWS))
    pairs = [Corpus.lines(write(tmp_path / f"train.{s}", f"{s}\n{s}{s}\n")) for s in ("de", "en")]
    for tokenizer in (ByteTokenizer(), Untouchable()):
        assert LabelledDataset(table, tokenizer, 4).labels.tolist() == [1, 0, 1]
        assert PairsDataset(*pairs, tokenizer).lengths.tolist() == [4, 8]


def test_other_columns_are_not_the_kept_ones(tmp_path):
    rows = [{"text": "a", "title": "bb", "label": 1, "stars": 0}, {"text": "ccc", "title": "dddd", "label": 0, "stars": 1}]
    table = write(tmp_path / "train.csv", as_csv(rows))
    for text, label in (("text", "label"), ("title", "label"), ("title", "stars"), ("text", "label")):
        data = LabelledDataset(table, ByteTokenizer(), 9, (text, label))
        assert data.labels.tolist() == [row[label] for row in rows] and data.lengths.tolist() == [len(row[text]) for row in rows]


# ---------------------------------------------------------------- windows


def counted(n: int, borders=()) -> TokenFile:
    """Tokens 0 .. n-1, in documents that end at `borders`."""

    class Numbers(ByteTokenizer):
        vocab_size, fingerprint = 60_000, f"{n}"

        def encode_batch(self, texts):
            return [list(range(*map(int, t.split()))) for t in texts]

    edges = [0, *borders, n]
    return build([f"{a} {b}" for a, b in itertools.pairwise(edges)], Numbers(), f"{edges}")


@pytest.mark.parametrize("n", [2, 9, 10, 11, 100, 101, 109, 110, 111])
def test_evaluation_predicts_every_token_once(n):
    data = LMDataset(counted(n), 10, shuffle_phase=False)
    rows = [data[i]["ids"] for i in range(len(data))]
    assert np.concatenate([r[1:] for r in rows]).tolist() == list(range(1, n))  # the targets: all but the first, in order
    assert np.concatenate([r[:-1] for r in rows]).tolist() == list(range(n - 1))
    assert all(len(r) == 11 for r in rows[:-1]) and rows[0].dtype == np.int64
    assert data.lengths.tolist() == [len(r) - 1 for r in rows] and data.n_targets == n - 1
    assert data.item(0, 5)["ids"].tolist() == rows[0].tolist()


@pytest.mark.parametrize("n", [11, 15, 20, 21, 29, 30, 31, 105])
def test_training_windows_tile_at_a_phase_of_seed_and_epoch(n):
    data = LMDataset(counted(n), 10, seed=3)
    phases = set()
    for epoch in range(60):
        rows = [data.item(i, epoch)["ids"] for i in range(len(data))]
        start = rows[0][0]
        assert [r.tolist() for r in rows] == [list(range(start + 10 * i, start + 10 * i + 11)) for i in range(len(data))]
        assert start < 10 and n - 1 - rows[-1][-1] < 20
        phases.add(int(start))
    assert phases == set(range(min(10, n - 10 * len(data))))
    again = LMDataset(counted(n), 10, seed=3)
    assert [again.phase(e) for e in range(20)] == [data.phase(e) for e in range(20)]
    if n >= 30:
        assert [LMDataset(counted(n), 10, seed=4).phase(e) for e in range(20)] != [data.phase(e) for e in range(20)]
    assert data.epoch_aware and data.lengths.tolist() == [10] * len(data)


def test_packed_documents():
    borders = [3, 3, 12, 13, 30]  # one of them empty
    data = LMDataset(counted(40, borders), 10, pack="documents", shuffle_phase=False)
    number = np.searchsorted(borders, np.arange(40), side="right")
    begin = np.array([0, *borders])[number]
    predicted = 0
    for i in range(len(data)):
        item = data[i]
        ids, segments, positions = item["ids"], item["segments"], item["positions"]
        assert segments[0] == 0 and ids.tolist() == list(range(10 * i, min(40, 10 * i + 11)))
        same = segments[:, None] == segments
        assert (same == (number[ids][:, None] == number[ids])).all()
        assert positions.tolist() == (ids - np.maximum(begin[ids], ids[0])).tolist()
        assert set(np.diff(segments)) <= {0, 1}
        predicted += int((segments[1:] == segments[:-1]).sum())
    assert predicted == data.n_targets == 40 - 5
    moved = LMDataset(counted(40, borders), 10, seed=1, pack="documents")
    epoch = next(e for e in range(50) if moved.phase(e) == 2)
    assert moved.item(0, epoch)["segments"].tolist() == [0, *[1] * 9, 2] and moved.item(0, epoch)["positions"].tolist() == [0, *range(9), 0]


def test_text_shorter_than_a_window():
    assert "has 10 tokens, less than a window of 10 + 1" in error(LMDataset, counted(10), 10)
    assert len(LMDataset(counted(10), 10, shuffle_phase=False)) == 1
    with pytest.raises(IndexError):
        LMDataset(counted(100), 10)[9]


def test_loader_gives_the_epoch(tmp_path):
    from gradus.data.loader import Loader, Plan

    data = LMDataset(counted(105), 10, seed=3)
    plan = Plan(len(data), 0, batch_samples=4)
    loader = Loader(data, plan, lambda samples: {"ids": np.stack([s["ids"] for s in samples])})
    for epoch in range(3):
        first = np.concatenate([np.asarray(b["ids"])[:, 0] for step in loader.steps(epoch) for b in step.micro_batches])
        assert sorted(first.tolist()) == [data.phase(epoch) + 10 * i for i in range(len(data))]


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("across", [False, True])
def test_rows_of_documents_hold_every_token_once(across):
    borders = [3, 3, 12, 13, 30, 52, 55]
    data = DocumentsDataset(counted(70, borders), 10, across=across)
    rows = [data[i]["ids"].tolist() for i in range(len(data))]
    assert list(itertools.chain(*rows)) == list(range(70)) and data.lengths.tolist() == [len(r) for r in rows] and max(data.lengths) == 10
    if across:  # whole paragraphs while they fit
        assert [r[0] for r in rows] == [0, 3, 13, 23, 30, 40, 50, 55, 65]
    else:
        edges = [0, *borders, 70]
        assert [r[0] for r in rows] == [s for a, b in itertools.pairwise(edges) for s in range(a, b, 10)]
    assert "leaves 0 tokens" in error(DocumentsDataset, counted(70, borders), 0)


# ---------------------------------------------------------------- labels


def labelled(tmp_path, rows, name="train.jsonl", **options) -> LabelledDataset:
    return LabelledDataset(write(tmp_path / name, "".join(json.dumps(r) + "\n" for r in rows)), ByteTokenizer(), 5, **options)


def test_labels_as_numbers_and_names(tmp_path):
    data = labelled(tmp_path, [{"review": "abcdefg", "class": 2}, {"review": "", "class": "0"}, {"review": "xy", "class": 1.0}])
    assert data.labels.tolist() == [2, 0, 1] and data.classes == ["0", "1", "2"]
    assert data.lengths.tolist() == [5, 0, 2] and len(data) == 3
    assert bytes(data[0]["ids"].astype(np.uint8)) == b"abcde" and data[0]["label"] == 2 and data[1]["ids"].shape == (0,)
    data = labelled(tmp_path, [{"text": "a", "label": "pos"}, {"text": "b", "label": "neg"}, {"text": "b", "label": "pos"}])
    assert data.labels.tolist() == [1, 0, 1] and data.classes == ["neg", "pos"]
    valid = labelled(tmp_path, [{"text": "a", "label": "pos"}], "valid.jsonl", like=data)
    assert valid.labels.tolist() == [1] and valid.classes == ["neg", "pos"]
    named = labelled(tmp_path, [{"text": "a", "label": 0}], "named.jsonl", names=["neg", "pos"])
    assert named.labels.tolist() == [0] and named.classes == ["neg", "pos"]
    chosen = labelled(tmp_path, [{"text": "a", "label": 0, "b": "text", "c": 3}], "chosen.jsonl", columns=("b", "c"))
    assert chosen.labels.tolist() == [0] and chosen.classes == ["3"] and len(chosen[0]["ids"]) == 4
    assert labelled(tmp_path, [{"text": "a", "label": True}], "bool.jsonl", names=["a", "b", "c"]).classes == ["a", "b", "c"]


def test_the_order_of_names_that_the_labels_have_is_the_given_one(tmp_path):
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}]
    data = labelled(tmp_path, rows, names=["good", "fair", "bad"])
    assert data.labels.tolist() == [0, 2] and data.classes == ["good", "fair", "bad"]
    assert labelled(tmp_path, rows, names=["positive", "negative"]).classes == ["bad", "good"]  # names of something else


def test_numbers_that_do_not_occur_are_no_classes(tmp_path):
    stars = labelled(tmp_path, [{"text": "a", "label": i % 5 + 1} for i in range(10)])
    assert stars.classes == ["1", "2", "3", "4", "5"] and stars.labels.tolist() == [0, 1, 2, 3, 4] * 2
    valid = labelled(tmp_path, [{"text": "a", "label": 5}], "valid.jsonl", like=stars)
    assert valid.labels.tolist() == [4]
    again = labelled(tmp_path, [{"text": "a", "label": 2}], "again.jsonl", names=stars.classes)  # of a resolved recipe
    assert again.labels.tolist() == [1] and again.classes == stars.classes
    earlier = labelled(tmp_path, [{"text": "a", "label": 5}], "earlier.jsonl", n_classes=6)
    assert earlier.labels.tolist() == [5] and earlier.classes == ["0", "1", "2", "3", "4", "5"]
    told = error(labelled, tmp_path, [{"text": "a", "label": 0}], "valid.jsonl", like=stars)
    assert "label 0 is not one of the 5 classes of" in told and "(1, 2, 3, 4, 5)" in told and "task.classes" in told


def test_names_that_look_like_numbers_stay_names_in_every_split(tmp_path):
    train = labelled(tmp_path, [{"text": "a", "label": "none"}, {"text": "b", "label": "7"}])
    valid = labelled(tmp_path, [{"text": "a", "label": "7"}], "valid.jsonl", like=train)
    assert train.classes == valid.classes == ["7", "none"] and valid.labels.tolist() == [0]
    assert "test.jsonl: row 2: label 1 is not one of the 2 classes of" in error(
        labelled, tmp_path, [{"text": "a", "label": 7}, {"text": "a", "label": 1}], "test.jsonl", like=train
    )


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_numbers_have_the_names_of_hugging_faces_features(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    if kind == "parquet":
        table.to_parquet(str(tmp_path / "train.parquet"))
    else:
        datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "all"))
    path = tmp_path / "train.parquet" if kind == "parquet" else find_split(tmp_path / "all", "train")
    data = LabelledDataset(path, ByteTokenizer(), 5)
    assert data.classes == ["bad", "good"] and data.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"text": "a", "label": 7}, "row 3: label 7 is not one of the 2 classes (0, 1)"),
        ({"text": "a", "label": "x"}, "row 3: label 'x' is not a whole number"),
        ({"text": "a", "label": 0.5}, "row 3: label 0.5 is neither"),
        ({"text": "a", "label": None}, "row 3: label None is neither"),
        ({"text": "a", "label": ""}, "row 3: label '' is neither"),
        ({"text": "a"}, "row 3 has no column 'label'; it has: text."),
        ({"label": 1}, "row 3 has no column 'text'; it has: label."),
        ({"text": 5, "label": 1}, "row 3: column 'text' holds 5, not text."),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, words):
    good = {"text": "a", "label": 1}
    for _ in range(2):  # the second time from the cache, where the row could be kept
        assert f"train.jsonl: {words}" in error(labelled, tmp_path, [good, good, bad], n_classes=2)


def test_other_label_errors(tmp_path):
    names = [{"text": "a", "label": "pos"}, {"text": "b", "label": "neutral"}]
    train = labelled(tmp_path, [{"text": "a", "label": "pos"}, {"text": "b", "label": "neg"}])
    told = error(labelled, tmp_path, names, "valid.jsonl", like=train)
    assert "valid.jsonl: row 2: label 'neutral' is not one of the 2 classes of" in told and "train.jsonl (neg, pos)" in told
    numbers = labelled(tmp_path, [{"text": "a", "label": 0}, {"text": "b", "label": 1}], "numbers.jsonl")
    told = error(labelled, tmp_path, [{"text": "a", "label": 2}], "valid.jsonl", like=numbers)
    assert "valid.jsonl: row 1: label 2 is not one of the 2 classes of" in told and "numbers.jsonl (0, 1)" in told
    assert "no text column (text, sentence, review, content); there are: a, label. Set data.text=NAME" in error(
        labelled, tmp_path, [{"a": "b", "label": 1}]
    )
    hidden = {"text": "a", "label": -1}
    assert "row 1: label -1 is not one of the 2 classes (bad, good)" in error(labelled, tmp_path, [hidden], names=["bad", "good"])
    assert "no label column" in error(labelled, tmp_path, [{"text": "b", "lable": 1}])
    path = write(tmp_path / "train.txt", "a\n")
    assert "a text file has no columns, so no label" in error(LabelledDataset, path, ByteTokenizer(), 5)


@pytest.mark.shared_data
def test_sst2_ids_equal_transformers(shared_data):
    from transformers import BertTokenizerFast

    folder = shared_data / "tokenizers/bert-base-uncased"
    data = LabelledDataset(find_split(shared_data / "sst2", "valid"), load(folder), 20)
    rows = list(read_rows(shared_data / "sst2/dev.tsv.xz"))
    theirs = BertTokenizerFast.from_pretrained(folder, do_lower_case=True)([r["sentence"] for r in rows], add_special_tokens=False)["input_ids"]
    assert len(data) == 872 and int(data.labels.sum()) == 444 and data.classes == ["0", "1"]
    assert [data[i]["ids"].tolist() for i in range(872)] == [ids[:20] for ids in theirs]


def test_of_a_labelled_text_so_many_characters_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FIELD", 8)
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 50, "label": 0}) + "\n" + json.dumps({"text": "abc", "label": 1}) + "\n")
    assert LabelledDataset(path, ByteTokenizer(), 20).lengths.tolist() == [8, 3]
