"""BERT's, RoBERTa's and DistilBERT's tensors and config.json as Hugging Face has them: the bare model, ForMaskedLM,
BERT's ForPreTraining, and ForSequenceClassification, by `config.head`. XLM-RoBERTa (Conneau et al. 2020) and CamemBERT
(Martin et al. 2020) are RoBERTas, and are written as such.

RoBERTa's positions begin behind the number of its padding. The rows before them are never read, and kept.
"""

from __future__ import annotations

from gradus.models.weights import Rule, fields
from gradus.recipe.schema import BertConfig

NAMES = fields.names()["bert"]
TYPES, HEADS = NAMES["types"], NAMES["heads"]  # model_type → [variant, its classes]; end of a class's name → head
MODEL_TYPES = tuple(TYPES)
PREFIXES = ("bert.", "roberta.", "distilbert.")
IGNORABLE = ("embeddings.position_ids", "embeddings.token_type_ids")  # 0, 1, 2 ... and zeros


def config_from_hf(hf: dict) -> BertConfig:
    """Without `architectures` the head is none. Raises UserError naming the field of a feature that Gradus' BERT does
    not have."""
    variant, classes = TYPES[hf.get("model_type", "bert")]
    names, heads = NAMES[variant], {f"{classes}{end}": head for end, head in HEADS.items()}
    head = heads[fields.architecture("bert", hf, heads)]
    tied = {"tie_word_embeddings": True} if head in ("masked_lm", "pretraining") else {}
    fields.only("bert", hf, names["fixed"] | tied)
    activation = fields.activation("bert", names["activation"], hf.get(names["activation"], "gelu"))
    dropouts = {name: hf.get(name, 0.1) for name in (names["fields"]["dropout"][0], names["attention_dropout"])}
    fields.one_dropout("bert", hf, next(iter(dropouts)), dropouts)
    stated = fields.read(hf, names["fields"])
    if variant == "roberta":
        stated["first_position"] = hf.get("pad_token_id", 1) + 1
        stated["seq_len"] -= stated["first_position"]
    elif variant == "distilbert":
        stated |= {"n_token_types": 0, "pooler": head == "classification"}
    n_classes = fields.n_classes(hf) if head == "classification" else None
    return BertConfig(**stated, variant=variant, head=head, n_classes=n_classes, activation=activation)


def config_to_hf(config: BertConfig) -> dict:
    names, (_, classes) = NAMES[config.variant], TYPES[config.variant]
    hf = {
        "model_type": config.variant,
        "architectures": [next(f"{classes}{end}" for end, head in HEADS.items() if head == config.head)],
        **fields.written(config, names["fields"]),
        names["activation"]: fields.their_activation(config),
        names["attention_dropout"]: config.dropout,
        **(fields.labels(config.n_classes) if config.head == "classification" else {}),
    }
    if config.variant == "roberta":
        hf["pad_token_id"] = config.first_position - 1
        hf["max_position_embeddings"] += config.first_position
    elif config.variant == "distilbert":
        hf["seq_classif_dropout"] = config.head_dropout
    return hf


def rules(config: BertConfig) -> list[Rule]:
    names = NAMES[config.variant]
    body = "" if config.head == "none" else f"{config.variant}."
    layers = {"embedding_norm": f"{body}embeddings.LayerNorm"}
    layers |= fields.blocks(config.n_layers, "blocks", f"{body}{names['layers']}", names["block"])
    if config.pools:
        layers["pooler"] = f"{body}pooler.dense"
    kinds = ["word", "position", *(["token_type"] if config.n_token_types else [])]
    embeddings = {f"{kind.removeprefix('token_')}_embedding": f"{body}embeddings.{kind}_embeddings" for kind in kinds}
    table = fields.layers(embeddings, ["weight"])
    if config.head in ("masked_lm", "pretraining"):
        layers |= names["masked_lm"]
        table += [Rule("masked_lm.decoder.bias", theirs) for theirs in names["output_bias"]]
        table.append(Rule("word_embedding.weight", names["output"]))
    if config.head == "pretraining":
        layers["next_sentence"] = "cls.seq_relationship"
    if config.head == "classification":
        layers |= names["classification"]
    table += fields.layers(layers)
    norms = [rule for rule in table if "LayerNorm" in rule.theirs]
    # The published checkpoints still say gamma and beta, as TensorFlow did.
    new = [rule.theirs.replace(".weight", ".gamma").replace(".bias", ".beta") for rule in norms]
    return table + [Rule(rule.ours, theirs) for rule, theirs in zip(norms, new)]
