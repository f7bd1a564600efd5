"""Learning rates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus.recipe.schema import Schedule
from gradus.train.schedule import learning_rate


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    last=st.integers(51, 500),
    final=st.floats(0, 1),
    step=st.integers(1, 600),
)
def test_rates_rise_to_the_base_and_never_leave_their_bounds(name, warmup, last, final, step):
    schedule = Schedule(name=name, warmup_steps=warmup, **({"final": final} if name != "constant" else {}))
    rate = learning_rate(schedule, 2.0, step, last, 64)
    assert 0 <= rate <= 2.0 + 1e-12
    if warmup:
        assert learning_rate(schedule, 2.0, warmup, last, 64) == pytest.approx(2.0)
    if name != "constant":
        assert learning_rate(schedule, 2.0, last, last, 64) == pytest.approx(2.0 * final)


def test_schedules_equal_transformers_and_the_paper():
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, theirs in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
        scheduler = theirs(optimizer, 10, 100)
        for step in range(1, 100):
            optimizer.step()
            scheduler.step()
            assert learning_rate(Schedule(name=name, warmup_steps=10), 0.3, step, 100, 64) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
    # the copy task of the sources: 5.5e-6 early, 1.1e-3 at step 400
    noam = Schedule(name="noam", warmup_steps=400)
    assert learning_rate(noam, 0.5, 2, 400, 512) == pytest.approx(5.5e-6, rel=0.01)
    assert learning_rate(noam, 0.5, 400, 400, 512) == pytest.approx(1.1e-3, rel=0.01)
    for step in (1, 100, 4000, 10_000):
        want = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(Schedule(name="noam", warmup_steps=4000), 1.0, step, 10_000, 512) == pytest.approx(want)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_single_step_is_taken_at_the_base(name):
    assert learning_rate(Schedule(name=name), 1e-3, 1, 1, 64) == 1e-3


def test_a_share_of_all_steps_follows_their_number():
    """transformers rounds it up."""
    from transformers import TrainingArguments, get_linear_schedule_with_warmup

    schedule = Schedule(name="linear", warmup_ratio=0.1)
    for last in (20, 101):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
        steps = TrainingArguments(warmup_steps=0.1, report_to="none").get_warmup_steps(last)
        scheduler = get_linear_schedule_with_warmup(optimizer, steps, last)
        assert schedule.warmup(last) == steps
        for step in range(1, last):
            optimizer.step()
            scheduler.step()
            assert learning_rate(schedule, 0.3, step, last, 64) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
    with pytest.raises(ValueError, match="give one of warmup_steps and warmup_ratio"):
        Schedule(name="linear", warmup_ratio=0.1, warmup_steps=3)
