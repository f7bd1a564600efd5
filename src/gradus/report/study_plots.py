"""The plots of a study, as SVG: equal rows give equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradus.proof.ladder import LAST
from gradus.proof.ladder_search import Trial
from gradus.proof.optimizations import words
from gradus.proof.timing import PARTS
from gradus.report.plots import BARS, COLOURS, INK, LEAST, SHAPES, Plot, bars, numbered, panels
from gradus.report.studies import Study

MOST = 30  # configurations in one plot
MARKS = "".join(SHAPES)
# a step's parts, in colours of their own
OF_PARTS = dict(zip(PARTS, (COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[2], COLOURS[6])))


def of_study(study: Study) -> Iterator[Plot]:
    """What the study has rows for."""
    speeds = study.values("samples_per_s")
    rungs = {f"{t.rung}: {words(t.keys)}": t for t in study.trials if t.keys and t.speed and not t.failed}
    if len(rungs) >= LEAST:
        yield _ladder(rungs)
    if len(speeds) >= LEAST:
        yield _speed(study, speeds)
    runners = dict.fromkeys(study.facts[c].get("runner") for c in speeds)
    lines: dict[str, list[str]] = {}
    for runner in runners:
        of_runner = _lines(study, {c: v for c, v in speeds.items() if study.facts[c].get("runner") == runner})
        whole = "whole trainings" if runner == "train" and len(runners) > 1 else ""
        lines |= {", ".join(word for word in (name, whole) if word): own for name, own in of_runner.items()}
    if any(len(line) >= LEAST for line in lines.values()):
        yield _scaling(study, lines, speeds)
    if plot := _by_batch(study):
        yield plot
    yield from _quality(study)


def _ladder(rungs: dict[str, Trial]) -> Plot:
    """× of each option as a bar, faint where it was not kept, with the lowest and highest of the rounds."""
    axes = bars(list(rungs), 0.3)
    for place, trial in enumerate(rungs.values()):
        axes.barh(place, trial.ratio, 0.62, color=COLOURS[0], alpha=0.85 if trial.kept else 0.3)
        axes.plot([trial.low, trial.high], [place, place], color=INK, lw=1)
    axes.axvline(1, color=INK, lw=1, ls="--")
    axes.set_xlabel("times the samples/s of the best before")
    numbered(axes.xaxis)
    caption = "The speed of each rung against the best before. A faint bar was not kept; lines go from lowest to "
    return f"{caption}highest of the rounds. {LAST} has all that was kept, against the first rung.", [axes]


def _speed(study: Study, speeds: dict[str, float]) -> Plot:
    """Lying bars, with every sample as a dot, or the deviation over the seeds."""
    best = sorted(speeds, key=speeds.get)[-MOST:]
    names = [c for c in speeds if c in best]
    axes = bars(names, 0.3)
    for place, c in enumerate(names):
        row, value = study.row(c, "samples_per_s"), speeds[c]
        samples, std = [s for s in row.get("samples", ()) if isinstance(s, int | float)], row.get("std") or 0
        axes.barh(place, value, 0.62, color=COLOURS[0], alpha=0.85)
        if std:
            axes.errorbar(value, place, xerr=std, color=INK, capsize=3, lw=1)
        elif len(samples) > 1:
            axes.plot(samples, [place] * len(samples), "o", color=INK, ms=3.5, mew=0)
        ratios = (study.values(kind).get(c) for kind in ("speed_up", "ratio"))
        if ratio := next(filter(None, ratios), None):
            far = max([value + std, *samples])
            axes.annotate(f"{ratio:.2f} ×", (far, place), (5, 0), textcoords="offset points", va="center")
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_xlabel("samples/s")
    numbered(axes.xaxis)
    rows = [study.row(c, "samples_per_s") for c in names]
    caption = "The speed of each configuration."
    caption += f" The plot shows the {MOST} largest of {len(speeds)}." * (len(speeds) > MOST)
    if any("std" in row for row in rows):
        caption += " Lines show the standard deviation over the seeds."
    elif any(len(row.get("samples", ())) > 1 for row in rows):
        caption += " Dots show every sample."
    return caption + " Numbers beside bars are the ratio." * any(study.row(c, "ratio") for c in names), [axes]


# ---------------------------------------------------------------- several numbers of processes


def _lines(study: Study, speeds: dict[str, float]) -> dict[str, list[str]]:
    """Name of a line → its configurations, by processes; none where these are on no axis."""
    at = {c: study.facts[c].get("at") or {"configuration": c} for c in speeds if "processes" in study.facts[c]}
    for axis in dict.fromkeys(axis for place in at.values() for axis in place):
        counts = {(place.get(axis), study.facts[c]["processes"]) for c, place in at.items()}
        if len(counts) > 1 and len({name for name, _ in counts}) == len({n for _, n in counts}) == len(counts):
            lines: dict[str, list[str]] = {}
            for c in sorted(at, key=lambda c: study.facts[c]["processes"]):
                lines.setdefault(" · ".join(v for k, v in at[c].items() if k != axis), []).append(c)
            return {name: line for name, line in lines.items() if len(line) > 1}
    return {}


def _scaling(study: Study, lines: dict[str, list[str]], speeds: dict[str, float]) -> Plot:
    """Speed-up with the ideal line; where one line has known parts also these, and what was lost by name."""
    processes = {c: study.facts[c]["processes"] for line in lines.values() for c in line}
    counts = sorted(set(processes.values()))
    of_parts = [line for line in lines.values() if _by_part(study, "time/step", line[-1], 1)]
    only = of_parts[0] if len(of_parts) == 1 else []
    stacks = []
    for start, unit, label in (("time/step", 1e3, "ms per step"), ("lost", 100, "% of the step lost")):
        by_count = {str(processes[c]): _by_part(study, start, c, unit) for c in only}
        stacks += [(label, {n: stack for n, stack in by_count.items() if stack})] if any(by_count.values()) else []
    axes, *more = panels(1 + len(stacks), 2.8)
    axes.plot(range(len(counts)), [n / counts[0] for n in counts], "--", color=INK, lw=1, label="ideal")
    for i, (name, line) in enumerate(lines.items()):
        base = speeds[line[0]] * counts[0] / processes[line[0]]
        ends = [[study.row(c, "samples_per_s").get(end, speeds[c]) for c in line] for end in ("low", "high")]
        spread = [[abs(end - speeds[c]) / base for c, end in zip(line, side)] for side in ends]
        style = {"fmt": "o-", "ms": 4, "lw": 1.2, "capsize": 3, "color": COLOURS[i % len(COLOURS)]}
        ratios = [speeds[c] / base for c in line]
        axes.errorbar([counts.index(processes[c]) for c in line], ratios, spread, label=name or "measured", **style)
    shares = {processes[c]: f"\n{speeds[c] * processes[only[0]] / speeds[only[0]] / processes[c]:.0%}" for c in only}
    axes.set_xticks(range(len(counts)), [f"{n}{shares.get(n, '')}" for n in counts])
    axes.set(xlabel="processes" + ", and their efficiency" * bool(only), ylabel="times the samples/s", ylim=(0, None))
    axes.margins(x=0.12)
    axes.grid(alpha=0.25)
    for panel, (label, by_count) in zip(more, stacks):
        _stacked(panel, by_count)
        panel.set(xlabel="processes", ylabel=label)
    caption = "The speed-up. Lines go from the lowest to the highest of the rounds; the dashed line is the ideal."
    return caption + " Bars show a step by its parts, and what was lost by name." * bool(stacks), [axes, *more]


def _by_part(study: Study, start: str, c: str, unit: float) -> dict[str, float]:
    values = {part: study.values(f"{start}/{part}").get(c) for part in PARTS}
    return {part: value * unit for part, value in values.items() if value is not None}


def _stacked(axes: Any, stacks: dict[str, dict[str, float]]) -> None:
    """What is below zero is stacked downwards."""
    ends, places = [[0.0, 0.0] for _ in stacks], range(len(stacks))
    for part, colour in OF_PARTS.items():
        heights = [stack.get(part, 0.0) for stack in stacks.values()]
        bottoms = [end[height < 0] for end, height in zip(ends, heights)]
        axes.bar(places, heights, 0.6, bottoms, color=colour, label=part)
        for end, height in zip(ends, heights):
            end[height < 0] += height
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(places, list(stacks))
    axes.set_xlim(-0.7, max(len(stacks), 2) - 0.3)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


# ---------------------------------------------------------------- several batches


def _by_batch(study: Study) -> Plot | None:
    """Latency, a line for what differs in nothing but the batch."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for c, latency in study.values("latency/median").items():
        at = dict(study.facts[c].get("at", {}))
        if "batch" in at:
            batch = float(at.pop("batch"))
            name = at.pop("engine", "") + "".join(f" · {n} {axis}" for axis, n in at.items())
            lines.setdefault(name, []).append((batch, latency))
    if all(len(line) < LEAST for line in lines.values()):
        return None
    (axes,) = panels(1, 3.2, BARS)
    for i, (name, line) in enumerate([*lines.items()][:MOST]):
        marker, colour = MARKS[i // len(COLOURS) % len(MARKS)], COLOURS[i % len(COLOURS)]
        axes.plot(*zip(*sorted(line)), label=name, marker=marker, color=colour, ms=4, lw=1.2)
    batches = sorted({batch for line in lines.values() for batch, _ in line})
    axes.set(xscale="log", yscale="log", xlabel="samples at a time", ylabel="latency, s")
    axes.set_xticks(batches, [f"{n:g}" for n in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    return "The median latency by the number of samples at a time. Both axes are logarithmic.", [axes]


# ---------------------------------------------------------------- accuracy against speed


def _quality(study: Study) -> Iterator[Plot]:
    x = next((name for name in study.names if name.startswith("latency")), "samples_per_s")
    known = [name for name in study.names if name.startswith(("valid/", "test/", "accuracy"))]
    known.sort(key=lambda name: name.endswith(("/loss", "/perplexity")))  # after what is better
    pairs = {name: [c for c in study.values(name) if c in study.values(x)] for name in known}
    metrics = [name for name, configurations in pairs.items() if len(configurations) >= LEAST][:3]
    if not metrics:
        return
    all_axes = panels(len(metrics), 2.8)
    names = list(dict.fromkeys(c for name in metrics for c in pairs[name]))[:MOST]
    for axes, name in zip(all_axes, metrics):
        for i, c in enumerate(names):
            if c in pairs[name]:
                ends = [study.row(c, of).get("std") for of in (x, name)]
                at = study.values(x)[c], study.values(name)[c]
                style = {"fmt": MARKS[i // len(COLOURS) % len(MARKS)], "ms": 6, "capsize": 2, "lw": 1, "label": c}
                axes.errorbar(*at, xerr=ends[0], yerr=ends[1], color=COLOURS[i % len(COLOURS)], **style)
        unit = study.row(names[0], x).get("unit", "")
        axes.set(xlabel="samples/s" if x == "samples_per_s" else f"{x}, {unit}", ylabel=name)
        axes.margins(0.15)
        for limits, to in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
            middle = sum(limits) / 2  # what is the same to 2 % looks so
            to(min(limits[0], middle - 0.02 * abs(middle)), max(limits[1], middle + 0.02 * abs(middle)))
        numbered(axes.xaxis)
        axes.grid(alpha=0.25)
    std = any("std" in study.row(c, name) for name in metrics for c in names)
    against = "speed" if x == "samples_per_s" else "latency"
    caption = f"The quality and the {against} of each configuration."
    yield caption + " Lines show the standard deviation over the seeds." * std, all_axes
