"""BERT's tensors and config.json as Hugging Face has them: BertModel, BertForMaskedLM, BertForPreTraining and
BertForSequenceClassification, by `config.head`."""

from __future__ import annotations

from gradus.models.weights import Rule, fields
from gradus.recipe.schema import BertConfig

MODEL_TYPES = ("bert",)
PREFIXES = ("bert.",)
IGNORABLE = ("embeddings.position_ids", "embeddings.token_type_ids")  # 0, 1, 2 ... and zeros
NAMES = fields.names()["bert"]
HEADS, WITHOUT_EFFECT = NAMES["heads"], NAMES["without effect"]  # architecture → head


def config_from_hf(hf: dict) -> BertConfig:
    """Without `architectures` the head is none. Raises UserError naming the field of a feature that Gradus' BERT does
    not have."""
    head = HEADS[fields.architecture("bert", hf, HEADS)]
    tied = {"tie_word_embeddings": True} if head in ("masked_lm", "pretraining") else {}
    fields.only("bert", hf, NAMES["fixed"] | tied)
    activation = fields.activation("bert", "hidden_act", hf.get("hidden_act", "gelu"))
    n_classes = fields.n_classes(hf) if head == "classification" else None
    return BertConfig(**fields.read(hf, NAMES["fields"]), head=head, n_classes=n_classes, activation=activation)


def config_to_hf(config: BertConfig) -> dict:
    return {
        "model_type": "bert",
        "architectures": [next(a for a, head in HEADS.items() if head == config.head)],
        **fields.written(config, NAMES["fields"]),
        "hidden_act": fields.their_activation(config),
        "attention_probs_dropout_prob": config.dropout,
        **(fields.labels(config.n_classes) if config.head == "classification" else {}),
    }


def rules(config: BertConfig) -> list[Rule]:
    bert = "" if config.head == "none" else "bert."
    layers = {"embedding_norm": f"{bert}embeddings.LayerNorm"}
    layers |= fields.blocks(config.n_layers, "blocks", f"{bert}encoder.layer", NAMES["block"])
    if config.pooler and config.head != "masked_lm":
        layers["pooler"] = f"{bert}pooler.dense"
    table = [
        Rule("word_embedding.weight", f"{bert}embeddings.word_embeddings.weight"),
        Rule("position_embedding.weight", f"{bert}embeddings.position_embeddings.weight"),
        Rule("type_embedding.weight", f"{bert}embeddings.token_type_embeddings.weight"),
    ]
    if config.head in ("masked_lm", "pretraining"):
        layers["masked_lm.dense"] = "cls.predictions.transform.dense"
        layers["masked_lm.norm"] = "cls.predictions.transform.LayerNorm"
        table += [
            Rule("masked_lm.decoder.bias", "cls.predictions.bias"),
            Rule("masked_lm.decoder.bias", "cls.predictions.decoder.bias"),
            Rule("word_embedding.weight", "cls.predictions.decoder.weight"),
        ]
    if config.head == "pretraining":
        layers["next_sentence"] = "cls.seq_relationship"
    if config.head == "classification":
        layers["classifier"] = "classifier"
    table += fields.layers(layers)
    norms = [rule for rule in table if "LayerNorm" in rule.theirs]
    # The published checkpoints still say gamma and beta, as TensorFlow did.
    new = [rule.theirs.replace(".weight", ".gamma").replace(".bias", ".beta") for rule in norms]
    return table + [Rule(rule.ours, theirs) for rule, theirs in zip(norms, new)]
