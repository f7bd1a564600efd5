"""Which recipe, and which run, a command line means."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradus import files
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel import world
from gradus.recipe.axes import DATA, needed, sizes
from gradus.recipe.schema import Layout, Recipe
from gradus.recipe.training_args import from_training_args
from gradus.train.precision import meet

Notes = list[str]


@dataclasses.dataclass(frozen=True)
class Given:
    """What the recipe and its overrides do not say: a file of TrainingArguments (None: none), the processes that the
    run has or will have, whether it resumes a run, and settings as `recipe.load` takes them from Python."""

    json_file: str | None = None
    here: world.World = dataclasses.field(default_factory=world.World)
    resuming: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, load: Callable[[dict[str, Any], Notes], Recipe], notes: Notes) -> Recipe:
        """What load(values of the file, notes) gives, with the file's values for so many processes."""
        if self.json_file is None:
            return load(dict(self.settings), notes)
        layout, on_host = Layout(), self.here.local_size
        for _ in range(2):  # which processes see the same samples, the recipe says
            extra, told = from_training_args(self.json_file, self.here.size, on_host, layout, self.resuming)
            more: Notes = []
            recipe = load(extra, more)
            layout = recipe.layout
        notes += [*(f"{self.json_file}: {line}" for line in told), *more]
        return recipe


def told(name: str, overrides: list[str], given: Given, quiet: bool = False) -> Recipe:
    """The recipe of `load`; its notes are printed, unless `quiet`."""
    recipe, notes = load(name, overrides, given)
    for note in () if quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    return recipe


def load(name: str, overrides: list[str], given: Given | None = None) -> tuple[Recipe, Notes]:
    """(recipe, notes): `recipe.load` with its notes beside, and with what a file of TrainingArguments gives."""
    notes: Notes = []
    given = given or Given()
    recipe = given.read(lambda extra, notes: recipes.load(name, overrides, notes=notes, **extra), notes)
    if given.resuming:
        recipe = _smaller_shares(recipe, given.here.size, overrides, notes)
    return recipe, notes


def _smaller_shares(recipe: Recipe, n: int, overrides: list[str], notes: Notes) -> Recipe:
    """A run that is resumed with more processes keeps its batch; a micro-batch larger than a process's share of the
    batch shrinks to that share."""
    micro, samples, one = recipe.layout.micro_batch, recipe.batch.samples, needed(recipe.layout)
    if not (micro and samples) or n % one or any(word.startswith("layout.micro_batch=") for word in overrides):
        return recipe
    arranged = sizes(recipe.layout, n)
    share = samples // math.prod(arranged[axis] for axis in DATA)
    if not 0 < share < micro:
        return recipe
    notes.append(f"layout.micro_batch={share} instead of {micro}: a process's share of batch.samples={samples}")
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"micro_batch": share})})


def started(name: str, overrides: list[str], given: Given) -> Path | None:
    """The run that `--auto-resume` resumes; None where log.dir holds none yet. Rank 0 decides for all."""
    recipe = load(name, overrides, given)[0]
    if recipe.log.dir is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    there, here = (Path(recipe.log.dir) / "recipe.yaml").exists(), given.here
    if here.size > 1:
        meet(recipe.layout, here)
        there = world.from_first(there)
    return Path(recipe.log.dir) if there else None


def run_to_resume(name: str, overrides: list[str], given: Given | None = None) -> Path:
    """The run folder that `--resume` means: RECIPE itself, else log.dir, else the newest run of that recipe."""
    name = files.run_of(name)
    if (Path(name) / "recipe.yaml").exists():
        folder = dict(o.split("=", 1) for o in overrides if "=" in o).get("log.dir")
        if folder is not None and Path(folder).resolve() != Path(name).resolve():
            raise UserError(f"--resume: log.dir={folder} has no effect: the run goes on in {name}. Leave it out.")
        return Path(name)
    recipe = load(name, overrides, given)[0]  # a file may say log.dir and name
    if recipe.log.dir is not None:
        folder = Path(recipe.log.dir)
        if not (folder / "recipe.yaml").exists():
            raise UserError(f"--resume: {folder} holds no run. Start it without --resume.")
        return folder
    base = Path("runs") / recipe.name
    runs = [p.parent for p in base.glob("*/recipe.yaml")]
    if not runs:
        raise UserError(f"--resume: no run of {name} in {base}. Give a run folder, or start it without --resume.")
    newest = max(runs, key=lambda folder: (folder.name == files.LATEST, folder))  # what the link says, else by the time
    return Path(files.run_of(str(newest)))
