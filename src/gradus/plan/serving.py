"""What a model takes to use: weights, the cache of keys and values, logits; lower bounds of the time a token; and how large a model, or how
many tokens, a budget of operations is best spent on."""

from __future__ import annotations

import math
from typing import Any

from gradus import models
from gradus.errors import UserError, did_you_mean
from gradus.hardware import Device
from gradus.hardware.tables import table
from gradus.plan.counts import matmul_weights, sizes
from gradus.plan.figures import figure
from gradus.recipe.schema import ModelConfig
from gradus.rows import Row

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
RULE = 'rule of thumb: M = P · 4 bytes / (32 / Q) · 1.2, "an overhead of 20 %"'
POPE = "Pope et al. 2022, section 2 and appendix A.1"
ENCODERS = ("bert", "vit")


# ---------------------------------------------------------------- the cache


def kv_per_token(config: ModelConfig, precision: str = "bf16") -> int:
    """Bytes of keys and values that a token of a decoder leaves in the cache: 2 · L · k · d · bytes (layers/cache.py); encoders leave none."""
    if config.family in ENCODERS:
        return 0
    layers = getattr(config, "n_decoder_layers", None) or config.n_layers
    return 2 * layers * _kv_heads(config) * config.head_dim * BYTES[precision]


def cache_bytes(config: ModelConfig, batch: int, tokens: int, *, source_len: int = 0, precision: str = "bf16") -> tuple[int, int]:
    """(keys and values of `tokens` a row, those of the encoder's output), in bytes, as `model.new_cache` holds them.

    tokens: prompt and new ones, of an encoder-decoder the target's. An encoder's output is projected once for every layer and row.
    """
    each = kv_per_token(config, precision)
    return batch * tokens * each, batch * source_len * each if config.family in ("t5", "seq2seq") else 0


def _kv_heads(config: ModelConfig) -> int:
    return getattr(config, "n_kv_heads", None) or config.n_heads


# ---------------------------------------------------------------- memory, devices, time


def serving(
    config: ModelConfig,
    *,
    batch: int = 1,
    seq_len: int | None = None,
    source_len: int | None = None,
    bits: int | None = None,
    precision: str = "bf16",
    cache_precision: str | None = None,
    device: Device | str | None = None,
    path: Any = None,
) -> list[Row]:
    """Rows serving/<what>: weights, kv_per_token, kv_cache, cross_cache, logits, total (bytes, on one device); rule and rule_tokens, the
    article's rule and the tokens at which its 20 % are used up; device, the one with the least memory that holds the total; and with a
    `device` that holds it the lower bounds prefill_time, decode_time (s) and tokens_per_s.

    batch: rows decoded together. seq_len: tokens a row, prompt and new ones (None: all the model has positions for). source_len: the
    source's, of encoder-decoders (None: seq_len). bits: of a stored weight, where it is not that of `precision` (8, 4: quantised, their
    scales not counted); `precision` is then what is computed in, and of the cache unless cache_precision says another. path: the user's
    hardware file, if not the usual one. Raises UserError for lengths the model cannot take and precisions that are not known.
    """
    from gradus import hardware

    for name, value in (("batch", batch), ("seq_len", seq_len), ("source_len", source_len), ("bits", bits)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: must be 1 or more")
    if bits is not None and bits > 32:
        raise UserError(f"bits={bits}: of a weight, 32 or fewer. Set bits=8 or bits=4")
    cached = cache_precision or precision
    for name, value in (("precision", precision), ("cache_precision", cached)):
        if value not in BYTES:
            raise UserError(f"{name}={value}: not known.{did_you_mean(value, BYTES)}")
    both = config.family in ("t5", "seq2seq")
    length, source = _lengths(config, seq_len, source_len, both)
    bits = bits or 8 * BYTES[precision]
    if isinstance(device, str):
        device = hardware.find(device, path)

    total = models.count(config)["total"]
    given = {**sizes(config), "batch": batch, "tokens": length, **({"source": source} if both else {})}
    where = {"batch": batch, "seq_len": length, "bits": bits, "precision": precision, "cache": cached, **({"source_len": source} if both else {})}
    weights = total * bits / 8
    rows = [figure("serving/weights", weights, "bytes", "P · Q / 8", {"P": total, "Q": bits}, POPE, **where)]
    own, cross = cache_bytes(config, batch, length, source_len=source, precision=cached)
    if config.family not in ENCODERS:
        each = kv_per_token(config, cached)
        inputs = {**given, "k": _kv_heads(config), "bytes": BYTES[cached]}
        rows.append(figure("serving/kv_per_token", each, "bytes/token", "2 · L · k · d · bytes", inputs, POPE, **where))
        rows.append(figure("serving/kv_cache", own, "bytes", "2 · L · k · d · bytes · tokens · batch", inputs, POPE, **where))
        if both:
            text = "2 · L_d · a · d · bytes · source · batch: keys and values of the encoder's output"
            rows.append(figure("serving/cross_cache", cross, "bytes", text, inputs, "Raffel et al. 2020, section 2.1", **where))
    scores = _scores(config)
    logits = batch * scores * (BYTES[precision] + 4)
    text = "batch · classes · (bytes + 4): the scores of each row's last place, and their fp32 copy"
    rows.append(figure("serving/logits", logits, "bytes", text, {"batch": batch, "classes": scores, "bytes": BYTES[precision]}, "", **where))
    need = weights + own + cross + logits
    parts = {"weights": weights, "kv_cache": own, **({"cross_cache": cross} if both else {}), "logits": logits}
    left_out = "the prompt's activations, workspaces, the framework"
    rows.append(figure("serving/total", need, "bytes", "sum of the parts", parts, "", without=left_out, **where))
    rows += _rule(total, bits, own + cross, kv_per_token(config, cached), where)
    rows.append(_device(need, 1.2 * weights, precision, path, left_out, where))
    if device is not None and need <= device.capacity:
        rows += _times(config, device, batch, length, source, bits, precision, own + cross, where)
    return rows


def _lengths(config: ModelConfig, seq_len: int | None, source_len: int | None, both: bool) -> tuple[int, int]:
    if source_len is not None and not both:
        raise UserError(f"source_len={source_len}: family {config.family} has no source. It is for t5 and seq2seq")
    if config.family == "vit":
        if seq_len is not None:
            raise UserError(f"seq_len={seq_len}: an image's length is its patches. Set model.image_size or model.patch_size")
        return (config.image_size // config.patch_size) ** 2 + (config.pool == "class_token"), 0
    length = seq_len or config.seq_len
    source = (source_len or length) if both else 0
    if config.family != "t5" and max(length, source) > config.seq_len:
        raise UserError(f"seq_len={max(length, source)}: the model has {config.seq_len} positions. Set seq_len={config.seq_len} or fewer")
    return length, source


def _scores(config: ModelConfig) -> int:
    """What a row's answer has: words, or classes, or the width."""
    if config.family == "vit" or getattr(config, "head", None) == "classification":
        return config.n_classes or config.d_model
    if getattr(config, "head", None) == "none":
        return config.d_model
    return getattr(config, "target_vocab_size", None) or config.vocab_size


def _rule(total: int, bits: int, cache: int, each: int, where: dict) -> list[Row]:
    weights = total * bits / 8
    rule = total * 4 / (32 / bits) * 1.2
    holds = cache <= 0.2 * weights
    why = "" if holds else f"the cache alone is {cache / weights:.0%} of the weights: the rule knows neither batch nor length"
    given = {"P": total, "Q": bits, "cache": cache, "20 % of the weights": 0.2 * weights}
    rows = [figure("serving/rule", rule, "bytes", "P · 4 / (32 / Q) · 1.2", given, RULE, holds=holds, **({"why": why} if why else {}), **where)]
    if each:
        text = "0.2 · weights / kv_per_token: tokens, over all rows, whose keys and values take up the 20 %"
        given = {"weights": weights, "kv_per_token": each}
        rows.append(figure("serving/rule_tokens", int(0.2 * weights / each), "tokens", text, given, RULE, **where))
    return rows


def least(need: float, numbers: str, path: Any = None) -> list[Device]:
    """The GPUs that hold `need` bytes and compute in `numbers`, that with the least memory first; of equals the cheapest, then the fastest."""
    from gradus import hardware

    def key(d: Device) -> tuple:
        price = hardware.price(d)
        return d.memory, price is None, price.expected if price else 0.0, -d.peaks[numbers]

    return sorted((d for d in hardware.devices(path).values() if d.kind == "gpu" and numbers in d.peaks and d.capacity >= need), key=key)


def _device(need: float, rule: float, numbers: str, path: Any, left_out: str, where: dict) -> Row:
    fits, by_rule = ([d.name for d in least(n, numbers, path)] for n in (need, rule))
    text = f"the least memory · usable part that is at least the total, of those that compute in {numbers}; of equals the cheapest"
    given = {"total": need, "fits": fits}
    more = {"by_rule": by_rule[0] if by_rule else "none", "fits": len(fits), "without": left_out}
    return figure("serving/device", fits[0] if fits else "none: split it over several", "", text, given, "the hardware file", **more, **where)


def decode_weights(config: ModelConfig) -> int:
    """The weights a new token is multiplied by: of decoders N_mm (with experts only top_k of them), of encoder-decoders the decoder's
    without the projections of the encoder's output, which are done once."""
    if config.family in ("gpt", "llama"):
        return matmul_weights(config)
    h, wide = config.d_model, config.n_heads * config.head_dim
    ff = (3 if getattr(config, "gated", False) else 2) * h * config.d_ff
    return (config.n_decoder_layers or config.n_layers) * (4 * h * wide + 2 * h * wide + ff) + _scores(config) * h


def _times(
    config: ModelConfig, device: Device, batch: int, length: int, source: int, bits: int, precision: str, cache: int, where: dict
) -> list[Row]:
    """Roofline bounds: no kernel is faster than its operations at the dense peak, nor than its bytes at the memory's bandwidth."""
    if precision not in device.peaks:
        raise UserError(f"{device.name}: its peak in {precision} is not known.{did_you_mean(precision, device.peaks)}")
    peak, bandwidth = device.peaks[precision], device.bandwidth
    machine = {f"peak in {precision} (FLOP/s)": peak, "bandwidth (bytes/s)": bandwidth}
    h, wide, layers = config.d_model, config.n_heads * config.head_dim, config.n_layers
    both, where = bool(source), {**where, "device": device.name, "bound": "lower"}
    if config.family in ENCODERS or both:
        from gradus.plan.counts import Shape, closed_form

        if both:
            operations = closed_form(config, Shape(source)) // 3  # the encoder, and the decoder's keys and values of its output
            read = (closed_form(config, Shape(1)) - 12 * layers * wide) // 6
            text = "max(batch · operations on the source / peak, weights that act on it / bandwidth)"
        else:
            operations = closed_form(config, Shape(length, selected=length)) // 3
            read = models.count(config)["total"]
            text = "max(batch · (2·N_mm·s + 4·L·a·d·s²) / peak, weights / bandwidth)"
    else:
        n, head = matmul_weights(config), config.vocab_size * h
        operations = 2 * (n - head) * length + 2 * head + 2 * layers * wide * length**2  # causal: half of the scores; the last place's logits
        read = n
        text = "max(batch · (2·(N_mm - hV)·s + 2hV + 2·L·a·d·s²) / peak, weights / bandwidth)"
    given = {"operations a row": operations, "batch": batch, "weights (bytes)": read * bits / 8, **machine}
    prefill = max(batch * operations / peak, read * bits / 8 / bandwidth)
    name = "serving/forward_time" if config.family in ENCODERS else "serving/prefill_time"
    rows = [figure(name, prefill, "s", text, given, POPE, **where)]
    if config.family in ENCODERS:
        rows.append(figure("serving/samples_per_s", batch / prefill, "samples/s", "batch / forward_time, at most", {}, POPE, **where))
        return rows
    n = decode_weights(config)
    pairs = 4 * (getattr(config, "n_decoder_layers", None) or layers) * wide * (length + source)
    operations, moved = batch * (2 * n + pairs), n * bits / 8 + cache
    given = {"weights a token meets": n, "bits": bits, "cache (bytes)": cache, "operations": operations, **machine}
    note = {"experts": "top_k read: rows of a batch that choose others read more"} if getattr(config, "n_experts", None) else {}
    decode = max(operations / peak, moved / bandwidth)
    text = "max(batch · (2·N + 4·L·a·d·tokens) / peak, (weights + cache) / bandwidth)"
    limit = "bandwidth" if moved / bandwidth >= operations / peak else "operations"
    rows.append(figure("serving/decode_time", decode, "s/token", text, given, POPE, limit=limit, **note, **where))
    rows.append(figure("serving/tokens_per_s", batch / decode, "tokens/s", "batch / decode_time, at most", {"batch": batch}, POPE, **where))
    return rows


def lines(name: str, rows: list[Row], device: Device | None = None, images: bool = False) -> list[str]:
    """The rows of `serving` as a person reads them. images: what is put in are images."""
    from gradus.plan.show import duration, rate, size

    found = {row.name.removeprefix("serving/"): row for row in rows}
    total, rule, least = found["total"], found["rule"], found["device"]
    c, need = total.conditions, total.value
    parts = [f"{text} {size(found[k].value)}" for k, text in PARTS.items() if k in found]
    held = f"{c['batch']} {'image' if images else 'sequence'}{'s' * (c['batch'] > 1)} of {c['seq_len']:,} {'patches' if images else 'tokens'}"
    held += f" and {c['source_len']:,} of source" if c.get("source_len") else ""
    answer = [f"{name}, to use it: {weights_of(found):,} parameters of {c['bits']} bits, {held} at a time"]
    if device is not None:
        capacity = device.capacity
        over = f", {size(need - capacity)} too much" if need > capacity else ""
        answer.append(f"{'NO FIT' if over else 'fits':9} {size(need)} of {size(capacity)} ({need / capacity:.0%}{over}): {', '.join(parts)}")
    else:
        answer.append(f"memory    {size(need)}: {', '.join(parts)}")
    device_said = f"{least.value} has the least memory of those that hold it (of equals the cheapest)"
    device_said = device_said if least.conditions["fits"] else "no single one holds it"
    answer.append(f"device    {device_said}; by the 1.2 rule {least.conditions['by_rule']}")
    share = cache_of(found) / found["weights"].value
    holds = "which holds here" if rule.conditions["holds"] else f"which does not hold: the cache alone is {share:.0%} of the weights"
    until = f"; its 20 % are {found['rule_tokens'].value:,} tokens of cache" if "rule_tokens" in found else ""
    answer.append(f"1.2 rule  {size(rule.value)}: weights + 20 %, {holds}{until}")
    if "kv_per_token" in found:
        answer.append(f"cache     {size(found['kv_per_token'].value)} of keys and values for each token of each sequence")
    if "decode_time" in found:
        decode, prefill = found["decode_time"], found["prefill_time"]
        what, of_each = ("a prompt", "") if c["batch"] == 1 else (f"{c['batch']} prompts", " of each")
        prompt = f"{what} of {c.get('source_len') or c['seq_len']:,} tokens at least {duration(prefill.value)}"
        said = f"{prompt}, then a token{of_each} at least {duration(decode.value)}"
        answer.append(f"how fast  {said} (limit: {decode.conditions['limit']}): at most {rate(found['tokens_per_s'].value)} tokens/s in all")
    elif "forward_time" in found:
        speed = rate(found["samples_per_s"].value)
        answer.append(f"how fast  at least {duration(found['forward_time'].value)} a batch: at most {speed} {'images' if images else 'samples'}/s")
    elif device is None:
        answer.append("how fast  say --on DEVICE")
    return [*answer, f"not in it {c['without']}"]


PARTS = {"weights": "weights", "kv_cache": "cache of keys and values", "cross_cache": "cache of the source", "logits": "logits"}


def cache_of(found: dict[str, Row]) -> float:
    return sum(found[k].value for k in ("kv_cache", "cross_cache") if k in found)


def weights_of(found: dict[str, Row]) -> int:
    return found["weights"].conditions["how"]["inputs"]["P"]


def optimal_lines(name: str, parameters: int, tokens: float | None, rows: list[Row]) -> list[str]:
    """The rows of `optimal` as a table, a line a fit."""
    what = f"{tokens:,.0f} tokens" if tokens else f"{name}: {parameters:,} parameters"
    answer = [f"{what}: compute-optimal by two fits of the same runs, C = 6 N D (their data and tokenizer)", ""]
    body = []
    for fit in FITS:
        of = {row.name.removeprefix("optimal/"): row.value for row in rows if row.conditions["fit"] == fit}
        figures = (f"{of[k]:.3g}" for k in ("parameters", "tokens", "tokens_per_parameter", "flops", "loss"))
        body.append([fit, *figures])
    return [*answer, *table(["fit", "parameters", "tokens", "tokens a parameter", "FLOP", "loss, nats a token"], body, set(range(1, 6)))]


# ---------------------------------------------------------------- compute-optimal sizes

FITS = {  # E, A, B, alpha, beta of L(N, D) = E + A / N^alpha + B / D^beta
    "Hoffmann 2022": ((1.69, 406.4, 410.7, 0.34, 0.28), "Hoffmann et al. 2022, section 3.3 and appendix D.3"),
    "Besiroglu 2024": ((1.8172, 482.01, 2085.43, 0.3478, 0.3658), "Besiroglu et al. 2024, table 1: a refit of the same runs"),
}


def optimal(*, flops: float | None = None, parameters: float | None = None, tokens: float | None = None) -> list[Row]:
    """Rows optimal/parameters, optimal/tokens, optimal/flops, optimal/tokens_per_parameter and optimal/loss (nats/token), by both fits, for
    the one of the three that is given: N* = G·(C/6)^(β/(α+β)), D* = (C/6)/N*, G = (αA/βB)^(1/(α+β)), C = 6ND.

    The loss is that of the fits' data and tokenizer. Raises UserError unless exactly one is given and positive.
    """
    asked = {"flops": flops, "parameters": parameters, "tokens": tokens}
    asked = {k: v for k, v in asked.items() if v is not None}
    if len(asked) != 1:
        raise UserError(f"compute-optimal: give exactly one of flops, parameters, tokens, not {', '.join(asked) or 'none'}")
    ((what, value),) = asked.items()
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"compute-optimal: {what}={value:g} must be a positive number")
    rows = []
    for fit, ((e, a, b, alpha, beta), source) in FITS.items():
        g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
        if what == "parameters":
            product = (value / g) ** ((alpha + beta) / beta)
        elif what == "tokens":
            product = (value * g) ** ((alpha + beta) / alpha)
        else:
            product = value / 6
        n = g * product ** (beta / (alpha + beta))
        d = product / n
        given = {what: value, "E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "G": g}
        how = {"inputs": given, "source": source, "fit": fit}
        rows += [
            figure("optimal/parameters", n, "parameters", "G · (C/6)^(β/(α+β))", **how),
            figure("optimal/tokens", d, "tokens", "(C/6) / N", **how),
            figure("optimal/flops", 6 * n * d, "FLOP", "6·N·D", **how),
            figure("optimal/tokens_per_parameter", d / n, "tokens/parameter", "D / N", **how),
            figure("optimal/loss", e + a / n**alpha + b / d**beta, "nats/token", "E + A/N^α + B/D^β", **how),
        ]
    return rows
