"""A study folder as a report reads it, and its tables: from its rows, and the recipes that it keeps, alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradus import limits
from gradus.errors import UserError, either
from gradus.proof import ladder, results, scale
from gradus.proof.ladder_search import Trial
from gradus.proof.optimizations import words
from gradus.proof.timing import PARTS
from gradus.report.blocks import Block, Code, Table, Text, plain
from gradus.report.runs import (
    Amount,
    Content,
    Machine,
    checked,
    flat,
    is_number,
    read_json,
    value_word,
    with_distinct_names,
)
from gradus.rows import read_rows

WIDE = 120  # characters of a table's line at most
AGAIN = "Delete the file, or measure again."
DELETE = "Delete the line, or measure again."
FILES = ("study.json", "ladder.json")  # that say of what the folder is
ELSEWHERE = ("lost/", "collective/", "time/step/", "verdict")  # are not columns


class Told(Content):
    """What study.json keeps of a configuration."""

    runner: str = ""
    processes: int | None = None
    options: dict[str, Any] = {}
    recipe: str | None = None


class About(Content):
    """study.json, as proof.study writes it."""

    study: str | None = None
    command: str = ""
    configurations: dict[str, Told] = {}


class Conditions(Machine):
    """What the report computes with of a row's conditions."""

    configuration: str
    kind: str = ""
    unit: str = ""
    processes: Annotated[int, Field(ge=1)] = 1
    at: dict[str, str] | str = {}  # str: of older plans, during which the peak is
    samples: list[Any] = []
    std: Amount | None = None
    low: float | None = None
    high: float | None = None
    calls: float = 0
    bytes: float | None = None
    others: list[Amount | None] = []
    load: Amount | None = None
    date: str = ""


class Tried(Content, strict=False):
    """A row with an option of a ladder."""

    trial: Trial


@dataclasses.dataclass
class Study:
    """`name` tells it from the others of the report."""

    name: str
    folder: Path

    @functools.cached_property
    def about(self) -> About:
        found = (read_json(self.folder / name, About, AGAIN) for name in FILES)
        return next(filter(None, found), About())

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        """All rows."""
        file = self.folder / "rows.jsonl"
        rows = read_rows(file)
        if any("configuration" not in row for row in rows):
            raise UserError(f"{file}: has rows without a configuration. Give the folder that gradus study wrote.")
        for row in rows:
            checked(row, Conditions, f"{file}: a row of {row['name'][:40]!r}", DELETE)
            if not (isinstance(row["value"], str) or is_number(row["value"])):
                row["value"] = str(row["value"])[:40]  # no plot and no ratio can hold it
        return rows

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of a ladder those of whole trainings alone: `trials` has the rungs."""
        return [row for row in self.records if row.get("rung") in (None, "to-the-end")]

    @functools.cached_property
    def trials(self) -> list[Trial]:
        """Of a ladder: the first rung, every option that was tried, and all that was kept beside the first rung."""
        what = f"{self.folder / 'rows.jsonl'}: an option of the ladder"
        return [checked(row, Tried, what, DELETE).trial for row in self.records if "trial" in row]

    @functools.cached_property
    def table(self) -> results.Table:
        return results.Table(self.rows)

    @functools.cached_property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Configuration → the conditions of all its measured rows: processes, at, runner and more."""
        facts: dict[str, dict[str, Any]] = {}
        for row in self.records:
            if row.get("kind") == "measured":
                mine = facts.setdefault(row["configuration"], {})
                mine.update((k, v) for k, v in row.items() if k not in ("name", "value", "unit"))
        return facts

    def values(self, name: str) -> dict[str, float]:
        """Configuration → the finite number of this name that was measured of it."""
        rows = ((c, row["value"]) for (c, of), row in self.table.measured.items() if of == name)
        return {c: value for c, value in rows if is_number(value)}

    def row(self, c: str, name: str) -> dict[str, Any]:
        return self.table.measured.get((c, name), {})

    @property
    def names(self) -> list[str]:
        """Of all that was measured."""
        return list(dict.fromkeys(name for _, name in self.table.measured if name != "failed"))

    @property
    def machine(self) -> dict[str, Any]:
        facts = next((f for f in self.facts.values() if "cpu" in f), {})
        return {**facts, "cpus_allowed": facts.get("cpus")}


def is_study(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def read(folders: Iterable[str], left_out: list[str] | None = None) -> list[Study]:
    """Raises UserError for one that is given twice, and for a study of which nothing was measured; left_out: receives
    the reason instead."""
    studies = [Study(Path(folder).resolve().name, Path(folder)) for folder in folders]
    for study in studies:
        study.name = study.about.study or "ladder " * (study.folder / FILES[1]).is_file() + study.name
    wrong = {study.folder: _unmeasured(study) for study in with_distinct_names(studies)}
    reasons = [reason for reason in wrong.values() if reason]
    if reasons and left_out is None:
        raise UserError(reasons[0])
    if left_out is not None:
        left_out += reasons
    return [study for study in studies if not wrong[study.folder]]


def _unmeasured(study: Study) -> str | None:
    """Why a study cannot be shown."""
    command = study.about.command
    again = f"Start it again: {command}" if command else "Start it again, with the same --to."
    if not (study.folder / "rows.jsonl").is_file():
        return f"{study.folder}: this study is not finished. {again}"
    if not study.names and not study.trials:
        if any("rung" in row for row in study.records):
            return f"{study.folder}: a ladder of an earlier version, whose rows a report does not read. {again}"
        why = "".join(f" {c}: {reason}" for c, reason in [*study.table.failed.items()][:1])
        return f"{study.folder}: nothing was measured in this study.{why} {again}"
    return None


# ---------------------------------------------------------------- tables


def tables(study: Study) -> Iterator[Block]:
    left = [name for name in study.table.columns if not name.startswith(ELSEWHERE)]
    better = {"ratio": "speed_up", "ratio/process": "ratio/memory"}  # that say as much
    left = [name for name in left if better.get(name) not in left]
    if study.trials:
        yield from _rungs(*study.trials)
    while left:
        n = next(n for n in range(len(left), 0, -1) if n == 1 or _width(*_cells(study, left[:n])) <= WIDE)
        what = either((results.LABELS.get(name, name) for name in left[:n]), "and")
        caption = f"{what[0].upper()}{what[1:]} of each configuration.{_caption_notes(study, left[:n])}"
        yield Table(*_cells(study, left[:n]), caption)
        left = left[n:]
    yield from _parts(study)
    for c, why in study.table.failed.items():
        yield Text([("strong", c), ("plain", f": failed: {why}")], item=True)
    for line in study.table.summary():
        yield Text([("plain", f"{line}.")], item=True)
    if line := results.conditions_line([row for row in study.records if row.get("study") != "once"]):
        yield plain(f"Conditions: {line}.")


def _rungs(start: Trial, *trials: Trial) -> Iterator[Block]:
    """A ladder as the screen has it."""
    tried = [trial for trial in trials if trial.rung != ladder.LAST]
    rungs = [start.rung, *(trial.rung for trial in tried if trial.keys)]
    body = [[rung, *cells] for rung, cells in zip(rungs, ladder.body_of(start, tried))]
    caption = "The ladder, rung by rung. × and saved are against the best before, measured in the same rounds. "
    caption += "Samples/s and × are without the time in which other programs had the processor, the wall clock has it. "
    caption += "Tensors and process are of the largest batch of all data; loss off is the farthest of a few steps."
    yield Table(["rung", *ladder.HEAD], body, caption)
    for trial in tried:
        decision = f" {words(trial.keys)}: {'' if trial.kept else 'not '}kept," if trial.keys else ""
        yield Text([("strong", trial.rung), ("plain", f":{decision} {trial.verdict}")], item=True)
    for whole in trials[len(tried) :]:
        yield plain(f"{whole.verdict if whole.failed else ladder.against_first(whole, start)}.")


def _cells(study: Study, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    table = results.Table(study.rows, names)
    return table.head(), [line for line in table.body() if set(line[1:]) != {"-"}]


def _width(head: list[str], body: list[list[str]]) -> int:
    return sum(3 + max(map(len, column)) for column in zip(head, *body))


def _caption_notes(study: Study, names: Sequence[str]) -> str:
    text, bases = "", [f["against"] for f in study.facts.values() if "against" in f]
    if "ratio" in names and len(set(bases)) == 1:
        text = f" × is as many times the samples/s of {bases[0]}."
    elif "ratio" in names:
        pairs = [f"{c} against {f['against']}" for c, f in study.facts.items() if "against" in f]
        text = f" × is a ratio of samples/s: {', '.join(pairs[:6])}{' and so on' * (len(pairs) > 6)}."
    if any(name.endswith(results.UNDISTURBED) for name in names):
        text += " Undisturbed: without the time in which a step was ready to run but other programs had the processor."
    if any("std" in study.row(c, name) for c in study.facts for name in names):
        text += " ±: the standard deviation over the seeds."
    return text


def _parts(study: Study) -> Iterator[Table]:
    """A step by its parts, what was lost by name, and collectives."""
    whole = (r for r in study.rows if "samples" not in r or all(is_number(r.get(end)) for end in ("low", "high")))
    rows = [r for r in whole if is_number(r["value"])]
    if body := scale.steps_by_part(rows):
        caption = "A step by its parts, in ms. Means over the processes; the parts add up to the step."
        yield Table(["configuration", "step", *PARTS], body, caption)
    if any(r["name"].startswith("lost/") for r in rows):
        noise = "; ".join(scale.noise_lines(rows))
        caption = f"What was lost against the first configuration, in % of the step. {noise[0].upper()}{noise[1:]}."
        yield Table(["configuration", "in total", *PARTS], scale.lost(rows), caption)
    if calls := scale.collectives(rows):
        caption = "The collectives of a step. They were profiled separately; times include the wait for others; "
        caption += "some collectives overlap with computing."
        yield Table(scale.COLLECTIVES, calls, caption)


# ---------------------------------------------------------------- how it was done


def appendix(study: Study, code: bool = False) -> Iterator[Block]:
    """code: also the recipe."""
    if study.about.command:
        yield Code(f"{study.name}: command", study.about.command)
    configurations = study.about.configurations
    recipes = {c: t.recipe for c, t in configurations.items() if t.recipe}
    first = next(iter(recipes), "")
    keys = {c: flat(limits.parse_yaml(text, study.folder / "study.json")) for c, text in recipes.items()}
    body = []
    for c, t in configurations.items():
        mine, its = keys.get(c, {}), keys.get(first, {})
        changed = {k: mine.get(k) for k in dict.fromkeys((*its, *mine)) if mine and mine.get(k) != its.get(k)}
        pairs = [f"{k}={value_word(v)}" for k, v in {**changed, **t.options}.items()]
        body.append([c, t.runner or "–", str(t.processes or "–"), ", ".join(pairs) or "–"])
    if body:
        head = ["configuration", "measured by", "processes", f"other than in {first}" if first else "options"]
        yield Table(head, body, f"The configurations of {study.name}.", words=True)
    if first and code:
        yield Code(f"{study.name}: recipe of {first}", recipes[first])
