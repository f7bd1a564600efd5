"""Figures that were predicted, each beside what was measured of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradus.plan.show import value_text
from gradus.proof.predict import STATE
from gradus.rows import Row
from gradus.text import table as columns

PEAK = "memory/allocated"
# planned of the largest batch: a process keeps the memory that it has
OF_LARGEST = ("memory/process", "memory/reserved", "memory/device")
LABELS = {
    **{f"memory/{name}": name for name in STATE},
    "memory/rest": "activations and the rest",
    "memory/allocated": "tensors at the peak",
    "memory/largest": "tensors with the largest batch",
    "memory/process": "process at the peak",
    "memory/reserved": "reserved at the peak",
    "memory/device": "device",
    "time/step": "step",
    "traffic/sent": "sent per step",
    "energy/step": "energy per step",
}
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One figure. Either side may be absent. batch: what it is of, where others are of another."""

    name: str
    unit: str
    predicted: float | str | None
    measured: float | str | None
    batch: str | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where one is no number: what is not finite is a word in a file."""
        numbers = isinstance(self.predicted, int | float) and isinstance(self.measured, int | float)
        return (self.predicted - self.measured) / self.measured if numbers and self.measured else None

    def summary(self) -> dict[str, float | str]:
        values = {"predicted": self.predicted, "measured": self.measured, "error": self.error, "batch": self.batch}
        return {k: v for k, v in values.items() if v is not None}

    def cells(self) -> list[str]:
        """Figure, predicted, measured, error."""
        label = figure_name(self.name) + (f" ({self.batch})" if self.batch else "")
        sides = (self.predicted, self.measured)
        like = self.measured if self.error is not None else None  # both in one unit
        texts = ("-" if value is None else value_text(Row(self.name, value, self.unit), like) for value in sides)
        return [f"  {label}", *texts, signed(self.error)]


def figure_name(name: str) -> str:
    """Of what is planned and measured."""
    return LABELS.get(name, name.replace("/", ": ").replace("_", " "))


def joined(predicted: Mapping[Any, Record], measured: Mapping[Any, Record]) -> dict[Any, Pair]:
    """Every figure of either side, by the key that its rows have."""
    pairs = {}
    for key in {**measured, **predicted}:
        planned, row = predicted.get(key), measured.get(key)
        either = row or planned
        values = (side and side["value"] for side in (planned, row))
        pairs[key] = Pair(either["name"], either.get("unit", ""), *values)
    return pairs


def pairs_of_run(predicted: Sequence[Record], measured: Sequence[Record]) -> list[Pair]:
    """Each figure of the measured step beside its prediction (OF_LARGEST: of the largest batch); times and energy also
    without one. Where the largest batch was predicted to need another peak, one step does not measure that: the
    promise follows as memory/largest."""
    of_step = {r["name"]: r for r in predicted if r.get("step") is not None or r["name"] in OF_LARGEST}
    pairs = joined(of_step, {r["name"]: r for r in measured})
    traffic = sorted(name for name in pairs if name.startswith("traffic/") and name not in LABELS)
    ordered = [pairs[name] for name in (*LABELS, *traffic) if name in pairs and pairs[name].measured is not None]
    shown = [p for p in ordered if p.predicted is not None or p.name.startswith(("time", "energy"))]
    promise = next((r for r in predicted if r["name"] == PEAK and r.get("step") is None), None)
    for i, peak in enumerate(shown):
        if promise and peak.name == PEAK and peak.predicted != promise["value"]:
            step, largest = of_step[PEAK], Pair("memory/largest", "bytes", promise["value"], None, promise.get("batch"))
            peak = dataclasses.replace(peak, batch=f"step {step['step']}: {step.get('batch')}")
            return [*shown[:i], peak, largest, *shown[i + 1 :]]
    return shown


def signed(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def table(pairs: Sequence[Pair]) -> list[str]:
    """predicted | measured | error, a line for each figure. Collectives by kind are in the rows alone."""
    body = [pair.cells() for pair in pairs if pair.name in LABELS]
    return columns(["the plan", "predicted", "measured", "error"], body, {1, 2, 3}) if body else []


def errors_table(runs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Each figure's error by run, and the median and the largest of their sizes."""
    errors = {run: {p.name: p.error for p in pairs if p.error is not None} for run, pairs in runs.items()}
    names = [name for name in LABELS if any(name in of_run for of_run in errors.values())]
    body = [[run, *(signed(of_run.get(name)) for name in names)] for run, of_run in errors.items()]
    sizes = [[abs(of_run[name]) for of_run in errors.values() if name in of_run] for name in names]
    for word, of in (("median", statistics.median), ("largest", max)):
        body.append([word, *(f"{of(s):.1%}" for s in sizes)])
    return columns(["error", *(LABELS[name] for name in names)], body, set(range(1, len(names) + 1)))
