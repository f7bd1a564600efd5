"""The learning rate of each step."""

from __future__ import annotations

import math

from gradus import models
from gradus.recipe.schema import ModelConfig, Recipe, Schedule

SMALL = 512  # d_model below which a pre-trained model takes a larger learning rate


def learning_rate(schedule: Schedule, base: float, step: int, last_step: int, d_model: int) -> float:
    """The rate of optimizer step `step` (the first is 1).

    `noam`: base · factor · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), Vaswani et al. 2017, equation 3.
    The others rise linearly over `warmup_steps`, reaching `base` at the step `warmup_steps`; linear and cosine then
    fall to `final · base` at `end_step` (None: `last_step`) and stay there.
    """
    warmup = schedule.warmup(last_step)
    if schedule.name == "noam":
        return base * schedule.factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    if step < warmup:
        return base * step / warmup
    if schedule.name == "constant" or last_step == 1:  # a single step has nothing to fall over
        return base
    end = schedule.end_step or last_step
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    fall = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (schedule.final + (1.0 - schedule.final) * fall)


def rate_of(recipe: Recipe, step: int, last_step: int) -> float:
    """`learning_rate` of a recipe's run of so many steps."""
    return learning_rate(recipe.schedule, recipe.optimizer.lr, step, last_step, recipe.model.d_model)


def fine_tuning_rate(config: ModelConfig) -> float:
    """The usual learning rate of Adam for weights that are trained already, rounded to one digit; for an adapter ten
    times that (Schulman & Thinking Machines Lab 2025, "LoRA Without Regret")."""
    times = (1 if config.d_model >= SMALL else 6) * (10 if config.adapter else 1)
    return float(f"{models.lookup(config.family).fine_tuning_rate * times:.1g}")


def unusual(recipe: Recipe, last_step: int) -> str | None:
    """A warning where the weights of model.init would be trained at a learning rate for new ones: of Adam, ten times
    the usual one for trained ones; and an adapter at one for whole weights."""
    schedule, usual = recipe.schedule, fine_tuning_rate(recipe.model)
    peak = min(max(1, schedule.warmup(last_step)), last_step)
    rate = rate_of(recipe, peak, last_step)
    if recipe.model.init is None or recipe.optimizer.name == "sgd":
        return None
    if recipe.adapter and rate <= 1.01 * usual / 10:
        return (
            f"note: a learning rate of {rate:.1e} is for training all weights; an adapter takes about ten times that: "
            f"optimizer.lr={usual:.0e}, say."
        )
    if rate < 10 * usual:
        return None
    fix = f"optimizer.lr={usual:.0e}" + (" schedule.name=linear" if schedule.name == "noam" else "")
    return (
        f"note: a learning rate of {rate:.1e} is for training from scratch; the weights of model.init="
        f"{recipe.model.init} may lose what they have learned. Set {fix}, say."
    )
