"""GPT-2 and GPT-3 (Radford et al. 2019, section 2.3; Brown et al. 2020, section 2.1): a causal decoder, pre-norm, with
learned positions and the output projection tied to the token embedding. GPT-3's alternating sparse attention is not
built: all attention is dense."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from gradus.layers import (
    Attention,
    Block,
    Cache,
    Decoder,
    ExpertLinear,
    FeedForward,
    MixtureOfExperts,
    decoder_inputs,
)
from gradus.layers.init import Draw, normal, norms_and_biases
from gradus.models.family import Family, Stack
from gradus.models.weights import gpt as weights
from gradus.recipe.schema import GPTConfig


class GPTBlock(Block):
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(config.d_model, config.n_heads, bias=config.bias, dropout=config.dropout)
        self.feedforward_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
        if config.n_experts is None:
            self.feedforward = FeedForward(config.d_model, config.d_ff, config.activation, bias=config.bias)
        else:
            self.feedforward = MixtureOfExperts(
                config.d_model, config.d_ff, config.n_experts, config.top_k, config.activation,
                gated=False, bias=config.bias,
            )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = True, cache=None,
                positions: Tensor | None = None) -> Tensor:  # fmt: skip
        x = x + self.dropout(
            self.attention(self.attention_norm(x), mask=mask, causal=causal, cache=cache, positions=positions)
        )
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))  # (batch, seq, d_model)


class GPT(Decoder):
    """The decoder, and the projection to the vocabulary."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_output:
            self.head.weight = self.token_embedding.weight

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Normal of 0.02, and 0.02 / sqrt(2 n_layers) for the projections that end in the residual stream, of which
        there are two a layer (Radford et al. 2019, section 2.3); biases 0."""
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                yield module.weight, normal(0.02)
        for block in self.blocks:
            for projection in (block.attention.to_out, getattr(block.feedforward, "experts", block.feedforward).down):
                yield projection.weight, normal(0.02 / (2 * self.config.n_layers) ** 0.5)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` tokens a row."""
        c, weight = self.config, self.token_embedding.weight
        return Cache(c.n_layers, batch, c.n_heads, c.head_dim, max_len, weight.device, weight.dtype)

    def hidden(self, ids: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None,
               keep: Tensor | None = None, cache: Cache | None = None) -> Tensor:  # fmt: skip
        """The last hidden states, after the final norm: (batch, seq, d_model). Arguments and errors as in
        `layers.decoder_inputs`; cache: from `new_cache`."""
        positions, mask = decoder_inputs(ids, self.config.seq_len, positions, segments, keep, cache)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))  # (batch, seq, d_model)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(x, mask=mask, causal=cache is None, cache=layer, positions=positions)
        return self.norm(x)


FAMILY = Family(
    config=GPTConfig, model=GPT, weights=weights, attention="causal",
    stacks=(Stack("blocks", before=("token_embedding", "position_embedding"), norm="norm", heads=("head",)),),
    tokens=("token_embedding",), head="head",
)  # fmt: skip
