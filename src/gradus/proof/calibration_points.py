"""The points of a calibration: operations at a few sizes, each with operands as a training step has them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradus.plan.work import Op

SIDES = (16, 256, 1024)  # of m, n and k
BATCH, BATCHED = 32, (64, 256)  # of batched products: how many, and the same of each
FUSED = ((1, 8, 16), (64, 32, 32), (16, 128, 64), (8, 256, 32), (4, 512, 64))  # attention: batch, positions, head_dim
ELEMENTS = tuple(2**k for k in (10, 14, 17, 20, 22, 24))  # of what is bound by memory
ROW = 512  # of them in a row
POOL = 2**26  # elements of the pool


class Pool:
    """Memory with random numbers. Every call gets other parts of it."""

    def __init__(self, device: torch.device, n: int = POOL):
        self.device, self.n, self.at, self.kept = device, n, 0, {}
        base = torch.empty(2**20, device=device).normal_(generator=torch.Generator(device).manual_seed(0))
        self.kept[torch.float32] = base.repeat(-(-n // 2**20))[:n]

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next part."""
        n = math.prod(shape)
        assert n <= self.n, f"{shape} is more than the pool has"
        if dtype not in self.kept:
            self.kept[dtype] = self.kept[torch.float32].to(dtype)
        if self.at + n > self.n:
            self.at = 0
        part = self.kept[dtype][self.at : self.at + n].view(shape)
        self.at += -(-n // 64) * 64
        return part


@dataclasses.dataclass
class Point:
    """One operation at one size, and its times. fresh: the operand that the step has just written; None: none."""

    make_operands: Callable[[], tuple]
    call: Callable[..., Any]
    fresh: int | None = 0
    op: Op | None = None  # None: not yet read off the call
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        if len(self.times) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.median


def products(pool: Pool, dtype: torch.dtype) -> Iterator[Point]:
    """As in the forward pass (the second operand transposed in memory), for the input's gradient (neither) and for the
    weight's (the first); batched likewise."""

    def pair(transposed: int | None, *batch: int, m: int, n: int, k: int) -> tuple[Tensor, ...]:
        shapes = (m, k), (k, n)
        operands = [pool.take(*batch, *(s[::-1] if i == transposed else s), dtype=dtype) for i, s in enumerate(shapes)]
        return tuple(x.mT if i == transposed else x for i, x in enumerate(operands))

    for batch, sides in ((), SIDES), ((BATCH,), BATCHED):
        for m, n, k, transposed in itertools.product(sides, sides, sides, (0, 1, None)):
            make = functools.partial(pair, transposed, *batch, m=m, n=n, k=k)
            yield Point(make, torch.matmul, int(not batch and transposed == 0))


def attentions(pool: Pool, dtype: torch.dtype) -> Iterator[Point]:
    """Fused attention forward and backward. Queries, keys and values lie as a linear layer leaves them: (batch, seq,
    heads, head_dim)."""

    def qkv(n: int, batch: int, seq: int, dim: int) -> list[Tensor]:
        return [pool.take(batch, seq, 4, dim, dtype=dtype).transpose(1, 2) for _ in range(n)]

    def graph(forward: Callable, *shape: int) -> tuple:
        leaves = [x.detach().requires_grad_() for x in qkv(3, *shape)]
        with torch.enable_grad():
            out = forward(*leaves)
        return out, leaves, *qkv(1, *shape)

    for shape, causal in itertools.product(FUSED, (False, True)):
        forward = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        yield Point(functools.partial(qkv, 3, *shape), forward)
        yield Point(functools.partial(graph, forward, *shape), torch.autograd.grad, None)


def memory_bound(pool: Pool, dtype: torch.dtype) -> Iterator[Point]:
    """One operation of each kind: of two tensors, of one, by rows."""

    def make(n: int, e: int) -> list[Tensor]:
        return [pool.take(e // ROW, ROW, dtype=dtype) for _ in range(n)]

    by_rows = functools.partial(torch.softmax, dim=-1), functools.partial(F.layer_norm, normalized_shape=(ROW,))
    for e in ELEMENTS:
        yield Point(functools.partial(make, 2, e), torch.add)
        yield from (Point(functools.partial(make, 1, e), call) for call in (F.gelu, *by_rows))
