"""What watches a step is told where the step is, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Observer:
    """Override what you need: here, every method does nothing."""

    def edge(self, unit: str, name: str) -> None:
        """A step passes an edge. Of the unit "", the whole model: begin (of all passes); of each micro-batch forward,
        backward and, where a schedule splits the backward pass, weights, each followed by idle; end (of all passes:
        gradients are summed next). Of a head whose loss is computed by chunks: loss."""

    def gradients(self, unit: str, made: Sequence[Tensor | None]) -> None:
        """Of a head: its loss by chunks is there, with the gradients of states, weight and bias, None where none is
        wanted. Of the unit "": all gradients of this process are complete."""

    def step(self, before: bool) -> None:
        """The optimizer is about to step (`before`), or has stepped."""
