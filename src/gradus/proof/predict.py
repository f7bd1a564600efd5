"""What the plan says of a run before its first step: of its largest batch, and of the one step that will be measured."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.plan import batches, engine
from gradus.plan.engine import Memory
from gradus.plan.figures import figure
from gradus.plan.show import duration, size
from gradus.plan.step import step_time
from gradus.plan.trace import trace_recipe
from gradus.plan.work import Work
from gradus.plan.workers import Fault, Worker
from gradus.proof.room import Room, fix_of, room_of, ways
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.train.schedule import total_steps
from gradus.train.session import Session

MEASURED = 3  # step of a start that is measured: the first two set things up (DDP its buckets in the second)
PATIENCE = 120.0  # s that a plan may take
SMALLER = "Set a smaller layout.micro_batch (gradus fit finds it) or layout.checkpointing=full"
WHOLE = 16  # blocks × micro-batches up to which a step is traced whole
STATE = ("weights", "gradients", "optimizer")  # told by name; the others only together, since measuring cannot tell them apart
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a prediction needs: it may be made in another process."""

    recipe: Recipe  # resolved
    room: Room
    step: int | None  # of the start, that is measured
    micro_batches: list[Batch] | None  # of that step on rank 0


@dataclasses.dataclass
class Predicted:
    rows: list[Row]
    line: str
    notes: list[str]
    needed: int  # bytes a process
    least: int  # of them without any activation
    refusal: str | None = None  # where it does not fit


def case_of(session: Session, position: tuple[int, int] = (0, 0), local: int | None = None) -> Case:
    """The case of a run that begins at `position` (epoch, step within it)."""
    return Case(session.recipe, room_of(session, local), *batches_of(session, position))


def batches_of(session: Session, position: tuple[int, int]) -> tuple[int | None, list[Batch] | None]:
    """(the step of this start that will be measured, its micro-batches on rank 0)."""
    loader, (epoch, at) = session.loader(), position
    plan = loader.plan
    passed = at + sum(len(plan.epoch(e)) for e in range(epoch)) if epoch < 100 else at + epoch * plan.steps_per_epoch
    left = total_steps(session.recipe, plan) - passed
    if left < 2:  # the first step of all finds no optimizer state yet
        return None, None
    number = min(MEASURED, left)
    at += number - 1
    while at >= (length := len(plan.epoch(epoch))):
        epoch, at = epoch + 1, at - length
    return number, next(loader.steps(epoch, at)).micro_batches


def predict(case: Case) -> Predicted:
    """The rows of the plan, without a step: of the largest batch; with one: of the step that will be measured. Raises UserError where the
    plan cannot be made."""
    r, room = case.recipe, case.room
    largest = batches.micro_batches(r, room.n, task=room.task)
    step = foresee(case) if case.micro_batches else None
    same = step and room.target == "cpu" and r.layout.pipeline == 1 and shapes(largest) == shapes(case.micro_batches)
    memory = step[0] if same else room.memory(r)
    need, components, rank = memory.device_total, memory.components, memory.rank
    of = {"of": "largest batch", "batch": batches.described(largest) + (f", rank {rank}" if rank else "")}
    rows = [figure(f"memory/{name}", value, "bytes", source="traced", rank=rank, **of) for name, value in components.items()]
    rows.append(figure("memory/allocated", memory.allocated, "bytes", "sum of the components", components, rank=rank, **of))
    rows.append(figure("memory/reserved", memory.reserved, "bytes", "as the caching allocator rounds it", **of))
    if room.target == "cuda":
        rows.append(figure("memory/device", need, "bytes", "reserved + framework", **of))
        most, sharing = f"reserved {size(memory.reserved)}, device {size(need)}", 1
    else:
        formula, given = memory.outside
        rows.append(figure("memory/process", need, "bytes", f"allocated + {formula}", given, **of))
        most, sharing = f"process {size(need)}", room.local
    rows.append(figure("memory/capacity", room.budget * sharing, "bytes", source="this machine", processes=sharing))
    line = f"plan: tensors {size(memory.allocated)}, {most} of {size(room.budget)}"
    if step:
        shape = batches.described(case.micro_batches)
        if step[0].allocated != memory.allocated:
            line += f" with the largest batch ({of['batch']}); tensors {size(step[0].allocated)} in step {case.step} ({shape}), which is measured"
        rows += step_rows(case, *step, shape)
        found = {row.name: row.value for row in rows}
        line += f"; {size(found['traffic/sent'])} sent per step" if found.get("traffic/sent") else ""
        coarse = " (coarse: gradus calibrate)" if room.device and "coarse" in (room.device.measured or {}) else ""
        alike = f" --threads {r.layout.threads}" if r.layout.threads else ""
        line += f"; {duration(found['time/step'])} per step{coarse}" if "time/step" in found else f"; no time (gradus calibrate{alike})"
    refusal = refuse(case, need) if 0 < room.budget < need else None
    writing = memory.outside[0] == engine.WRITING  # takes no activations
    least = need if writing else sum(memory.held.values()) + need - memory.allocated
    return Predicted(rows, line, [*memory.notes, *evaluation_note(case, largest)], need, least, refusal)


def evaluation_note(case: Case, largest: list[Batch]) -> Iterator[str]:
    """The plan is of training. An evaluation keeps nothing for a backward pass, so it takes less of as many samples; not of many more."""
    r, room = case.recipe, case.room
    evaluated = r.evaluate.batch or r.layout.micro_batch or -(-(r.batch.samples or 64) // ways(r, room.n))
    trained = max(len(next(v for v in batch.values() if isinstance(v, Tensor))) for batch in largest)
    if "valid" in room.task.splits and evaluated > 2 * trained:
        yield f"an evaluation takes {evaluated} samples at a time (evaluate.batch), a step {trained}: what it needs is not in the plan"


def shapes(micro_batches: list[Batch]) -> list[dict[str, tuple[int, ...]]]:
    return [{k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)} for batch in micro_batches]


def foresee(case: Case) -> tuple[Memory, Work]:
    """Of rank 0 in the step that will be measured: traced whole where that is quick, else put together from profiles. Of tensors alone:
    nothing is reserved beyond them, and nothing is noted."""
    r, room, given = case.recipe, case.room, case.micro_batches
    blocks = r.model.n_layers + (getattr(r.model, "n_decoder_layers", None) or 0)
    if blocks * len(given) <= WHOLE:
        t = trace_recipe(r, room.n, 0, target=room.target, task=room.task, micro_batches=given)
        memory = Memory(t.memory, t.peak, t.peak, 0, 0, t.at, t.held, t.parameters, [])
        return memory if room.target == "cuda" else engine.with_process(memory, room.resident, r.layout), t.work
    first = engine.processes(r, room.n, room.target, room.task, given)[0]
    memory = engine.memory_of([first], room.resident)
    return dataclasses.replace(memory, reserved=memory.allocated, notes=[]), first.work


def step_rows(case: Case, memory: Memory, work: Work, shape: str) -> Iterator[Row]:
    """What one traced step tells of the step that will be measured, whose batch is of that shape: memory, traffic, time, energy."""

    def row(name: str, value: float, unit: str, formula: str = "", inputs: dict[str, Any] | None = None) -> Row:
        made = figure(name, value, unit, formula, inputs, "traced: the module, optimizer and step under fake tensors", rank=0, batch=shape)
        made.step = case.step
        return made

    held, n, device = {name: memory.held[name] for name in STATE}, case.room.n, case.room.device
    for name, value in held.items():
        yield row(f"memory/{name}", value, "bytes")
    rest = memory.allocated - sum(held.values())
    yield row("memory/rest", rest, "bytes", "allocated − weights − gradients − optimizer", memory.components)
    yield row("memory/allocated", memory.allocated, "bytes", "sum of the components at the peak", memory.components)
    if n > 1:
        sent: dict[str, float] = defaultdict(float)
        for t in work.transfers:
            sent[t.kind] += t.sent
        for kind, value in sent.items():
            yield row(f"traffic/{kind}", value, "bytes", "Σ calls × payload × what a ring sends of it")
        yield row("traffic/sent", sum(sent.values()), "bytes", "sum over the collectives", dict(sent))
    if device is not None:
        time = step_time(work, Cluster(device, n))
        yield row("time/step", time.total, "s", "sum of the parts", time.parts)
        if device.power:
            inputs = {"power": device.power, "devices": n, "time": time.total}
            yield row("energy/step", device.power * n * time.total, "J", "power × devices × time", inputs)


def refuse(case: Case, needed: int, fix: str = SMALLER) -> str:
    """One line: what does not fit, and what would."""
    room = case.room
    device = "GPU" if room.target == "cuda" else "host" if room.local == 1 else f"host for each of its {room.local} processes"
    return f"the plan needs {size(needed)} per process and the {device} has {size(room.budget)}. {fix}."


# ---------------------------------------------------------------- a process of its own


class Planner(Worker):
    """A process in which a case is predicted: a trace makes a world of its own, which a process that has joined others cannot; it may be
    interrupted and given up at any moment; and what it takes of memory is not the run's. Begun before the others are met, where Linux
    lets it be a copy of this process."""

    def __init__(self):
        super().__init__(fork=sys.platform == "linux")

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def plan(self, case: Case, seconds: float = PATIENCE) -> Predicted:
        """Raises as `ask` where there is no answer in time. Where it does not fit and there is time, the refusal says what would."""
        end = time.monotonic() + seconds
        found = self.ask(_predict_there, case, seconds)
        if found.refusal:
            with contextlib.suppress(TimeoutError, EOFError, UserError, Fault):
                found.refusal = self.ask(_refuse_there, (case, found), end - time.monotonic())
        return found


def _predict_there(case: Case) -> Predicted:
    torch.set_num_threads(1)  # the threads of the process that it is a copy of are not there
    return predict(case)


def _refuse_there(asked: tuple[Case, Predicted]) -> str:
    case, found = asked
    return refuse(case, found.needed, fix_of(case.recipe, case.room, found.least))
