"""In which numbers a step is computed: applied around the model, never inside it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradus.errors import UserError, need
from gradus.layers.capabilities import capabilities
from gradus.recipe.axes import AXES
from gradus.torch_private import infinities

if TYPE_CHECKING:  # it takes half a second, which a plan need not wait for
    from gradus.parallel.engine import Parallel

HALF = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16,
    "pure_bf16": torch.bfloat16, "pure_fp16": torch.float16,
}  # fmt: skip


class Precision:
    """`fp32`; `bf16` and `fp16` keep fp32 weights and compute matrix products in half precision (autocast; fp16 with
    loss scaling); `fp8` is `bf16`, and `parallel.apply` has the products of the blocks' Linears in fp8; `pure_bf16` and
    `pure_fp16` cast the weights and the optimizer's state too (no master copy, no scaling)."""

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device
        self.pure = name.startswith("pure_")
        self.dtype = HALF.get(name, torch.float32)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if self.scaler:  # makes the scale, also where this process never sees the loss (stages of a pipeline)
            self.scaled(torch.zeros((), device=device))
        on_gpu = device.type == "cuda"
        if name.endswith("bf16") and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            instead = name.replace("bf16", "fp16")
            raise UserError(f"layout.precision={name}: this GPU has no bf16. Use layout.precision={instead}.")
        if name == "fp8":
            if capabilities(device).fp8 is None or (on_gpu and torch.cuda.get_device_capability(device) < (8, 9)):
                raise UserError(
                    "layout.precision=fp8 needs a CUDA device of capability 8.9 or more (Ada, Hopper, Blackwell). Use "
                    "layout.precision=bf16."
                )
            if on_gpu:
                need("torchao", "fp8", "layout.precision=fp8")

    def cast(self, model: nn.Module) -> nn.Module:
        return model.to(self.dtype) if self.pure else model

    def cast_batch(self, batch: dict) -> dict:
        """Floating-point inputs (images) in the weights' own type."""
        if not self.pure:
            return batch
        return {k: v.to(self.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}

    def autocast(self):
        if self.pure or self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """What is differentiated: fp16 gradients would underflow."""
        return self.scaler.scale(loss) if self.scaler else loss

    def unscale(self, optimizer: torch.optim.Optimizer, parallel: Parallel) -> None:
        if self.scaler:
            self.scaler.unscale_(optimizer)
            stepped = {id(local) for _, local in parallel.trained()}
            for own in parallel.local_parameters:  # what others step counts in the norm too
                if id(own.local) not in stepped and own.local.grad is not None:
                    own.local.grad.div_(self.scaler.get_scale())
            for flag in infinities(self.scaler, optimizer):
                parallel.sum(flag, *AXES).clamp_(max=1.0)  # where one skips, all do: fused kernels at 1 alone

    def step(self, optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
        """Step, unless `bad` (a float scalar on the device: 1 where the gradient is not finite). The fused kernels
        decide that on the device, without a wait for it."""
        if self.scaler:
            self.scaler.step(optimizer)  # skips by its own count of infinities
            self.scaler.update()
            return
        # For weights that FSDP keeps on the host: PyTorch would copy `bad` there without waiting, and step by a value
        # that has not arrived yet.
        optimizer.found_inf = bad.to(optimizer.param_groups[0]["params"][0].device)
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf

    def forget(self) -> None:
        """The step under way is thrown away: the scaler stands before it."""
        if self.scaler:
            state, self.scaler = self.scaler.state_dict(), torch.amp.GradScaler(self.device.type)
            self.scaled(torch.zeros((), device=self.device))
            self.scaler.load_state_dict(state)

    def state(self) -> dict:
        return self.scaler.state_dict() if self.scaler else {}

    def load_state(self, state: dict) -> None:
        if self.scaler and state:
            self.scaler.load_state_dict(state)
