"""The plan proved by the run: predicted before the first step, measured on the way, and set beside each other at the end.

Two batches are looked at. What the run needs at most is that of its largest micro-batch: where it does not fit, the run is refused. What is
proved is one step, the third of a start, whose batch is known beforehand: the same batch is traced and then measured, on rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import torch_private
from gradus.data.loader import Loader, Step
from gradus.errors import UserError
from gradus.hardware import Cluster, Device
from gradus.measure.energy import Meter, total
from gradus.measure.memory import Timeline
from gradus.parallel import world as worlds
from gradus.parallel.mesh import DATA, sizes
from gradus.plan.figures import figure
from gradus.plan.show import duration, size
from gradus.plan.work import Work
from gradus.recipe.schema import Recipe
from gradus.rows import Row, RowFile, read_rows
from gradus.tasks.base import Task
from gradus.train import machine
from gradus.train.clock import begin_peak, peaks
from gradus.train.loop import Taken, Trainer
from gradus.train.run import Plan
from gradus.train.schedule import total_steps
from gradus.train.session import Session, open_for

SETTLED = 5  # steps of a start whose times are kept apart from those of the others
TIMED = 4096  # latest marks of the time that are kept: on a CPU one a step
MEASURED = 3  # step of a start that is measured: the first sets things up, of the second the traffic is counted
PATIENCE = 120.0  # s that a plan may take
WAIT = 0.25  # of layout.timeout, after which others that wait for the plan give this process up
WHOLE = 16  # blocks × micro-batches up to which a step is traced whole
STATE = ("weights", "gradients", "optimizer")  # told by name; the others only together, since measuring cannot tell them apart
Batch = dict[str, Any]


# ---------------------------------------------------------------- what is predicted


@dataclasses.dataclass(frozen=True)
class Case:
    """What a prediction needs: it may be made in another process."""

    recipe: Recipe  # resolved
    n: int
    local: int  # processes on this host
    task: Task
    target: str  # cpu, cuda
    device: Device | None  # None: the hardware file does not know it
    capacity: int  # bytes of the device, or of the host for all `local` processes
    resident: int  # bytes that this process has on the host before the model is built
    step: int | None  # of the start, that is measured
    micro_batches: list[Batch] | None  # of that step on rank 0


@dataclasses.dataclass
class Predicted:
    rows: list[Row]
    line: str
    refusal: str | None = None
    lacking: tuple[int, int, int] | None = None  # where it does not fit, bytes a process: needed, there, needed without any activation
    notes: list[str] = dataclasses.field(default_factory=list)


def case_of(session: Session, position: tuple[int, int] = (0, 0)) -> Case:
    """The case of a run that begins at `position` (epoch, step within it)."""
    recipe, world = session.recipe, session.mesh.world
    step, micro_batches = batches_of(session, position)
    return Case(
        recipe, world.size, world.local_size, session.task, session.device.type, device_of(session.device), capacity(session.device), resident(),
        step, micro_batches,
    )  # fmt: skip


def batches_of(session: Session, position: tuple[int, int]) -> tuple[int | None, list[Batch] | None]:
    """(the step of this start that will be measured, its micro-batches on rank 0)."""
    r, task, mesh = session.recipe, session.task, session.mesh
    plan = task.plan("train", samples=r.batch.samples, tokens=r.batch.tokens)
    epoch, at = position
    passed = at + sum(len(plan.epoch(e)) for e in range(epoch)) if epoch < 100 else at + epoch * plan.steps_per_epoch
    left = total_steps(r, plan) - passed
    if left < 2:  # the first step of all finds no optimizer state yet
        return None, None
    number = min(MEASURED, left)
    at += number - 1
    while at >= (length := len(plan.epoch(epoch))):
        epoch, at = epoch + 1, at - length
    loader = Loader(
        task.splits["train"], plan, task.collate, prepare=task.prepare, micro_batch=r.layout.micro_batch,
        rank=mesh.rank(*DATA), world=mesh.size(*DATA),
    )  # fmt: skip
    return number, next(loader.steps(epoch, at)).micro_batches


def device_of(device: torch.device) -> Device | None:
    """This device as the hardware file has it; the CPU where it was calibrated. None: not known, so no time is predicted."""
    from gradus import hardware

    if device.type == "cuda":
        return hardware.by_driver(torch.cuda.get_device_name(device))
    with contextlib.suppress(UserError):
        return hardware.find("this")
    return None


def capacity(device: torch.device) -> int:
    """Bytes: of a GPU as PyTorch sees it, else of this host, or of this container where it may use less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory, limit = machine.memory_bytes()
    return limit or memory or 0


def resident() -> int:
    """Bytes of this process in memory now. 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def predict(case: Case) -> Predicted:
    """The rows of the plan, without a step: of the largest batch; with one: of the step that will be measured. Raises UserError where the
    plan cannot be made."""
    from gradus.plan import batches
    from gradus.plan.engine import plan_memory
    from gradus.proof.fit import total_need

    r, n, rows = case.recipe, case.n, []
    largest, foreseen, of = batches.micro_batches(r, n, task=case.task), None, "largest batch"
    if case.micro_batches:
        foreseen = foresee(case)
    if foreseen and case.target == "cpu" and r.layout.pipeline == 1 and shapes(largest) == shapes(case.micro_batches):
        components, allocated, reserved, rank, notes, held = foreseen.components, foreseen.peak, foreseen.peak, 0, [], foreseen.held
        need = allocated + case.resident
    else:
        memory = plan_memory(r, n, target=case.target, device=case.device, task=case.task)
        components, allocated, reserved, rank = memory.components, memory.allocated, memory.reserved, memory.rank
        notes, held = memory.notes, memory.held
        need = total_need(memory, case.target, case.resident)
    for name, value in components.items():
        rows.append(figure(f"memory/{name}", value, "bytes", source="traced", rank=rank, of=of))
    rows += [
        figure("memory/allocated", allocated, "bytes", "sum of the components", components, rank=rank, of=of),
        figure("memory/reserved", reserved, "bytes", "as the caching allocator rounds it", of=of),
        whole_process(case, allocated, need, of),
        figure("memory/capacity", case.capacity, "bytes", source="this machine", processes=case.local if case.target == "cpu" else 1),
    ]
    share = case.capacity // case.local if case.target == "cpu" else case.capacity
    most = f"reserved {size(reserved)}, device" if case.target == "cuda" else "process"
    line = f"plan: tensors {size(allocated)}, {most} {size(need)} of {size(share)}"
    if foreseen:
        rows += step_rows(case, foreseen)
        seconds = next((row.value for row in rows if row.name == "time/step"), None)
        sent = next((row.value for row in rows if row.name == "traffic/sent"), 0)
        line += f"; {size(sent)} sent a step" if sent else ""
        line += f"; {duration(seconds)} a step" if seconds else "; no time (gradus calibrate)"
    notes = [*notes, *evaluation_note(case, largest)]
    lacking = (need, share, sum(held.values()) + need - allocated) if case.capacity and need > share else None
    return Predicted(rows, line, refuse(case, lacking, None) if lacking else None, lacking, notes)


def whole_process(case: Case, allocated: int, need: int, of: str) -> Row:
    """What has to fit: of a GPU all that it shows as taken, of a CPU the process with its libraries."""
    if case.target == "cuda":
        return figure("memory/device", need, "bytes", "reserved + framework", of=of)
    given = {"allocated": allocated, "before": case.resident}
    return figure("memory/process", need, "bytes", "tensors + this process before the model", given, of=of)


def evaluation_note(case: Case, largest: list[Batch]) -> Iterator[str]:
    """The plan is of training. An evaluation keeps nothing for a backward pass, so it takes less of as many samples; not of many more."""
    r = case.recipe
    size_of = sizes(r.layout, case.n)
    evaluated = r.evaluate.batch or r.layout.micro_batch or -(-(r.batch.samples or 64) // math.prod(size_of[axis] for axis in DATA))
    trained = max(len(next(v for v in batch.values() if isinstance(v, Tensor))) for batch in largest)
    if "valid" in case.task.splits and evaluated > 2 * trained:
        yield f"an evaluation takes {evaluated} samples at a time (evaluate.batch), a step {trained}: what it needs is not in the plan"


def shapes(micro_batches: list[Batch]) -> list[dict[str, tuple[int, ...]]]:
    return [{k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)} for batch in micro_batches]


@dataclasses.dataclass
class Foreseen:
    """One step of rank 0, in bytes."""

    components: dict[str, int]
    peak: int
    held: dict[str, int]
    work: Work


def foresee(case: Case) -> Foreseen:
    """The step that will be measured: traced whole where that is quick, else put together from profiles."""
    from gradus.plan import engine
    from gradus.plan.trace import trace_recipe

    r, given = case.recipe, case.micro_batches
    blocks = r.model.n_layers + (getattr(r.model, "n_decoder_layers", None) or 0)
    if blocks * len(given) <= WHOLE:
        traced = trace_recipe(r, case.n, 0, target=case.target, task=case.task, micro_batches=given)
        return Foreseen(traced.memory, traced.peak, traced.held, traced.work)
    first = engine.processes(r, case.n, case.target, case.task, given)[0]
    memory = engine.memory_of([first])
    return Foreseen(memory.components, memory.allocated, memory.held, first.work)


def step_rows(case: Case, foreseen: Foreseen) -> list[Row]:
    """What one traced step tells of the step that will be measured: memory, traffic, time, energy."""
    at, rows = case.step, []

    def row(name: str, value: float, unit: str, formula: str = "", inputs: dict[str, Any] | None = None) -> None:
        made = figure(name, value, unit, formula, inputs, "traced: the module, optimizer and step under fake tensors", rank=0)
        made.step = at
        rows.append(made)

    held = {name: foreseen.held[name] for name in STATE}
    for name, value in held.items():
        row(f"memory/{name}", value, "bytes")
    row("memory/rest", foreseen.peak - sum(held.values()), "bytes", "allocated − weights − gradients − optimizer", foreseen.components)
    row("memory/allocated", foreseen.peak, "bytes", "sum of the components at the peak", foreseen.components)
    if case.n > 1:
        sent: dict[str, float] = {}
        for t in foreseen.work.transfers:
            sent[t.kind] = sent.get(t.kind, 0) + t.sent
        for kind, value in sent.items():
            row(f"traffic/{kind}", value, "bytes", "Σ calls × payload × what a ring sends of it")
        row("traffic/sent", sum(sent.values()), "bytes", "sum over the collectives", sent)
    if case.device is not None:
        from gradus.plan.step import step_time

        time = step_time(foreseen.work, Cluster(case.device, case.n))
        row("time/step", time.total, "s", "sum of the parts", time.parts)
        if case.device.power:
            inputs = {"power": case.device.power, "devices": case.n, "time": time.total}
            row("energy/step", case.device.power * case.n * time.total, "J", "power × devices × time", inputs)
    return rows


def refuse(case: Case, lacking: tuple[int, int, int], fix: str | None) -> str:
    """One line: what does not fit, and what would."""
    need, share, _ = lacking
    device = "GPU" if case.target == "cuda" else "host" if case.local == 1 else f"host for each of its {case.local} processes"
    fix = fix or "Set a smaller layout.micro_batch (gradus fit finds it) or layout.checkpointing=full"
    return f"the plan needs {size(need)} a process and the {device} has {size(share)}. {fix}, or go on with --force."


def fix_of(case: Case, lacking: tuple[int, int, int]) -> str:
    """The settings with which it fits. Takes some traces."""
    from gradus.proof.fit import Room, largest_micro_batch

    layout, (_, share, state) = case.recipe.layout, lacking
    for changes in ({}, {"checkpointing": "full"}, {"checkpointing": "full", "precision": "bf16"}):
        if state >= share or any(getattr(layout, k) == v for k, v in changes.items()):
            continue
        changed = case.recipe.model_copy(update={"layout": layout.model_copy(update=changes)})
        found = largest_micro_batch(changed, Room.of(case))
        if found:
            return "Set " + " ".join([*(f"layout.{k}={v}" for k, v in changes.items()), f"layout.micro_batch={found}"])
    if case.target == "cuda":
        return "Not one sample fits: set layout.shard=N over N GPUs or take a smaller model"
    if case.resident >= share:
        return f"Python and its libraries alone take {size(case.resident)} a process: start fewer on this host"
    return "Not one sample fits: take a smaller model or layout.shard=N over N hosts"


# ---------------------------------------------------------------- a process of its own


class NoPlan(Exception):
    """There is none, and why."""


class Planner:
    """A process in which a case is predicted: a trace makes a world of its own, which a process that has joined others cannot; it may be
    interrupted and given up at any moment; and what it takes of memory is not the run's.

    Begun before the others are met, where Linux lets it be a copy of this process, which has imported all that it needs. It ends with
    this process, however that ended.
    """

    def __init__(self):
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_plan, args=(theirs, self.pipe if sys.platform == "linux" else None), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that are there: none that is needed there
            self.process.start()
        theirs.close()

    def ask(self, case: Case, seconds: float = PATIENCE) -> Predicted:
        """Raises NoPlan where there is no answer in time."""
        end = time.monotonic() + seconds
        data = ForkingPickler.dumps(case)
        threading.Thread(target=self._send, args=(data,), daemon=True).start()  # a pipe that nobody reads is soon full
        try:
            if not self.pipe.poll(max(0.0, end - time.monotonic())):
                raise NoPlan(f"not ready within {seconds:.0f} s")
            found = self.pipe.recv()
            if isinstance(found, str):
                raise NoPlan(found)
            if found.lacking and self.pipe.poll(max(0.0, end - time.monotonic())):
                fix = self.pipe.recv()
                found.refusal = refuse(case, found.lacking, fix)
        except (EOFError, ConnectionError):
            raise NoPlan("the planning process ended") from None
        return found

    def _send(self, data: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(data)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Around a trace in this process: Ctrl-C takes effect at its end. In the midst of it, it may come in a destructor or a hook, where
    PyTorch drops it or aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt


def _plan(pipe: connection.Connection, other_end: connection.Connection | None) -> None:
    """In that process: a case comes, the prediction goes; where it does not fit, then the fix."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, whose end is this one's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if other_end is not None:
        other_end.close()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    torch.set_num_threads(1)  # the threads of the process that this is a copy of are not here
    try:
        case = pipe.recv()
        found = predict(case)
        pipe.send(found)
        if found.lacking:
            pipe.send(fix_of(case, found.lacking))
    except Exception as e:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(e).__name__}: {first_line(e)}")
    os._exit(0)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


# ---------------------------------------------------------------- the plan of a run


class Proof(Plan):
    """Foresees and follows a run of `gradus train`. A plan that fails is told in one line, and the run goes on."""

    def __init__(self, force: bool = False):
        self.force = force
        self.planner: Planner | None = None
        self.predicted: Predicted | None = None
        self.step: int | None = None
        self.measured: list[Row] = []
        self.traffic: list[Row] = []
        self.meter: Meter | None = None
        self.energy = [0.0, 0]  # joules, steps: of the stretches that held training alone
        self._mark: tuple[float, int, float] | None = None
        # (step, seconds of training, tokens so far) whenever the device was known to have done all
        self.marks: deque[tuple[int, float, int]] = deque(maxlen=TIMED)

    # ------------------------------------------------------------ before

    @contextlib.contextmanager
    def ready(self, world: worlds.World) -> Iterator[None]:
        try:
            if world.first and self.planner is None:
                with contextlib.suppress(Exception):  # then there is no plan, and `before` says so
                    self.planner = Planner()
            yield
        finally:
            self._end_planner()
            self._end_meter()

    def _end_planner(self) -> None:
        if self.planner:
            self.planner.end()
            self.planner = None

    def before(self, session: Session, position: tuple[int, int]) -> None:
        world = session.mesh.world
        verdict: tuple[str | None, int | None] = (None, None)
        if world.first:
            patience = PATIENCE if world.size == 1 else min(PATIENCE, WAIT * session.recipe.layout.timeout)
            try:
                case = case_of(session, position)
                verdict = None, case.step
                if self.planner is None:
                    raise NoPlan("no process could be started for it")
                self.predicted = self.planner.ask(case, patience)
                verdict = self.predicted.refusal, case.step
                print(self.predicted.line, flush=True)
                for note in self.predicted.notes[:2]:
                    print(f"note: {note}")
            except NoPlan as e:
                print(f"note: no plan ({e})", flush=True)
            except Exception as e:
                print(f"note: no plan ({type(e).__name__}: {first_line(e)})", flush=True)
            self._end_planner()
        if world.size > 1:
            verdict = worlds.from_first(verdict)
        refusal, self.step = verdict
        if refusal and not self.force:
            raise UserError(refusal)
        if refusal and world.first:
            print(f"note: --force: {refusal.partition('. ')[0]}", flush=True)

    def begin(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # the run's own rows will say that the disk is full
            for name in ("plan.jsonl", "proof.jsonl"):
                (folder / name).unlink(missing_ok=True)
            if self.predicted:
                write(folder / "plan.jsonl", self.predicted.rows)

    # ------------------------------------------------------------ on the way

    def start(self, trainer: Trainer) -> None:
        """Each GPU has a meter of its own; the processors of a host have one together."""
        self._mark_time(trainer)
        if trainer.device.type == "cuda" or trainer.parallel.mesh.world.local_rank == 0:
            with contextlib.suppress(Exception):  # a meter that fails is no meter
                self.meter = Meter(trainer.device)
                self.meter.__enter__()

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        number = trainer.progress.step - trainer.start_step + 1
        if number != self.step or not trainer.parallel.mesh.world.first or trainer.device.type not in ("cpu", "cuda"):
            yield
            return
        with memory_of_step(trainer, step.micro_batches) as found:
            yield
        self.measured = [Row(f"memory/{name}", value, "bytes", number, {"kind": "measured", "rank": 0}) for name, value in found.items()]

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        if trainer.device.type == "cpu":
            self._mark_time(trainer)
        elif taken.step - trainer.start_step == SETTLED:
            with trainer.clock.count("train", wait=True):
                pass
            self._mark_time(trainer)

    def _mark_time(self, trainer: Trainer) -> None:
        seconds = trainer.clock.seconds
        self.marks.append((trainer.progress.step, seconds["train"] + seconds["data"], trainer.progress.tokens))

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        if rows[0].name != "train/loss":
            return
        if trainer.device.type != "cpu":
            self._mark_time(trainer)
        if not self.traffic:
            sent = [row for row in rows if row.name.startswith("traffic/")]
            self.traffic = [Row(r.name, r.value, r.unit, r.step, {**r.conditions, "kind": "measured"}) for r in sent]
        self._read_meter(trainer)

    def _read_meter(self, trainer: Trainer) -> None:
        """Between two calls without an evaluation or a checkpoint there was training alone."""
        if self.meter is None:
            return
        seconds = trainer.clock.seconds
        now = (self.meter.read(), trainer.progress.step, seconds["evaluate"] + seconds["checkpoint"])
        if self._mark is not None and None not in (now[0], self._mark[0]) and now[2] == self._mark[2]:
            self.energy[0] += now[0] - self._mark[0]
            self.energy[1] += now[1] - self._mark[1]
        self._mark = now

    # ------------------------------------------------------------ after

    def _end_meter(self) -> None:
        if self.meter:
            self.meter.__exit__()
            self.meter = None

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        source = self.meter.source if self.meter else None
        mine = (self.meter is not None, *self.energy, source)
        self._end_meter()
        parallel = trainer.parallel
        told = [m for m in parallel.collect(mine) if m[0]]
        if not parallel.mesh.world.first:
            return []
        rows = [*self.measured, *self.traffic]
        if self.measured and trainer.device.type == "cpu":  # the whole run's, as its lines show it
            of_run = {"kind": "measured", "rank": 0, "of": "run"}
            rows += [Row(f"memory/{name}", n, "bytes", None, of_run) for name, n in peaks(trainer.device).items()]
        seconds = step_seconds(times_of(self.marks), trainer.start_step, self.step)
        if seconds:
            middle, low, high, count = seconds
            rows.append(Row("time/step", middle, "s", None, {"kind": "measured", "median_of": count, "fastest": low, "slowest": high}))
        if told and all(source and steps for _, _, steps, source in told):
            joules = total(j / steps for _, j, steps, _ in told)
            rows.append(Row("energy/step", joules, "J", None, {"kind": "measured", "meter": told[0][3], "meters": len(told)}))
        predicted = self.predicted.rows if self.predicted else []
        with contextlib.suppress(OSError):
            write(trainer.folder / "proof.jsonl", rows)
        found = pairs([row_dict(r) for r in predicted], [row_dict(r) for r in rows])
        if found:
            summary["proof"] = {f.name: f.summary() for f in found}
        return list(table(found)) if any(f.predicted is not None for f in found) else []


def times_of(marks: Iterable[tuple[int, float, int]]) -> Iterator[tuple[int, float, float]]:
    """(step, seconds, tokens) from (step, seconds, tokens so far): of steps between two marks only the mean is known."""
    for (before, then, seen), (last, now, tokens) in itertools.pairwise(marks):
        for step in range(before + 1, last + 1):
            yield step, (now - then) / (last - before), (tokens - seen) / (last - before)


def step_seconds(times: Iterable[tuple[int, float, float]], start: int, measured: int | None) -> tuple[float, float, float, int] | None:
    """(median, fastest, slowest, how many) seconds of a step, without the first ones and the one that was measured.

    Of batches of unequal size only those count whose tokens are within a tenth of the measured step's, where there are three.
    """
    times = [(step - start, seconds, tokens) for step, seconds, tokens in times]
    at = next((tokens for number, _, tokens in times if number == measured), None)
    kept = [t for t in times if t[0] != measured]
    kept = [t for t in kept if t[0] > SETTLED] or kept[len(kept) // 2 :]
    like = [t for t in kept if at is not None and abs(t[2] - at) <= 0.1 * at]
    chosen = [seconds for _, seconds, _ in (like if len(like) >= 3 else kept)]
    return (statistics.median(chosen), min(chosen), max(chosen), len(chosen)) if chosen else None


def write(path: Path, rows: list[Row]) -> None:
    path.unlink(missing_ok=True)
    file = RowFile(path)
    file.write(rows)
    file.close()


class Scaled:
    """Goes with `gradus scale`: a plan for every number of processes (measure.scaling.measure)."""

    def __init__(self, force: bool = False):
        self.force = force
        self.rows: list[Row] = []

    def before(self, by_processes: dict[int, Recipe], say: Callable[[str], None]) -> list[Row]:
        """The rows of the plans. Raises UserError where one will not fit."""
        for n, recipe in by_processes.items():
            planner = None
            try:
                planner = Planner()
                found = planner.ask(dataclasses.replace(case_of(open_for(recipe, n)), local=n))
            except Exception as e:
                why = str(e) if isinstance(e, NoPlan) else f"{type(e).__name__}: {first_line(e)}"
                say(f"note: no plan for {n} process{'es' * (n > 1)} ({why})")
                continue
            finally:
                if planner:
                    planner.end()
            if found.refusal and not self.force:
                raise UserError(f"--processes {n}: {found.refusal}")
            say(f"{n} process{'es' * (n > 1)}, {found.line}")
            for row in found.rows:
                row.conditions["processes"] = n
            self.rows += found.rows
        return self.rows

    def after(self, rows: list[Row], folder: Path, say: Callable[[str], None]) -> None:
        """Prints what was planned of the step and of what it sends beside what was measured, and writes it to `folder`/proof.jsonl."""
        found: list[tuple[int, Pair]] = []
        for n in dict.fromkeys(row.conditions["processes"] for row in self.rows):
            said = [row_dict(row) for row in self.rows if row.conditions["processes"] == n]
            seen = {row.name: row.value for row in rows if row.conditions.get("processes") == n}
            measured = [("time/step", "s", seen.get("scale/step")), ("traffic/sent", "bytes", seen.get("scale/sent") or None)]
            found += [(n, pair) for pair in pairs(said, [{"name": k, "unit": u, "value": v} for k, u, v in measured if v is not None])]
        if found:
            write(folder / "proof.jsonl", [Row(f.name, f.measured, f.unit, None, {"kind": "measured", "processes": n}) for n, f in found])
            say("")
            for n, f in found:
                error = "-" if f.error is None else f"{f.error:+.1%}"
                values = f"planned {shown(f.predicted, f.unit)}, measured {shown(f.measured, f.unit)}, error {error}"
                say(f"{n} process{'es' * (n > 1)}, {LABELS.get(f.name, f.name)}: {values}")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


# ---------------------------------------------------------------- what is measured


@contextlib.contextmanager
def memory_of_step(trainer: Trainer, micro_batches: list[Batch]) -> Iterator[dict[str, int]]:
    """Bytes by name, once the step within is done: weights, gradients (all of them, when the optimizer steps), optimizer, allocated (the
    peak), rest (the difference); on CUDA also reserved, and device: what all processes have of the GPU."""
    device, found, precision = trainer.device, {}, trainer.precision
    own, gradients = precision.step, {}

    def step(optimizer: Any, bad: Tensor) -> None:
        gradients.update(_storages(h.local.grad for h in trainer.parallel.local_parameters if h.local.grad is not None))
        own(optimizer, bad)

    precision.step = step
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin_peak(device)
            yield found
            torch.cuda.synchronize(device)
            found["allocated"] = torch.cuda.max_memory_allocated(device)
            found["reserved"] = torch.cuda.max_memory_reserved(device)
            free, whole = torch.cuda.mem_get_info(device)
            found["device"] = whole - free
        else:
            held = alive(micro_batches)
            with Timeline() as timeline:
                yield found
            if isinstance(trainer.parallel.model, nn.parallel.DistributedDataParallel):
                held |= gradients  # its buckets, which are there between steps too
            found["allocated"] = sum(held.values()) + max(peak for *_, peak in timeline.phases())
    finally:
        del precision.step  # the class's own is there again
    found |= state_bytes(trainer) | {"gradients": sum(gradients.values())}
    found["rest"] = found["allocated"] - sum(found[name] for name in STATE)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {torch_private.memory_id(t): t.untyped_storage().nbytes() for t in map(_local, tensors)}


def state_bytes(trainer: Trainer) -> dict[str, int]:
    """What this process holds between two steps."""
    part = trainer.parallel.part
    state = [] if trainer.optimizer is None else [v for values in trainer.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return {"weights": sum(_storages([*part.parameters(), *part.buffers()]).values()), "optimizer": sum(_storages(state).values())}


def alive(micro_batches: list[Batch]) -> dict[int, int]:
    """Storage → bytes, on a CPU: of all tensors now whose memory PyTorch allocated itself (arrays of NumPy's and files that are mapped are
    others'), and of the step's batch."""
    found = _storages(v for batch in micro_batches for v in batch.values() if isinstance(v, Tensor))
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.resizable():
                found[torch_private.storage_id(storage)] = storage.nbytes()
    return found


# ---------------------------------------------------------------- side by side


@dataclasses.dataclass(frozen=True)
class Pair:
    """One figure. Either side may be absent; error: measured against predicted, (predicted - measured) / measured."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or not self.measured else (self.predicted - self.measured) / self.measured

    def summary(self) -> dict[str, float]:
        found = {"predicted": self.predicted, "measured": self.measured, "error": self.error}
        return {k: v for k, v in found.items() if v is not None}


KEPT = ("process", "reserved", "device")  # planned of the largest batch: what a process has taken, it keeps
SHOWN = (
    *(f"memory/{name}" for name in (*STATE, "rest", "allocated", *KEPT)), "time/step", "traffic/sent", "energy/step",
)  # fmt: skip
LABELS = {
    "memory/allocated": "tensors at the peak", "memory/rest": "activations and the rest", "memory/process": "process at the peak",
    "memory/reserved": "reserved at the peak", "memory/device": "device", "time/step": "step", "traffic/sent": "sent a step",
    "energy/step": "energy a step",
}  # fmt: skip


def row_dict(row: Row) -> dict[str, Any]:
    return {"name": row.name, "value": row.value, "unit": row.unit, "step": row.step, **row.conditions}


def pairs(predicted: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[Pair]:
    """What was predicted of the measured step (KEPT: of the largest batch) beside what was measured; nothing where nothing was."""
    said = {r["name"]: r for r in predicted if r.get("step") is not None or r["name"].removeprefix("memory/") in KEPT}
    seen = {r["name"]: r for r in measured}
    names = [*SHOWN, *sorted(name for name in {*said, *seen} if name.startswith("traffic/") and name not in SHOWN)]
    found = []
    for name in names:
        p, m = said.get(name), seen.get(name)
        if m is not None and (name in said or name.startswith(("time", "energy"))):
            found.append(Pair(name, m["unit"], p and p["value"], m["value"]))
    return found


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return size(value) if unit == "bytes" else duration(value) if unit == "s" else f"{value:.3g} {unit}"


def table(found: Sequence[Pair]) -> Iterator[str]:
    """predicted | measured | error, a line a figure. Collectives by kind are in the rows alone."""
    found = [f for f in found if f.name in SHOWN]
    if found:
        yield f"{'the plan':26} {'predicted':>12} {'measured':>12} {'error':>8}"
    for f in found:
        label = LABELS.get(f.name, f.name.rpartition("/")[2])
        error = "-" if f.error is None else f"{f.error:+.1%}"
        yield f"  {label:24} {shown(f.predicted, f.unit):>12} {shown(f.measured, f.unit):>12} {error:>8}"


def prove(folders: Sequence[str], as_json: bool = False) -> Iterator[str]:
    """`gradus prove RUN...`: of one run its table; of several, each figure's error by run, and the median of their sizes.

    Raises UserError for a folder without a run, or a run that left no plan or proof.
    """
    runs = {str(folder): pairs(*files_of(Path(folder))) for folder in folders}
    if as_json:
        for folder, found in runs.items():
            for f in found:
                yield Row(f"proof/{f.name}", f.measured, f.unit, None, {"run": folder, **f.summary()}).json()
        return
    if len(runs) == 1:
        yield from table(next(iter(runs.values())))
        return
    names = [name for name in SHOWN if any(f.name == name and f.error is not None for found in runs.values() for f in found)]
    heads = [LABELS.get(name, name.rpartition("/")[2]) for name in names]
    width = max(len(folder) for folder in runs)
    widths = [max(10, len(head)) for head in heads]
    yield f"{'error':{width}}  " + "  ".join(f"{head:>{w}}" for head, w in zip(heads, widths))
    errors: dict[str, list[float]] = {}
    for folder, found in runs.items():
        cells = []
        for name, w in zip(names, widths):
            error = next((f.error for f in found if f.name == name), None)
            if error is not None:
                errors.setdefault(name, []).append(abs(error))
            cells.append(f"{'-' if error is None else f'{error:+.1%}':>{w}}")
        yield f"{folder:{width}}  " + "  ".join(cells)
    for word, function in (("median", statistics.median), ("largest", max)):
        yield f"{word:{width}}  " + "  ".join(f"{function(errors[name]):>{w}.1%}" for name, w in zip(names, widths))


def files_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows predicted, rows measured) of a finished run."""
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: no run here (it has no recipe.yaml).")
    for name, what in (("plan.jsonl", "it was trained without a plan, or the plan failed"), ("proof.jsonl", "it has not come to its end")):
        if not (folder / name).exists():
            raise UserError(f"{folder}: no {name}: {what}. Train it again, or to its end with --resume.")
    return read_rows(folder / "plan.jsonl"), read_rows(folder / "proof.jsonl")
