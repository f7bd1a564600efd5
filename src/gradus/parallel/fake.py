"""A world of any size in one process: a layout is built and stepped as one of its ranks, and nothing travels.

What a process computes, holds and sends is as in a real world. What it would receive is not: the others are taken to
have what it has itself, or what happens to lie in memory, so losses and gradients mean nothing. Under FakeTensorMode
nothing is computed either, only shapes, and a world of 1,024 is a matter of seconds:

    with fake_world(1024, rank=5) as world:
        mesh = Mesh.make(layout, world)
        with FakeTensorMode():
            parallel = apply(models.build(config), layout, mesh)
            with Traffic() as traffic:
                parallel.forward_backward(micro_batches, loss_of, lambda share: share)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradus.errors import UserError
from gradus.parallel import replicate
from gradus.parallel.world import World
from gradus.patch import replaced
from gradus.recipe.schema import Layout
from gradus.torch_private import (
    chunking_of_fsdp,
    ddp_buckets,
    forget_meshes,
    join_fake,
    set_shapes_known,
    shape_votes,
    unset_fake_temporarily,
)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """While this lasts, this process is `rank` of `size` that have met. The group is taken down afterwards, whatever
    happens.

    Not for a process that has joined others.
    """
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert not dist.is_initialized(), "this process is one of several already"
    if size > 1:
        join_fake(rank, size)
    try:
        with contextlib.ExitStack() as stack:
            for patch in _patches():
                stack.enter_context(patch)
            yield World(rank, size, rank, size, "fake")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()  # of this world


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """model.to(dtype), in place, for a model of fake tensors, whose parameters nn.Module.to cannot exchange."""
    cast_parameters: dict[nn.Parameter, nn.Parameter] = {}  # shared ones stay shared
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.is_floating_point():
                if p not in cast_parameters:
                    cast_parameters[p] = nn.Parameter(p.detach().to(dtype), p.requires_grad)
                module.register_parameter(name, cast_parameters[p])
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, b.to(dtype) if b.is_floating_point() else b)
    return model


def _patches() -> Iterator[contextlib.AbstractContextManager]:
    # A mesh reads the values of a tensor of ranks. FSDP2 makes meshes out of others in the midst of FakeTensorMode.
    yield replaced(DeviceMesh, "__init__", _not_fake(DeviceMesh.__init__))
    yield replaced(DeviceMesh, "mesh", property(_not_fake(DeviceMesh.mesh.fget)))

    # FSDP2 cuts every parameter in as many parts as there are ranks and looks at two of them: most of the time of a
    # large world.
    yield replaced(*chunking_of_fsdp(), _Chunks)

    # DDP is written in C++, reads the gradients' memory, and takes the results of collectives from futures that are
    # empty here.
    yield replaced(replicate, "DDP", BucketedReplicas)
    if votes := shape_votes():
        yield replaced(*votes, _all_know_their_shapes)


def _not_fake(function: Callable) -> Callable:
    @functools.wraps(function)
    def outside(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


class _Chunks:
    """torch.chunk's parts, and empty ones where it gives fewer than n, each made when it is asked for."""

    def __init__(self, tensor: Tensor, n: int, dim: int):
        self.tensor, self.dim, self.total = tensor, dim, tensor.size(dim)
        self.size = -(-self.total // n)

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.size
        if i and start >= self.total:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.size, self.total - start))


class BucketedReplicas(replicate.Replicas):
    """What DDP does, in Python: gradients are views of buckets that live as long as the model, filled in the order of
    the backward pass; on the last micro-batch each bucket is summed as soon as it is full. As many calls and bytes as
    DDP's from its third step on, when it has made its buckets anew. Raises UserError for a compression that only DDP
    can do.
    """

    def __init__(self, bare: nn.Module, group: dist.ProcessGroup, layout: Layout):
        super().__init__(bare)
        if layout.compress == "powersgd":
            raise UserError(
                "layout.compress=powersgd: what it sends is decided inside DDP and cannot be traced. Use none, bf16 "
                "or fp16."
            )
        self.group, self.last, self.scale = group, True, float(dist.get_world_size(group))
        self.wire = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(layout.compress)
        parameters = [p for p in bare.parameters() if p.requires_grad][::-1]
        for bucket in ddp_buckets(parameters, int(layout.bucket_mb * 2**20)):
            members = [parameters[i] for i in bucket]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            waiting = {id(p) for p in members}
            for p, part in zip(members, flat.split([p.numel() for p in members])):
                p.register_post_accumulate_grad_hook(
                    functools.partial(self._arrived, part.view_as(p), flat, waiting, frozenset(waiting))
                )

    def _arrived(self, view: Tensor, flat: Tensor, waiting: set[int], members: frozenset[int], p: nn.Parameter) -> None:
        if not self.last:
            return
        view.copy_(p.grad)
        p.grad = view
        waiting.discard(id(p))
        if not waiting:
            waiting |= members
            sent = flat if self.wire is None else flat.to(self.wire)
            dist.all_reduce(sent, group=self.group)
            flat.copy_(sent)
            flat /= self.scale

    def sync_on(self, last: bool) -> None:
        self.last = last


def _all_know_their_shapes(schedule: Any, stages: list, has_backward: bool, p2p_done: bool) -> None:
    for stage in stages:
        set_shapes_known(stage)
