"""The plots of a report, as SVG: equal rows give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradus.errors import need
from gradus.report.runs import Run

INK = "#111111"  # of all text and axes: a page replaces it by its own
# of Okabe and Ito: distinct to all eyes
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
PLAIN = ("axes.spines.top", "axes.spines.right", "legend.frameon")
STYLE = {
    "svg.hashsalt": "gradus",
    "svg.fonttype": "path",
    "text.parse_math": False,  # a $ in a name is a $
    "font.size": 9,
    **dict.fromkeys(PLAIN, False),
    **dict.fromkeys(INKED, INK),
}


def svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def drawn(figures: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(caption, SVG) of figures that are made as they are asked for. Raises UserError without matplotlib."""
    matplotlib = need("matplotlib", "report", "a report's plots")
    with matplotlib.rc_context(STYLE):
        return [(caption, svg(figure)) for caption, figure in figures]


def of_runs(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """(caption, figure) of what the runs have rows for."""
    yield from _curves(runs)
    yield from _by_step(runs, "Learning rate and norm of the gradient", {"lr": "learning rate", "grad_norm": "norm"})
    yield from _by_step(runs, "Throughput", {"samples_per_s": "samples/s", "mfu": "MFU"})
    bars = [(run, *pair) for run in runs for pair in run.proved if pair[0].startswith("memory/")]
    if bars := [bar for bar in bars if bar[1] != "memory/process"]:  # which is much more than its tensors
        yield "Memory of tensors by component.", _memory(bars, several=len(runs) > 1)
    if len(done := [run for run in runs if run.speed]) > 1:
        caption = f"Speed-up against {done[0].name}; dashed: as many times as there are processes."
        yield caption, _speed_up(done)


def sheet(n: int, height: float = 2.7) -> tuple[Any, list[Any]]:
    figure = need("matplotlib.figure", "report", "a report's plots").Figure(figsize=(9.2, height), layout="constrained")
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


def legend(figure: Any, axes: Any, columns: int = 4) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))


def _curves(runs: Sequence[Run]) -> Iterator[tuple[str, Any]]:
    """Losses, then each other metric, by step, by tokens and by seconds."""
    names = dict.fromkeys(name for run in runs for name in run.names if name.startswith("valid/"))
    lines = {"train": {"ls": "-", "lw": 1.0}, "valid": {"ls": "--", "lw": 1.2, "marker": "o", "ms": 3}}
    for name in ("loss", *(name.removeprefix("valid/") for name in names if name != "valid/loss")):
        own = [(kind, run) for run in runs for kind in lines if run.series(f"{kind}/{name}")]
        if not own:
            continue
        figure, panels = sheet(3)
        for axes, x in zip(panels, ("step", "tokens", "seconds of training")):
            for kind, run in own:
                points = run.series(f"{kind}/{name}")
                if x != "step":
                    points = [(run.axes[x][step], value) for step, value in points if step in run.axes[x]]
                label, colour = f"{run.name}: " * (len(runs) > 1) + kind, COLOURS[runs.index(run) % len(COLOURS)]
                axes.plot(*(zip(*points) if points else ([], [])), color=colour, label=label, **lines[kind])
            axes.set_xlabel(x)
            axes.grid(alpha=0.25)
        unit = next(run.unit(f"{kind}/{name}") for kind, run in own)
        panels[0].set_ylabel(f"{name}, {unit}" if unit else name)
        legend(figure, panels[0])
        yield f"{name.capitalize()} by step, by tokens and by seconds of training.", figure


def _by_step(runs: Sequence[Run], caption: str, wanted: dict[str, str]) -> Iterator[tuple[str, Any]]:
    known = {name: label for name, label in wanted.items() if any(run.series(f"train/{name}") for run in runs)}
    if not known:
        return
    figure, panels = sheet(len(known))
    for axes, (name, label) in zip(panels, known.items()):
        for i, run in enumerate(runs):
            if points := run.series(f"train/{name}"):
                axes.plot(*zip(*points), color=COLOURS[i % len(COLOURS)], lw=1.0, label=run.name)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.25)
    legend(figure, panels[0])
    yield f"{caption}, by step.", figure


def _memory(bars: list[tuple[Run, str, float, float]], several: bool) -> Any:
    figure, (axes,) = sheet(1, 0.8 + 0.28 * len(bars))
    places = range(len(bars), 0, -1)
    for label, i, alpha, shift in (("planned", 2, 0.4, 0.18), ("measured", 3, 1.0, -0.18)):
        widths = [bar[i] / 1e6 for bar in bars]
        axes.barh([place + shift for place in places], widths, 0.34, color=COLOURS[0], alpha=alpha, label=label)
    axes.set_yticks(list(places), [f"{run.name}: " * several + name.removeprefix("memory/") for run, name, *_ in bars])
    axes.set_xlabel("MB")
    axes.grid(axis="x", alpha=0.25)
    legend(figure, axes)
    return figure


def _speed_up(runs: Sequence[Run]) -> Any:
    figure, (axes,) = sheet(1)
    base, places = runs[0], range(len(runs))
    axes.bar(places, [run.speed / base.speed for run in runs], 0.6, color=COLOURS[0])
    for i, run in enumerate(runs):
        axes.hlines(run.processes / base.processes, i - 0.38, i + 0.38, colors=INK, linestyles="dashed")
        axes.text(i, run.speed / base.speed, f"{run.speed / base.speed:.2f}", ha="center", va="bottom")
    axes.set_xticks(list(places), [f"{run.name}\n{run.processes} process{'es' * (run.processes > 1)}" for run in runs])
    axes.set_ylabel("times as many samples/s")
    axes.grid(axis="y", alpha=0.25)
    return figure
