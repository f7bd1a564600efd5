"""Expert parallelism: every process keeps a part of the experts, and tokens travel to them and back (Lepikhin et al.
2021, section 3.2; without its capacity: no token is dropped)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gradus import torch_private
from gradus.layers import ExpertLinear, MixtureOfExperts
from gradus.layers.moe import Experts
from gradus.torch_private import FakeTensor, all_to_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of every MixtureOfExperts over `mesh`, one-dimensional with the dimension `expert`, in place:
    their parameters become DTensors, Shard(0), under the names they had. All processes hold the same weights before.
    Not collective.

    Each process goes on with samples of its own. Every forward and backward pass is collective: all processes of the
    mesh do equally many, with whatever batches. An expert's gradient has the contributions of all processes of the mesh
    after the backward pass (`is_expert`); all other gradients have those of one.
    """
    n, rank = mesh.size(), mesh.get_local_rank()
    for mixture in [m for m in model.modules() if isinstance(m, MixtureOfExperts)]:
        for module in [m for m in mixture.experts.modules() if isinstance(m, ExpertLinear)]:
            module.local = DTensor.to_local
            for name, p in list(module.named_parameters(recurse=False)):
                local = p.detach().chunk(n)[rank].clone()  # so that the whole one can be freed
                placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                setattr(module, name, nn.Parameter(placed, requires_grad=p.requires_grad))
        mixture.dispatch = Exchange(mesh)


def is_expert(parameter: Tensor) -> bool:
    """Whether expert_parallel split this parameter: its gradient must not be summed over the expert axis."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("expert",)


class Exchange:
    """Rows to the processes that have their experts, through them, and back: `MixtureOfExperts.dispatch`."""

    def __init__(self, mesh: DeviceMesh):
        self.group, self.n = mesh.get_group(), mesh.size()

    @torch_private.uncompiled  # how many rows travel is a value
    def __call__(self, experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
        """x: (rows, d_model), sorted by expert, counts: (n_experts,) -> (rows, d_model)."""
        sent = counts.view(self.n, -1)  # (processes, experts of each)
        received = all_to_all(sent.contiguous(), None, None, self.group)  # (processes, experts here)
        if isinstance(counts, FakeTensor) or counts.is_meta:  # no values: as if all experts were equally loaded
            to = back = [x.shape[0] // self.n + (i < x.shape[0] % self.n) for i in range(self.n)]
        else:
            to, back = torch.stack((sent.sum(1), received.sum(1))).tolist()
        rows = all_to_all(x.contiguous(), back, to, self.group)  # (rows here, d_model), by process, then by expert
        expert = torch.arange(received.shape[1], device=x.device).repeat(self.n)
        expert = expert.repeat_interleave(received.flatten(), output_size=rows.shape[0])  # (rows here,)
        order = expert.argsort(stable=True)
        rows = experts(rows[order], received.sum(0))
        return all_to_all(rows[order.argsort()], to, back, self.group)
