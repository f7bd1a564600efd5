"""The order of samples is a pure function of (seed, epoch, position), whatever the workers, micro-batches, ranks and resumes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.loader import Loader, Plan, sample_rng
from gradus.errors import UserError
from gradus.recipe.schema import DataConfig

sys.path.insert(0, str(Path(__file__).parent))  # workers get this process's path
from loader_parts import Epochal, MyUserError, Ragged, bad_collate, collate, draw

few = settings(max_examples=60)


@st.composite
def plans(draw):
    n = draw(st.integers(1, 200))
    lengths = np.array(draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)))
    size = {"batch_samples": draw(st.integers(1, 40))} if draw(st.booleans()) else {"batch_tokens": draw(st.integers(30, 200))}
    return {"n": n, "seed": draw(st.integers(0, 2**40)), "lengths": lengths, "bucket": draw(st.booleans()), "shuffle": draw(st.booleans()), **size}


@few
@given(plans(), st.integers(0, 5))
def test_every_sample_once_an_epoch_and_a_pure_function(arguments, epoch):
    plan = Plan(**arguments)
    plan.epoch(epoch + 1)  # what was asked before changes nothing
    batches, again = plan.epoch(epoch), Plan(**arguments).epoch(epoch)
    assert len(batches) == len(again) and all(np.array_equal(a, b) for a, b in zip(batches, again))
    assert sorted(np.concatenate(batches).tolist()) == list(range(plan.n))
    assert plan.steps_per_epoch == len(plan.epoch(0))
    lengths = arguments["lengths"]
    if plan.batch_samples:
        assert sorted(map(len, batches))[1:] == [plan.batch_samples] * (len(batches) - 1) or len(batches) == 1
    else:
        assert all(len(b) and lengths[b].max() * len(b) <= plan.batch_tokens for b in batches)
    if not plan.shuffle:
        order = np.concatenate(batches)
        assert np.array_equal(order, np.argsort(lengths, kind="stable") if plan.bucket else np.arange(plan.n))
        assert all(np.array_equal(a, b) for a, b in zip(batches, plan.epoch(epoch + 3)))
        if plan.batch_tokens:  # as many as fit: no batch could have taken the next sample too
            for batch, following in itertools.pairwise(batches):
                more = np.append(batch, following[0])
                assert lengths[more].max() * len(more) > plan.batch_tokens


def test_plain_order_is_numpys_permutation():
    order = np.random.default_rng(np.random.SeedSequence([5, 3])).permutation(100)
    assert np.array_equal(np.concatenate(Plan(100, 5, batch_samples=7).epoch(3)), order)


def test_epochs_and_seeds_differ():
    orders = {tuple(np.concatenate(Plan(50, seed, batch_samples=8).epoch(e))) for seed in range(3) for e in range(4)}
    assert len(orders) == 12


@pytest.mark.parametrize("size", [{"batch_samples": 16}, {"batch_tokens": 1600}])
def test_buckets_have_little_padding_and_a_random_order(size):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 5000)
    plain, bucketed = Plan(5000, 0, lengths=lengths, **size), Plan(5000, 0, lengths=lengths, bucket=True, **size)
    places = [sum(lengths[b].max() * len(b) for b in plan.epoch(0)) for plan in (plain, bucketed)]
    assert 1 - lengths.sum() / places[0] > 0.3
    assert 1 - lengths.sum() / places[1] < 0.04
    longest = np.array([lengths[b].max() for b in bucketed.epoch(0)], dtype=float)
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.15  # batches follow each other at random
    together = [{frozenset(b.tolist()) for b in bucketed.epoch(e)} for e in (0, 1)]
    assert len(together[0] & together[1]) < 3  # and other samples meet in another epoch


def test_plan_says_what_is_wrong():
    with pytest.raises(UserError, match=r"sample 2 has 9 tokens .* batch\.tokens=8"):
        Plan(3, 0, batch_tokens=8, lengths=np.array([1, 8, 9]))
    with pytest.raises(UserError, match="empty"):
        Plan(0, 0, batch_samples=8)
    for arguments in ({"batch_tokens": 8}, {"batch_samples": 8, "bucket": True}):
        with pytest.raises(UserError, match="length of every sample"):
            Plan(3, 0, **arguments)


# ---------------------------------------------------------------- the loader


def rows(steps):
    """[(epoch, step, sample indices, unpadded ids, drawn numbers)]: all that must not depend on how it was loaded."""
    out = []
    for s in steps:
        busy = [m for m in s.micro_batches if "idle" not in m]
        ids = [row[keep].tolist() for m in busy for row, keep in zip(m["ids"], m["keep"])]
        drawn = [x for m in busy for x in m["drawn"].tolist()]
        out.append((s.epoch, s.step, s.indices.tolist(), ids, drawn))
    return out


def loader(n=50, **options):
    data = Ragged(n)
    plan = Plan(n, 3, batch_tokens=40, lengths=data.lengths, bucket=True)
    return Loader(data, plan, collate, prepare=draw, **options)


@few
@given(st.integers(1, 60), st.integers(0, 3), st.none() | st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6))
def test_micro_batches_ranks_and_resumes_change_nothing(n, epoch, micro_batch, world, at):
    whole = rows(loader(n).steps(epoch))
    assert [w[2] for w in whole] == [b.tolist() for b in loader(n).plan.epoch(epoch)]
    assert all(ids == [[i] * (i % 7 + 1) for i in indices] for _, _, indices, ids, _ in whole)
    start = at % (len(whole) + 1)
    assert rows(loader(n, micro_batch=micro_batch).steps(epoch, start)) == whole[start:]
    shares = [rows(loader(n, micro_batch=micro_batch, rank=r, world=world).steps(epoch, start)) for r in range(world)]
    assert all(len(share) == len(whole) - start for share in shares)
    for k, (_, step, *parts) in enumerate(whole[start:]):
        assert all(share[k][:2] == (epoch, step) for share in shares)
        assert [[x for share in shares for x in share[k][2 + i]] for i in range(3)] == parts
        assert max(len(share[k][2]) for share in shares) - min(len(share[k][2]) for share in shares) <= 1
    steps = [list(loader(n, micro_batch=micro_batch, rank=r, world=world).steps(epoch, start)) for r in range(world)]
    for of_ranks, (_, _, indices, *_) in zip(zip(*steps), whole[start:]):  # all ranks compute as often, whatever they have
        assert len({len(s.micro_batches) for s in of_ranks}) == 1 and {s.samples for s in of_ranks} == {len(indices)}


def test_micro_batches_are_the_batch_in_pieces():
    (step,) = Loader(Ragged(10), Plan(10, 0, batch_samples=10), collate, micro_batch=4).steps(0)
    assert [m["count"] for m in step.micro_batches] == [4, 4, 2]
    (step,) = Loader(Ragged(2), Plan(2, 0, batch_samples=10), collate, rank=2, world=3).steps(0)
    assert step.indices.size == 0
    (idle,) = step.micro_batches
    assert idle["idle"] and idle["n_tokens"] == 0 and len(idle["ids"]) == 1


def test_what_is_drawn_depends_on_seed_epoch_and_index_alone():
    drawn = {(seed, epoch, i): sample_rng(seed, epoch, i).integers(2**62) for seed in range(3) for epoch in range(3) for i in range(20)}
    assert len(set(drawn.values())) == len(drawn)
    for s in loader().steps(2):
        assert [sample_rng(3, 2, i).integers(2**62) for i in s.indices.tolist()] == torch.cat([m["drawn"] for m in s.micro_batches]).tolist()
    # item 0 does not share its stream with the order of its epoch
    assert sample_rng(3, 2, 0).permutation(50).tolist() != np.concatenate(Plan(50, 3, batch_samples=5).epoch(2)).tolist()


def test_epoch_aware_data_sets_are_told_the_epoch():
    for epoch in (0, 4):
        (step,) = Loader(Epochal(3), Plan(3, 0, batch_samples=3), collate).steps(epoch)
        assert step.micro_batches[0]["ids"].tolist() == [[i, epoch] for i in step.indices]


def test_workers_change_nothing_and_survive_epochs():
    torch.set_num_threads(2)
    torch.ones(600, 600) @ torch.ones(600, 600)  # this process has threads before the workers start
    expected = {e: rows(loader(micro_batch=3).steps(e)) for e in range(3)}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    background = loader(micro_batch=3, loading=DataConfig(workers=2))
    pids = []
    for epoch in (0, 1):
        steps = list(background.steps(epoch))
        assert rows(steps) == expected[epoch]
        pids.append({int(p) for s in steps for m in s.micro_batches for p in m["pid"]})
    assert len(pids[0]) == 2 and pids[0] == pids[1] and os.getpid() not in pids[0]
    abandoned = background.steps(1)
    next(abandoned)
    assert rows(background.steps(2, start=4)) == expected[2][4:]
    with pytest.raises(AssertionError, match="one at a time"):
        next(abandoned)
    assert rows(background.steps(0, start=len(expected[0]))) == []
    background.close()
    passing = loader(micro_batch=3, loading=DataConfig(workers=1, persistent=False))
    assert rows(passing.steps(0)) == expected[0] and rows(passing.steps(1)) == expected[1]
    assert torch.equal(torch.get_rng_state(), before)  # dropout, which draws from it, is not disturbed


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_data_set_and_the_sample(workers):
    def load(data, collate=collate):
        return list(Loader(data, Plan(len(data), 0, batch_samples=4, shuffle=False), collate, loading=DataConfig(workers=workers), micro_batch=2).steps(0))

    with pytest.raises(RuntimeError) as caught:
        load(Ragged(9, bad=6))
    assert str(caught.value) == "ragged numbers, sample 6 (epoch 0, step 1): ValueError: reviews.csv row 6: no such column"
    assert "loader_parts.py" in caught.value.__notes__[0]  # where it came from is not lost
    with pytest.raises(UserError) as caught:
        load(Ragged(9, bad=6, error=MyUserError))
    assert str(caught.value) == "reviews.csv row 6: no such column"
    with pytest.raises(RuntimeError, match=r"ragged numbers, collating samples 0, 1 \(epoch 0, step 0\): KeyError: 'targets'"):
        load(Ragged(9), bad_collate)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_sent_to_workers_is_said():
    with pytest.raises(UserError, match=r"data\.workers=1: .* by pickle"):
        list(Loader(Ragged(4), Plan(4, 0, batch_samples=2), lambda samples: collate(samples), loading=DataConfig(workers=1)).steps(0))


SCRIPT = """
import os, signal, sys, time
from gradus.data.loader import Loader, Plan
from gradus.recipe.schema import DataConfig
from loader_parts import Ragged, collate
if __name__ == "__main__":
    told = []
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda n, frame: told.append(n))
    loader = Loader(Ragged(4000, seconds=0.002), Plan(4000, 0, batch_samples=4), collate, loading=DataConfig(workers=2))
    pids = set()
    for step in loader.steps(0):
        pids |= set(step.micro_batches[0]["pid"].tolist())
        if step.step == 20:
            print("ready", *pids, flush=True)
            while len(told) < 2: time.sleep(0.01)
            goal = step.step + 40  # more than was fetched ahead
        if step.step > 20 and step.step == goal: break
    print("alive", len(pids), flush=True)
    time.sleep(60)
"""


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_signal_to_all_leaves_the_workers_alive_and_a_kill_leaves_none(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        word, *pids = process.stdout.readline().split()
        assert word == "ready" and len(pids) == 2
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGTERM)  # Slurm's warning too
        assert process.stdout.readline().split() == ["alive", "2"]
        assert all(running(int(p)) for p in pids)
    finally:
        process.kill()
        process.wait()
    give_up = time.time() + 30
    while any(running(int(p)) for p in pids) and time.time() < give_up:
        time.sleep(0.1)
    assert not any(running(int(p)) for p in pids)
