"""`gradus report`: one HTML file and one PDF of runs, to read and to hand in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.errors import UserError
from gradus.limits import read_text
from gradus.plan.show import duration, size
from gradus.proof.pairs import signed
from gradus.report import plots, runs
from gradus.report.blocks import Block, Code, Figure, Heading, Table, from_markdown, plain
from gradus.report.page import to_html, to_pdf
from gradus.report.runs import Run

NOTES = 2**20  # bytes of notes at most
KEPT = (  # of environment.json
    *("cpu", "cpus_allowed", "cpu_flags", "threads", "gpu", "device", "memory_bytes"),
    *("os", "python", "versions", "gradus"),
)


def report(folders: Sequence[str], to: str, notes: str | None = None) -> Iterator[str]:
    """Write report.html and, with typst, report.pdf into the folder `to`; yields what is printed.

    notes: a Markdown file with one's own discussion, which comes after the tables. Equal rows give equal bytes. Raises
    UserError for folders that hold no run, and where matplotlib is not installed.
    """
    found = runs.read(folders)
    text = read_text(Path(notes), NOTES) if notes else ""
    title = ", ".join(dict.fromkeys(run.config.name for run in found))
    blocks = list(content(title, found, text))
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "report.html", to_html(title, blocks))
    yield f"{folder / 'report.html'}: {len(found)} run{'s' * (len(found) > 1)}; it needs no other file"
    try:
        to_pdf(title, blocks, folder / "report.pdf")
        yield f"{folder / 'report.pdf'}"
    except UserError as e:
        yield f"note: no PDF: {e} The HTML prints as well."


def content(title: str, found: Sequence[Run], notes: str) -> Iterator[Block]:
    yield Heading(1, title)
    yield Heading(2, "Results")
    yield from compared(found)
    yield from planned(found)
    if notes:
        yield Heading(2, "Discussion")
        yield from from_markdown(notes)
    yield Heading(2, "Plots")
    for caption, svg in plots.drawn(plots.of_runs(found)):
        yield Figure(svg, caption)
    yield Heading(2, "How it was done")
    for run in found:
        yield from appendix(run)
    for family, run in {run.config.model.family: run for run in found}.items():
        yield Code(f"The model: {family}", run.model_code)


def compared(found: Sequence[Run]) -> Iterator[Table]:
    """Speed, then quality: a line a run. Speed-up and efficiency are against the first that came to its end."""
    base = next((run for run in found if run.speed), None)
    speed, quality = [], []
    metrics = dict.fromkeys(name for run in found for name in run.summary.get("metrics", {}))
    for run in found:
        s, layout = run.summary, run.config.layout
        ratio = run.speed / base.speed if run.speed else None
        cells = [s and duration(s["train_runtime"]), run.speed, ratio, ratio and ratio * base.processes / run.processes]
        how = s.get("layout", "not finished")
        speed.append([run.name, how, layout.precision, cell(run.processes), cell(s.get("steps")), *map(cell, cells)])
        losses = [s.get("train_loss"), *(s.get("metrics", {}).get(name) for name in metrics)]
        quality.append([run.name, cell(s.get("epoch")), cell(s.get("samples")), *map(cell, losses)])
    caption = "Time and samples/s are those of training, from the first step on, without evaluation and checkpoints"
    caption += f"; speed-up and efficiency are against {base.name}." if base and len(found) > 1 else "."
    head = ["run", "layout", "precision", "processes", "steps", "time", "samples/s", "speed-up", "efficiency"]
    yield Table(head, speed, caption)
    yield Table(
        ["run", "epochs", "samples", "training loss", *metrics],
        quality,
        "The metrics are those of the run's last evaluation.",
    )


def cell(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def planned(found: Sequence[Run]) -> Iterator[Table]:
    rows = []
    for run in found:
        for name, before, after in run.proved:
            shown = size if name.startswith("memory/") else cell
            rows.append([run.name, name.replace("/", ": "), shown(before), shown(after), signed(before / after - 1)])
    if rows:
        yield Table(
            ["run", "figure", "planned", "measured", "error"],
            rows,
            "Planned before the first step, measured in the run.",
        )


def appendix(run: Run) -> Iterator[Block]:
    yield Heading(3, run.name)
    yield Table(
        ["machine", ""],
        [
            [key.removesuffix("_bytes").replace("_", " "), told(key, run.environment[key])]
            for key in KEPT
            if run.environment.get(key)
        ],
        words=True,
    )
    if command := run.environment.get("command"):
        yield Code(f"{run.name}: command", command)
    yield Code(f"{run.name}: recipe", run.recipe)
    yield from itertools.starmap(Code, ((f"{run.name}: {name}", text) for name, text in run.scripts.items()))
    if not run.summary:
        yield plain("This run has not come to its end.")


def told(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(name, v)}" for name, v in value.items())
    if key.endswith("_bytes"):
        return size(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
