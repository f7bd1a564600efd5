"""What a model takes to use: weights, the cache of keys and values, logits; lower bounds of the time a token, on one device or split over
those of a node; and how large a model, or how many tokens, a budget of operations is best spent on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradus import hardware, models
from gradus.errors import UserError, did_you_mean
from gradus.hardware import Cluster, Device
from gradus.hardware.tables import table
from gradus.plan.collectives import collective_seconds
from gradus.plan.counts import sizes
from gradus.plan.figures import known_figure
from gradus.plan.show import duration, rate, size
from gradus.recipe.schema import ModelConfig
from gradus.rows import Row

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
ENCODERS = ("bert", "vit")
LEFT_OUT = "the prompt's activations, workspaces, the framework"


# ---------------------------------------------------------------- the cache


def kv_per_token(config: ModelConfig, precision: str = "bf16") -> int:
    """Bytes of keys and values that a token leaves in a decoder's cache (layers/cache.py); in an encoder none."""
    return 0 if config.family in ENCODERS else 2 * _deep(config) * _kv_heads(config) * config.head_dim * BYTES[precision]


def cache_bytes(config: ModelConfig, batch: int, tokens: int, *, source_len: int = 0, precision: str = "bf16") -> tuple[int, int]:
    """(keys and values of `tokens` a row, those of the encoder's output), in bytes, as `model.new_cache` holds them.

    tokens: prompt and new ones, of an encoder-decoder the target's. An encoder's output is projected once for every layer and row.
    """
    each = kv_per_token(config, precision)
    return batch * tokens * each, batch * source_len * each if _two_sided(config) else 0


def _kv_heads(config: ModelConfig) -> int:
    return getattr(config, "n_kv_heads", None) or config.n_heads


def _deep(config: ModelConfig) -> int:
    """Layers that make tokens."""
    return getattr(config, "n_decoder_layers", None) or config.n_layers


def _two_sided(config: ModelConfig) -> bool:
    return config.family in ("t5", "seq2seq")


# ---------------------------------------------------------------- memory, devices


@dataclasses.dataclass(frozen=True)
class Use:
    config: ModelConfig
    batch: int  # rows decoded together
    tokens: int  # a row, prompt and new ones
    source: int  # of the other side, of encoder-decoders
    bits: int  # of a stored weight
    precision: str  # computed in, and of the cache
    on: Cluster | None
    split: int  # devices


def serving(
    config: ModelConfig, *, batch: int = 1, seq_len: int | None = None, bits: int | None = None, precision: str = "bf16",
    on: Cluster | None = None,
) -> list[Row]:  # fmt: skip
    """Rows serving/<what>: weights, kv_per_token, kv_cache, cross_cache, logits, total (bytes, on each device); rule and rule_tokens, the
    rule of thumb and the tokens at which its 20 % are used up; device, the single one with the least memory that holds all; and where `on`
    holds it prefill_time, decode_time (s) and tokens_per_s: of one device lower bounds, of several with what they send.

    batch: rows decoded together. seq_len: tokens a row, prompt and new ones, and of an encoder-decoder's source (None: all the model has
    positions for). bits: of a stored weight, where it is not that of `precision` (8, 4: quantized, their scales not counted). on: several
    devices split weights and heads among them (tensor parallelism); keys and values as far as their heads divide. Raises UserError for a
    length the model cannot take, and devices that it cannot be split over or whose peak is not known.
    """
    length = _length(config, seq_len)
    if on is not None and on.n > 1:
        _can_split(config, on)
    use = Use(config, batch, length, length * _two_sided(config), bits or 8 * BYTES[precision], precision, on, on.n if on else 1)
    total, t = models.count(config)["total"], use.split
    weights, logits = total * use.bits / 8, batch * _scores(config) * (BYTES[precision] + 4)
    own, cross = cache_bytes(config, batch, length, source_len=use.source, precision=precision)
    part = math.gcd(_kv_heads(config), t)
    given = {**sizes(config), "batch": batch, "tokens": length, "k": _kv_heads(config), "bytes": BYTES[precision], "parts": part}
    rows = [known_figure("serving/weights", weights / t, {"P": total, "Q": use.bits, "devices": t})]
    if config.family not in ENCODERS:
        rows.append(known_figure("serving/kv_per_token", kv_per_token(config, precision) // part, given))
        rows.append(known_figure("serving/kv_cache", own // part, given))
    if use.source:
        rows.append(known_figure("serving/cross_cache", cross // part, {**given, "source": length}))
    rows.append(known_figure("serving/logits", logits, {"batch": batch, "classes": _scores(config), "bytes": BYTES[precision]}))
    parts = {row.name.partition("/")[2]: row.value for row in rows if row.unit == "bytes"}
    need = sum(parts.values())
    rows.append(known_figure("serving/total", need, parts, without=LEFT_OUT))
    rows += [*_rule(use, total, own + cross), _device(weights + own + cross + logits, 1.2 * weights, precision)]
    if on is not None and need <= on.device.capacity:
        rows += _times(use, (own + cross) // part)
    where = {"batch": batch, "seq_len": length, "bits": use.bits, "precision": precision}
    where |= {**({"source_len": length} if use.source else {}), **({"devices": t} if t > 1 else {})}
    for row in rows:
        row.conditions |= where
    return rows


def _length(config: ModelConfig, seq_len: int | None) -> int:
    if config.family == "vit" and seq_len is not None:
        raise UserError(f"seq_len={seq_len}: an image's length is its patches. Set model.image_size or model.patch_size")
    if config.family == "vit":
        return (config.image_size // config.patch_size) ** 2 + (config.pool == "class_token")
    if config.family != "t5" and (seq_len or 0) > config.seq_len:
        raise UserError(f"seq_len={seq_len}: the model has {config.seq_len} positions. Set seq_len={config.seq_len} or fewer")
    return seq_len or config.seq_len


def _can_split(config: ModelConfig, on: Cluster) -> None:
    most = max(n for n in range(1, on.device.node + 1) if config.n_heads % n == 0)
    instead = f"Use --on {f'{most}x' if most > 1 else ''}{on.device.name}"
    if on.n > on.device.node:
        why = f"a node has {on.device.node}: beyond it the all-reduces of every token would cross the network"
        raise UserError(f"--on {on.n}x{on.device.name}: {why}. {instead}, and another copy of the model on every further node")
    if config.n_heads % on.n:
        raise UserError(f"--on {on.n}x{on.device.name}: n_heads={config.n_heads} is not a multiple of {on.n}. {instead}")


def _scores(config: ModelConfig) -> int:
    """What a row's answer has: words, or classes, or the width."""
    if config.family == "vit" or getattr(config, "head", None) == "classification":
        return config.n_classes or config.d_model
    if getattr(config, "head", None) == "none":
        return config.d_model
    return getattr(config, "target_vocab_size", None) or config.vocab_size


def _rule(use: Use, total: int, cache: int) -> list[Row]:
    weights, each = total * use.bits / 8, kv_per_token(use.config, use.precision)
    holds = cache <= 0.2 * weights
    why = {} if holds else {"why": f"the cache alone is {cache / weights:.0%} of the weights: the rule knows neither batch nor length"}
    given = {"P": total, "Q": use.bits, "cache": cache, "20 % of the weights": 0.2 * weights}
    rows = [known_figure("serving/rule", 1.2 * weights, given, holds=holds, **why)]
    if each:
        rows.append(known_figure("serving/rule_tokens", int(0.2 * weights / each), {"weights": weights, "kv_per_token": each}))
    return rows


def least(need: float, numbers: str) -> list[Device]:
    """The GPUs that hold `need` bytes and compute in `numbers`, the least memory first; of equals the cheapest, then the fastest."""

    holds = [d for d in hardware.devices().values() if d.kind == "gpu" and numbers in d.peaks and d.capacity >= need]
    money = {d.name: price.expected if (price := hardware.price(d)) else math.inf for d in holds}
    return sorted(holds, key=lambda d: (d.memory, money[d.name], -d.peaks[numbers]))


def _device(need: float, rule: float, numbers: str) -> Row:
    fits, by_rule = ([d.name for d in least(n, numbers)] for n in (need, rule))
    text = f"the least memory · usable part that is at least the total, of those that compute in {numbers}; among equals the cheapest"
    more = {"by_rule": by_rule[0] if by_rule else "none", "fits": len(fits), "without": LEFT_OUT}
    name = fits[0] if fits else "none: split it over several"
    return known_figure("serving/device", name, {"total": need, "fits": fits}, formula=text, **more)


# ---------------------------------------------------------------- time


def decode_weights(config: ModelConfig) -> int:
    """The weights a new token is multiplied by, with experts only top_k of them; of encoder-decoders the decoder's without the projections
    of the encoder's output, which are done once."""
    cross = 2 * config.d_model * config.n_heads * config.head_dim if _two_sided(config) else 0
    return _deep(config) * (_layer(config) + cross) + _scores(config) * config.d_model


def _layer(config: ModelConfig) -> int:
    """The weights of a layer, without cross-attention, that a token is multiplied by."""
    h, experts = config.d_model, getattr(config, "n_experts", None) or 0
    matrices = 3 if config.family == "llama" or getattr(config, "gated", False) else 2
    attention = 2 * h * config.head_dim * (config.n_heads + _kv_heads(config))
    return attention + matrices * h * config.d_ff * (config.top_k if experts else 1) + h * experts


def _encoder_head(config: ModelConfig, places: int) -> int:
    """Weights behind (of ViT: and before) an encoder's blocks, times the places they act on."""
    h, head = config.d_model, getattr(config, "head", None)
    if config.family == "vit":
        return config.n_channels * config.image_size**2 * h + h * (config.n_classes or 0)  # the patches have all pixels
    classes = {"pretraining": 2, "classification": config.n_classes}.get(head)
    words = places * (h * h + h * config.vocab_size) if head in ("masked_lm", "pretraining") else 0
    return words + (h * h + h * classes if classes else 0)


class Pass(NamedTuple):
    """What one pass over a batch computes and reads, over all devices."""

    name: str
    text: str
    operations: float
    weights: int  # that are read
    sums: int  # all-reduces, where several devices split it
    places: int  # of a row in each


def _times(use: Use, cache: int) -> list[Row]:
    """Roofline bounds: no kernel is faster than its operations at the dense peak, nor than its bytes at the memory's bandwidth; what the
    devices send comes on top. cache: bytes on a device, which a new token reads."""
    device, t = use.on.device, use.split
    if use.precision not in device.peaks:
        raise UserError(f"{device.name}: its peak in {use.precision} is not known.{did_you_mean(use.precision, device.peaks)}")
    peak, rows = device.peaks[use.precision], []
    for one in passes(use):
        decoding = one.name == "decode_time"
        moved = one.weights * use.bits / 8 / t + cache * decoding
        payload = use.batch * one.places * use.config.d_model * BYTES[use.precision]
        sent = one.sums * collective_seconds("all_reduce", payload, t, 1, use.on)  # of one device: 0
        seconds = {"bandwidth": moved / device.bandwidth, "operations": one.operations / t / peak, "all-reduces": sent}
        given = {"operations": one.operations, "bytes": moved, "devices": t, "all-reduces": one.sums, "bytes of each": payload,
                 f"peak in {use.precision} (FLOP/s)": peak, "bandwidth (bytes/s)": device.bandwidth}  # fmt: skip
        text = f"max(batch · ({one.text}) / devices / peak, bytes / bandwidth) + all-reduces"
        more = {"limit": max(seconds, key=seconds.get), "device": device.name, **({"bound": "lower"} if t == 1 else {})}
        if decoding and getattr(use.config, "n_experts", None):
            more["experts"] = "top_k read: rows of a batch that choose others read more"
        found = max(seconds["bandwidth"], seconds["operations"]) + sent
        rows.append(known_figure(f"serving/{one.name}", found, given, formula=text, **more))
    name, given = f"serving/{'tokens' if decoding else 'samples'}_per_s", {"batch": use.batch, "seconds": found}
    return [*rows, known_figure(name, use.batch / found, given, device=device.name)]


def passes(use: Use) -> Iterator[Pass]:
    """Of a decoder prefill_time, then decode_time, a token of every row; of an encoder forward_time."""
    c, s = use.config, use.tokens
    wide, layers, deep = c.n_heads * c.head_dim, c.n_layers, _deep(c)
    sums = 2 * layers + (c.family != "vit")  # after attention and feed-forward network; and of the words' table, cut by words
    if c.family in ENCODERS:
        operations = 2 * (layers * (_layer(c) * s + 2 * wide * s**2) + _encoder_head(c, s))
        yield Pass("forward_time", "2·N_mm·s + 4·L·a·d·s²", use.batch * operations, models.count(c)["total"], sums, s)
        return
    n, head, both = decode_weights(c), _scores(c) * c.d_model, _two_sided(c)
    if both:  # the encoder, and the decoder's keys and values of its output
        acting = layers * _layer(c) + deep * 2 * c.d_model * wide
        operations = 2 * acting * use.source + 4 * layers * wide * use.source**2
        yield Pass("prefill_time", "operations on the source", use.batch * operations, acting, sums, use.source)
    else:  # causal: half of the scores; the last position's logits
        operations = 2 * (n - head) * s + 2 * head + 2 * layers * wide * s**2
        yield Pass("prefill_time", "2·(N_mm - hV)·s + 2hV + 2·L·a·d·s²", use.batch * operations, n, sums, s)
    operations = 2 * n + 4 * deep * wide * (s + use.source)
    yield Pass("decode_time", "2·N + 4·L·a·d·tokens", use.batch * operations, n, (2 + both) * deep + 1, 1)


# ---------------------------------------------------------------- as text


def lines(name: str, rows: list[Row], on: Cluster | None = None, images: bool = False) -> list[str]:
    """The rows of `serving` as a person reads them. images: what is put in are images."""
    found = {row.name.removeprefix("serving/"): row for row in rows}
    total, rule, device = found["total"], found["rule"], found["device"]
    c, need = total.conditions, total.value
    named = {"weights": "weights", "kv_cache": "cache of keys and values", "cross_cache": "cache of the source", "logits": "logits"}
    parts = ", ".join(f"{text} {size(found[k].value)}" for k, text in named.items() if k in found)
    of, places = ("image", "patches") if images else ("sequence", "tokens")
    held = f"{c['batch']} {of}{'s' * (c['batch'] > 1)} of {c['seq_len']:,} {places}"
    held += f" and {c['source_len']:,} of source" if "source_len" in c else ""
    answer = [f"{name}, to serve it: {rule.conditions['how']['inputs']['P']:,} parameters of {c['bits']} bits, {held} at a time"]
    if on is None:
        answer.append(f"memory    {size(need)}: {parts}")
    else:
        capacity = on.device.capacity
        over = f", {size(need - capacity)} too much" if need > capacity else ""
        each = f" on each of {on.n} × {on.device.name}" * (on.n > 1)
        answer.append(f"{'NO FIT' if over else 'fits':9} {size(need)} of {size(capacity)}{each} ({need / capacity:.0%}{over}): {parts}")
    single = f"{device.value} is the smallest that holds it (among equals, the cheapest)"
    single = f"{'one device: ' * bool(on and on.n > 1)}{single}" if device.conditions["fits"] else "no single device holds it; --on 8xDEVICE splits it over eight"
    holds = "which holds here" if rule.conditions["holds"] else f"which does not hold: {rule.conditions['why'].partition(':')[0]}"
    until = f"; its 20 % are {found['rule_tokens'].value:,} tokens of cache" if "rule_tokens" in found else ""
    answer.append(f"device    {single}; by the 1.2 rule {device.conditions['by_rule']}")
    answer.append(f"1.2 rule  {size(rule.value)}: weights + 20 %, a rule of thumb, {holds}{until}")
    if "kv_per_token" in found:
        each = " on each device" * ("devices" in c)
        answer.append(f"cache     {size(found['kv_per_token'].value)} of keys and values for each token of each sequence{each}")
    answer += [f"how fast  {line}" for line in _how_fast(found, c, on, images)]
    return [*answer, f"excluded  {c['without']}"]


def _how_fast(found: dict[str, Row], c: dict[str, Any], on: Cluster | None, images: bool) -> Iterator[str]:
    least, most = ("about", "about") if "devices" in c else ("at least", "at most")
    if "decode_time" in found:
        decode, prefill = found["decode_time"], found["prefill_time"]
        what, of_each = ("a prompt", "") if c["batch"] == 1 else (f"{c['batch']} prompts", " of each")
        prompt = f"{what} of {c.get('source_len') or c['seq_len']:,} tokens {least} {duration(prefill.value)}"
        limit, speed = decode.conditions["limit"], rate(found["tokens_per_s"].value)
        yield f"{prompt}, then a token{of_each} {least} {duration(decode.value)} (limit: {limit}): {most} {speed} tokens/s in total"
    elif "forward_time" in found:
        speed, forward = rate(found["samples_per_s"].value), duration(found["forward_time"].value)
        yield f"{least} {forward} per batch: {most} {speed} {'images' if images else 'samples'}/s"
    elif on is None:
        yield "give --on DEVICE"


# ---------------------------------------------------------------- compute-optimal sizes

FITS = {  # E, A, B, alpha, beta of L(N, D) = E + A / N^alpha + B / D^beta
    "Hoffmann 2022": ((1.69, 406.4, 410.7, 0.34, 0.28), "Hoffmann et al. 2022, section 3.3 and appendix D.3"),
    "Besiroglu 2024": ((1.8172, 482.01, 2085.43, 0.3478, 0.3658), "Besiroglu et al. 2024, table 1: a refit of the same runs"),
}


def optimal(*, parameters: float | None = None, tokens: float | None = None) -> list[Row]:
    """Rows optimal/parameters, optimal/tokens, optimal/flops, optimal/tokens_per_parameter and optimal/loss (nats/token), by both fits,
    for the one of the two that is given: N* = G·(C/6)^(β/(α+β)), D* = (C/6)/N*, G = (αA/βB)^(1/(α+β)), C = 6ND. The loss is that of
    the fits' data and tokenizer."""
    rows: list[Row] = []
    for fit, ((e, a, b, alpha, beta), source) in FITS.items():
        g, all_of = (alpha * a / (beta * b)) ** (1 / (alpha + beta)), alpha + beta
        product = (parameters / g) ** (all_of / beta) if parameters else (tokens * g) ** (all_of / alpha)  # N · D
        n = g * product ** (beta / all_of)
        d = product / n
        given = {"E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "G": g, **({"N": parameters} if parameters else {"D": tokens})}
        loss = e + a / n**alpha + b / d**beta
        found = {"parameters": n, "tokens": d, "flops": 6 * n * d, "tokens_per_parameter": d / n, "loss": loss}
        rows += [known_figure(f"optimal/{name}", value, given, source=source, fit=fit) for name, value in found.items()]
    return rows


def optimal_lines(name: str, parameters: int, tokens: float | None, rows: list[Row]) -> list[str]:
    """The rows of `optimal` as a table, a line a fit."""
    what = f"{tokens:,.0f} tokens" if tokens else f"{name}: {parameters:,} parameters"
    body = [[fit, *(f"{row.value:.3g}" for row in rows if row.conditions["fit"] == fit)] for fit in FITS]
    head = ["fit", "parameters", "tokens", "FLOP", "tokens/parameter", "loss, nats"]
    title = f"{what}: compute-optimal by two fits of the same runs, C = 6 N D (loss per token of their data and tokenizer)"
    return [title, "", *table(head, body, set(range(1, 6)))]
