"""The runners of studies: each times the steps of one configuration in a process that may meet others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradus import models
from gradus.data.loader import Step
from gradus.errors import UserError
from gradus.measure.profile import endless
from gradus.measure.trace import merged
from gradus.parallel import status
from gradus.parallel.traffic import collective
from gradus.parallel.world import World, meet
from gradus.plan import batches
from gradus.proof.step_memory import memory_of_step
from gradus.proof.timing import Subject, Timed, Window, peak_of_one_more, time_it
from gradus.recipe.schema import Layout, Recipe
from gradus.train.loop import Trainer
from gradus.train.metrics import TrafficCount
from gradus.train.session import Session, open_session

PROFILED = 3  # steps whose collectives are timed by name


def train_steps(recipe: Recipe, options: dict[str, Any], window: Window, world: World) -> Timed:
    """Steps of the recipe's training, in one of `world.size` processes that all call this. Collective. Writes
    nothing."""
    meet(world, recipe.layout)
    session = open_session(recipe, None, world)
    parallel, traffic = session.lay_out(), TrafficCount()
    trainer = Trainer(session, parallel, Path(os.devnull), [traffic])
    source = endless(trainer.loader)

    def memory() -> dict[str, int]:
        largest = batches.micro_batches(session.recipe, world.size, task=session.task)
        with memory_of_step(trainer, largest) as memory:
            trainer.step(largest)
        return memory

    def ready() -> None:
        nonlocal source
        parallel.all_reduce([0])
        if window.restart_data:
            source = endless(trainer.loader)

    subject = Subject(
        batch=lambda: next(source), step=lambda step: trainer.take(step).loss,
        samples=lambda: trainer.progress.samples, device=session.device, memory=memory, ready=ready,
        agree=lambda busy: parallel.all_reduce([int(busy)])[0] > 0,
        facts={
            "precision": recipe.layout.precision, "parameters": models.count(session.recipe.model)["total"],
            "loss_unit": session.task.loss_unit,
        },
    )  # fmt: skip
    try:
        timed, sent = time_it(subject, window), traffic.per_step(trainer)
        if window.collectives and (parallel.several or session.device.type == "cuda"):
            profile_communication(timed, subject, whole_rounds(PROFILED, recipe.layout))
        timed.memory |= peak_of_one_more(subject)
    finally:
        trainer.loader.close()
    if sent is not None:
        timed.sent = {name: [*of_step] for name, of_step in sent.items()}
    return timed


def profile_communication(timed: Timed, subject: Subject, steps: int) -> None:
    """Profiles so many more steps for `timed.kernels` (of a GPU) or `timed.collectives`."""
    cuda = subject.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            subject.step(subject.batch())
        subject.synchronise()
    events = [Event(e.name, e.time_range.start, e.time_range.end) for e in profile.events()]
    if cuda:
        timed.kernels = by_kernel(events, steps)
    else:
        timed.collectives = by_collective(events, steps)


def load_steps(recipe: Recipe, options: dict[str, Any], window: Window, world: World) -> Timed:
    """Steps of the recipe's loader with nobody to train."""
    samples = 0

    def step(batch: Any) -> None:
        nonlocal samples
        samples += batch.samples

    meet(world, recipe.layout)
    with loading(open_session(recipe, None, world)) as source:
        return time_it(Subject(lambda: next(source), step, lambda: samples), window)


@contextlib.contextmanager
def loading(session: Session) -> Iterator[Iterator[Step]]:
    """The steps of the recipe's loader as fast as it makes them: those fetched beforehand are gone."""
    data = session.recipe.data
    with contextlib.closing(session.loader) as loader:
        source = endless(loader)
        for _ in range(1 + data.workers * data.prefetch):
            next(source)
        yield source


def whole_rounds(steps: int, layout: Layout) -> int:
    """At least so many steps: from one synchronisation of local updates to another."""
    local = layout.local_sgd or layout.diloco
    every = local.every if local else 1
    return -(-steps // every) * every


def own_steps(
    file: str, function: str, recipe: Recipe | None, options: dict[str, Any], window: Window, world: World
) -> Timed:
    """Steps of the `timing.Subject` that FILE.py's FUNCTION(recipe, options) returns. Raises UserError for whatever it
    raises."""

    def make(recipe: Recipe | None, options: dict[str, Any]) -> Subject:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"runner={Path(file).name}:{function}: the file has no {function}.")
        return getattr(module, function)(recipe, options)

    return time_subject(make, recipe, options, window, world)


MakeSubject = Callable[[Recipe | None, dict[str, Any]], Subject]


def time_subject(
    make: MakeSubject, recipe: Recipe | None, options: dict[str, Any], window: Window, world: World
) -> Timed:
    """Steps of the subject that make(recipe, options) returns. Raises UserError for whatever it raises."""
    torch.set_num_threads((recipe and recipe.layout.threads) or options.get("threads") or 1)
    try:
        subject = make(recipe, options)
        timed = time_it(subject, window)
        timed.memory |= peak_of_one_more(subject)
        subject.finish(timed, window)
        return timed
    except UserError:
        raise
    except BaseException as e:  # whatever a peer, an exporter or a compiler raises; sys.exit too
        if status.speaks_of_peers(str(e)) or (recipe and isinstance(e, torch.OutOfMemoryError)):
            raise  # what `start` has words for
        traceback.print_exc()
        message = next(iter(str(e).strip().splitlines()), "")[:200]
        error = f"{type(e).__name__}: {message}" if message else type(e).__name__
        raise UserError(f"does not run here ({error}). The study's workers.log has the traceback.") from None


# ------------------------------------------------------------ from a profile to figures


class Event(NamedTuple):
    """An event of a profiler; start and end in µs."""

    name: str
    start: float
    end: float


def by_collective(events: Sequence[Event], steps: int) -> dict[str, list[float]]:
    """[calls, seconds] for each step and collective.

    A collective goes by the name that it was called by: gloo does a reduce_scatter by an all_reduce. What was called
    first is done first, so the calls' order tells which is which.
    """
    in_order = sorted(events, key=lambda e: e.start)
    calls = (collective(e.name.removeprefix("c10d::")) for e in in_order if e.name.startswith("c10d::"))
    reductions = [name for name in calls if name in ("all_reduce", "reduce_scatter")]
    work = [e._replace(name=e.name.removeprefix("gloo:")) for e in in_order if e.name.startswith("gloo:")]
    if len(reductions) == sum(e.name == "all_reduce" for e in work):
        names = iter(reductions)
        work = [e._replace(name=next(names)) if e.name == "all_reduce" else e for e in work]
    times: dict[str, list[float]] = {}
    for e in work:
        times.setdefault(e.name, []).append((e.end - e.start) / 1e6)
    return {name: [len(t) / steps, sum(t) / steps] for name, t in sorted(times.items())}


def by_kernel(events: Sequence[Event], steps: int) -> list[float]:
    """[computing, only communicating] seconds a step of a GPU, from its kernels, which may overlap."""
    computing = covered((e.start, e.end) for e in events if not e.name.startswith("nccl"))
    busy = covered((e.start, e.end) for e in events)
    return [computing / steps / 1e6, (busy - computing) / steps / 1e6]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the line that these intervals cover."""
    return sum(end - start for start, end in merged(intervals))
