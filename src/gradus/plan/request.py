"""What is asked of a plan, and what it answers, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.recipe.schema import Recipe
from gradus.rows import Row

if TYPE_CHECKING:  # imported where it is needed: --help is instant
    from gradus.plan.engine import Plan


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked. recipe: a packaged recipe, a file, a run folder, a preset's name or hf:NAME."""

    recipe: str
    overrides: tuple[str, ...] | list[str] = ()
    on: str | None = None  # "8xA100-80GB", "H100", "this"
    tokens: float | None = None  # to train on, in place of the recipe's steps
    days: float | None = None  # a deadline
    json_file: str | None = None  # Hugging Face's TrainingArguments
    price: float | None = None  # of a device-hour
    mtbf: float | None = None  # seconds of one device between two failures

    def __post_init__(self) -> None:
        for name in ("tokens", "days", "price", "mtbf"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name}={value:g}: must be a positive number.")


@dataclasses.dataclass
class Answer:
    recipe: Recipe
    cluster: Cluster | None
    n: int
    rows: list[Row]
    notes: list[str]
    fits: bool | None  # by the upper end of its memory; None: the memory of the device is not known
    layout_keys: str  # the layout as words ready to paste; where --days found the number of devices, with --on
    headline: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)  # what would fit, where this does not
    chosen: bool = False  # whether the layout, or the number of devices, is the plan's own choice
    plan: Plan | None = None  # that it is made of

    @property
    def tight(self) -> bool:
        """Whether it fits by the middle estimate of its memory, not by its upper end."""
        return self.fits is False and self.value("memory/device") <= self.value("memory/capacity")

    def value(self, name: str, **conditions) -> float | None:
        """The first row's of this name and these conditions; None where there is none."""
        rows = (row for row in self.rows if row.name == name)
        alike = (row for row in rows if all(row.conditions.get(k) == v for k, v in conditions.items()))
        return next((row.value for row in alike), None)


class Reply(NamedTuple):
    """The answer to another question than the plan."""

    lines: list[str]  # as the screen shows them
    rows: list[Row]
    notes: list[str]
