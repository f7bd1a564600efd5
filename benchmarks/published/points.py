"""What a file of published points holds: fields, devices, models, and what a metric makes of a step's seconds."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gradus import hardware, limits
from gradus.errors import UserError
from gradus.hardware import Cluster, Device
from gradus.plan import roofline
from gradus.plan.work import Work
from gradus.recipe.presets import PRESETS, config_of
from gradus.recipe.schema import MODELS, GPTConfig, LlamaConfig, ModelConfig

Point = dict[str, Any]




def read_yaml(name: str) -> Any:
    """A file of this folder."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text())


READING = read_yaml("reading.yaml")  # what words in a point mean, and which of its fields are numbers or texts


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
    run: Any = None  # of a step: what it was read as (`runs.Run`)
    kind: str = "plan"  # other: a formula that no plan uses; identity: a count, or the source's own arithmetic: nothing is predicted

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


def load(path: str | Path) -> list[Point]:
    """The points of a file. Raises UserError where it is no list of points."""
    points = limits.read_json(path, 100 * limits.MB)
    if not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
        raise UserError(f"{path}: not a list of points, each {{id, model, config, hardware, n_devices, batch, seq, metric, value, unit, source}}")
    return points


# ---------------------------------------------------------------- models and devices


@functools.cache
def sizes() -> list[tuple[str, dict[str, Any]]]:
    """(pattern of a name, fields) of models.yaml."""
    return [tuple(entry) for entry in read_yaml("models.yaml")]


class Program(types.SimpleNamespace):
    """What is known of a program; its file says of which fields."""


@functools.cache
def programs(file: str) -> dict[str, Program]:
    """By name, each with what it is like, or else `any`, has."""
    found = read_yaml(file)
    for name, entry in found.items():  # what others are like stands before them
        found[name] = {**found[entry.get("like", "any")], **({"words": []} if "like" in entry else {}), **entry}
    return {name: Program(**entry, name=name) for name, entry in found.items()}


def named(model: str) -> ModelConfig | None:
    """The model that a text calls by its name, of its own length; None: not known. "Llama 3.1 8B pre-training" is llama3.1-8b."""
    key = re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*|pre-training|2-node", "", model.lower()))
    fields = next((fields for pattern, fields in sizes() if re.fullmatch(pattern, key)), None)
    preset = next((p for p in PRESETS if re.sub(r"[^a-z0-9]", "", p.lower()) == key), None)
    if fields is None:
        return config_of(preset) if preset else None
    return config_of(fields["preset"]) if "preset" in fields else MODELS[fields["family"]].model_validate(fields)


def decoder(point: Point, vocab: int) -> dict[str, int]:
    """The sizes of a decoder that the point states, with heads that its tensor parallelism divides. vocab: where it is not stated."""
    c, hidden = point["config"], point["config"]["hidden"]
    vocab, layers = c.get("vocab") or vocab, c.get("layers")
    layers = layers or round((point["params"] - vocab * hidden) / (12 * hidden**2))
    tensor = c.get("tp") or 1
    heads = c.get("heads") or max(1, hidden // 128)
    if hidden % heads or heads % tensor:  # not stated, or of no matter here
        most = tensor * max(1, round(hidden / 128 / tensor))
        heads = next((h for h in range(most, 0, -1) if hidden % h == 0 and h % tensor == 0), heads)
    if not (0 < layers < 1e4 and 0 < hidden < 1e6 and 0 < vocab < 1e7):
        raise NotCovered(f"{layers} layers of width {hidden} over {vocab} words are no model")
    return {"n_layers": layers, "d_model": hidden, "n_heads": heads, "vocab_size": vocab}


def padded(words: int, tensor: int) -> int:
    """A vocabulary of a multiple of 128 × tensor, as Megatron makes it."""
    return -(-words // (128 * tensor)) * 128 * tensor


def stated(point: Point) -> ModelConfig:
    """A decoder of the sizes that the point states. Gated, as Llama, where keys have fewer heads or the network is not four times as wide."""
    c, size = point["config"], decoder(point, 51200)
    hidden, heads = size["d_model"], size["n_heads"]
    kv, inner = c.get("kv_heads") or heads, c.get("ffn") or 4 * hidden
    if kv != heads or inner != 4 * hidden:
        return LlamaConfig(**size, n_kv_heads=kv, d_ff=inner, d_head=c.get("head_dim") or None)
    if hidden % heads:
        raise NotCovered(f"{heads} heads do not divide a width of {hidden}")
    return GPTConfig(**size)


def model_of(point: Point) -> ModelConfig:
    """A model by its name, else by its stated sizes, with the point's length where it states one."""
    model, sized = named(point["model"]), point["config"].get("hidden") is not None
    if model is None and not sized:
        raise NotCovered(f"model {point['model']}: sizes not known")
    if model is None or (sized and isinstance(model, GPTConfig)):
        model = stated(point)
    return model.changed(seq_len=point["seq"]) if point["seq"] and hasattr(model, "seq_len") else model


def device_of(point: Point) -> Device:
    """The device that the point's text names."""
    text = str(point.get("hardware") or "")
    words = re.sub(r"\(.*|,.*|NVIDIA|AWS|DGX[- ]|HGX[- ]", "", text).replace("_", "-").split()
    called = next((name for pattern, name in READING["devices"].items() if re.search(pattern, text)), "")
    for name in (called, *(" ".join(words[:i]) for i in range(len(words), 0, -1)), roofline.chip_of(text)):
        try:
            return hardware.find(name)
        except UserError:
            continue
    raise NotCovered(f"device {text or 'not given'}: not in the hardware file")


def divisor(total: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(total, limit)) + 1) if total % d == 0)


# ---------------------------------------------------------------- metrics

FOR_TOKENS = re.compile(r"(days|gpu_hours)_for_([\d.]+)([BT])_tokens")


def timed(metric: str) -> bool:
    """Whether a metric is a step's time in other words."""
    return metric.removesuffix("_per_gpu") in READING["rates"] or bool(FOR_TOKENS.fullmatch(metric))


def number(count: str, unit: str) -> float:
    return float(count) * {"B": 1e9, "T": 1e12}[unit]


def core_share(work: Work, n: int) -> float:
    """Attention's two inner products of the forward pass, by the model's operations: what selective recomputation does again."""
    flops = sum(op.flops * op.count for op in work.micro if op.phase == "forward" and (op.kind == "attention" or op.name in ("bmm", "baddbmm")))
    return flops * work.stages * work.micro_batches * n / work.stages / work.model_flops


def in_metric(point: Point, work: Work, cluster: Cluster, recompute: str) -> Callable[[float], float]:
    """Seconds of a step → what the point's metric and unit make of them. Hardware FLOPs add what `recompute` ("full", "selective": attention's
    inner part) does again (Korthikanti et al. 2022, section 4). Raises NotCovered for a metric that is no step's time."""
    metric, unit, n = point["metric"], (point.get("unit") or "").lower(), cluster.n
    if not timed(metric):
        raise NotCovered(f"metric {metric} of this source: nothing predicts it")
    if found := FOR_TOKENS.fullmatch(metric):
        steps = number(found[2], found[3]) / work.tokens
        each = n / 3600 if found[1] == "gpu_hours" else 1 / 86400
        return lambda t: steps * t * each
    flops, name = work.model_flops, metric.removesuffix("_per_gpu")
    if name in ("hfu", "hardware_tflops", "aggregate_pflops"):
        flops *= {"full": 4 / 3, "selective": 1 + core_share(work, n)}.get(recompute, 1.0)
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


# what odd fields lead to
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, UserError, ValueError)


def cleaned(point: Point) -> Asked:
    """The point with every field of the schema: None where it is not given, or is nothing that such a field can be."""
    config = point.get("config")
    config = dict(config) if isinstance(config, dict) else {}
    for name in config.keys() & READING["numbers"]:
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            del config[name]
        elif value % 1 == 0:
            config[name] = int(value)
    for name in config.keys() & READING["texts"]:
        if not isinstance(config[name], str):
            del config[name]
    found = Asked(point, config=config)
    for name in ("id", "model", "hardware", "source", "unit"):
        found[name] = str(point.get(name) or "")
    for name in ("n_devices", "batch", "seq", "params"):
        value = point.get(name)
        most = 1e15 if name == "params" else 1e7
        good = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < most
        whole = good and abs(value - round(value)) <= 1e-3 * value  # tokens over length, rounded
        found[name] = (value if good else None) if name == "params" else round(value) if whole else None
    if found.get("n_devices") is None and found["config"].get("dp"):
        found["n_devices"] = math.prod(found["config"].get(axis) or 1 for axis in ("tp", "pp", "cp", "dp"))
    return found
