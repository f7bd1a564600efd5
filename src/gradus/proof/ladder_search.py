"""How `gradus ladder` climbs: the greedy search for the optimizations that pay. Nothing is measured in here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from gradus.proof.optimizations import Keys, LadderContext, Optimization, has_keys, with_keys
from gradus.recipe.schema import Recipe

MARGIN = 0.02  # of speed and of memory: less is no difference
SLOWEST = 0.67  # of the speed of the rung before, that --for memory may cost
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}  # of a loss, against the rung before
SAME = "no difference"


@dataclasses.dataclass
class Trial:
    """The measurement of one option, and what follows from it. ratio: of samples/s against the rung before, median,
    lowest and highest of the rounds; wall_clock: the same of each round, with the time that other programs took;
    tensors, planned, process: bytes; saved: share of the tensors before; loss: farthest of a few steps against before;
    None: not known."""

    rung: str
    keys: Keys
    speed: float | None = None
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    tensors: float | None = None
    planned: float | None = None
    process: float | None = None
    saved: float = 0.0
    first_call: float | None = None
    data_wait: float | None = None
    loss: float | None = None
    failed: str | None = None
    kept: bool = False
    verdict: str = ""
    wall_clock: Sequence[float] = ()
    busy: bool = False  # other programs used the processors

    @property
    def by_wall_clock(self) -> float:
        """The ratio's median, with the time that other programs took."""
        return statistics.median(self.wall_clock or [self.ratio])


@dataclasses.dataclass
class Climbed:
    """The best recipe, the keys that were kept, and a trial of each option, or of what was left out."""

    best: Recipe
    keys: Keys
    trials: list[Trial]


Measure = Callable[[str, Recipe, list[Keys], bool], list[Trial]]  # (rung, best so far, options, compare losses)


def climb(optimizations: Sequence[Optimization], best: Recipe, context: LadderContext, measure: Measure) -> Climbed:
    climbed = Climbed(best, {}, [])
    for n, optimization in enumerate(optimizations, 1):
        name = f"{n:02}-{optimization.name.replace(' ', '-')}"  # of its folder
        options, reasons = optimization.candidates(climbed.best, context)
        trials = measure(name, climbed.best, options, optimization.changes is None) if options else []
        chosen = choose(trials, optimization, climbed.best, context)
        for trial in trials:
            if trial is chosen or context.data_wait is None:
                context.data_wait = trial.data_wait
        climbed.trials += [*trials, *(Trial(name, {}, verdict=f"left out: {reason}") for reason in reasons)]
        if chosen:
            climbed.best = with_keys(climbed.best, chosen.keys)
            climbed.keys |= chosen.keys
    return climbed


def choose(
    trials: Sequence[Trial], optimization: Optimization, best: Recipe, context: LadderContext
) -> Trial | None:
    """The option that is kept, if one is; each gets its verdict. What makes no difference is kept where the recipe has
    it."""
    paying, original = [], []
    for trial in trials:
        pays, trial.verdict = judge(trial, context.goal, tolerance(with_keys(best, trial.keys)))
        paying += [trial] if pays else []
        if trial.verdict == SAME and has_keys(context.original, trial.keys):
            original, trial.verdict = [trial], f"{SAME}: as in the recipe"
        trial.verdict += f" ({optimization.changes})" if optimization.changes else ""
    if not (paying := paying or original):
        return None
    by_speed = context.goal == "speed"
    chosen = max(paying, key=lambda trial: trial.ratio if by_speed else (-(trial.tensors or 0), trial.ratio))
    for trial in paying:
        trial.verdict += "" if trial is chosen else "; another is better"
    if not optimization.keep:
        chosen.verdict += ": changes the recipe, so not kept: yours to decide"
        return None
    chosen.kept = True
    return chosen


def tolerance(recipe: Recipe) -> float:
    precision = recipe.layout.precision.removeprefix("pure_")
    return TOLERANCE["tf32" if precision == "fp32" and recipe.layout.tf32 else precision]


def judge(trial: Trial, goal: str, tolerance: float) -> tuple[bool, str]:
    """(the option pays, why)."""
    if trial.failed:
        return False, f"not possible: {trial.failed}"
    if trial.loss is not None and not trial.loss <= tolerance:
        return False, f"refused: a loss is off by {trial.loss:.1e}, more than {tolerance:.0e}"
    longer = 2 * sum(ratio < 1 - MARGIN for ratio in trial.wall_clock) > len(trial.wall_clock)  # in most rounds
    slower = trial.ratio < 1 - MARGIN or longer
    faster = trial.low > 1 and trial.ratio >= 1 + MARGIN and not longer
    smaller, larger = trial.saved >= MARGIN, trial.saved < -MARGIN
    effects = {"faster": faster, "slower": slower, "smaller": smaller, "larger": larger}
    if goal == "speed":
        pays = faster or (smaller and not slower)
    else:
        pays = (smaller and trial.ratio >= SLOWEST) or (faster and not larger)
    return pays, " and ".join(word for word, true in effects.items() if true) or SAME
