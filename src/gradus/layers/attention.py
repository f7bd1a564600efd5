"""Multi-head attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from gradus.layers.cache import LayerCache
from gradus.layers.kernels import naive, sdpa
from gradus.layers.positions import apply_rotary
from gradus.patch import replaced


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """In the norm's type: autocast's products come in another."""
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with fewer key heads than query heads when n_kv_heads
    is given (Ainslie et al. 2023). `kernel` does the inner part and may be replaced from outside
    (`gradus.layers.get_kernel`).

    head_dim: None for d_model / n_heads. bias: in to_q, to_k, to_v; out_bias: in to_out, None for the same. dropout: on
    the weights.
    scale: of the scores, None for head_dim ** -0.5. window: a query looks at no key so many or more places from it.
    head_norm: head_dim → the norm of each head's queries and of its keys, before they are rotated.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, head_dim: int | None = None,
        bias: bool = True, out_bias: bool | None = None, dropout: float = 0.0, scale: float | None = None,
        window: int | None = None, head_norm: Callable[[int], nn.Module] | None = None,
    ):  # fmt: skip
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        assert n_heads % n_kv_heads == 0, f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}"
        self.head_dim = head_dim or d_model // n_heads
        self.dropout = dropout
        self.scale, self.window = scale, window
        self.kernel = sdpa
        self.to_q = nn.Linear(d_model, n_heads * self.head_dim, bias=bias)
        self.to_k = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=bias)
        self.to_v = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=bias)
        self.to_out = nn.Linear(n_heads * self.head_dim, d_model, bias=bias if out_bias is None else out_bias)
        self.q_norm, self.k_norm = (None if head_norm is None else head_norm(self.head_dim) for _ in "qk")

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # (batch, heads, seq, head_dim)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, rotary: tuple[Tensor, Tensor] | None = None, cache: LayerCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from x to itself, or to `context`.

        x: (batch, seq, d_model). context: (batch, k_len, d_model), for cross attention. mask: boolean, True where a
        query may look, and bias: added to the scores, both broadcastable to (batch, n_heads, seq, k_len). causal: no
        query looks at a later key.
        rotary: (cos, sin) of `rotary_table`, applied to q and k. cache: this layer's; new keys go into its slots
        `positions` (batch, seq), and k_len counts its slots; with `context`, the context's keys and values are kept in
        it and projected once.
        Returns (batch, seq, d_model).
        """
        q = self.split_heads(self.to_q(x))  # (batch, n_heads, seq, head_dim)
        if context is not None and cache is not None and cache.cross is not None:
            k, v = cache.cross
        else:
            source = x if context is None else context
            # (batch, n_kv_heads, k_len, head_dim)
            k, v = self.split_heads(self.to_k(source)), self.split_heads(self.to_v(source))
            k = normed(self.k_norm, k)
        q = normed(self.q_norm, q)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        window = self.window
        if cache is not None:
            if context is None:
                k, v, mask, window = cache.update(k, v, positions, mask, window)
            else:
                cache.cross = k, v
        out, _ = self.kernel(
            q, k, v, mask=mask, bias=bias, causal=causal, scale=self.scale,
            dropout=self.dropout if self.training else 0.0, window=window,
        )  # fmt: skip
        return self.to_out(out.transpose(1, 2).flatten(2))


@contextlib.contextmanager
def observe_attention(model: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While a block lasts, every attention of the model is computed the textbook's way (`naive`), and `see` gets the
    module's name and its weights, (batch, n_heads, q_len, k_len). `weights = {}; observe_attention(model,
    weights.__setitem__)` keeps the last of each."""

    def kernel(name: str) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            out, weights = naive(*args, **kwargs)
            see(name, weights)
            return out, weights

        return observed

    with contextlib.ExitStack() as kernels:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                kernels.enter_context(replaced(module, "kernel", kernel(name)))
        yield
