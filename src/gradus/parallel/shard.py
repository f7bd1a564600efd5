"""Weights, gradients and optimizer state split over processes: FSDP2, and ZeRO-1 for replicas."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradus.layers import Block
from gradus.layers.moe import Experts
from gradus.parallel import gloo
from gradus.parallel.replicate import as_one
from gradus.recipe.schema import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


def shard(model: nn.Module, mesh: DeviceMesh, layout: Layout, experts: DeviceMesh | None = None) -> None:
    """Apply FSDP2 in place to every block, to each large end (`ends`), then to the rest as the root (Zhao et al. 2023;
    Rajbhandari et al. 2020: ZeRO-3; ZeRO-2 with layout.reshard=false).

    mesh: one-dimensional, or (replicate, shard) for HSDP. experts: the mesh of the experts' weights where expert
    parallelism has split them. Each layer's experts are then a unit of their own, and their gradients already hold the
    contributions of all expert-parallel processes.

    Gradients are summed, since the loss's shares are already divided by global counts.
    """
    # of logits that are a view: nothing is done to them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    on_gpu = mesh.device_type == "cuda"
    options = {
        "mesh": mesh,
        "reshard_after_forward": layout.reshard,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[layout.param_dtype],
            reduce_dtype=reduced_in(layout),
            cast_forward_inputs=layout.param_dtype is not None,
        ),
    }
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
    layers = [m for m in model.modules() if isinstance(m, Experts)]
    parts = {p for layer in layers for p in layer.parameters()}
    own = mesh if experts is None else experts
    n = own.size(own.ndim - 1)
    options["shard_placement_fn"] = lambda p: _across(p, n) if p in parts else None
    for layer in layers if experts is not None else ():
        fully_shard(layer, **{**options, "mesh": experts})
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, **options)
    for end in ends(model) if layout.pipeline == 1 else ():
        fully_shard(end, **options)
    fully_shard(model, **options)
    gather, scatter = gloo.AllGather(), gloo.ReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if dist.get_backend() == "gloo":
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)


def reduced_in(layout: Layout) -> torch.dtype | None:
    """Gradients of bf16 weights would be reduced in bf16; their sum is worth four bytes."""
    return DTYPES[layout.reduce_dtype or ("fp32" if layout.param_dtype else None)]


def ends(model: nn.Module) -> list[nn.Module]:
    """Embeddings of a vocabulary and projections to one, so that they are gathered only while they are used.

    Tied ones are not among them: a weight that the first and the last layer share stays with the root, gathered as long
    as either may need it.
    """
    sizes = {getattr(model.config, name, None) for name in ("vocab_size", "target_vocab_size")}
    layers = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear) and m.weight.shape[0] in sizes]
    inside = {m for block in model.modules() if isinstance(block, Block) for m in block.modules()}
    return [m for m in layers if m not in inside and sum(m.weight is other.weight for other in layers) == 1]


def _across(parameter: Tensor, n: int) -> Shard:
    """Where n processes cut a parameter of experts: between experts, or along the first dimension that n divides. FSDP2
    pads the first: 8 experts cut into 64 parts would be no smaller than in 8."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(next((i for i, size in enumerate(local.shape) if size % n == 0), 0))


class OptimizerShards:
    """ZeRO-1 (Rajbhandari et al. 2020, section 5.1): each replica steps a part of the weights and sends it to the
    others.

    Whole parameters are dealt out, the largest first, each to the replica that has least so far.
    """

    def __init__(self, weights: list[tuple[str, Tensor]], group: dist.ProcessGroup):
        self.group, size = group, dist.get_world_size(group)
        load = [0] * size
        self.owner: dict[str, int] = {}
        for name, weight in sorted(weights, key=lambda pair: (-pair[1].numel(), pair[0])):
            self.owner[name] = load.index(min(load))
            load[self.owner[name]] += weight.numel()
        self.parts = [[w for name, w in weights if self.owner[name] == r] for r in range(size)]
        self.rank = dist.get_group_rank(group, dist.get_rank())

    def mine(self, name: str) -> bool:
        return self.owner[name] == self.rank

    @torch.no_grad()
    def send_weights(self) -> None:
        """After the step: every replica sends what it stepped."""
        for owner, part in enumerate(self.parts):
            if part:
                with as_one(part) as flat:
                    dist.broadcast(flat, group=self.group, group_src=owner)
