"""The Linears of a model by name, and the one way to put others in their places: low-rank matrices beside them, weights
stored small, rounded or quantized ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradus.layers.moe import MixtureOfExperts


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All but routers, which compute in fp32 by a way of their own."""
    routers = {module.router for module in model.modules() if isinstance(module, MixtureOfExperts)}
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m not in routers}


def within(model: nn.Module, kind: type[nn.Module]) -> tuple[str, ...]:
    """What the names of modules inside one of this kind begin with."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, kind))


def use_linears(model: nn.Module, kind: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Put `kind(name, linear)` in the place of every Linear, which may be the same Linear again."""
    for name, linear in linears(model).items():
        if (new := kind(name, linear)) is not linear:
            model.set_submodule(name, new)
