"""The largest micro-batch that fits, found by the plan and confirmed by one step; and a study of micro-batches."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from gradus import limits, models
from gradus.errors import UserError
from gradus.hardware.units import quantity
from gradus.parallel import check
from gradus.parallel.mesh import needed
from gradus.parallel.processes import run_group
from gradus.parallel.world import World, meet
from gradus.plan import batches
from gradus.plan.process import Memory
from gradus.proof import results
from gradus.proof.harness import run
from gradus.proof.memory_budget import (
    MemoryBudget,
    budget_of,
    changed,
    largest_micro_batch,
    local_batch,
    suggested_fix,
    with_micro_batch,
)
from gradus.proof.pairs import Pair, signed
from gradus.proof.step_memory import memory_of_step
from gradus.proof.study import Configuration, Study, with_fixed_threads
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.text import size
from gradus.train import machine
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.session import open_for, open_session

TIMED, WARM_UP, ROUNDS = 8, 3, 3  # of a study: steps of a round, steps before them, rounds
MOST = 2**16  # samples of a micro-batch that are tried
SPARE = 0.2  # of a host's free memory: for the system, for other programs and for the plan's error
SWEEP_COLUMNS = ("samples_per_s", "ratio", "time/step", "memory/allocated", "memory/process", "memory/device")


def fit(recipe: Recipe, args: Any) -> Generator[str, None, int]:
    """`gradus fit RECIPE`. Yields what is printed; returns the exit code. Raises UserError."""
    if args.sweep is not None and args.memory is not None:
        raise UserError("--sweep and --memory are different questions. Give one of them.")
    models.check_built(recipe.model)
    n = needed(recipe.layout)
    session = open_for(recipe, n)
    with tempfile.TemporaryDirectory() as folder:
        if args.sweep is not None:
            say = results.quiet if args.json else results.say
            rows = run(sweep(session.recipe, n, args.sweep), Path(folder) / "study", say)
            lines = ["", *results.lines([row.known() for row in rows], SWEEP_COLUMNS)]
        else:
            budget = budget_of(session, local_processes=n)
            budget.available, said = free_now(budget)
            capacity = budget.available
            if args.memory is not None:
                budget.available, said = parse_size(args.memory), []
            rows, lines = largest(session.recipe, budget, capacity, folder)
            lines = [*said, *lines]
    yield from (row.json() for row in rows) if args.json else lines
    return 0 if args.sweep is not None or rows[0].value else 2  # not even one sample fits


def free_now(budget: MemoryBudget) -> tuple[int, list[str]]:
    """(bytes that each process may take, lines that say so): of a GPU all that it has, and running out of it is an
    error; of a host what is free now, less a part, since Linux kills a program where no memory is left."""
    free = machine.free_bytes() if budget.target == "cpu" else None
    if free is None:
        return budget.available, []
    usable = min(budget.available, int(free * (1 - SPARE)) // budget.local_processes)
    each = f": {size(usable)} for each of {budget.local_processes} processes" if budget.local_processes > 1 else ""
    return usable, [f"{size(free)} of memory are free now; {SPARE:.0%} of it is left to other programs{each}"]


def sweep(recipe: Recipe, n: int, text: str) -> Study:
    """Speed and memory at every micro-batch, each a batch by itself, beside the plan."""
    configurations = []
    for k in limits.numbers(text, "--sweep", most=MOST):
        recipe_of_k = with_fixed_threads(with_micro_batch(recipe, k, n, 0), n)
        configurations.append(Configuration(f"micro-batch {k}", recipe_of_k, {"micro_batch": str(k)}, processes=n))
    return Study(f"{recipe.name}: micro-batches", configurations, TIMED, WARM_UP, ROUNDS)


def parse_size(text: str) -> int:
    """`8GiB`, `8GB`, `500 MB` → bytes. Raises UserError."""
    try:
        return int(quantity(text, "bytes"))
    except ValueError as e:
        example = "Write for example 8GiB (2^30 bytes each) or 8GB (10^9)."
        raise UserError(f"--memory: {e} {example}") from None


# ---------------------------------------------------------------- what is measured, in a process of its own


def measured_step(recipe: Recipe, folder: str, world: World) -> dict[str, float]:
    """Bytes at the peak of one step of the largest batch, the optimizer's state there already.

    need: of a GPU all that is used of it; of a CPU the resident memory of the process, before the profiler that counts
    its tensors.
    """
    meet(world, recipe.layout)
    session = open_session(recipe, None, world)
    if session.device.type == "cpu":
        take_no_more(machine.free_bytes(), world.local_size)
    resident = machine.resident()
    trainer = Trainer(session, session.lay_out(), Path(folder))
    micro_batches = batches.micro_batches(session.recipe, world.size, task=session.task)
    for _ in range(2):
        trainer.step(micro_batches)
    process = peak_memory(session.device)
    with memory_of_step(trainer, micro_batches) as memory:
        trainer.step(micro_batches)
    return {**memory, "resident": resident, "need": memory.get("device", process)}


def take_no_more(free: int | None, processes: int) -> None:
    """From here on, memory beyond this process's share of what is free is an error, where otherwise the system would
    kill a program: this one before any other."""
    with contextlib.suppress(ImportError, OSError, TypeError, ValueError):  # only Linux tells and has both
        import resource

        has = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (has + int(free * (1 - SPARE / 4)) // processes,) * 2)
        Path("/proc/self/oom_score_adj").write_text("1000")


def run_in_processes(n: int, function: Callable, recipe: Recipe, folder: str) -> dict[str, float] | str:
    """The largest value of all processes, by name; where they did not come to an end, why."""
    try:
        by_rank = run_group(n, function, recipe, folder, log=Path(folder) / "log")
    except UserError as e:
        return str(e)
    except RuntimeError as e:
        if not re.search(r"allocate memory|\bMemoryError\b|bad_alloc", str(e)):  # PyTorch's, Python's, C++'s
            raise
        return "it took more than the memory that was free. Use a smaller one."
    return {key: max(values[key] for values in by_rank) for key in by_rank[0]}


# ---------------------------------------------------------------- rows and lines


def memory_pairs(memory: Memory, measured: dict[str, float] | None, budget: MemoryBudget) -> list[Pair]:
    """Memory as planned, and as measured: on a CPU the step's tensors and the process, of a GPU all that it shows."""
    need = measured and measured["need"]
    if budget.target == "cuda":
        return [Pair("device", "bytes", memory.device_total, need)]
    tensors = Pair("tensors", "bytes", memory.allocated, measured and measured["allocated"])
    return [tensors, Pair("process", "bytes", memory.device_total, need)]


def pairs_text(pairs: Sequence[Pair]) -> str:
    """'tensors 1 GB, process 2 GB' as planned, or as measured with the plan's error."""

    def text(pair: Pair) -> str:
        if pair.measured is None:
            return f"{pair.name} {size(pair.predicted)}"
        return f"{pair.name} {size(pair.measured)} (planned {signed(pair.error)})"

    return ", ".join(map(text, pairs))


class Search:
    """The largest micro-batch by the plan, and its rows. share: samples of a step that a process takes. most:
    micro-batches beyond are not tried."""

    def __init__(self, recipe: Recipe, budget: MemoryBudget):
        self.recipe, self.budget = changed(recipe, evaluate={"batch": None}), budget  # it is as large as a micro-batch
        self.rows: list[Row] = []
        n, task = budget.processes, budget.task
        self.share = self.most = local_batch(recipe, n, task)
        if recipe.batch.samples is not None:
            self.most = min(MOST, max(self.share, len(task.splits["train"]) // n))
        self.memory = functools.cache(lambda k: budget.memory(self.recipe_of(k)))  # each micro-batch is traced once

    def recipe_of(self, k: int) -> Recipe:
        return with_micro_batch(self.recipe, k, self.budget.processes, self.share)

    def need(self, k: int) -> int:
        return self.memory(k).device_total

    def largest(self) -> int | None:
        """None where not even one sample fits."""
        micro_batch = largest_micro_batch(self.recipe, self.budget, self.share, self.need)
        if micro_batch != self.share or self.most == self.share:
            return micro_batch
        limit = self.share  # double until it does not fit, so that nothing huge is traced for nothing
        while limit < self.most and self.need(limit) <= self.budget.available:
            limit = min(self.most, 2 * limit)
        return largest_micro_batch(self.recipe, self.budget, limit, self.need)

    def add(self, kind: str, name: str, value: float, unit: str, **more: Any) -> None:
        """A row. kind: predicted or measured. more: conditions."""
        budget = self.budget
        about = {
            "recipe": self.recipe.name, "device": budget.target, "precision": self.recipe.layout.precision,
            "processes": budget.processes, "resident": budget.resident, "budget": budget.available,
        }  # fmt: skip
        self.rows.append(Row(f"fit/{name}", value, unit, None, {**about, **more, "kind": kind}))

    def text(self, k: int, measured: dict[str, float] | None = None) -> str:
        return pairs_text(memory_pairs(self.memory(k), measured, self.budget))

    def line(self, k: int) -> str:
        """The keys of micro-batch k, and what they need."""
        share, available = self.share, self.budget.available
        keys = f"batch.samples={self.recipe_of(k).batch.samples} " * (k > share) + f"layout.micro_batch={k}"
        beyond = f" (more than its {share})" if k > share else " (its whole batch)" * (k == share)
        spare = f"{size(available - self.need(k))} ({1 - self.need(k) / available:.1%}) to spare"
        return f"{keys}{beyond}: {self.text(k)} of {size(available)} by the plan, {spare}; {self.traces} traces"

    @property
    def traces(self) -> int:
        return self.memory.cache_info().currsize


def largest(recipe: Recipe, budget: MemoryBudget, capacity: int, folder: str) -> tuple[list[Row], list[str]]:
    """(rows, lines) of the largest micro-batch in the budget. capacity: bytes a process that this machine has, to
    confirm it by one step."""
    search = Search(recipe, budget)
    micro_batch = search.largest()
    if micro_batch is None:
        search.add("predicted", "micro_batch", 0, "samples")
        fix = suggested_fix(recipe, budget)
        return search.rows, [f"not even one sample fits: {search.text(1)} of {size(budget.available)}. {fix}."]
    memory = search.memory(micro_batch)
    search.add("predicted", "micro_batch", micro_batch, "samples", traces=search.traces)
    search.add("predicted", "need", memory.device_total, "bytes", micro_batch=micro_batch, peak=memory.allocated)
    lines = [search.line(micro_batch)]
    if micro_batch == search.most:
        whole = "all the data" if search.most > search.share else "the recipe's whole batch"
        lines.append(f"larger ones were not tried: this is {whole}")
    if memory.device_total > capacity:
        return search.rows, [*lines, f"not confirmed: this machine has {size(capacity)} free per process"]
    return search.rows, [*lines, confirm(search, micro_batch, folder)]


def confirm(search: Search, micro_batch: int, folder: str) -> str:
    """One step of that micro-batch: its row is added, its line returned."""
    recipe, budget = search.recipe_of(micro_batch), search.budget
    check.validate(recipe, budget.processes)
    measured = run_in_processes(budget.processes, measured_step, recipe, folder)
    if isinstance(measured, str):
        return f"NOT confirmed: one step of it failed: {measured}"
    need, more = measured["need"], {"peak": measured["allocated"], "resident": measured["resident"]}
    search.add("measured", "need", need, "bytes", micro_batch=micro_batch, **more)
    memory, difference = search.text(micro_batch, measured), size(abs(budget.available - need))
    if need <= budget.available:
        return f"confirmed by one step: {memory}, {difference} to spare"
    return f"did not fit: use a smaller one: one step took {memory}, {difference} too much"
