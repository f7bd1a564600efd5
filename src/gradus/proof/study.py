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
import itertools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradus import files, limits
from gradus import recipe as recipes
from gradus.errors import UserError, writing
from gradus.hardware import Cluster
from gradus.measure.machine import conditions
from gradus.parallel import check, status
from gradus.parallel.mesh import single_process
from gradus.parallel.processes import ended_by_sigterm, run_group
from gradus.parallel.world import World
from gradus.plan.engine import plan_memory, traced_work
from gradus.plan.show import duration, size
from gradus.plan.step import step_time
from gradus.proof import runs, timing
from gradus.proof.predict import Planner, case_of
from gradus.proof.prove import why_not
from gradus.proof.timing import Timed, Window, load_steps, peak_of_one_more, time_it, train_steps, whole_rounds
from gradus.recipe.schema import Recipe
from gradus.rows import Row, RowFile, read_rows
from gradus.train import machine
from gradus.train.log import LOCK, locked
from gradus.train.precision import pick_device
from gradus.train.session import open_for, open_session

RUNNERS = {"steps": train_steps, "loader": load_steps}  # and train; and FILE.py:FUNCTION
RATIOS = {  # row → against its base
    "samples_per_s": "ratio", "samples_per_s/undisturbed": "ratio/undisturbed", "memory/allocated": "ratio/memory",
    "memory/process": "ratio/process",
}  # fmt: skip
VERBS = ("study", "scale", "ladder", "bench")  # that measure by this harness: what a report shows as the command
SAMPLES, PLAN = "samples.jsonl", "plan.jsonl"
AGAIN = "free some space and start it again: what was measured is kept."
Values = dict[str, tuple[float, str]]  # name → value, unit
Say = Callable[[str], None]
More = Callable[["Study", "Notebook"], Iterable["Row"]]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """The devices that a source measured on, as they are written, and the recipe as it ran there."""

    name: str
    cluster: Cluster
    recipe: Recipe

    def values(self) -> Values:
        """What the plan says of it; of an epoch where data.limit says how many samples that is."""
        n, device = self.cluster.n, self.cluster.device
        check.validate(self.recipe, n)
        target = "cpu" if device.kind == "cpu" else "cuda"
        memory = plan_memory(self.recipe, n, target=target)
        time = step_time(traced_work(self.recipe, n, target=target), self.cluster)
        found: Values = {"time/step": (time.total, "s"), "memory/allocated": (memory.allocated, "bytes"), "memory/device": (memory.device_total, "bytes")}
        if self.recipe.batch.samples:
            rate, limit = self.recipe.batch.samples / time.total, self.recipe.data.limit
            found |= {"samples_per_s": (rate, "samples/s")} | ({"time/epoch": (limit / rate / 3600, "h")} if limit else {})
        return found


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is measured once a round. at: its place on each axis. runner: steps (of training), loader, train (to the end, as a user starts
    it), none (it is planned only), or FILE.py:FUNCTION, where FUNCTION(recipe, options) returns a timing.Subject. rounds: of it (None: the
    study's). force: measured although the plan says that it does not fit. source, foreign: what a source says, and where it measured.
    against: as Study has it, of this one."""

    name: str
    recipe: Recipe | None
    at: dict[str, str] = dataclasses.field(default_factory=dict)
    runner: str = "steps"
    processes: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounds: int | None = None
    force: bool = False
    source: dict[str, float] = dataclasses.field(default_factory=dict)
    foreign: Foreign | None = None
    against: str | None = None

    def describe(self) -> dict[str, Any]:
        """What makes it another one."""
        recipe = recipes.dump(self.recipe) if self.recipe else None
        return {"runner": Path(self.runner).name, "processes": self.processes, "options": self.options, "recipe": recipe}


@dataclasses.dataclass(frozen=True)
class Study:
    """steps, warm_up: of a round. seeds: of whole trainings, which take a round each. against: a name on one of the axes; its configuration
    is what ratios are against (None: the first configuration). collectives: profile them by name in the last round. retakes, anew: of a
    timing.Window. patience: a configuration that after a round has less than this share of its base's samples/s gets no other round. strict:
    what one configuration fails of ends the study. seconds: of timing.Window."""

    name: str
    configurations: Sequence[Configuration]
    steps: int = 10
    warm_up: int = 3
    rounds: int = 3
    seeds: Sequence[int] = ()
    against: str | None = None
    plan: bool = True
    collectives: bool = False
    retakes: int = timing.RETAKES
    anew: bool = False
    patience: float = 0.0
    strict: bool = False
    seconds: float = 0.0

    def base_of(self, c: Configuration) -> Configuration:
        """The configuration that `c` is compared with. Raises UserError where there is none."""
        against = c.against or self.against
        if against is None:
            return self.configurations[0]
        axis = next((axis for axis, name in self._places() if name == against), None)
        found = next((o for o in self.configurations if o.at == {**c.at, axis: against}), None)
        if found is None:
            raise UserError(f"{c.name}: against={against}: no configuration is that and otherwise the same. Give it another against.")
        return found

    def _places(self) -> Iterator[tuple[str, str]]:
        return ((axis, name) for c in self.configurations for axis, name in c.at.items())

    def digest(self) -> str:
        told = [{c.name: c.describe()} for c in self.configurations]
        what = [told, self.steps, self.warm_up, self.rounds, list(self.seeds), *([self.seconds] if self.seconds else [])]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclasses.dataclass
class Sample:
    """One configuration in one round. ranks: of steps; else, of a whole training, values, what its own plan said, and series by
    step."""

    round: int
    ranks: list[Timed] = dataclasses.field(default_factory=list)
    values: Values = dataclasses.field(default_factory=dict)
    planned: Values = dataclasses.field(default_factory=dict)
    series: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    took: float = 0.0  # s in all
    failed: str | None = None

    def __post_init__(self) -> None:
        if self.ranks:
            self.values, self.planned, self.series = figures(self.ranks), self.ranks[0].planned, {"loss": self.ranks[0].losses}

    @property
    def rate(self) -> float:
        """Samples/s."""
        return self.values.get("samples_per_s", (0.0,))[0]

    @classmethod
    def of(cls, row: dict[str, Any]) -> Sample:
        """From what `record` gave. Raises TypeError, ValueError and their like for anything else."""
        made = cls(**{k: row[k] for k in ("round", "values", "planned", "series", "took") if k in row}, ranks=[Timed(**rank) for rank in row.get("ranks", ())])
        numbers = [made.round, made.took, *(value for of in (made.values, made.planned) for value, _ in of.values()), *itertools.chain(*made.series.values())]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError
        return made

    def record(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if v and not (self.ranks and k in ("values", "planned", "series"))}


def middle_of(samples: Sequence[Sample]) -> Sample:
    """The round of median speed (of an even number of rounds, the slower of the two in the middle): its figures belong together."""
    speeds = [s.rate for s in samples]
    return samples[speeds.index(statistics.median_low(speeds))]


def figures(ranks: list[Timed]) -> Values:
    """Of the steps that the processes of one configuration timed together."""
    first, elapsed = ranks[0], max(t.elapsed for t in ranks)
    step = elapsed / len(first.spent)
    found: Values = {"samples_per_s": (first.samples / elapsed, "samples/s"), "time/step": (step, "s")}
    if first.others is not None:  # where others were there, without the time that this was ready to run and they had the processor
        kept_off = sum(spent[2] for spent in first.spent) if first.others > timing.OTHERS else 0.0
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
    return found | {name: (value, unit) for name, (value, unit) in first.values.items()}


# ------------------------------------------------------------ what is measured


def steady(recipe: Recipe, processes: int) -> Recipe:
    """With a fixed number of threads: on a CPU those of this process, divided among the processes, where the recipe says nothing."""
    if recipe.layout.threads is not None or pick_device(recipe.layout.device).type != "cpu":
        return recipe
    threads = max(1, torch.get_num_threads() // processes)
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"threads": threads})})


def own_steps(file: str, function: str, recipe: Recipe | None, options: dict[str, Any], window: Window, here: World) -> Timed:
    """Steps of what FILE.py's FUNCTION(recipe, options) returns, a timing.Subject. Raises UserError for whatever it raises."""
    torch.set_num_threads((recipe and recipe.layout.threads) or options.get("threads") or 1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"runner={Path(file).name}:{function}: the file has no {function}.")
        subject = getattr(module, function)(recipe, options)
        timed = time_it(subject, window)
        timed.memory |= peak_of_one_more(subject)
        subject.finish(timed, window)
        return timed
    except UserError:
        raise
    except BaseException as e:  # whatever a peer, an exporter or a compiler raises; sys.exit too
        if status.speaks_of_peers(str(e)) or (recipe and isinstance(e, torch.OutOfMemoryError)):
            raise  # what `start` has words for
        traceback.print_exc()
        why = next(iter(str(e).strip().splitlines()), "")
        raise UserError(f"does not run here ({type(e).__name__}{': ' if why else ''}{why[:200]}). The study's workers.log has the traceback.") from None


def take(study: Study, c: Configuration, number: int, folder: Path) -> Sample:
    """One sample. Raises UserError where the configuration cannot be measured."""
    began, log = time.monotonic(), folder / "workers.log"
    if c.runner == "train":
        seed = study.seeds[number - 1] if study.seeds else None
        values, said, series = runs.train(c.recipe, c.processes, seed, folder / "runs" / f"{label(c.name)}-{number}")
        return Sample(number, values=values, planned=said, series=series, took=time.monotonic() - began)
    steps = whole_rounds(study.steps, c.recipe.layout)[0] if c.recipe else study.steps
    window = Window(steps, study.warm_up, os.getpid(), study.collectives and number == study.rounds, study.retakes, study.anew, study.seconds, number)
    if c.runner in RUNNERS:
        ranks = run_group(c.processes, RUNNERS[c.runner], c.recipe, window, log=log)
    else:
        file, _, function = c.runner.rpartition(":")
        ranks = run_group(c.processes, own_steps, file, function, c.recipe, c.options, window, log=log)
    return Sample(number, ranks, took=time.monotonic() - began)


def label(name: str) -> str:
    """A name as a file can have it."""
    return "".join(ch if ch.isalnum() or ch in "-_." else "-" for ch in name)


@contextlib.contextmanager
def claimed(folder: Path, kind: str, mine: dict[str, Any], more: dict[str, Any]) -> Iterator[None]:
    """The folder, made and locked inside the context, for what `mine` tells from others, kept in KIND.json with `more` and the command. One
    without samples or runs is free. Raises UserError where it holds something else, or another process writes there."""
    file, other = folder / f"{kind}.json", f"--to={folder}: holds another {kind}, or this one with other settings. Give another folder, or remove it."
    with locked(folder, kind, "give another --to"):
        if file.exists():
            kept = limits.read_json(file, limits.CONFIG_FILE)
            if not isinstance(kept, dict):
                raise UserError(f"{file}: not what gradus writes there. Remove the folder, or give another --to.")
            if not mine.items() <= kept.items():
                runs = any(folder.rglob("recipe.yaml"))  # whole trainings that were begun
                if runs or any("failed" not in row for path in folder.rglob(SAMPLES) for row in read_rows(path)):
                    raise UserError(other)
                for name in (SAMPLES, PLAN):
                    (folder / name).unlink(missing_ok=True)
        elif any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"--to={folder}: is not empty, and holds no {kind}. Give another folder.")
        command = {"command": text} if (text := status.typed(*VERBS)) else {}
        keep(file, json.dumps({**mine, **command, **more}, indent=1, default=str) + "\n")
        yield


def keep(path: Path, text: str) -> None:
    """Written aside and renamed. Raises EnvironmentFault where the disk fails."""
    with writing(path, AGAIN):
        files.write_text(path, text)


class Notebook:
    """The samples of a study's folder: read at the start, written as they come."""

    def __init__(self, study: Study, folder: Path):
        """Raises UserError for a line that is no sample of the study."""
        self.path, self.samples = folder / SAMPLES, {c.name: [] for c in study.configurations}
        kept = [row for row in read_rows(self.path) if "failed" not in row] if self.path.exists() else []
        for row in kept:
            try:
                self.samples[row["configuration"]].append(Sample.of(row))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                raise UserError(f"{self.path}: a line is not a sample of this study: {str(row)[:60]}. Remove it.") from None
        self.common = {**conditions(), "study": study.name}
        cpu = self.common["cpu"]
        if other := next((row["cpu"] for row in kept if row.get("cpu", cpu) != cpu), None):
            raise UserError(f"{folder}: holds samples of another machine ({other}); this is {cpu}. Go on there, or give another --to.")
        keep(self.path, "".join(json.dumps(row) + "\n" for row in kept))  # what a kill cut short is gone
        self.file = RowFile(self.path)

    def has(self, c: Configuration, number: int) -> bool:
        return any(s.round == number or s.failed for s in self.samples[c.name])

    def hopeless(self, study: Study, c: Configuration) -> bool:
        """Whether the first round was enough."""
        speed = lambda s: s.values.get("samples_per_s/undisturbed", (s.rate,))[0]  # noqa: E731
        first = [speed(s) for o in (c, study.base_of(c)) for s in self.samples[o.name][:1]]
        return len(first) == 2 and first[0] < study.patience * first[1]

    def add(self, c: Configuration, sample: Sample) -> None:
        self.samples[c.name].append(sample)
        about = {"configuration": c.name, **sample.record(), **self.common}
        with writing(self.path, AGAIN):
            self.file.write([Row("sample/samples_per_s", sample.rate, "samples/s", None, about)])


# ------------------------------------------------------------ what is planned


def planned(study: Study, folder: Path, say: Say, only: set[str] | None = None) -> tuple[list[Row], dict[str, str]]:
    """(rows of the plans of the configurations, why one of them will not fit: name → reason); kept in plan.jsonl."""
    rows: list[Row] = []
    path, before = folder / PLAN, 0
    if path.exists():
        rows = [Row(r.pop("name"), r.pop("value"), r.pop("unit", ""), r.pop("step", None), r) for r in read_rows(path)]
    if not all({"configuration", "kind"} <= row.conditions.keys() for row in rows):
        raise UserError(f"{path}: not what gradus writes there. Delete it: the plan is made again.")
    known = {row.conditions["configuration"] for row in rows}
    for c in study.configurations:
        if c.name in known or (only and c.name not in only):
            continue
        about = {"configuration": c.name, "at": c.at}
        rows += [Row(name, value, unit_of(name), None, {**about, "kind": "source"}) for name, value in c.source.items()]
        if c.foreign is not None:
            where = {**about, "kind": "planned", "on": c.foreign.name}
            rows += [Row(name, value, unit, None, where) for name, (value, unit) in c.foreign.values().items()]
        if not study.plan or c.recipe is None or c.runner != "steps":
            continue
        try:
            case = case_of(open_for(c.recipe, c.processes), local=c.processes)
            if case.room.target == "cpu":
                before = before or run_group(1, resident_bytes, c.recipe, log=folder / "workers.log")[0]
                case.room.resident = before
            with Planner() as planner:
                found = planner.plan(case)
        except Exception as e:
            say(f"note: no plan for {c.name} ({why_not(e)})")
            continue
        say(f"{c.name}, {found.line}")
        if found.refusal and not c.force:
            rows.append(Row("refused", found.refusal, "", None, {**about, "kind": "predicted"}))
        for row in found.rows:
            row.conditions |= {"configuration": c.name, "kind": "predicted"}
        rows += found.rows
    keep(path, "".join(row.json() + "\n" for row in rows))
    refused = {row.conditions["configuration"]: row.value for row in rows if row.name == "refused"}
    return [row for row in rows if row.name != "refused"], refused


def ratios(study: Study, rows: Sequence[Row]) -> Iterator[Row]:
    """Of what a source says, and of what is planned for its devices, against the base of each."""
    of = {(r.conditions["configuration"], r.name, r.conditions["kind"]): r for r in rows if r.conditions["kind"] in ("source", "planned")}
    for c in study.configurations:
        base = study.base_of(c)
        for kind, (name, ratio) in itertools.product(("source", "planned"), RATIOS.items()):
            mine, other = of.get((c.name, name, kind)), of.get((base.name, name, kind))
            if mine and other and base is not c and (c.name, ratio, kind) not in of:
                yield Row(ratio, mine.value / other.value, "", None, {**mine.conditions, "against": base.name})


def resident_bytes(recipe: Recipe, here: World) -> int:
    """Of a process that is about to build the recipe's model, with the libraries that a step loads."""
    open_session(recipe.model_copy(update={"layout": single_process(recipe.layout)}), None, here)
    layer = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(32, 32)).sum().backward()
    optimizer.step()
    return machine.resident()


def unit_of(name: str) -> str:
    """Of a figure that a source states."""
    first = name.partition("/")[0]
    return {"samples_per_s": "samples/s", "time/epoch": "h"}.get(name) or {"time": "s", "memory": "bytes", "traffic": "bytes"}.get(first, "")


# ------------------------------------------------------------ the study


def run(study: Study, folder: Path, say: Say = print, only: Sequence[str] = (), more: More = lambda *_: ()) -> list[Row]:
    """Take the samples that are missing, and return and write the rows of all that are there.

    only: names of configurations, or parts of them; each with what it is compared with. more: further rows, of all samples, each in
    place of one of that name. Writes study.json, plan.jsonl, samples.jsonl, rows.jsonl and workers.log into `folder`. Raises UserError for a
    mistake that is known before anything is started; what a configuration fails of later is told in its row.
    """
    wanted = {c.name for c in study.configurations if not only or any(word in c.name for word in only)}
    if not wanted:
        raise UserError(f"--only {' '.join(only)}: no configuration has that in its name; there are: {', '.join(c.name for c in study.configurations)}")
    wanted |= {study.base_of(c).name for c in study.configurations if c.name in wanted}
    for c in study.configurations:
        if c.recipe is not None and c.name in wanted:
            try:
                check.validate(c.recipe, c.processes)
            except UserError as e:
                raise UserError(f"{c.name}: {e}") from None
    mine = {"study": study.name, "digest": study.digest()}
    with claimed(folder, "study", mine, {"configurations": {c.name: c.describe() for c in study.configurations}}):
        rows = measured(study, folder, say, wanted, more)
        keep(folder / "rows.jsonl", "".join(row.json() + "\n" for row in rows))
    return rows


def measured(study: Study, folder: Path, say: Say, wanted: set[str], more: More) -> list[Row]:
    """The samples that are missing of the configurations in `wanted` are taken; the rows of all."""
    notebook = Notebook(study, folder)
    foreseen, refused = planned(study, folder, say, wanted)
    for name, why in refused.items():
        if study.strict:
            raise UserError(f"{name}: {why}")
        say(f"{name}: {why}")
    rounds = len(study.seeds) or study.rounds
    chosen = [c for c in study.configurations if c.name in wanted and c.name not in refused and c.runner != "none"]
    todo = [(k, c) for k in range(1, rounds + 1) for c in chosen if k <= (c.rounds or rounds)]
    with contextlib.closing(notebook.file), ended_by_sigterm():
        for at, (k, c) in enumerate(todo, 1):
            if notebook.has(c, k) or notebook.hopeless(study, c):
                continue
            try:
                sample = take(study, c, k, folder)
            except UserError as e:
                if study.strict:
                    raise UserError(f"{c.name}: {e}") from None
                sample = Sample(k, failed=str(e))
            notebook.add(c, sample)
            left = sum(mean_of(notebook, o) for j, o in todo[at:] if not notebook.has(o, j) and not notebook.hopeless(study, o))
            say(f"round {k} of {rounds}, {at} of {len(todo)}: {c.name}: {told(sample)}" + (f"; {duration(left)} left" if left else ""))
    own = list(more(study, notebook))
    replaced = {(row.conditions["configuration"], row.name, row.conditions["kind"]) for row in own}
    rows = rows_of(study, notebook, foreseen, refused)
    return [*(row for row in rows if (row.conditions["configuration"], row.name, row.conditions["kind"]) not in replaced), *own]


def exit_code(rows: Iterable[Row]) -> int:
    """1 where every configuration failed."""
    names = [row.name for row in rows if row.conditions["kind"] == "measured"]
    return int("failed" in names and set(names) == {"failed"})


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
    words += [f"{duration(values['time/step'])} per step"] if "time/step" in values else []
    words += [f"first call {duration(values['time/first_call'])}"] if values.get("time/first_call", 0) > 3 * values.get("time/step", 1e9) else []
    words += [f"tensors {size(values['memory/allocated'])}"] if "memory/allocated" in values else []
    disturbed = [t for t in sample.ranks if t.retaken]
    words += [f"measured again {disturbed[0].retaken} times: other programs used the processors"] if disturbed else []
    return ", ".join(words) or duration(sample.took)


# ------------------------------------------------------------ rows


def rows_of(study: Study, notebook: Notebook, foreseen: Sequence[Row], refused: dict[str, str]) -> list[Row]:
    """What was planned, then what was measured: the median over the rounds (of whole trainings the mean over the seeds), with all samples;
    and against the base: ratio, saved memory, farthest loss."""
    rows = [*foreseen, *ratios(study, foreseen)]
    for c in study.configurations:
        samples, common = [s for s in notebook.samples[c.name] if not s.failed], about(study, notebook, c)
        if why := refused.get(c.name) or next((s.failed for s in notebook.samples[c.name] if s.failed), None):
            rows.append(Row("failed", why, "", None, common))
        if not samples:
            continue
        for name, (value, unit) in samples[0].planned.items():
            rows.append(Row(name, value, unit, None, {**common, "kind": "predicted"}))
        for name in samples[0].values:
            values = [s.values[name] for s in samples if name in s.values]
            rows.append(summary(name, values, common, None if study.seeds else statistics.median(value for value, _ in values)))
        rows += compared(study, c, samples, notebook, common)
    order = [c.name for c in study.configurations]
    return sorted(rows, key=lambda row: order.index(row.conditions["configuration"]))


def about(study: Study, notebook: Notebook, c: Configuration) -> dict[str, Any]:
    """Under which conditions a configuration was measured."""
    samples, r = [s for s in notebook.samples[c.name] if not s.failed], c.recipe
    found = {"kind": "measured", "configuration": c.name, "at": c.at, "processes": c.processes, "runner": Path(c.runner).name}
    found |= {"recipe": r.name, "layout": r.layout.model_dump(exclude_defaults=True)} if r else {}
    found |= {"options": c.options} if c.options else {}
    first = [rank for s in samples for rank in s.ranks[:1]]
    if not first:
        return {**found, "seeds": list(study.seeds), **notebook.common}
    disturbed = {"retaken": sum(t.retaken for t in first), "others": [t.others for t in first]}
    return {**found, "steps": study.steps, "warm_up": study.warm_up, **notebook.common, **first[0].facts, **disturbed}


def summary(name: str, found: Sequence[tuple[float, str]], common: dict[str, Any], value: float | None) -> Row:
    """value: None for the mean over seeds."""
    values = [value for value, _ in found]
    spread = {"samples": values, "low": min(values), "high": max(values)}
    spread |= {"std": statistics.stdev(values)} if value is None and len(values) > 1 else {}
    return Row(name, statistics.mean(values) if value is None else value, found[0][1], None, {**common, **spread})


def compared(study: Study, c: Configuration, samples: list[Sample], notebook: Notebook, common: dict[str, Any]) -> Iterator[Row]:
    """Against its base, round by round, so that a busy moment that hit both does not count."""
    base = study.base_of(c)
    there = {s.round: s for s in notebook.samples[base.name] if not s.failed}
    pairs = [(s, there[s.round]) for s in samples if s.round in there]
    if base is c or not pairs:
        return
    common = {**common, "against": base.name}
    for name, kind in RATIOS.items():
        found = [(s.values[name][0] / b.values[name][0], "") for s, b in pairs if name in s.values and b.values.get(name, (0,))[0]]
        if found:
            yield summary(kind, found, common, statistics.median(ratio for ratio, _ in found))
    s, b = pairs[0]
    for name, values in s.series.items():
        if values and len(values) == len(b.series.get(name, ())):
            farthest = max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(values, b.series[name]))
            yield Row(f"deviation/{name}", farthest, "of the farthest step", None, common)
