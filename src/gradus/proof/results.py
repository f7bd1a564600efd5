"""The rows of a study as one table: planned, measured, error, ratio; for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from gradus.hardware.tables import table as columns
from gradus.plan.show import duration, size
from gradus.proof.pairs import signed

LABELS = {  # of rows, in the order of the columns
    "samples_per_s": "samples/s", "ratio": "×", "time/step": "step", "time/first_call": "first call", "time/run": "run", "time/epoch": "h/epoch",
    "memory/allocated": "tensors", "ratio/memory": "of tensors", "memory/device": "device", "memory/process": "process",
    "ratio/process": "of process", "traffic/sent": "sent", "data_wait": "waits for data", "loss": "loss",
    "deviation/loss": "farthest loss", "deviation/grad_norm": "its gradient norm", "train/loss": "training loss",
}  # fmt: skip
HIDDEN = ("time/warm_up", "parameters", "energy/run", "memory/weights", "memory/gradients", "memory/optimizer", "memory/rest", "memory/reserved",
          "samples_per_s/undisturbed", "ratio/undisturbed")  # fmt: skip
Record = dict[str, Any]


class Table:
    """Rows by configuration and name."""

    def __init__(self, rows: Sequence[Record], wanted: Sequence[str] = ()):
        measured = [r for r in rows if r.get("kind") == "measured"]
        self.names = list(dict.fromkeys(r["configuration"] for r in measured))
        self.measured = {(r["configuration"], r["name"]): r for r in measured}
        self.failed = {r["configuration"]: r["value"] for r in measured if r["name"] == "failed"}
        self.planned: dict[tuple[str, str], Record] = {}
        for r in rows:  # of the largest batch, where that was planned; else of the one step
            if r.get("kind") == "predicted" and not ((r["configuration"], r["name"]) in self.planned and r.get("step") is not None):
                self.planned[r["configuration"], r["name"]] = r
        there = dict.fromkeys(r["name"] for r in measured if r["name"] != "failed")
        order = [*(name for name in LABELS if name in there), *(n for n in there if n not in LABELS and n not in HIDDEN)]
        order = [name for name in order if not name.startswith(("traffic/", "time/step/")) or name == "traffic/sent"]
        self.columns = [name for name in wanted if name in there] if wanted else order

    def both(self, name: str) -> bool:
        return any((c, name) in self.planned and (c, name) in self.measured for c in self.names)

    def head(self) -> list[str]:
        cells = ["configuration"]
        for name in self.columns:
            label = LABELS.get(name, name)
            cells += [f"{label} planned", "measured", "error"] if self.both(name) else [label]
        return cells

    def body(self) -> Iterator[list[str]]:
        for c in self.names:
            cells = [c]
            for name in self.columns:
                r, planned = self.measured.get((c, name)), self.planned.get((c, name))
                if self.both(name):
                    cells.append(shown(name, planned and planned["value"], planned))
                cells.append(shown(name, r and r["value"], r))
                if self.both(name):
                    cells.append(signed((planned["value"] - r["value"]) / r["value"]) if r and planned and r["value"] else "-")
            yield cells

    def errors(self) -> Iterator[str]:
        """The sizes of the plan's errors, over all configurations."""
        for name in self.columns:
            pairs = [(self.planned[c, name]["value"], self.measured[c, name]["value"]) for c in self.names if self._pair(c, name)]
            if len(pairs) > 1:
                sizes = [abs(p - m) / m for p, m in pairs if m]
                yield f"{LABELS.get(name, name)}: planned with a median error of {statistics.median(sizes):.1%}, at most {max(sizes):.1%} ({len(sizes)})"

    def _pair(self, c: str, name: str) -> bool:
        return (c, name) in self.planned and (c, name) in self.measured


def shown(name: str, value: Any, row: Record | None) -> str:
    """A cell: the value; of several samples with the lowest and highest, of several seeds with the standard deviation."""
    if value is None or row is None:
        return "-"
    if isinstance(value, str):
        return value
    unit = row.get("unit", "")
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return duration(value)
    if name.startswith("deviation/"):
        return f"{value:.1e}"
    if name == "data_wait":
        return f"{value:.1%}"
    text = figure(value)
    if row.get("std") is not None:
        return f"{text} ± {row['std']:.2g}"
    if name in ("samples_per_s", "ratio") and len(row.get("samples", ())) > 1:
        text += f" [{figure(row['low'])}, {figure(row['high'])}]"
    return text


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def conditions_line(rows: Sequence[Record]) -> str:
    """What all rows share of their conditions."""
    r = next((r for r in rows if r.get("kind") == "measured" and "cpu" in r), None)
    if r is None:
        return ""
    threads = {str(r["threads"]) for r in rows if "threads" in r}
    words = [r["cpu"], f"{r['cpus']} processors", f"PyTorch {r['versions']['torch']}"]
    words += [f"threads a process: {', '.join(sorted(threads))}"] if threads else []
    words += [f"{r['steps']} steps a round after {r['warm_up']}"] if "steps" in r else []
    rounds = max((len(r.get("samples", ())) for r in rows), default=0)
    words += [f"median of {rounds} rounds [lowest, highest]"] if rounds > 1 and "steps" in r else []
    disturbed = sum(r.get("retaken", 0) for r in rows if r["name"] == "samples_per_s")
    words += [f"{disturbed} samples taken again, since others used the processors"] if disturbed else []
    return "; ".join(words)


def lines(rows: Sequence[Record], wanted: Sequence[str] = ()) -> Iterator[str]:
    """For a terminal."""
    table = Table(rows, wanted)
    yield from columns(table.head(), list(table.body()), set(range(1, 99)))
    yield from (f"{c}: {why}" for c, why in table.failed.items())
    yield from table.errors()
    yield conditions_line(rows)


def markdown(rows: Sequence[Record], wanted: Sequence[str] = ()) -> Iterator[str]:
    """For a page."""
    table = Table(rows, wanted)
    head = table.head()
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    yield from ("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in table.body())
    yield ""
    yield from (f"{c}: {why}  " for c, why in table.failed.items())
    yield from (f"{line}  " for line in table.errors())
    yield conditions_line(rows) + "."
