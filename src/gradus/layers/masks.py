"""Which tokens a decoder's queries may attend to."""

from __future__ import annotations

from torch import Tensor


def attention_mask(segments: Tensor | None, keep: Tensor | None) -> Tensor | None:
    """What a decoder's queries may look at besides looking backwards. segments, keep: (batch, seq), as in `decoder_inputs`.

    Returns a boolean mask (batch, 1, seq or 1, seq), or None where nothing is masked.
    """
    mask = None if keep is None else keep[:, None, None, :]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same if mask is None else mask & same
    return mask
