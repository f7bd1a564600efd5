"""The plan proved by the run: predicted before the first step, measured on the way, and compared at the end.

Two batches are looked at. The largest micro-batch says what the run needs at most: where it does not fit, the run is
refused. One step is proved, the third of a start, whose batch is known beforehand: the same batch is traced and then
measured, on rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradus import limits
from gradus.data.loader import Step
from gradus.errors import DataError, UserError
from gradus.measure.energy import Meter, total
from gradus.measure.flops import for_run
from gradus.parallel import world as worlds
from gradus.parallel.processes import Fault
from gradus.proof.calibrate import calibrate_once
from gradus.proof.pairs import LABELS, errors_table, pairs_of_run, table
from gradus.proof.predict import PATIENCE, Planner, Predicted, case_of
from gradus.proof.run_energy import add_energy
from gradus.proof.step_memory import memory_of_step
from gradus.proof.timing import OtherPrograms, taken
from gradus.rows import Row, as_lines, read_rows
from gradus.text import duration, say
from gradus.train.clock import peaks
from gradus.train.loop import Taken, Trainer
from gradus.train.resolve import RunContext
from gradus.train.run import Outcome, Plan, start
from gradus.train.session import Session

FIRST_LOOK = 4  # steps of a start after which they are compared with their plan; then after 8, 16, ...
FIRST_STEPS = 5  # of a start: their times do not count
MARKS = 4096  # latest marks of the time that are kept: on a CPU one for each step
MEASURED = {"kind": "measured"}
SLOW = 5.0  # times its plan, from which a step is said to be slow
WAIT = 0.25  # of layout.timeout, after which others that wait for the plan give this process up


class TimeMark(NamedTuple):
    """The progress of a run at a moment when the device had finished all of it."""

    step: int
    seconds: float  # of training
    tokens: int


class StepTime(NamedTuple):
    step: int
    seconds: float
    tokens: float


class StepSeconds(NamedTuple):
    """Seconds of the steps that count, and how many they are."""

    median: float
    fastest: float
    slowest: float
    count: int


class MeterMark(NamedTuple):
    joules: float | None
    step: int
    paused: float  # seconds of evaluations and checkpoints so far


class Energy(NamedTuple):
    """Energy by one process's meter, of the stretches of a run with training alone; in_all: of all since this start,
    which is `share` of the run's seconds: of a replica that came later a smaller one."""

    joules: float
    steps: int
    source: str | None = None
    in_all: float | None = None
    share: float = 1.0


class Proof(Plan):
    """The plan of a run of `gradus train` and its measurement, around the whole of it. A plan that fails is told in one
    line, and the run goes on."""

    def __init__(self, force: bool = False, world: worlds.World = worlds.World()):
        self.force, self.world = force, world
        self.planner: Planner | None = None
        self.predicted: Predicted | None = None
        self.measured: list[Row] = []
        self.traffic: list[Row] = []
        self.meter: Meter | None = None
        self.energy = Energy(0.0, 0)
        self.seconds_before = 0.0  # of the run, up to this start
        self.opened = contextlib.ExitStack()  # the planner, then the meter
        self._meter_mark: MeterMark | None = None
        self.others: OtherPrograms | None = None  # since the start, then since the first step
        self.load: dict[str, float | None] = {}  # processors that others took
        self.next_look = FIRST_LOOK
        self.marks: deque[TimeMark] = deque(maxlen=MARKS)

    # ------------------------------------------------------------ before

    def __enter__(self) -> Proof:
        """Before the processes meet."""
        self._watch_others()
        if self.world.first:
            with contextlib.suppress(Exception):  # then there is no plan, and `before` says so
                self.planner = self.opened.enter_context(Planner())
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.close()

    def before(self, session: Session, position: tuple[int, int]) -> None:
        world = session.mesh.world
        answer = worlds.from_first(self._predict(session, position) if world.first else None)
        if isinstance(answer, DataError):
            raise answer
        refusal, self.step, evaluate_batch = answer
        if evaluate_batch:
            session.recipe.evaluate.batch = evaluate_batch
        if refusal and not self.force:
            raise UserError(f"{refusal.removesuffix('.')}, or start anyway with --force.")
        if refusal and world.first:
            say(f"note: --force: {refusal.partition('. ')[0]}")

    def _predict(
        self, session: Session, position: tuple[int, int]
    ) -> tuple[str | None, int | None, int | None] | DataError:
        """(why the run is refused, the step that will be measured, evaluate.batch where its default does not fit).
        Prints the plan, or why there is none; an error of the data is returned."""
        step = None
        try:
            why = calibrate_once(session, self._taken(session.device.type) is not None)
            case = dataclasses.replace(case_of(session, position), no_time=why)
            step = case.step
            if self.planner is None:
                raise UserError("no process could be started for it")
            others_wait = session.mesh.world.size > 1
            patience = min(PATIENCE, WAIT * session.recipe.layout.timeout) if others_wait else PATIENCE
            try:
                self.predicted = self.planner.plan(case, patience)
            except TimeoutError as e:
                share = f", {WAIT:g} of layout.timeout: the other processes wait" if patience < PATIENCE else ""
                raise UserError(f"{e}{share}") from None
            say(self.predicted.line)
            for note in self.predicted.notes[:2]:
                say(f"note: {note}")
        except DataError as e:  # training would meet it too, after many steps
            return e
        except Exception as e:
            say(f"note: no plan ({why_not(e)})")
        self.load["before"] = self.others.share()
        if line := self._taken(session.device.type):
            say(f"note: {line}")
        self.opened.close()
        planned = self.predicted
        return planned and planned.refusal, step, planned and planned.evaluate_batch

    def _watch_others(self) -> None:
        """From now on. The processes of this host have one parent; of one process, its parent may be anything."""
        if self.world.first:
            self.others = OtherPrograms(os.getppid() if self.world.local_size > 1 else os.getpid())

    def _taken(self, device: str) -> str | None:
        """A line where other programs have the processors that a run on a CPU needs."""
        threads, processes = torch.get_num_threads(), self.world.local_size
        return taken(self.others.share(), threads, processes) if device == "cpu" else None

    def begin(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # the run's own rows will say that the disk is full
            for name in ("plan.jsonl", "proof.jsonl"):
                (folder / name).unlink(missing_ok=True)
            if self.predicted:
                write(folder / "plan.jsonl", self.predicted.rows)

    # ------------------------------------------------------------ on the way

    def start(self, trainer: Trainer) -> None:
        """Each GPU has a meter of its own; the processors of a host have one together."""
        self.opened.close()  # a replica that comes to a run has planned nothing, and its planner still waits
        self._watch_others()
        self._mark_time(trainer)
        self.seconds_before = sum(trainer.clock.seconds.values())
        if trainer.device.type == "cuda" or trainer.parallel.mesh.world.local_rank == 0:
            with contextlib.suppress(Exception):  # a meter that fails is no meter
                self.meter = self.opened.enter_context(Meter(trainer.device))

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        number = trainer.progress.step - trainer.start_step + 1
        first, device = trainer.parallel.mesh.world.first, trainer.device.type
        if not (number == self.step and first and device in ("cpu", "cuda")):
            yield
            return
        with memory_of_step(trainer, step.micro_batches) as memory:
            yield
        conditions = MEASURED | {"rank": 0}
        self.measured += [Row(f"memory/{name}", n, "bytes", number, conditions) for name, n in memory.items()]

    def after_step(self, trainer: Trainer, result: Taken) -> None:
        if trainer.device.type == "cpu":
            self._mark_time(trainer)
            steps = result.step - trainer.start_step
            if steps >= self.next_look and self.others is not None:
                self.next_look = math.inf if self._note_slow(trainer) else 2 * steps
        elif result.step - trainer.start_step == FIRST_STEPS:
            with trainer.clock.count("train", wait=True):
                pass
            self._mark_time(trainer)

    def _note_slow(self, trainer: Trainer) -> bool:
        """Prints what helps where steps take many times their plan. Returns whether they do."""
        rows = self.predicted.rows if self.predicted else []
        planned = next((row.value for row in rows if row.name == "time/step"), None)
        measured = step_seconds(times_of(self.marks), trainer.start_step, self.step)
        if not planned or not measured or measured.median < SLOW * planned:
            return False
        why = self._taken("cpu")
        if why is None and self.world.size == 1:
            why = f"gradus profile {trainer.folder} shows where the time goes"
        times = f"{duration(measured.median)}, {measured.median / planned:.0f} × its plan"
        trainer.say(f"note: a step takes {times}{f': {why}' if why else ''}")
        return True

    def _mark_time(self, trainer: Trainer) -> None:
        if not trainer.synced:  # of local updates a step's time is its share of all from one sync to the next
            return
        seconds = trainer.clock.seconds
        progress = trainer.progress
        self.marks.append(TimeMark(progress.step, seconds["train"] + seconds["data"], progress.tokens))

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        if rows[0].name != "train/loss":
            return
        if trainer.device.type != "cpu":
            self._mark_time(trainer)
        if not self.traffic:
            sent = (row for row in rows if row.name.startswith("traffic/"))
            self.traffic = [dataclasses.replace(row, conditions=row.conditions | MEASURED) for row in sent]
        self._read_meter(trainer)

    def _read_meter(self, trainer: Trainer) -> None:
        """Between two calls without an evaluation or a checkpoint there was training alone."""
        if self.meter is None:
            return
        paused = trainer.clock.seconds["evaluate"] + trainer.clock.seconds["checkpoint"]
        now, before = MeterMark(self.meter.read(), trainer.progress.step, paused), self._meter_mark
        if before is not None and None not in (now.joules, before.joules) and now.paused == before.paused:
            joules, steps = now.joules - before.joules, now.step - before.step
            self.energy = Energy(self.energy.joules + joules, self.energy.steps + steps)
        self._meter_mark = now

    # ------------------------------------------------------------ after

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        self.opened.close()
        meter = self.meter
        seconds = sum(trainer.clock.seconds.values())
        share = 1 - self.seconds_before / seconds if seconds else 0.0
        own_energy = self.energy._replace(source=meter.source, in_all=meter.joules, share=share) if meter else None
        energies = [energy for energy in worlds.gathered(own_energy) if energy]
        if not trainer.parallel.mesh.world.first:
            return []
        load = self.load | {"during": self.others and self.others.share()}
        known = {name: round(share, 2) for name, share in load.items() if share is not None}
        summary["load"] = {"processors": limits.cores(), **known}
        if trainer.progress.step == trainer.start_step:  # of a run that had ended before
            predicted, measured = self._as_it_was(trainer.folder)
        else:
            rows = [*self._measured_rows(trainer), *energy_rows(energies)]
            with contextlib.suppress(OSError):
                write(trainer.folder / "proof.jsonl", rows)
            planned = self.predicted  # of a replica that became rank 0 later: what another has planned
            predicted = [r.record() for r in planned.rows] if planned else self._as_it_was(trainer.folder)[0]
            measured = [r.record() for r in rows]
        if pairs := pairs_of_run(predicted, measured):
            summary["proof"] = {pair.name: pair.summary() for pair in pairs}
        lines = table(pairs) if any(pair.predicted is not None for pair in pairs) else []
        metered = next((row for row in measured if row["name"] == "energy/run"), None)
        return [*lines, add_energy(trainer, summary, metered)]

    def _measured_rows(self, trainer: Trainer) -> Iterator[Row]:
        """Memory and traffic of the measured step, and the time of steps like it."""
        yield from (*self.measured, *self.traffic)
        if self.measured and trainer.device.type == "cpu":  # the whole run's, as its lines show it
            conditions = MEASURED | {"rank": 0, "of": "run"}
            for name, n in peaks(trainer.device).items():
                yield Row(f"memory/{name}", n, "bytes", None, conditions)
        seconds = step_seconds(times_of(self.marks), trainer.start_step, self.step)
        if seconds:
            spread = {"median_of": seconds.count, "fastest": seconds.fastest, "slowest": seconds.slowest}
            yield Row("time/step", seconds.median, "s", None, MEASURED | spread)

    @staticmethod
    def _as_it_was(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        with contextlib.suppress(UserError):
            plan, proof = (folder / name for name in ("plan.jsonl", "proof.jsonl"))
            return tuple(read_rows(file) if file.exists() else [] for file in (plan, proof))
        return [], []


def train_and_prove(
    name: str, overrides: list[str], context: RunContext, *, force: bool = False, **options: Any
) -> Outcome:  # fmt: skip
    """`train.run.start` of a run that is planned before and measured beside. force: also where it will not fit."""
    with Proof(force, context.world) as proof:
        return start(name, overrides, context, plan=proof, flops=for_run, **options)


def energy_rows(energies: Sequence[Energy]) -> Iterator[Row]:
    """The joules of a step, and of the run, by all processes' meters; nothing where one has none to tell. Seconds that
    a meter did not see count as many joules as those that it saw."""
    if not energies or not all(energy.source for energy in energies):
        return
    conditions = MEASURED | {"meter": energies[0].source, "meters": len(energies)}
    if all(energy.steps for energy in energies):
        yield Row("energy/step", total(e.joules / e.steps for e in energies), "J", None, conditions)
    share = min(energy.share for energy in energies)
    if share and (joules := total(energy.in_all and energy.in_all / energy.share for energy in energies)):
        yield Row("energy/run", joules, "J", None, conditions | {"share": share})


def times_of(marks: Iterable[TimeMark]) -> Iterator[StepTime]:
    """The time of each step: of steps between two marks only the mean is known."""
    for before, now in itertools.pairwise(marks):
        for step in range(before.step + 1, now.step + 1):
            n = now.step - before.step
            yield StepTime(step, (now.seconds - before.seconds) / n, (now.tokens - before.tokens) / n)


def step_seconds(times: Iterable[StepTime], start: int, measured: int | None) -> StepSeconds | None:
    """The seconds of a step, without the first ones and the one that was measured, both counted from `start`.

    Of batches of unequal size only those count whose tokens are within a tenth of the measured step's, where there are
    three; else the three nearest, each by its time per token.
    """
    times = [t._replace(step=t.step - start) for t in times]
    tokens = next((t.tokens for t in times if t.step == measured), None)
    others = [t for t in times if t.step != measured]
    others = [t for t in others if t.step > FIRST_STEPS] or others[len(others) // 2 :]
    alike = [t.seconds for t in others if tokens is not None and abs(t.tokens - tokens) <= 0.1 * tokens]
    if tokens and len(alike) < 3:
        nearest = sorted((t for t in others if t.tokens), key=lambda t: abs(t.tokens - tokens))[:3]
        alike = [t.seconds * tokens / t.tokens for t in nearest]
    chosen = alike or [t.seconds for t in others]
    return StepSeconds(statistics.median(chosen), min(chosen), max(chosen), len(chosen)) if chosen else None


def write(path: Path, rows: list[Row]) -> None:
    path.write_text(as_lines(rows), encoding="utf-8")


def why_not(error: Exception) -> str:
    """Why there is no plan, in a line. A fault of the planner's own is also added to the file that GRADUS_FAULTS names:
    tests fail for it."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, UserError | TimeoutError | EOFError):
        return text
    text = text if isinstance(error, Fault) else f"{type(error).__name__}: {text}"
    if file := os.environ.get("GRADUS_FAULTS"):
        with open(file, "a", encoding="utf-8") as faults:
            faults.write(f"{text}\n")
    return text


# ---------------------------------------------------------------- the verb


def prove(folders: Sequence[str], as_json: bool = False) -> Iterator[str]:
    """`gradus prove RUN...`: of one run its table; of several, each figure's error by run, and the median of their
    sizes.

    Raises UserError for a folder without a run, or a run that left no plan or proof.
    """
    runs = {str(folder): pairs_of_run(*files_of(Path(folder))) for folder in folders}
    if as_json:
        for run, pair in ((run, pair) for run, pairs in runs.items() for pair in pairs):
            value = pair.predicted if pair.measured is None else pair.measured
            yield Row(f"proof/{pair.name}", value, pair.unit, None, {"run": run, **pair.summary()}).json()
    else:
        yield from table(next(iter(runs.values()))) if len(runs) == 1 else errors_table(runs)


def files_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows predicted, rows measured) of a finished run."""
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: no run here (it has no recipe.yaml).")
    reasons = {"plan.jsonl": "it was trained without a plan, or the plan failed", "proof.jsonl": "it is not finished"}
    for name, reason in reasons.items():
        if not (folder / name).exists():
            raise UserError(f"{folder}: no {name}: {reason}. Train it again, or finish it with --resume.")
    predicted, measured = read_rows(folder / "plan.jsonl"), read_rows(folder / "proof.jsonl")
    for name, rows in (("plan.jsonl", predicted), ("proof.jsonl", measured)):
        if not any(row["name"] in LABELS for row in rows):
            raise UserError(f"{folder}: {name} has no row of a plan. Train it again.")
        if large := [row["name"] for row in rows if isinstance(row["value"], int) and abs(row["value"]) > 1e300]:
            raise UserError(f"{folder}: {name}: the value of {large[0]} is no figure of a run. Train it again.")
    return predicted, measured
