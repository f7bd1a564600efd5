"""Which tokens a T5 has to restore: as many, in as many spans, as the paper's rate and mean length say, wherever they fall."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradus.tasks.span_corruption import noise_spans


@given(length=st.integers(2, 300), rate=st.floats(0.01, 0.9), mean=st.floats(1.0, 12.0), seed=st.integers(0, 999))
def test_the_number_of_tokens_and_of_spans_follows_from_the_length(length, rate, mean, seed):
    noise = noise_spans(length, rate, mean, np.random.default_rng(seed))
    tokens = min(max(1, round(length * rate)), length - 1)
    starts = np.flatnonzero(np.diff(noise.astype(int), prepend=0) == 1)
    assert len(noise) == length and noise.sum() == tokens and not noise[0]
    assert len(starts) == min(max(1, round(tokens / mean)), length - tokens), "no span is empty, and no two of them touch"


def test_every_place_but_the_first_may_be_noise():
    often = np.mean([noise_spans(12, 0.5, 2.0, np.random.default_rng(seed)) for seed in range(400)], axis=0)
    assert often[0] == 0 and (often[1:] > 0.2).all()
