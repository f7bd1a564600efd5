"""Whether what a model gives is finite, and which of its modules is the first whose weights or output are not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError

if TYPE_CHECKING:  # a configuration is read without torch
    from torch import Tensor, nn

MEND = "Give another checkpoint, or train it again with a smaller optimizer.lr or with train.clip_norm=1.0."


class NotFinite(UserError):
    """A model that has no answer: its weights or its logits are not finite."""


class _Spoiled(Exception):
    """The name of the module that gave something not finite."""


def spoiled(x: Tensor) -> Tensor:
    """A scalar on x's device, for which nothing waits: 0, or nan where any of x is not finite."""
    return (x * 0).sum()


def finite(out: Any) -> bool:
    """Whether all numbers are that a module gave: a tensor, or a tuple, list or dictionary with some."""
    if isinstance(out, dict | tuple | list):
        return all(map(finite, out.values() if isinstance(out, dict) else out))
    import torch

    if not hasattr(out, "is_floating_point") or not out.is_floating_point():
        return True
    total = out.detach().sum(dtype=out.dtype if out.itemsize >= 4 else torch.float32)  # needs no memory beside
    return math.isfinite(float(total)) or math.isfinite(float(spoiled(out.detach())))


def first_not_finite(model: nn.Module, call: Callable[[], Any] | None = None) -> str | None:
    """'weights of module NAME', else 'module NAME': the first whose output is not finite when `call` runs the model."""
    if weights := weights_not_finite(model.named_parameters()):
        return weights

    def see(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            if not finite(out):
                raise _Spoiled(name)

        return hook

    hooks = [module.register_forward_hook(see(name)) for name, module in model.named_modules() if name]
    try:
        if call is not None:
            call()
    except (_Spoiled, NotFinite) as e:
        return f"module {e}" if isinstance(e, _Spoiled) else None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """'weights of module NAME' for the first of these parameters that is not finite."""
    name = next((name for name, p in named if not finite(p.detach())), None)
    return None if name is None else f"weights of module {name.rpartition('.')[0] or name}"


def not_finite(name: str, path: Path | None, where: str | None, mend: str = MEND) -> NotFinite:
    """The error for a model called `name` whose weights are at `path`; where: as `first_not_finite` says."""
    step = re.search(r"step-(\d+)", path.resolve().name) if path else None
    about = ", ".join(filter(None, (f"step {int(step[1]):,}" if step else None, where)))
    return NotFinite(f"{name}: its logits are not finite{f' ({about})' if about else ''}. {mend}")
