"""The worked examples of the source documents: their figures come out, and where they are wrong the row says why (docs/errata.md)."""

from __future__ import annotations

from gradus import hardware
from gradus.hardware import Device
from gradus.plan.budget import KWH, devices_for, energy_and_carbon
from gradus.plan.figures import figure
from gradus.rows import Row

GB, MIB = 1e9, 2**20


def gpt3_devices() -> list[Row]:
    """GPT-3 175B, 300e9 tokens, 30 days, 160 TFLOP/s each: the lecture's 800 GPUs (S5)."""
    six, eight = (devices_for(175e9, 300e9, 160e12, 30, factor) for factor in (6, 8))
    six.conditions["why"] = "the lecture rounds 760 up to 800; 6 N D counts no recomputation, though 160 TFLOP/s was reached with it"
    eight.conditions["why"] = "140 to 160 TFLOP/s of Narayanan et al. 2021 count the forward pass done again: to that rate belongs 8 N D"
    return [six, eight]


def layer_parameters(d: int) -> list[Row]:
    """A GPT layer of width d: the lecture's 12 d² + 5 d, and what it has (S5)."""
    parts = {"queries, keys, values": 3 * d * d + 3 * d, "projection": d * d + d, "feed-forward": 8 * d * d + 5 * d, "two norms": 4 * d}
    why = "said to be without biases, yet 5 d are those of the feed-forward network; 3 d + d of attention and 4 d of the norms are left out"
    return [
        figure("parameters/layer", 12 * d * d + 5 * d, "parameters", "12 d² + 5 d", {"d": d}, "S5", why=why),
        figure("parameters/layer", sum(parts.values()), "parameters", "12 d² + 13 d", parts, "counted: gradus models gpt2"),
    ]


def gpt3_memory(parameters: float = 175e9) -> list[Row]:
    """700 + 700 + 700 + 350 + 350 GB: fp32 weights, Adam's two moments, fp16 weights and gradients (S5): 16 bytes a parameter."""
    parts = {"weights fp32": 4, "first moment": 4, "second moment": 4, "weights fp16": 2, "gradients fp16": 2}
    source = "Rajbhandari et al. 2020, section 3.1; activations, buffers and fp32 gradients (Megatron: 18 bytes) come on top"
    rows = [
        figure(f"memory/{name}", parameters * n, "bytes", "parameters × bytes", {"parameters": parameters, "bytes": n}, source)
        for name, n in parts.items()
    ]
    return [*rows, figure("memory/state", parameters * sum(parts.values()), "bytes", "16 bytes a parameter", {"parameters": parameters}, source)]


def serving_memory(parameters: float, bits: int) -> float:
    """Bytes, by S3's rule: M = (P · 4 B) / (32 / Q) · 1.2. It knows neither batch nor context."""
    return parameters * 4 / (32 / bits) * 1.2


def cache_bytes(n_layers: int, kv_heads: int, head_dim: int, tokens: float, bytes_each: int = 2) -> float:
    """Keys and values of all layers: 2 · L · k · d · tokens · bytes."""
    return 2 * n_layers * kv_heads * head_dim * tokens * bytes_each


def smallest(
    need: float, numbers: str, names: tuple[str, ...] = ("T4", "L4", "A10G", "A100-40GB", "L40S", "A100-80GB", "H100", "H200", "B200")
) -> Device | None:
    """The device of the least memory that holds `need` bytes and computes in `numbers`, of those S3 chooses from; the first named of equals."""
    fitting = [d for d in map(hardware.find, names) if numbers in d.peaks and d.capacity >= need]
    return min(fitting, key=lambda d: d.memory, default=None)


def llama2_serving() -> list[Row]:
    """Llama-2-7B (S3): 33.6 GB → A100-40GB; in bf16, as the model is kept there; and with the cache that the rule leaves out."""
    rows = []
    for bits, why in (
        (32, "the rule with fp32, though the model is kept in bf16"),
        (16, "bf16: half of it, and a 24 GB card is enough for one sequence"),
    ):
        need = serving_memory(7e9, bits)
        given = {"P": 7e9, "Q": bits}
        rows.append(
            figure(
                "memory/serving",
                need,
                "bytes",
                "P · 4 / (32 / Q) · 1.2",
                given,
                "S3",
                device=smallest(need, f"{'bf' if bits == 16 else 'fp'}{bits}").name,
                why=why,
            )
        )
    weights = 6_738_415_616 * 2
    for batch, tokens in ((1, 4096), (8, 4096), (32, 4096)):
        cache = cache_bytes(32, 32, 128, batch * tokens)
        device = smallest(weights + cache, "bf16")
        given = {"weights": weights, "cache": cache, "batch": batch, "tokens": tokens}
        why = f"the cache is {cache / weights:.0%} of the weights: the rule's 20 % {'holds' if cache <= 0.2 * weights else 'does not hold'}"
        rows.append(figure("memory/serving", weights + cache, "bytes", "2 P + 2 L k d tokens 2 B", given, "", device=device and device.name, why=why))
    return rows


def copy_task_energy() -> list[Row]:
    """The copy task on an A100 (S1): 14 min · 65 W · PUE 1.1 = 16.7 Wh, and 0.385 kg/kWh → 6.4e-6 t."""
    rows = []
    for watts, why in (
        (65.0, "65 W was read at 0 % utilisation: it is what the card draws when it waits"),
        (300.0, "the card's limit: the energy of training lies between the two"),
    ):
        joules, kg = energy_and_carbon(14 / 60, watts, 1.1, 0.385)
        given = {"h": 14 / 60, "W": watts, "PUE": 1.1, "kg/kWh": 0.385}
        rows.append(figure("budget/energy", joules, "J", "GPU-h · W · PUE", given, "S1", why=why))
        rows.append(figure("budget/co2", kg, "kg", "kWh · kg/kWh", {"kWh": joules / KWH, "kg/kWh": 0.385}, "S1; 0.385: Touvron et al. 2023", why=why))
    return rows


def gradient_seconds(link: str, group: int = 8, payload: float = 350 * GB) -> list[Row]:
    """350 GB of gradients once over a link in one direction, and a ring all-reduce of them (S5): nominal bandwidth, no latency."""
    one = hardware.link(link)
    given = {"bytes": payload, "bytes/s, one direction": one.bandwidth}
    ring = 2 * (group - 1) / group
    rows = [
        figure("time/payload", payload / one.bandwidth, "s", "bytes / bandwidth", given, one.source, link=one.name),
        figure("time/all_reduce", ring * payload / one.bandwidth, "s", "2 (k − 1) / k · bytes / bandwidth", {**given, "k": group},
               "Patarasuk & Yuan 2009", link=one.name, group=group),
    ]  # fmt: skip
    if one.both:
        why = "the advertised bandwidth counts both directions; a gradient goes one way at a time"
        rows.append(
            figure("time/as_advertised", payload / one.both, "s", "bytes / both directions", {"bytes/s": one.both}, "S5", link=one.name, why=why)
        )
    return rows


def attention_bytes(n: int, chunk: int | None = None, rows: int = 48, bytes_each: int = 4) -> float:
    """Scores of attention (S4): rows · n · n, or rows · chunk · n for one chunk. rows = batch · heads: 48 (4 · 12) gives S4's figures, in MiB."""
    return rows * (chunk or n) * n * bytes_each


def bert_activations() -> Row:
    """S4's formula 2 · B · n · d · L · bytes for BERT-base, B=32, n=512: 1.2 GB, where it prints 9."""
    why = "1.2 GB, not 9; but a layer keeps more than two tensors: 34 + 5 a n / d bytes a place and channel in fp16 (Korthikanti 2022)"
    given = {"B": 32, "n": 512, "d": 768, "L": 12, "bytes": 4}
    return figure("memory/activations", 2 * 32 * 512 * 768 * 12 * 4, "bytes", "2 · B · n · d · L · bytes", given, "S4", why=why)


def bert_cache(tokens: int = 1000) -> Row:
    """S4's cache: 12 layers of width 768 in fp16, 1,000 tokens."""
    why = "36.9 MB (36.8 in the source) for one sequence; the same page's 1 to 2 GB are for 27 to 54 sequences"
    given = {"L": 12, "d": 768, "tokens": tokens, "bytes": 2}
    return figure("memory/cache", cache_bytes(12, 12, 64, tokens), "bytes", "2 · L · d · tokens · bytes", given, "S4", why=why)


def cache_speedup(n: int) -> float:
    """The most that a cache can save in generating n tokens: n (n + 1) / 2 token passes without, n with (S4). 500.5 at 1,000."""
    return (n + 1) / 2


def rows() -> list[Row]:
    """All of them."""
    answer = [*gpt3_devices(), *layer_parameters(12_288), *gpt3_memory(), *llama2_serving(), *copy_task_energy(), bert_activations(), bert_cache()]
    for link in ("NVLink 5", "InfiniBand NDR", "PCIe 5 x16"):
        answer += gradient_seconds(link)
    return answer


def lines() -> list[str]:
    """All of them, printed."""
    answer = []
    for row in rows():
        how = row.conditions["how"]
        value = {"bytes": (row.value / GB, "GB"), "J": (row.value / 3600, "Wh") if row.unit == "J" else None}.get(row.unit, (row.value, row.unit))
        more = "".join(f"; {row.conditions[k]}" for k in ("link", "device", "why") if row.conditions.get(k))
        answer.append(f"{row.name:22} {value[0]:>18,.10g} {value[1]:10} = {how['formula']}{more}")
    return answer
