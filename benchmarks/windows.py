"""Time and memory of attention in a window beside the same kernel's full attention, forwards and backwards:

    python benchmarks/windows.py            a table: causal, 8 heads of 128 over 2 of keys or 8, window 512, batch 1, fp32, one thread
    python benchmarks/windows.py 1024       of this length alone
    python benchmarks/windows.py --write    rows to benchmarks/results/windows-cpu-1-thread.jsonl

A cell is a process of its own. Seconds are the processor's (other programs on the machine do not count), the median and the spread of 3 calls;
memory is the process's peak above what it had before the first call, in MiB.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from gradus.layers import get_kernel
from gradus.measure.machine import conditions
from gradus.rows import Row, as_lines

HEADS, WIDTH, WINDOW, CALLS = 8, 128, 512, 3
LENGTHS, KERNELS = (2048, 4096, 8192), [(name, keys) for name in ("chunked", "sdpa") for keys in (2, 8)]


def measure(kernel: str, keys: int, length: int, window: int | None) -> dict:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, heads, length, WIDTH, requires_grad=True) for heads in (HEADS, keys, keys))
    grad, seconds = torch.randn_like(q), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(CALLS + 1):
        began = time.process_time()
        get_kernel(kernel)(q, k, v, causal=True, window=window)[0].backward(grad)
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(seconds[1:]), "least": min(seconds[1:]), "most": max(seconds[1:]), "MiB": peak / 1024}


def main(words: list[str]) -> None:
    if words[:1] == ["one"]:
        print(json.dumps(measure(words[1], *map(int, words[2:4]), int(words[4]) or None)))
        return
    rows = []
    print(f"{'kernel':8} {'keys':>4} {'length':>6} {'full':>22} {'window':>22} {'ratio':>6} {'MiB':>14}")
    for kernel, keys in KERNELS:
        for length in [int(word) for word in words if word.isdigit()] or LENGTHS:
            cells = []
            for window in (0, WINDOW):
                command = [sys.executable, __file__, "one", kernel, str(keys), str(length), str(window)]
                cells.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
                about = {"kernel": kernel, "heads of keys": keys, "length": length, "window": window, **conditions()}
                spread = {"least": cells[-1]["least"], "most": cells[-1]["most"]}
                rows.append(Row("cpu/call", cells[-1]["seconds"], "s", None, about | spread))
                rows.append(Row("memory/process", round(cells[-1]["MiB"]), "MiB", None, about))
            shown = [f"{c['seconds']:.3f} s ({c['least']:.3f} to {c['most']:.3f})" for c in cells]
            ratio, memory = cells[1]["seconds"] / cells[0]["seconds"], " / ".join(f"{c['MiB']:.0f}" for c in cells)
            print(f"{kernel:8} {keys:4} {length:6,} {shown[0]:>22} {shown[1]:>22} {ratio:6.2f} {memory:>14}", flush=True)
    if "--write" in words:
        Path("benchmarks/results/windows-cpu-1-thread.jsonl").write_text(as_lines(rows))


main(sys.argv[1:])
