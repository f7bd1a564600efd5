"""The folder of a study: its lock, its settings, and every sample, a line of samples.jsonl the moment it is there; and
from the samples the rows: medians with all samples, conditions, and comparisons with the base."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gradus import files, limits
from gradus.errors import UserError, writing
from gradus.measure import machine
from gradus.parallel import status
from gradus.proof import timing
from gradus.proof.study import Configuration, Study, Values
from gradus.proof.timing import Timed
from gradus.rows import Row, RowFile, read_rows
from gradus.train.folder import LOCK, locked

VERBS = ("study", "scale", "ladder", "bench")  # that measure by this harness: what a report shows as the command
SAMPLES, PLAN = "samples.jsonl", "plan.jsonl"
RATIOS = {  # row → against its base
    "samples_per_s": "ratio",
    "samples_per_s/undisturbed": "ratio/undisturbed",
    "memory/allocated": "ratio/memory",
    "memory/process": "ratio/process",
}
EFFICIENCY = "ratio/efficiency"
AGAIN = "free some space and start it again: what was measured is kept."


@dataclasses.dataclass
class Sample:
    """One configuration in one round. ranks: of steps. Of a whole training instead: values, planned (by its own plan)
    and series by step."""

    round: int
    ranks: list[Timed] = dataclasses.field(default_factory=list)
    values: Values = dataclasses.field(default_factory=dict)
    planned: Values = dataclasses.field(default_factory=dict)
    series: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    elapsed: float = 0.0  # s in all
    failed: str | None = None

    def __post_init__(self) -> None:
        if self.ranks:
            self.values, self.planned = figures(self.ranks), self.ranks[0].planned
            self.series = {"loss": self.ranks[0].losses}

    @property
    def speed(self) -> float:
        """Samples/s."""
        return self.values.get("samples_per_s", (0.0,))[0]

    def record(self) -> dict[str, Any]:
        """A line of samples.jsonl, but for its name, value and conditions."""
        from_ranks = ("values", "planned", "series") if self.ranks else ()
        return {k: v for k, v in dataclasses.asdict(self).items() if v and k not in from_ranks}


def middle_of(samples: Sequence[Sample]) -> Sample:
    """The round of median speed (of an even number of rounds, the slower of the two in the middle): its figures belong
    together."""
    speeds = [s.speed for s in samples]
    return samples[speeds.index(statistics.median_low(speeds))]


def figures(ranks: list[Timed]) -> Values:
    """The figures of steps that the processes of one configuration timed together."""
    first, elapsed = ranks[0], max(t.elapsed for t in ranks)
    step = elapsed / len(first.spent)
    values: Values = {"samples_per_s": (first.samples / elapsed, "samples/s"), "time/step": (step, "s")}
    if first.others is not None:  # without the time that other programs had the processor, where they disturbed
        waited = first.total("ready") if first.others > timing.BUSY else 0.0
        values["samples_per_s/undisturbed"] = (first.samples / (elapsed - waited), "samples/s")
    if first.warm_up:
        values["time/first_call"] = (max(t.warm_up[0] for t in ranks), "s")
        values["time/warm_up"] = (max(sum(t.warm_up) for t in ranks), "s")
    values["data_wait"] = (max(t.total("data") for t in ranks) / elapsed, "of the step")
    if first.losses:
        values["loss"] = (first.losses[-1], first.facts.get("loss_unit", ""))
    for name in first.memory:
        values[f"memory/{name}"] = (max(t.memory[name] for t in ranks), "bytes")
    if first.sent is not None:
        values["traffic/sent"] = (sum(n_bytes for _, n_bytes in first.sent.values()), "bytes")
    return values | {name: (value, unit) for name, (value, unit) in first.values.items()}


class StudyStore:
    """The samples of a study's folder: read at the start, written as they come."""

    def __init__(self, study: Study, folder: Path):
        """Raises UserError for a line that is no sample of the study, and for samples of another machine."""
        self.study, self.path, self.samples = study, folder / SAMPLES, {c.name: [] for c in study.configurations}
        rows = [row for row in read_rows(self.path) if "failed" not in row] if self.path.exists() else []
        for row in rows:
            try:
                self.samples[row["configuration"]].append(TypeAdapter(Sample).validate_python(row))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                line = f"a line is not a sample of this study: {str(row)[:60]}"
                raise UserError(f"{self.path}: {line}. Remove it.") from None
        self.common = {**machine.conditions(), "study": study.name}
        cpu = self.common["cpu"]
        if other := next((row["cpu"] for row in rows if row.get("cpu", cpu) != cpu), None):
            machines = f"holds samples of another machine ({other}); this is {cpu}"
            raise UserError(f"{folder}: {machines}. Go on there, or give another --to.")
        keep(self.path, "".join(json.dumps(row) + "\n" for row in rows))  # what a kill cut short is gone
        self.file = RowFile(self.path)

    def has(self, c: Configuration, number: int) -> bool:
        """True where there is a sample of this round, or none can be measured."""
        return any(s.round == number or s.failed for s in self.samples[c.name])

    def measured(self, c: Configuration) -> list[Sample]:
        """The samples that did not fail."""
        return [s for s in self.samples[c.name] if not s.failed]

    def too_slow(self, c: Configuration) -> bool:
        """True where the first round was enough."""
        first = [self.samples[other.name][0] for other in (c, self.study.base_of(c)) if self.samples[other.name]]
        speeds = [s.values.get("samples_per_s/undisturbed", (s.speed,))[0] for s in first]
        return len(speeds) == 2 and speeds[0] < self.study.patience * speeds[1]

    def expected_seconds(self, c: Configuration) -> float:
        """The time of one more sample of a configuration, by its own or else all samples. One must be there."""
        samples = self.samples[c.name] or itertools.chain(*self.samples.values())
        return statistics.mean(s.elapsed for s in samples)

    def add(self, c: Configuration, sample: Sample) -> None:
        self.samples[c.name].append(sample)
        about = {"configuration": c.name, **sample.record(), **self.common}
        with writing(self.path, AGAIN):
            self.file.write([Row("sample/samples_per_s", sample.speed, "samples/s", None, about)])

    # ------------------------------------------------------------ from samples to rows

    def rows(self, plan: Sequence[Row], refused: dict[str, str]) -> list[Row]:
        """The planned rows, then the measured ones: the median over the rounds (of whole trainings the mean over the
        seeds), with all samples; and against the base: ratio, saved memory, farthest loss."""
        rows = [*plan, *planned_ratios(self.study, plan)]
        for c in self.study.configurations:
            rows += self._rows_of(c, refused.get(c.name))
        order = [c.name for c in self.study.configurations]
        return sorted(rows, key=lambda row: order.index(row.conditions["configuration"]))

    def _rows_of(self, c: Configuration, refusal: str | None) -> Iterator[Row]:
        samples, common = self.measured(c), self.conditions(c)
        if reason := refusal or next((s.failed for s in self.samples[c.name] if s.failed), None):
            yield Row("failed", reason, "", None, common)
        if not samples:
            return
        for name, (value, unit) in samples[0].planned.items():
            yield Row(name, value, unit, None, {**common, "kind": "predicted"})
        for name, (_, unit) in samples[0].values.items():
            values = [s.values[name][0] for s in samples if name in s.values]
            yield summary(name, values, unit, common, mean=bool(self.study.seeds))
        yield from self._comparisons(c, samples)

    def conditions(self, c: Configuration) -> dict[str, Any]:
        """The conditions under which a configuration was measured."""
        study = self.study
        about = {"kind": "measured", "configuration": c.name, "at": c.at, "processes": c.processes}
        about |= {"runner": Path(c.runner).name}
        if c.recipe:
            about |= {"recipe": c.recipe.name, "layout": c.recipe.layout.model_dump(exclude_defaults=True)}
        if c.options:
            about["options"] = c.options
        first_ranks = [s.ranks[0] for s in self.measured(c) if s.ranks]
        if not first_ranks:
            return {**about, "seeds": list(study.seeds), **self.common}
        about |= {"steps": study.steps, "warm_up": study.warm_up, **self.common, **first_ranks[0].facts}
        return {**about, "retaken": sum(t.retaken for t in first_ranks), "others": [t.others for t in first_ranks]}

    def _comparisons(self, c: Configuration, samples: list[Sample]) -> Iterator[Row]:
        """Ratios to the base, round by round, so that a busy moment that hit both does not count."""
        base = self.study.base_of(c)
        base_samples = {s.round: s for s in self.measured(base)}
        pairs = [(s, base_samples[s.round]) for s in samples if s.round in base_samples]
        if base is c or not pairs:
            return
        common = {**self.conditions(c), "against": base.name, "against_processes": base.processes}
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


# ------------------------------------------------------------ medians and ratios


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


def summary(name: str, values: Sequence[float], unit: str, common: dict[str, Any], mean: bool = False) -> Row:
    """The median of the rounds, or the mean over seeds, with the samples and their range."""
    spread: dict[str, Any] = {"samples": values, "low": min(values), "high": max(values)}
    if mean and len(values) > 1:
        spread["std"] = statistics.stdev(values)
    value = statistics.mean(values) if mean else statistics.median(values)
    return Row(name, value, unit, None, {**common, **spread})


def farthest(series: Sequence[float], base: Sequence[float]) -> float:
    """The largest relative difference of two series of one length."""
    return max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(series, base))


# ------------------------------------------------------------ the folder


@contextlib.contextmanager
def claimed(folder: Path, kind: str, identity: dict[str, Any], more: dict[str, Any]) -> Iterator[None]:
    """The folder exists and is locked inside the context, for what has this identity. KIND.json keeps that with `more`
    and the command. A folder without samples or runs is free. Raises UserError where it holds something else, or
    another process writes there."""
    file = folder / f"{kind}.json"
    with locked(folder, kind, "give another --to"):
        if file.exists():
            kept = limits.read_json(file, limits.CONFIG_FILE)
            if not isinstance(kept, dict):
                raise UserError(f"{file}: not what gradus writes there. Remove the folder, or give another --to.")
            if not identity.items() <= kept.items():
                _remove_samples(folder, kind)
        elif any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"--to={folder}: is not empty, and holds no {kind}. Give another folder.")
        command = {"command": text} if (text := status.typed(*VERBS)) else {}
        keep(file, json.dumps({**identity, **command, **more}, indent=1, default=str) + "\n")
        yield


def _remove_samples(folder: Path, kind: str) -> None:
    """Files of another study that measured nothing. Raises UserError where it did, or began a whole training."""
    trainings = any(folder.rglob("recipe.yaml"))
    if trainings or any("failed" not in row for path in folder.rglob(SAMPLES) for row in read_rows(path)):
        other = f"holds another {kind}, or this one with other settings"
        raise UserError(f"--to={folder}: {other}. Give another folder, or remove it.")
    for name in (SAMPLES, PLAN):
        (folder / name).unlink(missing_ok=True)


def keep(path: Path, text: str) -> None:
    """Written aside and renamed. Raises EnvironmentFault where the disk fails."""
    with writing(path, AGAIN):
        files.write_text(path, text)
