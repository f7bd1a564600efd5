"""Which single device, at which precision and price: every device of the hardware file, each of its precisions,
ranked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gradus import hardware, models
from gradus.hardware import Cluster, Device
from gradus.hardware.tables import short_name
from gradus.parallel import mesh
from gradus.plan.budget import CASES, Failures, usual_goodput
from gradus.plan.figures import known_figure
from gradus.plan.keys import layout_keys
from gradus.plan.serving import serving
from gradus.plan.step import step_time
from gradus.plan.work import Target, Work
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.rows import Row
from gradus.text import SIGNS, duration, money, size, table

if TYPE_CHECKING:
    from gradus.tasks.base import Task

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PER_TOKENS = 1e9  # where there is no epoch


def on_one_device(recipe: Recipe, numbers: str) -> Recipe:
    """The recipe on one device, computed in `numbers`, weights too where the recipe has them in half; all that concerns
    several devices is left out."""
    pure = "pure_" * (numbers in ("bf16", "fp16") and recipe.layout.precision.startswith("pure_"))
    computed = {"precision": pure + numbers.replace("tf32", "fp32"), "tf32": numbers == "tf32"}
    return recipe.model_copy(update={"layout": mesh.single_process(recipe.layout).model_copy(update=computed)})


def in_tf32(work: Work) -> Work:
    """The same work with its fp32 matrix products in tf32, as plan/trace.py takes layout.tf32; attention's kernels stay
    in fp32."""

    def changed(op):
        return op._replace(dtype="tf32") if op.dtype == "fp32" and op.kind == "matmul" else op

    return dataclasses.replace(work, micro=[changed(op) for op in work.micro], step=[changed(op) for op in work.step])


def epoch_of(recipe: Recipe, task: Task | None, work: Work, whole: bool = False) -> tuple[float, str]:
    """(steps, what they make): an epoch where the data are at hand, else 1e9 tokens, else 1e6 samples. whole: all of
    the recipe."""
    if whole and recipe.train.steps:
        return recipe.train.steps, "run"
    if task is not None:
        return len(task.plan("train", recipe.batch.samples, recipe.batch.tokens).epoch(0)), "epoch"
    images = recipe.model.reads == "images"
    if work.tokens and not images:
        return PER_TOKENS / work.tokens, "1e9 tokens"
    return 1e6 / work.samples, "1e6 images" if images else "1e6 samples"


def rank_devices(
    recipe: Recipe, task: Task | None = None, *, names: list[str] | None = None, whole: bool = False
) -> list[dict[str, Any]]:
    """One dict for each device and precision it has: device, name (a short one), precision, memory, its upper
    end (high) and capacity (bytes), fits, layout (as words), seconds (per step), hours and cost (low, expected, high;
    None without a price) per `per`, all None where it does not fit, currency, missing (bytes, of the upper end), notes:
    whose parameters a device takes that has none of its own. The software is the same on all: Gradus's.

    What fits comes first: by money, then what has no price, by time; then what does not fit, by what is missing. The
    recipe's batch, micro-batch and checkpointing stay. What Gradus does not run on (TPUs) is left out. Raises UserError
    for an unknown name.
    """
    from gradus.plan import engine
    from gradus.plan.case import Case

    @functools.cache
    def traced(numbers: str, target: Target) -> tuple[int, int, Work]:
        plan = engine.plan(Case.of(on_one_device(recipe, numbers), 1, target, task))
        memory = plan.memory
        return memory.device_total, engine.interval(memory, plan.case.layout, target)[1], plan.work

    ranked = []
    for device in [hardware.find(name) for name in names] if names else hardware.devices().values():
        for numbers in PRECISIONS:
            if not device.runs or numbers not in device.peaks:
                continue
            memory, high, work = traced(numbers.replace("tf32", "fp32"), "cpu" if device.kind == "cpu" else "cuda")
            work = in_tf32(work) if numbers == "tf32" else work
            words = layout_keys(on_one_device(recipe, numbers).layout, recipe.layout, ("precision",))
            lost = Failures.of(Case.of(on_one_device(recipe, numbers), 1, "cuda", task))
            priced = _priced(device, memory, high, work, epoch_of(recipe, task, work, whole), lost)
            names_of = {"device": device.name, "name": short_name(device), "precision": numbers, "layout": words}
            ranked.append(names_of | priced)
    return sorted(ranked, key=order)


def _priced(
    device: Device, memory: int, high: int, work: Work, epoch: tuple[float, str], lost: Failures
) -> dict[str, Any]:
    """The entries of `rank_devices` that depend on the work. memory: bytes that it takes; high: their upper end, which
    has to fit. lost: of the recipe."""
    (steps, per), one = epoch, Cluster(device, 1)
    price, fits = hardware.price(device), high <= device.capacity
    time = step_time(work, one) if fits else None
    hours = steps * time.total / 3600 / usual_goodput(one, lost, steps, time.total) if time else None
    priced = price is not None and time is not None
    return {
        "memory": memory, "high": high, "capacity": device.capacity, "fits": fits,
        "missing": max(0.0, high - device.capacity),
        "per": per, "seconds": time and time.total, "hours": hours, "notes": time.notes if time else (),
        "cost": (hours * price.low, hours * price.expected, hours * price.high) if priced else None,
        "currency": price and price.currency, "date": price and price.date,
    }  # fmt: skip


def order(entry: dict[str, Any]) -> tuple:
    """The key by which entries of `rank_devices` are sorted."""
    if not entry["fits"]:
        return 2, entry["missing"], 0.0
    return (1, entry["hours"], 0.0) if entry["cost"] is None else (0, entry["cost"][1], entry["hours"])


def to_serve(model: ModelConfig) -> list[list[Row]]:
    """The rows of plan.serving in fp32, bf16 and fp16, for one sequence of all its positions; [] for an encoder."""
    if models.lookup(model.family).attention == "both":
        return []
    return [serving(model, precision=numbers) for numbers in ("fp32", "bf16", "fp16")]


def devices(
    recipe: Recipe, task: Task | None = None, *, names: list[str] | None = None, whole: bool = False,
    everything: bool = False,
) -> tuple[list[str], list[Row], list[str]]:  # fmt: skip
    """(printed lines, rows, notes) of `gradus plan RECIPE --devices`. whole: time and money of the recipe's steps, not
    of an epoch. everything: see `lines`."""
    ranked, served = rank_devices(recipe, task, names=names, whole=whole), to_serve(recipe.model)
    printed, notes = lines(ranked, served, everything)
    return printed, rows(ranked, served), notes


FIRST = 12  # devices of the first screen
TITLE = (
    "One device to train on, as the recipe is (its batch, micro-batch, checkpointing): what fits, by the upper end of "
    "its memory, cheapest first, then what has no price, fastest first; then what does not fit. Time and expected cost "
    "per "
)


def lines(
    ranked: list[dict[str, Any]], served: list[list[Row]], everything: bool = False
) -> tuple[list[str], list[str]]:
    """(the ranking as a table, and for a decoder what serving it takes; notes). Each device once, at its best
    precision, the first of them; everything: all devices and precisions, with low and high costs and the keys of each.
    """
    per = ranked[0]["per"] if ranked else "epoch"
    best: dict[str, tuple[dict[str, Any], str]] = {}
    for entry in ranked:
        best.setdefault(entry["device"], (entry, entry["precision"]))
    shown = _joined(ranked) if everything else list(best.values())[:FIRST]
    columns = ["device", "precision", "memory", "used", "per step", "time", "cost"]
    head, *text = table(columns, [_cells(entry, precisions) for entry, precisions in shown], {2, 3, 4, 5, 6})
    keys = [f"--on {entry['name']} {entry['layout']}".rstrip() for entry, _ in shown]
    more = []
    if everything:
        text = [line for row, (entry, _), words in zip(text, shown, keys) for line in (row, _details(entry, words))]
    elif keys:
        hidden = f"{len(best) - len(shown)} more devices, other" if len(best) > len(shown) else "other"
        more = [f"--all: {hidden} precisions, low and high costs, the keys of each; of the first: {keys[0]}"]
    notes = list(_joined_notes(note for entry, _ in shown for note in entry["notes"]))
    return [TITLE + per, "", head, *text, *more, *(_serving_lines(served) if served else [])], notes


def _cells(entry: dict[str, Any], precisions: str) -> list[str]:
    step, total, cost = "-", "-", f"{size(entry['missing'])} too much"
    if entry["fits"]:
        step, total, cost = duration(entry["seconds"]), duration(entry["hours"] * 3600), "no price"
    if entry["cost"] is not None:
        cost = money(entry["cost"][1], entry["currency"])
    used = f"{entry['memory'] / entry['capacity']:.0%}"
    return [entry["name"], precisions, size(entry["memory"]), used, step, total, cost]


def _details(entry: dict[str, Any], keys: str) -> str:
    """The line below an entry: low and high costs, and the keys."""
    if entry["cost"] is None:
        return f"    {keys}"
    low, _, high = (money(cost, entry["currency"]) for cost in entry["cost"])
    return f"    [{low} .. {high}] {keys}"


def _joined_notes(notes: Iterable[str]) -> Iterator[str]:
    """One note for all chips that have it: `no fitted parameters for A10, L4: ...`."""
    chips: dict[tuple[str, str], list[str]] = {}
    for note in dict.fromkeys(notes):
        head, colon, rest = note.partition(": ")
        what, _, chip = head.rpartition(" ")
        chips.setdefault((what, colon + rest), []).append(chip)
    yield from (f"{what} {', '.join(names)}{rest}" for (what, rest), names in chips.items())


def _serving_lines(served: list[list[Row]]) -> list[str]:
    conditions, body = served[0][0].conditions, []
    source = f" and {conditions['source_len']:,} of source" if "source_len" in conditions else ""
    for precision in served:
        by_name = {row.name.removeprefix("serving/"): row for row in precision}
        device, cache = by_name["device"], sum(by_name[k].value for k in ("kv_cache", "cross_cache") if k in by_name)
        values = (by_name["rule"].value, by_name["weights"].value, cache, by_name["total"].value)
        rule, *sizes = map(size, values)
        fits = device.value if device.conditions["fits"] else "several"
        by_rule = device.conditions["by_rule"].replace("none", "several")
        body.append([device.conditions["precision"], rule, by_rule, *sizes, fits])
    header = ["", "weights × 1.2", "held by", "weights", "cache", "total", "held by"]
    title = (
        f"One device to serve it on, one sequence of {conditions['seq_len']:,} tokens{source}, before activations and "
        "framework: by the rule of thumb (weights × 1.2), and by weights, cache and logits"
    )
    return ["", title, *table(header, body, {1, 3, 4, 5})]


def _joined(ranked: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """(entry, its precisions): those of a device that take as long and as much in one line; of what does not fit only
    the nearest of each device."""
    joined: dict[tuple, tuple[dict[str, Any], str]] = {}
    for entry in ranked:
        key = (entry["device"], entry["seconds"], entry["memory"]) if entry["fits"] else (entry["device"],)
        if key not in joined:
            joined[key] = entry, entry["precision"]
        elif entry["fits"] or entry["memory"] == joined[key][0]["memory"]:
            joined[key] = joined[key][0], f"{joined[key][1]}, {entry['precision']}"
    return list(joined.values())


def rows(ranked: list[dict[str, Any]], served: list[list[Row]]) -> list[Row]:
    """The same as rows: device/memory, device/step, device/hours, device/cost; and those of serving."""
    figures = []
    for entry in ranked:
        common = {name: entry[name] for name in ("device", "precision", "layout")}
        inputs = {"memory": entry["memory"], "capacity": entry["capacity"]}
        figures.append(known_figure("device/memory", entry["memory"], inputs, fits=entry["fits"], **common))
        if not entry["fits"]:
            continue
        per, hours, unit = entry["per"], entry["hours"], SIGNS.get(entry["currency"], entry["currency"])
        figures.append(known_figure("device/step", entry["seconds"], {}, fits=True, **common))
        figures.append(known_figure("device/hours", hours, {"seconds": entry["seconds"]}, per=per, fits=True, **common))
        for case, cost in zip(CASES, entry["cost"] or ()):
            priced = {"unit": unit, "case": case, "per": per, "date": entry["date"]}
            figures.append(known_figure("device/cost", cost, {"hours": hours}, **priced, **common))
    return [*figures, *itertools.chain.from_iterable(served)]
