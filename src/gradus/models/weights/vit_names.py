"""ViT's weights as torchvision and timm name them, from shapes alone: theirs have no config.json that says the sizes.

Both are the published ViT with biases and a class token. What else they have (registers, layer scale, a norm before the
head's pooling) is named and refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gradus.errors import UserError, some
from gradus.models.weights import fields
from gradus.models.weights.stored import Stored
from gradus.recipe.schema import ViTConfig

if TYPE_CHECKING:
    from torch import Tensor

NAMES = fields.names()["timm and torchvision"]
BLOCK = re.compile(r"(?:blocks\.|encoder\.layers\.encoder_layer_)(\d+)\.(.+?)[._](weight|bias)")
WIDE = {1280: 16, 1408: 16, 1664: 16}  # d_model → heads, of the published sizes whose heads are not of 64


def knows(names: Mapping[str, object]) -> bool:
    return bool({"patch_embed.proj.weight", "conv_proj.weight"} & set(names))


def read(tensors: Mapping[str, Stored], where: object) -> tuple[ViTConfig, dict[str, Stored]]:
    """(configuration, tensors under Hugging Face's names). Raises UserError for a tensor that a plain ViT has not."""
    renamed: dict[str, Stored] = {}
    unknown = []
    for name, tensor in tensors.items():
        block, (owner, _, kind) = BLOCK.fullmatch(name), name.rpartition(".")
        outside = NAMES["outside"]
        theirs = NAMES["block"].get(block[2]) if block else outside.get(name) or outside.get(owner)
        if theirs is None:
            unknown.append(name)
        elif not block:
            renamed[theirs if name in outside else f"{theirs}.{kind}"] = tensor
        else:
            parts = theirs if isinstance(theirs, list) else [theirs]
            n = tensor.shape[0] // len(parts)
            for i, part in enumerate(parts):
                renamed[f"encoder.layer.{block[1]}.{part}.{block[3]}"] = tensor.rows(i * n, n)
    if unknown:
        raise UserError(f"{where}: {some(unknown)}: no plain ViT has them. Gradus reads vit_* of torchvision and timm")
    positions, projection = (
        renamed.get(f"embeddings.{name}") for name in ("position_embeddings", "patch_embeddings.projection.weight")
    )
    up = renamed.get("encoder.layer.0.intermediate.dense.weight")
    if positions is None or projection is None or up is None or "embeddings.cls_token" not in renamed:
        raise UserError(f"{where}: not a whole ViT: its positions, class token, patches or first block are missing")
    d_model, n_channels, patch_size, _ = projection.shape
    classifier = renamed.get("classifier.weight")
    config = ViTConfig(
        n_layers=1 + max(int(name.split(".")[2]) for name in renamed if name.startswith("encoder.layer.")),
        d_model=d_model, n_heads=WIDE.get(d_model, max(1, d_model // 64)), d_ff=up.shape[0], norm_eps=1e-6,
        n_channels=n_channels, patch_size=patch_size, image_size=round((positions.shape[1] - 1) ** 0.5) * patch_size,
        n_classes=classifier.shape[0] if classifier else None,
    )  # fmt: skip
    body = "vit." if classifier else ""
    return config, {name if name.startswith("classifier") else f"{body}{name}": x for name, x in renamed.items()}


# ---------------------------------------------------------------- another size of image


def resized(stored: ViTConfig, config: ViTConfig, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Positions for images of another size, as timm makes them when it loads: bicubic, smoothed where they shrink."""
    end, new_tensors = "embeddings.position_embeddings", dict(tensors)
    if stored.patch_size != config.patch_size:
        return new_tensors
    token = int(stored.pool == "class_token")
    old, new = (c.image_size // c.patch_size for c in (stored, config))
    for name, tensor in tensors.items():
        if name.endswith(end):
            make = partial(interpolated, token=token, old=old, new=new)
            new_tensors[name] = tensor.changed(make, 1, new * new + token, tensor.shape[2])
    return new_tensors


def interpolated(whole: Tensor, token: int, old: int, new: int) -> Tensor:
    """whole: (1, token + old², d_model) -> (1, token + new², d_model)."""
    import torch
    from torch.nn.functional import interpolate

    grid = whole[:, token:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    grid = interpolate(grid, size=(new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat((whole[:, :token], grid.flatten(2).transpose(1, 2).to(whole.dtype)), dim=1)
