"""`gradus bench`: a trained model in every engine and precision, at several batches and lengths, as a study; and which
is the fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gradus import files, hardware, limits, models
from gradus.errors import UserError, did_you_mean, either
from gradus.infer import ModelSource, engines, find
from gradus.infer.checked import verdict
from gradus.infer.compiled import other_dtype
from gradus.infer.exported import check_finite
from gradus.parallel.device import pick_device
from gradus.plan.serving import BYTES, serving, usage_of
from gradus.proof import results
from gradus.proof.harness import exit_code, run
from gradus.proof.memory_budget import device_of
from gradus.proof.study import Configuration, Study, Values
from gradus.proof.study_store import Sample, StudyStore
from gradus.recipe.schema import ModelConfig
from gradus.rows import Row

LENGTHS, NEW = (128, 512), 64
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
ENOUGH = 200  # runs of which two are above p99
POINT = 0.01  # of accuracy that weights of 8 and 4 bits may lose
QUALITY = {"valid/accuracy": 1.0, "valid/bleu": 0.01}  # metric → factor to a share of it
COLUMNS = (
    "best", "latency/median", "latency/p90", "latency/p99", "latency/first_token", "latency/per_token",
    "decode/tokens_per_s", "samples_per_s", "samples_per_s/undisturbed", "ratio", "ratio/undisturbed", "memory/process",
    "memory/allocated", "size/weights", "time/load", "time/first_call", "roof", "energy/sample", *QUALITY,
)  # fmt: skip


class EnginePair(NamedTuple):
    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


def bench(args: Any) -> Iterator[str]:
    """The verb. Yields what is printed; returns the exit code."""
    plan = plan_bench(find(args.model), args)
    if not plan.source.export_info:  # which was checked when it was written
        check_finite(plan.source)
    folder = Path(args.to or Path("bench") / Path(args.model).resolve().name)
    rows = run(plan.study, folder, results.quiet if args.json else results.say, more=plan.rows)
    best = next((row for row in rows if row.name == "best"), None)
    exported = plan.source.export_info
    if best and not exported:
        remember(plan.source, best.conditions["of"])
    if args.json:
        yield from (row.json() for row in rows)
        return exit_code(rows)
    yield from ("", *results.lines([row.known() for row in rows], COLUMNS))
    fastest = "not known: at batch 1 no engine that ran is accurate enough"
    if best:
        fastest = best.conditions["at"]["engine"] + ("" if exported else "; --engine auto takes it")
    yield f"best at batch 1: {fastest}"
    yield f"rows: {folder / 'rows.jsonl'}"
    return exit_code(rows)


# ------------------------------------------------------------ which configurations


def chosen(text: str, option: str, known: Iterable[str], every: Iterable[str]) -> list[str]:
    """The names of a list, or `every` of them. Raises UserError for one that is not known."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in known and words != ["all"]:
            raise UserError(f"{option}={word}: no such name.{did_you_mean(word, [*known, 'all'])}")
    return list(every) if words == ["all"] else words


def engines_of(source: ModelSource, args: Any) -> tuple[list[EnginePair], dict[str, str]]:
    """(those that this model and this machine may have, why others are not: name → reason). Raises UserError where none
    is left."""
    ways = engines.ways_of(source) if source.export_info else []
    every = [dict.fromkeys(names) for names in zip(*ways)] or [engines.ENGINES, engines.PRECISIONS]
    names = chosen(args.engines, "--engines", engines.ENGINES, every[0])
    precisions = chosen(args.precisions, "--precisions", engines.PRECISIONS, every[1])
    possible, refused = [], {}
    for pair in itertools.starmap(EnginePair, itertools.product(names, precisions)):
        kind = engines.kind(pair.engine)
        try:
            if not source.export_info:
                engines.fits(kind, pair.precision, source)
            elif pair not in ways:
                use = either(f"--engines {name} --precisions {precision}" for name, precision in ways)
                raise UserError(f"{source.name}: made for {use}. Use that, or give the model that it was made from.")
            engines.installed(kind)
            possible.append(pair)
        except UserError as e:
            refused[str(pair)] = str(e)
    if not possible:
        raise UserError(next(iter(refused.values())))
    return possible, refused


def new_tokens(source: ModelSource, args: Any) -> int | None:
    """Tokens that are written; None where the model writes none. Raises UserError where --new has no effect."""
    if source.family.attention == "both":
        if args.new is not None:
            generating = f"for models that generate text, and {source.name} is not one"
            raise UserError(f"--new={args.new}: {generating}. Leave it out.")
        return None
    longest = source.config.longest or 2 * NEW
    return args.new or min(NEW, max(2, longest // 2))


def lengths_of(source: ModelSource, args: Any, new: int | None) -> list[int | None]:
    """The lengths that are read, None for images. Raises UserError for what has no effect, or does not fit the
    model."""
    longest = source.config.longest
    if source.config.reads == "images":
        if args.length is not None:
            raise UserError(f"--length={args.length}: an image's length is its patches. Leave it out.")
        return [None]
    most = longest and longest - (new - 1 if source.family.attention == "causal" else 0)
    if longest and ((new and new > longest) or most < 1):
        few = f"Set --new {max(2, longest // 2)} or fewer."
        raise UserError(f"--new={new}: the model has {longest:,} positions. {few}")
    if args.length is None:
        return [n for n in LENGTHS if most is None or n <= most] or [most]
    lengths = limits.numbers(args.length, "--length", most=limits.LENGTH)
    if most is not None and max(lengths) > most:
        written = f", of which {new - 1} are for --new {new}" if most < longest else ""
        few = f"Set --length {most} or fewer."
        raise UserError(f"--length={max(lengths)}: the model has {longest:,} positions{written}. {few}")
    return lengths


def plan_bench(source: ModelSource, args: Any) -> BenchPlan:
    """Raises UserError."""
    possible, refused = engines_of(source, args)
    new = new_tokens(source, args)
    lengths = lengths_of(source, args, new)
    batches = limits.numbers(args.batch, "--batch", most=limits.LENGTH)
    if args.accuracy and source.recipe is None:
        no_data = f"{source.name} belongs to no run, so there is no data to measure it on"
        raise UserError(f"--accuracy: {no_data}. Leave it out, or give a run folder.")
    of_run = limits.SAMPLES if source.recipe is not None and source.family.attention == "both" else 0
    accuracy = of_run if args.accuracy is None else args.accuracy
    weights = engines.cache_key(source, *([json.dumps(source.export_info)] if source.export_info else []))
    common = {
        "model": str(source.path.absolute()), "weights": weights, "threads": torch.get_num_threads(), "new": new,
        "asked": bool(args.accuracy),
    }  # fmt: skip
    configurations = []
    for length, batch, pair in itertools.product(lengths, batches, possible):
        first = (length, batch) == (lengths[0], batches[0])  # of each pair: what does not depend on sizes
        once = {"check": first, "accuracy": accuracy * first}
        configurations.append(configuration(pair, batch, length, {**common, **once}))
    base = next((pair for pair in possible if pair == ("torch", "fp32")), possible[0])
    study = Study(
        f"bench {Path(args.model).resolve().name}", configurations, steps=-(-args.runs // args.rounds),
        warm_up=args.warmup, rounds=args.rounds, against=str(base), plan=False,
        strict=len(possible) + len(refused) == 1, seconds=args.seconds / args.rounds,
    )  # fmt: skip
    named = set() if args.precisions == "all" else {word.strip() for word in args.precisions.split(",")}
    return BenchPlan(source, study, refused, named)


def configuration(pair: EnginePair, batch: int, length: int | None, options: dict[str, Any]) -> Configuration:
    at = {"engine": str(pair), "batch": str(batch), **({"length": str(length)} if length else {})}
    words = [str(pair), f"batch {batch}"]
    words += [f"{length} tokens"] if length else []
    words += [f"{options['new']} new"] if options["new"] else []
    options = {**options, "engine": pair.engine, "precision": pair.precision, "batch": batch, "length": length}
    return Configuration(" · ".join(words), None, at, "engine", options=options)


def pair_of(c: Configuration) -> EnginePair:
    return EnginePair(c.options["engine"], c.options["precision"])


# ------------------------------------------------------------ rows


@dataclasses.dataclass
class BenchPlan:
    """A model, what is measured of it, what is not and why, and the precisions that the user named."""

    source: ModelSource
    study: Study
    refused: dict[str, str]
    named: set[str]

    def rows(self, store: StudyStore) -> Iterator[Row]:
        """Figures of all runs of all rounds together (latency, tokens/s, the share of the roof), the plan, the best
        pair, and why others are missing."""
        configurations = self.study.configurations
        samples = {c.name: of_c for c in configurations if (of_c := [s for s in store.measured(c) if s.ranks])}
        for c in configurations:
            yield from planned_rows(self.source, c)
            if c.name in samples:
                for row in measured_rows(self.source, c, samples[c.name]):
                    row.conditions = {**store.conditions(c), **row.conditions}
                    yield row
        best = fastest(self, samples)
        for c in configurations:
            if best and pair_of(c) == best["any"] and c.options["batch"] == 1:
                yield Row("best", "yes", "", None, {**store.conditions(c), "of": best})
        for name, reason in self.refused.items():
            yield Row("failed", reason, "", None, {"kind": "measured", "configuration": name, **store.common})


def raw_of(samples: Sequence[Sample], name: str) -> list[float]:
    """Seconds of every run of every round."""
    return [seconds for s in samples for seconds in s.ranks[0].raw[name]]


def measured_rows(source: ModelSource, c: Configuration, samples: Sequence[Sample]) -> Iterator[Row]:
    latency, new = raw_of(samples, "latency"), c.options["new"]
    seconds = statistics.median(latency)  # of a pass
    n = {"n": len(latency)}
    spread = {**n, "low": min(latency), "high": max(latency)}
    yield Row("latency/median", seconds, "s", None, spread)
    for percent in (90, 99) if len(latency) >= ENOUGH else (90,):
        yield Row(f"latency/p{percent}", float(np.percentile(latency, percent)), "s", None, spread)
    if new:
        first_token = raw_of(samples, "first_token")
        seconds = statistics.median((end - first) / (new - 1) for end, first in zip(latency, first_token))
        yield Row("latency/first_token", statistics.median(first_token), "s", None, n)
        yield Row("latency/per_token", seconds, "s", None, n)
        yield Row("decode/tokens_per_s", c.options["batch"] / seconds, "tokens/s", None, n)
    yield roof(source, c, samples, seconds)


def roof(source: ModelSource, c: Configuration, samples: Sequence[Sample], seconds: float) -> Row:
    """The least time that reading the weights (and keys and values), or the operations, could take at the speeds that
    were measured in the same processes, as a share of `seconds`, a pass's time; of a model that writes, a token's."""
    options, config, facts = c.options, source.config, samples[0].ranks[0].facts
    bits, new, batch = BITS[options["precision"]], options["new"], options["batch"]
    cross = source.family.attention == "cross"
    n = options["length"] or config.n_tokens
    tokens = max(1, (0 if cross else n) + new // 2) if new else n  # in a row, of those written the mean
    stored = facts["computes"][:4] if facts["computes"][:4] in BYTES else "fp32"
    usage = usage_of(config, batch, tokens, n * cross)
    one = usage.decode or usage.prefill
    weights = one.weights * bits / 8
    cache = (usage.own + usage.cross) * BYTES[stored] if new else 0
    bandwidth, rate = (statistics.median(s.values[f"roof/{k}"][0] for s in samples) for k in ("bandwidth", "rate"))
    least = {"bandwidth": (weights + cache) / bandwidth, "operations": one.operations / rate}
    limit = max(least, key=least.get)
    resident = limit == "bandwidth" and weights < facts["cache_bytes"]
    share = "cache-resident" if resident else least[limit] / seconds
    return Row("roof", share, "", None, {"limit": limit, "least": least[limit]})


def planned_rows(source: ModelSource, c: Configuration) -> Iterator[Row]:
    """The plan of `gradus plan --serve` for the same; times where this machine is calibrated."""
    device = device_of(pick_device("auto"), c.options["threads"])
    for cluster in (device and hardware.Cluster(device, 1), None):  # without a device where its peak is not known
        with contextlib.suppress(UserError):
            for name, (value, unit) in serving_figures(source, c, cluster).items():
                yield Row(name, value, unit, None, {"kind": "predicted", "configuration": c.name, "at": c.at})
            return


def serving_figures(source: ModelSource, c: Configuration, cluster: hardware.Cluster | None) -> Values:
    """Raises UserError where the plan cannot be made."""
    options, new = c.options, c.options["new"]
    precision, bits, batch = options["precision"], BITS[options["precision"]], options["batch"]
    computed_in = "fp32" if precision.startswith("int") else precision

    def plan(length: int | None) -> dict[str, Any]:
        rows = serving(source.config, batch=batch, seq_len=length, bits=bits, precision=computed_in, on=cluster)
        return {row.name.removeprefix("serving/"): row.value for row in rows}

    prompt = plan(options["length"])
    last = plan(options["length"] + new - 1) if new and source.family.attention == "causal" else prompt
    figures: Values = {"size/weights": (prompt["weights"], "bytes")}
    if options["engine"] == "compiled" and bits <= 8:
        rest = BYTES[other_dtype(precision, pick_device("auto"))]
        figures["size/weights"] = (in_integers(source.config, bits, rest), "bytes")
    if "forward_time" in prompt:
        figures["latency/median"] = (prompt["forward_time"], "s")
    if "decode_time" in last:
        first, token = prompt["prefill_time"], last["decode_time"]
        figures |= {
            "latency/first_token": (first, "s"),
            "latency/per_token": (token, "s"),
            "decode/tokens_per_s": (batch / token, "tokens/s"),
            "latency/median": (first + (new - 1) * token, "s"),
        }
    return figures


def in_integers(config: ModelConfig, bits: int, rest: int) -> float:
    """Bytes of a model whose Linears are in `bits` bits, their scales not counted, and all else in `rest` bytes a
    number: an embedding too that a head shares."""
    n_bytes = {}
    for module in models.build(config, "meta").modules():
        for name, p in module.named_parameters(recurse=False):
            quantized = isinstance(module, nn.Linear) and name == "weight"
            n_bytes[id(p), quantized] = p.numel() * (bits / 8 if quantized else rest)
    return sum(n_bytes.values())


# ------------------------------------------------------------ the best


def fastest(plan: BenchPlan, samples: dict[str, list[Sample]]) -> dict[str, EnginePair]:
    """"any" and each precision → the pair that counts and is the fastest over all lengths at batch 1 (by the geometric
    mean of latencies); empty where none is."""
    latency = {name: statistics.median(raw_of(of_c, "latency")) for name, of_c in samples.items()}
    checked = {pair_of(c): samples.get(c.name) for c in plan.study.configurations if c.options["check"]}
    base = checked.get(("torch", "fp32"))
    scores: dict[EnginePair, float] = {}
    for pair, of_pair in checked.items():
        singles = [c.name for c in plan.study.configurations if pair_of(c) == pair and c.options["batch"] == 1]
        if not singles or not of_pair or not all(name in latency for name in singles):
            continue
        exported = plan.source.export_info  # checked when it was written
        if exported or is_accurate(pair, of_pair[0], base and base[0], plan.named):
            scores[pair] = statistics.mean(math.log(latency[name]) for name in singles)
    order = sorted(scores, key=scores.get)
    best: dict[str, EnginePair] = {"any": order[0]} if order else {}
    for pair in order:
        best.setdefault(pair.precision, pair)
    return best


def is_accurate(pair: EnginePair, sample: Sample, base: Sample | None, named: set[str]) -> bool:
    """Outputs are near enough; and with weights of 8 or 4 bits, accuracy is too, or the user named the precision."""
    figures = {name.removeprefix("check/"): value for name, (value, _) in sample.values.items()}
    try:
        verdict(figures | {"computes": sample.ranks[0].facts["computes"]}, *pair)
    except UserError:
        return False
    if not pair.precision.startswith("int") or pair.precision in named:
        return True
    metric = next((m for m in QUALITY if base and m in base.values and m in sample.values), None)
    return metric is not None and (base.values[metric][0] - sample.values[metric][0]) * QUALITY[metric] <= POINT


def remember(source: ModelSource, best: dict[str, EnginePair]) -> None:
    """Keep the best pairs for `--engine auto`."""
    file = engines.best_at(source)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, {**best, "when": f"{datetime.date.today()}"})
