"""The largest micro-batch that fits, found by the plan and confirmed by one step; and sweeps that measure speed and memory beside the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.data.loader import Loader
from gradus.errors import UserError
from gradus.hardware import Device
from gradus.hardware.tables import table as columns
from gradus.measure.profile import endless
from gradus.measure.workers import start
from gradus.parallel import check
from gradus.parallel.mesh import needed, sizes
from gradus.parallel.world import World
from gradus.plan import batches
from gradus.plan.show import size
from gradus.proof.prove import Case, capacity, device_of, memory_of_step, resident, uninterrupted
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.tasks.base import Task
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.session import Session, open_for, open_session

TRACES = 12  # of a search along the line; then by halves
TIMED, WARM_UP = 8, 3  # steps of a sweep
LOADED = 2.0  # s for which a loader alone is timed
MOST = 2**16  # samples of a micro-batch that are asked for


# ---------------------------------------------------------------- what fits


@dataclasses.dataclass
class Room:
    """What a process may use, and what the plan says that it needs."""

    budget: float  # bytes a process
    n: int
    target: str
    device: Device | None
    resident: int  # bytes of a process on a CPU before the model is built
    task: Task | None

    @classmethod
    def of(cls, case: Case) -> Room:
        share = case.capacity // case.local if case.target == "cpu" else case.capacity
        return cls(share, case.n, case.target, case.device, case.resident, case.task)

    def need(self, recipe: Recipe) -> int:
        """Bytes of the device (of a CPU: of the process) at the peak of the largest batch, on the rank that needs most."""
        from gradus.plan.engine import plan_memory

        with uninterrupted():
            return total_need(plan_memory(recipe, self.n, target=self.target, device=self.device, task=self.task), self.target, self.resident)


def total_need(memory: Any, target: str, resident: int) -> int:
    """All that a process takes: on a CPU its tensors and what it had before; on a GPU with context and the allocator's rounding."""
    return memory.reserved + memory.framework if target == "cuda" else memory.allocated + resident


def share_of(recipe: Recipe, n: int, task: Task | None) -> int:
    """Samples of a step that one process takes, at most."""
    if recipe.batch.samples is not None:
        samples = recipe.batch.samples
        if task is not None:
            samples = min(samples, len(task.splits["train"]))
    else:
        samples = max(len(b) for b in task.plan("train", None, recipe.batch.tokens).epoch(0))
    size_of = sizes(recipe.layout, n)
    return -(-samples // (size_of["replicate"] * size_of["expert"] * size_of["shard"]))


def with_micro_batch(recipe: Recipe, k: int, n: int, share: int) -> Recipe:
    """The recipe with micro-batches of k samples. More than its share of the batch: the batch grows until each process has k."""
    changes: dict[str, Any] = {"layout": recipe.layout.model_copy(update={"micro_batch": k})}
    if k > share:
        size_of = sizes(recipe.layout, n)
        data = size_of["replicate"] * size_of["expert"] * size_of["shard"]
        changes["batch"] = recipe.batch.model_copy(update={"samples": k * data, "tokens": None})
    return recipe.model_copy(update=changes)


def largest_micro_batch(recipe: Recipe, room: Room, limit: int | None = None, need: Callable[[int], int] | None = None) -> int | None:
    """The largest layout.micro_batch whose step fits; None where not even one sample does. limit: where to stop (None: the share of the batch).

    What is needed grows nearly linearly with the micro-batch, so the next one to try lies on the line through the last two.
    """
    share = share_of(recipe, room.n, room.task)
    known: dict[int, int] = {}

    def fits(k: int) -> bool:
        if k not in known:
            known[k] = need(k) if need else room.need(with_micro_batch(recipe, k, room.n, share))
        return known[k] <= room.budget

    low, high = 0, (limit or share)  # what fits, and what does not
    if fits(high):
        return high
    guess = high // 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = (low + high) // 2
        near = sorted((k for k in known if k < share or k == limit), key=lambda k: abs(known[k] - room.budget))[:2]
        if len(near) == 2 and len(known) < TRACES and known[near[0]] != known[near[1]]:
            k, other = near
            line = k + (room.budget - known[k]) * (other - k) / (known[other] - known[k])
            guess = math.floor(line) if math.floor(line) > low else low + 1  # below the line first, then the one above it
    return low or None


def parse_size(text: str, key: str = "--memory") -> int:
    """`8GiB`, `8GB`, `500 MB` → bytes. Raises UserError."""
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].lower() not in units or not 0 < float(found[1]) * units[found[2].lower()] < 1e18:
        raise UserError(f"{key} {text}: not a size. Write for example 8GiB (2^30 bytes each) or 8GB (10^9).")
    return int(float(found[1]) * units[found[2].lower()])


# ---------------------------------------------------------------- what is measured, in a process of its own


def step_of(session: Session, folder: Path) -> tuple[Trainer, list[dict[str, Any]]]:
    """(a trainer, this rank's micro-batches of the first epoch's largest step)."""
    trainer = Trainer(session, session.lay_out(), folder)
    return trainer, batches.micro_batches(session.recipe, session.mesh.world.size, task=session.task)


def measured_step(recipe: Recipe, folder: str, here: World) -> tuple[Trainer, dict[str, float]]:
    """(the trainer, bytes at the peak of one step of the largest batch), the optimizer's state there already.

    need: of a GPU all that is taken of it; of a CPU the resident memory of the process, before there is the profiler that counts its tensors.
    """
    session = open_session(recipe, None, here)
    before = resident()
    trainer, micro_batches = step_of(session, Path(folder))
    for _ in range(2):
        trainer.step(micro_batches)
    process = peak_memory(session.device)
    with memory_of_step(trainer, micro_batches) as found:
        trainer.step(micro_batches)
    return trainer, {**found, "resident": before, "need": found.get("device", process)}


def one_step(recipe: Recipe, folder: str, here: World) -> dict[str, float]:
    """Bytes at the peak of one step of the largest batch."""
    return measured_step(recipe, folder, here)[1]


def timed_steps(recipe: Recipe, folder: str, here: World) -> dict[str, float]:
    """The same, with samples/s of the run's own steps, and how much of their time was spent waiting for data."""
    trainer, found = measured_step(recipe, folder, here)
    spent, waits = [], []
    with contextlib.closing(trainer.loader) as loader:
        began, wait = time.perf_counter(), loader.wait_s
        for step in itertools.islice(endless(trainer), WARM_UP + TIMED):
            trainer.take(step)
            trainer.clock.synchronise()
            now = time.perf_counter()
            spent.append((now - began) / step.samples)
            waits.append(loader.wait_s - wait)
            began, wait = now, loader.wait_s
    spent, waits = spent[WARM_UP:], waits[WARM_UP:]
    second = statistics.median(spent)
    step_samples = trainer.progress.samples / trainer.progress.step
    return {
        **found, "samples_per_s": 1 / second, "step": second * step_samples, "waited": statistics.mean(waits),
    }  # fmt: skip


def load_alone(recipe: Recipe, folder: str, here: World) -> dict[str, float]:
    """Samples/s of the loader with nobody to train, after its first batches."""
    return {"samples_per_s": loader_speed(open_session(recipe, None, here))}


def loader_speed(session: Session, seconds: float = LOADED) -> float:
    """Samples/s of the recipe's loader for about so many seconds, what its workers had fetched beforehand left out."""
    r, task = session.recipe, session.task
    plan = task.plan("train", samples=r.batch.samples, tokens=r.batch.tokens)
    loader = Loader(
        task.splits["train"], plan, task.collate, prepare=task.prepare, micro_batch=r.layout.micro_batch, loading=r.data
    )
    ahead = 1 + r.data.workers * r.data.prefetch
    try:
        began, samples = time.perf_counter(), 0
        for step in itertools.chain.from_iterable(loader.steps(epoch) for epoch in itertools.count()):
            now = time.perf_counter()
            if ahead:
                ahead, began = ahead - 1, now
                continue
            samples += step.samples
            if now - began >= seconds:
                return samples / (now - began)
    finally:
        loader.close()


# ---------------------------------------------------------------- the verb


def fit(recipe: Recipe, args: Any) -> Iterator[str]:
    """`gradus fit RECIPE`. Yields what is printed. Raises UserError."""
    if args.sweep is not None and args.workers is not None:
        raise UserError("--sweep and --workers are different questions. Give one of them.")
    n = needed(recipe.layout)
    session = open_for(recipe, n)
    given = session.recipe
    own = capacity(session.device) // (n if session.device.type == "cpu" else 1)
    budget = own if args.memory is None else parse_size(args.memory)
    room = Room(budget, n, session.device.type, device_of(session.device), resident(), session.task)
    with tempfile.TemporaryDirectory() as folder:
        if args.sweep is not None:
            rows, lines = sweep(given, room, limits.numbers(args.sweep, "--sweep", most=MOST), folder)
        elif args.workers is not None:
            rows, lines = workers(given, room, limits.numbers(args.workers, "--workers", 0, limits.WORKERS), folder)
        else:
            rows, lines = largest(given, room, own, folder)
    yield from (row.json() for row in rows) if args.json else lines


def run_apart(n: int, function: Callable, recipe: Recipe, folder: str) -> dict[str, float] | str:
    """Rank by rank the largest of what each process found; where they did not come to an end, why."""
    try:
        found = start(n, function, recipe, folder, log=Path(folder) / "log")
    except UserError as e:
        return str(e)
    return {key: max(f[key] for f in found) for key in found[0]}


def measured(told: dict[str, float]) -> dict[str, Any]:
    return {"kind": "measured", "peak": told["allocated"], "resident": told["resident"]}


def measures(need: float, told: dict[str, float] | None, room: Room) -> dict[str, tuple[float, float | None]]:
    """What of memory was planned, and measured, by name: on a CPU the step's tensors and the process, of a GPU all that it shows."""
    if room.target == "cuda":
        return {"device": (need, told and told["need"])}
    return {"tensors": (need - room.resident, told and told["allocated"]), "process": (need, told and told["need"])}


def said(found: dict[str, tuple[float, float | None]]) -> str:
    """'tensors 1 GB, process 2 GB' as planned, or as measured with the plan's error."""
    words = (f"{size(p)}" if m is None else f"{size(m)} (planned {p / m - 1:+.1%})" for p, m in found.values())
    return ", ".join(f"{name} {text}" for name, text in zip(found, words))


def common(recipe: Recipe, room: Room) -> dict[str, Any]:
    return {"recipe": recipe.name, "device": room.target, "precision": recipe.layout.precision, "processes": room.n, "resident": room.resident}


def largest(recipe: Recipe, room: Room, own: int, folder: str) -> tuple[list[Row], list[str]]:
    share = share_of(recipe, room.n, room.task)
    known: dict[int, int] = {}

    def need(k: int) -> int:
        known[k] = room.need(with_micro_batch(recipe, k, room.n, share))
        return known[k]

    most = share if recipe.batch.samples is None else min(MOST, max(share, len(room.task.splits["train"]) // room.n))
    found = largest_micro_batch(recipe, room, share, need)
    if found == share and most > share:
        limit = share  # double until it does not fit, so that nothing huge is traced for nothing
        while limit < most and known.get(limit, need(limit)) <= room.budget:
            limit = min(most, 2 * limit)
        found = largest_micro_batch(recipe, room, limit, lambda k: known.get(k) or need(k))
    conditions = {**common(recipe, room), "budget": room.budget}
    if found is None:
        text = f"not even one sample fits: {said(measures(known[1], None, room))} of {size(room.budget)}"
        return [Row("fit/micro_batch", 0, "samples", None, {**conditions, "kind": "predicted"})], [
            f"{text}. {_remedy(recipe, room)}"
        ]
    chosen = with_micro_batch(recipe, found, room.n, share)
    rows = [
        Row("fit/micro_batch", found, "samples", None, {**conditions, "kind": "predicted", "traces": len(known)}),
        Row("fit/need", known[found], "bytes", None, {**conditions, "micro_batch": found, "kind": "predicted"}),
    ]
    keys = f"batch.samples={chosen.batch.samples} " * (found > share) + f"layout.micro_batch={found}"
    beyond = f" (more than its {share})" if found > share else " (its whole batch)" * (found == share)
    margin = room.budget - known[found]
    lines = [
        f"{keys}{beyond}: {said(measures(known[found], None, room))} of {size(room.budget)} by the plan, "
        f"{size(margin)} ({margin / room.budget:.1%}) to spare; {len(known)} traces"
    ]
    if found == most:
        lines.append("more does not make a batch: that is all the data" if most > share else "more does not make a batch of this recipe")
    if known[found] > own:
        return rows, [*lines, f"not confirmed: this machine has {size(own)} a process"]
    check.validate(chosen, room.n)
    told = run_apart(room.n, one_step, chosen, folder)
    if isinstance(told, str):
        return rows, [*lines, f"NOT confirmed: one step of it failed: {told}"]
    rows.append(Row("fit/need", told["need"], "bytes", None, {**conditions, "micro_batch": found, **measured(told)}))
    verdict = "confirmed" if told["need"] <= room.budget else "NOT confirmed"
    lines.append(
        f"{verdict} by one step: {said(measures(known[found], told, room))}, {size(abs(room.budget - told['need']))} "
        f"{'to spare' if told['need'] <= room.budget else 'too much: take a smaller one'}"
    )
    return rows, lines


def _remedy(recipe: Recipe, room: Room) -> str:
    """What would make one sample fit, as words to paste."""
    for changes in ({"checkpointing": "full"}, {"precision": "bf16"}, {"checkpointing": "full", "precision": "bf16"}):
        changed = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={**changes, "micro_batch": 1})})
        if changed.layout != recipe.layout and (need := room.need(changed)) <= room.budget:
            return f"Set {' '.join(f'layout.{k}={v}' for k, v in changes.items())} layout.micro_batch=1: {size(need)}"
    return "Nor does it with full checkpointing and bf16: share it among more processes (layout.shard), or take a smaller model."


def sweep(recipe: Recipe, room: Room, wanted: Sequence[int], folder: str) -> tuple[list[Row], list[str]]:
    """Samples/s and memory at every micro-batch, each a batch by itself, beside the plan."""
    table, rows = [], []
    for k in wanted:
        changed = with_micro_batch(recipe, k, room.n, 0)
        conditions = {**common(recipe, room), "micro_batch": k, "batch_samples": changed.batch.samples}
        need = room.need(changed)
        rows.append(Row("fit/need", need, "bytes", None, {**conditions, "kind": "predicted"}))
        step = planned_step(changed, room)
        if step:
            rows.append(Row("fit/samples_per_s", changed.batch.samples / step, "samples/s", None, {**conditions, "kind": "predicted"}))
        expected = f"{changed.batch.samples / step:,.1f}" if step else "-"
        if need > room.budget:
            table.append((str(k), expected, "-", *cells(measures(need, None, room)), "does not fit"))
            continue
        told = run_apart(room.n, timed_steps, changed, folder)
        if isinstance(told, str):
            table.append((str(k), expected, "-", *cells(measures(need, None, room)), told[:60]))
            continue
        rows += [
            Row("fit/samples_per_s", told["samples_per_s"], "samples/s", None, {**conditions, "kind": "measured", "steps": TIMED}),
            Row("fit/need", told["need"], "bytes", None, {**conditions, **measured(told)}),
        ]
        table.append((str(k), expected, f"{told['samples_per_s']:,.1f}", *cells(measures(need, told, room)), ""))
    memory = [head for name in measures(0, None, room) for head in (f"{name} planned", "measured", "error")]
    head = ("micro-batch", "samples/s planned", "measured", *memory, "")
    return rows, [f"{recipe.name}: {TIMED} steps each after {WARM_UP}; memory at the peak", *columns(head, table)]


def cells(found: dict[str, tuple[float, float | None]]) -> Iterator[str]:
    """Of each measure: planned, measured, error."""
    for planned, seen in found.values():
        yield from (size(planned), *(("-", "-") if seen is None else (size(seen), f"{planned / seen - 1:+.1%}")))


def planned_step(recipe: Recipe, room: Room) -> float | None:
    """Seconds; None where the device is not known."""
    if room.device is None:
        return None
    from gradus.hardware import Cluster
    from gradus.plan.engine import traced_work
    from gradus.plan.step import step_time

    with uninterrupted():
        return step_time(traced_work(recipe, room.n, target=room.target, task=room.task), Cluster(room.device, room.n)).total


def workers(recipe: Recipe, room: Room, wanted: Sequence[int], folder: str) -> tuple[list[Row], list[str]]:
    """Samples/s of the loader alone and of training with it, and the share of training that waits for data."""
    table, rows = [], []
    for k in wanted:
        changed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"workers": k})})
        alone = run_apart(1, load_alone, changed.model_copy(update={"layout": recipe.layout}), folder) if room.n == 1 else "-"
        told = run_apart(room.n, timed_steps, changed, folder)
        if isinstance(told, str):
            table.append((str(k), "-", "-", told[:60]))
            continue
        conditions = {**common(recipe, room), "workers": k, "kind": "measured"}
        if not isinstance(alone, str):
            rows.append(Row("fit/loader_samples_per_s", alone["samples_per_s"], "samples/s", None, conditions))
        waits = told["waited"] / told["step"]
        rows += [
            Row("fit/samples_per_s", told["samples_per_s"], "samples/s", None, conditions),
            Row("fit/data_wait", waits, "of the step", None, conditions),
        ]
        table.append((str(k), "-" if isinstance(alone, str) else f"{alone['samples_per_s']:,.1f}", f"{told['samples_per_s']:,.1f}", f"{waits:.1%}"))
    return rows, [f"{recipe.name}: data.workers", *columns(("workers", "loader alone, samples/s", "training, samples/s", "waits for data"), table)]
