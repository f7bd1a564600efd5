"""How many steps a run has, and the learning rate of each."""

from __future__ import annotations

import math

from gradus.data.loader import Plan
from gradus.recipe.schema import Recipe, Schedule


def total_steps(recipe: Recipe, plan: Plan) -> int:
    """Optimizer steps of the whole run; part of an epoch counts its steps, rounded up."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    whole = int(recipe.train.epochs)
    if plan.batch_samples is None:
        steps = sum(len(plan.epoch(e)) for e in range(whole))
    else:
        steps = whole * plan.steps_per_epoch
    rest = recipe.train.epochs - whole
    # rounded first: 1.1 - 1 is a little more than 0.1
    return steps + (math.ceil(round(rest * len(plan.epoch(whole)), 6)) if rest else 0) or 1


def learning_rate(schedule: Schedule, base: float, step: int, last_step: int, d_model: int) -> float:
    """The rate of optimizer step `step` (the first is 1).

    `noam`: base · factor · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), Vaswani et al. 2017, equation 3.
    The others rise linearly over `warmup_steps`, reaching `base` at the step `warmup_steps`; linear and cosine then
    fall to `final · base` at `end_step` (None: `last_step`) and stay there.
    """
    warmup = schedule.warmup_steps
    if schedule.name == "noam":
        return base * schedule.factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    if step < warmup:
        return base * step / warmup
    if schedule.name == "constant":
        return base
    end = schedule.end_step or last_step
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    fall = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (schedule.final + (1.0 - schedule.final) * fall)
