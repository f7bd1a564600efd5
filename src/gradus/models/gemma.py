"""Gemma 3's text model (Gemma Team 2025, section 2): a causal decoder as Llama's, whose sublayers are normed on both
sides, with norms of each head's queries and keys and a GELU gate. Most layers see a window alone and have rotary
positions of their own. The embedding is multiplied by the root of d_model, and a norm's weight w stands for 1 + w (its
published code)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from gradus.layers import Attention, Block, Cache, Decoder, GatedFeedForward, decoder_inputs, rotary_table
from gradus.layers.init import Draw, normal, zeros
from gradus.models.family import Family, Stack
from gradus.models.weights import gemma as weights
from gradus.recipe.schema import GemmaConfig


class RMSNorm(nn.RMSNorm):
    """norm(x) · (1 + w), in fp32. In its files' 16 bits 1 + w itself would lose most of w, and in fp32 some."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class GemmaBlock(Block):
    """Norm, attention, norm, residual; norm, feed-forward, norm, residual."""

    def __init__(self, config: GemmaConfig, number: int):
        super().__init__()
        norm = functools.partial(RMSNorm, eps=config.norm_eps)
        self.attention_norm = norm(config.d_model)
        self.attention = Attention(
            config.d_model, config.n_heads, config.n_kv_heads, config.head_dim, bias=False, dropout=config.dropout,
            scale=config.query_width**-0.5, window=config.window_of(number), head_norm=norm,
        )  # fmt: skip
        self.attention_out_norm = norm(config.d_model)
        self.feedforward_norm = norm(config.d_model)
        self.feedforward = GatedFeedForward(config.d_model, config.d_ff, "gelu_tanh")
        self.feedforward_out_norm = norm(config.d_model)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = True,
                cache=None, positions: Tensor | None = None) -> Tensor:  # fmt: skip
        look = self.attention(
            self.attention_norm(x), mask=mask, causal=causal, rotary=rotary, cache=cache, positions=positions
        )
        x = x + self.attention_out_norm(look)  # (batch, seq, d_model)
        return x + self.feedforward_out_norm(self.feedforward(self.feedforward_norm(x)))


class Gemma(Decoder):
    """The published models have no dropout; `config.dropout` is that of the attention weights."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(GemmaBlock(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_output:
            self.head.weight = self.token_embedding.weight

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Every matrix from a normal of 0.02, norms 0. (The paper does not say; this is Hugging Face's.)"""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                yield module.weight, zeros
            elif isinstance(module, nn.Linear | nn.Embedding):
                yield module.weight, normal(0.02)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` tokens a row, in layers with a window for those in it."""
        c, weight = self.config, self.token_embedding.weight
        windows = [c.window_of(i) for i in range(c.n_layers)]
        return Cache(c.n_layers, batch, c.n_kv_heads, c.head_dim, max_len, weight.device, weight.dtype, windows)

    def hidden(self, ids: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None,
               keep: Tensor | None = None, cache: Cache | None = None) -> Tensor:  # fmt: skip
        """The last hidden states, after the final norm: (batch, seq, d_model). Arguments and errors as in
        `layers.decoder_inputs`; cache: from `new_cache`."""
        c = self.config
        positions, mask = decoder_inputs(ids, c.seq_len, positions, segments, keep, cache)
        # each 2 × (batch or 1, 1, seq, head_dim)
        everywhere = rotary_table(positions[:, None], c.head_dim, c.rope_theta, c.rope_scaling)
        local = rotary_table(positions[:, None], c.head_dim, c.local_theta)
        x = self.token_embedding(ids)  # (batch, seq, d_model)
        x = x * x.new_full((), c.d_model**0.5)  # rounded to the weights' type: in bf16 33.94 is 34
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            rotary = local if c.window_of(i) else everywhere
            x = block(x, rotary=rotary, mask=mask, causal=cache is None, cache=layer, positions=positions)
        return self.norm(x)


FAMILY = Family(
    config=GemmaConfig, model=Gemma, weights=weights, attention="causal",
    stacks=(Stack("blocks", before=("token_embedding",), norm="norm", heads=("head",),
                  kind=lambda config, i: config.window_of(i)),),
    tokens=("token_embedding",), head="head", fine_tuning_rate=2e-5,
)  # fmt: skip
