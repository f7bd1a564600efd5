"""The original Transformer (Vaswani et al. 2017, "Attention Is All You Need"): an encoder-decoder with sinusoidal
positions.

Post-norm, `norm_first=False`, is the paper: LayerNorm(x + dropout(sublayer(x))), no norm at a stack's end (section
3.1). Pre-norm, `norm_first=True`, is The Annotated Transformer's code: x + dropout(sublayer(LayerNorm(x))), and a final
norm on each stack.

Dropout is where the annotated code has it: on the sums of embeddings and positions and on the output of each sub-layer
(both the paper's, section 5.4), and on attention weights and within the feed-forward network (of which the paper says
nothing).
Other differences: the paper ties both embeddings and the output projection, which has no bias (section 3.4); the
annotated code ties nothing, and its projection has a bias: share_embeddings, tie_output, output_bias. All matrices,
embeddings included, start as Glorot's, as in the annotated code; biases start at 0, where that code leaves them to
PyTorch's Linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from gradus.layers import (
    Attention,
    Block,
    Cache,
    EncoderDecoder,
    FeedForward,
    LayerCache,
    check_length,
    sinusoidal,
)
from gradus.layers.init import Draw, norms_and_biases, xavier_uniform
from gradus.models import family
from gradus.models.weights import seq2seq as weights
from gradus.recipe.schema import Seq2SeqConfig


class Embedding(nn.Module):
    """Token embeddings times the root of d_model, plus sinusoidal positions, then dropout (sections 3.4 and 3.5)."""

    def __init__(self, config: Seq2SeqConfig, vocab_size: int):
        super().__init__()
        self.scale = math.sqrt(config.d_model)
        self.tokens = nn.Embedding(vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        # No buffer: it is right after a build on the meta device, and no cast of the model rounds it.
        self.table_of = partial(sinusoidal, config.seq_len, config.d_model, config.positions)
        self.table = self.table_of(device="cpu")  # (seq_len, d_model) fp32

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """ids, positions (None: 0, 1, 2 ...): (batch, seq) -> (batch, seq, d_model). Raises UserError for more than
        seq_len tokens."""
        check_length(ids.shape[1], len(self.table))
        if self.table.device != ids.device:
            self.table = self.table_of(device=ids.device)
        # (seq, d_model) or (batch, seq, d_model)
        where = self.table[: ids.shape[1]] if positions is None else self.table[positions]
        x = self.tokens(ids) * self.scale + where
        return self.dropout(x.to(self.tokens.weight.dtype))


class EncoderBlock(Block):
    """Self-attention, then feed-forward (figure 1, left)."""

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = Attention(config.d_model, config.n_heads, dropout=config.dropout)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.feedforward = FeedForward(config.d_model, config.d_ff, config.activation, dropout=config.dropout)
        self.feedforward_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def residual(self, x: Tensor, norm: nn.LayerNorm, sublayer) -> Tensor:
        """Add a sub-layer's output to x, and norm after (the paper) or before (the annotated code)."""
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.residual(x, self.attention_norm, lambda y: self.attention(y, mask=mask))  # (batch, seq, d_model)
        return self.residual(x, self.feedforward_norm, self.feedforward)


class DecoderBlock(EncoderBlock):
    """Masked self-attention, attention to the encoder's output, then feed-forward (figure 1, right)."""

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self.cross = Attention(config.d_model, config.n_heads, dropout=config.dropout)
        self.cross_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, memory_mask: Tensor | None = None,
                causal: bool = False, cache: LayerCache | None = None,
                positions: Tensor | None = None) -> Tensor:  # fmt: skip
        def look_back(y: Tensor) -> Tensor:
            return self.attention(y, mask=mask, causal=causal, cache=cache, positions=positions)

        x = self.residual(x, self.attention_norm, look_back)  # (batch, target_seq, d_model)
        x = self.residual(x, self.cross_norm, lambda y: self.cross(y, memory, mask=memory_mask, cache=cache))
        return self.residual(x, self.feedforward_norm, self.feedforward)


class Stack(nn.Module):
    """The encoder's or the decoder's blocks, and the final norm where they are pre-norm."""

    def __init__(self, config: Seq2SeqConfig, block: type[Block], n_layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(block(config) for _ in range(n_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if config.norm_first else nn.Identity()


class Seq2Seq(EncoderDecoder):
    """Encoder, decoder, and the projection to the target vocabulary. Shared embeddings are one module, a tied
    projection one Parameter.

    Raises UserError when d_model is odd.
    """

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.config = config
        target_vocab_size = config.target_vocab_size or config.vocab_size
        self.source_embedding = Embedding(config, config.vocab_size)
        shared = config.share_embeddings
        self.target_embedding = self.source_embedding if shared else Embedding(config, target_vocab_size)
        self.encoder = Stack(config, EncoderBlock, config.n_layers)
        self.decoder = Stack(config, DecoderBlock, config.n_decoder_layers or config.n_layers)
        self.head = nn.Linear(config.d_model, target_vocab_size, bias=config.output_bias)
        if config.tie_output:
            self.head.weight = self.target_embedding.tokens.weight

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Matrices uniform as of Glorot & Bengio 2010, equation 16 (each of q, k, v by itself); biases 0; norms 1 and
        0."""
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                yield module.weight, xavier_uniform

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for the keys and values of `max_len` target tokens a row, and of the memory once it is seen.

        Raises UserError for more than seq_len tokens.
        """
        c, weight = self.config, self.target_embedding.tokens.weight
        check_length(max_len, c.seq_len)
        return Cache(len(self.decoder.blocks), batch, c.n_heads, c.head_dim, max_len, weight.device, weight.dtype)

    def encode(self, source: Tensor, keep: Tensor | None = None) -> Tensor:
        """source (batch, source_seq), keep boolean of that shape, True where a token is real (None: everywhere)
        -> memory (batch, source_seq, d_model)."""
        mask = None if keep is None else keep[:, None, None, :]  # (batch, 1, 1, source_seq)
        x = self.source_embedding(source)
        for block in self.encoder.blocks:
            x = block(x, mask=mask)
        return self.encoder.norm(x)

    def decode_hidden(self, target: Tensor, memory: Tensor, keep: Tensor | None = None, *, cache: Cache | None = None,
                      positions: Tensor | None = None) -> Tensor:  # fmt: skip
        """The decoder's states: (batch, target_seq, d_model). Arguments as in `decode`."""
        if cache is not None and positions is None:
            positions = cache.next_positions(*target.shape, device=target.device)
        mask = None if cache is None else cache.mask(positions)  # (batch, 1, target_seq, slots)
        memory_mask = None if keep is None else keep[:, None, None, :]  # (batch, 1, 1, source_seq)
        x = self.target_embedding(target, positions)
        for i, block in enumerate(self.decoder.blocks):
            layer = None if cache is None else cache.layers[i]
            x = block(
                x, memory=memory, mask=mask, memory_mask=memory_mask, causal=cache is None, cache=layer,
                positions=positions,
            )  # fmt: skip
        return self.decoder.norm(x)

    def decode(self, target: Tensor, memory: Tensor, keep: Tensor | None = None, *, select: Tensor | None = None,
               cache: Cache | None = None, positions: Tensor | None = None) -> Tensor:  # fmt: skip
        """Scores of the next tokens: (batch, target_seq, vocab), or with `select` (boolean, (batch, target_seq)) those
        of the selected places only: (n_selected, vocab).

        target (batch, target_seq), padded on the right. memory from `encode`; keep is the source's padding mask.
        cache: keys and values of earlier calls; `positions` (batch, target_seq) then says which place each token has
        (None: behind those already there). Raises UserError for more than seq_len tokens.
        """
        x = self.decode_hidden(target, memory, keep, cache=cache, positions=positions)
        return self.head(x if select is None else x[select])


FAMILY = family.Family(
    config=Seq2SeqConfig, model=Seq2Seq, weights=weights, attention="cross",
    stacks=(
        family.Stack("encoder.blocks", before=("source_embedding",), norm="encoder.norm"),
        family.Stack("decoder.blocks", before=("target_embedding",), norm="decoder.norm", heads=("head",)),
    ),
    tokens=("source_embedding.tokens", "target_embedding.tokens"), head="head",
    entry=("source_embedding", "target_embedding"),  # they add positions
    whole_sequence="seq2seq has cross-attention, of two sequences, each of which would need its own split and ring",
    fine_tuning_rate=1e-4,
)  # fmt: skip
