"""A GPU measured beside what the plan says of it: single kernels, then peak memory and seconds of training steps of usual models.

    python benchmarks/gpu.py [--models gpt2 ...] [--steps 20] [--out FILE.jsonl]     # some six minutes on an H100
    python benchmarks/gpu.py --tiny --device cpu                                     # the same code on small shapes and models

Kernels: matrix products in bf16 and fp8, attention with and without a window, copies, and collectives where there are several GPUs; each
is the median of calls that the device's own events time, after a warm-up. Steps: predicted before they run, memory from the traced step,
time from the device's entry in the hardware file; the trainer's own, on synthetic batches, in bf16 (autocast) with AdamW, without and with
full checkpointing.
Rows (benchmarks/results/) have the conditions; one is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gradus import models
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.layers import get_kernel
from gradus.measure.energy import Meter
from gradus.parallel.apply import apply
from gradus.parallel.device import pick_device
from gradus.parallel.precision import Precision
from gradus.plan import batches, engine
from gradus.plan.case import Case
from gradus.plan.collectives import intra_node_seconds
from gradus.plan.roofline import op_seconds
from gradus.plan.step import step_time
from gradus.plan.work import Op
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
USUAL = ("gpt2", "llama-1b", "vit-l16")
TINY = {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128}
WARM_UP = 5
PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 1024), (4096, 14336, 4096), (4096, 4096, 14336), (16, 8192, 8192), (1, 4096, 4096))
ATTENTION = ((4, 2048, None), (1, 8192, None), (1, 8192, 512))  # rows, length, window; 32 heads of 128 over 8
COPIED, COLLECTIVES = (2**20, 2**28, 2**31), (2**16, 2**22, 2**28)  # bytes
CALLS = 20


# ---------------------------------------------------------------- kernels


def seconds_of(call: Callable[[], Any], device: torch.device, calls: int = CALLS) -> tuple[float, float, float]:
    """Median, least and most seconds of a call."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    else:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(device)
        times = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    return statistics.median(times), min(times), max(times)


def product(m: int, n: int, k: int, device: torch.device) -> tuple[Op, Callable[[], Any]]:
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    op = Op("matmul", "mm", "bf16", "forward", 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), (1, m, n, k))
    return op, lambda: F.linear(a, b)


def product_in_fp8(m: int, n: int, k: int, device: torch.device) -> tuple[Op, Callable[[], Any]]:
    """Its casts are not timed."""
    a, b = (torch.randn(*size, device=device).to(torch.float8_e4m3fn) for size in ((m, k), (n, k)))
    one = torch.ones((), device=device)
    how = F.ScalingType.TensorWise
    op = Op("matmul", "mm", "fp8", "forward", 2.0 * m * n * k, m * k + n * k + 2.0 * m * n, (1, m, n, k))
    return op, lambda: F.scaled_mm(a, b.t(), one, how, one, how, output_dtype=torch.bfloat16, use_fast_accum=True)


def attention(rows: int, length: int, window: int | None, device: torch.device) -> tuple[Op, Callable[[], Any]]:
    """Its forward pass."""
    q, k, v = (torch.randn(rows, heads, length, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8))
    seen = length * (length + 1) / 2 - (max(0, length - window) * (length - window + 1) / 2 if window else 0)
    op = Op("attention", "flash", "bf16", "forward", 4.0 * rows * 32 * 128 * seen, 2.0 * rows * 128 * length * (2 * 32 + 2 * 8),
            (rows, 32, length, min(length, window or length), 128))  # fmt: skip
    kernel = get_kernel("sdpa")
    return op, lambda: kernel(q, k, v, causal=True, window=window)


def copy(size: int, device: torch.device) -> tuple[Op, Callable[[], Any]]:
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return Op("memory", "copy", "bf16", "forward", 0.0, 2.0 * size), lambda: b.copy_(a)


def kernels(device: torch.device, tiny: bool) -> Iterator[tuple[dict[str, Any], Op, Callable[[], Any]]]:
    """What each is, as the plan sees it, and a call of it."""
    small = 64 if tiny else 1
    for make, dtype in ((product, "bf16"), (product_in_fp8, "fp8")):
        if dtype == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
            print("products in fp8: this device has none")
            continue
        for sizes in PRODUCTS:
            m, n, k = (max(16 if dtype == "fp8" else 1, size // small) for size in sizes)
            yield {"op": "gemm", "dtype": dtype, "m": m, "n": n, "k": k}, *make(m, n, k, device)
    for rows, length, window in ATTENTION:
        length, window = length // small, window and window // small
        about = {"op": "attention_prefill", "dtype": "bf16", "batch": rows, "seq": length, "heads": 32, "kv_heads": 8, "head_dim": 128, "window": window or 0}
        yield about, *attention(rows, length, window, device)
    for size in COPIED:
        yield {"op": "copy", "dtype": "uint8", "bytes": size // small}, *copy(size // small, device)


def collective(rank: int, n: int, store: str, to: str) -> None:
    """In a process of its own, one for each GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=n)
    found = []
    for size in COLLECTIVES:
        whole = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        part = torch.zeros(size // 2 // n, dtype=torch.bfloat16, device=device)
        calls = {"all_reduce": (dist.all_reduce, whole), "all_gather": (dist.all_gather_into_tensor, whole, part),
                 "reduce_scatter": (dist.reduce_scatter_tensor, part, whole)}  # fmt: skip
        for name, call in calls.items():
            found.append(({"op": name, "dtype": "bf16", "ranks": n, "bytes": size}, seconds_of(functools.partial(*call), device)))
    dist.destroy_process_group()
    if rank == 0:
        Path(to).write_text(json.dumps(found))


def measure_kernels(device: torch.device, file: RowFile, about: dict[str, Any], tiny: bool) -> None:
    known = device_of(device, torch.get_num_threads())
    print(f"{'kernel':64} {'planned':>10} {'measured':>10} {'error':>8}")

    def show(what: dict[str, Any], planned: float | None, seconds: tuple[float, float, float]) -> None:
        median, least, most = seconds
        file.write([Row("gpu/kernel", median, "s", None, about | what | {"least": least, "most": most, "planned": planned})])
        said = (f"{1e6 * planned:7.1f} µs", f"{planned / median - 1:+8.1%}") if planned else ("-", "-")
        name = " ".join(str(value) if key in ("op", "dtype") else f"{key}={value}" for key, value in what.items())
        print(f"{name:64} {said[0]:>10} {1e6 * median:7.1f} µs {said[1]:>8}", flush=True)

    for what, op, call in kernels(device, tiny):
        show(what, op_seconds(op, known) if known else None, seconds_of(call, device, 3 if tiny else CALLS))
    n = torch.cuda.device_count() if device.type == "cuda" else 0
    if n < 2:
        print("collectives: one device alone\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "rows"
        torch.multiprocessing.spawn(collective, (n, f"{folder}/store", str(to)), n)
        for what, seconds in json.loads(to.read_text()):
            show(what, intra_node_seconds(what["op"], what["bytes"], n, Cluster(known, n)) if known else None, seconds)
    print()


# ---------------------------------------------------------------- steps


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
    parser.add_argument("--models", nargs="*", default=list(USUAL), choices=list(MODELS))
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
    measure_kernels(device, file, about, args.tiny)
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
