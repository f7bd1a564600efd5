"""config.json → our configuration, with as many parameters as transformers' own class on the meta device; bare models → recipes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.models.weights import others
from gradus.plan.answer import Request, open_recipe
from gradus.plan.batches import complete
from gradus.plan.case import Case
from gradus.plan.counts import active, flops, parameters, tokens_a_sample
from gradus.plan.hf import read_hf, recipe_for
from gradus.plan.serving import serving
from gradus.recipe.presets import PRESETS, config_of

sys.path[:0] = [str(Path(__file__).parent)]

from test_latent_plans import THEIRS as LATENT  # noqa: E402

SIZE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**SIZE, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
BERT = {**SIZE, "max_position_embeddings": 66}
MODERN = hf.ModernBertConfig(**{**BERT, "num_hidden_layers": 4}, pad_token_id=0, num_labels=3)
DISTIL = hf.DistilBertConfig(vocab_size=97, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=66, num_labels=3)
THEIRS = {  # name → (configuration, class)
    "gpt2": (hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=32), hf.GPT2LMHeadModel),
    "gpt2-dropouts": (hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, attn_pdrop=0.0, activation_function="silu"), hf.GPT2LMHeadModel),
    "opt": (hf.OPTConfig(vocab_size=97, hidden_size=48, ffn_dim=80, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
                         word_embed_proj_dim=48), hf.OPTForCausalLM),
    "llama": (hf.LlamaConfig(**LLAMA, num_key_value_heads=2), hf.LlamaForCausalLM),
    "smollm3": (hf.SmolLM3Config(**LLAMA, num_key_value_heads=2, pad_token_id=0), hf.SmolLM3ForCausalLM),
    "llama-linear-rope": (hf.LlamaConfig(**LLAMA, rope_scaling={"type": "linear", "factor": 2.0}), hf.LlamaForCausalLM),
    "mistral": (hf.MistralConfig(**LLAMA, num_key_value_heads=2, head_dim=12, sliding_window=32), hf.MistralForCausalLM),
    "mixtral": (hf.MixtralConfig(**LLAMA, num_key_value_heads=2, head_dim=12, num_local_experts=4), hf.MixtralForCausalLM),
    "qwen2": (hf.Qwen2Config(**LLAMA, num_key_value_heads=2, sliding_window=32), hf.Qwen2ForCausalLM),
    "qwen3": (hf.Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=20), hf.Qwen3ForCausalLM),
    "qwen3_moe": (hf.Qwen3MoeConfig(**LLAMA, num_key_value_heads=2, head_dim=20, **EXPERTS, decoder_sparse_step=2), hf.Qwen3MoeForCausalLM),
    "qwen2_moe": (hf.Qwen2MoeConfig(**LLAMA, num_key_value_heads=2, **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]), hf.Qwen2MoeForCausalLM),
    "hunyuan_v1_dense": (hf.HunYuanDenseV1Config(**LLAMA, num_key_value_heads=2, head_dim=20), hf.HunYuanDenseV1ForCausalLM),
    "gemma": (hf.GemmaConfig(**LLAMA, num_key_value_heads=1, head_dim=20), hf.GemmaForCausalLM),
    "gemma3_text": (hf.Gemma3TextConfig(**LLAMA, num_key_value_heads=2, head_dim=20, sliding_window=32), hf.Gemma3ForCausalLM),
    "phi3": (hf.Phi3Config(**LLAMA, num_key_value_heads=2, pad_token_id=0), hf.Phi3ForCausalLM),
    "ministral": (hf.MinistralConfig(**LLAMA, num_key_value_heads=2, head_dim=12, sliding_window=32), hf.MinistralForCausalLM),
    "ernie4_5": (hf.Ernie4_5Config(**LLAMA, num_key_value_heads=2, head_dim=20), hf.Ernie4_5ForCausalLM),
    "granite": (hf.GraniteConfig(**LLAMA, num_key_value_heads=2, logits_scaling=8.0), hf.GraniteForCausalLM),
    "bert": (hf.BertConfig(**BERT), hf.BertModel),
    "bert-masked-lm": (hf.BertConfig(**BERT, attention_probs_dropout_prob=0.0), hf.BertForMaskedLM),
    "bert-pretraining": (hf.BertConfig(**BERT), hf.BertForPreTraining),
    "bert-classes": (hf.BertConfig(**BERT, num_labels=5), hf.BertForSequenceClassification),
    "roberta-masked-lm": (hf.RobertaConfig(**BERT, type_vocab_size=1), hf.RobertaForMaskedLM),
    "roberta-classes": (hf.RobertaConfig(**BERT, type_vocab_size=1, num_labels=3), hf.RobertaForSequenceClassification),
    "xlm-roberta": (hf.XLMRobertaConfig(**BERT, type_vocab_size=1), hf.XLMRobertaForMaskedLM),
    "camembert": (hf.CamembertConfig(**BERT, type_vocab_size=1), hf.CamembertForMaskedLM),
    "distilbert": (DISTIL, hf.DistilBertForMaskedLM),
    "distilbert-classes": (DISTIL, hf.DistilBertForSequenceClassification),
    "modernbert": (MODERN, hf.ModernBertForMaskedLM),
    "modernbert-classes": (MODERN, hf.ModernBertForSequenceClassification),
    "t5": (hf.T5Config(vocab_size=97, d_model=48, d_ff=80, d_kv=10, num_layers=2, num_decoder_layers=3, num_heads=4), hf.T5ForConditionalGeneration),
    "t5-gated": (hf.T5Config(vocab_size=97, d_model=48, d_ff=80, d_kv=10, num_layers=2, num_heads=4, feed_forward_proj="gated-silu"),
                 hf.T5ForConditionalGeneration),
    "mt5": (hf.MT5Config(vocab_size=97, d_model=48, d_ff=80, d_kv=10, num_layers=2, num_heads=4, tie_word_embeddings=True),
            hf.MT5ForConditionalGeneration),
    "vit": (hf.ViTConfig(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=7),
            hf.ViTForImageClassification),
    "ijepa": (hf.IJepaConfig(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=7),
              hf.IJepaForImageClassification),
}  # fmt: skip


KEYS = {**LLAMA, "num_key_value_heads": 2}
WINDOW = {**KEYS, "head_dim": 20, "sliding_window": 32}


def qk(c):
    return 2 * c.head_dim * c.num_hidden_layers


def norms(c):
    return c.hidden_size * (2 * c.num_hidden_layers + 1)


NEAR = {  # name → (configuration, class, what it has more than ours)
    "olmo": (hf.OlmoConfig(**KEYS), hf.OlmoForCausalLM, lambda c: -norms(c)),
    **{name: (config(**KEYS), cls, lambda c: c.hidden_size * (1 + c.num_key_value_heads / c.num_attention_heads) * c.num_hidden_layers)
       for name, config, cls in (("olmo2", hf.Olmo2Config, hf.Olmo2ForCausalLM), ("olmo3", hf.Olmo3Config, hf.Olmo3ForCausalLM))},
    "exaone4": (hf.Exaone4Config(**KEYS, sliding_window=32), hf.Exaone4ForCausalLM, lambda c: 2 * c.hidden_size // c.num_attention_heads * c.num_hidden_layers),
    "gemma2": (hf.Gemma2Config(**WINDOW), hf.Gemma2ForCausalLM, lambda c: norms(c) - c.hidden_size),
    "cohere": (hf.CohereConfig(**KEYS), hf.CohereForCausalLM, lambda c: -c.hidden_size * c.num_hidden_layers),
    "cohere2": (hf.Cohere2Config(**WINDOW), hf.Cohere2ForCausalLM, lambda c: -c.hidden_size * c.num_hidden_layers),
    "gpt_oss": (hf.GptOssConfig(**WINDOW, num_local_experts=4, num_experts_per_tok=2), hf.GptOssForCausalLM, lambda c: c.num_hidden_layers * (
        c.num_attention_heads + c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads) + c.hidden_size  # sinks, biases of q, k, v, out
        + c.num_local_experts * (1 + 2 * c.intermediate_size + c.hidden_size))),  # of the router and the experts
    "stablelm": (hf.StableLmConfig(**KEYS), hf.StableLmForCausalLM, norms),
}  # fmt: skip


def written(folder, config, cls=None, **more):
    content = {**config.to_dict(), "architectures": [cls.__name__] if cls else None, **more}
    (folder / "config.json").write_text(json.dumps(content))
    return f"hf:{folder}"


def from_hf(name):
    read = read_hf(name)
    return read.config, "; ".join(read.notes)


def count_of(cls, config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in cls(config).parameters())


@pytest.mark.parametrize("name", THEIRS)
def test_as_many_parameters_as_theirs(name, tmp_path):
    config, cls = THEIRS[name]
    ours, note = from_hf(written(tmp_path, config, cls))
    assert models.count(ours)["total"] == count_of(cls, config)
    assert ("planned" in note or "left out" in note or "used" in note) == (
        name in ("gpt2-dropouts", "opt", "gemma", "granite", "bert-masked-lm", "t5-gated")
    ), note


@pytest.mark.parametrize("name", NEAR)
def test_what_a_near_family_lacks_is_said_and_is_next_to_nothing(name, tmp_path):
    """As many parameters as theirs but for what the note names; of the sizes that transformers has by default, under 0.1 %. It is not trained."""
    config, cls, more = NEAR[name]
    folder, entry = written(tmp_path, config, cls), others.planned()[config.model_type]
    ours = from_hf(folder)[0]
    assert models.count(ours)["total"] + more(config) == count_of(cls, config)
    usual = type(config)()
    assert abs(more(usual)) < 0.001 * models.count(from_hf(written(tmp_path, usual, cls))[0])["total"]
    notes: list[str] = []
    recipe_for(folder, notes=notes)
    said = f"model_type={config.model_type} can be planned, not trained: it is planned as family {entry['family']} {entry['near']}: under 0.1 % of the parameters"
    assert said in notes
    with pytest.raises(UserError, match="can be planned, not trained"):
        models.config_of(folder.removeprefix("hf:"))


@pytest.mark.parametrize("experts", ["num_experts", "num_local_experts"])
def test_qwen3_moe_as_published_and_as_transformers_writes_it(tmp_path, experts):
    """Qwen3-30B-A3B has 30.53 billion parameters, 3.3 of them active."""
    content = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
               "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, experts: 128,
               "num_experts_per_tok": 8, "tie_word_embeddings": False, "max_position_embeddings": 40_960, "rope_theta": 1e6, "mlp_only_layers": []}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    ours, note = from_hf(f"hf:{tmp_path}")
    assert (models.count(ours)["total"], active(ours), note) == (30_532_122_624, 3_353_032_704, "")


def test_every_reader_is_tested_and_none_is_also_refused():
    kinds = {config.model_type for config, *_ in (*THEIRS.values(), *NEAR.values())} | {"marian", "pegasus", "gemma3", *LATENT}  # tests/models/test_gemma.py
    assert kinds == set(others.planned()) and not kinds & set(others.table()["refused"])


def test_published_configurations(tmp_path):
    """Sizes as released, against their published counts."""
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
               "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "sliding_window": 4096,
               "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
    gemma = {**mistral, "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "vocab_size": 256_000, "hidden_size": 2048, "head_dim": 256,
             "intermediate_size": 16_384, "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_act": "gelu",
             "max_position_embeddings": 8192, "tie_word_embeddings": True, "sliding_window": None}  # fmt: skip
    opt = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 50_272, "hidden_size": 4096, "ffn_dim": 16_384,
           "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "word_embed_proj_dim": 4096}  # fmt: skip
    roberta = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50_265, "hidden_size": 768, "intermediate_size": 3072,
               "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}  # fmt: skip
    distilbert = {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "vocab_size": 30_522, "dim": 768, "hidden_dim": 3072,
                  "n_layers": 6, "n_heads": 12, "max_position_embeddings": 512, "sinusoidal_pos_embds": False, "seq_classif_dropout": 0.2}  # fmt: skip
    modernbert = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "vocab_size": 50_368, "hidden_size": 768,
                  "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
                  "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_attention": 128, "local_rope_theta": 10_000.0}  # fmt: skip
    phi3 = {**mistral, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 32_064, "hidden_size": 3072, "num_key_value_heads": 32,
            "intermediate_size": 8192, "max_position_embeddings": 4096, "sliding_window": 2047}  # fmt: skip
    mt5 = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "vocab_size": 250_112, "d_model": 512, "d_ff": 1024, "d_kv": 64,
           "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # fmt: skip
    for content, published in ((phi3, 3_821_079_552), (mt5, 300_176_768), (mistral, 7_241_732_096), (gemma, 2_506_172_416), (opt, 6_658_473_984), (roberta, 124_697_433),
                               (distilbert, 66_985_530), (modernbert, 149_655_232)):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert models.count(from_hf(f"hf:{tmp_path}")[0])["total"] == published, content["model_type"]


@pytest.mark.parametrize("kind", ["marian", "pegasus"])
def test_original_transformers(kind, tmp_path):
    """Theirs counts its two tables of sinusoidal positions, which are not trained, and not the bias of the output, a buffer there."""
    size = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 80))}
    more = {"scale_embedding": True, "activation_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.1}
    cls = {"marian": hf.MarianMTModel, "pegasus": hf.PegasusForConditionalGeneration}[kind]
    config = cls.config_class(vocab_size=97, d_model=48, max_position_embeddings=32, pad_token_id=0, decoder_start_token_id=0, **size, **more)
    ours, note = from_hf(written(tmp_path, config, cls))
    assert models.count(ours)["total"] == count_of(cls, config) - 2 * 32 * 48 + 97
    assert "the output bias" in note and "activation_dropout=0.0 planned as 0.1" in note


def test_what_is_not_known_of_a_configuration_is_said(tmp_path):
    """Of each field that transformers writes a plan knows what it does; of another a note says so, also of types that are not trained."""
    for name, (config, cls, *_) in (THEIRS | NEAR).items():
        folder = written(tmp_path, config, cls)
        assert ": unknown for" not in from_hf(folder)[1], name
        ours, note = from_hf(written(tmp_path, config, cls, kv_rank=8, note=None))
        assert f"config.json: kv_rank=8: unknown for model_type={config.model_type}, planned as if it changed nothing" in note
        assert models.count(ours) == models.count(from_hf(written(tmp_path, config, cls))[0])


def test_a_window_limits_the_length(tmp_path):
    config, cls = THEIRS["mistral"]
    ours, note = from_hf(written(tmp_path, config, cls))
    assert (ours.seq_len, ours.window, note) == (64, 32, ""), "ours is as theirs"
    ours, note = from_hf(written(tmp_path, config, cls, model_type="granite"))
    assert (ours.seq_len, ours.window) == (64, 32)
    mixed = ["sliding_attention", "full_attention", "full_attention"]
    ours, note = from_hf(written(tmp_path, config, cls, model_type="granite", layer_types=mixed))
    assert (ours.seq_len, ours.window) == (32, None) and "sliding_window=32" in note
    ours, note = from_hf(written(tmp_path, config, cls, sliding_window=None))
    assert ours.seq_len == 64 and note == ""


@pytest.mark.parametrize(
    ("config", "fields", "seen"),
    [
        (hf.GptOssConfig(**WINDOW), {}, (32, 2)),
        (hf.Gemma2Config(**WINDOW), {"layer_types": None}, (32, 2)),
        (hf.Cohere2Config(**{**WINDOW, "num_hidden_layers": 5}), {}, (32, 4)),
        (hf.Exaone4Config(**{**WINDOW, "num_hidden_layers": 5}), {"layer_types": None, "sliding_window_pattern": "LLLG"}, (32, 4)),
        (hf.Olmo3Config(**WINDOW), {"layer_types": ["sliding_attention"] * 3}, (32, None)),
        (hf.Phi3Config(**LLAMA, pad_token_id=0, sliding_window=32), {}, (32, None)),
        (hf.Phi3Config(**LLAMA, pad_token_id=0, sliding_window=64), {}, (None, None)),
        (hf.Olmo3Config(**WINDOW), {"layer_types": ["full_attention"] * 3}, (None, None)),
    ],
)
def test_windows_by_layer_are_planned_as_such(config, fields, seen, tmp_path):
    """Of what is planned alone; the length stays, and a prompt's keys and values are kept by the type of the layer."""
    ours, note = from_hf(written(tmp_path, config, **fields))
    assert (ours.window, ours.full_every) == seen and ours.seq_len == 64 and "sliding_window" not in note
    rows = {row.name: row.value for row in serving(ours, batch=1, seq_len=64, bits=16, precision="bf16")}
    tokens = sum(min(ours.window_of(i) or 64, 64) for i in range(ours.n_layers))
    assert rows["serving/kv_cache"] == 2 * 2 * ours.n_kv_heads * ours.head_dim * tokens
    assert ("serving/rule_tokens" in rows) == (ours.window is None), "with a window a token takes no constant number of bytes"


def test_layers_mixed_in_another_way_limit_the_length(tmp_path):
    mixed = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ours, note = from_hf(written(tmp_path, hf.Gemma2Config(**WINDOW), **mixed))
    assert (ours.window, ours.seq_len) == (None, 32) and "up to 32 tokens, where the window changes nothing" in note


def test_untied_mt5_has_a_head_of_its_own(tmp_path):
    config, cls = THEIRS["mt5"]
    tied = count_of(cls, config)
    ours, _ = from_hf(written(tmp_path, config, cls, tie_word_embeddings=False))
    assert models.count(ours)["total"] == tied + 97 * 48


def test_positions_that_are_stored_and_never_used(tmp_path):
    for name in ("opt", "roberta-masked-lm"):
        name_or_path = written(tmp_path, *THEIRS[name])
        read = read_hf(name_or_path)
        assert (read.seq_len or read.config.seq_len) == recipe_for(name_or_path).data.max_len == 64


@pytest.mark.parametrize("cls", [hf.RobertaModel, hf.XLMRobertaModel, hf.CamembertModel, hf.DistilBertModel])
def test_a_bare_encoder_is_planned_with_the_head_that_it_learns(cls, tmp_path):
    config = DISTIL if cls is hf.DistilBertModel else cls.config_class(**BERT)
    ours, note = from_hf(folder := written(tmp_path, config, cls))
    assert ours.head == recipe_for(folder).model.head == "masked_lm" and "without the pooler" in note


def test_what_lies_in_our_own_folders_is_read_as_it_is(tmp_path):
    ours = config_of("gpt2-small").model_copy(update={"preset": None, "n_layers": 1, "vocab_size": 50})
    models.save(models.build(ours), tmp_path)
    assert from_hf(f"hf:{tmp_path}") == (ours, "")


def test_a_length_that_nobody_stated_is_said(tmp_path):
    for positions in (8192, 4096, 2048):
        config = hf.LlamaConfig(**{**LLAMA, "max_position_embeddings": positions})
        folder = written(tmp_path, config, hf.LlamaForCausalLM)
        recipe = recipe_for(folder, notes=(notes := []))
        assert recipe.data.max_len == (length := min(4096, positions))
        assert f"planned for samples of {length:,} tokens, of {positions:,} that the model takes (data.max_len)" in notes
        for stated in ("data.max_len=512", "model.seq_len=512"):
            recipe = open_recipe(Request(folder, (stated,)), notes := [])[0]
            assert recipe.data.max_len == 512 and not any("planned for samples" in note for note in notes)


def test_a_folder_is_planned_by_its_config_and_said_not_to_be_trained_where_it_is_not(tmp_path):
    from gradus.plan.answer import Request, open_recipe

    for name, trained in (("opt", False), ("llama", True)):
        (tmp_path / name).mkdir()
        folder = written(tmp_path / name, *THEIRS[name]).removeprefix("hf:")
        recipe, _, bare = open_recipe(Request(folder), notes := [])
        assert bare == f"hf:{folder}" and recipe.model == read_hf(folder).config
        assert any(f"model_type={name} can be planned, not trained: " in note for note in notes) is not trained


@pytest.mark.parametrize("kind", others.table()["refused"])
def test_refused_families_name_the_field_and_the_nearest(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError, match=f"model_type={kind} can be neither planned nor trained: ") as e:
        from_hf(f"hf:{tmp_path}")
    assert "\n" not in str(e.value)
    with pytest.raises(UserError) as trained:
        models.config_of(tmp_path)
    assert str(trained.value).partition("model_type=")[2] == str(e.value).partition("model_type=")[2], "the same sentence"
    family, preset = others.table()["refused"][kind][2:]
    assert f"The nearest family is {family}: gradus plan {preset}" in str(e.value)
    assert config_of(preset).family == family


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures=LlamaForSequenceClassification is not supported"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads: missing"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim=24 is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "architectures=BertForTokenClassification is not supported"),
        ("bert", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("t5", {"feed_forward_proj": "swish"}, "feed_forward_proj=swish is not supported"),
        ("vit", {"qkv_bias": False}, "qkv_bias=False is not supported"),
        ("gpt2", {"model_type": "gpt5"}, r"model_type=gpt5 is not one of Gradus's families, nor similar to one\. Known: (?!.*Did you mean)"),
        ("gpt2", {"model_type": None}, "model_type=None is not one of"),
        ("llama", {"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
    ],
)
def test_fields_that_do_not_map_are_named(name, more, text, tmp_path):
    with pytest.raises(UserError, match=text) as e:
        from_hf(written(tmp_path, *THEIRS[name], **more))
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


@pytest.mark.parametrize(
    ("width", "inner", "layers", "heads", "keys", "vocab", "tied", "published"),
    [
        (896, 4864, 24, 14, 2, 151_936, True, 494_032_768),
        (1536, 8960, 28, 12, 2, 151_936, True, 1_543_714_304),
        (3584, 18_944, 28, 28, 4, 152_064, False, 7_615_616_512),
    ],
)
def test_qwen2_as_published(tmp_path, width, inner, layers, heads, keys, vocab, tied, published):
    """Qwen2.5-0.5B, 1.5B and 7B: the biases of q, k and v are (a + 2k)·d a layer. The window that they name is not used."""
    config = hf.Qwen2Config(vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                            num_key_value_heads=keys, max_position_embeddings=32_768, tie_word_embeddings=tied)  # fmt: skip
    name = written(tmp_path, config, hf.Qwen2ForCausalLM, use_sliding_window=False, sliding_window=4096)
    ours, note = from_hf(name)
    assert (ours.qkv_bias, ours.seq_len, ours.tie_output, note) == (True, 32_768, tied, "")
    assert models.count(ours)["total"] == count_of(hf.Qwen2ForCausalLM, config) == published
    window = {"use_sliding_window": True, "sliding_window": 4096, "layer_types": None}
    ours, note = from_hf(written(tmp_path, config, hf.Qwen2ForCausalLM, **window))
    assert (ours.seq_len, note) == (32_768, ""), "only layers from max_window_layers=28 on have the window: none"
    ours, note = from_hf(written(tmp_path, config, hf.Qwen2ForCausalLM, **window, max_window_layers=4))
    assert (ours.seq_len, ours.window, ours.full_first, note) == (32_768, 4096, 4, "")


def test_a_hub_name_without_internet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no such folder, and not in the local copy of the hub") as e:
        from_hf("hf:nobody/no-such-model")
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="hf: what comes after it is missing"):
        from_hf("hf:")
    with pytest.raises(UserError, match="no such file or folder"):
        from_hf("hf:./not/here")


# ---------------------------------------------------------------- recipes


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_recipe(name):
    notes: list[str] = []
    r = recipe_for(name, notes=notes)
    assert recipes.resolve(r.model_dump()) == r
    assert r.model.preset == name and r.layout.precision == "bf16" and any("training settings" in note for note in notes)
    assert complete(r).model == r.model  # nothing is left for the data to tell
    assert r.schedule.warmup_steps < r.train.steps and r.layout.micro_batch <= r.batch.samples
    assert recipes.load(name, text=recipes.dump(r)) == r


@pytest.mark.parametrize(
    ("name", "tokens_a_step", "seq_len", "tokens"),
    [
        ("gpt3-175b", 3.2e6, 2048, 300e9),
        ("gpt3-13b", 2e6, 2048, 300e9),
        ("gpt3-small", 0.5e6, 2048, 300e9),
        ("llama2-70b", 4e6, 4096, 2e12),
        ("llama3.1-405b", 16e6, 8192, 15.6e12),
        ("bert-base", 256 * 512, 512, 256 * 512 * 1e6),
        ("roberta-large", 8192 * 512, 512, 8192 * 512 * 5e5),
        ("qwen3-4b", 4e6, 4096, 36e12),
        ("smollm2-1.7b", 2e6, 2048, 11e12),
        ("smollm3-3b", 2.36e6, 4096, 11.2e12),
        ("gpt2-small", 512 * 1024, 1024, 20 * 124_439_808),
    ],
)
def test_published_settings(name, tokens_a_step, seq_len, tokens):
    r = recipe_for(name)
    assert r.batch.samples * tokens_a_sample(r) == pytest.approx(tokens_a_step, rel=0.06)
    assert r.data.max_len == seq_len
    assert r.train.steps * r.batch.samples * tokens_a_sample(r) == pytest.approx(tokens, rel=1e-3)
    assert models.count(r.model)["total"]  # it can be built


def test_t5_and_vit_settings():
    t5, vit = recipe_for("t5-11b"), recipe_for("vit-l16")
    assert (t5.task.name, t5.batch.samples, t5.data.max_len, t5.train.steps) == ("span_corruption", 2048, 512, 1_000_000)
    assert (vit.task.name, vit.batch.samples, vit.train.steps) == ("classification", 4096, math.ceil(300 * 1_281_167 / 4096))


def test_an_adapter_is_planned_with_the_batch_of_a_fine_tuning():
    """Hu et al. 2022, appendix D.4: 128 samples, 2,048 tokens; the learning rate and its schedule: table 12."""
    def planned(*words, name="llama3.1-8b", tokens=1e9):
        return open_recipe(Request(name, words, tokens=tokens), notes := [])[0], " ".join(notes)

    r, notes = planned("adapter.rank=16")
    assert (r.batch.samples, r.data.max_len, r.layout.precision, r.optimizer.lr, r.schedule.name) == (128, 2048, "pure_bf16", 2e-4, "linear")
    assert r.train.steps == math.ceil(1e9 / (128 * 2048)) and "Hu et al. 2022 (LoRA), appendix D.4" in notes and "layout.precision=pure_bf16" in notes
    whole, notes = planned("adapter.rank=16", tokens=None)  # of data that are yours
    assert (whole.train.steps, whole.train.epochs) == (None, 2) and "15" not in notes
    own, notes = planned("adapter.rank=16", "batch.samples=16", "data.max_len=512", "layout.precision=bf16")
    assert (own.batch.samples, own.data.max_len, own.layout.precision, own.train.steps) == (16, 512, "bf16", math.ceil(1e9 / (16 * 512)))
    assert "pure_bf16" not in notes
    assert (lambda r: (r.batch.samples, r.data.max_len))(planned("adapter={rank: 8}", name="gpt2-small")[0]) == (128, 1024), "no more than its positions"
    assert planned("adapter.rank=8", name="vit-l16", tokens=None)[0].batch == recipe_for("vit-l16").batch, "images: as published"


def test_fsdps_mixed_precision_is_one_key_of_a_bare_model():
    def layout(*words):
        return open_recipe(Request("gpt2-small", words), [])[0].layout

    assert layout("layout.shard=2", "layout.param_dtype=bf16").precision == "fp32" and layout("layout.shard=2").precision == "bf16"
    assert layout("layout.shard=2", "layout.param_dtype=null").precision == "bf16"
    with pytest.raises(UserError, match="both say what is computed in"):
        layout("layout.shard=2", "layout.param_dtype=bf16", "layout.precision=bf16")


def test_a_config_json_may_be_named_itself(tmp_path):
    folder = written(tmp_path, *THEIRS["mixtral"]).removeprefix("hf:")
    by_file, by_folder = (open_recipe(Request(str(path)), [])[0] for path in (Path(folder) / "config.json", folder))
    assert by_file == by_folder


def test_what_is_asked_for_wins():
    said = ("batch.samples=64", "model.seq_len=1024", "layout.tensor=8", "optimizer.lr=1e-3", "train.seed=7")
    r = open_recipe(Request("gpt3-13b", said, tokens=1e9), [])[0]
    assert (r.data.max_len, r.batch.samples, r.layout.tensor, r.optimizer.lr, r.train.seed) == (1024, 64, 8, 1e-3, 7)
    assert r.train.steps == math.ceil(1e9 / (64 * 1024))
    assert open_recipe(Request("gpt2", ("optimizer.name=sgd",)), [])[0].optimizer.name == "sgd"


def test_another_model_is_trained_as_the_nearest_in_size_with_as_many_tokens_a_step(tmp_path):
    config = hf.LlamaConfig(vocab_size=32_000, max_position_embeddings=2048)  # 7B
    notes: list[str] = []
    r = recipe_for(written(tmp_path, config, hf.LlamaForCausalLM), notes=notes)
    assert (r.optimizer.lr, r.batch.samples, r.data.max_len) == (3e-4, 2048, 2048)
    assert "Llama 2" in notes[0] and "2,048 tokens" in notes[1] and "20 per active parameter" in notes[2]
    assert recipe_for("mixtral-8x7b").optimizer.lr == 1.5e-4


def test_a_configuration_of_ones_own():
    config = config_of("gpt2-small", n_layers=4).model_copy(update={"preset": None})
    r = recipe_for(config)
    assert r.model == config and r.data.max_len == 1024
    assert {row.name for row in [*parameters(r.model), *flops(Case.of(r))]} >= {"parameters/total", "flops/model", "flops/hardware"}


@pytest.mark.parametrize(
    ("name", "task"), [("mixtral", "causal_lm"), ("bert", "masked_lm"), ("bert-classes", "classification"), ("t5", "span_corruption"), ("vit", "classification")]
)
def test_a_folder_as_a_recipe(name, task, tmp_path):
    r = recipe_for(written(tmp_path, *THEIRS[name]))
    assert recipes.resolve(r.model_dump()) == r
    assert r.task.name == task and complete(r) == r


@pytest.mark.parametrize(
    ("name", "word", "text"),
    [
        ("gpt3-175", None, "unknown preset. Did you mean gpt3-175b"),
        ("gpt2", "layout.tensr=2", "layout.tensr: unknown key. Did you mean layout.tensor"),
        ("gpt2", "optimizer.lr=-1", "optimizer.lr"),
    ],
)
def test_mistakes_are_told_in_one_line(name, word, text):
    with pytest.raises(UserError, match=text) as e:
        open_recipe(Request(name, (word,)), []) if word else recipe_for(name)
    assert "\n" not in str(e.value)
