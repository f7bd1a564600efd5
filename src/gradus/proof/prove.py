"""The plan proved by the run: predicted before the first step, measured on the way, and set beside each other at the end.

Two batches are looked at. What the run needs at most is that of its largest micro-batch: where it does not fit, the run is refused. What is
proved is one step, the third of a start, whose batch is known beforehand: the same batch is traced and then measured, on rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.data.loader import Step
from gradus.errors import UserError
from gradus.measure.energy import Meter, total
from gradus.parallel import world as worlds
from gradus.parallel.processes import Fault
from gradus.proof.calibrate import once
from gradus.proof.measured import memory_of_step
from gradus.proof.pairs import LABELS, errors_table, pairs, table
from gradus.proof.predict import PATIENCE, Planner, Predicted, case_of
from gradus.rows import Row, read_rows
from gradus.train.clock import peaks
from gradus.train.loop import Taken, Trainer
from gradus.train.run import Plan
from gradus.train.session import Session

SETTLED = 5  # steps of a start whose times are kept apart from those of the others
TIMED = 4096  # latest marks of the time that are kept: on a CPU one a step
MEASURED = {"kind": "measured"}
WAIT = 0.25  # of layout.timeout, after which others that wait for the plan give this process up


class Proof(Plan):
    """Foresees and follows a run of `gradus train`. A plan that fails is told in one line, and the run goes on."""

    def __init__(self, force: bool = False):
        self.force = force
        self.planner: Planner | None = None
        self.predicted: Predicted | None = None
        self.measured: list[Row] = []
        self.traffic: list[Row] = []
        self.meter: Meter | None = None
        self.energy = [0.0, 0]  # joules, steps: of the stretches that held training alone
        self.opened = contextlib.ExitStack()  # the planner, then the meter
        self._mark: tuple[float, int, float] | None = None
        # (step, seconds of training, tokens so far) whenever the device was known to have done all
        self.marks: deque[tuple[int, float, int]] = deque(maxlen=TIMED)

    # ------------------------------------------------------------ before

    @contextlib.contextmanager
    def ready(self, world: worlds.World) -> Iterator[None]:
        with self.opened:
            if world.first and self.planner is None:  # it is begun once: not again when the processes have met
                with contextlib.suppress(Exception):  # then there is no plan, and `before` says so
                    self.planner = self.opened.enter_context(Planner())
            yield

    def before(self, session: Session, position: tuple[int, int]) -> None:
        world = session.mesh.world
        verdict = self._foresee(session, position) if world.first else None
        refusal, self.step = worlds.from_first(verdict) if world.size > 1 else verdict
        if refusal and not self.force:
            raise UserError(f"{refusal.removesuffix('.')}, or start anyway with --force.")
        if refusal and world.first:
            print(f"note: --force: {refusal.partition('. ')[0]}", flush=True)

    def _foresee(self, session: Session, position: tuple[int, int]) -> tuple[str | None, int | None]:
        """(why the run is refused, the step that will be measured). Prints the plan, or why there is none."""
        step = None
        try:
            once(session)
            case = case_of(session, position)
            step = case.step
            if self.planner is None:
                raise UserError("no process could be started for it")
            alone = session.mesh.world.size == 1
            self.predicted = self.planner.plan(case, PATIENCE if alone else min(PATIENCE, WAIT * session.recipe.layout.timeout))
            print(self.predicted.line, flush=True)
            for note in self.predicted.notes[:2]:
                print(f"note: {note}")
        except Exception as e:
            print(f"note: no plan ({why_not(e)})", flush=True)
        self.opened.close()
        return self.predicted.refusal if self.predicted else None, step

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
                self.meter = self.opened.enter_context(Meter(trainer.device))

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        number = trainer.progress.step - trainer.start_step + 1
        looked = number == self.step and trainer.parallel.mesh.world.first and trainer.device.type in ("cpu", "cuda")
        with memory_of_step(trainer, step.micro_batches) if looked else contextlib.nullcontext({}) as found:
            yield
        self.measured += [Row(f"memory/{name}", value, "bytes", number, MEASURED | {"rank": 0}) for name, value in found.items()]

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
            sent = (row for row in rows if row.name.startswith("traffic/"))
            self.traffic = [dataclasses.replace(row, conditions=row.conditions | MEASURED) for row in sent]
        self._read_meter(trainer)

    def _read_meter(self, trainer: Trainer) -> None:
        """Between two calls without an evaluation or a checkpoint there was training alone."""
        if self.meter is None:
            return
        seconds = trainer.clock.seconds
        now, before = (self.meter.read(), trainer.progress.step, seconds["evaluate"] + seconds["checkpoint"]), self._mark
        if before is not None and None not in (now[0], before[0]) and now[2] == before[2]:
            self.energy = [self.energy[0] + now[0] - before[0], self.energy[1] + now[1] - before[1]]
        self._mark = now

    # ------------------------------------------------------------ after

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        mine = (*self.energy, self.meter.source) if self.meter else None
        self.opened.close()
        told = [m for m in trainer.parallel.collect(mine) if m]
        if not trainer.parallel.mesh.world.first:
            return []
        if trainer.progress.step == trainer.start_step:  # of a run that had ended before
            return self._as_it_was(trainer.folder, summary)
        rows = [*self.measured, *self.traffic]
        if self.measured and trainer.device.type == "cpu":  # the whole run's, as its lines show it
            of_run = MEASURED | {"rank": 0, "of": "run"}
            rows += [Row(f"memory/{name}", n, "bytes", None, of_run) for name, n in peaks(trainer.device).items()]
        seconds = step_seconds(times_of(self.marks), trainer.start_step, self.step)
        if seconds:
            middle, low, high, count = seconds
            rows.append(Row("time/step", middle, "s", None, MEASURED | {"median_of": count, "fastest": low, "slowest": high}))
        if told and all(source and steps for _, steps, source in told):
            joules = total(j / steps for j, steps, _ in told)
            rows.append(Row("energy/step", joules, "J", None, MEASURED | {"meter": told[0][2], "meters": len(told)}))
        with contextlib.suppress(OSError):
            write(trainer.folder / "proof.jsonl", rows)
        predicted = self.predicted.rows if self.predicted else []
        return _compared([r.record() for r in predicted], [r.record() for r in rows], summary)

    @staticmethod
    def _as_it_was(folder: Path, summary: dict[str, Any]) -> list[str]:
        with contextlib.suppress(UserError):
            return _compared(*files_of(folder), summary)
        return []


def _compared(predicted: list[dict[str, Any]], measured: list[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    """The table of both; `summary` gets it as data."""
    found = pairs(predicted, measured)
    if found:
        summary["proof"] = {f.name: f.summary() for f in found}
    return table(found) if any(f.predicted is not None for f in found) else []


def times_of(marks: Iterable[tuple[int, float, int]]) -> Iterator[tuple[int, float, float]]:
    """(step, seconds, tokens) from (step, seconds, tokens so far): of steps between two marks only the mean is known."""
    for (before, then, seen), (last, now, tokens) in itertools.pairwise(marks):
        for step in range(before + 1, last + 1):
            yield step, (now - then) / (last - before), (tokens - seen) / (last - before)


def step_seconds(times: Iterable[tuple[int, float, float]], start: int, measured: int | None) -> tuple[float, float, float, int] | None:
    """(median, fastest, slowest, how many) seconds of a step, without the first ones and the one that was measured.

    Of batches of unequal size only those count whose tokens are within a tenth of the measured step's, where there are three; else the
    three nearest, each by its time per token.
    """
    times = [(step - start, seconds, tokens) for step, seconds, tokens in times]
    at = next((tokens for number, _, tokens in times if number == measured), None)
    kept = [t for t in times if t[0] != measured]
    kept = [t for t in kept if t[0] > SETTLED] or kept[len(kept) // 2 :]
    like = [t for t in kept if at is not None and abs(t[2] - at) <= 0.1 * at]
    if at and len(like) < 3:
        near = sorted((t for t in kept if t[2]), key=lambda t: abs(t[2] - at))[:3]
        like = [(number, seconds * at / tokens, at) for number, seconds, tokens in near]
    chosen = [seconds for _, seconds, _ in like or kept]
    return (statistics.median(chosen), min(chosen), max(chosen), len(chosen)) if chosen else None


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(row.json() + "\n" for row in rows), encoding="utf-8")


def why_not(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return text if isinstance(error, UserError | Fault | TimeoutError | EOFError) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------- the verb


def prove(folders: Sequence[str], as_json: bool = False) -> Iterator[str]:
    """`gradus prove RUN...`: of one run its table; of several, each figure's error by run, and the median of their sizes.

    Raises UserError for a folder without a run, or a run that left no plan or proof.
    """
    runs = {str(folder): pairs(*files_of(Path(folder))) for folder in folders}
    if as_json:
        both = ((run, f, f.predicted if f.measured is None else f.measured) for run, found in runs.items() for f in found)
        rows = (Row(f"proof/{f.name}", value, f.unit, None, {"run": run, **f.summary()}) for run, f, value in both)
        yield from (row.json() for row in rows)
    else:
        yield from table(next(iter(runs.values()))) if len(runs) == 1 else errors_table(runs)


def files_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows predicted, rows measured) of a finished run."""
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: no run here (it has no recipe.yaml).")
    for name, what in (("plan.jsonl", "it was trained without a plan, or the plan failed"), ("proof.jsonl", "it is not finished")):
        if not (folder / name).exists():
            raise UserError(f"{folder}: no {name}: {what}. Train it again, or finish it with --resume.")
    predicted, measured = read_rows(folder / "plan.jsonl"), read_rows(folder / "proof.jsonl")
    for name, rows in (("plan.jsonl", predicted), ("proof.jsonl", measured)):
        if not any(row["name"] in LABELS for row in rows):
            raise UserError(f"{folder}: {name} has no row of a plan. Train it again.")
    return predicted, measured
