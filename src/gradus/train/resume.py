"""Going on with a run: what it was, what may change, how much longer it becomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from gradus import limits, tasks
from gradus import recipe as recipes
from gradus.errors import UserError, either
from gradus.parallel.world import World
from gradus.recipe.schema import Recipe
from gradus.tasks.base import Task
from gradus.train.checkpoint import Checkpoints
from gradus.train.schedule import rate_of
from gradus.train.session import Session


@dataclasses.dataclass
class Start:
    """Where a run begins: a new one with nothing, another with its checkpoint."""

    before: Recipe | None = None  # as the run stored it
    checkpoint: Path | None = None
    tokenizers: dict | None = None
    step: int = 0
    position: tuple[int, int] = (0, 0)  # epoch, step within it


def start_of(recipe: Recipe, folder: Path, resume: bool, world: World) -> Start:
    """Raises UserError where there is a run already, none to resume, or one that would become another. Collective.

    A newcomer to a run's replicas has its weights from them, and its tokenizers from its latest checkpoint: those of a
    run that was resumed need not be what the data would make (--data-changed).
    """
    if world.newcomer:
        latest = Checkpoints(folder / "checkpoints", recipe.train.keep).latest()
        return Start(tokenizers=latest and tasks.load_tokenizers(latest))
    if not resume:
        if world.first and (folder / "metrics.jsonl").exists():
            raise UserError(
                f"{folder}: there is a run already. Resume it: gradus train {folder} --resume; "
                "or set another log.dir."
            )
        return Start()
    start = Start(before=recipes.load(folder, configure=None))
    check_same(start.before, recipe)
    start.checkpoint = Checkpoints(folder / "checkpoints", recipe.train.keep).newest_whole()
    if start.checkpoint:
        start.tokenizers = tasks.load_tokenizers(start.checkpoint)
        progress = json.loads((start.checkpoint / "training.json").read_text())["progress"]
        start.step, start.position = progress["step"], (progress["epoch"], progress["epoch_step"])
    return start


# what may change between a run and its continuation, since it changes no sample and no update; of the length see
# `extend`
FREE_ON_RESUME = ("layout", "log", "evaluate", "energy", "name")
LENGTH = ("steps", "epochs")
FREE_KEYS = {
    "data": ("workers", "prefetch", "persistent", "pin", "path", "cache"),
    "train": ("checkpoint_every", "keep", "on_nonfinite", "patience", *LENGTH),
}


def check_same(before: Recipe, now: Recipe) -> None:
    """Raises UserError that names the first thing a resume would change in the mathematics of the run."""
    old, new = before.model_dump(), now.model_dump()
    for section in old:
        if section in FREE_ON_RESUME:
            continue
        a, b = old[section] or {}, new[section] or {}
        for key in dict.fromkeys([*a, *b]):
            if a.get(key) != b.get(key) and key not in FREE_KEYS.get(section, ()):
                was = f"{section}.{key} was {a.get(key)} and is now {b.get(key)}"
                raise UserError(f"--resume: {was}: that is another run. Start it without --resume in a new folder.")


DATA = "data.json"  # in a run folder: split → a hash of what the run has read (see Task.content)


def read_data(folder: Path) -> dict[str, str]:
    """What a run has kept of the data that it has read; nothing of an older one."""
    return limits.read_object(folder / DATA) if (folder / DATA).is_file() else {}


def changed_data(folder: Path, task: Task) -> list[str]:
    """The opened splits that are not what the run in this folder has read, as far as it has kept that."""
    known = read_data(folder)
    return [split for split, content in task.content().items() if known.get(split, content) != content]


def check_data(folder: Path, task: Task, step: int, allowed: bool) -> str | None:
    """What a resume at `step` says of data that are not what the run has read. allowed: by --data-changed. Raises
    UserError where they may not be."""
    changed, data = changed_data(folder, task), task.recipe.data
    if not changed:
        return "note: --data-changed: the data are not known to have changed" if allowed else None
    path = getattr(data, "path", None)
    what = f"{either(changed, 'and')} of {f'data.path={path}' if path else f'data.source={data.source}'}"
    if not allowed:
        raise UserError(
            f"--resume: {what}: other data than the run has read, so its position means other samples. "
            "Put its data back, start another run, or go on with these: --data-changed."
        )
    return f"note: --data-changed: other data from step {step + 1} on ({what})"


def extend(before: Recipe, session: Session, taken: int, stated: bool) -> str | None:
    """What another train.steps or train.epochs does to a run that has taken `taken` steps, in a line; None where it
    stays as long.

    before: the recipe as the run stored it. stated: the user gave a length. Raises UserError where no step would be
    left.
    """
    now, last = session.recipe, session.steps.total
    was = session.steps.order.total_steps(before.train)
    key = "steps" if now.train.steps is not None else "epochs"
    setting = f"train.{key}={getattr(now.train, key)}"
    more = f"Give more than {taken}: train.steps={2 * taken}, say, or start another run without --resume."
    if last < taken or (last == taken and was != last):
        raise UserError(f"--resume: {setting}: {taken} steps have been taken already and cannot be undone. {more}")
    if last == was == taken and stated:
        raise UserError(f"--resume: {setting}: the run is finished, all its {taken} steps are taken. {more}")
    if last == was:
        return None
    schedule, rate = now.schedule, rate_of(now, taken + 1, last)
    moves = schedule.name in ("linear", "cosine") and schedule.end_step is None
    stays = "does not change" + (f": it ends at step {schedule.end_step}" if schedule.end_step else "")
    rates = f"goes from {rate_of(now, taken, was):.2e} (step {taken}) to" if taken else "is"
    return (
        f"{was} steps become {last}, {taken} of them taken; the schedule ({schedule.name}) "
        f"{f'now ends at step {last}' if moves else stays}; the learning rate {rates} {rate:.2e} (step {taken + 1})"
    )
