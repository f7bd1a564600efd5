"""Samples into batches: pure functions from lists of numpy arrays to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradus.errors import UserError

IGNORE = -100  # a target that does not count: torch.nn.functional.cross_entropy's default ignore_index
WINDOW = 1024  # rows that first_fit keeps open


def stack(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples whose arrays have equal shapes: each key gains a leading batch dimension.

    Arrays keep their type; Python numbers become int64, float32 or bool tensors of shape (batch,); anything else stays a list.
    """
    batch: dict[str, Any] = {}
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        if isinstance(first, (np.ndarray, np.generic)):
            batch[key] = torch.from_numpy(np.stack(values))
        else:
            batch[key] = torch.tensor(values) if isinstance(first, (bool, int, float)) else values
    return batch


def pad_sequences(
    sequences: Sequence[np.ndarray], pad_id: int, to: int | None = None, multiple_of: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right to the longest, to `to` places, or to the next multiple of `multiple_of`.

    sequences: 1-D integer arrays, at least one. Returns ids (batch, longest) int64 and keep (batch, longest), True at real tokens.
    Raises UserError if a sequence is longer than `to`.
    """
    assert to is None or multiple_of is None, "give to or multiple_of, not both"
    lengths = np.array([len(s) for s in sequences])
    width = int(lengths.max()) if to is None else to
    if lengths.max() > width:
        raise UserError(f"a sequence has {lengths.max()} tokens, more than the {width} allowed. Lower data.max_len or raise model.seq_len")
    if multiple_of is not None:
        width = multiple_of * -(-width // multiple_of)
    keep = np.arange(width) < lengths[:, None]  # (batch, longest)
    ids = np.full(keep.shape, pad_id, dtype=np.int64)
    ids[keep] = np.concatenate(sequences)
    return torch.from_numpy(ids), torch.from_numpy(keep)


def first_fit(lengths: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """The row of each document, when each goes into the first row that still has room for it (among the last 1,024 rows,
    so that the time grows only linearly). lengths: (n,), none above size. Returns (n,) rows, counted from 0."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths) == 0 or lengths.max() <= size
    room = np.full(len(lengths), size, dtype=np.int64)  # a row more for every document is enough
    rows = np.empty(len(lengths), dtype=np.int64)
    used = 0
    for i, length in enumerate(lengths.tolist()):
        low = max(0, used - WINDOW)
        fits = room[low:used] >= length
        row = low + int(fits.argmax()) if fits.any() else used
        used = max(used, row + 1)
        room[row] -= length
        rows[i] = row
    return rows


def pack(samples: Sequence[np.ndarray], seq_len: int, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Documents into full rows for a causal language model, first-fit; packed documents do not attend across borders.

    samples: 1-D integer arrays, one a document. Each next token is a target exactly once: a document of L tokens takes L-1 places,
    in pieces of at most seq_len where it is longer (a document of one token has no target and takes none).
    Returns, each (rows, seq_len) int64: `ids`; `targets`, the next token, IGNORE at padding; `segments`, 1, 2, ... for the pieces
    of a row, 0 at padding: attend only within equal segments; `positions`, from 0 in every piece.
    """
    pieces = [d[lo : lo + seq_len + 1] for d in samples for lo in range(0, len(d) - 1, seq_len)]  # one token more than places
    lengths = np.array([len(p) - 1 for p in pieces], dtype=np.int64)
    rows = first_fit(lengths, seq_len)
    order = np.argsort(rows, kind="stable")
    rows, lengths, pieces = rows[order], lengths[order], [pieces[i] for i in order]
    n_rows = int(rows[-1]) + 1 if len(rows) else 0
    before = np.cumsum(lengths) - lengths  # places taken by earlier pieces, over all rows
    first = np.searchsorted(rows, rows)  # the first piece of each piece's row
    start = rows * seq_len + before - before[first]  # (n_pieces,) place in the flattened rows
    positions = np.arange(lengths.sum()) - np.repeat(before, lengths)
    places = np.repeat(start, lengths) + positions

    def laid_out(values: np.ndarray, empty: int) -> torch.Tensor:
        flat = np.full(n_rows * seq_len, empty, dtype=np.int64)
        flat[places] = values
        return torch.from_numpy(flat.reshape(n_rows, seq_len))

    none = [np.empty(0, dtype=np.int64)]  # concatenate refuses an empty list
    return {
        "ids": laid_out(np.concatenate(none + [p[:-1] for p in pieces]), pad_id),
        "targets": laid_out(np.concatenate(none + [p[1:] for p in pieces]), IGNORE),
        "segments": laid_out(np.repeat(np.arange(len(rows)) - first + 1, lengths), 0),
        "positions": laid_out(positions, 0),
    }
