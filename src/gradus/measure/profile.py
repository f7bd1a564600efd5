"""Where a training step spends its time and memory, measured on the very step that trains, with real batches."""

from __future__ import annotations

import collections
import dataclasses
import gc
import glob
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from gradus import limits
from gradus.data.loader import Loader, Step
from gradus.errors import UserError
from gradus.files import write_text
from gradus.measure import machine, trace
from gradus.measure.hints import hints
from gradus.measure.memory import Timeline, component_bytes
from gradus.parallel.apply import apply
from gradus.parallel.mesh import needed
from gradus.parallel.observe import Observer
from gradus.recipe.schema import Recipe
from gradus.rows import Row, as_lines
from gradus.text import milliseconds
from gradus.text import table as columns
from gradus.train.loop import Trainer
from gradus.train.machine import release_freed_memory
from gradus.train.session import Session, open_session

WAIT, WARM_UP, ACTIVE, TOP, POINTS = 1, 1, 3, 10, 100
CYCLE = WAIT + WARM_UP + ACTIVE


def profile(
    recipe: Recipe, folder: Path, repeat: int = 2, page: Callable[[Path], Iterator[str]] | None = None
) -> Iterator[str]:
    """Take real steps of the recipe and yield lines: the memory picture; where a step's time goes, by phase, category,
    operation and place in the code; and what to try next.

    Memory: allocated (on CUDA also reserved) and the peak after building, and after the forward pass, the backward pass
    and the optimizer's step of the first two steps; then by component. Time: `repeat` cycles of 1 step not looked at, 1
    to warm up, 3 recorded with shapes, memory and stacks. Writes into `folder` rows.jsonl, RECIPE.CYCLE.pt.trace.json
    (for Perfetto and TensorBoard) and on CUDA memory_summary.txt; `page` then makes one of the folder's rows. Raises
    UserError for what the recipe, the data or the disk do not allow.
    """
    if (n := needed(recipe.layout)) > 1:
        several = f"a profile is of one process, and the layout needs {n}. Set its axes to 1"
        raise UserError(f"{recipe.name}: {several}, or use gradus scale RECIPE --processes {n}.")
    folder_for(folder, ("rows.jsonl",))
    session = open_session(recipe)
    trainer, steps, picture, rows = memory_picture(session, folder)
    written = [folder / "rows.jsonl"]
    try:
        where = f"{session.recipe.name}, {session.recipe.layout.precision} on {session.device}"
        yield f"memory of {where}, MB:"
        yield from picture
        recorded = record(trainer, steps, folder, repeat)
    finally:
        trainer.loader.close()
    times = time_rows(session, recorded)
    write_text(written[0], as_lines(rows + times))
    if session.device.type == "cuda":
        written.append(folder / "memory_summary.txt")
        write_text(written[-1], torch.cuda.memory_summary())
    yield ""
    yield from time_lines([row.record() for row in times], where)
    yield ""
    yield f"wrote {', '.join(map(str, [*written, *recorded.files]))}"
    yield from page(folder) if page else ()


def conditions(session: Session) -> dict[str, Any]:
    """Of every row of a profile."""
    r, device = session.recipe, session.device
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    what = {"recipe": r.name, "device": str(device), **gpu, "precision": r.layout.precision, "samples": r.batch.samples}
    return {**what, "tokens": r.batch.tokens, "threads": torch.get_num_threads(), **machine.conditions()}


def folder_for(folder: Path, names: Iterable[str]) -> None:
    """Make the folder of --to, with these files in it. Raises UserError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).touch()
    except OSError as e:
        raise UserError(f"--to={folder}: cannot write there ({e.strerror}). Give a folder you may write.") from None


def endless(loader: Loader) -> Iterator[Step]:
    """Its steps, one epoch after the other."""
    return itertools.chain.from_iterable(map(loader.steps, itertools.count()))


# ---------------------------------------------------------------- memory


class CudaTimeline:
    """The allocator's own count at each mark, and its peak since the mark before."""

    def __enter__(self) -> CudaTimeline:
        self.rows: list[tuple[str, int, int]] = []
        self.reserved: dict[str, int] = {}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return self

    def mark(self, name: str) -> None:
        torch.cuda.synchronize()
        self.rows.append((name, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        self.reserved[name] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()

    def phases(self) -> list[tuple[str, int, int]]:
        return self.rows

    def __exit__(self, *error: Any) -> None:
        pass


class Marks(Observer):
    """Marks where the passes of a step begin and end."""

    def __init__(self, mark: Callable[[str], None]):
        self.mark = mark

    def edge(self, unit: str, name: str) -> None:
        if mark := {"forward": "ready", "backward": "forward", "idle": "backward"}.get(name):
            self.mark(mark)

    def step(self, before: bool) -> None:
        if not before:
            self.mark("step")


def memory_picture(session: Session, folder: Path) -> tuple[Trainer, Iterator[Any], list[str], list[Row]]:
    """(the trainer after two steps, the steps to come, a table, the same as rows). Bytes of tensor memory: on a CPU
    counted from before the model was built, on CUDA whatever the allocator holds."""
    if session.device.type == "mps":
        raise UserError("layout.device=mps: its memory cannot be tracked. Profile with layout.device=cpu.")
    timeline = CudaTimeline() if session.device.type == "cuda" else Timeline()
    gc.collect()  # what an earlier run in this process left would be freed meanwhile
    with timeline:
        model = session.build()
        apply(model, session.recipe.layout, qat=session.recipe.train.qat)
        model.train()
        trainer = Trainer(session, model, folder)
        timeline.mark("building")
        by_component = {}
        steps = endless(trainer.loader)
        for number in (1, 2):

            def mark(name: str, number: int = number) -> None:
                timeline.mark(f"step {number}: {name}")
                if name == "backward":
                    by_component["gradients"] = component_bytes(model)["gradients"]

            with trainer.parallel.observed(Marks(mark)):
                trainer.take(next(steps))
            timeline.mark(f"step {number}: cleared")
    by_component |= {k: v for k, v in component_bytes(model, trainer.optimizer).items() if k != "gradients"}

    return trainer, steps, *picture_lines(session, timeline, by_component)


def picture_lines(
    session: Session, timeline: Timeline | CudaTimeline, state: dict[str, int]
) -> tuple[list[str], list[Row]]:
    """(a table, the same as rows) of two steps that were followed. state: bytes of weights, gradients and optimizer."""
    # With accumulation a step has several forward passes: the last one finds the gradients of the others there.
    phases, cuda = timeline.phases(), isinstance(timeline, CudaTimeline)
    last = {name: allocated for name, allocated, _ in phases}
    peaks = {name: max(peak for other, _, peak in phases if other == name) for name in last}
    activations = last["step 2: forward"] - last["step 2: ready"]
    where, cells, rows = conditions(session), [], []
    for name in ("building", *(f"step {n}: {name}" for n in (1, 2) for name in ("forward", "backward", "step"))):
        numbers = {"allocated": last[name], "peak": peaks[name]}
        numbers |= {"reserved": timeline.reserved[name]} if cuda else {}
        cells.append([f"  {name}", *(f"{n / 1e6:,.2f}" for n in numbers.values())])
        phase, step = name.split(": ")[-1], int(name[5]) if ":" in name else None
        rows += [Row(f"memory/{phase}/{kind}", n, "bytes", step, where) for kind, n in numbers.items()]
    lines = columns(["  after", *numbers], cells, {1, 2, 3})
    components = (
        ("weights", state["weights"], ""), ("gradients", state["gradients"], "after the backward pass"),
        ("optimizer", state["optimizer"], "its state"),
        ("activations", activations, "kept for the backward pass, by one micro-batch"),
        ("peak", max(peaks.values()), "the highest overall"),
    )  # fmt: skip
    cells = [[f"  {name}", f"{n / 1e6:,.2f}", what] for name, n, what in components]
    rows += [Row(f"memory/{name}", n, "bytes", conditions=where) for name, n, _ in components]
    return [*lines, "", *columns(["  component", "MB", ""], cells, {1})], rows


# ---------------------------------------------------------------- time


@dataclasses.dataclass
class Recorded:
    """cycles: what was recorded. files: their traces. seconds: of steps that were not recorded, on the host's clock.
    levels: memory within the last recorded step. allocations: per step."""

    cycles: list[trace.Trace] = dataclasses.field(default_factory=list)
    files: list[Path] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    levels: list[trace.Level] = dataclasses.field(default_factory=list)
    allocations: float = 0.0


def record(trainer: Trainer, steps: Iterator[Step], folder: Path, repeat: int) -> Recorded:
    """Take steps under torch.profiler, with a trace of each cycle; an earlier profile's traces go. Raises UserError."""
    cuda, name = trainer.device.type == "cuda", trainer.recipe.name
    recorded, gradients = Recorded(), set()
    for old in folder.glob(f"{glob.escape(name)}.*.pt.trace.json"):
        old.unlink()

    def keep(profiler: torch.profiler.profile) -> None:
        path = folder / f"{name}.{len(recorded.files) + 1}.pt.trace.json"  # as TensorBoard's plugin wants them called
        try:
            profiler.export_chrome_trace(str(path))
            # the profiler does not look whether the disk took it all
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, RuntimeError, ValueError) as e:
            raise UserError(f"{path}: the trace could not be written ({e}). Give another --to.") from None
        recorded.files.append(path)
        recorded.cycles.append(trace.read(events, cuda))
        recorded.allocations += trace.allocations(events, cuda) / (ACTIVE * repeat)
        state = component_bytes(trainer.model, trainer.optimizer)
        state = {name: state[name] for name in ("weights", "optimizer")}
        recorded.levels = trace.memory(events, cuda, gradients, state, POINTS)

    def mark(name: str) -> None:
        with record_function(trace.MARK + name):
            pass
        if name == "backward" and profiler.step_num % CYCLE == CYCLE - 1:
            grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            gradients.clear()
            gradients.update(g.untyped_storage().data_ptr() for g in grads)
            mark("ready")

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=repeat)
    what = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),  # that a cycle forgets the one before
        torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=keep, **what) as profiler,
    ):
        for number in range(CYCLE * repeat):
            began = _now(cuda)
            step = next(steps)
            mark("data")
            with trainer.parallel.observed(Marks(mark)):
                trainer.take(step)
            if number < WAIT:  # later ones follow the writing of a trace, and pay for it
                recorded.seconds.append(_now(cuda) - began)
            profiler.step()
            release_freed_memory()  # what was recorded lies between its pieces: the next step does not fit into them
    return recorded


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def time_rows(session: Session, recorded: Recorded) -> list[Row]:
    """Seconds per step by phase, category, operation and place, each kind summing to a recorded step (of operations and
    places the largest only); the memory within a step; hints, with the share of the step that each is about."""
    calls = [call for cycle in recorded.cycles for call in cycle.calls]
    n = sum(len(cycle.steps) for cycle in recorded.cycles)
    where = conditions(session) | {"recorded_steps": n}
    total = sum(call.own for call in calls)
    rows = [
        Row("time/step", statistics.median(recorded.seconds), "s", conditions=where),
        Row("time/step/recorded", total / n / 1e6, "s", conditions=where),
        Row("memory/allocations", recorded.allocations, "per step", conditions=where),
    ]
    if session.device.type == "cuda":
        waits, microseconds = (sum(cycle.waits[i] for cycle in recorded.cycles) / n for i in (0, 1))
        rows.append(Row("time/waits", microseconds / 1e6, "s", conditions=where | {"calls": waits}))
    shares = {}
    for kind, of in KINDS.items():
        groups = collections.defaultdict(list)
        for call in calls:
            groups[of(call)].append(call)
        largest = sorted(groups, key=lambda key: -sum(call.own for call in groups[key]))
        for key in [key for key in largest if key][: 3 * TOP]:
            seconds = sum(call.own for call in groups[key]) / n / 1e6
            share = seconds * n * 1e6 / total
            shares |= {key: share} if kind in ("phase", "category") else {}
            more = {"share": share, "calls": len(groups[key]) / n, **_most(kind, groups[key])}
            rows.append(Row(f"time/{kind}/{key}", seconds, "s", conditions=where | more))
    for level in recorded.levels:
        at = where | {"ms": level.ms}
        rows += [Row(f"memory/timeline/{name}", n, "bytes", conditions=at) for name, n in level.bytes.items()]
    busy = torch.get_num_threads() if session.device.type == "cpu" else 1
    advice = hints(session.recipe, session.device, shares, limits.processors() - busy)
    return rows + [Row(f"hint/{h.key}", h.share, "of the step", conditions=where | {"text": h.text}) for h in advice]


KINDS: dict[str, Callable[[trace.Call], str]] = {
    "phase": lambda call: call.phase,
    "category": lambda call: call.category,
    "operation": lambda call: (
        call.name if call.kind == "cpu_op" else trace.COMPILED if call.category == trace.COMPILED else ""
    ),
    "place": lambda call: call.place.name,
}


def _most(kind: str, calls: list[trace.Call]) -> dict[str, Any]:
    """What the most expensive of the calls are: their category and place, or their source."""

    def most(of: Callable[[trace.Call], str]) -> str:
        seconds = collections.Counter()
        for call in calls:
            seconds[of(call)] += call.own
        return seconds.most_common(1)[0][0]

    if kind == "operation":
        return {"category": most(KINDS["category"]), "place": most(KINDS["place"])}
    return {"source": most(lambda c: c.place.source)} if kind == "place" else {}


# what stands behind the time of each kind
COLUMNS = {"phase": (), "category": (), "operation": ("calls", "category", "place"), "place": ("source",)}


def below(rows: Sequence[dict[str, Any]], path: str) -> dict[str, dict[str, Any]]:
    """The rest of its name → row, of what is named below a path."""
    return {row["name"].removeprefix(f"{path}/"): row for row in rows if row["name"].startswith(f"{path}/")}


def time_table(rows: Sequence[dict[str, Any]], kind: str) -> tuple[list[str], list[list[str]]]:
    """(head, cells) of the largest of a kind; of phases and categories all."""
    keys, cells = COLUMNS[kind], []
    for name, row in [*below(rows, f"time/{kind}").items()][: TOP if keys else 2 * TOP]:
        more = (f"{row[key]:,.0f}" if key == "calls" else row[key] or "–" for key in keys)
        cells.append([name, milliseconds(row["value"]), f"{row['share']:.1%}", *more])
    return [kind, "ms", "share", *keys], cells


def time_lines(rows: Sequence[dict[str, Any]], where: str) -> Iterator[str]:
    """The times of a profile's rows as tables, and its hints."""
    by = {row["name"]: row for row in rows}
    step, recorded = by["time/step"], by["time/step/recorded"]
    yield (
        f"a step of {where}: {step['value'] * 1e3:,.1f} ms; {recorded['value'] * 1e3:,.1f} ms while recorded, "
        f"to which the shares refer ({recorded['recorded_steps']} steps)"
    )
    if waits := by.get("time/waits"):
        yield f"the host waited for the GPU {waits['calls']:.1f} times per step, {waits['value'] * 1e3:,.1f} ms"
    for kind, keys in COLUMNS.items():
        head, cells = time_table(rows, kind)
        head, *cells = ([f"  {name}", *more[:4]] for name, *more in (head, *cells))  # where it is called: on the page
        yield ""
        yield from columns(head, cells, {1, 2, 3} if "calls" in keys else {1, 2})
    yield ""
    advice = below(rows, "hint")
    yield "what to try next:" if advice else "what to try next: no setting of the layout stands out"
    yield from (f"  {name}: {row['text']}" for name, row in advice.items())
