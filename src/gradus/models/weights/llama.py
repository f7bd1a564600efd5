"""Llama's tensors and config.json as Hugging Face's LlamaForCausalLM has them (and MistralForCausalLM, where its
attention has no window), with experts MixtralForCausalLM and with biases of q, k and v Qwen2ForCausalLM, under the
names in published files (for experts, transformers has other names in memory). Its q and k rows are in the half-split
rotary layout, as ours are."""

from __future__ import annotations

from gradus.models.weights import Rule, fields, rope, transpose
from gradus.recipe.schema import LlamaConfig

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "smollm3")
PREFIXES = ("model.",)
IGNORABLE = ("rotary_emb.inv_freq",)

NAMES = fields.names()["llama"]
ARCHITECTURES, WITHOUT_EFFECT = NAMES["architectures"], NAMES["without effect"]


def config_from_hf(hf: dict) -> LlamaConfig:
    """Raises UserError naming the field of a feature that Gradus' Llama does not have."""
    kind = hf.get("model_type", "llama")
    for name, value in NAMES["lacking"].get(kind, {}).items():
        hf.setdefault(name, value)
    same, window = fields.read(hf, NAMES["fields"]), hf.get("sliding_window") or 0
    if full := set(hf.get("layer_types") or ()) == {"full_attention"}:
        hf["layer_types"] = None
    if kind == "qwen2":  # published ones name a window that no layer has
        used = hf.get("use_sliding_window", False) and hf["max_window_layers"] < same["n_layers"]
        window = window if used and not full else 0
    hf["sliding_window"] = window if 0 < window < same["seq_len"] else None  # one that holds every text is none
    fields.only("llama", hf, NAMES["fixed"])
    fields.architecture("llama", hf, ARCHITECTURES[kind])
    experts = {"n_experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]} if kind == "mixtral" else {}
    d_head, (theta, scaling) = hf.get("head_dim"), rope.read("llama", hf)
    return LlamaConfig(
        **same,
        d_head=None if d_head == same["d_model"] // same["n_heads"] else d_head,
        rope_theta=theta or 10_000.0,
        rope_scaling=scaling,
        no_rotation_every=_without_rotation(hf, same["n_layers"]) if kind == "smollm3" else None,
        qkv_bias=kind == "qwen2",
        **experts,
    )


def _without_rotation(hf: dict, n_layers: int) -> int | None:
    """Every so many layers one has no rotary positions; None: all have them."""
    every = hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n_layers)]
    every = [*rotates, 0].index(0) + 1
    if rotates != [int((i + 1) % every != 0) for i in range(n_layers)]:
        raise fields.unsupported("llama", "no_rope_layers", rotates, " (only every n-th layer without them is)")
    return every if every <= n_layers else None


def config_to_hf(config: LlamaConfig) -> dict:
    if config.n_experts is not None:
        kind, only = "mixtral", {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    elif config.qkv_bias:
        kind, only = "qwen2", {"use_sliding_window": False}
    elif every := config.no_rotation_every:
        rotates = [int((i + 1) % every != 0) for i in range(config.n_layers)]
        kind, only = "smollm3", {"no_rope_layers": rotates, "no_rope_layer_interval": every, "pad_token_id": None}
    else:
        kind, only = "llama", {"attention_bias": False, "mlp_bias": False}
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        **fields.written(config, NAMES["fields"]),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        **rope.written(config.rope_theta, config.rope_scaling),
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
    parts, experts = dict(NAMES["block"]), NAMES["experts"]
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
