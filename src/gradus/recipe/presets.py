"""A model's architecture by name: the published sizes, as data (`model: {preset: gpt2-small}` is the same as writing
these fields out); how they were trained (runs.yaml); and what comes with weights.

Counts of parameters: `gradus models`. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import MODELS, ModelConfig

# What a recipe says about a model whatever its size; and what task and data say where the recipe does not: a preset's
# or other weights' is for their own data.
NOT_ARCHITECTURE = ("init", "dropout", "classifier_dropout", "head", "pooler", "n_classes", "patches")
HEAD = ("head", "pooler", "n_classes")


# Scaled rotary frequencies give Llama 3.1 (3.2: with a larger factor) a context of 128k.
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 8192}
LLAMA3 = {"vocab_size": 128_256, "n_kv_heads": 8, "seq_len": 131_072, "rope_theta": 500_000.0, "rope_scaling": ROPE}
EXPERTS = {"n_kv_heads": 8, "n_experts": 8, "top_k": 2}

# What all sizes of a table share, and the columns of the table.
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    # Vaswani et al. 2017, table 3. English and German share the vocabulary of about 37,000 tokens (section 5.1).
    "seq2seq": ({"family": "seq2seq", "vocab_size": 37_000, "n_layers": 6}, "d_model n_heads d_ff dropout"),
    # Devlin et al. 2019, section 3; the vocabularies are those of the published checkpoints.
    "bert": ({"family": "bert"}, "vocab_size n_layers d_model n_heads d_ff"),
    # Radford et al. 2019, table 2; Brown et al. 2020, table 2.1. One byte-level BPE vocabulary for all.
    "gpt": ({"family": "gpt", "vocab_size": 50_257}, "n_layers d_model n_heads seq_len"),
    # Raffel et al. 2020, section 3.7. The vocabulary is 32,000 pieces and 100 sentinels, padded.
    "t5": ({"family": "t5", "vocab_size": 32_128, "gated": False, "tie_output": True},
           "n_layers d_model n_heads d_head d_ff"),
    # Shazeer 2020 and the released configurations.
    "t5-v1.1": ({"family": "t5", "vocab_size": 32_128, "gated": True, "tie_output": False},
                "n_layers d_model n_heads d_head d_ff"),
    # Touvron et al. 2023 (Llama 2), table 1 and the released params.json.
    "llama2": ({"family": "llama", "vocab_size": 32_000, "seq_len": 4096}, "n_layers d_model n_heads"),
    # Grattafiori et al. 2024, table 3, and the released params.json (3.2: its model card).
    "llama3": ({"family": "llama", **LLAMA3}, "n_layers d_model n_heads"),
    "llama3.2": ({"family": "llama", **LLAMA3, "rope_scaling": {**ROPE, "factor": 32.0}, "multiple_of": 256,
                  "tie_output": True}, "n_layers d_model n_heads"),
    # Jiang et al. 2024, table 1: Llama's block with eight experts, of which a token takes two; the release's base.
    "mixtral": ({"family": "llama", "vocab_size": 32_000, "seq_len": 32_768, "rope_theta": 1_000_000.0, **EXPERTS},
                "n_layers d_model n_heads d_ff"),
    # Dosovitskiy et al. 2021, table 1; Ti, S, g and G: Zhai et al. 2022, table 2. The 1,000 classes of ImageNet.
    "vit": ({"family": "vit", "image_size": 224, "n_classes": 1000}, "patch_size n_layers d_model d_ff n_heads"),
}  # fmt: skip


def _size(table: str, *row: float, **more: Any) -> dict[str, Any]:
    shared, columns = TABLES[table]
    return {**shared, **dict(zip(columns.split(), row, strict=True)), **more}


PRESETS: dict[str, dict[str, Any]] = {
    "seq2seq-base": _size("seq2seq", 512, 8, 2048, 0.1),
    "seq2seq-big": _size("seq2seq", 1024, 16, 4096, 0.3),
    "bert-base-uncased": _size("bert", 30_522, 12, 768, 12, 3072),
    "bert-base-cased": _size("bert", 28_996, 12, 768, 12, 3072),
    "bert-large-uncased": _size("bert", 30_522, 24, 1024, 16, 4096),
    "bert-large-cased": _size("bert", 28_996, 24, 1024, 16, 4096),
    "gpt2-small": _size("gpt", 12, 768, 12, 1024),
    "gpt2-medium": _size("gpt", 24, 1024, 16, 1024),
    "gpt2-large": _size("gpt", 36, 1280, 20, 1024),
    "gpt2-xl": _size("gpt", 48, 1600, 25, 1024),
    "gpt3-small": _size("gpt", 12, 768, 12, 2048),
    "gpt3-medium": _size("gpt", 24, 1024, 16, 2048),
    "gpt3-large": _size("gpt", 24, 1536, 16, 2048),
    "gpt3-xl": _size("gpt", 24, 2048, 16, 2048),  # the table's 24 heads of 128 are not 2048 wide; 16 are
    "gpt3-2.7b": _size("gpt", 32, 2560, 32, 2048),
    "gpt3-6.7b": _size("gpt", 32, 4096, 32, 2048),
    "gpt3-13b": _size("gpt", 40, 5120, 40, 2048),  # the table's 5140 is not 40 heads of 128; 5120 is
    "gpt3-175b": _size("gpt", 96, 12_288, 96, 2048),
    "t5-small": _size("t5", 6, 512, 8, 64, 2048),
    "t5-base": _size("t5", 12, 768, 12, 64, 3072),
    "t5-large": _size("t5", 24, 1024, 16, 64, 4096),
    "t5-3b": _size("t5", 24, 1024, 32, 128, 16_384),
    "t5-11b": _size("t5", 24, 1024, 128, 128, 65_536),
    "t5-v1.1-small": _size("t5-v1.1", 8, 512, 6, 64, 1024),
    "t5-v1.1-base": _size("t5-v1.1", 12, 768, 12, 64, 2048),
    "t5-v1.1-large": _size("t5-v1.1", 24, 1024, 16, 64, 2816),
    "t5-v1.1-xl": _size("t5-v1.1", 24, 2048, 32, 64, 5120),
    "t5-v1.1-xxl": _size("t5-v1.1", 24, 4096, 64, 64, 10_240),
    "llama2-7b": _size("llama2", 32, 4096, 32),
    "llama2-13b": _size("llama2", 40, 5120, 40),
    "llama2-70b": _size("llama2", 80, 8192, 64, n_kv_heads=8, multiple_of=4096, ffn_multiplier=1.3),
    "llama3.1-8b": _size("llama3", 32, 4096, 32, multiple_of=1024, ffn_multiplier=1.3),
    "llama3.1-70b": _size("llama3", 80, 8192, 64, multiple_of=4096, ffn_multiplier=1.3),
    "llama3.1-405b": _size("llama3", 126, 16_384, 128, multiple_of=4096, ffn_multiplier=1.2),
    "llama3.2-1b": _size("llama3.2", 16, 2048, 32, ffn_multiplier=1.5),
    "llama3.2-3b": _size("llama3.2", 28, 3072, 24, ffn_multiplier=1.0),
    "mixtral-8x7b": _size("mixtral", 32, 4096, 32, 14_336),
    "vit-ti16": _size("vit", 16, 12, 192, 768, 3),
    "vit-s16": _size("vit", 16, 12, 384, 1536, 6),
    "vit-b16": _size("vit", 16, 12, 768, 3072, 12),
    "vit-b32": _size("vit", 32, 12, 768, 3072, 12),
    "vit-l16": _size("vit", 16, 24, 1024, 4096, 16),
    "vit-h14": _size("vit", 14, 32, 1280, 5120, 16),
    "vit-g14": _size("vit", 14, 40, 1408, 6144, 16),
    "vit-G14": _size("vit", 14, 48, 1664, 8192, 16),
}

ALIASES = {
    "transformer-base": "seq2seq-base",
    "transformer-big": "seq2seq-big",
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "gpt2": "gpt2-small",
    "gpt3": "gpt3-175b",
    "t5-v1.1-3b": "t5-v1.1-xl",
    "t5-v1.1-11b": "t5-v1.1-xxl",
}


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


@functools.cache
def runs() -> list[dict[str, Any]]:
    """How published models were trained (runs.yaml)."""
    return yaml.safe_load((importlib.resources.files("gradus.recipe") / "runs.yaml").read_text(encoding="utf-8"))


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
