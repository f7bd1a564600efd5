"""The plan against the run, on a grid: the tables of docs/accuracy.md.

    python benchmarks/accuracy.py --to docs/accuracy.md            # memory and traffic; step times where the machine is calibrated

Six families × {fp32, bf16} × {no checkpointing, full} × {one process; two: ddp, shard, tensor}. Each is `gradus train` as a user starts it:
the plan is made before its first step and one step is measured, by `gradus train` itself (`proof.jsonl` in the run's folder). Nothing is
fitted to these runs. Rows go to benchmarks/results/accuracy-cpu.jsonl. With --to, the tables replace what stands between the marks there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from layouts import fill

from gradus.train.machine import describe

FAMILIES = {  # recipes that need no download, in sizes whose activations fill hundreds of megabytes
    "seq2seq": "copy-task task.length=60 model.d_model=256 model.n_layers=3 model.d_ff=1024 model.dropout=0.1 data.n_valid=8 batch.samples=64",
    "bert": "wikitext2-bert data.path=null data.source=stdlib tokenizer.vocab_size=2048 batch.samples=32 evaluate.test=false",
    "gpt": "stdlib-gpt batch.samples=16",
    "t5": "wikitext2-t5 data.path=null data.source=stdlib tokenizer.vocab_size=2048 batch.samples=16 evaluate.test=false",
    "llama": "stories-llama data.source=stdlib tokenizer.kind=byte model.d_model=256 model.n_layers=4 model.d_ff=688 model.seq_len=256",
    "vit": "digits-vit model.patch_size=1 model.d_model=256 model.n_layers=6 model.d_ff=1024 batch.samples=64 evaluate.test=false",
}
PRECISIONS = ("fp32", "bf16")
CHECKPOINTING = ("none", "full")
LAYOUTS = {"one": (1, ""), "ddp": (2, "layout.replicate=ddp"), "shard": (2, "layout.shard=2"), "tensor": (2, "layout.tensor=2")}
SHORT = "data.limit_valid=8 evaluate.batch=8 evaluate.samples=0 log.every=100"


def run(family: str, precision: str, checkpointing: str, layout: str, steps: int, folder: Path) -> list[dict]:
    """The figures of one run's proof: name, predicted, measured, error (`gradus prove RUN --json`)."""
    n, keys = LAYOUTS[layout]
    shutil.rmtree(folder, ignore_errors=True)
    words = [*FAMILIES[family].split(), *SHORT.split(), *keys.split(), f"layout.precision={precision}", f"layout.checkpointing={checkpointing}"]
    words += [f"train.steps={steps}", f"log.dir={folder}"]
    gradus([*["train", *words], *(["--processes", str(n)] if n > 1 else [])])
    case = {"family": family, "precision": precision, "checkpointing": checkpointing, "layout": layout, "processes": n}
    found = [json.loads(line) for line in gradus(["prove", str(folder), "--json"]).splitlines()]
    return [{**{k: v for k, v in row.items() if k != "run"}, **case} for row in found]


def gradus(words: list[str]) -> str:
    """What `gradus WORDS` prints."""
    done = subprocess.run([sys.executable, "-m", "gradus", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"gradus {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def pairs(rows: list[dict], name: str) -> list[tuple[dict, float, float]]:
    """(row, predicted, measured) of every case that has both."""
    return [(r, r["predicted"], r["measured"]) for r in rows if r["name"] == f"proof/{name}" and r.get("predicted") is not None and r.get("measured")]


def errors(found: list[tuple[dict, float, float]]) -> list[float]:
    return [abs(p - m) / m for _, p, m in found]


def tables(rows: list[dict]) -> str:
    """Markdown: medians first, then each case's peak."""
    lines = ["| what | processes | cases | median error | largest error |", "|---|---|---|---|---|"]
    for name in ("memory/allocated", "memory/weights", "memory/gradients", "memory/optimizer", "traffic/sent", "time/step"):
        for label, layouts in (("one", ("one",)), ("two: ddp, shard, tensor", ("ddp", "shard", "tensor"))):
            e = errors([f for f in pairs(rows, name) if f[0]["layout"] in layouts])
            if e:
                lines.append(f"| {name} | {label} | {len(e)} | {statistics.median(e):.2%} | {max(e):.2%} |")
    lines += ["", "The peak of tensor memory on the first process, predicted | measured, MB (error):", ""]
    lines += ["| family | precision | checkpointing | " + " | ".join(LAYOUTS) + " |", "|---|---|---|" + "---|" * len(LAYOUTS)]
    peaks = {(r["family"], r["precision"], r["checkpointing"], r["layout"]): (p, m) for r, p, m in pairs(rows, "memory/allocated")}
    for family in FAMILIES:
        for precision in PRECISIONS:
            for checkpointing in CHECKPOINTING:
                cells = []
                for layout in LAYOUTS:
                    p, m = peaks.get((family, precision, checkpointing, layout), (None, None))
                    cells.append("–" if p is None else f"{p / 1e6:.1f} \\| {m / 1e6:.1f} ({(p - m) / m:+.2%})")
                lines.append(f"| {family} | {precision} | {checkpointing} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=4, help="of each run (default 4; more for step times)")
    parser.add_argument("--to", type=Path, help="page to fill")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/accuracy-cpu.jsonl"))
    args = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            for precision in args.precisions:
                for checkpointing in CHECKPOINTING:
                    for layout in args.layouts:
                        rows += run(family, precision, checkpointing, layout, args.steps, Path(folder) / "run")
                        ((_, p, m),) = pairs(rows[-200:], "memory/allocated")[-1:]
                        print(f"{family:8} {precision} {checkpointing:5} {layout:7} {p / 1e6:9.1f} {m / 1e6:9.1f} MB {(p - m) / m:+.2%}", flush=True)
    conditions = {**{k: v for k, v in describe().items() if k != "launchers"}, "threads": os.environ.get("OMP_NUM_THREADS", "default"), "steps": args.steps}
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in [{"name": "conditions", **conditions}, *rows]), encoding="utf-8")
    text = tables(rows)
    print(text)
    fill(args.to, "grid", text.splitlines())


if __name__ == "__main__":
    main()
