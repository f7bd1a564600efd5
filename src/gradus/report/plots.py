"""The plots of a report's runs: equal rows give equal bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gradus.errors import either
from gradus.pictures import COLOURS, MARKS, Curve, Picture, bars, bytes_in, lines
from gradus.proof.pairs import PEAK, figure_name
from gradus.report.blocks import Figure
from gradus.report.runs import X_AXES, Run, words

CURVES = 7  # runs in one plot at most
LEAST = 3  # points of a curve, or bars: fewer are read faster in a table
SIDE = 3  # panels of metrics in one figure
PANEL = {"width": 310, "height": 230, "zero": False}  # of several side by side
METRICS = 12  # that are drawn at most; the table has all
DOTS = 60  # evaluations that are still marked one by one


def not_drawn(runs: Sequence[Run], x: str = "step") -> str:
    """One sentence on metrics that have no plot, if any."""
    names = metrics(runs)
    few = [name for name in names if not _several(runs, name, x)]
    over = [name for name in names if name not in few][METRICS:]
    listed = f"{', '.join(map(words, few[:6]))}{' and more' * (len(few) > 6)}"
    by = f" by {X_AXES[x]}" * (x != "step")
    omissions = [f"no plot of {listed}, measured{by} fewer than {LEAST} times"] if few else []
    omissions += [f"plots of the first {METRICS} metrics only, {len(over)} more are in the table"] if over else []
    omissions += [f"the curves of the first {CURVES} runs only, of {len(runs)}"] if len(runs) > CURVES else []
    return f"The report has {'; '.join(omissions)}." if omissions else ""


def metrics(runs: Sequence[Run]) -> list[str]:
    """What is evaluated, the loss first."""
    names = [name.removeprefix("valid/") for run in runs for name in run.names if name.startswith("valid/")]
    return list(dict.fromkeys([*["loss"] * any("train/loss" in run.names for run in runs), *names]))


def _several(runs: Sequence[Run], name: str, x: str) -> bool:
    return any(len(run.points(f"{kind}/{name}", x)) >= LEAST for run in runs for kind in ("train", "valid"))


def of_runs(runs: Sequence[Run], x: str = "step") -> Iterator[Figure]:
    """What the runs of one recipe have rows for. x: of X_AXES."""
    curves = runs[:CURVES]
    names = [name for name in metrics(runs) if _several(curves, name, x)][:METRICS]
    for i in range(0, len(names), SIDE):
        yield _curves(curves, names[i : i + SIDE], x)
    rates = {"lr": "learning rate", "grad_norm": "norm of the gradient"}
    yield from _of_training(curves, "", rates, x)
    speeds = {"samples_per_s": "samples/s", "mfu": "MFU"}
    yield from _of_training(curves, " Each point is the mean since the point before.", speeds, x)
    memory = [(run, *pair) for run in runs for pair in run.proved if pair[0].startswith("memory/") and pair[2]]
    several = len(runs) > 1
    # a process has much more than its tensors
    memory = [bar for bar in memory if bar[1] == PEAK or not (several or bar[1] == "memory/process")]
    if len(memory) >= LEAST:
        of = "at the peak" if several else "by component"
        yield Figure([_memory(memory, several)], f"The memory of tensors {of}. Bars were measured, marks planned.")
    compared = [run for run in runs if run.speed_up]
    if len(compared) >= LEAST:
        ideal = "Marks show the ideal, the ratio of the numbers of processes."
        yield Figure([_speed_up(compared)], f"The speed-up against {compared[0].name}. {ideal}")


def _curves(runs: Sequence[Run], names: Sequence[str], x: str) -> Figure:
    """A panel for each metric, of training and validation."""
    panels, kinds = [], set()
    for name in names:
        curves, unit = {}, ""
        for (run, colour), kind in itertools.product(zip(runs, COLOURS), ("train", "valid")):
            if points := run.points(f"{kind}/{name}", x):
                kinds.add(kind)
                mark = MARKS[0] if kind == "valid" and len(points) <= DOTS else ""
                label, unit = f"{run.name}: " * (len(runs) > 1) + words(kind), run.unit(f"{kind}/{name}")
                curves[label] = Curve(points, colour, kind == "valid", mark)
        more = f", {unit}" * (unit not in ("", words(name).replace(" per ", "/")))
        panels.append(lines(curves, words(name) + more, x=X_AXES[x], **PANEL))
    how = "Solid lines are training, dashed lines validation." if len(kinds) > 1 else f"All of {words(kinds.pop())}."
    return Figure(panels, f"The {either(map(words, names), 'and')} by {X_AXES[x]}. {how}")


def _of_training(runs: Sequence[Run], more: str, wanted: dict[str, str], x: str) -> Iterator[Figure]:
    panels = {}
    for name, title in wanted.items():
        points = [(run.name, colour, run.points(f"train/{name}", x)) for run, colour in zip(runs, COLOURS)]
        if any(len(of_run) >= LEAST for *_, of_run in points):
            curves = {run: Curve(of_run, colour) for run, colour, of_run in points if of_run}
            panels[title] = lines(curves, title, x=X_AXES[x], **PANEL)
    if panels:
        yield Figure([*panels.values()], f"The {either(panels, 'and')} of training by {X_AXES[x]}.{more}")


def _memory(rows: list[tuple[Run, str, float, float]], several: bool) -> Picture:
    one, unit = bytes_in(max(max(planned, measured) for *_, planned, measured in rows))
    names = [run.name if several else figure_name(component) for run, component, *_ in rows]
    planned, measured = ({name: row[side] / one for name, row in zip(names, rows)} for side in (2, 3))
    marks = {name: [value] for name, value in planned.items()}
    return bars(measured, "memory of tensors", unit=unit, marks=marks, width=560)


def _speed_up(runs: Sequence[Run]) -> Picture:
    names = [f"{run.name}, {run.processes} process{'es' * (run.processes > 1)}" for run in runs]
    ideal = {name: [run.processes / runs[0].processes] for name, run in zip(names, runs)}
    speed_ups = {name: run.speed_up for name, run in zip(names, runs)}
    return bars(speed_ups, "times as many samples/s", unit="×", marks=ideal, width=560)
