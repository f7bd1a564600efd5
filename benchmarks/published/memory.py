"""Peak memory of other programs: read by fields, planned from the processes of a step of Gradus, with what `kept.yaml` says a program keeps otherwise."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np

from gradus import models
from gradus.layers.small import BUFFERS
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.peak import peak_of
from gradus.plan.process import Process, local_bytes
from gradus.plan.profiles import INDEX, Piece, Profile, Stretch
from gradus.plan.profiles import N as COMPONENTS
from gradus.plan.stage import Stage
from gradus.recipe.schema import Adapter, GPTConfig, Layout, LlamaConfig, ModelConfig, Recipe
from published import points, runs
from published.points import READING, NotCovered, Point, Program

METRICS = {"peak_memory": "", "peak_reserved_memory": "reserved", "allocated_memory_after_step": "after"}
GIB = 2**30


def programs() -> dict[str, Program]:
    return points.programs("kept.yaml")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A base that is not trained. trained: parameters of the adapter beside it; ends: a copy of embedding and head is trained too; bits: of a weight
    of the base; scales: every Linear's output is scaled by what is trained."""

    trained: float
    ends: bool
    bits: float
    scales: bool


@dataclasses.dataclass(frozen=True)
class Question:
    """A published run whose memory is asked for."""

    recipe: Recipe
    base: ModelConfig  # without an adapter
    n: int
    keeps: Program
    kind: str  # allocated, reserved, device (all that the device shows), after (allocated, after a step)
    recompute: str = "none"
    frozen: Frozen | None = None
    zero: int = 0  # DeepSpeed's stages: what replicas split
    replicas: int = 1
    compiled: bool = False
    chunks: int = 1  # of the loss
    offload: bool = False  # optimizer and weights lie on the host
    offloads: bool = False  # what blocks keep lies on the host
    in_backward: bool = False  # the optimizer steps in the backward pass
    state: float = 8.0  # bytes a trained parameter
    paged: bool = False
    wide: bool = False  # gradients are added up in fp32 beside half ones
    alive: float = 0.0  # tokens of a micro-batch as it usually is
    capacity: float = math.inf  # of the device, where what is not stated depends on it
    logits: float = 12.0  # bytes of one
    liger: bool = False  # Triton kernels for norms, activations and the loss of the head's product by parts (linkedin/Liger-Kernel)
    options: tuple[Question, ...] = ()  # ways to recompute, where none is stated: the first that fits


# ---------------------------------------------------------------- reading

GPTQ = 4.156  # bits of a number: a scale and a zero for 128
ADAPTERS = re.compile(r"lora|adapter|ia3|loha|lokr|oft|vera|prefix|prompt|ln_tuning")


def keeps_of(point: Point) -> Program:
    """The program by its name; where that says nothing, by what such programs state."""
    c, known = point["config"], programs()
    text = str(c.get("framework") or "").lower()
    for keeps in known.values():
        if any(word in text for word in keeps.words):
            return keeps
    if "async_tp" in c or "local_batch" in c or "fsdp" in c or "fsdp" in str(c.get("zero")).lower():
        return known["titan"]
    if (c.get("tp") or 1) * (c.get("pp") or 1) > 1:
        return known["megatron" if "sequence_parallel" not in c else "mcore"]
    if "trainable" in c and "quant" in c:
        return known["litgpt"]
    if "sequence_packing" in c or "steps_of_ladder" in c:
        return known["torchtune"]
    if str(c.get("zero")) in ("2", "3"):
        return known["deepspeed"]
    return known["hf" if c.get("base_frozen") or ADAPTERS.search(str(c.get("method")).lower()) else "script"]


def measured(point: Point) -> float:
    """Bytes."""
    unit = keeps_of(point).unit or str(point.get("unit") or "")
    return float(point["value"]) * next((size for name, size in (("GiB", GIB), ("MiB", 2**20), ("GB", 1e9), ("MB", 1e6)) if name in unit), 1.0)


def kind_of(point: Point, keeps: Program) -> str:
    if METRICS[point["metric"]]:
        return METRICS[point["metric"]]
    said = f"{point['config'].get('memory_kind')} {point.get('unit')} {point.get('note')}".lower()
    kinds = {"reserved": "reserved", "nvidia-smi": "device", "not said": "device", "allocated": "allocated", "active": "allocated"}
    return next((kind for word, kind in kinds.items() if word in said), keeps.prints)


def seq_of(point: Point) -> int:
    """Of the longest batch: stated, the most tokens that a sample may have, or of a data set the most that it has: of a range, whose ends are
    tokenizers', the upper one with a small vocabulary."""
    c = point["config"]
    if seq := point.get("seq") or c.get("max_length"):
        return int(seq)
    ends = [int(n) for n in re.findall(r"\d+", re.search(r"max [\d-]+ tokens|$", str(c.get("dataset")))[0])]
    if not ends:
        raise NotCovered("seq not given")
    return max(ends) if model_of(point, 128).vocab_size <= 32000 else min(ends)


def model_of(point: Point, seq: int, tensor: int = 1) -> ModelConfig:
    """By stated sizes, else by name; with heads and vocabulary that `tensor` divides."""
    c, name = point["config"], str(point["model"]).lower()
    family = str(c.get("family") or "")
    if not c.get("hidden"):
        return points.model_of(points.cleaned({"config": {}, "model": name, "seq": seq}))
    sizes = points.decoder(point, 50304) | {"seq_len": seq}
    sizes["vocab_size"] = points.padded(sizes["vocab_size"], tensor) if tensor > 1 else sizes["vocab_size"]
    if re.search("gpt|bloom|opt|mpt|phi|stablelm|pythia|neo|falcon", family) or not (c.get("kv_heads") or family):
        return GPTConfig(**sizes, d_ff=c.get("ffn"), dropout=float(c.get("dropout") or (keeps_of(point).dropout if "llama" not in name else 0.0)))
    expert, shared = c.get("expert_ffn") or c.get("ffn"), c.get("shared_experts")
    if c.get("experts"):
        width = (shared["ffn"] * shared["count"] if isinstance(shared, dict) else shared * expert) if shared else None
        sizes |= {"n_experts": c["experts"], "top_k": c.get("top_k") or 1, "d_expert": expert, "d_shared": width}
    model = LlamaConfig(**sizes, n_kv_heads=c.get("kv_heads") or sizes["n_heads"], d_head=c.get("head_dim"), d_ff=c.get("ffn") or expert,
                        tie_output=bool(c.get("tied")), qk_norm="qwen3" in name)  # fmt: skip
    if c.get("tied") is None and point.get("params"):  # as the stated number of parameters has it
        tied = model.model_copy(update={"tie_output": True})
        return min((model, tied), key=lambda m: abs(models.count(m)["total"] - point["params"]))
    return model


def widths(model: Any) -> dict[str, tuple[int, int]]:
    """(in, out) of the Linears of a block."""
    h, f = model.d_model, model.d_ff
    head = getattr(model, "head_dim", h // model.n_heads)
    a, kv = model.n_heads * head, (getattr(model, "n_kv_heads", None) or model.n_heads) * head
    gate = {"gate": (h, f)} if isinstance(model, LlamaConfig) else {}
    return {"to_q": (h, a), "to_k": (h, kv), "to_v": (h, kv), "to_out": (a, h), "up": (h, f), "down": (f, h)} | gate


def adapted(point: Point, model: ModelConfig) -> tuple[Adapter | None, Frozen | None]:
    """Any kind of adapter is a low-rank one of as many parameters."""
    c = point["config"]
    method = f"{c.get('method') or ''} {' '.join(c.get('steps_of_ladder') or ())}".lower()
    if not (ADAPTERS.search(method) or c.get("base_frozen")):
        return None, None
    named = widths(model)
    targets = [part for name in c.get("target_modules") or () for part in READING["parts"].get(name, ()) if part in named] or ["to_q", "to_v"]
    each = sum(sum(named[t]) for t in dict.fromkeys(targets)) * model.n_layers
    stated = float(str(c.get("trainable_params") or c.get("trainable") or 0).replace(",", ""))
    rank = c.get("lora_rank") or max(1, round(stated / each)) if stated or c.get("lora_rank") else 8
    stored = f"{c.get('base')} {c.get('quant')} {method}".lower()
    bits = next((bits for words, bits in (("gptq|int4", GPTQ), ("dq|double", 4.127), ("nf4|qlora|4.?bit", 4.5), ("int8|8.?bit base", 8.0)) if re.search(words, stored)), 16.0)
    base = "nf4" if bits < 8 else "int8" if bits == 8 else None
    return Adapter(rank=rank, targets=list(dict.fromkeys(targets)), base=base), Frozen(stated or float(rank * each), "embeddings" in method, bits, "v2" in method)


def recomputed(point: Point, keeps: Program, several: bool, text: str) -> tuple[str, ...]:
    c = point["config"]
    said = str(c.get("recompute") or c.get("ac") or "").lower() or {True: "full", False: "none"}.get(c.get("activation_checkpointing"), "")
    if "full" in said or "activation checkpointing" in text:
        return ("full",)
    if "per-op" in said or ("selective" in said and keeps.name == "titan"):
        return ("products",)
    if said:
        return ("attention" if "selective" in said else "none",)
    return ("full",) if keeps.name == "litgpt" and several else ("none",) if "steps_of_ladder" in c else keeps.recompute


def state_of(each: float, pure: bool, optimizer: str) -> float:
    """Bytes a parameter of another optimizer's state. each: of Adam's, with a master copy or not."""
    moment = 2.0 if pure and each < 12 else 4.0
    if re.search("8.?bit", optimizer):
        return max(2.0, each - 2 * moment + 2)
    moments = 0 if "adafactor" in optimizer or ("sgd" in optimizer and "momentum" not in optimizer) else 1 if re.search("sgd|lion|muon", optimizer) else 2
    return each - (2 - moments) * moment


def logits_of(config: dict[str, Any], keeps: Program) -> float:
    version = re.search(r"transformers (\d+)\.(\d+)", str(config.get("framework")))
    return keeps.older if keeps.older and version and tuple(map(int, version.groups())) < (4, 46) else keeps.logits


def capacity_of(point: Point) -> float:
    try:
        return float(points.device_of(point).memory)
    except NotCovered:
        return math.inf


def numbers_of(point: Point, keeps: Program, frozen: bool) -> tuple[str, bool, bool]:
    """(half type, whether weights are in it, whether nothing is). Weights in half where the program has them so; of transformers' full fine-tuning
    only where that is said (its default is autocast)."""
    said = str(point["config"].get("precision") or "bf16").lower()
    if "fp4" in said:
        raise NotCovered("NVFP4")
    full = "tf32" in said or "fp32" in said.partition("+")[0]
    casts = bool(re.search(r"(?<!no )(autocast|amp|mixed)", said)) or (keeps.name == "hf" and not frozen and not re.search("pure|true|no autocast", said))
    return "fp16" if "fp16" in said and "bf16" not in said else "bf16", keeps.name == "megatron" or (keeps.half and not casts and not full), full


def layout_of(point: Point, keeps: Program, numbers: tuple[str, bool, bool], n: int, micro: int) -> Layout:
    c, zero, (half, pure, full) = point["config"], str(point["config"].get("zero") or "").lower(), numbers
    tensor, stages = int(c.get("tp") or 1), int(c.get("pp") or 1)
    ranks = n // (tensor * stages)
    split = ranks > 1 and ("fsdp" in zero or "fsdp" in c or zero_of(c) == 3 or (keeps.sharded and not zero_of(c)))
    attention = str(c.get("attention") or ("plain" if keeps.name == "megatron" else ""))
    virtual = runs.virtual_of(point) if stages > 1 and not split else 1
    held = {"precision": "fp32" if full else f"pure_{half}" if pure else half, "tf32": "tf32" in str(c.get("precision")).lower()}
    if split and not (full or pure):
        held = {"param_dtype": half, "reduce_dtype": "fp32"}
    return Layout(device="cuda", **held, shard=ranks if split else 1, tensor=tensor, pipeline=stages, micro_batch=micro, offload=split and offloaded(c),
                  attention="naive" if re.search("plain|naive|eager", attention) else "sdpa", reshard=stages == 1 or not split,
                  sequence_parallel=tensor == 1 or bool(c.get("sequence_parallel", keeps.name != "megatron")),
                  **({"schedule": "interleaved", "stages": virtual} if virtual > 1 else {}))  # fmt: skip


def zero_of(config: dict[str, Any]) -> int:
    """DeepSpeed's stage; 1 of a distributed optimizer."""
    said = str(config.get("zero") or "").lower()
    stage = re.search("[123]", said) if "fsdp" not in said else None
    return int(stage[0]) if stage else int(bool(config.get("dist_optimizer")))


def offloaded(config: dict[str, Any]) -> bool:
    return "offload" in str(config.get("zero")).lower() or "cpu offload" in str(config.get("method")).lower()


def question_of(point: Point) -> Question:
    """Raises NotCovered."""
    c, keeps = point["config"], keeps_of(point)
    ladder = "steps_of_ladder" in c
    text = f"{c.get('method') or ''} {' '.join(c.get('steps_of_ladder') or ())} {c.get('optimizer') or ''}".lower()
    if ladder and "packed" not in text:
        raise NotCovered("the samples' length is not given: they are padded")
    seq, n = seq_of(point), int(point.get("n_devices") or math.prod(c.get(axis) or 1 for axis in ("tp", "pp", "cp", "dp")))
    tensor, stages, context = (int(c.get(k) or 1) for k in ("tp", "pp", "cp"))
    ranks = n // (tensor * stages)
    groups = ranks // context
    batch = point.get("batch") or groups * (c.get("micro_batch") or 1) * (c.get("grad_accum") or 1)
    micro = int(c.get("micro_batch") or (1 if stages > 1 else c.get("local_batch") or max(1, batch // groups)))
    model = model_of(point, seq // context, tensor)
    adapter, frozen = adapted(point, model)
    numbers = _, pure, _ = numbers_of(point, keeps, frozen is not None)
    layout = layout_of(point, keeps, numbers, n, micro)
    many = min(max(1, round(batch / (groups * micro))), 2 * stages + 2 if stages > 1 else 3)  # further ones repeat the peak
    paged = keeps.paged and n == 1 and frozen is None and not ladder
    state = state_of(keeps.state if pure or not keeps.half else 8.0, pure, "8-bit" if paged else text)
    ways = recomputed(point, keeps, n > 1, text)
    said = f"{c.get('gradients')} {c.get('precision')}".lower()

    def of(way: str) -> Question:
        own = layout.model_copy(update={"checkpointing": "none" if way == "products" else way})
        recipe = runs.recipe_of(model.trained(adapter, None) if adapter else model, own, many * ranks * micro, adapter and adapter.model_dump())
        return Question(
            recipe, model, n, keeps, kind_of(point, keeps), way, frozen, zero=3 if layout.shard > 1 else zero_of(c) or int(keeps.distributed), replicas=ranks,
            compiled=bool(c.get("compile")) or "compile" in text, chunks=keeps.chunks if "chunked" in text or not ladder else 1, offload=offloaded(c),
            offloads=keeps.offloads or "activation offloading" in text, in_backward=paged or "in backward" in text, state=0.0 if offloaded(c) else state, paged=paged,
            wide=pure and keeps.gradients <= 2 and bool(re.search("fp32 grad|float32", said)), alive=micro * (c.get("mean_length_padded") or seq),
            capacity=capacity_of(point) if len(ways) > 1 or paged else math.inf, logits=logits_of(c, keeps),
            liger="liger" in f"{c.get('framework')} {c.get('kernels')} {text}".lower(),
        )  # fmt: skip

    found = [of(way) for way in ways]
    return dataclasses.replace(found[0], options=tuple(found)) if len(found) > 1 or paged else found[0]


# ---------------------------------------------------------------- as the program does it


def today(q: Question) -> float:
    """Bytes as a plan of Gradus says them of such a run, without what the program does otherwise."""
    memory = engine.memory_of(engine.processes(Case.of(q.recipe, q.n, "cuda")))
    return {"allocated": memory.allocated, "reserved": memory.reserved, "device": memory.device_total, "after": sum(memory.state.values())}[q.kind]


@dataclasses.dataclass(frozen=True)
class Change:
    """Of a profile. block: bytes that a block keeps more (or fewer) for its backward pass; again: that its backward pass makes anew; logits:
    factor of what logits take; gradients: whether they add up beside the weights, as the trace has it; offloaded: nothing is kept on the device."""

    block: float = 0.0
    again: float = 0.0
    logits: float = 1.0
    gradients: bool = True
    offloaded: bool = False

    def row(self, row: np.ndarray, activations: float = 0.0, transient: float = 0.0, net: bool = False) -> np.ndarray:
        row = row.copy()
        more = (self.logits - 1) * row[INDEX["logits"]] + activations + transient
        row[INDEX["logits"]] *= self.logits
        row[INDEX["activations"]] += activations
        row[INDEX["transient"]] += transient
        if net and not self.gradients:
            more -= row[INDEX["gradients"]]
            row[INDEX["gradients"]] = 0.0
        row[COMPONENTS + 2] += more  # large tensors
        return row

    def piece(self, piece: Piece, profile: Profile, kind: str, full: bool) -> Piece:
        stack, _ = profile.block_of(piece.unit)
        own, s = bool(stack) and piece.unit.count(".") == stack.count(".") + 1, piece.stretch
        traced, kept, rise, again = s.net[INDEX["activations"]], 0.0, 0.0, 0.0
        if own and piece.edge == "pre_forward" and kind == "forward":
            kept = rise = -traced if self.offloaded else 0.0 if full else self.block
        elif own and piece.edge == "pre_backward":
            kept = -traced if self.offloaded else 0.0 if full else -self.block
            again = max(self.block, 0.0) if full else self.again
            again += kept if self.offloaded else 0.0  # it comes back
        stretch = Stretch(self.row(s.peak, rise, again), self.row(s.net, kept, net=True), s.ops, s.transfers)
        return dataclasses.replace(piece, stretch=stretch)

    def stage(self, stage: Stage, full: bool) -> Stage:
        """full: blocks are computed again as a whole. PyTorch's pipeline has buffers for every micro-batch of a step, others receive into new
        ones."""
        profile = stage.profile
        passes = {which: {kind: [self.piece(piece, profile, kind, full) for piece in pieces] for kind, pieces in getattr(profile, which).items()}
                  for which in ("first", "later")}  # fmt: skip
        return dataclasses.replace(stage, profile=dataclasses.replace(profile, **passes, buffers=0 * profile.buffers))


def change_of(q: Question) -> Change:
    """What a block keeps otherwise than Gradus's: bytes a token by sizes, in half 2 a number."""
    model, layout, keeps, frozen = q.base, q.recipe.layout, q.keeps, q.frozen
    named, gated, experts = widths(model), isinstance(model, LlamaConfig), getattr(model, "n_experts", None)
    h, a, kv, f = model.d_model, named["to_q"][1], named["to_k"][1], named["up"][1]
    if experts:
        f = model.top_k * (model.d_expert or model.d_ff) + (model.d_shared or 0)
    inner, wide = 1 / layout.tensor, 2 if layout.precision == "fp32" and not layout.param_dtype else 1  # bytes of a number, over two
    outer = inner if layout.sequence_parallel else 1.0  # of norms and residuals
    block, again = 2 * keeps.routed * h * model.top_k if experts else 0.0, 0.0
    if q.recompute == "products":  # kept: input, queries, values, attention's output, gate and the last product
        again = 2 * (2 * h * outer + (kv + 3 * f + (a + kv if getattr(model, "qk_norm", False) else 0)) * inner)
        block -= again
    elif (q.compiled or q.liger) and not experts:
        block -= 2 * f * inner if gated else 0.0  # the activation's output is computed again
    elif keeps.norms and gated:
        once = frozen and keeps.norms != "both"  # without a copy of what is scaled
        block += 2 * ((0 if once else 2) if wide == 2 else 2 if once else 4) * h * outer
    if keeps.gelu and not gated and q.recompute != "products":
        block += keeps.gelu * h * inner
    if keeps.repeated and a > kv and layout.attention == "sdpa":
        block += 4 * (a - kv) * inner
    if frozen:
        block += keeps.inputs * h
        targets = q.recipe.adapter.targets
        if keeps.casts:  # in fp32 for each of them, where those that share an input kept it once
            shared = {{"to_q": "x", "to_k": "x", "to_v": "x", "gate": "y", "up": "y"}.get(t, t): named[t][0] for t in targets}
            block += sum(4 * named[t][0] + 2 * q.recipe.adapter.rank for t in targets) - 2 * sum(shared.values())
        if keeps.low and frozen.bits < 8:
            block += 2 * (h + f)
        if frozen.scales:
            block += 2 * sum(out for _, out in named.values())
    logits = q.logits - (4 if frozen and frozen.bits == GPTQ and keeps.casts else 0)  # its head's are in fp32 already
    logits = 1.5 if q.liger else min(logits, keeps.fused) if q.compiled else logits
    alone = bool(frozen) or q.in_backward or keeps.standing or (q.zero >= 2 and layout.shard == 1)
    tokens = layout.micro_batch * model.seq_len
    return Change(wide * block * tokens, wide * again * tokens, (2 + (logits - 2) / q.chunks) / 12, not alone, q.offloads)


def ends_of(q: Question) -> int:
    """Parameters of embedding and head."""
    return (1 if getattr(q.base, "tie_output", False) else 2) * q.base.vocab_size * q.base.d_model


def kept_beside(q: Question, p: Process) -> float:
    """Bytes that stay besides what the trace has of weights and gradients."""
    keeps, layout, frozen = q.keeps, q.recipe.layout, q.frozen
    elements, over = p.param_bytes / p.width, layout.shard * layout.tensor * layout.pipeline
    ends = ends_of(q)
    more = 2.0 * models.count(q.base)["total"] * keeps.whole * (q.n > 1) + 1e9 * keeps.buffers * (q.zero >= 2)
    if frozen:
        more += frozen.trained * keeps.adapter / over - p.param_bytes + frozen.ends * 8 * ends / over
        if frozen.bits < 8:
            small = [(name, w, n) for stage in p.stages for _, _, others, n in stage.units for name, w in others.items() if w.buffer]
            traced = sum(n * local_bytes(w, layout) for name, w, n in small if name.rpartition(".")[2] in BUFFERS)
            numbers = sum(2 * n * w.size for name, w, n in small if name.endswith("codes"))
            more += numbers * frozen.bits / 8 / (layout.shard if keeps.low else 1) - traced + 2 * ends * keeps.casts
        return more
    if keeps.standing or (q.zero == 2 and layout.shard == 1):
        more += elements * keeps.gradients / (q.replicas if q.zero == 2 else 1)
    if q.wide:
        more += 4 * elements
    if layout.shard > 1 and layout.pipeline > 1:  # added up whole, in fp32, beside the last micro-batch's in half
        more += 6 * elements * layout.shard
    if q.zero == 3 and keeps.buffers:  # gradients in fp32 while 1e9 parameters are stepped at a time
        more += 4 * min(1e9, elements)
    if layout.pipeline > 1 and q.kind != "after":
        more += keeps.pipelined * q.base.vocab_size * layout.micro_batch * q.base.seq_len / layout.tensor
    return more


@dataclasses.dataclass(frozen=True, eq=False)
class Balanced(Case):
    """Stages of equal work where the head counts as so many blocks: a stage takes blocks until it has its share."""

    @functools.cached_property
    def bounds(self) -> list[int]:
        model, stages = self.recipe.model, len(self.rank_of)
        head = model.vocab_size * model.d_model / sum(a * b for a, b in widths(model).values())
        each, out = (model.n_layers + head) / stages, [0]
        for block in range(1, model.n_layers + 1):
            if block > each * len(out) and len(out) < stages:
                out.append(block)
        return [*out, *[model.n_layers] * (stages + 1 - len(out))]


def theirs(q: Question) -> list[Process]:
    """The processes, as the program has them."""
    kind = Balanced if q.keeps.balance and q.recipe.layout.pipeline > 1 else Case
    change, full, out = change_of(q), q.recipe.layout.checkpointing == "full", []
    for p in engine.processes(kind.of(q.recipe, q.n, "cuda")):
        state = 0.0 if q.frozen else q.state * p.stepped_elements / (q.replicas if q.zero in (1, 2) and q.recipe.layout.shard == 1 else 1)
        stages = [change.stage(stage, full) for stage in p.stages]
        out.append(dataclasses.replace(p, stages=stages, tail=[], optimizer_bytes=state, frozen_bytes=p.frozen_bytes + kept_beside(q, p)))
    return out


def planned(q: Question) -> float:
    """Bytes of the process that needs most."""
    if q.options:
        values = [planned(dataclasses.replace(option, options=())) for option in q.options]
        value = next((value for value in values if value <= q.capacity), min(values))
        gone = [dataclasses.replace(option, options=(), state=0.0) for option in q.options]  # a paged state goes to the host
        return min(map(planned, gone)) if q.paged and value > q.capacity else value
    return max(_of_process(q, p) for p in theirs(q))


def _of_process(q: Question, p: Process) -> float:
    standing = p.param_bytes + p.frozen_bytes + p.optimizer_bytes
    gradients = 0.0 if q.frozen or q.in_backward or q.keeps.standing else p.param_bytes
    if q.kind == "after":
        return standing + gradients + (2 * q.alive * q.base.vocab_size if q.keeps.logits > 12 else 0.0)  # of the model's output
    peak, stepped = peak_of(p), standing + gradients + q.keeps.step * p.param_bytes
    if q.frozen:  # adapters are in fp32
        ends = ends_of(q) * q.frozen.ends
        stepped = standing + q.keeps.step * (4 * q.frozen.trained + 2 * ends) / q.recipe.layout.shard
    value = max(peak.bytes, 0.0 if q.offload else stepped, 0 if q.kind == "allocated" else peak.reserved)
    return value + (1e9 * q.keeps.outside if q.kind == "device" else 0.0)
