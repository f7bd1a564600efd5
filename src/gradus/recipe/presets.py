"""A model's architecture by name: the published sizes (presets.yaml), which `model: {preset: gpt2-small}` fills in; how
they were trained (runs.yaml); and what comes with weights.

Counts of parameters: `gradus models`. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from gradus import files
from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import MODELS, ModelConfig

# What a recipe says about a model whatever its size; and what task and data say where the recipe does not: a preset's
# or other weights' is for their own data.
NOT_ARCHITECTURE = ("init", "dropout", "classifier_dropout", "head", "pooler", "n_classes", "patches")
HEAD = ("head", "pooler", "n_classes")

_DATA: dict[str, Any] = files.packaged("recipe/presets.yaml")
PRESETS: dict[str, dict[str, Any]] = {
    name: {**table["shared"], **dict(zip(table["columns"], row, strict=True))}
    for table in _DATA["tables"]
    for name, row in table["sizes"].items()
}
ALIASES: dict[str, str] = _DATA["aliases"]
DRAFTS: dict[str, dict[str, Any]] = _DATA["drafts"]
TINY: list[dict[str, dict[str, Any]]] = _DATA["tiny"]
EXAMPLE = "gpt2-small"  # what a form opens with


def fields(name: str) -> dict[str, Any]:
    """What a preset states. Raises UserError for an unknown one (names are case-sensitive: vit-g14 is not vit-G14)."""
    if ALIASES.get(name, name) not in PRESETS:
        raise UserError(f"model.preset={name}: unknown preset.{did_you_mean(name, [*PRESETS, *ALIASES])}")
    return PRESETS[ALIASES.get(name, name)]


def runs() -> list[dict[str, Any]]:
    """How published models were trained (runs.yaml)."""
    return files.packaged("recipe/runs.yaml")


def config_of(name: str, **more: Any) -> ModelConfig:
    """The configuration of a preset, with `more` in place of its own fields. Raises UserError for an unknown preset."""
    stated = {**fields(name), "preset": name, **more}
    return MODELS[stated["family"]](**stated)


def beside_weights(init: str) -> dict[str, Any] | None:
    """What config.json beside the weights says; None where only the hub has it (it is then read when the weights are).

    The room that reads weights stands above this one and is asked for by name, so that nothing here depends on it.
    Raises UserError for a path where there is nothing.
    """
    models, there = import_module("gradus.models"), Path(os.path.expanduser(init)).exists()
    if not there and init.startswith((".", "/", "~")):
        raise UserError(f"model.init={init}: no such file or folder.")
    with contextlib.suppress(*(() if there else (UserError,))):
        return models.config_of(init).model_dump()
    return None
