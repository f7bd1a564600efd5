"""The plots of a report, as SVG: equal rows give equal bytes."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradus.errors import either, need
from gradus.proof.pairs import PEAK, figure_name
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
LEAST = 3  # points of a curve, or bars: fewer are read faster in a table
SIDE = 3  # panels of metrics in one figure
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
    height = max([height, *(0.1 + 0.16 * len(lines) for lines in labels)])
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


def of_runs(runs: Sequence[Run], x: str = "step") -> Iterator[Plot]:
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
        caption = f"The memory of tensors {'at the peak' if several else 'by component'}. Upper bars were planned, "
        yield f"{caption}lower ones measured.", [_memory(memory, several)]
    compared = [run for run in runs if run.speed_up]
    if len(compared) >= LEAST:
        caption = f"The speed-up against {compared[0].name}. Dashed lines show the ideal, the ratio of the numbers of "
        yield f"{caption}processes.", [_speed_up(compared)]


def _curves(runs: Sequence[Run], names: Sequence[str], x: str) -> Plot:
    """A panel for each metric, of training and validation."""
    all_axes, kinds = panels(len(names)), set()
    for axes, name in zip(all_axes, names):
        for (i, run), kind in itertools.product(enumerate(runs), ("train", "valid")):
            if points := run.points(f"{kind}/{name}", x):
                kinds.add(kind)
                line = {"ls": "-", "lw": 1.0} if kind == "train" else {"ls": "--", "lw": 1.2, "ms": 3}
                line |= {"marker": "o"} if kind == "valid" and len(points) <= DOTS else {}
                label, unit = f"{run.name}: " * (len(runs) > 1) + words(kind), run.unit(f"{kind}/{name}")
                axes.plot(*zip(*points), color=COLOURS[i], label=label, **line)
        more = f", {unit}" * (unit not in ("", words(name).replace(" per ", "/")))
        axes.set(xlabel=X_AXES[x], ylabel=words(name) + more)
        _lay_out(axes)
    lines = "Solid lines are training, dashed lines validation." if len(kinds) > 1 else f"All of {words(kinds.pop())}."
    return f"The {either(map(words, names), 'and')} by {X_AXES[x]}. {lines}", all_axes


def _lay_out(axes: Any) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        numbered(axis)
    axes.grid(alpha=0.25)


def _of_training(runs: Sequence[Run], more: str, wanted: dict[str, str], x: str) -> Iterator[Plot]:
    points = {name: [run.points(f"train/{name}", x) for run in runs] for name in wanted}
    known = [name for name, curves in points.items() if any(len(of_run) >= LEAST for of_run in curves)]
    all_axes = panels(len(known))
    for axes, name in zip(all_axes, known):
        for run, colour, of_run in zip(runs, COLOURS, points[name]):
            if of_run:
                axes.plot(*zip(*of_run), color=colour, lw=1.0, label=run.name)
        axes.set(xlabel=X_AXES[x], ylabel=wanted[name])
        _lay_out(axes)
    if known:
        yield f"The {either((wanted[name] for name in known), 'and')} of training by {X_AXES[x]}.{more}", all_axes


def bytes_in(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def _memory(rows: list[tuple[Run, str, float, float]], several: bool) -> Any:
    axes = bars([run.name if several else figure_name(component) for run, component, *_ in rows], 0.28)
    unit, name = bytes_in(max(max(planned, measured) for *_, planned, measured in rows))
    for label, side, alpha, shift in (("planned", 2, 0.4, -0.18), ("measured", 3, 1.0, 0.18)):
        widths = [bar[side] / unit for bar in rows]
        axes.barh([i + shift for i in range(len(rows))], widths, 0.34, color=COLOURS[0], alpha=alpha, label=label)
    axes.set_xlabel(name)
    numbered(axes.xaxis)
    return axes


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
