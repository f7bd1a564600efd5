"""What was predicted and what was measured, side by side."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradus.hardware.tables import table as columns
from gradus.plan.show import duration, size
from gradus.proof.predict import STATE

PEAK = "memory/allocated"
KEPT = ("process", "reserved", "device")  # planned of the largest batch: what a process has taken, it keeps
LABELS = {
    **{f"memory/{name}": name for name in STATE}, "memory/rest": "activations and the rest", "memory/allocated": "tensors at the peak",
    "memory/largest": "tensors with the largest batch", "memory/process": "process at the peak", "memory/reserved": "reserved at the peak", "memory/device": "device", "time/step": "step",
    "traffic/sent": "sent per step", "energy/step": "energy per step",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """One figure. Either side may be absent; error: measured against predicted, (predicted - measured) / measured. batch: what it is of,
    where others are of another."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    batch: str | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or not self.measured else (self.predicted - self.measured) / self.measured

    def summary(self) -> dict[str, float | str]:
        found = {"predicted": self.predicted, "measured": self.measured, "error": self.error, "batch": self.batch}
        return {k: v for k, v in found.items() if v is not None}

    def cells(self) -> list[str]:
        """Figure, predicted, measured, error."""
        label = LABELS[self.name] + (f" ({self.batch})" if self.batch else "")
        return [f"  {label}", shown(self.predicted, self.unit), shown(self.measured, self.unit), signed(self.error)]


def pairs(predicted: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[Pair]:
    """What was predicted of the measured step (KEPT: of the largest batch) beside what was measured; nothing where nothing was. Where
    the largest batch was predicted to need another peak, that promise too, which one step does not measure."""
    said = {r["name"]: r for r in predicted if r.get("step") is not None or r["name"].removeprefix("memory/") in KEPT}
    seen = {r["name"]: r for r in measured}
    names = [*LABELS, *sorted(name for name in {*said, *seen} if name.startswith("traffic/") and name not in LABELS)]
    wanted = [name for name in names if name in seen and (name in said or name.startswith(("time", "energy")))]
    found = [Pair(name, seen[name]["unit"], said.get(name, {}).get("value"), seen[name]["value"]) for name in wanted]
    promised = next((r for r in predicted if r["name"] == PEAK and r.get("step") is None), None)
    if promised and PEAK in wanted and promised["value"] != said[PEAK]["value"]:
        at, step = wanted.index(PEAK), said[PEAK]
        found[at] = dataclasses.replace(found[at], batch=f"step {step['step']}: {step.get('batch')}")
        found.insert(at + 1, Pair("memory/largest", "bytes", promised["value"], None, promised.get("batch")))
    return found


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return size(value) if unit == "bytes" else duration(value) if unit == "s" else f"{value:.3g} {unit}"


def signed(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def table(found: Sequence[Pair]) -> list[str]:
    """predicted | measured | error, a line a figure. Collectives by kind are in the rows alone."""
    body = [f.cells() for f in found if f.name in LABELS]
    return columns(["the plan", "predicted", "measured", "error"], body, {1, 2, 3}) if body else []


def errors_table(runs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Each figure's error by run, and the median and the largest of their sizes."""
    errors = {run: {f.name: f.error for f in found if f.error is not None} for run, found in runs.items()}
    names = [name for name in LABELS if any(name in of for of in errors.values())]
    body = [[run, *(signed(of.get(name)) for name in names)] for run, of in errors.items()]
    sizes = [[abs(of[name]) for of in errors.values() if name in of] for name in names]
    body += [[word, *(f"{function(s):.1%}" for s in sizes)] for word, function in (("median", statistics.median), ("largest", max))]
    return columns(["error", *(LABELS[name] for name in names)], body, set(range(1, len(names) + 1)))
