"""Predicted against measured peak memory and seconds of a training step on one GPU, of models of usual sizes.

    python benchmarks/gpu.py [--models gpt2,...] [--steps 20] [--out FILE.jsonl]     # some five minutes on an H100
    python benchmarks/gpu.py --tiny --device cpu                                     # the same code on small models

The prediction is made before the step is run: memory from the traced step, time from the device's entry in the hardware file. The step is
the trainer's own, on synthetic batches, in bf16 (autocast) with AdamW, without and with full checkpointing. Rows (benchmarks/results/)
have the conditions; one is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gradus import models
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.measure.energy import Meter
from gradus.parallel.apply import apply
from gradus.parallel.device import pick_device
from gradus.parallel.precision import Precision
from gradus.plan import batches, engine
from gradus.plan.case import Case
from gradus.plan.step import step_time
from gradus.proof.memory_budget import device_of
from gradus.proof.step_memory import memory_of_step
from gradus.recipe import schema
from gradus.recipe.presets import PRESETS
from gradus.rows import Row, RowFile
from gradus.train import machine
from gradus.train.step import Stepper

TEXT = {"kind": "text", "path": "-"}
MODELS = {  # model, task, data, samples of a step
    "gpt2": (PRESETS["gpt2-small"], {"name": "causal_lm"}, TEXT, 16),
    "bert-base": (PRESETS["bert-base-uncased"] | {"head": "masked_lm", "pooler": False}, {"name": "masked_lm"}, TEXT, 32),
    "vit-l16": (PRESETS["vit-l16"] | {"n_classes": 1000}, {"name": "classification"}, {"kind": "images", "path": "-"}, 64),
    "llama-1b": (PRESETS["llama3.2-1b"] | {"seq_len": 2048}, {"name": "causal_lm"}, TEXT, 4),
    "t5-base": (PRESETS["t5-base"] | {"seq_len": 512}, {"name": "span_corruption"}, TEXT, 16),
}
TINY = {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128}
WARM_UP = 5


def recipe_of(name: str, checkpointing: str, device: str, tiny: bool) -> schema.Recipe:
    model, task, data, samples = MODELS[name]
    if tiny:
        model = model | TINY | ({"image_size": 32} if name == "vit-l16" else {"vocab_size": 256, "seq_len": 64})
        model |= {"n_kv_heads": 1} if name == "llama-1b" else {}
        samples = 4
    return batches.complete(schema.Recipe.model_validate({
        "name": name, "model": model, "task": task, "data": data, "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"samples": samples},
        "train": {"steps": 100, "clip_norm": 1.0}, "layout": {"device": device, "precision": "bf16", "checkpointing": checkpointing},
    }))  # fmt: skip


def predicted(recipe: schema.Recipe, device: torch.device) -> dict[str, tuple[float, str]]:
    known = device_of(device, torch.get_num_threads())
    plan = engine.plan(Case.of(recipe, 1, device.type))
    memory = plan.memory
    found = {"memory": (memory.allocated, "bytes"), "memory/reserved": (memory.reserved, "bytes")}
    if known:
        found["step"] = step_time(plan.work, Cluster(known, 1)).total, "s"
    return found


def measured(recipe: schema.Recipe, device: torch.device, steps: int) -> dict[str, tuple[float, str]]:
    """Peak of a step, once the optimizer's state is there; median of `steps` steps, each waited for; joules of such a step."""
    torch.manual_seed(0)
    parallel = apply(models.build(recipe.model, device=device), recipe.layout)
    parallel.bare.train()
    stepper = Stepper(recipe, batches.task_without_data(recipe), parallel, device, Precision(recipe.layout.precision, device))
    given = batches.micro_batches(recipe)
    counts = {kind: sum(b["counts"][kind] for b in given) for kind in given[0]["counts"]}

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(WARM_UP):
        stepper.step(given, counts)
    with memory_of_step(stepper, given) as memory:
        stepper.step(given, counts)
    found: dict[str, tuple[float, str]] = {"memory": (memory["allocated"], "bytes")}
    found |= {"memory/reserved": (memory["reserved"], "bytes")} if "reserved" in memory else {}
    times = []
    with Meter(device) as meter:
        for _ in range(steps):
            began = wait()
            loss, _ = stepper.step(given, counts)
            times.append(wait() - began)
    assert torch.isfinite(loss), "the loss is not finite"
    found["step"] = statistics.median(times), "s"
    if meter.joules:
        found["energy"] = meter.joules / steps, "J"
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models of the same families")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        device = pick_device(args.device)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu_name()
    place = Path(__file__).parent / "results" / f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', name).lower()}.jsonl"
    (args.out or place).unlink(missing_ok=True)
    file = RowFile(args.out or place)
    about: dict[str, Any] = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"date": time.strftime("%Y-%m-%d"), "tiny": args.tiny}
    print(f"{'model':12} {'checkpointing':14} {'what':16} {'predicted':>14} {'measured':>14} {'error':>8}")
    for model in args.models:
        for checkpointing in ("none", "full"):
            recipe = recipe_of(model, checkpointing, args.device, args.tiny)
            conditions = about | {
                "model": model, "checkpointing": checkpointing, "precision": "bf16", "samples": recipe.batch.samples,
                "seq_len": getattr(recipe.model, "seq_len", None), "steps": args.steps,
            }  # fmt: skip
            said = predicted(recipe, device)
            file.write([Row(f"gpu/{k}", v, unit, None, conditions | {"kind": "predicted"}) for k, (v, unit) in said.items()])
            try:
                seen = measured(recipe, device, args.steps if not args.tiny else 3)
            except torch.OutOfMemoryError:
                print(f"{model:12} {checkpointing:14} out of memory", flush=True)
                seen = {}
            file.write([Row(f"gpu/{k}", v, unit, None, conditions | {"kind": "measured"}) for k, (v, unit) in seen.items()])
            for k, (value, unit) in seen.items():
                p = said.get(k, (None,))[0]
                both = (f"{p:14.4g}", f"{(p - value) / value:+8.1%}") if p else (f"{'-':>14}", f"{'-':>8}")
                print(f"{model:12} {checkpointing:14} {k + ', ' + unit:16} {both[0]} {value:14.4g} {both[1]}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
    file.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
