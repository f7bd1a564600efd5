"""Keys and values kept while decoding, so that each token is projected once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradus.errors import UserError
from gradus.layers.masks import attention_mask

NO_LENGTHS = "a window keeps no padding: set cache.lengths to the prompts' own before they are read"


class LayerCache:
    """One layer's share: `k` and `v` (batch, n_kv_heads, slots, head_dim), and `cross`, the keys and values of the
    encoder's output (or None), which are projected once. A slot a token; a layer with a window has as many slots as its
    window has tokens, and position p goes into slot p % window."""

    def __init__(self, cache: Cache, shape: tuple[int, int, int, int], v_dim: int, device, dtype):
        self.cache = cache
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros((*shape[:3], v_dim), device=device, dtype=dtype)
        self.cross: tuple[Tensor, Tensor] | None = None

    def update(
        self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, int | None]:
        """Write k, v (batch, n_kv_heads, seq, head_dim), of the tokens at `positions` (batch, seq). mask: of
        `cache.mask(positions)`, which must have been called before, once for all layers.

        Returns the keys and values that the tokens may look at, (batch, n_kv_heads, keys, head_dim), and of these the
        mask and the window that an attention kernel takes.
        """
        rows, slots = (torch.arange(n, device=k.device) for n in (k.shape[0], self.k.shape[2]))
        n, length = len(slots), self.cache.length
        if n == self.cache.max_len or k.shape[2] == 1:
            for kept, new in ((self.k, k), (self.v, v)):
                kept[rows[:, None], :, positions % n] = new.transpose(1, 2).to(kept.dtype)
            if n < self.cache.max_len:
                return self.k, self.v, slots <= positions[:, None, :, None], None
            return self.k[:, :, :length], self.v[:, :, :length], mask, None
        seen, looks, window = (k, v), mask, n
        first, end, prompt = positions[:, :1], positions[:, -1:] + 1, self.cache.lengths
        if prompt is not None:  # of what follows a prompt no token is padding
            end = torch.where(prompt[:, None] > first, prompt[:, None], end)
        if length > k.shape[2]:  # there are earlier tokens
            at = torch.cat((_held(first, slots), positions), dim=1)[:, None, None]
            seen = tuple(torch.cat((kept, new.to(kept.dtype)), dim=2) for kept, new in ((self.k, k), (self.v, v)))
            back, window = positions[:, None, :, None] - at, None
            looks = (at >= 0) & (back >= 0) & (back < n)
        held = _held(end, slots)  # (batch, slots)
        new, place = (held >= first)[:, None, :, None], (held - first).clamp_min(0)
        for kept, x in ((self.k, k), (self.v, v)):
            kept.copy_(torch.where(new, x.transpose(1, 2)[rows[:, None], place].transpose(1, 2).to(kept.dtype), kept))
        return *seen, looks, window


def _held(end: Tensor, slots: Tensor) -> Tensor:
    """The position in each slot, negative: none, of a window's slots after `end` (batch, 1) tokens: (batch, slots)."""
    return end - 1 - (end - 1 - slots) % len(slots)


class Cache:
    """Keys and values of all layers of a decoder: `layers[i]` is layer i's. `length`: slots in use, of the longest row.

    `positions` (batch, seq) says in which slot each token sits. Prompts of different lengths are padded on the right:
    row i goes on at slot length_i, over the padding's keys, and no query looks at a slot behind its own. Every call
    adds as many slots as it has tokens a row, whatever their positions: where the longest row stands is known without
    asking the device. Once `fixed`, all slots are in use: the shapes of a decoding step never change again.

    windows: of each layer, the tokens that its queries look at; None: all. lengths (batch,): of the tokens of each row
    of a prompt those that are no padding, which a window would have no room for: with windows set it before prompts of
    different lengths are read. None: all. v_dim: of values; None: head_dim; 0 where they are made of the keys.
    """

    def __init__(
        self, n_layers: int, batch: int, n_kv_heads: int, head_dim: int, max_len: int, device=None,
        dtype: torch.dtype = torch.float32, windows: Sequence[int | None] = (), v_dim: int | None = None,
    ):  # fmt: skip
        self.batch, self.max_len, self.length, self.fixed = batch, max_len, 0, False
        self.lengths: Tensor | None = None
        slots = [min(max_len, window or max_len) for window in windows or [None] * n_layers]
        self.windowed = min(slots, default=max_len) < max_len
        v_dim = head_dim if v_dim is None else v_dim
        self.layers = [LayerCache(self, (batch, n_kv_heads, n, head_dim), v_dim, device, dtype) for n in slots]

    def fix(self) -> None:
        assert self.lengths is not None or not (self.windowed and self.length), NO_LENGTHS
        self.length, self.fixed = self.max_len, True

    def next_positions(self, batch: int, seq_len: int, device=None) -> Tensor:
        """(batch, seq): the slots behind those in use, the same in every row (for prompts of one length)."""
        return torch.arange(self.length, self.length + seq_len, device=device).expand(batch, seq_len)

    def mask(self, positions: Tensor) -> Tensor:
        """Call once per forward pass, before the layers: makes room for `positions` (batch, seq), none of which may lie
        behind that room, and returns which slots each query may look at, slot <= position: boolean (batch, 1, seq,
        length).

        Raises UserError when the cache is full.
        """
        if positions.shape[0] != self.batch:
            raise UserError(f"the cache was made for a batch of {self.batch}, not {positions.shape[0]}; make a new one")
        if not self.fixed:
            if self.windowed and self.lengths is None:
                assert (positions == self.next_positions(*positions.shape, positions.device)).all(), NO_LENGTHS
            if self.length + positions.shape[1] > self.max_len:
                more = f"{self.length} tokens per row and {positions.shape[1]} more"
                raise UserError(f"the cache holds {self.max_len} tokens per row, not {more}; shorten the prompt")
            self.length += positions.shape[1]
        return torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] is, in place. rows: (batch,), each of the same encoder's output as i."""
        for layer in self.layers:
            for kept in (layer.k, layer.v):
                kept[:, :, : self.length] = kept[:, :, : self.length].index_select(0, rows)


def check_length(length: int, seq_len: int) -> None:
    """Raises UserError for a sequence of more tokens than a model has positions."""
    if length > seq_len:
        way_out = f"Cut it (data.max_len={seq_len}), or raise model.seq_len"
        raise UserError(f"a sequence of {length} tokens is longer than model.seq_len={seq_len}. {way_out}")


def decoder_inputs(
    ids: Tensor, seq_len: int | None, positions: Tensor | None, segments: Tensor | None, keep: Tensor | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(positions (batch or 1, seq), mask broadcastable to (batch, 1, seq, keys) or None) of a causal decoder.

    ids: (batch, seq). positions: (batch, seq), where each token stands; None: 0, 1, 2, ..., or on from where the cache
    ends. segments: integers (batch, seq); a token attends only to earlier ones of its own segment. keep: boolean
    (batch, seq), False where no token may attend (padding on the right needs none).
    Raises UserError when the sequence is longer than seq_len (None: never), or for segments or keep together with a
    cache.
    """
    if cache is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        mask, length = attention_mask(segments, keep), ids.shape[1]
    else:
        if segments is not None or keep is not None:
            text = "with a cache, prompts are padded on the right and not packed"
            raise UserError(f"{text}: give positions, not segments or keep")
        positions = cache.next_positions(*ids.shape, ids.device) if positions is None else positions
        mask, length = cache.mask(positions), cache.length  # (batch, 1, seq, slots)
    if seq_len is not None:
        check_length(length, seq_len)
    return positions, mask
