"""Tensor parallelism: every matrix product split over the processes of one mesh axis (Shoeybi et al. 2019), and what
lies between the products split along the sequence (Korthikanti et al. 2022, section 4.2.2). Parameters become DTensors;
the models are not edited.

    token embedding          rows of the vocabulary                    gives the stream
    to_q, to_k, to_v         heads; their input is gathered once       give plain tensors: this process's heads
    q_norm, k_norm           whole, of this process's heads: their gradients are parts of a sum
    up, gate                 rows of d_ff; their input gathered once   give DTensors split along d_ff
    to_out, down             columns: the processes' sums              give the stream
    output projection        rows of the vocabulary                    gives logits, see `loss_context`
    a family's own           as its `Family.tensor` says
    an adapter               beside what is split by rows a whole and b by rows, else a by columns and b whole
    all else                 whole on every process: norms, positions, token types, patches, class token, pooler,
                             classifiers

The stream is the hidden states from block to block: a DTensor (batch, seq, d_model), split along the sequence with
`layout.sequence_parallel`, else whole on every process. As a DTensor it knows its whole length, so that any length may
be split. After the last norm (for BERT: after the last block) tensors are plain and whole again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.overrides import TorchFunctionMode

from gradus import models, torch_private
from gradus.layers import Attention, Cache, FeedForward, GatedFeedForward, LoRALinear
from gradus.parallel.replicate import as_one
from gradus.recipe.schema import Layout
from gradus.torch_private import FakeTensor

# ---------------------------------------------------------------- the model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """Split a model of any family over a one-dimensional mesh, in place. Collective; the mesh's first process gives the
    weights.

    Every parameter becomes a DTensor on `mesh` under its old name; tied ones stay one Parameter. All processes of the
    mesh must be given the same inputs, and start from one state of the random generators.

    Where each process sees a part of the sequence, gradients of parameters that are whole on every process come out as
    parts of a sum. `sum_partial_gradients`, or fully_shard over another axis, adds them up. All other gradients are
    placed as their parameters.
    """
    stream = Shard(1) if layout.sequence_parallel else Replicate()
    family = models.lookup(model.config.family)
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention):
            _split_attention(module, mesh, stream, n_inputs=2 if name.endswith("cross") else 1)
        elif isinstance(module, FeedForward | GatedFeedForward):
            _split_feedforward(module, mesh, stream)
        elif isinstance(module, nn.Dropout):
            module.forward = _dropout(module, module.forward)
        elif way := next((way for end, way in family.tensor.items() if name.endswith(end)), None):
            if way == "gather":
                _gather(module, mesh, (stream,))
            else:
                row = RowwiseParallel(output_layouts=stream, use_local_output=False)
                _split(module, mesh, row if way == "row" else ColwiseParallel())

    tokens = {model.get_submodule(name): None for name in family.tokens}  # a shared one once
    head = model.get_submodule(family.head) if family.head and hasattr(model, family.head.split(".")[0]) else None
    tied = next((module for module in tokens if head is not None and head.weight is module.weight), None)
    plain = bool(family.entry)  # something plain is added before it
    for module in tokens:
        out = Replicate() if plain else stream
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=out, use_local_output=plain)
        parallelize_module(module, mesh, style)
        module.forward = _lookup(module, mesh)
    for module in {model.get_submodule(name): None for name in family.entry}:
        if isinstance(module, nn.Dropout):
            cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=stream, use_local_output=False)
        else:
            cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream, use_local_output=False)
        parallelize_module(module, mesh, cut)
    if head is not None:
        _split_rows(head, mesh)
    if tied is not None:
        head.weight = tied.weight
    for module in list(model.modules()):
        _keep_whole(module, mesh)
    for stack in family.stacks:
        module = model.get_submodule(stack.norm) if stack.norm else model.get_submodule(stack.blocks)[-1]
        parallelize_module(module, mesh, PrepareModuleOutput(output_layouts=stream, desired_output_layouts=Replicate()))
    if hasattr(model, "new_cache"):
        model.new_cache = _cache_of_local_heads(model.new_cache, mesh.size())


def _split_attention(module: Attention, mesh: DeviceMesh, stream: Shard | Replicate, n_inputs: int) -> None:
    _gather(module, mesh, (stream, Replicate())[:n_inputs])  # the second: the encoder's output
    for linear in (module.to_q, module.to_k, module.to_v):
        _split(linear, mesh, ColwiseParallel())
    _split(module.to_out, mesh, RowwiseParallel(output_layouts=stream, use_local_output=False))
    for norm in filter(None, (module.q_norm, module.k_norm)):
        distribute_module(norm, mesh, None, _of_local_heads, lambda norm, x, mesh: x.to_local())
    if module.dropout:
        plain, own = module.forward, _own_random_numbers(module.forward, mesh)

        @functools.wraps(plain)
        def forward(*args, **kwargs) -> Tensor:
            return (own if module.training else plain)(*args, **kwargs)

        module.forward = forward


def _of_local_heads(norm: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(*inputs, mesh, (Shard(1),))  # (batch, heads, seq, head_dim)


def _split_feedforward(module: FeedForward | GatedFeedForward, mesh: DeviceMesh, stream: Shard | Replicate) -> None:
    _gather(module, mesh, (stream,))
    for name in ("gate", "up"):
        if hasattr(module, name):  # DTensors: n need not divide d_ff
            _split(getattr(module, name), mesh, ColwiseParallel(use_local_output=False))
    _split(module.down, mesh, RowwiseParallel(output_layouts=stream, use_local_output=False))


def _split(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Split a Linear or an Embedding, and of an adapted Linear the two matrices along the same dimension."""
    if not isinstance(module, LoRALinear):
        parallelize_module(module, mesh, style)
        return
    children, rows = dict(module.named_children()), isinstance(style, ColwiseParallel)
    for name in children:  # the style would take them for its own
        delattr(module, name)
    parallelize_module(module, mesh, style)
    for name, child in children.items():
        module.add_module(name, child)
    placements = (Replicate(), Shard(0)) if rows else (Shard(1), Replicate())
    for linear, placement in zip((module.a, module.b), placements):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [placement]), linear.weight.requires_grad)
    if not rows:
        module.added = _added_in_parts(module, mesh)


def _added_in_parts(module: LoRALinear, mesh: DeviceMesh) -> Callable[[DTensor], DTensor]:
    """Each process multiplies its columns, and the sum is that of `to_out` or `down`."""

    def added(x: DTensor) -> DTensor:
        low = F.linear(module.dropout(x).to_local(), module.a.weight.to_local())  # (batch, seq, rank), a part
        part = F.linear(low, module.b.weight.to_local(grad_placements=(Partial(),))) * module.scale
        return DTensor.from_local(part, mesh, (Partial(),))  # (batch, seq, d_model)

    return added


def _gather(module: nn.Module, mesh: DeviceMesh, layouts: tuple[Shard | Replicate, ...]) -> None:
    """Make inputs whole on every process, as DTensors. The backward pass sums the processes' gradients of them, once.
    """
    wanted = (Replicate(),) * len(layouts)
    prepare = functools.partial(PrepareModuleInput, input_layouts=layouts, desired_input_layouts=wanted)
    if layouts[0] == Replicate():  # nothing to gather, and so nothing to sum, unless they are made DTensors here
        parallelize_module(module, mesh, prepare(use_local_output=True))
    parallelize_module(module, mesh, prepare(use_local_output=False))


def _lookup(module: nn.Embedding, mesh: DeviceMesh) -> Callable[[DTensor], DTensor]:
    """Each process looks up what lies in its rows. (DTensor's own lookup does too, but its gradient is as large as the
    whole table.)"""
    first = mesh.get_local_rank() * -(-module.num_embeddings // mesh.size())

    def forward(ids: DTensor) -> DTensor:
        rows, weight = ids.to_local() - first, module.weight.to_local()  # (batch, seq), (vocab / n, d_model)
        elsewhere = (rows < 0) | (rows >= len(weight))
        embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0.0)
        return DTensor.from_local(embedded, mesh, (Partial(),))  # (batch, seq, d_model)

    return forward


def _split_rows(head: nn.Linear, mesh: DeviceMesh) -> None:
    """As `ColwiseParallel`, which takes no output but logits: with layout.loss=chunked it is their loss."""

    def split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)]), p.requires_grad))

    distribute_module(head, mesh, split, _as_dtensors)
    head.register_forward_hook(_logits)


def _as_dtensors(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
    return tuple(x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (Replicate(),)) for x in inputs)


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """What no other rule has made a DTensor is whole on every process. A module without children computes with
    DTensors, of plain inputs too; a projection's result is a plain tensor."""

    def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local() if isinstance(module, nn.Linear) else output

    rest = {name: p for name, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
    if rest and next(module.children(), None) is None:
        distribute_module(module, mesh, None, _as_dtensors, leave)
    else:  # a model's own parameters: ViT's class token and positions
        for name, p in rest.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Replicate()]), p.requires_grad))


def _cache_of_local_heads(new_cache: Callable[..., Cache], n: int) -> Callable[..., Cache]:
    @functools.wraps(new_cache)
    def new(*args, **kwargs) -> Cache:
        cache = new_cache(*args, **kwargs)
        for layer in cache.layers:
            # (batch, n_kv_heads / n, max_len, head_dim)
            layer.k, layer.v = (x[:, : x.shape[1] // n].contiguous() for x in (layer.k, layer.v))
        return cache

    return new


# ---------------------------------------------------------------- dropout


def _dropout(module: nn.Dropout, drop: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Dropout with one mask on all processes for a tensor that is whole on each, and a mask of its own for each part of
    a split one."""

    def forward(x: Tensor) -> Tensor:
        if not (module.training and module.p) or not isinstance(x, DTensor):
            return drop(x)
        split = any(isinstance(placement, Shard) for placement in x.placements)
        own = _own_random_numbers(drop, x.device_mesh) if split else drop
        return DTensor.from_local(own(x.to_local()), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())

    return forward


def _own_random_numbers(function: Callable, mesh: DeviceMesh) -> Callable:
    """`function` with random numbers of this process's own. Afterwards the generators of all processes are in the same
    state again.

    The numbers follow from the generators' state alone, so that recomputation and a resumed run draw them again.
    """

    @torch_private.uncompiled
    def call(*args, **kwargs) -> Any:
        seed = torch.randint(2**62, ())  # the same on every process
        if isinstance(seed, FakeTensor):
            return function(*args, **kwargs)
        with torch.random.fork_rng([torch.cuda.current_device()] if mesh.device_type == "cuda" else []):
            torch.manual_seed(int(seed) + mesh.get_local_rank())
            return function(*args, **kwargs)

    return call


# ---------------------------------------------------------------- loss and gradients


class _SplitLoss(TorchFunctionMode):
    """Within it logits stay split along the vocabulary, and their cross entropy is a plain tensor, the same on every
    process."""

    active = False

    def __enter__(self):
        type(self).active = True
        return super().__enter__()

    def __exit__(self, *args):
        type(self).active = False
        return super().__exit__(*args)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.cross_entropy and isinstance(args[0], DTensor):
            assert kwargs["reduction"] != "mean" and kwargs["weight"] is None, "sums of losses or each, unweighted"
            return _cross_entropy(*args, kwargs["reduction"], kwargs["ignore_index"], kwargs["label_smoothing"])
        return function(*args, **(kwargs or {}))


def loss_context(layout: Layout) -> contextlib.AbstractContextManager:
    """The context for the forward and backward pass of a training step.

    With `layout.vocab_parallel` the logits are, within it, DTensors split along the vocabulary, for `F.cross_entropy`
    with reduction="sum" or "none" (label smoothing too). Outside of it, or without `layout.vocab_parallel`, logits are
    plain and whole.
    """
    stack = contextlib.ExitStack()
    if layout.tensor > 1 and layout.vocab_parallel:
        stack.enter_context(loss_parallel())
        stack.enter_context(_SplitLoss())
    return stack


def _logits(module: nn.Module, inputs: tuple, logits: Tensor) -> Tensor:
    if _SplitLoss.active or not isinstance(logits, DTensor):  # a loss by chunks is plain
        return logits
    return logits.redistribute(placements=[Replicate()]).to_local()


def _cross_entropy(
    logits: DTensor, targets: Tensor, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """logits (n, vocab) split along the vocabulary, targets (n,) -> the summed loss, a plain scalar, or for
    reduction="none" each (n,).

    PyTorch's parallel loss has no label smoothing; this adds its part, the cross entropy to the uniform distribution
    (Szegedy et al. 2016, section 7).
    """
    loss = F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignore_index).full_tensor()
    if not label_smoothing:
        return loss
    highest = logits.detach().amax(-1, keepdim=True).redistribute(placements=[Replicate()])  # (n, 1)
    total = (logits - highest).exp().sum(-1).full_tensor()  # (n,)
    mean = logits.sum(-1).full_tensor() / logits.shape[-1]
    uniform = total.log() + highest.to_local()[:, 0] - mean  # (n,)
    uniform = uniform.masked_fill(targets == ignore_index, 0.0)
    return (1 - label_smoothing) * loss + label_smoothing * (uniform.sum() if reduction == "sum" else uniform)


def sum_partial_gradients(model: nn.Module) -> None:
    """Add up, in one all-reduce a dtype, the gradients that are parts of a sum over the mesh of `tensor_parallel`, so
    that all are placed as their parameters. Once a step, after the last backward pass. Collective over that mesh."""
    parts: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in model.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            assert p.device_mesh.ndim == 1, "fully_shard adds up the gradients itself"
            parts.setdefault(p.grad.dtype, []).append(p)
    for parameters in parts.values():
        local = [p.grad.to_local() for p in parameters]
        with as_one(local) as flat:
            dist.all_reduce(flat, group=parameters[0].device_mesh.get_group())
        for p, g in zip(parameters, local):
            p.grad = DTensor.from_local(g, p.device_mesh, p.placements)
