"""`gradus report`: one HTML file and one PDF of runs and studies, to read and to hand in."""

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
from gradus.report import plots, runs, studies, study_plots
from gradus.report.blocks import Block, Code, Figure, Heading, Table, from_markdown, plain
from gradus.report.page import to_html, to_pdf
from gradus.report.runs import Run
from gradus.report.studies import Study

NOTES = 2**20  # bytes of notes at most
KEPT = (  # of environment.json
    *("cpu", "cpus_allowed", "cpu_flags", "threads", "gpu", "device", "memory_bytes"),
    *("os", "python", "versions", "gradus"),
)


def report(folders: Sequence[str], to: str, notes: str | None = None) -> Iterator[str]:
    """Write report.html and, with typst, report.pdf into the folder `to`; yields what is printed.

    notes: a Markdown file with one's own discussion, which comes after the tables. Equal rows give equal bytes. Raises
    UserError for folders that hold no run and no study, and where matplotlib is not installed.
    """
    of_studies = [given for given in folders if studies.is_study(Path(given))]
    found, studied = runs.read(given for given in folders if given not in of_studies), studies.read(of_studies)
    text = read_text(Path(notes), NOTES) if notes else ""
    title = ", ".join(dict.fromkeys([*(run.config.name for run in found), *(study.name for study in studied)]))
    blocks = list(content(title, found, text, studied))
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "report.html", to_html(title, blocks))
    counts = [(len(found), "run", "runs"), (len(studied), "study", "studies")]
    of = ", ".join(f"{n} {many if n > 1 else one}" for n, one, many in counts if n)
    yield f"{folder / 'report.html'}: {of}; it needs no other file"
    try:
        to_pdf(title, blocks, folder / "report.pdf")
        yield f"{folder / 'report.pdf'}"
    except UserError as e:
        yield f"note: no PDF: {e} The HTML prints as well."


def content(title: str, found: Sequence[Run], notes: str, studied: Sequence[Study] = ()) -> Iterator[Block]:
    yield Heading(1, title)
    if found:
        yield Heading(2, "Results")
        yield from compared(found)
        yield from planned(found)
    for study in studied:
        yield Heading(2, f"Study: {study.name}")
        yield from studies.tables(study)
        yield from (Figure(svg, caption) for caption, svg in plots.drawn(study_plots.of_study(study)))
    if notes:
        yield Heading(2, "Discussion")
        yield from from_markdown(notes)
    if found:
        yield Heading(2, "Plots")
        yield from (Figure(svg, caption) for caption, svg in plots.drawn(plots.of_runs(found)))
    yield Heading(2, "How it was done")
    for run in found:
        yield from appendix(run)
    for study in studied:
        yield Heading(3, study.name)
        yield machine(study.machine)
        yield from studies.appendix(study)
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


def machine(found: dict[str, Any]) -> Table:
    keys = [key for key in KEPT if found.get(key)]
    body = [[key.removesuffix("_bytes").replace("_", " "), told(key, found[key])] for key in keys]
    return Table(["machine", ""], body, words=True)


def appendix(run: Run) -> Iterator[Block]:
    yield Heading(3, run.name)
    yield machine(run.environment)
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
