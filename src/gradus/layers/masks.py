"""Where tokens may look, of documents packed into rows: blocks of scores where the device can skip blocks, else a dense
mask."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gradus.layers.capabilities import capabilities
from gradus.torch_private import uncompiled

BLOCK = 128  # queries and keys a block of flex_attention's


class Documents:
    """A query looks at earlier tokens of its own document. Stands in the place of a dense mask, which is
    made once for all layers.

    segments: integers (batch, seq), the document of each token. keep: boolean (batch, seq), False where no token may
    look, or None.
    """

    def __init__(self, segments: Tensor, keep: Tensor | None):
        self.segments, self.keep = segments, keep
        self._made = {None: _blocks(segments, keep)}
        self._dense_mask: Tensor | None = None

    def blocks(self, window: int | None = None) -> BlockMask:
        """Of attention with this window."""
        if window not in self._made:
            self._made[window] = _blocks(self.segments, self.keep, window)
        return self._made[window]

    @uncompiled
    def dense(self) -> Tensor:
        """(batch, 1, seq, seq), for kernels that take no blocks; that a query looks backwards alone is left to them."""
        if self._dense_mask is None:
            self._dense_mask = _dense(self.segments, self.keep)
        return self._dense_mask


def attention_mask(segments: Tensor | Any | None, keep: Tensor | None) -> Tensor | Documents | Any | None:
    """What a decoder's queries may look at besides looking backwards. segments, keep: as of Documents, or None; or
    segments that stand for a mask already, since the rows are parts of sequences (parallel.context).

    Returns None, a boolean mask (batch, 1, seq or 1, seq), or for packed documents on a device that skips blocks
    Documents.
    """
    if not isinstance(segments, Tensor | None):
        return segments
    if segments is not None and capabilities(segments.device).skips_blocks:
        return Documents(segments, keep)
    return _dense(segments, keep)


def _dense(segments: Tensor | None, keep: Tensor | None) -> Tensor | None:
    mask = None if keep is None else keep[:, None, None, :]
    if segments is None:
        return mask
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same if mask is None else mask & same


@functools.lru_cache(16)
def one_document(batch: int, seq: int, device: torch.device, window: int) -> BlockMask:
    """Blocks of a window where every row is one document."""
    return _blocks(torch.zeros(1, seq, dtype=torch.int32, device=device).expand(batch, seq), None, window)


@uncompiled
def _blocks(segments: Tensor, keep: Tensor | None, window: int | None = None) -> BlockMask:
    """Blocks of scores that may hold one which counts. Found by the first and last document of each block, so that
    nothing of seq × seq is ever made; `mask_mod` decides within a block, but not where one document fills both its
    sides and the window holds all of them."""
    window = segments.shape[1] if window is None else window
    batch, seq = segments.shape
    n = -(-seq // BLOCK)
    tail = (batch, n * BLOCK - seq)
    low, high = (
        torch.cat((segments, segments.new_full(tail, fill)), dim=1).view(batch, n, BLOCK)
        for fill in (torch.iinfo(segments.dtype).max, torch.iinfo(segments.dtype).min)
    )
    low, high = low.amin(-1), high.amax(-1)  # (batch, n)
    i = torch.arange(n, device=segments.device)
    back = (i[:, None] - i) * BLOCK
    backwards = (back >= 0) & (back - BLOCK + 1 < window)
    meets = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None]) & backwards  # (batch, n, n)
    whole = torch.zeros_like(meets)
    if keep is None:
        one = (low == high) & ((i + 1) * BLOCK <= seq)
        whole = one[:, :, None] & one[:, None, :] & (low[:, :, None] == low[:, None, :])
        whole &= (back > 0) & (back + BLOCK - 1 < window)

    def looks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        may = (q >= k) & (q - k < window) & (segments[b, q] == segments[b, k])
        return may if keep is None else may & keep[b, k]

    return BlockMask.from_kv_blocks(*_listed(meets & ~whole), *_listed(whole), BLOCK, looks, (seq, seq))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many blocks of keys each block of queries takes, which ones first): integers (batch, 1, n), (batch, 1, n,
    n)."""
    blocks = blocks[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()
