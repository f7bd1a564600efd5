"""The page of a profile: what `gradus profile` wrote as rows, to read. A pure function of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.errors import UserError
from gradus.report import plots
from gradus.report.blocks import Block, Code, Heading, Inline, Table, Text, plain
from gradus.report.page import to_html
from gradus.report.report import fact_text
from gradus.rows import read_rows
from gradus.text import milliseconds, size

TOP = 10
CONDITIONS = (
    *("recipe", "device", "gpu", "precision", "samples", "tokens", "recorded_steps"),
    *("host", "cpu", "cpus", "threads", "load", "versions"),
)
Row = dict[str, Any]


def page(folder: Path) -> Iterator[str]:
    """Write profile.html from the folder's rows.jsonl and, of CUDA, memory_summary.txt; yields what is printed.

    Equal rows give equal bytes. Without matplotlib there is a note in place of the page."""
    rows, file = read_rows(folder / "rows.jsonl"), folder / "memory_summary.txt"
    summary = file.read_text(encoding="utf-8") if rows[0]["device"].startswith("cuda") else ""
    try:
        blocks = list(content(rows, summary))
    except UserError as e:
        yield f"note: no page: {e} The rows and the lines above hold the same figures."
        return
    files.write_text(folder / "profile.html", to_html(f"Profile: {rows[0]['recipe']}", blocks))
    yield f"{folder / 'profile.html'}: the page; it needs no other file"


def content(rows: Sequence[Row], summary: str = "") -> Iterator[Block]:
    """Raises UserError without matplotlib."""
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
    yield from (Text(_hint(name, row), item=True) for name, row in hints)
    if not hints:
        yield plain("No setting of the layout stands out.")
    times, memory = plots.drawn(_figures(rows))
    yield Heading(2, "Where the step's time goes")
    yield times
    yield from tables(rows)
    yield Heading(2, "Memory")
    yield memory
    yield from memory_tables(rows)
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


def below(rows: Sequence[Row], path: str) -> list[tuple[str, Row]]:
    """(the rest of its name, row) of what is named below a path."""
    return [(row["name"].removeprefix(f"{path}/"), row) for row in rows if row["name"].startswith(f"{path}/")]


def _hint(name: str, row: Row) -> Inline:
    return [("code", name), ("plain", f": {row['text']}.")]


def cost(row: Row) -> tuple[str, str]:
    """ms, and their share."""
    return milliseconds(row["value"]), f"{row['share']:.1%}"


def tables(rows: Sequence[Row]) -> Iterator[Block]:
    """By operation and by place in the code; categories and phases are in the plot."""
    yield Heading(2, "Top operations")
    cells = [
        [name, row["category"], *cost(row), f"{row['calls']:,.0f}", row["place"] or "–"]
        for name, row in below(rows, "time/operation")[:TOP]
    ]
    head = ["operation", "category", "ms", "share", "calls", "mostly in"]
    yield Table(head, cells, "The time of an operation is per step, without the operations that it calls.")
    yield Heading(2, "Where they are called")
    cells = [[name, *cost(row), row["source"] or "–"] for name, row in below(rows, "time/place")[:TOP]]
    caption = "The backward pass of an operation counts where the operation was called."
    yield Table(["module, or file", "ms", "share", "mostly from"], cells, caption)


def memory_tables(rows: Sequence[Row]) -> Iterator[Block]:
    by = {row["name"]: row for row in rows}
    known = {name: name for name in ("weights", "gradients", "optimizer")}
    known |= {"activations": "activations, of one micro-batch", "peak": "peak of the first two steps"}
    yield Table(["component", "size"], [[text, size(by[f"memory/{name}"]["value"])] for name, text in known.items()])
    passes: dict[str, dict[str, str]] = {}
    for name, row in below(rows, "memory"):
        when, _, kind = name.partition("/")
        if kind in ("allocated", "peak", "reserved"):
            step = f"step {row['step']}: {when}" if row.get("step") else when
            passes.setdefault(step, {})[kind] = size(row["value"])
    kinds = list(next(iter(passes.values())))
    yield Table(["after", *kinds], [[name, *row.values()] for name, row in passes.items()])


# ---------------------------------------------------------------- plots


def _figures(rows: Sequence[Row]) -> Iterator[plots.Plot]:
    panels = []
    for kind in ("phase", "category"):
        own = [(name, row) for name, row in below(rows, f"time/{kind}") if row["share"] >= 0.0005]
        axes = plots.bars([name for name, _ in own], 0.25)
        axes.barh(range(len(own)), [row["value"] * 1e3 for _, row in own], 0.7, color=plots.COLOURS[0])
        for place, (_, row) in enumerate(own):
            axes.text(row["value"] * 1e3, place, f" {row['share']:.1%}", va="center")
        axes.set(xlabel="ms per step", title=f"by {kind}")
        axes.margins(x=0.18)
        panels.append(axes)
    yield "Bars show the time of a recorded step by phase and by category of operations; each sums to the step.", panels
    (axes,) = plots.panels(1, 2.8, plots.BARS)
    levels: dict[str, list[tuple[float, float]]] = {}
    for name, row in below(rows, "memory/timeline"):
        levels.setdefault(name, []).append((row["ms"], row["value"] / 1e6))
    times = [at for at, _ in next(iter(levels.values()))]
    heights = [[value for _, value in points] for points in levels.values()]
    axes.stackplot(times, heights, labels=list(levels), colors=plots.COLOURS, step="mid", lw=0)
    axes.set(xlabel="ms of the step", ylabel="MB", xlim=(times[0], times[-1]))
    axes.grid(alpha=0.25)
    yield "Areas show the memory of tensors within the last recorded step, by component.", [axes]
