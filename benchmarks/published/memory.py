"""Peak memory of other programs: the planner's processes of a step, with what `kept.yaml` says a program keeps otherwise."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gradus import models
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.peak import peak_of
from gradus.plan.process import Process
from gradus.plan.profiles import INDEX, Piece, Profile, Stretch
from gradus.plan.profiles import N as COMPONENTS
from gradus.plan.stage import Stage
from gradus.recipe.schema import Adapter, GPTConfig, Layout, LlamaConfig, ModelConfig, Recipe
from published.points import GPT, LLAMA, MPT, NotCovered, Point, device_of, llama_name

METRICS = {"peak_memory", "peak_reserved_memory", "allocated_memory_after_step"}
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Keeps:
    """See kept.yaml."""

    name: str
    words: tuple[str, ...] = ()
    half: bool = True
    low: bool = False
    state: float = 8.0
    step: float = 0.0
    gradients: float = 2.0
    standing: bool = False
    adapter: float = 8.0
    casts: bool = False
    norms: str = ""
    repeated: bool = False
    logits: float = 12.0
    inputs: float = 0.0
    whole: float = 0.0
    buffers: float = 0.0
    balance: bool = False
    paged: bool = False
    pipelined: float = 0.0
    routed: float = 0.0
    recompute: tuple[str, ...] = ("none",)
    outside: float = 0.6
    communicator: float = 0.5
    prints: str = "device"
    unit: str = ""
    why: str = ""


@functools.cache
def programs() -> dict[str, Keeps]:
    found = yaml.safe_load(Path(__file__).with_name("kept.yaml").read_text()) or {}
    tuples = ("words", "recompute")
    return {name: Keeps(name, **{k: tuple(v) if k in tuples else v for k, v in entry.items()}) for name, entry in found.items()}


@dataclasses.dataclass(frozen=True)
class Question:
    """A published run whose memory is asked for."""

    recipe: Recipe
    base: ModelConfig  # without an adapter
    n: int
    keeps: Keeps
    kind: str  # allocated, reserved, device (all that the device shows), after (allocated, after a step)
    replicas: int = 1  # over which the optimizer's state is split beside layout.shard (ZeRO-1)
    zero: int = 0
    recompute: str = "none"
    compiled: bool = False
    chunked: int = 0  # chunks of the loss
    trained: float = 0.0  # parameters of an adapter; 0: all of them are trained
    ends: bool = False  # embedding and head are trained beside it
    bits: float = 16.0  # of a frozen weight
    scales: bool = False  # an adapter scales the Linears' outputs
    offload: bool = False  # optimizer and weights on the host
    offload_activations: bool = False
    in_backward: bool = False  # the optimizer steps in the backward pass
    state: float | None = None  # bytes of the optimizer's state a trained parameter, where it is stated
    wide: bool = False  # gradients are added up in fp32 beside half ones
    alive: float = 0.0  # tokens of a micro-batch as it usually is
    capacity: float = math.inf  # of the device, where what is not stated depends on it
    options: tuple[Question, ...] = ()  # ways to recompute, where none is stated: the first that fits


# ---------------------------------------------------------------- reading

LIKE_GPT = re.compile(r"gpt|bloom|\bopt|mpt|phi|stablelm|pythia|neox|falcon|korthikanti")
# (layers, d_model, heads, d_ff, vocabulary) of decoders with two matrices, that are called by name
NAMED = {"phi 1.5": (24, 2048, 32, 8192, 51200), "stablelm alpha 3": (16, 4096, 32, 16384, 50688), "stablelm alpha 7": (16, 6144, 48, 24576, 50688)}
# what others call the Linears of a block
PARTS = {"c_attn": ("to_q", "to_k", "to_v"), "qkv": ("to_q", "to_k", "to_v"), "query_key_value": ("to_q", "to_k", "to_v"), "q_proj": ("to_q",),
         "k_proj": ("to_k",), "v_proj": ("to_v",), "o_proj": ("to_out",), "out_proj": ("to_out",), "output_proj": ("to_out",), "dense": ("to_out",),
         "c_proj": ("to_out", "down"), "w1": ("gate",), "w2": ("up",), "w3": ("up",), "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
         "c_fc": ("up",), "fc1": ("up",), "fc2": ("down",), "dense_h_to_4h": ("up",), "dense_4h_to_h": ("down",)}  # fmt: skip
USUAL = ("to_q", "to_v")


def keeps_of(point: Point) -> Keeps:
    """The program by its name; where that says nothing, by what only such programs state."""
    c, known = point["config"], programs()
    text = f"{c.get('framework') or ''}".lower()
    for keeps in known.values():
        if any(word in text for word in keeps.words):
            return keeps
    method = str(c.get("method") or "").lower()
    if "async_tp" in c or "local_batch" in c or "fsdp" in c or "fsdp2" in str(c.get("zero")).lower():
        return known["titan"]
    if (c.get("tp") or 1) * (c.get("pp") or 1) > 1:
        return known["megatron"]
    if "trainable" in c and "quant" in c:
        return known["litgpt"]
    return known["deepspeed-hf" if str(c.get("zero") or "") in ("2", "3") and not method else "hf"]


def model_of(point: Point, seq: int, heads: int = 0) -> ModelConfig:
    """By stated sizes, else by name."""
    c, name = point["config"], str(point["model"]).lower()
    if c.get("hidden") and (c.get("layers") or point.get("params")):
        hidden, vocab = c["hidden"], c.get("vocab") or 50304
        layers = c.get("layers") or round((point["params"] - vocab * hidden) / (12 * hidden**2))
        heads = heads or c.get("heads") or max(1, hidden // 128)
        sizes = {"n_layers": layers, "d_model": hidden, "n_heads": heads, "vocab_size": vocab, "seq_len": seq}
        if not (c.get("kv_heads") or c.get("family") in ("llama", "llama4", "qwen", "mistral")) or LIKE_GPT.search(str(c.get("family") or "")):
            return GPTConfig(**sizes, d_ff=c.get("ffn"), dropout=float(c.get("dropout") or 0.0))
        experts = c.get("experts")
        shared = c.get("shared_experts")
        routed = {"n_experts": experts, "top_k": c.get("top_k") or 1, "d_expert": c.get("expert_ffn")} if experts else {}
        if experts and shared:
            routed["d_shared"] = shared["ffn"] * shared["count"] if isinstance(shared, dict) else shared * (c.get("expert_ffn") or c["ffn"])
        found = LlamaConfig(**sizes, n_kv_heads=c.get("kv_heads") or heads, d_head=c.get("head_dim"), d_ff=c.get("ffn") or c.get("expert_ffn"),
                            tie_output=bool(c.get("tied")), qk_norm="qwen3" in name, **routed)  # fmt: skip
        if c.get("tied") is None and point.get("params"):
            tied = found.model_copy(update={"tie_output": True})
            found = min((found, tied), key=lambda model: abs(models.count(model)["total"] - point["params"]))
        return found
    key = re.sub(r"[\s_-]+", " ", name)
    for known, (layers, hidden, heads, d_ff, vocab) in NAMED.items():
        if known in key:
            return GPTConfig(n_layers=layers, d_model=hidden, n_heads=heads, d_ff=d_ff, vocab_size=vocab, seq_len=seq, tie_output=False)
    for names in (GPT, MPT):
        for known, (layers, hidden, heads) in names.items():
            if key.replace(" ", "") in (known.lower().replace("-", ""), "mpt" + known):
                return GPTConfig(n_layers=layers, d_model=hidden, n_heads=heads, vocab_size=50304, seq_len=seq)
    layers, hidden, heads, kv, d_ff, vocab = LLAMA[llama_name(name)]
    return LlamaConfig(n_layers=layers, d_model=hidden, n_heads=heads, n_kv_heads=kv, d_ff=d_ff, seq_len=seq, vocab_size=vocab)


def widths(model: Any) -> dict[str, tuple[int, int]]:
    """(in, out) of the Linears of a block."""
    h, a = model.d_model, model.n_heads * getattr(model, "head_dim", model.d_model // model.n_heads)
    kv = a // model.n_heads * (getattr(model, "n_kv_heads", None) or model.n_heads)
    f = model.d_ff
    gate = {"gate": (h, f)} if isinstance(model, LlamaConfig) else {}
    return {"to_q": (h, a), "to_k": (h, kv), "to_v": (h, kv), "to_out": (a, h), "up": (h, f), "down": (f, h)} | gate


def vocabulary(point: Point) -> int:
    return model_of(point, 128).vocab_size


def seq_of(point: Point) -> int:
    """Of the longest batch: stated, the most tokens that a sample may have, or of a data set the most that it has: of a range, whose ends are
    tokenizers', the upper one with a small vocabulary."""
    c = point["config"]
    longest = [int(n) for n in re.findall(r"\d+", re.search(r"max [\d-]+ tokens|$", str(c.get("dataset") or ""))[0])]
    seq = point.get("seq") or c.get("max_length") or c.get("max_seq_len") or (longest and (max if (c.get("vocab") or vocabulary(point)) <= 32000 else min)(longest))
    if not seq:
        raise NotCovered("seq not given")
    return int(seq)


def kind_of(point: Point, keeps: Keeps) -> str:
    c, metric = point["config"], point["metric"]
    if metric == "allocated_memory_after_step":
        return "after"
    said = f"{c.get('memory_kind') or ''} {point.get('unit')} {point.get('note') or ''}".lower()
    if metric == "peak_reserved_memory" or "reserved" in said:
        return "reserved"
    if "not said" in said or "nvidia-smi" in said or "on the first" in said:
        return "device"
    return "allocated" if "allocated" in said or "active" in said else keeps.prints


def measured(point: Point) -> float:
    """Bytes."""
    unit, keeps = str(point.get("unit") or ""), keeps_of(point)
    return float(point["value"]) * (1 if unit == "B" else GIB if "GiB" in unit or keeps.unit == "GiB" else 1e6 if unit.startswith("MB") else 1e9)


def question_of(point: Point) -> Question:
    """Raises NotCovered."""
    c = dict(point["config"])
    keeps = keeps_of(point)
    method = str(c.get("method") or "full").lower()
    steps = " ".join(c.get("steps_of_ladder") or ())
    text = f"{method} {steps}".lower()
    seq, n = seq_of(point), int(point["n_devices"])
    precision = str(c.get("precision") or "bf16").lower()
    if "nvfp4" in precision or "fp4" in precision.replace("mxfp4", ""):
        raise NotCovered("NVFP4")
    half = "fp16" if "fp16" in precision and "bf16" not in precision else "bf16"
    tp, pp, cp = (int(c.get(k) or 1) for k in ("tp", "pp", "cp"))
    dp = n // (tp * pp * cp)
    micro = c.get("micro_batch") or (1 if pp > 1 else None)
    batch = point.get("batch") or (dp * (micro or 1) * (c.get("grad_accum") or 1))
    if not batch and not micro:
        raise NotCovered("batch not given")
    local = c.get("local_batch")
    micro = micro or (1 if pp > 1 else local or max(1, batch // dp))
    zero = str(c.get("zero") or "").lower()
    sharded = "fsdp" in zero or zero == "3" or "fsdp" in c or keeps.name == "titan" or (keeps.name in ("torchtune", "litgpt") and n > 1)
    # ... adapters
    adapts = bool(re.search(r"lora|adapter|ia3|loha|lokr|oft|vera|prefix|prompt|ln_tuning|frozen", text)) or bool(c.get("base_frozen"))
    heads = 0
    if c.get("hidden"):
        heads = c.get("heads") or max(1, c["hidden"] // 128)
        if c["hidden"] % heads or heads % tp:
            heads = next(h for h in range(tp * max(1, round(c["hidden"] / 128 / tp)), 0, -1) if c["hidden"] % h == 0 and h % tp == 0)
    model = model_of(point, seq // cp, heads)
    if tp > 1:
        model = model.model_copy(update={"vocab_size": -(-model.vocab_size // (128 * tp)) * 128 * tp})
    adapter, trained, bits, base = None, 0.0, 16.0, ""
    if adapts:
        named = widths(model)
        targets = [part for name in c.get("target_modules") or () for part in PARTS.get(name, ()) if part in named] or list(USUAL)
        sizes = sum(sum(named[t]) for t in targets) * model.n_layers
        stated = c.get("trainable_params") or c.get("trainable")
        stated = float(str(stated).replace(",", "")) if stated else 0.0
        rank = c.get("lora_rank") or (max(1, round(stated / sizes)) if stated else 8)
        trained = stated or rank * sum(sum(named[t]) for t in dict.fromkeys(targets)) * model.n_layers
        stored = f"{c.get('base') or ''} {c.get('quant') or ''} {text}".lower()
        if re.search(r"nf4|int4|qlora|4.?bit|fp4", stored):
            bits = 4.156 if "int4" in stored or "gptq" in stored else 4.127 if "dq" in stored or "double" in stored else 4.5
            base = "nf4"
        elif "int8" in stored or "8-bit base" in stored:
            bits, base = 8.0, "int8"
        adapter = Adapter(rank=rank, targets=list(dict.fromkeys(targets)), base=base or None)
    recompute = str(c.get("recompute") or c.get("ac") or "").lower()
    if not recompute and c.get("activation_checkpointing") is not None:
        recompute = "full" if c["activation_checkpointing"] else "none"
    way = "sac" if "per-op" in recompute or ("selective" in recompute and keeps.name == "titan") else "attention" if "selective" in recompute else \
        "full" if "full" in recompute or "activation checkpointing" in text else "none" if recompute else ""
    ladder = "ladder" in str(c) and "steps_of_ladder" in c
    if ladder and "packed" not in text:
        raise NotCovered("the samples' length is not given: they are padded")
    ways = (way,) if way else ("full",) if keeps.name == "litgpt" and n > 1 else keeps.recompute
    capacity = float(device_of(point).memory) if len(ways) > 1 or keeps.paged else math.inf
    half_weights = keeps.half
    if sharded:
        held = {"shard": dp * cp, **({"precision": f"pure_{half}"} if half_weights else {"param_dtype": half, "reduce_dtype": "fp32"})}
        if dp * cp == 1:
            held = {"precision": f"pure_{half}" if half_weights else half}
    else:
        held = {"precision": f"pure_{half}" if half_weights else half}
    attention = "naive" if "naive" in str(c.get("attention")) or "eager" in str(c.get("attention")) or (keeps.name == "megatron" and "flash" not in str(c.get("attention"))) else "sdpa"
    virtual = int(c.get("vp") or (2 if "interleaved" in str(c.get("schedule")) else 1)) if pp > 1 else 1
    def recipe(way: str) -> Recipe:
        layout = Layout(device="cuda", **held, offload="offload" in method and dp * cp > 1, tensor=tp, pipeline=pp, micro_batch=int(micro), attention=attention,
                        checkpointing={"sac": "none"}.get(way, way) or "none", sequence_parallel=tp == 1 or bool(c.get("sequence_parallel", keeps.name != "megatron")),
                        reshard=pp == 1 or not sharded or dp * cp == 1, **({"schedule": "interleaved", "stages": virtual} if virtual > 1 else {}))  # fmt: skip
        many = max(1, round(batch / (dp * micro)))
        many = min(many, 2 * pp + 2) if pp > 1 else min(many, 3)
        configured = model.trained(adapter, None) if adapter else model
        return Recipe.model_validate({
            "name": "published", "model": configured, "task": {"name": "causal_lm"}, "data": {"kind": "text", "path": "-"},
            "optimizer": {"name": "adamw", "lr": 1e-4}, "batch": {"samples": int(many * dp * cp * micro)}, "adapter": adapter and adapter.model_dump(),
            "train": {"steps": 100, "clip_norm": 1.0}, "layout": layout.model_dump()})  # fmt: skip

    optimizer, eight = str(c.get("optimizer") or "").lower(), keeps.state / 4
    paged = keeps.paged and n == 1 and not trained and not ladder
    low = "8-bit" in text + optimizer or "8bit" in text + optimizer or paged
    state = 0.0 if "offload" in method else eight + (keeps.state - 4 if keeps.state > 4 and keeps.half else 0) * 0 + eight if low and keeps.state <= 8 else None
    if "sgd" in optimizer and "momentum" not in optimizer:
        state = 0.0
    fields = {"zero": 3 if sharded else int(zero) if zero in ("1", "2", "3") else 1 if c.get("dist_optimizer") else 0, "replicas": dp * cp,
              "compiled": bool(c.get("compile")) or "compile" in text, "chunked": 8 if "chunked" in text or (keeps.name == "torchtune" and not ladder) else 0,
              "trained": trained, "scales": "v2" in text, "ends": "embeddings" in text, "bits": bits, "offload": "offload" in method,
              "alive": micro * (c.get("mean_length_padded") or seq), "offload_activations": "activation offloading" in text, "in_backward": "in backward" in text or paged, "state": state,
              "wide": keeps.half and ("fp32 grad" in precision or "float32" in str(c.get("gradients"))) and not keeps.gradients > 2, "capacity": capacity}  # fmt: skip
    questions = [Question(recipe(way), model, n, keeps, kind_of(point, keeps), recompute=way, **fields) for way in ways]
    return dataclasses.replace(questions[0], options=tuple(questions)) if len(questions) > 1 or keeps.paged else questions[0]


# ---------------------------------------------------------------- today


def today(q: Question) -> float:
    """Bytes as a plan of Gradus says them of such a run, without what the program does otherwise."""
    memory = engine.memory_of(engine.processes(Case.of(q.recipe, q.n, "cuda")))
    return {"allocated": memory.allocated, "reserved": memory.reserved, "device": memory.device_total, "after": sum(memory.state.values())}[q.kind]


# ---------------------------------------------------------------- as the program does it


@dataclasses.dataclass(frozen=True)
class Change:
    """Of a profile. block: bytes that a block keeps more (or fewer) for its backward pass; again: that its backward pass makes anew; logits:
    factor of what logits take; gradients: whether they add up beside the weights, as the trace has it; offloaded: nothing is kept on the device."""

    block: float = 0.0
    again: float = 0.0
    logits: float = 1.0
    gradients: bool = True
    offloaded: bool = False


def _row(row: np.ndarray, change: Change, activations: float = 0.0, transient: float = 0.0, net: bool = False) -> np.ndarray:
    row = row.copy()
    more = (change.logits - 1) * row[INDEX["logits"]] + activations + transient
    row[INDEX["logits"]] *= change.logits
    row[INDEX["activations"]] += activations
    row[INDEX["transient"]] += transient
    if net and not change.gradients:
        more -= row[INDEX["gradients"]]
        row[INDEX["gradients"]] = 0.0
    row[COMPONENTS + 2] += more  # large tensors
    return row


def _changed(piece: Piece, profile: Profile, kind: str, full: bool, change: Change) -> Piece:
    stack, _ = profile.block_of(piece.unit)
    own, s = bool(stack) and piece.unit.count(".") == stack.count(".") + 1, piece.stretch
    kept = again = 0.0
    if own and piece.edge == "pre_forward" and kind == "forward" and (not full or change.offloaded):
        kept = -s.net[INDEX["activations"]] if change.offloaded else change.block
        return dataclasses.replace(piece, stretch=Stretch(_row(s.peak, change, kept), _row(s.net, change, kept, net=True), s.ops, s.transfers))
    if own and piece.edge == "pre_backward":
        kept = -s.net[INDEX["activations"]] if change.offloaded else 0.0 if full else -change.block
        again = max(change.block, 0.0) if full else change.again
        again += kept if change.offloaded else 0.0  # it comes back
    return dataclasses.replace(piece, stretch=Stretch(_row(s.peak, change, 0.0, again), _row(s.net, change, kept, net=True), s.ops, s.transfers))


def changed(stage: Stage, full: bool, change: Change) -> Stage:
    """full: blocks are computed again as a whole. PyTorch's pipeline has buffers for every micro-batch of a step, others receive into new
    ones."""
    profile = stage.profile
    passes = {which: {kind: [_changed(piece, profile, kind, full, change) for piece in pieces] for kind, pieces in getattr(profile, which).items()}
              for which in ("first", "later")}  # fmt: skip
    return dataclasses.replace(stage, profile=dataclasses.replace(profile, **passes, buffers=0 * profile.buffers))


def kept_otherwise(q: Question) -> Change:
    """What a block keeps otherwise than Gradus's, by sizes."""
    model, layout, keeps = q.recipe.model, q.recipe.layout, q.keeps
    named, gated = widths(model), isinstance(model, LlamaConfig)
    h, a, kv, f = model.d_model, named["to_q"][1], named["to_k"][1], named["up"][1]
    if getattr(model, "n_experts", None):
        f = model.top_k * (model.d_expert or model.d_ff) + (model.d_shared or 0)
    tp = layout.tensor
    outer = 1 / tp if layout.sequence_parallel else 1.0  # of norms and residuals
    tokens = layout.micro_batch * model.seq_len
    block = 2 * keeps.routed * h * model.top_k if getattr(model, "n_experts", None) else 0.0
    again = 0.0
    frozen = q.recipe.adapter is not None
    inner = 1 / tp
    if q.recompute == "sac":  # input, queries, values, attention's output, gate, the block's last product (torchtitan, every second product)
        qk = (a + kv) * inner if getattr(model, "qk_norm", False) else 0.0
        again += 2 * (3 * h * outer - h * outer + (kv + 3 * f) * inner + qk)
        block -= again
    elif q.compiled and not getattr(model, "n_experts", None):
        block -= 2 * f * inner if gated else 0.0  # the activation's output is computed again
    elif keeps.norms and gated:
        block += 2 * (2 if frozen and keeps.norms != "both" else 4) * h * outer
    if keeps.repeated and a > kv and layout.attention == "sdpa":
        block += 4 * (a - kv) * inner
    if frozen and keeps.casts:
        targets = [t for t in q.recipe.adapter.targets if t in named]
        inputs = {{"to_q": "x", "to_k": "x", "to_v": "x", "gate": "y", "up": "y"}.get(t, t): named[t][0] for t in targets}
        block += sum(4 * named[t][0] + 2 * q.recipe.adapter.rank for t in targets) - 2 * sum(inputs.values())
    if frozen:
        block += keeps.inputs * h
        if q.bits < 8 and keeps.low:  # the product of a weight in 4 bits keeps its input
            block += 2 * (h + f)
        if q.scales:  # each Linear is scaled by what is trained
            block += 2 * sum(out for _, out in named.values())
    each = keeps.logits - (4 if frozen and q.bits < 16 and keeps.casts else 0)
    logits = (2 + (each - 2) / q.chunked if q.chunked else each) / 12
    alone = frozen or q.in_backward or keeps.standing or (q.zero in (2, 3) and not layout.shard > 1)
    return Change(block * tokens, again * tokens, logits, not alone, q.offload_activations)


def _kept_state(q: Question, p: Process) -> tuple[float, float]:
    """Bytes of (what is kept besides what the trace has, the optimizer's state)."""
    keeps, layout, replicas = q.keeps, q.recipe.layout, q.replicas
    elements, over = p.param_bytes / p.width, layout.shard * layout.tensor * layout.pipeline
    whole = 2.0 * models.count(q.base)["total"] * keeps.whole if q.n > 1 else 0.0
    if q.trained:  # an adapter
        more = q.trained / over * keeps.adapter - p.param_bytes + whole
        ends = 2 * q.base.vocab_size * q.base.d_model
        linear = sum(w.size * times * 2 for stage in p.stages for _, _, others, times in stage.units for name, w in others.items() if name.endswith("codes"))
        if q.recipe.adapter.base == "nf4":
            stored = linear * 4.5 / 8
            more += linear * q.bits / 8 / (layout.shard if keeps.low else 1) - stored
            more += 2 * ends if keeps.casts else 0.0  # embedding, head and norms in fp32 (prepare_model_for_kbit_training)
        if q.ends:  # a copy of embedding and head is trained
            more += ends * 8 / over
        return more + (keeps.buffers * 1e9 if layout.shard > 1 else 0.0), 0.0
    each = keeps.state if q.state is None else q.state
    state = each * p.stepped_elements / (replicas if q.zero in (1, 2) else 1)
    standing = elements * keeps.gradients / (replicas if q.zero == 2 else 1) if keeps.standing or q.zero == 2 else 0.0
    if q.wide:
        standing += 4 * elements
    if layout.shard > 1 and layout.pipeline > 1:  # added up whole, in fp32, beside the last micro-batch's in half
        standing += 6 * elements * layout.shard
    standing += keeps.pipelined * q.base.vocab_size * layout.micro_batch * q.base.seq_len / layout.tensor * (layout.pipeline > 1 and q.kind != "after")
    return standing + whole + (1e9 * keeps.buffers + 4 * min(1e9, elements) if q.zero == 3 and keeps.buffers else 0.0), state


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
    change, full = kept_otherwise(q), q.recipe.layout.checkpointing == "full"
    out = []
    for p in engine.processes(kind.of(q.recipe, q.n, "cuda")):
        more, state = _kept_state(q, p)
        stages = [changed(stage, full, change) for stage in p.stages]
        out.append(dataclasses.replace(p, stages=stages, tail=[], optimizer_bytes=state, frozen_bytes=p.frozen_bytes + more))
    return out


def planned(q: Question) -> float:
    """Bytes of the process that needs most."""
    if q.options:
        values = [planned(dataclasses.replace(option, options=())) for option in q.options]
        value = next((value for value in values if value <= q.capacity), min(values))
        if value > q.capacity and q.keeps.paged and q.state:  # a paged optimizer's state goes to the host
            return min(planned(dataclasses.replace(option, options=(), state=0.0)) for option in q.options)
        return value
    most = 0.0
    for p in theirs(q):
        if q.kind == "after":
            gradients = 0.0 if q.trained or q.keeps.standing else p.param_bytes
            alive = 2 * q.alive * q.base.vocab_size if q.keeps.logits > 12 else 0.0  # of the model's output
            most = max(most, p.param_bytes + p.frozen_bytes + p.optimizer_bytes + gradients + alive)
            continue
        peak = peak_of(p)
        gradients = 0.0 if q.in_backward or q.keeps.standing else p.param_bytes
        stepped = p.param_bytes + gradients + p.frozen_bytes + p.optimizer_bytes + q.keeps.step * p.param_bytes / p.width
        if q.trained:  # in fp32, but for what else is trained
            ends = 2 * q.base.vocab_size * q.base.d_model * q.ends
            stepped = p.param_bytes + p.frozen_bytes + q.keeps.step * (2 * q.trained + ends) / q.recipe.layout.shard
        stepped = 0.0 if q.offload else stepped
        value = max(peak.bytes, stepped) if q.kind == "allocated" else max(peak.reserved, peak.bytes, stepped)
        if q.kind == "device":
            value += 1e9 * q.keeps.outside
        most = max(most, value)
    return most
