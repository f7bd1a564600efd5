"""Which single device, at which precision and price: every device of the hardware file, each precision it has, ranked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gradus import hardware
from gradus.hardware import Cluster, Device
from gradus.hardware.tables import short_name, table
from gradus.parallel import mesh
from gradus.plan.budget import CASES, SIGNS
from gradus.plan.figures import known_figure
from gradus.plan.keys import layout_keys
from gradus.plan.serving import ENCODERS, serving
from gradus.plan.show import duration, money, note_lines, size
from gradus.plan.step import step_time
from gradus.plan.work import Work
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.rows import Row

if TYPE_CHECKING:
    from gradus.tasks.base import Task

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PER_TOKENS = 1e9  # where there is no epoch


def alone(recipe: Recipe, numbers: str) -> Recipe:
    """The recipe on one device, in these numbers; all that concerns several devices is left out."""
    computed = {"precision": numbers.replace("tf32", "fp32"), "tf32": numbers == "tf32"}
    return recipe.model_copy(update={"layout": mesh.single_process(recipe.layout).model_copy(update=computed)})


def in_tf32(work: Work) -> Work:
    """The same work with its fp32 matrix products in tf32, as plan/trace.py takes layout.tf32; attention's kernels stay in fp32."""

    def changed(op):
        return dataclasses.replace(op, dtype="tf32") if op.dtype == "fp32" and op.kind == "matmul" else op

    return dataclasses.replace(work, micro=[changed(op) for op in work.micro], step=[changed(op) for op in work.step])


def epoch_of(recipe: Recipe, task: Task | None, work: Work, whole: bool = False) -> tuple[float, str]:
    """(steps, what they are): of an epoch where the data are at hand, else of 1e9 tokens, else of 1e6 samples; whole: all of the recipe."""
    if whole and recipe.train.steps:
        return recipe.train.steps, "run"
    if task is not None:
        return len(task.plan("train", recipe.batch.samples, recipe.batch.tokens).epoch(0)), "epoch"
    if work.tokens and recipe.model.family != "vit":
        return PER_TOKENS / work.tokens, "1e9 tokens"
    return 1e6 / work.samples, "1e6 images" if recipe.model.family == "vit" else "1e6 samples"


def rank_devices(recipe: Recipe, task: Task | None = None, *, names: list[str] | None = None, whole: bool = False) -> list[dict[str, Any]]:
    """One dict for each device and precision it has: device, name (a short one), precision, memory and capacity (bytes), fits, layout (as words), seconds (a
    step), hours and cost (low, expected, high; None without a price) per `per`, all None of what does not fit, currency, missing (bytes),
    notes: whose parameters a device takes that has none of its own. The software is the same on all: Gradus's.

    What fits comes first: by money, then what has no price, by time; then what does not fit, by what is missing. The recipe's batch,
    micro-batch and checkpointing stay. TPUs are left out: Gradus does not run on them. Raises UserError for an unknown name.
    """
    from gradus.plan.engine import plan_memory, traced_work

    @functools.cache
    def traced(numbers: str, target: str) -> tuple[int, Work]:
        one = alone(recipe, numbers)
        memory = plan_memory(one, 1, target=target, task=task)
        return memory.device_total, traced_work(one, 1, target=target, task=task)

    found = []
    for device in [hardware.find(name) for name in names] if names else hardware.devices().values():
        for numbers in PRECISIONS:
            if device.kind == "tpu" or numbers not in device.peaks:
                continue
            taken, work = traced(numbers.replace("tf32", "fp32"), "cpu" if device.kind == "cpu" else "cuda")
            work = in_tf32(work) if numbers == "tf32" else work
            words = layout_keys(alone(recipe, numbers).layout, recipe.layout, ("precision",))
            priced = _priced(device, taken, work, epoch_of(recipe, task, work, whole))
            found.append({"device": device.name, "name": short_name(device), "precision": numbers, "layout": words, **priced})
    return sorted(found, key=order)


def _priced(device: Device, taken: int, work: Work, epoch: tuple[float, str]) -> dict[str, Any]:
    """What `rank_devices` says of work that takes so many bytes."""
    steps, per = epoch
    price, fits = hardware.price(device), taken <= device.capacity
    time = step_time(work, Cluster(device, 1)) if fits else None
    hours = steps * time.total / 3600 if time else None
    return {
        "memory": taken, "capacity": device.capacity, "fits": fits, "missing": max(0.0, taken - device.capacity), "per": per,
        "seconds": time and time.total, "hours": hours, "notes": time.notes if time else (),
        "cost": None if price is None or not time else (hours * price.low, hours * price.expected, hours * price.high),
        "currency": price and price.currency, "date": price and price.date,
    }  # fmt: skip


def order(one: dict[str, Any]) -> tuple:
    if not one["fits"]:
        return 2, one["missing"], 0.0
    return (1, one["hours"], 0.0) if one["cost"] is None else (0, one["cost"][1], one["hours"])


def to_serve(model: ModelConfig) -> list[list[Row]]:
    """The rows of plan.serving in fp32, bf16 and fp16, one sequence of all its positions; [] for what has no cache."""
    return [] if model.family in ENCODERS else [serving(model, precision=numbers) for numbers in ("fp32", "bf16", "fp16")]


def devices(
    recipe: Recipe, task: Task | None = None, *, names: list[str] | None = None, whole: bool = False, everything: bool = False
) -> tuple[list[str], list[Row]]:
    """(printed lines, rows) of `gradus plan RECIPE --devices`. whole: time and money of the recipe's steps, not of an epoch. everything:
    see `lines`."""
    ranked, served = rank_devices(recipe, task, names=names, whole=whole), to_serve(recipe.model)
    return lines(ranked, served, everything), rows(ranked, served)


FIRST = 12  # devices of the first screen


def lines(ranked: list[dict[str, Any]], served: list[list[Row]], everything: bool = False) -> list[str]:
    """The ranking as a table, and for a decoder what serving it takes. Each device once, at its best precision, the first of them;
    everything: all devices and precisions, with low and high costs and the keys of each."""
    per = ranked[0]["per"] if ranked else "epoch"
    best: dict[str, tuple[dict[str, Any], str]] = {}
    for one in ranked:
        best.setdefault(one["device"], (one, one["precision"]))
    shown = _together(ranked) if everything else list(best.values())[:FIRST]
    body, keys = [], []
    for one, precisions in shown:
        step, took, cost, between = "-", "-", f"{size(one['missing'])} too much", ""
        if one["fits"]:
            step, took, cost = duration(one["seconds"]), duration(one["hours"] * 3600), "no price"
        if one["cost"] is not None:
            low, cost, high = (money(c, one["currency"]) for c in one["cost"])
            between = f"    [{low} .. {high}]"
        used = f"{one['memory'] / one['capacity']:.0%}"
        body.append([one["name"], precisions, size(one["memory"]), used, step, took, cost])
        keys.append((between, f"--on {one['name']} {one['layout']}".rstrip()))
    head, *text = table(["device", "precision", "memory", "used", "per step", "time", "cost"], body, {2, 3, 4, 5, 6})
    notes = _of_chips(note for one, _ in shown for note in one["notes"])
    hidden = f"{len(best) - len(shown)} more devices, other" if len(best) > len(shown) else "other"
    rest = [line for row, more in zip(text, keys) for line in (row, f"{more[0] or '   '} {more[1]}")] if everything else text
    more = [] if everything or not keys else [f"--all: {hidden} precisions, low and high costs, the keys of each; of the first: {keys[0][1]}"]
    return [
        "One device to train on, as the recipe is (its batch, micro-batch, checkpointing): what fits, cheapest first, then what has no "
        f"price, fastest first; then what does not fit. Time and expected cost per {per}",
        "",
        head,
        *rest,
        *more,
        *(note_lines(notes) or [""]),
        *(_serving_lines(served) if served else []),
    ]


def _of_chips(notes: Iterable[str]) -> list[str]:
    """One note for all chips that it is said of: `no fitted parameters for A10, L4: ...`."""
    chips: dict[tuple[str, str], list[str]] = {}
    for note in dict.fromkeys(notes):
        head, colon, rest = note.partition(": ")
        what, _, chip = head.rpartition(" ")
        chips.setdefault((what, colon + rest), []).append(chip)
    return [f"{what} {', '.join(names)}{rest}" for (what, rest), names in chips.items()]


def _serving_lines(served: list[list[Row]]) -> list[str]:
    at, body = served[0][0].conditions, []
    source = f" and {at['source_len']:,} of source" if "source_len" in at else ""
    for precision in served:
        found = {row.name.removeprefix("serving/"): row for row in precision}
        chosen, cache = found["device"], sum(found[k].value for k in ("kv_cache", "cross_cache") if k in found)
        rule, *sizes = (size(n) for n in (found["rule"].value, found["weights"].value, cache, found["total"].value))
        by_rule, fits = chosen.conditions["by_rule"].replace("none", "several"), chosen.value if chosen.conditions["fits"] else "several"
        body.append([chosen.conditions["precision"], rule, by_rule, *sizes, fits])
    header = ["", "weights × 1.2", "held by", "weights", "cache", "total", "held by"]
    title = (
        f"One device to serve it on, one sequence of {at['seq_len']:,} tokens{source}, before activations and framework: by the rule of thumb "
        "(weights × 1.2), and by weights, cache and logits"
    )
    return ["", title, *table(header, body, {1, 3, 4, 5})]


def _together(ranked: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Precisions of a device that take as long and as much in one line; of what does not fit only the nearest of each device."""
    found: dict[tuple, tuple[dict[str, Any], str]] = {}
    for one in ranked:
        key = (one["device"], one["seconds"], one["memory"]) if one["fits"] else (one["device"],)
        if key not in found:
            found[key] = one, one["precision"]
        elif one["fits"] or one["memory"] == found[key][0]["memory"]:
            found[key] = found[key][0], f"{found[key][1]}, {one['precision']}"
    return list(found.values())


def rows(ranked: list[dict[str, Any]], served: list[list[Row]]) -> list[Row]:
    """The same as rows: device/memory, device/step, device/hours, device/cost; and those of serving."""
    answer = []
    for one in ranked:
        at = {"device": one["device"], "precision": one["precision"], "layout": one["layout"]}
        given = {"memory": one["memory"], "capacity": one["capacity"]}
        answer.append(known_figure("device/memory", one["memory"], given, fits=one["fits"], **at))
        if not one["fits"]:
            continue
        per, unit = one["per"], SIGNS.get(one["currency"], one["currency"])
        answer.append(known_figure("device/step", one["seconds"], {}, fits=True, **at))
        answer.append(known_figure("device/hours", one["hours"], {"seconds": one["seconds"]}, per=per, fits=True, **at))
        for case, cost in zip(CASES, one["cost"] or ()):
            given = {"hours": one["hours"]}
            answer.append(known_figure("device/cost", cost, given, unit=unit, case=case, per=per, date=one["date"], **at))
    return [*answer, *itertools.chain.from_iterable(served)]
