"""Llama 2, 3.1, 3.2 (Touvron et al. 2023, section 2.2; Grattafiori et al. 2024, section 3.2): a causal decoder,
pre-norm with RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases. With experts in place of the
feed-forward network it is Mixtral (Jiang et al. 2024); with biases of queries, keys and values Qwen2 (Yang et al. 2024,
section 2.2.1), and with a shared expert Qwen2-MoE (section 2.2.2); with norms of each head's queries and keys in place
of the biases Qwen3 (Yang et al. 2025, section 2); with attention in a window Mistral (Jiang et al. 2023, section 2);
with multi-head latent attention DeepSeek-V2 and V3 (DeepSeek-AI 2024, section 2), which are planned only."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor, nn

from gradus.layers import (
    Attention,
    Block,
    Cache,
    Decoder,
    ExpertLinear,
    GatedFeedForward,
    LatentAttention,
    MixtureOfExperts,
    decoder_inputs,
    rotary_table,
)
from gradus.layers.init import Draw, normal, norms_and_biases
from gradus.models.family import Family, Stack
from gradus.models.weights import llama as weights
from gradus.recipe.schema import LlamaConfig


class LlamaBlock(Block):
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, config: LlamaConfig, number: int):
        super().__init__()
        self.rotates = rotates(config, number)
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        norm = functools.partial(nn.RMSNorm, eps=config.norm_eps)
        self.attention = LatentAttention(
            config.d_model, config.n_heads, **dict(config.latent), norm=norm, dropout=config.dropout
        ) if config.latent else Attention(
            config.d_model, config.n_heads, config.n_kv_heads, config.head_dim,
            bias=config.qkv_bias, out_bias=False, dropout=config.dropout, window=config.window_of(number),
            head_norm=norm if config.qk_norm else None,
        )  # fmt: skip
        self.feedforward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        if config.has_experts(number):
            self.feedforward = MixtureOfExperts(
                config.d_model, config.d_expert or config.d_ff, config.n_experts, config.top_k, "silu", gated=True,
                norm_top_k=config.norm_top_k, d_shared=config.d_shared, shared_gate=config.shared_gate,
                sigmoid=config.router == "sigmoid",
            )
        else:
            self.feedforward = GatedFeedForward(config.d_model, config.d_ff, "silu")

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None, causal: bool = True,
                cache=None, positions: Tensor | None = None) -> Tensor:  # fmt: skip
        x = x + self.attention(
            self.attention_norm(x), mask=mask, causal=causal, rotary=rotary if self.rotates else None, cache=cache,
            positions=positions,
        )  # fmt: skip
        return x + self.feedforward(self.feedforward_norm(x))  # (batch, seq, d_model)


def rotates(config: LlamaConfig, i: int) -> bool:
    """Whether block i has rotary positions."""
    return not config.no_rotation_every or (i + 1) % config.no_rotation_every != 0


def kind_of(config: LlamaConfig, i: int) -> tuple[int | None, bool]:
    """What no parameter of block i shows."""
    return config.window_of(i), rotates(config, i)


class Llama(Decoder):
    """The published models have no dropout; `config.dropout` is that of the attention weights."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(LlamaBlock(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_output:
            self.head.weight = self.token_embedding.weight

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Every matrix from a normal of 0.02, biases 0, norms 1. (The papers do not say; this is Hugging Face's.)"""
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                yield module.weight, normal(0.02)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` tokens a row, or for what latent attention makes them of."""
        c, weight = self.config, self.token_embedding.weight
        windows = [c.window_of(i) for i in range(c.n_layers)]
        k_dim, v_dim = (c.latent.kv_rank + c.latent.rope_dim, 0) if c.latent else (c.head_dim, c.head_dim)
        return Cache(c.n_layers, batch, c.n_kv_heads, k_dim, max_len, weight.device, weight.dtype, windows, v_dim)

    def hidden(self, ids: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None,
               keep: Tensor | None = None, cache: Cache | None = None) -> Tensor:  # fmt: skip
        """The last hidden states, after the final norm: (batch, seq, d_model). Arguments and errors as in
        `layers.decoder_inputs`; cache: from `new_cache`."""
        c = self.config
        positions, mask = decoder_inputs(ids, c.seq_len, positions, segments, keep, cache)
        width = c.latent.rope_dim if c.latent else c.head_dim
        # 2 × (batch or 1, 1, seq, width)
        rotary = rotary_table(positions[:, None], width, c.rope_theta, c.rope_scaling)
        x = self.token_embedding(ids)  # (batch, seq, d_model)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, rotary=rotary, mask=mask, causal=cache is None, cache=layer, positions=positions)
        return self.norm(x)


FAMILY = Family(
    config=LlamaConfig, model=Llama, weights=weights, attention="causal",
    stacks=(Stack("blocks", before=("token_embedding",), norm="norm", heads=("head",), kind=kind_of),),
    tokens=("token_embedding",), head="head", fine_tuning_rate=2e-5,
)  # fmt: skip
