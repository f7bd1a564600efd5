"""What a model takes to use: weights, the cache of keys and values, logits; lower bounds of the time per token, on one
device or split over those of a node; and the compute-optimal size of a model, or number of tokens, for a budget of
operations. What a pass computes, reads and sums is traced (`plan.pass_tracing`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from gradus import hardware, models
from gradus.errors import UserError, did_you_mean
from gradus.hardware import Cluster, Device
from gradus.plan.collectives import collective_seconds
from gradus.plan.figures import known_figure
from gradus.plan.passes import Pass, Usage
from gradus.plan.roofline import op_seconds, parameters
from gradus.plan.store import stored, versions
from gradus.plan.work import Op
from gradus.recipe.schema import ModelConfig
from gradus.rows import Row
from gradus.text import duration, rate, size, table

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
PASS = 8192  # tokens of prompts in one pass: vLLM's and TensorRT-LLM's default on large GPUs
LEFT_OUT = "the prompt's activations, workspaces, the framework"


# ---------------------------------------------------------------- passes and the cache


@functools.lru_cache(maxsize=64)
def usage_of(config: ModelConfig, batch: int, tokens: int, source: int = 0) -> Usage:
    """Traced once, and kept on disk. batch: rows. tokens: of a row; of an image its patches. source: tokens that an
    encoder-decoder reads."""
    question = config.described(), batch, tokens, source, *versions(config.family)

    def trace() -> dict:
        from gradus.plan.pass_tracing import PassTracer  # half a second, which what is kept need not wait for

        return dataclasses.asdict(PassTracer(config, batch).usage(tokens, source))

    plain = stored("profiles", question, trace)
    passes = {name: Pass(**plain[name]) for name in ("prefill", "decode") if plain[name]}
    return Usage(**plain | passes)


# ---------------------------------------------------------------- memory, devices


@dataclasses.dataclass(frozen=True)
class Use:
    """A model in use. batch: rows decoded together. tokens: of a row, prompt and new ones. source: those of the other
    side of an encoder-decoder. bits: of a stored weight. precision: of computing, and of the cache. products: of linear
    layers' products, where that is another: fp8, fp4."""

    config: ModelConfig
    batch: int
    tokens: int
    source: int
    bits: int
    precision: str
    on: Cluster | None
    products: str = ""

    @property
    def devices(self) -> int:
        return self.on.n if self.on else 1

    @property
    def parts(self) -> int:
        """Devices among which keys and values are split."""
        return math.gcd(getattr(self.config, "n_kv_heads", None) or self.config.n_heads, self.devices)

    @property
    def conditions(self) -> dict[str, Any]:
        own = {"batch": self.batch, "seq_len": self.tokens, "bits": self.bits, "precision": self.precision}
        other = {"source_len": self.source, "devices": self.devices if self.devices > 1 else 0}
        return own | {name: value for name, value in other.items() if value}


def serving(
    config: ModelConfig, *, batch: int = 1, seq_len: int | None = None, bits: int | None = None,
    precision: str = "bf16", on: Cluster | None = None, new: int | None = None, rate: float | None = None,
) -> list[Row]:  # fmt: skip
    """Rows serving/<what>: weights, kv_per_token, kv_cache, cross_cache, logits, total (bytes, on each device); rule
    and rule_tokens, the rule of thumb and the tokens at which its 20 % are used up; device, the single one with the
    least memory that holds all; and where `on` holds it prefill_time, decode_time (s) and tokens_per_s: lower bounds,
    on several devices with what they send at the usual rate of their links; with new also requests_per_s, ttft and itl,
    as `expected`.

    batch: rows decoded together. seq_len: tokens per row, prompt and new ones, and of an encoder-decoder's source
    (None: all the model has positions for). bits: of a stored weight, where it is not that of `precision` (8, 4:
    quantized, their scales not counted). on: several devices split weights and heads among them (tensor parallelism);
    keys and values as far as their heads divide. new: tokens of the row that are an answer. rate: requests/s that
    arrive. Raises UserError for a length the model cannot take, and devices that it cannot be split over or whose peak
    is not known.
    """
    length = _length(config, seq_len)
    if on is not None and on.n > 1:
        _check_split(config, on)
    attention = models.lookup(config.family).attention
    source = length if attention == "cross" else 0
    if (new or rate) and not (on and attention == "causal" and 0 < (new or 0) < length):
        needs = "--on DEVICE, --new N below --length, and a model that continues text"
        raise UserError(f"--new and --rate: a request's time needs {needs}")
    use = Use(config, batch, length, source, bits or 8 * BYTES[precision], precision, on)
    usage, total = usage_of(config, batch, length, source), models.count(config)["total"]
    rows = _memory(use, usage, total)
    parts = {row.name.partition("/")[2]: row.value for row in rows if row.unit == "bytes"}
    need, weights = sum(parts.values()), total * use.bits / 8
    cache = (usage.own + usage.cross) * BYTES[precision]
    limited = (getattr(config, "window", None) or length) < length  # some layers keep no more than their window
    rows += [
        known_figure("serving/total", need, parts, without=LEFT_OUT),
        *_rule(total, use.bits, cache, 0 if limited else usage.own * BYTES[precision] // (batch * length)),
        _device(weights + cache + parts["logits"], 1.2 * weights, precision),
    ]
    if on is not None and need <= on.device.capacity:
        rows += _times(use, usage, parts.get("kv_cache", 0) + parts.get("cross_cache", 0))
        if new:
            inputs = {"batch": batch, "prompt": length - new, "new": new, "rate": rate}
            rows += [known_figure(f"serving/{key}", v, inputs, **inputs) for key, v in expected(use, new, rate).items()]
    for row in rows:
        row.conditions |= use.conditions
    return rows


def _length(config: ModelConfig, seq_len: int | None) -> int:
    if config.reads == "images":
        if seq_len is not None:
            why = "an image's length is its patches. Set model.image_size or model.patch_size"
            raise UserError(f"seq_len={seq_len}: {why}")
        return config.n_tokens
    most = config.longest
    if most is not None and (seq_len or 0) > most:
        raise UserError(f"seq_len={seq_len}: the model has {most} positions. Set seq_len={most} or fewer")
    return seq_len or config.seq_len


def _check_split(config: ModelConfig, on: Cluster) -> None:
    most = max(n for n in range(1, on.device.node + 1) if config.n_heads % n == 0)
    instead = f"Use --on {f'{most}x' if most > 1 else ''}{on.device.name}"
    if on.n > on.device.node:
        why = f"a node has {on.device.node}: beyond it the all-reduces of every token would cross the network"
        copies = "another copy of the model on every further node"
        raise UserError(f"--on {on.n}x{on.device.name}: {why}. {instead}, and {copies}")
    if config.n_heads % on.n:
        why = f"n_heads={config.n_heads} is not a multiple of {on.n}"
        raise UserError(f"--on {on.n}x{on.device.name}: {why}. {instead}")


def _memory(use: Use, usage: Usage, total: int) -> list[Row]:
    """The parts of a device's memory. total: parameters."""
    width, weights = BYTES[use.precision], total * use.bits / 8
    inputs = {"P": total, "Q": use.bits, "devices": use.devices}
    rows = [known_figure("serving/weights", weights / use.devices, inputs)]
    inputs = {"bytes": width, "parts": use.parts, "batch": use.batch}
    if usage.own:
        each = usage.own // (use.batch * use.tokens)
        own = {"elements": each, "tokens": use.tokens, **inputs}
        rows.append(known_figure("serving/kv_per_token", each * width // use.parts, own))
        rows.append(known_figure("serving/kv_cache", usage.own * width // use.parts, own))
    if usage.cross:
        cross = {"elements": usage.cross // use.batch // use.source, "source": use.source, **inputs}
        rows.append(known_figure("serving/cross_cache", usage.cross * width // use.parts, cross))
    inputs = {"batch": use.batch, "classes": usage.classes, "bytes": width}
    return [*rows, known_figure("serving/logits", use.batch * usage.classes * (width + 4), inputs)]


def _rule(total: int, bits: int, cache: int, each: int) -> list[Row]:
    """total: parameters. cache, each: bytes of keys and values, of all and of a token, 0 where that is no constant."""
    weights = total * bits / 8
    holds, part = cache <= 0.2 * weights, f"{cache / weights:.0%}"
    why = {} if holds else {"why": f"the cache alone is {part} of the weights: the rule knows neither batch nor length"}
    inputs = {"P": total, "Q": bits, "cache": cache, "20 % of the weights": 0.2 * weights}
    rows = [known_figure("serving/rule", 1.2 * weights, inputs, holds=holds, **why)]
    if each:
        inputs = {"weights": weights, "kv_per_token": each}
        rows.append(known_figure("serving/rule_tokens", int(0.2 * weights / each), inputs))
    return rows


def least(need: float, numbers: str) -> list[Device]:
    """The GPUs that hold `need` bytes and compute in `numbers`, the least memory first; of equals the cheapest, then
    the fastest. A laptop's card is not proposed."""
    holds = [d for d in hardware.cards() if numbers in d.peaks and d.capacity >= need]
    prices = {d.name: price.expected if (price := hardware.price(d)) else math.inf for d in holds}
    return sorted(holds, key=lambda d: (d.memory, prices[d.name], -d.peaks[numbers]))


def _device(need: float, rule: float, numbers: str) -> Row:
    fits, by_rule = ([d.name for d in least(n, numbers)] for n in (need, rule))
    formula = f"the least memory · usable part that is at least the total, of those that compute in {numbers}"
    conditions = {"by_rule": by_rule[0] if by_rule else "none", "fits": len(fits), "without": LEFT_OUT}
    name, inputs = fits[0] if fits else "none: split it over several", {"total": need, "fits": fits}
    return known_figure("serving/device", name, inputs, formula=f"{formula}; among equals the cheapest", **conditions)


# ---------------------------------------------------------------- time


def _times(use: Use, usage: Usage, cache: int) -> list[Row]:
    """Roofline bounds: no kernel is faster than its operations at the dense peak, nor than its bytes at the memory's
    bandwidth; what the devices send comes on top. cache: bytes on a device, which a new token reads."""
    device = use.on.device
    if use.precision not in device.peaks:
        known = did_you_mean(use.precision, device.peaks)
        raise UserError(f"{device.name}: its peak in {use.precision} is not known.{known}")
    if usage.decode is None:
        rows, rate_of = [_time("forward_time", usage.prefill, use, 0)], "samples"
    else:
        rows = [_time("prefill_time", usage.prefill, use, 0), _time("decode_time", usage.decode, use, cache)]
        rate_of = "tokens"
        if getattr(use.config, "n_experts", None):
            rows[-1].conditions["experts"] = "top_k read: rows of a batch that choose others read more"
    seconds = rows[-1].value
    inputs = {"batch": use.batch, "seconds": seconds}
    return [*rows, known_figure(f"serving/{rate_of}_per_s", use.batch / seconds, inputs, device=device.name)]


def _time(name: str, done: Pass, use: Use, cache: int) -> Row:
    """cache: bytes on a device that the pass reads."""
    device, n, peak = use.on.device, use.devices, use.on.device.peaks[use.precision]
    moved = done.weights * use.bits / 8 / n + cache
    payloads = [(elements * BYTES[use.precision], calls) for elements, calls in done.sums]
    sent = _sums(done, use)
    seconds = {"bandwidth": moved / device.bandwidth, "operations": done.operations / n / peak, "all-reduces": sent}
    inputs = {
        "operations": done.operations, "bytes": moved, "devices": n, "all-reduces": sum(calls for _, calls in payloads),
        "bytes of each": ", ".join(str(payload) for payload, _ in payloads), f"peak in {use.precision} (FLOP/s)": peak,
        "bandwidth (bytes/s)": device.bandwidth,
    }  # fmt: skip
    conditions = {"limit": max(seconds, key=seconds.get), "device": device.name, "bound": "lower"}
    least_time = max(seconds["bandwidth"], seconds["operations"]) + sent
    return known_figure(f"serving/{name}", least_time, inputs, **conditions)


def _sums(done: Pass, use: Use) -> float:
    """Seconds of a pass's all-reduces."""
    width = BYTES[use.precision]
    return sum(n * collective_seconds("all_reduce", size * width, use.devices, 1, use.on) for size, n in done.sums)


# ---------------------------------------------------------------- expected


def kernel_seconds(done: Pass, use: Use, cache: int = 0) -> float:
    """Seconds of a pass by what single kernels reach (`plan.roofline`), launched without waiting for the host (CUDA
    graphs): products, attention, and all else fused to one kernel between two products, which writes what the next one
    reads and reads what the last one wrote; and all-reduces. cache: as in `_time`."""
    device, n, width = use.on.device, use.devices, BYTES[use.precision]
    fit = dataclasses.replace(parameters(device, "")[0], cast=0.0)  # which those between fuse, too
    moved, seconds = cache, _sums(done, use)
    for kind, flops, shape, times in done.kernels:
        dtype, nbytes = use.precision, 0.0
        if kind == "matmul":
            experts, each, *sides = shape
            rows = flops / 2 / math.prod(sides)
            chosen = experts * (1 - (1 - 1 / experts) ** rows)  # one, or as many as all rows choose at random
            sides[sides[1] > sides[0]] /= n  # tensor parallelism cuts the longer one
            dtype, shape = use.products or dtype, (experts, each, *sides)
            nbytes = chosen * math.prod(sides) * use.bits / 8
            moved += times * rows * sum(sides) * width
        seconds += times * op_seconds(Op(kind, "", dtype, "forward", flops / n, nbytes, shape), device, fit)
    return seconds + moved / device.bandwidth / fit.bandwidth


def expected(use: Use, new: int, rate: float | None = None) -> dict[str, float]:
    """requests_per_s: the most that `use.batch` rows serve; ttft, itl: mean seconds to a request's first token and
    between its others, which wait for the prompts of requests beside it. rate: requests/s, which arrive at random and
    wait for a free row as in M/D/n (Sakasegawa 1977); no times where it is no less than what is served. None: a batch
    starts at once, and each request is followed by another."""
    n, width, start = use.batch, BYTES[use.precision], use.tokens - new
    beside = min(n, max(PASS // start, 1))
    prompt = kernel_seconds(usage_of(use.config, beside, start).prefill, use) / beside

    def step(rows: int) -> float:
        usage = usage_of(use.config, rows, start + new // 2)
        return kernel_seconds(usage.decode, use, usage.own * width // use.parts)

    full = step(n)
    most = n / (new * full + n * prompt)
    itl = full + (n - 1) * prompt / new
    if rate is None:
        return {"requests_per_s": most, "ttft": (n + 1) / 2 * prompt + full, "itl": itl}
    if rate >= most:
        return {"requests_per_s": most}
    alone = step(1)
    load, row = rate / most, (full - alone) / max(n - 1, 1)
    itl = min(itl, alone / (1 - rate * (prompt + row * new)))
    wait = load ** (math.sqrt(2 * n + 2) - 1) / (1 - load) / 2 / most
    return {"requests_per_s": most, "ttft": wait + prompt + itl, "itl": itl}


# ---------------------------------------------------------------- as text

PARTS = {
    "weights": "weights", "kv_cache": "cache of keys and values", "cross_cache": "cache of the source",
    "logits": "logits",
}  # fmt: skip


def lines(name: str, rows: list[Row], on: Cluster | None = None, images: bool = False) -> list[str]:
    """The rows of `serving` as a person reads them. images: whether the model reads images."""
    by_name = {row.name.removeprefix("serving/"): row for row in rows}
    total, rule = by_name["total"], by_name["rule"]
    c = total.conditions
    unit, tokens = ("image", "patches") if images else ("sequence", "tokens")
    source = f" and {c['source_len']:,} of source" if "source_len" in c else ""
    batch = f"{c['batch']} {unit}{'s' * (c['batch'] > 1)} of {c['seq_len']:,} {tokens}{source}"
    parameters = f"{rule.conditions['how']['inputs']['P']:,} parameters of {c['bits']} bits"
    until = by_name.get("rule_tokens")
    until = f"; its 20 % are {until.value:,} tokens of cache" if until else ""
    broken = rule.conditions.get("why", "").partition(":")[0]
    holds = f"which does not hold: {broken}" if broken else "which holds here"
    text = [
        f"{name}, to serve it: {parameters}, {batch} at a time",
        _fit(by_name, on),
        f"device    {_smallest(by_name['device'], on)}",
        f"1.2 rule  {size(rule.value)}: weights + 20 %, a rule of thumb, {holds}{until}",
    ]
    if "kv_per_token" in by_name:
        each = f"each token of each sequence{' on each device' * ('devices' in c)}"
        limit = "" if until else ", on average: layers with a window keep no more than it"
        text.append(f"cache     {size(by_name['kv_per_token'].value)} of keys and values for {each}{limit}")
    text += [f"how fast  {line}" for line in _how_fast(by_name, c, on, images)]
    if "requests_per_s" in by_name:
        text.append(_expected(by_name))
    return [*text, f"excluded  {c['without']}"]


def _expected(by_name: dict[str, Row]) -> str:
    c, most = by_name["requests_per_s"].conditions, f"at most {rate(by_name['requests_per_s'].value)} requests/s"
    if "itl" not in by_name:
        return f"SATURATED {c['rate']:g} requests/s would queue without end: {most} are served"
    ttft, itl = (duration(by_name[name].value) for name in ("ttft", "itl"))
    when = f"at {c['rate']:g} requests/s" if c["rate"] else "all at once"
    return f"expected  {when}: the first of {c['new']:,} new tokens after {ttft}, then one every {itl}; {most}"


def _fit(by_name: dict[str, Row], on: Cluster | None) -> str:
    need = by_name["total"].value
    parts = ", ".join(f"{text} {size(by_name[part].value)}" for part, text in PARTS.items() if part in by_name)
    if on is None:
        return f"memory    {size(need)}: {parts}"
    capacity = on.device.capacity
    over = f", {size(need - capacity)} too much" if need > capacity else ""
    each = f" on each of {on.n} × {on.device.name}" * (on.n > 1)
    share = f"{need / capacity:.0%}{over}"
    return f"{'NO FIT' if over else 'fits':9} {size(need)} of {size(capacity)}{each} ({share}): {parts}"


def _smallest(device: Row, on: Cluster | None) -> str:
    """The single device that holds it, and the rule's."""
    single = "no single device holds it; --on 8xDEVICE splits it over eight"
    if device.conditions["fits"]:
        one = "one device: " * bool(on and on.n > 1)
        single = f"{one}{device.value} is the smallest that holds it (among equals, the cheapest)"
    return f"{single}; by the 1.2 rule {device.conditions['by_rule']}"


def _how_fast(by_name: dict[str, Row], c: dict[str, Any], on: Cluster | None, images: bool) -> Iterator[str]:
    if "decode_time" in by_name:
        decode, prefill = by_name["decode_time"], by_name["prefill_time"]
        what, of_each = ("a prompt", "") if c["batch"] == 1 else (f"{c['batch']} prompts", " of each")
        tokens = c.get("source_len") or c["seq_len"]
        prompt = f"{what} of {tokens:,} tokens at least {duration(prefill.value)}"
        token = f"a token{of_each} at least {duration(decode.value)} (limit: {decode.conditions['limit']})"
        speed = f"at most {rate(by_name['tokens_per_s'].value)} tokens/s in total"
        yield f"{prompt}, then {token}: {speed}"
    elif "forward_time" in by_name:
        speed = f"{rate(by_name['samples_per_s'].value)} {'images' if images else 'samples'}/s"
        yield f"at least {duration(by_name['forward_time'].value)} per batch: at most {speed}"
    elif on is None:
        yield "give --on DEVICE"


# ---------------------------------------------------------------- compute-optimal sizes

FITS = {  # E, A, B, alpha, beta of L(N, D) = E + A / N^alpha + B / D^beta
    "Hoffmann 2022": ((1.69, 406.4, 410.7, 0.34, 0.28), "Hoffmann et al. 2022, section 3.3 and appendix D.3"),
    "Besiroglu 2024": (
        (1.8172, 482.01, 2085.43, 0.3478, 0.3658), "Besiroglu et al. 2024, table 1: a refit of the same runs",
    ),
}  # fmt: skip


def optimal(*, parameters: float | None = None, tokens: float | None = None) -> list[Row]:
    """Rows optimal/parameters, optimal/tokens, optimal/flops, optimal/tokens_per_parameter and optimal/loss
    (nats/token), by both fits, for one of the two arguments: N* = G·(C/6)^(β/(α+β)), D* = (C/6)/N*,
    G = (αA/βB)^(1/(α+β)), C = 6ND. The loss is that of the fits' data and tokenizer."""
    rows: list[Row] = []
    for fit, ((e, a, b, alpha, beta), source) in FITS.items():
        both = alpha + beta
        g = (alpha * a / (beta * b)) ** (1 / both)
        product = (parameters / g) ** (both / beta) if parameters else (tokens * g) ** (both / alpha)  # N · D
        n = g * product ** (beta / both)
        d = product / n
        known = {"N": parameters} if parameters else {"D": tokens}
        inputs = {"E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "G": g, **known}
        loss = e + a / n**alpha + b / d**beta
        values = {"parameters": n, "tokens": d, "flops": 6 * n * d, "tokens_per_parameter": d / n, "loss": loss}
        rows += [known_figure(f"optimal/{name}", v, inputs, source=source, fit=fit) for name, v in values.items()]
    return rows


def optimal_lines(name: str, parameters: int, tokens: float | None, rows: list[Row]) -> list[str]:
    """The rows of `optimal` as a table, a line for each fit."""
    what = f"{tokens:,.0f} tokens" if tokens else f"{name}: {parameters:,} parameters"
    body = [[fit, *(f"{row.value:.3g}" for row in rows if row.conditions["fit"] == fit)] for fit in FITS]
    head = ["fit", "parameters", "tokens", "FLOP", "tokens/parameter", "loss, nats"]
    how = "by two fits of the same runs, C = 6 N D (loss per token of their data and tokenizer)"
    return [f"{what}: compute-optimal {how}", "", *table(head, body, set(range(1, 6)))]
