"""Chips' and softwares' parameters from all runs together: least squares on logarithms, robust, drawn to priors.

The logarithm of a run's parameter is a sum of terms: what all chips have, what its maker's and its chip have more (of a chip's parameters),
or its software's own. A chip or a software that no run is left of has the rest of the sum, as a plan for it would.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import numpy as np

from gradus.plan import roofline
from gradus.plan.roofline import OF_CHIP, OF_SOFTWARE
from published.price import NAMES, Runs

SIGMA = 0.08  # of the logarithm of a measurement, within which errors count as squares and beyond which less
# field → (prior of all chips, how far its logarithm is expected to lie from it; how far a maker's and a chip's lies from that)
CHIPS = {"matmul": (0.8, 0.1, 0.08), "depth": (120.0, 0.7, 0.3), "attention": (0.35, 0.5, 0.3), "bandwidth": (0.8, 0.15, 0.08),
         "kernel": (3e-6, 0.5, 0.2), "misaligned": (0.33, 0.5, 0.0), "low": (0.75, 0.2, 0.1)}  # fmt: skip
NETWORK = {"network": (0.8, 0.3, 0.0), "latency": (2e-5, 0.7, 0.0)}
SOFTWARE = {"elementwise": (0.8, 0.3), "host": (1.2e-5, 1.0), "wait": (2e-5, 1.0), "overlap": (0.9, 0.1), "contention": (0.1, 0.7), "straggle": (0.003, 1.0)}
# What is known of a software beside the runs: DeepSpeed's change of 2021 gives 25 GB/s a device (see software.yaml), of eight ports' 200
KNOWN = {("network", "zero3"): (0.125, 0.3), ("overlap", "zero3"): (0.01, 0.0), ("elementwise", "timm"): (1.0, 0.15), ("elementwise", "mosaic"): (1.0, 0.15)}
LIMIT = {"matmul": 1.0, "bandwidth": 0.95, "network": 1.0, "overlap": 1.0, "attention": 0.9, "low": 1.0, "misaligned": 1.0, "elementwise": 1.0}


@dataclasses.dataclass
class Term:
    """A summand of the logarithm of a field: of all runs (key "*"), a maker's, a chip's or a software's."""

    field: str
    key: str
    prior: float
    spread: float


def maker(chip: str) -> str:
    return next((name for name, text in roofline.MAKERS if re.match(text, chip)), "other")


def keys_of(chip: str, software: str) -> set[str]:
    return {"*", maker(chip), chip, software}


def terms(runs: list[tuple[str, str]]) -> list[Term]:
    """Of runs as (chip, software)."""
    chips, softwares = sorted({chip for chip, _ in runs}), sorted({s for _, s in runs if s})
    out = []
    for field, (start, wide, apart) in (CHIPS | NETWORK).items():
        out.append(Term(field, "*", math.log(start), wide))
        if field in CHIPS and apart:
            out += [Term(field, chip, 0.0, apart) for chip in chips]
        if field == "matmul":
            out += [Term(field, name, 0.0, 0.15) for name in sorted({maker(chip) for chip in chips} - {"nvidia"})]
    for software in softwares:
        for field, known in SOFTWARE.items():
            start, wide = KNOWN.get((field, software), known)
            out.append(Term(field, software, math.log(start), wide))
    out += [Term(field, name, math.log(start / NETWORK[field][0]), wide) for (field, name), (start, wide) in KNOWN.items() if field in NETWORK and name in softwares]
    return [t for t in out if t.spread] + [t for t in out if not t.spread]


class Fit:
    """The fit of all runs; `solve` with some of them left out. runs: (chip, software) of each; weights: of each."""

    def __init__(self, priced: Runs, runs: list[tuple[str, str]], targets: np.ndarray, signs: np.ndarray, weights: np.ndarray):
        """targets: measured seconds (or what `priced` says), signs unused where seconds; weights: of each run's error."""
        self.priced, self.runs, self.targets, self.weights = priced, runs, targets, weights
        self.terms = terms(runs)
        self.free = sum(1 for t in self.terms if t.spread)
        self.prior = np.array([t.prior for t in self.terms])
        self.spread = np.array([t.spread or 1.0 for t in self.terms])
        keys = [keys_of(*run) for run in runs]
        self.has = np.array([[t.key in k for t in self.terms] for k in keys], dtype=float)  # runs × terms
        self.into = np.array([[t.field == name for name in NAMES] for t in self.terms], dtype=float)  # terms × fields
        self.limit = np.log([LIMIT.get(name, np.inf) for name in NAMES])
        default = dataclasses.asdict(roofline.Parameters())
        self.base = np.array([0.0 if any(t.field == name for t in self.terms) else math.log(default[name] or 1e-12) for name in NAMES])

    def parameters(self, x: np.ndarray) -> np.ndarray:
        return np.exp(np.minimum((self.has * x) @ self.into + self.base, self.limit))

    def errors(self, x: np.ndarray) -> np.ndarray:
        return np.log(self.priced.seconds(self.parameters(x)) / self.targets) / SIGMA

    def _cost(self, e, x, w) -> float:
        return float(np.sum(w * 2 * (np.sqrt(1 + e**2) - 1)) + np.sum(((x - self.prior) / self.spread) ** 2))

    def slopes(self, x: np.ndarray, e: np.ndarray) -> np.ndarray:
        out = np.zeros((len(e), self.free))
        for i in range(self.free):
            moved = x.copy()
            moved[i] -= 1e-3
            out[:, i] = (e - self.errors(moved)) / 1e-3
        return out

    def solve(self, without: np.ndarray | None = None, start: np.ndarray | None = None, rounds: int = 30) -> np.ndarray:
        """Levenberg-Marquardt (Marquardt 1963) with numerical derivatives; errors beyond SIGMA count less (soft L1). Deterministic."""
        w = self.weights * (1.0 if without is None else ~without)
        x = (self.prior if start is None else start).copy()
        damping, e = 1e-3, self.errors(x)
        best = self._cost(e, x, w)
        for _ in range(rounds):
            j = self.slopes(x, e)
            weight = w / np.sqrt(1 + e**2)
            matrix = j.T @ (j * weight[:, None]) + np.diag(1 / self.spread[: self.free] ** 2)
            slope = j.T @ (weight * e) + ((x - self.prior) / self.spread**2)[: self.free]
            for _ in range(8):
                tried = x.copy()
                tried[: self.free] -= np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
                found = self.errors(tried)
                value = self._cost(found, tried, w)
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


def weights_of(sources: list[str]) -> np.ndarray:
    """A source of n runs counts as the root of n."""
    many = Counter(sources)
    return np.array([3 * many[s] ** -0.5 for s in sources])


def leave_out(fit: Fit, labels: list[str], whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors (log of predicted over measured seconds) with each label's runs left out, and how many runs and labels stood in each fit."""
    out, labels = np.zeros(len(labels)), np.array(labels)
    for label in sorted(set(labels)):
        without = labels == label
        x = fit.solve(without, whole, rounds=4)
        out[without] = fit.errors(x)[without] * SIGMA
    return out, labels
