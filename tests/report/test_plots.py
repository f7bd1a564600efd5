"""The plots of a report, and what has none."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
from report_parts import rows_of, variant
from svg_parts import check_texts, elements, texts

from gradus.pictures import bars, lines
from gradus.report import plots
from gradus.report.runs import read


def test_what_was_measured_once_or_twice_is_in_the_table_alone(folders, tmp_path):
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.5), (3, 1.2)], unit="nats"), *rows_of("valid/loss", [(2, 1.6)]), *rows_of("valid/exact_match", [(1, 0.4), (2, 0.5)])]
    run = variant(folders / "short", tmp_path / "once", rows=rows)
    found = read([str(run)])
    captions = [figure.caption for figure in plots.of_runs(found)]
    assert captions[0].startswith("The loss by step. Solid lines")
    assert next(plots.of_runs(found, "seconds")).caption.startswith("The loss by seconds of training. Solid lines")
    assert not any("exact match" in caption for caption in captions) and not any("learning rate" in caption for caption in captions)
    assert plots.not_drawn(found) == "The report has no plot of exact match, measured fewer than 3 times."


def test_a_report_of_many_metrics_draws_some_and_says_so(folders, tmp_path):
    rows = [row for i in range(300) for row in rows_of(f"valid/m{i}", [(1, i), (2, i + 1), (3, i)])]
    found = read([str(variant(folders / "short", tmp_path / "many", rows=rows))])
    assert sum(len(figure.panels) for figure in plots.of_runs(found) if "by step" in figure.caption) == plots.METRICS
    assert plots.not_drawn(found) == f"The report has plots of the first {plots.METRICS} metrics only, {300 - plots.METRICS} more are in the table."


@pytest.mark.parametrize("most", [3, 12_345, 1_234_567_890, 1e-7])
def test_tick_labels_do_not_run_into_each_other(most):
    """Neither along an axis nor, where the values are nearly the same, up it: these are written with the digits in which they differ."""
    drawn = lines({"a": [(0, most), (most, most * 1.001)]}, "t", x="step", **plots.PANEL)
    labels = [text for text in texts(drawn.svg())[1:] if re.fullmatch(r"-?[\d.,e-]+( [mb]illion)?", text[0])]
    lying = [text for text in labels if text[4] == max(label[4] for label in labels)]
    upright = sorted((text for text in labels if text not in lying), key=lambda text: text[2])
    assert len(lying) > 1 and all(a[3] < b[1] for a, b in itertools.pairwise(lying))
    assert len(upright) > 1 and all(a[4] < b[2] and a[0] != b[0] for a, b in itertools.pairwise(upright))
    check_texts(drawn.svg())


def test_of_many_points_the_extremes_are_drawn():
    points = [(i, float(i % 2) + 5 * (i == 7_777)) for i in range(20_000)]
    (line,) = elements(lines({"a": points}, "t"), "polyline")
    heights = [float(pair.partition(",")[2]) for pair in line.get("points").split()]
    assert len(heights) <= 1_000 and heights.count(min(heights)) == 1 and len(set(heights)) == 3


def test_names_of_bars_are_whole():
    names = ["07-checkpointing · layout.checkpointing=selective layout.micro_batch=12", "short"]
    drawn = " ".join(words for words, *_ in texts(bars(dict.fromkeys(names, 1.0), "t").svg()))
    assert all(name in drawn for name in names)


def test_the_bars_of_memory_are_those_of_their_names():
    rows = [(SimpleNamespace(name="one"), "weights", 3e6, 5e6), (SimpleNamespace(name="one"), "optimizer", 7e6, 6e6)]
    drawn = plots._memory(rows, several=False)
    wide = [float(bar.get("width")) for bar in elements(drawn, "rect")]
    left = [float(bar.get("x")) for bar in elements(drawn, "rect")]
    planned = [float(mark.get("d")[1:].split()[0]) - x for mark, x in zip(elements(drawn, "path"), left)]
    assert [*wide, *planned] == pytest.approx([part * wide[0] / 5 for part in (5, 6, 3, 7)], rel=1e-3)
    assert [words for words, *_ in texts(drawn.svg())] == ["memory of tensors", "weights", "5 MB", "optimizer", "6 MB"]
