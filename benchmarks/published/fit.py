"""Softwares' parameters, and those of chips whose kernels nobody measured, from all runs together: least squares on logarithms, robust, drawn
to priors. What `kernels.yaml` says of a chip stays as it is.

The logarithm of a run's parameter is a sum of terms: what its chip has more than the nearest one whose kernels were measured, or its
software's own. A chip or a software that no run is left of has the rest of the sum, as a plan for it would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

from gradus.plan import roofline
from published.points import read_yaml
from published.price import NAMES, Runs
from published.software import table

SIGMA = 0.08  # of the logarithm of a measurement, within which errors count as squares and beyond which less
PRIORS = read_yaml("priors.yaml")
CHIPS, NETWORK, SOFTWARE, LIMIT = (PRIORS[name] for name in ("chips", "network", "software", "limits"))
KNOWN = {(field, key): known for key, fields in PRIORS["known"].items() for field, known in fields.items()}


def short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclasses.dataclass
class Term:
    """A summand of the logarithm of a field: of all runs (key "*"), a chip's, a program's or a feature's, or one of those on a family of chips."""

    field: str
    key: str
    prior: float
    spread: float


def before_runs(chip: str) -> dict[str, float]:
    """A chip's parameters by kernels alone."""
    return roofline.of_chip(chip, {})


def feature(kind: str, software: str) -> str:
    """What stands for a program's feature of a kind; kind "": for itself."""
    return f"{kind} {getattr(table()[software], kind)}" if kind and software in table() else software


def keys_of(chip: str, software: str) -> set[str]:
    """What a run's terms are of."""
    own, family = {feature(kind, software) for kind, *_ in SOFTWARE.values()}, roofline.family(chip)
    return {"*", chip, f"*@{family}", *own, *(f"{key}@{family}" for key in own)}


def terms(runs: list[tuple[str, str]]) -> list[Term]:
    """Of runs as (chip, software)."""
    chips, softwares = sorted({chip for chip, _ in runs}), sorted({s for _, s in runs if s})
    measured = roofline.fitted(roofline.KERNELS)["chips"]
    out = [Term(field, "*", math.log(start), wide) for field, (start, wide) in NETWORK.items()]
    for chip in chips:
        near = measured[roofline.family(chip) or "any"]
        fields = [field for field in CHIPS if field in near] if any(c == chip and software for c, software in runs) else ["matmul"]
        out += [Term(field, chip, 0.0, CHIPS[field]) for field in fields if field not in measured.get(chip, {})]
    for field, (kind, *known) in SOFTWARE.items():
        for key in sorted({feature(kind, software) for software in softwares}):
            start, wide = KNOWN.get((field, key), known)
            out.append(Term(field, key, math.log(start), wide))
    for software in softwares:
        families = {roofline.family(chip) for chip, s in runs if s == software} - {""}
        out += [Term("products", f"{software}@{family}", 0.0, PRIORS["pair"]) for family in sorted(families) if len(families) > 1]
    out += [Term(field, key, math.log(start), wide) for key, fields in PRIORS["on families"].items() for field, (start, wide) in fields.items()]
    out += [Term("network", f"*@{family}", 0.0, PRIORS["fabric"]) for family in sorted({roofline.family(chip) for chip, software in runs if software} - {""})]
    every = {key for software in softwares for key in keys_of("", software)}
    return out + [Term(field, key, math.log(start), wide) for (field, key), (start, wide) in KNOWN.items() if field in NETWORK and key in every]


def slopes_of(errors: Callable, x: np.ndarray, e: np.ndarray, together: list) -> np.ndarray:
    """Numerical derivatives of the errors at x, e there. together: as of `minimise`."""
    slopes = np.zeros((len(e), len(x)))
    for columns, on in together:
        moved = x.copy()
        moved[columns] -= 1e-3
        slope = ((e - errors(moved)) / 1e-3)[:, None]
        slopes[:, columns] = slope if on is None else slope * on
    return slopes


def minimise(errors: Callable, prior: np.ndarray, spread: np.ndarray, weights: np.ndarray, start: np.ndarray, rounds: int = 40, together=None) -> np.ndarray:
    """Where the weighted errors, of the size of 1, and the distance from the prior are least: Levenberg-Marquardt (Marquardt 1963) with
    numerical derivatives; errors beyond 1 count less (soft L1). What has no spread stays. together: sets of parameters of which an error
    depends on one, and on which each depends. Deterministic."""
    free = np.flatnonzero(spread)
    together = together or [([i], None) for i in free]

    def cost(e, x) -> float:
        return float(np.sum(weights * 2 * (np.sqrt(1 + e**2) - 1)) + np.sum(((x - prior)[free] / spread[free]) ** 2))

    x, damping, e = start.copy(), 1e-3, errors(start)
    best = cost(e, x)
    for _ in range(rounds):
        slopes = slopes_of(errors, x, e, together)[:, free]
        weight = weights / np.sqrt(1 + e**2)
        matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(1 / spread[free] ** 2)
        slope = slopes.T @ (weight * e) + (x - prior)[free] / spread[free] ** 2
        for _ in range(8):
            tried = x.copy()
            tried[free] -= np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
            found = errors(tried)
            value = cost(found, tried)
            if value < best:
                break
            damping *= 5
        else:
            break
        done = best - value < 1e-4 * best
        x, e, best, damping = tried, found, value, damping / 5
        if done:
            break
    return x


class Fit:
    """Of all runs together. runs: (chip, software) of each; seconds: measured."""

    def __init__(self, priced: Runs, runs: list[tuple[str, str]], seconds: np.ndarray, weights: np.ndarray):
        self.priced, self.runs, self.measured, self.weights = priced, runs, seconds, weights
        self.terms = terms(runs)
        self.prior = np.array([t.prior for t in self.terms])
        self.spread = np.array([t.spread for t in self.terms])
        self.has = np.array([[self.applies(t, keys_of(*run)) for t in self.terms] for run in runs], dtype=float)  # runs × terms
        self.into = np.array([[t.field == name for name in NAMES] for t in self.terms], dtype=float)  # terms × fields
        self.limit = np.log([LIMIT.get(name, np.inf) for name in NAMES])
        chips = {chip for chip, _ in runs}
        alike: dict[tuple[str, str], list[int]] = {}  # a run has one chip and one program
        for i, t in enumerate(self.terms):
            if t.spread:
                level = t.key if t.key == "*" else "chip" if t.key in chips else "family" if "@" in t.key else "program"
                alike.setdefault((t.field, level), []).append(i)
        self.together = [(columns, self.has[:, columns]) for columns in alike.values()]
        known = {chip: before_runs(chip) for chip in chips}
        self.base = np.log([[known[chip].get(name, 1.0) for name in NAMES] for chip, _ in runs])  # runs × fields

    @staticmethod
    def applies(t: Term, keys: set[str]) -> bool:
        """Whether a term is of such a run; of a network that is known of its software, no other."""
        return t.key in keys and not (t.key.startswith("*") and any((t.field, key) in KNOWN for key in keys))

    def parameters(self, x: np.ndarray) -> np.ndarray:
        return np.exp(np.minimum((self.has * x) @ self.into + self.base, self.limit))

    def errors(self, x: np.ndarray) -> np.ndarray:
        """Logarithms of predicted over measured seconds."""
        return np.log(self.priced.seconds(self.parameters(x)) / self.measured)

    def solve(self, without: np.ndarray | None = None) -> np.ndarray:
        weights = self.weights * (1.0 if without is None else ~without)
        return minimise(lambda x: self.errors(x) / SIGMA, self.prior, self.spread, weights, self.prior, 30, self.together)

    def entry(self, x: np.ndarray, keys: set[str], fields: Iterable[str]) -> dict[str, float]:
        """What a chip or a software has in the end, of what was fitted of it."""
        out = {}
        for name in fields:
            found = [(t, v) for t, v in zip(self.terms, x) if t.field == name and self.applies(t, keys)]
            if found:
                start = math.prod(before_runs(t.key)[name] for t, _ in found if name in CHIPS)
                out[name] = short(min(start * math.exp(sum(v for _, v in found)), LIMIT.get(name, math.inf)))
        return out

    def on_families(self, x: np.ndarray, software: str) -> dict[str, dict[str, float]]:
        """What a software has otherwise on a family of chips, by `software@family`."""
        out = {}
        for family in sorted({t.key.partition("@")[2] for t in self.terms} - {""}):
            keys = keys_of(family, software) - {"*", f"*@{family}", family}
            if fields := sorted({t.field for t in self.terms if t.key in keys and "@" in t.key}):
                out[f"{software}@{family}"] = self.entry(x, keys, fields)
        return out
