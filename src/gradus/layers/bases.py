"""What blocks and models begin with."""

from __future__ import annotations

from torch import Tensor, nn

from gradus.layers.cache import Cache


class Block(nn.Module):
    """A layer that a model repeats. From outside, blocks are what is checkpointed, compiled and sharded."""


class Decoder(nn.Module):
    """A causal decoder: `hidden`, and a `head` that projects to the vocabulary."""

    def forward(self, ids: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None,
                keep: Tensor | None = None, select: Tensor | None = None,
                cache: Cache | None = None) -> Tensor:  # fmt: skip
        """Logits of the next token: (batch, seq, vocab), or (n_selected, vocab) at the places where `select`, boolean
        (batch, seq), is True. Other arguments and errors as in `hidden`."""
        x = self.hidden(ids, positions=positions, segments=segments, keep=keep, cache=cache)
        return self.head(x if select is None else x[select])


class EncoderDecoder(nn.Module):
    """`encode`, and `decode`, which reads what it gives."""

    def forward(self, source: Tensor, target: Tensor, *, source_keep: Tensor | None = None,
                select: Tensor | None = None) -> Tensor:  # fmt: skip
        """source (batch, source_seq), target (batch, target_seq) as the decoder reads it -> scores, as in `decode`."""
        return self.decode(target, self.encode(source, source_keep), source_keep, select=select)
