"""How far predictions are off, counted so that no source, model or metric counts twice: a run once, a model on a chip with as many devices and samples
as one, medians of groups, and the mean of these. What the planner refuses counts as an error of 100 %."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from published.points import Case, Point

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
    """A run that is scored. error: the logarithm of measured by predicted seconds; None: refused. between: of it, 80 % of such runs."""

    point: Point
    group: str
    chip: str = ""
    program: str = ""
    error: float | None = None
    between: tuple[float, float] | None = None
    weight: float = 1.0
    label: str = ""  # what was left out with it
    case: Case | None = None
    value: float | None = None  # in the point's own unit

    @property
    def kin(self) -> tuple[tuple[str, ...], ...]:
        """Whose residuals make an interval, the nearest first."""
        family = self.program.partition("-")[0]  # whatever its way with experts
        return (self.chip, self.program), (self.chip, family, ""), (self.program,), (family, ""), ()

    @property
    def inside(self) -> bool | None:
        return None if self.between is None or self.error is None else self.between[0] <= self.error <= self.between[1]

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


def lines(title: str, entries: list[Entry]) -> Iterator[str]:
    yield f"{title:58}{'runs':>6}{'cells':>7}{'covered %':>11}{'median %':>10}{'slower %':>10}{'inside %':>10}{'width':>8}"
    for name, r in table(entries).items():
        covered, median, bias, inside = ("–" if r[key] is None else f"{100 * r[key]:.1f}" for key in ("covered", "median", "bias", "inside"))
        yield f"{name:58}{r['n']:6d}{r['cells']:7d}{covered:>11}{median:>10}{bias:>10}{inside:>10}" + ("–" if r["width"] is None else f"{r['width']:.2f}").rjust(8)


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
