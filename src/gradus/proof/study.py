"""One harness for all that is measured side by side: configurations, each in processes of its own, in rounds that alternate over them.

Every sample is a line of samples.jsonl the moment it is there, so a study that was stopped goes on where it stood. What is printed and
rendered are rows (rows.jsonl): the medians over the rounds with all samples beside, what was planned of the same configuration, and under
which conditions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradus import files
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.measure.machine import conditions
from gradus.measure.workers import ended_with_this, start
from gradus.parallel import check
from gradus.parallel.world import World
from gradus.plan.show import duration, size
from gradus.proof import runs
from gradus.proof.predict import Planner, case_of
from gradus.proof.prove import why_not
from gradus.proof.timing import OTHERS, RETAKES, Timed, Window, load_steps, time_it, train_steps, whole_rounds
from gradus.recipe.schema import Recipe
from gradus.rows import Row, RowFile, read_rows
from gradus.train.precision import pick_device
from gradus.train.session import open_for

RUNNERS = {"steps": train_steps, "loader": load_steps}  # and train; and FILE.py:FUNCTION
Values = dict[str, tuple[float, str]]  # name → value, unit
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is measured once a round. at: its place on each axis. runner: steps (of training), loader, train (to the end, as a user starts
    it), or FILE.py:FUNCTION, where FUNCTION(recipe, options) returns a timing.Subject. force: measured although the plan says that it does
    not fit."""

    name: str
    recipe: Recipe | None
    at: dict[str, str] = dataclasses.field(default_factory=dict)
    runner: str = "steps"
    processes: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    force: bool = False

    def describe(self) -> dict[str, Any]:
        """What makes it another one."""
        recipe = recipes.dump(self.recipe) if self.recipe else None
        return {"runner": Path(self.runner).name, "processes": self.processes, "options": self.options, "recipe": recipe}


@dataclasses.dataclass(frozen=True)
class Study:
    """steps, warm_up: of a round. seeds: of whole trainings, which take a round each. against: a name on one of the axes; its configuration
    is what ratios are against (None: the first configuration). collectives: profile them by name in the last round. retakes, anew: of a
    timing.Window. patience: a configuration that after a round has less than this share of its base's samples/s gets no other round."""

    name: str
    configurations: Sequence[Configuration]
    steps: int = 10
    warm_up: int = 3
    rounds: int = 3
    seeds: Sequence[int] = ()
    against: str | None = None
    plan: bool = True
    collectives: bool = False
    retakes: int = RETAKES
    anew: bool = False
    patience: float = 0.0

    def base_of(self, c: Configuration) -> Configuration:
        """The configuration that `c` is compared with."""
        if self.against is None:
            return self.configurations[0]
        axis = next(axis for axis, name in self._places() if name == self.against)
        return next(o for o in self.configurations if o.at == {**c.at, axis: self.against})

    def _places(self) -> Iterator[tuple[str, str]]:
        return ((axis, name) for c in self.configurations for axis, name in c.at.items())

    def digest(self) -> str:
        told = [{c.name: c.describe()} for c in self.configurations]
        what = [told, self.steps, self.warm_up, self.rounds, list(self.seeds)]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclasses.dataclass
class Sample:
    """One configuration in one round. ranks: of steps; else, of a whole training, values, what its own plan said, and series by step."""

    round: int
    ranks: list[Timed] = dataclasses.field(default_factory=list)
    values: Values = dataclasses.field(default_factory=dict)
    planned: Values = dataclasses.field(default_factory=dict)
    series: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    took: float = 0.0  # s in all
    failed: str | None = None

    def __post_init__(self) -> None:
        if self.ranks:
            self.values, self.series = figures(self.ranks), {"loss": self.ranks[0].losses}

    def record(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if v and not (self.ranks and k in ("values", "series"))}


def figures(ranks: list[Timed]) -> Values:
    """Of the steps that the processes of one configuration timed together."""
    first, elapsed = ranks[0], max(t.elapsed for t in ranks)
    step = elapsed / len(first.spent)
    found: Values = {"samples_per_s": (first.samples / elapsed, "samples/s"), "time/step": (step, "s")}
    if first.others is not None:  # where others were there, without the time that this was ready to run and they had the processor
        kept_off = sum(spent[2] for spent in first.spent) if first.others > OTHERS else 0.0
        found["samples_per_s/undisturbed"] = (first.samples / (elapsed - kept_off), "samples/s")
    if first.warm_up:
        found |= {"time/first_call": (max(t.warm_up[0] for t in ranks), "s"), "time/warm_up": (max(sum(t.warm_up) for t in ranks), "s")}
    data = max(sum(spent[0] for spent in t.spent) for t in ranks)
    found["data_wait"] = (data / elapsed, "of the step")
    if first.losses:
        found["loss"] = (first.losses[-1], first.facts.get("loss_unit", ""))
    for name in first.memory:
        found[f"memory/{name}"] = (max(t.memory[name] for t in ranks), "bytes")
    if first.sent is not None:
        found["traffic/sent"] = (sum(n_bytes for _, n_bytes in first.sent.values()), "bytes")
    return found


# ------------------------------------------------------------ what is measured


def steady(recipe: Recipe, processes: int) -> Recipe:
    """With a fixed number of threads: on a CPU those of this process, divided among the processes, where the recipe says nothing."""
    if recipe.layout.threads is not None or pick_device(recipe.layout.device).type != "cpu":
        return recipe
    threads = max(1, torch.get_num_threads() // processes)
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"threads": threads})})


def own_steps(file: str, function: str, recipe: Recipe | None, options: dict[str, Any], window: Window, here: World) -> Timed:
    """Steps of what FILE.py's FUNCTION(recipe, options) returns, a timing.Subject."""
    torch.set_num_threads((recipe and recipe.layout.threads) or options.get("threads") or 1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return time_it(getattr(module, function)(recipe, options), window)


def take(study: Study, c: Configuration, number: int, folder: Path) -> Sample:
    """One sample. Raises UserError where the configuration cannot be measured."""
    began, log = time.monotonic(), folder / "workers.log"
    if c.runner == "train":
        seed = study.seeds[number - 1] if study.seeds else None
        values, said, series = runs.train(c.recipe, c.processes, seed, folder / "runs" / f"{label(c.name)}-{number}")
        return Sample(number, values=values, planned=said, series=series, took=time.monotonic() - began)
    steps = whole_rounds(study.steps, c.recipe.layout)[0] if c.recipe else study.steps
    window = Window(steps, study.warm_up, os.getpid(), study.collectives and number == study.rounds, study.retakes, study.anew)
    if c.runner in RUNNERS:
        ranks = start(c.processes, RUNNERS[c.runner], c.recipe, window, log=log)
    else:
        file, _, function = c.runner.rpartition(":")
        ranks = start(c.processes, own_steps, file, function, c.recipe, c.options, window, log=log)
    return Sample(number, ranks, took=time.monotonic() - began)


def label(name: str) -> str:
    """A name as a file can have it."""
    return "".join(ch if ch.isalnum() or ch in "-_." else "-" for ch in name)


class Notebook:
    """The samples of a study's folder: read at the start, written as they come."""

    def __init__(self, study: Study, folder: Path):
        """Raises UserError where the folder holds something else."""
        self.path, self.samples = folder / "samples.jsonl", {c.name: [] for c in study.configurations}
        guard, mine = folder / "study.json", {"study": study.name, "digest": study.digest()}
        if guard.exists():
            if json.loads(guard.read_text(encoding="utf-8")) != mine:
                raise UserError(f"--to={folder}: holds another study, or this one with other settings. Give another folder, or remove it.")
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"--to={folder}: is not empty, and holds no study. Give another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(guard, mine)
        kept = []
        for row in read_rows(self.path) if self.path.exists() else []:
            if "failed" not in row:
                kept.append(row)
                ranks = [Timed(**rank) for rank in row.get("ranks", ())]
                fields = {k: row[k] for k in ("round", "values", "planned", "series", "took") if k in row}
                self.samples[row["configuration"]].append(Sample(**fields, ranks=ranks))
        self.common = {**conditions(), "study": study.name}
        files.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))  # what a kill cut short is gone
        self.file = RowFile(self.path)

    def has(self, c: Configuration, number: int) -> bool:
        return any(s.round == number or s.failed for s in self.samples[c.name])

    def hopeless(self, study: Study, c: Configuration) -> bool:
        """Whether the first round was enough."""
        speed = lambda s: s.values.get("samples_per_s/undisturbed", s.values.get("samples_per_s", (0.0,)))[0]  # noqa: E731
        first = [speed(s) for o in (c, study.base_of(c)) for s in self.samples[o.name][:1]]
        return len(first) == 2 and first[0] < study.patience * first[1]

    def add(self, c: Configuration, sample: Sample) -> None:
        self.samples[c.name].append(sample)
        value, unit = sample.values.get("samples_per_s", (0.0, "samples/s"))
        self.file.write([Row("sample/samples_per_s", value, unit, None, {"configuration": c.name, **sample.record(), **self.common})])

    def last(self, c: Configuration) -> Sample | None:
        return self.samples[c.name][-1] if self.samples[c.name] else None


# ------------------------------------------------------------ what is planned


def planned(study: Study, folder: Path, say: Say, only: set[str] | None = None) -> tuple[list[Row], dict[str, str]]:
    """(rows of the plans of the configurations, why one of them will not fit: name → reason); kept in plan.jsonl."""
    rows, refused, path = [], {}, folder / "plan.jsonl"
    if path.exists():
        rows = [Row(r.pop("name"), r.pop("value"), r.pop("unit", ""), r.pop("step", None), r) for r in read_rows(path)]
        known = {row.conditions["configuration"] for row in rows}
    else:
        known = set()
    for c in study.configurations if study.plan else ():
        if c.recipe is None or c.runner != "steps" or c.name in known or (only and c.name not in only):
            continue
        try:
            with Planner() as planner:
                found = planner.plan(case_of(open_for(c.recipe, c.processes), local=c.processes))
        except Exception as e:
            say(f"note: no plan for {c.name} ({why_not(e)})")
            continue
        if found.refusal and not c.force:
            refused[c.name] = found.refusal
        for row in found.rows:
            row.conditions |= {"configuration": c.name, "kind": "predicted"}
        rows += found.rows
    files.write_text(path, "".join(row.json() + "\n" for row in rows))
    return rows, refused


# ------------------------------------------------------------ the study


def run(study: Study, folder: Path, say: Say = print, only: Sequence[str] = ()) -> list[Row]:
    """Take the samples that are missing, and return and write the rows of all that are there.

    only: names of configurations, or parts of them; each with what it is compared with. Writes study.json, plan.jsonl, samples.jsonl,
    rows.jsonl and workers.log into `folder`. Raises UserError for a mistake that is known before anything is started; what a configuration
    fails of later is told in its row.
    """
    wanted = {c.name for c in study.configurations if not only or any(word in c.name for word in only)}
    if not wanted:
        raise UserError(f"--only {' '.join(only)}: no configuration has that in its name: {', '.join(c.name for c in study.configurations)}")
    wanted |= {study.base_of(c).name for c in study.configurations if c.name in wanted}
    for c in study.configurations:
        if c.recipe is not None and c.name in wanted:
            try:
                check.validate(c.recipe, c.processes)
            except UserError as e:
                raise UserError(f"{c.name}: {e}") from None
    notebook = Notebook(study, folder)
    foreseen, refused = planned(study, folder, say, wanted)
    for name, why in refused.items():
        say(f"{name}: {why}")
    rounds = len(study.seeds) or study.rounds
    todo = [(k, c) for k in range(1, rounds + 1) for c in study.configurations if c.name in wanted and c.name not in refused]
    with contextlib.closing(notebook.file), ended_with_this():
        for at, (k, c) in enumerate(todo, 1):
            if notebook.has(c, k) or notebook.hopeless(study, c):
                continue
            try:
                sample = take(study, c, k, folder)
            except UserError as e:
                sample = Sample(k, failed=str(e))
            notebook.add(c, sample)
            left = sum(mean_of(notebook, o) for j, o in todo[at:] if not notebook.has(o, j) and not notebook.hopeless(study, o))
            say(f"round {k} of {rounds}, {at} of {len(todo)}: {c.name}: {told(sample)}" + (f"; {duration(left)} left" if left else ""))
    rows = rows_of(study, notebook, foreseen, refused)
    files.write_text(folder / "rows.jsonl", "".join(row.json() + "\n" for row in rows))
    return rows


def mean_of(notebook: Notebook, c: Configuration) -> float:
    """Seconds that one more sample of a configuration will take, from what its own, or else all samples took."""
    own = [s.took for s in notebook.samples[c.name]] or [s.took for found in notebook.samples.values() for s in found]
    return statistics.mean(own)


def told(sample: Sample) -> str:
    """A sample in one line."""
    if sample.failed:
        return f"failed: {sample.failed}"
    values = {name: value for name, (value, _) in sample.values.items()}
    words = [f"{values['samples_per_s']:,.4g} samples/s"] if "samples_per_s" in values else []
    words += [f"a step {duration(values['time/step'])}"] if "time/step" in values else []
    words += [f"first call {duration(values['time/first_call'])}"] if values.get("time/first_call", 0) > 3 * values.get("time/step", 1e9) else []
    words += [f"tensors {size(values['memory/allocated'])}"] if "memory/allocated" in values else []
    disturbed = [t for t in sample.ranks if t.retaken]
    words += [f"taken again {disturbed[0].retaken} times: others used the processors"] if disturbed else []
    return ", ".join(words) or duration(sample.took)


# ------------------------------------------------------------ rows


def rows_of(study: Study, notebook: Notebook, foreseen: Sequence[Row], refused: dict[str, str]) -> list[Row]:
    """What was planned, then what was measured: the median over the rounds (of whole trainings the mean over the seeds), with all samples;
    and against the base: ratio, saved memory, farthest loss."""
    rows = list(foreseen)
    for c in study.configurations:
        samples = [s for s in notebook.samples[c.name] if not s.failed]
        r = c.recipe
        common = {"kind": "measured", "configuration": c.name, "at": c.at, "processes": c.processes, "runner": Path(c.runner).name}
        common |= {"recipe": r.name, "layout": r.layout.model_dump(exclude_defaults=True)} if r else {}
        common |= {"options": c.options} if c.options else {}
        common |= {"steps": study.steps, "warm_up": study.warm_up} if samples and samples[0].ranks else {"seeds": list(study.seeds)}
        common |= notebook.common
        if why := refused.get(c.name) or next((s.failed for s in notebook.samples[c.name] if s.failed), None):
            rows.append(Row("failed", why, "", None, common))
        if not samples:
            continue
        common |= samples[0].ranks[0].facts if samples[0].ranks else {}
        retaken, others = sum(t.retaken for s in samples for t in s.ranks[:1]), [t.others for s in samples for t in s.ranks[:1]]
        common |= {"retaken": retaken, "others": others} if samples[0].ranks else {}
        for name, (value, unit) in samples[0].planned.items():
            rows.append(Row(name, value, unit, None, {**common, "kind": "predicted"}))
        for name in samples[0].values:
            rows.append(summary(name, [s.values[name] for s in samples if name in s.values], common, bool(study.seeds)))
        rows += compared(study, c, samples, notebook, common)
    return rows


def summary(name: str, found: Sequence[tuple[float, str]], common: dict[str, Any], seeds: bool) -> Row:
    values = [value for value, _ in found]
    value = statistics.mean(values) if seeds else statistics.median(values)
    spread = {"samples": values, "low": min(values), "high": max(values)}
    spread |= {"std": statistics.stdev(values)} if seeds and len(values) > 1 else {}
    return Row(name, value, found[0][1], None, {**common, **spread})


def compared(study: Study, c: Configuration, samples: list[Sample], notebook: Notebook, common: dict[str, Any]) -> Iterator[Row]:
    """Against its base, round by round, so that a busy moment that hit both does not count."""
    base = study.base_of(c)
    there = {s.round: s for s in notebook.samples[base.name] if not s.failed}
    pairs = [(s, there[s.round]) for s in samples if s.round in there]
    if base is c or not pairs:
        return
    common = {**common, "against": base.name}
    speeds = (("samples_per_s", "ratio"), ("samples_per_s/undisturbed", "ratio/undisturbed"))
    for name, kind in (*speeds, ("memory/allocated", "ratio/memory"), ("memory/process", "ratio/process")):
        found = [(s.values[name][0] / b.values[name][0], "") for s, b in pairs if name in s.values and b.values.get(name, (0,))[0]]
        if found:
            yield summary(kind, found, common, False)
    s, b = pairs[0]
    for name, values in s.series.items():
        if values and len(values) == len(b.series.get(name, ())):
            farthest = max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(values, b.series[name]))
            yield Row(f"deviation/{name}", farthest, "of the farthest step", None, common)
