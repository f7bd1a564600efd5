"""The plots of a report, and what has none."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from report_parts import rows_of, variant

from gradus.report import plots
from gradus.report.runs import read


def test_what_was_measured_once_or_twice_is_in_the_table_alone(folders, tmp_path):
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.5), (3, 1.2)], unit="nats"), *rows_of("valid/loss", [(2, 1.6)]), *rows_of("valid/exact_match", [(1, 0.4), (2, 0.5)])]
    run = variant(folders / "short", tmp_path / "once", rows=rows)
    found = read([str(run)])
    captions = [caption for caption, _ in plots.of_runs(found)]
    assert captions[0].startswith("The loss by step. Solid lines")
    assert next(plots.of_runs(found, "seconds"))[0].startswith("The loss by seconds of training. Solid lines")
    assert not any("exact match" in caption for caption in captions) and not any("learning rate" in caption for caption in captions)
    assert plots.not_drawn(found) == "The report has no plot of exact match, measured fewer than 3 times."


def test_a_report_of_many_metrics_draws_some_and_says_so(folders, tmp_path):
    rows = [row for i in range(300) for row in rows_of(f"valid/m{i}", [(1, i), (2, i + 1), (3, i)])]
    found = read([str(variant(folders / "short", tmp_path / "many", rows=rows))])
    assert sum(len(axes) for caption, axes in plots.of_runs(found) if "by step" in caption) == plots.METRICS
    assert plots.not_drawn(found) == f"The report has plots of the first {plots.METRICS} metrics only, {300 - plots.METRICS} more are in the table."


@pytest.mark.parametrize("most", [3, 12_345, 1_234_567_890, 1e-7])
def test_tick_labels_do_not_run_into_each_other(most):
    (left, right), named = plots.panels(2), plots.bars(["a", "b"], 0.3)
    left.plot([0, most], [most, most * 1.001])
    plots._lay_out(left)
    right.plot([0, 1], [0, 1])
    right.set_xticks([i / 30 for i in range(31)], [f"label {i}" for i in range(31)])
    plots.drawn([("caption", [left, right, named])])
    assert len(right.get_xticks()) < 31 and [label.get_text() for label in named.get_yticklabels()] == ["a", "b"]
    for axes in (left, right):
        for labels, start, end in ((axes.get_xticklabels(), "x0", "x1"), (axes.get_yticklabels(), "y0", "y1")):
            boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: getattr(box, start))
            assert len(boxes) > 1 and all(getattr(a, end) < getattr(b, start) for a, b in itertools.pairwise(boxes))


def test_names_of_bars_are_whole():
    names = ["07-checkpointing · layout.checkpointing=selective layout.micro_batch=12", "short"]
    axes = plots.bars(names, 0.3)
    assert [" ".join(label.get_text().split("\n")) for label in axes.get_yticklabels()] == names


def test_the_bars_of_memory_are_those_of_their_names():
    axes = plots._memory([(SimpleNamespace(name="one"), "weights", 3e6, 5e6), (SimpleNamespace(name="one"), "optimizer", 7e6, 6e6)], several=False)
    bars = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert bars == {"planned": [3.0, 7.0], "measured": [5.0, 6.0]} and axes.get_xlabel() == "MB"
