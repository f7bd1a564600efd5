"""Does a layout fit a model, a batch and a number of processes? Asked before anything is built or started."""

from __future__ import annotations

from collections.abc import Iterator

from gradus.errors import UserError
from gradus.parallel.fits import AXES
from gradus.recipe.axes import batch, processes
from gradus.recipe.conflicts import LAYOUT, conflicts
from gradus.recipe.schema import Layout, ModelConfig, Recipe


def fits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Whether a layout can be applied to a model: what the table of recipe.conflicts says, and the axes' own sizes."""
    for p in conflicts({"model": config, "layout": layout}, rows=LAYOUT):
        yield f"{p.path}: {p.text}"
    for axis, problems in AXES.items():
        if getattr(layout, axis) > 1:
            yield from problems(config, layout)


def validate(recipe: Recipe, n_processes: int) -> None:
    """Raises one UserError with a line for everything that is wrong with the recipe's layout on so many processes."""
    layout = recipe.layout
    errors = [*fits(recipe.model, layout), *processes(layout, n_processes), *batch(recipe, n_processes)]
    if errors:
        raise UserError("\n".join(f"{recipe.name}: {line}" for line in dict.fromkeys(errors)))
