"""The points of a calibration: operations at many sizes, each with operands as a training step has them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradus import torch_private
from gradus.measure import collectives

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = 32  # of batched products
ROW = 512  # elements of a row of what works by rows: norms, softmax
LONGEST = 0.1  # s of one call; what takes longer is left out, and the rate of the next smaller one holds
POOL = 2**26  # elements of the pool


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a calibration's points."""

    sides: tuple[int, ...]  # of m, n and k
    batched: tuple[int, ...]  # the same of batched products
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    elements: tuple[int, ...]
    rounds: int  # at least
    every: int  # of how many tiny models one is stepped
    repeat: int  # how often
    sent: tuple[int, ...] = collectives.SIZES
    causal: tuple[bool, ...] = (False, True)


# Kernels change their blocks with the length. Of heads of 8 they are slower than of 16, where products have whole
# vectors. Up to 512 tokens a CPU's kernel computes a causal mask's whole matrix.
ALL = Sizes(
    sides=(16, 64, 256, 1024, 4096), batched=(16, 64, 256, 1024),
    sequences=(8, 32, 64, 128, 192, 256, 384, 512, 768, 1024), head_dims=(8, 16, 32, 64, 128),
    elements=tuple(2**k for k in (10, 14, 17, 19, 21, 22, 23, 24)), rounds=2, every=1, repeat=30,
)  # fmt: skip
SOME = Sizes(
    sides=(16, 128, 1024), batched=(16, 128), sequences=(8, 32, 128, 512), head_dims=(8, 16, 64),
    elements=(2**10, 2**16, 2**22), rounds=1, every=2, repeat=6, sent=(2**10, 2**16, 2**22), causal=(False,),
)  # fmt: skip


# ---------------------------------------------------------------- operands


class Pool:
    """Memory with random numbers. Every call gets other parts of it."""

    def __init__(self, device: torch.device, n: int = POOL):
        self.device, self.n, self.at, self.generator = device, n, 0, torch.Generator(device).manual_seed(0)
        base = torch.empty(2**20, device=device).normal_(generator=self.generator)
        self.kept: dict[Any, Tensor] = {torch.float32: base.repeat(-(-n // 2**20))[:n]}

    def take(self, *shape: int, dtype: torch.dtype = torch.float32, to_change: bool = False) -> Tensor:
        """The next part. to_change: of memory that may be written to."""
        n = math.prod(shape)
        assert n <= self.n, f"{shape} is more than the pool has"
        key = (dtype, "to change") if to_change else dtype
        if key not in self.kept:
            self.kept[key] = self.kept[torch.float32].to(dtype, copy=True)
        if self.at + n > self.n:
            self.at = 0
        part = self.kept[key][self.at : self.at + n].view(shape)
        self.at += -(-n // 64) * 64
        return part

    def ids(self, n: int, below: int) -> Tensor:
        """(n,) indices."""
        return torch.randint(below, (n,), device=self.device, generator=self.generator)


class ProductRow(NamedTuple):
    """The fields of a product's row in the hardware file."""

    name: str
    dtype: str
    layout: str  # of both operands: n as it lies in memory, t transposed
    batch: int
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class AttentionRow(NamedTuple):
    """The fields of fused attention's row."""

    direction: str
    dtype: str
    mask: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int


class MemoryRow(NamedTuple):
    """The fields of a memory-bound operation's row."""

    name: str
    dtype: str
    n_bytes: int


@dataclasses.dataclass
class Point:
    """One operation at one size, and its times. fresh: the operand that the step has just written; None: none."""

    make_operands: Callable[[], tuple]
    call: Callable[..., Any]
    fresh: int | None = 0
    name: str = ""  # of memory-bound operations, for messages
    row: ProductRow | AttentionRow | MemoryRow | None = None  # None: not yet read off the call
    times: list[float] = dataclasses.field(default_factory=list)
    unavailable: str = ""  # why it cannot be measured here

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        if len(self.times) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.median

    def __str__(self) -> str:
        return self.name or " ".join(map(str, self.row[:3]))


# ---------------------------------------------------------------- what is measured


def matmuls(pool: Pool, sizes: Sizes, dtype: str, rate: float) -> Iterator[Point]:
    """mm as in the forward pass (nt), for the input's gradient (nn) and for the weight's (tn); addmm forward; bmm
    likewise. rate: operations/s, by which those that take too long are left out."""
    d = DTYPES[dtype]

    def pair(layout: str, *batch: int, m: int, n: int, k: int) -> tuple[Tensor, ...]:
        return tuple(
            pool.take(*batch, columns, rows, dtype=d).mT if letter == "t" else pool.take(*batch, rows, columns, dtype=d)
            for letter, rows, columns in zip(layout, (m, k), (k, n))
        )

    def biased(m: int, n: int, k: int) -> tuple[Tensor, ...]:
        return pool.take(n, dtype=d), *pair("nt", m=m, n=n, k=k)

    for batch, sides in ((), sizes.sides), ((BATCH,), sizes.batched):
        b, call, name = (BATCH, torch.bmm, "bmm") if batch else (1, torch.mm, "mm")
        for m, n, k in itertools.product(sides, repeat=3):
            row = ProductRow(name, dtype, "nt", b, m, n, k)
            if row.operations / rate > LONGEST or b * max(m * n, m * k, n * k) > pool.n // 4:
                continue
            for layout in ("nt", "nn", "tn"):
                make = functools.partial(pair, layout, *batch, m=m, n=n, k=k)
                yield Point(make, call, int(name == "mm" and layout == "tn"), row=row._replace(layout=layout))
            if not batch:
                yield Point(functools.partial(biased, m, n, k), torch.addmm, 1, row=row._replace(name="addmm"))


def attentions(pool: Pool, sizes: Sizes, dtype: str, rate: float) -> Iterator[Point]:
    """Fused attention forward and backward. Queries, keys and values lie as a linear layer leaves them: (batch, seq,
    heads, head_dim)."""
    d, heads = DTYPES[dtype], 4

    def qkv(n: int, batch: int, seq: int, dim: int) -> list[Tensor]:
        return [pool.take(batch, seq, heads, dim, dtype=d).transpose(1, 2) for _ in range(n)]

    def graph(forward: Callable, *shape: int) -> tuple:
        leaves = [x.detach().requires_grad_() for x in qkv(3, *shape)]
        with torch.enable_grad():
            out = forward(*leaves)
        return out.detach(), out, leaves, *qkv(1, *shape)

    def backward(_: Tensor, out: Tensor, leaves: list[Tensor], grad: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, grad)

    for seq, dim, causal in itertools.product(sizes.sequences, sizes.head_dims, sizes.causal):
        batch = max(1, 2048 // seq)
        if 10 * batch * heads * seq * seq * dim / rate > 3 * LONGEST:
            continue
        row = AttentionRow("forward", dtype, "causal" if causal else "full", batch, heads, seq, seq, dim)
        forward = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        yield Point(functools.partial(qkv, 3, batch, seq, dim), forward, row=row)
        make = functools.partial(graph, forward, batch, seq, dim)
        yield Point(make, backward, None, row=row._replace(direction="backward"))


def operands(pool: Pool, dtype: torch.dtype, e: int, letters: str) -> list[Any]:
    """The operands of an operation on about `e` elements, a letter each (see BOUND)."""
    rows, row, classes = e // ROW or 1, min(e, ROW), min(4096, e)
    words = 4 * rows  # of an embedding: some times as many as there are tokens
    take = functools.partial(pool.take, dtype=dtype)
    make: dict[str, Callable[[], Any]] = {
        "x": lambda: take(rows, row),
        "c": lambda: take(rows, row, to_change=True),
        "h": lambda: take(-(-e // 2048), 8, min(e, 2048) // 64 or 1, 8).transpose(1, 2),
        "r": lambda: pool.take(rows, 1),
        "w": lambda: pool.take(row),
        "m": lambda: (torch.arange(row, device=pool.device) < row // 2).expand(rows, row),  # padding, for all heads
        "t": lambda: take(words, row),
        "i": lambda: pool.ids(rows, words),
        "l": lambda: pool.take(e // classes, classes),
        "y": lambda: pool.ids(e // classes, classes),
        "u": lambda: torch.ones((), device=pool.device),
        "p": lambda: [pool.take(max(1, e // 8), to_change=True) for _ in range(8)],
        "s": lambda: [torch.ones((), device=pool.device) for _ in range(8)],
    }
    return [make[letter]() for letter in letters]


ADAM = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.01, "momentum": 0.9, "lr": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
    "is_first_step": False,
}  # fmt: skip
OTHER = {torch.float32: torch.bfloat16}  # a type to cast to
# The other operations of our models, their losses and optimizers (with a rate of 0: the numbers stay, the work is the
# same), by their operands: x a tensor, c one to change, h heads beside each other, r a column of rows, w a row (norms
# and losses stay in fp32), m a mask, t an embedding's table and i indices into it, l logits and y labels, u a scalar,
# p eight parameters, s their steps; and whether the step has just written the first of these.
NORM_BACKWARD = aten.native_layer_norm_backward.default
BOUND: list[tuple[str, Callable[..., Any], bool]] = [
    *(("xx", call, True) for call in (aten.add.Tensor, aten.mul.Tensor)),
    *(("x", call, True) for call in (aten.relu.default, aten.silu.default, aten.tanh.default, aten.gelu.default)),
    *(("xx", call.default, True) for call in (aten.silu_backward, aten.tanh_backward, aten.gelu_backward)),
    ("x", lambda x: aten.mul.Scalar(x, 0.5), True),
    ("x", lambda x: aten.div.Scalar(x, 2.0), True),
    ("c", lambda x: aten.mul_.Scalar(x, 1.0), True),
    ("c", lambda x: aten.div_.Scalar(x, 1.0), True),
    ("c", lambda x: aten.bernoulli_.float(x, 0.9), False),
    ("c", lambda x: aten.fill_.Scalar(x, 1.0), False),
    ("x", lambda x: torch_private.TO_COPY(x, dtype=OTHER.get(x.dtype, torch.float32)), True),
    ("h", lambda x: aten.clone.default(x, memory_format=torch.contiguous_format), True),
    ("xx", lambda x, y: aten.cat.default([x, y], -1), True),
    ("x", lambda x: aten.roll.default(x, [x.shape[1] // 2 or 1], [1]), True),
    ("xxx", aten.addcmul.default, True),
    ("x", lambda x: aten.pow.Tensor_Scalar(x, 2), True),
    ("xx", lambda g, x: aten.threshold_backward.default(g, x, 0), True),
    ("x", lambda x: aten.gelu.default(x, approximate="tanh"), True),
    ("xx", lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"), True),
    ("x", lambda x: aten.sum.dim_IntList(x, [0], True), True),
    ("x", lambda x: aten.mean.dim(x, [-1], True), True),
    ("x", lambda x: torch_private.SOFTMAX(x, -1, False), True),
    ("x", lambda x: torch_private.SAFE_SOFTMAX(x, -1), True),
    ("xx", lambda g, y: torch_private.SOFTMAX_BACKWARD(g, y, -1, g.dtype), True),
    ("x", lambda x: torch_private.LOG_SOFTMAX(x, -1, False), True),
    ("xx", lambda g, y: torch_private.LOG_SOFTMAX_BACKWARD(g, y, -1, g.dtype), True),
    ("xww", lambda x, w, b: aten.native_layer_norm.default(x, [len(w)], w, b, 1e-5), True),
    ("xxrrww", lambda g, x, m, r, w, b: NORM_BACKWARD(g, x, [len(w)], m, r, w, b, [True] * 3), True),
    ("xm", lambda x, mask: aten.masked_fill.Scalar(x, mask, 0.0), False),
    ("xxm", lambda x, y, mask: aten.where.self(mask, x, y), True),
    ("ti", aten.embedding.default, False),
    ("xi", lambda g, ids: aten.embedding_dense_backward.default(g, ids, 4 * len(ids), -1, False), True),
    ("ti", lambda x, ids: aten.index.Tensor(x, [ids]), False),
    ("xti", lambda g, x, ids: aten.index_put.default(x, [ids], g, True), True),
    ("ly", lambda x, y: aten.nll_loss_forward.default(x, y, None, 2, -100), True),
    ("lyu", lambda x, y, one: aten.nll_loss_backward.default(one, x, y, None, 2, -100, one), True),
    ("p", lambda x: torch_private.FOREACH_NORM(x, 2), False),
    ("pu", torch_private.FOREACH_MUL, False),
    ("pppps", lambda p, g, m, v, s: torch_private.FUSED_ADAMW(p, g, m, v, [], s, **ADAM), False),
    ("pppps", lambda p, g, m, v, s: torch_private.FUSED_ADAM(p, g, m, v, [], s, **ADAM), False),
    ("ppp", lambda p, g, b: torch_private.FUSED_SGD(p, g, b, **SGD), False),
]


def memory_bound(pool: Pool, sizes: Sizes, dtype: str) -> Iterator[Point]:
    """BOUND by size. The trace's own names and bytes are read off the call."""
    for e, (letters, call, fresh) in itertools.product(sizes.elements, BOUND):
        if (dtype == "fp32" or not set(letters) & set("wlp")) and not ("i" in letters and e > 2**22):
            make = functools.partial(operands, pool, DTYPES[dtype], e, letters)
            yield Point(make, call, 0 if fresh else None, name=getattr(call, "__name__", "operation"))
