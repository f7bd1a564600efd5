"""Low-rank adaptation (LoRA, Hu et al. 2022): a frozen Linear with a product of two small matrices beside it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from gradus.layers.init import Draw, uniform, zeros


class LoRALinear(nn.Linear):
    """W x + bias + scale · B A dropout(x) (Hu et al. 2022, equation 3). x: (..., in_features) -> (..., out_features).

    weight, bias: those of `linear`, the same parameters. a: a Linear (rank, in_features), b: (out_features, rank).
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.a = nn.Linear(self.in_features, rank, bias=False, **like)
        self.b = nn.Linear(rank, self.out_features, bias=False, **like)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """A uniform within 1 / sqrt(in_features), as PyTorch's and PEFT's Linears, and B 0: at first nothing is added
        (Hu et al. 2022, section 4.1)."""
        yield self.a.weight, uniform(self.in_features**-0.5)
        yield self.b.weight, zeros

    def added(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.dropout(x)) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        # in this order: A x, small and kept, then splits less of what malloc has free; not in place: selective
        # checkpointing keeps each as it was
        return self.added(x) + super().forward(x)
