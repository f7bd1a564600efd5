"""Gemma 3's text model against transformers': norms of 1 + w on both sides of each sublayer, windows with rotary positions of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gradus import models
from gradus.errors import UserError
from gradus.models.decoding import Steps, complete
from gradus.models.gemma import RMSNorm
from gradus.models.weights.gemma import config_from_hf, config_to_hf
from gradus.plan.hf import read_hf
from gradus.recipe import load
from gradus.recipe.presets import config_of
from gradus.recipe.schema import Adapter, GemmaConfig, RopeScaling

sys.path.insert(0, str(Path(__file__).parent))
from test_llama import VOCAB, shake
from test_qwen import differences

F, S = "full_attention", "sliding_attention"
HF = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "query_pre_attn_scalar": 20, "sliding_window": 8, "sliding_window_pattern": 3, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
STRETCHED = {F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}, S: {"rope_type": "default", "rope_theta": 300.0}}
THEIRS = {  # what their configuration has besides
    "two of three layers local": {}, "stretched": {"rope_parameters": STRETCHED}, "one head of keys, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "a head of the model's width": {"head_dim": 10, "rms_norm_eps": 1e-3}, "all local": {"sliding_window_pattern": 9}, "none local": {"layer_types": [F] * 4},
    "the first and every third see all": {"layer_types": [F, S, F, S]},
}  # fmt: skip
OURS = {"vocab_size": VOCAB, "n_layers": 4, "d_model": 40, "n_heads": 4, "n_kv_heads": 2, "d_head": 12, "d_ff": 56, "seq_len": 64, "window": 8, "full_every": 3}


def their_model(**fields):
    return shake(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**HF | fields))).train()


def saved(folder: Path, **fields):
    theirs = their_model(**fields)
    theirs.save_pretrained(folder)
    return theirs, models.load(folder)


@pytest.mark.parametrize("name", THEIRS)
def test_there_and_back(name, tmp_path):
    """Theirs read, computed and differentiated, and written: a config.json of theirs alone, and the same tensors. (In float64 their norms stay in fp32.)"""
    theirs, model = saved(tmp_path, **THEIRS[name])
    models.save(model, tmp_path / "back")
    assert "gradus" not in json.loads((tmp_path / "back" / "config.json").read_text()), "nothing of it that Hugging Face has no words for"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is transformers.Gemma3ForCausalLM and back.config.layer_types == theirs.config.layer_types
    assert back.config.rope_parameters == theirs.config.rope_parameters
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert config_from_hf(config_to_hf(model.config)) == model.config
    off = differences(model.double(), theirs.double())
    assert max(off.values()) < 1e-5, {name: value for name, value in off.items() if value >= 1e-5}


@pytest.mark.parametrize("fields", [{}, {"window": None, "full_every": None}, {"full_every": None, "full_first": 2}, {"rope_scaling": RopeScaling(type="linear", factor=4.0)},
                                    {"full_every": 6}, {"tie_output": False, "local_theta": 77.0, "rope_theta": 1e5, "query_width": None}])  # fmt: skip
def test_ours_in_transformers(fields, tmp_path):
    config = GemmaConfig(**OURS | {"norm_eps": 1e-4, "query_width": 10} | fields)
    model = shake(models.build(config))
    models.save(model, tmp_path)
    assert models.load(tmp_path).config == config
    off = differences(model.double(), transformers.AutoModelForCausalLM.from_pretrained(tmp_path).double())
    assert max(off.values()) < 1e-5, {name: value for name, value in off.items() if value >= 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_weights_of_norms_lose_nothing(dtype, tmp_path):
    """w of 1e-4 is stored as it is: 1 + w would be 1 in bf16."""
    theirs = their_model().to(dtype)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "norm" in name:
                p.normal_(std=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    models.save(models.load(tmp_path / "theirs"), tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys() and all(torch.equal(after[name].to(dtype), before[name]) for name in before)


def test_in_bf16_the_embeddings_scale_is_rounded_and_norms_are_fp32(tmp_path):
    """The root of 40 is 6.3125 in bf16; rounded after the product instead, most numbers would be others."""
    theirs = their_model().bfloat16().eval()
    theirs.save_pretrained(tmp_path)
    model, ids, seen = models.load(tmp_path).bfloat16().eval(), torch.randint(0, VOCAB, (3, 20)), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ours = model(ids)
    assert torch.equal(seen[0], theirs.model.embed_tokens(ids)) and torch.equal(seen[0], model.token_embedding(ids) * 6.3125)
    assert not torch.equal(seen[0], model.token_embedding(ids) * 40**0.5)
    x = 3 * torch.randn(9, 40).bfloat16()
    got, norm = model.norm(x), theirs.model.norm
    torch.testing.assert_close(got, norm(x), rtol=2**-8, atol=0)
    assert (got != torch.nn.functional.rms_norm(x, (40,), 1 + norm.weight, norm.eps)).any(), "1 + w in bf16 would be another norm"
    wanted = theirs(ids).logits
    assert (ours - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_it_continues_as_theirs_past_its_window(tmp_path):
    """The same tokens as their `generate`, three windows on; and step by step, ragged, the logits of the whole text."""
    theirs, model = saved(tmp_path, rope_parameters=STRETCHED)
    theirs, model = theirs.eval(), model.eval()
    for length in (5, 13):
        ids = torch.randint(1, VOCAB, (1, length))
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert complete(model, ids.tolist(), max_new=24)[0] == found[0, length:].tolist()
    ids, lengths = torch.randint(1, VOCAB, (2, 30)), torch.tensor([11, 3])
    whole, steps = model(ids), Steps(model)
    with torch.no_grad():
        logits = [steps.prefill(ids[:, :11], lengths, room=30)] + [steps.decode(ids[[0, 1], lengths + i], lengths + i) for i in range(18)]
    for i, found in enumerate(logits):
        torch.testing.assert_close(found, whole[[0, 1], lengths - 1 + i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_within_one_of_images(prefix, tmp_path, capsys):
    """As transformers writes it; and under its names in memory. The vision tower is not read, which a note says; written is the text model."""
    vision = transformers.SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    text = transformers.Gemma3TextConfig(**HF)
    theirs = shake(transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.replace("language_model.model.", prefix): tensor for name, tensor in load_file(file).items()}
    assert any(name.startswith(prefix) for name in stored)
    save_file(stored, file, metadata={"format": "pt"})
    model, ids = models.load(tmp_path).eval(), torch.randint(0, VOCAB, (2, 20))
    told = capsys.readouterr().err
    assert f"{tmp_path}: vision_tower.* is not read" in told and "multi_modal_projector.* is not read" in told
    torch.testing.assert_close(model(ids), theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    models.save(model, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is transformers.Gemma3ForCausalLM
    torch.testing.assert_close(model(ids), back(ids).logits, rtol=1e-4, atol=1e-4)
    file.write_bytes(b"")
    save_file(stored | {f"{prefix}layers.0.self_attn.k_proj.bias": torch.zeros(24)}, file)
    with pytest.raises(UserError, match=r"extra .*k_proj\.bias"):
        models.load(tmp_path)


OLD = {  # google/gemma-3-4b-it's config.json, as transformers 4 wrote it
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
    "model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
PUBLISHED = {  # what their configurations state; the others are the class's defaults
    "270m": {"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
             "sliding_window": 512, "max_position_embeddings": 32_768},
    "1b": {"vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
           "sliding_window": 512, "max_position_embeddings": 32_768, "rope_theta": 1e6, "rope_local_base_freq": 10_000, "rope_scaling": None, "cache_implementation": "hybrid",
           "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256},
    "4b": OLD["text_config"],
    "12b": {**OLD["text_config"], "hidden_size": 3840, "intermediate_size": 15_360, "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8},
    "27b": {**OLD["text_config"], "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21_504, "num_attention_heads": 32, "num_hidden_layers": 62,
            "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_ones_and_count_as_theirs(name):
    preset, stated = config_of(f"gemma3-{name}"), {**PUBLISHED[name], "model_type": "gemma3_text"}
    assert config_from_hf(dict(stated)) == preset.model_copy(update={"preset": None})
    theirs = transformers.Gemma3TextConfig(**stated)
    assert config_from_hf(theirs.to_dict()) == config_from_hf(dict(stated)), "as transformers 5 writes it"
    with torch.device("meta"):
        total = sum(p.numel() for p in transformers.Gemma3ForCausalLM(theirs).parameters())
    assert models.count(preset)["total"] == total


def test_a_model_of_images_is_planned_and_read_as_its_text_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    config = config_of("gemma3-4b").model_copy(update={"preset": None})
    assert models.config_of(tmp_path) == config == read_hf(f"hf:{tmp_path}").config
    assert "the vision tower" in "; ".join(read_hf(f"hf:{tmp_path}").notes)
    (tmp_path / "config.json").write_text(json.dumps({**OLD, "text_config": {**OLD["text_config"], "kv_rank": 8}}))
    with pytest.raises(UserError, match="kv_rank=8: unknown for text_config"):
        models.config_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation=silu is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"layer_types": [S, F, F, S]}, "layer_types=.* .only all in the first and every n-th layer"),
        ({"sliding_window": None}, "layer_types=.* is not supported"),
        ({"rope_parameters": {**STRETCHED, S: STRETCHED[F]}}, "rope_parameters of sliding_attention=linear is not supported"),
        ({"rope_parameters": STRETCHED[F]}, "rope_parameters=.* .only for each type of layer"),
        ({"rope_parameters": {F: {"rope_type": "dynamic"}}}, "rope_type=dynamic is not supported"),
        ({"architectures": ["Gemma3TextForSequenceClassification"]}, "architectures=Gemma3TextForSequenceClassification is not supported"),
    ],
)
def test_what_is_not_built_is_named(fields, said):
    with pytest.raises(UserError, match=said):
        config_from_hf({**HF, "model_type": "gemma3_text", **fields})


def test_an_angle_that_is_not_stated_is_the_models_own():
    """Of the layers with a window too, where rope_parameters have those of the others alone."""
    for stated in ({}, {"rope_parameters": {F: {"rope_type": "default"}}}, {"rope_parameters": {F: {"rope_type": "default", "rope_theta": 1e6}}}):
        theirs = transformers.Gemma3TextConfig(**HF, **json.loads(json.dumps(stated))).rope_parameters
        config = config_from_hf({**HF, **stated})
        assert (config.rope_theta, config.local_theta) == (theirs[F]["rope_theta"], theirs[S]["rope_theta"]) == (1e6, 1e4)


def test_a_ring_is_refused_by_name():
    with pytest.raises(UserError, match=r"model\.window: cannot be combined with layout\.context_method=ring.*Set layout\.context_method=ulysses"):
        load("stdlib-gemma", ["layout.context=2"])
    assert load("stdlib-gemma", ["layout.context=2", "layout.context_method=ulysses"]).model.window == 64


def test_norms_start_at_1_and_are_the_identity_of_scale():
    model = models.build(GemmaConfig(**OURS))
    assert all((m.weight == 0).all() for m in model.modules() if isinstance(m, RMSNorm))
    assert abs(float(model.token_embedding.weight.detach().std()) - 0.02) < 2e-3
    x = torch.randn(5, 40)
    torch.testing.assert_close(model.norm(x), torch.nn.functional.rms_norm(x, (40,), eps=1e-6))


@pytest.mark.parametrize(("base", "most"), [("int8", 0.05), ("nf4", 0.4)])
def test_its_blocks_linears_are_stored_small_beside_an_adapter(base, most, tmp_path):
    model = shake(models.build(GemmaConfig(**OURS))).eval()
    models.save(model, tmp_path)
    config, ids = models.config_of(tmp_path).model_copy(update={"init": str(tmp_path)}), torch.randint(0, VOCAB, (2, 20))
    small = models.load_start(config.trained(Adapter(rank=2, base=base)), seed=1).on("cpu").eval()
    off = (small(ids) - model(ids)).abs().max() / model(ids).abs().max()
    assert 0 < off < most
