"""The copy task's sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.synthetic import CopyDataset

few = settings(max_examples=60)


@pytest.mark.slow
@few
@given(st.integers(3, 12), st.integers(2, 15), st.integers(0, 10**12), st.sampled_from(["zero", "first"]), st.sampled_from(["train", "valid"]))
def test_items(n_symbols, length, seed, start, split):
    data = CopyDataset(1000, n_symbols, length, seed, start=start, split=split)
    assert len(data) == 1000 and data.lengths.tolist() == [length] * 1000
    for i in (0, 7, 999):
        item = data[i]
        source = item["source"]
        assert source.shape == (length,) and source.dtype == np.int64 and source.min() >= 1 and source.max() < n_symbols
        if start == "first":
            assert source[0] == 1
            assert np.array_equal(item["target_in"], source[:-1]) and np.array_equal(item["target_out"], source[1:])
        else:
            assert item["target_in"].tolist() == [0, *source[:-1].tolist()] and np.array_equal(item["target_out"], source)
    # item i does not depend on n or on what was asked before
    fresh = CopyDataset(10**12 if i == 999 else 8, n_symbols, length, seed, start=start, split=split)
    assert np.array_equal(fresh[7]["source"], data[7]["source"])


@pytest.mark.parametrize(
    "n_symbols, length, start", [(3, 2, "first"), (3, 2, "zero"), (3, 5, "zero"), (4, 4, "first"), (11, 3, "zero"), (11, 4, "first")]
)
def test_held_out_sequences_are_never_trained_on(n_symbols, length, start):
    possible = (n_symbols - 1) ** (length - (start == "first"))
    for seed in range(3 if possible < 1000 else 1):
        drawn = {}
        for split in ("train", "valid"):
            data = CopyDataset(20 * possible, n_symbols, length, seed, start=start, split=split)
            drawn[split] = {tuple(item["source"].tolist()) for item in map(data.__getitem__, range(len(data)))}
        assert not drawn["train"] & drawn["valid"]
        assert len(drawn["valid"]) == max(1, possible // 10)
        assert len(drawn["train"] | drawn["valid"]) == possible  # none of the possible ones is lost


def test_symbols_are_uniform_everywhere():
    for split in ("train", "valid"):
        data = CopyDataset(5_000, 11, 10, seed=1, split=split)
        sequences = np.stack([data[i]["source"] for i in range(5_000)])
        counts = np.stack([np.bincount(column, minlength=11)[1:] for column in sequences.T])  # (place, symbol), 500 expected
        chi_squared = ((counts - 500) ** 2 / 500).sum(1)  # 9 degrees of freedom: mean 9
        assert chi_squared.max() < 33  # p < 0.0001 a place
        assert len({tuple(s) for s in sequences}) > 4_990
        pairs = np.bincount(sequences[:, 3] * 11 + sequences[:, 4], minlength=121).reshape(11, 11)[1:, 1:]  # neighbours are independent
        assert ((pairs - 50) ** 2 / 50).sum() < 160  # 99 degrees of freedom


def test_seeds_and_splits_differ():
    drawn = {tuple(CopyDataset(1, 11, 30, seed, split=split)[0]["source"]) for seed in range(10) for split in ("train", "valid")}
    assert len(drawn) == 20
    with pytest.raises(IndexError):
        CopyDataset(5, 11, 10, 0)[5]
