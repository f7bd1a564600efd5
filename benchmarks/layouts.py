"""One recipe in every layout, and how far each is from one process: the table of docs/layouts.md.

    python benchmarks/layouts.py shakespeare-char-gpt data.path=input.txt optimizer.lr=3e-4 --steps 40 --to docs/layouts.md

Each run is `gradus train` as a user starts it. Rows go to benchmarks/results/layouts-cpu-1-thread.json. With --to, the table replaces what stands
between the two marks in that file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gradus.train.machine import describe

SAME = [  # (processes, settings): mathematically one run
    (1, ""),
    (1, "layout.micro_batch=3"),
    (2, "layout.replicate=manual"),
    (2, "layout.replicate=manual layout.transport=mpi"),
    (2, "layout.replicate=parameter_server"),
    (2, "layout.replicate=ddp"),
    (2, "layout.replicate=ddp layout.micro_batch=3"),
    (2, "layout.shard_optimizer=true"),
    (2, "layout.shard=2"),
    (2, "layout.shard=2 layout.reshard=false"),
    (2, "layout.shard=2 layout.offload=true"),
    (2, "layout.tensor=2"),
    (2, "layout.tensor=2 layout.sequence_parallel=false layout.vocab_parallel=false"),
    (2, "layout.pipeline=2 layout.micro_batch=3 layout.schedule=gpipe"),
    (2, "layout.pipeline=2 layout.micro_batch=3"),
    (2, "layout.pipeline=2 layout.micro_batch=3 layout.schedule=interleaved"),
    (2, "layout.pipeline=2 layout.micro_batch=3 layout.schedule=zero_bubble"),
    (2, "layout.context=2"),
    (2, "layout.context=2 layout.context_method=ulysses"),
    (4, "layout.replicate=ddp"),
    (4, "layout.shard=2"),
    (4, "layout.shard=2 layout.tensor=2"),
    (4, "layout.pipeline=2 layout.tensor=2 layout.micro_batch=3"),
    (4, "layout.context=2 layout.shard=2"),
]
ROUNDED = [  # the same run in coarser numbers
    (1, "layout.precision=bf16"),
    (2, "layout.precision=bf16"),
    (2, "layout.shard=2 layout.param_dtype=bf16"),
    (2, "layout.compress=bf16"),
    (2, "layout.compress=fp16"),
    (2, "layout.compress=powersgd"),
]
EXPERTS = [(1, "model.n_experts=4"), (2, "model.n_experts=4 layout.expert=2"), (2, "model.n_experts=4 layout.shard=2"),
           (4, "model.n_experts=4 layout.expert=2"), (4, "model.n_experts=4 layout.expert=2 layout.shard=2")]  # fmt: skip


def run(recipe: list[str], processes: int, settings: str, folder: Path) -> dict:
    """`gradus train` with these settings; its rows by (name, step), and its summary."""
    command = [sys.executable, "-m", "gradus", "train", *recipe, *settings.split(), f"log.dir={folder}"]
    if "transport=mpi" in settings:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes), *command]
    elif processes > 1:
        command += ["--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(r["name"], r.get("step")): r["value"] for r in rows} | {"summary": json.loads((folder / "summary.json").read_text())}


def keep(name: str, rows: list[dict], folder: Path | None) -> None:
    """Write rows with their conditions to folder/NAME.json (None: results/ here). Paths are told by their last part."""
    conditions = {k: v for k, v in describe().items() if k != "launchers"} | {"threads": 1}
    command = [re.sub(r"(^|=)/\S*/", r"\1", word) for word in sys.argv]
    text = json.dumps({"conditions": {**conditions, "command": command}, "rows": rows}, indent=1)
    ((folder or Path(__file__).parent / "results") / f"{name}.json").write_text(text + "\n")


def fill(page: Path | None, mark: str, lines: list[str]) -> None:
    """Put a table into a page, between `<!-- MARK -->` and `<!-- end of MARK -->`."""
    if page is not None:
        before, rest = page.read_text().split(f"<!-- {mark} -->\n")
        page.write_text(f"{before}<!-- {mark} -->\n" + "\n".join(lines) + f"\n<!-- end of {mark} -->\n" + rest.split(f"<!-- end of {mark} -->\n")[1])


def table(recipe: list[str], groups: list[list[tuple[int, str]]]) -> tuple[list[str], list[dict]]:
    lines = ["| processes | layout | last training loss | validation loss | farthest step's loss | its gradient norm | bytes sent a step |"]
    lines.append("|---|---|---|---|---|---|---|")
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups:
            one = None
            for i, (processes, settings) in enumerate(group):
                if "transport=mpi" in settings and not shutil.which("mpirun"):
                    print("no mpirun: layout.transport=mpi is left out", file=sys.stderr)
                    continue
                rows = run(recipe, processes, settings, Path(scratch) / str(len(found)))
                one = one or rows
                worst = {
                    name: max(abs(value - one[key]) / abs(one[key]) for key, value in rows.items() if key[0] == name)
                    for name in ("train/loss", "train/grad_norm")
                }
                steps = rows["summary"]["steps"]
                sent = next((value for key, value in rows.items() if key[0] == "traffic/sent"), None)
                row = {
                    "processes": processes, "layout": settings, "loss": rows["train/loss", steps], "valid_loss": rows["summary"]["metrics"]["valid/loss"],
                    "loss_deviation": worst["train/loss"], "norm_deviation": worst["train/grad_norm"], "sent_a_step": sent,
                }  # fmt: skip
                found.append(row)
                apart = "" if not i else f"{row['loss_deviation']:.1e}"
                norm = "" if not i else f"{row['norm_deviation']:.1e}"
                shown = f"`{settings}`" if settings else "nothing set"
                lines.append(f"| {processes} | {shown} | {row['loss']:.6f} | {row['valid_loss']:.6f} | {apart} | {norm} | {f'{sent:,.0f}' if sent else ''} |")
                print(lines[-1], flush=True)
    return lines, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help="as for gradus train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--to", type=Path, help="a page with the marks")
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts whose settings hold this, beside the first")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder for the rows (default: results/ beside this file)")
    args = parser.parse_args()
    recipe = [*args.recipe, f"train.steps={args.steps}", "log.every=1", "layout.threads=1", "layout.device=cpu", "evaluate.samples=0"]
    recipe += [f"evaluate.every={args.steps}", "data.limit_valid=200"]
    groups = [[group[0], *(case for case in group[1:] if args.only in case[1])] for group in (SAME, [SAME[0], *ROUNDED], EXPERTS)]
    lines, found = table(recipe, groups)
    keep("layouts-cpu-1-thread", found, args.results)
    fill(args.to, "table", lines)


if __name__ == "__main__":
    main()
