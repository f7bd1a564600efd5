"""The work of one training step from sizes alone: what `trace` reads off the real step, written down, for the search and for other programs.

Nothing here imports torch, and one call takes well under a millisecond. Styles: "gradus" is our own step; "megatron" is Megatron-LM
and Megatron-DeepSpeed of 2021 and 2022 (unfused attention, vocabulary padded, gradients added up in the reduced precision's buffers and
reduced after the backward pass); "mosaic" is llm-foundry (fused attention, FSDP).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gradus.plan.work import Op, Transfer, Work
from gradus.recipe.schema import Layout, ModelConfig

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that are alike. tokens, memory: of one sample; memory: what cross attention looks at, 0 for none."""

    layers: int
    tokens: int
    causal: bool
    memory: int = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model in the numbers that count."""

    stacks: tuple[Stack, ...]
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    gated: bool
    bias: bool
    qkv_bias: bool
    vocab: int  # of the output, 0: no head over a vocabulary
    experts: int
    top_k: int
    dropout: float
    rotary: bool
    head_tokens: float  # of one sample, that the head sees
    head_parameters: float  # of the head that are not the vocabulary's
    embedding: float  # parameters of look-up tables that are not the head's
    tied: bool
    patch: int = 0  # inputs of a patch's projection
    norm_parameters: int = 2  # by d_model: weight and bias, or weight


def sizes(model: ModelConfig, seq_len: int) -> Sizes:
    """The sizes of a model of any family at `seq_len` tokens a sample (ViT: its own number of patches)."""
    h, a = model.d_model, model.n_heads
    family = model.family
    vocab = model.vocab_size or 0
    common: dict[str, Any] = {"d_model": h, "heads": a, "kv_heads": getattr(model, "n_kv_heads", None) or a, "head_dim": model.head_dim,
                              "d_ff": model.d_ff, "gated": False, "bias": True, "qkv_bias": True, "vocab": vocab, "experts": 0, "top_k": 1,
                              "dropout": model.dropout, "rotary": False, "head_tokens": float(seq_len), "head_parameters": 0.0,
                              "embedding": 0.0, "tied": getattr(model, "tie_output", True)}  # fmt: skip
    if family in ("gpt", "llama"):
        common |= {"experts": model.n_experts or 0, "top_k": model.top_k if model.n_experts else 1}
    if family == "gpt":
        stacks = (Stack(model.n_layers, seq_len, True),)
        common |= {"bias": model.bias, "qkv_bias": model.bias, "embedding": model.seq_len * h}
    elif family == "llama":
        stacks = (Stack(model.n_layers, seq_len, True),)
        common |= {"gated": True, "bias": False, "qkv_bias": False, "rotary": True, "norm_parameters": 1}
    elif family == "bert":
        stacks = (Stack(model.n_layers, seq_len, False),)
        head = model.head in ("masked_lm", "pretraining")
        common |= {"embedding": (model.seq_len + model.n_token_types + 1) * h + (0 if head else vocab * h),
                   "head_parameters": (h * h if head else 0) + (h * h if model.pooler else 0), "vocab": vocab if head else 0, "tied": True,
                   "head_tokens": seq_len * 0.15 if head else 1.0}  # fmt: skip
    elif family == "vit":
        tokens = (model.image_size // model.patch_size) ** 2 + (model.pool == "class_token")
        inputs = model.n_channels * model.patch_size**2
        stacks = (Stack(model.n_layers, tokens, False),)
        common |= {"vocab": 0, "head_tokens": 1.0, "head_parameters": h * (model.n_classes or 0), "embedding": tokens * h, "patch": inputs}
    else:  # t5, seq2seq
        decoder = model.n_decoder_layers or model.n_layers
        stacks = (Stack(model.n_layers, seq_len, False), Stack(decoder, seq_len, True, seq_len))
        if family == "t5":
            common |= {"gated": model.gated, "bias": False, "qkv_bias": False, "norm_parameters": 1}
        else:
            common |= {"embedding": 0.0 if model.share_embeddings else vocab * h, "vocab": model.target_vocab_size or vocab}
    return Sizes(stacks=stacks, **common)


def layer_matrices(z: Sizes, cross: bool, active: bool = False) -> float:
    """Weights of one layer's matrices; of experts all, or those that a token takes."""
    inner, kv = z.heads * z.head_dim, z.kv_heads * z.head_dim
    attention = 2 * z.d_model * inner + 2 * z.d_model * kv
    one = (3 if z.gated else 2) * z.d_model * z.d_ff
    copies = 1 if not z.experts else (z.top_k if active else z.experts)
    return attention * (2 if cross else 1) + one * copies + (z.d_model * z.experts if z.experts else 0)


def _rest(z: Sizes, cross: bool) -> float:
    """Biases and norms of one layer."""
    inner, kv = z.heads * z.head_dim, z.kv_heads * z.head_dim
    biases = (z.d_ff + z.d_model if z.bias else 0) * max(z.experts, 1) + (inner + 2 * kv + z.d_model if z.qkv_bias else 0) * (2 if cross else 1)
    return biases + z.norm_parameters * z.d_model * (3 if cross else 2)


def model_flops(z: Sizes, samples: float) -> float:
    """Of a step: 6 for each weight of a matrix and token, 12 for each head, its width, query and key; attention's full matrix
    (Chowdhery et al. 2022, appendix B). No recomputation."""
    total = 0.0
    for stack in z.stacks:
        inner, kv = z.heads * z.head_dim, z.kv_heads * z.head_dim
        total += stack.layers * (6 * stack.tokens * layer_matrices(z, False, active=True) + 12 * stack.tokens**2 * inner)
        if stack.memory:
            total += stack.layers * (12 * z.d_model * inner * stack.tokens + 12 * z.d_model * kv * stack.memory
                                     + 12 * stack.tokens * stack.memory * inner)  # fmt: skip
    total += 6 * z.head_tokens * z.d_model * z.vocab + 6 * z.head_tokens * z.head_parameters
    if z.patch:
        total += 6 * z.patch * z.d_model * z.stacks[0].tokens
    return total * samples


class _Ops:
    """Operations of a micro-batch as they are written down."""

    def __init__(self, dtype: str, width: float, count: float, recompute: str, frozen: bool = False):
        self.ops: list[Op] = []
        self.frozen = frozen  # the weights are not trained: no gradients for them
        self.dtype, self.width, self.count, self.recompute = dtype, width, count, recompute

    def add(self, kind: str, name: str, phase: str, flops: float, size: float, shape: tuple = (), launches: float = 1, times: float = 1) -> None:
        self.ops.append(Op(kind, name, self.dtype, phase, flops, size, shape, self.count * times, launches))

    def matmul(self, name: str, m: float, n: float, k: float, batch: float = 1, again: bool = True, weight: bool = True, times: float = 1) -> None:
        """m × k by k × n, its two products of the backward pass, and once more if the layer is computed again."""
        flops, size = 2.0 * batch * m * n * k, self.width * batch * (m * k + k * n + m * n)
        self.add("matmul", name, "forward", flops, size, (batch, m, n, k), times=times)
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


def _residual(o: _Ops, z: Sizes, share: float, style: str) -> None:
    """The sum with the residual stream, dropout before it; megatron's is one kernel (bias, dropout, sum)."""
    w = o.width
    if style == "megatron":
        o.memory("residual", (3 * w + 1) * share, (2 * w + 1) * share)
    elif z.dropout > 0:
        o.memory("residual", (5 * w + 1) * share, (4 * w + 1) * share, launches=2)
    else:
        o.memory("residual", 3 * w * share, 2 * w * share, back=0)


def _layer(o: _Ops, z: Sizes, stack: Stack, b: float, tensor: int, context: int, expert: int, style: str, sequence: bool, naive: bool) -> None:
    """One layer of a stack, forward, backward and what is computed again, on one device."""
    s = stack.tokens / context
    tokens = b * s
    w = o.width
    h, d = z.d_model, z.head_dim
    heads, kv = z.heads / tensor, max(z.kv_heads / tensor, 1)
    inner, kv_inner = heads * d, kv * d
    f = z.d_ff / tensor
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
        if z.rotary:
            o.memory("rotary", 6 * w * (tokens * inner + key_tokens * kv_inner), launches=8)
        o.memory("heads", 2 * w * tokens * inner, 4 * w * (tokens * inner + key_tokens * kv_inner), launches=1, back=4)
        o.core("attention", b, heads, s, keys, d, stack.causal and not cross, fused, z.dropout > 0 or style == "megatron")
        o.matmul("attention_output", tokens, h, inner)
        _residual(o, z, share, style)
    o.memory("norm", 2 * w * share)
    times = 1.0
    ff_tokens = tokens
    if z.experts:
        local = max(z.experts / expert, 1)
        ff_tokens, times = tokens * z.top_k / local * (expert / expert), local
        o.matmul("router", tokens, z.experts, h)
        o.memory("dispatch", 6 * w * tokens * h * z.top_k, launches=12)
    if z.gated:
        o.matmul("feedforward_in", ff_tokens, f, h, times=2 * times)
        o.memory("activation", 5 * w * ff_tokens * f * times, 8 * w * ff_tokens * f * times, launches=2 * times)
    else:
        o.matmul("feedforward_in", ff_tokens, f, h, times=times)
        o.memory("activation", 2 * w * ff_tokens * f * times, 3 * w * ff_tokens * f * times, launches=times)
    o.matmul("feedforward_out", ff_tokens, h, f, times=times)
    _residual(o, z, share, style)


def analytic_work(
    model: ModelConfig, layout: Layout, n: int, *, samples: int, seq_len: int, micro_batch: int, style: str = "gradus", dtype: str | None = None,
    pad: bool = True, frozen: bool = False,
) -> Work:  # fmt: skip
    """The work of one optimizer step on the busiest of `n` devices.

    samples: of the whole step; seq_len: tokens of one (for encoder-decoders of either side); micro_batch: samples of one forward pass on
    one device. dtype: what matrix products are computed in, where that is not the layout's precision (fp8). pad: style "megatron" makes
    the vocabulary a multiple of 128 × tensor. frozen: only small adapters are trained. The layout must fit n.
    """
    z = sizes(model, seq_len)
    if style == "megatron" and z.vocab and pad:
        unit = 128 * layout.tensor
        z = dataclasses.replace(z, vocab=-(-z.vocab // unit) * unit)
    tensor, stages, context, expert, shard = layout.tensor, layout.pipeline, layout.context, layout.expert, layout.shard
    replicas = max(n // (tensor * stages * context * expert * shard), 1)
    groups = replicas * expert * shard  # that see different samples
    m = max(1, round(samples / (groups * micro_batch)))
    half = layout.precision != "fp32"
    computed = dtype or ("tf32" if layout.precision == "fp32" and layout.tf32 else layout.precision.removeprefix("pure_"))
    width = 2.0 if half else 4.0
    virtual = layout.stages or (2 if layout.schedule in ("interleaved", "zero_bubble") and stages > 1 else 1)
    sequence = tensor > 1 and layout.sequence_parallel
    checkpoint = {"full": "full", "selective": "core", "attention": "core"}.get(layout.checkpointing, "")
    naive = layout.attention == "naive"

    # on this stage: its share of the layers, and of the embedding and the head what the last stage has
    ops: list[Op] = []
    layers = sum(stack.layers for stack in z.stacks)
    weights = 0.0  # of the layers on this device
    for stack in z.stacks:
        mine = -(-stack.layers // stages) if len(z.stacks) == 1 else stack.layers / stages
        o = _Ops(computed, width, mine, checkpoint, frozen)
        _layer(o, z, stack, micro_batch, tensor, context, expert, style, sequence, naive)
        ops += o.ops
        ff = layer_matrices(z, False) - layer_matrices(dataclasses.replace(z, d_ff=0), False)
        weights += mine * ((layer_matrices(z, bool(stack.memory)) - ff + ff / (expert if z.experts else 1)) / tensor + _rest(z, bool(stack.memory)))
    last = z.stacks[-1]
    tokens = micro_batch * last.tokens / context
    o = _Ops(computed, width, 1, "", frozen)
    vocabulary = z.vocab * z.d_model / tensor
    if z.vocab:
        seen = micro_batch * z.head_tokens / context
        logits = seen * z.vocab / (tensor if layout.vocab_parallel or style == "megatron" else 1)
        o.matmul("logits", seen, z.vocab / tensor, z.d_model)
        o.memory("loss", (6 + 12) * logits if half else 12 * logits, (12 + 6) * logits if half else 12 * logits, launches=6)
        if stages == 1:
            o.memory("embedding", 2 * width * tokens * z.d_model, 8 * vocabulary + 3 * width * tokens * z.d_model, launches=2)
    if z.head_parameters:
        o.matmul("logits_other", micro_batch * z.head_tokens, z.head_parameters / z.d_model, z.d_model)
    if z.patch and stages == 1:
        o.matmul("embedding_patches", micro_batch * z.stacks[0].tokens, z.d_model, z.patch)
    ops += o.ops
    ends = vocabulary * (1 if z.tied or stages > 1 else 2) + (z.embedding + z.head_parameters + z.patch * z.d_model) / (1 if stages == 1 else 2)
    here = weights + ends

    # per micro-batch, by weight: casts of autocast, adding up of gradients
    o = _Ops("fp32", width, 1, "")
    pure = layout.precision.startswith("pure_")
    tensors = 12.0 * layers / stages + 4
    if style == "gradus" and half and not pure and shard == 1:
        o.add("memory", "cast", "forward", 0.0, 6 * here, launches=tensors / 2)
        o.add("memory", "cast", "backward", 0.0, 6 * here, launches=tensors / 2)
    if frozen:
        pass
    elif m > 1 and style != "mosaic":
        size = width if pure or style == "megatron" else 4.0
        o.add("memory", "accumulate", "backward", 0.0, (3 * size if style == "gradus" else 2 * size + width) * here / shard, launches=tensors)
    elif style == "mosaic" and m > 1:
        o.add("memory", "accumulate", "backward", 0.0, 12.0 * here / max(shard, 1), launches=layers)
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
    step = o.ops

    # communication
    transfers: list[Transfer] = []
    send = transfers.append
    mine = layers / stages
    if tensor > 1:
        payload = width * micro_batch * last.tokens / context * z.d_model
        sublayers = 2 + (1 if last.memory else 0) / 2
        again = 1 if checkpoint == "full" else 0
        for phase, times in (("forward", 1), ("recompute", again), ("backward", 1)):
            if not times:
                continue
            if sequence:
                send(Transfer("tensor", "all_gather", payload, sublayers * mine * m * (2 if phase == "backward" else 1), tensor, 1, phase))
                send(Transfer("tensor", "reduce_scatter", payload, sublayers * mine * m, tensor, 1, phase))
            else:
                send(Transfer("tensor", "all_reduce", payload, sublayers * mine * m, tensor, 1, phase))
    if context > 1:
        chunk = 2 * width * micro_batch * last.tokens / context * z.kv_heads * z.head_dim / tensor
        if layout.context_method == "ring":
            send(Transfer("context", "send", chunk, (context - 1) * mine * m, context, tensor, "forward", "forward"))
            send(Transfer("context", "send", 2 * chunk, (context - 1) * mine * m, context, tensor, "backward", "backward"))
        else:
            payload = width * micro_batch * last.tokens / context * z.heads * z.head_dim / tensor * context
            for phase in ("forward", "backward"):
                send(Transfer("context", "all_to_all", payload / context, 4 * mine * m, context, tensor, phase))
    if expert > 1 and z.experts:
        payload = width * z.top_k * micro_batch * last.tokens / context * z.d_model
        for phase in ("forward", "backward"):
            send(Transfer("expert", "all_to_all", payload, 2 * mine * m, expert, tensor * context * shard, phase))
    stride = tensor
    reduced = 2.0 if pure or style == "megatron" else 4.0
    if shard * context > 1 and shard > 1:
        gathered = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}[layout.param_dtype or ("bf16" if half else "fp32")]
        scattered = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}[layout.reduce_dtype or ("bf16" if pure else "fp32")]
        units = mine + 1
        group = shard * context
        send(Transfer("shard", "all_gather", gathered * here / units, units * m, group, stride, "forward", "forward"))
        if layout.reshard:
            send(Transfer("shard", "all_gather", gathered * here / units, units * m, group, stride, "backward", "backward"))
        send(Transfer("shard", "reduce_scatter", scattered * here / units, units * m, group, stride, "backward", "backward"))
        if replicas * expert > 1:
            send(Transfer("replicate", "all_reduce", scattered * here / shard, 1, replicas * expert, stride * group, "backward", "backward"))
    elif replicas * expert * context > 1 and not frozen:
        group = replicas * expert * context
        if style == "megatron":
            send(Transfer("replicate", "all_reduce", reduced * here, 1, group, stride, "optimizer"))
        else:
            bucket = layout.bucket_mb * 2**20
            calls = max(1.0, reduced * here / bucket)
            send(Transfer("replicate", "all_reduce", reduced * here * (calls - 1) / calls**2, calls, group, stride, "backward", "backward"))
            send(Transfer("replicate", "all_reduce", reduced * here / calls, 1, group, stride, "optimizer"))
        if layout.shard_optimizer:
            send(Transfer("replicate", "all_gather", width * here, 1, group, stride, "optimizer"))
    if stages > 1:
        # each tensor rank sends its part (Narayanan et al. 2021, section 4.1); the other direction's backward pass travels meanwhile
        payload = width * micro_batch * last.tokens / context * z.d_model / (tensor if sequence or style == "megatron" else 1)
        apart = n // stages
        send(Transfer("pipeline", "send", payload, m * virtual, stages, apart, "forward"))
        send(Transfer("pipeline", "send", payload, m * virtual, stages, apart, "backward", "both"))
        if z.tied and z.vocab:
            send(Transfer("pipeline", "all_reduce", reduced * vocabulary, 1, 2, apart * (stages - 1), "optimizer"))

    every = micro_batch * m * groups
    return Work(ops, step, transfers, micro_batches=m, stages=stages, virtual=virtual, schedule=layout.schedule, samples=every,
                tokens=every * sum(stack.tokens for stack in z.stacks), model_flops=model_flops(z, every),
                data_bytes=8.0 * micro_batch * m * last.tokens if not z.patch else 4.0 * micro_batch * m * z.patch * last.tokens,
                software=style)  # fmt: skip
