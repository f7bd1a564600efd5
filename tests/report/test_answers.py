"""A report's section on answers: scikit-learn's figures of the same predictions; pictures in the page and on paper."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from gradus.report import answers
from gradus.report import page as pages
from gradus.report.blocks import Figure, Table
from gradus.report.page import to_html, to_pdf
from gradus.report.report import predictions
from gradus.report.runs import Prediction, Run


def drawn(n_classes: int, n: int = 400) -> list[tuple[str, str]]:
    rng = np.random.default_rng(n_classes)
    truth = rng.integers(0, n_classes, n)
    said = np.where(rng.random(n) < 0.6, truth, rng.integers(0, n_classes - 1, n))  # the last class is rarely right
    return [(f"c{t:02}", f"c{s:02}") for t, s in zip(truth, said)]


@pytest.mark.parametrize("n_classes", [2, 9, 30])
def test_a_confusion_matrix_is_scikit_learns(n_classes):
    metrics = pytest.importorskip("sklearn.metrics")
    pairs = drawn(n_classes)
    figure, table = answers.confusion(pairs, "run")
    truth, said = zip(*pairs)
    names = sorted({*truth, *said})
    matrix = metrics.confusion_matrix(truth, said, labels=names)
    precision, recall, f1, n = metrics.precision_recall_fscore_support(truth, said, labels=names, zero_division=0)
    chosen = sorted(np.argsort(f1, kind="stable")[: answers.CLASSES])
    assert [row[0] for row in table.rows] == [names[i] for i in chosen]
    for i, row in zip(chosen, table.rows):
        assert [float(x) for x in row[1:5]] == pytest.approx([n[i], precision[i], recall[i], f1[i]], rel=1e-3)
        others = [0 if j == i else k for j, k in enumerate(matrix[i])]
        most = int(np.argmax(others))
        assert row[5] == (f"{names[most]} ({others[most]})" if others[most] else "–")
    shares = [f"{matrix[i, j] / n[i]:.2f}" for i in chosen for j in chosen]
    assert re.findall(r">(\d\.\d\d)</text>", figure.panels[0].svg()) == shares
    assert (f"the 20 of {n_classes} classes" in table.caption) == (n_classes > 20)


def test_a_class_that_never_occurs_and_one_that_is_never_answered():
    _, table = answers.confusion([("a", "b"), ("a", "c"), ("c", "c")], "run")
    assert [row[:5] for row in table.rows] == [["a", "2", "0", "0", "0"], ["b", "0", "0", "0", "0"], ["c", "1", "0.5", "1", "0.6667"]]


def test_the_section_of_a_run(tmp_path):
    """The images with the largest loss, each with its answer; what stands in the file is text wherever it is shown."""
    rows = [{"input": f"valid {i}", "label": "<b>", "truth": "cat", "right": False, "loss": 9.5 - i, "probability": 0.9, "pixels": [[[i, 0], [255, 7]]]} for i in range(3)]
    rows += [{"input": f"valid {i}", "label": "cat", "truth": "cat", "right": True, "loss": 0.1, "probability": 0.9} for i in range(3, 9)]
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run("run", tmp_path)
    blocks = list(predictions([run]))
    assert [type(block) for block in blocks] == [Figure, Table, Figure, Table]
    assert blocks[2].caption == f"The 3 images of {run.name} with the largest loss." and blocks[3].caption == f"Answers of {run.name}, the largest losses first: 6 of 9 right."
    assert blocks[3].rows[0] == ["valid 0", "<b>", "cat", "wrong", "9.5"]
    page = to_html("x", blocks)
    assert page.count("data:image/png") == 1 + 3, "the matrix, and the images"
    assert "✗ &lt;b&gt; (90%)" in page and "<b>" not in page
    assert not any("var(--" in pages._typst(block) for block in blocks), "paper has no variables"


def test_a_confusion_matrix_on_paper():
    pytest.importorskip("typst")
    assert to_pdf("x", list(answers.confusion(drawn(3), "run"))).startswith(b"%PDF")


def test_answers_along_a_training_are_a_table_by_step(tmp_path):
    steps = range(0, 300, 10)
    lines = [{"name": f"answers/{i}", "value": f"1 2 → {step} {i}", "unit": "", "step": step} for step in steps for i in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = predictions([Run("run", tmp_path)])
    assert table.head == ["step", "", ""] and 2 <= len(table.rows) <= answers.STEPS
    assert table.rows[-1] == ["290", "1 2 → 290 0", "1 2 → 290 1"]
    assert all(row[1:] == [f"1 2 → {row[0]} {i}" for i in range(2)] for row in table.rows)


def test_a_run_without_answers_has_none():
    assert not list(answers.answered(SimpleNamespace(answers=[], name="run"), [Prediction(input="a", answer="b")]))
