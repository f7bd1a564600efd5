"""The plots of a study: equal rows give equal bytes."""

from __future__ import annotations

from collections.abc import Iterator

from gradus.pictures import COLOURS, MARKS, Curve, bars, lines
from gradus.proof.ladder import LAST
from gradus.proof.ladder_search import Trial
from gradus.proof.optimizations import words
from gradus.proof.timing import PARTS
from gradus.report.blocks import Figure
from gradus.report.plots import LEAST, PANEL
from gradus.report.runs import is_number
from gradus.report.studies import Study

MOST = 30  # configurations in one plot


def of_study(study: Study) -> Iterator[Figure]:
    """What the study has rows for."""
    speeds = study.values("samples_per_s")
    rungs = {f"{t.rung}: {words(t.keys)}": t for t in study.trials if t.keys and t.speed and not t.failed}
    if len(rungs) >= LEAST:
        yield _ladder(rungs)
    if len(speeds) >= LEAST:
        yield _speed(study, speeds)
    runners = dict.fromkeys(study.facts[c].get("runner") for c in speeds)
    groups: dict[str, list[str]] = {}
    for runner in runners:
        of_runner = _lines(study, {c: v for c, v in speeds.items() if study.facts[c].get("runner") == runner})
        whole = "whole trainings" if runner == "train" and len(runners) > 1 else ""
        groups |= {", ".join(word for word in (name, whole) if word): own for name, own in of_runner.items()}
    if any(len(line) >= LEAST for line in groups.values()):
        yield _scaling(study, groups, speeds)
    if plot := _by_batch(study):
        yield plot
    yield from _quality(study)


def _ladder(rungs: dict[str, Trial]) -> Figure:
    """× of each option as a bar, with the lowest and highest of the rounds."""
    ratios = {name: {"kept" if trial.kept else "not kept": trial.ratio} for name, trial in rungs.items()}
    marks, limit = {name: [trial.low, trial.high] for name, trial in rungs.items()}, ("the best before", 1.0)
    drawn = bars(ratios, "times the samples/s of the best before", unit="×", limit=limit, marks=marks)
    caption = "The speed of each rung against the best before. Marks are at the lowest and the highest of the rounds. "
    return Figure([drawn], f"{caption}{LAST} has all that was kept, against the first rung.")


def _speed(study: Study, speeds: dict[str, float]) -> Figure:
    """Lying bars, with a mark for every sample, or the deviation over the seeds."""
    best = sorted(speeds, key=speeds.get)[-MOST:]
    rows, marks, notes = {c: study.row(c, "samples_per_s") for c in speeds if c in best}, {}, {}
    for c, row in rows.items():
        samples, std = list(filter(is_number, row.get("samples", ()))), row.get("std") or 0
        marks[c] = [max(0.0, speeds[c] - std), speeds[c] + std] if std else samples[1:] and samples
        if ratio := next(filter(None, (study.values(kind).get(c) for kind in ("speed_up", "ratio"))), None):
            notes[c] = f", {ratio:.2f} ×"
    drawn = bars({c: speeds[c] for c in rows}, "samples/s", marks=marks, notes=notes)
    caption = "The speed of each configuration."
    caption += f" The plot shows the {MOST} largest of {len(speeds)}." * (len(speeds) > MOST)
    if any("std" in row for row in rows.values()):
        caption += " Marks show the standard deviation over the seeds."
    elif any(marks.values()):
        caption += " Marks show every sample."
    return Figure([drawn], caption + " The last number is the ratio." * any(study.row(c, "ratio") for c in rows))


# ---------------------------------------------------------------- several numbers of processes


def _lines(study: Study, speeds: dict[str, float]) -> dict[str, list[str]]:
    """Name of a line → its configurations, by processes; none where these are on no axis."""
    at = {c: study.facts[c].get("at") or {"configuration": c} for c in speeds if "processes" in study.facts[c]}
    for axis in dict.fromkeys(axis for place in at.values() for axis in place):
        counts = {(place.get(axis), study.facts[c]["processes"]) for c, place in at.items()}
        if len(counts) > 1 and len({name for name, _ in counts}) == len({n for _, n in counts}) == len(counts):
            groups: dict[str, list[str]] = {}
            for c in sorted(at, key=lambda c: study.facts[c]["processes"]):
                groups.setdefault(" · ".join(v for k, v in at[c].items() if k != axis), []).append(c)
            return {name: line for name, line in groups.items() if len(line) > 1}
    return {}


def _scaling(study: Study, groups: dict[str, list[str]], speeds: dict[str, float]) -> Figure:
    """Speed-up with the ideal line; where one line has known parts also these, and what was lost by name."""
    processes = {c: study.facts[c]["processes"] for line in groups.values() for c in line}
    counts = sorted(set(processes.values()))
    of_parts = [line for line in groups.values() if _by_part(study, "time/step", line[-1], 1)]
    only = of_parts[0] if len(of_parts) == 1 else []
    curves = {"ideal": Curve([(i, n / counts[0]) for i, n in enumerate(counts)], "var(--quiet)", dashed=True)}
    for i, (name, line) in enumerate(groups.items()):
        base = speeds[line[0]] * counts[0] / processes[line[0]]
        at = {c: (counts.index(processes[c]), speeds[c] / base) for c in line}
        ends = ([study.row(c, "samples_per_s").get(end, speeds[c]) / base for end in ("low", "high")] for c in line)
        spreads = [((x, low), (x, high)) for (x, _), (low, high) in zip(at.values(), ends)]
        curves[name or "measured"] = Curve([*at.values()], COLOURS[i % len(COLOURS)], mark=MARKS[0], spreads=spreads)
    shares = {processes[c]: f": {speeds[c] * processes[only[0]] / speeds[only[0]] / processes[c]:.0%}" for c in only}
    named = {i: f"{n}{shares.get(n, '')}" for i, n in enumerate(counts)}
    x = "processes" + ", and their efficiency" * bool(only)
    panels = [lines(curves, "times the samples/s", x=x, named=named, **PANEL | {"zero": True})]
    for start, unit, label in (("time/step", 1e3, "ms per step"), ("lost", 100, "% of the step lost")):
        stacks = {f"{processes[c]} process{'es' * (processes[c] > 1)}": _by_part(study, start, c, unit) for c in only}
        if stacks := {name: stack for name, stack in stacks.items() if stack}:
            panels.append(bars(stacks, label, width=PANEL["width"]))
    caption = "The speed-up. Lines go from the lowest to the highest of the rounds; the dashed line is the ideal."
    return Figure(panels, caption + " Bars show a step by its parts, and what was lost by name." * (len(panels) > 1))


def _by_part(study: Study, start: str, c: str, unit: float) -> dict[str, float]:
    values = {part: study.values(f"{start}/{part}").get(c) for part in PARTS}
    return {part: value * unit for part, value in values.items() if value is not None}


# ---------------------------------------------------------------- several batches


def _by_batch(study: Study) -> Figure | None:
    """Latency, a line for what differs in nothing but the batch."""
    points: dict[str, list[tuple[float, float]]] = {}
    for c, latency in study.values("latency/median").items():
        at = dict(study.facts[c].get("at", {}))
        batch = float(at.pop("batch", 0))
        if batch > 0 and latency > 0:
            name = at.pop("engine", "") + "".join(f" · {n} {axis}" for axis, n in at.items())
            points.setdefault(name, []).append((batch, latency))
    if all(len(line) < LEAST for line in points.values()):
        return None
    curves = {name: Curve(sorted(line), *_look(i)) for i, (name, line) in enumerate([*points.items()][:MOST])}
    named = {batch: f"{batch:g}" for batch in sorted({batch for line in points.values() for batch, _ in line})}
    drawn = lines(curves, "latency, s", x="samples at a time", log="xy", named=named, width=560)
    caption = "The median latency by the number of samples at a time. Both axes are logarithmic."
    return Figure([drawn], caption)


def _look(i: int) -> tuple[str, bool, str]:
    """Colour, dashes (none) and mark: one for each of MOST."""
    return COLOURS[i % len(COLOURS)], False, MARKS[i // len(COLOURS) % len(MARKS)]


# ---------------------------------------------------------------- accuracy against speed


def _quality(study: Study) -> Iterator[Figure]:
    x = next((name for name in study.names if name.startswith("latency")), "samples_per_s")
    known = [name for name in study.names if name.startswith(("valid/", "test/", "accuracy"))]
    known.sort(key=lambda name: name.endswith(("/loss", "/perplexity")))  # after what is better
    pairs = {name: [c for c in study.values(name) if c in study.values(x)] for name in known}
    metrics = [name for name, configurations in pairs.items() if len(configurations) >= LEAST][:3]
    if not metrics:
        return
    names = list(dict.fromkeys(c for name in metrics for c in pairs[name]))[:MOST]
    unit = study.row(names[0], x).get("unit", "")
    label, panels = "samples/s" if x == "samples_per_s" else f"{x}, {unit}", []
    for name in metrics:
        curves = {}
        for i, c in enumerate(names):
            if c in pairs[name]:
                a, b = study.values(x)[c], study.values(name)[c]
                da, db = (study.row(c, of).get("std") or 0 for of in (x, name))
                spreads = [((a - da, b), (a + da, b)), ((a, b - db), (a, b + db))]
                curves[c] = Curve([(a, b)], *_look(i), joined=False, spreads=spreads)
        panels.append(lines(curves, name, x=label, **PANEL))
    std = any("std" in study.row(c, name) for name in metrics for c in names)
    against = "speed" if x == "samples_per_s" else "latency"
    caption = f"The quality and the {against} of each configuration."
    yield Figure(panels, caption + " Lines show the standard deviation over the seeds." * std)
