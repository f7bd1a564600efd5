"""Gathers and scatters of sharded weights over gloo, as sends between all pairs of processes.

gloo's own all-gather and reduce-scatter copy what they send into new buffers in every call: with two processes and
200 MB they take three times as long, and their memory is a multiple of what is sent.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradus.parallel.traffic import Traffic


class _Allocates:
    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """For `FSDPModule.set_custom_all_gather`. output_tensor: (n · numel,), of which this process's part is
    input_tensor, (numel,)."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts, rank = output_tensor.view(group.size(), -1), group.rank()
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        with Traffic.as_one("all_gather", output_tensor.nbytes, group.size()):
            _exchange([(r, parts[rank], part) for r, part in enumerate(parts) if r != rank], group)


class ReduceScatter(_Allocates):
    """For `FSDPModule.set_custom_reduce_scatter`: output_tensor, (numel,), becomes the sum over the processes of their
    part of input_tensor, (n · numel,), in the order of the ranks."""

    def __init__(self):
        self.received = np.empty(0, np.uint8)  # kept for the next call; no tensor, so not counted as the step's

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        n, rank = group.size(), group.rank()
        parts = list(input_tensor.view(n, -1))
        size = (n - 1) * output_tensor.nbytes
        if self.received.nbytes < size:
            self.received = np.empty(size, np.uint8)
        received = torch.from_numpy(self.received[:size]).view(output_tensor.dtype).view(n - 1, -1)
        others = [r for r in range(n) if r != rank]
        with Traffic.as_one("reduce_scatter", input_tensor.nbytes, n):
            _exchange([(r, parts[r], into) for r, into in zip(others, received)], group)
        for r, part in zip(others, received):
            parts[r] = part
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor += part


def _exchange(pairs: list[tuple[int, Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """pairs: (rank in the group, what it is sent, where to put what it sends)."""
    operations = []
    for peer, mine, theirs in pairs:
        operations += [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
