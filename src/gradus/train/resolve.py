"""Which recipe, and which run, a command line means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel import world
from gradus.recipe.schema import Recipe
from gradus.train.precision import pick_device


def load(name: str, overrides: list[str], extra: dict[str, Any] | None = None) -> tuple[Recipe, list[str]]:
    """(recipe, notes). Where `model.init` names local weights, their configuration is the model's; a hub name's when it can be had."""
    notes: list[str] = []
    recipe = recipes.load(name, overrides, notes=notes, configure=_configuration, **(extra or {}))
    return recipe, notes


def _configuration(init: str) -> dict[str, Any] | None:
    """What config.json beside the weights says; None where only the hub has it (it is then read when the weights are)."""
    if not Path(init).expanduser().exists():
        if init.startswith((".", "/", "~")):
            raise UserError(f"model.init={init}: no such file or folder.")
        try:
            return models.config_of(init).model_dump()
        except UserError:
            return None
    return models.config_of(init).model_dump()


def started(name: str, overrides: list[str], extra: dict[str, Any] | None, here: world.World) -> Path | None:
    """The run that `--auto-resume` goes on with; None where log.dir holds none yet. Rank 0 decides for all."""
    recipe = load(name, overrides, extra)[0]
    if recipe.log.dir is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    there = (Path(recipe.log.dir) / "recipe.yaml").exists()
    if here.size > 1:
        world.join(here, pick_device(recipe.layout.device).type, recipe.layout.timeout)
        there = world.from_first(there)
    return Path(recipe.log.dir) if there else None


def run_to_resume(name: str, overrides: list[str], extra: dict[str, Any] | None = None) -> Path:
    """The run folder that `--resume` means: RECIPE itself, else log.dir, else the newest run of that recipe."""
    if (Path(name) / "recipe.yaml").exists():
        given = dict(o.split("=", 1) for o in overrides if "=" in o).get("log.dir")
        if given is not None and Path(given).resolve() != Path(name).resolve():
            raise UserError(f"--resume: log.dir={given} has no effect: the run goes on in {name}. Leave it out.")
        return Path(name)
    recipe = load(name, overrides, extra)[0]  # a file may say log.dir and name
    if recipe.log.dir is not None:
        folder = Path(recipe.log.dir)
        if not (folder / "recipe.yaml").exists():
            raise UserError(f"--resume: {folder} holds no run. Start it without --resume.")
        return folder
    base = Path("runs") / recipe.name
    runs = sorted(p.parent for p in base.glob("*/recipe.yaml"))
    if not runs:
        raise UserError(f"--resume: no run of {name} in {base}. Give a run folder, or start it without --resume.")
    return runs[-1]
