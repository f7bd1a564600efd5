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

PRESETS: dict[str, dict[str, Any]] = {
    name: {**table["shared"], **dict(zip(table["columns"], row, strict=True))}
    for table in files.packaged("recipe/presets.yaml")["tables"]
    for name, row in table["sizes"].items()
}
ALIASES: dict[str, str] = files.packaged("recipe/presets.yaml")["aliases"]
EXAMPLE = "gpt2-small"  # what a form opens with

# What `gradus new` drafts to be trained from scratch, by the kind of data.
DEEP, SHALLOW = ({"n_layers": n, "d_model": 128, "n_heads": 4} for n in (4, 2))
DRAFTS: dict[str, dict[str, Any]] = {
    "images": {"family": "vit", "image_size": 32, "patch_size": 4, **DEEP, "d_ff": 256},
    "text": {"family": "gpt", **DEEP, "seq_len": 128, "bias": False},
    "pairs": {"family": "seq2seq", **SHALLOW, "d_ff": 512, "norm_first": True, "seq_len": 512},
    "labelled": {"family": "bert", **SHALLOW, "d_ff": 512, "seq_len": 1024},
}

# Sections of models whose step is nearly all the framework's, once they have tiny sizes.
_LM = {"task": {"name": "causal_lm"}, "data": {"kind": "text", "path": "-"}}
TINY: tuple[dict[str, dict[str, Any]], ...] = (
    {"model": {"family": "gpt"}, **_LM},
    {"model": {"family": "llama"}, **_LM},
    {
        "model": {"family": "seq2seq", "dropout": 0.1}, "task": {"name": "copy", "n_symbols": 32, "length": 8},
        "data": {"kind": "synthetic"},
    },
)  # fmt: skip


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
