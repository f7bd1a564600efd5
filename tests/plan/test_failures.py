"""What failures cost: closed forms beside simulated runs, and beside what was published."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus import hardware
from gradus.hardware import Cluster
from gradus.plan import budget, failures
from gradus.plan.budget import HOUR, Failures, goodput
from gradus.plan.case import Case
from gradus.plan.request import Request

H100 = hardware.find("H100")


def of(n: int, lost: Failures, steps: float = 1e6, step: float = 10.0) -> budget.Goodput:
    return goodput(Cluster(H100, n), lost, steps, (step,) * 3)


def within_its_error(share: float, simulated: list[float]) -> bool:
    return abs(share - statistics.fmean(simulated)) < 4 * statistics.stdev(simulated) / math.sqrt(len(simulated))


# ---------------------------------------------------------------- closed forms


def test_youngs_optimum():
    assert failures.young(write=2.0, between=3600.0) == pytest.approx(120.0)


@pytest.mark.parametrize("between", (600.0, 11_000.0, 1e6))
def test_dalys_optimum_loses_least(between):
    """Beside intervals around it: in a thousandth of what is lost at least there is none with less."""
    lost = {x: 1 - failures.with_restarts(between, 0.0, x * failures.daly(30.0, between), 30.0) for x in (0.5, 0.8, 0.95, 1, 1.05, 1.25, 2)}
    assert lost[1] == pytest.approx(min(lost.values()), rel=1e-3)
    assert lost[1] <= 1 - failures.with_restarts(between, 0.0, failures.young(30.0, between), 30.0)
    assert failures.daly(2 * between, between) == between, "a checkpoint that takes longer than failures leave"


@pytest.mark.parametrize("between, recovery, interval, write", ((1000.0, 100.0, 200.0, 10.0), (1000.0, 800.0, 1000.0, 100.0), (1e5, 10.0, 1000.0, 1.0)))
def test_the_share_with_restarts_is_a_simulated_runs(between, recovery, interval, write):
    dice = random.Random(0)

    def one_interval() -> float:
        """Seconds until an interval's work and its checkpoint are done."""
        seconds = 0.0
        while (life := dice.expovariate(1 / between)) < interval + write:
            seconds += life
            while (life := dice.expovariate(1 / between)) < recovery:  # a failure while it recovers: from the start
                seconds += life
            seconds += recovery
        return seconds + interval + write

    runs = [500 * interval / sum(one_interval() for _ in range(500)) for _ in range(100)]
    assert within_its_error(failures.with_restarts(between, recovery, interval, write), runs)


@pytest.mark.parametrize("between, away, stop, replicas", ((1000.0, 600.0, 50.0, 8), (100.0, 300.0, 20.0, 3), (5000.0, 600.0, 600.0, 64)))
def test_the_elastic_share_is_a_simulated_runs(between, away, stop, replicas):
    dice, horizon = random.Random(0), 200 * between

    def useful() -> float:
        """The share of a long run, all of whose replicas fail by themselves and come back after `away`."""
        at, deaths = 20 * (away + between), []
        for _ in range(replicas):
            now = 0.0
            while now < at + horizon:
                now += dice.expovariate(1 / (between * replicas))
                deaths.append(now)
                now += away
        changes = sorted([(t, -1) for t in deaths] + [(t + away, 1) for t in deaths])
        up, done, waits_until = replicas, 0.0, 0.0
        for (t, change), (after, _) in itertools.pairwise([(0.0, 0), *changes]):
            up += change
            waits_until = t + stop if change < 0 else waits_until
            begin, end = max(t, waits_until, at), min(after, at + horizon)
            done += up * max(0.0, end - begin)
        return done / replicas / horizon

    assert within_its_error(failures.elastic(between, away, stop, replicas), [useful() for _ in range(100)])


# ---------------------------------------------------------------- a run's goodput

lost_of = st.builds(
    Failures, checkpoint=st.floats(1e6, 1e13).map(lambda size: {"weights": size}), every=st.none() | st.integers(1, 100_000),
    mtbf=st.none() | st.floats(1e5, 1e9), elastic=st.booleans(), replicas=st.just(16), noticed=st.floats(1, 600),
)  # fmt: skip


@settings(max_examples=200)
@given(lost=lost_of, n=st.integers(1, 20_000), more=st.integers(1, 20_000), longer=st.floats(1, 1e3), step=st.floats(1e-2, 100))
def test_more_devices_and_more_failures_leave_less(lost, n, more, longer, step):
    """More devices also write a checkpoint sooner: they are compared without one."""
    share = of(n, lost, step=step).share
    assert 0 <= share[0] <= share[1] <= share[2] <= 1
    few, many = (of(k, lost._replace(checkpoint={}), step=step).share for k in (n, n + more))
    assert all(b <= a + 1e-12 for a, b in zip(few, many))
    if lost.mtbf:
        rarer = of(n, lost._replace(mtbf=lost.mtbf * longer), step=step).share
        # Daly's optimum in whole steps may lose a little more than a step more or less
        assert all(b >= a * (1 - 1e-3) - 1e-12 for a, b in zip(share, rarer))


def test_there_is_no_jump_where_a_second_node_begins():
    shares = [of(n, Failures({"weights": 1e11}), steps=1e5).share for n in range(1, 33)]
    for case in range(3):
        steps = [a[case] - b[case] for a, b in itertools.pairwise(shares)]
        assert min(steps) >= 0 and steps[7] <= steps[6] < 0.01, "from 8 to 9 devices less is lost than from 7 to 8"


def test_a_run_that_expects_no_failure_loses_nothing_beside_one():
    short, long = (of(8, Failures(), steps=steps).beside for steps in (10, 1e9))
    assert short == pytest.approx((0, 0, 0), abs=1e-5) and long == pytest.approx(budget.BESIDE)


def test_checkpoints_come_as_the_recipe_says_else_at_dalys_optimum():
    size = {"weights": 1e12}
    assert of(1024, Failures(size, every=50)).every == 50
    free = of(1024, Failures(size))
    assert free.every == round(free.daly / 10) and free.share[1] >= max(of(1024, Failures(size, every=k)).share[1] for k in (1, free.every // 2, 2 * free.every))
    assert of(1024, Failures(size), steps=7).every == 7, "not more steps than the run has"
    assert of(1024, Failures(size)).write == pytest.approx(1e12 / 128e9) and of(2, Failures(size)).write == pytest.approx(1000)


def test_an_elastic_run_goes_on():
    """It loses a wait and a replica's share for a while, where another goes back to a checkpoint."""
    size = {"weights": 4.87e12}
    assert of(16_384, Failures(size, elastic=True, replicas=64)).share[1] > 0.99 > of(16_384, Failures(size)).share[1]
    alone = Failures(size, elastic=True, replicas=1)
    assert of(16_384, alone).share == of(16_384, Failures(size)).share, "nobody is there to go on"


def test_a_checkpoint_has_the_weights_and_what_adam_keeps():
    from gradus.plan.answer import open_recipe

    recipe, *_ = open_recipe(Request("llama3.1-405b", ("layout.precision=bf16",), tokens=1e12), [])
    lost = Failures.of(Case.of(recipe, 16_384, "cuda"))
    assert lost.checkpoint == {"weights": 4 * 405_853_388_800, "optimizer": 8 * 405_853_388_800}
    assert lost.every is None and not lost.elastic


# ---------------------------------------------------------------- what was published


def test_llama_3():
    """Grattafiori et al. 2024, section 3.3.4: 419 unplanned stops in 54 days on 16,384 H100, more than 90 % useful."""
    found = of(16_384, Failures({"weights": 12 * 405e9}))
    assert found.between[1] == pytest.approx(54 * 24 * HOUR / 419, rel=1e-3)
    assert 0.90 < found.share[1] < 0.95


def test_a_research_clusters_own_projection():
    """Kokolis et al. 2024: 6.50 failures in 1,000 days of a node of 8, and from them 1.8 h on 16,384 GPUs, 0.23 h on 131,072."""
    assert budget.MTBF[0] == pytest.approx(8 * 24 * 1000 / 6.50 * HOUR, rel=2e-3)
    assert budget.MTBF[2] == pytest.approx(8 * 24 * 1000 / 2.34 * HOUR, rel=2e-3)
    assert of(16_384, Failures()).between[0] == pytest.approx(1.8 * HOUR, rel=0.01)
    assert of(131_072, Failures()).between[0] == pytest.approx(0.23 * HOUR, rel=0.03)


def test_megascale():
    """Jiang et al. 2024: more than 90 % useful on more than 10,000 GPUs."""
    assert of(12_288, Failures({"weights": 12 * 175e9})).share[1] > 0.90


def test_bloom_and_palm_lost_more_than_failures_explain():
    """BLOOM: 1 to 2 failures a week of about 400 GPUs, a checkpoint of 2.3 TB each 3 h (100 steps) in 40 s; end to end over steady 0.89. PaLM on
    6,144 chips: 0.65. What is left is `BESIDE`'s high end, which a range has and the expected goodput has not."""
    bloom = of(384, Failures({"all": 2.3e12}, every=100), steps=30_000, step=108.0)
    assert 7 * 24 * HOUR / 2 < bloom.between[1] * 384 / 400 < 7 * 24 * HOUR and bloom.write == pytest.approx(40, rel=0.25)
    assert bloom.share[1] == pytest.approx(0.98, abs=0.005) and bloom.share[0] < 0.89 < bloom.share[1]
    palm = of(6144, Failures({"all": 12 * 540e9}))
    assert 1 - 0.65 / palm.share[1] == pytest.approx(budget.BESIDE[2], abs=0.01)
    assert palm.share[0] < 0.65 < palm.share[1]


def test_opt_stopped_more_often_than_the_range_has():
    """Zhang et al. 2022, section 2.5: at least 35 manual and about 70 automatic restarts in two months on 992 A100: --mtbf 13600h."""
    each = 992 * 60 * 24 * HOUR / 105
    assert each == pytest.approx(13_600 * HOUR, rel=0.01) and each < budget.MTBF[0]
    assert of(992, Failures({"weights": 12 * 175e9}, mtbf=each)).share[1] < of(992, Failures({"weights": 12 * 175e9})).share[1]
