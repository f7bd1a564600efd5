"""Pictures of the documentation that no page draws itself.

The README's, from committed rows: planned beside measured, memory of tensors and time of a step. That of the page of costs, from the plan's own
formulas: goodput against devices.

`python benchmarks/picture.py` writes docs/images/proof-light.svg, proof-dark.svg and goodput.svg. It needs the extra `docs`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from gradus import hardware, pictures
from gradus.hardware import Cluster
from gradus.pictures import COLOURS, MARKS, Curve
from gradus.plan.budget import Failures, goodput

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


USEFUL = {"Llama 3": (16_384, 0.90), "MegaScale": (12_288, 0.90)}  # of the time, at least
END_TO_END = {"BLOOM": (384, 0.89), "PaLM": (6_144, 0.65)}  # speed over that of a steady step
REPLICA = 128  # devices of one of Llama 3 405B: tensor 8, pipeline 16


def failing() -> pictures.Picture:
    """Goodput of Llama 3 405B against the number of devices, with what was published of runs of these sizes."""
    sizes = [round(REPLICA * 2 ** (i / 4)) for i in range(4, 41)]
    checkpoint = {"weights and optimizer": 12 * 405_853_388_800}

    def share(n: int, case: int, elastic: bool = False) -> float:
        lost = Failures(checkpoint, elastic=elastic, replicas=n // REPLICA)
        return goodput(Cluster(hardware.find("H100"), n), lost, steps=929_833, step=(15.0,) * 3).share[case]

    curves = {
        "elastic": Curve([(n, share(n, 1, elastic=True)) for n in sizes], COLOURS[2]),
        "restart from checkpoints": Curve([(n, share(n, 1)) for n in sizes], COLOURS[0]),
        "restart: high": Curve([(n, share(n, 2)) for n in sizes], COLOURS[5], dashed=True),
        "restart: low": Curve([(n, share(n, 0)) for n in sizes], COLOURS[4], dashed=True),
        f"{', '.join(USEFUL)}: more than": Curve([*USEFUL.values()], COLOURS[1], mark=MARKS[2], joined=False),
        f"{', '.join(END_TO_END)}: end to end": Curve([*END_TO_END.values()], COLOURS[3], mark=MARKS[0], joined=False),
    }
    words = (
        "Llama 3 405B, planned: the share of the time that goes into steps that count. A device fails each 50,700 hours (82,100 and 29,500), the run "
        "is back after 10 minutes (5 and 20), checkpoints come at Daly's optimum; low has 0.32 lost beside failures. Elastic: replicas of "
        f"{REPLICA} devices, of which the others go on. Marks: published runs of their own models and layouts; end to end counts also what is lost beside failures."
    )
    named = {n: f"{n:,}" for n in (256, 1024, 4096, 16_384, 65_536)}
    return pictures.lines(curves, "Goodput by the number of devices", words, x="devices", y="goodput", width=720, height=360, log="x", named=named)


if __name__ == "__main__":
    failing().save(IMAGES / "goodput.svg")
    print((IMAGES / "goodput.svg").relative_to(ROOT))
    for theme in INK:
        print(draw(theme).relative_to(ROOT))
