"""Speed and memory techniques, one function each, applied from outside in one order: attention kernel, rounding or
fp8, context → experts → tensor → loss by chunks → pipeline → checkpointing → compile → shard → memory and values →
replicate.

A model does not know what was applied to it; parameter names stay as they are.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradus import models
from gradus.errors import UserError
from gradus.layers import Attention, Block, Targets, get_kernel, use_linears
from gradus.layers.capabilities import capabilities
from gradus.layers.linears import within
from gradus.layers.word_loss import Words, chunked_loss
from gradus.models.values import Values, materialise
from gradus.parallel.check import fits
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import DATA, Mesh
from gradus.parallel.observe import Observer
from gradus.parallel.qat import use_qat
from gradus.parallel.stages import Stages
from gradus.recipe.schema import Layout
from gradus.torch_private import FUSED_ATTENTION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply(
    model: nn.Module, layout: Layout, mesh: Mesh | None = None, *,
    device: torch.device | None = None, values: Values | None = None, qat: bool = False,
    stages: Stages | None = None, replicas: bool = True, observer: Observer = Observer(),
) -> Parallel:  # fmt: skip
    """Apply the whole layout, in order, to `model`, which is changed in place. Collective.

    A model on the meta device is given memory on `device`, for this process's part alone, and that part of `values`
    (None: whatever lies there). Without a mesh: one process. qat: train.qat, which is no matter of the layout. stages:
    of a pipeline, other ones than the layout's. replicas=False: what several processes hold is summed over none.
    observer: is told where each step is. Raises AssertionError where model and layout do not fit together;
    `parallel.check` reports that before.
    """
    assert not (reasons := list(fits(model.config, layout))), reasons
    mesh = mesh or Mesh.single()
    device = device or next(model.parameters()).device
    p = Parallel(model, layout, mesh, replicas, observer)
    use_kernel(model, layout.attention, layout.chunk)
    if qat:
        use_qat(model)
    if layout.precision == "fp8" and device.type != "meta":
        use_fp8(model, device)
    if mesh.size("context") > 1:
        from gradus.parallel.context import Context

        p.context = Context(model, mesh.group("context"), layout)
    if mesh.size("expert") > 1:
        from gradus.parallel.expert import expert_parallel, is_expert

        expert_parallel(model, mesh.sub("expert"))
        p.is_expert = is_expert
    if mesh.size("tensor") > 1:
        from gradus.parallel.tensor import loss_context, tensor_parallel

        tensor_parallel(model, mesh.sub("tensor"), layout)
        p.around = functools.partial(loss_context, layout)
    if layout.loss == "chunked":
        use_chunked_loss(model, mesh.sub("tensor") if mesh.size("tensor") > 1 else None, p)
    if mesh.size("pipeline") > 1:
        from gradus.parallel.pipeline import Pipeline

        p.pipeline = Pipeline(model, mesh.group("pipeline"), layout, device, stages)
        model = p.pipeline.model
    use_checkpointing(model, layout.checkpointing)
    use_compile(model, layout.compile, device, in_turn=p.pipeline is None)
    if mesh.size("shard") > 1:
        use_shard(p, model, device)
    if next(model.parameters()).is_meta:
        place = "cpu" if layout.offload else device
        materialise(model, place, values, *(p.pipeline.views if p.pipeline else ()))
    if replicas and mesh.size("shard") == 1 and (p.several or layout.replicate == "data_parallel"):
        use_replicas(p, model)
    if layout.shard_optimizer and mesh.size("replicate") > 1:
        from gradus.parallel.shard import OptimizerShards

        weights = [(h.name, h.local.data) for h in p.trainable]
        p.optimizer_shards = OptimizerShards(weights, mesh.group("replicate"))
    assert p.local_parameters, "every process must hold a part of the model"
    return p


def use_shard(p: Parallel, model: nn.Module, device: torch.device) -> None:
    """Apply FSDP2 over shard × expert × context: ranks that split experts or the sequence share the other weights;
    or SimpleFSDP over shard.

    Experts that are split are sharded over `shard` alone. With several replicas the shards are replicated (HSDP).
    """
    def over(*axes: str) -> DeviceMesh:
        mesh = p.mesh.sub(*axes)
        return p.mesh.devices["replicate", mesh.mesh_dim_names[0]] if p.mesh.size("replicate") > 1 else mesh

    p.summed_by_engine = (*DATA, "context")
    if p.layout.shard_with == "simple":
        from gradus.parallel import simple

        simple.shard(model, over("shard"), p.layout, backend(device))
        return
    from gradus.parallel.shard import shard

    shard(model, over("shard", "expert", "context"), p.layout, over("shard") if p.mesh.size("expert") > 1 else None)
    p.replicas.sync_on = model.set_requires_gradient_sync


def use_replicas(p: Parallel, model: nn.Module) -> None:
    """Replicate as layout.replicate says. DDP takes whole, plain parameters; where they are split, or the pipeline runs
    the backward pass, gradients are summed in buckets after it."""
    from gradus.parallel import replicate

    layout, mesh = p.layout, p.mesh
    group = mesh.group("replicate", "context")
    if layout.replicate == "data_parallel":
        p.replicas = replicate.Replicas(p.bare)
        p.replicas.model = nn.DataParallel(model)
    elif layout.local_sgd or layout.diloco:
        weights = [h.local.data for h in p.trainable]
        p.local_updates = replicate.LocalUpdates(layout, weights, mesh.group("replicate"), layout.bucket_mb * 2**20)
    elif group is None:
        return
    elif layout.replicate == "manual":
        p.replicas = replicate.ManualMPI(p.bare) if layout.transport == "mpi" else replicate.Manual(p.bare, group)
    elif layout.replicate == "parameter_server":
        p.replicas = replicate.ParameterServer(p.bare, group)
    elif mesh.size("expert", "tensor", "pipeline") == 1:
        p.replicas = replicate.DDP(p.bare, group, layout)
        p.summed_by_engine = ("replicate", "context")


def use_kernel(model: nn.Module, name: str, chunk: int) -> None:
    """Every attention computes with this kernel (equal results: layers/kernels.py)."""
    kernel = get_kernel(name, chunk)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = kernel


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """The blocks' Linears that are trained compute their three products in fp8, those alone whose widths are multiples
    of 16, as the products need. Names of parameters stay as they are. `Precision` has said whether the device can."""
    inside, convert = within(model, Block), capabilities(device).fp8

    def converted(name: str, linear: nn.Linear) -> nn.Module:
        fits = name.startswith(inside) and linear.weight.requires_grad
        return linear if not fits or any(size % 16 for size in linear.weight.shape) else convert(linear)

    use_linears(model, converted)


def use_chunked_loss(model: nn.Module, mesh: DeviceMesh | None, p: Parallel | None = None) -> None:
    """Where a task gives its targets, the head over words gives their loss in place of logits: `layers.word_loss`.

    mesh: that of tensor parallelism, which splits the head's rows. p: whose observer is told.
    """
    name = models.lookup(model.config.family).head
    head = model.get_submodule(name)
    plain, n, words = head.forward, len(head.weight), Words(len(head.weight))
    if mesh:
        words = Words(n, mesh.get_local_rank() * -(-n // mesh.size()), mesh.get_group())

    @functools.wraps(plain)
    def forward(x: Tensor) -> Tensor:
        if (targets := Targets.now()) is None:
            return plain(x)
        weight, bias = (t.to_local() if isinstance(t, DTensor) else t for t in (head.weight, head.bias))
        x = x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x
        observer = p.observer if p else Observer()
        observer.edge(name, "loss")
        loss = chunked_loss(x, weight, bias, targets, words)
        observer.gradients(name, getattr(loss.grad_fn, "gradients", ()))
        return loss

    head.forward = forward


# what selective checkpointing keeps: the results of matrix products and of attention, which cost most to compute again;
# of a product with a weight, which argument that is
_KEPT = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    torch.ops.gradus.grouped_mm.default: 1,
    torch.ops.aten.bmm.default: None,
    **{operator.default: None for operator in FUSED_ATTENTION},
}


def _policy(ctx, op, *args, **kwargs):
    """A frozen weight's product is not kept: it only goes into a sum, which alone is needed for a backward pass."""
    weight = _KEPT.get(op)
    kept = op in _KEPT and (weight is None or args[weight].requires_grad)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def use_checkpointing(model: nn.Module, mode: str) -> None:
    """Forget activations in the forward pass and compute them again in the backward pass (Chen et al. 2016).

    `full`: of every block. `selective`: of every block, but keep the results of matrix products and attention
    (also the scores, where a kernel writes them out).
    `attention`: of the attention alone, whose scores grow with the square of the length.
    """
    if mode == "none":
        return
    kind = Attention if mode == "attention" else Block
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    context = selective if mode == "selective" else {}
    for module in model.modules():
        if isinstance(module, kind):
            module.forward = _checkpointed(module.forward, context)


def _checkpointed(forward, context: dict):
    @functools.wraps(forward)
    def recomputing(*args, **kwargs):
        if not torch.is_grad_enabled():  # evaluation and decoding keep nothing anyway
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputing


def has_compiler() -> bool:
    """Of C++, which torch.compile needs for a CPU: $CXX, or its default."""
    return bool(shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")))


def backend(device: torch.device) -> str:
    """What compiles a model as one graph: where a CPU has no compiler, PyTorch, operator by operator."""
    return "aot_eager" if device.type == "cpu" and not has_compiler() else "inductor"


def use_compile(model: nn.Module, mode: str, device: torch.device, in_turn: bool = True) -> None:
    """Compile every block, in place: one graph serves all blocks of a kind, and heads and losses stay eager.

    in_turn: a micro-batch's backward pass comes before the next one's forward pass (not so in a pipeline).
    """
    if mode == "none":
        return
    on_cpu = device.type == "cpu"
    if on_cpu and not has_compiler():
        raise UserError(
            f"layout.compile={mode}: compiling for a CPU needs a C++ compiler and there is none. "
            "Install g++ or set layout.compile=none."
        )
    # CUDA graphs: a call of the model may reuse the memory of what the call before it returned
    if mode in ("reduce-overhead", "max-autotune") and in_turn and not on_cpu:
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(mode=None if mode == "default" else mode)
