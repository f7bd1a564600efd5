"""A model's architecture by name: the published sizes, as data (`model: {preset: gpt2-small}` is the same as writing
these fields out), and what comes with weights.

Counts of parameters: `gradus models`. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import MODELS, ModelConfig

# What a recipe says about a model whatever its size; and what task and data say where the recipe does not: a preset's
# or other weights' is for their own data.
NOT_ARCHITECTURE = ("init", "dropout", "head", "pooler", "n_classes", "patches")
HEAD = ("head", "pooler", "n_classes")


def _seq2seq(**size: Any) -> dict[str, Any]:
    """Vaswani et al. 2017, table 3. English and German share the vocabulary of about 37,000 tokens (section 5.1)."""
    return {"family": "seq2seq", "vocab_size": 37_000, "n_layers": 6, **size}


def _bert(vocab_size: int, n_layers: int, d_model: int, n_heads: int) -> dict[str, Any]:
    """Devlin et al. 2019, section 3; the vocabularies are those of the published checkpoints."""
    size = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "d_ff": 4 * d_model}
    return {"family": "bert", "vocab_size": vocab_size, **size}


def _gpt(n_layers: int, d_model: int, n_heads: int, seq_len: int) -> dict[str, Any]:
    """Radford et al. 2019, table 2; Brown et al. 2020, table 2.1. One byte-level BPE vocabulary for all."""
    size = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "seq_len": seq_len}
    return {"family": "gpt", "vocab_size": 50_257, **size}


def _t5(n_layers: int, d_model: int, n_heads: int, d_head: int, d_ff: int, v1_1: bool = False) -> dict[str, Any]:
    """Raffel et al. 2020, section 3.7; v1.1: Shazeer 2020 and the released configurations.

    The vocabulary is 32,000 pieces and 100 sentinels, padded.
    """
    size = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "d_head": d_head, "d_ff": d_ff}
    return {"family": "t5", "vocab_size": 32_128, **size, "gated": v1_1, "tie_output": not v1_1}


def _llama2(n_layers: int, d_model: int, n_heads: int, **more: Any) -> dict[str, Any]:
    """Touvron et al. 2023 (Llama 2), table 1 and the released params.json."""
    size = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads}
    return {"family": "llama", "vocab_size": 32_000, **size, "seq_len": 4096, **more}


def _llama3(n_layers: int, d_model: int, n_heads: int, rope_factor: float = 8.0, **more: Any) -> dict[str, Any]:
    """Grattafiori et al. 2024, table 3, and the released params.json (3.2: its model card).

    Scaled rotary frequencies give a context of 128k.
    """
    size = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "n_kv_heads": 8}
    rope = {"factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 8192}
    return {
        "family": "llama", "vocab_size": 128_256, **size, "seq_len": 131_072, "rope_theta": 500_000.0,
        "rope_scaling": rope, **more,
    }  # fmt: skip


def _mixtral(n_layers: int, d_model: int, n_heads: int, d_ff: int) -> dict[str, Any]:
    """Jiang et al. 2024, table 1: Llama's block with eight experts, of which a token takes two.

    32k context; the rotary base is that of the release.
    """
    size = {
        "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "n_kv_heads": 8, "d_ff": d_ff, "n_experts": 8,
        "top_k": 2,
    }  # fmt: skip
    return {"family": "llama", "vocab_size": 32_000, **size, "seq_len": 32_768, "rope_theta": 1_000_000.0}


def _vit(patch_size: int, n_layers: int, d_model: int, d_ff: int, n_heads: int) -> dict[str, Any]:
    """Dosovitskiy et al. 2021, table 1; Ti, S, g and G: Zhai et al. 2022, table 2.

    Images have 224 pixels a side and the 1,000 classes of ImageNet.
    """
    size = {"n_layers": n_layers, "d_model": d_model, "d_ff": d_ff, "n_heads": n_heads}
    return {"family": "vit", "image_size": 224, "patch_size": patch_size, **size, "n_classes": 1000}


PRESETS: dict[str, dict[str, Any]] = {
    "seq2seq-base": _seq2seq(d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
    "seq2seq-big": _seq2seq(d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
    "bert-base-uncased": _bert(30_522, 12, 768, 12),
    "bert-base-cased": _bert(28_996, 12, 768, 12),
    "bert-large-uncased": _bert(30_522, 24, 1024, 16),
    "bert-large-cased": _bert(28_996, 24, 1024, 16),
    "gpt2-small": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt3-small": _gpt(12, 768, 12, 2048),
    "gpt3-medium": _gpt(24, 1024, 16, 2048),
    "gpt3-large": _gpt(24, 1536, 16, 2048),
    "gpt3-xl": _gpt(24, 2048, 16, 2048),  # the table's 24 heads of 128 are not 2048 wide; 16 are
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),  # the table's 5140 is not 40 heads of 128; 5120 is
    "gpt3-175b": _gpt(96, 12_288, 96, 2048),
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16_384),
    "t5-11b": _t5(24, 1024, 128, 128, 65_536),
    "t5-v1.1-small": _t5(8, 512, 6, 64, 1024, v1_1=True),
    "t5-v1.1-base": _t5(12, 768, 12, 64, 2048, v1_1=True),
    "t5-v1.1-large": _t5(24, 1024, 16, 64, 2816, v1_1=True),
    "t5-v1.1-xl": _t5(24, 2048, 32, 64, 5120, v1_1=True),
    "t5-v1.1-xxl": _t5(24, 4096, 64, 64, 10_240, v1_1=True),
    "llama2-7b": _llama2(32, 4096, 32),
    "llama2-13b": _llama2(40, 5120, 40),
    "llama2-70b": _llama2(80, 8192, 64, n_kv_heads=8, multiple_of=4096, ffn_multiplier=1.3),
    "llama3.1-8b": _llama3(32, 4096, 32, multiple_of=1024, ffn_multiplier=1.3),
    "llama3.1-70b": _llama3(80, 8192, 64, multiple_of=4096, ffn_multiplier=1.3),
    "llama3.1-405b": _llama3(126, 16_384, 128, multiple_of=4096, ffn_multiplier=1.2),
    "llama3.2-1b": _llama3(16, 2048, 32, 32.0, multiple_of=256, ffn_multiplier=1.5, tie_output=True),
    "llama3.2-3b": _llama3(28, 3072, 24, 32.0, multiple_of=256, ffn_multiplier=1.0, tie_output=True),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14_336),
    "vit-ti16": _vit(16, 12, 192, 768, 3),
    "vit-s16": _vit(16, 12, 384, 1536, 6),
    "vit-b16": _vit(16, 12, 768, 3072, 12),
    "vit-b32": _vit(32, 12, 768, 3072, 12),
    "vit-l16": _vit(16, 24, 1024, 4096, 16),
    "vit-h14": _vit(14, 32, 1280, 5120, 16),
    "vit-g14": _vit(14, 40, 1408, 6144, 16),
    "vit-G14": _vit(14, 48, 1664, 8192, 16),
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


def fields(name: str) -> dict[str, Any]:
    """What a preset states. Raises UserError for an unknown one (names are case-sensitive: vit-g14 is not vit-G14)."""
    if ALIASES.get(name, name) not in PRESETS:
        raise UserError(f"model.preset={name}: unknown preset.{did_you_mean(name, [*PRESETS, *ALIASES])}")
    return PRESETS[ALIASES.get(name, name)]


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
