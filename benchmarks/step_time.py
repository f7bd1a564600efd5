"""Predicted against measured seconds of a training step on this machine: six families × {fp32, bf16} × {no, full} checkpointing.

    gradus calibrate                      # first: the tables of this machine
    python benchmarks/step_time.py [--threads N] [--families gpt,t5] [--repeat 3] [--out FILE.json]

The prediction is made before the step is run, from the traced step (`plan.trace`) and the measured tables (`plan.tables`); nothing of it
is fitted to a step. With --fit, `FACTORS` are fitted to the other families' steps and the family that is predicted is left out: what is
printed then tells whether an operation inside a step differs from one alone, and not how well factors describe what they were fitted to.
The steps are `Trainer.step`'s, on synthetic batches. The cases are measured in turns, `--repeat` times; a time is the median over all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

import torch

from gradus import hardware, models
from gradus.parallel.apply import apply
from gradus.plan import batches, tables
from gradus.plan.trace import trace_recipe
from gradus.plan.work import Op
from gradus.train import resolve
from gradus.train.log import environment
from gradus.train.precision import Precision
from gradus.train.step import Stepper

# family → packaged recipe, and what makes it small enough for a processor: 0.1 to 2 s a step
RECIPES = {
    "gpt": ("wikitext2-gpt", "model.vocab_size=8192 model.d_model=384 model.n_heads=6 model.n_layers=4 model.dropout=0 batch.samples=8"),
    "llama": ("stories-llama", "model.vocab_size=4096 model.n_layers=4 model.d_model=256 model.n_heads=8 model.d_ff=688 model.seq_len=256 batch.samples=8"),
    "bert": ("wikitext2-bert", "model.vocab_size=8192 batch.samples=16"),
    "t5": ("wikitext2-t5", "model.vocab_size=8192 model.n_layers=3 batch.samples=8 model.seq_len=128"),
    "vit": ("cifar10-vit-small", "data.mixup=0 data.cutmix=0 model.d_model=256 model.n_heads=4 model.d_ff=1024 batch.samples=32"),
    "seq2seq": ("multi30k-seq2seq", "model.vocab_size=8000 batch.samples=32 batch.tokens=null model.seq_len=48"),
}
FACTORS = {  # part of the prediction → what its factor means
    "matmul": "matrix products inside a step over such alone: what of their operands is still in a cache",
    "attention": "likewise of fused attention",
    "memory": "likewise of memory-bound operations",
    "dispatch": "what the framework spends around an operation, over what it spends in very small models",
}


@dataclasses.dataclass
class Case:
    """One cell of the grid."""

    family: str
    precision: str
    checkpointing: str
    parts: dict[str, float]  # predicted seconds
    step: object  # () → None
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def predicted(self) -> float:
        return sum(self.parts.values())

    @property
    def measured(self) -> float:
        return statistics.median(self.times)

    def error(self, factors: dict[str, float] | None = None) -> float:
        predicted = sum((factors or {}).get(part, 1.0) * s for part, s in self.parts.items())
        return predicted / self.measured - 1


def parts_of(ops: list[Op], device: hardware.Device) -> dict[str, float]:
    """Seconds by part: by kind of operation, and what the framework adds to each."""
    bare = dataclasses.replace(device, measured={**device.measured, "dispatch": {}})
    found = dict.fromkeys(FACTORS, 0.0)
    for op in ops:
        kernel = tables.seconds(op, bare) * op.count
        found[op.kind] += kernel
        found["dispatch"] += tables.seconds(op, device) * op.count - kernel
    return found


def case(family: str, precision: str, checkpointing: str, device: hardware.Device, threads: int) -> Case:
    name, words = RECIPES[family]
    layout = [f"layout.precision={precision}", f"layout.checkpointing={checkpointing}", f"layout.threads={threads}", "layout.device=cpu"]
    recipe, _ = resolve.load(name, [*words.split(), *layout], {})
    recipe = batches.complete(recipe)
    given = batches.micro_batches(recipe)
    work = trace_recipe(recipe, micro_batches=given).work
    parts = parts_of([*(dataclasses.replace(op, count=op.count * work.micro_batches) for op in work.micro), *work.step], device)

    torch.manual_seed(0)
    task = batches.task_without_data(recipe)
    numbers = Precision(precision, torch.device("cpu"))
    parallel = apply(numbers.cast(models.build(recipe.model)), recipe.layout)
    parallel.bare.train()
    stepper = Stepper(recipe, task, parallel, torch.device("cpu"), numbers)
    counts = {kind: sum(b["counts"][kind] for b in given) for kind in given[0]["counts"]}
    return Case(family, precision, checkpointing, parts, lambda: stepper.step(given, counts))


def measure(cases: list[Case], repeat: int, seconds: float, clock=time.perf_counter) -> None:
    """Times steps of every case in turns."""
    for c in cases:
        for _ in range(2):  # warm-up: the optimizer's state, memory
            c.step()
    for _ in range(repeat):
        for c in cases:
            c.step()
            begin = time.perf_counter()
            while not c.times or time.perf_counter() - begin < seconds / repeat:
                start = clock()
                c.step()
                c.times.append(clock() - start)


def fit(cases: list[Case]) -> dict[str, float]:
    """Factors by least squares on relative errors, drawn towards 1 as if one more case said so: few cases do not tell four numbers apart."""
    a = torch.tensor([[c.parts[part] / c.measured for part in FACTORS] for c in cases], dtype=torch.float64)  # (cases, factors)
    ridge = a.mean(0).diag() / 2  # a part weighs as much as it is
    wanted = torch.cat([torch.ones(len(cases), dtype=torch.float64), ridge.diagonal()])
    found = torch.linalg.lstsq(torch.cat([a, ridge]), wanted[:, None]).solution[:, 0]
    return dict(zip(FACTORS, found.tolist()))


def report(cases: list[Case], fitted: bool) -> list[dict]:
    """Prints the table; returns its rows."""
    rows = []
    print(f"{'family':8} {'precision':9} {'checkpointing':13} {'predicted':>10} {'measured':>10} {'spread':>7} {'error':>7}" + ("  fitted" if fitted else ""))
    for c in cases:
        left_out = fit([o for o in cases if o.family != c.family]) if fitted else None
        low, _, high = statistics.quantiles(c.times, n=4) if len(c.times) > 1 else c.times * 3
        row = {
            "family": c.family, "precision": c.precision, "checkpointing": c.checkpointing, "predicted": c.predicted, "measured": c.measured,
            "quartiles": [low, high], "steps": len(c.times), "error": c.error(), "parts": c.parts,
        }  # fmt: skip
        line = f"{c.family:8} {c.precision:9} {c.checkpointing:13} {c.predicted:9.4f}s {c.measured:9.4f}s {(high - low) / c.measured:7.1%} {c.error():+7.1%}"
        if left_out:
            row |= {"error_left_out": c.error(left_out), "factors": left_out}
            line += f" {c.error(left_out):+7.1%}"
        rows.append(row)
        print(line, flush=True)
    errors = [abs(r["error"]) for r in rows]
    print(f"median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}; nothing fitted")
    if fitted:
        errors = [abs(r["error_left_out"]) for r in rows]
        print(f"median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}; factors from the other families")
        print("factors from all: " + ", ".join(f"{part} {value:.3f}" for part, value in fit(cases).items()))
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--on", default="this", help="device of the hardware file (default this)")
    p.add_argument("--families", default=",".join(RECIPES))
    p.add_argument("--precisions", default="fp32,bf16")
    p.add_argument("--checkpointing", default="none,full")
    p.add_argument("--threads", type=int, help="default: those of the calibration")
    p.add_argument("--repeat", type=int, default=3, help="rounds over all cases (default 3)")
    p.add_argument("--seconds", type=float, default=9.0, help="of steps for each case, over all rounds (default 9)")
    p.add_argument("--fit", action="store_true", help="also fit factors, leaving out the family that is predicted")
    p.add_argument("--out", metavar="FILE.json")
    a = p.parse_args()
    device = hardware.find(a.on)
    if device.measured is None:
        p.error(f"{a.on} has no measured tables: run gradus calibrate")
    threads = a.threads or device.measured["threads"]
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    grid = [(f, n, c) for f in a.families.split(",") for n in a.precisions.split(",") for c in a.checkpointing.split(",")]
    cases = [case(*cell, device, threads) for cell in grid]
    measure(cases, a.repeat, a.seconds)
    print(f"{device.name}, calibrated {device.measured['date']}, {threads} threads, torch {torch.__version__}, load before {load:.2f}")
    rows = report(cases, a.fit)
    if a.out:
        conditions = {
            **{k: v for k, v in vars(a).items() if k != "out"}, "threads": threads, "load_before": load, "calibrated": device.measured["date"],
            "environment": environment(torch.device("cpu")), "recipes": {f: RECIPES[f] for f in a.families.split(",")},
        }  # fmt: skip
        Path(a.out).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
