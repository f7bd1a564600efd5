"""`gradus report`: one HTML file and one PDF of runs and studies, to read and to hand in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.errors import UserError, not_written
from gradus.limits import read_text
from gradus.proof.pairs import Pair
from gradus.proof.results import INCOMPARABLE
from gradus.proof.study import unit_of
from gradus.proof.timing import TAKEN
from gradus.report import answers, first_page, plots, runs, studies, study_plots
from gradus.report.blocks import Block, Code, Heading, Table, from_markdown, narrow, numbered, plain
from gradus.report.page import to_html, to_pdf
from gradus.report.runs import Machine, Run, words
from gradus.report.studies import Study
from gradus.text import cell as text_of
from gradus.text import duration, size

SHOWN = 32  # predictions in a table
NOTES = 2**20  # bytes of notes at most
cell = functools.partial(text_of, nothing="–")


@dataclasses.dataclass
class Options:
    """title, author: of the first page ("": the names of what is reported, nobody). x: of runs.X_AXES, of the plots by
    step. code: recipes and the models' source too."""

    title: str = ""
    author: str = ""
    x: str = "step"
    code: bool = False


def report(folders: Sequence[str], to: str, notes: str | None = None, **shown: Any) -> Iterator[str]:
    """Write report.html and, with typst, report.pdf into the folder `to`; yields what is printed.

    notes: a Markdown file with one's own discussion, which comes after the tables. shown: of Options. A study that is
    not finished is left out, and a note says so. Equal rows give equal bytes. Raises UserError for folders that hold no
    run and no study, and where nothing is left; EnvironmentFault for a full disk: then nothing is written.
    """
    options = Options(**shown)
    left_out: list[str] = []
    of_studies = [folder for folder in folders if studies.is_study(Path(folder))]
    trained = runs.read(folder for folder in folders if folder not in of_studies)
    studied = studies.read(of_studies, left_out)
    if left_out and not (trained or studied):
        raise UserError(left_out[0])
    text = read_text(Path(notes), NOTES) if notes else ""
    names = dict.fromkeys([*(run.config.name for run in trained), *(study.name for study in studied)])
    title = options.title or "; ".join(names)
    blocks = numbered(content(title, trained, text, studied, options))
    contents, missing = {"report.html": to_html(title, blocks).encode()}, ""
    try:
        contents["report.pdf"] = to_pdf(title, blocks, options.author)
    except UserError as e:
        missing = f"note: no PDF: {e} The HTML prints as well."
    _write(Path(to), contents)
    counts = [(len(trained), "run", "runs"), (len(studied), "study", "studies")]
    of = ", ".join(f"{n} {many if n > 1 else one}" for n, one, many in counts if n)
    yield f"{Path(to) / 'report.html'}: {of}; it needs no other file"
    yield missing or f"{Path(to) / 'report.pdf'}"
    yield from (f"note: left out: {reason}" for reason in left_out)


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    """Write all files, or none."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            for name, content in contents.items():
                stack.enter_context(files.aside(folder / name)).write_bytes(content)
    except OSError as e:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise not_written(folder, e, "nothing was written. Free some space, or give another --to.") from e


def content(
    title: str, trained: Sequence[Run], notes: str, studied: Sequence[Study] = (), options: Options | None = None
) -> Iterator[Block]:
    """The first page, a section for the runs of each recipe and for each study, the notes, then how it was done."""
    options = options or Options()
    measured = [*((run, run.environment) for run in trained), *((study, study.machine) for study in studied)]
    groups = runs.by_recipe(trained)
    for group in groups:
        runs.name_by_difference(group)
    name_machines(measured)
    yield Heading(1, title)
    sections = [(f"{len(g)} run{'s' * (len(g) > 1)} of {g[0].config.name}", first_page.of_runs(g)) for g in groups]
    sections += [(f"the study '{study.name}'", first_page.of_study(study)) for study in studied]
    dates = [*(run.summary.finished[:10] for run in trained), *(study.machine.get("date", "") for study in studied)]
    yield from first_page.blocks(options.author, max(dates), sections)
    for n, group in enumerate(groups):
        yield Heading(2, f"Recipe: {group[0].config.name}" if len(sections) > 1 else "Results", new_page=not n)
        yield from map(narrow, compared(group))
        yield from energy(group)
        yield from planned(group)
        yield from predictions(group)
        yield from plots.of_runs(group, options.x)
        if text := plots.not_drawn(group, options.x):
            yield plain(text)
    for n, study in enumerate(studied, len(groups)):
        yield Heading(2, f"Study: {study.name}", new_page=not n)
        yield from studies.tables(study)
        yield from study_plots.of_study(study)
    if notes:
        yield Heading(2, "Discussion")
        yield from from_markdown(notes)
    yield Heading(2, "Appendix: how it was measured", new_page=True)
    yield from machines([(each.name, facts) for each, facts in measured])
    for run in trained:
        yield from appendix(run, options.code)
    for study in studied:
        yield from studies.appendix(study, options.code)
    for family, run in {run.config.model.family: run for run in trained if options.code}.items():
        yield Code(f"The model: {family}", run.model_code)


def name_machines(measured: Sequence[tuple[Run | Study, dict[str, Any]]]) -> None:
    """Where they were measured on several machines, each run's and study's name says on which."""
    machines = [first_page.machine(facts) for _, facts in measured]
    if len({*machines} - {""}) > 1:
        for (each, _), name in zip(measured, machines):
            each.name += f" ({name or 'machine not known'})"


def compared(group: Sequence[Run]) -> Iterator[Table]:
    """Of runs of one recipe: speed, then quality; a line a run. Speed-up and efficiency are against the first that is
    finished."""
    base, wrong = next((run for run in group if run.speed_up), None), runs.uneven_load(group)
    speed, quality = [], []
    metrics = dict.fromkeys(name for run in group for name in run.summary.metrics)
    for run in group:
        s, ratio = run.summary, run.speed_up
        time = None if s.train_runtime is None else duration(s.train_runtime)
        cells = [s.steps, time, run.speed]
        if base:  # as many processes have no efficiency of their own
            scaled = ratio and (run is base or run.processes != base.processes)
            both = [ratio, ratio * base.processes / run.processes if scaled else None]
            cells += [INCOMPARABLE] * 2 if run.name in wrong else both
        processes = cell(run.processes if run.finished else None)  # its end says how many
        speed.append([run.name, s.layout or "–", run.config.layout.precision, processes, *map(cell, cells)])
        losses = [s.train_loss, run.last("train/loss"), *(s.metrics.get(name) for name in metrics)]
        quality.append([run.name, state(run), cell(s.epoch), cell(s.samples), *map(cell, losses)])
    head = ["run", "layout", "precision", "processes", "steps", "time", "samples/s"]
    caption = "The speed of each run. Time and samples/s are of training and waiting for data, without evaluations and "
    caption += "checkpoints."
    if base:
        head += ["speed-up", "efficiency"]
        caption += f" Speed-up and efficiency are against {base.name}"
        caption += "; a run of another model, or not finished, has none." if not all(r.speed_up for r in group) else "."
    caption += "".join(f" {name}: {reason}." for name, reason in wrong.items())
    caption += "".join(f" {run.name} has {run.differs}." for run in group if run.differs)
    loads = {run.name: run.summary.load.during or 0 for run in group}
    if max(loads.values()) > TAKEN:
        used = ", ".join(f"{load:.1f} processors during {name}" for name, load in loads.items())
        caption += f" Other programs used {used}."
    yield Table(head, speed, caption)
    head = ["run", "state", "epochs", "samples", "training loss, mean", "training loss, last", *map(words, metrics)]
    yield Table(head, quality, "The losses and metrics of each run. The metrics are those of the last evaluation.")


def energy(group: Sequence[Run]) -> Iterator[Table]:
    if rows := [[run.name, run.summary.energy.text] for run in group if run.summary.energy]:
        caption = "The energy and CO2 of each run. Of the whole run, with evaluations and checkpoints."
        yield Table(["run", "energy and CO2"], rows, caption, words=True)


def state(run: Run) -> str:
    """Whether a run has come to its end, or where it stands."""
    steps = run.config.train.steps
    of = f" of {steps:,}" if steps else ""
    return "finished" if run.finished else f"not finished: at step {run.summary.steps or 0:,}{of}"


def planned(group: Sequence[Run]) -> Iterator[Table]:
    rows, several = [], len(group) > 1
    for run in group:
        for name, before, after in run.proved:
            label, *cells = Pair(name, unit_of(name), before, after, run.summary.proof[name].batch).cells()
            rows.append([*[run.name] * several, label.strip(), *cells])
    if rows:
        head = [*["run"] * several, "figure", "planned", "measured", "error"]
        caption = "Planned figures beside measured ones. The plan was made before the first step, the rest in the run."
        yield Table(head, rows, caption)


def predictions(group: Sequence[Run]) -> Iterator[Block]:
    """What the model of each run says of some inputs, where `gradus predict` or `evaluate` has left it in the run's
    folder, and what it said along its training."""
    for run in group:
        yield from answers.answered(run, run.predictions)
        if rows := run.predictions:
            known = [row.right for row in rows if row.right is not None]
            by_loss = rows[0].loss is not None  # of an evaluation, and of all samples where they have classes
            of = f"Answers of {run.name}" + ", the largest losses first" * by_loss
            of += f": {sum(known)} of {len(known)} right" if known and (rows[0].label or not by_loss) else ""
            more = f"; the first {SHOWN} of {len(rows)}" if len(rows) > SHOWN else ""
            cells = [["input", "answer", "it is", "", "loss"], *(row.cells for row in rows[:SHOWN])]
            head, *body = map(list, zip(*(column for column in zip(*cells) if any(column[1:]))))
            yield Table(head, body, f"{of}{more}.", words=True)


def machines(measured: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Table]:
    """A table for each machine."""
    names: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, facts in measured:
        keys = [key for key in Machine.model_fields if facts.get(key)]
        body = ((key.removesuffix("_bytes").replace("_", " "), fact_text(key, facts[key])) for key in keys)
        names.setdefault(tuple(body), []).append(name)
    for body, of in names.items():
        if body:
            which = f" of {', '.join(of)}" * (len(names) > 1)
            first, *rest = map(list, body)
            yield Table(first, rest, f"The machine{which}.", words=True)


def appendix(run: Run, code: bool) -> Iterator[Block]:
    if command := run.environment.get("command"):
        yield Code(f"{run.name}: command", command)
    if not code:
        return
    yield Code(f"{run.name}: recipe", run.recipe)
    yield from itertools.starmap(Code, ((f"{run.name}: {name}", text) for name, text in run.scripts.items()))


def fact_text(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {fact_text(name, v)}" for name, v in value.items())
    if key.endswith("_bytes") and runs.is_number(value):
        return size(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
