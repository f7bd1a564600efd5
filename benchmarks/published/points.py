"""What a file of published points holds: fields, devices, models, and what a metric makes of a step's seconds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus import hardware, limits
from gradus.errors import UserError
from gradus.hardware import Cluster, Device
from gradus.plan import roofline
from gradus.plan.work import Work
from gradus.recipe.presets import PRESETS, config_of
from gradus.recipe.schema import GPTConfig, LlamaConfig, ModelConfig

Point = dict[str, Any]

# Decoders that points call by name: (layers, d_model, heads). MPT: llm-foundry's configurations; GPT: Korthikanti et al. 2022, table 3.
MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32),
       "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}  # fmt: skip
GPT = {"GPT-22B": (48, 6144, 64), "GPT-175B": (96, 12288, 96), "MT-NLG-530B": (105, 20480, 128), "GPT-1T": (128, 25600, 160)}
# (layers, d_model, heads, kv_heads, d_ff, vocabulary)
LLAMA = {"tinyllama": (22, 2048, 32, 4, 5632, 32000), "llama 2 7": (32, 4096, 32, 32, 11008, 32000), "llama 2 13": (40, 5120, 40, 40, 13824, 32000),
         "llama 2 70": (80, 8192, 64, 8, 28672, 32000), "llama 3 8": (32, 4096, 32, 8, 14336, 128256), "llama 3 70": (80, 8192, 64, 8, 28672, 128256),
         "llama 3 405": (126, 16384, 128, 8, 53248, 128256)}  # fmt: skip


class NotCovered(Exception):
    """A point that the planner says nothing about; the text says why."""


@dataclasses.dataclass
class Case:
    """A point as the planner sees it: the work of a step, or a direct formula."""

    point: Point
    group: str  # of the table
    source: str  # what one publication measured on one machine: left out together
    model: str  # likewise
    measured: float
    work: Work | None = None  # of a step, as its software does it
    cluster: Cluster | None = None
    value: Callable[[float], float] = float  # seconds of a step → the point's own unit
    direct: Callable[[dict[str, float]], float] | None = None  # of parameters to the value, for what is no step's time
    entry: str = ""  # whose parameters `direct` takes: of `others`
    base: float | None = None  # of which the baseline is a constant multiple, for what is no step's time
    kind: str = "plan"  # other: a formula that no plan uses; identity: a count, or the source's own arithmetic: nothing is predicted
    note: str = ""

    @property
    def chip(self) -> str:
        return roofline.chip_of(self.cluster.device) if self.cluster else ""

    @property
    def seconds(self) -> float:
        """Of a step, that the measured value means."""
        one = self.value(1.0)
        return one / self.measured if self.rate else self.measured / one

    @property
    def rate(self) -> bool:
        """Whether more is faster."""
        return self.value(2.0) < self.value(1.0)

    def at_mfu(self, mfu: float) -> float:
        """The value at a constant model FLOPs utilisation."""
        return self.value(self.work.model_flops / (self.cluster.n * roofline.peak_flops(self.cluster.device, self.work.micro[0].dtype) * mfu))


def load(path: str | Path) -> list[Point]:
    """The points of a file. Raises UserError where it is no list of points."""
    points = limits.read_json(path, 100 * limits.MB)
    if not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
        raise UserError(f"{path}: not a list of points, each {{id, model, config, hardware, n_devices, batch, seq, metric, value, unit, source}}")
    return points


# ---------------------------------------------------------------- models and devices


def gpt(layers: int, d_model: int, heads: int, seq: int, vocab: int, **fields: Any) -> GPTConfig:
    if not (0 < layers < 1e4 and 0 < d_model < 1e6 and 0 < vocab < 1e7):
        raise NotCovered(f"{layers} layers of width {d_model} over {vocab} words are no model")
    if d_model % heads:
        raise NotCovered(f"{heads} heads do not divide a width of {d_model}")
    return GPTConfig(n_layers=layers, d_model=d_model, n_heads=heads, seq_len=seq, vocab_size=vocab, **fields)


def llama(name: str, seq: int) -> LlamaConfig:
    layers, d_model, heads, kv, d_ff, vocab = LLAMA[name]
    return LlamaConfig(n_layers=layers, d_model=d_model, n_heads=heads, n_kv_heads=kv, d_ff=d_ff, seq_len=seq, vocab_size=vocab)


def llama_name(model: str) -> str:
    """LLAMA3.1_405B, "Llama 2-7 B", Llama-3.1-8B → a key of LLAMA."""
    text = re.sub(r"[\s_-]+", " ", model.lower())
    if "tinyllama" in text:
        return "tinyllama"
    found = re.search(r"llama ?(\d)(?:\.\d)?[ -]+(\d+)", text)
    key = f"llama {found.group(1)} {found.group(2)}" if found else ""
    if key not in LLAMA:
        raise NotCovered(f"model {model}: sizes not known")
    return key


def model_of(point: Point) -> ModelConfig:
    """A model by its stated sizes, else by its name."""
    c, name = point["config"], str(point["model"])
    key = re.sub(r"[\s_-]+", "", name.lower())
    if c.get("hidden") and c.get("layers"):
        return gpt(c["layers"], c["hidden"], c.get("heads") or max(1, c["hidden"] // 128), point["seq"] or 2048, c.get("vocab") or 50304)
    for names in (GPT, MPT):
        for known, size in names.items():
            if key in (known.lower().replace("-", ""), "mpt" + known):
                return gpt(*size, point["seq"] or 2048, 50304)
    preset = next((p for p in PRESETS if re.sub(r"[\s_-]+", "", p) == key), None)
    return config_of(preset) if preset else llama(llama_name(name), point["seq"] or 2048)


def device_of(point: Point, known: str = "") -> Device:
    """The device that the point's text names: `known` (which of its kind the source has) where it is one of those, or not said."""
    text = str(point.get("hardware") or known)
    if known and roofline.chip_of(text) == roofline.chip_of(known):
        return hardware.find(known)
    words = re.sub(r"\(.*|,.*|NVIDIA|DGX[- ]|HGX[- ]", "", text).split()
    for name in (*(" ".join(words[:i]) for i in range(len(words), 0, -1)), roofline.chip_of(text)):
        try:
            return hardware.find(name)
        except UserError:
            continue
    raise NotCovered(f"device {text or 'not given'}: not in the hardware file")


def divisor(total: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(total, limit)) + 1) if total % d == 0)


# ---------------------------------------------------------------- metrics

RATES = ("step_time", "tokens_per_s", "samples_per_s", "train_samples_per_s", "images_per_s", "mfu", "hfu", "model_tflops", "hardware_tflops",
         "aggregate_pflops")  # and each by _per_gpu; and days_for_300B_tokens, gpu_hours_for_300B_tokens  # fmt: skip
FOR_TOKENS = re.compile(r"(days|gpu_hours)_for_([\d.]+)([BT])_tokens")


def timed(metric: str) -> bool:
    """Whether a metric is a step's time in other words."""
    return metric.removesuffix("_per_gpu") in RATES or bool(FOR_TOKENS.fullmatch(metric))


def number(count: str, unit: str) -> float:
    return float(count) * {"B": 1e9, "T": 1e12}[unit]


def core_share(work: Work, n: int) -> float:
    """Attention's two inner products of the forward pass, by the model's operations: what selective recomputation does again."""
    flops = sum(op.flops * op.count for op in work.micro if op.phase == "forward" and (op.kind == "attention" or op.name in ("bmm", "baddbmm")))
    return flops * work.stages * work.micro_batches * n / work.stages / work.model_flops


def in_metric(point: Point, work: Work, cluster: Cluster, recompute: str, hardware_flops: float | None = None) -> Callable[[float], float]:
    """Seconds of a step → what the point's metric and unit make of them. Hardware FLOPs add what `recompute` ("full", "selective": attention's
    inner part) does again (Korthikanti et al. 2022, section 4), or are given. Raises NotCovered for a metric that is no step's time."""
    metric, unit, n = point["metric"], (point.get("unit") or "").lower(), cluster.n
    if not timed(metric):
        raise NotCovered(f"metric {metric} of this source: nothing predicts it")
    if found := FOR_TOKENS.fullmatch(metric):
        steps = number(found[2], found[3]) / work.tokens
        each = n / 3600 if found[1] == "gpu_hours" else 1 / 86400
        return lambda t: steps * t * each
    flops, name = work.model_flops, metric.removesuffix("_per_gpu")
    if name in ("hfu", "hardware_tflops", "aggregate_pflops"):
        flops = hardware_flops or flops * {"full": 4 / 3, "selective": 1 + core_share(work, n)}.get(recompute, 1.0)
    share = 1 if unit in ("fraction", "ratio", "share") else 100
    among = n if metric.endswith("_per_gpu") else 1
    peak = n * roofline.peak_flops(cluster.device, "bf16")
    return {"step_time": lambda t: t * (1e3 if unit == "ms" else 1), "tokens_per_s": lambda t: work.tokens / t / among,
            "mfu": lambda t: share * flops / t / peak, "hfu": lambda t: share * flops / t / peak, "aggregate_pflops": lambda t: flops / t / 1e15,
            "model_tflops": lambda t: flops / t / among / 1e12, "hardware_tflops": lambda t: flops / t / among / 1e12,
            }.get(name, lambda t: work.samples / t / among)  # fmt: skip


# ---------------------------------------------------------------- fields


class Asked(dict):
    """A point that remembers which of its fields were wanted and are not there."""

    absent: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None and name not in self.absent:
            self.absent = (*self.absent, name)
        return value


# of config
NUMBERS = {"hidden", "layers", "heads", "vocab", "tp", "pp", "cp", "dp", "vp", "fsdp", "zero", "interleave", "micro_batch", "local_batch",
           "grad_accum", "batch", "bytes", "theoretical", "active_params", "tdp_w", "zettaflops"}  # fmt: skip
TEXTS = {"recompute", "precision", "schedule", "ac", "scheme", "method", "quant", "attn", "mixed_precision_mode", "op"}


def cleaned(point: Point) -> Asked:
    """The point with every field of the schema: None where it is not given, or is nothing that such a field can be."""
    config = point.get("config")
    config = dict(config) if isinstance(config, dict) else {}
    for name in NUMBERS & config.keys():
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            del config[name]
        elif value % 1 == 0:
            config[name] = int(value)
    for name in TEXTS & config.keys():
        if not isinstance(config[name], str):
            del config[name]
    found = Asked(point, config=config)
    for name in ("id", "model", "hardware", "source", "unit"):
        found[name] = str(point.get(name) or "")
    for name in ("n_devices", "batch", "seq", "params"):
        value = point.get(name)
        most = 1e15 if name == "params" else 1e7
        good = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < most and (name == "params" or value % 1 == 0)
        found[name] = None if not good else value if name == "params" else int(value)
    if found.get("n_devices") is None and found["config"].get("dp"):
        found["n_devices"] = math.prod(found["config"].get(axis) or 1 for axis in ("tp", "pp", "cp", "dp"))
    return found
