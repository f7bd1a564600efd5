"""The page of a profile: what `gradus profile` wrote as rows, to read. A pure function of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files, pictures
from gradus.measure.profile import below, time_table
from gradus.report.blocks import Block, Code, Figure, Heading, Table, Text, plain
from gradus.report.page import to_html
from gradus.report.report import fact_text
from gradus.rows import read_rows
from gradus.text import milliseconds

CONDITIONS = (
    *("recipe", "device", "gpu", "precision", "samples", "tokens", "recorded_steps"),
    *("host", "cpu", "cpus", "threads", "load", "versions"),
)
Row = dict[str, Any]


def page(folder: Path) -> Iterator[str]:
    """Write profile.html from the folder's rows.jsonl and, of CUDA, memory_summary.txt; yields what is printed.

    Equal rows give equal bytes."""
    rows, file = read_rows(folder / "rows.jsonl"), folder / "memory_summary.txt"
    summary = file.read_text(encoding="utf-8") if rows[0]["device"].startswith("cuda") else ""
    files.write_text(folder / "profile.html", to_html(f"Profile: {rows[0]['recipe']}", content(rows, summary)))
    yield f"{folder / 'profile.html'}: the page; it needs no other file"


def content(rows: Sequence[Row], summary: str = "") -> Iterator[Block]:
    by = {row["name"]: row for row in rows}
    step, recorded = by["time/step"], by["time/step/recorded"]
    yield Heading(1, f"Profile: {step['recipe']}")
    alone, seen = milliseconds(step["value"]), milliseconds(recorded["value"])
    text = f"A step takes {alone} ms, and {seen} ms while it is recorded: the shares are of the latter. "
    text += f"A step allocates memory {by['memory/allocations']['value']:,.0f} times"
    if waits := by.get("time/waits"):
        text += f", and waits {waits['calls']:,.1f} times for the GPU, {milliseconds(waits['value'])} ms in all"
    yield plain(f"{text}.")
    yield Heading(2, "What to try next")
    hints = below(rows, "hint")
    for name, row in hints.items():
        yield Text([("code", name), ("plain", f": {row['text']}.")], item=True)
    if not hints:
        yield plain("No setting of the layout stands out.")
    times, memory = _figures(rows)
    yield Heading(2, "Where the step's time goes")
    yield times
    yield from tables(rows)
    yield Heading(2, "Memory")
    yield memory
    if summary:
        yield Code("torch.cuda.memory_summary()", summary)
    yield Heading(2, "How it was measured")
    yield Table(["", ""], [[k.replace("_", " "), fact_text(k, step[k])] for k in CONDITIONS if step.get(k)], words=True)
    trace = f"{step['recipe']}.1.pt.trace.json"
    parts = [("plain", "The traces beside this page ("), ("code", trace), ("plain", ", one per cycle) open in ")]
    parts += [("code", "ui.perfetto.dev"), ("plain", " and "), ("code", "chrome://tracing"), ("plain", "; ")]
    yield Text(
        [*parts, ("code", "tensorboard --logdir ."), ("plain", " shows them with the plugin torch-tb-profiler.")]
    )


def tables(rows: Sequence[Row]) -> Iterator[Block]:
    """By operation and by place in the code; categories and phases are in the plot."""
    yield Heading(2, "Top operations")
    caption = "The time of an operation is per step, without the operations that it calls."
    yield Table(*time_table(rows, "operation"), caption)
    yield Heading(2, "Where they are called")
    caption = "The backward pass of an operation counts where the operation was called."
    yield Table(*time_table(rows, "place"), caption)


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    panels = []
    for kind in ("phase", "category"):
        own = {name: row for name, row in below(rows, f"time/{kind}").items() if row["share"] >= 0.0005}
        notes = {name: f", {row['share']:.1%}" for name, row in own.items()}
        values = {name: row["value"] * 1e3 for name, row in own.items()}
        panels.append(pictures.bars(values, f"ms per step, by {kind}", notes=notes, width=470))
    text = "Bars show the time of a recorded step by phase and by category of operations; each sums to the step."
    yield Figure(panels, text)
    levels: dict[str, dict[float, float]] = {}
    for row in (row for row in rows if row["name"].startswith("memory/timeline/")):
        levels.setdefault(row["name"].rpartition("/")[2], {})[row["ms"]] = row["value"] / 1e6
    heights, times = {name: [*own.values()] for name, own in levels.items()}, [*next(iter(levels.values()))]
    drawn = pictures.area(heights, times, "memory of tensors", x="ms of the step", unit="MB")
    yield Figure([drawn], "Areas show the memory of tensors within the last recorded step, by component.")
