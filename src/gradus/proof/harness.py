"""One harness for all that is measured side by side: configurations, each in processes of its own, in rounds that
alternate over them.

Every sample is a line of samples.jsonl the moment it is there, so a study that was stopped goes on where it stood.
What is printed and rendered are rows (rows.jsonl): the medians over the rounds with all samples beside, what was
planned of the same configuration, and under which conditions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel.mesh import single_process
from gradus.parallel.processes import run_group
from gradus.parallel.world import World
from gradus.proof import runs
from gradus.proof.engine_runner import engine_subject
from gradus.proof.predict import Planner, case_of
from gradus.proof.prove import why_not
from gradus.proof.runners import load_steps, own_steps, time_subject, train_steps, whole_rounds
from gradus.proof.study import Configuration, Study, unit_of
from gradus.proof.study_store import PLAN, Sample, StudyStore, claimed, keep
from gradus.proof.timing import Window, taken
from gradus.recipe.schema import Recipe
from gradus.rows import Row, as_lines, read_rows
from gradus.signals import ended_by_sigterm
from gradus.text import duration, size
from gradus.train import machine
from gradus.train.session import open_for, open_session

# a function that gives a Timed in each process, and its arguments before (recipe, options, window, world). Others:
# train, none, FILE.py:FUNCTION (see Configuration)
RUNNERS = {"steps": (train_steps,), "loader": (load_steps,), "engine": (time_subject, engine_subject)}
Say = Callable[[str], None]
MoreRows = Callable[[StudyStore], Iterable[Row]]


# ------------------------------------------------------------ one sample


def measure(study: Study, c: Configuration, number: int, folder: Path) -> Sample:
    """One sample, in the round of this number. Raises UserError where the configuration cannot be measured."""
    if c.runner == "train":
        seed = study.seeds[number - 1] if study.seeds else None
        return runs.train(c.recipe, c.processes, seed, folder / "runs" / f"{label(c.name)}-{number}", number)
    window = Window(
        steps=whole_rounds(study.steps, c.recipe.layout) if c.recipe else study.steps,
        warm_up=study.warm_up,
        root=os.getpid(),
        collectives=study.collectives and number == study.rounds,
        repeats_if_busy=study.repeats_if_busy,
        restart_data=study.restart_data,
        seconds=study.seconds,
        round=number,
    )
    file, _, function = c.runner.rpartition(":")
    runner = RUNNERS.get(c.runner, (own_steps, file, function))
    return Sample(number, run_group(c.processes, *runner, c.recipe, c.options, window, log=folder / "workers.log"))


def label(name: str) -> str:
    """A name as a file can have it."""
    return "".join(ch if ch.isalnum() or ch in "-_." else "-" for ch in name)


# ------------------------------------------------------------ what is planned


def planned(
    study: Study, folder: Path, say: Say, only: set[str] | None = None
) -> tuple[list[Row], dict[str, str]]:
    """(rows of the plans of the configurations, why one of them will not fit: name → reason); kept in plan.jsonl."""
    path, resident = folder / PLAN, None
    rows = read_plan(path) if path.exists() else []
    known = {row.conditions["configuration"] for row in rows}
    for c in study.configurations:
        if c.name in known or (only and c.name not in only):
            continue
        rows += source_rows(c)
        if not study.plan or c.recipe is None or c.runner != "steps":
            continue
        try:
            case = case_of(open_for(c.recipe, c.processes), local_processes=c.processes)
            if case.budget.target == "cpu":
                resident = resident or run_group(1, resident_bytes, c.recipe, log=folder / "workers.log")[0]
                case.budget.resident = resident
            with Planner() as planner:
                prediction = planner.plan(case)
        except Exception as e:
            say(f"note: no plan for {c.name} ({why_not(e)})")
            continue
        say(f"{c.name}, {prediction.line}")
        about = {"configuration": c.name, "kind": "predicted"}
        if prediction.refusal and not c.force:
            rows.append(Row("refused", prediction.refusal, "", None, {**about, "at": c.at}))
        rows += [dataclasses.replace(row, conditions=row.conditions | about) for row in prediction.rows]
    keep(path, as_lines(rows))
    refused = {row.conditions["configuration"]: row.value for row in rows if row.name == "refused"}
    return [row for row in rows if row.name != "refused"], refused


def read_plan(path: Path) -> list[Row]:
    """Raises UserError for a file that no study wrote."""
    rows = [Row(r.pop("name"), r.pop("value"), r.pop("unit", ""), r.pop("step", None), r) for r in read_rows(path)]
    if not all(isinstance(row.conditions.get(key), str) for row in rows for key in ("configuration", "kind")):
        raise UserError(f"{path}: not what gradus writes there. Delete it: the plan is made again.")
    return rows


def source_rows(c: Configuration) -> Iterator[Row]:
    """The figures of a configuration's source, and the plan for its devices."""
    about = {"configuration": c.name, "at": c.at}
    kinds = [(c.source, {**about, "kind": "source"})]
    if c.reference is not None:
        kinds.append((c.reference.figures(), {**about, "kind": "planned", "on": c.reference.name}))
    for figures, conditions in kinds:
        yield from (Row(name, value, unit_of(name), None, conditions) for name, value in figures.items())


def resident_bytes(recipe: Recipe, world: World) -> int:
    """Resident bytes of a process that is about to build the recipe's model."""
    open_session(recipe.model_copy(update={"layout": single_process(recipe.layout)}), None, world)
    return machine.resident()


# ------------------------------------------------------------ the study


def run(
    study: Study, folder: Path, say: Say = print, only: Sequence[str] = (), more: MoreRows = lambda *_: ()
) -> list[Row]:
    """Measure the samples that are missing, and return and write the rows of all that are there.

    only: names of configurations, or parts of them; each with what it is compared with. more: further rows, of all
    samples, each in place of one of that name. Writes study.json, plan.jsonl, samples.jsonl, rows.jsonl and
    workers.log into `folder`. Raises UserError for a mistake that is known before anything is started; a later failure
    of one configuration is told in its row.
    """
    chosen, identity = choose(study, only), {"study": study.name, "digest": study.digest()}
    for c in (c for c in chosen if c.recipe is not None):
        try:
            check.validate(c.recipe, c.processes)
        except UserError as e:
            raise UserError(f"{c.name}: {e}") from None
    with claimed(folder, "study", identity, {"configurations": {c.name: c.identity() for c in study.configurations}}):
        rows = measure_missing(study, folder, say, {c.name for c in chosen}, more)
        keep(folder / "rows.jsonl", as_lines(rows))
    return rows


def choose(study: Study, only: Sequence[str]) -> list[Configuration]:
    """The configurations with one of these words in their name, and their bases. Raises UserError for none."""
    names = {c.name for c in study.configurations if not only or any(word in c.name for word in only)}
    if not names:
        known = ", ".join(c.name for c in study.configurations)
        raise UserError(f"--only {' '.join(only)}: no configuration has that in its name; there are: {known}")
    names |= {study.base_of(c).name for c in study.configurations if c.name in names}
    return [c for c in study.configurations if c.name in names]


def measure_missing(study: Study, folder: Path, say: Say, names: set[str], more: MoreRows) -> list[Row]:
    """Measures the missing samples of the configurations of these names; the rows of all."""
    store = StudyStore(study, folder)
    plan, refused = planned(study, folder, say, names)
    for name, reason in refused.items():
        if study.strict:
            raise UserError(f"{name}: {reason}")
        say(f"{name}: {reason}")
    rounds = len(study.seeds) or study.rounds
    included = [c for c in study.configurations if c.name in names and c.name not in refused and c.runner != "none"]
    todo = [(k, c) for k in range(1, rounds + 1) for c in included if k <= (c.rounds or rounds)]

    def is_missing(k: int, c: Configuration) -> bool:
        return not store.has(c, k) and not store.too_slow(c)

    busy = None
    with contextlib.closing(store.file), ended_by_sigterm():
        for i, (k, c) in enumerate(todo, 1):
            if is_missing(k, c):
                sample = _sample(study, c, k, folder)
                store.add(c, sample)
                left = sum(store.expected_seconds(other) for j, other in todo[i:] if is_missing(j, other))
                line = f"round {k} of {rounds}, {i} of {len(todo)}: {c.name}: {described(sample)}"
                say(line + (f"; {duration(left)} left" if left else ""))
                if not busy and (busy := busy_line(c, sample)):  # said once
                    say(f"note: {busy}. Delete {folder} to measure again when they do not.")
    own_rows = list(more(store))
    replaced = {row_key(row) for row in own_rows}
    return [*(row for row in store.rows(plan, refused) if row_key(row) not in replaced), *own_rows]


def _sample(study: Study, c: Configuration, number: int, folder: Path) -> Sample:
    """One sample, failed where it cannot be measured and the study is not strict."""
    began = time.monotonic()
    try:
        sample = measure(study, c, number, folder)
        sample.elapsed = time.monotonic() - began
        return sample
    except UserError as e:
        if study.strict:
            raise UserError(f"{c.name}: {e}") from None
        return Sample(number, failed=str(e))


def busy_line(c: Configuration, sample: Sample) -> str | None:
    """A line where other programs had the processors that a sample on a CPU needed."""
    if not sample.ranks or sample.ranks[0].facts.get("device") != "cpu":
        return None
    first, key = sample.ranks[0], "layout.threads=" if c.recipe else "OMP_NUM_THREADS="
    return taken(first.others, first.facts.get("threads", 1), len(sample.ranks), key)


def row_key(row: Row) -> tuple[str, str, str]:
    return row.conditions["configuration"], row.name, row.conditions["kind"]


def exit_code(rows: Iterable[Row]) -> int:
    """1 where every configuration failed."""
    names = [row.name for row in rows if row.conditions["kind"] == "measured"]
    return int("failed" in names and set(names) == {"failed"})


def described(sample: Sample) -> str:
    """A sample in one line."""
    if sample.failed:
        return f"failed: {sample.failed}"
    values = {name: value for name, (value, _) in sample.values.items()}
    first_call, step, tensors = (values.get(k) for k in ("time/first_call", "time/step", "memory/allocated"))
    words = [f"{sample.speed:,.4g} samples/s"] if "samples_per_s" in values else []
    words += [f"{duration(step)} per step"] if step is not None else []
    words += [f"first call {duration(first_call)}"] if step and first_call and first_call > 3 * step else []
    words += [f"tensors {size(tensors)}"] if tensors is not None else []
    repeats = next((t.retaken for t in sample.ranks if t.retaken), 0)
    words += [f"measured again {repeats} times: other programs used the processors"] if repeats else []
    return ", ".join(words) or duration(sample.elapsed)
