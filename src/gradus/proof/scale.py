"""Is it worth more processes? One recipe trained on 1, 2, 4, ... of them: speed, efficiency, and where the rest of it goes, by name.

Strong scaling keeps the global batch; weak scaling keeps the batch of a process. `timing` says what the parts of a step are.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus.errors import UserError
from gradus.hardware.tables import table as columns
from gradus.limits import processors
from gradus.measure.collectives import BYTES, shown
from gradus.parallel import world as worlds
from gradus.parallel.mesh import DATA, needed, sizes
from gradus.parallel.replicate import POWERSGD_START
from gradus.proof import results
from gradus.proof.study import Configuration, Notebook, Study, middle_of, run
from gradus.proof.timing import PARTS, Timed
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row
from gradus.train.metrics import COUNTED_STEP
from gradus.train.precision import enough_devices, pick_device

SHOWN = ("samples_per_s", "speed_up", "efficiency", "time/step", "memory/process", "memory/device", "traffic/sent", "loss")
TO_THE_END = ", to the end"
RIGHT = set(range(1, 7))  # columns aligned to the right


def recipe_for(recipe: Recipe, n: int, *, weak: bool = False, scale_lr: bool = False) -> Recipe:
    """The recipe as n processes train it: the same (strong), or with the recipe's batch for every process that sees samples of its own.

    Weak: what is counted in steps is divided by their number k; the learning rate stays, or is multiplied by k with `scale_lr` (Goyal et al.
    2017, section 2.1). What a layout cannot do with one replica is left out for one. On a CPU every process has `layout.threads` threads,
    else 1.
    """
    layout, changes = recipe.layout, {}
    if layout.threads is None and pick_device(layout.device).type == "cpu":
        changes["threads"] = 1
    arranged = sizes(layout, n)
    if arranged["replicate"] == 1:
        changes |= without_replicas(layout)
    r = recipe.model_copy(update={"layout": layout.model_copy(update=changes)})
    k = math.prod(arranged[axis] for axis in DATA)
    if not weak or k == 1:
        return r

    def fewer(section: Any, *keys: str) -> Any:
        return section.model_copy(update={key: max(1, round(n / k)) for key in keys if (n := getattr(section, key))})

    rate = r.optimizer.lr * (k if scale_lr else 1)
    # its peak is proportional to warmup_steps^-0.5: without this, fewer of them would raise it
    if r.schedule.name == "noam":
        rate /= math.sqrt(k)
    batch = {key: n * k for key in ("samples", "tokens") if (n := getattr(r.batch, key))}
    sections = {"batch": r.batch.model_copy(update=batch), "optimizer": r.optimizer.model_copy(update={"lr": rate})}
    sections |= {"train": fewer(r.train, "steps", "checkpoint_every"), "evaluate": fewer(r.evaluate, "every")}
    return r.model_copy(update={**sections, "schedule": fewer(r.schedule, "warmup_steps", "end_step")})


def without_replicas(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that have nothing to do where there is one replica, as they are then."""
    kept = layout.replicate in ("auto", "none", "data_parallel")  # the last is one process by itself
    plain = {"replicate": layout.replicate if kept else "auto", "shard_optimizer": False, "local_sgd": None}
    return {k: v for k, v in {**plain, "diloco": None}.items() if getattr(layout, k) != v}


# ------------------------------------------------------------ from times to figures


def parts_of(ranks: Sequence[Timed]) -> dict[str, float] | None:
    """Seconds of the mean step by PARTS: means over the processes, which add up to the step. None where nothing tells them."""
    spent = np.array([t.spent for t in ranks])  # (processes, steps, 4)
    step = max(t.elapsed for t in ranks) / spent.shape[1]
    data, computing, ready, _ = spent.mean(axis=(0, 1)).tolist()
    if ranks[0].facts["device"] != "cpu":
        if any(t.kernels is None for t in ranks):
            return None
        computing, communication = np.mean([t.kernels for t in ranks], axis=0).tolist()
        return dict(zip(PARTS, (computing, communication, 0.0, data, step - computing - communication - data)))
    if len(ranks) == 1:
        return dict(zip(PARTS, (computing, 0.0, 0.0, data, step - computing - data)))
    communication = float(spent[:, :, 3].min(axis=0).mean())
    return dict(zip(PARTS, (computing, communication, step - computing - communication - data - ready, data, ready)))


def work(ranks: Sequence[Timed], base: Sequence[Timed]) -> float:
    """A process's samples a step, against the base's: 1/2 with twice the processes (strong), 1 (weak)."""
    return ranks[0].samples * len(base) / (base[0].samples * len(ranks))


def lost(ranks: Sequence[Timed], base: Sequence[Timed]) -> dict[str, float] | None:
    """Where the rest of the efficiency goes: name → share of the step. They add up to 1 - efficiency.

    Against the base's parts in the ideal step: with strong scaling divided by the ratio of processes, with weak scaling as they are.
    """
    parts, ideal = parts_of(ranks), parts_of(base)
    if parts is None or ideal is None:
        return None
    return {name: (parts[name] - ideal[name] * work(ranks, base)) / sum(parts.values()) for name in PARTS}


def collectives_of(ranks: Sequence[Timed]) -> dict[str, tuple[float, float, float | None]]:
    """Collective → (calls, seconds, bytes that a process sends) a step, means over the processes."""
    timed, sent = [t.collectives or {} for t in ranks], ranks[0].sent or {}
    names = sorted({name for t in timed for name in t})
    mean = {name: np.mean([t.get(name, (0.0, 0.0)) for t in timed], axis=0).tolist() for name in names}
    return {name: (*mean[name], sent.get(name, (0, None))[1]) for name in names}


def own_rows(study: Study, notebook: Notebook) -> Iterator[Row]:
    """Speed-up and efficiency, the parts of a step, what was lost and collectives, beside the rows of every study."""
    found = [(c, samples) for c in study.configurations if (samples := [s for s in notebook.samples[c.name] if not s.failed])]
    for of, speed in (("steps", "samples_per_s"), ("train", "time/run")):
        some = [(c, middle_of(samples), samples[-1].ranks) for c, samples in found if c.runner == of]
        speeds = {c.name: statistics.median(s.values[speed][0] for s in samples) for c, samples in found if c.runner == of}
        for _, sample, last in some:
            for t, profiled in zip(sample.ranks, last):
                t.kernels = profiled.kernels
        for c, sample, last in some:
            base, its, _ = some[0]
            about = {"kind": "measured", "configuration": c.name, "processes": c.processes, "against": base.name, **notebook.common}
            ratio = speeds[c.name] / speeds[base.name]
            ratio = ratio if of == "steps" else 1 / ratio
            yield Row("speed_up", ratio, "", None, about)
            yield Row("efficiency", ratio * base.processes / c.processes, "", None, about)
            if last:
                yield from (Row(f"time/step/{name}", t, "s", None, about) for name, t in (parts_of(sample.ranks) or {}).items())
                shares = lost(sample.ranks, its.ranks) if c is not base else None
                yield from (Row(f"lost/{name}", share, "of the step", None, about) for name, share in (shares or {}).items())
            for name, (calls, t, b) in collectives_of(last).items() if last else ():
                yield Row(f"collective/{name}", t, "s", None, {**about, "calls": calls, "bytes": b, "of": "a step, from start to end"})


# ------------------------------------------------------------ what is shown


def ms(seconds: float) -> str:
    value = max(0.0, seconds * 1e3)  # clocks differ by microseconds
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def noise_of(rows: Sequence[results.Record]) -> dict[str, float]:
    """Configuration → by what share of a step the rounds differ among themselves: half of the range, its own or the first configuration's."""
    steps = [r for r in rows if r["name"] == "time/step" and r["kind"] == "measured" and len(r["samples"]) > 1]
    own = {r["configuration"]: (r["high"] - r["low"]) / 2 / r["value"] for r in steps}
    first = next(iter(own.values()), 0.0)
    return {c: max(share, first) for c, share in own.items()}


def lines(rows: Sequence[results.Record]) -> Iterator[str]:
    """The figures of all numbers of processes, for a terminal."""
    steps = [r for r in rows if TO_THE_END not in r["configuration"]]
    yield from results.lines(steps, SHOWN)
    of: dict[str, dict[str, Any]] = {}
    for r in rows:
        if r["kind"] == "measured":
            of.setdefault(r["configuration"], {})[r["name"]] = r["value"]
    names, parts = [c for c in of if TO_THE_END not in c and "time/step" in of[c]], list(PARTS)

    def cells(shape: Callable[[float], str], found: dict[str, Any], keys: Sequence[str]) -> list[str]:
        return [shape(found[key]) if key in found else "-" for key in keys]

    spread = noise_of(steps)
    if names and "time/step/data" in of[names[0]]:
        yield "\na step in ms, mean over the processes; the parts add up to it:"
        body = [[c, *cells(ms, of[c], ["time/step", *(f"time/step/{p}" for p in parts)])] for c in names]
        yield from columns(["configuration", "step", *parts], body, RIGHT)
        yield f"\nlost against {names[0]}, in % of the step:"
        body = []
        for c in names:
            share = lambda value, least=spread.get(c, 0.0): "noise" if 0 < abs(value) < least else f"{100 * value:+.1f}"  # noqa: E731
            body.append([c, share(1 - of[c]["efficiency"]), *cells(share, of[c], [f"lost/{p}" for p in parts])])
        yield from columns(["configuration", "in total", *parts], body, RIGHT)
        differ = ", ".join(f"{c} ±{100 * spread[c]:.1f}" for c in names if c in spread)
        yield f"noise: less than the rounds differ among themselves ({differ})" if differ else "one round does not show what is noise: use --repeat 3"
    elif names:
        yield "\nno parts of a step: this device has no clocks for them"
    calls = [r for r in steps if r["name"].startswith("collective/")]
    if calls:
        yield "\ncollectives per step, profiled separately: ms from start to end, the wait for others included;"
        yield "some may overlap with computing:"
        sent = lambda r: shown(r["bytes"], BYTES) if "bytes" in r else "-"  # noqa: E731
        body = [[r["configuration"], r["name"].removeprefix("collective/"), f"{r['calls']:g}", ms(r["value"]), sent(r)] for r in calls]
        yield from columns(["configuration", "collective", "calls", "ms", "sent"], body, {2, 3, 4})
    for r in (r for r in steps if r["name"] == "ratio" and len(r["samples"]) > 1 and r["low"] <= 1 <= r["high"]):
        yield f"\n{r['configuration']} against {r['against']}: {r['value']:.2f} [{r['low']:.2f}, {r['high']:.2f}] times the samples/s: noise, no difference"
    if whole := [r for r in rows if TO_THE_END in r["configuration"]]:
        yield "\ntrained to the end, once; seconds without evaluation and checkpoints:"
        metrics = dict.fromkeys(r["name"] for r in whole if r["name"].startswith(("valid/", "test/")))
        yield from list(results.lines(whole, ["time/run", "speed_up", "efficiency", "samples_per_s", "train/loss", *metrics]))[:-1]


# ------------------------------------------------------------ the verb


def examine(recipe: Recipe, counts: Sequence[int], *, weak: bool, scale_lr: bool, force: bool = False) -> list[Configuration]:
    """The recipe for each number of processes. Raises UserError, in the terms of this verb where it has its own."""
    if recipe.layout.transport == "mpi":
        raise UserError("layout.transport=mpi: processes are started here without mpirun. Leave it out.")
    enough_devices(recipe.layout.device, counts[-1])
    for n in counts:
        if n % needed(recipe.layout):
            raise UserError(f"--processes {n}: this layout needs a multiple of {needed(recipe.layout)}.")
    made = [(n, recipe_for(recipe, n, weak=weak, scale_lr=scale_lr)) for n in counts]
    return [Configuration(named(n), r, {"processes": named(n)}, processes=n, force=force) for n, r in made]


def named(n: int) -> str:
    return f"{n} process{'es' * (n > 1)}"


def notes(recipe: Recipe, made: Sequence[Configuration], warm_up: int) -> Iterator[str]:
    """In what the measurement is not what was asked for."""
    if recipe.layout.compress == "powersgd" and warm_up == POWERSGD_START + COUNTED_STEP:
        yield f"note: {warm_up} steps to warm up: PowerSGD begins after {POWERSGD_START}"
    for c in made:
        if sizes(recipe.layout, c.processes)["replicate"] == 1 and (left_out := without_replicas(recipe.layout)):
            yield f"note: {c.name}: one replica, so {', '.join(f'layout.{k}' for k in left_out)} left out"
    most, threads = made[-1].processes, made[-1].recipe.layout.threads
    if threads and most * threads > processors():
        yield f"note: {most} processes × {threads} threads share {processors()} processors: they keep each other waiting"


def scale(recipe: Recipe, counts: list[int], args: Any) -> Iterator[str]:
    """`gradus scale RECIPE --processes 1,2,4`. counts: of processes. Yields what is printed. Raises UserError."""
    world = worlds.find()
    if world.size > 1:
        place = f"process {world.rank} of {world.size}"
        raise UserError(f"gradus scale: {world.launcher} started this already, as {place}. Start it without a launcher.")
    if any(word.startswith("log.dir=") for word in args.overrides):
        raise UserError("log.dir cannot take effect: what is measured goes to --to. Use --to DIR.")
    if args.warmup < COUNTED_STEP:
        raise UserError(f"--warmup {args.warmup}: must be at least {COUNTED_STEP}, for what the first steps set up.")
    if args.scale_lr and not args.weak:
        raise UserError("--scale-lr: without --weak the global batch stays, and its learning rate too. Add --weak.")
    folder = Path(args.to) if args.to else Path("scale") / recipe.name / time.strftime("%Y%m%d-%H%M%S")
    made = examine(recipe, sorted(counts), weak=args.weak, scale_lr=args.scale_lr, force=args.force)
    warm_up = max(args.warmup, POWERSGD_START + COUNTED_STEP) if recipe.layout.compress == "powersgd" else args.warmup
    yield from notes(recipe, made, warm_up)
    if args.to_the_end or args.weak:
        whole = [(c.name + TO_THE_END, c) for c in made]
        made += [Configuration(name, c.recipe, {"processes": name}, "train", c.processes, rounds=1, force=args.force) for name, c in whole]
    kind = f"{recipe.name}, {'weak' if args.weak else 'strong'} scaling"
    study = Study(kind, made, args.steps, warm_up, args.repeat, collectives=True, strict=True)
    rows = run(study, folder, results.say, more=own_rows)
    kept = "the same batch for every process" if args.weak else "the same global batch"
    yield f"\n{kind} ({kept}): {recipe.layout.precision}, torch {torch.__version__}"
    yield from lines([row.known() for row in rows])
    yield f"\nrows: {folder / 'rows.jsonl'}; plots: gradus report {folder} --to DIR"
