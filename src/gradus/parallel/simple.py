"""SimpleFSDP (Zhang et al. 2024, arXiv 2411.00284): what FSDP2 does, of DTensor and the compiler alone.

Each parameter is split, and reading it gathers it: the model computes what is written in its file, as on one device.
FSDP2 knows by hooks when to gather, free, gather again and reduce; here all that is operators of one graph, which the
compiler sees whole and may put together and move.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from gradus.parallel.shard import DTYPES, reduced_in
from gradus.recipe.schema import Layout

Gather = Callable[[DTensor], Tensor]


def shard(model: nn.Module, mesh: DeviceMesh, layout: Layout, backend: str) -> None:
    """Split every parameter over the mesh along its first dimension, in place, and compile the model as one graph
    (section 3.1).

    mesh: one-dimensional, or (replicate, shard) for HSDP. backend: of torch.compile. Names of parameters stay.
    """
    own, shards = [*[Replicate()] * (mesh.ndim - 1), Shard(0)], mesh[mesh.mesh_dim_names[-1]]
    computed = DTYPES[layout.param_dtype]
    dtypes = {"forward_dtype": computed, "backward_dtype": reduced_in(layout)}

    def gather(p: DTensor) -> Tensor:
        """The whole parameter. Backwards: a process's share of its gradient, summed over all and cut as `p` is."""
        if mesh.ndim > 1:  # each replica by itself; the sums over replicas, of parts, come after the backward pass
            local = p.to_local(grad_placements=[Partial(), Shard(0)])
            p = DTensor.from_local(local, shards, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
        return p.redistribute(placements=[Replicate()], **dtypes).to_local(grad_placements=[Partial()])

    def gather_again(p: DTensor) -> Tensor:
        """Selective activation checkpointing of the gather alone: the whole is not kept for the backward pass."""
        return checkpoint(gather, p, use_reentrant=False)

    whole: dict[DTensor, Tensor] = {}  # tied weights while the model computes, so that their gradients are summed once

    def gather_once(p: DTensor) -> Tensor:
        if p not in whole:
            whole[p] = keeping(p)
        return whole[p]

    uses = collections.Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    keeping = gather_again if layout.reshard else gather
    parts: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        mine = dict(module.named_parameters(recurse=False))
        for name, p in mine.items():
            if p not in parts:
                part = distribute_tensor(p.detach(), mesh, own, src_data_rank=None)
                parts[p] = nn.Parameter(part, p.requires_grad)
            module.register_parameter(name, parts[p])
        if mine:
            how = gather_once if any(uses[p] > 1 for p in mine.values()) else keeping
            module.__class__ = _gathering(type(module), tuple(mine), how)
    if computed:
        model.register_forward_pre_hook(lambda _, args: tuple(x.to(computed) if _is_float(x) else x for x in args))
    model.register_forward_hook(lambda *_: whole.clear())
    torch.compiler.reset()  # graphs of a model before this one count towards the compiler's limit
    model.compile(fullgraph=True, backend=backend)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@functools.cache
def _gathering(kind: type, names: tuple[str, ...], gather: Gather) -> type:
    """A subclass in which reading these parameters gathers them."""

    def read(name: str) -> property:
        return property(lambda module: gather(module._parameters[name]))

    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | {name: read(name) for name in names})
