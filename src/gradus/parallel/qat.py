"""Quantization-aware training: every Linear computes with its input and its weight rounded as an int8 product rounds
them, and gradients pass the rounding as if it were not there (Jacob et al. 2018, section 3; Bengio et al. 2013).

The rounding is that of `gradus quantize --as static`, which takes over the ranges of inputs that training saw.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.layers import use_linears
from gradus.layers.small import LEVELS, weight_scale

NEW = 0.01  # share of a batch in the moving range of inputs, as in torch.ao's MovingAverageMinMaxObserver
FILE = "qat.json"  # in a checkpoint: module → [lowest, highest input]


def input_scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """(step, the number that stands for 0.0) of inputs between two values. Scalars. The numbers are 0 to 127: AVX2 adds
    two products in 16 bits, which 255 would overflow."""
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    scale = ((high - low) / LEVELS).clamp_min(1e-12)
    return scale, (-low / scale).round().clamp(0, LEVELS).int()


class Rounded:
    """In the place of a Linear's forward. seen: lowest and highest input (2,), a moving mean over training's batches;
    None before the first of them, when each batch has its own."""

    def __init__(self, linear: nn.Linear):
        self.linear = linear
        self.seen: Tensor | None = None

    def range(self, x: Tensor) -> Tensor:
        if not self.linear.training and self.seen is not None:
            return self.seen
        new = torch.stack(x.detach().aminmax())
        if self.linear.training:
            self.seen = new if self.seen is None else self.seen.lerp(new, NEW)
        return new if self.seen is None else self.seen

    def __call__(self, x: Tensor) -> Tensor:
        scale, zero = input_scale(*self.range(x).unbind())
        x = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, LEVELS)
        scale = weight_scale(self.linear.weight)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, scale, zero, 0, -LEVELS, LEVELS)
        return F.linear(x, weight, self.linear.bias)


def use_qat(model: nn.Module) -> None:
    """Every Linear rounds from here on. Names of parameters stay as they are."""

    def rounded(name: str, linear: nn.Linear) -> nn.Linear:
        linear.forward = Rounded(linear)
        return linear

    use_linears(model, rounded)


def ranges(model: nn.Module) -> dict[str, list[float]]:
    """Module → [lowest, highest input], as training saw them; {} of a model without `use_qat`."""
    forwards = ((name, getattr(module, "forward", None)) for name, module in model.named_modules())
    return {name: f.seen.tolist() for name, f in forwards if isinstance(f, Rounded) and f.seen is not None}


def restore(model: nn.Module, kept: dict[str, list[float]]) -> None:
    """Put ranges back."""
    for name, values in kept.items():
        linear = model.get_submodule(name)
        linear.forward.seen = torch.tensor(values, device=linear.weight.device)
