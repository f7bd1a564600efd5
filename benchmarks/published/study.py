"""All points of a file: read, fitted, predicted with their model or their source left out, summed up."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gradus.errors import UserError
from gradus.plan import collectives, roofline
from gradus.plan.roofline import OF_CHIP, OF_NETWORK, OF_SOFTWARE
from gradus.plan.step import interval, step_time
from published import fit as fitting
from published import others, runs, scoring
from published.points import Asked, Case, NotCovered, Point, cleaned, timed
from published.price import Runs

# of points that are no run: text of their source, metric → reader
READERS: list[tuple[str, str, Callable[[Point], Case]]] = [
    ("Korthikanti et al. 2022 Figure 1", "", others.korthikanti_memory), ("litgpt", "", others.litgpt), ("MLCarbon", "", others.bookkeeping),
    ("", "parameter_count", others.count), ("", "saved_activation_bytes_per_sbh", others.saved),
]  # fmt: skip
BY_METRIC = {"gpu_hours": others.hours, "chip_hours": others.hours, "energy": others.hours, "carbon": others.hours, "carbon_location_based": others.hours,
             "collective_time": others.collective, "max_achievable_matmul_tflops": others.largest_product}  # fmt: skip
# what odd fields lead to
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, UserError, ValueError)


# ---------------------------------------------------------------- reading


# of old files, whose points have no group: text of the source → group of the table, what is left out together
GROUPS = [("ground_truth_single", "vtrain-single", ""), ("vTrain", "vtrain-multi", ""), ("bigscience", "bloom time", ""), ("Korthikanti", "korthikanti", ""),
          ("Narayanan", "narayanan", ""), ("Megatron-LM@152aab304d", "megatron 2020", ""), ("llm-foundry", "mosaic", ""), ("flash-attention", "flash-attention", ""),
          ("TinyLlama", "tinyllama", ""), ("torchtitan", "torchtitan", "asyncTP"), ("Megatron-Bridge", "megatron-bridge", ""),
          ("Megatron-LM@d98e8a64dd", "megatron-core", ""), ("pytorch-image-models", "timm", "")]  # fmt: skip


def label(found: Case, point: Point) -> None:
    """Give a run's case its group and its source, which no prediction depends on."""
    text = str(point.get("source") or "")
    group, apart = next(((group, apart) for word, group, apart in GROUPS if word in text), ("elsewhere", ""))
    group, apart = (point["group"], "") if isinstance(point.get("group"), str) else (group, apart)
    found.source = f"{group} {apart}" if apart and apart in text else group
    if group == "mosaic":
        group += f" {point.get('hardware')}"
    if group == "narayanan" and found.work is not None and found.work.software == "zero3":
        group = found.source = "narayanan zero3"
    if found.work is None and group == "bloom time":
        group = "feasible" if point["metric"] == "feasible" else "bloom memory"
    if group == "elsewhere":
        found.source += f" {text[:40]}"
    found.group = group


def _by_metric(point: Point) -> Case:
    """What any source's point of a metric is predicted by."""
    metric = point["metric"]
    if "_for_" in metric and not (point.get("batch") or point["config"].get("batch")):
        return others.hours(point)
    if timed(metric) or metric in ("peak_memory", "feasible"):
        return runs.training(point)
    if metric not in BY_METRIC:
        raise NotCovered(f"metric {metric}: nothing predicts it")
    return BY_METRIC[metric](point)


def case(point: Point) -> Case:
    """The point as work, or as a formula. Raises NotCovered."""
    value, metric = point.get("value"), point.get("metric")
    if not metric or not isinstance(metric, str):
        raise NotCovered("no metric")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or (value <= 0 and metric != "feasible"):
        raise NotCovered(f"{metric}: the value is {value!r}, not a positive number")
    readers = [reader for text, only, reader in READERS if text in str(point.get("source") or "") and only in ("", metric)]
    why = ""
    for reader in (*readers[:1], _by_metric):
        asked = Asked()
        try:
            asked = cleaned(point)
            found = reader(asked)
            if not math.isfinite(predicted(found)):
                raise NotCovered(f"{metric}: no finite prediction")
            found.point = point
            if not found.group:
                label(found, point)
            return found
        except NotCovered as reason:
            why = why or str(reason)
        except WRONG as error:
            absent = ", ".join(asked.absent)
            said = f"config has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}".splitlines()[0]
            why = why or f"{metric}: " + (f"{absent} not given" if absent else said)
    raise NotCovered(why)


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


def sample(points: Sequence[Point], every: int = 25) -> list[float | None]:
    """What is predicted of some of the points with the committed parameters (None: not covered): kept beside the tables, to tell whether a
    change of the code asks for a new fit."""
    out: list[float | None] = []
    for point in points[::every]:
        try:
            out.append(float(f"{predicted(case(point)):.5g}"))
        except NotCovered:
            out.append(None)
    return out


def committed(entry: str) -> dict[str, float]:
    """The parameters of a formula, where they were fitted; of links {}: what the plan says of them."""
    return {} if entry.startswith("links/") else others.values(entry)


def predicted(c: Case) -> float:
    """With the committed parameters."""
    if c.work is None:
        return c.direct(committed(c.entry))
    return c.value(step_time(c.work, c.cluster, roofline.parameters(c.cluster.device, c.work.software)[0]).total)


@dataclasses.dataclass
class Result:
    """A point, predicted. inside: whether it lies in the stated interval; others: (models, sources) that stood in its fit."""

    case: Case
    predicted: float
    baseline: float | None = None
    inside: bool | None = None
    others: tuple[int, int] = (0, 0)

    @property
    def error(self) -> float:
        """Relative; of values that are 0 or 1 the difference."""
        return (self.predicted - self.case.measured) / (abs(self.case.measured) or 1.0)


def slower(c: Case, value: float) -> float:
    """Measured by predicted seconds."""
    return value / c.measured if c.rate else c.measured / value


def inside(c: Case, value: float, foreign: bool) -> bool | None:
    """Whether the measured step lies in the interval that the plan states with its prediction."""
    if c.work is None or not c.work.software:
        return None
    low, high = interval(c.work, foreign)
    return low <= slower(c, value) <= high


# ---------------------------------------------------------------- the baseline


def kind(c: Case) -> str:
    """Within which the baseline is one constant: chip and kind of source."""
    return f"{c.chip} {c.group}" if c.work is not None and c.work.software else c.group


def constant_of(c: Case) -> float | None:
    """What the baseline takes as constant: the utilisation (MFU) that a measured time means, or the value over its reference."""
    if c.work is None:
        return c.measured / c.base if c.base and c.measured > 0 else None
    ratio = c.measured / c.at_mfu(1.0)
    return ratio if c.rate else 1 / ratio


def constants(cases: Iterable[Case]) -> dict[str, float]:
    """The baseline's constant of each kind: a geometric mean."""
    found: dict[str, list[float]] = {}
    for c in cases:
        if constant := constant_of(c):
            found.setdefault(kind(c), []).append(math.log(constant))
    return {name: math.exp(statistics.fmean(logs)) for name, logs in found.items()}


def baseline(c: Case, constant: float | None) -> float | None:
    if constant is None or (c.work is None and not c.base):
        return None
    return c.at_mfu(constant) if c.work is not None else c.base * constant


# ---------------------------------------------------------------- left out


def _formula(cases: list[Case], entry: str) -> dict[str, float]:
    """Parameters of an entry's formula, fitted on these."""
    cases = [c for c in cases if not c.group.startswith("feasible")]  # yes or no has no logarithm
    start = {"alpha": 5e-5, "beta": 1.5e11} if entry.startswith("links/") else others.starts().get(entry, {})
    names = [name for name in start if name != "tokens"]
    if not cases or not names:
        return {"nominal": 1.0} if entry.startswith("links/") else start

    def values(x) -> dict[str, float]:
        return start | {name: math.exp(v) for name, v in zip(names, x)}

    def errors(x):
        return np.array([math.log(max(c.direct(values(x)), 1e-30) / c.measured) / 0.05 for c in cases])

    prior = np.log([start[name] for name in names])
    return values(fitting.minimise(errors, prior, np.full(len(names), 0.7), np.ones(len(cases)), prior))


def weights_of(cases: list[Case]) -> np.ndarray:
    """A source of n cells (`scoring.cell`) counts as the root of n; the rows of a cell share its weight."""
    cells = [(c.source, *scoring.cell(c.point)) for c in cases]
    rows, many = Counter(cells), Counter(source for source, *_ in set(cells))
    return np.array([3 * many[source] ** -0.5 / rows[source, *rest] for source, *rest in cells])


class LeftOut:
    """The errors of runs by fits without them, near the fit of all: slopes are taken there once."""

    def __init__(self, fit: fitting.Fit, x: np.ndarray):
        self.fit, self.x, self.free = fit, x, np.flatnonzero(fit.spread)
        self.errors = fit.errors(x)
        slopes = np.zeros((len(self.errors), len(x)))
        for columns, on in fit.together:
            moved = x.copy()
            moved[columns] -= 1e-3
            slope = ((self.errors - fit.errors(moved)) / 1e-3)[:, None]
            slopes[:, columns] = slope if on is None else slope * on
        self.slopes = slopes[:, self.free] / fitting.SIGMA

    def without(self, out: np.ndarray, rounds: int = 3) -> np.ndarray:
        """Errors of all runs by a fit without these."""
        fit, x, errors = self.fit, self.x.copy(), self.errors
        spread, prior = fit.spread[self.free], fit.prior[self.free]
        for _ in range(rounds):
            e = errors / fitting.SIGMA
            weight = fit.weights * ~out / np.sqrt(1 + e**2)
            matrix = self.slopes.T @ (self.slopes * weight[:, None]) + np.diag(1 / spread**2)
            x[self.free] -= np.linalg.solve(matrix, self.slopes.T @ (weight * e) + (x[self.free] - prior) / spread**2)
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
        collectives.MEASURED = self.tables()  # what follows is fitted on top of them
        try:
            priced = Runs([(c.work, c.cluster) for c in self.priced])
        finally:
            collectives.MEASURED = None
        self.fit = fitting.Fit(priced, [(c.chip, c.work.software) for c in self.priced], np.array([c.seconds for c in self.priced]),
                               weights_of(self.priced))  # fmt: skip
        self.x = self.fit.solve()

    def tables(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for entry, v in self.links.items():
            _, chip, n = entry.split("/")
            table = found.setdefault(chip, {"latency": {}, "bandwidth": {}})
            table["latency"][int(n)], table["bandwidth"][int(n)] = _short(v["alpha"]), _short(v["beta"])
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

    def left_out(self, label: str, progress: Callable[[str], None] = lambda text: None) -> dict[int, float]:
        """id of a case → its value, predicted with all of its `label` (model, source) left out."""
        progress(f"leaving one {label} out")
        errors = self.without([getattr(c, label) for c in self.priced])
        out = {id(c): c.value(c.seconds * math.exp(e)) for c, e in zip(self.priced, errors)}
        for entry in sorted({c.entry for c in self.direct}):
            members = [c for c in self.direct if c.entry == entry]
            for name in sorted({getattr(c, label) for c in members}):
                v = _formula([c for c in members if getattr(c, label) != name], entry)
                out |= {id(c): c.direct(v) for c in members if getattr(c, label) == name}
        return out

    def foreign(self, c: Case, label: str) -> bool:
        """Whether no run on its chip is left."""
        return not any(o.chip == c.chip for o in self.priced if getattr(o, label) != getattr(c, label))

    def beside(self, c: Case, label: str) -> tuple[int, int]:
        """Models and sources that are left with its chip or its software, or its formula."""
        def alike(o: Case) -> bool:
            return o.entry == c.entry if c.work is None else o.work is not None and (o.chip == c.chip or o.work.software == c.work.software)

        left = [o for o in self.cases if alike(o) and getattr(o, label) != getattr(c, label)]
        return len({o.model for o in left}), len({o.source for o in left})

    def results(self, label: str, progress: Callable[[str], None] = lambda text: None) -> list[Result]:
        values, rest = self.left_out(label, progress), {}
        for name in {getattr(c, label) for c in self.cases}:
            rest[name] = constants(o for o in self.cases if getattr(o, label) != name)
        out = []
        for c in self.cases:
            value = values.get(id(c), math.nan)
            if math.isnan(value):  # elsewhere: never in the fit
                value = predicted(c)
            foreign = c.work is not None and (c.group == "elsewhere" or self.foreign(c, label))
            out.append(Result(c, value, baseline(c, rest[getattr(c, label)].get(kind(c))), inside(c, value, foreign), self.beside(c, label)))
        return out


# ---------------------------------------------------------------- summing up


def summary(results: list[Result]) -> dict[str, float | None]:
    """n, mean, median and largest absolute error, bias (geometric), the share inside the stated interval, the baseline's mean error and the
    skill over it, models and sources that stood in the fits (medians)."""
    errors = [abs(r.error) for r in results]
    both = [r for r in results if r.baseline is not None]
    plain = statistics.fmean(abs(r.baseline - r.case.measured) / abs(r.case.measured) for r in both) if both else None
    mine = statistics.fmean(abs(r.error) for r in both) if both else None
    ratios = [math.log(r.predicted / r.case.measured) for r in results if r.predicted > 0 and r.case.measured > 0]
    known = [r.inside for r in results if r.inside is not None]
    return {"n": len(results), "mean": statistics.fmean(errors), "median": statistics.median(errors), "max": max(errors),
            "bias": math.exp(statistics.fmean(ratios)) - 1 if ratios else 0.0, "inside": statistics.fmean(known) if known else None,
            "constant": plain, "skill": 1 - mine / plain if plain else None,
            "models": statistics.median(r.others[0] for r in results), "sources": statistics.median(r.others[1] for r in results)}  # fmt: skip


APART = ("all-reduce", "bloom memory", "feasible", "largest")  # what is no step's time
JOINED = {"steps (all)": lambda g: not g.startswith(APART),
          "mosaic (all)": lambda g: g.startswith("mosaic"),
          "multi-node A100, Megatron (all)": lambda g: g in ("vtrain-multi", "bloom time", "korthikanti", "narayanan")}  # fmt: skip


def grouped(results: list[Result]) -> dict[str, dict[str, float | None]]:
    """By group; what the plan predicts first, and that together; then formulas of their own; then identities."""
    table = {}
    for which, total in (("plan", "all together"), ("other", None), ("identity", None)):
        mine = [r for r in results if r.case.kind == which]
        groups: dict[str, list[Result]] = {}
        for r in mine:
            groups.setdefault(r.case.group, []).append(r)
        table |= {name: summary(rows) for name, rows in sorted(groups.items())}
        if total and mine:
            for name, chosen in JOINED.items():
                rows = [r for r in mine if chosen(r.case.group)]
                table |= {name: summary(rows)} if rows else {}
            table[total] = summary([r for r in mine if not r.case.group.startswith("feasible")] or mine)
    return table


HEAD = f"{'group':34}{'points':>7}{'mean %':>8}{'median':>8}{'max':>8}{'bias':>8}{'inside':>8}{'constant':>9}{'skill':>7}{'models':>7}{'sources':>8}"


def lines(table: dict[str, dict[str, float | None]]) -> Iterator[str]:
    def cell(value: float | None, width: int = 8, sign: bool = False) -> str:
        return "–".rjust(width) if value is None else f"{100 * value:{'+' if sign else ''}{width}.1f}"

    yield HEAD
    for name, row in table.items():
        skill = "–".rjust(7) if row["skill"] is None else f"{row['skill']:7.2f}"
        numbers = "".join(cell(row[key]) for key in ("mean", "median", "max")) + cell(row["bias"], sign=True) + cell(row["inside"])
        yield f"{name:34}{int(row['n']):7d}{numbers}{cell(row['constant'], 9)}{skill}{int(row['models']):7d}{int(row['sources']):8d}"


def not_predicted(reasons: dict[str, list[Point]]) -> Iterator[str]:
    """The reasons, the most frequent first, each with its points' number and their first names."""
    for reason, points in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = ", ".join(str(p.get("id")) for p in points[:3])
        yield f"not predicted: {len(points):4d}  {reason}  ({names}{', ...' if len(points) > 3 else ''})"


def remarks(points: list[Point], results: list[Result]) -> list[str]:
    """What a reader of the table must know of how the points were read, and whose parameters were taken."""
    n = sum(map(runs.on_one_node, points))
    text = "points of bloom time are read as 512 samples a step, not the published 2,048: their own TFLOP/s and seconds imply 512"
    notes: Counter[str] = Counter()
    for r in results:
        notes.update(note for note in (r.case.note, *(roofline.parameters(r.case.cluster.device, r.case.work.software)[1] if r.case.work else ())) if note)
    return ([f"note: {n} {text}"] if n else []) + [f"note: {count} points: {note}" for note, count in notes.most_common()]


def score(points: Iterable[Point]) -> tuple[list[Result], dict[str, list[Point]]]:
    """Points of any file of the schema, with the committed parameters and the committed constants of the baseline: nothing is fitted."""
    cases, reasons = read(points)
    known = others.fitted().get("constants", {})
    out = []
    for c in cases:
        value = predicted(c)
        foreign = c.work is not None and bool(roofline.parameters(c.cluster.device, c.work.software)[1])
        out.append(Result(c, value, baseline(c, known.get(kind(c))), inside(c, value, foreign)))
    return out, reasons


# ---------------------------------------------------------------- evaluations

ALONE = {"H100": "", "B200": "", "A100": "torchtune"}  # chips whose runs are left out, their kernels kept, and the group that is scored; "": all
BY_RATIO = re.compile("GB200|GB300|B300|TPU.*")  # chips without kernels of their own


def entry(c: Case, error: float | None) -> scoring.Entry:
    return scoring.Entry(c.point, c.group, c.chip, c.work.software.partition("-")[0], error)


def _refused(reasons: dict[str, list[Point]]) -> list[scoring.Entry]:
    missed = scoring.once(p for points in reasons.values() for p in points if not scoring.apart(p) and (p.get("group") or timed(str(p.get("metric")))))
    return [scoring.Entry(p, str(p.get("group") or "elsewhere")) for p in missed]


def stated(results: list[Result], reasons: dict[str, list[Point]]) -> list[scoring.Entry]:
    """Runs as they are predicted, with the interval that the plan states."""
    alone = {id(p) for p in scoring.once(r.case.point for r in results if not scoring.apart(r.case.point))}
    found = []
    for r in results:
        if r.case.work is not None and r.case.work.software and id(r.case.point) in alone:
            found.append(entry(r.case, math.log(slower(r.case, r.predicted))))
            low, high = interval(r.case.work, bool(roofline.parameters(r.case.cluster.device, r.case.work.software)[1]))
            found[-1].between = math.log(low), math.log(high)
    return scoring.weigh([*found, *_refused(reasons)])


def evaluations(study: Study, reasons: dict[str, list[Point]]) -> Iterator[tuple[str, list[scoring.Entry]]]:
    """(what was left out, the runs that are scored so, with intervals that no residual of the same made). A refusal is in the first."""
    cases = study.priced
    family = {name: name.partition("-")[0] for name in {c.work.software for c in cases}}  # whatever its way with experts
    pairs = {(c.source, c.chip, family[c.work.software]) for c in cases}
    shared = {key for key in pairs if any(o[0] != key[0] and o[1:] == key[1:] for o in pairs)}
    chosen: list[tuple[str, Callable[[Case], str], list[scoring.Entry]]] = [
        ("each model left out", lambda c: c.model, _refused(reasons)),
        ("each group left out, where another has chip and program", lambda c: c.source if (c.source, c.chip, family[c.work.software]) in shared else "", []),
        ("each chip's runs left out, its kernels kept", lambda c: c.chip if c.chip in ALONE else "", []),
        ("each chip's runs left out, by ratio", lambda c: c.chip if BY_RATIO.fullmatch(c.chip) else "", []),
    ]  # fmt: skip
    for title, label, more in chosen:
        labels = [label(c) if c.work.software else "" for c in cases]
        errors = study.without(labels)
        every = scoring.weigh([dataclasses.replace(entry(c, -e), label=name) for c, e, name in zip(cases, errors, labels) if name])
        scoring.intervals(every)
        if "kernels" in title:
            every = [e for e in every if ALONE[e.chip] in ("", e.group)]
        yield title, scoring.weigh([*every, *more])


# ---------------------------------------------------------------- what is kept


OUTSIDE = 0.128  # on either side, with the source left out; less with the model left out, whose errors are smaller: a fifth of both together
MANY = 20  # points of a software, for an interval of its own
EAGER = ("mosaic", "titan")  # PyTorch programs, whose parameters Gradus's are taken to be


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def quantile(values: list[float], q: float) -> float:
    return float(np.quantile(np.array(values), q))


def intervals(results: Iterable[Result]) -> dict[str, list[float]]:
    """Between which 80 % of the measured steps lie (see OUTSIDE), by predictions with their source left out: of a software with MANY points
    its own, else of all. Of Gradus, of which no step on a GPU was measured, 90 % of all, and no less than any other's."""
    found: dict[str, list[float]] = {}
    for r in results:
        if r.case.work is not None and r.case.work.software and r.case.group != "elsewhere":
            found.setdefault(r.case.work.software, []).append(slower(r.case, r.predicted))
    every = [v for values in found.values() for v in values]

    def between(values: list[float], out: float) -> tuple[float, float]:
        return min(1.0, quantile(values, out)), max(1.0, quantile(values, 1 - out))

    own = {name: between(values if len(values) >= MANY else every, OUTSIDE) for name, values in sorted(found.items())}
    lows, highs = zip(*own.values(), between(every, 0.05))
    return {name: [_short(low), _short(high)] for name, (low, high) in (own | {"gradus": (min(lows), max(highs))}).items()}


def kept(study: Study, points: list[Point], reasons: dict[str, list[Point]], date: str, progress: Callable[[str], None]) -> tuple[dict, dict]:
    """What `fitted.yaml` and `others-fitted.yaml` hold. Deterministic."""
    fit, x = study.fit, study.x
    chips = {chip: entry for chip in sorted({c.chip for c in study.priced}) if (entry := fit.entry(x, {chip}, OF_CHIP))}
    softwares = {s: fit.entry(x, fitting.keys_of("", s) - {"*"}, [*OF_SOFTWARE, "network"]) for s in sorted({c.work.software for c in study.priced} - {""})}
    softwares |= {name: entry for s in list(softwares) for name, entry in fit.on_families(x, s).items()}
    for place in ("", *sorted({"@" + name.partition("@")[2] for name in softwares if "@" in name})):
        fields = {field for s in EAGER for field in softwares.get(s + place, ())}
        named = {f: [softwares.get(s + place, {}).get(f, softwares[s][f]) for s in EAGER if s in softwares] for f in OF_SOFTWARE if f in fields}
        softwares["gradus" + place] = {f: _short(math.exp(statistics.fmean(map(math.log, values)))) for f, values in named.items()}
    first = {"date": date, "data": f"{len(points)} published points, {len(study.cases)} of them predicted", "chips": chips,
             "network": fit.entry(x, {"*"}, OF_NETWORK), "software": softwares, "links": study.tables()}  # fmt: skip
    first["intervals"] = intervals(study.results("source", progress))
    first |= {"uncovered": {why: len(p) for why, p in reasons.items()}}
    entries = {e: {k: _short(v) for k, v in _formula([c for c in study.direct if c.entry == e], e).items()} for e in sorted({c.entry for c in study.direct}) if e in others.starts()}
    many = Counter(kind(c) for c in study.cases)  # a constant of so few would be their own value
    entries["constants"] = {k: _short(v) for k, v in sorted(constants(study.cases).items()) if many[k] > 3}
    return first, entries


def rows(results: list[Result], reasons: dict[str, list[Point]]) -> Iterator[str]:
    """Every point as a line of JSON."""
    for r in results:
        p = r.case.point
        yield json.dumps({"id": p.get("id"), "group": r.case.group, "model": p.get("model"), "metric": p.get("metric"), "unit": p.get("unit"),
                          "measured": r.case.measured, "predicted": r.predicted, "error": r.error, "constant": r.baseline, "inside": r.inside})  # fmt: skip
    for reason, missed in reasons.items():
        for p in missed:
            yield json.dumps({"id": p.get("id"), "model": p.get("model"), "metric": p.get("metric"), "not_predicted": reason})
