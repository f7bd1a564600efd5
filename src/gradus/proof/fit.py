"""The largest micro-batch that fits, found by the plan and confirmed by one step; and sweeps that measure speed and memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError
from gradus.hardware.tables import table as columns
from gradus.measure.profile import endless
from gradus.measure.workers import start
from gradus.parallel import check
from gradus.parallel.mesh import needed
from gradus.parallel.world import World
from gradus.plan import batches
from gradus.plan.show import size
from gradus.proof.measured import memory_of_step
from gradus.proof.pairs import Pair, signed
from gradus.proof.room import Room, changed, fix_of, largest_micro_batch, resident, room_of, share_of, with_micro_batch
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.session import Session, open_for, open_session

TIMED, WARM_UP = 8, 3  # steps of a sweep
LOADED, ROUNDS = 2.0, 5  # s for which a loader alone is timed; in so many rounds, whose median counts
MOST = 2**16  # samples of a micro-batch that are asked for


def fit(recipe: Recipe, args: Any) -> Iterator[str]:
    """`gradus fit RECIPE`. Yields what is printed. Raises UserError."""
    if args.sweep is not None and args.workers is not None:
        raise UserError("--sweep and --workers are different questions. Give one of them.")
    n = needed(recipe.layout)
    session = open_for(recipe, n)
    room = room_of(session, local=n)
    own = room.budget
    if args.memory is not None:
        room.budget = parse_size(args.memory)
    with tempfile.TemporaryDirectory() as folder:
        if args.sweep is not None:
            rows, lines = sweep(session.recipe, room, limits.numbers(args.sweep, "--sweep", most=MOST), folder)
        elif args.workers is not None:
            rows, lines = workers(session.recipe, room, limits.numbers(args.workers, "--workers", 0, limits.WORKERS), folder)
        else:
            rows, lines = largest(session.recipe, room, own, folder)
    yield from (row.json() for row in rows) if args.json else lines


def parse_size(text: str) -> int:
    """`8GiB`, `8GB`, `500 MB` → bytes. Raises UserError."""
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].lower() not in units or not 0 < float(found[1]) * units[found[2].lower()] < 1e18:
        raise UserError(f"--memory {text}: not a size. Write for example 8GiB (2^30 bytes each) or 8GB (10^9).")
    return int(float(found[1]) * units[found[2].lower()])


# ---------------------------------------------------------------- what is measured, in a process of its own


def measured_step(recipe: Recipe, folder: str, timed: bool, here: World) -> dict[str, float]:
    """Bytes at the peak of one step of the largest batch, the optimizer's state there already; timed: also what `times` tells.

    need: of a GPU all that is taken of it; of a CPU the resident memory of the process, before the profiler that counts its tensors.
    """
    session = open_session(recipe, None, here)
    before = resident()
    trainer = Trainer(session, session.lay_out(), Path(folder))
    micro_batches = batches.micro_batches(session.recipe, here.size, task=session.task)
    for _ in range(2):
        trainer.step(micro_batches)
    process = peak_memory(session.device)
    with memory_of_step(trainer, micro_batches) as found:
        trainer.step(micro_batches)
    return {**found, "resident": before, "need": found.get("device", process), **(times(trainer) if timed else {})}


def times(trainer: Trainer) -> dict[str, float]:
    """Samples/s of the run's own steps, and the share of their time that was spent waiting for data."""
    spent, waits = [], []
    with contextlib.closing(trainer.loader) as loader:
        began, wait = time.perf_counter(), loader.wait_s
        for step in itertools.islice(endless(loader), WARM_UP + TIMED):
            trainer.take(step)
            trainer.clock.synchronise()
            now = time.perf_counter()
            spent.append((now - began) / step.samples)
            waits.append(loader.wait_s - wait)
            began, wait = now, loader.wait_s
    second = statistics.median(spent[WARM_UP:])
    step_samples = trainer.progress.samples / trainer.progress.step
    return {"samples_per_s": 1 / second, "waited": statistics.mean(waits[WARM_UP:]) / (second * step_samples)}


def load_alone(recipe: Recipe, folder: str, here: World) -> dict[str, float]:
    """Samples/s of the loader with nobody to train, after its first batches."""
    return {"samples_per_s": loader_speed(open_session(recipe, None, here))}


def loader_speed(session: Session, seconds: float = LOADED) -> float:
    """Samples/s of the recipe's loader, what was fetched beforehand left out: the median of ROUNDS rounds, about so many seconds in all."""
    data = session.recipe.data
    with contextlib.closing(session.loader(data)) as loader:
        steps = endless(loader)
        for _ in range(1 + data.workers * data.prefetch):
            next(steps)
        speeds, end = [], time.perf_counter() + seconds
        while not speeds or time.perf_counter() < end:
            began, samples = time.perf_counter(), 0
            while not samples or time.perf_counter() - began < seconds / ROUNDS:
                samples += next(steps).samples
            speeds.append(samples / (time.perf_counter() - began))
        return statistics.median(speeds)


def run_apart(n: int, function: Callable, recipe: Recipe, folder: str, *more: Any) -> dict[str, float] | str:
    """The largest of what each process found, by name; where they did not come to an end, why."""
    try:
        found = start(n, function, recipe, folder, *more, log=Path(folder) / "log")
    except UserError as e:
        return str(e)
    return {key: max(f[key] for f in found) for key in found[0]}


# ---------------------------------------------------------------- rows and lines


def measures(need: float, told: dict[str, float] | None, room: Room) -> list[Pair]:
    """What of memory was planned, and measured: on a CPU the step's tensors and the process, of a GPU all that it shows."""
    whole = Pair("device" if room.target == "cuda" else "process", "bytes", need, told and told["need"])
    return [whole] if room.target == "cuda" else [Pair("tensors", "bytes", need - room.resident, told and told["allocated"]), whole]


def said(found: Sequence[Pair]) -> str:
    """'tensors 1 GB, process 2 GB' as planned, or as measured with the plan's error."""
    words = (size(f.predicted) if f.measured is None else f"{size(f.measured)} (planned {signed(f.error)})" for f in found)
    return ", ".join(f"{f.name} {text}" for f, text in zip(found, words))


def adder(rows: list[Row], recipe: Recipe, room: Room, **conditions: Any) -> Callable[..., None]:
    """What adds to the rows one of this recipe: add("predicted" or "measured", name, value, unit, more conditions)."""
    about = {"recipe": recipe.name, "device": room.target, "precision": recipe.layout.precision, "processes": room.n}
    about |= {"resident": room.resident, **conditions}

    def add(kind: str, name: str, value: float, unit: str, **more: Any) -> None:
        rows.append(Row(f"fit/{name}", value, unit, None, {**about, **more, "kind": kind}))

    return add


def largest(recipe: Recipe, room: Room, own: int, folder: str) -> tuple[list[Row], list[str]]:
    share = share_of(recipe, room.n, room.task)
    need = functools.cache(lambda k: room.need(with_micro_batch(recipe, k, room.n, share)))
    most = share if recipe.batch.samples is None else min(MOST, max(share, len(room.task.splits["train"]) // room.n))
    found = largest_micro_batch(recipe, room, share, need)
    if found == share and most > share:
        limit = share  # double until it does not fit, so that nothing huge is traced for nothing
        while limit < most and need(limit) <= room.budget:
            limit = min(most, 2 * limit)
        found = largest_micro_batch(recipe, room, limit, need)
    rows: list[Row] = []
    add = adder(rows, recipe, room, budget=room.budget)
    if found is None:
        add("predicted", "micro_batch", 0, "samples")
        takes = f"{said(measures(need(1), None, room))} of {size(room.budget)}"
        return rows, [f"not even one sample fits: {takes}. {fix_of(recipe, room)}."]
    traces, chosen, needs = need.cache_info().currsize, with_micro_batch(recipe, found, room.n, share), need(found)
    add("predicted", "micro_batch", found, "samples", traces=traces)
    add("predicted", "need", needs, "bytes", micro_batch=found)
    keys = f"batch.samples={chosen.batch.samples} " * (found > share) + f"layout.micro_batch={found}"
    beyond = f" (more than its {share})" if found > share else " (its whole batch)" * (found == share)
    spare = f"{size(room.budget - needs)} ({1 - needs / room.budget:.1%}) to spare"
    lines = [f"{keys}{beyond}: {said(measures(needs, None, room))} of {size(room.budget)} by the plan, {spare}; {traces} traces"]
    if found == most:
        lines.append("more does not make a batch: that is all the data" if most > share else "more does not make a batch of this recipe")
    if needs > own:
        return rows, [*lines, f"not confirmed: this machine has {size(own)} a process"]
    check.validate(chosen, room.n)
    told = run_apart(room.n, measured_step, chosen, folder, False)
    if isinstance(told, str):
        return rows, [*lines, f"NOT confirmed: one step of it failed: {told}"]
    add("measured", "need", told["need"], "bytes", micro_batch=found, peak=told["allocated"], resident=told["resident"])
    verdict, left = ("confirmed", "to spare") if told["need"] <= room.budget else ("NOT confirmed", "too much: take a smaller one")
    takes = f"{said(measures(needs, told, room))}, {size(abs(room.budget - told['need']))}"
    return rows, [*lines, f"{verdict} by one step: {takes} {left}"]


def sweep(recipe: Recipe, room: Room, wanted: Sequence[int], folder: str) -> tuple[list[Row], list[str]]:
    """Samples/s and memory at every micro-batch, each a batch by itself, beside the plan."""
    body, rows = [], []
    for k in wanted:
        of_k = with_micro_batch(recipe, k, room.n, 0)
        add = adder(rows, recipe, room, micro_batch=k, batch_samples=of_k.batch.samples)
        need, step = room.need(of_k), room.step_time(of_k)
        add("predicted", "need", need, "bytes")
        if step:
            add("predicted", "samples_per_s", of_k.batch.samples / step, "samples/s")
        told = run_apart(room.n, measured_step, of_k, folder, True) if need <= room.budget else "does not fit"
        expected, speed, why = f"{of_k.batch.samples / step:,.1f}" if step else "-", "-", told
        if not isinstance(told, str):
            add("measured", "samples_per_s", told["samples_per_s"], "samples/s", steps=TIMED)
            add("measured", "need", told["need"], "bytes", peak=told["allocated"], resident=told["resident"])
            speed, why = f"{told['samples_per_s']:,.1f}", ""
        cells = (cell for pair in measures(need, None if why else told, room) for cell in pair.cells())
        body.append((str(k), expected, speed, *cells, why[:60]))
    memory = [head for pair in measures(0, None, room) for head in (f"{pair.name} planned", "measured", "error")]
    head = ("micro-batch", "samples/s planned", "measured", *memory, "")
    return rows, [f"{recipe.name}: {TIMED} steps each after {WARM_UP}; memory at the peak", *columns(head, body)]


def workers(recipe: Recipe, room: Room, wanted: Sequence[int], folder: str) -> tuple[list[Row], list[str]]:
    """Samples/s of the loader alone and of training with it, and the share of training that waits for data."""
    body, rows = [], []
    for k in wanted:
        with_workers = changed(recipe, data={"workers": k})
        alone = run_apart(1, load_alone, with_workers, folder) if room.n == 1 else "-"
        told = run_apart(room.n, measured_step, with_workers, folder, True)
        if isinstance(told, str):
            body.append((str(k), "-", "-", told[:60]))
            continue
        add, speed = adder(rows, recipe, room, workers=k), "-"
        if not isinstance(alone, str):
            add("measured", "loader_samples_per_s", alone["samples_per_s"], "samples/s")
            speed = f"{alone['samples_per_s']:,.1f}"
        add("measured", "samples_per_s", told["samples_per_s"], "samples/s")
        add("measured", "data_wait", told["waited"], "of the step")
        body.append((str(k), speed, f"{told['samples_per_s']:,.1f}", f"{told['waited']:.1%}"))
    head = ("workers", "loader alone, samples/s", "training, samples/s", "waits for data")
    return rows, [f"{recipe.name}: data.workers", *columns(head, body)]
