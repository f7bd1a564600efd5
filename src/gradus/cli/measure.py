"""Verbs that measure, and show what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gradus.cli.verb import JSON, RECIPE, load_recipe, print_all, verb
from gradus.limits import LENGTH, PROCESSES, SAMPLES, STEPS, numbers
from gradus.options import FORCE, Option, option, real, whole


def folder(default: str) -> Option:
    return option("--to DIR", f"folder (default: {default}); an interrupted one is continued")


@verb(
    "planned beside measured", "gradus prove runs/copy-task/latest", "proof",
    option("runs RUN", "run folders; several: each figure's error by run, and their median", nargs="+"),
    option("--json", "the figures as JSON lines"),
)  # fmt: skip
def prove(args) -> Iterable[str]:
    """planned against measured, for finished runs"""
    from gradus.proof.prove import prove

    return prove(args.runs, args.json)


@verb(
    "runs as HTML and PDF", "gradus report runs/copy-task/latest --to report", "report",
    option(
        "runs RUN|STUDY",
        "folders of runs and of studies; runs of one recipe are compared with the first of them that is finished",
        nargs="+",
    ),
    option("--to DIR", "folder for report.html and report.pdf", required=True),
    option("--notes FILE.md", "your own discussion"),
    option("--title TEXT", "of the first page (default: the names of what is reported)", default=""),
    option("--author TEXT", "beside the date of the newest measurement", default=""),
    option(
        "--x", "what curves stand above (default: step)", default="step", choices=["step", "tokens", "seconds"]
    ),
    option("--code", "also recipes with every key, job scripts and the models' source"),
)  # fmt: skip
def report(args) -> Iterable[str]:
    """runs and studies as one HTML file and one PDF, to hand in"""
    from gradus.report.report import report

    return report(args.runs, args.to, args.notes, title=args.title, author=args.author, x=args.x, code=args.code)


@verb(
    "where time and memory go", "gradus profile copy-task", "report",
    *RECIPE,
    option("--repeat N", "cycles of 1 step to wait, 1 to warm up, 3 recorded", whole(1_000), default=2),
    option("--to DIR", "folder for page, rows and traces (default: profile/RECIPE)"),
)  # fmt: skip
def profile(args) -> Iterable[str]:
    """torch.profiler over a few steps: where time and memory go, and what to try next"""
    from gradus.measure.profile import profile
    from gradus.report.profiled import page

    recipe = load_recipe(args)
    return profile(recipe, Path(args.to or f"profile/{recipe.name}"), args.repeat, page)


@verb(
    "engines and precisions", "gradus bench RUN", "inference",
    option("model RUN_OR_MODEL", "a run folder, a checkpoint or a folder in the Hugging Face layout"),
    option("--engines NAME,...", "torch, compiled, ... (default: all)", default="all"),
    option("--precisions NAME,...", "fp32, bf16, fp16, int8, int4 (default: all)", default="all"),
    option("--batch N,...", "samples at a time (default 1,8,32)", default="1,8,32"),
    option("--length N,...", "input tokens (default: 128 and 512, if they fit)"),
    option("--new N", "tokens to generate (default 64)", whole(LENGTH, 2)),
    option(
        "--accuracy N",
        "over N samples of the run's valid split; 0: none (default: all for encoders, else 0; without N: all)",
        whole(SAMPLES, 0), nargs="?", const=SAMPLES,
    ),
    option("--runs N", "timed runs in all rounds, at least; at most ten times as many (default 10)", whole(STEPS),
           default=10),
    option("--seconds S", "seconds to time in all rounds, at least; at most six times as long (default 10)",
           real(above=0, most=1e6), default=10.0),
    option("--warmup N", "runs before them, in each round (default 10)", whole(STEPS), default=10),
    option("--rounds N", "each with every configuration in a new process (default 2)", whole(10**6), default=2),
    folder("bench/NAME"), JSON,
)  # fmt: skip
def bench(args) -> int:
    """latency, tokens/s, memory and accuracy of a trained model in every engine and precision"""
    from gradus.proof.bench import bench

    return print_all(bench(args), args.json)


@verb(
    "faster or smaller by steps", "gradus ladder copy-task", "ladder",
    *RECIPE,
    option("--for", "what to optimise for (default speed)", dest="goal", default="speed", choices=["speed", "memory"]),
    option("--steps N", "timed steps per round (default 8)", whole(STEPS), default=8),
    option("--rounds N", "rounds of each comparison (default 3)", whole(10**6), default=3),
    option("--to-the-end", "also train the first and the last rung in full, with accuracy"),
    folder("ladder/RECIPE-GOAL"), JSON,
)  # fmt: skip
def ladder(args) -> int:
    """faster, or smaller, step by step: each optimisation measured side by side with the best so far"""
    from gradus.proof.ladder import ladder

    return print_all(ladder(load_recipe(args), args), args.json)


@verb(
    "1, 2, 4, ... processes", "gradus scale copy-task --processes 1,2", "layouts-measured",
    *RECIPE,
    option("--processes N,...", "how many to compare, e.g. 1,2,4; all on this machine", required=True),
    option("--steps N", "timed steps per round (default 30)", whole(STEPS), default=30),
    option("--warmup N", "untimed steps before them (default 5)", whole(STEPS, 0), default=5),
    option("--repeat N", "rounds, each with every number of processes (default 3)", whole(10**6), default=3),
    option("--to-the-end", "also run the whole training once, with its evaluations"),
    option("--weak", "weak scaling: the recipe's batch per process, not in total; also with --to-the-end"),
    option("--scale-lr", "with --weak: the learning rate times the number of processes (the linear rule)"),
    FORCE, folder("scale/RECIPE/TIME"),
)  # fmt: skip
def scale(args) -> int:
    """speed-up and efficiency on 1, 2, 4, ... processes, and what is lost"""
    from gradus.proof.scale import scale

    counts = numbers(args.processes, "--processes")  # strong scaling keeps one batch: that of the most processes
    recipe = load_recipe(args, 1 if args.weak else max(counts))
    return print_all(scale(recipe, counts, args))


@verb(
    "any settings side by side", "gradus study FILE.yaml", "studies",
    option("file FILE.yaml", "the configurations, and what to measure of each"),
    option("overrides key=value", "settings for every recipe", nargs="*"),
    option("--only TEXT,...", "only configurations with one of these in the name, and their baselines"),
    option("--rounds N", "instead of the file's", whole(10**6)),
    option("--steps N", "instead of the file's: timed steps per round", whole(STEPS)),
    folder("studies/NAME"),
    option("--page FILE.md", "also put the table into this page, between its marks <!-- NAME -->"),
    JSON,
)  # fmt: skip
def study(args) -> int:
    """a table of any configurations: planned, measured, accuracy"""
    from gradus.proof.study_file import study

    return print_all(study(args), args.json)


@verb(
    "all-reduce and the others", "gradus collectives --processes 2", "collectives",
    option("--processes N", "how many (default 2; under a launcher: the launcher's)", whole(PROCESSES)),
    option("--backend gloo|mpi|nccl", "that carries the messages (default gloo)", default="gloo"),
    option("--sizes SIZE,...", "of the whole array, e.g. 1KiB,4MiB (default: 1KiB to 16MiB, times 4)"),
    option("--to FILE.jsonl", "add the rows to this file"),
)  # fmt: skip
def collectives(args) -> int:
    """time broadcast, all-reduce and the other collectives between processes"""
    from gradus.measure.collectives import collectives

    return collectives(args)
