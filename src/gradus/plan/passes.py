"""What a pass of a model in use computes, reads and sums; `plan.pass_tracing` traces it."""

from __future__ import annotations

import dataclasses

from torch import nn

from gradus.layers import MixtureOfExperts
from gradus.torch_private import memory_id


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a pass over a batch does, on all devices together.

    kernels: (kind, operations, shape, how many) of matrix products, convolutions and attention, of which a causal
    kernel computes half; as in `work.Op`. weights: elements of parameters that are read: none of a table that is looked
    up in, top_k experts of a layer. sums: (elements of an output that tensor parallelism sums, how many all-reduces
    have so many).
    """

    kernels: list[tuple]
    weights: int
    sums: list[tuple[int, int]]

    @property
    def operations(self) -> float:
        return sum(operations * times for _, operations, _, times in self.kernels)


@dataclasses.dataclass(frozen=True)
class Usage:
    """prefill: the prompt up to its next token; the source of an encoder-decoder; the forward pass of an encoder.
    decode: a further token of every row; None for an encoder. classes: scores of an answer. Elements that the cache
    holds: own, keys and values of all tokens; cross, of an encoder's output."""

    prefill: Pass
    decode: Pass | None
    classes: int
    own: int = 0
    cross: int = 0


def active_elements(model: nn.Module) -> dict[int, int]:
    """Memory of a parameter → its elements; those of top_k experts where a layer has many."""
    elements = {memory_id(p): p.numel() for p in model.parameters()}
    for layer in [module for module in model.modules() if isinstance(module, MixtureOfExperts)]:
        elements |= {memory_id(p): p.numel() // layer.n_experts * layer.top_k for p in layer.experts.parameters()}
    return elements
