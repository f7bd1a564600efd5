"""How `gradus ladder` climbs: what is kept of what was measured. Nothing is measured in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gradus.proof.rungs import Keys, Place, Rung, each, value_of, with_keys
from gradus.recipe.schema import Recipe

MARGIN = 0.02  # of speed and of memory: less is no difference
SLOWEST = 0.67  # of the speed of the rung before, that --for memory may cost
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}  # of a loss, against the rung before
SAME = "no difference"


@dataclasses.dataclass
class Found:
    """What was measured of one option. ratio: of samples/s against the rung before, median, lowest and highest of the rounds; tensors,
    planned, process: bytes; saved: share of the tensors before; loss: farthest of a few steps against before; None: not known."""

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


Measure = Callable[[str, Recipe, list[Keys], bool], list[Found]]  # (rung, best so far, options, whether losses are compared)


def climb(rungs: Sequence[Rung], best: Recipe, place: Place, measure: Measure) -> tuple[Recipe, Keys, list[Found]]:
    """(the best recipe, the keys that were kept, what was found of each rung)."""
    kept: Keys = {}
    found: list[Found] = []
    for name, rung in each(tuple(rungs)):
        options, reasons = rung.tries(best, place)
        tried = measure(name, best, options, rung.changes is None) if options else []
        chosen = choose(tried, rung, best, place)
        for f in tried:
            place.data_wait = f.data_wait if f is chosen or place.data_wait is None else place.data_wait
        found += [*tried, *(Found(name, {}, verdict=f"left out: {why}") for why in reasons)]
        if chosen:
            best, kept = with_keys(best, chosen.keys), {**kept, **chosen.keys}
    return best, kept, found


def choose(tried: Sequence[Found], rung: Rung, best: Recipe, place: Place) -> Found | None:
    """The option that is kept, if one is; each gets its verdict. What makes no difference is kept where the recipe has it."""
    pays, own = [], []
    for f in tried:
        good, f.verdict = judge(f, place.goal, tolerance(with_keys(best, f.keys)))
        pays += [f] if good else []
        if f.verdict == SAME and all(value_of(place.given, key) == value for key, value in f.keys.items()):
            own, f.verdict = [f], f"{SAME}: as in the recipe"
        f.verdict += f" ({rung.changes})" if rung.changes else ""
    if not (pays := pays or own):
        return None
    chosen = max(pays, key=lambda f: f.ratio if place.goal == "speed" else (-(f.tensors or 0), f.ratio))
    for f in pays:
        f.verdict += "" if f is chosen else "; another is better"
    if not rung.ours:
        chosen.verdict += ": changes the recipe, so not kept: yours to decide"
        return None
    chosen.kept = True
    return chosen


def tolerance(recipe: Recipe) -> float:
    precision = recipe.layout.precision.removeprefix("pure_")
    return TOLERANCE["tf32" if precision == "fp32" and recipe.layout.tf32 else precision]


def judge(f: Found, goal: str, within: float) -> tuple[bool, str]:
    """Whether it pays, and why."""
    if f.failed:
        return False, f"not possible: {f.failed}"
    if f.loss is not None and not f.loss <= within:
        return False, f"refused: a loss is off by {f.loss:.1e}, more than {within:.0e}"
    faster, slower = f.low > 1 and f.ratio >= 1 + MARGIN, f.ratio < 1 - MARGIN
    smaller, larger = f.saved >= MARGIN, f.saved < -MARGIN
    what = " and ".join(word for word, so in {"faster": faster, "slower": slower, "smaller": smaller, "larger": larger}.items() if so)
    if goal == "speed":
        good = faster or (smaller and not slower)
    else:
        good = (smaller and f.ratio >= SLOWEST) or (faster and not larger)
    return good, what or SAME
