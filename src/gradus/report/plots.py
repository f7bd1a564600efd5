"""The plots of a report, as SVG: equal rows give equal bytes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradus.errors import either, need
from gradus.proof.pairs import LABELS
from gradus.report.blocks import Figure, Key
from gradus.report.runs import X_AXES, Run, words
from gradus.text import count

INK = "#111111"  # of all text and axes: a page replaces it by its own
# of Okabe and Ito: distinct to all eyes
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
PLAIN = ("axes.spines.top", "axes.spines.right", "axes.formatter.useoffset")
STYLE = {
    "svg.hashsalt": "gradus",
    "svg.fonttype": "path",
    "text.parse_math": False,  # a $ in a name is a $
    "font.size": 9,
    **dict.fromkeys(PLAIN, False),
    **dict.fromkeys(INKED, INK),
}
SHAPES = dict(zip("os^DvP*X", "●■▲◆▼✚★✖"))  # markers, and the characters that look like them
CURVES = len(COLOURS)  # runs in one plot at most
METRICS = 12  # that are drawn at most; the table has all
BARS, LONG, LINES = 4.8, 32, 8  # inches of a plot of bars; characters of a line of their names, and lines
DOTS = 60  # evaluations that are still marked one by one
Plot = tuple[str, list[Any]]  # caption, axes of its panels


def panels(n: int, height: float = 2.4, width: float | None = None) -> list[Any]:
    """Axes, each of a figure of its own. height, width: in inches."""
    figure = need("matplotlib.figure", "report", "a report's plots").Figure
    size = width or (3.0 if n > 2 else 3.6), height
    return [figure(figsize=size, layout="constrained").subplots() for _ in range(n)]


def bars(names: Sequence[str], height: float, width: float = BARS) -> Any:
    """Axes for lying bars: their names, in as many lines as they take, from top to bottom at 0, 1, ... height: of one,
    in inches, at least."""
    labels = [textwrap.wrap(name, LONG, break_on_hyphens=False, max_lines=LINES, placeholder=" …") for name in names]
    height = max([height, *(0.06 + 0.14 * len(lines) for lines in labels)])
    (axes,) = panels(1, 0.8 + height * len(names), width)
    axes.set_yticks(range(len(names)), ["\n".join(lines) for lines in labels])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    return axes


def drawn(plots: Iterable[Plot]) -> list[Figure]:
    """Plots that are made as they are asked for. Raises UserError without matplotlib."""
    matplotlib = need("matplotlib", "report", "a report's plots")
    with matplotlib.rc_context(STYLE):
        return [Figure([_svg(axes) for axes in own], caption, _legend(own)) for caption, own in plots]


def _svg(axes: Any) -> str:
    axes.figure.draw_without_rendering()
    axes.figure.set_layout_engine("none")  # it is laid out
    _spread_ticks(axes.xaxis, "x0", "x1")
    _spread_ticks(axes.yaxis, "y0", "y1")
    text = io.StringIO()
    axes.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _spread_ticks(axis: Any, start: str, end: str) -> None:
    """Leave out labels that would run into the one before."""
    kept, edge = [], -math.inf
    low, high = sorted(axis.get_view_interval())
    labels = [(at, label) for at, label in zip(axis.get_ticklocs(), axis.get_ticklabels()) if low <= at <= high]
    shown = [(label.get_window_extent(), at, label.get_text()) for at, label in labels if label.get_text()]
    for box, at, text in sorted(shown, key=lambda entry: getattr(entry[0], start)):
        if getattr(box, start) >= edge + 3:
            kept.append((at, text))
            edge = getattr(box, end)
    if len(kept) < len(shown):
        axis.set_ticks(*zip(*kept))


def _legend(panels: Sequence[Any]) -> list[Key]:
    """What the panels' colours and lines stand for; nothing of one alone."""
    handles = {}
    for axes in panels:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels())})
    return [Key(*_looks(handle), label) for label, handle in handles.items()] if len(handles) > 1 else []


def _looks(handle: Any) -> tuple[str, str]:
    """(colour, mark) of what a legend would show."""
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.lines import Line2D

    artist = handle[0] if isinstance(handle, tuple) else handle
    if isinstance(artist, Line2D):
        colour, dashes = artist.get_color(), {"-": "━━━", "--": "━ ━"}
        mark = dashes.get(artist.get_linestyle()) or SHAPES.get(artist.get_marker(), "●")
    else:
        colour, mark = artist.get_facecolor(), "■"
    alpha = artist.get_alpha()
    colour = colour if isinstance(colour, str) else tuple(getattr(colour, "flat", colour))[:4]
    return to_hex(to_rgba(colour, alpha), keep_alpha=True), mark


def numbered(axis: Any) -> None:
    """Short numbers at the ticks: 20k for 20,000."""
    axis.set_major_formatter(lambda value, _: count(value, 6))
    axis.set_major_locator(need("matplotlib.ticker", "report", "a report's plots").MaxNLocator(5, steps=[1, 2, 5, 10]))


# ---------------------------------------------------------------- runs of one recipe


def not_drawn(runs: Sequence[Run]) -> str:
    """One sentence on metrics that have no plot, if any."""
    names = metrics(runs)
    once = [name for name in names if not _several(runs, name)]
    over = [name for name in names if name not in once][METRICS:]
    omissions = (
        [f"no plot of {', '.join(map(words, once[:6]))}{' and more' * (len(once) > 6)}, measured once only"]
        if once
        else []
    )
    omissions += [f"plots of the first {METRICS} metrics only, {len(over)} more are in the table"] if over else []
    omissions += [f"the curves of the first {CURVES} runs only, of {len(runs)}"] if len(runs) > CURVES else []
    return f"The report has {'; '.join(omissions)}." if omissions else ""


def metrics(runs: Sequence[Run]) -> list[str]:
    """What is evaluated, the loss first."""
    names = [name.removeprefix("valid/") for run in runs for name in run.names if name.startswith("valid/")]
    return list(dict.fromkeys([*["loss"] * any("train/loss" in run.names for run in runs), *names]))


def _several(runs: Sequence[Run], name: str) -> bool:
    return any(len(run.points(f"{kind}/{name}", "step")) > 1 for run in runs for kind in ("train", "valid"))


def of_runs(runs: Sequence[Run]) -> Iterator[Plot]:
    """What the runs of one recipe have rows for."""
    curves = runs[:CURVES]
    for name in [name for name in metrics(runs) if _several(curves, name)][:METRICS]:
        yield _curves(curves, name)
    rates = {"lr": "learning rate", "grad_norm": "norm of the gradient"}
    yield from _by_step(curves, "The panels show the learning rate and the norm of the gradient by step.", rates)
    speeds = {"samples_per_s": "samples/s", "mfu": "MFU"}
    caption = "The plot shows the speed of training by step, each point the mean since the point before."
    yield from _by_step(curves, caption, speeds)
    memory = [(run, *pair) for run in runs for pair in run.proved if pair[0].startswith("memory/") and pair[2]]
    if memory := [bar for bar in memory if bar[1] != "memory/process"]:  # which is much more than its tensors
        caption = "Bars show the memory of tensors by component: planned before the first step, and measured."
        yield caption, [_memory(memory, len(runs) > 1)]
    compared = [run for run in runs if run.speed_up]
    if len(compared) > 1:
        caption = f"Bars show the speed-up against {compared[0].name}; dashed lines show the ideal, the ratio of "
        yield f"{caption}the numbers of processes.", [_speed_up(compared)]


def _curves(runs: Sequence[Run], name: str) -> Plot:
    """A metric by all that a run went through."""
    series = [(kind, i, run) for i, run in enumerate(runs) for kind in ("train", "valid")]
    series = [(kind, i, run) for kind, i, run in series if run.points(f"{kind}/{name}", "step")]
    shown = [x for x in X_AXES if any(len(run.points(f"{kind}/{name}", x)) > 1 for kind, _, run in series)]
    all_axes = panels(len(shown))
    for axes, x in zip(all_axes, shown):
        for kind, i, run in series:
            points = run.points(f"{kind}/{name}", x)
            line = {"ls": "-", "lw": 1.0} if kind == "train" else {"ls": "--", "lw": 1.2, "ms": 3}
            line |= {"marker": "o"} if kind == "valid" and len(points) <= DOTS else {}
            label = f"{run.name}: " * (len(runs) > 1) + words(kind)
            if points:
                axes.plot(*zip(*points), color=COLOURS[i], label=label, **line)
        axes.set_xlabel(X_AXES[x])
        _lay_out(axes)
    unit = next(run.unit(f"{kind}/{name}") for kind, _, run in series)
    for axes in all_axes:
        axes.set_ylabel(
            f"{words(name)}, {unit}" if unit not in ("", words(name).replace(" per ", "/")) else words(name)
        )
    kinds = {kind for kind, *_ in series}
    what = {"train": "training", "valid": "validation"}
    lines = "solid lines are training, dashed lines validation" if len(kinds) > 1 else f"all of {what[kinds.pop()]}"
    by = either((f"by {X_AXES[x]}" for x in shown), "and")
    return f"The {'panels show' if len(shown) > 1 else 'plot shows'} the {words(name)} {by}; {lines}.", all_axes


def _lay_out(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        numbered(axis)
    axes.grid(alpha=0.25)


def _by_step(runs: Sequence[Run], caption: str, wanted: dict[str, str]) -> Iterator[Plot]:
    points = {name: [run.points(f"train/{name}", "step") for run in runs] for name in wanted}
    known = [name for name, curves in points.items() if any(len(of_run) > 1 for of_run in curves)]
    all_axes = panels(len(known))
    for axes, name in zip(all_axes, known):
        for run, colour, of_run in zip(runs, COLOURS, points[name]):
            if of_run:
                axes.plot(*zip(*of_run), color=colour, lw=1.0, label=run.name)
        axes.set(xlabel="step", ylabel=wanted[name])
        _lay_out(axes)
    if known:
        yield caption, all_axes


def bytes_in(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def _memory(rows: list[tuple[Run, str, float, float]], several: bool) -> Any:
    axes = bars([f"{run.name}: " * several + figure_name(component) for run, component, *_ in rows], 0.28)
    unit, name = bytes_in(max(max(planned, measured) for *_, planned, measured in rows))
    for label, side, alpha, shift in (("planned", 2, 0.4, -0.18), ("measured", 3, 1.0, 0.18)):
        widths = [bar[side] / unit for bar in rows]
        axes.barh([i + shift for i in range(len(rows))], widths, 0.34, color=COLOURS[0], alpha=alpha, label=label)
    axes.set_xlabel(name)
    numbered(axes.xaxis)
    return axes


def figure_name(name: str) -> str:
    """Of what is planned and measured."""
    return LABELS.get(name, name.replace("/", ": ").replace("_", " "))


def _speed_up(runs: Sequence[Run]) -> Any:
    names, base = [f"{run.name}, {run.processes} process{'es' * (run.processes > 1)}" for run in runs], runs[0]
    axes = bars(names, 0.35)
    for i, run in enumerate(runs):
        axes.barh(i, run.speed_up, 0.6, color=COLOURS[0])
        axes.vlines(run.processes / base.processes, i - 0.38, i + 0.38, colors=INK, linestyles="dashed")
        axes.annotate(f"{run.speed_up:.2f}", (run.speed_up, i), (4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)
    axes.set_xlabel("times as many samples/s")
    numbered(axes.xaxis)
    return axes
