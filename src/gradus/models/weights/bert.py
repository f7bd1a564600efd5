"""The tensors and config.json of BERT, RoBERTa, DistilBERT and ModernBERT as Hugging Face has them: the bare model,
ForMaskedLM, BERT's ForPreTraining, and ForSequenceClassification, by `config.head`. XLM-RoBERTa (Conneau et al. 2020)
and CamemBERT (Martin et al. 2020) are RoBERTas, and are written as such.

RoBERTa's positions begin behind the number of its padding. The rows before them are never read, and kept.
"""

from __future__ import annotations

from gradus.models.weights import Rule, fields
from gradus.recipe.schema import BertConfig

NAMES = fields.names()["bert"]
TYPES, HEADS = NAMES["types"], NAMES["heads"]  # model_type → [variant, its classes]; end of a class's name → head
MODEL_TYPES = tuple(TYPES)
PREFIXES = ("bert.", "roberta.", "distilbert.", "model.")
IGNORABLE = ("embeddings.position_ids", "embeddings.token_type_ids")  # 0, 1, 2 ... and zeros
WITHOUT_EFFECT = NAMES["without effect"]


def config_from_hf(hf: dict) -> BertConfig:
    """Without `architectures` the head is none. Raises UserError naming the field of a feature that Gradus' BERT does
    not have."""
    variant, classes = TYPES[hf.get("model_type", "bert")]
    names, heads = NAMES[variant], {f"{classes}{end}": head for end, head in HEADS.items()}
    head = heads[fields.architecture("bert", hf, heads)]
    tied = {"tie_word_embeddings": True} if head in ("masked_lm", "pretraining") else {}
    fields.only("bert", hf, names["fixed"] | tied)
    activation = fields.activation("bert", names["activation"], hf.get(names["activation"], "gelu"))
    stated = fields.read(hf, names["fields"]) | names["stated"]
    if variant == "roberta":
        if (padding := hf.get("pad_token_id", 1)) is None:
            raise fields.unsupported("bert", "pad_token_id", None, ": positions begin behind its number (published: 1)")
        stated["first_position"] = padding + 1
        stated["seq_len"] -= stated["first_position"]
    elif variant == "modernbert":
        stated["alternation"] = _alternation(hf)
    n_classes = fields.n_classes(hf) if head == "classification" else None
    return BertConfig(**stated, variant=variant, head=head, n_classes=n_classes, activation=activation)


def _alternation(hf: dict) -> dict:
    """As published, or as transformers 5 writes it, with a type and rotary angles for each layer."""
    rope, every = hf.get("rope_parameters") or {}, hf.get("global_attn_every_n_layers", 3)
    full, sliding = (rope.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    for one in (full, sliding):
        fields.only("bert", one, {"rope_type": "default"})
    if types := hf.get("layer_types"):
        every = [*types, "full_attention"].index("full_attention", 1)
        if types != ["sliding_attention" if i % every else "full_attention" for i in range(len(types))]:
            raise fields.unsupported("bert", "layer_types", types, " (only full attention in every n-th layer is)")
    return {
        "window": hf.get("local_attention", 128) // 2,
        "global_every": every,
        "theta": full.get("rope_theta") or hf.get("global_rope_theta", 160_000.0),
        "local_theta": sliding.get("rope_theta") or hf.get("local_rope_theta", 10_000.0),
    }


def config_to_hf(config: BertConfig) -> dict:
    names, (_, classes) = NAMES[config.variant], TYPES[config.variant]
    hf = {
        "model_type": config.variant,
        "architectures": [next(f"{classes}{end}" for end, head in HEADS.items() if head == config.head)],
        **fields.written(config, names["fields"]),
        names["activation"]: fields.their_activation(config),
        **dict.fromkeys(names["dropouts"], config.dropout),
        **(fields.labels(config) if config.head == "classification" else {}),
    }
    if config.variant == "roberta":
        hf["pad_token_id"] = config.first_position - 1
        hf["max_position_embeddings"] += config.first_position
    elif how := config.alternation:
        hf |= {"local_attention": 2 * how.window, "global_attn_every_n_layers": how.global_every}
        hf |= {"global_rope_theta": how.theta, "local_rope_theta": how.local_theta}
        hf |= {**names["fixed"], **dict.fromkeys(names["tokens"])}
    if config.variant in ("distilbert", "modernbert"):  # where null is no dropout
        hf[names["fields"]["classifier_dropout"][0]] = config.head_dropout
    return hf


def rules(config: BertConfig) -> list[Rule]:
    names = NAMES[config.variant]
    body = "" if config.head == "none" else names["body"]
    layers = names["outside"] | fields.blocks(config.n_layers, "blocks", names["layers"], names["block"])
    if not config.has_pooler:
        layers.pop("pooler", None)
    if config.alternation:
        del layers["blocks.0.attention_norm"]
    layers = {ours: f"{body}{theirs}" for ours, theirs in layers.items()} | names["head"].get(config.head, {})
    table = fields.layers(layers, names["kinds"])
    for i in range(config.n_layers):
        for theirs, ours in names["fused"].items():
            parts = [f"blocks.{i}.{name}.weight" for name in ours]
            table.append(fields.fused(parts, f"{body}{names['layers']}.{i}.{theirs}.weight"))
    tensors = names["tensors"].items()
    table += [Rule(ours, f"{body}{their}") for ours, their in tensors if config.n_token_types or "type" not in ours]
    if config.head in ("masked_lm", "pretraining"):
        weight, *biases = names["output"]
        table += [Rule("word_embedding.weight", weight), *(Rule("masked_lm.decoder.bias", bias) for bias in biases)]
    elif config.head == "classification":
        table += fields.layers(names.get("last", {}))
    norms = [rule for rule in table if "LayerNorm" in rule.theirs]
    # The published checkpoints still say gamma and beta, as TensorFlow did.
    new = [rule.theirs.replace(".weight", ".gamma").replace(".bias", ".beta") for rule in norms]
    return table + [Rule(rule.ours, theirs) for rule, theirs in zip(norms, new)]
