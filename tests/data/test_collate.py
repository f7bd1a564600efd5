"""Padding, against torch's own, and stacking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.collate import pad_sequences, stack
from gradus.errors import UserError

sequences = st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=8)
few = settings(max_examples=100)


@few
@given(sequences, st.integers(-1, 5))
def test_padding_is_torchs(lists, pad_id):
    ids, keep = pad_sequences([np.array(s, dtype=np.int32) for s in lists], pad_id)
    expected = torch.nn.utils.rnn.pad_sequence([torch.tensor(s, dtype=torch.int64) for s in lists], batch_first=True, padding_value=pad_id)
    assert ids.dtype == torch.int64 and keep.dtype == torch.bool and torch.equal(ids, expected)
    assert keep.sum(1).tolist() == [len(s) for s in lists]
    assert [row[k].tolist() for row, k in zip(ids, keep)] == lists


def test_padding_to_a_width():
    arrays = [np.array([1, 2, 3]), np.array([4])]
    assert pad_sequences(arrays, 9, to=5)[0].tolist() == [[1, 2, 3, 9, 9], [4, 9, 9, 9, 9]]
    with pytest.raises(UserError, match="3 tokens, more than the 2"):
        pad_sequences(arrays, 9, to=2)


def test_stack():
    batch = stack([{"image": np.full((1, 2), i, np.uint8), "label": i, "flip": i > 0, "lam": np.float32(i / 2)} for i in range(3)])
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (3, 1, 2)
    assert batch["label"].dtype == torch.int64 and batch["label"].tolist() == [0, 1, 2]
    assert batch["flip"].dtype == torch.bool and batch["flip"].tolist() == [False, True, True]
    assert batch["lam"].dtype == torch.float32 and batch["lam"].tolist() == [0.0, 0.5, 1.0]
