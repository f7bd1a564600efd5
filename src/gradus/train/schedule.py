"""The learning rate of every step."""

from __future__ import annotations

import math

from gradus.recipe.schema import Schedule


def learning_rate(schedule: Schedule, base: float, step: int, last_step: int, d_model: int) -> float:
    """The rate of optimizer step `step` (the first is 1).

    `noam`: base · factor · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), Vaswani et al. 2017, equation 3.
    The others rise linearly over `warmup_steps`, reaching `base` at the step `warmup_steps`; linear and cosine then fall
    to `final · base` at `end_step` (None: `last_step`) and stay there.
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
