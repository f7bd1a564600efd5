"""Padding and packing: against torch's own padding, a naive first-fit, and the documents themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.collate import IGNORE, first_fit, pack, pad_sequences, stack
from gradus.errors import UserError

sequences = st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=8)
few = settings(max_examples=100, deadline=None)


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
    assert pad_sequences(arrays, 9, multiple_of=8)[0].shape == (2, 8)
    assert pad_sequences(arrays, 9, multiple_of=3)[0].shape == (2, 3)
    with pytest.raises(UserError, match="3 tokens, more than the 2"):
        pad_sequences(arrays, 9, to=2)


def test_stack():
    batch = stack([{"image": np.full((1, 2), i, np.uint8), "label": i, "flip": i > 0, "lam": i / 2, "name": str(i)} for i in range(3)])
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (3, 1, 2)
    assert batch["label"].dtype == torch.int64 and batch["label"].tolist() == [0, 1, 2]
    assert batch["flip"].dtype == torch.bool and batch["flip"].tolist() == [False, True, True]
    assert batch["lam"].dtype == torch.float32 and batch["lam"].tolist() == [0.0, 0.5, 1.0]
    assert batch["name"] == ["0", "1", "2"]


@few
@given(st.lists(st.integers(0, 20), max_size=60))
def test_first_fit_is_first_fit(lengths):
    room, expected = [], []
    for length in lengths:
        row = next((r for r, left in enumerate(room) if left >= length), len(room))
        room += [20] if row == len(room) else []
        room[row] -= length
        expected.append(row)
    assert first_fit(lengths, 20).tolist() == expected


def test_first_fit_of_many_is_tight():
    lengths = np.random.default_rng(0).integers(1, 1024, 20_000)
    rows = first_fit(lengths, 1024)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 1024 and filled.mean() > 0.95 * 1024


@few
@given(st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=10), st.integers(1, 12))
def test_packing_keeps_every_next_token_once(lists, seq_len):
    packed = {k: v.numpy() for k, v in pack([np.array(d, dtype=np.int64) for d in lists], seq_len, pad_id=7).items()}
    assert all(v.shape == packed["ids"].shape and v.shape[1] == seq_len and v.dtype == np.int64 for v in packed.values())
    pieces = []
    for ids, targets, segments, positions in zip(*(packed[k] for k in ("ids", "targets", "segments", "positions"))):
        assert segments.max() >= 1  # no row is empty
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert np.array_equal(at, np.arange(at[0], at[0] + len(at))) and np.array_equal(positions[at], np.arange(len(at)))
            pieces.append((ids[at].tolist(), targets[at].tolist()))
        empty = segments == 0
        assert (ids[empty] == 7).all() and (targets[empty] == IGNORE).all() and (positions[empty] == 0).all()
    expected = [(d[lo : lo + seq_len], d[lo + 1 : lo + seq_len + 1]) for d in lists for lo in range(0, len(d) - 1, seq_len)]
    expected = [(a[: len(b)], b) for a, b in expected]
    assert sorted(pieces) == sorted(expected)


def test_packed_attention_equals_attention_alone():
    """With the mask that segments stand for, every document's attention and loss are those it has in a row of its own."""
    torch.manual_seed(0)
    documents = [np.arange(n) % 11 for n in (6, 3, 9, 4, 5)]
    table, head = torch.randn(11, 4, 8), torch.randn(8, 11)  # by token and position; readout

    def loss(batch):
        x = table[batch["ids"], batch["positions"] % 4]  # (rows, seq, 8)
        mask = (batch["segments"][:, :, None] == batch["segments"][:, None, :]).tril()  # (rows, seq, seq)
        return F.cross_entropy(
            (F.scaled_dot_product_attention(x, x, x, attn_mask=mask) @ head).flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )

    together = pack(documents, 10)
    assert len(together["ids"]) < len(documents)
    alone = sum(loss(pack([d], 10)) for d in documents)
    torch.testing.assert_close(loss(together), alone)
