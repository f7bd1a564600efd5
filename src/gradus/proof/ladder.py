"""`gradus ladder RECIPE`: a recipe made faster, or smaller, step by step.

The ladder begins where nothing is optimised (attention written out, fp32, padding to the full length). Each rung's options are
measured beside the best so far, in rounds that alternate, and the best of them is kept if it pays; what does not is shown. Three things are
measured, all by the study's harness: speed, of one epoch of the recipe's first samples, so that the same samples are timed however they are
padded and batched; memory, of the largest batch of all data; the loss of a few steps from one start, without dropout, since every kernel
draws it in its own way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import recipe as recipes
from gradus.errors import UserError, colour
from gradus.hardware.tables import table as columns
from gradus.plan.show import duration, size
from gradus.proof import results
from gradus.proof.climb import TOLERANCE, Found, climb
from gradus.proof.room import changed, largest_micro_batch, room_of, share_of
from gradus.proof.rungs import RUNGS, Keys, Place, first, value_of, with_keys, words
from gradus.proof.study import Configuration, Study, claimed, keep, run, steady
from gradus.recipe.axes import needed
from gradus.recipe.schema import Recipe
from gradus.rows import Row, read_rows
from gradus.train.session import open_for

PATIENCE = {"speed": 0.8, "memory": 0.6}  # slower than this in the first round: no other round
LOSSES = 3  # steps whose losses are compared
WARM_UP = 2  # steps
BEFORE = "before"


# ------------------------------------------------------------ measuring


@dataclasses.dataclass
class Bench:
    """Measures for `climb`, in a folder where nothing is measured twice. samples: of an epoch that is timed; None: batches in tokens."""

    folder: Path
    goal: str
    steps: int
    rounds: int
    samples: int | None
    say: Callable[[str], None]
    rows: list[Row] = dataclasses.field(default_factory=list)

    def __call__(self, rung: str, best: Recipe, options: list[Keys], compare: bool) -> list[Found]:
        named = {words(keys): with_keys(best, keys) for keys in options}
        before, memory = self.once(rung, BEFORE, best), {name: self.once(rung, name, recipe) for name, recipe in named.items()}
        rows = self.timed(rung, {BEFORE: best, **{name: recipe for name, recipe in named.items() if not memory[name]["failed"]}})
        losses = self.losses(rung, BEFORE, best) if compare else []
        found = []
        for (name, recipe), keys in zip(named.items(), options):
            f = of_rows(rung, keys, rows, name)
            f.tensors, f.planned, f.process = (memory[name].get(k) for k in ("tensors", "planned", "process"))
            f.failed = memory[name]["failed"] or f.failed
            f.saved = 1 - f.tensors / before["tensors"] if f.tensors and before["tensors"] else 0.0
            if compare and not f.failed and f.ratio >= PATIENCE[self.goal]:
                f.loss = deviation(self.losses(rung, name, recipe), losses)
            found.append(f)
        return found

    def study(self, rung: str, study: Study, folder: Path, **more: Any) -> list[Row]:
        rows = run(study, folder, lambda line: self.say(f"{rung}: {line}"))
        self.rows += [dataclasses.replace(row, conditions={**row.conditions, "rung": rung, **more}) for row in rows]
        return rows

    def timed(self, rung: str, named: dict[str, Recipe]) -> list[Row]:
        """In rounds that alternate; the first is what the others are against."""
        limit = {"data": {"limit": self.samples}} if self.samples else {}
        configurations = [Configuration(name, changed(r, **limit)) for name, r in named.items()]
        how = {"plan": False, "retakes": 0, "anew": True, "patience": PATIENCE[self.goal]}
        return self.study(rung, Study("ladder", configurations, self.steps, WARM_UP, self.rounds, **how), self.folder / rung)

    def one(self, rung: str, name: str, recipe: Recipe, steps: int, plan: bool = True) -> tuple[list[Row], Path]:
        """The first steps of all the data, and its largest batch; taken once for each recipe."""
        folder = self.folder / "once" / hashlib.sha256(recipes.dump(recipe).encode()).hexdigest()[:16]
        study = Study("once", [Configuration("first steps", recipe)], steps, 0, 1, plan=plan, retakes=0)
        return self.study(rung, study, folder, configuration=name), folder

    def once(self, rung: str, name: str, recipe: Recipe) -> dict[str, Any]:
        """Bytes at the peak of the largest batch, planned and measured; or why there are none."""
        rows, _ = self.one(rung, name, recipe, 1 if still(recipe) is not recipe else LOSSES)
        said = {r.name: r.value for r in sorted(rows, key=lambda r: r.step is None) if r.conditions["kind"] == "predicted"}
        seen = {r.name: r.value for r in rows if r.conditions["kind"] == "measured"}
        names = {"tensors": "memory/allocated", "process": "memory/process", "failed": "failed"}
        return {k: seen.get(v) for k, v in names.items()} | {"planned": said.get("memory/allocated")}

    def losses(self, rung: str, name: str, recipe: Recipe) -> list[float]:
        _, folder = self.one(rung, f"{name}, without dropout", still(recipe), LOSSES, plan=still(recipe) is recipe)
        return next((row["ranks"][0]["losses"] for row in read_rows(folder / "samples.jsonl") if "ranks" in row), [])


def deviation(own: list[float], losses: list[float]) -> float:
    """Of the farthest step, as a share; NaN where one could not be measured."""
    if len(own) != len(losses) or not own:
        return math.nan
    return max(abs(x - y) / max(abs(y), 1e-30) for x, y in zip(own, losses))


def still(recipe: Recipe) -> Recipe:
    """Without dropout."""
    return changed(recipe, model={"dropout": 0.0}) if getattr(recipe.model, "dropout", 0) else recipe


def of_rows(rung: str, keys: Keys, rows: Sequence[Row], name: str) -> Found:
    """Of one configuration of a study."""
    own = {r.name: r for r in rows if r.conditions["configuration"] == name}
    value = {k: r.value for k, r in own.items()}
    better = "/undisturbed" if "ratio/undisturbed" in own else ""  # by other programs
    found = Found(rung, keys, value.get(f"samples_per_s{better}"), first_call=value.get("time/first_call"), failed=value.get("failed"))
    found.data_wait = value.get("data_wait")
    if "ratio" in own:
        ratio = own[f"ratio{better}"]
        found.ratio, found.low, found.high = ratio.value, ratio.conditions["low"], ratio.conditions["high"]
    elif not found.failed:
        found.failed = "what it is compared with could not be measured"
    return found


# ------------------------------------------------------------ the verb


def ladder(given: Recipe, args: Any) -> Iterator[str]:
    """The verb. Yields what is printed."""
    if (n := needed(given.layout)) > 1:
        raise UserError(f"gradus ladder measures one process, and this layout needs {n}. Leave its axes out; gradus scale compares them.")
    session = open_for(given, 1)
    given = session.recipe  # with what only the data knows, which data of another length might not tell
    room = room_of(session)
    share = share_of(given, 1, session.task)
    place = Place(args.goal, session.device, given, room, share)
    steps = min(args.steps, max(1, len(session.task.splits["train"]) // share)) if given.batch.samples else args.steps
    folder = Path(args.to or Path("ladder") / f"{given.name}-{args.goal}")
    asked = json.dumps([recipes.dump(given), args.goal, steps, args.rounds])
    keys = first(given)
    lowest = steady(with_keys(given, keys), 1)
    if not args.json:
        yield f"the first rung: {words(keys)}"
    micro = largest_micro_batch(lowest, room)
    if micro is None:
        raise UserError("the first rung does not fit, not even with one sample. Use a smaller model.")
    if micro < share:
        keys["layout.micro_batch"], lowest = micro, changed(lowest, layout={"micro_batch": micro})
    say = results.quiet if args.json else results.say
    bench = Bench(folder, args.goal, steps, args.rounds, steps * share if given.batch.samples else None, say)
    with claimed(folder, "ladder", {"digest": hashlib.sha256(asked.encode()).hexdigest()}, {}):
        start = bench.once("00-first", BEFORE, lowest)
        best, kept, found = climb(RUNGS, lowest, place, bench)
        whole = bench("first-and-last", lowest, [kept], kept.get("data.pad") != "bucket")[0] if kept else None
        ends = list(to_the_end(bench, lowest, best)) if args.to_the_end else []
        bench.rows += [row for f in found for row in verdicts(f)]
        keep(folder / "rows.jsonl", "".join(row.json() + "\n" for row in bench.rows))
    if args.json:
        yield from (row.json() for row in bench.rows)
        return
    yield from ("", *table(start, found), "")
    winning = {k: v for k, v in {**keys, **kept}.items() if k in kept or value_of(given, k) != v}
    typed = ["gradus", "train", args.recipe, *args.overrides, *(["--json_file", args.json_file] if args.json_file else [])]
    yield from summary(whole, start, winning, found, typed)
    yield from ends
    yield conditions(bench, given)
    yield f"rows: {folder / 'rows.jsonl'}"


def to_the_end(bench: Bench, lowest: Recipe, best: Recipe) -> Iterator[str]:
    """Whole trainings of the first and the last rung."""
    configurations = [Configuration(name, r, runner="train") for name, r in (("first", lowest), ("last", best))]
    rows = bench.study("to-the-end", Study("to-the-end", configurations, rounds=1, plan=False), bench.folder / "to-the-end")
    records = [row.known() for row in rows]
    metrics = dict.fromkeys(r["name"] for r in records if r["name"].startswith(("valid/", "test/")))
    wanted = ["samples_per_s", "ratio", "time/run", "memory/allocated", "ratio/memory", *metrics]
    yield from ("", "to the end:", *results.lines(records, wanted))


def verdicts(f: Found) -> Iterator[Row]:
    told = {"rung": f.rung, "keys": f.keys, "kept": f.kept, "kind": "measured", "configuration": words(f.keys)}
    yield Row("verdict", f.verdict, "", None, told)
    if f.loss is not None:
        yield Row("deviation/loss", f.loss, "of the farthest step", None, {**told, "steps": LOSSES, "dropout": 0})


# ------------------------------------------------------------ what is printed


HEAD = ["tried", "kept", "samples/s", "× [lowest, highest]", "tensors", "planned", "saved", "process", "first call", "loss off"]


def table(start: dict[str, Any], found: Sequence[Found]) -> Iterator[str]:
    """A line for each option that was tried, × and saved against the best before it; then what each comes to."""
    body = [["the first rung", "", "", "", *(memory(start[k]) for k in ("tensors", "planned")), "", memory(start["process"]), "", ""]]
    for f in (f for f in found if f.keys):
        there = f.speed is not None and not f.failed
        cells = [words(f.keys), mark(f), results.figure(f.speed) if there else "-"]
        cells += [f"{f.ratio:.2f} [{f.low:.2f}, {f.high:.2f}]" if there else "-"]
        cells += [memory(f.tensors), memory(f.planned), f"{f.saved:+.1%}" if f.tensors else "-", memory(f.process)]
        cells += [duration(f.first_call) if f.first_call else "-", "-" if f.loss is None else f"{f.loss:.1e}" if f.loss else "0"]
        body.append(cells)
    yield from columns(HEAD, body, set(range(2, len(HEAD))), results.width())
    rung = None
    for f in found:
        yield from ["", f.rung] if f.rung != rung else []
        rung = f.rung
        yield f"  {words(f.keys)}: {'kept' if f.kept else 'not kept'}, {f.verdict}" if f.keys else f"  {f.verdict}"


def mark(f: Found) -> str:
    return colour("yes", "green") if f.kept else colour("no", "red")


def memory(value: float | None) -> str:
    return "-" if value is None else size(value)


def summary(whole: Found | None, start: dict[str, Any], winning: Keys, found: Sequence[Found], command: list[str]) -> Iterator[str]:
    """The keys, what they give against the first rung, and why."""
    if whole is None:
        yield "nothing helps here: the first rung is the best"
        return
    yield f"keys: {words(winning)}"
    yield from results.pasted([*command, *words(winning).split()])
    if whole.failed:
        yield f"first against last: {whole.failed}"
        return
    tensors = f"{memory(start['tensors'])} → {memory(whole.tensors)} ({less(whole)})"
    off = "" if whole.loss is None else f"; a loss off by {whole.loss:.1e}"
    yield f"first against last, side by side: {whole.ratio:.2f}× [{whole.low:.2f}, {whole.high:.2f}] the samples/s; tensors {tensors}{off}"
    why = ", ".join(f"{words(f.keys)} ({f.ratio:.2f}×, tensors {less(f)})" for f in found if f.kept)
    yield f"why: {why} helped when measured beside the rung before"


def less(f: Found) -> str:
    return f"{-f.saved:+.1%}" if abs(f.saved) >= 0.0005 else "equal"


def conditions(bench: Bench, given: Recipe) -> str:
    records = [row.known() for row in bench.rows if row.conditions.get("rung") not in ("to-the-end", None)]
    same = f"the same {bench.samples:,} samples" if bench.samples else f"{bench.steps} batches in tokens"
    told = f"{results.conditions_line([r for r in records if r.get('steps') == bench.steps])}; each round times {same}"
    within = ", ".join(f"{name} {share:.1%}" for name, share in TOLERANCE.items())
    return f"{told}; memory of the largest batch of all data; losses of {LOSSES} steps without dropout, within {within}"
