"""Llama's tensors and config.json as Hugging Face's LlamaForCausalLM has them, with a window in every layer
MistralForCausalLM, in some MinistralForCausalLM, with experts MixtralForCausalLM and with biases of q, k and v
Qwen2ForCausalLM, under the names in published files (for experts, transformers has other names in memory). Its q and k
rows are in the half-split rotary layout, as ours are."""

from __future__ import annotations

from gradus.models.weights import Rule, fields, rope, transpose
from gradus.recipe.schema import LlamaConfig

MODEL_TYPES = ("llama", "mistral", "ministral", "mixtral", "qwen2", "smollm3")
PREFIXES = ("model.",)
IGNORABLE = ("rotary_emb.inv_freq",)

NAMES = fields.names()["llama"]
ARCHITECTURES, WITHOUT_EFFECT = NAMES["architectures"], NAMES["without effect"]


def config_from_hf(hf: dict) -> LlamaConfig:
    """Raises UserError naming the field of a feature that Gradus' Llama does not have."""
    kind = hf.get("model_type", "llama")
    for name, value in NAMES["lacking"].get(kind, {}).items():
        hf.setdefault(name, value)
    same = fields.read(hf, NAMES["fields"])
    fields.only("llama", hf, NAMES["fixed"])
    fields.architecture("llama", hf, ARCHITECTURES[kind])
    experts = {"n_experts": hf["num_local_experts"], "top_k": hf["num_experts_per_tok"]} if kind == "mixtral" else {}
    d_head, (theta, scaling) = hf.get("head_dim"), rope.read("llama", hf)
    return LlamaConfig(
        **same,
        **windows(hf, same["n_layers"], same["seq_len"]),
        d_head=None if d_head == same["d_model"] // same["n_heads"] else d_head,
        rope_theta=theta or 10_000.0,
        rope_scaling=scaling,
        no_rotation_every=_without_rotation(hf, same["n_layers"]) if kind == "smollm3" else None,
        qkv_bias=kind == "qwen2",
        **experts,
    )


def windows(hf: dict, n_layers: int, seq_len: int) -> dict:
    """The window, and which layers are without; one that holds every text is none. Raises UserError where the layers
    with a window are others than those behind the first few, or all but every n-th."""
    window, full, types = hf.get("sliding_window"), hf.get("max_window_layers", 0), hf.get("layer_types")
    local = [kind == "sliding_attention" for kind in types] if types else [i >= full for i in range(n_layers)]
    if not window or window >= seq_len or not any(local) or not hf.get("use_sliding_window", True):
        return {}
    if hf.get("model_type", "llama") == "llama" or (hf["model_type"] == "smollm3" and not types):
        raise fields.unsupported("llama", "sliding_window", window, f" in model_type={hf.get('model_type', 'llama')}")
    first, every = local.index(True), None
    if not all(local[first:]):
        every = first + local[first:].index(False) + 1
        first = first if first < every - 1 else 0
    said = {"window": window, "full_first": first, "full_every": every}
    if local != [i >= first and (not every or (i + 1) % every != 0) for i in range(n_layers)]:
        raise fields.unsupported("llama", "layer_types", types, " (only full ones first, or every n-th full, are)")
    return said


def _without_rotation(hf: dict, n_layers: int) -> int | None:
    """Every so many layers one has no rotary positions; None: all have them."""
    every = hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n_layers)]
    every = [*rotates, 0].index(0) + 1
    if rotates != [int((i + 1) % every != 0) for i in range(n_layers)]:
        raise fields.unsupported("llama", "no_rope_layers", rotates, " (only every n-th layer without them is)")
    return every if every <= n_layers else None


def config_to_hf(config: LlamaConfig) -> dict:
    types = [f"{'sliding' if config.window_of(i) else 'full'}_attention" for i in range(config.n_layers)]
    mixed = {"layer_types": types, "max_window_layers": config.full_first} if config.window else {}
    if config.n_experts is not None:
        kind, only = "mixtral", {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    elif config.qkv_bias:
        kind, only = "qwen2", {"use_sliding_window": bool(config.window), **mixed}
    elif every := config.no_rotation_every:
        rotates = [int((i + 1) % every != 0) for i in range(config.n_layers)]
        kind, only = "smollm3", {"no_rope_layers": rotates, "no_rope_layer_interval": every, "pad_token_id": None}
        only |= {"use_sliding_window": bool(config.window), **mixed}
    elif config.window:
        kind, only = ("ministral", mixed) if config.full_first or config.full_every else ("mistral", {})
    else:
        kind, only = "llama", {"attention_bias": False, "mlp_bias": False}
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        **fields.written(config, NAMES["fields"]),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        **rope.written(config.rope_theta, config.rope_scaling),
        **({"sliding_window": config.window} if config.window else {}),
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
