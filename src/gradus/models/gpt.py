"""GPT-2 and GPT-3 (Radford et al. 2019, section 2.3; Brown et al. 2020, section 2.1): a causal decoder, pre-norm, with learned
positions and the output projection tied to the token embedding. GPT-3's alternating sparse attention is not built: all is dense."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.layers import Attention, Block, Cache, ExpertLinear, FeedForward, MixtureOfExperts, attention_mask
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
                config.d_model, config.d_ff, config.n_experts, config.top_k, config.activation, gated=False, bias=config.bias
            )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = True, cache=None, positions: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask, causal=causal, cache=cache, positions=positions))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))  # (batch, seq, d_model)


class GPT(nn.Module):
    """Raises UserError when the size of the vocabulary is not known."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size: not known. Set it, or give a tokenizer.")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_output:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal of 0.02, and 0.02 / sqrt(2 n_layers) for the projections that end in the residual stream, of which there are two
        a layer (Radford et al. 2019, section 2.3); biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for projection in (block.attention.to_out, getattr(block.feedforward, "experts", block.feedforward).down):
                nn.init.normal_(projection.weight, std=0.02 / (2 * self.config.n_layers) ** 0.5)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` tokens a row."""
        c, weight = self.config, self.token_embedding.weight
        return Cache(c.n_layers, batch, c.n_heads, c.head_dim, max_len, weight.device, weight.dtype)

    def hidden(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The last hidden states, after the final norm: (batch, seq, d_model).

        ids: (batch, seq). positions: (batch, seq), where each token stands; None: 0, 1, 2, ..., or on from where the cache ends.
        segments: integers (batch, seq); a token looks only at earlier ones of its own segment. keep: boolean (batch, seq), False
        where no token may look (padding on the right needs none: all looks are backwards). cache: from `new_cache`.
        Raises UserError when the sequence is longer than the model's positions, or for segments or keep together with a cache.
        """
        if cache is None:
            mask = attention_mask(segments, keep)
            positions = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            length = ids.shape[1]
        else:
            if segments is not None or keep is not None:
                raise UserError("with a cache, prompts are padded on the right and not packed: give positions, not segments or keep")
            positions = cache.next_positions(*ids.shape, ids.device) if positions is None else positions
            mask = cache.mask(positions)  # (batch, 1, seq, slots)
            length = cache.length
        if length > self.config.seq_len:
            raise UserError(f"a sequence of {length} tokens is longer than model.seq_len={self.config.seq_len}; cut it, or train with more positions")
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))  # (batch, seq, d_model)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, cache is None, None if cache is None else cache.layers[i], positions)
        return self.norm(x)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        select: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits of the next token: (batch, seq, vocab), or (n_selected, vocab) at the places where `select`, boolean (batch, seq),
        is True. Other arguments and errors as in `hidden`."""
        x = self.hidden(ids, positions=positions, segments=segments, keep=keep, cache=cache)
        return self.head(x if select is None else x[select])
