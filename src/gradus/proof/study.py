"""A study: configurations that are measured side by side, and what each is compared with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.parallel.device import pick_device
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.step import step_time
from gradus.proof import timing
from gradus.proof.memory_budget import changed
from gradus.recipe.schema import Recipe

Values = dict[str, tuple[float, str]]  # name → value, unit


UNITS = {
    "samples_per_s": "samples/s", "time/epoch": "h", "cost": "USD", "time": "s", "memory": "bytes", "traffic": "bytes",
    "tokens_per_s": "tokens/s", "energy/run": "Wh", "energy": "J", "co2": "kg",
}  # fmt: skip


def unit_of(name: str) -> str:
    """The unit of a figure, by its name or the first part of it."""
    return UNITS.get(name) or UNITS.get(name.partition("/")[0], "")


@dataclasses.dataclass(frozen=True)
class ReferenceHardware:
    """The devices that a source measured on, as the study names them, the recipe as it ran there, and what all of them
    cost in USD per hour."""

    name: str
    cluster: Cluster
    recipe: Recipe
    price: float | None = None

    def figures(self) -> dict[str, float]:
        """The plan for these devices; of an epoch where data.limit says how many samples that is."""
        n, device = self.cluster.n, self.cluster.device
        target = "cpu" if device.kind == "cpu" else "cuda"
        plan = engine.plan(Case.of(self.recipe, n, target))
        memory, time = plan.memory, step_time(plan.work, self.cluster)
        figures = {
            "time/step": time.total, "memory/allocated": memory.allocated, "memory/device": memory.device_total,
        }  # fmt: skip
        if self.recipe.batch.samples:
            speed, limit = self.recipe.batch.samples / time.total, self.recipe.data.limit
            figures["samples_per_s"] = speed
            if limit:
                figures["time/epoch"] = hours = limit / speed / 3600
                if self.price is not None:
                    figures["cost/epoch"] = hours * self.price
        return figures


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One thing that is measured in every round.

    at: its name on each axis. runner: one of `harness.RUNNERS`, or train (to the end, as a user starts it), none (only
    planned), or FILE.py:FUNCTION, where FUNCTION(recipe, options) returns a `timing.Subject`. rounds: of it (None: the
    study's). force: measured although the plan says that it does not fit. source, reference: the figures of a source,
    and the devices they were measured on. against: as Study has it, of this one.
    """

    name: str
    recipe: Recipe | None
    at: dict[str, str] = dataclasses.field(default_factory=dict)
    runner: str = "steps"
    processes: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounds: int | None = None
    force: bool = False
    source: dict[str, float] = dataclasses.field(default_factory=dict)
    reference: ReferenceHardware | None = None
    against: str | None = None

    def identity(self) -> dict[str, Any]:
        """The parts that make it another configuration where they differ."""
        recipe = recipes.dump(self.recipe) if self.recipe else None
        runner = Path(self.runner).name
        return {"runner": runner, "processes": self.processes, "options": self.options, "recipe": recipe}


@dataclasses.dataclass(frozen=True)
class Study:
    """Configurations, and how they are measured.

    steps, warm_up: of a round. seeds: of whole trainings, which take a round each. against: a name on one of the axes;
    its configuration is what ratios are against (None: the first configuration). collectives: profile them by name in
    the last round. repeats_if_busy, restart_data, seconds: of a `timing.Window`. patience: a configuration that after
    a round has less than this share of its base's samples/s gets no other round. strict: the failure of one
    configuration ends the study.
    """

    name: str
    configurations: Sequence[Configuration]
    steps: int = 10
    warm_up: int = 3
    rounds: int = 3
    seeds: Sequence[int] = ()
    against: str | None = None
    plan: bool = True
    collectives: bool = False
    repeats_if_busy: int = timing.REPEATS_IF_BUSY
    restart_data: bool = False
    patience: float = 0.0
    strict: bool = False
    seconds: float = 0.0

    def base_of(self, c: Configuration) -> Configuration:
        """The configuration that `c` is compared with. Raises UserError where there is none."""
        against = c.against or self.against
        if against is None:
            return self.configurations[0]
        names = ((axis, name) for other in self.configurations for axis, name in other.at.items())
        axis = next((axis for axis, name in names if name == against), None)
        base = next((other for other in self.configurations if other.at == {**c.at, axis: against}), None)
        if base is None:
            reason = "no configuration is that and otherwise the same. Give it another against."
            raise UserError(f"{c.name}: against={against}: {reason}")
        return base

    def digest(self) -> str:
        """The digest of what is measured: samples of another digest are another study's."""
        configurations = [{c.name: c.identity()} for c in self.configurations]
        content = [configurations, self.steps, self.warm_up, self.rounds, list(self.seeds)]
        content += [self.seconds] if self.seconds else []
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def with_fixed_threads(recipe: Recipe, processes: int) -> Recipe:
    """The recipe with a number of threads: on a CPU, where it says nothing, those of this process divided among the
    processes."""
    if recipe.layout.threads is not None or pick_device(recipe.layout.device).type != "cpu":
        return recipe
    return changed(recipe, layout={"threads": max(1, torch.get_num_threads() // processes)})
