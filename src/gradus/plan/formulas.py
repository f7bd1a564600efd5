"""The plan in closed form: parameters, memory and traffic from sizes alone, in well under a millisecond, for all six families.

Nothing here builds or traces a model: `parameters` is written from the papers' shapes, `activations` from the rule by which autograd keeps
what an operator's derivative needs, `traffic` from what the layouts of `gradus.parallel` send. Tests hold all three against the real
modules. `plan.trace` is the exact way; this is the fast one, for searching.

Letters: b samples of a micro-batch, s tokens of a sequence, h d_model, f d_ff, a heads, d head_dim, V vocabulary; t tensor, p pipeline.
Bytes throughout.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import NamedTuple

from gradus.plan.work import COMPONENTS, Transfer
from gradus.recipe.axes import DATA, sizes, stages_per_process, strides
from gradus.recipe.schema import Layout, ModelConfig

PARAMETERS = ("embeddings", "attention", "feedforward", "experts", "norms", "head")  # as models.count, whose feedforward includes experts
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "pure_bf16": 2, "pure_fp16": 2}


# ---------------------------------------------------------------- what a model is made of


class Part(NamedTuple):
    """A parameter. split: the dimension that tensor parallelism cuts, None: whole everywhere (parallel.tensor)."""

    component: str
    shape: tuple[int, ...]
    split: int | None = None
    experts: bool = False  # cut along dimension 0 by layout.expert
    along_stream: bool = False  # whole, and applied to the stream that sequence parallelism cuts: its gradient is to be summed

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local(self, tensor: int, expert: int = 1) -> tuple[int, ...]:
        """The shape on the process that has most: DTensor cuts as torch.chunk does, the first part the largest."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split] = -(-shape[self.split] // tensor)
        if self.experts:
            shape[0] //= expert
        return tuple(shape)


class Stack(NamedTuple):
    """Blocks in a row; names of the ends that its first block, its last and all of them need (models.family.Stack)."""

    n_blocks: int
    block: tuple[Part, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    beside: tuple[str, ...] = ()


class Anatomy(NamedTuple):
    stacks: tuple[Stack, ...]
    ends: dict[str, tuple[Part, ...]]

    @property
    def n_blocks(self) -> int:
        return sum(stack.n_blocks for stack in self.stacks)


def _linear(component: str, d_in: int, d_out: int, bias: bool, how: str = "whole") -> list[Part]:
    """how: columns (the output is split), rows (the input is split) or whole."""
    weight = Part(component, (d_out, d_in), {"columns": 0, "rows": 1, "whole": None}[how])
    return [weight, Part(component, (d_out,), 0 if how == "columns" else None)] if bias else [weight]


def _attention(m: ModelConfig, bias: bool) -> list[Part]:
    """Vaswani et al. 2017, section 3.2.2; fewer key heads: Ainslie et al. 2023; biases of all but the output: Yang et al. 2024, section 2.2.1."""
    h, inner = m.d_model, m.n_heads * m.head_dim
    keys = kv_heads(m) * m.head_dim
    into = [part for width in (inner, keys, keys) for part in _linear("attention", h, width, bias or getattr(m, "qkv_bias", False), "columns")]
    return into + _linear("attention", inner, h, bias, "rows")


def _feedforward(m: ModelConfig, bias: bool, gated: bool) -> list[Part]:
    """Vaswani et al. 2017, equation 2; gated: Shazeer 2020, equation 6; experts: Shazeer et al. 2017."""
    h, f, n = m.d_model, m.d_ff, getattr(m, "n_experts", None)
    if n is None:
        return _linear("feedforward", h, f, bias, "columns") * (1 + gated) + _linear("feedforward", f, h, bias, "rows")
    into, out = ([Part("experts", (n, *d), experts=True)] + [Part("experts", (n, d[1]), experts=True)] * bias for d in ((h, f), (f, h)))
    return [Part("experts", (n, h)), *into * (1 + gated), *out]


def _norm(h: int, bias: bool, along_stream: bool = True) -> list[Part]:
    return [Part("norms", (h,), along_stream=along_stream)] * (1 + bias)


def anatomy(m: ModelConfig) -> Anatomy:
    """The parameters of a model in the model's order. Sources: the docstring of each module in gradus.models.

    GPT-2 has 12h² + 13h a layer (four biases of attention, 5h of the feed-forward network, 4h of two norms), not 12h² + 5h.
    """
    h, family = m.d_model, m.family
    tokens = {"tokens": (Part("embeddings", (m.vocab_size, h), 0),)} if family != "vit" else {}
    if family in ("gpt", "llama"):
        bias, gated = (m.bias, False) if family == "gpt" else (False, True)
        norm = _norm(h, bias)
        block = norm + _attention(m, bias) + norm + _feedforward(m, bias, gated)
        first = {"positions": (Part("embeddings", (m.seq_len, h), along_stream=True),)} if family == "gpt" else {}
        head = {} if m.tie_output else {"head": (Part("head", (m.vocab_size, h), 0),)}
        stack = Stack(m.n_layers, tuple(block), ("tokens", *first), ("norm", "tokens" if m.tie_output else "head"))
        return Anatomy((stack,), tokens | first | {"norm": tuple(norm)} | head)
    norm = _norm(h, family != "t5")
    if family == "bert":
        block = _attention(m, True) + norm + _feedforward(m, True, False) + norm
        first = (Part("embeddings", (m.seq_len, h), along_stream=True), Part("embeddings", (m.n_token_types, h), along_stream=True), *norm)
        ends, after = tokens | {"first": first}, []
        if m.pooler and m.head != "masked_lm":
            ends["pooler"] = tuple(_linear("head", h, h, True))
            after.append("pooler")
        if m.head in ("masked_lm", "pretraining"):  # the decoder's weight is the word embedding
            ends["masked_lm"] = (*_linear("head", h, h, True), *_norm(h, True, False), Part("head", (m.vocab_size,), 0))
            after += ["masked_lm", "tokens"]
        n_classes = 2 if m.head == "pretraining" else m.n_classes if m.head == "classification" else None
        if n_classes:
            ends["classifier"] = tuple(_linear("head", h, n_classes, True))
            after.append("classifier")
        return Anatomy((Stack(m.n_layers, tuple(block), ("tokens", "first"), tuple(after)),), ends)
    if family == "vit":
        block = norm + _attention(m, True) + norm + _feedforward(m, True, False)
        token = (Part("embeddings", (1, 1, h)),) if m.pool == "class_token" else ()
        patches = Part("embeddings", (h, m.n_channels, m.patch_size, m.patch_size)), Part("embeddings", (h,))
        ends = {"first": (*token, Part("embeddings", (1, vit_tokens(m), h)), *patches), "norm": tuple(norm)}
        ends["head"] = tuple(_linear("head", h, m.n_classes, True)) if m.n_classes else ()
        return Anatomy((Stack(m.n_layers, tuple(block), ("first",), ("norm", "head")),), ends)
    decoders = m.n_decoder_layers or m.n_layers
    if family == "t5":
        attention, feed, table = _attention(m, False), _feedforward(m, False, m.gated), (Part("embeddings", (m.n_buckets, m.n_heads), 1),)
        encoder, decoder = norm + attention + norm + feed, norm + attention + norm + attention + norm + feed
        head = {} if m.tie_output else {"head": (Part("head", (m.vocab_size, h), 0),)}
        ends = tokens | {"encoder_bias": table, "encoder_norm": tuple(norm), "decoder_bias": table, "norm": tuple(norm)} | head
        first = Stack(m.n_layers, tuple(encoder), ("tokens",), ("encoder_norm",), ("encoder_bias",))
        second = Stack(decoders, tuple(decoder), ("tokens",), ("norm", "tokens" if m.tie_output else "head"), ("decoder_bias",))
        return Anatomy((first, second), ends)
    assert family == "seq2seq", family
    encoder = _attention(m, True) + norm + _feedforward(m, True, False) + norm
    decoder = encoder + _attention(m, True) + norm
    target = m.target_vocab_size or m.vocab_size
    of_target = "tokens" if m.share_embeddings else "target"
    ends = tokens | ({} if m.share_embeddings else {"target": (Part("embeddings", (target, h), 0),)})
    ends |= {name: tuple(norm) if m.norm_first else () for name in ("encoder_norm", "norm")}
    after = ["norm", of_target if m.tie_output else "head"]
    if not m.tie_output:
        ends["head"] = (Part("head", (target, h), 0),)
    if m.output_bias:
        ends["head_bias"] = (Part("head", (target,), 0),)
        after.append("head_bias")
    first = Stack(m.n_layers, tuple(encoder), ("tokens",), ("encoder_norm",))
    return Anatomy((first, Stack(decoders, tuple(decoder), (of_target,), tuple(after))), ends)


def patches(m: ModelConfig) -> int:
    return (m.image_size // m.patch_size) ** 2


def vit_tokens(m: ModelConfig) -> int:
    """Patches, and the class token if there is one (Dosovitskiy et al. 2021, section 3.1)."""
    return patches(m) + (m.pool == "class_token")


def kv_heads(m: ModelConfig) -> int:
    return getattr(m, "n_kv_heads", None) or m.n_heads


def two_sided(m: ModelConfig) -> bool:
    """Whether there is a decoder beside the encoder."""
    return m.family in ("t5", "seq2seq")


def gated(m: ModelConfig) -> bool:
    return m.family == "llama" or getattr(m, "gated", False)


def n_experts(m: ModelConfig) -> int:
    return getattr(m, "n_experts", None) or 0


def parameters(m: ModelConfig) -> dict[str, int]:
    """Parameters by component, each shared one once, and `total`. `feedforward` + `experts` is models.count's feedforward."""
    a, counts = anatomy(m), dict.fromkeys(PARAMETERS, 0)
    for stack in a.stacks:
        for part in stack.block:
            counts[part.component] += part.size * stack.n_blocks
    for part in (part for end in a.ends.values() for part in end):
        counts[part.component] += part.size
    return {**counts, "total": sum(counts.values())}


# ---------------------------------------------------------------- operations


class Shape(NamedTuple):
    """One training sample as the model sees it, in positions. Of decoders and encoders `source` is the sequence and `target` 0."""

    source: int
    target: int = 0
    selected: float = 0  # places at which a masked-LM head computes


def head_products(m: ModelConfig, shape: Shape) -> list[tuple[float, int, int]]:
    """(places of a sample, inputs, outputs) of the matrices behind the blocks; that of the vocabulary last."""
    h = m.d_model
    if m.family == "vit":
        return [(1, h, m.n_classes or 0)]
    if m.family != "bert":
        return [(shape.target if two_sided(m) else shape.source, h, vocabulary(m))]
    classes = {"pretraining": 2, "classification": m.n_classes}.get(m.head)
    found = [(1, h, h), (1, h, classes)] if classes else []
    return found + ([(shape.selected, h, h), (shape.selected, h, m.vocab_size)] if m.head in ("masked_lm", "pretraining") else [])


def closed_form(m: ModelConfig, shape: Shape) -> float:
    """Operations of forward and backward pass over one sample, attention's full matrix: 6·N_mm a token, and 12·a·d a pair of query and key.

    N_mm are the weights that multiply (Chowdhery et al. 2022, appendix B). Of the encoder-decoder the encoder's weights, and those of the
    decoder that make keys and values of the encoder's output, act on the source, the rest on the target. A masked-LM head acts on the
    places it is asked for. Patches need no gradient of the image: 4 a weight instead of 6.
    """
    h, (s, t, _) = m.d_model, shape
    queries, keys = m.n_heads * m.head_dim, kv_heads(m) * m.head_dim
    layer = 2 * h * (queries + keys) + (3 if gated(m) else 2) * h * m.d_ff * (m.top_k if n_experts(m) else 1) + h * n_experts(m)
    total = m.n_layers * (6 * layer * s + 12 * queries * s * s)
    if two_sided(m):  # cross-attention: keys and values of the source, queries and the output of the target
        total += (m.n_decoder_layers or m.n_layers) * (6 * layer * t + 12 * h * queries * (s + t) + 12 * queries * (t * t + t * s))
    if m.family == "vit":
        total += 4 * m.n_channels * m.patch_size**2 * h * patches(m)
    return total + 6 * sum(math.prod(product) for product in head_products(m, shape))


# ---------------------------------------------------------------- what a device holds of it


class Share(NamedTuple):
    """What one device of the pipeline has: blocks of each stack, and names of ends."""

    blocks: tuple[int, ...]
    ends: frozenset[str]
    first: bool = True  # it has the first stage of all
    last: bool = True
    stages: tuple[int, ...] = (0,)


def stages_of(rank: int, layout: Layout) -> list[int]:
    """The stages of a pipeline rank: round the ranks, or with two zero-bubble stages down and up again in a V (Qi et al. 2024)."""
    p, v = layout.pipeline, stages_per_process(layout)
    if layout.schedule == "zero_bubble" and v == 2 and p > 1:
        return [rank, 2 * p - 1 - rank]
    return [rank + i * p for i in range(v)]


def rank_of(stage: int, layout: Layout) -> int:
    """The pipeline rank that has a stage."""
    p, v = layout.pipeline, stages_per_process(layout)
    return 2 * p - 1 - stage if layout.schedule == "zero_bubble" and v == 2 and stage >= p else stage % p


def _own(n_blocks: int, stage: int, n_stages: int) -> range:
    """Blocks of a stage: ceil(n·i/k) to ceil(n·(i+1)/k) (parallel.pipeline)."""
    return range(-(-n_blocks * stage // n_stages), -(-n_blocks * (stage + 1) // n_stages))


def share(m: ModelConfig, layout: Layout, rank: int, a: Anatomy | None = None) -> Share:
    """The part of pipeline rank `rank`."""
    a = a or anatomy(m)
    if layout.pipeline == 1:
        return Share(tuple(stack.n_blocks for stack in a.stacks), frozenset(a.ends))
    n_stages, blocks, ends = layout.pipeline * stages_per_process(layout), [0] * len(a.stacks), set()
    n_blocks, mine = a.n_blocks, stages_of(rank, layout)
    for stage in mine:
        own, start = _own(n_blocks, stage, n_stages), 0
        for i, stack in enumerate(a.stacks):
            here = max(0, min(own.stop, start + stack.n_blocks) - max(own.start, start))
            blocks[i] += here
            if start in own:
                ends.update(stack.before)
            if start + stack.n_blocks - 1 in own:
                ends.update(stack.after)
            if here:
                ends.update(stack.beside)
            start += stack.n_blocks
    return Share(tuple(blocks), frozenset(ends), 0 in mine, n_stages - 1 in mine, tuple(mine))


def kinds_of_rank(m: ModelConfig, layout: Layout, a: Anatomy) -> list[int]:
    """One pipeline rank of each kind: the first of those that have equal parts. It also has most micro-batches in flight among them."""
    found: dict[tuple, int] = {}
    for rank in range(layout.pipeline):
        mine = share(m, layout, rank, a)
        found.setdefault((mine.blocks, mine.ends, mine.first, mine.last), rank)
    return list(found.values())


def holders(layout: Layout, a: Anatomy) -> dict[str, list[int]]:
    """End → the pipeline ranks that have it."""
    n_stages, n_blocks, start = layout.pipeline * stages_per_process(layout), a.n_blocks, 0
    found: dict[str, set[int]] = {name: set() for name in a.ends}
    for stack in a.stacks:
        first, last = (block * n_stages // n_blocks for block in (start, start + stack.n_blocks - 1))
        for names, stages in ((stack.before, (first,)), (stack.after, (last,)), (stack.beside, range(first, last + 1))):
            for name in names:
                found[name].update(rank_of(stage, layout) for stage in stages)
        start += stack.n_blocks
    return {name: sorted(ranks) for name, ranks in found.items()}


def held(m: ModelConfig, layout: Layout, rank: int = 0, a: Anatomy | None = None) -> list[tuple[Part, int]]:
    """(part, how many of it) on pipeline rank `rank`, not yet cut; blocks' parts by kind of block."""
    a = a or anatomy(m)
    mine = share(m, layout, rank, a)
    found = [(part, n) for stack, n in zip(a.stacks, mine.blocks) if n for part in stack.block]
    return found + [(part, 1) for name, end in a.ends.items() if name in mine.ends for part in end]


def in_order(m: ModelConfig, layout: Layout, rank: int = 0, a: Anatomy | None = None) -> list[Part]:
    """The parts on a pipeline rank, one for each parameter, as `named_parameters` gives them."""
    a = a or anatomy(m)
    mine = share(m, layout, rank, a)
    inner = [name for stack in a.stacks for name in (*stack.beside, *(n for n in stack.after if n.endswith("norm")))]
    names = [name for name in a.ends if name in mine.ends]
    before = [name for stack in a.stacks for name in stack.before]
    found = [part for name in names if name in before for part in a.ends[name]]
    for stack, n in zip(a.stacks, mine.blocks):
        found += [part for name in stack.beside if name in mine.ends for part in a.ends[name]]
        found += stack.block * n
        found += [part for name in stack.after if name.endswith("norm") and name in mine.ends for part in a.ends[name]]
    return found + [part for name in names if name not in before and name not in inner for part in a.ends[name]]


def padded(shape: tuple[int, ...], n: int) -> int:
    """Elements of a parameter that FSDP2 gathers from n devices, each of which has equally many rows of dimension 0."""
    return -(-shape[0] // n) * n * math.prod(shape[1:])


def cut(part: Part, layout: Layout) -> tuple[int, int]:
    """(elements that FSDP2 gathers of a parameter, from how many devices): the device that has most holds elements / devices. Experts that
    are split are cut over shard alone, and all experts along the first dimension that divides (parallel.shard)."""
    local = part.local(layout.tensor, layout.expert)
    n = layout.shard * layout.context * (1 if part.experts else layout.expert) if layout.shard > 1 else 1
    return (math.prod(local) if part.experts and any(size % n == 0 for size in local) else padded(local, n)), n


def fullest(part: Part, layout: Layout) -> int:
    """Elements of a parameter on the device that has most."""
    elements, n = cut(part, layout)
    return elements // n


def local_parameters(m: ModelConfig, layout: Layout) -> int:
    """Elements of parameters on the fullest pipeline rank, under tensor, expert and pipeline; FSDP leaves them whole while they are used."""
    a = anatomy(m)
    ranks = kinds_of_rank(m, layout, a) if layout.pipeline > 1 else [0]
    return max(sum(math.prod(part.local(layout.tensor, layout.expert)) * times for part, times in held(m, layout, r, a)) for r in ranks)


def korthikanti(b: int, s: int, h: int, a: int, t: int = 1, *, sequence_parallel: bool = False, checkpointing: str = "none") -> float:
    """Activation bytes of one layer, in 16 bits, dropout masks of 1 byte (Korthikanti et al. 2022, table 2). Ours differ: see `block_saved`.

    >>> korthikanti(1, 2048, 12288, 96) / (2048 * 12288)
    114.0
    """
    sbh = float(s * b * h)
    if checkpointing == "full":
        return 2 * sbh
    scores = 5 * a * s / h if checkpointing == "none" else 0.0
    if sequence_parallel:
        return sbh * (34 + scores) / t
    return sbh * (10 + 24 / t + scores / t)


# ---------------------------------------------------------------- activations: what autograd keeps


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Bytes an element: of matrix products, of what runs from block to block, of weights. auto: autocast makes half copies."""

    compute: int
    stream: int
    weight: int
    auto: bool

    @classmethod
    def of(cls, layout: Layout) -> Numbers:
        name = layout.precision
        if name.startswith("pure_"):
            return cls(2, 2, 2, False)
        if name != "fp32":
            return cls(2, 4, 4, True)
        if layout.shard > 1 and layout.param_dtype in ("bf16", "fp16"):
            return cls(2, 2, 4, False)
        return cls(4, 4, 4, False)


@dataclasses.dataclass(eq=False)
class _T:
    """A tensor: elements, and bytes of each."""

    n: float
    size: int

    @property
    def bytes(self) -> float:
        return self.n * self.size


class Saved(NamedTuple):
    """Bytes of one block and micro-batch."""

    all: float  # kept where nothing is checkpointed
    casts: float  # half copies of weights that autocast makes and the graph keeps
    products: float  # results of matrix products and of attention, which selective checkpointing keeps
    attention: float  # of `all`, that which the attention module keeps for itself, and not its input
    attention_casts: float
    entry: float  # the block's input
    working: float  # at most alive besides in its backward pass: gradients of the widest place


class _Ledger:
    """Every tensor that some operator's derivative needs, once. The rules are PyTorch's derivatives.yaml."""

    def __init__(self, z: _Sizes):
        self.z, self.kept, self.shared, self.casts, self.products, self.widest = z, {}, set(), 0.0, 0.0, 0.0

    def keep(self, *tensors: _T) -> None:
        self.kept.update({id(t): t for t in tensors if id(t) not in self.shared})

    @property
    def total(self) -> float:
        return sum(t.bytes for t in self.kept.values())

    def linear(self, x: _T, rows: float, d_in: int, d_out: int) -> _T:
        z = self.z
        if z.num.auto and x.size != z.num.compute:
            x = _T(x.n, z.num.compute)  # autocast remembers casts of weights, not of activations: each use has its own
        if z.num.auto:
            self.casts += d_in * d_out * z.num.compute
        self.keep(x)
        out = _T(rows * d_out, z.num.compute)
        self.products += out.bytes
        self.widest = max(self.widest, x.bytes + out.bytes)
        return out

    def layer_norm(self, x: _T, rows: float) -> _T:
        self.keep(x, _T(2 * rows, x.size if self.z.cpu else 4))
        return _T(x.n, x.size)

    def rms_norm(self, x: _T, rows: float) -> _T:
        """A fused kernel on a GPU; on a CPU three operators in fp32, of which the normed values are kept too."""
        if not self.z.cpu:
            self.keep(x, _T(rows, 4))
            return _T(x.n, x.size)
        self.keep(x if x.size == 4 else _T(x.n, 4), _T(x.n, 4), _T(rows, 4))
        return _T(x.n, x.size)

    def dropout(self, x: _T) -> _T:
        """The mask: bytes on a GPU; on a CPU the factors themselves."""
        if not self.z.dropout:
            return x
        self.keep(_T(x.n, x.size if self.z.cpu else 1))
        return _T(x.n, x.size)


@dataclasses.dataclass
class _Sizes:
    """One block's sizes on one device."""

    m: ModelConfig
    num: Numbers
    b: int
    s: int  # of the block's own sequence, on this device
    memory: int  # tokens of the sequence that cross-attention looks at
    t: int
    sequence_parallel: bool
    kernel: str  # sdpa, naive, chunked, ring, ulysses
    cpu: bool
    dropout: float
    context: int = 1
    expert: int = 1

    @property
    def rows(self) -> float:
        return self.b * self.s

    @property
    def stream_rows(self) -> float:
        return self.b * -(-self.s // self.t) if self.sequence_parallel else self.rows


def _gathered(ledger: _Ledger, x: _T, rows: float) -> _T:
    """Tensor parallelism gathers what attention and feed-forward read, and the products keep it whole: Korthikanti's would gather again."""
    z = ledger.z
    return _T(rows * z.m.d_model, x.size) if z.t > 1 and z.sequence_parallel else x


def _attend(ledger: _Ledger, x: _T, memory: _T | None = None, causal: bool = False, rotary: bool = False, bias: bool = False) -> _T:
    z, m = ledger.z, ledger.z.m
    h, d, c = m.d_model, m.head_dim, z.num.compute
    heads, kv = m.n_heads // z.t, kv_heads(m) // z.t
    keys = z.memory if memory is not None else z.s
    k_rows = z.b * keys
    x = _gathered(ledger, x, z.rows)
    source = x if memory is None else memory
    q = ledger.linear(x, z.rows, h, heads * d)
    k, v = (ledger.linear(source, k_rows, h, kv * d) for _ in range(2))
    if rotary:  # computed in fp32, kept in the dtype it came in
        q, k = _T(q.n, c), _T(k.n, c)
    out = _T(z.rows * heads * d, c)
    scores = z.b * heads * float(z.s) * keys
    drop = z.dropout > 0 and m.family != "vit"
    if z.kernel in ("sdpa", "ulysses"):
        # grouped keys: only a flash kernel shares them (layers.kernels.sdpa)
        if kv != heads and not z.cpu and (bias or c == 4):
            k, v = _T(k.n * heads / kv, c), _T(v.n * heads / kv, c)
        if z.cpu and (drop or bias):  # the plain path: scaled queries and keys in fp32, weights, and what is left of them
            whole = _T(k_rows * heads * d, 4)
            ledger.keep(_T(q.n, 4), _T(whole.n, 4), v if c == 4 and kv == heads else whole, _T(scores, 4))
            ledger.products += 4 * scores
            if drop:
                ledger.keep(_T(scores, 4), _T(scores, 4))
        else:
            ledger.keep(q, k, v, out, _T(z.rows * heads, 4))
            ledger.products += out.bytes + 4 * z.rows * heads
        if bias and causal:
            ledger.keep(_T(z.s * keys, 1))
        if bias and not z.cpu and (causal or z.num.auto):
            ledger.keep(_T(heads * z.s * keys, c))  # of the bias a copy in half, or with the later keys struck out
        if z.kernel == "ulysses":  # the all-to-all's results are what the kernel keeps; what it gives goes back through another
            out = _T(out.n, c)
    elif z.kernel in ("chunked", "ring"):
        ledger.keep(q, k, v, out, _T(z.rows * heads, 4))
        out = _T(out.n, c)  # laid out anew, token by token
    else:  # all scores at once
        weights = _T(scores, 4 if z.num.auto and (bias or not z.cpu) else c)  # autocast takes softmax to fp32 on a GPU
        if kv != heads:
            k, v = _T(k.n * heads / kv, c), _T(v.n * heads / kv, c)
        scaled = _T(q.n, c)
        used = weights if weights.size == c else _T(scores, c)
        ledger.keep(scaled, k, v, weights, used)
        if causal:
            ledger.keep(_T(z.s * keys, 1))
        if drop:
            ledger.keep(_T(scores, weights.size if z.cpu else 1), _T(scores, c))
        ledger.products += scores * c + out.bytes
        ledger.widest = max(ledger.widest, 2 * weights.bytes)
    return ledger.linear(out, z.rows, heads * d, h)


def _feed(ledger: _Ledger, x: _T, gated: bool, activation: str, dropout: bool) -> _T:
    z, m = ledger.z, ledger.z.m
    if getattr(m, "n_experts", None):
        return _feed_experts(ledger, x, gated)
    h, f = m.d_model, -(-m.d_ff // z.t)
    x = _gathered(ledger, x, z.rows)
    up = ledger.linear(x, z.rows, h, f)
    if gated:
        gate = ledger.linear(x, z.rows, h, f)
        acted = _T(gate.n, gate.size)
        ledger.keep(gate, acted, up)
        hidden = _T(up.n, up.size)
    else:
        hidden = _T(up.n, up.size)
        ledger.keep(hidden if activation == "relu" else up)
    ledger.widest = max(ledger.widest, (3 if gated else 2) * up.bytes)
    if dropout:
        hidden = ledger.dropout(hidden)
    return ledger.linear(hidden, z.rows, f, h)


def _feed_experts(ledger: _Ledger, x: _T, gated: bool) -> _T:
    """Experts that are equally loaded. The router computes in fp32 (Fedus et al. 2021, section 2.4)."""
    z, m = ledger.z, ledger.z.m
    h, f, n, k, c = m.d_model, m.d_ff, m.n_experts, m.top_k, z.num.compute
    rows = z.rows * k
    wide = x if x.size == 4 else _T(x.n, 4)
    ledger.keep(wide, _T(z.rows * n, 4), _T(z.rows * k, 8), _T(z.rows * k, 4), _T(z.rows, 4))  # scores, choices, their weights and sums
    ledger.keep(_T(rows, 8), _T(rows, 8), _T(z.rows * k, 4))  # orders, normed weights
    into = _T(rows * h, c)
    here = n // z.expert

    def grouped(t: _T, d_in: int, d_out: int) -> _T:
        if z.num.auto:
            ledger.casts += here * d_in * d_out * c
        ledger.keep(t)
        out = _T(rows * d_out, c)
        ledger.products += out.bytes
        return out

    up = grouped(into, h, f)
    if gated:
        gate = grouped(_T(rows * h, c) if z.num.auto else into, h, f)
        acted = _T(gate.n, c)
        ledger.keep(gate, acted, up)
    else:
        ledger.keep(up)
        if m.family == "gpt" and m.bias:
            ledger.keep(_T(rows, 8), _T(rows, 8))
    out = grouped(_T(rows * f, c), f, h)
    if z.expert > 1:
        ledger.keep(_T(rows, 8), _T(rows, 8))
    ledger.keep(_T(out.n, c))
    ledger.widest = max(ledger.widest, (3 if gated else 2) * up.bytes)
    return _T(z.rows * h, c)


def _added(ledger: _Ledger, x: _T) -> _T:
    """The stream after a residual: of the wider of both."""
    return _T(x.n, ledger.z.num.stream)


def _saved(z: _Sizes, decoder: bool) -> Saved:
    m = z.m
    h, family = m.d_model, m.family
    ledger = _Ledger(z)
    x = entry = _T(z.stream_rows * h, z.num.stream)
    memory = _T(z.b * z.memory * h, z.num.stream) if decoder else None
    if memory is not None:
        ledger.shared.add(id(memory))  # the encoder's result: once, not in every block
    norm = ledger.rms_norm if family in ("llama", "t5") else ledger.layer_norm
    post = family == "bert" or (family == "seq2seq" and not m.norm_first)
    of_attention = attention_casts = 0.0

    def residual(x: _T, sublayer, with_dropout: bool = True) -> _T:
        y = sublayer(x if post else norm(x, z.stream_rows))
        y = _T(x.n, y.size)
        if with_dropout:
            ledger.dropout(y)
        x = _added(ledger, x)
        return norm(x, z.stream_rows) if post else x

    def attention(**how):
        def run(y: _T) -> _T:
            nonlocal of_attention, attention_casts
            had, casts, before = ledger.total, ledger.casts, id(y) in ledger.kept
            out = _attend(ledger, y, **how)
            of_attention += ledger.total - had - (0 if before else y.bytes)
            attention_casts += ledger.casts - casts
            return out

        return run

    causal = family in ("gpt", "llama") or decoder
    x = residual(x, attention(causal=causal, rotary=family == "llama", bias=family == "t5"), family != "llama")
    if decoder:
        x = residual(x, attention(memory=memory))
    activation = {"llama": "silu", "vit": "gelu", "t5": "relu"}.get(family) or m.activation
    gated = family == "llama" or (family == "t5" and m.gated)
    residual(x, lambda y: _feed(ledger, y, gated, activation, family in ("vit", "t5", "seq2seq")), family != "llama")
    return Saved(ledger.total, ledger.casts, ledger.products, of_attention, attention_casts, entry.bytes, ledger.widest)


def lengths(m: ModelConfig, seq_len: int, target_len: int | None) -> tuple[int, int]:
    """(tokens of the encoder's or only sequence, of the decoder's)."""
    if m.family == "vit":
        return vit_tokens(m), 0
    return seq_len, (target_len or seq_len) if two_sided(m) else 0


def block_saved(
    m: ModelConfig, layout: Layout, b: int, seq_len: int, *, target_len: int | None = None, target: str = "cuda", decoder: bool = False
) -> Saved:
    """What one block keeps of a micro-batch for its backward pass, as our modules are written.

    Not Korthikanti's 34 sbh: his kernels fuse and keep masks of bytes in 16 bits throughout. Ours, of a GPT without dropout, on a GPU with
    fused attention, keep in fp32 per token 4 × (2 norms' inputs + 4 inputs of products (attention's once for q, k, v) + q, k, v + attention's
    result shared with the projection's input + 2 × 4h of the feed-forward network) = 64h + statistics. Autocast to bf16 keeps the stream in
    fp32 and a half copy for every product that reads it. Tensor parallelism keeps the gathered inputs whole, which Korthikanti et al.
    gather again (section 4.2.2).
    """
    s, s_target = lengths(m, seq_len, target_len)
    mine, memory = (s_target, s) if decoder else (s, 0)
    kernel = layout.attention if layout.context == 1 else layout.context_method
    z = _Sizes(
        m, Numbers.of(layout), b, _local(m, layout, mine), memory, layout.tensor, layout.tensor > 1 and layout.sequence_parallel, kernel,
        target == "cpu", m.dropout, layout.context, layout.expert,
    )  # fmt: skip
    return _saved(z, decoder)


def _local(m: ModelConfig, layout: Layout, tokens: int) -> int:
    """Tokens of a process under layout.context: a causal ring has two chunks each (parallel.context.Split)."""
    chunks = 2 if layout.context > 1 and layout.context_method == "ring" and m.family in ("gpt", "llama") else 1
    return -(-tokens // (layout.context * chunks)) * chunks


def kept(saved: Saved, checkpointing: str) -> tuple[float, float]:
    """(activations, half copies of weights) of a block that stay until its backward pass, under layout.checkpointing (Chen et al. 2016)."""
    if checkpointing == "full":
        return saved.entry, 0.0
    if checkpointing == "selective":
        return saved.entry + saved.products, 0.0
    if checkpointing == "attention":
        return saved.all - saved.attention, saved.casts - saved.attention_casts
    return saved.all, saved.casts


class Ends(NamedTuple):
    """Bytes of a micro-batch beside the blocks: kept by the first stage, by every stage, by the last; and of the logits."""

    first: float
    each: float
    last: float
    logits: float  # kept until the backward pass begins
    logits_peak: float  # at most alive while the loss is differentiated


def ends_saved(
    m: ModelConfig, layout: Layout, b: int, seq_len: int, *, target_len: int | None = None, target: str = "cuda", selected: float | None = None,
    label_smoothing: float = 0.0,
) -> Ends:  # fmt: skip
    """Embeddings, last norms, head and loss. selected: part of the places whose logits are made, None: 0.15 for a masked language model
    (task.mask_rate), else all.

    The loss: log_softmax keeps fp32 log-probabilities, 4 bytes a logit; its derivative holds those, the gradient that comes and the one that
    goes: 12. (Logits in half also have an fp32 copy: 2 + 4 + 4 in the forward pass, which is less.) The loss over a split vocabulary
    (torch.distributed.tensor.parallel.loss_parallel) writes every step of the softmax anew: 20, and 22 with logits in half.
    """
    s, s_target = lengths(m, seq_len, target_len)
    num, h, cpu, t = Numbers.of(layout), m.d_model, target == "cpu", layout.tensor
    z = _Sizes(m, num, b, s, 0, t, t > 1 and layout.sequence_parallel, layout.attention, cpu, m.dropout)
    cut = layout.context if m.family in ("gpt", "llama") else 1
    rows, rows_target = b * -(-s // cut), b * s_target
    streams = [rows, rows_target] if s_target else [rows]
    first, each, last = _Ledger(z), _Ledger(z), _Ledger(z)
    if m.family == "vit":
        first.keep(_T(b * m.n_channels * m.image_size**2, num.compute))
    else:
        first.keep(*(_T(r, 8) for r in streams))
    for r in streams:
        r = b * -(-r // b // t) if z.sequence_parallel else r
        x = _T(r * h, num.stream)
        if m.family == "bert":
            x = first.layer_norm(x, r)
        if m.family != "llama":
            first.dropout(x)
        if m.family == "t5":
            each.keep(_T((r // b) ** 2, 8))  # buckets of distances
            if not cpu:
                each.keep(_T(m.n_heads // t * (r // b) ** 2, num.weight if num.auto else num.compute))
        if m.family == "t5" or (m.family == "seq2seq" and m.norm_first):
            y = (last.rms_norm if m.family == "t5" else last.layer_norm)(x, r)
            if m.family == "t5":
                last.dropout(y)
    if m.family == "llama":  # cos and sin
        each.keep(*(_T(_local(m, layout, s) * m.head_dim, 4) for _ in range(2)))
    seen, classes = _head(m, b, s, s_target, cut, selected)
    stream_rows = b * -(-s // t) if z.sequence_parallel else rows
    if m.family in ("gpt", "llama", "vit"):
        (last.rms_norm if m.family == "llama" else last.layer_norm)(_T(stream_rows * h, num.stream), stream_rows)
    if m.family == "bert" and m.head in ("masked_lm", "pretraining"):
        inner = last.linear(_T(seen * h, num.stream), seen, h, h)
        last.keep(inner)  # the activation's input
        last.layer_norm(_T(seen * h, num.compute), seen)
    if m.family == "bert" and m.head in ("classification", "pretraining"):
        last.keep(_T(3 * b * h, num.compute))
    if m.family == "vit" and m.pool == "class_token" and not num.auto:
        last.keep(_T(rows * h, num.stream))  # of the norm's result the head reads a view
    elif classes:
        last.linear(_T(seen * h, num.stream), seen, h, 1)
    classes_here = -(-classes // t) if m.family != "vit" and classes == vocabulary(m) and layout.vocab_parallel else classes
    logits = float(seen) * classes_here
    peak = 16 if label_smoothing else 12
    if t > 1 and m.family != "vit" and classes == vocabulary(m) and layout.vocab_parallel:
        peak = 20 if num.compute == 4 else 22
    return Ends(first.total, each.total, last.total, 4 * logits, peak * logits)


def vocabulary(m: ModelConfig) -> int | None:
    return getattr(m, "target_vocab_size", None) or m.vocab_size


def _head(m: ModelConfig, b: int, s: int, s_target: int, cut: int, selected: float | None) -> tuple[int, int]:
    """(places whose logits are made, logits a place)."""
    if m.family == "vit":
        return b, m.n_classes or 0
    if m.family == "bert":
        if m.head in ("masked_lm", "pretraining"):
            return math.ceil(b * s * (0.15 if selected is None else selected)), m.vocab_size
        return b, m.n_classes or 0
    return math.ceil(b * (s_target or -(-s // cut)) * (1.0 if selected is None else selected)), vocabulary(m)


def head_casts(m: ModelConfig, layout: Layout) -> float:
    """Half copies that autocast makes of the head's and the patches' weights."""
    num = Numbers.of(layout)
    if not num.auto:
        return 0.0
    if m.family == "vit":
        return num.compute * m.d_model * ((m.n_classes or 0) + m.n_channels * m.patch_size**2)
    _, classes = _head(m, 1, 1, 1, 1, None)
    return num.compute * m.d_model * (-(-classes // layout.tensor) + (m.d_model if m.family == "bert" else 0))


# ---------------------------------------------------------------- the pipeline


def pipelined(layout: Layout, micro_batches: int) -> int:
    """Micro-batches that the schedule runs: it may need some that count nothing (parallel.pipeline)."""
    p = layout.pipeline
    if p == 1 or layout.schedule == "gpipe" or (layout.schedule == "zero_bubble" and stages_per_process(layout) == 2):
        return micro_batches
    return max(micro_batches, p) if layout.schedule == "1f1b" else -(-micro_batches // p) * p


def in_flight(layout: Layout, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at most, in units of its whole share of the layers.

    gpipe: all (Huang et al. 2019). 1f1b: min(m, p - i) (Narayanan et al. 2021, section 2.2.1). interleaved: as its warm-up has it,
    2 (p - i - 1) + (v - 1) p + 1 stages of v (section 2.2.2; 1 + (p - 1) / (pv) micro-batches on rank 0). zero_bubble: p + (v - 1) p stages,
    since activations stay until the weights' gradients; its V-shaped form p (Qi et al. 2024).
    """
    p, v, m = layout.pipeline, stages_per_process(layout), pipelined(layout, micro_batches)
    if p == 1:
        return 1
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "1f1b":
        return min(m, p - rank)
    if layout.schedule == "zero_bubble" and v == 2:
        return min(m, p)
    round_size = m // max(1, m // p)
    if layout.schedule == "zero_bubble":
        return min(m, (p + (v - 1) * round_size) / v)
    return min(m, ((v - 1) * round_size + 2 * (p - 1 - rank) + 1) / v)


def capacity(rows: int) -> int:
    """Rows of the tensors that stages send: rounded up by an eighth at most (parallel.pipeline)."""
    step = max(1, 2 ** (rows.bit_length() - 4))
    return -(-rows // step) * step


def boundaries(m: ModelConfig, layout: Layout, b: int, seq_len: int, target_len: int | None = None, a: Anatomy | None = None) -> list[int]:
    """Rows that leave each stage but the last. An encoder-decoder's later stages pass on the encoder's result too."""
    a = a or anatomy(m)
    s, s_target = lengths(m, seq_len, target_len)
    local = (lambda n: -(-n // layout.tensor)) if layout.tensor > 1 and layout.sequence_parallel else (lambda n: n)
    n_stages, found = layout.pipeline * stages_per_process(layout), []
    for stage in range(1, n_stages):
        begin = -(-a.n_blocks * stage // n_stages)
        if len(a.stacks) == 1 or begin < a.stacks[0].n_blocks:
            rows = local(s)
        else:
            rows = s + (local(s_target) if begin > a.stacks[0].n_blocks else 0)
        found.append(capacity(b * rows))
    return found


# ---------------------------------------------------------------- memory


def micro_batches(layout: Layout, n: int, samples: int, micro_batch: int) -> int:
    """Forward passes of a device in one optimizer step."""
    shape = sizes(layout, n)
    return max(1, math.ceil(samples / math.prod(shape[axis] for axis in DATA) / micro_batch))


def optimizer_bytes(optimizer: str, momentum: float, weight: int) -> int:
    """A parameter, in the weights' own type (train.optim): Adam's two moments, SGD's momentum."""
    return {"adamw": 2, "adam": 2, "sgd": 1 if momentum else 0}[optimizer] * weight


def memory(
    m: ModelConfig,
    layout: Layout,
    n: int,
    *,
    micro_batch: int,
    seq_len: int,
    samples: int,
    optimizer: str = "adamw",
    momentum: float = 0.0,
    target_len: int | None = None,
    selected: float | None = None,
    label_smoothing: float = 0.0,
    target: str = "cuda",
    rank: int | None = None,
    at: str | None = None,
) -> dict[str, float]:
    """Bytes on the device by component (work.COMPONENTS) at the moment when it has most, of pipeline rank `rank`; None: of the rank that has
    most. Tensors only: no context, no communicators, no rounding by the allocator.

    The peak is the largest of: `forward` and `last` (the loss's forward pass, the last block's), `loss` (the backward pass begins:
    activations of all micro-batches in flight, logits), `block` (the first block's backward pass: what checkpointing computes again), `next`
    (FSDP's second), `end` (the last block's: all gradients), `table` (the embedding's) and `step` (the optimizer). `at` asks for one of them.
    Gradients are absent at the beginning of a step, but where earlier micro-batches have left theirs.

    Where ours differs from the usual closed forms: DDP keeps buckets as large as the gradients all the time, and with several micro-batches
    gradients of their own besides; FSDP2 that accumulates keeps the whole gradient unsharded until the last micro-batch; autocast's half
    copies of weights stay with the graph, once for every micro-batch in flight.
    """
    a, num, shape = anatomy(m), Numbers.of(layout), sizes(layout, n)
    count = micro_batches(layout, n, samples, micro_batch)
    lengths = {"target_len": target_len, "target": target}
    blocks = [block_saved(m, layout, micro_batch, seq_len, decoder=i > 0, **lengths) for i in range(len(a.stacks))]
    ends = ends_saved(m, layout, micro_batch, seq_len, selected=selected, label_smoothing=label_smoothing, **lengths)
    rows_between = boundaries(m, layout, micro_batch, seq_len, target_len, a) if layout.pipeline > 1 else []
    whole = _Whole(m, layout, shape, a, num, count, blocks, ends, rows_between, optimizer_bytes(optimizer, momentum, num.weight), target)
    ranks = kinds_of_rank(m, layout, a) if rank is None else (rank,)
    found = [phase for r in ranks for name, phase in whole.phases(r).items() if at in (None, name)]
    return max(found, key=lambda parts: sum(parts.values()))


class _Whole(NamedTuple):
    m: ModelConfig
    layout: Layout
    shape: dict[str, int]
    a: Anatomy
    num: Numbers
    count: int
    blocks: list[Saved]
    ends: Ends
    rows_between: list[int]
    per_parameter: int  # bytes of optimizer state
    target: str

    def phases(self, rank: int) -> dict[str, dict[str, float]]:
        layout, num, count = self.layout, self.num, self.count
        mine, parts = share(self.m, layout, rank, self.a), held(self.m, layout, rank, self.a)
        locals_ = [(part.local(layout.tensor, layout.expert), times) for part, times in parts]
        whole = sum(math.prod(shape) * times for shape, times in locals_)
        own = sum(fullest(part, layout) * times for part, times in parts)

        weights = float(own * num.weight)
        replicas = self.shape["replicate"] * layout.context
        ddp = layout.shard == layout.tensor == layout.expert == layout.pipeline == 1 and replicas > 1 and layout.replicate in ("auto", "ddp")
        apart = layout.local_sgd or layout.diloco
        ddp = ddp and not apart
        gradients = full = float(own * num.weight)
        buckets = gradients if ddp else 0.0
        state = own * self.per_parameter
        if layout.shard_optimizer and self.shape["replicate"] > 1:
            state = zero1_share(self.m, layout, self.shape["replicate"], self.a) * self.per_parameter
        if layout.diloco:
            state += 2 * own * num.weight
        if layout.offload and self.target != "cpu":
            weights = gradients = state = 0.0

        flight = in_flight(layout, count, rank)
        per_rank = [kept(saved, layout.checkpointing) for saved in self.blocks]
        activations = sum(n * act for n, (act, _) in zip(mine.blocks, per_rank))
        casts = sum(n * cast for n, (_, cast) in zip(mine.blocks, per_rank))
        activations += self.ends.each + (self.ends.first if mine.first else 0.0)
        at_loss = activations + (self.ends.last if mine.last else 0.0)
        casts += head_casts(self.m, layout) if mine.last else 0.0
        widest = max((saved for saved, n in zip(self.blocks, mine.blocks) if n), key=lambda s: s.all, default=None)
        # in the forward pass autocast holds copies of all weights, whether or not the graph keeps them
        forward_casts = sum(n * saved.casts for n, saved in zip(mine.blocks, self.blocks)) + (head_casts(self.m, layout) if mine.last else 0.0)

        communication = gathered = near = 0.0  # near: gathered when only one block is
        if layout.pipeline > 1:
            wire, h = num.weight, self.m.d_model
            sent = pipelined(layout, count)
            for stage in mine.stages:
                into = self.rows_between[stage - 1] if stage else 0
                out = self.rows_between[stage] if stage < len(self.rows_between) else 0
                communication += sent * (into + out) * h * wire  # received states and gradients, of every micro-batch
                at_loss += out * h * wire / len(mine.stages)
        one_block = max((_unit(stack.block, layout) for stack, n in zip(self.a.stacks, mine.blocks) if n), default=0)
        reduced, size = 0.0, num.weight  # size: of a gradient's element before it is reduced
        if layout.shard > 1:
            size = 2 if layout.param_dtype in ("bf16", "fp16") else num.weight
            root = _unit(end_units(self.a, set(mine.ends), layout)[-1], layout)
            n_blocks = sum(mine.blocks)
            gathered = size * (root + (min(n_blocks, 2) if layout.reshard else n_blocks) * one_block)
            near = size * (root + one_block) if layout.reshard else gathered
            reduce_size = {"fp32": 4, "bf16": 2, "fp16": 2, None: 4 if layout.param_dtype else num.weight}[layout.reduce_dtype]
            reduced = one_block * reduce_size
            if count > 1 and layout.pipeline == 1:
                full = float(whole * (reduce_size if layout.param_dtype else num.weight))
        elif replicas > 1 and not ddp and not apart:
            largest = max((math.prod(shape) for shape, _ in locals_), default=0) * num.weight
            reduced = min(max(layout.bucket_mb * 2**20, largest), whole * num.weight)

        several = count > 1 or layout.pipeline > 1
        before = (full if several else 0.0) + buckets  # gradients when the last backward pass begins
        after = max(gradients, buckets)
        logits, one = self.ends.logits_peak if mine.last else 0.0, widest or Saved(*[0.0] * 7)
        again, recast = one.all - kept(one, layout.checkpointing)[0], one.casts if layout.checkpointing in ("full", "selective") else 0.0
        made = 0.0 if several else one_block * size  # gradients of the block under way, and of the head before it
        head = 0.0
        if mine.last and not several:
            sizes_of = [math.prod(part.local(layout.tensor)) for part, _ in parts if part.component in ("embeddings", "head")]
            head = max(sizes_of, default=0) * size
        table = self.shared_table() * size if layout.pipeline == 1 else 0.0
        kept_ends = self.ends.each + (self.ends.first if mine.first else 0.0)
        in_forward = (flight - 1) * casts + max(casts, forward_casts)
        at_end = 0.0 if layout.shard > 1 and layout.reshard and layout.pipeline == 1 else gathered  # the root's weights are forgotten before the loss
        found = {
            "loss": {"gradients": before, "activations": flight * at_loss, "logits": logits, "gathered": at_end + flight * casts},
            "forward": {"gradients": before, "activations": flight * at_loss, "logits": logits * self.forward_part(),
                        "gathered": at_end + in_forward},
            "last": {"gradients": before, "activations": flight * activations, "gathered": gathered + in_forward, "transient": one.working},
            "block": {"gradients": before + head, "activations": flight * activations + again, "gathered": near + flight * casts + recast,
                      "communication": 0.0 if layout.shard > 1 else reduced, "transient": one.working + made},
            "end": {"gradients": after, "activations": kept_ends + one.all, "gathered": near + one.casts, "communication": reduced,
                    "transient": one.working},
            "table": {"gradients": after, "activations": kept_ends, "gathered": near, "transient": (3 if several or layout.shard > 1 else 2) * table},
            "step": {"gradients": after},
        }  # fmt: skip
        if layout.shard > 1 and sum(mine.blocks) > 1:  # FSDP2 reduces the gradients of the block before
            act, cast = kept(one, layout.checkpointing)
            found["next"] = {**found["block"], "activations": flight * activations + again - act, "communication": reduced,
                             "gathered": near + flight * casts + recast - cast}  # fmt: skip
        state_now = {"weights": weights, "optimizer": float(state)}
        for phase in found.values():
            phase["communication"] = phase.get("communication", 0.0) + communication
        return {name: {c: {**state_now, **phase}.get(c, 0.0) for c in COMPONENTS} for name, phase in found.items()}

    def shared_table(self) -> int:
        """Elements of the embedding if it is used more than once. Each use makes a gradient of the whole table, and their sum is one more."""
        uses = sum(name == "tokens" for stack in self.a.stacks for name in (*stack.before, *stack.after))
        return math.prod(self.a.ends["tokens"][0].local(self.layout.tensor)) if uses > 1 else 0

    def forward_part(self) -> float:
        """The loss's memory in the forward pass by that of its derivative (see `ends_saved`)."""
        if self.num.compute == 4:
            return 8 / 12
        return 1.0 if self.layout.tensor > 1 and self.layout.vocab_parallel else 10 / 12


def end_units(a: Anatomy, names: set[str], layout: Layout) -> list[tuple[Part, ...]]:
    """The parts of the ends as FSDP2 gathers them: untied embeddings and heads by themselves, then the rest (parallel.shard.ends)."""
    before, after = ({name for stack in a.stacks for name in getattr(stack, place)} for place in ("before", "after"))
    own = [name for name in ("tokens", "target", "head") if name in names and not (name in before and name in after)]
    own = [name for name in own if layout.pipeline == 1 and (name != "head" or "tokens" in a.ends)]
    units = [(*a.ends[name], *(a.ends.get("head_bias", ()) if name == "head" else ())) for name in own]
    rest = [name for name in a.ends if name in names and name not in own and not (name == "head_bias" and "head" in own)]
    return [*units, tuple(part for name in rest for part in a.ends[name])]


def _unit(parts: tuple[Part, ...], layout: Layout) -> int:
    """Elements that FSDP2 gathers for these parts."""
    return sum(cut(part, layout)[0] for part in parts)


def zero1_share(m: ModelConfig, layout: Layout, replicas: int, a: Anatomy | None = None) -> int:
    """Parameters that the fullest replica steps: whole ones are dealt out, the largest first, each to whom has least (parallel.shard)."""
    return max(zero1_parts(m, layout, replicas, a))


def zero1_parts(m: ModelConfig, layout: Layout, replicas: int, a: Anatomy | None = None) -> list[int]:
    load = [(0, r) for r in range(replicas)]
    for size in sorted((part.size for part in in_order(m, layout, 0, a)), reverse=True):
        least, r = load[0]
        heapq.heapreplace(load, (least + size, r))
    return [size for size, _ in load]


# ---------------------------------------------------------------- traffic


def traffic(
    m: ModelConfig,
    layout: Layout,
    n: int,
    *,
    micro_batch: int,
    seq_len: int,
    samples: int,
    target_len: int | None = None,
    selected: float | None = None,
    clip: bool = True,
    rank: int | None = None,
) -> list[Transfer]:
    """What one device sends in an optimizer step, of pipeline rank `rank`; None: of the rank that sends most. Equal to what
    parallel.traffic.Traffic counts (of replicas by DDP: from its third step on), bytes and calls.

    In closed form, for G bytes of gradients, k ranks and m micro-batches: DDP 2 (k-1)/k G once a step; FSDP2 gathers the weights twice a
    micro-batch (once with reshard=false) and scatters gradients once a step, (k-1)/k each; ZeRO-1 DDP's and a broadcast of all weights,
    not ZeRO's reduce-scatter (its optimizer has whole parameters); tensor parallelism per layer and micro-batch 4 gathers and 4
    scatters of b s h with sequence parallelism (Korthikanti et al. 2022, section 4.2.2), or 4 all-reduces; where their paper has all in half,
    autocast gathers the norms' results in fp32 and reduces products in half. `control`: the loss and the norm, 4 bytes each.
    """
    ranks = kinds_of_rank(m, layout, anatomy(m)) if rank is None else (rank,)
    length = {"target_len": target_len, "selected": selected}
    found = [_Traffic(m, layout, n, micro_batch, seq_len, samples, clip, r, **length).all() for r in ranks]
    return max(found, key=lambda transfers: sum(t.sent for t in transfers))


class _Traffic:
    def __init__(self, m, layout, n, b, seq_len, samples, clip, rank, target_len, selected):
        self.m, self.layout, self.n, self.b, self.seq_len, self.clip, self.rank = m, layout, n, b, seq_len, clip, rank
        self.shape, self.stride, self.a, self.num = sizes(layout, n), strides(layout, n), anatomy(m), Numbers.of(layout)
        self.mine, self.parts = share(m, layout, rank, self.a), held(m, layout, rank, self.a)
        self.count = micro_batches(layout, n, samples, b)
        self.target_len = target_len
        self.s, self.s_target = lengths(m, seq_len, target_len)
        self.seen, self.classes = _head(m, b, self.s, self.s_target, layout.context if m.family in ("gpt", "llama") else 1, selected)
        self.found: list[Transfer] = []

    def send(self, axis: str, kind: str, payload: float, calls: float, group: int, stride: int, phase: str = "backward", hidden: str = "") -> None:
        if calls and payload and group > 1:
            self.found.append(Transfer(axis, kind, float(payload), calls, group, stride, phase, hidden))

    def all(self) -> list[Transfer]:
        layout = self.layout
        if layout.tensor > 1:
            self.tensor()
        if layout.context > 1:
            self.context()
        if layout.expert > 1:
            self.expert()
        if layout.pipeline > 1:
            self.pipeline()
        if layout.shard > 1:
            self.shard()
        else:
            self.replicas()
        self.control()
        return self.found

    # ------------------------------------------------------------ one axis each

    @property
    def runs(self) -> int:
        """Micro-batches that pass through this device."""
        return pipelined(self.layout, self.count)

    def tensor(self) -> None:
        m, layout, t, h = self.m, self.layout, self.layout.tensor, self.m.d_model
        runs, narrow, wide = self.runs, self.num.compute, self.num.stream
        parallel = layout.sequence_parallel
        again = layout.checkpointing in ("full", "selective")
        streams = [(self.s, self.mine.blocks[0], 2)]
        if len(self.mine.blocks) > 1:
            streams.append((self.s_target, self.mine.blocks[1], 3))

        def both(tokens: int, size: int, cut: bool = True) -> float:
            """Bytes of the stream; of a cut one, its parts all as long as the longest."""
            return self.b * (-(-tokens // t) * t if cut else tokens) * h * size

        def send(kind: str, payload: float, calls: float, phase: str) -> None:
            self.send("sequence" if kind != "all_reduce" and parallel else "tensor", kind, payload, calls * runs, t, 1, phase)

        early = 0 if m.family in ("bert", "seq2seq") and not getattr(m, "norm_first", False) else 1  # the last product is not needed again
        for tokens, n, sublayers in streams:
            tokens = _local(m, layout, tokens)
            if parallel:
                send("all_gather", both(tokens, wide), sublayers * n, "forward")
                send("reduce_scatter", both(tokens, narrow), sublayers * n, "forward")
                send("all_gather", both(tokens, narrow), sublayers * n, "backward")
                send("reduce_scatter", both(tokens, wide), sublayers * n, "backward")
                if again:
                    send("all_gather", both(tokens, wide), sublayers * n, "recompute")
                    send("reduce_scatter", both(tokens, narrow), (sublayers - early) * n, "recompute")
            else:
                send("all_reduce", both(tokens, narrow, False), sublayers * n, "forward")
                send("all_reduce", both(tokens, wide, False), sublayers * n, "backward")
                if again:
                    send("all_reduce", both(tokens, narrow, False), (sublayers - early) * n, "recompute")
        if len(streams) > 1:  # the gradient of what the encoder gave, of every cross-attention
            send("all_reduce", both(self.s, wide, False), self.mine.blocks[1], "backward")
        self.tensor_ends(send, both, streams, wide)
        self.partial_gradients()

    def tensor_ends(self, send, both, streams, wide: int) -> None:
        m, layout, parallel = self.m, self.layout, self.layout.sequence_parallel
        lengths = [self.s, self.s_target][: len(streams)]
        firsts = [stack.before[0] in self.mine.ends and n > 0 for stack, n in zip(self.a.stacks, self.mine.blocks)]
        lasts = [self._has_last(i) for i in range(len(self.a.stacks))]
        if m.family in ("gpt", "llama"):
            lengths = [_local(m, layout, length) for length in lengths]
        for i, tokens in enumerate(lengths):
            first = self._has_first(i) and firsts[i]
            if first and m.family == "seq2seq":
                send("all_reduce", both(tokens, wide, False), 1, "forward")
                if parallel:
                    send("all_gather", both(tokens, wide), 1, "backward")
            elif first and m.family == "vit":
                if parallel:
                    send("all_gather", both(tokens, wide), 1, "backward")
            elif first and parallel:
                send("reduce_scatter", both(tokens, wide), 1, "forward")
                send("all_gather", both(tokens, wide), 1, "backward")
            elif first:
                send("all_reduce", both(tokens, wide, False), 1, "forward")
            elif m.family == "t5" and "tokens" in self.mine.ends:  # one embedding for both: a stage that has it looks up the other's too
                send("reduce_scatter" if parallel else "all_reduce", both(tokens, wide, parallel), 1, "forward")
            if lasts[i] and parallel:
                send("all_gather", both(tokens, wide), 1, "forward")
        if self.mine.last and m.family != "vit" and self.classes == vocabulary(m):
            size = self.num.compute if m.family == "bert" else wide  # what the head reads: BERT's comes from a product
            self.send("tensor", "all_reduce", self.seen * m.d_model * size, self.runs, layout.tensor, 1, "backward")
            if layout.vocab_parallel:
                self.send("tensor", "all_reduce", self.seen * 4, 3 * self.runs, layout.tensor, 1, "forward")
            else:
                whole = -(-self.classes // layout.tensor) * layout.tensor
                self.send("tensor", "all_gather", self.seen * whole * self.num.compute, self.runs, layout.tensor, 1, "forward")

    def _has_first(self, i: int) -> bool:
        """Whether this device has the first block of stack i."""
        return self._block(sum(stack.n_blocks for stack in self.a.stacks[:i]))

    def _has_last(self, i: int) -> bool:
        return self._block(sum(stack.n_blocks for stack in self.a.stacks[: i + 1]) - 1)

    def _block(self, index: int) -> bool:
        n_stages = self.layout.pipeline * stages_per_process(self.layout)
        return index * n_stages // self.a.n_blocks in self.mine.stages

    def partial_gradients(self) -> None:
        """Of parameters that are whole on every process and applied to a part of the stream: one call, or with FSDP2 one each."""
        if not self.layout.sequence_parallel:
            return
        found = [(part.size, times) for part, times in self.parts if part.along_stream]
        if self.layout.shard > 1:
            half = self.layout.param_dtype in ("bf16", "fp16") and (self.count == 1 or self.layout.pipeline > 1)  # added up in the reduced type
            for elements, times in found:
                self.send("sequence", "all_reduce", elements * (2 if half else self.num.weight), times, self.layout.tensor, 1)
        else:
            total = sum(elements * times for elements, times in found)
            self.send("sequence", "all_reduce", total * self.num.weight, 1, self.layout.tensor, 1)

    def context(self) -> None:
        m, layout, k, c = self.m, self.layout, self.layout.context, self.num.compute
        ring, stride = layout.context_method == "ring", self.stride["context"]
        local = _local(m, layout, self.s)
        heads, kv = m.n_heads // layout.tensor, kv_heads(m) // layout.tensor
        again = layout.checkpointing != "none"
        calls = sum(self.mine.blocks) * self.runs
        if ring:
            pair = 2 * self.b * kv * local * m.head_dim
            self.send("context", "send", pair * c, (k - 1) * calls, k, stride, "forward", "forward")
            if again:
                self.send("context", "send", pair * c, (k - 1) * calls, k, stride, "recompute", "backward")
            self.send("context", "send", pair * c, (k - 1) * calls, k, stride, "backward", "backward")
            self.send("context", "send", pair * 4, k * calls, k, stride, "backward", "backward")
        else:
            there, back = self.b * (heads + 2 * kv) * local * m.head_dim * c, self.b * heads * local * m.head_dim * c
            for phase in ("forward", "recompute", "backward") if again else ("forward", "backward"):
                self.send("context", "all_to_all", there, calls, k, stride, phase)
                self.send("context", "all_to_all", back, calls, k, stride, phase)
        if m.family in ("bert", "vit"):  # the hidden states after the last block
            whole = self.b * local * k * m.d_model * self.num.stream
            self.send("context", "all_gather", whole, self.runs, k, stride, "forward")
            self.send("context", "reduce_scatter", whole, self.runs, k, stride, "backward")
            if layout.tensor > 1 and layout.sequence_parallel:  # the stream is put together along the sequence before it is cut anew
                for tokens in (self.s, local):
                    cut = self.b * -(-tokens // layout.tensor) * layout.tensor * m.d_model * self.num.stream
                    for phase in ("forward", "backward"):
                        self.send("sequence", "all_gather", cut, self.runs, layout.tensor, 1, phase)

    def expert(self) -> None:
        m, k, stride = self.m, self.layout.expert, self.stride["expert"]
        rows = self.b * self.s * m.top_k * m.d_model * self.num.compute
        layers = self.mine.blocks[0] * self.runs
        again = self.layout.checkpointing in ("full", "selective")
        for phase in ("forward", "recompute") if again else ("forward",):
            self.send("expert", "all_to_all", m.n_experts * 8, layers, k, stride, phase)
            self.send("expert", "all_to_all", rows, 2 * layers, k, stride, phase)
        self.send("expert", "all_to_all", rows, 2 * layers, k, stride, "backward")

    def pipeline(self) -> None:
        m, layout = self.m, self.layout
        rows = boundaries(m, layout, self.b, self.seq_len, self.target_len, self.a)
        p, stride, size = layout.pipeline, self.stride["pipeline"], m.d_model * self.num.weight
        for stage in self.mine.stages:
            if stage < len(rows) and rank_of(stage + 1, layout) != self.rank:
                self.send("pipeline", "send", rows[stage] * size, self.runs, p, stride, "forward", "forward")
            if stage and rank_of(stage - 1, layout) != self.rank:
                self.send("pipeline", "send", rows[stage - 1] * size, self.runs, p, stride, "backward", "backward")
        for name, have in holders(layout, self.a).items():  # parameters of several ranks: the first adds up and gives back
            if len(have) > 1 and self.rank in have:
                for part in self.a.ends[name]:
                    calls = len(have) - 1 if self.rank == have[0] else 1
                    self.send("pipeline", "send", fullest(part, layout) * self.num.weight, calls, p, stride, "optimizer")

    def shard(self) -> None:
        layout, replicas = self.layout, self.shape["replicate"]
        size = 2 if layout.param_dtype in ("bf16", "fp16") else self.num.weight
        reduced = {"fp32": 4, "bf16": 2, "fp16": 2, None: 4 if layout.param_dtype else self.num.weight}[layout.reduce_dtype]
        units = [(stack.block, k) for stack, k in zip(self.a.stacks, self.mine.blocks) if k]
        units += [(unit, 1) for unit in end_units(self.a, set(self.mine.ends), layout) if unit]
        if layout.expert > 1:  # a block's experts are a unit of their own
            units = [(tuple(part for part in unit if part.experts == which), k) for unit, k in units for which in (False, True)]
        scatters = self.runs if layout.pipeline > 1 else 1  # a pipeline's stages reduce after every micro-batch
        for unit, k in units:
            elements, split = _unit(unit, layout), layout.expert > 1 and any(part.experts for part in unit)
            n, stride = (layout.shard, self.stride["shard"]) if split else (layout.shard * layout.expert * layout.context, self.stride["context"])
            self.send("shard", "all_gather", elements * size, k * self.runs, n, stride, "forward", "forward")
            if layout.reshard:
                self.send("shard", "all_gather", elements * size, k * self.runs, n, stride, "backward", "backward")
            self.send("shard", "reduce_scatter", elements * reduced, k * scatters, n, stride, "backward", "backward")
            self.send("replicate", "all_reduce", elements // n * reduced, k * scatters, replicas, self.stride["replicate"], "backward", "backward")

    def replicas(self) -> None:
        layout, shape, weight = self.layout, self.shape, self.num.weight
        parts = in_order(self.m, layout, self.rank, self.a)
        sizes_ = [math.prod(part.local(layout.tensor, layout.expert)) * weight for part in parts]
        group, stride = shape["replicate"] * layout.context, self.stride["context"]
        limit = layout.bucket_mb * 2**20
        apart = layout.local_sgd or layout.diloco
        if apart:
            every = apart.every
            self.buckets(sizes_, limit, "apart", shape["replicate"], self.stride["replicate"], after=True, every=every)
            return
        if layout.replicate == "manual":
            for size in sizes_:
                self.send("replicate", "all_reduce", size, 1, group, stride, "optimizer")
        elif layout.replicate == "parameter_server":
            self.send("replicate", "send", sum(sizes_), group - 1, group, stride, "optimizer")
        elif layout.tensor == layout.pipeline == layout.expert == 1:
            wire = 0.5 if layout.compress in ("bf16", "fp16") and weight == 4 else 1.0
            self.buckets(sizes_[::-1], limit, "replicate", group, stride, after=False, wire=wire)
        else:
            of_experts = [part.experts and layout.expert > 1 for part in parts]
            wide, narrow = (layout.expert, self.stride["context"]), (1, self.stride["replicate"])
            for which, (more, apart_by) in ((False, wide), (True, narrow)):
                chosen = [size for size, is_expert in zip(sizes_, of_experts) if is_expert == which]
                self.buckets(chosen, limit, "replicate", group * more, apart_by, after=True)
        if layout.shard_optimizer and shape["replicate"] > 1:
            for load in zero1_parts(self.m, layout, shape["replicate"], self.a):
                self.send("replicate", "broadcast", load * weight, 1, shape["replicate"], self.stride["replicate"], "optimizer")

    def buckets(self, sizes_, limit, axis, group, stride, after: bool, wire: float = 1.0, every: int = 1) -> None:
        """Gradients sent many at a time. DDP closes a bucket that has reached its size; the sums after the backward pass close one before it
        would go beyond."""
        filled, calls, last = 0.0, 0, 0.0
        for size in sizes_:
            if after and filled and filled + size > limit:
                calls, filled = calls + 1, 0.0
            filled += size
            last = filled
            if not after and filled >= limit:
                calls, filled = calls + 1, 0.0
        calls += filled > 0
        total = sum(sizes_) * wire
        if not calls:
            return
        if after:
            self.send(axis, "all_reduce", total / calls, calls / every, group, stride, "optimizer")
            return
        tail = last * wire  # the last bucket has nothing to hide behind
        if calls > 1:
            self.send(axis, "all_reduce", (total - tail) / (calls - 1), calls - 1, group, stride, "backward", "backward")
        self.send(axis, "all_reduce", tail, 1, group, stride, "backward")

    def control(self) -> None:
        """The loss over all that have a part of it; the norm's squares over the axes along which parameters are cut."""
        layout, shape = self.layout, self.shape
        over = math.prod(shape[axis] for axis in (*DATA, "context", "pipeline"))
        if not (layout.local_sgd or layout.diloco):
            self.send("control", "all_reduce", 4, 1, over, self.stride["context"], "optimizer")
        if not self.clip:
            return
        cuts = set()
        for part, _ in self.parts:
            axes = ("shard", "expert", "context") if layout.shard > 1 else ("expert",) if part.experts else ()
            axes += ("tensor",) if part.split is not None else ()
            cuts.add(tuple(axis for axis in axes if shape[axis] > 1))
        for axes in sorted(cuts - {()}):
            self.send("control", "all_reduce", 4, 1, math.prod(shape[axis] for axis in axes), 1, "optimizer")
        self.send("control", "all_reduce", 4, 1, shape["pipeline"], self.stride["pipeline"], "optimizer")
