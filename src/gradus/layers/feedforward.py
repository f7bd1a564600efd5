"""The position-wise feed-forward networks."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """down(dropout(activation(up(x)))) (Vaswani et al. 2017, equation 2). x: (batch, seq, d_model), and so the
    result."""

    def __init__(self, d_model: int, d_ff: int, activation: str, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """down(dropout(activation(gate(x)) · up(x))) (Shazeer 2020, equation 6). x: (batch, seq, d_model), and so the
    result."""

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: float = 0.0):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
