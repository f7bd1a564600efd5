"""Speed and memory techniques, one function each, applied from outside in one order: attention kernel → checkpointing → compile.

A model does not know what was applied to it; parameter names stay as they are.
"""

from __future__ import annotations

import functools
import os
import shutil

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradus.errors import UserError
from gradus.layers import Attention, Block, get_kernel
from gradus.recipe.schema import Layout


def apply(model: nn.Module, layout: Layout) -> nn.Module:
    """The whole of the layout that concerns one process, in order. Returns the same module."""
    use_kernel(model, layout.attention, layout.chunk)
    use_checkpointing(model, layout.checkpointing)
    use_compile(model, layout.compile)
    return model


def use_kernel(model: nn.Module, name: str, chunk: int) -> None:
    """Every attention computes with this kernel (equal results: layers/kernels.py)."""
    kernel = get_kernel(name, chunk)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = kernel


# what selective checkpointing keeps: the results of matrix products and of attention, which cost most to compute again
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def use_checkpointing(model: nn.Module, mode: str) -> None:
    """Forget activations in the forward pass and compute them again in the backward pass (Chen et al. 2016).

    `full`: of every block. `selective`: of every block, but keep what matrix products and attention gave. `attention`: of the
    attention alone, whose scores are what grows with the square of the length.
    """
    if mode == "none":
        return
    kind = Attention if mode == "attention" else Block
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
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


def use_compile(model: nn.Module, mode: str) -> None:
    """Compile every block, in place: one graph serves all blocks of a kind, and heads and losses stay eager."""
    if mode == "none":
        return
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        raise UserError(f"layout.compile={mode}: compiling for a CPU needs a C++ compiler and there is none. Install g++ or set layout.compile=none.")
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(mode=None if mode == "default" else mode)
