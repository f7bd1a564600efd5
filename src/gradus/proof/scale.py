"""Is it worth more processes? One recipe trained on 1, 2, 4, ... of them: speed, efficiency, and where the rest of it
goes, by name.

Strong scaling keeps the global batch; weak scaling keeps the batch of a process. `timing` says what the parts of a step
are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus.errors import UserError
from gradus.limits import processors
from gradus.parallel import world as worlds
from gradus.parallel.device import enough_devices, pick_device
from gradus.parallel.mesh import needed, sizes
from gradus.parallel.replicate import POWERSGD_START
from gradus.proof import results
from gradus.proof.harness import run
from gradus.proof.memory_budget import changed
from gradus.proof.study import Configuration, Study
from gradus.proof.study_store import StudyStore, middle_of
from gradus.proof.timing import PARTS, SPENT, Timed
from gradus.recipe.axes import data_parallel_size
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row
from gradus.text import in_unit, milliseconds
from gradus.text import table as columns
from gradus.train.metrics import COUNTED_STEP

SHOWN = (
    "samples_per_s", "samples_per_s/undisturbed", "ratio/undisturbed", "speed_up", "efficiency", "time/step",
    "memory/process", "memory/device", "traffic/sent", "loss",
)  # fmt: skip
TO_THE_END = ", to the end"
RIGHT = set(range(1, 7))  # columns aligned to the right
COLLECTIVES = ["configuration", "collective", "calls", "ms", "sent"]


def recipe_for(recipe: Recipe, n: int, *, weak: bool = False, scale_lr: bool = False) -> Recipe:
    """The recipe as n processes train it: the same (strong), or with the recipe's batch for every process that sees
    samples of its own.

    Weak: what is counted in steps is divided by their number k; the learning rate stays, or is multiplied by k with
    `scale_lr` (Goyal et al. 2017, section 2.1). What a layout cannot do with one replica is left out for one. On a CPU
    every process has `layout.threads` threads, else 1.
    """
    layout, changes = recipe.layout, {}
    if layout.threads is None and pick_device(layout.device).type == "cpu":
        changes["threads"] = 1
    if sizes(layout, n)["replicate"] == 1:
        changes |= without_replicas(layout)
    r = changed(recipe, layout=changes)
    k = data_parallel_size(layout, n)
    if not weak or k == 1:
        return r

    def fewer(section: Any, *keys: str) -> dict[str, int]:
        return {key: max(1, round(n / k)) for key in keys if (n := getattr(section, key))}

    rate = r.optimizer.lr * (k if scale_lr else 1)
    # its peak is proportional to warmup_steps^-0.5: without this, fewer of them would raise it
    if r.schedule.name == "noam":
        rate /= math.sqrt(k)
    return changed(
        r,
        batch={key: n * k for key in ("samples", "tokens") if (n := getattr(r.batch, key))},
        optimizer={"lr": rate},
        train=fewer(r.train, "steps", "checkpoint_every"),
        evaluate=fewer(r.evaluate, "every"),
        schedule=fewer(r.schedule, "warmup_steps", "end_step"),
    )


def without_replicas(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that have nothing to do where there is one replica, as they are then."""
    alone = ("auto", "none", "data_parallel")  # the last is one process by itself
    replicate = layout.replicate if layout.replicate in alone else "auto"
    plain = {"replicate": replicate, "shard_optimizer": False, "local_sgd": None, "diloco": None}
    return {k: v for k, v in plain.items() if getattr(layout, k) != v}


# ------------------------------------------------------------ from times to figures


def parts_of(ranks: Sequence[Timed]) -> dict[str, float] | None:
    """Seconds of the mean step by PARTS: means over the processes, which add up to the step. None where nothing tells
    them."""
    spent = np.array([t.spent for t in ranks])  # (processes, steps, 4)
    step = max(t.elapsed for t in ranks) / spent.shape[1]
    data, computing, ready, _ = spent.mean(axis=(0, 1)).tolist()
    if ranks[0].facts["device"] != "cpu":
        if any(t.kernels is None for t in ranks):
            return None
        computing, communication = np.mean([t.kernels for t in ranks], axis=0).tolist()
        waiting, other = 0.0, step - computing - communication - data
    elif len(ranks) == 1:
        communication, waiting, other = 0.0, 0.0, step - computing - data
    else:
        blocked = spent[:, :, SPENT.index("blocked")]
        communication = float(blocked.min(axis=0).mean())
        waiting, other = step - computing - communication - data - ready, ready
    return dict(zip(PARTS, (computing, communication, waiting, data, other)))


def losses(ranks: Sequence[Timed], base: Sequence[Timed]) -> dict[str, float] | None:
    """The parts of the efficiency that is lost: name → share of the step. They add up to 1 - efficiency.

    Against the base's parts in the ideal step: with strong scaling divided by the ratio of processes, with weak scaling
    as they are.
    """
    parts, ideal = parts_of(ranks), parts_of(base)
    if parts is None or ideal is None:
        return None
    # a process's samples a step, against the base's: 1/2 with twice the processes (strong), 1 (weak)
    work = ranks[0].samples * len(base) / (base[0].samples * len(ranks))
    return {name: (parts[name] - ideal[name] * work) / sum(parts.values()) for name in PARTS}


def scaling_rows(store: StudyStore) -> Iterator[Row]:
    """Speed-up and efficiency, the parts of a step, what was lost and collectives, beside the rows of every study."""
    for runner, speed in (("steps", "samples_per_s"), ("train", "time/run")):
        of_runner = [c for c in store.study.configurations if c.runner == runner and store.measured(c)]
        middles = {c.name: middle_of(store.measured(c)) for c in of_runner}
        speeds = {c.name: statistics.median(s.values[speed][0] for s in store.measured(c)) for c in of_runner}
        for c in of_runner:
            base = of_runner[0]
            ranks, profiled = middles[c.name].ranks, store.measured(c)[-1].ranks  # these of the last round alone
            for timed, of_last in zip(ranks, profiled):
                timed.kernels = of_last.kernels
            about = {"kind": "measured", "configuration": c.name, "processes": c.processes, "against": base.name}
            about |= store.common
            ratio = speeds[c.name] / speeds[base.name]
            ratio = ratio if runner == "steps" else 1 / ratio
            yield Row("speed_up", ratio, "", None, about)
            yield Row("efficiency", ratio * base.processes / c.processes, "", None, about)
            if ranks:
                yield from step_rows(ranks, middles[base.name].ranks if c is not base else None, about)
                yield from collective_rows(profiled, about)


def step_rows(ranks: Sequence[Timed], base: Sequence[Timed] | None, about: dict[str, Any]) -> Iterator[Row]:
    """The parts of a step, and what was lost against the base."""
    for name, seconds in (parts_of(ranks) or {}).items():
        yield Row(f"time/step/{name}", seconds, "s", None, about)
    shares = losses(ranks, base) if base else None
    for name, share in (shares or {}).items():
        yield Row(f"lost/{name}", share, "of the step", None, about)


def collective_rows(ranks: Sequence[Timed], about: dict[str, Any]) -> Iterator[Row]:
    """The collectives of a step, means over the processes; bytes: that one process sends, where they are counted."""
    by_rank, sent = [t.collectives or {} for t in ranks], ranks[0].sent or {}
    for name in sorted({name for timed in by_rank for name in timed}):
        calls, seconds = np.mean([timed.get(name, (0.0, 0.0)) for timed in by_rank], axis=0).tolist()
        how = {"calls": calls, "bytes": sent.get(name, (0, None))[1], "of": "a step, from start to end"}
        yield Row(f"collective/{name}", seconds, "s", None, {**about, **how})


# ------------------------------------------------------------ what is shown


def measured(rows: Sequence[results.Record]) -> list[results.Record]:
    """Those of steps, not of whole trainings."""
    return [r for r in rows if r.get("kind") == "measured" and TO_THE_END not in r["configuration"]]


def noise_of(rows: Sequence[results.Record]) -> dict[str, float]:
    """Configuration → by what share of a step the rounds differ among themselves: half of the range, its own or the
    first configuration's."""
    steps = [r for r in measured(rows) if r["name"] == "time/step" and len(r.get("samples", ())) > 1]
    own = {r["configuration"]: (r["high"] - r["low"]) / 2 / max(r["value"], 1e-30) for r in steps}
    first = next(iter(own.values()), 0.0)
    return {c: max(share, first) for c, share in own.items()}


def lines(rows: Sequence[results.Record]) -> Iterator[str]:
    """The figures of all numbers of processes, for a terminal."""
    steps = [r for r in rows if TO_THE_END not in r["configuration"]]
    yield from results.lines(steps, SHOWN)
    if parts := steps_by_part(rows):
        yield "\na step in ms, mean over the processes; the parts add up to it:"
        yield from columns(["configuration", "step", *PARTS], parts, RIGHT)
        yield f"\nlost against {parts[0][0]}, in % of the step:"
        yield from columns(["configuration", "in total", *PARTS], lost(rows), RIGHT)
    elif any(r["name"] == "time/step" for r in measured(rows)):
        yield "\nno parts of a step: this device has no clocks for them"
    if calls := collectives(rows):
        yield "\ncollectives per step, profiled separately: ms from start to end, the wait for others included;"
        yield "some may overlap with computing:"
        yield from columns(COLLECTIVES, calls, {2, 3, 4})
    yield from noise_lines(rows)
    if whole := [r for r in rows if TO_THE_END in r["configuration"]]:
        yield "\ntrained to the end, once; seconds without evaluation and checkpoints:"
        metrics = dict.fromkeys(r["name"] for r in whole if r["name"].startswith(("valid/", "test/")))
        wanted = ["time/run", "speed_up", "efficiency", "samples_per_s", "train/loss", *metrics]
        yield from list(results.lines(whole, wanted))[:-1]


def cells(values: dict[str, float], names: Sequence[str], text: Callable[[float], str]) -> list[str]:
    return [text(values[name]) if name in values else "-" for name in names]


def by_configuration(rows: Sequence[results.Record]) -> dict[str, dict[str, Any]]:
    """Configuration → name → value, of what was measured."""
    values: dict[str, dict[str, Any]] = {}
    for r in measured(rows):
        values.setdefault(r["configuration"], {})[r["name"]] = r["value"]
    return values


# The cells of these three are those of the screen and of reports.


def steps_by_part(rows: Sequence[results.Record]) -> list[list[str]]:
    """Configuration, ms of a step, and of its PARTS."""
    names = ["time/step", *(f"time/step/{part}" for part in PARTS)]
    values = by_configuration(rows).items()
    return [[c, *cells(of_c, names, milliseconds)] for c, of_c in values if "time/step/data" in of_c]


def _percent(share: float, least: float) -> str:
    return "noise" if 0 < abs(share) < least else f"{100 * share:+.1f}"


def lost(rows: Sequence[results.Record]) -> list[list[str]]:
    """Configuration, what it lost against the first one in total and by PARTS, in % of the step, or "noise"."""
    noise, values = noise_of(rows), by_configuration(rows)
    names, body = ["total", *(f"lost/{part}" for part in PARTS)], []
    for c, of_c in values.items():
        if "efficiency" in of_c and "time/step" in of_c:
            shares, least = {**of_c, "total": 1 - of_c["efficiency"]}, noise.get(c, 0.0)
            body.append([c, *cells(shares, names, functools.partial(_percent, least=least))])
    return body


def noise_lines(rows: Sequence[results.Record]) -> Iterator[str]:
    """What "noise" in `lost` stands for, and which ratios are no difference."""
    differences = ", ".join(f"{c} ±{100 * share:.1f}" for c, share in noise_of(rows).items())
    if any(r["name"].startswith("lost/") for r in rows):
        known = f"noise: less than the rounds differ among themselves ({differences})"
        yield known if differences else "one round does not show what is noise: use --repeat 3"
    for r in measured(rows):
        if r["name"] == "ratio" and len(r.get("samples", ())) > 1 and r["low"] <= 1 <= r["high"]:
            speed = f"{r['value']:.2f} [{r['low']:.2f}, {r['high']:.2f}] times the samples/s"
            yield f"{r['configuration']} against {r.get('against')}: {speed}: noise, no difference"


def collectives(rows: Sequence[results.Record]) -> list[list[str]]:
    """Cells of COLLECTIVES."""
    body = []
    for r in measured(rows):
        kind, _, name = r["name"].partition("/")
        if kind == "collective":
            sent = in_unit(r["bytes"], "binary") if r.get("bytes") is not None else "-"
            body.append([r["configuration"], name, f"{r.get('calls', 0):g}", milliseconds(r["value"]), sent])
    return body


# ------------------------------------------------------------ the verb


def configurations_of(
    recipe: Recipe, counts: Sequence[int], *, weak: bool, scale_lr: bool, force: bool = False
) -> list[Configuration]:
    """The recipe for each number of processes. Raises UserError, in the terms of this verb where it has its own."""
    if recipe.layout.transport == "mpi":
        raise UserError("layout.transport=mpi: processes are started here without mpirun. Leave it out.")
    enough_devices(recipe.layout.device, counts[-1])
    for n in counts:
        if n % needed(recipe.layout):
            raise UserError(f"--processes {n}: this layout needs a multiple of {needed(recipe.layout)}.")
    recipes = {n: recipe_for(recipe, n, weak=weak, scale_lr=scale_lr) for n in counts}
    return [Configuration(named(n), r, {"processes": named(n)}, processes=n, force=force) for n, r in recipes.items()]


def named(n: int) -> str:
    return f"{n} process{'es' * (n > 1)}"


def notes(recipe: Recipe, configurations: Sequence[Configuration], warm_up: int) -> Iterator[str]:
    """Differences of the measurement from what the user asked for."""
    if recipe.layout.compress == "powersgd" and warm_up == POWERSGD_START + COUNTED_STEP:
        yield f"note: {warm_up} steps to warm up: PowerSGD begins after {POWERSGD_START}"
    for c in configurations:
        if sizes(recipe.layout, c.processes)["replicate"] == 1 and (left_out := without_replicas(recipe.layout)):
            yield f"note: {c.name}: one replica, so {', '.join(f'layout.{k}' for k in left_out)} left out"
    most, threads = configurations[-1].processes, configurations[-1].recipe.layout.threads
    if threads and most * threads > processors():
        share = f"{most} processes × {threads} threads share {processors()} processors"
        yield f"note: {share}: they keep each other waiting"


def scale(recipe: Recipe, counts: list[int], args: Any) -> Iterator[str]:
    """`gradus scale RECIPE --processes 1,2,4`. counts: of processes. Yields what is printed. Raises UserError."""
    refuse(args)
    folder = Path(args.to) if args.to else Path("scale") / recipe.name / time.strftime("%Y%m%d-%H%M%S")
    how = {"weak": args.weak, "scale_lr": args.scale_lr, "force": args.force}
    configurations = configurations_of(recipe, sorted(counts), **how)
    powersgd = recipe.layout.compress == "powersgd"
    warm_up = max(args.warmup, POWERSGD_START + COUNTED_STEP) if powersgd else args.warmup
    yield from notes(recipe, configurations, warm_up)
    if args.to_the_end or args.weak:
        configurations += [to_the_end(c) for c in configurations]
    kind = f"{recipe.name}, {'weak' if args.weak else 'strong'} scaling"
    study = Study(kind, configurations, args.steps, warm_up, args.repeat, collectives=True, strict=True)
    rows = run(study, folder, results.say, more=scaling_rows)
    batch = "the same batch for every process" if args.weak else "the same global batch"
    yield f"\n{kind} ({batch}): {recipe.layout.precision}, torch {torch.__version__}"
    yield from lines([row.known() for row in rows])
    yield f"\nrows: {folder / 'rows.jsonl'}; plots: gradus report {folder} --to DIR"


def refuse(args: Any) -> None:
    """Raises UserError for what the verb cannot do."""
    world = worlds.find()
    if world.size > 1:
        process = f"process {world.rank} of {world.size}"
        started = f"{world.launcher} started this already, as {process}"
        raise UserError(f"gradus scale: {started}. Start it without a launcher.")
    if any(word.startswith("log.dir=") for word in args.overrides):
        raise UserError("log.dir cannot take effect: what is measured goes to --to. Use --to DIR.")
    if args.warmup < COUNTED_STEP:
        raise UserError(f"--warmup {args.warmup}: must be at least {COUNTED_STEP}, for what the first steps set up.")
    if args.scale_lr and not args.weak:
        raise UserError("--scale-lr: without --weak the global batch stays, and its learning rate too. Add --weak.")


def to_the_end(c: Configuration) -> Configuration:
    """The whole training of a configuration, once."""
    name = c.name + TO_THE_END
    return dataclasses.replace(c, name=name, at={"processes": name}, runner="train", rounds=1)
