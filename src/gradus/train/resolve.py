"""Which recipe, and which run, a command line means."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradus import files
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.world import World
from gradus.recipe.axes import data_parallel_size, needed
from gradus.recipe.schema import Layout, Recipe
from gradus.recipe.training_args import from_training_args
from gradus.text import say

Notes = list[str]


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What the recipe and its overrides leave open. json_file: a file of TrainingArguments (None: none). world: the
    processes that the run has or will have. resuming: it goes on with a run. settings: as `recipe.load` takes them
    from Python."""

    json_file: str | None = None
    world: World = dataclasses.field(default_factory=World)
    resuming: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def load_with(self, load: Callable[[dict[str, Any], Notes], Recipe], notes: Notes) -> Recipe:
        """What load(settings, notes) returns, the file's values for so many processes among the settings."""
        if self.json_file is None:
            return load(dict(self.settings), notes)
        layout = Layout()
        for _ in range(2):  # which processes see the same samples, the recipe says
            values, file_notes = from_training_args(
                self.json_file, self.world.size, self.world.local_size, layout, self.resuming
            )
            recipe_notes: Notes = []
            recipe = load(values, recipe_notes)
            layout = recipe.layout
        notes += [*(f"{self.json_file}: {line}" for line in file_notes), *recipe_notes]
        return recipe


def load_and_print_notes(name: str, overrides: list[str], context: RunContext) -> Recipe:
    """The recipe of `load`; rank 0 prints its notes."""
    recipe, notes = load(name, overrides, context)
    for note in notes if context.world.first else ():
        say(f"note: {note}", sys.stderr)
    return recipe


def load(name: str, overrides: list[str], context: RunContext | None = None) -> tuple[Recipe, Notes]:
    """(recipe, notes): `recipe.load` with its notes, and with what a file of TrainingArguments sets."""
    notes: Notes = []
    context = context or RunContext()
    recipe = context.load_with(lambda settings, notes: recipes.load(name, overrides, notes=notes, **settings), notes)
    if context.resuming:
        recipe = _smaller_shares(recipe, context.world.size, overrides, notes)
    return recipe, notes


def _smaller_shares(recipe: Recipe, n: int, overrides: list[str], notes: Notes) -> Recipe:
    """A run that is resumed with more processes keeps its batch; a micro-batch larger than a process's share of the
    batch shrinks to that share."""
    micro, samples = recipe.layout.micro_batch, recipe.batch.samples
    set_by_user = any(word.startswith("layout.micro_batch=") for word in overrides)
    if not (micro and samples) or n % needed(recipe.layout) or set_by_user:
        return recipe
    share = samples // data_parallel_size(recipe.layout, n)
    if not 0 < share < micro:
        return recipe
    notes.append(f"layout.micro_batch={share} instead of {micro}: a process's share of batch.samples={samples}")
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"micro_batch": share})})


def run_to_auto_resume(name: str, overrides: list[str], context: RunContext) -> Path | None:
    """The run that `--auto-resume` resumes; None where log.dir holds none yet."""
    folder = load(name, overrides, context)[0].log.dir
    if folder is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    return Path(folder) if (Path(folder) / "recipe.yaml").exists() else None


def run_to_resume(name: str, overrides: list[str], context: RunContext | None = None) -> Path:
    """The run folder that `--resume` means: RECIPE itself, else log.dir, else the newest run of that recipe."""
    if (Path(name) / "recipe.yaml").exists():
        folder = dict(o.split("=", 1) for o in overrides if "=" in o).get("log.dir")
        if folder is not None and Path(folder).resolve() != Path(name).resolve():
            raise UserError(f"--resume: log.dir={folder} has no effect: the run goes on in {name}. Leave it out.")
        return Path(name)
    recipe = load(name, overrides, context)[0]  # a file may say log.dir and name
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
