"""PyTorch's own optimizers, fused, with weight decay only where it belongs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.recipe.schema import Optimizer, Recipe


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices and tables of embeddings decay; biases, norms, and ViT's class token and positions do not."""
    special = any(part in name for part in ("class_token", "positions", "norm"))
    return parameter.ndim >= 2 and not special and not name.endswith("bias")


def check_eps(recipe: Recipe) -> None:
    """Raises UserError where Adam's eps is below what fp16 holds as a normal number, and weights and moments are in it:
    second moments that are rounded to zero then leave a quotient of first moments by next to nothing."""
    eps, normal = getattr(recipe.optimizer, "eps", 1.0), torch.finfo(torch.float16).smallest_normal
    if recipe.layout.precision == "pure_fp16" and eps < normal:
        enough = 10.0 ** math.ceil(math.log10(normal))
        why = f"too small for layout.precision=pure_fp16, in which second moments below {2**-25:.0e} are zero"
        raise UserError(f"optimizer.eps={eps:g}: {why}. Set optimizer.eps={enough:g}, say, or layout.precision=fp16.")


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: Optimizer) -> torch.optim.Optimizer | None:
    """The recipe's optimizer over named parameters (this process's parts of them), in two groups: decayed and not. None
    where there are no parameters: another process steps them."""
    named = [(name, p) for name, p in named if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": getattr(config, "weight_decay", 0.0)},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        return None
    fused = all(p.device.type in ("cpu", "cuda", "mps") for _, p in named)
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
        # the fused kernel allocates these without a value, which stays if step 1 is skipped
        for p in (p for _, p in named if config.momentum):
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def state_tensors(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, e.g. `exp_avg.blocks.0.mlp.up.weight`."""
    if optimizer is None:
        return {}
    names = {p: name for name, p in named}
    return {
        f"{key}.{names[p]}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def load_state_tensors(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """The inverse of `state_tensors`."""
    parameters = dict(named)
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        # step counters are scalars that the fused kernels want beside the parameter
        optimizer.state[parameter][kind] = value.to(parameter.device).clone()
