"""Replicas and local updates, with threads in the place of processes: sums, buckets, and the outer step by hand."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradus.parallel import replicate
from gradus.recipe.schema import Layout


class Threads:
    """As much of torch.distributed as is used here, between threads."""

    def __init__(self, n: int):
        self.n, self.here, self.parts = n, threading.local(), [None] * n
        self.barrier = threading.Barrier(n, timeout=20)
        self.boxes = {(a, b): queue.Queue() for a in range(n) for b in range(n)}

    def run(self, work) -> list:
        """What work(rank) returned, in the order of the ranks."""
        done: dict[int, object] = {}

        def as_rank(rank: int) -> None:
            self.here.rank = rank
            done[rank] = work(rank)

        threads = [threading.Thread(target=as_rank, args=(rank,), daemon=True) for rank in range(self.n)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replicate, "dist", self)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        return [done[rank] for rank in range(self.n)]

    def get_rank(self) -> int:
        return self.here.rank

    def get_group_rank(self, group, rank: int) -> int:
        return rank

    def get_world_size(self, group=None) -> int:
        return self.n

    def all_reduce(self, tensor, group=None) -> None:
        self.parts[self.here.rank] = tensor.clone()
        self.barrier.wait()
        total = sum(self.parts)
        self.barrier.wait()
        tensor.copy_(total)

    def send(self, tensor, group=None, group_dst: int = 0) -> None:
        self.boxes[self.here.rank, group_dst].put(tensor.clone())

    def recv(self, tensor, group=None, group_src: int = 0) -> None:
        tensor.copy_(self.boxes[group_src, self.here.rank].get(timeout=20))


def drawn(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=g), torch.randn(5, generator=g), torch.randn(2, 6, generator=g).t()]


def test_every_replica_has_the_sum_and_of_a_parameter_server_rank_0_alone():
    def work(rank: int):
        manual, pushed = drawn(rank), drawn(rank)
        replicate.Manual(nn.Linear(1, 1), "group").reduce(manual)
        server, weights = replicate.ParameterServer(nn.Linear(1, 1), "group"), drawn(10 + rank)
        server.reduce(pushed)
        server.send_weights(weights)
        return manual, pushed, weights, server.steps_optimizer()

    told = Threads(3).run(work)
    total = [sum(parts) for parts in zip(*(drawn(rank) for rank in range(3)))]
    for manual, _, weights, _ in told:
        torch.testing.assert_close(manual, total)
        torch.testing.assert_close(weights, drawn(10), rtol=0, atol=0)
    torch.testing.assert_close(told[0][1], total)
    assert [steps for *_, steps in told] == [True, False, False]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16])), max_size=12), st.integers(4, 40))
def test_buckets_are_as_full_as_their_size_lets_them_be_and_of_one_type(gradients, size):
    tensors = [torch.full((n,), i + 1.0, dtype=dtype) for i, (n, dtype) in enumerate(gradients)]
    sent = []

    def all_reduce(flat, group):
        sent.append((flat.dtype, flat.nbytes, flat[0].item()))
        flat.mul_(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicate.dist, "all_reduce", all_reduce)
        replicate.sum_in_buckets(tensors, "group", size)
        replicate.sum_in_buckets(tensors, None, size)  # nobody else
    assert all((t == 3 * (i + 1)).all() for i, t in enumerate(tensors))
    first = [int(value) - 1 for *_, value in sent]  # the gradient that a bucket begins with
    assert sum(n for _, n, _ in sent) == sum(t.nbytes for t in tensors) and first == sorted(first)
    for (dtype, n, _), start, end in zip(sent, first, [*first[1:], len(tensors)]):
        assert {t.dtype for t in tensors[start:end]} == {dtype} and (n <= size or end == start + 1)
        if end < len(tensors):
            assert tensors[end].dtype != dtype or n + tensors[end].nbytes > size, "the next one had room"


def test_workers_that_train_apart_come_to_the_mean_of_their_weights():
    workers = [replicate.LocalUpdates(Layout(local_sgd={"every": 2}), drawn(rank), "group", 30) for rank in range(3)]
    Threads(3).run(lambda rank: workers[rank].sync())
    mean = [sum(parts) / 3 for parts in zip(*(drawn(rank) for rank in range(3)))]
    for worker in workers:
        torch.testing.assert_close(worker.weights, mean)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_an_outer_step_is_nesterovs_on_the_mean_change(momentum):
    """DiLoCo's algorithm 1 by hand: b = μ b + g, w = w - η (g + μ b), where g is the mean of what the weights have moved."""
    rate = 0.7
    layout = Layout(diloco={"every": 2, "outer_lr": rate, "outer_momentum": momentum})
    workers = [replicate.LocalUpdates(layout, drawn(7), "group", 1e6) for _ in range(2)]

    def work(rank: int) -> None:
        for n in range(3):
            for w, change in zip(workers[rank].weights, drawn(100 * n + rank)):
                w.sub_(change)
            workers[rank].sync()

    Threads(2).run(work)
    weights, buffers = drawn(7), [torch.zeros_like(w) for w in drawn(7)]
    for n in range(3):
        for w, b, *changes in zip(weights, buffers, drawn(100 * n), drawn(100 * n + 1)):
            gradient = sum(changes) / 2
            b.mul_(momentum).add_(gradient)
            w.sub_(rate * (gradient + momentum * b))
    for worker in workers:
        torch.testing.assert_close(worker.weights, weights)
        torch.testing.assert_close(worker.state(), buffers if momentum else [])


def test_weights_that_were_loaded_are_those_of_the_last_sync():
    weights = drawn(1)
    updates = replicate.LocalUpdates(Layout(diloco={"every": 2}), weights, "group", 1e6)
    for w, other in zip(weights, drawn(2)):
        w.copy_(other)
    updates.restart()
    Threads(1).run(lambda rank: updates.sync())
    torch.testing.assert_close(weights, drawn(2), rtol=0, atol=0)


def test_the_last_step_of_a_run_is_a_sync_too():
    updates = replicate.LocalUpdates(Layout(local_sgd={"every": 4}), [], "group", 1e6)
    updates.last_step = 10
    assert [step for step in range(1, 11) if updates.due(step)] == [4, 8, 10] and updates.state() == []
