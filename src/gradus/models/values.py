"""A model before it has memory: its modules on the meta device, and beside them the values that its parameters will
have, each read or drawn when it is asked for. A layout is applied in between, so that a process makes no more than the
part that it keeps, and one whole parameter beside it at a time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradus import spin
from gradus.layers import LoRALinear, SmallLinear
from gradus.layers.init import Draw
from gradus.layers.linears import within
from gradus.models.weights import LoadReport, Stored
from gradus.torch_private import FakeTensor, local_shape_and_offset, unset_fake_temporarily

Values = Mapping[str, Stored]  # parameters of the whole model by name


@dataclass
class Deferred:
    """`model` is on the meta device; `report`: of values from a file."""

    model: nn.Module
    values: Values | None
    report: LoadReport | None = None

    def on(self, device: str | torch.device) -> nn.Module:
        """The whole model, with its values, on a device."""
        materialise(self.model, device, self.values)
        if self.report:
            self.model.load_report = self.report
        return self.model


def drawn(model: nn.Module, seed: int | None) -> dict[str, Stored]:
    """The family's initialisation: each parameter from a generator of its own, seeded with `seed` and its name, so that
    it is the same whoever draws it, and whatever else is drawn. None: a seed from torch's global generator."""
    if seed is None:
        with unset_fake_temporarily():
            seed = int(torch.randint(2**31, ()))
    described = [model, *(m for m in model.modules() if isinstance(m, LoRALinear))]  # the later one counts
    how = {id(p): draw for module in described for p, draw in module.initialisation()}
    return {
        name: Stored(tuple(p.shape), partial(_draw, how[id(p)], p.shape, f"{seed} {name}"))
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def _draw(draw: Draw, shape: tuple[int, ...], key: str) -> Tensor:
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4])  # the generator takes 32 bits
    draw(whole, torch.Generator().manual_seed(seed))
    return whole


def stored_small(model: nn.Module, values: Values) -> Values:
    """The values of a model whose adapter has a base stored small, from those of its weights as they are. One weight is
    read at a time, when its codes are asked for; its scales come of the same reading where they are asked for next."""
    out = dict(values)

    @functools.lru_cache(maxsize=1)
    def made(name: str) -> dict[str, Tensor]:
        return linears[name].stored(values[f"{name}.weight"].read().float())

    linears = {name: module for name, module in model.named_modules() if isinstance(module, SmallLinear)}
    for name, linear in linears.items():
        del out[f"{name}.weight"]
        for key, b in linear.named_buffers(recurse=False):
            out[f"{name}.{key}"] = Stored(tuple(b.shape), partial(lambda n, k: made(n)[k], name, key))
    return out


def held(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that have values of their own: parameters, and weights stored small."""
    inside = within(model, SmallLinear)
    buffers = {name: b for name, b in model.named_buffers() if name.startswith(inside)}
    return {**dict(model.named_parameters()), **buffers}


def materialise(model: nn.Module, device: str | torch.device, values: Values | None, *views: nn.Module) -> None:
    """Give the parameters and buffers of a model on the meta device memory and values (None: memory alone). Shared
    parameters stay so.

    views: further modules around some of the same parameters.
    """
    spin.watch()  # it is going to compute
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for root in (model, *views):
        for module in root.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if p.is_meta and p not in replacements:
                    replacements[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                setattr(module, name, replacements.get(p, p))
            for name, b in list(module.named_buffers(recurse=False)):
                if b.is_meta:
                    setattr(module, name, torch.empty_like(b, device=device))
    if isinstance(model, FSDPModule):
        model.to(device)  # FSDP2 takes up the new parameters, of its inner units too
    if values is not None:
        fill(held(model), values)


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], values: Values) -> None:
    """Copy values into tensors, plain or DTensors, of any device and dtype: this process's part of each."""
    for name, tensor in tensors.items():
        local, (offset, shape) = local_of(tensor), place(tensor)
        if local.numel() and not isinstance(local, FakeTensor):
            local.copy_(values[name].part(offset, shape))


def place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of this process's part in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    assert not any(p.is_partial() for p in tensor.placements), "a sum that is not complete is no state"
    shape, offset = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """This process's part, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
