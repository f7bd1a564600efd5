"""What PyTorch has on a device. Kernels ask here, so that a plan can answer for a device that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@functools.cache
def _compiled():
    return torch.compile(flex_attention)  # as it is, it would make all scores


def flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Callable[[int | None], BlockMask], window: int | None, scale: float | None
) -> Tensor:
    """Attention block by block. blocks: window → which of them. All others and the result as in layers.kernels."""
    return _compiled()(q, k, v, block_mask=blocks(window), scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def fp8(linear: nn.Linear) -> nn.Module:
    """torchao's Linear with the same parameters: its three products are in fp8, of tensors that are each scaled by
    their largest value. Input and weight are kept as they are, and cast again in the backward pass."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # the rows of a batch, over which the weight's gradient sums, need not be a multiple of 16
    return convert_to_float8_training(linear, config=Float8LinearConfig(pad_inner_dim=True))


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Of one kind of device.

    skips_blocks: PyTorch compiles flex_attention for it, forwards and backwards. plain_attention: its fused attention
    may be slower than `kernels.naive`. casts_first: an operation of two types takes a copy in one type, where a GPU
    casts as it reads and writes. attention: called as F.scaled_dot_product_attention. blocks: called as `flex`. fp8:
    called as `fp8`; None: it has no such products.
    """

    skips_blocks: bool = False
    plain_attention: bool = False
    casts_first: bool = False
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention
    blocks: Callable[..., Tensor] = flex
    fp8: Callable[[nn.Linear], nn.Module] | None = None


CPU = Capabilities(plain_attention=True, casts_first=True)  # where flex_attention has no backward pass
CUDA = Capabilities(skips_blocks=True, fp8=fp8)
OTHER = Capabilities()
_pretended: Capabilities | None = None


def capabilities(device: torch.device) -> Capabilities:
    if _pretended is not None:
        return _pretended
    return CPU if device.type == "cpu" else CUDA if device.type == "cuda" else OTHER


@contextlib.contextmanager
def pretending(other: Capabilities) -> Iterator[None]:
    """While a block lasts, every device has these."""
    global _pretended
    before, _pretended = _pretended, other
    try:
        yield
    finally:
        _pretended = before
