"""`gradus bench`: a trained model in every engine and precision, at several batches and lengths, as a study; and which is the fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus import files, hardware, limits, models
from gradus.errors import UserError, did_you_mean, either
from gradus.infer import Encoded, Place, engines, exported, find, predict
from gradus.infer.checked import compare, verdict
from gradus.infer.compiled import beside
from gradus.measure import roofs
from gradus.measure.energy import Meter
from gradus.models.decoding import generate
from gradus.plan.serving import BYTES, cache_bytes, serving, usage_of
from gradus.proof import results
from gradus.proof.room import device_of
from gradus.proof.study import Configuration, Notebook, Sample, Study, about, exit_code, run
from gradus.proof.timing import Subject, Timed, Window
from gradus.recipe.schema import ModelConfig
from gradus.rows import Row
from gradus.train.precision import pick_device

LENGTHS, NEW = (128, 512), 64
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
ENOUGH = 200  # runs of which two are above p99
POINT = 0.01  # of accuracy that weights of 8 and 4 bits may lose
QUALITY = {"valid/accuracy": 1.0, "valid/bleu": 0.01}  # metric → what makes a share of it
ENERGY_RUNS = 3
COLUMNS = (
    "best", "latency/median", "latency/p90", "latency/p99", "latency/first_token", "latency/per_token", "decode/tokens_per_s", "samples_per_s",
    "ratio", "memory/process", "memory/allocated", "size/weights", "time/load", "time/first_call", "roof", "energy/sample", *QUALITY,
)  # fmt: skip
Pair = tuple[str, str]  # engine, precision


def bench(args: Any) -> Iterator[str]:
    """The verb. Yields what is printed; returns the exit code."""
    place = find(args.model)
    study, refused, named = cells(place, args)
    folder = Path(args.to or Path("bench") / Path(args.model).resolve().name)
    say = results.quiet if args.json else results.say
    rows = run(study, folder, say, more=lambda *found: derived(place, refused, named, *found))
    if not place.made:
        remember(place, rows)
    if args.json:
        yield from (row.json() for row in rows)
        return exit_code(rows)
    yield from ("", *results.lines([row.known() for row in rows], COLUMNS))
    best = next((row for row in rows if row.name == "best"), None)
    yield "best at batch 1: " + (f"{best.conditions['at']['engine']}{'' if place.made else '; --engine auto takes it'}" if best else "not known: at batch 1 no engine that ran is accurate enough")
    yield f"rows: {folder / 'rows.jsonl'}"
    return exit_code(rows)


# ------------------------------------------------------------ which cells


def chosen(text: str, option: str, known: Iterable[str], every: Iterable[str]) -> list[str]:
    """The names of a list, or `every` of them. Raises UserError for one that is not known."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in known and words != ["all"]:
            raise UserError(f"{option}={word}: no such name.{did_you_mean(word, [*known, 'all'])}")
    return list(every) if words == ["all"] else words


def pairs(place: Place, args: Any) -> tuple[list[Pair], dict[str, str]]:
    """(engines with precisions that this model and this machine may have, why another may not: its name → reason). Raises UserError where
    none is left."""
    ways = engines.ways_of(place) if place.made else []
    every = [dict.fromkeys(names) for names in zip(*ways)] or [engines.ENGINES, engines.PRECISIONS]
    names = chosen(args.engines, "--engines", engines.ENGINES, every[0])
    found, refused = [], {}
    for name, precision in itertools.product(names, chosen(args.precisions, "--precisions", engines.PRECISIONS, every[1])):
        kind = engines.kind(name)
        try:
            if not place.made:
                engines.fits(kind, precision, place)
            elif (name, precision) not in ways:
                use = either(f"--engines {name} --precisions {precision}" for name, precision in ways)
                raise UserError(f"{place.name}: made for {use}. Use that, or give the model that it was made from.")
            engines.installed(kind)
            found.append((name, precision))
        except UserError as e:
            refused[f"{name} {precision}"] = str(e)
    if not found:
        raise UserError(next(iter(refused.values())))
    return found, refused


def sizes(place: Place, args: Any) -> tuple[list[int | None], int | None]:
    """(the lengths that are read, None for images; tokens that are written, None where none are). Raises UserError for what has no effect, or
    does not fit the model."""
    writes, longest, images = place.family.attention != "both", place.config.longest, place.config.reads == "images"
    if images and args.length is not None:
        raise UserError(f"--length={args.length}: an image's length is its patches. Leave it out.")
    if not writes and args.new is not None:
        raise UserError(f"--new={args.new}: for models that generate text, and {place.name} is not one. Leave it out.")
    new = None if not writes else args.new or min(NEW, max(2, (longest or 2 * NEW) // 2))
    if images:
        return [None], new
    room = longest and longest - (new - 1 if place.family.attention == "causal" else 0)
    if (longest and new and new > longest) or (room is not None and room < 1):
        raise UserError(f"--new={new}: the model has {longest:,} positions. Set --new {max(2, longest // 2)} or fewer.")
    if args.length is None:
        return [n for n in LENGTHS if room is None or n <= room] or [room], new
    lengths = limits.numbers(args.length, "--length", most=limits.LENGTH)
    if room is not None and max(lengths) > room:
        more = f", of which {new - 1} are for --new {new}" if room < longest else ""
        raise UserError(f"--length={max(lengths)}: the model has {longest:,} positions{more}. Set --length {room} or fewer.")
    return lengths, new


def cells(place: Place, args: Any) -> tuple[Study, dict[str, str], set[str]]:
    """(the study, refused pairs, precisions that the user named). Raises UserError."""
    possible, refused = pairs(place, args)
    lengths, new = sizes(place, args)
    batches = limits.numbers(args.batch, "--batch", most=limits.LENGTH)
    if args.accuracy and place.recipe is None:
        raise UserError(f"--accuracy: {place.name} belongs to no run, so there is no data to measure it on. Leave it out, or give a run folder.")
    default = limits.SAMPLES if place.recipe is not None and place.family.attention == "both" else 0
    accuracy = default if args.accuracy is None else args.accuracy
    weights = engines.here(place, *([json.dumps(place.made)] if place.made else []))
    common = {"model": str(place.path.absolute()), "weights": weights, "threads": torch.get_num_threads()}
    made = []
    for (length, batch), (name, precision) in itertools.product(itertools.product(lengths, batches), possible):
        at = {"engine": f"{name} {precision}", "batch": str(batch), **({"length": str(length)} if length else {})}
        first = (length, batch) == (lengths[0], batches[0])  # of each pair: what does not depend on sizes
        options = {**common, "engine": name, "precision": precision, "batch": batch, "length": length, "new": new, "check": first,
                   "accuracy": accuracy * first, "asked": bool(args.accuracy)}  # fmt: skip
        words = [at["engine"], f"batch {batch}", *([f"{length} tokens"] if length else []), *([f"{new} new"] if new else [])]
        made.append(Configuration(" · ".join(words), None, at, f"{Path(__file__).absolute()}:cell", options=options))
    base = next((pair for pair in possible if pair == ("torch", "fp32")), possible[0])
    study = Study(
        f"bench {Path(args.model).resolve().name}", made, steps=-(-args.runs // args.rounds), warm_up=args.warmup, rounds=args.rounds,
        against=" ".join(base), plan=False, strict=len(possible) + len(refused) == 1, seconds=args.seconds / args.rounds,
    )  # fmt: skip
    return study, refused, set() if args.precisions == "all" else {word.strip() for word in args.precisions.split(",")}


# ------------------------------------------------------------ one cell, in a process of its own


class Runs:
    """What is timed: a forward pass over other random inputs each time, or a prompt read and `new` tokens written, greedily, however the text
    ends."""

    def __init__(self, options: dict[str, Any]):
        self.options, self.batch, self.length, self.new = options, options["batch"], options["length"], options["new"]
        self.place, self.draw = find(options["model"]), torch.Generator().manual_seed(0)
        name, precision = options["engine"], options["precision"]
        kind = engines.kind(name)
        if issubclass(kind, exported.GraphEngine):
            exported.found(self.place, kind, precision)  # is made once: no part of the time that loading takes
        began = time.perf_counter()
        self.engine = engines.open(self.place, name, precision)
        self.load, self.seen, self.raw = time.perf_counter() - began, 0, {"latency": []}
        self.raw |= {"first_token": []} if self.new else {}

    def inputs(self, batch: int | None = None) -> Encoded | dict[str, torch.Tensor]:
        config, batch = self.place.config, batch or self.batch
        if config.reads == "images":
            return {"images": torch.randn(batch, config.n_channels, *2 * (config.image_size,), generator=self.draw).to(self.engine.device)}
        ids = torch.randint(config.vocab_size, (batch, self.length), generator=self.draw)
        if not self.new:
            return {"ids": ids.to(self.engine.device)}
        cross = self.place.family.attention == "cross"
        return Encoded([[0]] * batch, ids.tolist(), None) if cross else Encoded(ids.tolist(), None, None)

    @torch.no_grad()
    def step(self, given: Encoded | dict[str, torch.Tensor]) -> None:
        began = time.perf_counter()
        if isinstance(given, Encoded):
            tokens = generate(self.engine, given.prompts, max_new=self.new, sources=given.sources)
            next(tokens)
            self.raw["first_token"].append(time.perf_counter() - began)
            for _ in tokens:
                pass
        else:
            self.engine(**given)
            if self.engine.device.type != "cpu":
                torch.accelerator.synchronize()
        self.raw["latency"].append(time.perf_counter() - began)
        self.seen += self.batch

    @torch.no_grad()
    def finish(self, timed: Timed, window: Window) -> None:
        """What is no part of the timed runs, and comes after the process's peak was taken: roofs, energy, the check, accuracy."""
        device, computes = self.engine.device, self.engine.computes
        timed.raw = {name: found[-len(timed.spent) :] for name, found in self.raw.items()}
        kinds = {torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(computes[:4], torch.float32)}
        middle = statistics.median(timed.raw["latency"])  # without the making of inputs
        timed.values = {
            "samples_per_s": [self.batch / middle, "samples/s"], "time/step": [middle, "s"], "time/load": [self.load, "s"], "size/weights": [self.engine.weight_bytes(), "bytes"],
            "roof/bandwidth": [roofs.bandwidth(device), "bytes/s"], "roof/rate": [max(roofs.product_rate(device, k) for k in kinds), "FLOP/s"],
        }  # fmt: skip
        with Meter(device) as meter:
            for _ in range(ENERGY_RUNS if meter.source else 0):
                self.step(self.inputs())
        if meter.joules:
            timed.values["energy/sample"] = [meter.joules / ENERGY_RUNS / self.batch, "J"]
            timed.facts["meter"] = meter.source
        timed.facts |= {"computes": computes, "cache_bytes": roofs.last_cache() if device.type == "cpu" else 0}
        if window.round == 1 and self.options["check"] and not self.place.made:  # which was checked when it was written
            reference = engines.Torch(dataclasses.replace(self.place, model=None), "fp32")
            given = self.inputs(2)
            found = compare(self.engine, reference, given if isinstance(given, Encoded) else [given])
            timed.values |= {row.name: [row.value, ""] for row in found if row.name != "check/computes"}
        if window.round == 1 and self.options["accuracy"]:
            self.accuracy(timed)

    def accuracy(self, timed: Timed) -> None:
        """Metrics over the run's valid split, by the code of gradus evaluate."""
        of, limit = self.options, self.options["accuracy"]
        some = [f"data.limit_valid={limit}"] if limit < limits.SAMPLES else []
        run_folder = str(self.place.path.parent.parent)
        words = ["layout.precision=fp32", *some]  # the engine does the rest
        try:
            found = predict.evaluate(run_folder, words, "valid", of["model"], engine=of["engine"], precision=of["precision"])
        except UserError as e:
            if of["asked"]:
                raise
            timed.facts["no_accuracy"] = str(e)
            return
        timed.values |= {name: [float(value), ""] for name, value in found.items()}


def cell(recipe: None, options: dict[str, Any]) -> Subject:
    """The runner of study.own_steps."""
    made = Runs(options)
    return Subject(made.inputs, made.step, lambda: made.seen, made.engine.device, memory=dict, finish=made.finish)


# ------------------------------------------------------------ rows


def derived(place: Place, refused: dict[str, str], named: set[str], study: Study, notebook: Notebook) -> Iterator[Row]:
    """Of all runs of all rounds together: latency, tokens/s, the share of the roof; what gradus plan --serve says; the best; what could not
    be."""
    taken = {c.name: found for c in study.configurations if (found := [s for s in notebook.samples[c.name] if s.ranks and not s.failed])}
    median = {name: statistics.median(latencies(samples)) for name, samples in taken.items()}
    for c in study.configurations:
        yield from planned(place, c)
        if c.name in taken:
            for row in cell_rows(place, c, taken[c.name]):
                row.conditions = {**conditions(study, notebook, c), **row.conditions}
                yield row
    best = fastest(place, study, taken, median, named)
    for c in study.configurations:
        if best and (c.options["engine"], c.options["precision"]) == best["any"] and c.options["batch"] == 1:
            yield Row("best", "yes", "", None, {**conditions(study, notebook, c), "of": best})
    for name, why in refused.items():
        yield Row("failed", why, "", None, {"kind": "measured", "configuration": name, **notebook.common})


def conditions(study: Study, notebook: Notebook, c: Configuration) -> dict[str, Any]:
    return {**about(study, notebook, c), "threads": c.options["threads"]}


def latencies(samples: Sequence[Sample]) -> list[float]:
    """Seconds of every run of every round."""
    return [x for s in samples for x in s.ranks[0].raw["latency"]]


def cell_rows(place: Place, c: Configuration, samples: Sequence[Sample]) -> Iterator[Row]:
    raw = {name: [x for s in samples for x in s.ranks[0].raw[name]] for name in samples[0].ranks[0].raw}
    whole, new, batch = raw["latency"], c.options["new"], c.options["batch"]
    spread = {"n": len(whole), "low": min(whole), "high": max(whole)}
    yield Row("latency/median", statistics.median(whole), "s", None, dict(spread))
    yield Row("latency/p90", float(np.percentile(whole, 90)), "s", None, dict(spread))
    if len(whole) >= ENOUGH:
        yield Row("latency/p99", float(np.percentile(whole, 99)), "s", None, dict(spread))
    took = statistics.median(whole)
    if new:
        took = statistics.median((end - first) / (new - 1) for end, first in zip(whole, raw["first_token"]))
        yield Row("latency/first_token", statistics.median(raw["first_token"]), "s", None, {"n": len(whole)})
        yield Row("latency/per_token", took, "s", None, {"n": len(whole)})
        yield Row("decode/tokens_per_s", batch / took, "tokens/s", None, {"n": len(whole)})
    values = {name: statistics.median(s.values[name][0] for s in samples) for name in ("roof/bandwidth", "roof/rate")}
    facts = samples[0].ranks[0].facts
    yield roof(place, c, took, values["roof/bandwidth"], values["roof/rate"], facts)


def roof(place: Place, c: Configuration, took: float, bandwidth: float, rate: float, facts: dict[str, Any]) -> Row:
    """The least time that reading the weights (and keys and values), or the operations, could take at the speeds that were measured in the
    same processes, as a share of a pass's time; of a model that writes, of a token's."""
    o, config, cross = c.options, place.config, place.family.attention == "cross"
    n = o["length"] or (config.image_size // config.patch_size) ** 2 + 1
    held = (0 if cross else n) + (o["new"] or 0) // 2 if o["new"] else n  # tokens a row, of those written the mean
    stored = facts["computes"][:4] if facts["computes"][:4] in BYTES else "fp32"
    usage = usage_of(config, o["batch"], max(1, held), n * cross)
    one = usage.decode or usage.prefill
    weights = one.weights * BITS[o["precision"]] / 8
    kept = sum(cache_bytes(config, o["batch"], max(1, held), source_len=n * cross, precision=stored)) if o["new"] else 0
    least = {"bandwidth": (weights + kept) / bandwidth, "operations": one.operations / rate}
    limit = max(least, key=least.get)
    resident = limit == "bandwidth" and weights < facts["cache_bytes"]
    return Row("roof", "cache-resident" if resident else least[limit] / took, "", None, {"limit": limit, "least": least[limit]})


def planned(place: Place, c: Configuration) -> Iterator[Row]:
    """What `gradus plan --serve` says of the same; of times where this machine is calibrated."""
    o = c.options
    bits, numbers = BITS[o["precision"]], "fp32" if o["precision"].startswith("int") else o["precision"]

    def of(length: int | None, on: hardware.Cluster | None) -> dict[str, Any]:
        found = serving(place.config, batch=o["batch"], seq_len=length, bits=bits, precision=numbers, on=on)
        return {row.name.removeprefix("serving/"): row.value for row in found}

    device = device_of(pick_device("auto"), o["threads"])
    for on in (device and hardware.Cluster(device, 1), None):  # without a device where its peak is not known
        with contextlib.suppress(UserError):
            prompt = of(o["length"], on)
            last = of(o["length"] + o["new"] - 1, on) if o["new"] and place.family.attention == "causal" else prompt
            break
    else:
        return
    rest = BYTES[beside(o["precision"], pick_device("auto"))]
    weights = in_integers(place.config, bits, rest) if o["engine"] == "compiled" and bits <= 8 else prompt["weights"]
    found = {"size/weights": (weights, "bytes")}
    if "forward_time" in prompt:
        found["latency/median"] = (prompt["forward_time"], "s")
    if "decode_time" in last:
        first, token = prompt["prefill_time"], last["decode_time"]
        found |= {"latency/first_token": (first, "s"), "latency/per_token": (token, "s"), "decode/tokens_per_s": (o["batch"] / token, "tokens/s")}
        found["latency/median"] = (first + (o["new"] - 1) * token, "s")
    for name, (value, unit) in found.items():
        yield Row(name, value, unit, None, {"kind": "predicted", "configuration": c.name, "at": c.at})


def in_integers(config: ModelConfig, bits: int, rest: int) -> float:
    """Bytes of a model whose Linears are in `bits` bits, their scales not counted, and all else in `rest` bytes a number: an embedding too that
    a head shares."""
    held = {}
    for module in models.build(config, "meta").modules():
        for name, p in module.named_parameters(recurse=False):
            whole = isinstance(module, nn.Linear) and name == "weight"
            held[id(p), whole] = p.numel() * (bits / 8 if whole else rest)
    return sum(held.values())


# ------------------------------------------------------------ the best


def fastest(place: Place, study: Study, taken: dict[str, list[Sample]], median: dict[str, float], named: set[str]) -> dict[str, Pair]:
    """"any" and each precision → the pair that counts and is the fastest over all lengths at batch 1 (by the geometric mean of latencies);
    empty where none is."""
    first = {(c.options["engine"], c.options["precision"]): taken.get(c.name) for c in study.configurations if c.options["check"]}
    base = first.get(("torch", "fp32"))
    scores: dict[Pair, float] = {}
    for pair, samples in first.items():
        ones = [c for c in study.configurations if (c.options["engine"], c.options["precision"]) == pair and c.options["batch"] == 1]
        if not ones or not samples or not all(c.name in median for c in ones):
            continue
        if place.made or counts(pair, samples[0], base and base[0], named):  # what was made for engines was checked when it was written
            scores[pair] = statistics.mean(math.log(median[c.name]) for c in ones)
    order = sorted(scores, key=scores.get)
    best: dict[str, Pair] = {"any": order[0]} if order else {}
    for pair in order:
        best.setdefault(pair[1], pair)
    return best


def counts(pair: Pair, sample: Sample, base: Sample | None, named: set[str]) -> bool:
    """Whether outputs are near enough, and of weights of 8 and 4 bits the accuracy too, or the user named them."""
    at = {"engine": pair[0], "precision": pair[1]}
    found = [{"name": name, "value": value, **at} for name, (value, _) in sample.values.items() if name.startswith("check/")]
    try:
        verdict([*found, {"name": "check/computes", "value": sample.ranks[0].facts["computes"], **at}])
    except UserError:
        return False
    if not pair[1].startswith("int") or pair[1] in named:
        return True
    both = [m for m in QUALITY if base and m in base.values and m in sample.values]
    return bool(both) and (base.values[both[0]][0] - sample.values[both[0]][0]) * QUALITY[both[0]] <= POINT


def remember(place: Place, rows: Sequence[Row]) -> None:
    """For `--engine auto`."""
    best = next((row.conditions["of"] for row in rows if row.name == "best"), None)
    if best:
        kept = engines.best_at(place)
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(kept, {**best, "when": f"{datetime.date.today()}"})
