"""The road from one process to sharded weights, step by step, on one recipe: what each step costs and brings.

    python benchmarks/road.py cifar10-vit-small data.path=cifar10 batch.samples=16 --steps 200 --to docs/layouts.md

none → manual (torch.distributed) → manual (MPI) → parameter server → DDP → bf16 → FSDP2, two processes of one thread each. Speeds are
medians of the rows that a run logs every ten steps, after the first two. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from layouts import fill, keep, run

ROAD = [
    ("one process", 1, "layout.precision=fp32"),
    ("manual, torch.distributed", 2, "layout.precision=fp32 layout.replicate=manual"),
    ("manual, MPI", 2, "layout.precision=fp32 layout.replicate=manual layout.transport=mpi"),
    ("parameter server", 2, "layout.precision=fp32 layout.replicate=parameter_server"),
    ("DDP", 2, "layout.precision=fp32 layout.replicate=ddp"),
    ("DDP, bf16", 2, "layout.precision=bf16 layout.replicate=ddp"),
    ("FSDP2, bf16", 2, "layout.precision=bf16 layout.shard=2"),
    ("one process, bf16", 1, "layout.precision=bf16"),
]

def measure(recipe: list[str], name: str, processes: int, settings: str, folder: Path, steps: int) -> dict:
    rows = run(recipe, processes, settings, folder)
    speeds = [value for key, value in rows.items() if key[0] == "train/samples_per_s"][2:]
    losses = [value for key, value in rows.items() if key[0] == "train/loss"]
    summary = rows["summary"]
    return {
        "step": name, "processes": processes, "layout": settings, "samples_per_s": statistics.median(speeds), "slowest": min(speeds),
        "fastest": max(speeds), "sent_a_step": next((v for k, v in rows.items() if k[0] == "traffic/sent"), 0.0),
        "hours_per_epoch": summary["samples"] / summary["epoch"] / statistics.median(speeds) / 3600, "loss": statistics.mean(losses[-5:]),
        "first_loss": losses[0], "memory_per_rank": summary.get("memory_tensors_per_rank") or summary["memory_process_per_rank"], "steps": steps,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help="as for gradus train")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--to", type=Path, help="a page with the marks")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder for the rows (default: results/ beside this file)")
    args = parser.parse_args()
    recipe = [*args.recipe, f"train.steps={args.steps}", "log.every=10", "layout.threads=1", "layout.device=cpu", "evaluate.samples=0"]
    recipe += ["evaluate.test=false", f"evaluate.every={args.steps}", "data.limit_valid=100", "data.workers=0"]
    lines = ["| | samples/s, median (slowest, fastest) | ratio | sent a step and process | hours an epoch | memory a process | loss (last 5 rows) |"]
    lines.append("|---|---|---|---|---|---|---|")
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for i, (name, processes, settings) in enumerate(ROAD):
            row = measure(recipe, name, processes, settings, Path(scratch) / str(i), args.steps)
            found.append(row)
            ratio, memory = row["samples_per_s"] / found[0]["samples_per_s"], max(row["memory_per_rank"]) / 1e9
            sent = f"{row['sent_a_step'] / 1e6:.1f} MB" if row["sent_a_step"] else ""
            lines.append(
                f"| {name} | {row['samples_per_s']:.1f} ({row['slowest']:.1f}, {row['fastest']:.1f}) | {ratio:.2f} | {sent} "
                f"| {row['hours_per_epoch']:.2f} | {memory:.2f} GB | {row['loss']:.4f} |"
            )
            print(lines[-1], flush=True)
    keep("road-cpu-2-processes", found, args.results)
    fill(args.to, "road", lines)


if __name__ == "__main__":
    main()
