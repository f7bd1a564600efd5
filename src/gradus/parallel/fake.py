"""A world of any size in one process: a layout is built and stepped as one of its ranks, and nothing travels.

What a process computes, holds and sends is as it would be; what it would receive is not (a gathered weight is this process's part, and
memory as it was), so losses and gradients mean nothing. Under FakeTensorMode nothing is computed either, only shapes:

    with fake_world(1024) as world:
        mesh = Mesh.make(layout, world)
        with FakeTensorMode(), Traffic() as traffic:
            parallel = apply(models.build(config), layout, mesh)
            ...
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from gradus.parallel.world import World


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """While this lasts, this process is `rank` of `size` that have met. Gone afterwards, whatever happens."""
    # PyTorch's own tests trace large worlds with this group; private, the same from 2.11 to 2.13
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert not dist.is_initialized(), "this process is one of several already"
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _meshes_are_real(), _chunks_are_lazy():
            yield World(rank, size, rank, size, "fake")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _meshes_are_real() -> Iterator[None]:
    """A mesh reads the values of a tensor of ranks, which a fake tensor has not: meshes are made outside of FakeTensorMode, also those
    that FSDP2 makes of two others in the midst of it."""
    kept = {name: DeviceMesh.__dict__[name] for name in ("__init__", "mesh")}
    DeviceMesh.__init__ = _real(kept["__init__"])
    DeviceMesh.mesh = property(_real(kept["mesh"].fget))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(DeviceMesh, name, value)


def _real(function: Callable) -> Callable:
    @functools.wraps(function)
    def outside(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


@contextlib.contextmanager
def _chunks_are_lazy() -> Iterator[None]:
    """FSDP2 cuts every parameter in as many parts as there are ranks and looks at two of them: by far most of the time of a large world."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    kept = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = kept


class _Chunks:
    """torch.chunk's parts, with empty ones where it gives fewer than n, each made when it is asked for."""

    def __init__(self, tensor: Tensor, n: int, dim: int):
        self.tensor, self.dim, self.total = tensor, dim, tensor.size(dim)
        self.size = -(-self.total // n)

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.size
        if i and start >= self.total:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.size, self.total - start))
