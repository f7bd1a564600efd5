"""Models with multi-head latent attention, which are planned only: as many parameters as transformers' own, operations and what is kept in use by the
closed forms of DeepSeek-V2's section 2.1, and one sentence from `plan` and from `train`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers as hf

from gradus import models
from gradus.errors import UserError
from gradus.hardware import cluster
from gradus.parallel import check
from gradus.plan import engine
from gradus.plan.batches import complete
from gradus.plan.case import Case
from gradus.plan.counts import active, flops
from gradus.plan.hf import read_hf, recipe_for
from gradus.plan.serving import serving, usage_of
from gradus.plan.trace import trace_recipe
from gradus.recipe.schema import Layout, LlamaConfig, Recipe

KIMI = {"vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
LITE = {"hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1}  # fmt: skip
THEIRS = {  # name → (configuration, as published; class; all parameters with the routers' biases, and those that a token meets, where published)
    "deepseek_v3": (hf.DeepseekV3Config(), hf.DeepseekV3ForCausalLM, 671_026_419_200, 37_552_297_472),
    "kimi_k2": (hf.DeepseekV3Config(**KIMI), hf.DeepseekV3ForCausalLM, 1_026_408_232_448, 32_861_500_928),
    "deepseek_v2": (hf.DeepseekV2Config(**LITE), hf.DeepseekV2ForCausalLM, 15_706_484_224, None),
    "minicpm3": (hf.MiniCPM3Config(), hf.MiniCPM3ForCausalLM, None, None),
    "youtu": (hf.YoutuConfig(), hf.YoutuForCausalLM, None, None),
    "glm4_moe_lite": (hf.Glm4MoeLiteConfig(), hf.Glm4MoeLiteForCausalLM, None, None),
    "mistral4": (hf.Mistral4Config(), hf.Mistral4ForCausalLM, None, None),
}  # fmt: skip


def written(folder: Path, name: str, **more) -> str:
    content = {**THEIRS[name][0].to_dict(), "architectures": [THEIRS[name][1].__name__], "model_type": name, **more}
    (folder / "config.json").write_text(json.dumps(content))
    return f"hf:{folder}"


@pytest.mark.parametrize("name", THEIRS)
def test_as_many_parameters_as_theirs(name, tmp_path):
    theirs, cls, total, meets = THEIRS[name]
    with torch.device("meta"):
        theirs = sum(p.numel() for p in cls(theirs).parameters())
    ours = read_hf(written(tmp_path, name)).config
    assert models.count(ours)["total"] == theirs
    biases = sum(b.numel() for b in models.whole(ours).buffers())
    assert total in (None, theirs + biases) and meets in (None, active(ours) + biases)


def test_plan_and_train_say_the_same(tmp_path):
    """DeepSeek-V3's config.json as published; the note names the part."""
    published = {
        "quantization_config": {"quant_method": "fp8"}, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "num_nextn_predict_layers": 1, "rope_theta": 10_000,
        "rope_parameters": None, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    folder, notes = written(tmp_path, "deepseek_v3", **published), []
    recipe_for(folder, notes=notes)
    said = "model_type=deepseek_v3 can be planned, not trained: multi-head latent attention (kv_lora_rank) is built for plans only"
    assert notes[:2] == [said, "without a module that predicts further tokens (num_nextn_predict_layers), and with plain weights for quantized ones"]
    with pytest.raises(UserError) as refused:
        models.config_of(tmp_path)
    assert f"{said}. Plan it: gradus plan {folder}" in str(refused.value)
    for fields, error in (({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"), ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
                          ({"attention_bias": True}, "attention_bias=True is not supported")):  # fmt: skip
        with pytest.raises(UserError, match=error):
            read_hf(written(tmp_path, "deepseek_v3", **fields))


# ---------------------------------------------------------------- closed forms

SIZES = H, A, QR, R, NOPE, ROPE, V, E, K, F, DENSE, WORDS, LAYERS = 32, 4, 24, 16, 12, 8, 10, 6, 2, 20, 56, 97, 3
SMALL = LlamaConfig(
    vocab_size=WORDS, n_layers=LAYERS, d_model=H, n_heads=A, d_ff=DENSE, seq_len=16, n_experts=E, top_k=K, d_expert=F, d_shared=2 * F,
    dense_layers=[0], shared_gate=False, router="sigmoid", latent={"q_rank": QR, "kv_rank": R, "nope_dim": NOPE, "rope_dim": ROPE, "v_dim": V},
)  # fmt: skip
ATTENTION = H * QR + QR * A * (NOPE + ROPE) + H * (R + ROPE) + R * A * (NOPE + V) + A * V * H  # equations 9 to 19
NETWORKS = 3 * H * DENSE + (LAYERS - 1) * (3 * H * (K * F + 2 * F) + H * E)
MATRICES = LAYERS * ATTENTION + NETWORKS  # without the output's


def recipe(n: int = 1, **layout) -> Recipe:
    return Recipe(
        model=SMALL, task={"name": "causal_lm"}, data={"kind": "text"}, optimizer={"name": "adamw", "lr": 1e-3}, batch={"samples": 2 * n},
        train={"steps": 1}, layout=layout,
    )  # fmt: skip


def test_operations_of_a_step_are_the_closed_form():
    """6 a weight and token; of a pair of query and key 2 a head and width of scores and of values, three times, and the scores again in a
    fused kernel's backward pass."""
    s, samples = 16, 2
    rows = {row.name: row.value for row in flops(Case.of(recipe(), target="cuda"))}
    matrices, pairs = 6 * s * (MATRICES + H * WORDS), 2 * LAYERS * A * s * s
    assert rows["flops/model"] == samples * (matrices + 3 * pairs * (NOPE + ROPE + V))
    assert rows["flops/hardware"] == rows["flops/model"] + samples * pairs * (NOPE + ROPE)
    assert rows["flops/model_causal"] == samples * (matrices + 3 * pairs * (NOPE + ROPE + V) / 2)


def test_in_use_a_token_attends_to_what_is_kept():
    """kv_rank + rope_dim elements a token and layer, on every device; a further token multiplies by the same weights as in the prompt, and
    its attention is over vectors of the latent width (section 2.1.2)."""
    batch, s = 3, 12
    usage = usage_of(SMALL, batch, s)
    assert usage.own == batch * s * LAYERS * (R + ROPE)
    prompt = 2 * s * MATRICES + 2 * H * WORDS + LAYERS * A * s * s * (NOPE + ROPE + V)  # causal: half of the scores
    token = 2 * (MATRICES + H * WORDS) + 2 * LAYERS * A * s * (R + ROPE + R)
    assert (usage.prefill.operations, usage.decode.operations) == (batch * prompt, batch * token)
    norms = LAYERS * (2 * H + QR + R) + H
    assert usage.decode.weights == MATRICES + H * WORDS + norms


def test_deepseek_v3_keeps_as_much_of_a_token_as_published(tmp_path):
    """Zhao et al. 2025 (Insights into DeepSeek-V3), table 1: 70.272 KB, in bf16; on each device of a node that it is split over."""
    config = read_hf(written(tmp_path, "deepseek_v3")).config
    for on in (None, cluster("8xH200")):
        rows = {row.name: row.value for row in serving(config, seq_len=64, on=on)}
        assert rows["serving/kv_per_token"] == 70_272


LAYOUTS = [{"expert": 2, "shard": 2, "precision": "bf16"}, {"shard": 4, "checkpointing": "selective"}, {"checkpointing": "attention"}]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_layout_is_put_together_as_it_is_traced_whole(layout, target):
    n = max(1, layout.get("expert", 1) * layout.get("shard", 1))
    r = complete(recipe(n, **layout))
    whole, plan = trace_recipe(r, n, target=target), engine.plan(Case.of(r, n, target=target))
    assert plan.memory.allocated == pytest.approx(whole.peak, rel=0.02)
    operations = [sum(op.flops * op.count for op in work.micro) for work in (plan.work, whole.work)]
    assert operations[0] == pytest.approx(operations[1], rel=1e-6)


def test_layouts_that_split_heads_or_the_sequence_are_refused_by_name():
    dense = SMALL.changed(n_experts=None, d_shared=None, d_expert=None, dense_layers=[])
    for axis, ways in itertools.product(("tensor", "context"), ("expert", "pipeline", "shard")):
        error = "\n".join(check.fits(dense, Layout(**{axis: 2})))
        assert f"layout.{axis}: cannot be combined with model.latent: " in error and f"layout.{ways}" in error
    assert not list(check.fits(dense, Layout(pipeline=2)))
