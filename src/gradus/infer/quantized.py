"""Quantized models: the modules that replace Linears, and the folder of their numbers.

    config.json             as beside any weights
    quantized.safetensors   of every Linear its numbers as MODULE.NAME; all other parameters, fp32, by our names
    quantized.json          how ("dynamic", "static", "int8", "int4"), the precision, what the table said
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradus import models
from gradus.errors import UserError
from gradus.infer import QUANTIZED as FILE
from gradus.infer import ModelSource
from gradus.infer.compiled import INTEGER, Int4, Int8, StoredLinear, whole_blocks
from gradus.layers import linears, use_linears
from gradus.layers.small import quantize_int8
from gradus.models.values import Deferred, fill
from gradus.models.weights import Stored
from gradus.parallel.device import pick_device
from gradus.parallel.qat import input_scale
from gradus.torch_private import has_fbgemm, linear_dynamic, linear_pack, linear_static

WEIGHTS = "quantized.safetensors"


class Dynamic(StoredLinear):
    """8 bits a weight, with one scale for each output, and 7 an input, whose range is that of the batch at hand; the
    product is of integers, the result fp32."""

    @staticmethod
    def numbers(weight: Tensor) -> dict[str, Tensor]:
        return dict(zip(("numbers", "scale"), quantize_int8(weight)))

    def load_numbers(self, numbers: Tensor, scale: Tensor) -> None:
        self.packed = linear_pack(numbers, scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear_dynamic(x, self.packed, True)


class Static(Dynamic):
    """The same with a range of inputs (2,) that is known beforehand; beyond it they are cut."""

    def load_numbers(self, numbers: Tensor, scale: Tensor, range: Tensor) -> None:
        super().load_numbers(numbers, scale)
        step, zero = input_scale(*range)
        self.step, self.zero = float(step), int(zero)

    def forward(self, x: Tensor) -> Tensor:
        return linear_static(x, self.step, self.zero, self.packed)


KINDS: dict[frozenset, type[StoredLinear]] = {  # by the numbers that are kept
    frozenset({"numbers", "scale"}): Dynamic, frozenset({"numbers", "scale", "range"}): Static,
    frozenset({"packed", "scale"}): Int8, frozenset({"pairs", "scales"}): Int4,
}  # fmt: skip


@torch.no_grad()
def tensors_of(model: nn.Module, how: str, ranges: dict[str, list[float]]) -> dict[str, Tensor]:
    """What quantized.safetensors holds. ranges: of static, lowest and highest input of every Linear."""
    tensors: dict[str, Tensor] = {}
    for name, linear in (inside := linears(model)).items():
        weight = linear.weight
        kind = Int4 if how == "int4" and whole_blocks(*weight.shape) else Int8 if how in ("int8", "int4") else Dynamic
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in kind.numbers(weight).items()}
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias.clone()
        if how == "static":
            tensors[f"{name}.range"] = torch.tensor(ranges[name])
    seen = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[0] not in inside and id(p) not in seen:  # a head may share its weight with an embedding
            seen.add(id(p))
            tensors[name] = p.float().contiguous()
    return tensors


def write(folder: Path, model: nn.Module, how: str, ranges: dict[str, list[float]]) -> dict[str, Any]:
    """Fill the folder, without a tokenizer. Returns what quantized.json says."""
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(model, how, ranges), folder / WEIGHTS)
    config = models.to_config_json(model.config, torch.float32)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    computes = INTEGER.get(how, "int8, inputs in 7 bits")
    precision = "int4" if how == "int4" else "int8"
    about = {"as": how, "precision": precision, "computes": computes, "torch": torch.__version__}
    (folder / FILE).write_text(json.dumps(about) + "\n")
    return about


def load(source: ModelSource, precision: str) -> nn.Module:
    """The model of such a folder. Raises UserError where it is none, damaged, or for another precision."""
    about, file = source.export_info, source.folder / WEIGHTS
    if "format" in about or about["precision"] != precision:
        what = "quantized" if "as" in about else "exported"
        use = f"--engine {about.get('format', 'torch')} --precision {about['precision']}"
        raise UserError(f"{source.name}: {what} for {use}. Use that, or give the model that it was made from.")
    if why := lacks(about["as"]):
        raise UserError(f"{source.name}: {why}. Give the model that it was made from.")
    model = models.build(source.config, "meta")
    try:
        tensors = {name: t.clone() for name, t in load_file(file).items()}  # aligned, as the products of AVX512 need it
        use_linears(model, lambda name, linear: _stored(name, linear, tensors))
        for name, p in model.named_parameters():
            if p.is_meta:
                same(name, tensors[name], p)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as e:
        raise UserError(f"{file}: damaged, or of another model ({e}). Quantize the model again.") from None
    values = {name: Stored.of(tensor) for name, tensor in tensors.items()}
    model = Deferred(model, None).on(pick_device("auto")).to(pick_device("auto"))
    fill({name: p for name, p in model.named_parameters() if name in values}, values)
    return model


def _stored(name: str, linear: nn.Linear, tensors: dict[str, Tensor]) -> StoredLinear:
    """The Linear of a name with its numbers, which are taken out of the tensors. linear: the model's, on meta."""
    own = {key.rpartition(".")[2]: tensors.pop(key) for key in list(tensors) if key.rpartition(".")[0] == name}
    bias = own.pop("bias", None)
    kind, like = KINDS[frozenset(own)], {"range": torch.empty(2)}
    like |= kind.numbers(linear.weight) | {"bias": linear.bias}  # on meta: shapes and types
    for key, tensor in {**own, "bias": bias}.items():
        same(f"{name}.{key}", tensor, like[key])
    return kind(bias, **own)


def lacks(how: str) -> str | None:
    """Why this machine has no such products; None: it has."""
    if how in ("int8", "int4"):
        return None
    if pick_device("auto").type != "cpu":
        return f"{how} int8 is for CPUs, and there is a GPU here"
    return None if has_fbgemm() else f"{how} int8 needs PyTorch with FBGEMM (x86 with AVX2)"


def same(name: str, tensor: Tensor | None, like: Tensor | None) -> None:
    """Raises ValueError where a tensor has another shape or type than the model's."""
    stored, expected = ("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in (tensor, like))
    if stored != expected:
        raise ValueError(f"{name}: found {stored}, expected {expected}")
