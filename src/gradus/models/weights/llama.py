"""Llama's tensors and config.json as Hugging Face's LlamaForCausalLM has them, with a window in every layer
MistralForCausalLM, in some MinistralForCausalLM, with experts MixtralForCausalLM, and those of Qwen2, Qwen3 and
SmolLM3, under the names in published files (for experts, transformers has other names in memory). Its q and k rows are
in the half-split rotary layout, as ours are.

What none of them has together (biases beside head norms) is saved with model_type gradus-llama: our configuration, and
tensors named as Qwen's.
"""

from __future__ import annotations

import json

from gradus.models.weights import Rule, fields, rope, transpose
from gradus.recipe.schema import LlamaConfig

NAMES = fields.names()["llama"]
ARCHITECTURES, WITHOUT_EFFECT = NAMES["architectures"], NAMES["without effect"]
MODEL_TYPES = (*ARCHITECTURES, "gradus-llama")
PREFIXES = ("model.",)
IGNORABLE = ("rotary_emb.inv_freq",)

# what one of them has and another has not
FEATURES = {
    name: LlamaConfig.model_fields[name].default
    for name in (
        "qkv_bias", "qk_norm", "no_rotation_every", "n_experts", "d_shared", "norm_top_k", "experts_every",
        "dense_layers", "window", "full_first", "full_every", "latent", "shared_gate", "router",
    )
}  # fmt: skip


def config_from_hf(hf: dict) -> LlamaConfig:
    """Raises UserError naming the field of a feature that Gradus' Llama does not have."""
    kind = hf.get("model_type", "llama")
    if kind == "gradus-llama":
        return LlamaConfig(**fields.from_ours(hf))
    for name, value in NAMES["lacking"].get(kind, {}).items():
        hf.setdefault(name, value)
    same = fields.read(hf, NAMES["fields"])
    fields.only("llama", hf, NAMES["fixed"])
    fields.architecture("llama", hf, ARCHITECTURES[kind])
    if kind.endswith("_moe") and "num_local_experts" in hf:  # as transformers 5 writes it
        hf.setdefault("num_experts", hf["num_local_experts"])
    own = {"d_head": hf.get("head_dim"), **NAMES["always"].get(kind, {}), **fields.read(hf, NAMES["own"].get(kind, {}))}
    if kind == "smollm3":
        own["no_rotation_every"] = _without_rotation(hf, same["n_layers"])
    usual = {"d_head": same["d_model"] // same["n_heads"], "d_expert": same["d_ff"]}
    theta, scaling = rope.read("llama", hf)
    return LlamaConfig(
        **same,
        **{name: value for name, value in own.items() if value not in (None, usual.get(name))},
        **windows(hf, same["n_layers"], same["seq_len"]),
        rope_theta=theta or 10_000.0,
        rope_scaling=scaling,
    )


def windows(hf: dict, n_layers: int, seq_len: int) -> dict:
    """The window, and which layers are without; one that holds every text is none. Raises UserError where the layers
    with a window are others than those behind the first few, or all but every n-th."""
    window, types, kind = hf.get("sliding_window"), hf.get("layer_types"), hf.get("model_type", "llama")
    full = hf.get("max_window_layers", 0) if kind != "qwen3_moe" else 0
    local = [kind == "sliding_attention" for kind in types] if types else [i >= full for i in range(n_layers)]
    if not window or window >= seq_len or not any(local) or not hf.get("use_sliding_window", True):
        return {}
    if kind not in NAMES["windows"] or (kind in ("smollm3", "qwen2_moe") and not types):
        raise fields.unsupported("llama", "sliding_window", window, f" in model_type={kind}")
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


def _kind(config: LlamaConfig) -> str | None:
    """The first model_type that has all FEATURES of this configuration, and no others."""
    for kind in ARCHITECTURES:
        own, always, windows = (NAMES[table].get(kind, {}) for table in ("own", "always", "windows"))
        if all(
            getattr(config, name) is not None
            if name in own
            else name in windows or getattr(config, name) == always.get(name, usual)
            for name, usual in FEATURES.items()
        ):
            return kind
    return None


def config_to_hf(config: LlamaConfig) -> dict:
    if (kind := _kind(config)) is None:
        return fields.as_ours(config, "gradus-llama", "Llama")
    own = fields.theirs(NAMES["own"].get(kind, {}))
    hf = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        **fields.written(config, NAMES["fields"]),
        **{their: getattr(config, our) for our, their in own.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        **rope.written(config.rope_theta, config.rope_scaling),
        **NAMES["written"].get(kind, {}),
        "bos_token_id": None,  # the tokenizer knows; without this, transformers assumes the published models'
        "eos_token_id": None,
    }
    if "d_expert" in own:
        hf[own["d_expert"]] = config.d_expert or config.d_ff
    if config.window:
        hf["sliding_window"] = config.window
        if "use_sliding_window" in hf:
            hf["use_sliding_window"] = True
        if "full_first" in NAMES["windows"][kind]:
            types = ("sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.n_layers))
            hf |= {"layer_types": list(types), "max_window_layers": config.full_first}
    if every := config.no_rotation_every:
        hf["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(config.n_layers)]
    return hf


def unknown_to_transformers(config: LlamaConfig) -> str:
    """What keeps every one of its models from computing this configuration, and what to set."""
    own = {name: json.dumps(usual) for name, usual in FEATURES.items() if getattr(config, name) != usual}
    ways = " or ".join(f"model.{name}={usual}" for name, usual in own.items())
    return f"{', '.join(own)}, which none of its models has together; set {ways}"


def rules(config: LlamaConfig) -> list[Rule]:
    if config.planned_only:
        return []
    table = [
        Rule("token_embedding.weight", "model.embed_tokens.weight"),
        Rule("norm.weight", "model.norm.weight"),
        Rule("head.weight", "lm_head.weight"),  # when tied: the same tensor as embed_tokens.weight, so written once
    ]
    parts = NAMES["block"] | (NAMES["head norms"] if config.qk_norm else {})
    table += fields.layers(fields.blocks(config.n_layers, "blocks", "model.layers", parts), ["weight"])
    if config.qkv_bias:
        biases = {f"attention.to_{x}": f"self_attn.{x}_proj" for x in "qkv"}
        table += fields.layers(fields.blocks(config.n_layers, "blocks", "model.layers", biases), ["bias"])
    network, experts, mixture = NAMES["feedforward"], NAMES["feedforward"], "mlp"
    if _kind(config) == "mixtral":
        experts, mixture = NAMES["experts of mixtral"], "block_sparse_moe"
    dense = {f"feedforward.{our}": f"mlp.{their}" for our, their in network.items()}
    routed = {"feedforward.router": f"{mixture}.gate"}
    if config.d_shared:
        routed["feedforward.shared_gate"] = "mlp.shared_expert_gate"
        routed |= {f"feedforward.shared.{our}": f"mlp.shared_expert.{their}" for our, their in network.items()}
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        parts = routed if config.has_experts(i) else dense
        table += fields.layers({f"{ours}.{our}": f"{theirs}.{their}" for our, their in parts.items()}, ["weight"])
        for n in range(config.n_experts if config.has_experts(i) else 0):
            for our, their in experts.items():
                name = f"{theirs}.{mixture}.experts.{n}.{their}.weight"
                table.append(Rule(f"{ours}.feedforward.experts.{our}.weight", name, transpose, transpose, index=n))
    return table
