"""Llama's tensors and config.json as Hugging Face's LlamaForCausalLM has them, with experts MixtralForCausalLM and with biases of q, k and v
Qwen2ForCausalLM, under the names that lie in published files (of experts transformers has other ones in memory). Its q and k rows are in the
half-split rotary layout, as ours are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradus.errors import UserError, did_you_mean
from gradus.models.weights import Rule
from gradus.recipe.schema import LlamaConfig, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPES = ("llama", "mixtral", "qwen2")

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
}
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None, "router_jitter_noise": 0.0}
LACKING = {  # what a config.json means by a field that it lacks
    "mixtral": {"num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"vocab_size": 151_936, "num_key_value_heads": 32, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
}  # fmt: skip
SCALING = {  # theirs → ours
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}


def config_from_hf(hf: dict) -> LlamaConfig:
    """Raises UserError naming the field of a feature that Gradus' Llama has not."""
    kind = hf.get("model_type", "llama")
    hf = {**LACKING.get(kind, {}), **hf}
    if kind == "qwen2" and not hf.get("use_sliding_window", False):
        hf["sliding_window"] = None  # published ones name a window that is not used
    for name, value in FIXED.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json: {name}={hf[name]} is not supported by family llama (only {value} is)")
    known = ARCHITECTURES[kind]
    architecture = (hf.get("architectures") or known)[0]
    if architecture not in known:
        raise UserError(f"config.json: architectures={architecture} is not supported by family llama.{did_you_mean(architecture, known)}")
    experts = {"n_experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]} if kind == "mixtral" else {}
    d_model, n_heads = hf.get("hidden_size", 4096), hf.get("num_attention_heads", 32)
    d_head = hf.get("head_dim")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # the second is the name since transformers 5
    return LlamaConfig(
        vocab_size=hf.get("vocab_size", 32000),
        n_layers=hf.get("num_hidden_layers", 32),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads"),
        d_head=None if d_head == d_model // n_heads else d_head,
        d_ff=hf.get("intermediate_size", 11008),
        seq_len=hf.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or hf.get("rope_theta", 10_000.0),
        rope_scaling=_scaling_from_hf(rope),
        tie_output=hf.get("tie_word_embeddings", False),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        dropout=hf.get("attention_dropout", 0.0),
        qkv_bias=kind == "qwen2",
        **experts,
    )


def _scaling_from_hf(rope: dict) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not supported by family llama (only 1.0 is)")
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"config.json: rope_type={kind} is not supported by family llama.{did_you_mean(kind, ('default', 'llama3'))}")
    missing = [name for name in SCALING if name not in rope]
    if missing:
        raise UserError(f"config.json: rope_scaling of type llama3 lacks {', '.join(missing)}")
    return RopeScaling(**{ours: rope[theirs] for theirs, ours in SCALING.items()})


def config_to_hf(config: LlamaConfig) -> dict:
    scaling = config.rope_scaling
    if config.n_experts is not None:
        kind, only = "mixtral", {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    elif config.qkv_bias:
        kind, only = "qwen2", {"use_sliding_window": False}
    else:
        kind, only = "llama", {"attention_bias": False, "mlp_bias": False}
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for theirs, ours in SCALING.items()}},
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        **only,
        "tie_word_embeddings": config.tie_output,
        "bos_token_id": None,  # the tokenizer knows; without this, transformers assumes the published models'
        "eos_token_id": None,
    }


def rules(config: LlamaConfig) -> list[Rule]:
    table = [
        Rule("token_embedding.weight", "model.embed_tokens.weight"),
        Rule("norm.weight", "model.norm.weight"),
        Rule("head.weight", "lm_head.weight"),  # when tied: the same tensor as embed_tokens.weight, so written once
    ]
    parts = {
        "attention_norm": "input_layernorm",
        "attention.to_q": "self_attn.q_proj",
        "attention.to_k": "self_attn.k_proj",
        "attention.to_v": "self_attn.v_proj",
        "attention.to_out": "self_attn.o_proj",
        "feedforward_norm": "post_attention_layernorm",
    }
    experts = {"gate": "w1", "up": "w3", "down": "w2"}
    if config.n_experts is None:
        parts |= {f"feedforward.{name}": f"mlp.{name}_proj" for name in experts}
    else:
        parts["feedforward.router"] = "block_sparse_moe.gate"
    for i in range(config.n_layers):
        table += [Rule(f"blocks.{i}.{ours}.weight", f"model.layers.{i}.{theirs}.weight") for ours, theirs in parts.items()]
        if config.qkv_bias:
            table += [Rule(f"blocks.{i}.attention.to_{x}.bias", f"model.layers.{i}.self_attn.{x}_proj.bias") for x in "qkv"]
        for n in range(config.n_experts or 0):
            for ours, theirs in experts.items():
                ours, theirs = f"blocks.{i}.feedforward.experts.{ours}.weight", f"model.layers.{i}.block_sparse_moe.experts.{n}.{theirs}.weight"
                table.append(Rule(ours, theirs, _transpose, _transpose, index=n))
    return table


def _transpose(matrix: Tensor) -> Tensor:
    return matrix.T


def prefixes(keys: list[str]) -> str:
    return "model." if any(key.startswith("model.") for key in keys) else ""


def ignorable(key: str) -> bool:
    return key.endswith("rotary_emb.inv_freq")
