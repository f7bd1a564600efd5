"""How far predictions are off, counted so that no source, model or metric counts twice: a run once, a model on a chip with as many devices and samples
as one, medians of groups, and the mean of these. What the planner refuses counts as an error of 100 %. And of peak memory, beside rivals on the same rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from gradus import text
from gradus.plan import published as shown
from published import estimates, memory
from published.points import WRONG, Case, NotCovered, Point

REFUSED = 1.0
LEAST = 10  # rows of a group that counts, and of a pool that makes an interval
BEST = ("step_time", "tokens_per_s", "samples_per_s", "sequences_per_s", "images_per_s")  # metrics, before those that count operations
SAME = ("id", "metric", "value", "unit", "note", "kind")  # may differ between two rows of one run


def apart(point: Point) -> str:
    """Why a point is out of what is planned; "" where it is not."""
    config = point.get("config") or {}
    if re.search(r"nemotron.?(3_|3\.|v3)", str(point.get("model")).lower()):
        return "a hybrid of Mamba and attention"
    if point.get("group") and "fp4" in str(config.get("precision")).lower():
        return "NVFP4"
    if point.get("group") and point.get("metric") == "peak_memory":
        return "peak memory, which is scored by itself"
    if point.get("group") and not (point.get("batch") and point.get("seq") and point.get("n_devices")):
        return "batch, length or devices not given"
    return ""


def once(points: Iterable[Point]) -> list[Point]:
    """Of the rows that say the same of one run, that which says time, or tokens."""
    def rank(point: Point) -> int:
        return next((i for i, name in enumerate(BEST) if str(point.get("metric")).startswith(name)), len(BEST))

    found: dict[str, Point] = {}
    for point in points:
        key = json.dumps({k: v for k, v in point.items() if k not in SAME}, sort_keys=True, default=str)
        key = key if rank(point) < len(BEST) or "tflops" in str(point.get("metric")) or str(point.get("metric")) in ("mfu", "hfu") else str(id(point))
        if key not in found or rank(point) < rank(found[key]):
            found[key] = point
    return list(found.values())


def cell(point: Point) -> tuple:
    """Of which all rows together weigh one."""
    return tuple(str(point.get(name)) for name in ("group", "model", "hardware", "n_devices", "batch"))


def quantile(values: Sequence[float], weights: Sequence[float], q: float) -> float:
    """Weighted."""
    order = np.argsort(values)
    total = np.cumsum(np.array(weights, dtype=float)[order])
    return float(np.interp(q * total[-1], total - np.array(weights, dtype=float)[order] / 2, np.array(values, dtype=float)[order]))


@dataclasses.dataclass
class Entry:
    """A run that is scored. error: the logarithm of measured by predicted seconds, or bytes; None: refused. between: of it, 80 % of such runs."""

    point: Point
    group: str
    chip: str = ""
    program: str = ""
    error: float | None = None
    between: tuple[float, float] | None = None
    weight: float = 1.0
    label: str = ""  # what was left out with it
    case: Case | None = None
    value: float | None = None  # in the point's own unit; of memory bytes
    rivals: dict[str, float] = dataclasses.field(default_factory=dict)  # what others say, and a plan of Gradus as it is

    @property
    def kin(self) -> tuple[tuple[str, ...], ...]:
        """Whose residuals make an interval, the nearest first."""
        family = self.program.partition("-")[0]  # whatever its way with experts
        return (self.chip, self.program), (self.chip, family, ""), (self.program,), (family, ""), ()

    @property
    def inside(self) -> bool | None:
        return None if self.between is None or self.error is None else self.between[0] <= self.error <= self.between[1]

    @property
    def measured(self) -> float:
        return self.case.measured if self.case else self.value * math.exp(self.error)

    @property
    def old(self) -> bool:
        return not self.point.get("group")


def weigh(entries: list[Entry]) -> list[Entry]:
    many = Counter(cell(e.point) for e in entries)
    for e in entries:
        e.weight = 1 / many[cell(e.point)]
    return entries


def intervals(entries: list[Entry]) -> list[Entry]:
    """Give each run the interval that the residuals of runs with other labels make: of its chip and program, else of its chip or program, else all.
    Their errors are of fits without themselves; its own is in none of them. Returns the same."""
    known = [e for e in entries if e.error is not None]
    pools: dict[tuple, tuple[float, float] | None] = {}
    for e in known:
        for level, kin in enumerate(e.kin):
            key = (e.label, level, kin)
            if key not in pools:
                pool = [o for o in known if o.label != e.label and o.kin[level] == kin]
                size = sum(o.weight for o in pool)
                labels = len({o.label for o in pool})
                out = 0.1 * labels / (labels + 1)  # what one label holds is alike: few of them say less than all would
                errors, weights = [o.error for o in pool], [o.weight for o in pool]
                pools[key] = None if size < LEAST else (quantile(errors, weights, out), quantile(errors, weights, 1 - out))
            if pools[key]:
                e.between = pools[key]
                break
    return entries


def row(entries: list[Entry]) -> dict[str, float | None]:
    """n: runs; covered: the share that is predicted; median of |error|; share inside, median width as a factor; cells."""
    known = [e for e in entries if e.between is not None and e.error is not None]
    errors, weights = [REFUSED if e.error is None else abs(e.error) for e in entries], [e.weight for e in entries]
    total = sum(e.weight for e in known)
    return {"n": len(entries), "cells": round(sum(weights)), "covered": sum(e.error is not None for e in entries) / len(entries), "median": quantile(errors, weights, 0.5),
            "bias": statistics.median([e.error for e in entries if e.error is not None] or [0.0]),
            "inside": sum(e.weight for e in known if e.inside) / total if known else None,
            "width": math.exp(statistics.median(e.between[1] - e.between[0] for e in known)) if known else None}  # fmt: skip


def table(entries: list[Entry]) -> dict[str, dict[str, float | None]]:
    """A row a group, and the mean over those of LEAST runs, old and new apart."""
    out = {}
    for old, word in ((True, "old"), (False, "new")):
        mine = [e for e in entries if e.old == old]
        rows = {f"{word}: {name}": row([e for e in mine if e.group == name]) for name in sorted({e.group for e in mine})}
        out |= rows
        if large := [r for r in rows.values() if r["n"] >= LEAST]:
            of = {name: [r[name] for r in large if r[name] is not None] for name in large[0]}
            counts = {name: sum(values) for name, values in of.items() if name in ("n", "cells")}
            out[f"{word}: mean of {len(large)} groups of {LEAST} runs and more"] = {name: statistics.fmean(values) if values else None for name, values in of.items()} | counts
    return out


def by_chip(entries: list[Entry]) -> dict[str, dict[str, float | None]]:
    """A row for each chip and program."""
    pairs = sorted({(e.chip, e.program) for e in entries if e.chip and e.program})
    return {f"{chip} {program}": row([e for e in entries if (e.chip, e.program) == (chip, program)]) for chip, program in pairs}


def printed(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return text.table(columns, [*rows], range(1, len(columns)))


def lines(title: str, entries: list[Entry]) -> list[str]:
    rows = table(entries)
    columns = ["runs", "cells", "covered %", "median %", "slower %", "inside %", "width"]
    return printed([title, *columns], ([name, *(shown.cell_text("n" if name in ("n", "cells") else name, v) for name, v in row.items())] for name, row in rows.items()))


def worst(entries: list[Entry], many: int = 10) -> Iterator[str]:
    """The runs that are furthest off, one of a cell."""
    seen: set[tuple] = set()
    for e in sorted((e for e in entries if e.error is not None), key=lambda e: -abs(e.error)):
        if cell(e.point) not in seen and len(seen) < many:
            seen.add(cell(e.point))
            yield f"worst: takes {math.exp(e.error):5.2f} x what is predicted  {e.group}: {e.point.get('id')} ({e.program})"


def set_apart(points: Iterable[Point]) -> Iterator[str]:
    """What is not planned, by name."""
    found: dict[str, list[str]] = {}
    for point in points:
        if why := apart(point):
            found.setdefault(why, []).append(str(point.get("model")))
    for why, names in found.items():
        yield f"apart: {len(names):4d} rows: {why} ({', '.join(sorted(set(names)))})"


def not_predicted(reasons: dict[str, list[Point]]) -> Iterator[str]:
    """The reasons, the most frequent first, each with its points' number and their first names."""
    for reason, points in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = ", ".join(str(p.get("id")) for p in points[:3])
        yield f"not predicted: {len(points):4d}  {reason}  ({names}{', ...' if len(points) > 3 else ''})"


def rows(entries: list[Entry], reasons: dict[str, list[Point]]) -> Iterator[str]:
    """Every point as a line of JSON. error: the logarithm of measured by predicted."""
    for e in entries:
        about = {name: e.point.get(name) for name in ("id", "model", "metric", "unit")}
        yield json.dumps({**about, "group": e.group, "measured": e.measured, "predicted": e.value, "error": e.error, "inside": e.inside, **e.rivals})
    for reason, missed in reasons.items():
        for p in missed:
            yield json.dumps({"id": p.get("id"), "model": p.get("model"), "metric": p.get("metric"), "not_predicted": reason})


# ---------------------------------------------------------------- peak memory

INTERVALS = Path(__file__).with_name("kept-intervals.yaml")
HEAD = "# Between which 80 % of measured by planned memory lie, by program; every: of one that has few rows. Made by `python benchmarks/memory.py --keep`.\n"
MANY = 20  # rows of a program, for an interval of its own
UNDER = math.log(1.1)  # a plan so far under what was measured is believed to fit and does not
TODAY = "a plan of Gradus as it is"
LATER = ", after the step"


def memory_entry(point: Point) -> Entry:
    """Label: what one publication measured. Raises NotCovered."""
    q = memory.question_of(point)
    label = str(point.get("group") or str(point.get("source")).split("@")[0].rpartition("/")[2])
    after = q.kind == "after"
    rivals = {} if after else {name: value for name, rival in estimates.RIVALS.items() if (value := rival(q))}
    planned = memory.planned(q)
    return Entry(point, label + LATER * after, program=q.keeps.name, error=math.log(memory.measured(point) / planned), label=label, value=planned,
                 rivals=rivals | {TODAY: memory.today(q)})  # fmt: skip


def memory_entries(points: Iterable[Point]) -> tuple[list[Entry], dict[str, list[Point]]]:
    """(points of memory with nested intervals, those that are not covered by the reason why)."""
    entries: list[Entry] = []
    reasons: dict[str, list[Point]] = {}
    for point in points:
        if point.get("metric") in memory.METRICS and isinstance(point.get("config"), dict):
            try:
                entries.append(memory_entry(point))
            except NotCovered as why:
                reasons.setdefault(str(why), []).append(point)
            except WRONG as error:
                reasons.setdefault(f"{type(error).__name__}: {error}".splitlines()[0], []).append(point)
    for e in entries:
        e.between = interval([o for o in entries if o.label != e.label], e.program)
    return entries, reasons


def peaks(entries: Iterable[Entry]) -> list[Entry]:
    return [e for e in entries if not e.group.endswith(LATER)]


def interval(entries: Iterable[Entry], program: str = "") -> tuple[float, float]:
    """The logarithms between which 80 % lie: of the program where it has MANY rows, else of all; of what is left, or committed where nothing is. Each
    label counts once."""
    found = peaks(entries)
    own = [e for e in found if e.program == program]
    chosen = own if len(own) >= MANY else found
    if not chosen:
        low, high = committed().get(program) or committed()["every"]
        return math.log(low), math.log(high)
    size = Counter(e.label for e in chosen)
    errors, weights = [e.error for e in chosen], [1 / size[e.label] for e in chosen]
    return quantile(errors, weights, 0.1), quantile(errors, weights, 0.9)


@functools.cache
def committed() -> dict[str, list[float]]:
    return yaml.safe_load(INTERVALS.read_text())


def kept_intervals(entries: list[Entry]) -> dict[str, list[float]]:
    """What the file holds."""
    many = Counter(e.program for e in peaks(entries))
    programs = [name for name in sorted(many) if many[name] >= MANY]
    return {name: [float(f"{math.exp(v):.3f}") for v in interval(entries, name)] for name in [*programs, "every"]}


def _shares(over: Sequence[float]) -> list[str]:
    """Of logarithms of planned by measured: rows, median, bias, share under by more than 10 %, the worst."""
    parts = statistics.median(map(abs, over)), statistics.median(over), statistics.fmean(e < -UNDER for e in over), max(over, key=abs)
    return [str(len(over)), *(f"{100 * part:{form}}" for part, form in zip(parts, (".1f", "+.1f", ".0f", "+.0f")))]


def _beside(e: Entry, name: str) -> float:
    """The logarithm of a rival's by measured."""
    return math.log(e.rivals[name] / e.measured)


def memory_lines(entries: list[Entry]) -> list[str]:
    """By group: |log error| in the middle, bias, share under by more than 10 %, the worst; the share inside the interval made of the other groups, and
    above it; the same of the plan as it is of Gradus."""
    groups = [(name, [e for e in entries if e.group == name]) for name in sorted({e.group for e in entries})]
    out: list[list[str]] = []
    for name, chosen in [*groups, ("all peaks", peaks(entries))]:
        if chosen:
            _, median, _, under, _ = _shares([_beside(e, TODAY) for e in chosen])
            above = statistics.fmean(e.error > e.between[1] for e in chosen)
            parts = [f"{100 * statistics.fmean(e.inside for e in chosen):.0f}", f"{100 * above:.0f}", median, under]
            out.append([name, *_shares([-e.error for e in chosen]), *(parts if peaks(chosen) else [""] * 4)])
    return printed(["group", "rows", "median %", "bias", "under %", "worst", "inside", "above", "today", "under"], out)


def rival_lines(entries: list[Entry]) -> Iterator[str]:
    """Each estimate on the rows of peak memory that it covers, and the plan's median on these."""
    every = peaks(entries)
    for title, chosen in (("all rows of peak memory", every), ("on one device", [e for e in every if e.point.get("n_devices") == 1])):
        if not chosen:
            continue
        out = [["the plan", *_shares([-e.error for e in chosen]), "100", ""]]
        for name in estimates.RIVALS:
            if known := [e for e in chosen if name in e.rivals]:
                ours = statistics.median(abs(e.error) for e in known)
                out.append([name, *_shares([_beside(e, name) for e in known]), f"{100 * len(known) / len(chosen):.0f}", f"{100 * ours:.1f}"])
        yield from printed([title, "rows", "median %", "bias", "under %", "worst", "covers", "the plan there"], out)
