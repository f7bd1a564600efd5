"""What is sent to keep parameters alike: a tiny GPT's by hand, bytes of a ring included; buckets and owners against what forms them in a step."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradus import models
from gradus.parallel.replicate import sum_in_buckets
from gradus.parallel.shard import OptimizerShards
from gradus.plan import batches as making
from gradus.plan import engine, traffic
from gradus.plan.case import Case
from gradus.plan.process import assign_owners
from gradus.plan.work import Transfer
from gradus.torch_private import ddp_buckets

sys.path[:0] = [str(Path(__file__).parent)]

from test_trace import recipe  # noqa: E402

SAMPLES, SEQ, D, VOCAB = 2, 16, 32, 64  # samples of a process; all sizes are divided by the processes below
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)
CALL = Transfer("replicate", "all_reduce", 0, 1, 2)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def sent(n: int, axis: str, ways: int = 1, **layout) -> dict[tuple[str, str], float]:
    """(kind, phase) → bytes that the first of n processes sends along an axis. ways: parts of the step's samples."""
    r = making.complete(recipe("gpt", samples=SAMPLES * ways, layers=3, d=D, seq=SEQ, vocab=VOCAB, **layout))
    out: dict[tuple[str, str], float] = {}
    for t in traffic.of_parameters(engine.processes(Case.of(r, n))[0]):
        if t.axis == axis:
            out[t.kind, t.phase] = out.get((t.kind, t.phase), 0.0) + t.sent
    return out


@functools.cache
def elements() -> int:
    """Of a tiny GPT: 12 d² and 13 d of a block; embeddings of tokens, which are the head's weights too, and of positions; the last norm."""
    own = 3 * (12 * D * D + 13 * D) + VOCAB * D + SEQ * D + 2 * D
    r = recipe("gpt", layers=3, d=D, seq=SEQ, vocab=VOCAB)
    assert own == sum(p.numel() for p in models.build(r.model, "meta").parameters())
    return own


@pytest.mark.parametrize("n", [2, 4])
def test_replicas_sum_every_gradient_in_a_ring(n):
    assert sent(n, "replicate", n) == {("all_reduce", "backward"): pytest.approx(2 * 4 * elements() * (n - 1) / n)}
    assert sent(n, "replicate", n, replicate="manual") == {("all_reduce", "optimizer"): pytest.approx(2 * 4 * elements() * (n - 1) / n)}
    half = {("all_reduce", "backward"): pytest.approx(2 * 2 * elements() * (n - 1) / n)}
    assert sent(n, "replicate", n, compress="bf16") == half


@pytest.mark.parametrize(("layout", "micro", "forward", "backward", "scatter"), [
    ({}, 1, 4, 4, 4), ({"reshard": False}, 1, 4, 0, 4), ({"param_dtype": "bf16"}, 1, 2, 2, 4),
    ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, 1, 2, 2, 2), ({"micro_batch": SAMPLES}, 3, 3 * 4, 3 * 4, 4),
])  # fmt: skip
def test_shards_are_gathered_and_scattered_in_a_ring(layout, micro, forward, backward, scatter):
    """Bytes of an element; a block's weights are gathered for both passes of every micro-batch, their gradients are summed once."""
    part = elements() * 3 / 4
    expected = {("all_gather", "forward"): forward * part, ("all_gather", "backward"): backward * part, ("reduce_scatter", "backward"): scatter * part}
    assert sent(4, "shard", 4 * micro, shard=4, **layout) == {key: pytest.approx(nbytes) for key, nbytes in expected.items() if nbytes}


def test_shards_of_replicas_sum_what_each_has():
    """HSDP: four processes, two of which share a replica's weights."""
    assert sent(4, "replicate", 4, shard=2) == {("all_reduce", "backward"): pytest.approx(2 * 4 * elements() / 2 / 2)}


def test_stages_send_hidden_states_and_the_gradient_of_a_tied_embedding():
    hidden, micro = SAMPLES / 2 * SEQ * D * 4, 2
    expected = {("send", "forward"): micro * hidden, ("send", "optimizer"): VOCAB * D * 4}
    assert sent(2, "pipeline", pipeline=2, micro_batch=1, schedule="gpipe") == expected


@given(SIZES, st.integers(1, 40))
def test_ddps_buckets_are_pytorchs(sizes, limit):
    """Parameters as fake tensors of single bytes, the last first."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    theirs = [sum(tensors[i].nbytes for i in bucket) for bucket in ddp_buckets(tensors, limit)]
    mine = list(traffic._ddp(sizes, limit, CALL, 1.0))
    assert sorted(theirs) == sorted(t.payload for t in mine for _ in range(int(t.calls)))
    assert [(t.payload, t.calls) for t in mine if not t.hidden_by] == [(theirs[-1], 1)], "nothing hides the last one"


@given(SIZES, st.integers(1, 90))
def test_buckets_after_the_backward_pass_are_those_of_a_step(sizes, limit):
    theirs: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda flat, group: theirs.append(flat.nbytes))
        sum_in_buckets([torch.zeros(size, dtype=torch.uint8) for size in sizes], object(), limit)
    mine = traffic._after_backward(sizes, limit, CALL)
    assert sorted(theirs) == sorted(t.payload for t in mine for _ in range(int(t.calls)))


@given(SIZES, st.integers(1, 5))
def test_owners_step_what_they_step(sizes, replicas):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("get_world_size", replicas), ("get_rank", 0), ("get_group_rank", 0)):
            patch.setattr(dist, name, lambda *_, value=value: value)
        shards = OptimizerShards([(f"{i:02}", torch.empty(size, device="meta")) for i, size in enumerate(sizes)], object())
    assert sorted(assign_owners(sizes, replicas)) == sorted(sum(w.numel() for w in part) for part in shards.parts)
