"""Peak memory and time of the three attention kernels, forward and forward + backward.

    python benchmarks/attention_kernels.py [--lengths 512,1024,2048,4096] [--chunks 64,128,256,512] [--out FILE.json]

Shapes as in BERT-base: 12 heads of 64, batch 1, fp32. Memory is what a call allocates at its peak beyond its inputs and gradients
of inputs (on a CPU from the profiler's memory events, on CUDA from the allocator). Time is the median of `--repeat` calls after one warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradus.layers.kernels import get_kernel
from gradus.measure.memory import Timeline
from gradus.train.log import environment


def peak_of(function: Callable[[], object], device: torch.device | str = "cpu") -> tuple[int, int, int]:
    """(allocated before, allocated after, peak) in bytes of tensor memory while `function()` runs; what it returns is let go.

    On CUDA by the allocator's own count. On a CPU before is 0 and the others count from there: what `function()` itself allocates
    and releases (releases of older memory are not seen).
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return before, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    with Timeline() as timeline:
        function()
        timeline.mark("after")
    _, after, peak = timeline.phases()[0]
    return 0, after, peak


def call(kernel, q, k, v, backward: bool, causal: bool):
    out, _ = kernel(q, k, v, causal=causal)
    if backward:
        torch.autograd.grad(out.sum(), (q, k, v))
    return None


def measure(name: str, chunk: int, length: int, backward: bool, causal: bool, repeat: int, device: str) -> dict:
    q, k, v = (torch.randn(1, 12, length, 64, device=device, requires_grad=True) for _ in range(3))
    kernel = get_kernel(name, chunk)
    run = lambda: call(kernel, q, k, v, backward, causal)  # noqa: E731
    run()
    before, _, peak = peak_of(run)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "kernel": name if name != "chunked" else f"chunked {chunk}",
        "length": length,
        "pass": "forward + backward" if backward else "forward",
        "peak_mib": (peak - before) / 2**20,
        "median_ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lengths", default="512,1024,2048,4096")
    p.add_argument("--chunks", default="64,128,256,512")
    p.add_argument("--causal", action="store_true")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--device", default="cpu")
    p.add_argument("--out")
    args = p.parse_args()
    kinds = [("naive", 0), ("sdpa", 0)] + [("chunked", int(c)) for c in args.chunks.split(",")]
    rows = []
    for backward in (False, True):
        print(f"\n{'forward + backward' if backward else 'forward (training mode)'}; peak MiB, share of naive saved, median ms (spread)")
        for length in map(int, args.lengths.split(",")):
            base = None
            for name, chunk in kinds:
                row = measure(name, chunk, length, backward, args.causal, args.repeat, args.device)
                base = base or row["peak_mib"]
                row["saved"] = 1 - row["peak_mib"] / base
                rows.append(row)
                print(
                    f"n={length:5} {row['kernel']:12} {row['peak_mib']:9.1f} MiB  saved {row['saved']:6.1%}  {row['median_ms']:9.1f} ms ({row['spread_ms']:.1f})",
                    flush=True,
                )
    if args.out:
        conditions = {
            "heads": 12, "head_dim": 64, "batch": 1, "dtype": "float32", "causal": args.causal, "torch": torch.__version__,
            "threads": torch.get_num_threads(), "device": args.device, "environment": environment(torch.device(args.device)), "repeat": args.repeat,
        }  # fmt: skip
        Path(args.out).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
