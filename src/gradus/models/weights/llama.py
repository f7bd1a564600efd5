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

NAMES = fields.names()["llama"]
ARCHITECTURES, SCALING, WITHOUT_EFFECT = (NAMES[table] for table in ("architectures", "scaling", "without effect"))


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
    d_head, theta = hf.get("head_dim"), hf.get("rope_theta", 10_000.0)
    new = hf.get("rope_parameters")  # the name since transformers 5
    rope = type(hf)(hf.get("rope_scaling") or new or {})
    return LlamaConfig(
        **same,
        d_head=None if d_head == same["d_model"] // same["n_heads"] else d_head,
        rope_theta=rope.get("rope_theta") or theta,
        rope_scaling=_scaling_from_hf(rope),
        qkv_bias=kind == "qwen2",
        **experts,
    )


def _scaling_from_hf(rope: dict) -> RopeScaling | None:
    kind = rope.get("type", "default")
    kind = rope.get("rope_type") or kind
    fields.only("llama", rope, {"partial_rotary_factor": 1.0})
    if isinstance(rope, fields.Fields):  # not of what Gradus has just written
        fields.refuse_unknown(rope, SCALING.values(), "rope_parameters")
    if fields.one_of("llama", "rope_type", kind, ("default", "llama3")) == "default":
        return None
    missing = [name for name in SCALING.values() if name not in rope]
    if missing:
        raise UserError(f"config.json: rope_scaling of type llama3 lacks {', '.join(missing)}")
    return RopeScaling(**fields.read(rope, SCALING))


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
        **fields.written(config, NAMES["fields"]),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {
            "rope_type": "llama3", **fields.written(scaling, SCALING)
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
