"""Published measurements of serving beside `gradus.plan.serving.expected`, which `gradus plan --serve` prints: by single kernels. Nothing is fitted
to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from gradus.hardware import Cluster
from gradus.plan.serving import Use, expected
from published import runs, scoring, study
from published.points import NotCovered, Point, cleaned, device_of, model_of

METRICS = {"itl_s": "time between tokens", "ttft_s": "time to the first token", "batch_latency_s": "a static batch, prompts and tokens"}
GROUPS = "aiconfigurator-runs", "llm-inference-bench"
MOST = 32  # requests at once, with more of which the time to a first token is the queue's
BITS = {"int4": 4, "fp4": 4, "fp8": 8}  # of a weight, by precision; activations and the cache have 16


def use_of(point: Point) -> Use:
    """What was served. Raises NotCovered."""
    c = point["config"]
    if c.get("mode") == "disagg":
        raise NotCovered("prompts and tokens on separate machines")
    if not point["batch"] or not c.get("tp"):
        raise NotCovered("requests at once or tensor degree not given")
    if (c.get("max_batch") or point["batch"]) < point["batch"]:
        raise NotCovered("more requests at once than rows: some wait, or several copies share them")
    if c.get("hidden") and not c.get("kv_heads"):
        raise NotCovered(f"model {point['model']}: heads of keys not known")
    model, precision = model_of(point), runs.words(point, "precision")
    bits = next((bits for word, bits in BITS.items() if word in precision), 16)
    half, dtype = runs.precision_of(point)
    tokens = point["seq"] + c["osl"]
    return Use(model.changed(seq_len=tokens), point["batch"], tokens, 0, bits, half, Cluster(device_of(point), c["tp"]), dtype)


def planned(point: Point, use: Use) -> float:
    """Seconds, of the point's metric."""
    found = expected(use, point["config"]["osl"])
    if point["metric"] == "batch_latency_s":
        return use.batch / found["requests_per_s"]
    return found[point["metric"].removesuffix("_s")]


def score(points: Iterable[Point]) -> tuple[list[scoring.Entry], dict[str, list[Point]]]:
    """Rows of GROUPS, those that are refused without an error and a weight; and these by the reason why."""
    entries: list[scoring.Entry] = []
    reasons: dict[str, list[Point]] = {}
    for point in points:
        late = point.get("metric") == "ttft_s" and (point.get("batch") or 0) > MOST
        if point.get("group") not in GROUPS or point.get("metric") not in METRICS or late:
            continue
        asked = cleaned(point)
        entries.append(one := scoring.Entry(asked, point["group"], asked["hardware"], str(asked["config"].get("engine")), weight=0))
        try:
            one.chip = device_of(asked).name
            use = use_of(asked)
            one.error, one.weight = math.log(point["value"] / planned(asked, use)), 1
            one.label = "experts" if getattr(use.config, "n_experts", None) else "dense"
        except NotCovered as why:
            reasons.setdefault(str(why), []).append(point)
        except study.WRONG as error:
            reasons.setdefault(f"{type(error).__name__}: {error}".splitlines()[0], []).append(point)
    return entries, reasons


def band(value: float, *ends: float) -> str:
    return next((f"up to {end:4g}" for end in ends if value <= end), f"with more than {ends[-1]:g}")


BY: dict[str, Callable[[scoring.Entry], str]] = {
    "": lambda e: e.point["group"],
    "tensor degree": lambda e: str(e.point["config"].get("tp")),
    "new tokens": lambda e: band(e.point["config"].get("osl") or 0, 128, 256, 512, 1024),
    "chip": lambda e: e.chip,
    "engine": lambda e: e.program,
    "requests at once": lambda e: band(e.point["batch"] or 0, 1, 8, 32, 64, 128),
    "precision": lambda e: e.point["config"].get("precision") or "16 bits",
    "kind of model": lambda e: e.label or "not read",
    "prompt's tokens by new ones": lambda e: band((e.point["seq"] or 0) / (e.point["config"].get("osl") or 1), 1, 2, 8, 16),
}


def tables(entries: list[scoring.Entry]) -> Iterator[str]:
    """Errors of each metric, by what may be their cause: medians of rows, each once."""
    for metric, text in METRICS.items():
        mine = [e for e in entries if e.point["metric"] == metric]
        for title, key in BY.items() if mine else ():
            for e in mine:
                e.group = key(e)
            yield from ("", *scoring.lines(f"{text}{', by ' * bool(title)}{title}", mine))
