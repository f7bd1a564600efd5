"""The largest micro-batch that fits, found by the plan and confirmed by one step; and studies of micro-batches and of workers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError
from gradus.hardware.units import quantity
from gradus.parallel import check
from gradus.parallel.mesh import needed
from gradus.parallel.processes import run_group
from gradus.parallel.world import World
from gradus.plan import batches
from gradus.plan.engine import Memory
from gradus.plan.show import size
from gradus.proof import results
from gradus.proof.measured import memory_of_step
from gradus.proof.pairs import Pair, signed
from gradus.proof.room import Room, changed, fix_of, largest_micro_batch, room_of, share_of, with_micro_batch
from gradus.proof.study import Configuration, Study, run, steady
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.train import machine
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.session import open_for, open_session

TIMED, WARM_UP, ROUNDS = 8, 3, 3  # of a study: steps of a round, steps before them, rounds
MOST = 2**16  # samples of a micro-batch that are asked for


def fit(recipe: Recipe, args: Any) -> Iterator[str]:
    """`gradus fit RECIPE`. Yields what is printed. Raises UserError."""
    asked = [word for word, value in (("--sweep", args.sweep), ("--workers", args.workers), ("--memory", args.memory)) if value is not None]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} are different questions. Give one of them.")
    n = needed(recipe.layout)
    session = open_for(recipe, n)
    with tempfile.TemporaryDirectory() as folder:
        if args.sweep is not None or args.workers is not None:
            study, columns = sweep(session.recipe, n, args.sweep) if args.sweep is not None else workers(session.recipe, n, args.workers)
            rows = run(study, Path(folder) / "study", results.quiet if args.json else results.say)
            lines = ["", *results.lines([row.known() for row in rows], columns)]
        else:
            room = room_of(session, local=n)
            own = room.budget
            if args.memory is not None:
                room.budget = parse_size(args.memory)
            rows, lines = largest(session.recipe, room, own, folder)
    yield from (row.json() for row in rows) if args.json else lines


def sweep(recipe: Recipe, n: int, wanted: str) -> tuple[Study, Sequence[str]]:
    """Speed and memory at every micro-batch, each a batch by itself, beside the plan; and the columns to show."""
    every = limits.numbers(wanted, "--sweep", most=MOST)
    made = [Configuration(f"micro-batch {k}", steady(with_micro_batch(recipe, k, n, 0), n), {"micro_batch": str(k)}, processes=n) for k in every]
    return Study(f"{recipe.name}: micro-batches", made, TIMED, WARM_UP, ROUNDS), ("samples_per_s", "ratio", "time/step", "memory/allocated", "memory/process", "memory/device")


def workers(recipe: Recipe, n: int, wanted: str) -> tuple[Study, Sequence[str]]:
    """Speed of the loader alone and of training with it, and the share of training that waits for data; and the columns to show."""
    every = limits.numbers(wanted, "--workers", 0, limits.WORKERS)
    made = [
        Configuration(f"{k} workers · {what}", steady(changed(recipe, data={"workers": k}), n), {"workers": str(k), "what": what}, runner, n)
        for k in every
        for what, runner in (("loader alone", "loader"), ("training", "steps"))
    ]
    return Study(f"{recipe.name}: data.workers", made, TIMED, WARM_UP, ROUNDS, against=str(every[0]), plan=False), ("samples_per_s", "ratio", "data_wait")


def parse_size(text: str) -> int:
    """`8GiB`, `8GB`, `500 MB` → bytes. Raises UserError."""
    try:
        return int(quantity(text, "bytes"))
    except ValueError as e:
        raise UserError(f"--memory: {e} Write for example 8GiB (2^30 bytes each) or 8GB (10^9).") from None


# ---------------------------------------------------------------- what is measured, in a process of its own


def measured_step(recipe: Recipe, folder: str, here: World) -> dict[str, float]:
    """Bytes at the peak of one step of the largest batch, the optimizer's state there already.

    need: of a GPU all that is taken of it; of a CPU the resident memory of the process, before the profiler that counts its tensors.
    """
    session = open_session(recipe, None, here)
    before = machine.resident()
    trainer = Trainer(session, session.lay_out(), Path(folder))
    micro_batches = batches.micro_batches(session.recipe, here.size, task=session.task)
    for _ in range(2):
        trainer.step(micro_batches)
    process = peak_memory(session.device)
    with memory_of_step(trainer, micro_batches) as found:
        trainer.step(micro_batches)
    return {**found, "resident": before, "need": found.get("device", process)}


def run_apart(n: int, function: Callable, recipe: Recipe, folder: str, *more: Any) -> dict[str, float] | str:
    """The largest of what each process found, by name; where they did not come to an end, why."""
    try:
        found = run_group(n, function, recipe, folder, *more, log=Path(folder) / "log")
    except UserError as e:
        return str(e)
    return {key: max(f[key] for f in found) for key in found[0]}


# ---------------------------------------------------------------- rows and lines


def measures(memory: Memory, told: dict[str, float] | None, room: Room) -> list[Pair]:
    """What of memory was planned, and measured: on a CPU the step's tensors and the process, of a GPU all that it shows."""
    whole = Pair("device" if room.target == "cuda" else "process", "bytes", memory.device_total, told and told["need"])
    return [whole] if room.target == "cuda" else [Pair("tensors", "bytes", memory.allocated, told and told["allocated"]), whole]


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
    memory = functools.cache(lambda k: room.memory(with_micro_batch(recipe, k, room.n, share)))

    def need(k: int) -> int:
        return memory(k).device_total

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
        takes = f"{said(measures(memory(1), None, room))} of {size(room.budget)}"
        return rows, [f"not even one sample fits: {takes}. {fix_of(recipe, room)}."]
    traces, chosen, needs = memory.cache_info().currsize, with_micro_batch(recipe, found, room.n, share), need(found)
    add("predicted", "micro_batch", found, "samples", traces=traces)
    add("predicted", "need", needs, "bytes", micro_batch=found, peak=memory(found).allocated)
    keys = f"batch.samples={chosen.batch.samples} " * (found > share) + f"layout.micro_batch={found}"
    beyond = f" (more than its {share})" if found > share else " (its whole batch)" * (found == share)
    spare = f"{size(room.budget - needs)} ({1 - needs / room.budget:.1%}) to spare"
    lines = [f"{keys}{beyond}: {said(measures(memory(found), None, room))} of {size(room.budget)} by the plan, {spare}; {traces} traces"]
    if found == most:
        lines.append("larger ones were not tried: this is all the data" if most > share else "larger ones were not tried: this is the recipe's whole batch")
    if needs > own:
        return rows, [*lines, f"not confirmed: this machine has {size(own)} per process"]
    check.validate(chosen, room.n)
    told = run_apart(room.n, measured_step, chosen, folder)
    if isinstance(told, str):
        return rows, [*lines, f"NOT confirmed: one step of it failed: {told}"]
    add("measured", "need", told["need"], "bytes", micro_batch=found, peak=told["allocated"], resident=told["resident"])
    verdict, left = ("confirmed", "to spare") if told["need"] <= room.budget else ("did not fit: use a smaller one", "too much")
    takes = f"{said(measures(memory(found), told, room))}, {size(abs(room.budget - told['need']))} {left}"
    return rows, [*lines, f"{verdict} by one step: {takes}" if left == "to spare" else f"{verdict}: one step took {takes}"]

