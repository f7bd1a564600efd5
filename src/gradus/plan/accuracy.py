"""How right the plan's times are: published measurements predicted with their own model left out, beside a constant MFU.

`gradus plan --accuracy` prints the table; `benchmarks/groundtruth.py` scores a file of the same schema with the committed parameters.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gradus import hardware, limits
from gradus.errors import UserError
from gradus.hardware import Cluster, Device, Link
from gradus.plan import analytic, collectives, roofline
from gradus.plan.roofline import Parameters
from gradus.plan.step import step_time
from gradus.plan.work import Op, Work
from gradus.recipe.schema import GPTConfig, Layout, LlamaConfig, ModelConfig, ViTConfig

Point = dict[str, Any]

# Decoders that points call by name: (layers, d_model, heads). MPT: llm-foundry's configurations; GPT: Korthikanti et al. 2022, table 3.
MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32),
       "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}  # fmt: skip
GPT = {"GPT-22B": (48, 6144, 64), "GPT-175B": (96, 12288, 96), "MT-NLG-530B": (105, 20480, 128), "GPT-1T": (128, 25600, 160)}
# (layers, d_model, heads, kv_heads, d_ff, vocabulary)
LLAMA = {"tinyllama": (22, 2048, 32, 4, 5632, 32000), "llama 2 7": (32, 4096, 32, 32, 11008, 32000), "llama 2 13": (40, 5120, 40, 40, 13824, 32000),
         "llama 2 70": (80, 8192, 64, 8, 28672, 32000), "llama 3 8": (32, 4096, 32, 8, 14336, 128256), "llama 3 70": (80, 8192, 64, 8, 28672, 128256),
         "llama 3 405": (126, 16384, 128, 8, 53248, 128256)}  # fmt: skip
VIT = {"tiny": (12, 192, 3, 768), "small": (12, 384, 6, 1536), "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096),
       "huge": (32, 1280, 16, 5120), "giant": (40, 1408, 16, 6144), "gigantic": (48, 1664, 16, 8192)}  # fmt: skip


class NotCovered(Exception):
    """A point that the planner says nothing about; the text says why."""


@dataclasses.dataclass
class Case:
    """A point as the planner sees it. value: seconds of a step → the point's own unit."""

    point: Point
    group: str  # of the table
    model: str  # what is left out together
    measured: float
    profile: str = ""  # whose parameters: chip/software@site
    work: Work | None = None
    cluster: Cluster | None = None
    value: Callable[[float], float] = float
    direct: Callable[[dict[str, float]], float] | None = None  # of parameters to the value, for what is no step time
    base: float | None = None  # of which the baseline is a constant multiple, for what is no step time
    note: str = ""

    def predict(self, values: dict[str, float]) -> float:
        if self.direct is not None:
            return self.direct(values)
        return self.value(step_time(self.work, self.cluster, Parameters(**values)).total)

    def at_mfu(self, mfu: float) -> float:
        """The value at a constant model FLOPs utilisation."""
        peak = roofline.peak(self.cluster.device, self.work.micro[0].dtype)
        return self.value(self.work.model_flops / (self.cluster.n * peak * mfu))


def load(path: str | Path) -> list[Point]:
    """The points of a file. Raises UserError where it is no list of points."""
    points = limits.read_json(path, limits.POINTS_FILE)
    if not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
        raise UserError(f"{path}: not a list of points, each {{id, model, config, hardware, n_devices, batch, seq, metric, value, unit, source}}")
    return points


# ---------------------------------------------------------------- the points as work


def gpt(layers: int, d_model: int, heads: int, seq: int, vocab: int) -> GPTConfig:
    if not (0 < layers < 1e4 and 0 < d_model < 1e6 and 0 < vocab < 1e7):
        raise NotCovered(f"{layers} layers of width {d_model} over {vocab} words are no model")
    return GPTConfig(n_layers=layers, d_model=d_model, n_heads=heads, seq_len=seq, vocab_size=vocab)


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


def _divisor(total: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(total, limit)) + 1) if total % d == 0)


RATES = ("step_time", "tokens_per_s", "samples_per_s", "train_samples_per_s", "images_per_s", "mfu", "hfu", "model_tflops", "hardware_tflops",
         "aggregate_pflops")  # and each by _per_gpu; and days_for_300B_tokens, gpu_hours_for_300B_tokens  # fmt: skip
FOR_TOKENS = re.compile(r"(days|gpu_hours)_for_([\d.]+)([BT])_tokens")


def timed(metric: str) -> bool:
    """Whether a metric is a step's time in other words."""
    return metric.removesuffix("_per_gpu") in RATES or bool(FOR_TOKENS.fullmatch(metric))


def in_metric(point: Point, work: Work, device: Device, n: int, recompute: str = "none") -> Callable[[float], float]:
    """Seconds of a step → what the point's metric and unit make of them. Hardware FLOPs add what `recompute` ("full", "selective": attention's
    inner part) does again (Korthikanti et al. 2022, section 4). Raises NotCovered for a metric that is no step's time."""
    metric, unit = point["metric"], (point.get("unit") or "").lower()
    if not timed(metric):
        raise NotCovered(f"metric {metric} of this source: nothing predicts it")
    if found := FOR_TOKENS.fullmatch(metric):
        steps = float(found[2]) * {"B": 1e9, "T": 1e12}[found[3]] / work.tokens
        each = n / 3600 if found[1] == "gpu_hours" else 1 / 86400
        return lambda t: steps * t * each
    flops, name = work.model_flops, metric.removesuffix("_per_gpu")
    if name in ("hfu", "hardware_tflops", "aggregate_pflops"):
        core = sum(op.flops * op.count for op in work.micro
                   if op.phase == "forward" and (op.kind == "attention" or op.name in ("attention_scores", "attention_values")))  # fmt: skip
        flops *= {"full": 4 / 3, "selective": 1 + core * work.micro_batches * n / flops}.get(recompute, 1.0)
    share = 1 if unit in ("fraction", "ratio", "share") else 100
    among = n if metric.endswith("_per_gpu") else 1
    peak = n * roofline.peak(device, "bf16")
    return {"step_time": lambda t: t * (1e3 if unit == "ms" else 1), "tokens_per_s": lambda t: work.tokens / t / among,
            "mfu": lambda t: share * flops / t / peak, "hfu": lambda t: share * flops / t / peak, "aggregate_pflops": lambda t: flops / t / 1e15,
            "model_tflops": lambda t: flops / t / among / 1e12, "hardware_tflops": lambda t: flops / t / among / 1e12,
            }.get(name, lambda t: work.samples / t / among)  # fmt: skip


def _device(point: Point, known: str = "") -> Device:
    """The device that the point's text names: `known` (which of its kind the source has) where it is one of those, or not said."""
    text = str(point.get("hardware") or known)
    if known and roofline.family(text) == roofline.family(known):
        return hardware.find(known)
    words = re.sub(r"\(.*|,.*|NVIDIA|DGX[- ]|HGX[- ]", "", text).split()
    for name in (*(" ".join(words[:i]) for i in range(len(words), 0, -1)), roofline.family(text)):
        try:
            return hardware.find(name)
        except UserError:
            continue
    raise NotCovered(f"device {text or 'not given'}: not in the hardware file")


def _model(point: Point) -> ModelConfig:
    """A model by its stated sizes, else by its name."""
    from gradus.recipe.presets import PRESETS, config_of

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


def _site(device: Device, network: str | float | None) -> Device:
    if network is None:
        return device
    link = Link("network", network) if isinstance(network, float) else hardware.link(network)
    return dataclasses.replace(device, network=link)


def megatron(point: Point, device: Device, site: str, group: str, *, network=None, vocab=51200, virtual=1, sequence=None,
             precision="fp16", shard=1, pad=True) -> Case:  # fmt: skip
    """A run of Megatron-LM or Megatron-DeepSpeed."""
    c = point["config"]
    seq, n, batch = point["seq"] or 2048, point["n_devices"], point["batch"]
    name = re.sub(r"\s.*", "", point["model"])
    if c.get("hidden") is None and name in GPT:
        layers, hidden, heads = GPT[name]
    else:
        hidden, heads = c["hidden"], c.get("heads")
        layers = c.get("layers") or round((point["params"] - vocab * hidden) / (12 * hidden**2))
    heads = heads or max(1, hidden // 128)
    if hidden % heads:
        raise NotCovered(f"{heads} heads do not divide a width of {hidden}")
    tp, pp = c.get("tp") or 1, c.get("pp") or 1
    dp = n // (tp * pp)
    interleave = c.get("interleave") or virtual
    micro = c.get("micro_batch") or (1 if pp > 1 else _divisor(batch // dp, 8))
    recompute = {"full": "full", "selective": "selective"}.get(c.get("recompute"), "none")
    layout = Layout(precision=precision, tensor=tp, pipeline=pp, shard=shard, reduce_dtype=precision if shard > 1 else None, checkpointing=recompute,
                    micro_batch=micro, attention="naive", schedule="interleaved" if interleave > 1 and pp > 1 else "1f1b",
                    stages=interleave if pp > 1 else None, sequence_parallel=bool(c.get("sequence_parallel", sequence)))  # fmt: skip
    model = gpt(layers, hidden, heads, seq, vocab)
    work = analytic.analytic_work(model, layout, n, samples=batch, seq_len=seq, micro_batch=micro, style="megatron", pad=pad)
    work.software = f"megatron@{site}"
    return Case(point, group, point["model"], float(point["value"]), f"{roofline.family(device)}/{work.software}", work,
                Cluster(_site(device, network), n), in_metric(point, work, device, n, recompute))  # fmt: skip


def hardware_flops(layers: int, hidden: int, seq: int, batch: int, vocab: int = 51200) -> float:
    """Of a step with all activations computed again (Narayanan et al. 2021, equation 3)."""
    return 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def _vtrain(point: Point) -> Case:
    single = "single" in point["source"]
    device = _device(point, "A100-80GB")
    name = "vtrain-single" if single else "vtrain-multi"
    return megatron(point, device, name, name, network=None if single else 12.5e9,
                    vocab=point["config"].get("vocab") or 50257, pad=not single or point["config"].get("tp", 1) > 1)  # fmt: skip


def _on_one_node(point: Point) -> bool:
    """BLOOM's step times on one node: their own TFLOP/s and seconds agree with 512 samples a step, not with the 2,048 that are published."""
    return point.get("n_devices") == 8 and point.get("metric") == "step_time" and "bigscience" in str(point.get("source"))


def remarks(points: list[Point], results: list[Result] = ()) -> list[str]:
    """What a reader of the table must know of how the points were read, and whose parameters were taken."""
    n = sum(map(_on_one_node, points))
    text = "points of bloom time are read as 512 samples a step, not the published 2,048: their own TFLOP/s and seconds imply 512"
    notes = Counter(note for r in results for note in (r.case.note, *_foreign(r.case)) if note)
    return ([f"note: {n} {text}"] if n else []) + [f"note: {count} points: {note}" for note, count in notes.most_common()]


def _foreign(c: Case) -> tuple[str, ...]:
    software = c.profile.partition("/")[2]
    return roofline.parameters(c.cluster.device, software)[1] if c.direct is None and software else ()


def _bloom(point: Point) -> Case:
    if timed(point["metric"]):
        if _on_one_node(point):
            point = {**point, "batch": 512}
        bf16 = "bf16 +" in (point["config"].get("precision") or "")
        return megatron(point, _device(point, "A100-80GB"), "jean-zay", "bloom time", network="Omni-Path 100 (half a port)",
                        vocab=point["config"].get("vocab") or 250880, precision="bf16" if bf16 else "fp16")  # fmt: skip
    c = point["config"]
    hidden, vocab, tp, pp, dp, b, s = c["hidden"], c.get("vocab") or 250880, c["tp"], c["pp"], c["dp"], c["micro_batch"], point["seq"]
    layers = c.get("layers") or round((point["params"] - vocab * hidden) / (12 * hidden**2))
    heads = c.get("heads") or hidden // 128
    mine = -(-layers // pp)
    weights = (mine * 12 * hidden**2 + vocab * hidden) / tp
    kept = 8 if "bf16 +" in (c.get("precision") or "") else 4  # weights and gradients, in half precision; with fp32 sums of gradients 4 more
    state = weights * (kept + 16 / dp)  # ZeRO-1 (Rajbhandari et al. 2020), and its own part of the gradients in fp32 while it steps
    checkpoints = 2 * s * b * hidden * mine * min(pp, (point["batch"] or 2048) / (dp * b))
    live = s * b * hidden * (10 + 24 / tp + 5 * heads * s / (hidden * tp))  # of the layer that is computed again (Korthikanti et al. 2022)

    def total(v: dict[str, float]) -> float:
        return (state + checkpoints + v["live"] * live) / 1e9 + v["constant"]

    case = Case(point, "bloom memory", point["model"], float(point["value"]), "bloom memory", direct=total, base=1.0)
    if point["metric"] == "feasible":
        case.direct, case.group, case.base = lambda v: float(total(v) < 80 * 2**30 / 1e9), "feasible", None
    elif point["metric"] != "peak_memory":
        raise NotCovered(f"metric {point['metric']} of BLOOM")
    return case


def _korthikanti(point: Point) -> Case:
    if "Figure 1" in point["source"]:
        return _korthikanti_memory(point)
    point = {**point, "config": {"micro_batch": 1, "interleave": 3 if "530B" in point["model"] else 1, **point["config"]}}
    return megatron(point, _device(point, "A100-80GB"), "selene", "korthikanti", network="InfiniBand HDR", sequence=False)


def _narayanan(point: Point) -> Case:
    c, metric = point["config"], point["metric"]
    zero = c.get("scheme") == "zero3"
    case = megatron(point, _device(point, "A100-80GB"), "selene-zero3" if zero else "selene", "narayanan zero3" if zero else "narayanan",
                    network="InfiniBand HDR", virtual=2, shard=point["n_devices"] if zero else 1)  # fmt: skip
    if metric in ("hardware_tflops_per_gpu", "aggregate_pflops"):
        flops = hardware_flops(c["layers"], c["hidden"], point["seq"], point["batch"])
        each = point["n_devices"] * 1e12 if metric.endswith("per_gpu") else 1e15
        case.value = lambda t: flops / t / each
    return case


def _megatron2020(point: Point) -> Case:
    device = _device(point, "V100-32GB" if "V100" in point["hardware"] else "A100-40GB")
    if "DGX-2" in point["hardware"]:  # a switch between the GPUs, where the measured V100 node has a cube
        device = dataclasses.replace(device, link=Link("NVSwitch", device.link.bandwidth))
    return megatron(point, device, "2020", "megatron 2020")


def _mosaic(point: Point) -> Case:
    c = point["config"]
    size = point["model"].lower().removeprefix("mpt-")
    if size not in MPT:
        raise NotCovered(f"model {point['model']}: sizes not known")
    device = _device({**point, "hardware": point["hardware"].replace("_", "-")}, "H100-SXM")
    layers, hidden, heads = MPT[size]
    n, seq = point["n_devices"], point["seq"]
    layout = Layout(precision="pure_bf16" if c.get("mixed_precision_mode") == "PURE" else "bf16", shard=n,
                    checkpointing="full" if c.get("activation_checkpointing") else "none", micro_batch=c["micro_batch"])  # fmt: skip
    model = gpt(layers, hidden, heads, seq, 50368)
    fp8 = "fp8" in str(c.get("precision"))
    work = analytic.analytic_work(model, layout, n, samples=point["batch"], seq_len=seq, micro_batch=c["micro_batch"], style="mosaic",
                                  dtype="fp8" if fp8 else None)  # fmt: skip
    work.software = "mosaic"
    return Case(point, f"mosaic {point['hardware']}", point["model"], float(point["value"]), f"{roofline.family(device)}/mosaic", work,
                Cluster(device, n), in_metric(point, work, device, n, layout.checkpointing))  # fmt: skip


def _korthikanti_memory(point: Point) -> Case:
    """The paper's own analytic bars: equal to its formulas, or our reading of them is wrong."""
    name, metric = point["model"], point["metric"]
    layers, h, a = GPT[name]
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
    return Case(point, "korthikanti memory (closed form)", name, float(point["value"]), "exact", direct=lambda v: value / 2**30)


def _collective(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    device = _device(point)
    chip = roofline.family(device)
    if chip not in (roofline.fitted().get("links", {}) if collectives.MEASURED is None else collectives.MEASURED) and chip not in ("A100", "V100"):
        return Case(point, "collectives elsewhere", f"{c['bytes']} bytes", float(point["value"]), "links",
                    direct=lambda v: collectives.collective_seconds(c["op"], c["bytes"], n, 1, Cluster(device, n)))  # fmt: skip
    crossed = collectives.passes(c["op"], n) * c["bytes"]
    return Case(point, f"all-reduce {chip}", f"{c['bytes']} bytes", float(point["value"]), f"links/{chip}/{n}",
                direct=lambda v: v["alpha"] + crossed / v["beta"], base=crossed / 1e9)  # fmt: skip


def _plain(
    point: Point, device: Device, model: ModelConfig, layout: Layout, *, micro: int, software: str, group: str, style: str = "mosaic",
    dtype: str | None = None, n: int | None = None, samples: int | None = None, frozen: bool = False,
) -> Case:  # fmt: skip
    """A run of any other software."""
    n = n or point["n_devices"]
    seq = point["seq"] or getattr(model, "seq_len", 1)
    samples = samples or point["batch"]
    work = analytic.analytic_work(model, layout, n, samples=samples, seq_len=seq, micro_batch=micro, style=style, dtype=dtype, frozen=frozen)
    work.software = software
    return Case(point, group, point["model"], float(point["value"]), f"{roofline.family(device)}/{software}", work, Cluster(device, n),
                in_metric(point, work, device, n, layout.checkpointing))  # fmt: skip


def _flash(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    model = gpt(c["layers"], c["hidden"], c["heads"], point["seq"], 50304)
    layout = Layout(precision="bf16", checkpointing=c.get("recompute") or "none")
    samples = -(-point["batch"] // (8 * n)) * 8 * n
    return _plain(point, _device(point, "A100-80GB"), model, layout, micro=8, software="flash", group="flash-attention", samples=samples)


def _tinyllama(point: Point) -> Case:
    if "tinyllama" not in point["model"].lower():  # its README sets other models' whole runs beside its throughput
        return _hours(point)
    layout = Layout(precision="bf16", shard=16)
    model = llama("tinyllama", 2048)
    return _plain(point, _device(point, "A100-40GB"), model, layout, micro=8, software="mosaic", group="tinyllama", n=16, samples=16 * 8 * 4)


def _titan(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    if point["metric"] == "peak_memory":
        raise NotCovered("torchtitan's peak memory: its allocator and compiler are not modelled")
    model = llama(llama_name(point["model"]), point["seq"])
    text = json.dumps(c).lower()
    tensor, stages, context = c.get("tp") or 1, c.get("pp") or 1, c.get("cp") or 1
    schedule = "interleaved" if "interleaved" in (c.get("schedule") or "").lower() else "1f1b"
    shard = n // (tensor * stages * context)
    local = c.get("local_batch") or point["batch"] // shard
    layout = Layout(precision="bf16", shard=shard, tensor=tensor, pipeline=stages, context=context, schedule=schedule,
                    checkpointing=c.get("ac") if c.get("ac") in ("full", "selective", "none") else "none")  # fmt: skip
    case = _plain(point, _device(point, "H100-96GB-500W"), model, layout, micro=1 if stages > 1 else local, software="titan",
                  group="torchtitan", style="gradus", dtype="fp8" if "float8" in text else None)  # fmt: skip
    if "float8" in text:
        case.profile += "@rowwise" if "rowwise" in text else "@fp8"
    work = case.work
    if stages > 1:  # torchtitan keeps the gathered weights through a pipelined step
        work.transfers = [dataclasses.replace(t, calls=t.calls / work.micro_batches) if t.axis == "shard" else t for t in work.transfers]
    if "async" in text:  # the products and their gathers run in pieces beside one another
        work.transfers = [dataclasses.replace(t, payload=t.payload / 2) if t.axis == "tensor" else t for t in work.transfers]
    if c.get("compile"):
        work.micro = _fused(work.micro)
    if stages > 1 and shard > 1:  # and adds its gradients up whole, where others add up their own part
        work.micro = [dataclasses.replace(op, bytes=op.bytes * shard) if op.name == "accumulate" else op for op in work.micro]
    return case


def _fused(ops: list[Op]) -> list[Op]:
    """Elementwise operations as a compiler or Transformer Engine makes them: half the bytes."""
    return [dataclasses.replace(op, bytes=op.bytes / 2) if op.kind == "memory" else op for op in ops]


def _overlapped(work: Work) -> None:
    """Megatron-Core with Transformer Engine: tensor and data communication beside the computing, elementwise operations fused."""
    work.transfers = [dataclasses.replace(t, hidden_by="both") if t.axis in ("tensor", "replicate", "pipeline") else t for t in work.transfers]
    work.transfers = [dataclasses.replace(t, payload=t.payload / 4) if t.axis == "replicate" and t.kind == "all_reduce" else t
                      for t in work.transfers]  # bf16, scattered to the parts of the distributed optimizer instead of reduced everywhere
    work.micro = _fused(work.micro)


def _bridge(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    device = _device(point)
    model = llama(llama_name(point["model"]), point["seq"])
    tensor, stages, context, micro = c.get("tp") or 1, c.get("pp") or 1, c.get("cp") or 1, c.get("micro_batch") or 1
    virtual = c.get("vp") or 1
    precision = (c.get("precision") or "bf16").lower()
    dtype = "fp4" if "fp4" in precision else "fp8" if "fp8" in precision else None
    if dtype == "fp4" and "fp4" not in device.peaks:
        raise NotCovered(f"the fp4 peak of {device.name} is not known")
    shard = c.get("fsdp") or 1
    frozen = 16 * (point["params"] or 0) > n * device.memory  # what cannot be trained whole on so few is an adapter's fine-tuning
    layout = Layout(precision="bf16", tensor=tensor, pipeline=stages, context=context, shard=shard, shard_optimizer=shard == 1,
                    schedule="interleaved" if virtual > 1 and stages > 1 else "1f1b",
                    stages=virtual if virtual > 1 and stages > 1 else None)  # fmt: skip
    case = _plain(point, device, model, layout, micro=micro, software="mcore", group="megatron-bridge", style="gradus", dtype=dtype, frozen=frozen)
    case.profile += f"@{dtype}" if dtype else ""
    _overlapped(case.work)
    return case


def _mcore(point: Point) -> Case:
    c = point["config"]
    model = gpt(c["layers"], c["hidden"], c["heads"], point["seq"], c["vocab"])
    stages = c.get("pp") or 1
    layout = Layout(precision="bf16", tensor=c["tp"], pipeline=stages, shard_optimizer=True, schedule="interleaved" if stages > 1 else "1f1b")
    micro = c.get("micro_batch") or 1
    case = _plain(point, _device(point, "H100-SXM"), model, layout, micro=micro, software="mcore", group="megatron-core", style="gradus")
    _overlapped(case.work)
    return case


def _timm(point: Point) -> Case:
    name = point["model"]
    found = re.search(r"(vit|deit3?|beit(?:v2)?)_(tiny|small|medium|base|large|huge|giant|gigantic)(?:_distilled)?_patch(\d+)(?:_clip)?_(\d+)", name)
    if not found or found.group(2) not in VIT:
        raise NotCovered(f"model {name}: sizes not known")
    layers, width, heads, d_ff = VIT[found.group(2)]
    patch, size = int(found.group(3)), int(found.group(4))
    model = ViTConfig(n_layers=layers, d_model=width, n_heads=heads, d_ff=d_ff, patch_size=patch, image_size=size, n_classes=1000)
    layout = Layout(precision="fp16", attention="naive")
    batch = point["batch"]
    case = _plain(point, _device(point, "RTX-3090"), model, layout, micro=batch, software="timm", group="timm")
    case.model = found.group(0).replace("deit3_", "vit_").replace("deit_", "vit_").replace("beit_", "vit_").replace("_distilled", "")
    case.work.data_bytes = 0.0  # timm measures on one batch that stays on the device
    return case


# (layers, d_model, gated) of what litgpt's table names
LITGPT = {"phi 1.5 1.3": (24, 2048, False), "stablelm alpha 3": (16, 4096, False), "stablelm alpha 7": (16, 6144, False),
          "llama 2 7": (32, 4096, True), "llama 2 13": (40, 5120, True), "llama 2 70": (80, 8192, True),
          "falcon 7": (32, 4544, False), "falcon 40": (60, 8192, False),
          "falcon 180": (80, 14848, False), "platypus 30": (60, 6656, True), "tinyllama 1.1": (22, 2048, True)}  # fmt: skip


def _litgpt(point: Point) -> Case:
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
        raise NotCovered(f"quantisation {quant}: none of it to fit on")
    several = n > 1

    def memory(v: dict[str, float]) -> float:
        weights = count * ((v["quantised"] if quant else 2.0) if not several else v["sharded"])
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
        return Case(point, "litgpt time", name, float(point["value"]), "litgpt time", direct=minutes, base=float(count) ** 0.5)
    case = Case(point, "litgpt memory", name, float(point["value"]), "litgpt memory", direct=memory, base=float(count))
    if metric == "feasible":
        case.direct, case.group, case.base = lambda v: float(memory(v) < 40 * 2**30 / 1e9), "feasible", None
    elif metric != "peak_memory":
        raise NotCovered(f"metric {metric} of this source")
    return case


def _mamf(point: Point) -> Case:
    name = point["hardware"]
    peak = point["config"].get("theoretical") or roofline.peak(_device(point), "bf16") / 1e12
    maker = "nvidia" if re.search(r"[ABH][0-9]{2,}|GH|GB", name) and "MI" not in name else "amd" if "MI" in name else "other"
    return Case(point, "largest matmul", name, float(point["value"]), f"matmul/{maker}", direct=lambda v: v["share"] * peak, base=float(peak))


# (layers, d_model, tokens a sample) of whole runs that LLAMA does not have; for attention's operations. Touvron et al. 2023 (both)
WHOLE = {"llama 7": (32, 4096, 2048), "llama 13": (40, 5120, 2048), "llama 33": (60, 6656, 2048), "llama 65": (80, 8192, 2048),
         "llama 2 34": (48, 8192, 4096), "mpt 1.3": (24, 2048, 2048), "pythia 1.0": (16, 2048, 2048)}  # fmt: skip
# tokens, where a point has none
PRETRAINED = {"llama 7": 1e12, "llama 13": 1e12, "llama 33": 1.4e12, "llama 65": 1.4e12, "llama 2": 2e12, "llama 3": 15e12}


def _hours(point: Point) -> Case:
    """Device-hours of a whole run from its tokens: the operations of a token, over what large products reach of the peak, over one share for
    all runs (the rest of the step, restarts, stages of training)."""
    c, n, metric = point["config"], point["params"], point["metric"]
    name = re.sub(r"[\s_-]+", " ", str(point["model"]).lower())
    name = re.sub(r"(llama \d)\.\d", r"\1", name).removesuffix("b").strip()
    found = FOR_TOKENS.fullmatch(metric)
    tokens = float(found[2]) * {"B": 1e9, "T": 1e12}[found[3]] if found else c.get("tokens")
    tokens = tokens or PRETRAINED.get(name) or PRETRAINED.get(name[:7])
    if not tokens:
        raise NotCovered("the number of tokens is not known")
    if isinstance(tokens, str):  # "15T+"
        tokens = float(re.sub(r"[^0-9.]", "", tokens)) * (1e9 if "B" in tokens else 1e12)
    device = _device(point)
    sizes = (*LLAMA[name][:2], point["seq"] or 4096) if name in LLAMA else WHOLE.get(name)
    attention = 12 * math.prod(sizes) if sizes else 0.0  # its full matrix (Chowdhery et al. 2022); not counted where the sizes are not known
    whole = (6 * (c.get("active_params") or n) + attention) * tokens
    whole /= roofline.peak(device, "bf16") * roofline.parameters(device)[0].matmul * 3600
    watts, pue, grid = c.get("tdp_w") or device.power or math.nan, 1.1, 0.385  # the model cards' own convention

    def value(v: dict[str, float]) -> float:
        hours = whole / v["utilisation"]
        mwh = hours * watts * (1.0 if device.name.startswith("H100") else pue) / 1e6
        if found or metric in ("gpu_hours", "chip_hours", "days"):
            return hours / (24 * point["n_devices"] if metric == "days" or (found and found[1] == "days") else 1)
        return {"energy": mwh, "carbon": mwh * grid, "carbon_location_based": mwh * 0.41}[metric]

    return Case(point, "GPU-hours of whole runs", point["model"], float(point["value"]), "hours", direct=value, base=None)


def _patterson(point: Point) -> Case:
    """Book-keeping: the achieved rate and the power are the point's own inputs; no prediction."""
    c = point["config"]
    days = c["zettaflops"] * 1e21 / (point["n_devices"] * c["achieved_tflops"] * 1e12) / 86400
    mwh = point["n_devices"] * c["avg_system_w"] * days * 24 * c["pue"] / 1e6
    value = {"days": days, "energy": mwh, "carbon": mwh * c["kg_per_kwh"]}[point["metric"]]
    return Case(point, "energy and carbon (book-keeping)", point["model"], float(point["value"]), "exact", direct=lambda v: value)


COUNTED = {"GPT-2 small": "gpt2-small", "GPT-2 medium": "gpt2-medium", "GPT-2 large": "gpt2-large", "GPT-2 XL": "gpt2-xl", "GPT-3 175B": "gpt3-175b",
           "Llama-2-7B": "llama2-7b", "Llama-2-13B": "llama2-13b", "Llama-2-70B": "llama2-70b", "Llama-3.1-8B": "llama3.1-8b",
           "Llama-3.1-70B": "llama3.1-70b", "Llama-3.1-405B": "llama3.1-405b", "BERT-base BertModel": "bert-base-uncased",
           "BERT-large BertModel": "bert-large-uncased", "T5-small": "t5-small", "T5-base": "t5-base", "T5-large": "t5-large", "T5-3B": "t5-3b",
           "T5-11B": "t5-11b", "ViT-B/16": "vit-b16", "ViT-L/16": "vit-l16", "ViT-H/14": "vit-h14", "Mixtral-8x7B total": "mixtral-8x7b"}  # fmt: skip


def _count(point: Point) -> Case:
    from gradus.plan import formulas
    from gradus.recipe.presets import config_of

    name = re.sub(r" \(.*\)", "", point["model"])
    if name == "BART-large":  # no family of ours: its closed form (Lewis et al. 2020)
        h, f, v, layers = 1024, 4096, 50265, 12
        attention, feed = 4 * h * h + 4 * h, 2 * h * f + f + h
        value = v * h + 2 * (1026 * h + 2 * h) + layers * (attention + feed + 4 * h) + layers * (2 * attention + feed + 6 * h)
    elif name == "TinyLlama-1.1B":
        value = formulas.parameters(llama("tinyllama", 2048))["total"]
    else:
        training = name.endswith("ForPreTraining")
        preset = COUNTED.get(name.replace("ForPreTraining", "BertModel"))
        if preset is None:
            raise NotCovered(f"model {point['model']}: sizes not known")
        fields = {"head": "pretraining"} if training else {"n_classes": 1000} if preset.startswith("vit") else {}
        value = formulas.parameters(config_of(preset, **fields))["total"]
    return Case(point, "parameters (exact)", point["model"], float(point["value"]), "exact", direct=lambda v: float(value))


def _saved(point: Point) -> Case:
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
    return Case(point, "saved activations (closed form)", name, float(point["value"]), "exact", direct=lambda v: value)


READERS: list[tuple[str, str, Callable[[Point], Case]]] = [
    ("vTrain@f8dda84 data/ground_truth", "", _vtrain), ("vTrain@f8dda84 trace", "collective_time", _collective), ("bigscience", "", _bloom),
    ("Korthikanti", "", _korthikanti), ("Narayanan", "", _narayanan), ("Megatron-LM@152aab304d", "step_time", _megatron2020),
    ("llm-foundry", "tokens_per_s_per_gpu", _mosaic), ("flash-attention", "", _flash), ("TinyLlama", "", _tinyllama), ("torchtitan", "", _titan),
    ("Megatron-Bridge", "tokens_per_s_per_gpu", _bridge), ("Megatron-LM@d98e8a64dd", "", _mcore), ("pytorch-image-models", "", _timm),
    ("litgpt", "", _litgpt), ("MAMF", "max_achievable_matmul_tflops", _mamf), ("MLCarbon", "", _patterson), ("Touvron", "", _hours),
    ("meta-llama", "", _hours), ("DeepSeek-V3", "gpu_hours", _hours), ("", "parameter_count", _count), ("", "saved_activation_bytes_per_sbh", _saved),
]  # fmt: skip


# what odd fields lead to
WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, StopIteration, TypeError, UserError, ValueError)


def _elsewhere(point: Point) -> Case:
    """A run that no reader above knows: the layout as far as it is stated, with the parameters of the nearest software."""
    c, text = point["config"], json.dumps({k: v for k, v in point.items() if k != "note"}).lower()
    device, model = _device(point), _model(point)
    tensor, stages, context = (int(c.get(key) or 1) for key in ("tp", "pp", "cp"))
    dp = c.get("dp") or c.get("fsdp")
    n = point["n_devices"]
    batch = point["batch"] or c.get("batch") or (c.get("micro_batch") and dp and c["micro_batch"] * dp * (c.get("grad_accum") or 1))
    if not n or not batch:
        raise NotCovered(f"{'the number of devices' if not n else 'the batch'} is not given")
    if not c.get("tp") and n // (stages * context) > batch:  # split what has more devices than samples
        tensor = next(t for t in range(1, n + 1) if n % t == 0 and n // (t * stages * context) <= batch)
    groups = n // (tensor * stages * context)
    if groups < 1:
        raise NotCovered(f"{n} devices do not hold {tensor} x {stages} x {context}")
    micro = c.get("micro_batch") or (1 if stages > 1 else _divisor(max(batch // groups, 1), 8))
    mine, room = tensor * stages, device.capacity
    whole = c.get("zero") == 3 or any(word in text for word in ("fsdp", "zero-3", "full_shard")) or 16 * (point["params"] or 0) / mine > room
    tokens = point["seq"] or getattr(model, "seq_len", 512)
    kept = 34 * tokens * micro * model.d_model * model.n_layers / (tensor * context)  # bytes, of as many micro-batches as there are stages
    needed = point["metric"] == "hfu" or kept + 16 * (point["params"] or 0) / (mine * (groups if whole else 1)) > room
    recompute = str(c.get("recompute") or c.get("ac") or ("full" if c.get("activation_checkpointing", needed) else "none")).lower()
    recompute = recompute if recompute in ("full", "selective") else "none"
    style = "megatron" if "megatron" in text else "mosaic"
    layout = Layout(precision="fp16" if "fp16" in text else "fp32" if "fp32" in str(c.get("precision")) else "bf16", tensor=tensor, pipeline=stages,
                    context=context, shard=groups if whole else 1, shard_optimizer=not whole and c.get("zero") in (1, 2), checkpointing=recompute)
    case = _plain(point, device, model, layout, micro=micro, software=f"{style}@elsewhere", group="elsewhere", style=style, n=n,
                  samples=batch)  # fmt: skip
    case.note = f"a software without parameters of its own: those of {style} on {roofline.family(device)}, and its layout where it is stated"
    return case


def _by_metric(point: Point) -> Case:
    """What any source's point of a metric is predicted by."""
    metric = point["metric"]
    if timed(metric):
        return _elsewhere(point)
    reader = {"gpu_hours": _hours, "chip_hours": _hours, "energy": _hours, "carbon": _hours, "carbon_location_based": _hours,
              "collective_time": _collective, "max_achievable_matmul_tflops": _mamf}.get(metric)  # fmt: skip
    if reader is None:
        raise NotCovered(f"metric {metric}: nothing predicts it")
    return reader(point)


class _Asked(dict):
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


def _cleaned(point: Point) -> _Asked:
    """The point with every field of the schema: None where it is not given, or is nothing that such a field can be."""
    config = point.get("config")
    config = dict(config) if isinstance(config, dict) else {}
    for name in NUMBERS & config.keys():
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            del config[name]
    found = _Asked(point, config=config)
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


def case(point: Point) -> Case:
    """The point as work. Raises NotCovered."""
    value, metric = point.get("value"), point.get("metric")
    if not metric or not isinstance(metric, str):
        raise NotCovered("no metric")
    if not isinstance(value, int | float) or not math.isfinite(value) or (value <= 0 and metric != "feasible"):
        raise NotCovered(f"{metric}: the value is {value!r}, not a positive number")
    readers = [reader for text, only, reader in READERS if text in str(point.get("source") or "") and only in ("", metric)]
    why = ""
    for reader in (*readers[:1], _by_metric):
        cleaned = _Asked()
        try:
            cleaned = _cleaned(point)
            found = reader(cleaned)
            start, _ = specification(found.profile)
            if not math.isfinite(found.predict(start if found.direct else {**dataclasses.asdict(Parameters()), **start})):
                raise NotCovered(f"{metric}: no finite prediction")
            found.point = point
            return found
        except NotCovered as reason:
            why = why or str(reason)
        except WRONG as error:
            absent = ", ".join(cleaned.absent)
            said = f"config has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}".splitlines()[0]
            why = why or f"{metric}: " + (f"{absent} not given" if absent else said)
    raise NotCovered(why)


# ---------------------------------------------------------------- fitting

# Profile → (where the search starts, which is also what it is drawn towards; what is fitted). What is not named stays at its default.
SLOW_HOST = {"host": 3e-5, "wait": 2e-4, "straggle": 0.005}
FITS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "A100/megatron@vtrain-single": ({**SLOW_HOST, "misaligned": 0.3}, ("matmul", "depth", "bandwidth", "host", "kernel", "misaligned", "wait")),
    "A100/megatron@vtrain-multi": (SLOW_HOST, ("matmul", "depth", "bandwidth", "network", "latency", "wait", "straggle")),
    "A100/megatron@jean-zay": ({**SLOW_HOST, "bandwidth": 0.7}, ("matmul", "bandwidth", "network", "wait", "straggle")),
    # DeepSpeed of 2021 waits for each gather (torch.cuda.synchronize) and copies it: 5.1 G parameters in 0.47 s less 0.06 s of computing,
    # so 25 GB/s a device; here as a share of eight ports of 25 GB/s. https://github.com/deepspeedai/DeepSpeed/pull/1188 and issue 1174
    "A100/megatron@selene-zero3": ({"network": 0.125, "overlap": 0.0}, ("network",)),
    "A100/megatron@selene": ({}, ("matmul",)),
    "*/megatron@2020": ({}, ("matmul", "bandwidth")),
    "A100/mosaic": ({"contention": 0.3}, ("matmul", "bandwidth", "attention", "contention")),
    "H100/mosaic": ({"contention": 0.3, "matmul": 0.75}, ("matmul", "bandwidth", "attention", "contention", "network")),
    "A100/flash": ({}, ("matmul",)),
    "RTX3090/timm": ({}, ("matmul", "bandwidth", "depth")),
    # the fused attention of H100/mosaic; its share is not fitted again
    "H100/titan": ({"matmul": 0.65, "attention": 0.19}, ("matmul",)),
    "H100/titan@fp8": ({"matmul": 0.65, "attention": 0.19}, ("matmul",)),
    "H100/titan@rowwise": ({"matmul": 0.65, "attention": 0.19, "low": 0.5}, ("matmul",)),
    "*/mcore": ({"matmul": 0.75}, ("matmul",)),
    "links/*": ({"alpha": 5e-5, "beta": 1.5e11}, ("alpha", "beta")),
    "bloom memory": ({"constant": 8.0, "live": 1.5}, ("constant", "live")),
    "matmul/*": ({"share": 0.75}, ("share",)),
    "hours": ({"utilisation": 0.4}, ("utilisation",)),
    "litgpt time": ({"host": 3e-3, "adapter": 0.7, "adapter_v2": 0.8, "several": 2.0, "tokens": 300.0, "unpack": 1.2e-11, "gather": 1e11},
                    ("host", "adapter", "adapter_v2", "several", "unpack", "gather")),
    "litgpt memory": ({"quantised": 0.7, "sharded": 2.7, "adapter": 0.8, "activation": 38.0, "constant": 1.0},
                      ("quantised", "sharded", "adapter", "activation", "constant")),
}  # fmt: skip
# How far the logarithm of a parameter is expected to lie from its start; and what it cannot exceed.
SPREAD = {"matmul": 0.15, "bandwidth": 0.25, "network": 0.3, "contention": 0.5, "attention": 0.5, "misaligned": 0.5, "depth": 0.7, "kernel": 0.6,
          "host": 0.8, "share": 0.3, "constant": 0.5, "live": 0.5}  # fmt: skip
LIMIT = {"matmul": 1.0, "bandwidth": 0.95, "network": 1.0, "overlap": 1.0, "share": 1.0, "utilisation": 1.0}
SIGMA = 0.05  # of the logarithm of a measurement, within which errors count as squares and beyond which less


def specification(profile: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Start and fitted parameters of a profile."""
    chip, _, rest = profile.partition("/")
    software = rest.split("@")[0]
    for key in (profile, f"*/{rest}", f"*/{software}", f"{chip}/*"):
        if key in FITS:
            return FITS[key]
    return {}, ()


def fit(cases: list[Case], profile: str) -> dict[str, float]:
    """The parameters under which the logarithms of the measurements are met best, each drawn towards its start: Levenberg-Marquardt
    (Marquardt 1963) with numerical derivatives; errors beyond SIGMA count less (soft L1). Deterministic."""
    import numpy as np

    start, names = specification(profile)
    cases = [c for c in cases if c.group != "feasible"]  # yes or no has no logarithm
    general = {**{f.name: f.default for f in dataclasses.fields(Parameters)}, **start} if cases and cases[0].direct is None else dict(start)
    if not cases or not names:
        return general
    x0 = np.array([math.log(general[name]) for name in names])
    spread = np.array([SPREAD.get(name, 1.0) for name in names])

    def values(x) -> dict[str, float]:
        return {**general, **{name: min(math.exp(v), LIMIT.get(name, math.inf)) for name, v in zip(names, x, strict=True)}}

    def errors(x):
        v = values(x)
        return np.array([math.log(max(c.predict(v), 1e-30) / c.measured) / SIGMA for c in cases])

    def cost(e, x) -> float:
        return float(np.sum(2 * (np.sqrt(1 + e**2) - 1)) + np.sum(((x - x0) / spread) ** 2))

    x, damping = x0.copy(), 1e-2
    e = errors(x)
    best = cost(e, x)
    for _ in range(40):
        slopes = np.empty((len(e), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            step = -1e-3 if math.exp(x[i]) >= LIMIT.get(names[i], math.inf) else 1e-3
            moved[i] += step
            slopes[:, i] = (errors(moved) - e) / step
        weight = 1 / np.sqrt(1 + e**2)
        matrix = slopes.T @ (slopes * weight[:, None]) + np.diag(1 / spread**2)
        slope = slopes.T @ (weight * e) + (x - x0) / spread**2
        for _ in range(8):
            tried = x - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
            tried = np.minimum(tried, [math.log(LIMIT.get(name, math.inf)) for name in names])
            found = errors(tried)
            value = cost(found, tried)
            if value < best:
                break
            damping *= 4
        else:
            break
        done = best - value < 1e-4 * best
        x, e, best, damping = tried, found, value, damping / 6
        if done:
            break
    return values(x)


@dataclasses.dataclass
class Result:
    """A point, predicted. predicted: with its model left out (or with the committed parameters); baseline: at the constant of the rest."""

    case: Case
    predicted: float
    baseline: float | None = None

    @property
    def error(self) -> float:
        """Relative; of values that are 0 or 1 the difference."""
        return (self.predicted - self.case.measured) / (abs(self.case.measured) or 1.0)


def read(points: Iterable[Point]) -> tuple[list[Case], dict[str, list[Point]]]:
    """The points that the planner covers, and the others by the reason why not."""
    cases: list[Case] = []
    reasons: dict[str, list[Point]] = {}
    for point in points:
        try:
            cases.append(case(point))
        except NotCovered as reason:
            reasons.setdefault(str(reason), []).append(point)
    return cases, reasons


def _constant(c: Case) -> float | None:
    """What the baseline takes as constant: the utilisation (MFU) that a measured time means, or the value over its reference."""
    if c.direct is not None:
        return c.measured / c.base if c.base and c.measured > 0 else None
    ratio = c.measured / c.at_mfu(1.0)
    return ratio if c.value(2.0) < c.value(1.0) else 1 / ratio  # of a rate, or of a time


def _baseline(c: Case, constant: float | None) -> float | None:
    if constant is None or (c.direct is not None and not c.base):
        return None
    return c.at_mfu(constant) if c.direct is None else c.base * constant


def _kind(c: Case) -> str:
    """Within which the baseline is one constant: device and kind of source."""
    return c.group if c.cluster is None else f"{roofline.family(c.cluster.device)} {c.group}"


def constants(cases: list[Case]) -> dict[str, float]:
    """The baseline's constant of each kind: a geometric mean."""
    found: dict[str, list[float]] = {}
    for c in cases:
        constant = _constant(c)
        if constant:
            found.setdefault(_kind(c), []).append(math.log(constant))
    return {kind: math.exp(statistics.fmean(logs)) for kind, logs in found.items()}


def leave_one_out(points: Iterable[Point], progress: Callable[[str], None] = lambda text: None) -> tuple[list[Result], dict[str, list[Point]]]:
    """Every covered point predicted by parameters that were fitted without any point of its model; the baseline likewise."""
    cases, reasons = read(points)
    profiles: dict[str, list[Case]] = {}
    for c in cases:
        profiles.setdefault(c.profile, []).append(c)
    predicted: dict[int, float] = {}
    for profile, members in profiles.items():
        progress(profile)
        names = sorted({c.model for c in members}) if specification(profile)[1] else [None]
        for name in names:
            values = fit([c for c in members if c.model != name], profile)
            for c in members:
                if name in (None, c.model):
                    predicted[id(c)] = c.predict(values)
    rest: dict[str, dict[str, float]] = {}
    for c in cases:
        if c.model not in rest:
            rest[c.model] = constants([other for other in cases if other.model != c.model])
    return [Result(c, predicted[id(c)], _baseline(c, rest[c.model].get(_kind(c)))) for c in cases], reasons


def summary(results: list[Result]) -> dict[str, float | None]:
    """n, mean, median and largest absolute error, bias (geometric), the baseline's mean error and the skill over it."""
    errors = [abs(r.error) for r in results]
    both = [r for r in results if r.baseline is not None]
    baseline = statistics.fmean(abs(r.baseline - r.case.measured) / abs(r.case.measured) for r in both) if both else None
    mine = statistics.fmean(abs(r.error) for r in both) if both else None
    ratios = [math.log(r.predicted / r.case.measured) for r in results if r.predicted > 0 and r.case.measured > 0]
    return {"n": len(results), "mean": statistics.fmean(errors), "median": statistics.median(errors), "max": max(errors),
            "bias": math.exp(statistics.fmean(ratios)) - 1 if ratios else 0.0, "baseline": baseline,
            "skill": 1 - mine / baseline if baseline else None}  # fmt: skip


def grouped(results: list[Result]) -> dict[str, dict[str, float | None]]:
    groups: dict[str, list[Result]] = {}
    for r in results:
        groups.setdefault(r.case.group, []).append(r)
    table = {name: summary(rows) for name, rows in groups.items()}
    mosaic = [r for r in results if r.case.group.startswith("mosaic")]
    if mosaic:
        table["mosaic (all)"] = summary(mosaic)
    multi = [r for r in results if r.case.group in ("vtrain-multi", "bloom time", "korthikanti", "narayanan")]
    if multi:
        table["multi-node A100, Megatron (all)"] = summary(multi)
    return table


def table_lines(table: dict[str, dict[str, float | None]]) -> list[str]:
    def cell(value: float | None, sign: bool = False) -> str:
        return "–".rjust(8) if value is None else f"{100 * value:{'+' if sign else ''}8.1f}"

    lines = [f"{'group':36}{'points':>7}{'mean %':>9}{'median':>8}{'max':>8}{'bias':>8}{'constant':>9}{'skill':>7}"]
    for name, row in table.items():
        skill = "–".rjust(7) if row["skill"] is None else f"{row['skill']:7.2f}"
        numbers = "".join(cell(row[key]) for key in ("mean", "median", "max"))
        lines.append(f"{name:36}{int(row['n']):7d} {numbers}{cell(row['bias'], True)} {cell(row['baseline'])}{skill}")
    return lines


# ---------------------------------------------------------------- the file of parameters, and what is printed

# Whose parameters stand for a chip where the software is not named.
GENERAL = {"A100": "A100/mosaic", "A100/megatron": "A100/megatron@vtrain-multi", "H100": "H100/mosaic", "V100": "V100/megatron@2020",
           "RTX3090": "RTX3090/timm", "B200": "B200/mcore@fp8", "GB200": "GB200/mcore@fp8", "GB300": "GB300/mcore@fp8"}  # fmt: skip


def refit(points: list[Point], date: str, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """What `fitted.yaml` holds: parameters fitted on all points, the leave-one-model-out table, intervals. Deterministic."""
    links: dict[str, Any] = {}
    profiles: dict[str, list[Case]] = {}
    for c in read(points)[0]:
        profiles.setdefault(c.profile, []).append(c)
    for profile, cases in sorted(profiles.items()):
        if profile.startswith("links/"):
            _, chip, n = profile.split("/")
            values = fit(cases, profile)
            links.setdefault(chip, {"latency": {}, "bandwidth": {}})
            links[chip]["latency"][int(n)], links[chip]["bandwidth"][int(n)] = _short(values["alpha"]), _short(values["beta"])
    collectives.MEASURED = links  # what follows is fitted on top of them
    try:
        return _refit(points, date, progress, profiles, links)
    finally:
        collectives.MEASURED = None


def _refit(points: list[Point], date: str, progress: Callable[[str], None], profiles: dict[str, list[Case]], links: dict[str, Any]) -> dict[str, Any]:
    results, reasons = leave_one_out(points, progress)
    timed: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    for profile, cases in sorted(profiles.items()):
        start, names = specification(profile)
        if not names or profile.startswith("links/"):
            continue
        progress(profile)
        values = fit(cases, profile)
        sources = sorted({re.sub(r" \(.*|,.*", "", str(c.point["source"])) for c in cases})
        entry = {name: _short(values[name]) for name in sorted({*start, *names})}
        entry |= {"fitted": sorted(names), "points": len(cases), "data": sources}
        (timed if cases[0].direct is None else forms)[profile] = entry
    for name, source in GENERAL.items():
        if source in timed:
            timed[name] = {**json.loads(json.dumps(timed[source])), "as": source}
    ratios: dict[str, list[float]] = {}
    for r in results:
        if r.case.direct is None and r.case.group != "elsewhere":
            slower = r.case.measured / r.predicted  # of the value; a rate is the inverse of a time
            slower = 1 / slower if r.case.value(2.0) < r.case.value(1.0) else slower
            for key in (r.case.work.software.split("@")[0], "all"):
                ratios.setdefault(key, []).append(slower)
    intervals = {key: [_short(_quantile(v, 0.1)), _short(_quantile(v, 0.9))] for key, v in sorted(ratios.items()) if len(v) >= 20}
    many = Counter(_kind(r.case) for r in results)  # a constant of so few would be their own value
    table = {name: {k: (v if k == "n" or v is None else round(v, 4)) for k, v in row.items()} for name, row in grouped(results).items()}
    return {"date": date, "data": f"{len(points)} published points, {len(results)} of them predicted; sources at each entry",
            "meanings": MEANINGS, "profiles": timed, "links": links, "formulas": forms, "intervals": intervals,
            "constants": {k: _short(v) for k, v in sorted(constants([r.case for r in results]).items()) if many[k] > 3},
            "accuracy": table, "uncovered": {why: len(points) for why, points in reasons.items()}}  # fmt: skip


MEANINGS = {
    "matmul": "share of the dense peak that a large matrix product reaches where whole tiles fill the device",
    "depth": "length (of k) by which filling and emptying a product's pipeline makes it longer",
    "attention": "share of the dense peak that fused attention reaches, of the operations it does (causal: half)",
    "bandwidth": "share of the memory's bandwidth that memory-bound operations reach",
    "kernel": "s a kernel takes on the device whatever its size",
    "host": "s the host needs to launch a kernel; litgpt: for a layer",
    "network": "share of the network's bandwidth that collectives between nodes reach",
    "latency": "s of a collective between nodes for each doubling of the nodes; under links: of one collective",
    "overlap": "part of the computing time beside which communication can be hidden",
    "contention": "slowing of the computing while communication runs beside it, by the communication's time",
    "misaligned": "rate of half-precision products whose rows are no multiples of 8 long, by that of others",
    "low": "rate of fp8 and fp4 products, of what matmul says of their peak",
    "wait": "s the ranks of a group wait for one another at a collective that nothing hides",
    "straggle": "slowing for each doubling of the nodes",
    "constant": "GB a device holds besides what the formula counts: context, NCCL, allocator",
    "live": "times the live activations of the layer that is computed again",
    "share": "share of the dense peak of the largest matrix product",
    "utilisation": "6 N D over peak times the GPU-hours of whole runs, interruptions included",
}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def committed(profile: str) -> dict[str, float]:
    """The parameters of fitted.yaml for a profile; where it has none, the start of its fit."""
    start, _ = specification(profile)
    file = roofline.fitted()
    if profile.startswith("links/"):
        _, chip, n = profile.split("/")
        table = file.get("links", {}).get(chip)
        if not table:
            return start
        size = min(table["bandwidth"], key=lambda s: abs(s - int(n)))
        return {"alpha": table["latency"][size], "beta": table["bandwidth"][size]}
    if profile in file.get("formulas", {}):
        return {**start, **{k: v for k, v in file["formulas"][profile].items() if isinstance(v, float | int)}}
    if "/" not in profile:
        return start
    chip, _, software = profile.partition("/")
    return dataclasses.asdict(roofline.find_parameters(chip, software, roofline.FITTED)[0])


def score(points: Iterable[Point]) -> tuple[list[Result], dict[str, list[Point]]]:
    """Points of any file of the schema, with the committed parameters and the committed constants of the baseline: nothing is fitted."""
    cases, reasons = read(points)
    known = roofline.fitted().get("constants", {})
    return [Result(c, c.predict(committed(c.profile)), _baseline(c, known.get(_kind(c)))) for c in cases], reasons


def not_predicted(reasons: dict[str, list[Point]]) -> Iterator[str]:
    """The reasons, the most frequent first, each with its points' number and their first names."""
    for reason, points in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = ", ".join(str(p.get("id")) for p in points[:3])
        yield f"not predicted: {len(points):4d}  {reason}  ({names}{', ...' if len(points) > 3 else ''})"


WEAK = (
    "Where it is weak, and why. torchtitan: 405B at 8,192 tokens lost 35 to 55 % more time than its operations and bubble explain; there are two",
    "models, so leaving one out leaves one. megatron-core: two runs, likewise. GPU-hours: whole runs, whose restarts and stages are one share.",
    "megatron-bridge, largest matmul: one share a chip, or a maker; containers' versions and power limits differ and are not in the points.",
    "elsewhere: no parameters of that device or software; the layout is guessed where it is not stated.",
)


def lines(path: str | Path | None = None, progress: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """What `gradus plan --accuracy [POINTS.json]` prints: with a file, its points predicted with their model left out (about a minute and
    a half); without one, the table that was kept when the parameters were fitted."""
    if path is None:
        file = roofline.fitted()
        fitted = f"Fitted {file.get('date', 'never')} on {file.get('data', 'nothing')}."
        yield f"Errors of the plan's predictions, each point's model left out of the fit. {fitted}"
        table = file.get("accuracy", {})
        unpredicted = [f"not predicted: {n:4d}  {why}" for why, n in sorted(file.get("uncovered", {}).items(), key=lambda item: -item[1])]
    else:
        yield f"Errors of the plan's predictions on {Path(path).name}, each point's model left out of the fit."
        points = load(path)
        results, reasons = leave_one_out(points, progress)
        table, unpredicted = grouped(results), list(not_predicted(reasons))
        yield from remarks(points, results)
    yield (
        "Honest reading: parameters were refitted without each model, but formulas and starting values were chosen with all points in view; "
        "only points that were never seen are a clean test."
    )
    yield "constant: mean error of a constant utilisation (or value) that was learnt from the other models; skill: 1 - error / constant's error."
    yield from table_lines(table)
    yield from WEAK
    yield from unpredicted
