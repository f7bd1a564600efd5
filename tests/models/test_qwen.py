"""Qwen3, Qwen3-MoE, Qwen2-MoE and Mixtral against transformers': norms of heads, experts of a width of their own, shared, in some layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from gradus import models
from gradus.errors import UserError
from gradus.infer.compiled import Int8
from gradus.layers import MixtureOfExperts, use_linears
from gradus.models.decoding import Steps, complete
from gradus.models.weights import loads_in_transformers, table_of
from gradus.models.weights.llama import config_from_hf, config_to_hf
from gradus.plan.counts import active
from gradus.recipe.schema import Adapter, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))
from test_llama import HF_TINY, TINY, VOCAB, shake

HF = {**HF_TINY, "num_hidden_layers": 3, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
THEIRS = {  # name, which begins with their model's -> what their configuration has besides
    "Qwen3": {"head_dim": 12},
    "Qwen3 tied, heads of the usual width": {"head_dim": 8, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "Qwen3 with a window": {"head_dim": 12, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3Moe": {**MIXED, "head_dim": 12, "norm_topk_prob": True},
    "Qwen3Moe with a window": {**MIXED, "use_sliding_window": True, "sliding_window": 6},
    "Qwen3Moe in every second layer": {**MIXED, "head_dim": 12, "decoder_sparse_step": 2, "moe_intermediate_size": 56},
    "Qwen3Moe but in the first layer": {**MIXED, "mlp_only_layers": [0], "num_experts_per_tok": 4},
    "Qwen2Moe": {**MIXED, "shared_expert_intermediate_size": 40},
    "Qwen2Moe with a window": {**MIXED, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 6,
                               "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding")]},
    "Mixtral with a window": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Qwen2Moe without biases, one layer dense": {**MIXED, "shared_expert_intermediate_size": 16, "qkv_bias": False, "mlp_only_layers": [1], "norm_topk_prob": True},
}  # fmt: skip
OURS = {  # name -> (their model's, ours)
    "head norms": ("Qwen3", {"qk_norm": True, "d_head": 10}),
    "experts of the usual width": ("Qwen3Moe", {"qk_norm": True, "n_experts": 4}),
    "dense layers": ("Qwen3Moe", {"qk_norm": True, "n_experts": 4, "top_k": 3, "experts_every": 2, "dense_layers": [3], "n_layers": 4, "d_expert": 8}),
    "a shared expert": ("Qwen2Moe", {"qkv_bias": True, "n_experts": 4, "d_shared": 16, "tie_output": True}),
    "Mixtral by a width of experts": ("Mixtral", {"n_experts": 4, "d_expert": 24}),
}  # fmt: skip
NOBODYS = [  # what no model of theirs has together
    {"qkv_bias": True, "qk_norm": True}, {"qkv_bias": True, "n_experts": 4}, {"qk_norm": True, "n_experts": 4, "d_shared": 8},
    {"n_experts": 4, "norm_top_k": False}, {"n_experts": 4, "experts_every": 2}, {"no_rotation_every": 2, "n_experts": 4},
    {"qkv_bias": True, "no_rotation_every": 2}, {"n_experts": 4, "window": 8, "full_every": 2},
]  # fmt: skip


def their_model(name: str):
    kind = name.partition(" ")[0]
    config = getattr(transformers, f"{kind}Config")(**HF, **THEIRS[name])
    return in_float64(shake(getattr(transformers, f"{kind}ForCausalLM")(config)))


def in_float64(model):
    """Their grouped products have no float64."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.train()


def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors under the names in files: in memory experts are one tensor, and of each gate and up are one."""
    out = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.partition("mlp.experts.")
        for i, one in enumerate(tensor if kind else ()):
            parts = one.chunk(2) if kind == "gate_up_proj" else [one]
            out |= {f"{layer}mlp.experts.{i}.{part}.weight": value for part, value in zip(kind.replace("gate_up_proj", "gate_proj up_proj").split(), parts)}
        if not kind:
            out[name] = tensor
    return out


MIXTRAL = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}  # its names in files


def differences(model, hf) -> dict[str, float]:
    """The largest differences of logits and of gradients, of their largest; of every parameter, through the mapping of the weights."""
    ids = torch.randint(0, VOCAB, (3, 40))
    ours, theirs = model(ids), hf(ids, use_cache=False).logits
    probe = torch.randn_like(ours)
    (ours * probe).sum().backward()
    (theirs * probe).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    wanted, off = published({name: p.grad for name, p in hf.named_parameters()}), {"logits": far(ours, theirs)}
    for rule in table_of(model.config):
        name = rule.theirs
        for old, new in MIXTRAL.items() if "block_sparse_moe" in name else ():
            name = name.replace(old, new)
        if name in wanted:
            mine = [grads[our] if rule.index is None else grads[our][rule.index] for our in rule.names]
            off[name] = far(rule.to_theirs(*mine), wanted[name])
    assert off.keys() == {"logits", *wanted}
    return off


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


def assert_same(model, hf) -> None:
    """In float64, but for the router, whose softmax is fp32 in both."""
    off = differences(model.double(), hf.double())
    assert max(off.values()) < 1e-5, {name: value for name, value in off.items() if value >= 1e-5}


@pytest.mark.parametrize("name", THEIRS)
def test_there_and_back(name, tmp_path):
    """Theirs read, computed and differentiated, and written: a config.json of theirs alone, and the same tensors."""
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    model = models.load(tmp_path)
    models.save(model, tmp_path / "back")
    assert "gradus" not in json.loads((tmp_path / "back" / "config.json").read_text()), "nothing of it that Hugging Face has no words for"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(theirs)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert config_from_hf(config_to_hf(model.config)) == model.config
    assert_same(model, theirs)


@pytest.mark.parametrize("name", OURS)
def test_ours_in_transformers(name, tmp_path):
    kind, fields = OURS[name]
    model = shake(models.build(LlamaConfig(**TINY | {"n_layers": 2, "n_kv_heads": 2, "norm_eps": 1e-4} | fields)))
    models.save(model, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf).__name__ == f"{kind}ForCausalLM" == loads_in_transformers(model.config)[0]
    assert_same(model, in_float64(hf))


@pytest.mark.parametrize("fields", NOBODYS, ids=lambda fields: " ".join(fields))
def test_what_no_model_of_theirs_has_together_is_saved_as_ours(fields, tmp_path):
    model = shake(models.build(LlamaConfig(**TINY, **fields)))
    models.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gradus-llama"
    again = models.load(tmp_path)
    assert again.config == model.config and all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    none, why = loads_in_transformers(model.config)
    assert none is None and all(f"model.{name}=" in why for name in fields), why


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe in every second layer", "Qwen2Moe", "Qwen3Moe with a window", "Mixtral with a window"])
def test_it_continues_as_theirs(name, tmp_path):
    """The same tokens as their `generate`, past a window of six; and step by step, ragged, the logits of the whole text."""
    theirs = their_model(name).eval()
    theirs.save_pretrained(tmp_path)
    model = models.load(tmp_path).eval()
    ids = torch.randint(1, VOCAB, (1, 5))
    found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert complete(model, ids.tolist(), max_new=12)[0] == found[0, 5:].tolist()
    ids, lengths = torch.randint(1, VOCAB, (2, 12)), torch.tensor([7, 3])
    whole, steps = model(ids), Steps(model)
    with torch.no_grad():
        logits = [steps.prefill(ids[:, :7], lengths, room=12)] + [steps.decode(ids[[0, 1], lengths + i], lengths + i) for i in range(5)]
    for i, found in enumerate(logits):
        torch.testing.assert_close(found, whole[[0, 1], lengths - 1 + i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe but in the first layer", "Qwen2Moe"])
def test_weights_in_few_bits(name, tmp_path):
    """A frozen base beneath an adapter, whose B is 0, and what engines and `gradus quantize` store: every Linear but the routers."""
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    model, ids = models.load(tmp_path).eval(), torch.randint(1, VOCAB, (2, 30))
    wanted, config = model(ids), model.config.model_copy(update={"init": str(tmp_path)})
    for base, off in (("int8", 0.06), ("nf4", 0.6)):
        small = models.load_start(config.trained(Adapter(rank=4, base=base)), 0).on("cpu").eval()
        assert 0 < float((small(ids) - wanted).detach().norm() / wanted.detach().norm()) < off
    use_linears(model.requires_grad_(False), lambda _, linear: Int8.of(linear))
    assert sum(isinstance(m, Int8) for m in model.modules()) == sum(isinstance(m, torch.nn.Linear) for m in models.load(tmp_path).modules()) - len(routers(model))
    assert 0 < float((model(ids) - wanted).detach().norm() / wanted.detach().norm()) < 0.06


def routers(model) -> list:
    return [m.router for m in model.modules() if isinstance(m, MixtureOfExperts)]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [2, 5]}, r"dense_layers=\[5\]: of n_layers=3 the last is 2"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "leave no layer its experts"),
    ],
)
def test_what_is_not_built_is_named(kind, fields, said):
    with pytest.raises((UserError, ValueError), match=said):
        config_from_hf({**HF, "model_type": kind, **fields})


PUBLISHED = {  # config.json's -> parameters, those that a token meets
    "Qwen3-0.6B": ({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40_960}, 596_049_920, 596_049_920),
    "Qwen3-30B-A3B": ({"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
                       "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                       "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}, 30_532_122_624, 3_353_032_704),
    "Qwen1.5-MoE-A2.7B": ({"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
                           "num_attention_heads": 16, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "num_experts": 60,
                           "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1}, 14_315_784_192, 2_689_173_504),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    hf, total, met = PUBLISHED[name]
    config = config_from_hf({"vocab_size": 151_936, "hidden_act": "silu", "rope_theta": 1e6, "rms_norm_eps": 1e-6, **hf})
    assert (models.count(config)["total"], active(config)) == (total, met)
