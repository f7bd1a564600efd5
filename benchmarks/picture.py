"""The README's picture, from committed rows: planned beside measured, memory of tensors and time of a step.

`python benchmarks/picture.py` writes docs/images/proof-light.svg and proof-dark.svg. It needs the extra `docs`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
INK = {"light": "#24292f", "dark": "#e6edf3"}
LAYOUTS = {  # as accuracy.yaml names them: what the legend says, colour, marker
    "one": ("one process", "#0969da", "o"),
    "ddp": ("two: DDP", "#2da44e", "s"),
    "shard": ("two: FSDP2", "#bf8700", "^"),
    "tensor": ("two: tensor parallel", "#cf222e", "D"),
}
Point = tuple[float, float]  # planned, measured


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def memory() -> dict[str, list[Point]]:
    """By layout: peak of tensors, MB; fp32 and bf16, with and without checkpointing, six families."""
    points: dict[str, list[Point]] = {name: [] for name in LAYOUTS}
    for file in ("accuracy-cpu", "accuracy-cpu-amx", "accuracy-cpu-vit-bf16"):
        for row in rows(file):
            if row["name"] == "proof/memory/allocated":
                points[row["layout"]].append((row["predicted"] / 1e6, row["measured"] / 1e6))
    return points


def step_time() -> list[Point]:
    """Seconds of a step on one thread of a calibrated CPU: six families, fp32 and bf16, with and without checkpointing."""
    found: dict[str, dict[str, float]] = {}
    for row in rows("step_time-cpu-1-thread"):
        if row["name"] == "time/step" and row["kind"] in ("predicted", "measured"):
            found.setdefault(row["configuration"], {})[row["kind"]] = row["value"]
    return [(pair["predicted"], pair["measured"]) for pair in found.values()]


def draw(theme: str) -> Path:
    ink, path = INK[theme], IMAGES / f"proof-{theme}.svg"
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    with plt.rc_context({"svg.hashsalt": "gradus", "svg.fonttype": "none", "font.family": "sans-serif", **colours}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.9), layout="constrained")
        for name, points in memory().items():
            label, colour, marker = LAYOUTS[name]
            left.scatter(*zip(*points), s=26, color=colour, marker=marker, label=f"{label} ({len(points)} runs)", alpha=0.8)
        left.set_title("Peak of tensor memory, MB", fontsize=11)
        left.legend(frameon=False, fontsize=9, loc="lower right")
        times = step_time()
        right.scatter(*zip(*times), s=26, color=LAYOUTS["one"][1], alpha=0.8)
        right.set_title(f"Time of a step, s ({len(times)} runs)", fontsize=11)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log", xlabel="planned before the run", ylabel="measured", aspect="equal", facecolor="none")
            low, high = (f(axes.get_xlim()[i], axes.get_ylim()[i]) for i, f in ((0, min), (1, max)))
            axes.plot([low, high], [low, high], color=ink, linewidth=0.8, zorder=0)
            axes.set(xlim=(low, high), ylim=(low, high))
            ticks = [t for t in (0.2, 0.5, 1, 2, 50, 100, 200, 500, 1000) if low <= t <= high]
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
                axis.set_ticks([], minor=True)
            axes.spines[["top", "right"]].set_visible(False)
        IMAGES.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
    return path


if __name__ == "__main__":
    for theme in INK:
        print(draw(theme).relative_to(ROOT))
