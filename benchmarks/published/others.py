"""Published points that are no run of a recipe: fine-tuning by litgpt, hours of whole runs, products, collectives; and identities, which
predict nothing: counts of parameters, book-keeping, papers' own formulas."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import yaml

from gradus import models
from gradus.hardware import Cluster, Device
from gradus.plan import collectives, roofline
from gradus.plan.work import Op, Work
from gradus.recipe.presets import config_of
from published.points import FOR_TOKENS, Case, NotCovered, Point, device_of, named, number

HERE = Path(__file__).parent
LARGEST = 16384  # sides of the largest products that are tried (stas00/ml-engineering, MAMF finder)


@functools.cache
def starts() -> dict[str, dict[str, float]]:
    return yaml.safe_load((HERE / "others.yaml").read_text())


def fitted() -> dict[str, dict[str, float]]:
    path = HERE / "others-fitted.yaml"
    return (yaml.safe_load(path.read_text()) if path.exists() else None) or {}


def values(entry: str) -> dict[str, float]:
    """The fitted parameters of an entry, or where its search starts."""
    return {**starts().get(entry, {}), **fitted().get(entry, {})}


def collective(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    device = device_of(point)
    chip = roofline.chip_of(device)
    crossed = collectives.ring_factor(c["op"], n) * c["bytes"]

    def seconds(v: dict[str, float]) -> float:
        """With latency and bandwidth; without them as the plan says it, its links measured or ("nominal") as their maker states them."""
        if "alpha" in v:
            return v["alpha"] + crossed / v["beta"]
        was, collectives.MEASURED = collectives.MEASURED, {} if "nominal" in v else collectives.MEASURED
        try:
            return collectives.collective_seconds(c["op"], c["bytes"], n, 1, Cluster(device, n))
        finally:
            collectives.MEASURED = was

    return Case(point, f"{c['op'].replace('_', '-')} {chip}", f"links {chip}", f"{c['bytes']} bytes", float(point["value"]),
                direct=seconds, entry=f"links/{chip}/{n}")  # fmt: skip


def largest_product(point: Point) -> Case:
    """One product as large as any that was tried: what a chip's matmul says."""
    try:
        device = device_of(point)
    except NotCovered:  # its peak is stated
        device = Device(point["hardware"], {"bf16": point["config"]["theoretical"] * 1e12}, 80e9, 3e12)
    flops = 2.0 * LARGEST**3
    work = Work([Op("matmul", "mm", "bf16", "forward", flops, 6.0 * LARGEST**2, (1, LARGEST, LARGEST, LARGEST), launches=0)], [], [], 1,
                model_flops=flops, software="")  # fmt: skip
    return Case(point, "largest product", f"product on {roofline.chip_of(device)}", point["hardware"], float(point["value"]), work, Cluster(device, 1),
                lambda t: flops / t / 1e12)  # fmt: skip


# ---------------------------------------------------------------- fine-tuning

# (layers, d_model, gated) of what litgpt's table names
LITGPT = {"phi 1.5 1.3": (24, 2048, False), "stablelm alpha 3": (16, 4096, False), "stablelm alpha 7": (16, 6144, False),
          "llama 2 7": (32, 4096, True), "llama 2 13": (40, 5120, True), "llama 2 70": (80, 8192, True),
          "falcon 7": (32, 4544, False), "falcon 40": (60, 8192, False),
          "falcon 180": (80, 14848, False), "platypus 30": (60, 6656, True), "tinyllama 1.1": (22, 2048, True)}  # fmt: skip


def litgpt(point: Point) -> Case:
    c, metric = point["config"], point["metric"]
    name = re.sub(r"[\s_-]+", " ", point["model"].lower()).removesuffix(" b").strip()
    if name not in LITGPT or "method" not in c:
        raise NotCovered(f"model {point['model']} or what was done with it is not known")
    layers, width, gated = LITGPT[name]
    n, count, micro = point["n_devices"], point["params"], c.get("micro_batch") or 1
    method = c["method"].lower()
    if "full" in method or "pretrain" in method:
        raise NotCovered("litgpt's full fine-tuning: none of it to fit on")
    kind = "adapter_v2" if "v2" in method else "adapter" if "adapter" in method else "lora"
    quant = (c.get("quant") or "None").replace("None", "")
    if quant and "nf4" not in quant:
        raise NotCovered(f"quantization {quant}: none of it to fit on")
    several = n > 1

    def memory(v: dict[str, float]) -> float:
        weights = count * ((v["quantized"] if quant else 2.0) if not several else v["sharded"])
        extra = v["adapter"] * count if kind == "adapter_v2" else 0.0
        kept = micro * layers * width * 1034 * v["activation"] * (1.5 if gated else 1.0) * (0.1 if several else 1.0)
        return (weights + extra + kept) / 1e9 + v["constant"]

    def minutes(v: dict[str, float]) -> float:
        host = layers * v["host"] * ({"lora": 1.0, "adapter": v["adapter"], "adapter_v2": v["adapter_v2"]}[kind]) * (v["several"] if several else 1.0)
        device = 4 * count * v["tokens"] * micro / (312e12 * 0.5)
        unpack = count * v["unpack"] * (1.1 if "dq" in quant else 1.0) if quant else 0.0
        gather = 4 * count * (n - 1) / n / v["gather"] if several else 0.0
        return 1000 * (max(host, device) + unpack + gather) / 60

    if metric == "minutes_per_1k_iterations":
        return Case(point, "litgpt time", "litgpt", name, float(point["value"]), direct=minutes, entry="litgpt time", kind="other")
    case = Case(point, "litgpt memory", "litgpt", name, float(point["value"]), direct=memory, entry="litgpt memory", kind="other")
    if metric == "feasible":
        case.direct, case.group = lambda v: float(memory(v) < 40 * 2**30 / 1e9), "feasible"
    elif metric != "peak_memory":
        raise NotCovered(f"metric {metric} of this source")
    return case


# ---------------------------------------------------------------- whole runs

# (layers, d_model, tokens a sample) of whole runs that LLAMA does not have; for attention's operations. Touvron et al. 2023 (both)
WHOLE = {"llama 7": (32, 4096, 2048), "llama 13": (40, 5120, 2048), "llama 33": (60, 6656, 2048), "llama 65": (80, 8192, 2048),
         "llama 2 34": (48, 8192, 4096), "mpt 1.3": (24, 2048, 2048), "pythia 1.0": (16, 2048, 2048)}  # fmt: skip
# tokens, where a point has none
PRETRAINED = {"llama 7": 1e12, "llama 13": 1e12, "llama 33": 1.4e12, "llama 65": 1.4e12, "llama 2": 2e12, "llama 3": 15e12}


def hours(point: Point) -> Case:
    """Device-hours of a whole run from its tokens: the operations of a token, over one share of the peak for all runs (steps, restarts,
    stages of training)."""
    c, n, metric = point["config"], point["params"], point["metric"]
    name = re.sub(r"[\s_-]+", " ", str(point["model"]).lower())
    name = re.sub(r"(llama \d)\.\d", r"\1", name).removesuffix("b").strip()
    found = FOR_TOKENS.fullmatch(metric)
    tokens = number(found[2], found[3]) if found else c.get("tokens")
    tokens = tokens or PRETRAINED.get(name) or PRETRAINED.get(name[:7])
    if not tokens:
        raise NotCovered("the number of tokens is not known")
    if isinstance(tokens, str):  # "15T+"
        tokens = float(re.sub(r"[^0-9.]", "", tokens)) * (1e9 if "B" in tokens else 1e12)
    device = device_of(point)
    model = named(name)
    sizes = (model.n_layers, model.d_model, point["seq"] or 4096) if model else WHOLE.get(name)
    attention = 12 * math.prod(sizes) if sizes else 0.0  # its full matrix (Chowdhery et al. 2022); not counted where the sizes are not known
    whole = (6 * (c.get("active_params") or n) + attention) * tokens
    whole /= roofline.peak_flops(device, "bf16") * 3600
    watts, pue, grid = c.get("tdp_w") or device.power or math.nan, 1.1, 0.385  # the model cards' own convention

    def value(v: dict[str, float]) -> float:
        hours = whole / v["utilisation"]
        mwh = hours * watts * (1.0 if device.name.startswith("H100") else pue) / 1e6
        if found or metric in ("gpu_hours", "chip_hours", "days"):
            return hours / (24 * point["n_devices"] if metric == "days" or (found and found[1] == "days") else 1)
        return {"energy": mwh, "carbon": mwh * grid, "carbon_location_based": mwh * 0.41}[metric]

    return Case(point, "GPU-hours of whole runs", str(point["source"])[:25], point["model"], float(point["value"]), direct=value, entry="hours", kind="other")


# ---------------------------------------------------------------- identities


def bookkeeping(point: Point) -> Case:
    """Book-keeping: the achieved rate and the power are the point's own inputs; no prediction."""
    c = point["config"]
    days = c["zettaflops"] * 1e21 / (point["n_devices"] * c["achieved_tflops"] * 1e12) / 86400
    mwh = point["n_devices"] * c["avg_system_w"] * days * 24 * c["pue"] / 1e6
    value = {"days": days, "energy": mwh, "carbon": mwh * c["kg_per_kwh"]}[point["metric"]]
    return Case(point, "energy and carbon (book-keeping)", "", point["model"], float(point["value"]), direct=lambda v: value, kind="identity")


COUNTED = {"GPT-2 small": "gpt2-small", "GPT-2 medium": "gpt2-medium", "GPT-2 large": "gpt2-large", "GPT-2 XL": "gpt2-xl", "GPT-3 175B": "gpt3-175b",
           "Llama-2-7B": "llama2-7b", "Llama-2-13B": "llama2-13b", "Llama-2-70B": "llama2-70b", "Llama-3.1-8B": "llama3.1-8b",
           "Llama-3.1-70B": "llama3.1-70b", "Llama-3.1-405B": "llama3.1-405b", "BERT-base BertModel": "bert-base-uncased",
           "BERT-large BertModel": "bert-large-uncased", "T5-small": "t5-small", "T5-base": "t5-base", "T5-large": "t5-large", "T5-3B": "t5-3b",
           "T5-11B": "t5-11b", "ViT-B/16": "vit-b16", "ViT-L/16": "vit-l16", "ViT-H/14": "vit-h14", "Mixtral-8x7B total": "mixtral-8x7b"}  # fmt: skip


def count(point: Point) -> Case:
    name = re.sub(r" \(.*\)", "", point["model"])
    if name == "BART-large":  # no family of ours: its closed form (Lewis et al. 2020)
        h, f, v, layers = 1024, 4096, 50265, 12
        attention, feed = 4 * h * h + 4 * h, 2 * h * f + f + h
        value = v * h + 2 * (1026 * h + 2 * h) + layers * (attention + feed + 4 * h) + layers * (2 * attention + feed + 6 * h)
    elif name == "TinyLlama-1.1B":
        value = models.count(named("tinyllama"))["total"]
    else:
        training = name.endswith("ForPreTraining")
        preset = COUNTED.get(name.replace("ForPreTraining", "BertModel"))
        if preset is None:
            raise NotCovered(f"model {point['model']}: sizes not known")
        fields = {"head": "pretraining"} if training else {"n_classes": 1000} if preset.startswith("vit") else {}
        value = models.count(config_of(preset, **fields))["total"]
    return Case(point, "parameters (exact)", "", point["model"], float(point["value"]), direct=lambda v: float(value), kind="identity")


def saved(point: Point) -> Case:
    """Hugging Face's modules, bytes by sbh in bf16: what each line of their forward keeps."""
    name, eager = point["model"], point["config"].get("attn") == "eager"
    h, a, s, d = 1024, 16, point["seq"] or 512, 64
    scores = a * s / h
    if name.startswith("GPT2"):
        value = 56 + (2 * scores if eager else 4 * a / h)  # gelu in five tensors
    elif name.startswith("Llama"):
        f = int(re.search(r"f=(\d+)", name).group(1))
        groups = int(found.group(1)) if (found := re.search(r"GQA (\d+)", name)) else 1
        kv = a // groups if groups > 1 else a
        value = (10 * h + 2 * a * d + 4 * kv * d + 8 * f + 8 * h) / h + (6 * scores + 4 * (a - kv) * d / h if eager else 4 * a / h)
    elif name.startswith("BERT"):
        drops = (found := re.search(r"dropout ([\d.]+)", name)) is not None and float(found.group(1)) > 0  # a CPU's dropout keeps its factors, wide
        if eager or not drops:
            value = 32 + (4 if drops else 0) + (scores * (6 if drops else 2) if eager else 4 * a / h)
        else:  # with dropout, sdpa on a CPU is products and a softmax in fp32
            value = 42 + 12 * scores
    else:
        raise NotCovered("saved activations of Hugging Face's T5: traced, not written down")
    return Case(point, "saved activations (closed form)", "", name, float(point["value"]), direct=lambda v: value, kind="identity")


def korthikanti_memory(point: Point) -> Case:
    """The paper's own analytic bars: equal to its formulas, or our reading of them is wrong."""
    name, metric = point["model"], point["metric"]
    model = named(name)
    layers, h, a = model.n_layers, model.d_model, model.n_heads
    s, t = point["seq"] or 2048, 8
    b, pp, virtual = {"GPT-22B": (4, 1, 1), "GPT-175B": (1, 8, 3), "MT-NLG-530B": (1, 35, 3), "GPT-1T": (1, 64, 1)}[name]
    stage = layers * (1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1)  # layers' worth of activations that the first stage keeps
    if metric == "params_optimizer_memory":
        value = 18 * layers * 12 * h * h / (t * pp)
    else:
        core = 5 * a * s / h
        per = {"no_recompute": 10 + 24 / t + core / t, "seq_parallel": (34 + core) / t, "selective": 10 + 24 / t, "seq_parallel+selective": 34 / t,
               "full_recompute": 2.0}.get(metric.removeprefix("activation_memory_"))  # fmt: skip
        if per is None:
            raise NotCovered(f"metric {metric} of this source")
        value = s * b * h * stage * per
    return Case(point, "korthikanti memory (closed form)", "", name, float(point["value"]), direct=lambda v: value / 2**30, kind="identity")
