"""Where a training step spends its time and memory, measured on the very step that trains, with real batches."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity

from gradus.data.loader import Loader, Step
from gradus.errors import UserError
from gradus.hardware.tables import table as columns
from gradus.measure.memory import Timeline, component_bytes
from gradus.parallel.apply import apply
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.train.loop import Trainer
from gradus.train.session import Session, open_session

WAIT, WARM_UP, ACTIVE, TOP = 1, 1, 3, 10


def profile(recipe: Recipe, folder: Path, repeat: int = 1) -> Iterator[str]:
    """Take real steps of the recipe and yield lines: first the memory picture, then torch.profiler's top operations.

    Memory: allocated (on CUDA also reserved) and the peak after building, and after the forward pass, the backward pass
    and the optimizer's step of the first two steps; then by component. Time: `repeat` cycles of 1 step not looked at, 1
    to warm up, 3 recorded. Writes trace.json (one a cycle; open it in Perfetto or chrome://tracing), top.txt and
    memory.jsonl (rows) into `folder`. Raises UserError for what the recipe, the data or the disk do not allow.
    """
    folder_for(folder, ("top.txt",))
    session = open_session(recipe)
    trainer, steps, picture, rows = memory_picture(session, folder)
    try:
        where = f"{session.recipe.name}, {session.recipe.layout.precision} on {session.device}"
        yield f"memory of {where}, MB:"
        yield from picture
        (folder / "memory.jsonl").write_text("".join(row.json() + "\n" for row in rows))
        operations = time_operations(trainer, steps, folder, repeat)
    finally:
        trainer.loader.close()
    top = [f"top {TOP} operations of {ACTIVE} steps of {where}, by their own time:", *operations]
    (folder / "top.txt").write_text("\n".join(top) + "\n")
    yield ""
    yield from top
    yield ""
    yield f"wrote {', '.join(str(folder / name) for name in ('trace.json', 'top.txt', 'memory.jsonl'))}"


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


@contextlib.contextmanager
def between(trainer: Trainer, mark: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, the trainer's step marks where its passes begin and end."""

    def marking(owner: Any, name: str, after: str, before: str | None = None) -> Any:
        own = getattr(owner, name)

        def marked(*args: Any) -> Any:
            if before:
                mark(before)
            result = own(*args)
            mark(after)
            return result

        return mock.patch.object(owner, name, marked)

    with (
        marking(trainer.task, "losses", "forward", before="ready"),
        marking(trainer.parallel, "backward", "backward"),
        marking(trainer.precision, "step", "step"),
    ):
        yield


def memory_picture(session: Session, folder: Path) -> tuple[Trainer, Iterator[Any], list[str], list[Row]]:
    """(the trainer after two steps, the steps to come, a table, the same as rows). Bytes of tensor memory: on a CPU
    counted from before the model was built, on CUDA whatever the allocator holds."""
    if session.device.type == "mps":
        raise UserError("layout.device=mps: its memory cannot be followed. Profile with layout.device=cpu.")
    timeline = CudaTimeline() if session.device.type == "cuda" else Timeline()
    with timeline:
        model = session.build()
        apply(model, session.recipe.layout)
        model.train()
        trainer = Trainer(session, model, folder)
        timeline.mark("building")
        held = {}
        steps = endless(trainer.loader)
        for number in (1, 2):

            def mark(name: str, number: int = number) -> None:
                timeline.mark(f"step {number}: {name}")
                if name == "backward":
                    held["gradients"] = component_bytes(model)["gradients"]

            step = next(steps)  # before the marks are set: workers take the task with them
            with between(trainer, mark):
                trainer.take(step)
            timeline.mark(f"step {number}: cleared")
    held |= {k: v for k, v in component_bytes(model, trainer.optimizer).items() if k != "gradients"}

    return trainer, steps, *picture_lines(session, timeline, held)


def picture_lines(
    session: Session, timeline: Timeline | CudaTimeline, state: dict[str, int]
) -> tuple[list[str], list[Row]]:
    """(a table, the same as rows) of two steps that were followed. state: bytes of weights, gradients and optimizer."""
    # With accumulation a step has several forward passes: the last one finds the gradients of the others there.
    phases, cuda = timeline.phases(), isinstance(timeline, CudaTimeline)
    last = {name: allocated for name, allocated, _ in phases}
    peaks = {name: max(peak for other, _, peak in phases if other == name) for name in last}
    activations = last["step 2: forward"] - last["step 2: ready"]
    recipe = session.recipe
    numbers = {"device": str(session.device), "precision": recipe.layout.precision}
    conditions = {"recipe": recipe.name, **numbers, "torch": torch.__version__}
    cells, rows = [], []
    for name in ("building", *(f"step {n}: {name}" for n in (1, 2) for name in ("forward", "backward", "step"))):
        numbers = {"allocated": last[name], "peak": peaks[name]}
        numbers |= {"reserved": timeline.reserved[name]} if cuda else {}
        cells.append([f"  {name}", *(f"{n / 1e6:,.2f}" for n in numbers.values())])
        phase, step = name.split(": ")[-1], int(name[5]) if ":" in name else None
        rows += [Row(f"memory/{phase}/{kind}", n, "bytes", step, conditions) for kind, n in numbers.items()]
    lines = columns(["  after", *numbers], cells, {1, 2, 3})
    components = (
        ("weights", state["weights"], ""), ("gradients", state["gradients"], "after the backward pass"),
        ("optimizer", state["optimizer"], "its state"),
        ("activations", activations, "kept for the backward pass, by one micro-batch"),
        ("peak", max(peaks.values()), "the highest of all"),
    )  # fmt: skip
    cells = [[f"  {name}", f"{n / 1e6:,.2f}", what] for name, n, what in components]
    rows += [Row(f"memory/{name}", n, "bytes", conditions=conditions) for name, n, _ in components]
    return [*lines, "", *columns(["  component", "MB", ""], cells, {1})], rows


# ---------------------------------------------------------------- time


def time_operations(trainer: Trainer, steps: Iterator[Any], folder: Path, repeat: int) -> list[str]:
    """Profile steps, write the traces, and return torch.profiler's table of the TOP operations by their own time."""
    cuda = trainer.device.type == "cuda"
    written: list[Path] = []

    def keep(found: torch.profiler.profile) -> None:
        path = folder / ("trace.json" if not written else f"trace-{len(written) + 1}.json")
        try:
            found.export_chrome_trace(str(path))
            json.loads(path.read_text(encoding="utf-8"))  # the profiler does not look whether the disk took it all
        except (OSError, RuntimeError, ValueError) as e:
            raise UserError(f"{path}: the trace could not be written ({e}). Give another --to.") from None
        written.append(path)

    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=repeat)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=keep, record_shapes=True, profile_memory=True
    ) as found:
        for _ in range((WAIT + WARM_UP + ACTIVE) * repeat):
            trainer.take(next(steps))
            found.step()
    by, width = f"self_{'device' if cuda else 'cpu'}_time_total", {"max_name_column_width": 56}
    return found.key_averages().table(sort_by=by, row_limit=TOP, **width).splitlines()
