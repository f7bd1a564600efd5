"""Training and decoding beside programs that use the processors, by how long waiting threads spin (gradus.spin):

    python benchmarks/busy.py                    0, 2 and 4 neighbours, five rounds, 5 s a sample: a quarter of an hour
    python benchmarks/busy.py --spins 500,10000  and with these counts of libgomp's GOMP_SPINCOUNT

A sample is a process of its own; the settings alternate within each round. Always among them: one thread, two threads that sleep at once
(spin 0), libgomp's own count (300,000), and Gradus, which spins shortly while others use the processors. --write: rows to
benchmarks/results/busy-cpu.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gradus import limits
from gradus.rows import Row, as_lines

SLEEP, OWN, DEFAULT = 0, "Gradus", 300_000


def training() -> Iterator[int]:
    """The tokens of each step of copy-task."""
    from gradus import recipe as recipes
    from gradus.measure.profile import endless
    from gradus.train.loop import Trainer
    from gradus.train.session import open_session
    session = open_session(recipes.load("copy-task", ["layout.device=cpu"]))
    trainer, before = Trainer(session, session.lay_out(), Path(os.devnull), []), 0
    for step in endless(trainer.loader):
        trainer.take(step)
        yield trainer.progress.tokens - before
        before = trainer.progress.tokens


def decoding() -> Iterator[int]:
    """One token at a time of a Llama of 15 million parameters with random weights, in texts of 64."""
    from gradus import models
    from gradus.models.decoding import generate
    from gradus.recipe.schema import LlamaConfig
    config = LlamaConfig(vocab_size=32_000, d_model=288, n_layers=6, n_heads=6, d_ff=768, seq_len=256)
    model = models.build(config, seed=0).eval()
    while True:
        yield from (1 for _ in generate(model, [[1] * 16], max_new=64))


def speed(what: str, seconds: float) -> float:
    """Tokens/s over so many seconds, after one step of warm-up."""
    counts = training() if what == "train" else decoding()
    next(counts)
    begun, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        tokens += next(counts)
    return tokens / elapsed


def run_sample(what: str, threads: int, spin: int | str, seconds: float) -> float:
    setting = {"OMP_NUM_THREADS": str(threads)} | ({} if spin == OWN else {"GOMP_SPINCOUNT": str(spin)})
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | setting
    command = [sys.executable, __file__, "--sample", what, "--seconds", str(seconds)]
    return float(subprocess.check_output(command, env=environment, text=True).split()[-1])


def measure(neighbours: int, what: list[str], settings: list[tuple[int, int | str]], rounds: int, seconds: float) -> Iterator[Row]:
    """Rows of one number of neighbours. settings: (threads, spin count or OWN)."""
    from gradus.measure.machine import conditions
    about = conditions()  # before the neighbours are there
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
    try:
        speeds = {(each, *setting): [] for each in what for setting in settings}
        for _ in range(rounds):
            for key, values in speeds.items():
                values.append(run_sample(*key, seconds))
    finally:
        for program in programs:
            program.kill()
            program.wait()
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    for (each, threads, spin), values in speeds.items():
        value, best = medians[each, threads, spin], max(medians[each, 1, OWN], medians[each, 2, SLEEP])
        setting = {"what": each, "neighbours": neighbours, "threads": threads, "spin": spin, "seconds": seconds}
        figures = {"ratio": value / best, "of_default": value / medians[each, 2, DEFAULT], "low": min(values), "high": max(values), "samples": values}
        yield Row("tokens_per_s", value, "tokens/s", None, {**setting, **figures, **about})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", default="train,decode")
    parser.add_argument("--spins", default="", help="further counts of GOMP_SPINCOUNT, e.g. 1000,10000")
    parser.add_argument("--neighbours", default="0,2,4", help="programs beside it that use a processor each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a sample")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/busy-cpu.jsonl")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample:
        return print(speed(args.sample, args.seconds))
    spins = sorted({SLEEP, DEFAULT, *map(int, filter(None, args.spins.split(",")))})
    settings = [(1, OWN), *((2, spin) for spin in [*spins, OWN])]
    print(f"{limits.processors()} processors; median of {args.rounds} rounds of {args.seconds:g} s; best: of one thread and of two that sleep at once")
    print(f"{'':8}{'neighbours':>10}{'threads':>9}{'spin':>9}{'tokens/s':>10}{'low':>10}{'high':>10}{'of best':>9}{'of default':>12}")
    rows: list[Row] = []
    for neighbours in map(int, args.neighbours.split(",")):
        measured = list(measure(neighbours, args.what.split(","), settings, args.rounds, args.seconds))
        rows += measured
        for value, c in ((row.value, row.conditions) for row in measured):
            print(f"{c['what']:8}{c['neighbours']:10}{c['threads']:9}{c['spin']!s:>9}{value:10,.1f}{c['low']:10,.1f}{c['high']:10,.1f}"
                  f"{c['ratio']:9.2f}{c['of_default']:12.2f}", flush=True)  # fmt: skip
    if args.write:
        (Path(__file__).parent / "results" / "busy-cpu.jsonl").write_text(as_lines(rows))


if __name__ == "__main__":
    main()
