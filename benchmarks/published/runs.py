"""A published run as a recipe, a cluster and a software: one reader a source, and one for any other."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from gradus import hardware
from gradus.hardware import Cluster, Device, Link
from gradus.recipe.schema import Layout, ModelConfig, Recipe, ViTConfig
from published import software
from published.points import (
    GPT,
    MPT,
    Case,
    NotCovered,
    Point,
    device_of,
    divisor,
    gpt,
    in_metric,
    llama,
    llama_name,
    model_of,
    timed,
)

VIT = {"tiny": (12, 192, 3, 768), "small": (12, 384, 6, 1536), "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096),
       "huge": (32, 1280, 16, 5120), "giant": (40, 1408, 16, 6144), "gigantic": (48, 1664, 16, 8192)}  # fmt: skip


@dataclasses.dataclass
class Run:
    """A training run of another program."""

    recipe: Recipe
    cluster: Cluster
    software: str
    recompute: str = "none"  # none, selective (attention's inner part), full
    dtype: str = ""  # of linear layers' products, where it is not the traced one
    frozen: bool = False  # only adapters are trained
    asynchronous: bool = False  # tensor parallel communication runs beside the products
    context: int = 1  # processes that share a sequence: in the recipe each has a sample as long as its part
    virtual: int = 1  # stages a device, interleaved
    wide_gradients: bool = False  # added up in fp32 beside half ones

    @property
    def replicas(self) -> int:
        """Processes that see different tokens."""
        layout = self.recipe.layout
        return self.cluster.n // (layout.tensor * layout.pipeline)


LARGEST = 2**22, 10**5  # tokens of a micro-batch, micro-batches: what is traced in seconds


def recipe_of(model: ModelConfig, layout: Layout, samples: int) -> Recipe:
    """Raises NotCovered for what no device was given."""
    images, micro = isinstance(model, ViTConfig), min(layout.micro_batch or samples, samples)
    if micro * (1 if images else model.seq_len) > LARGEST[0] or samples / micro / layout.shard > LARGEST[1]:
        raise NotCovered(f"{samples} samples a step, {micro} at a time: too many for a device")
    return Recipe.model_validate({
        "name": "published", "model": model.model_dump(), "task": {"name": "classification" if images else "causal_lm"},
        "data": {"kind": "images" if images else "text", "path": "-"}, "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"samples": samples},
        "train": {"steps": 100, "clip_norm": 1.0}, "layout": layout.model_dump() | {"device": "cuda"},
    })  # fmt: skip


def made(point: Point, group: str, source: str, run: Run, **more: Any) -> Case:
    """The case of a run. Raises NotCovered where the metric is no step's time, UserError where the layout does not fit."""
    if not timed(point["metric"]):
        raise NotCovered(f"metric {point['metric']} of this source: nothing predicts it")
    work = software.work_of(run)
    value = in_metric(point, work, run.cluster, run.recompute, more.pop("hardware_flops", None))
    return Case(point, group, source, point["model"], float(point["value"]), work, run.cluster, value, **more)


def sharded(processes: int, reduced: str | None = None, half: str = "bf16") -> dict[str, Any]:
    """Of a layout: weights sharded over so many, computed with in half; of one process autocast."""
    return {"shard": processes, "param_dtype": half, "reduce_dtype": reduced} if processes > 1 else {"precision": half}


def on(device: Device, network: str | float | None) -> Device:
    """A device with the network of the place where it stood."""
    if network is None:
        return device
    return dataclasses.replace(device, network=Link("network", network) if isinstance(network, float) else hardware.links()[network])


# ---------------------------------------------------------------- Megatron


def megatron_run(point: Point, device: Device, *, vocab: int = 51200, virtual: int = 1, sequence: bool = False, precision: str = "pure_fp16",
                 shard: int = 1, pad: bool = True) -> Run:  # fmt: skip
    """A run of Megatron-LM or Megatron-DeepSpeed. pad: the vocabulary is a multiple of 128 × tensor."""
    c = point["config"]
    seq, n, batch = point["seq"] or 2048, point["n_devices"], point["batch"]
    name = re.sub(r"\s.*", "", point["model"])
    if c.get("hidden") is None and name in GPT:
        layers, hidden, heads = GPT[name]
    else:
        hidden, heads = c["hidden"], c.get("heads")
        layers = c.get("layers") or round((point["params"] - vocab * hidden) / (12 * hidden**2))
    tp, pp = c.get("tp") or 1, c.get("pp") or 1
    heads = heads or max(1, hidden // 128)
    if hidden % heads or heads % tp:  # not stated, or of no matter here
        heads = tp * max(1, round(hidden / 128 / tp))
        heads = next(h for h in range(heads, 0, -1) if hidden % h == 0 and h % tp == 0)
    dp = n // (tp * pp)
    interleave = c.get("interleave") or virtual
    micro = c.get("micro_batch") or (1 if pp > 1 else divisor(batch // dp, 8))
    recompute = {"full": "full", "selective": "selective"}.get(c.get("recompute"), "none")
    layout = Layout(precision=precision, tensor=tp, pipeline=pp, shard=shard, reduce_dtype="fp16" if shard > 1 else None,
                    checkpointing="full" if recompute == "full" else "none", micro_batch=micro, attention="naive",
                    sequence_parallel=tp == 1 or bool(c.get("sequence_parallel", sequence)))  # fmt: skip
    words = -(-vocab // (128 * tp)) * 128 * tp if pad else vocab
    model = gpt(layers, hidden, heads, seq, words, dropout=0.1)
    samples = max(1, round(batch / (dp * micro))) * dp * micro
    return Run(recipe_of(model, layout, samples), Cluster(device, n), "megatron", recompute, virtual=interleave if pp > 1 else 1)


def vtrain(point: Point) -> Case:
    single = "single" in point["source"]
    name = "vtrain-single" if single else "vtrain-multi"
    device = on(device_of(point, "A100-80GB"), None if single else 12.5e9)
    run = megatron_run(point, device, vocab=point["config"].get("vocab") or 50257, pad=not single or (point["config"].get("tp") or 1) > 1)
    return made(point, name, name, run)


def on_one_node(point: Point) -> bool:
    """BLOOM's step times on one node: their own TFLOP/s and seconds agree with 512 samples a step, not with the 2,048 that are published."""
    return point.get("n_devices") == 8 and point.get("metric") == "step_time" and "bigscience" in str(point.get("source"))


def bloom(point: Point) -> Case:
    wide = "bf16 +" in (point["config"].get("precision") or "")
    point = {**point, "batch": 512} if on_one_node(point) else point
    device = on(device_of(point, "A100-80GB"), "Omni-Path 100 (half a port)")
    run = megatron_run(point, device, vocab=point["config"].get("vocab") or 250880, precision="pure_bf16" if wide else "pure_fp16")
    run.wide_gradients = wide
    if point["metric"] in ("peak_memory", "feasible"):
        feasible = point["metric"] == "feasible"
        most = software.memory_of(run) / 1e9

        def total(v: dict[str, float]) -> float:
            return float(most + v["constant"] < 80 * 2**30 / 1e9) if feasible else most + v["constant"]

        return Case(point, "feasible" if feasible else "bloom memory", "bloom", point["model"], float(point["value"]), direct=total,
                    entry="memory/megatron", base=None if feasible else 1.0)  # fmt: skip
    return made(point, "bloom time", "bloom", run)


def korthikanti(point: Point) -> Case:
    point = {**point, "config": {"micro_batch": 1, "interleave": 3 if "530B" in point["model"] else 1, **point["config"]}}
    return made(point, "korthikanti", "korthikanti", megatron_run(point, on(device_of(point, "A100-80GB"), "InfiniBand HDR")))


def hardware_flops(layers: int, hidden: int, seq: int, batch: int, vocab: int = 51200) -> float:
    """Of a step with all activations computed again (Narayanan et al. 2021, equation 3)."""
    return 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def narayanan(point: Point) -> Case:
    c = point["config"]
    zero = c.get("scheme") == "zero3"
    run = megatron_run(point, on(device_of(point, "A100-80GB"), "InfiniBand HDR"), virtual=2, shard=point["n_devices"] if zero else 1)
    if zero:
        run.software = "zero3"
    flops = hardware_flops(c["layers"], c["hidden"], point["seq"], point["batch"])
    return made(point, "narayanan zero3" if zero else "narayanan", "narayanan zero3" if zero else "narayanan", run, hardware_flops=flops)


def megatron2020(point: Point) -> Case:
    device = device_of(point, "V100-32GB" if "V100" in point["hardware"] else "A100-40GB")
    if "DGX-2" in point["hardware"]:  # a switch between the GPUs, where the measured V100 node has a cube
        device = dataclasses.replace(device, link=Link("NVSwitch", device.link.bandwidth))
    return made(point, "megatron 2020", "megatron 2020", megatron_run(point, device))


# ---------------------------------------------------------------- others


def mosaic(point: Point) -> Case:
    c = point["config"]
    size = point["model"].lower().removeprefix("mpt-")
    if size not in MPT:
        raise NotCovered(f"model {point['model']}: sizes not known")
    device = device_of({**point, "hardware": point["hardware"].replace("_", "-")}, "H100-SXM")
    layers, hidden, heads = MPT[size]
    n, pure = point["n_devices"], c.get("mixed_precision_mode") == "PURE"
    full = bool(c.get("activation_checkpointing"))
    layout = Layout(**sharded(n, "bf16" if pure else None),
                    checkpointing="full" if full else "none", micro_batch=c["micro_batch"])  # fmt: skip
    model = gpt(layers, hidden, heads, point["seq"], 50368, bias=False)
    run = Run(recipe_of(model, layout, point["batch"]), Cluster(device, n), "mosaic", "full" if full else "none",
              "fp8" if "fp8" in str(c.get("precision")) else "")  # fmt: skip
    return made(point, f"mosaic {point['hardware']}", "mosaic", run)


def flash(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    model = gpt(c["layers"], c["hidden"], c["heads"], point["seq"], 50304)
    full = c.get("recompute") == "full"
    layout = Layout(precision="bf16", checkpointing="full" if full else "none", micro_batch=8)
    samples = -(-point["batch"] // (8 * n)) * 8 * n
    return made(point, "flash-attention", "flash-attention", Run(recipe_of(model, layout, samples), Cluster(device_of(point, "A100-80GB"), n), "flash", "full" if full else "none"))


def tinyllama(point: Point) -> Case:
    if "tinyllama" not in point["model"].lower() or point["metric"] == "gpu_hours":
        raise NotCovered("a whole run")
    layout = Layout(**sharded(16), micro_batch=8)
    model = llama("tinyllama", 2048)
    return made(point, "tinyllama", "tinyllama", Run(recipe_of(model, layout, 16 * 8 * 4), Cluster(device_of(point, "A100-40GB"), 16), "flash"))


def titan(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    if point["metric"] == "peak_memory":
        raise NotCovered("torchtitan's peak memory: its allocator and compiler are not modelled")
    text = json.dumps(c).lower()
    tensor, stages, context = c.get("tp") or 1, c.get("pp") or 1, c.get("cp") or 1
    schedule = "interleaved" if "interleaved" in (c.get("schedule") or "").lower() else "1f1b"
    shard = n // (tensor * stages)
    local = c.get("local_batch") or point["batch"] * context // shard
    ac = c.get("ac") if c.get("ac") in ("full", "selective") else "none"
    model = llama(llama_name(point["model"]), point["seq"] // context)
    layout = Layout(**sharded(shard), tensor=tensor, pipeline=stages, checkpointing=ac, micro_batch=1 if stages > 1 else local)
    run = Run(recipe_of(model, layout, local * shard), Cluster(device_of(point, "H100-96GB-500W"), n), "titan", ac, "fp8" if "float8" in text else "",
              asynchronous=bool(c.get("async_tp")) or "async" in str(c.get("tp_kind")), context=context, virtual=2 if schedule == "interleaved" else 1)  # fmt: skip
    return made(point, "torchtitan", "torchtitan " + ("70B" if "asyncTP" in point["source"] else "405B"), run)


def bridge(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    device = device_of(point)
    tensor, stages, context, micro = c.get("tp") or 1, c.get("pp") or 1, c.get("cp") or 1, c.get("micro_batch") or 1
    virtual = (c.get("vp") or 1) if stages > 1 else 1
    precision = (c.get("precision") or "bf16").lower()
    dtype = "fp4" if "fp4" in precision else "fp8" if "fp8" in precision else ""
    if dtype == "fp4" and "fp4" not in device.peaks:
        raise NotCovered(f"the fp4 peak of {device.name} is not known")
    shard = c.get("fsdp") or 1
    frozen = 16 * (point["params"] or 0) > n * device.memory  # what cannot be trained whole on so few is an adapter's fine-tuning
    held = sharded(shard * context) if shard > 1 else {"precision": "pure_bf16"}
    layout = Layout(**held, tensor=tensor, pipeline=stages, micro_batch=micro)
    model = llama(llama_name(point["model"]), point["seq"] // context)
    run = Run(recipe_of(model, layout, point["batch"] * context), Cluster(device, n), "mcore", dtype=dtype, frozen=frozen, context=context, virtual=virtual)
    return made(point, "megatron-bridge", "megatron-bridge", run)


def mcore(point: Point) -> Case:
    c, n = point["config"], point["n_devices"]
    stages, micro = c.get("pp") or 1, c.get("micro_batch") or 1
    layout = Layout(precision="pure_bf16", tensor=c["tp"], pipeline=stages, micro_batch=micro)
    model = gpt(c["layers"], c["hidden"], c["heads"], point["seq"], c["vocab"])
    run = Run(recipe_of(model, layout, point["batch"]), Cluster(device_of(point, "H100-SXM"), n), "mcore", virtual=2 if stages > 1 else 1)
    return made(point, "megatron-core", "megatron-core", run)


def timm(point: Point) -> Case:
    name = point["model"]
    found = re.search(r"(vit|deit3?|beit(?:v2)?)_(tiny|small|medium|base|large|huge|giant|gigantic)(?:_distilled)?_patch(\d+)(?:_clip)?_(\d+)", name)
    if not found or found.group(2) not in VIT:
        raise NotCovered(f"model {name}: sizes not known")
    layers, width, heads, d_ff = VIT[found.group(2)]
    patch, size = int(found.group(3)), int(found.group(4))
    model = ViTConfig(n_layers=layers, d_model=width, n_heads=heads, d_ff=d_ff, patch_size=patch, image_size=size, n_classes=1000)
    layout = Layout(precision="fp16", attention="naive", micro_batch=point["batch"])
    case = made(point, "timm", "timm", Run(recipe_of(model, layout, point["batch"]), Cluster(device_of(point, "RTX-3090"), point["n_devices"]), "timm"))
    case.model = found.group(0).replace("deit3_", "vit_").replace("deit_", "vit_").replace("beit_", "vit_").replace("_distilled", "")
    return case


def elsewhere(point: Point) -> Case:
    """A run that no reader above knows: the layout as far as it is stated, by the nearest software."""
    c, text = point["config"], json.dumps({k: v for k, v in point.items() if k != "note"}).lower()
    device, model = device_of(point), model_of(point)
    tensor, stages, context = (int(c.get(key) or 1) for key in ("tp", "pp", "cp"))
    dp = c.get("dp") or c.get("fsdp")
    n = point["n_devices"]
    batch = point["batch"] or c.get("batch") or (c.get("micro_batch") and dp and c["micro_batch"] * dp * (c.get("grad_accum") or 1))
    if not n or not batch:
        raise NotCovered(f"{'the number of devices' if not n else 'the batch'} is not given")
    if not c.get("tp") and n // (stages * context) > batch:  # split what has more devices than samples
        tensor = next(t for t in range(1, n + 1) if n % t == 0 and n // (t * stages * context) <= batch and model.n_heads % t == 0)
    groups = n // (tensor * stages * context)
    if groups < 1 or groups * tensor * stages * context != n:
        raise NotCovered(f"{n} devices are no multiple of {tensor} x {stages} x {context}")
    micro = min(c.get("micro_batch") or (1 if stages > 1 else divisor(max(batch // groups, 1), 8)), max(1, batch // groups))
    mine, room = tensor * stages, device.capacity
    whole = c.get("zero") == 3 or any(word in text for word in ("fsdp", "zero-3", "full_shard")) or 16 * (point["params"] or 0) / mine > room
    tokens = point["seq"] or getattr(model, "seq_len", 512)
    kept = 34 * tokens * micro * model.d_model * model.n_layers / (tensor * context)  # bytes, of as many micro-batches as there are stages
    needed = point["metric"] == "hfu" or kept + 16 * (point["params"] or 0) / (mine * (groups if whole else 1)) > room
    recompute = str(c.get("recompute") or c.get("ac") or ("full" if c.get("activation_checkpointing", needed) else "none")).lower()
    recompute = recompute if recompute in ("full", "selective") else "none"
    name = next((name for name, words in NAMED.items() if any(word in text for word in words)), "mosaic")
    whole = whole and groups > 1
    half = "fp16" if "fp16" in text else "fp32" if "fp32" in str(c.get("precision")) else "bf16"
    pure = software.table()[name].precision.startswith("pure_") and half != "fp32" and not whole
    held = sharded(groups * context, half=half) if whole and half != "fp32" else {"precision": f"pure_{half}" if pure else half, "shard": groups * context if whole else 1}
    layout = Layout(**held, tensor=tensor, pipeline=stages, micro_batch=micro, attention="naive" if software.table()[name].attention == "plain" else "sdpa",
                    sequence_parallel=tensor == 1 or bool(c.get("sequence_parallel", name != "megatron")),
                    checkpointing="full" if recompute == "full" else "none")  # fmt: skip
    if context > 1:
        model = model.model_copy(update={"seq_len": (point["seq"] or model.seq_len) // context})
    samples = max(1, round(batch / (groups * micro))) * groups * micro
    case = made(point, "elsewhere", "elsewhere " + str(point["source"])[:40], Run(recipe_of(model, layout, samples * context), Cluster(device, n), name, recompute, context=context))
    case.note = f"a source without a reader of its own: read as a run of {name}, its layout where it is stated"
    return case


NAMED = {"mcore": ("megatron-core", "megatron-bridge", "nemo"), "megatron": ("megatron",), "titan": ("torchtitan", "fsdp2"),
         "timm": ("timm", "pytorch-image-models"), "flash": ("flash-attention", "flash_attention")}  # fmt: skip
