"""Frozen weights stored small, in 8 or in 4 bits, and computed anew wherever they are used: a model that is adapted
need not hold its base in full (QLoRA: Dettmers et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.layers.lora import LoRALinear

LEVELS = 127  # of int8 weights, -127 to 127
BLOCK = 64  # NF4 weights that share a scale
BUFFERS = ("codes", "scales", "pairs")  # in which a small weight is stored; int8 has no pairs


def weight_scale(weight: Tensor) -> Tensor:
    """(out, in) -> the step of each output's int8 weights (out,)."""
    return weight.detach().abs().amax(1).clamp_min(1e-12) / LEVELS


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) -> codes (out, in) int8 and the step of each output (out,): weight ≈ codes · step."""
    scale = weight_scale(weight)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes (out, in), scale (out,) -> (out, in)."""
    return codes.to(dtype).mul_(scale.to(dtype)[:, None])


def nf4_values(device: torch.device | str = "cpu") -> Tensor:
    """The 16 values (16,), ascending from -1 to 1: quantiles of the normal distribution, 8 equally probable steps above
    0 and 7 below it, and 0 itself, over the largest (Dettmers et al. 2023, section 3, appendix E)."""
    outermost = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))  # the probability below the largest: that of 1 is infinite
    exact = {"device": device, "dtype": torch.float64}
    below, above = (torch.special.ndtri(torch.linspace(outermost, 0.5, n + 1, **exact)[:-1]) for n in (7, 8))
    return (torch.cat((-below, torch.zeros(1, **exact), above.flip(0))) / above[0]).float()


def nf4_pairs(device: torch.device | str = "cpu") -> Tensor:
    """The two values of every byte (256, 2), that of the higher four bits first."""
    values = nf4_values(device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight of any shape -> codes (blocks, 32) uint8, two a byte, and absmax (blocks,) fp32, the largest size in
    each block of 64 consecutive weights; the last block is filled up with zeros. The scales are not quantized in turn
    (no double quantization)."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).unflatten(0, (-1, BLOCK))
    absmax = blocks.abs().amax(1)
    values = nf4_values(weight.device)
    codes = torch.bucketize(blocks / absmax.clamp_min(1e-38)[:, None], (values[1:] + values[:-1]) / 2).byte()
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def dequantize_nf4(
    codes: Tensor, absmax: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
    pairs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `quantize_nf4` stored, in this shape. pairs: `nf4_pairs()`, where they lie on the device already."""
    pairs = nf4_pairs(codes.device) if pairs is None else pairs
    blocks = F.embedding(codes.int(), pairs.to(dtype)).flatten(1).mul_(absmax.to(dtype)[:, None])
    return blocks.flatten()[: torch.Size(shape).numel()].view(shape)


class _Product(torch.autograd.Function):
    """x Wᵀ, where W is computed from what is stored, in the backward pass again: between the two it takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[..., Tensor], *stored: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(*stored)
        return F.linear(x, weight(*stored, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), stored = gradients, ctx.saved_tensors
        return gradient @ ctx.weight(*stored, dtype=gradient.dtype), None, *(None for _ in stored)


class SmallLinear(nn.Linear):
    """A frozen Linear whose weight is stored as `kind` says, on the meta device: `stored` gives the values. x: (...,
    in_features) -> (..., out_features).

    int8: one step an output, symmetric. nf4: 16 values, one scale for 64 weights. What is stored are buffers: codes,
    scales and, of nf4, pairs. `weight` is computed from them, (out, in) fp32, whenever it is asked for. The product is
    in the type of x, or of autocast, and so is the weight that it is made with.
    """

    def __init__(self, linear: nn.Linear, kind: Literal["int8", "nf4"]):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.kind = kind
        blocks = -(-linear.weight.numel() // BLOCK)
        stored = {
            "int8": {"codes": (torch.int8, *linear.weight.shape), "scales": (torch.float32, self.out_features)},
            "nf4": {
                "codes": (torch.uint8, blocks, BLOCK // 2), "scales": (torch.float32, blocks),
                "pairs": (torch.float32, 256, 2),
            },
        }  # fmt: skip
        for name, (dtype, *shape) in stored[kind].items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)

    def stored(self, weight: Tensor) -> dict[str, Tensor]:
        """(out, in) -> the buffers that stand for it."""
        quantize = quantize_int8 if self.kind == "int8" else quantize_nf4
        pairs = [nf4_pairs(weight.device)] if self.kind == "nf4" else []
        return dict(zip(BUFFERS, (*quantize(weight), *pairs)))

    def _computed(self, *stored: Tensor, dtype: torch.dtype) -> Tensor:
        if self.kind == "int8":
            return dequantize_int8(*stored, dtype)
        codes, absmax, pairs = stored
        return dequantize_nf4(codes, absmax, (self.out_features, self.in_features), dtype, pairs)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._computed(*self.buffers(recurse=False), dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = _Product.apply(x, self._computed, *self.buffers(recurse=False))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class SmallLoRALinear(LoRALinear, SmallLinear):
    """The same with low-rank matrices beside it."""

    def __init__(self, linear: LoRALinear, kind: Literal["int8", "nf4"]):
        SmallLinear.__init__(self, linear, kind)
        self.a, self.b, self.dropout, self.scale = linear.a, linear.b, linear.dropout, linear.scale


def small(linear: nn.Linear, kind: Literal["int8", "nf4"]) -> SmallLinear:
    """The same Linear, its weight stored small."""
    return SmallLoRALinear(linear, kind) if isinstance(linear, LoRALinear) else SmallLinear(linear, kind)
