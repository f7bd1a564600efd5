"""A published training run as a recipe, a cluster and a program: read by its fields, whatever source it is from."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from gradus import hardware
from gradus.hardware import Cluster, Device, Link
from gradus.plan import case as plan
from gradus.plan import engine
from gradus.recipe.schema import GPTConfig, Layout, ModelConfig, Recipe, ViTConfig
from published import software
from published.points import READING, Case, NotCovered, Point, device_of, divisor, in_metric, model_of, padded, timed


@dataclasses.dataclass
class Run:
    """A training run of another program."""

    recipe: Recipe
    cluster: Cluster
    software: str
    recompute: str = "none"  # none, selective (attention's inner part), cheap (all but products), half (and every other product), full
    dtype: str = ""  # of linear layers' products, where it is not the traced one
    asynchronous: bool = False  # tensor parallel communication runs beside the products
    context: int = 1  # processes that share a sequence: in the recipe each has a sample as long as its part
    gathered: bool = False  # the whole sequence comes together for attention: tensor parallelism beside experts
    sliced: int = 1  # stages of a pipeline of experts, which Gradus refuses: the recipe is of one stage alone, of so many
    layers: int = 0
    virtual: int = 1  # stages a device, interleaved

    @property
    def replicas(self) -> int:
        """Processes that see different tokens."""
        layout = self.recipe.layout
        return self.cluster.n // (layout.tensor * layout.pipeline * self.sliced)


LARGEST = 2**22, 10**5  # tokens of a micro-batch, micro-batches: what is traced in seconds


def recipe_of(model: ModelConfig, layout: Layout, samples: int, adapter: dict[str, Any] | None = None) -> Recipe:
    """Raises NotCovered for what no device was given."""
    images, micro = isinstance(model, ViTConfig), min(layout.micro_batch or samples, samples)
    if micro * (1 if images else model.seq_len) > LARGEST[0] or samples / micro / layout.shard > LARGEST[1]:
        raise NotCovered(f"{samples} samples a step, {micro} at a time: too many for a device")
    return Recipe.model_validate({
        "name": "published", "model": model.model_dump(), "task": {"name": "classification" if images else "causal_lm"},
        "data": {"kind": "images" if images else "text", "path": "-"}, "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"samples": samples},
        "train": {"steps": 100, "clip_norm": 1.0}, "layout": layout.model_dump() | {"device": "cuda"}, "adapter": adapter,
    })  # fmt: skip


def made(point: Point, run: Run) -> Case:
    """The case of a run. Raises NotCovered where the metric is no step's time, UserError where the layout does not fit."""
    if not timed(point["metric"]):
        raise NotCovered(f"metric {point['metric']}: nothing predicts it of a run")
    work = software.work_of(run)
    value = in_metric(point, work, run.cluster, run.recompute)
    return Case(point, "", "", point["model"], float(point["value"]), work, run.cluster, value, run=run)


# ---------------------------------------------------------------- fields


def words(point: Point, *names: str) -> str:
    """What stands in these fields of the configuration, in lower case."""
    return " ".join(str(point["config"].get(name) or "") for name in names).lower()


def program_of(point: Point, device: Device, sharded: bool, experts: bool = False) -> str:
    """The program that a run was of, and its way with experts, of the version that is stated."""
    name, text = _program_of(point, device, sharded), words(point, "container")
    names = [f"{name}-experts", *(n for n, entry in software.table().items() if n.startswith(f"{name}-experts-") and any(w in text for w in entry.versions))]
    return [n for n in (name, *names) if n in software.table()][-1] if experts else name


def _program_of(point: Point, device: Device, sharded: bool) -> str:
    """By the name of its framework, else by what its other fields say."""
    c, text = point["config"], words(point, "framework", "container", "kernels", "scheme")
    known = next((name for name, entry in software.table().items() if any(word in text for word in entry.words)), None)
    if known:
        return known
    if device.kind == "tpu" or "remat" in words(point, "recompute"):
        return "maxtext"
    if c.get("compile") or c.get("float8") or c.get("ac") or "compile" in words(point, "steps_of_ladder"):
        return "titan"
    if sharded or c.get("steps_of_ladder"):
        return "flash" if c.get("flash_attention") else "mosaic"
    if not c.get("tp") or ("zero" in c and c["tp"] * (c.get("pp") or 1) == 1):
        return "flash"
    return "mcore" if device.peaks.get("fp8") or c.get("ep") else "megatron"


def recomputed(point: Point) -> str:
    """What a run computes again, as far as it says so: a way of Run.recompute; "" where it does not."""
    c = point["config"]
    text = str(c.get("recompute") or c.get("ac") or c.get("activation_checkpointing", "")).lower().replace("false", "none")
    if "activation checkpointing" in words(point, "steps_of_ladder"):
        return "full"
    return next((way for pattern, way in READING["recomputed"].items() if re.match(pattern, text)), "")


def precision_of(point: Point) -> tuple[str, str]:
    """(half type, type of linear layers' products where it is another)."""
    text = words(point, "precision") + (" fp8" if point["config"].get("float8") else "")
    dtype = "fp4" if "fp4" in text else "fp8" if re.search(r"fp8|float8", text) else ""
    return "fp16" if "fp16" in text else "bf16", dtype


def adapter_of(point: Point, n: int, device: Device, beside: str) -> dict[str, Any] | None:
    """Small matrices beside a frozen base, where the run trained only such: said so, or no room for a whole optimizer."""
    method = words(point, "method", "steps_of_ladder")
    small = not method and precision_of(point)[1] and 16 * (point["params"] or 0) > n * device.memory
    if "lora" not in method and not small:
        return None
    return {"rank": 16, "targets": [beside], "base": "nf4" if "qlora" in method else None}


def device_at(point: Point) -> Device:
    """The device, with the links of the place where it stood."""
    device, place = device_of(point), point["hardware"].lower()
    network = next((hardware.links()[name] for word, name in READING["networks"].items() if word in place), None)
    if "dgx-2" in place:  # a switch between the GPUs, where the measured V100 node has a cube
        device = dataclasses.replace(device, link=Link("NVSwitch", device.link.bandwidth))
    if bandwidth := point["config"].get("network"):
        network = Link("network", bandwidth)
    return dataclasses.replace(device, network=network) if network else device


def on_one_node(point: Point) -> bool:
    """BLOOM's step times on one node: their own TFLOP/s and seconds agree with 512 samples a step, not with the 2,048 that are published."""
    return point.get("n_devices") == 8 and point.get("metric") == "step_time" and "bigscience" in str(point.get("source"))


def completed(point: Point) -> Point:
    """With what its source says of all its runs."""
    more = next((more for text, more in READING["sources"].items() if text in point["source"]), {})
    return type(point)(point, config={**more, **point["config"]}, batch=512 if on_one_node(point) else point.get("batch"))


NODE = 8  # devices that tensor parallelism is assumed to go over, where it is not stated


@dataclasses.dataclass
class Degrees:
    """How many processes share what. groups: those that see different tokens, parts of a sequence counted apart."""

    tensor: int
    stages: int
    context: int
    expert: int
    groups: int


def degrees_of(point: Point, model: ModelConfig, n: int, batch: int) -> Degrees:
    """As stated; where there are more devices than samples and nothing is said, tensor parallelism in a node makes up for it, then a pipeline;
    a dispatcher of experts without a degree goes over all."""
    c, heads = point["config"], getattr(model, "n_kv_heads", None) or model.n_heads
    tensor, stages, context = (int(c.get(key) or 1) for key in ("tp", "pp", "cp"))
    if not c.get("tp") and (ways := n // (stages * context * batch)) > 1:
        tensor = max(t for t in range(1, min(ways, NODE) + 1) if ways % t == 0 and heads % t == 0)
        stages *= ways // tensor
    experts = getattr(model, "n_experts", None)
    if experts and tensor > 1:  # which it does not split: their processes take parts of the sequence
        tensor, context = 1, context * tensor
    groups = n // (tensor * stages)
    if groups < 1 or groups * tensor * stages != n or groups % context:
        raise NotCovered(f"{n} devices are no multiple of {tensor} x {stages} x {context}")
    most = groups if (c.get("ep") or 1) == 1 and "deepep" in words(point, "kernels") else c.get("ep") or 1
    expert = next((e for e in range(min(most, groups), 0, -1) if groups % e == 0 and experts % e == 0), 1) if experts else 1
    return Degrees(tensor, stages, context, expert, groups)


def whole_sharded(point: Point, device: Device, held: int) -> bool:
    """Whether weights are sharded over all replicas (FSDP, ZeRO-3): said so, or no room for them. held: the parameters of one process."""
    c, text = point["config"], words(point, "zero", "sharding", "scheme", "framework", "fsdp")
    said = re.search(r"fsdp|zero-?3|full_shard|^3", text) or (c.get("fsdp") or 0) > 1 or str(c.get("zero")) == "3"
    return bool(said) or (16 * held > device.capacity and not c.get("tp"))


def training(point: Point) -> Case:
    """A point of a training run. Raises NotCovered for what is not stated and cannot be assumed."""
    point = completed(point)
    c, n = point["config"], point["n_devices"]
    if re.search(r"(vit|deit3?|beit(?:v2)?)_", point["model"]):
        return timm(point)
    device, model = device_at(point), model_of(point)
    shape = f"{model.family} {model.n_layers} x {model.d_model}" + (f", {model.n_experts} experts" if getattr(model, "n_experts", None) else "")
    batch = point["batch"] or c.get("batch") or (c.get("micro_batch") and c.get("dp") and c["micro_batch"] * c["dp"] * (c.get("grad_accum") or 1))
    batch = batch or (n and point["metric"] == "tokens_per_s_per_gpu" and c.get("fsdp") and 32 * n)  # of no matter to a rate
    if not n or not batch:
        raise NotCovered(f"{'the number of devices' if not n else 'the batch'} is not given")
    d, (half, dtype) = degrees_of(point, model, n, batch), precision_of(point)
    if dtype == "fp4" and "fp4" not in device.peaks:
        raise NotCovered(f"the fp4 peak of {device.name} is not known")
    sharded = whole_sharded(point, device, (point["params"] or 0) / (d.tensor * d.stages)) and d.groups > 1
    name = program_of(point, device, sharded, getattr(model, "n_experts", None) is not None)
    program = software.table()[name]
    parts, local = batch * d.context, c.get("local_batch") or 0
    micro = c.get("micro_batch") or (1 if d.stages > 1 else local or divisor(max(parts // d.groups, 1), 8))
    micro = max(1, min(int(micro), parts // d.groups))
    samples = max(1, round(parts / (d.groups * micro))) * d.groups * micro
    if isinstance(model, GPTConfig) and name in ("megatron", "zero3"):
        model = model.changed(dropout=0.1, **({} if c.get("unpadded") and d.tensor == 1 else {"vocab_size": padded(model.vocab_size, d.tensor)}))
    if d.context > 1:
        model = model.changed(seq_len=model.seq_len // d.context)
    sliced, layers = d.stages if getattr(model, "n_experts", None) else 1, model.n_layers
    if sliced > 1:
        model = model.changed(n_layers=-(-model.n_layers // sliced), dense_layers=[])
    shard = d.groups // d.expert if sharded else 1
    if device.kind == "tpu":  # between slices weights are replicated
        shard = d.groups // (c.get("slices") or max(1, n // device.node))
    kinds = {"reduce_dtype": half} if c.get("mixed_precision_mode") == "PURE" else {}
    held = {"shard": shard, "param_dtype": half, **kinds} if shard > 1 else {"precision": half}
    tuned = "steps_of_ladder" in c or words(point, "method") not in ("", "pre-training")  # in the type that weights are stored in
    if (program.precision.startswith("pure_") or tuned) and shard == 1:
        held = {"precision": f"pure_{half}" if c.get("precision") else program.precision}
    if sharded and shard == 1:
        held = {"precision": f"pure_{half}"}
    if name == "zero3":
        held = {"precision": program.precision, "shard": shard, "reduce_dtype": "fp16"}
    held["offload"] = shard > 1 and "cpu offload" in words(point, "method")
    layout = Layout(**held, tensor=d.tensor, pipeline=d.stages // sliced, expert=d.expert, micro_batch=micro, attention="naive" if program.attention == "plain" else "sdpa",
                    sequence_parallel=d.tensor == 1 or bool(c.get("sequence_parallel", name != "megatron")))  # fmt: skip
    run = Run(recipe_of(model, layout, samples, adapter_of(point, n, device, program.adapter)), Cluster(device, n), name, dtype=dtype, context=d.context, sliced=sliced, layers=layers, gathered=d.context > (c.get("cp") or 1),
              asynchronous=bool(c.get("async_tp")) or "async" in str(c.get("tp_kind")),
              virtual=virtual_of(point) if d.stages > 1 else 1)  # fmt: skip
    run = with_recompute(run, recomputed(point) or program.recompute)
    found = made(point, run)
    found.model = shape
    return found


def virtual_of(point: Point) -> int:
    """Stages a device."""
    c = point["config"]
    return int(c.get("vp") or c.get("interleave") or (2 if "interleaved" in words(point, "schedule") else 1))


def with_recompute(run: Run, way: str) -> Run:
    """The run with what it computes again. needed: all, where the whole does not fit."""
    if way == "needed":
        memory = engine.memory_of(engine.processes(plan.Case.of(run.recipe, run.cluster.n // run.sliced, "cuda")))
        way = "full" if memory.reserved > run.cluster.device.capacity else "none"
    checkpointing = {"full": "full", "cheap": "selective", "half": "selective"}.get(way, "none")
    layout = run.recipe.layout.model_copy(update={"checkpointing": checkpointing})
    return dataclasses.replace(run, recipe=run.recipe.model_copy(update={"layout": layout}), recompute=way)


def timm(point: Point) -> Case:
    name = point["model"]
    found = re.search(r"(vit|deit3?|beit(?:v2)?)_(tiny|small|medium|base|large|huge|giant|gigantic)(?:_distilled)?_patch(\d+)(?:_clip)?_(\d+)", name)
    if not found or found.group(2) not in READING["vit"]:
        raise NotCovered(f"model {name}: sizes not known")
    layers, width, heads, d_ff = READING["vit"][found.group(2)]
    patch, size = int(found.group(3)), int(found.group(4))
    model = ViTConfig(n_layers=layers, d_model=width, n_heads=heads, d_ff=d_ff, patch_size=patch, image_size=size, n_classes=1000)
    layout = Layout(precision="fp16", attention="naive", micro_batch=point["batch"])
    case = made(point, Run(recipe_of(model, layout, point["batch"]), Cluster(device_of(point), point["n_devices"]), "timm"))
    case.model = found.group(0).replace("deit3_", "vit_").replace("deit_", "vit_").replace("beit_", "vit_").replace("_distilled", "")
    return case
