"""Floating-point operations, and the peaks to set them against.

Convention: one multiply-add is two operations. *Model* operations are those of the paper's formulas: attention's full
matrix (causal kernels do about half of it), no recomputation, no padding (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gradus import hardware, models
from gradus.parallel.apply import use_kernel
from gradus.torch_private import FLASH_CPU, FLASH_CPU_BACKWARD

if TYPE_CHECKING:
    from gradus.tasks.base import Task
    from gradus.train.session import Session


# PyTorch's counter knows the fused attention of GPUs only and takes a CPU's for nothing, and does not know our own
# operators. All get shapes; each row takes one expert.
_MORE = {
    FLASH_CPU: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    FLASH_CPU_BACKWARD: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
    torch.ops.gradus.grouped_mm: lambda x, weights, *_, **__: 2 * x[0] * weights[1] * weights[2],
    torch.ops.gradus.grouped_outer: lambda x, y, *_, **__: 2 * x[0] * x[1] * y[1],
}


def count_flops(function: Callable[[], Any]) -> int:
    """The operations of matrix products, convolutions and attention that `function()` does, backward passes in it
    included.

    All that is done counts: also what checkpointing computes again, and the scores that a fused attention's backward
    pass computes again (naive attention keeps them). A causal kernel counts in full. Works on real, fake and meta
    tensors.
    """
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        function()
    return counter.get_total_flops()


# ---------------------------------------------------------------- of a run


def for_run(session: Session) -> tuple[float | None, float | None]:
    """(model operations of a training step a token, the device's peak in operations a second). Tokens as in `n_tokens`:
    without padding.

    Both None, and nothing is counted, where the peak of this device at this precision is not known.
    """
    peak = peak_flops(session)
    return (None, None) if peak is None else (flops_per_token(session.task), peak)


def flops_per_token(task: Task) -> float:
    """Forward and backward pass over the task's training samples, counted on meta tensors: nothing is computed.

    Samples of one length need one; ragged ones are counted at the middles of four equal parts of the sorted lengths,
    each alone.
    """
    data = task.splits["train"]
    lengths = getattr(data, "lengths", None)
    chosen = np.array([0])
    if lengths is not None:
        lengths = np.asarray(lengths)
        lengths = lengths.sum(-1) if lengths.ndim > 1 else lengths
        if lengths.min() < lengths.max():
            chosen = np.argsort(lengths, kind="stable")[(2 * np.arange(4) + 1) * len(lengths) // 8]
    if getattr(task.recipe.data, "pad", None) == "max_length":  # padding is no work of the model
        task = copy.copy(task)
        task.recipe = task.recipe.model_copy(update={"data": task.recipe.data.model_copy(update={"pad": "longest"})})

    model = models.build(task.recipe.model, device="meta")
    use_kernel(model, "naive", 0)
    operations = tokens = 0
    for i in chosen:
        sample = data[int(i)]
        if task.prepare is not None:
            sample = task.prepare(sample, np.random.Generator(np.random.PCG64(0)))
        batch = task.to_device(task.collate([sample]), torch.device("cpu"))
        tokens += batch["n_tokens"]
        operations += count_flops(lambda batch=to_meta(batch): sum(task.losses(model, batch).values()).backward())
    return operations / tokens


def to_meta(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch without values. How many places a selection holds is a value, so it becomes a tuple of indices, whose
    shapes say it."""
    batch = dict(batch)
    if isinstance(batch.get("select"), Tensor):
        batch["select"] = tuple(part.to("meta") for part in batch["select"].nonzero(as_tuple=True))
    return {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in batch.items()}


# ---------------------------------------------------------------- peaks


def peak_flops(session: Session) -> float | None:
    """The dense peak in operations a second of the session's device, in the numbers that its matrix products are
    computed in; with fp8 in bf16. None: not known, never guessed.

    From the hardware file, by whole names: a partition (MIG), a laptop's or a cut-down card has another peak and
    another name.
    """
    if session.device.type != "cuda":
        return None
    layout = session.recipe.layout
    numbers = layout.precision.removeprefix("pure_").replace("fp8", "bf16")
    device = hardware.by_driver(torch.cuda.get_device_name(session.device))
    return device and device.peaks.get("tf32" if numbers == "fp32" and layout.tf32 else numbers)
