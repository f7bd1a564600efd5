"""A study folder as a report reads it, and its tables: from its rows, and the recipes that it keeps, alone."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradus import limits
from gradus.errors import UserError
from gradus.proof import results, scale
from gradus.proof.timing import PARTS
from gradus.report.blocks import Block, Code, Table, Text, plain
from gradus.report.runs import Amount, Content, Machine, checked, is_number, read_json, with_distinct_names
from gradus.rows import read_rows
from gradus.text import cell, duration, size

WIDE = 120  # characters of a table's line at most
MANY = 80  # samples that are still shown one by one
GROUPS = (  # what the tables are of: names, caption
    (r"best|samples_per_s.*|ratio(/wall_clock)?|speed_up|efficiency|roof|(time|latency|decode)/.*",
     "The table shows speed."),
    (r"(memory|ratio|size)/.*", "The table shows the peak memory of tensors and of the whole process."),
    (r"traffic/.*|energy/.*|data_wait", "The table shows what a process sends per step, and its wait for data."),
    (r".*", "The table shows losses and metrics."),
)
AGAIN = "Delete the file, or measure again."
LAST = "first-and-last"  # the rung of a ladder that compares its ends
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
    at: dict[str, str] = {}
    samples: list[Any] = []
    std: Amount | None = None
    low: float | None = None
    high: float | None = None
    calls: float = 0
    bytes: float | None = None


@dataclasses.dataclass
class Study:
    """`name` tells it from the others of the report."""

    name: str
    folder: Path

    @functools.cached_property
    def about(self) -> About:
        return read_json(self.folder / "study.json", About, AGAIN) or About()

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of a ladder, whose configurations come again on other rungs, with the rung in the name."""
        file = self.folder / "rows.jsonl"
        rows = read_rows(file)
        if any("configuration" not in row for row in rows):
            raise UserError(f"{file}: has rows without a configuration. Give the folder that gradus study wrote.")
        for row in rows:
            checked(row, Conditions, f"{file}: a row of {row['name'][:40]!r}", "Delete the line, or measure again.")
            if not (isinstance(row["value"], str) or is_number(row["value"])):
                row["value"] = str(row["value"])[:40]  # no plot and no ratio can hold it
        return _of_ladder(rows) if any("rung" in row for row in rows) else rows

    @functools.cached_property
    def table(self) -> results.Table:
        return results.Table(self.rows)

    @functools.cached_property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Configuration → the conditions of all its measured rows: processes, at, runner, rung, kept and more."""
        facts: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row.get("kind") == "measured":
                mine = facts.setdefault(row["configuration"], {})
                mine.update((k, v) for k, v in row.items() if k not in ("name", "value", "unit"))
        return facts

    @functools.cached_property
    def _numbers(self) -> dict[tuple[str, Any], dict[str, float]]:
        numbers: dict[tuple[str, Any], dict[str, float]] = {}
        for row in self.rows:
            if is_number(row["value"]):
                numbers.setdefault((row["name"], row.get("kind")), {})[row["configuration"]] = row["value"]
        return numbers

    def values(self, name: str, planned: bool = False) -> dict[str, float]:
        """Configuration → the finite number of this name that was measured, or planned of one step, of it."""
        return self._numbers.get((name, "predicted" if planned else "measured"), {})

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


def _of_ladder(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a ladder, each configuration named with its rung, with the speed and × that it compares. Of what was
    measured more than once it keeps speed from the timed rounds and most samples, and memory of the largest batch of
    all data; "before" of the first rung alone."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.get("study") == "once" and row["name"].endswith("/undisturbed"):
            continue  # steps too short to tell have no such row, and this one is of others
        name = " · ".join(str(row[k]) for k in ("rung", "configuration") if k in row)
        if row.get("rung") == LAST and row["configuration"] != "before":
            name = f"{LAST} · all that was kept"
        key = (name, row["name"], row.get("kind"), row.get("step"))
        known = best.get(key)
        if known and row["name"].startswith(("memory/", "ratio/memory", "ratio/process")):
            row = known if known.get("study") == "once" else row
        elif known:
            row = max(known, row, key=lambda r: (r.get("study") != "once", len(r.get("samples", ()))))
        best[key] = {**row, "configuration": name}
    timed = ((c, row) for (c, *_), row in best.items() if row.get("study") != "once")  # for memory and losses
    wanted = [c for c, row in timed if row["name"] in ("samples_per_s", "failed", "verdict")]
    again = [c for c in dict.fromkeys(wanted) if c.endswith(" · before")][1:]
    kept: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}  # (configuration, kind, step) → name → row
    for (c, name, *of), row in best.items():
        if c in wanted and c not in again:
            kept.setdefault((c, *of), {})[name] = row
    named = (results.undisturbed(by_name).items() for by_name in kept.values())
    return [{**row, "name": name} for pairs in named for name, row in pairs]


def is_study(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("study.json", "ladder.json"))


def read(folders: Iterable[str], left_out: list[str] | None = None) -> list[Study]:
    """Raises UserError for one that is given twice, and for a study of which nothing was measured; left_out: receives
    the reason instead."""
    studies = [Study(Path(folder).resolve().name, Path(folder)) for folder in folders]
    for study in studies:
        study.name = study.about.study or study.name
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
    if not study.names:
        why = "".join(f" {c}: {reason}" for c, reason in [*study.table.failed.items()][:1])
        return f"{study.folder}: nothing was measured in this study.{why} {again}"
    return None


# ---------------------------------------------------------------- tables


def tables(study: Study) -> Iterator[Block]:
    left = [name for name in study.table.columns if not name.startswith(ELSEWHERE)]
    better = {"ratio": "speed_up", "ratio/process": "ratio/memory"}  # that say as much
    left = [name for name in left if better.get(name) not in left]
    for pattern, caption in GROUPS:
        mine = [name for name in left if re.fullmatch(pattern, name)]
        left = [name for name in left if name not in mine]
        while mine:
            n = next(n for n in range(len(mine), 0, -1) if n == 1 or _width(*_cells(study, mine[:n])) <= WIDE)
            yield Table(*_cells(study, mine[:n]), caption + _caption_notes(study, mine[:n]))
            mine = mine[n:]
    yield from _parts(study)
    for c, facts in study.facts.items():
        if verdict := study.row(c, "verdict").get("value"):
            yield Text([("strong", c), ("plain", f": {'' if facts.get('kept') else 'not '}kept: {verdict}")], item=True)
        elif why := study.table.failed.get(c):
            yield Text([("strong", c), ("plain", f": failed: {why}")], item=True)
    for line in study.table.summary():
        yield Text([("plain", f"{line}.")], item=True)
    if line := results.conditions_line([row for row in study.rows if row.get("study") != "once"]):
        yield plain(f"{line}.")


def _cells(study: Study, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    table = results.Table(study.rows, names)
    return table.head(), [line for line in table.body() if set(line[1:]) != {"-"}]


def _width(head: list[str], body: list[list[str]]) -> int:
    return sum(3 + max(map(len, column)) for column in zip(head, *body))


def _caption_notes(study: Study, names: Sequence[str]) -> str:
    text, bases = "", [f["against"] for f in study.facts.values() if "against" in f]
    if "ratio" in names and any("rung" in f for f in study.facts.values()):
        text = " × is against the best of the rungs before, measured in the same rounds."
        if "ratio/wall_clock" in names:
            text += " Time in which other programs had the processor counts in the wall clock alone."
    elif "ratio" in names and len(set(bases)) == 1:
        text = f" × is as many times the samples/s of {bases[0]}."
    elif "ratio" in names:
        pairs = [f"{c} against {f['against']}" for c, f in study.facts.items() if "against" in f]
        text = f" × is a ratio of samples/s: {', '.join(pairs[:6])}{' and so on' * (len(pairs) > 6)}."
    if any("std" in study.row(c, name) for c in study.facts for name in names):
        text += " ±: the standard deviation over the seeds."
    return text


def _parts(study: Study) -> Iterator[Table]:
    """A step by its parts, what was lost by name, and collectives."""
    by_part = {part: study.values(f"time/step/{part}") for part in PARTS}
    names = [c for c in study.facts if any(c in values for values in by_part.values())]
    if body := [[c, *(duration(v[c]) if c in v else "–" for v in by_part.values())] for c in names]:
        caption = "The table shows a step by its parts, the mean over the processes."
        yield Table(["configuration", *PARTS], body, caption)
    whole = (r for r in study.rows if "samples" not in r or all(is_number(r.get(end)) for end in ("low", "high")))
    rows = [r for r in whole if is_number(r["value"])]
    if any(r["name"].startswith("lost/") for r in rows):
        noise = "; ".join(scale.noise_lines(rows))
        caption = f"The table shows what was lost against the first configuration, in % of the step; {noise}."
        yield Table(["configuration", "in total", *PARTS], scale.lost(rows), caption)
    calls = [
        [c, name.removeprefix("collective/"), f"{r.get('calls', 0):g}", duration(r["value"]), size(r.get("bytes") or 0)]
        for (c, name), r in study.table.measured.items()
        if name.startswith("collective/") and is_number(r["value"])
    ]
    if calls:
        caption = "The table shows the collectives of a step, profiled separately. Times include the wait for others; "
        caption += "some collectives overlap with computing."
        yield Table(["configuration", "collective", "calls", "time", "sent"], calls, caption)


# ---------------------------------------------------------------- how it was done


def appendix(study: Study) -> Iterator[Block]:
    if study.about.command:
        yield Code(f"{study.name}: command", study.about.command)
    configurations = study.about.configurations
    recipes = {c: t.recipe for c, t in configurations.items() if t.recipe}
    first = next(iter(recipes), "")
    keys = {c: _flat(limits.parse_yaml(text, study.folder / "study.json")) for c, text in recipes.items()}
    body = []
    for c, t in configurations.items():
        mine, its = keys.get(c, {}), keys.get(first, {})
        changed = {k: mine.get(k) for k in dict.fromkeys((*its, *mine)) if mine and mine.get(k) != its.get(k)}
        words = [f"{k}={_word(v)}" for k, v in {**changed, **t.options}.items()]
        body.append([c, t.runner or "–", str(t.processes or "–"), ", ".join(words) or "–"])
    if body:
        head = ["configuration", "measured by", "processes", f"other than in {first}" if first else "options"]
        yield Table(head, body, words=True)
    if first:
        yield Code(f"{study.name}: recipe of {first}", recipes[first])
    samples = {c: study.row(c, "samples_per_s").get("samples", []) for c in study.values("samples_per_s")}
    rounds = max(map(len, samples.values()), default=0)
    if 1 < rounds <= 10 and rounds * len(samples) <= MANY:
        cells = [[cell(value) for value in values] for values in samples.values()]
        body = [[c, *row, *["–"] * (rounds - len(row))] for c, row in zip(samples, cells)]
        head = ["configuration", *(f"{n}." for n in range(1, rounds + 1))]
        yield Table(head, body, "The table shows every sample of samples/s.")


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {at: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{at}.{key}".lstrip(".")).items()}


def _word(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, list)
        else str(value)
    )
