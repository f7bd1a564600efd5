"""Peak memory, planned beside measured: errors by group, nested intervals, and rivals on the same rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gradus.errors import UserError
from published import estimates, memory
from published.points import NotCovered, Point

INTERVALS = Path(__file__).with_name("kept-intervals.yaml")
HEAD = "# Between which 80 % of measured by planned memory lie, by program; every: of one that has few rows. Made by `python benchmarks/memory.py --keep`.\n"
MANY = 20  # rows of a program, for an interval of its own
UNDER = math.log(1.1)  # a plan so far under what was measured is believed to fit and does not
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, UserError, ValueError)


@dataclasses.dataclass
class Result:
    """A point; bytes."""

    point: Point
    group: str
    program: str
    kind: str
    measured: float
    planned: float
    today: float
    rivals: dict[str, float]
    low: float = math.nan
    high: float = math.nan

    @property
    def error(self) -> float:
        return math.log(self.planned / self.measured)

    def row(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        return {"id": plain.pop("point").get("id")} | plain


def group_of(point: Point) -> str:
    """What one publication measured: left out together."""
    return str(point.get("group") or str(point.get("source")).split("@")[0].rpartition("/")[2])


def score(points: Iterable[Point]) -> tuple[list[Result], dict[str, list[Point]]]:
    """(points of memory with nested intervals, those that are not covered by the reason why)."""
    results: list[Result] = []
    reasons: dict[str, list[Point]] = {}
    for point in points:
        if point.get("metric") not in memory.METRICS or not isinstance(point.get("config"), dict):
            continue
        try:
            q = memory.question_of(point)
            rivals = {} if q.kind == "after" else {name: rival(q) for name, rival in estimates.RIVALS.items()}
            known = {name: value for name, value in rivals.items() if value}
            one = Result(point, group_of(point), q.keeps.name, q.kind, memory.measured(point), memory.planned(q), memory.today(q), known)
            results.append(one)
        except NotCovered as why:
            reasons.setdefault(str(why), []).append(point)
        except WRONG as error:
            reasons.setdefault(f"{type(error).__name__}: {error}".splitlines()[0], []).append(point)
    for r in results:
        r.low, r.high = interval([o for o in results if o.group != r.group], r.program)
    return results, reasons


# ---------------------------------------------------------------- intervals


def quantile(groups: Sequence[Sequence[float]], q: float) -> float:
    """Of values in groups, of which each counts once."""
    values = np.array([value for group in groups for value in group])
    weights = np.array([1 / len(group) for group in groups for _ in group])
    order = np.argsort(values)
    shares = (weights[order].cumsum() - weights[order] / 2) / weights.sum()
    return float(np.interp(q, shares, values[order]))


def interval(results: Iterable[Result], program: str = "") -> tuple[float, float]:
    """Measured by planned, between which 80 % lie: of the program where it has MANY rows, else of all; of what is left, or committed where nothing
    is."""
    peaks = [r for r in results if r.kind != "after"]
    own = [r for r in peaks if r.program == program]
    chosen = own if len(own) >= MANY else peaks
    if not chosen:
        table = committed()
        return table.get(program) or table["every"]
    groups = [[-r.error for r in chosen if r.group == name] for name in sorted({r.group for r in chosen})]
    return math.exp(quantile(groups, 0.1)), math.exp(quantile(groups, 0.9))


@functools.cache
def committed() -> dict[str, tuple[float, float]]:
    return {name: (low, high) for name, (low, high) in yaml.safe_load(INTERVALS.read_text()).items()}


def kept(results: list[Result]) -> dict[str, list[float]]:
    """What the file holds."""
    programs = [name for name in sorted({r.program for r in results}) if sum(r.program == name and r.kind != "after" for r in results) >= MANY]
    return {name: [float(f"{v:.3f}") for v in interval(results, name)] for name in [*programs, "every"]}


# ---------------------------------------------------------------- tables


def line(name: str, errors: Sequence[float], *more: str) -> str:
    worst = max(errors, key=abs)
    under = statistics.fmean(e < -UNDER for e in errors)
    return (f"{name:34}{len(errors):5d}{100 * statistics.median(map(abs, errors)):8.1f}{100 * statistics.median(errors):+8.1f}{100 * under:8.0f}"
            f"{100 * worst:+8.0f}{''.join(more)}")  # fmt: skip


def table(results: list[Result]) -> Iterator[str]:
    """By group and kind: |log error| in the middle, bias, share under by more than 10 %, the worst; the share inside the interval made of the other
    groups, and above it; the same of the plan as it is of Gradus."""
    yield f"{'group':34}{'rows':>5}{'median %':>8}{'bias':>8}{'under %':>8}{'worst':>8}{'inside':>8}{'above':>7}{'today':>8}{'under':>7}"
    named = {(r.group, r.kind == "after") for r in results}
    chosen = [(f"{group}{', after the step' * after}", [r for r in results if (r.group, r.kind == "after") == (group, after)]) for group, after in sorted(named)]
    for name, rows in [*chosen, ("all peaks", [r for r in results if r.kind != "after"])]:
        if not rows:
            continue
        inside = statistics.fmean(r.low <= r.measured / r.planned <= r.high for r in rows)
        above = statistics.fmean(r.measured / r.planned > r.high for r in rows)
        today = [math.log(r.today / r.measured) for r in rows]
        parts = f"{100 * inside:8.0f}{100 * above:7.0f}", f"{100 * statistics.median(map(abs, today)):8.1f}{100 * statistics.fmean(e < -UNDER for e in today):7.0f}"
        yield line(name, [r.error for r in rows], *(parts if rows[0].kind != "after" else ("", "")))


def rivals(results: list[Result]) -> Iterator[str]:
    """Each estimate on the rows of peak memory that it covers, and the plan's median on these."""
    peaks = [r for r in results if r.kind != "after"]
    one = [r for r in peaks if r.point.get("n_devices") == 1]
    for title, rows in (("all rows of peak memory", peaks), ("on one device", one)):
        yield f"{title:34}{'rows':>5}{'median %':>8}{'bias':>8}{'under %':>8}{'worst':>8}{'covers':>8}{'the plan there':>15}"
        if not rows:
            continue
        yield line("the plan", [r.error for r in rows], f"{100:8.0f}")
        for name in estimates.RIVALS:
            known = [r for r in rows if name in r.rivals]
            if known:
                errors, ours = [math.log(r.rivals[name] / r.measured) for r in known], statistics.median(abs(r.error) for r in known)
                yield line(name, errors, f"{100 * len(known) / len(rows):8.0f}", f"{100 * ours:15.1f}")


def uncovered(reasons: dict[str, list[Point]]) -> Iterator[str]:
    for reason, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield f"not covered: {len(found):4d}  {reason}  ({', '.join(str(p.get('id')) for p in found[:3])}{', ...' if len(found) > 3 else ''})"
