"""Llama's tensors and config.json as Hugging Face's LlamaForCausalLM has them (and MistralForCausalLM, where its
attention has no window), with experts MixtralForCausalLM and with biases of q, k and v Qwen2ForCausalLM, under the
names in published files (for experts, transformers has other names in memory). Its q and k rows are in the half-split
rotary layout, as ours are."""

from __future__ import annotations

from gradus.errors import UserError
from gradus.models.weights import Rule, fields, transpose
from gradus.recipe.schema import LlamaConfig, RopeScaling

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2")
PREFIXES = ("model.",)
IGNORABLE = ("rotary_emb.inv_freq",)

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
}
FIELDS = {
    "vocab_size": ("vocab_size", 32000), "n_layers": ("num_hidden_layers", 32), "d_model": ("hidden_size", 4096),
    "n_heads": ("num_attention_heads", 32), "n_kv_heads": ("num_key_value_heads", None),
    "d_ff": ("intermediate_size", 11008), "seq_len": ("max_position_embeddings", 2048),
    "tie_output": ("tie_word_embeddings", False), "norm_eps": ("rms_norm_eps", 1e-6),
    "dropout": ("attention_dropout", 0.0),
}  # fmt: skip
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None,
         "router_jitter_noise": 0.0}  # fmt: skip
LACKING = {  # what a config.json means by a field that it lacks
    "mistral": {"num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
                "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
                "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"vocab_size": 151_936, "num_key_value_heads": 32, "intermediate_size": 22_016,
              "max_position_embeddings": 32_768},
}  # fmt: skip
SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}  # theirs → ours
SCALING["original_max_position_embeddings"] = "original_seq_len"


def config_from_hf(hf: dict) -> LlamaConfig:
    """Raises UserError naming the field of a feature that Gradus' Llama does not have."""
    kind = hf.get("model_type", "llama")
    hf = {**LACKING.get(kind, {}), **hf}
    if kind == "qwen2" and not hf.get("use_sliding_window", False):
        hf["sliding_window"] = None  # published ones name a window that is not used
    if kind == "mistral" and (hf["sliding_window"] or 0) >= hf["max_position_embeddings"]:
        hf["sliding_window"] = None  # a window that holds every text is none
    fields.only("llama", hf, FIXED)
    fields.architecture("llama", hf, ARCHITECTURES[kind])
    experts = {"n_experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]} if kind == "mixtral" else {}
    same, d_head = fields.read(hf, FIELDS), hf.get("head_dim")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # the second is the name since transformers 5
    return LlamaConfig(
        **same,
        d_head=None if d_head == same["d_model"] // same["n_heads"] else d_head,
        rope_theta=rope.get("rope_theta") or hf.get("rope_theta", 10_000.0),
        rope_scaling=_scaling_from_hf(rope),
        qkv_bias=kind == "qwen2",
        **experts,
    )


def _scaling_from_hf(rope: dict) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    fields.only("llama", rope, {"partial_rotary_factor": 1.0})
    if fields.one_of("llama", "rope_type", kind, ("default", "llama3")) == "default":
        return None
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
        **fields.written(config, FIELDS),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {
            "rope_type": "llama3", **{theirs: getattr(scaling, ours) for theirs, ours in SCALING.items()}
        },
        **only,
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
    table += fields.layers(fields.blocks(config.n_layers, "blocks", "model.layers", parts), ["weight"])
    if config.qkv_bias:
        biases = {f"attention.to_{x}": f"self_attn.{x}_proj" for x in "qkv"}
        table += fields.layers(fields.blocks(config.n_layers, "blocks", "model.layers", biases), ["bias"])
    for i in range(config.n_layers):
        for n in range(config.n_experts or 0):
            for ours, theirs in experts.items():
                ours = f"blocks.{i}.feedforward.experts.{ours}.weight"
                theirs = f"model.layers.{i}.block_sparse_moe.experts.{n}.{theirs}.weight"
                table.append(Rule(ours, theirs, transpose, transpose, index=n))
    return table
