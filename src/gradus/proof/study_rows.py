"""From the samples of a study to its rows: medians with all samples, conditions, and comparisons with the base."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.proof.study import Configuration, Study
from gradus.proof.study_store import Sample, StudyStore
from gradus.rows import Row

RATIOS = {  # row → against its base
    "samples_per_s": "ratio",
    "samples_per_s/undisturbed": "ratio/undisturbed",
    "memory/allocated": "ratio/memory",
    "memory/process": "ratio/process",
}
EFFICIENCY = "ratio/efficiency"


def rows_of(study: Study, store: StudyStore, plan: Sequence[Row], refused: dict[str, str]) -> list[Row]:
    """The planned rows, then the measured ones: the median over the rounds (of whole trainings the mean over the
    seeds), with all samples; and against the base: ratio, saved memory, farthest loss."""
    rows = [*plan, *planned_ratios(study, plan)]
    for c in study.configurations:
        rows += configuration_rows(study, store, c, refused.get(c.name))
    order = [c.name for c in study.configurations]
    return sorted(rows, key=lambda row: order.index(row.conditions["configuration"]))


def configuration_rows(study: Study, store: StudyStore, c: Configuration, refusal: str | None) -> Iterator[Row]:
    samples, common = store.measured(c), conditions_of(study, store, c)
    if reason := refusal or next((s.failed for s in store.samples[c.name] if s.failed), None):
        yield Row("failed", reason, "", None, common)
    if not samples:
        return
    for name, (value, unit) in samples[0].planned.items():
        yield Row(name, value, unit, None, {**common, "kind": "predicted"})
    for name, (_, unit) in samples[0].values.items():
        values = [s.values[name][0] for s in samples if name in s.values]
        yield summary(name, values, unit, common, mean=bool(study.seeds))
    yield from comparison_rows(study, store, c, samples)


def planned_ratios(study: Study, rows: Sequence[Row]) -> Iterator[Row]:
    """The ratios of a source's figures, and of the plans for its devices, against the base of each."""
    kinds = ("source", "planned")
    known = {(r.conditions["configuration"], r.name, r.conditions["kind"]): r for r in rows}
    for c in study.configurations:
        base = study.base_of(c)
        for kind, (name, ratio) in itertools.product(kinds, RATIOS.items()):
            own, other = known.get((c.name, name, kind)), known.get((base.name, name, kind))
            if own and other and base is not c:
                common = {**own.conditions, "against": base.name}
                named = with_efficiency(ratio, [own.value / other.value], c, base)
                yield from (Row(n, v, "", None, common) for n, (v,) in named if (c.name, n, kind) not in known)


def with_efficiency(
    ratio: str, values: list[float], c: Configuration, base: Configuration
) -> Iterator[tuple[str, list[float]]]:
    """A ratio's values by its name; and those of speeds, against another number of processes, for each process."""
    yield ratio, values
    if ratio == "ratio" and c.processes != base.processes:
        yield EFFICIENCY, [value * base.processes / c.processes for value in values]


def conditions_of(study: Study, store: StudyStore, c: Configuration) -> dict[str, Any]:
    """The conditions under which a configuration was measured."""
    about = {"kind": "measured", "configuration": c.name, "at": c.at, "processes": c.processes}
    about |= {"runner": Path(c.runner).name}
    if c.recipe:
        about |= {"recipe": c.recipe.name, "layout": c.recipe.layout.model_dump(exclude_defaults=True)}
    if c.options:
        about["options"] = c.options
    first_ranks = [s.ranks[0] for s in store.measured(c) if s.ranks]
    if not first_ranks:
        return {**about, "seeds": list(study.seeds), **store.common}
    about |= {"steps": study.steps, "warm_up": study.warm_up, **store.common, **first_ranks[0].facts}
    return {**about, "retaken": sum(t.retaken for t in first_ranks), "others": [t.others for t in first_ranks]}


def summary(name: str, values: Sequence[float], unit: str, common: dict[str, Any], mean: bool = False) -> Row:
    """The median of the rounds, or the mean over seeds, with the samples and their range."""
    spread: dict[str, Any] = {"samples": values, "low": min(values), "high": max(values)}
    if mean and len(values) > 1:
        spread["std"] = statistics.stdev(values)
    value = statistics.mean(values) if mean else statistics.median(values)
    return Row(name, value, unit, None, {**common, **spread})


def comparison_rows(study: Study, store: StudyStore, c: Configuration, samples: list[Sample]) -> Iterator[Row]:
    """Ratios to the base, round by round, so that a busy moment that hit both does not count."""
    base = study.base_of(c)
    base_samples = {s.round: s for s in store.measured(base)}
    pairs = [(s, base_samples[s.round]) for s in samples if s.round in base_samples]
    if base is c or not pairs:
        return
    common = {**conditions_of(study, store, c), "against": base.name, "against_processes": base.processes}
    for name, ratio in RATIOS.items():
        both = [(s.values[name][0], b.values.get(name, (0,))[0]) for s, b in pairs if name in s.values]
        ratios = [value / of_base for value, of_base in both if of_base]
        if ratios:
            yield from (summary(n, values, "", common) for n, values in with_efficiency(ratio, ratios, c, base))
    sample, of_base = pairs[0]
    for name, series in sample.series.items():
        if series and len(series) == len(of_base.series.get(name, ())):
            value = farthest(series, of_base.series[name])
            yield Row(f"deviation/{name}", value, "of the farthest step", None, common)


def farthest(series: Sequence[float], base: Sequence[float]) -> float:
    """The largest relative difference of two series of one length."""
    return max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(series, base))
