"""Samples into batches: pure functions from lists of numpy arrays to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradus.errors import UserError

IGNORE = -100  # a target that does not count: torch.nn.functional.cross_entropy's default ignore_index


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples of arrays of equal shapes and of numbers: each key gains a leading batch dimension, types stay."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def pad_sequences(
    sequences: Sequence[np.ndarray], pad_id: int, to: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right to the longest, or to `to` places.

    sequences: 1-D integer arrays, at least one. Returns ids (batch, longest) int64 and keep (batch, longest), True at
    real tokens. Raises UserError if a sequence is longer than `to`.
    """
    lengths = np.array([len(s) for s in sequences])
    longest = int(lengths.max())
    if to is not None and longest > to:
        raise UserError(f"a sequence has {longest} tokens, more than the {to} allowed. Lower data.max_len.")
    keep = np.arange(longest if to is None else to) < lengths[:, None]  # (batch, longest)
    ids = np.full(keep.shape, pad_id, dtype=np.int64)
    ids[keep] = np.concatenate(sequences)
    return torch.from_numpy(ids), torch.from_numpy(keep)
