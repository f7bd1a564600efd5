"""Multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradus.layers.attention import Attention, normed
from gradus.layers.cache import LayerCache
from gradus.layers.kernels import sdpa
from gradus.layers.positions import apply_rotary


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1, equations 9 to 19): keys and values of
    every head are made of one latent vector of a token, and a rotated part of the keys is the same for all heads.

    q_rank: width of what queries are made of, None for x itself. kv_rank: of the latent vector. nope_dim, rope_dim: of
    a head's queries and keys the parts without and with rotary positions. v_dim: of its values. norm: width → the norm
    of what was projected down (section 3.1.2).
    """

    def __init__(
        self, d_model: int, n_heads: int, q_rank: int | None, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int,
        norm: Callable[[int], nn.Module], dropout: float = 0.0,
    ):  # fmt: skip
        nn.Module.__init__(self)  # its projections are others than those of Attention
        self.head_dim, self.n_heads, self.dropout = nope_dim + rope_dim, n_heads, dropout
        self.scale, self.window, self.kernel = self.head_dim**-0.5, None, sdpa
        self.query, self.key_value, self.kept = (nope_dim, rope_dim), (nope_dim, v_dim), (kv_rank, rope_dim)
        self.q_down = nn.Linear(d_model, q_rank, bias=False) if q_rank else None
        self.q_norm = norm(q_rank) if q_rank else None
        self.to_q = nn.Linear(q_rank or d_model, n_heads * self.head_dim, bias=False)
        self.kv_down = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.kv_norm = norm(kv_rank)
        self.to_kv = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.to_out = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(
        self, x: Tensor, *, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = False,
        cache: LayerCache | None = None, positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Arguments as of Attention. cache: its keys are (batch, 1, slots, kv_rank + rope_dim), its values of width 0.

        A single token attends to the latent vectors themselves: the matrices that would make keys and values of all of
        them are applied to its queries and to what comes out, which is the same (section 2.1.2).
        """
        low = x if self.q_down is None else normed(self.q_norm, self.q_down(x))  # (batch, seq, q_rank or d_model)
        q, q_rope = self.split_heads(self.to_q(low)).split(self.query, -1)  # (batch, n_heads, seq, ...)
        latent, k_rope = self.kv_down(x).unsqueeze(1).split(self.kept, -1)  # (batch, 1, seq, ...)
        latent = normed(self.kv_norm, latent)
        q_rope, k_rope = apply_rotary(q_rope, *rotary), apply_rotary(k_rope, *rotary)
        how = {"causal": causal, "scale": self.scale, "dropout": self.dropout if self.training else 0.0}
        if cache is not None:
            both = torch.cat((latent, k_rope), -1)
            both, _, mask, _ = cache.update(both, both[..., :0], positions, mask, None)
            latent, k_rope = both.split(self.kept, -1)
            if x.shape[1] == 1:
                weight = self.to_kv.weight.unflatten(0, (self.n_heads, -1))
                to_k, to_v = weight.split(self.key_value, 1)  # (n_heads, ..., kv_rank)
                q = torch.cat((q @ to_k, q_rope), -1)  # (batch, n_heads, 1, kv_rank + rope_dim)
                out, _ = self.kernel(q, both, latent, mask=mask, **how)
                return self.to_out((out @ to_v.transpose(1, 2)).transpose(1, 2).flatten(2))
        k, v = self.to_kv(latent[:, 0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2).split(self.key_value, -1)
        k = torch.cat((k, k_rope.expand(-1, self.n_heads, -1, -1)), -1)  # (batch, n_heads, k_len, head_dim)
        out, _ = self.kernel(torch.cat((q, q_rope), -1), k, v, mask=mask, **how)
        return self.to_out(out.transpose(1, 2).flatten(2))
