"""All points of a file: read, fitted, predicted with their model, their source or their chip left out."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradus.hardware import Cluster, Link
from gradus.plan import collectives, roofline
from gradus.plan.roofline import OF_CHIP, OF_NETWORK, OF_SOFTWARE
from gradus.plan.step import interval, step_time
from gradus.plan.work import Work
from published import fit as fitting
from published import others, runs, scoring, software
from published.memory import METRICS
from published.points import READING, WRONG, Asked, Case, NotCovered, Point, cleaned, timed
from published.price import NAMES, Runs

# of points that are no run: metric → reader
BY_METRIC = {"gpu_hours": others.hours, "chip_hours": others.hours, "energy": others.hours, "carbon": others.hours, "carbon_location_based": others.hours,
             "collective_time": others.collective, "max_achievable_matmul_tflops": others.largest_product, "parameter_count": others.count}  # fmt: skip


# ---------------------------------------------------------------- reading


def label(found: Case, point: Point) -> None:
    """Give a run's case its group and its source, which no prediction depends on."""
    text = str(point.get("source") or "")
    group, apart = next(((group, apart) for word, (group, apart) in READING["groups"].items() if word in text), ("elsewhere", ""))
    group, apart = (point["group"], "") if isinstance(point.get("group"), str) else (group, apart)
    found.source = f"{group} {apart}" if apart and apart in text else group
    if group == "mosaic":
        group += f" {point.get('hardware')}"
    if group == "narayanan" and found.work is not None and found.work.software == "zero3":
        group = found.source = "narayanan zero3"
    if group == "elsewhere":
        found.source += f" {text[:40]}"
    found.group = group


def _by_metric(point: Point) -> Case:
    """What any source's point of a metric is predicted by."""
    metric = point["metric"]
    if "_for_" in metric and not (point.get("batch") or point["config"].get("batch")):
        return others.hours(point)
    if timed(metric):
        return runs.training(point)
    if metric in METRICS:
        raise NotCovered("peak memory is scored by itself: python benchmarks/memory.py")
    if metric not in BY_METRIC:
        raise NotCovered(f"metric {metric}: nothing predicts it")
    return BY_METRIC[metric](point)


def case(point: Point) -> Case:
    """The point as work, or as a formula. Raises NotCovered."""
    value, metric = point.get("value"), point.get("metric")
    if not metric or not isinstance(metric, str):
        raise NotCovered("no metric")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise NotCovered(f"{metric}: the value is {value!r}, not a positive number")
    asked = Asked()
    try:
        asked = cleaned(point)
        found = _by_metric(asked)
        finite = math.isfinite(predicted(found))
    except WRONG as error:
        absent = ", ".join(asked.absent)
        said = f"config has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotCovered(f"{metric}: " + (f"{absent} not given" if absent else said)) from error
    if not finite:
        raise NotCovered(f"{metric}: no finite prediction")
    found.point = point
    if not found.group:
        label(found, point)
    return found


def read(points: Iterable[Point]) -> tuple[list[Case], dict[str, list[Point]]]:
    """The points that the planner covers, and the others by the reason why not."""
    cases: list[Case] = []
    reasons: dict[str, list[Point]] = {}
    for point in points:
        try:
            cases.append(case(point))
        except NotCovered as reason:
            reasons.setdefault(str(reason), []).append(point)
    return cases, reasons


# ---------------------------------------------------------------- one point


ANCHORS = Path(__file__).with_name("anchors.yaml")
RIGHT = 0.15  # of the logarithm: what a measurement itself is off (5 %), and 10 %


def anchors(points: Iterable[Point], ids: Collection[str]) -> dict[str, float]:
    """Of the points of these ids the logarithm of measured by planned seconds, with the committed parameters."""
    found = {e.point["id"]: round(float(e.error), 3) for e in score(p for p in points if p.get("id") in ids)[0]}
    return {name: found[name] for name in ids if name in found}


def drift(then: dict[str, float], now: dict[str, float]) -> Iterator[str]:
    """A line an anchor; those that were right and are not any more, or are not planned, say so."""
    for name, before in then.items():
        after = now.get(name)
        lost = abs(before) <= RIGHT and (after is None or abs(after) > RIGHT)
        yield f"{name:64} {before:+8.1%} {'–' if after is None else format(after, '+8.1%'):>8}{'  LOST' if lost else ''}"


def predicted(c: Case) -> float:
    """With the committed parameters."""
    if c.work is None:
        return c.direct(others.values(c.entry))
    return c.value(step_time(c.work, c.cluster, roofline.parameters(c.cluster.device, c.work.software)[0]).total)


def slower(c: Case, value: float) -> float:
    """Measured by predicted seconds."""
    return value / c.measured if c.rate else c.measured / value


def entry(c: Case, value: float | None, label: str = "") -> scoring.Entry:
    """The point with what is predicted of it."""
    program = c.work.software if c.work is not None else c.entry
    error = math.log(slower(c, value) if c.work is not None else c.measured / value)
    return scoring.Entry(c.point, c.group, c.chip, program, error, label=label, case=c, value=value)


# ---------------------------------------------------------------- left out


def _formula(cases: list[Case], entry: str) -> dict[str, float]:
    """Parameters of an entry's formula, fitted on these."""
    start = {"alpha": 5e-5, "beta": 1.5e11} if entry.startswith("links/") else others.KNOWN["starts"].get(entry, {})
    if not cases or not start:
        return {"nominal": 1.0} if entry.startswith("links/") else start

    def values(x) -> dict[str, float]:
        return {name: math.exp(v) for name, v in zip(start, x)}

    def errors(x):
        return np.array([math.log(max(c.direct(values(x)), 1e-30) / c.measured) / 0.05 for c in cases])

    prior = np.log([*start.values()])
    return values(fitting.minimise(errors, prior, np.full(len(prior), 0.7), np.ones(len(cases)), prior))


def weights_of(cases: list[Case]) -> np.ndarray:
    """A source of n cells (`scoring.cell`) counts as the root of n; the rows of a cell share its weight."""
    cells = [(c.source, *scoring.cell(c.point)) for c in cases]
    rows, many = Counter(cells), Counter(source for source, *_ in set(cells))
    return np.array([3 * many[source] ** -0.5 / rows[source, *rest] for source, *rest in cells])


class LeftOut:
    """The errors of runs by fits without them. A search that starts at the fit of all and stops where little is won keeps what it should not know:
    these are Gauss-Newton steps of full length, with slopes taken at the fit of all, then anew."""

    def __init__(self, fit: fitting.Fit, x: np.ndarray):
        self.fit, self.x, self.free = fit, x, np.flatnonzero(fit.spread)
        self.errors, self.slopes = self.at(x)

    def at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors and their slopes."""
        errors = self.fit.errors(x)
        return errors, fitting.slopes_of(self.fit.errors, x, errors, self.fit.together)[:, self.free] / fitting.SIGMA

    def without(self, out: np.ndarray) -> np.ndarray:
        """Errors of all runs by a fit without these."""
        fit, x, errors, slopes = self.fit, self.x.copy(), self.errors, self.slopes
        spread, prior = fit.spread[self.free], fit.prior[self.free]
        for anew in (False, False, True, False):
            if anew:
                errors, slopes = self.at(x)
            e = errors / fitting.SIGMA
            weight = fit.weights * ~out / np.sqrt(1 + e**2)
            matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(1 / spread**2)
            x[self.free] -= np.linalg.solve(matrix, slopes.T @ (weight * e) + (x[self.free] - prior) / spread**2)
            errors = fit.errors(x)
        return errors


class Study:
    """Cases with a joint fit of those that are work, and one of each formula."""

    def __init__(self, cases: list[Case]):
        self.cases = cases
        self.direct = [c for c in cases if c.work is None]
        self.links = {e: _formula([c for c in self.direct if c.entry == e], e) for e in sorted({c.entry for c in self.direct if c.entry.startswith("links/")})}
        alone = {id(p) for p in scoring.once(c.point for c in cases)}
        self.priced = [c for c in cases if c.work is not None and c.group != "elsewhere" and id(c.point) in alone and not scoring.apart(c.point)]
        self.fit = fitting.Fit(self.runs([(c.work, c.cluster) for c in self.priced]), [(c.chip, c.work.software) for c in self.priced], np.array([c.seconds for c in self.priced]),
                               weights_of(self.priced))  # fmt: skip
        self.x = self.fit.solve()

    def runs(self, works: list[tuple[Work, Cluster]]) -> Runs:
        """With links as measured."""
        collectives.MEASURED = self.tables()
        try:
            return Runs(works)
        finally:
            collectives.MEASURED = None

    def tables(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry, v in self.links.items():
            _, chip, n = entry.split("/")
            table = found.setdefault(chip, {"latency": {}, "bandwidth": {}})
            table["latency"][int(n)], table["bandwidth"][int(n)] = fitting.short(v["alpha"]), fitting.short(v["beta"])
        return found

    @functools.cached_property
    def near(self) -> LeftOut:
        return LeftOut(self.fit, self.x)

    def without(self, labels: list[str]) -> np.ndarray:
        """The logarithm of predicted by measured seconds of each priced run, by a fit without the runs of its label; "": of all."""
        errors, named = self.near.errors.copy(), np.array(labels)
        for name in sorted(set(labels) - {""}):
            errors[named == name] = self.near.without(named == name)[named == name]
        return errors

    def left_out(self, label: Callable[[Case], str]) -> list[scoring.Entry]:
        """Runs by a fit without those of their label; "": not among them."""
        labels = [label(c) if c.work.software else "" for c in self.priced]
        return scoring.intervals(self.entries(self.without(labels), labels))

    def entries(self, errors: Iterable[float], labels: Iterable[str]) -> list[scoring.Entry]:
        """The priced runs with a label, of logarithms of predicted by measured seconds."""
        found = zip(self.priced, errors, labels)
        return scoring.weigh([entry(c, c.value(c.seconds * math.exp(e)), name) for c, e, name in found if name])

    def formulas(self) -> list[scoring.Entry]:
        """What is no run by its formula, fitted without the model."""
        found = []
        for name, model in sorted({(c.entry, c.model) for c in self.direct}):
            members = [c for c in self.direct if c.entry == name]
            v = _formula([c for c in members if c.model != model], name)
            found += [entry(c, c.direct(v)) for c in members if c.model == model]
        return scoring.weigh(found)


# ---------------------------------------------------------------- summing up


def remarks(entries: list[scoring.Entry]) -> list[str]:
    """What a reader of the table must know of how the points were read, and whose parameters were taken."""
    cases = [e.case for e in entries if e.case]
    n = sum(runs.on_one_node(c.point) for c in cases)
    text = "points of bloom time are read as 512 samples a step, not the published 2,048: their own TFLOP/s and seconds imply 512"
    notes = Counter(note for c in cases if c.work is not None for note in roofline.parameters(c.cluster.device, c.work.software)[1])
    return ([f"note: {n} {text}"] if n else []) + [f"note: {count} points: {note}" for note, count in notes.most_common()]


def score(points: Iterable[Point]) -> tuple[list[scoring.Entry], dict[str, list[Point]]]:
    """Points of any file of the schema with the committed parameters, and the interval that the plan states: nothing is fitted."""
    cases, reasons = read(points)
    out = []
    for c in cases:
        out.append(entry(c, predicted(c)))
        if c.work is not None and c.work.software:
            low, high = interval(c.work, bool(roofline.parameters(c.cluster.device, c.work.software)[1]))
            out[-1].between = math.log(low), math.log(high)
    return scoring.weigh(out), reasons


# ---------------------------------------------------------------- evaluations

ALONE = {"H100": "", "B200": "", "A100": "torchtune"}  # chips whose runs are left out, their kernels kept, and the group that is scored; "": all
BY_RATIO = re.compile("GB200|GB300|B300|TPU.*")  # chips without kernels of their own


def _refused(reasons: dict[str, list[Point]]) -> list[scoring.Entry]:
    missed = scoring.once(p for points in reasons.values() for p in points if not scoring.apart(p) and (p.get("group") or timed(str(p.get("metric")))))
    return [scoring.Entry(p, str(p.get("group") or "elsewhere")) for p in missed]


def counted(entries: list[scoring.Entry], reasons: dict[str, list[Point]]) -> list[scoring.Entry]:
    """Each run once, those in scope that are refused with them."""
    alone = {id(p) for p in scoring.once(e.point for e in entries if not scoring.apart(e.point))}
    return scoring.weigh([*(e for e in entries if e.case.work is not None and id(e.point) in alone), *_refused(reasons)])


def evaluations(study: Study, reasons: dict[str, list[Point]]) -> Iterator[tuple[str, list[scoring.Entry]]]:
    """(what was left out, the runs that are scored so, with intervals that no residual of the same made). A refusal is in the first."""
    family = {c.work.software: c.work.software.partition("-")[0] for c in study.priced}
    pairs = {(c.source, c.chip, family[c.work.software]) for c in study.priced}
    shared = {key for key in pairs if any(o[0] != key[0] and o[1:] == key[1:] for o in pairs)}
    yield "each model left out", scoring.weigh([*study.left_out(lambda c: c.model), *_refused(reasons)])
    yield "each group left out, if another has its chip and program", study.left_out(lambda c: c.source if (c.source, c.chip, family[c.work.software]) in shared else "")
    found = study.left_out(lambda c: c.chip if c.chip in ALONE else "")
    yield "each chip's runs left out, its kernels kept", [e for e in found if ALONE[e.chip] in ("", e.group)]
    yield "each chip's runs left out, by ratio", study.left_out(lambda c: c.chip if BY_RATIO.fullmatch(c.chip) else "")
    yield "formulas of their own, each model left out", study.formulas()


NOTHING = dict.fromkeys(NAMES, 1.0) | dict.fromkeys(("kernel", "decode", "latency", "cast", "host", "wait", "contention", "straggle"), 0.0)


def nominal(cluster: Cluster) -> Cluster:
    """With the links inside a node as their maker states them."""
    device = cluster.device
    return dataclasses.replace(cluster, device=dataclasses.replace(device, link=device.link and Link("stated", device.link.bandwidth, 1.0)))


def layers(study: Study) -> dict[str, np.ndarray]:
    """The logarithms of predicted by measured seconds by what the plan knows, before any whole run."""
    works = [(software.work_of(c.run, plain=True) if c.run else c.work, c.cluster) for c in study.priced]
    kernels = np.array([[*(NOTHING | fitting.before_runs(c.chip)).values()] for c in study.priced])
    seconds = {"the data sheet alone": Runs([(work, nominal(cluster)) for work, cluster in works], shaped=False).seconds(np.array([[*NOTHING.values()]] * len(works))),
               "and the chip's kernels": study.runs(works).seconds(kernels)}  # fmt: skip
    return {title: np.log(t / study.fit.measured) for title, t in seconds.items()} | {"and the program's features": study.fit.errors(study.fit.prior)}


def ablation(study: Study, reasons: dict[str, list[Point]]) -> Iterator[str]:
    """What each layer of knowledge brings: of old and new groups the means of their medians."""
    labels = [c.work.software for c in study.priced]
    found = {title: scoring.weigh([*study.entries(errors, labels), *_refused(reasons)]) for title, errors in layers(study).items()}
    found["and whole runs, each model left out"] = next(evaluations(study, reasons))[1]
    yield "| what the plan knows | old: error % | bias % | covered % | new: error % | bias % | covered % |"
    yield "|---" * 7 + "|"
    for title, entries in found.items():
        means = [row for name, row in scoring.table(entries).items() if "mean of" in name]
        yield " | ".join([f"| {title}", *(f"{100 * row[name]:.1f}" for row in means for name in ("median", "bias", "covered"))]) + " |"


# ---------------------------------------------------------------- what is kept


OUTSIDE = 0.128  # on either side, with the source left out; less with the model left out, whose errors are smaller: a fifth of both together
MANY = 20  # points of a software, for an interval of its own
EAGER = ("mosaic", "titan")  # PyTorch programs, whose parameters Gradus's are taken to be


def intervals(study: Study) -> dict[str, list[float]]:
    """Between which 80 % of the measured steps lie (see OUTSIDE), by predictions with their source left out: of a software with MANY points
    its own, else of all. Of Gradus, of which no step on a GPU was measured, 90 % of all, and no less than any other's."""
    found: dict[str, list[float]] = {}
    for c, error in zip(study.priced, study.without([c.source for c in study.priced])):
        if c.work.software:
            found.setdefault(c.work.software, []).append(math.exp(-error))
    every = [v for values in found.values() for v in values]

    def between(values: list[float], out: float) -> tuple[float, float]:
        low, high = np.quantile(np.array(values), (out, 1 - out))
        return min(1.0, low), max(1.0, high)

    own = {name: between(values if len(values) >= MANY else every, OUTSIDE) for name, values in sorted(found.items())}
    lows, highs = zip(*own.values(), between(every, 0.05))
    return {name: [fitting.short(low), fitting.short(high)] for name, (low, high) in (own | {"gradus": (min(lows), max(highs))}).items()}


def kept(study: Study, points: list[Point], reasons: dict[str, list[Point]], date: str) -> tuple[dict, dict]:
    """What `fitted.yaml` and `others-fitted.yaml` hold. Deterministic."""
    fit, x = study.fit, study.x
    chips = {chip: fit.entry(x, {chip}, OF_CHIP) for chip in sorted({c.chip for c in study.priced})}
    for chip in [t.key.removeprefix("*@") for t in fit.terms if t.key.startswith("*@")]:
        chips[chip] = {**chips.get(chip, {}), **fit.entry(x, {"*", f"*@{chip}"}, ["network"])}
    chips = {chip: entry for chip, entry in chips.items() if entry}
    softwares = {s: fit.entry(x, fitting.keys_of("", s) - {"*"}, [*OF_SOFTWARE, "network"]) for s in sorted({c.work.software for c in study.priced} - {""})}
    softwares |= {name: entry for s in list(softwares) for name, entry in fit.on_families(x, s).items()}
    for place in ("", *sorted({"@" + name.partition("@")[2] for name in softwares if "@" in name})):
        fields = {field for s in EAGER for field in softwares.get(s + place, ())}
        named = {f: [softwares.get(s + place, {}).get(f, softwares[s][f]) for s in EAGER if s in softwares] for f in OF_SOFTWARE if f in fields}
        softwares["gradus" + place] = {f: fitting.short(math.exp(statistics.fmean(map(math.log, values)))) for f, values in named.items()}
    first = {"date": date, "data": f"{len(points)} published points, {len(study.cases)} of them predicted", "chips": chips,
             "network": fit.entry(x, {"*"}, OF_NETWORK), "software": softwares, "links": study.tables()}  # fmt: skip
    first |= {"intervals": intervals(study), "uncovered": {why: len(p) for why, p in reasons.items()}}
    entries = {e: {k: fitting.short(v) for k, v in _formula([c for c in study.direct if c.entry == e], e).items()} for e in sorted({c.entry for c in study.direct}) if e in others.KNOWN["starts"]}
    return first, entries
