"""T5 (Raffel et al. 2020): an encoder-decoder whose positions are a learned bias on the attention scores, shared by all
blocks of a stack. v1.0: ReLU and a head tied to the embeddings; v1.1: gated GELU and a head of its own (Shazeer
2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradus.layers import (
    Attention,
    Block,
    Cache,
    EncoderDecoder,
    FeedForward,
    GatedFeedForward,
    LayerCache,
    decoder_inputs,
    relative_buckets,
)
from gradus.layers.init import Draw, normal, norms_and_biases
from gradus.models import family
from gradus.models.weights import t5 as weights
from gradus.recipe.schema import T5Config


def attention(config: T5Config) -> Attention:
    """No biases and no division by the root of the head size: the initialisation has it (see `T5.initialisation`)."""
    return Attention(
        config.d_model, config.n_heads, head_dim=config.d_head, bias=False, dropout=config.dropout, scale=1.0
    )


class RelativeBias(nn.Module):
    """One learned number per head and bucket of distance, added to the scores (section 2.1)."""

    def __init__(self, config: T5Config, bidirectional: bool):
        super().__init__()
        self.bidirectional, self.n_buckets, self.max_distance = bidirectional, config.n_buckets, config.max_distance
        self.table = nn.Embedding(config.n_buckets, config.n_heads)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """query_positions (batch or 1, q_len), key_positions (batch or 1, k_len)
        -> (batch or 1, n_heads, q_len, k_len)."""
        buckets = relative_buckets(
            query_positions, key_positions, self.bidirectional, self.n_buckets, self.max_distance
        )
        return self.table(buckets).permute(0, 3, 1, 2)


class T5Block(Block):
    """Self-attention, in the decoder cross-attention, feed-forward: each on normed input, with dropout and residual
    (pre-norm)."""

    def __init__(self, config: T5Config, decoder: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = attention(config)
        if decoder:
            self.cross_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
            self.cross = attention(config)
        self.feedforward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        if config.gated:
            self.feedforward = GatedFeedForward(config.d_model, config.d_ff, "gelu_tanh", dropout=config.dropout)
        else:
            self.feedforward = FeedForward(config.d_model, config.d_ff, "relu", bias=False, dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor | None = None, causal: bool = False,
                memory: Tensor | None = None, memory_mask: Tensor | None = None, cache: LayerCache | None = None,
                positions: Tensor | None = None) -> Tensor:  # fmt: skip
        look = self.attention(
            self.attention_norm(x), mask=mask, bias=bias, causal=causal, cache=cache, positions=positions
        )
        x = x + self.dropout(look)  # (batch, seq, d_model)
        if memory is not None:
            x = x + self.dropout(self.cross(self.cross_norm(x), memory, mask=memory_mask, cache=cache))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class Stack(nn.Module):
    """The encoder or the decoder: blocks that share one relative bias, between dropouts, and a final norm."""

    def __init__(self, config: T5Config, decoder: bool):
        super().__init__()
        n_layers = (config.n_decoder_layers or config.n_layers) if decoder else config.n_layers
        self.relative_bias = RelativeBias(config, bidirectional=not decoder)
        self.blocks = nn.ModuleList(T5Block(config, decoder) for _ in range(n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)


class T5(EncoderDecoder):
    """Encoder, decoder, one embedding for both. With `config.tie_output` the head is the embedding, otherwise a matrix
    of its own. With `config.scale_output` (not given: as tie_output) the decoder's output is multiplied by d_model^-0.5
    before it.

    The decoder starts from the padding id (0 by convention); whoever makes the targets shifts them.
    """

    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_output:
            self.head.weight = self.embedding.weight

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Normal, with the deviations of the paper's code (Mesh TensorFlow): embeddings 1; matrices and an untied head
        fan-in^-0.5, but queries (d_model d_head)^-0.5, as their scores are not scaled; the relative bias
        d_model^-0.5."""
        c = self.config
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                yield module.weight, normal(module.in_features**-0.5)
            if isinstance(module, RelativeBias):
                yield module.table.weight, normal(c.d_model**-0.5)
        for module in self.modules():
            if isinstance(module, Attention):
                yield module.to_q.weight, normal((c.d_model * c.d_head) ** -0.5)
        yield self.embedding.weight, normal()  # after the head: a tied head is the embedding

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` target tokens a row, and of the memory once it is seen."""
        c, weight = self.config, self.embedding.weight
        return Cache(len(self.decoder.blocks), batch, c.n_heads, c.d_head, max_len, weight.device, weight.dtype)

    def encode(self, source: Tensor, keep: Tensor | None = None) -> Tensor:
        """As `Seq2Seq.encode`: memory (batch, source_seq, d_model)."""
        stack = self.encoder
        places = torch.arange(source.shape[1], device=source.device)[None]  # (1, source_seq)
        bias = stack.relative_bias(places, places)  # (1, n_heads, source_seq, source_seq)
        mask = None if keep is None else keep[:, None, None, :]  # (batch, 1, 1, source_seq)
        x = stack.dropout(self.embedding(source))
        for block in stack.blocks:
            x = block(x, bias=bias, mask=mask)
        return stack.dropout(stack.norm(x))

    def decode_hidden(self, target: Tensor, memory: Tensor, keep: Tensor | None = None, *, cache: Cache | None = None,
                      positions: Tensor | None = None) -> Tensor:  # fmt: skip
        """The decoder's states after the final norm: (batch, target_seq, d_model). Arguments as in `decode`."""
        stack = self.decoder
        positions, mask = decoder_inputs(target, None, positions, None, None, cache)
        keys = positions if cache is None else torch.arange(cache.length, device=target.device)[None]  # (1, slots)
        bias = stack.relative_bias(positions, keys)  # (batch or 1, n_heads, target_seq, slots)
        memory_mask = None if keep is None else keep[:, None, None, :]  # (batch, 1, 1, source_seq)
        x = stack.dropout(self.embedding(target))
        for i, block in enumerate(stack.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(
                x, bias=bias, mask=mask, causal=cache is None, memory=memory, memory_mask=memory_mask, cache=layer,
                positions=positions,
            )  # fmt: skip
        return stack.dropout(stack.norm(x))

    def decode(self, target: Tensor, memory: Tensor, keep: Tensor | None = None, *, select: Tensor | None = None,
               cache: Cache | None = None, positions: Tensor | None = None) -> Tensor:  # fmt: skip
        """Scores of the next tokens: (batch, target_seq, vocab), or (n_selected, vocab). Arguments as in
        `Seq2Seq.decode`."""
        x = self.decode_hidden(target, memory, keep, cache=cache, positions=positions)
        if select is not None:
            x = x[select]
        if self.config.scales:
            x = x * self.config.d_model**-0.5
        return self.head(x)


FAMILY = family.Family(
    config=T5Config, model=T5, weights=weights, attention="cross",
    stacks=(
        family.Stack("encoder.blocks", before=("embedding",), norm="encoder.norm", shared=("encoder.relative_bias",),
                     dropout="encoder.dropout"),
        family.Stack("decoder.blocks", before=("embedding",), norm="decoder.norm", heads=("head",),
                     shared=("decoder.relative_bias",)),
    ),
    tokens=("embedding",), head="head", tensor={"relative_bias.table": "column"},  # its columns are heads
    whole_sequence="T5 adds a relative bias to the scores of each pair of chunks, and its decoder attends across",
    decoder_start="padding", fine_tuning_rate=3e-4,
)  # fmt: skip
