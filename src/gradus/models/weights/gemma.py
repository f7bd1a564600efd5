"""Gemma's tensors and config.json as Hugging Face's Gemma3ForCausalLM has them, and the text model within
Gemma3ForConditionalGeneration, whose vision tower is not read. Written is the text model alone."""

from __future__ import annotations

from gradus.models.weights import Rule, fields, rope
from gradus.recipe.schema import GemmaConfig

NAMES = fields.names()["gemma"]
ARCHITECTURES, WITHOUT_EFFECT = NAMES["architectures"], NAMES["without effect"]
MODEL_TYPES = tuple(ARCHITECTURES)
PREFIXES = ("language_model.model.", "model.language_model.", "model.")
BESIDE = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
FULL, LOCAL = "full_attention", "sliding_attention"


def config_from_hf(hf: dict) -> GemmaConfig:
    """Raises UserError naming the field of a feature that Gradus' Gemma does not have."""
    kind = hf.get("model_type", "gemma3_text")
    fields.architecture("gemma", hf, ARCHITECTURES[kind])
    if kind == "gemma3":
        text = fields.Fields({**hf["text_config"], "model_type": "gemma3_text"})
        config = config_from_hf(text)
        fields.refuse_unknown(text, WITHOUT_EFFECT, "text_config")
        return config
    fields.only("gemma", hf, NAMES["fixed"])
    theta, scaling = rope.read("gemma", hf, FULL)
    beside = {"rope_theta": hf.get("rope_local_base_freq"), "rope_parameters": hf.get("rope_parameters")}
    local_theta, stretched = rope.read("gemma", type(hf)(beside), LOCAL)
    if stretched:
        raise fields.unsupported("gemma", f"rope_parameters of {LOCAL}", stretched.type, " (only default is)")
    same = fields.read(hf, NAMES["fields"])
    same |= {"rope_theta": theta or 1e6, "rope_scaling": scaling, "local_theta": local_theta or 1e4}
    n, usual, window = same["n_layers"], hf.get("sliding_window_pattern", 6), hf.get("sliding_window", 4096)
    types = hf.get("layer_types") or [LOCAL if (i + 1) % usual else FULL for i in range(n)]
    window = window if LOCAL in types else None
    first, ways = (types.index(LOCAL), (usual, *range(2, n), None)) if window else (0, (None,))
    for every in ways:
        config = GemmaConfig(**same, window=window, full_first=first, full_every=every)
        if layer_types(config) == types:
            return config
    raise fields.unsupported("gemma", "layer_types", types, " (only all in the first and every n-th layer is)")


def layer_types(config: GemmaConfig) -> list[str]:
    return [LOCAL if config.window_of(i) else FULL for i in range(config.n_layers)]


def config_to_hf(config: GemmaConfig) -> dict:
    everywhere, local = rope.written(config.rope_theta, config.rope_scaling), rope.written(config.local_theta, None)
    by_type = {FULL: everywhere["rope_parameters"], LOCAL: local["rope_parameters"]}
    return {
        "model_type": "gemma3_text",
        "architectures": [ARCHITECTURES["gemma3_text"][0]],
        **fields.written(config, NAMES["fields"]),
        **NAMES["fixed"],
        "sliding_window": config.window or config.seq_len,
        "sliding_window_pattern": config.full_every,
        "layer_types": layer_types(config),
        **everywhere,
        "rope_local_base_freq": config.local_theta,
        "rope_parameters": by_type,
        "bos_token_id": None,  # the tokenizer knows; without this, transformers assumes the published models'
        "eos_token_id": None,
        "pad_token_id": None,
    }


def rules(config: GemmaConfig) -> list[Rule]:
    table = [
        Rule("token_embedding.weight", "model.embed_tokens.weight"),
        Rule("norm.weight", "model.norm.weight"),
        Rule("head.weight", "lm_head.weight"),  # when tied: the same tensor as embed_tokens.weight, so written once
    ]
    blocks = fields.blocks(config.n_layers, "blocks", "model.layers", NAMES["block"])
    return table + fields.layers(blocks, ["weight"])
