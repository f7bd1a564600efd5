"""The work of one training step from sizes alone: what `trace` reads off the real step, written down, for the search and for other programs.

Nothing here imports torch, and one call takes well under a millisecond. Styles: "gradus" is our own step; "megatron" is Megatron-LM
and Megatron-DeepSpeed of 2021 and 2022 (unfused attention, vocabulary padded, gradients added up in the reduced precision's buffers and
reduced after the backward pass); "mosaic" is llm-foundry (fused attention, FSDP).
"""

from __future__ import annotations

from typing import NamedTuple

from gradus.plan import formulas
from gradus.plan.formulas import Shape, gated, kv_heads, n_experts, patches, two_sided
from gradus.plan.work import Op, Transfer, Work
from gradus.recipe.axes import stages_per_process
from gradus.recipe.schema import Layout, ModelConfig

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}


class Stack(NamedTuple):
    """Layers that are alike. tokens, memory: of one sample; memory: what cross attention looks at, 0 for none."""

    layers: int
    tokens: int
    causal: bool
    memory: int = 0


def shape_of(m: ModelConfig, seq_len: int, target_len: int | None = None, selected: float | None = None) -> Shape:
    """A sample of `seq_len` tokens, and of `target_len` (None: as many) where there is a decoder beside the encoder; an image has its own
    number of patches. A masked-LM head computes at 15 of 100 places, or at the part `selected` (Devlin et al. 2019, section 3.1)."""
    source, target = formulas.lengths(m, seq_len, target_len)
    masked = m.family == "bert" and m.head in ("masked_lm", "pretraining")
    return Shape(source, target, (0.15 if selected is None else selected) * source if masked else 0)


def stacks_of(m: ModelConfig, shape: Shape) -> tuple[Stack, ...]:
    if shape.target:
        return Stack(m.n_layers, shape.source, False), Stack(m.n_decoder_layers or m.n_layers, shape.target, True, shape.source)
    return (Stack(m.n_layers, shape.source, m.family in ("gpt", "llama")),)


class _Ops:
    """Operations of a micro-batch as they are written down."""

    def __init__(self, dtype: str, width: float, count: float, recompute: str, frozen: bool = False):
        self.ops: list[Op] = []
        self.frozen = frozen  # the weights are not trained: no gradients for them
        self.dtype, self.width, self.count, self.recompute = dtype, width, count, recompute

    def add(self, kind: str, name: str, phase: str, flops: float, size: float, shape: tuple = (), launches: float = 1, times: float = 1) -> None:
        self.ops.append(Op(kind, name, self.dtype, phase, flops, size, shape, self.count * times, launches))

    def matmul(self, name: str, m: float, n: float, k: float, batch: float = 1, again: bool = True, weight: bool = True, times: float = 1,
               given: bool = False) -> None:  # fmt: skip
        """m × k by k × n, its two products of the backward pass, and once more if the layer is computed again. given: m × k are data."""
        flops, size = 2.0 * batch * m * n * k, self.width * batch * (m * k + k * n + m * n)
        self.add("matmul", name, "forward", flops, size, (batch, m, n, k), times=times)
        if not given:
            self.add("matmul", name, "backward", flops, size, (batch, m, k, n), times=times)
        if not (weight and self.frozen):
            self.add("matmul", name, "backward", flops, size, (batch, k, n, m), times=times)
        if again and self.recompute == "full":
            self.add("matmul", name, "recompute", flops, size, (batch, m, n, k), times=times)

    def memory(self, name: str, forward: float, backward: float | None = None, launches: float = 1, again: bool = True, back: float | None = None,
               core: bool = False) -> None:  # fmt: skip
        """Bytes read and written by what is no matrix product; `core`: of the attention's inner part, that selective recomputation redoes."""
        self.add("memory", name, "forward", 0.0, forward, launches=launches)
        backward = 2 * forward if backward is None else backward
        if backward:
            self.add("memory", name, "backward", 0.0, backward, launches=launches if back is None else back)
        if again and (self.recompute == "full" or (core and self.recompute == "core")):
            self.add("memory", name, "recompute", 0.0, forward, launches=launches)

    def core(self, name: str, b: float, heads: float, q: float, k: float, d: float, causal: bool, fused: bool, dropout: bool) -> None:
        """Attention's inner part: scores, softmax, values; fused, or as two products and what lies between."""
        dtype, self.dtype = self.dtype, self.dtype if self.dtype not in ("fp8", "fp4") else "bf16"
        if fused:
            flops = 4.0 * b * heads * q * k * d * (0.5 if causal else 1.0)
            size = self.width * b * heads * d * (2 * q + 2 * k)
            shape = (b, heads, q, k, d)
            self.add("attention", name, "forward", flops, size, shape)
            self.add("attention", name, "backward", 2.5 * flops, 2.5 * size, shape, launches=3)
            if self.recompute in ("full", "core"):
                self.add("attention", name, "recompute", flops, size, shape)
            self.dtype = dtype
            return
        pairs = b * heads * q * k
        recompute, self.recompute = self.recompute, "full" if self.recompute == "core" else self.recompute
        self.matmul(name + "_scores", q, k, d, b * heads, weight=False)
        seen = 0.75 if causal else 1.0  # a causal kernel reads the half it needs and writes the whole
        self.memory(name + "_softmax", 2 * self.width * pairs * seen, 3 * self.width * pairs * seen)
        if dropout:
            self.memory(name + "_dropout", (2 * self.width + 1) * pairs, (2 * self.width + 1) * pairs)
        self.matmul(name + "_values", q, d, k, b * heads, weight=False)
        self.recompute, self.dtype = recompute, dtype


def _residual(o: _Ops, m: ModelConfig, share: float, style: str) -> None:
    """The sum with the residual stream, dropout before it; megatron's is one kernel (bias, dropout, sum)."""
    w = o.width
    if style == "megatron":
        o.memory("residual", (3 * w + 1) * share, (2 * w + 1) * share)
    elif m.dropout > 0:
        o.memory("residual", (5 * w + 1) * share, (4 * w + 1) * share, launches=2)
    else:
        o.memory("residual", 3 * w * share, 2 * w * share, back=0)


def _layer(o: _Ops, m: ModelConfig, stack: Stack, b: float, tensor: int, context: int, expert: int, style: str, sequence: bool, naive: bool) -> None:
    """One layer of a stack, forward, backward and what is computed again, on one device."""
    s = stack.tokens / context
    tokens = b * s
    w = o.width
    h, d = m.d_model, m.head_dim
    heads, kv = m.n_heads / tensor, max(kv_heads(m) / tensor, 1)
    inner, kv_inner = heads * d, kv * d
    f = m.d_ff / tensor
    share = tokens * h / (tensor if sequence else 1)  # elements of the residual stream on this device
    fused = not naive and style != "megatron"
    for cross in (False, True) if stack.memory else (False,):
        keys = stack.memory if cross else stack.tokens
        key_tokens = b * keys / context
        o.memory("norm", 2 * w * share)
        if cross or style == "gradus":
            o.matmul("query", tokens, inner, h)
            o.matmul("key_value", key_tokens, kv_inner, h, times=2)
        else:
            o.matmul("query_key_value", tokens, inner + 2 * kv_inner, h)
        if m.family == "llama":
            o.memory("rotary", 6 * w * (tokens * inner + key_tokens * kv_inner), launches=8)
        o.memory("heads", 2 * w * tokens * inner, 4 * w * (tokens * inner + key_tokens * kv_inner), launches=1, back=4)
        o.core("attention", b, heads, s, keys, d, stack.causal and not cross, fused, m.dropout > 0 or style == "megatron")
        o.matmul("attention_output", tokens, h, inner)
        _residual(o, m, share, style)
    o.memory("norm", 2 * w * share)
    times = 1.0
    ff_tokens = tokens
    experts = n_experts(m)
    if experts:
        local = max(experts / expert, 1)
        ff_tokens, times = tokens * m.top_k / local, local
        o.matmul("router", tokens, experts, h)
        o.memory("dispatch", 6 * w * tokens * h * m.top_k, launches=12)
    if gated(m):
        o.matmul("feedforward_in", ff_tokens, f, h, times=2 * times)
        o.memory("activation", 5 * w * ff_tokens * f * times, 8 * w * ff_tokens * f * times, launches=2 * times)
    else:
        o.matmul("feedforward_in", ff_tokens, f, h, times=times)
        o.memory("activation", 2 * w * ff_tokens * f * times, 3 * w * ff_tokens * f * times, launches=times)
    o.matmul("feedforward_out", ff_tokens, h, f, times=times)
    _residual(o, m, share, style)


def analytic_work(
    model: ModelConfig, layout: Layout, n: int, *, samples: int, seq_len: int, micro_batch: int, style: str = "gradus", dtype: str | None = None,
    pad: bool = True, frozen: bool = False, target_len: int | None = None, selected: float | None = None,
    transfers: list[Transfer] | None = None,
) -> Work:  # fmt: skip
    """The work of one optimizer step on the busiest of `n` devices.

    samples: of the whole step; seq_len, target_len, selected: as `shape_of`; micro_batch: samples of one forward pass on one device.
    dtype: what matrix products are computed in, where that is not the layout's precision (fp8). pad: style "megatron" makes the vocabulary
    a multiple of 128 × tensor. frozen: only small adapters are trained. transfers: what is sent (`formulas.traffic`);
    None: what other software sends. The layout must fit n.
    """
    if style == "megatron" and pad and model.vocab_size:
        unit = 128 * layout.tensor
        model = model.model_copy(update={"vocab_size": -(-model.vocab_size // unit) * unit})
    tensor, stages, context, expert, shard = layout.tensor, layout.pipeline, layout.context, layout.expert, layout.shard
    replicas = max(n // (tensor * stages * context * expert * shard), 1)
    groups = replicas * expert * shard  # that see different samples
    m = max(1, round(samples / (groups * micro_batch)))
    precision = layout.param_dtype if layout.precision == "fp32" and shard > 1 and layout.param_dtype else layout.precision
    half, pure = precision != "fp32", precision.startswith("pure_")
    computed = dtype or ("tf32" if precision == "fp32" and layout.tf32 else precision.removeprefix("pure_"))
    width = 2.0 if half else 4.0
    sequence = tensor > 1 and layout.sequence_parallel
    checkpoint = {"full": "full", "selective": "core", "attention": "core"}.get(layout.checkpointing, "")

    # on this stage: its share of the layers, and of the embedding and the head what the last stage has
    ops: list[Op] = []
    shape = shape_of(model, seq_len, target_len, selected)
    stacks, h = stacks_of(model, shape), model.d_model
    last, layers = stacks[-1], sum(stack.layers for stack in stacks)
    for stack in stacks:
        mine = -(-stack.layers // stages) if len(stacks) == 1 else stack.layers / stages
        o = _Ops(computed, width, mine, checkpoint, frozen)
        _layer(o, model, stack, micro_batch, tensor, context, expert, style, sequence, layout.attention == "naive")
        ops += o.ops
    tokens = micro_batch * last.tokens / context  # of the stream
    o = _Ops(computed, width, 1, "", frozen)
    vocabulary = 0.0  # weights of the output projection on this device
    for places, d_in, d_out in formulas.head_products(model, shape):
        if model.family == "vit" or d_out != formulas.vocabulary(model):
            o.matmul("logits_other", micro_batch * places, d_out, d_in)
            continue
        vocabulary = d_in * d_out / tensor
        seen = micro_batch * places / context
        logits = seen * d_out / (tensor if layout.vocab_parallel or style == "megatron" else 1)
        o.matmul("logits", seen, d_out / tensor, d_in)
        o.memory("loss", (18 if half else 12) * logits, (18 if half else 12) * logits, launches=6)
        if stages == 1:
            o.memory("embedding", 2 * width * tokens * h, 8 * vocabulary + 3 * width * tokens * h, launches=2)
    inputs = model.n_channels * model.patch_size**2 if model.family == "vit" else 0  # numbers of a patch
    if inputs and stages == 1:
        o.matmul("embedding_patches", micro_batch * patches(model), h, inputs, given=True)
    ops += o.ops
    here = formulas.local_parameters(model, layout)

    # per micro-batch, by weight: casts of autocast, adding up of gradients
    o = _Ops("fp32", width, 1, "")
    tensors = 12.0 * layers / stages + 4
    if style == "gradus" and half and not pure and shard == 1:
        o.add("memory", "cast", "forward", 0.0, 6 * here, launches=tensors / 2)
        o.add("memory", "cast", "backward", 0.0, 6 * here, launches=tensors / 2)
    if m > 1 and not frozen:
        if style == "mosaic":
            o.add("memory", "accumulate", "backward", 0.0, 12.0 * here / shard, launches=layers)
        else:
            size = width if pure or style == "megatron" else 4.0
            o.add("memory", "accumulate", "backward", 0.0, (3 * size if style == "gradus" else 2 * size + width) * here / shard, launches=tensors)
    ops += o.ops

    # once a step
    trained = 0.0 if frozen else here
    owned = trained / shard / (replicas if layout.shard_optimizer else 1)
    o = _Ops("fp32", 4.0, 1, "")
    if style == "megatron":
        o.add("memory", "gradients", "optimizer", 0.0, 8 * trained / shard, launches=4)  # unscale, norm
        o.add("memory", "adam", "optimizer", 0.0, 36 * owned, launches=20)
    else:
        size = 2.0 if pure else 4.0
        o.add("memory", "norm", "optimizer", 0.0, 4 * size * trained / shard, launches=tensors / 4)
        o.add("memory", "adam", "optimizer", 0.0, 7 * size * owned, launches=tensors / 4)

    if transfers is None:
        transfers = _transfers(model, layout, n, style, width * tokens * h, layers, m, here, vocabulary, frozen)
    every = micro_batch * m * groups
    return Work(ops, o.ops, transfers, micro_batches=m, stages=stages, virtual=stages_per_process(layout), schedule=layout.schedule, samples=every,
                tokens=every * sum(stack.tokens for stack in stacks), model_flops=every * formulas.closed_form(model, shape),
                data_bytes=micro_batch * m * last.tokens * (4.0 * inputs or 8.0), software=style)  # fmt: skip


def _transfers(
    model: ModelConfig, layout: Layout, n: int, style: str, stream: float, layers: float, m: int, here: float, vocabulary: float, frozen: bool
) -> list[Transfer]:
    """By the axes' usual closed forms. stream: bytes of a micro-batch's hidden states; here: weights of the device; vocabulary: of the output
    projection on it."""
    out: list[Transfer] = []
    tensor, stages, context, expert, shard = layout.tensor, layout.pipeline, layout.context, layout.expert, layout.shard
    pure, half, mine = layout.precision.startswith("pure_"), layout.precision != "fp32", layers / stages * m

    def send(axis: str, kind: str, payload: float, calls: float, group: int, stride: int, phase: str, hidden: str = "") -> None:
        out.append(Transfer(axis, kind, payload, calls, group, stride, phase, hidden))

    if tensor > 1:
        times = mine * (2.5 if two_sided(model) else 2)  # sublayers, of decoders one more
        for phase in ("forward", "recompute", "backward") if layout.checkpointing == "full" else ("forward", "backward"):
            if layout.sequence_parallel:
                send("tensor", "all_gather", stream, times * (2 if phase == "backward" else 1), tensor, 1, phase)
                send("tensor", "reduce_scatter", stream, times, tensor, 1, phase)
            else:
                send("tensor", "all_reduce", stream, times, tensor, 1, phase)
    if context > 1:
        of_heads = stream * model.head_dim / model.d_model / tensor  # bytes of one head's part
        for phase in ("forward", "backward"):
            if layout.context_method == "ring":
                chunk = 2 * of_heads * kv_heads(model) * (2 if phase == "backward" else 1)
                send("context", "send", chunk, (context - 1) * mine, context, tensor, phase, phase)
            else:
                send("context", "all_to_all", of_heads * model.n_heads, 4 * mine, context, tensor, phase)
    if expert > 1 and n_experts(model):
        for phase in ("forward", "backward"):
            send("expert", "all_to_all", model.top_k * stream, 2 * mine, expert, tensor * context, phase)
    reduced = 2.0 if pure or style == "megatron" else 4.0
    copies = max(n // (tensor * stages * context * shard), 1)  # of all weights but the experts
    if shard > 1:
        group, units = shard * context, layers / stages + 1
        gathered, scattered = (BYTES[of or default] * here for of, default in
                               ((layout.param_dtype, "bf16" if half else "fp32"), (layout.reduce_dtype, "bf16" if pure else "fp32")))  # fmt: skip
        for phase in ("forward", "backward") if layout.reshard else ("forward",):
            send("shard", "all_gather", gathered / units, units * m, group, tensor, phase, phase)
        send("shard", "reduce_scatter", scattered / units, units * m, group, tensor, "backward", "backward")
        if copies > 1:
            send("replicate", "all_reduce", scattered / shard, 1, copies, tensor * group, "backward", "backward")
    elif copies * context > 1 and not frozen:
        group = copies * context
        if style == "megatron":
            send("replicate", "all_reduce", reduced * here, 1, group, tensor, "optimizer")
        else:
            calls = max(1.0, reduced * here / (layout.bucket_mb * 2**20))
            send("replicate", "all_reduce", reduced * here * (calls - 1) / calls**2, calls, group, tensor, "backward", "backward")
            send("replicate", "all_reduce", reduced * here / calls, 1, group, tensor, "optimizer")
        if layout.shard_optimizer:
            send("replicate", "all_gather", (2.0 if half else 4.0) * here, 1, group, tensor, "optimizer")
    if stages > 1:
        # each tensor rank sends its part (Narayanan et al. 2021, section 4.1); the other direction's backward pass travels meanwhile
        payload, apart = stream / (tensor if layout.sequence_parallel or style == "megatron" else 1), n // stages
        send("pipeline", "send", payload, m * stages_per_process(layout), stages, apart, "forward")
        send("pipeline", "send", payload, m * stages_per_process(layout), stages, apart, "backward", "both")
        if vocabulary and getattr(model, "tie_output", True):
            send("pipeline", "all_reduce", reduced * vocabulary, 1, 2, apart * (stages - 1), "optimizer")
    return out
