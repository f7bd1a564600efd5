"""SimpleFSDP (Zhang et al. 2024, arXiv 2411.00284): what FSDP2 does, built from DTensor and torch.compile
alone.

Each parameter is split, and reading it gathers it: the model computes what is written in its file, as on one device.
FSDP2 knows by hooks when to gather, free, gather again and reduce; here all that is operators of one graph, which the
compiler sees whole. (The paper's own passes, which put collectives together and move them, are not here.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from gradus.layers import Block
from gradus.parallel.shard import DTYPES, reduced_in
from gradus.recipe.schema import Layout
from gradus.torch_private import compile_anew

Gather = Callable[[DTensor], Tensor]


def shard(model: nn.Module, mesh: DeviceMesh, layout: Layout, backend: str) -> None:
    """Split every parameter over the mesh along its first dimension, in place, and compile the model as one graph
    (section 3.1). What this process has compiled before is forgotten.

    mesh: one-dimensional, or (replicate, shard) for HSDP. layout: its reshard, param_dtype and reduce_dtype count.
    backend: of torch.compile. Names of parameters stay.
    """
    placements, shard_mesh = [*[Replicate()] * (mesh.ndim - 1), Shard(0)], mesh[mesh.mesh_dim_names[-1]]
    param_dtype = DTYPES[layout.param_dtype]
    dtypes = {"forward_dtype": param_dtype, "backward_dtype": reduced_in(layout)}

    def gather(p: DTensor) -> Tensor:
        """The whole parameter. Its backward pass is a reduce-scatter: gradients are summed over the processes, and each
        keeps its rows."""
        if mesh.ndim > 1:  # within a replica; replicas' gradients are summed after the last micro-batch
            local = p.to_local(grad_placements=[Partial(), Shard(0)])
            p = DTensor.from_local(local, shard_mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
        return p.redistribute(placements=[Replicate()], **dtypes).to_local(grad_placements=[Partial()])

    def gather_again(p: DTensor) -> Tensor:
        """Selective activation checkpointing of the gather alone: the whole is not kept for the backward pass. (By the
        compiler; eager PyTorch saves nothing here.)"""
        return checkpoint(gather, p, use_reentrant=False)

    read = gather_again if layout.reshard else gather
    computing: list[bool] = []  # while the model computes
    gathered: dict[DTensor, Tensor] = {}  # meanwhile, what is outside of blocks: read twice, it is summed once

    def read_once(p: DTensor) -> Tensor:
        if not computing:
            return read(p)
        if p not in gathered:
            gathered[p] = read(p)
        return gathered[p]

    @functools.cache
    def class_that_gathers(kind: type, names: tuple[str, ...], read: Gather) -> type:
        def whole(name: str) -> property:
            return property(lambda module: read(module._parameters[name]))

        return type(kind.__name__, (kind,), {"__module__": kind.__module__} | {name: whole(name) for name in names})

    def before(_: nn.Module, args: tuple) -> tuple:
        computing.append(True)
        return tuple(x.to(param_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def after(*_: object) -> None:
        computing.clear()
        gathered.clear()

    inside = {m for block in model.modules() if isinstance(block, Block) for m in block.modules()}
    parts: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        mine = dict(module.named_parameters(recurse=False))
        for name, p in mine.items():
            if p not in parts:
                part = distribute_tensor(p.detach(), mesh, placements, src_data_rank=None)
                parts[p] = nn.Parameter(part, p.requires_grad)
            module.register_parameter(name, parts[p])
        if mine:
            own = read if module in inside else read_once
            module.__class__ = class_that_gathers(type(module), tuple(mine), own)
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    compile_anew(model, backend)
