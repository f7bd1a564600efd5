"""Published points that are no run of a recipe: hours of whole runs, products, collectives; and counts of parameters, which predict nothing."""

from __future__ import annotations

import math
import re

from gradus import models
from gradus.hardware import Cluster, Device
from gradus.plan import collectives, roofline
from gradus.plan.work import Op, Work
from gradus.recipe.presets import config_of
from published.points import FOR_TOKENS, Case, NotCovered, Point, device_of, named, number, read_yaml

FITTED = "others-fitted.yaml"
KNOWN = read_yaml("others.yaml")
LARGEST = 16384  # sides of the largest products that are tried (stas00/ml-engineering, MAMF finder)


def values(entry: str) -> dict[str, float]:
    """The fitted parameters of a formula; of links none: what the plan says of them."""
    return read_yaml(FITTED).get(entry, {})


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


# ---------------------------------------------------------------- whole runs

def hours(point: Point) -> Case:
    """Device-hours of a whole run from its tokens: the operations of a token, over one share of the peak for all runs (steps, restarts,
    stages of training)."""
    c, n, metric = point["config"], point["params"], point["metric"]
    if c.get("zettaflops") and metric in ("energy", "carbon"):
        raise NotCovered("its own arithmetic of a stated rate and power")
    name = re.sub(r"[\s_-]+", " ", str(point["model"]).lower())
    name = re.sub(r"(llama \d)\.\d", r"\1", name).removesuffix("b").strip()
    found = FOR_TOKENS.fullmatch(metric)
    tokens = number(found[2], found[3]) if found else c.get("tokens")
    pretrained = KNOWN["tokens"]
    tokens = tokens or pretrained.get(name) or pretrained.get(name[:7])
    if not tokens:
        raise NotCovered("the number of tokens is not known")
    if isinstance(tokens, str):  # "15T+"
        tokens = float(re.sub(r"[^0-9.]", "", tokens)) * (1e9 if "B" in tokens else 1e12)
    device = device_of(point)
    model = named(name)
    sizes = (model.n_layers, model.d_model, point["seq"] or 4096) if model else KNOWN["sizes"].get(name)
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
        preset = KNOWN["counted"].get(name.replace("ForPreTraining", "BertModel"))
        if preset is None:
            raise NotCovered(f"model {point['model']}: sizes not known")
        fields = {"head": "pretraining"} if training else {"n_classes": 1000} if preset.startswith("vit") else {}
        value = models.count(config_of(preset, **fields))["total"]
    return Case(point, "parameters (exact)", "", point["model"], float(point["value"]), direct=lambda v: float(value), kind="identity")
