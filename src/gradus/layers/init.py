"""How weights start. A `Draw` fills a whole parameter, in place, from a generator of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Draw = Callable[[Tensor, torch.Generator], object]


def zeros(weight: Tensor, generator: torch.Generator) -> None:
    weight.zero_()


def ones(weight: Tensor, generator: torch.Generator) -> None:
    weight.fill_(1)


def norms_and_biases(model: nn.Module) -> Iterator[tuple[nn.Parameter, Draw]]:
    """Norms start at 1, biases at 0."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            yield module.weight, ones
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            yield module.bias, zeros


def normal(std: float = 1.0) -> Draw:
    return lambda weight, generator: weight.normal_(std=std, generator=generator)


def uniform(bound: float) -> Draw:
    return lambda weight, generator: weight.uniform_(-bound, bound, generator=generator)


def truncated_normal(std: float) -> Draw:
    """A normal cut off at two standard deviations, by the inverse of its distribution function.

    std: of the normal before the cut; what is left of it has 0.88 of that. nn.init.trunc_normal_ draws again until all
    values fit: fifteen times slower.
    """
    edge = math.erf(2 / math.sqrt(2))

    def draw(weight: Tensor, generator: torch.Generator) -> None:
        # the clamp is for rounding
        weight.uniform_(-edge, edge, generator=generator).erfinv_().mul_(std * math.sqrt(2)).clamp_(-2 * std, 2 * std)

    return draw


def xavier_uniform(weight: Tensor, generator: torch.Generator) -> None:
    """Glorot & Bengio 2010, equation 16."""
    nn.init.xavier_uniform_(weight, generator=generator)
