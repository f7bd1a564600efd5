"""The repeated unit of every model."""

from __future__ import annotations

from torch import nn


class Block(nn.Module):
    """A layer that a model repeats. From outside, blocks are what is checkpointed, compiled and sharded."""
