"""Models written as Hugging Face writes them, an adapter as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradus.models import weights
from gradus.models.building import whole
from gradus.models.config_json import adapter_config, to_config_json
from gradus.models.finite import finite, not_finite, weights_not_finite
from gradus.models.locating import locate
from gradus.models.opening import opened

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn


def save(model: nn.Module, folder: str | Path, max_shard_bytes: float = weights.SHARD) -> None:
    """Write config.json and safetensors as Hugging Face does, in shards above max_shard_bytes, each stored tensor once;
    of an adapted model the adapter, as PEFT does.

    Memory holds one shard at a time; a kill at any instant leaves no folder that looks whole and is not. Raises
    UserError where the disk refuses.
    """
    config = to_config_json(model.config, next(model.parameters()).dtype)
    weights.write(weights.to_hf(model), config, folder, max_shard_bytes, adapter_config(model))


def convert(
    name_or_path: str | Path, folder: str | Path, max_shard_bytes: float = weights.SHARD,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a model that `load` can read in Hugging Face's layout, without building it: one stored tensor at a time is
    read, and memory holds one shard of the result. dtype: of all tensors; None: values and dtype stay as they are
    stored. Errors as in `load` and `save`; NotFinite for values that are not finite."""
    path = locate(name_or_path)
    config, tensors = opened(path, weights_too=True)
    model = whole(config)
    values, _ = weights.fitting(model, tensors, path)
    as_stored, dtype = dtype is None, dtype or next(iter(values.values())).read().dtype
    if config.adapter:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        values = {name: value for name, value in values.items() if name in trained}
    stored = weights.theirs(model, values)

    def read(tensor: weights.Stored) -> torch.Tensor:
        value = tensor.read()
        if not finite(value):
            where = weights_not_finite((name, value.read()) for name, value in values.items())
            raise not_finite(str(name_or_path), path, where)
        return value if as_stored else value.to(dtype)

    written = ((name, read(tensor)) for name, tensor in stored.items())
    weights.write(written, to_config_json(config, dtype), folder, max_shard_bytes, adapter_config(model))
