"""Multi-head latent attention, which is planned only: the module that is traced computes what DeepSeek's does."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from torch import nn

from gradus import models
from gradus.cli import main
from gradus.errors import UserError
from gradus.recipe.schema import LlamaConfig

LATENT = {"q_rank": 28, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "v_dim": 10}
CONFIG = LlamaConfig(
    vocab_size=97, n_layers=3, d_model=48, n_heads=4, d_ff=80, seq_len=64, latent=LATENT, n_experts=6, top_k=2, d_expert=24, d_shared=48,
    shared_gate=False, router="sigmoid", dense_layers=[0], norm_eps=1e-6,
)  # fmt: skip
NAMES = {  # theirs → ours
    "model.embed_tokens": "token_embedding", "model.norm": "norm", "lm_head": "head", "model.layers": "blocks", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feedforward_norm", "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "to_q", "self_attn": "attention",
    "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "to_kv", "o_proj": "to_out", "q_proj": "to_q",
    "mlp.gate.": "mlp.router.", "shared_experts": "shared", "_proj": "", "mlp": "feedforward",
    "e_score_correction_bias": "choice_bias", "router.choice_bias": "choice_bias",
}  # fmt: skip


def both(config: LlamaConfig) -> tuple[nn.Module, nn.Module]:
    """Ours and transformers', with the same random weights."""
    latent = config.latent
    theirs = hf.DeepseekV3Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=2, n_routed_experts=6, routed_scaling_factor=1.0, kv_lora_rank=latent.kv_rank,
        q_lora_rank=latent.q_rank, qk_rope_head_dim=latent.rope_dim, v_head_dim=latent.v_dim, qk_nope_head_dim=latent.nope_dim,
        n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=64, rope_interleave=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = hf.DeepseekV3ForCausalLM(theirs).eval()
    ours = models.build(config, "meta").to_empty(device="cpu").eval()
    values = {}
    for name, tensor in theirs.state_dict().items():
        nn.init.normal_(tensor, float(tensor.dim() == 1), 0.2)
        for their, our in NAMES.items():
            name = name.replace(their, our)
        if name.endswith("gate_up"):
            gate, up = tensor.mT.chunk(2, -1)
            values |= {name.replace("gate_up", "gate.weight"): gate, name.replace("gate_up", "up.weight"): up}
        else:
            values[f"{name}.weight" if name.endswith("down") else name] = tensor.mT if tensor.dim() == 3 else tensor
    ours.load_state_dict(values)
    return ours, theirs


@pytest.mark.parametrize("q_rank", [28, None])
def test_logits_and_gradients_equal_those_of_deepseek(q_rank):
    ours, theirs = both(CONFIG.changed(latent={**LATENT, "q_rank": q_rank}))
    ids = torch.randint(97, (2, 11))
    logits = ours(ids)
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    logits.square().mean().backward()
    theirs(ids).logits.square().mean().backward()
    torch.testing.assert_close(ours.blocks[1].attention.kv_down.weight.grad, theirs.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.grad)
    torch.testing.assert_close(ours.blocks[2].feedforward.experts.up.weight.grad, theirs.model.layers[2].mlp.experts.gate_up_proj.grad.mT[..., 24:])


def test_a_token_after_the_others_is_computed_from_what_is_kept():
    """kv_rank + rope_dim elements of a token and layer are kept, and give what the whole text gives."""
    ours, _ = both(CONFIG)
    ids = torch.randint(97, (2, 9))
    with torch.no_grad():
        whole = ours(ids)
        cache = ours.new_cache(2, 9)
        parts = [ours.head(ours.hidden(part, cache=cache)) for part in ids.split((4, 3, 1, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    assert sum(x.k.numel() + x.v.numel() for x in cache.layers) == 3 * 2 * 9 * (20 + 8)


EXPERTS = {"vocab_size": 97, "n_layers": 1, "d_model": 8, "n_heads": 2, "n_experts": 2, "d_shared": 4}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (CONFIG, "latent"), (LlamaConfig(**EXPERTS, router="sigmoid"), "router=sigmoid"),
        (LlamaConfig(**EXPERTS, shared_gate=False), "shared_gate=false"),
    ],
)
def test_what_is_planned_only_is_not_trained(config, key):
    assert models.count(config)["total"] > 0
    with pytest.raises(UserError, match=rf"^this model can be planned, not trained: model\.{key} is built for plans only$"):
        models.build(config)


@pytest.mark.parametrize("verb", ["train", "check", "fit"])
def test_a_verb_that_trains_refuses_it_before_it_reads_data(verb, tmp_path, capsys):
    recipe = {
        "model": CONFIG.model_dump(exclude_none=True), "task": {"name": "causal_lm"}, "data": {"kind": "text", "path": "not there"},
        "tokenizer": {"kind": "byte"}, "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 2}, "train": {"steps": 1},
        "log": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    (tmp_path / "latent.yaml").write_text(json.dumps(recipe))
    assert main([verb, str(tmp_path / "latent.yaml")]) > 0
    said = " ".join("".join(capsys.readouterr()).split())  # `check` folds its lines
    assert "model.latent is built for plans only" in said and "not there" not in said
    assert not (tmp_path / "run").exists()


FOREIGN = {"n_kv_heads": 4, "d_head": 12, "qkv_bias": True, "qk_norm": True, "window": 8, "no_rotation_every": 4}


@pytest.mark.parametrize(("field", "value"), FOREIGN.items())
def test_what_it_has_not_is_an_error(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}: with latent it is .*; leave it out"):
        LlamaConfig(**{**CONFIG.model_dump(), field: value})
