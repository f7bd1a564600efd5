"""What the model of a run answers: its classes confused, images with their answers, answers along its training."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from gradus import pictures
from gradus.infer import grid
from gradus.report.blocks import Block, Figure, Table
from gradus.report.runs import Prediction, Run
from gradus.text import cell, short

CLASSES, STEPS = 20, 12  # that are shown at most


def answered(run: Run, rows: Sequence[Prediction]) -> Iterator[Block]:
    """Answers at the evaluations of a run, the classes that predictions confuse, and their images."""
    at_steps = itertools.groupby(run.answers, operator.itemgetter("step"))
    if body := [[str(step), *(short(row["value"], 120) for row in own)] for step, own in at_steps]:
        most = max(map(len, body))  # evaluate.answers may change when a run goes on
        body = [row + [""] * (most - len(row)) for row in body]
        head = ["step", *[""] * (most - 1)]
        some = body[:: -len(body) // STEPS][::-1]  # the last among them
        yield Table(head, some, f"Validation samples of {run.name} at the evaluations of its training.", words=True)
    if pairs := [(row.truth, row.label) for row in rows if row.truth and row.label]:
        yield from confusion(pairs, run.name)
    if seen := [row.model_dump(exclude_none=True) | {"pixels": np.array(row.pixels)} for row in rows if row.pixels]:
        yield Figure([grid.of_predictions(seen)], f"The {len(seen)} images of {run.name} with the largest loss.")


def confusion(pairs: Sequence[tuple[str, str]], name: str) -> Iterator[Block]:
    """pairs: (right class, answer) of each sample. Of many classes those with the lowest F1 are shown. Precision is 0
    of a class that was never answered."""
    names, ids = np.unique(pairs, return_inverse=True)
    matrix = np.zeros((len(names), len(names)))
    np.add.at(matrix, tuple(ids.reshape(-1, 2).T), 1)
    right, true, said = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    f1, shares = 2 * right / (true + said), matrix / true.clip(1)[:, None]
    shown = np.sort(f1.argsort(kind="stable")[:CLASSES])
    few = f" Shown: the {len(shown)} of {len(names)} classes with the lowest F1." * (len(shown) < len(names))
    drawn = pictures.heatmap(
        shares[shown][:, shown], *[names[shown].astype("U24")] * 2, "Confusion matrix",
        axes=("right class", "answer"), cell=36, numbers=True, most=1.0,
    )  # fmt: skip
    yield Figure([drawn], f"The share of each answer (a column) among the samples of a class (a row), {name}.{few}")
    body = []
    for i in shown:
        others = matrix[i] * (names != names[i])
        most = f"{names[others.argmax()]} ({others.max():.0f})" if others.any() else "–"
        body.append([names[i], *map(cell, (true[i], right[i] / max(1, said[i]), shares[i, i], f1[i])), most])
    head = ["class", "samples", "precision", "recall", "F1", "most often taken for"]
    yield Table(head, body, f"Samples, figures and confusion of each class, {name}.{few}")
