"""What failures cost a run: the share of its time that goes into steps that count.

Failures come independently of one another at a constant rate, so the times between them are exponential. All times are
seconds; `between` is the mean time between two failures of all devices together: one device's, by their number.
"""

from __future__ import annotations

import math

MOST = 300.0  # of an exponent: the share is as good as zero


def young(write: float, between: float) -> float:
    """Seconds of work between two checkpoints with which least is lost, to first order (Young 1974). write: what a
    checkpoint takes."""
    return math.sqrt(2 * write * between)


def daly(write: float, between: float) -> float:
    """The same to higher order (Daly 2006, equation 37)."""
    if write >= 2 * between:
        return between
    part = write / (2 * between)
    return young(write, between) * (1 + math.sqrt(part) / 3 + part / 9) - write


def with_restarts(between: float, recovery: float, interval: float, write: float) -> float:
    """The useful share of a run that goes back to its last checkpoint after each failure (Daly 2006, section 3: exact
    for such failures, those included that come while it writes or recovers). recovery: from a failure to the first
    step, with a checkpoint read. interval: of work, between two checkpoints."""
    grown = math.expm1(min((interval + write) / between, MOST)) * math.exp(min(recovery / between, MOST))
    return interval / (between * grown)


def elastic(between: float, away: float, stop: float, replicas: int) -> float:
    """The useful share of a run whose other replicas go on when one dies: the share of replicas that are there, but not
    while all wait. away: from a replica's failure to its return. stop: for which the others wait, at each failure anew:
    until it is noticed, new groups are made and the step under way is done again. Exact for independent replicas."""
    cycle = between * replicas + max(away, stop)
    return between * replicas / cycle * (1 - stop / cycle) ** (replicas - 1)
