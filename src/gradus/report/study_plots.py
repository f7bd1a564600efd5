"""The plots of a study, as SVG: equal rows give equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradus.proof.timing import PARTS
from gradus.report.plots import BARS, COLOURS, INK, SHAPES, Plot, bars, bytes_in, numbered, panels
from gradus.report.studies import Study

MOST = 30  # configurations in one plot
MARKS = "".join(SHAPES)
STATE = {"memory/weights": "weights", "memory/gradients": "gradients", "memory/optimizer": "optimizer"}
# a step's parts, in colours of their own
OF_PARTS = dict(zip(PARTS, (COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[2], COLOURS[6])))


def of_study(study: Study) -> Iterator[Plot]:
    """What the study has rows for."""
    speeds, ladder = study.values("samples_per_s"), any("rung" in facts for facts in study.facts.values())
    if speeds:
        yield _speed(study, speeds, ladder)
    if not ladder and (memory := _components(study)):
        yield _memory(memory)
    runners = dict.fromkeys(study.facts[c].get("runner") for c in speeds)
    lines: dict[str, list[str]] = {}
    for runner in runners:
        of_runner = _lines(study, {c: v for c, v in speeds.items() if study.facts[c].get("runner") == runner})
        whole = "whole trainings" if runner == "train" and len(runners) > 1 else ""
        lines |= {", ".join(word for word in (name, whole) if word): own for name, own in of_runner.items()}
    if lines and not ladder:
        yield _scaling(study, lines, speeds)
    if plot := _by_batch(study):
        yield plot
    yield from _quality(study)


def _few(values: dict[str, float]) -> tuple[list[str], str]:
    """Names of the configurations that are drawn, and what the caption says of it."""
    best = sorted(values, key=values.get)[-MOST:]
    less = f" The plot shows the {MOST} largest of {len(values)}." if len(values) > MOST else ""
    return [c for c in values if c in best], less


def _bars(study: Study, axes: Any, names: Sequence[str], name: str, unit: float = 1) -> None:
    """Lying bars, faint where a rung was not kept, with every sample as a dot, or the deviation over the seeds."""
    values, colour = study.values(name), COLOURS[0]
    for place, c in enumerate(names):
        if c not in values:
            continue
        row, value = study.row(c, name), values[c] / unit
        samples = [s / unit for s in row.get("samples", ()) if isinstance(s, int | float)]
        faint = not study.facts[c].get("kept", True)
        axes.barh(place, value, 0.62, color=colour, alpha=0.3 if faint else 0.85)
        if row.get("std"):
            axes.errorbar(value, place, xerr=row["std"] / unit, color=INK, capsize=3, lw=1)
        elif len(samples) > 1:
            axes.plot(samples, [place] * len(samples), "o", color=INK, ms=3.5, mew=0)
        far = max([value + row.get("std", 0) / unit, *samples])
        of = ("speed_up", "ratio") if name == "samples_per_s" else ("ratio/memory",)
        ratio = next((compared["value"] for compared in (study.row(c, kind) for kind in of) if compared), None)
        if isinstance(ratio, int | float):
            axes.annotate(f"{ratio:.2f} ×", (far, place), (5, 0), textcoords="offset points", va="center")
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    numbered(axes.xaxis)


def _speed(study: Study, speeds: dict[str, float], ladder: bool) -> Plot:
    names, less = (list(speeds), "") if ladder else _few(speeds)
    memory = next((n for n in ("memory/allocated", "memory/process") if ladder and study.values(n)), None)
    all_axes = [bars(names, 0.3, 4.0 if memory else BARS)]
    _bars(study, all_axes[0], names, "samples_per_s")
    all_axes[0].set_xlabel("samples/s")
    if memory:
        unit, word = bytes_in(max(study.values(memory).values()))
        all_axes.append(bars(names, 0.3, 4.0))
        _bars(study, all_axes[1], names, memory, unit)
        all_axes[1].set_xlabel(f"{word} of {'tensors' if memory == 'memory/allocated' else 'the process'}")
    rows = [study.row(c, "samples_per_s") for c in names]
    caption = "Bars show the speed of each configuration."
    if ladder:
        caption = "Bars show the speed and memory of each rung; a faint bar was not kept."
    if any("std" in row for row in rows):
        caption += " Lines show the standard deviation over the seeds."
    elif any(len(row.get("samples", ())) > 1 for row in rows):
        caption += " Dots show every sample."
    return caption + " Numbers beside bars are the ratio." * any(study.row(c, "ratio") for c in names) + less, all_axes


def _components(study: Study) -> dict[str, list[dict[str, float]]]:
    """Configuration → bytes by component: planned (empty where it was not), measured. Of the process as a whole where
    tensors are not known of any."""
    tensors = bool(study.values("memory/allocated"))
    whole, rest = ("memory/allocated", "activations and the rest") if tensors else ("memory/process", "the process")
    sides: dict[str, list[dict[str, float]]] = {}
    for c in study.values(whole):
        for planned, rows in ((True, study.table.planned), (False, study.table.measured)):
            total = rows.get((c, whole), {}).get("value", "")  # planned: of the largest batch; a word where not finite
            known = {label: study.values(name, planned).get(c) for name, label in STATE.items() if tensors}
            parts = {label: value for label, value in known.items() if value is not None}
            side = {} if isinstance(total, str) else {**parts, rest: max(0.0, total - sum(parts.values()))}
            sides.setdefault(c, []).append(side)
    return sides


def _memory(memory: dict[str, list[dict[str, float]]]) -> Plot:
    names, less = _few({c: sum(measured.values()) for c, (_, measured) in memory.items()})
    labels = dict.fromkeys(label for c in names for side in memory[c] for label in side)
    both = any(memory[c][0] for c in names)
    axes = bars(names, 0.42 if both else 0.3)
    unit, word = bytes_in(max(sum(side.values()) for c in names for side in memory[c]))
    ends = [[0.0] * len(names), [0.0] * len(names)]
    for label, colour in zip(labels, COLOURS):
        for side, alpha, shift in ((0, 0.45, -0.19), (1, 1.0, 0.19 * both)):
            widths = [memory[c][side].get(label, 0.0) / unit for c in names]
            places, style = [i + shift for i in range(len(names))], {"color": colour, "alpha": alpha}
            axes.barh(places, widths, 0.34 if both else 0.62, ends[side], label=label if side else None, **style)
            ends[side] = [end + width for end, width in zip(ends[side], widths)]
    axes.set_xlabel(word)
    numbered(axes.xaxis)
    what = "Bars show the peak memory of the process that takes most"
    how = ": upper, faint bars are planned, lower bars measured" if both else ", measured"
    return f"{what}{how}.{less}", [axes]


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
    caption = "Lines show the speed-up, from the lowest to the highest of the rounds; the dashed line is the ideal."
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
    if all(len(line) < 2 for line in lines.values()):
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
    return "Lines show the median latency by the number of samples at a time; both axes are logarithmic.", [axes]


# ---------------------------------------------------------------- accuracy against speed


def _quality(study: Study) -> Iterator[Plot]:
    x = next((name for name in study.names if name.startswith("latency")), "samples_per_s")
    known = [name for name in study.names if name.startswith(("valid/", "test/", "accuracy"))]
    known.sort(key=lambda name: name.endswith(("/loss", "/perplexity")))  # after what is better
    pairs = {name: [c for c in study.values(name) if c in study.values(x)] for name in known}
    metrics = [name for name, configurations in pairs.items() if len(configurations) > 1][:3]
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
    caption = f"Markers show the quality and the {against} of each configuration."
    yield caption + " Lines show the standard deviation over the seeds." * std, all_axes
