"""Rows are medians with the samples that their range is of, in the order of the configurations."""

from __future__ import annotations

import sys
from pathlib import Path

from gradus.proof import study, study_store
from gradus.rows import Row

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import of_samples  # noqa: E402


def test_a_row_is_the_median_of_the_samples_that_its_range_is_of():
    """Of two rounds too, and of each figure by itself: the memory of the round of median speed is not the median of memory."""
    made, speeds, bytes_of = study.Study("x", [study.Configuration("a", None)]), (1.0, 3.0), (7.0, 5.0)
    samples = [study_store.Sample(i, values={"samples_per_s": (s, ""), "memory/process": (b, "bytes")}) for i, (s, b) in enumerate(zip(speeds, bytes_of), 1)]
    rows = {row.name: row for row in of_samples(made, {"a": samples}).rows([], {})}
    assert rows["samples_per_s"].value == 2.0 and rows["memory/process"].value == 6.0
    assert (rows["samples_per_s"].conditions["low"], rows["samples_per_s"].conditions["high"]) == speeds


def test_rows_are_in_the_order_of_the_configurations():
    """A source's figures, which are known before anything is measured, do not put their configuration before the others."""
    made = study.Study("x", [study.Configuration("a", None), study.Configuration("b", None)])
    store = of_samples(made, {"a": [study_store.Sample(1, values={"loss": (1.0, "")})], "b": []})
    said = Row("loss", 2.0, "", None, {"configuration": "b", "kind": "source"})
    assert [row.conditions["configuration"] for row in store.rows([said], {})] == ["a", "b"]


def test_an_efficiency_is_the_speed_up_of_each_process():
    """By the article's figures on 1, 2 and 8 GPUs, as the article prints them; where there are as many processes there is none."""
    named = {"1": 1, "2": 2, "8": 8, "again": 1}
    made = study.Study("x", [study.Configuration(name, None, processes=n) for name, n in named.items()])
    speeds = {"1": 128, "2": 243, "8": 876, "again": 100}
    said = [Row("samples_per_s", value, "samples/s", None, {"configuration": name, "kind": "source"}) for name, value in speeds.items()]
    samples = {name: [study_store.Sample(i, values={"samples_per_s": (value * i, "samples/s")}) for i in (1, 2, 3)] for name, value in speeds.items()}
    rows = [row for row in of_samples(made, samples).rows(said, {}) if row.name == study_store.EFFICIENCY]
    for kind in ("source", "measured"):
        assert {r.conditions["configuration"]: round(r.value, 3) for r in rows if r.conditions["kind"] == kind} == {"2": 0.949, "8": 0.855}
