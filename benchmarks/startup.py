"""What the start of a training takes of a host's memory, by process and layout, and models that no process could hold whole.

    python benchmarks/startup.py                      a Llama of 1.1 B parameters over two processes, drawn and read
    python benchmarks/startup.py --model 7b           start and forward pass of a 6.7 B one, in bf16, with layout.shard=2
    python benchmarks/startup.py --model 3b --step    start and one step (SGD) of a 3.2 B one
    python benchmarks/startup.py --model tiny --step  the same, small

Peaks are the kernel's (VmHWM), above what the process had before it had a model, beside what is held in the end (`part`: this process's
weights) and the largest parameter of all (fp32). Rows go to benchmarks/results/startup-cpu-2-processes.json with --write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from gradus import models
from gradus.measure import machine
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.recipe.schema import Layout, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from distributed import run

MODELS = {
    "tiny": LlamaConfig(vocab_size=1000, d_model=128, n_layers=4, n_heads=4, d_ff=256, seq_len=64, tie_output=False),
    "1b": LlamaConfig(vocab_size=32_000, d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, d_ff=5632, seq_len=64, tie_output=False),
    "3b": LlamaConfig(vocab_size=32_000, d_model=3072, n_layers=28, n_heads=24, n_kv_heads=8, d_ff=8192, seq_len=64, tie_output=False),
    "7b": LlamaConfig(vocab_size=32_000, d_model=4096, n_layers=32, n_heads=32, d_ff=11_008, seq_len=64, tie_output=False),
}
LAYOUTS = ({"shard": 2}, {"tensor": 2}, {"pipeline": 2})
MB = 10**6


def resident(field: str) -> int:
    """Bytes; VmRSS now, VmHWM at the highest."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def started(world, name: str, layout: dict, folder: str, dtype: str, what: str) -> dict:
    """In each process: the start of the model, and with what=forward a pass, with what=step a step too."""
    config, layout = MODELS[name], Layout(**layout)
    for warm in (True, False):  # the first, tiny one brings in what is imported on the way
        before, begun = resident("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")
        known = folder and not warm
        start = models.load_deferred(folder) if known else models.deferred(MODELS["tiny"] if warm else config, seed=0)
        start.model.to(getattr(torch, dtype))
        parallel = apply(start.model, layout, Mesh.make(layout, world), device=torch.device("cpu"), values=start.values)
        part = sum(own.local.nbytes for own in parallel.local_parameters)
        found = {"start_mb": (resident("VmHWM") - before) / MB, "part_mb": part / MB, "seconds": time.perf_counter() - begun}
        ids = torch.arange(64 if what == "forward" else 16)[None] % 100
        if what == "forward":
            begun = time.perf_counter()
            with torch.no_grad():
                found["logits"] = list(parallel.model(ids).shape)
            found["forward_seconds"] = time.perf_counter() - begun
        if what == "step":
            begun = time.perf_counter()

            def loss_of(model, batch):
                return torch.nn.functional.cross_entropy(model(batch["ids"])[0, :-1].float(), batch["ids"][0, 1:]) / world.size

            optimizer = torch.optim.SGD([p for _, p in parallel.trained()], lr=0.01)
            found["loss"] = float(parallel.forward_backward([{"ids": ids}], loss_of, lambda loss: loss))
            optimizer.step()
            parallel.zero_grad()
            found["step_seconds"] = time.perf_counter() - begun
        found["peak_mb"] = (resident("VmHWM") - before) / MB
        del parallel, start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--write", action="store_true", help="add the rows to benchmarks/results/")
    args = parser.parse_args()
    config, rows = MODELS[args.model], []
    largest = 4 * config.vocab_size * config.d_model / MB
    count = models.count(config)["total"]
    print(f"Llama of {count:,} parameters; {machine.conditions()['cpu']}, two processes, MB")
    print(f"{'layout':16}{'values':8}{'process':>8}{'part':>9}{'largest':>9}{'start':>9}{'peak':>9}{'allowed':>9}{'s':>7}")
    large = args.model in ("3b", "7b")
    dtype, what = ("bfloat16" if large else "float32"), ("step" if args.step else "forward" if large else "")
    with tempfile.TemporaryDirectory() as folder:
        sources = [""] if large else ["", folder]
        if not large:
            models.save(models.build(config, seed=0), folder)
        for layout in LAYOUTS[:1] if what else LAYOUTS:
            for source in sources:
                for rank, found in enumerate(run(2, started, args.model, layout, source, dtype, what, timeout=3000)):
                    allowed = found["part_mb"] + largest + 100 * 2**20 / MB
                    key, value = next(iter(layout.items()))
                    print(
                        f"{key + '=' + str(value):16}{'read' if source else 'drawn':8}{rank:8}{found['part_mb']:9.0f}{largest:9.0f}"
                        f"{found['start_mb']:9.0f}{found['peak_mb']:9.0f}{allowed:9.0f}{found['seconds']:7.1f}"
                    )
                    for name in ("logits", "forward_seconds", "loss", "step_seconds"):
                        if name in found:
                            print(f"  {name}: {found[name]}")
                    rows.append({"model": args.model, "parameters": count, "dtype": dtype, "layout": layout, "read": bool(source),
                                 "rank": rank, "largest_mb": largest, **found})  # fmt: skip
    if args.write:
        file = Path(__file__).parent / "results" / "startup-cpu-2-processes.json"
        old = json.loads(file.read_text())["rows"] if file.exists() else []
        kept = [row for row in old if row["model"] != args.model]
        file.write_text(json.dumps({"conditions": machine.conditions(), "rows": kept + rows}, indent=1) + "\n")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
