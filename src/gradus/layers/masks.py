"""Which tokens a decoder's queries may attend to."""

from __future__ import annotations

from torch import Tensor


def attention_mask(segments: Tensor | None, keep: Tensor | None) -> Tensor | None:
    """Where a decoder's queries may attend besides to earlier tokens only: boolean (batch, 1, seq or 1, seq), or None.
    segments, keep: (batch, seq), as in `decoder_inputs`."""
    mask = None if keep is None else keep[:, None, None, :]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    return mask
