"""`gradus ladder RECIPE`: a recipe made faster, or smaller, step by step.

The ladder begins where nothing is optimised (attention written out, fp32, padding to the full length). Each rung's
options are measured beside the best so far, in rounds that alternate, and the best of them is kept if it pays; what
does not is shown. The study's harness measures three things: speed, of one epoch of the recipe's first samples, so
that the same samples are timed however they are padded and batched; memory, of the largest batch of all data; the loss
of a few steps from one start, without dropout, since every kernel draws it in its own way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import recipe as recipes
from gradus.errors import UserError, colour
from gradus.limits import processors
from gradus.proof import results
from gradus.proof.harness import run
from gradus.proof.ladder_search import MARGIN, TOLERANCE, Climbed, Trial, climb
from gradus.proof.memory_budget import budget_of, changed, largest_micro_batch, local_batch
from gradus.proof.optimizations import OPTIMIZATIONS, Keys, LadderContext, first_rung, value_of, with_keys, words
from gradus.proof.study import Configuration, Study, with_fixed_threads
from gradus.proof.study_store import claimed, farthest, keep
from gradus.proof.timing import BUSY
from gradus.recipe.axes import needed
from gradus.recipe.schema import Recipe
from gradus.rows import Row, as_lines, read_rows
from gradus.text import cell, duration, size, width
from gradus.text import table as columns
from gradus.train.session import open_for

PATIENCE = {"speed": 0.8, "memory": 0.6}  # slower than this in the first round: no other round
LOSSES = 3  # steps whose losses are compared
WARM_UP = 2  # steps
BEFORE, LAST = "before", "first-and-last"


# ------------------------------------------------------------ measuring


@dataclasses.dataclass
class LadderBench:
    """Measures for `climb`, in a folder where nothing is measured twice. samples: of an epoch that is timed; None:
    batches in tokens."""

    folder: Path
    goal: str
    steps: int
    rounds: int
    samples: int | None
    say: Callable[[str], None]
    rows: list[Row] = dataclasses.field(default_factory=list)

    def __call__(self, rung: str, best: Recipe, options: list[Keys], compare: bool) -> list[Trial]:
        recipes_by_name = {words(keys): with_keys(best, keys) for keys in options}
        before = self.memory(rung, BEFORE, best)
        trials = [self.memory(rung, words(keys), with_keys(best, keys), keys) for keys in options]
        possible = {words(trial.keys): recipes_by_name[words(trial.keys)] for trial in trials if not trial.failed}
        rows = self.timed(rung, {BEFORE: best, **possible})
        losses = self.losses(rung, BEFORE, best) if compare else []
        for name, trial in zip(recipes_by_name, trials):
            add_times(trial, {r.name: r for r in rows if r.conditions["configuration"] == name})
            trial.saved = 1 - trial.tensors / before.tensors if trial.tensors and before.tensors else 0.0
            if compare and not trial.failed and trial.ratio >= PATIENCE[self.goal]:
                trial.loss = deviation(self.losses(rung, name, recipes_by_name[name]), losses)
        return trials

    def run(self, rung: str, study: Study, folder: Path, **conditions: Any) -> list[Row]:
        rows = run(study, folder, lambda line: self.say(f"{rung}: {line}"))
        conditions["rung"] = rung
        self.rows += [dataclasses.replace(row, conditions={**row.conditions, **conditions}) for row in rows]
        return rows

    def timed(self, rung: str, recipes_by_name: dict[str, Recipe]) -> list[Row]:
        """Rows of speed, in rounds that alternate; the first recipe is the base of the others."""
        limit = {"data": {"limit": self.samples}} if self.samples else {}
        study = Study(
            "ladder",
            [Configuration(name, changed(recipe, **limit)) for name, recipe in recipes_by_name.items()],
            self.steps, WARM_UP, self.rounds,
            plan=False, repeats_if_busy=0, restart_data=True, patience=PATIENCE[self.goal],
        )  # fmt: skip
        return self.run(rung, study, self.folder / rung)

    def once(self, rung: str, name: str, recipe: Recipe, steps: int, plan: bool = True) -> tuple[list[Row], Path]:
        """(rows, folder) of the first steps of all the data, and its largest batch; measured once for each recipe."""
        folder = self.folder / "once" / hashlib.sha256(recipes.dump(recipe).encode()).hexdigest()[:16]
        study = Study("once", [Configuration("first steps", recipe)], steps, 0, 1, plan=plan, repeats_if_busy=0)
        return self.run(rung, study, folder, configuration=name), folder

    def memory(self, rung: str, name: str, recipe: Recipe, keys: Keys | None = None) -> Trial:
        """A trial with the memory of the largest batch."""
        rows, _ = self.once(rung, name, recipe, 1 if without_dropout(recipe) is not recipe else LOSSES)
        in_order = sorted(rows, key=lambda r: r.step is None)  # a plan of the largest batch counts
        planned = {r.name: r.value for r in in_order if r.conditions["kind"] == "predicted"}
        measured = {r.name: r.value for r in rows if r.conditions["kind"] == "measured"}
        return Trial(
            rung, keys or {}, tensors=measured.get("memory/allocated"), planned=planned.get("memory/allocated"),
            process=measured.get("memory/process"), failed=measured.get("failed"),
        )  # fmt: skip

    def losses(self, rung: str, name: str, recipe: Recipe) -> list[float]:
        plain = without_dropout(recipe)
        _, folder = self.once(rung, f"{name}, without dropout", plain, LOSSES, plan=plain is recipe)
        samples = read_rows(folder / "samples.jsonl")
        return next((row["ranks"][0]["losses"] for row in samples if "ranks" in row), [])


def deviation(losses: list[float], before: list[float]) -> float:
    """The largest relative difference of a step's loss; NaN where one could not be measured."""
    return farthest(losses, before) if losses and len(losses) == len(before) else math.nan


def without_dropout(recipe: Recipe) -> Recipe:
    return changed(recipe, model={"dropout": 0.0}) if getattr(recipe.model, "dropout", 0) else recipe


def add_times(trial: Trial, rows: dict[str, Row]) -> None:
    """Speed of a configuration of a study, with its ratio to the best before. rows: name → row; none where its memory
    could not be measured."""
    values = {name: row.value for name, row in rows.items()}
    trial.speed = values.get("samples_per_s/undisturbed", values.get("samples_per_s"))
    trial.first_call = values.get("time/first_call")
    trial.data_wait, trial.failed = values.get("data_wait"), trial.failed or values.get("failed")
    if wall_clock := rows.get("ratio"):
        ratio = rows.get("ratio/undisturbed", wall_clock)
        trial.ratio, trial.low, trial.high = ratio.value, ratio.conditions["low"], ratio.conditions["high"]
        trial.wall_clock = wall_clock.conditions["samples"]
        trial.busy = any((share or 0) > BUSY for share in wall_clock.conditions.get("others", ()))
    elif not trial.failed:
        trial.failed = "what it is compared with could not be measured"


# ------------------------------------------------------------ the verb


def ladder(recipe: Recipe, args: Any) -> Iterator[str]:
    """The verb. Yields what is printed."""
    if (n := needed(recipe.layout)) > 1:
        why = f"gradus ladder measures one process, and this layout needs {n}"
        raise UserError(f"{why}. Leave its axes out; gradus scale compares them.")
    session = open_for(recipe, 1)
    original = session.recipe  # with what only the data knows, which data of another length might not tell
    share = local_batch(original, 1, session.task)
    context = LadderContext(args.goal, session.device, original, budget_of(session), share)
    steps = args.steps
    if original.batch.samples:
        steps = min(steps, max(1, len(session.task.splits["train"]) // share))
    first = first_rung(original)
    if not args.json:
        yield f"the first rung: {words(first)}"
    lowest = with_fixed_threads(with_keys(original, first), 1)
    micro_batch = largest_micro_batch(lowest, context.budget)
    if micro_batch is None:
        raise UserError("the first rung does not fit, not even with one sample. Use a smaller model.")
    if micro_batch < share:  # where the whole share does not fit
        first["layout.micro_batch"] = micro_batch
        lowest = changed(lowest, layout={"micro_batch": micro_batch})
    bench = LadderBench(
        folder=Path(args.to or Path("ladder") / f"{original.name}-{args.goal}"), goal=args.goal, steps=steps,
        rounds=args.rounds, samples=steps * share if original.batch.samples else None,
        say=results.quiet if args.json else results.say,
    )  # fmt: skip
    settings = json.dumps([recipes.dump(original), args.goal, steps, args.rounds])
    with claimed(bench.folder, "ladder", {"digest": hashlib.sha256(settings.encode()).hexdigest()}, {}):
        start = bench.memory("00-first", BEFORE, lowest)
        climbed = climb(OPTIMIZATIONS, lowest, context, bench)
        whole = None
        if climbed.keys:
            (whole,) = bench(LAST, lowest, [climbed.keys], climbed.keys.get("data.pad") != "bucket")
            judge_whole(whole, args.goal)
        ends = list(train_to_end(bench, lowest, climbed.best)) if args.to_the_end else []
        start.verdict = "the first rung"
        bench.rows += [row for t in (start, *climbed.trials, *([whole] if whole else [])) for row in verdict_rows(t)]
        keep(bench.folder / "rows.jsonl", as_lines(bench.rows))
    if args.json:
        yield from (row.json() for row in bench.rows)
        return
    yield from ("", *table(start, climbed.trials), "")
    keys = {**first, **climbed.keys}
    winning = {k: v for k, v in keys.items() if k in climbed.keys or value_of(original, k) != v}
    command = ["gradus", "train", args.recipe, *args.overrides]
    command += ["--json_file", args.json_file] if args.json_file else []
    yield from summary(whole, start, climbed, winning, command)
    yield from ends
    yield conditions(bench)
    if args.rounds == 1:
        yield "note: one round has no spread, so [lowest, highest] says nothing of noise. Use --rounds 3"
    yield f"rows: {bench.folder / 'rows.jsonl'}"


def judge_whole(whole: Trial, goal: str) -> None:
    """Whether the last rung is better than the first, measured beside it: else its keys are not recommended."""
    if whole.failed:
        whole.verdict = f"not possible: {whole.failed}"
        return
    kept, word = whole.saved >= MARGIN, "smaller"
    if goal == "speed":
        kept, word = min(whole.ratio, whole.by_wall_clock) > 1, "faster"
    busy = whole.busy or os.getloadavg()[0] > processors() + 1  # steps may be too short to tell
    again = "; measured on a busy machine, run it again" * busy
    nothing = f"nothing is {word} here: the first rung is not beaten by {words(whole.keys)}, beside it{again}"
    whole.kept, whole.verdict = kept, words(whole.keys) if kept else nothing


def train_to_end(bench: LadderBench, lowest: Recipe, best: Recipe) -> Iterator[str]:
    """Whole trainings of the first and the last rung."""
    ends = {"first": lowest, "last": best}
    configurations = [Configuration(name, recipe, runner="train") for name, recipe in ends.items()]
    study = Study("to-the-end", configurations, rounds=1, plan=False)
    records = [row.known() for row in bench.run("to-the-end", study, bench.folder / "to-the-end")]
    metrics = dict.fromkeys(r["name"] for r in records if r["name"].startswith(("valid/", "test/")))
    wanted = ["samples_per_s", "ratio", "time/run", "memory/allocated", "ratio/memory", *metrics]
    yield from ("", "to the end:", *results.lines(records, wanted))


def verdict_rows(trial: Trial) -> Iterator[Row]:
    """The verdict, with all that a table has of the trial."""
    about = {"rung": trial.rung, "keys": trial.keys, "kept": trial.kept, "kind": "measured"}
    about["configuration"] = words(trial.keys)
    figures = {k: v for k, v in dataclasses.asdict(trial).items() if v == v}  # JSON has no NaN
    yield Row("verdict", trial.verdict, "", None, {**about, "trial": figures})
    if trial.loss is not None:
        how = {"steps": LOSSES, "dropout": 0}
        yield Row("deviation/loss", trial.loss, "of the farthest step", None, {**about, **how})


# ------------------------------------------------------------ what is printed


HEAD = [
    "tried", "kept", "samples/s", "× [lowest, highest]", "wall clock", "tensors", "planned", "saved", "process",
    "first call", "loss off",
]  # fmt: skip


def table(start: Trial, trials: Sequence[Trial]) -> Iterator[str]:
    """A line for each option that was tried, × and saved against the best before it; then what each comes to."""
    coloured = {"yes": colour("yes", "green"), "no": colour("no", "red"), "": ""}
    body = [[name, coloured[kept], *rest] for name, kept, *rest in body_of(start, trials)]
    yield from columns(HEAD, body, set(range(2, len(HEAD))), width())
    rung = None
    for trial in trials:
        yield from ["", trial.rung] if trial.rung != rung else []
        rung = trial.rung
        decision = f"{words(trial.keys)}: {'kept' if trial.kept else 'not kept'}, " if trial.keys else ""
        yield f"  {decision}{trial.verdict}"


def body_of(start: Trial, trials: Sequence[Trial]) -> list[list[str]]:
    """Cells of HEAD, for the screen and for reports: the first rung, then each option that was tried."""
    first = ["", n_bytes(start.tensors), n_bytes(start.planned), "", n_bytes(start.process), "", ""]
    return [["the first rung", "", "", "", *first], *(trial_cells(trial) for trial in trials if trial.keys)]


def trial_cells(trial: Trial) -> list[str]:
    timed = trial.speed is not None and not trial.failed
    return [
        words(trial.keys),
        "yes" if trial.kept else "no",
        cell(trial.speed) if timed else "-",
        f"{trial.ratio:.2f} [{trial.low:.2f}, {trial.high:.2f}]" if timed else "-",
        f"{trial.by_wall_clock:.2f}" if timed else "-",
        n_bytes(trial.tensors),
        n_bytes(trial.planned),
        f"{trial.saved:+.1%}" if trial.tensors else "-",
        n_bytes(trial.process),
        duration(trial.first_call) if trial.first_call else "-",
        "-" if trial.loss is None or math.isnan(trial.loss) else f"{trial.loss:.1e}" if trial.loss else "0",
    ]


def n_bytes(value: float | None) -> str:
    return "-" if value is None else size(value)


def summary(whole: Trial | None, start: Trial, climbed: Climbed, winning: Keys, command: list[str]) -> Iterator[str]:
    """The keys, what they give against the first rung, and why. whole: the last rung measured beside the first."""
    if whole is None:
        yield "nothing helps here: the first rung is the best"
        return
    if whole.failed:
        yield f"first against last: {whole.failed}"
        return
    if whole.kept:
        yield f"keys: {words(winning)}"
        yield from results.pasted([*command, *words(winning).split()])
    else:
        yield whole.verdict
    yield against_first(whole, start)
    if not whole.kept:
        return
    kept = (trial for trial in climbed.trials if trial.kept)
    why = ", ".join(f"{words(t.keys)} ({t.ratio:.2f}×, tensors {difference(t)})" for t in kept)
    yield f"why: {why} helped when measured beside the rung before"


def against_first(whole: Trial, start: Trial) -> str:
    """What all kept options come to, for the screen and for reports."""
    speed = f"{whole.ratio:.2f}× [{whole.low:.2f}, {whole.high:.2f}] the samples/s"
    if abs(whole.by_wall_clock / whole.ratio - 1) > MARGIN:
        speed += f" ({whole.by_wall_clock:.2f}× by the wall clock: other programs used the processors)"
    tensors = f"{n_bytes(start.tensors)} → {n_bytes(whole.tensors)} ({difference(whole)})"
    off = "" if whole.loss is None else f"; a loss off by {whole.loss:.1e}"
    return f"first against last, side by side: {speed}; tensors {tensors}{off}"


def difference(trial: Trial) -> str:
    """The change of the tensors, as a text."""
    return f"{-trial.saved:+.1%}" if abs(trial.saved) >= 0.0005 else "equal"


def conditions(bench: LadderBench) -> str:
    records = [row.known() for row in bench.rows if row.conditions.get("rung") not in ("to-the-end", None)]
    machine = results.conditions_line([r for r in records if r.get("steps") == bench.steps])
    samples = f"the same {bench.samples:,} samples" if bench.samples else f"{bench.steps} batches in tokens"
    tolerances = ", ".join(f"{name} {share:.1%}" for name, share in TOLERANCE.items())
    return (
        f"{machine}; each round times {samples}; memory of the largest batch of all data; losses of {LOSSES} steps "
        f"without dropout, within {tolerances}"
    )
