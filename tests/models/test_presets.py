"""The published sizes against the published numbers of parameters (integers counted with other software)."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time

import pytest
import torch
import transformers as hf
from torch import nn

from gradus import models
from gradus.errors import UserError
from gradus.models.building import undrawn
from gradus.plan.counts import active
from gradus.recipe.presets import ALIASES, PRESETS, config_of


@functools.cache
def counts_of(name: str) -> dict[str, int]:
    return models.count(config_of(name))


PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "bert-base-uncased": 109_482_240,
    "bert-large-uncased": 335_141_888,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    assert counts_of(name)["total"] == PUBLISHED[name]


# as their config.json say; total: published with the weights, or by the model card
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
MIXED = {**QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
MISTRAL = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5}  # fmt: skip
SMOL = {"vocab_size": 49_152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def sized(shared: dict, layers: int, width: int, heads: int, inner: int, **more) -> dict:
    return {**shared, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner, **more}


THEIRS = {  # preset → (class, configuration, published)
    "qwen3-0.6b": (hf.Qwen3ForCausalLM, sized(QWEN3, 28, 1024, 16, 3072, tie_word_embeddings=True), 596_049_920),
    "qwen3-1.7b": (hf.Qwen3ForCausalLM, sized(QWEN3, 28, 2048, 16, 6144, tie_word_embeddings=True), 1_720_574_976),
    "qwen3-4b": (hf.Qwen3ForCausalLM, sized(QWEN3, 36, 2560, 32, 9728, tie_word_embeddings=True), 4_022_468_096),
    "qwen3-8b": (hf.Qwen3ForCausalLM, sized(QWEN3, 36, 4096, 32, 12_288, tie_word_embeddings=False), 8_190_735_360),
    "qwen3-14b": (hf.Qwen3ForCausalLM, sized(QWEN3, 40, 5120, 40, 17_408, tie_word_embeddings=False), 14_768_307_200),
    "qwen3-32b": (hf.Qwen3ForCausalLM, sized(QWEN3, 64, 5120, 64, 25_600, tie_word_embeddings=False), 32_762_123_264),
    "qwen3-30b-a3b": (hf.Qwen3MoeForCausalLM, sized(MIXED, 48, 2048, 32, 6144, moe_intermediate_size=768), 30_532_122_624),
    "qwen3-235b-a22b": (hf.Qwen3MoeForCausalLM, sized(MIXED, 94, 4096, 64, 12_288, moe_intermediate_size=1536), 235_093_634_560),
    "mistral-7b-v0.1": (hf.MistralForCausalLM, {**MISTRAL, "vocab_size": 32_000, "rope_theta": 1e4, "sliding_window": 4096}, 7_241_732_096),
    "mistral-7b-v0.3": (hf.MistralForCausalLM, {**MISTRAL, "vocab_size": 32_768, "rope_theta": 1e6, "sliding_window": None}, 7_248_023_552),
    "smollm2-135m": (hf.LlamaForCausalLM, sized(SMOL, 30, 576, 9, 1536, num_key_value_heads=3, rope_theta=1e5), 134_515_008),
    "smollm2-360m": (hf.LlamaForCausalLM, sized(SMOL, 32, 960, 15, 2560, num_key_value_heads=5, rope_theta=1e5), 361_821_120),
    "smollm2-1.7b": (hf.LlamaForCausalLM, sized(SMOL, 24, 2048, 32, 8192, num_key_value_heads=32, rope_theta=1.3e5), 1_711_376_384),
    "smollm3-3b": (hf.SmolLM3ForCausalLM, sized({"vocab_size": 128_256, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6, "rope_theta": 5e6}, 36, 2048, 16, 11_008,
                   num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4), 3_075_098_624),
    "roberta-base": (hf.RobertaModel, {**ROBERTA, **BASE, "vocab_size": 50_265}, 124_645_632),
    "roberta-large": (hf.RobertaModel, {**ROBERTA, **LARGE, "vocab_size": 50_265}, 355_359_744),
    "xlm-roberta-base": (hf.XLMRobertaModel, {**ROBERTA, **BASE, "vocab_size": 250_002}, 278_043_648),
    "xlm-roberta-large": (hf.XLMRobertaModel, {**ROBERTA, **LARGE, "vocab_size": 250_002}, 559_890_432),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_counts_are_those_of_transformers_models_and_a_file_of_theirs_is_the_preset(name, tmp_path):
    cls, fields, published = THEIRS[name]
    config = cls.config_class(**fields)
    with torch.device("meta"):
        assert sum(p.numel() for p in cls(config).parameters()) == counts_of(name)["total"] == published
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [cls.__name__]}))
    read, preset = models.config_of(tmp_path), config_of(name)
    assert read.head_dim == preset.head_dim
    assert read.model_dump(exclude=(apart := {"preset", "balance", "d_head"})) == preset.model_dump(exclude=apart)


def test_active_parameters_are_those_of_the_names():
    assert [round(active(config_of(name)) / 1e9, 1) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")] == [3.4, 22.2]


def test_bert_large_with_its_pretraining_heads():
    assert models.count(config_of("bert-large-uncased", head="pretraining"))["total"] == 336_226_108


SIZES = [("vit-g14", 1011, 0.002), ("vit-G14", 1843, 0.002), ("seq2seq-base", 65, 0.04), ("seq2seq-big", 213, 0.01)]


@pytest.mark.parametrize(("name", "millions", "within"), SIZES)
def test_counts_against_rounded_ones(name, millions, within):
    """g and G: Zhai et al. 2022, table 2; the 2017 models: table 3, whose vocabulary is "about 37000" tokens."""
    assert counts_of(name)["total"] / 1e6 == pytest.approx(millions, rel=within)


GPT3 = {"small": 125, "medium": 350, "large": 760, "xl": 1300, "2.7b": 2700, "6.7b": 6700, "13b": 13_000, "175b": 175_000}


@pytest.mark.parametrize("size", GPT3)
def test_gpt3_has_about_the_size_of_its_name(size):
    """Brown et al. 2020, table 2.1, in millions, rounded there."""
    assert counts_of(f"gpt3-{size}")["total"] / 1e6 == pytest.approx(GPT3[size], rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_configuration(name):
    counts = counts_of(name)
    assert sum(counts.values()) == 2 * counts["total"]
    assert all(counts[part] > 0 for part in ("embeddings", "attention", "feedforward", "norms"))


def test_components_of_gpt2_small():
    """By hand: L(4h² + 4h) attention, L(8h² + 5h) feed-forward, 2h a norm; the head is the embedding."""
    h, layers = 768, 12
    assert models.count(config_of("gpt2")) == {
        "embeddings": (50257 + 1024) * h,
        "attention": layers * (4 * h * h + 4 * h),
        "feedforward": layers * (8 * h * h + 5 * h),
        "norms": (2 * layers + 1) * 2 * h,
        "head": 0,
        "total": 124_439_808,
    }


def test_counting_405_billion_allocates_nothing():
    import resource

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    models.count(config_of("llama3.1-405b"))
    assert time.monotonic() - start < 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 200e6  # bytes


def test_feedforward_sizes_of_llama_follow_the_rule():
    sizes = {"llama2-7b": 11008, "llama2-13b": 13824, "llama2-70b": 28672, "llama3.1-8b": 14336, "llama3.1-70b": 28672, "llama3.1-405b": 53248}
    sizes |= {"llama3.2-1b": 8192, "llama3.2-3b": 8192}
    assert {name: config_of(name).d_ff for name in sizes} == sizes


def test_stated_keys_win_and_the_preset_stays_as_it_is():
    config = config_of("vit-b16", n_classes=10, image_size=32, patch_size=4)
    assert (config.n_classes, config.image_size, config.patch_size, config.d_model) == (10, 32, 4, 768)
    assert PRESETS["vit-b16"]["n_classes"] == 1000


def test_aliases_name_presets():
    assert set(ALIASES.values()) <= set(PRESETS)
    assert config_of("gpt2").d_model == 768


def test_mistakes():
    with pytest.raises(UserError, match=r"model.preset=gpt2-smal: unknown preset. Did you mean gpt2-small\?"):
        config_of("gpt2-smal")


def test_presets_need_no_torch():
    code = "import sys; from gradus.recipe.presets import config_of; config_of('gpt2'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_is_made_meanwhile_keeps_its_initial_values():
    """Of a model without memory PyTorch's own are not drawn; of another thread's modules they are."""
    own = nn.Linear.reset_parameters
    with undrawn():
        torch.manual_seed(0)
        meanwhile = nn.Linear(3, 2)
        assert nn.Linear(3, 2, device="meta").weight.is_meta
    torch.manual_seed(0)
    assert torch.equal(meanwhile.weight, nn.Linear(3, 2).weight) and nn.Linear.reset_parameters is own
