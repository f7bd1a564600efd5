"""The original Transformer's tensors and config.json. Hugging Face has two models of its kind: MarianMTModel is the
paper's post-norm, PegasusForConditionalGeneration is pre-norm with final norms and one tied embedding. Both have
positions as all sin, then all cos; a model whose sin and cos alternate is written with the d_model features in that
order, which computes the same: nothing but the positions depends on the order of features. What neither can express is
saved with model_type gradus-seq2seq: our configuration, with tensors named and ordered as in those two."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gradus.models.weights import Rule, fields
from gradus.recipe.schema import Seq2SeqConfig

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPES = ("marian", "pegasus", "gradus-seq2seq")
# The table of positions; the output bias, which transformers writes as zeros where we have none; Pegasus' third
# embedding.
IGNORABLE = (
    "encoder.embed_positions.weight", "decoder.embed_positions.weight", "final_logits_bias", "model.shared.weight",
)  # fmt: skip

NORM_EPS = 1e-5  # theirs is no field
NAMES = fields.names()["seq2seq"]
FIELDS, ARCHITECTURES, WITHOUT_EFFECT = (NAMES[table] for table in ("fields", "architectures", "without effect"))


def config_from_hf(hf: dict) -> Seq2SeqConfig:
    """Raises UserError naming the field of a feature that Gradus' original Transformer does not have.

    Our dropout is theirs named `dropout`, everywhere. Published Marian models were stored with lower attention_dropout
    and activation_dropout.
    """
    kind = hf["model_type"]
    fields.architecture("seq2seq", hf, [ARCHITECTURES[kind]])
    if kind == "gradus-seq2seq":
        return Seq2SeqConfig(**fields.from_ours(hf))
    activation = fields.activation("seq2seq", "activation_function", hf.get("activation_function", "gelu"))
    fixed = {"scale_embedding": True, "encoder_layerdrop": 0, "decoder_layerdrop": 0, "tie_encoder_decoder": False}
    fixed |= {f"decoder_{name}": hf[f"encoder_{name}"] for name in ("attention_heads", "ffn_dim")}
    hf.setdefault("scale_embedding", False)
    fields.only("seq2seq", hf, fixed)
    tie = hf.get("tie_word_embeddings", True)
    share = tie if kind == "pegasus" else hf.get("share_encoder_decoder_embeddings", True)
    if share and not tie:
        way_out = ". With it false, transformers unties the shared embeddings too."
        raise fields.unsupported("seq2seq", "tie_word_embeddings", "false", way_out)
    same, n_decoder_layers = fields.read(hf, FIELDS), hf["decoder_layers"]
    target_vocab_size = hf.get("decoder_vocab_size")
    return Seq2SeqConfig(
        **same,
        target_vocab_size=None if share or target_vocab_size == same["vocab_size"] else target_vocab_size,
        n_decoder_layers=None if n_decoder_layers == same["n_layers"] else n_decoder_layers,
        norm_first=kind == "pegasus",
        share_embeddings=share,
        tie_output=tie,
        output_bias=True,
        positions="halves",
        activation=activation,
        norm_eps=NORM_EPS,
    )


def config_to_hf(config: Seq2SeqConfig) -> dict:
    """As Marian or Pegasus where one of them computes the same, else our own.

    The ids that transformers' own generation starts, pads and ends with belong to a tokenizer, so they are not set here
    (decoder_start_token_id has to be a number: 0).
    """
    kind = model_type(config)
    if kind == "gradus-seq2seq":
        return fields.as_ours(config, kind, ARCHITECTURES[kind])
    hf = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "is_encoder_decoder": True,
        **fields.written(config, FIELDS),
        "decoder_layers": config.n_decoder_layers or config.n_layers,
        "decoder_attention_heads": config.n_heads,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": fields.their_activation(config),
        "attention_dropout": config.dropout,
        "activation_dropout": config.dropout,
        "scale_embedding": True,
        "tie_word_embeddings": config.tie_output,
        "decoder_start_token_id": 0,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "forced_eos_token_id")),
    }
    if kind == "marian":
        hf["share_encoder_decoder_embeddings"] = config.share_embeddings
        hf["decoder_vocab_size"] = config.target_vocab_size or config.vocab_size
    return hf


def model_type(config: Seq2SeqConfig) -> str:
    """Which of MODEL_TYPES computes what this configuration says."""
    if config.norm_eps == NORM_EPS:
        one_size = config.target_vocab_size in (None, config.vocab_size)
        if config.norm_first and config.share_embeddings == config.tie_output and one_size:
            return "pegasus"
        if not config.norm_first and (config.tie_output or not config.share_embeddings):
            return "marian"
    return "gradus-seq2seq"


def unknown_to_transformers(config: Seq2SeqConfig) -> str:
    """What keeps both from computing this configuration, and what to set."""
    return (
        f"Marian and Pegasus have norm_eps={NORM_EPS:g}; Pegasus is pre-norm, with one vocabulary and all embeddings "
        "shared or none, and Marian post-norm, whose output shares an embedding that source and target share; "
        "set model.norm_eps, model.norm_first, model.share_embeddings, model.tie_output accordingly"
    )


def rules(config: Seq2SeqConfig) -> list[Rule]:
    return [_reordered(rule) if config.positions == "interleaved" else rule for rule in _rules(config)]


def _rules(config: Seq2SeqConfig) -> list[Rule]:
    source, target = "source_embedding.tokens.weight", "target_embedding.tokens.weight"
    table = [Rule(source, "model.shared.weight")] if config.share_embeddings else []
    table += [
        Rule(source, "model.encoder.embed_tokens.weight"),
        Rule(target, "model.decoder.embed_tokens.weight"),
        Rule("head.weight", "lm_head.weight"),
    ]
    if config.output_bias:
        table.append(
            Rule("head.bias", "final_logits_bias", lambda bias: bias.squeeze(0), lambda bias: bias.unsqueeze(0))
        )
    for stack, n_layers in (("encoder", config.n_layers), ("decoder", config.n_decoder_layers or config.n_layers)):
        names = {f"{stack}.norm": f"model.{stack}.layer_norm"} if config.norm_first else {}
        parts = NAMES["block"] | (NAMES["cross"] if stack == "decoder" else {})
        table += fields.layers(names | fields.blocks(n_layers, f"{stack}.blocks", f"model.{stack}.layers", parts))
    return table


def _reordered(rule: Rule) -> Rule:
    """The rule for features stored as 0, 2, 4 ..., 1, 3, 5 ...; see the head of this file."""
    *_, name, kind = ("", *rule.theirs.split("."))
    axis = 0  # where a tensor of theirs has the d_model features of the residual stream
    if name in ("q_proj", "k_proj", "v_proj", "fc1", "embed_tokens", "shared", "lm_head"):
        axis = 1  # what goes in; a bias is of what comes out
    if kind == "final_logits_bias" or (axis == 1 and kind == "bias"):
        return rule
    return replace(rule, to_ours=partial(_interleaved, axis=axis), to_theirs=partial(_halves, axis=axis))


def _halves(tensor: Tensor, axis: int) -> Tensor:
    import torch

    even, odd = (torch.arange(start, tensor.shape[axis], 2, device=tensor.device) for start in (0, 1))
    return tensor.index_select(axis, torch.cat((even, odd)))


def _interleaved(tensor: Tensor, axis: int) -> Tensor:
    import torch

    return torch.stack(tensor.chunk(2, axis), axis + 1).flatten(axis, axis + 1)
