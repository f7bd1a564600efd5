"""The plan of a run before its first step: of its largest batch, and of the one step that will be measured."""

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
from gradus.parallel.processes import Fault, Worker
from gradus.plan import batches, engine
from gradus.plan.budget import power_of
from gradus.plan.case import where_fewest
from gradus.plan.figures import figure
from gradus.plan.process import Memory
from gradus.plan.step import step_time
from gradus.plan.trace import trace_recipe
from gradus.plan.work import Work
from gradus.proof.memory_budget import (
    MemoryBudget,
    budget_of,
    changed,
    largest_evaluation,
    local_batch,
    powered,
    suggested_fix,
)
from gradus.recipe.axes import data_parallel_size, evaluation_samples, needed
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.text import duration, size
from gradus.train.session import Session

MEASURED_STEP = 3  # of a start: the first two set things up (DDP its buckets in the second)
PATIENCE = 120.0  # s that a plan may take
SMALLER = "Set a smaller layout.micro_batch (gradus fit finds it) or layout.checkpointing=full"
WHOLE = 16  # blocks × micro-batches up to which a step is traced whole
STATE = ("weights", "gradients", "optimizer")  # rows of their own; measuring cannot tell the other components apart
TRACED = "traced: the module, optimizer and step under fake tensors"
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """The inputs of a prediction, which another process may compute."""

    recipe: Recipe  # resolved
    budget: MemoryBudget
    step: int | None  # of the start, that is measured
    micro_batches: list[Batch] | None  # of that step on rank 0
    no_time: str | None = None  # why this machine was not measured


@dataclasses.dataclass
class Predicted:
    """The plan of a case."""

    rows: list[Row]
    line: str
    notes: list[str]
    needed: int  # bytes a process
    least: int  # of them without any activation
    refusal: str | None = None  # where it does not fit
    fix: str | None = None  # where an evaluation does not
    evaluate_batch: int | None = None  # that was chosen for it to fit


def case_of(session: Session, position: tuple[int, int] = (0, 0), local_processes: int | None = None) -> Case:
    """The case of a run that begins at `position` (epoch, step within it)."""
    return Case(session.recipe, budget_of(session, local_processes), *batches_of(session, position))


def batches_of(session: Session, position: tuple[int, int]) -> tuple[int | None, list[Batch] | None]:
    """(the step of this start that will be measured, its micro-batches on rank 0)."""
    (epoch, step), order = position, session.steps.order
    steps_left = session.steps.total - order.steps_before(epoch) - step
    if steps_left < 2:  # the first step of all finds no optimizer state yet
        return None, None
    number = min(MEASURED_STEP, steps_left)
    step += number - 1
    while step >= (length := len(order.epoch(epoch))):
        epoch, step = epoch + 1, step - length
    return number, session.loader.look(epoch, step).micro_batches


def predict(case: Case) -> Predicted:
    """The rows of the plan, without a step: of the largest batch; with one: of the step that will be measured. Raises
    UserError where the plan cannot be made."""
    recipe, budget = case.recipe, case.budget
    largest = batches.micro_batches(recipe, budget.processes, task=budget.task)
    step = predict_step(case) if case.micro_batches else None
    one_process = budget.target == "cpu" and recipe.layout.pipeline == 1
    same_plan = step and one_process and shapes(largest) == shapes(case.micro_batches)

    def memory_with(recipe: Recipe) -> Memory:
        if not same_plan:
            return budget.memory(recipe)
        return engine.with_evaluation(step[0], budget.case(recipe, case.micro_batches), budget.resident)

    memory, smaller, chosen = memory_with(recipe), None, None
    if 0 < budget.available < memory.device_total and memory.at == engine.EVALUATION:
        smaller = largest_evaluation(recipe, budget)
        if smaller and not recipe.evaluate.batch:
            chosen, case = smaller, dataclasses.replace(case, recipe=changed(recipe, evaluate={"batch": smaller}))
            memory = memory_with(case.recipe)
    need, evaluates = memory.device_total, memory.at == engine.EVALUATION
    if fewest := with_fewest(recipe, budget):
        need = max(need, fewest)
    fits = not 0 < budget.available < need
    batch = batches.describe_largest(largest) + (f", rank {memory.rank}" if memory.rank else "")
    rows = rows_of_largest(memory, budget, batch)
    whole = f"reserved {size(memory.reserved)}, device" if budget.target == "cuda" else "process"
    line = f"plan: tensors {size(memory.allocated)}, {whole} {size(need)} of {size(budget.available)}"
    line += " in an evaluation" * evaluates
    if step:
        shape = batches.describe_largest(case.micro_batches)
        if evaluates:
            line += f"; tensors {size(step[0].allocated)} in a step"
        elif step[0].allocated != memory.allocated:
            line += f" with the largest batch ({batch}); tensors {size(step[0].allocated)}"
            line += f" in step {case.step} ({shape}), which is measured" if case.step else f" in a step of {shape}"
        of_step = list(step_rows(case, *step, shape))
        rows += of_step
        line += cost_of_step(case, {row.name: row.value for row in of_step})
    fix = f"Set evaluate.batch={smaller}: an evaluation needs more memory than a step" if smaller else None
    refusal = None if fits else refusal_of(case, need, fix or SMALLER)
    writing = memory.outside[0] == engine.WRITING  # takes no activations
    least = need if writing else sum(memory.state.values()) + need - memory.allocated
    notes = [f"evaluate.batch={chosen}: an evaluation of more samples would not fit"] if chosen else []
    notes += [*memory.notes, *decoding_note(case, largest)]
    if fewest:
        each = "device" if budget.target == "cuda" else "process"
        notes.insert(0, where_fewest(recipe.layout, budget.processes, each, fewest))
    return Predicted(rows, line, notes, need, least, refusal, fix, chosen)


def with_fewest(recipe: Recipe, budget: MemoryBudget) -> int | None:
    """Of replicas that come and go: bytes that each needs where layout.min_replicas are left, which take the batch in
    as large micro-batches, and more of them."""
    layout, n = recipe.layout, budget.processes
    least = layout.min_replicas * needed(layout)
    if not layout.elastic or least >= n:
        return None
    micro = layout.micro_batch or local_batch(recipe, n, budget.task)
    samples = recipe.batch.samples
    even = {"samples": samples and -(-samples // least) * least}  # a plan is of equal shares
    fewest = dataclasses.replace(budget, processes=least)
    return fewest.need(changed(recipe, layout={"micro_batch": micro}, batch=even))


def rows_of_largest(memory: Memory, budget: MemoryBudget, batch: str) -> list[Row]:
    """The memory of a step of the largest batch."""
    about, components = {"of": "largest batch", "batch": batch}, memory.components
    about |= {"during": memory.at} if memory.at == engine.EVALUATION else {}

    def row(name: str, value: float, *how: Any, **conditions: Any) -> Row:
        return figure(f"memory/{name}", value, "bytes", *how, **conditions)

    rows = [row(name, value, source="traced", rank=memory.rank, **about) for name, value in components.items()]
    rows.append(row("allocated", memory.allocated, "sum of the components", components, rank=memory.rank, **about))
    rows.append(row("reserved", memory.reserved, "as the caching allocator rounds it", **about))
    if budget.target == "cuda":
        sharing = 1
        rows.append(row("device", memory.device_total, "reserved + framework", **about))
    else:
        sharing, (formula, inputs) = budget.local_processes, memory.outside
        rows.append(row("process", memory.device_total, f"allocated + {formula}", inputs, **about))
    capacity = budget.available * sharing
    return [*rows, row("capacity", capacity, source="this machine", processes=sharing)]


def cost_of_step(case: Case, values: dict[str, Any]) -> str:
    """The end of the plan's line: traffic and time of the measured step. values: of its rows, by name."""
    device, threads = case.budget.device, case.recipe.layout.threads
    text = f"; {size(values['traffic/sent'])} sent per step" if values.get("traffic/sent") else ""
    if "time/step" in values:
        coarse = " (coarse: gradus calibrate)" if "coarse" in (device.measured or {}) else ""
        return f"{text}; {duration(values['time/step'])} per step{coarse}"
    if untimed(case):
        return f"{text}; step time unknown (a coarse calibration does not hold for several processes: run gradus scale)"
    command = f"run gradus calibrate{f' --threads {threads}' if threads else ''} once"
    return f"{text}; step time unknown: {case.no_time or command}"


def untimed(case: Case) -> bool:
    """Processes that compute on one CPU delay each other's messages, which a coarse calibration does not measure: such
    times were 14 to 63 % too short."""
    device = case.budget.device
    coarse = device is not None and device.kind == "cpu" and "coarse" in (device.measured or {})
    return coarse and case.budget.local_processes > 1


def decoding_note(case: Case, largest: list[Batch]) -> Iterator[str]:
    """An evaluation that writes its answers token by token is not in the plan. It keeps nothing for a backward pass, so
    it takes less of as many samples as a step; not of many more."""
    recipe, budget = case.recipe, case.budget
    evaluated = evaluation_samples(recipe, data_parallel_size(recipe.layout, budget.processes))
    trained = max(len(next(v for v in batch.values() if isinstance(v, Tensor))) for batch in largest)
    if budget.task.decodes and "valid" in budget.task.splits and evaluated > 2 * trained:
        yield (
            f"an evaluation takes {evaluated} samples at a time (evaluate.batch), a step {trained}: what it needs is "
            "not in the plan"
        )


def shapes(micro_batches: list[Batch]) -> list[dict[str, tuple[int, ...]]]:
    return [{k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)} for batch in micro_batches]


def predict_step(case: Case) -> tuple[Memory, Work]:
    """Memory and work of rank 0 in the step that will be measured: traced whole where that is quick, else composed from
    profiles. The memory is of tensors alone: nothing is reserved beyond them, and nothing is noted."""
    recipe, budget, micro_batches = case.recipe, case.budget, case.micro_batches
    n, target, task = budget.processes, budget.target, budget.task
    blocks = recipe.model.n_layers + (getattr(recipe.model, "n_decoder_layers", None) or 0)
    if blocks * len(micro_batches) <= WHOLE and recipe.layout.shard_with == "fsdp2":  # it traces nothing compiled
        t = trace_recipe(recipe, n, 0, target=target, task=task, micro_batches=micro_batches)
        memory = Memory(t.memory, t.peak, t.peak, 0, 0, t.peak_phase, t.state, t.parameters, [])
        return memory if target == "cuda" else engine.with_process(memory, budget.resident, recipe), t.work
    first = engine.processes(budget.case(recipe, micro_batches))[0]
    memory = engine.memory_of([first], budget.resident)
    return dataclasses.replace(memory, reserved=memory.allocated, notes=[]), engine.step_work(first)


def step_rows(case: Case, memory: Memory, work: Work, shape: str) -> Iterator[Row]:
    """Memory, traffic, time and energy of the step that will be measured, whose batch is of that shape."""

    def row(name: str, value: float, unit: str, formula: str = "", inputs: dict[str, Any] | None = None) -> Row:
        row = figure(name, value, unit, formula, inputs, TRACED, rank=0, batch=shape)
        row.step = case.step
        return row

    n, device = case.budget.processes, case.budget.device
    state = {name: memory.state[name] for name in STATE}
    for name, value in state.items():
        yield row(f"memory/{name}", value, "bytes")
    rest = memory.allocated - sum(state.values())
    yield row("memory/rest", rest, "bytes", "allocated − weights − gradients − optimizer", memory.components)
    yield row("memory/allocated", memory.allocated, "bytes", "sum of the components at the peak", memory.components)
    if n > 1:
        sent: dict[str, float] = defaultdict(float)
        for t in work.transfers:
            sent[t.kind] += t.sent
        for kind, value in sent.items():
            yield row(f"traffic/{kind}", value, "bytes", "Σ calls × payload × what a ring sends of it")
        yield row("traffic/sent", sum(sent.values()), "bytes", "sum over the collectives", dict(sent))
    if device is not None and not untimed(case):
        time = step_time(work, Cluster(device, n))
        yield row("time/step", time.total, "s", "sum of the parts", time.parts)
        if drawn := power_of(device, case.recipe.energy):
            *_, watts = drawn.watts  # the limit, where none are stated
            devices = powered(n, case.budget.local_processes, case.budget.target)
            inputs = {"power": watts, "devices": devices, "time": time.total}
            yield row("energy/step", watts * devices * time.total, "J", "power × devices × time", inputs)


def refusal_of(case: Case, needed: int, fix: str = SMALLER) -> str:
    """One line: what does not fit, and what would."""
    budget, n = case.budget, case.budget.local_processes
    host = "host" if n == 1 else f"host for each of its {n} processes"
    device = "GPU" if budget.target == "cuda" else host
    return f"the plan needs {size(needed)} per process and the {device} has {size(budget.available)}. {fix}."


# ---------------------------------------------------------------- a process of its own


class Planner(Worker):
    """A process in which a case is predicted: a trace makes a world of its own, which a process that has joined others
    cannot; it may be interrupted and given up at any moment; and what it takes of memory is not the run's. It begins
    before this process joins others, where Linux lets it be a copy of this process."""

    def __init__(self):
        super().__init__(fork=sys.platform == "linux")

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def plan(self, case: Case, seconds: float = PATIENCE) -> Predicted:
        """The prediction. Raises as `ask` where there is no answer in time. Where it does not fit and there is time,
        the refusal says what would."""
        end = time.monotonic() + seconds
        predicted = self.ask(_predict_in_worker, case, seconds)
        if predicted.refusal:
            with contextlib.suppress(TimeoutError, EOFError, UserError, Fault):
                predicted.refusal = self.ask(_refuse_in_worker, (case, predicted), end - time.monotonic())
        return predicted


def _predict_in_worker(case: Case) -> Predicted:
    torch.set_num_threads(1)  # the threads of the process that it is a copy of are not there
    return predict(case)


def _refuse_in_worker(question: tuple[Case, Predicted]) -> str:
    case, predicted = question
    fix = predicted.fix or suggested_fix(case.recipe, case.budget, predicted.least)
    return refusal_of(case, predicted.needed, fix)
