"""BERT's tensors and config.json as Hugging Face has them: BertModel, BertForMaskedLM, BertForPreTraining and
BertForSequenceClassification, by `config.head`."""

from __future__ import annotations

from gradus.errors import UserError, did_you_mean
from gradus.models.weights import Rule
from gradus.recipe.schema import BertConfig

MODEL_TYPES = ("bert",)

HEADS = {  # architecture → head
    "BertModel": "none",
    "BertForMaskedLM": "masked_lm",
    "BertForPreTraining": "pretraining",
    "BertForSequenceClassification": "classification",
}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}  # theirs → ours
FIXED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}


def config_from_hf(hf: dict) -> BertConfig:
    """Without `architectures` the head is none. Raises UserError naming the field of a feature that Gradus' BERT has not."""
    architecture = (hf.get("architectures") or ["BertModel"])[0]
    if architecture not in HEADS:
        raise UserError(f"config.json: architectures={architecture} is not supported by family bert.{did_you_mean(architecture, HEADS)}")
    head = HEADS[architecture]
    fixed = FIXED | ({"tie_word_embeddings": True} if head in ("masked_lm", "pretraining") else {})
    for name, value in fixed.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json: {name}={hf[name]} is not supported by family bert (only {value} is)")
    activation = hf.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"config.json: hidden_act={activation} is not supported by family bert.{did_you_mean(activation, ACTIVATIONS)}")
    dropout = hf.get("hidden_dropout_prob", 0.1)
    same = {"attention_probs_dropout_prob": hf.get("attention_probs_dropout_prob", 0.1)}
    if head == "classification":
        same["classifier_dropout"] = hf.get("classifier_dropout")
    for name, value in same.items():
        if value not in (None, dropout):
            raise UserError(f"config.json: {name}={value} but hidden_dropout_prob={dropout}; family bert has one dropout. Make them equal there")
    return BertConfig(
        vocab_size=hf.get("vocab_size", 30522),
        n_layers=hf.get("num_hidden_layers", 12),
        d_model=hf.get("hidden_size", 768),
        n_heads=hf.get("num_attention_heads", 12),
        d_ff=hf.get("intermediate_size", 3072),
        seq_len=hf.get("max_position_embeddings", 512),
        n_token_types=hf.get("type_vocab_size", 2),
        dropout=dropout,
        head=head,
        n_classes=(len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)) if head == "classification" else None,
        activation=ACTIVATIONS[activation],
        norm_eps=hf.get("layer_norm_eps", 1e-12),
    )


def config_to_hf(config: BertConfig) -> dict:
    hf = {
        "model_type": "bert",
        "architectures": [next(a for a, head in HEADS.items() if head == config.head)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "max_position_embeddings": config.seq_len,
        "type_vocab_size": config.n_token_types,
        "layer_norm_eps": config.norm_eps,
    }
    if config.head == "classification":
        hf["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.n_classes)}
        hf["label2id"] = {f"LABEL_{i}": i for i in range(config.n_classes)}
    return hf


def rules(config: BertConfig) -> list[Rule]:
    bert = "" if config.head == "none" else "bert."
    table = [
        Rule("word_embedding.weight", f"{bert}embeddings.word_embeddings.weight"),
        Rule("position_embedding.weight", f"{bert}embeddings.position_embeddings.weight"),
        Rule("type_embedding.weight", f"{bert}embeddings.token_type_embeddings.weight"),
        *_norm("embedding_norm", f"{bert}embeddings.LayerNorm"),
    ]
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"{bert}encoder.layer.{i}"
        table += [
            *_linear(f"{ours}.attention.to_q", f"{theirs}.attention.self.query"),
            *_linear(f"{ours}.attention.to_k", f"{theirs}.attention.self.key"),
            *_linear(f"{ours}.attention.to_v", f"{theirs}.attention.self.value"),
            *_linear(f"{ours}.attention.to_out", f"{theirs}.attention.output.dense"),
            *_norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
            *_linear(f"{ours}.feedforward.up", f"{theirs}.intermediate.dense"),
            *_linear(f"{ours}.feedforward.down", f"{theirs}.output.dense"),
            *_norm(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
        ]
    if config.pooler and config.head != "masked_lm":
        table += _linear("pooler", f"{bert}pooler.dense")
    if config.head in ("masked_lm", "pretraining"):
        table += [
            *_linear("masked_lm.dense", "cls.predictions.transform.dense"),
            *_norm("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
            Rule("masked_lm.decoder.bias", "cls.predictions.bias"),
            Rule("masked_lm.decoder.bias", "cls.predictions.decoder.bias"),
            Rule("word_embedding.weight", "cls.predictions.decoder.weight"),
        ]
    if config.head == "pretraining":
        table += _linear("next_sentence", "cls.seq_relationship")
    if config.head == "classification":
        table += _linear("classifier", "classifier")
    return table


def _linear(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", f"{theirs}.weight"), Rule(f"{ours}.bias", f"{theirs}.bias")]


def _norm(ours: str, theirs: str) -> list[Rule]:
    """The published checkpoints still say gamma and beta, as TensorFlow did."""
    return [*_linear(ours, theirs), Rule(f"{ours}.weight", f"{theirs}.gamma"), Rule(f"{ours}.bias", f"{theirs}.beta")]


def prefixes(keys: list[str]) -> str:
    return "bert." if any(key.startswith("bert.") for key in keys) else ""


def ignorable(key: str) -> bool:
    return key.endswith(("embeddings.position_ids", "embeddings.token_type_ids"))  # 0, 1, 2 ... and zeros
