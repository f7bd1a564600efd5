"""T5's tensors and config.json as Hugging Face's T5ForConditionalGeneration has them, v1.0 and v1.1."""

from __future__ import annotations

from collections.abc import Mapping

from gradus.models.weights import Rule, Stored, fields
from gradus.recipe.schema import T5Config

MODEL_TYPES = ("t5",)
# An early converter of checkpoints wrote a relative bias for the cross-attention, which has none.
IGNORABLE = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

# the second is the first's former name
ARCHITECTURES = ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model")
NAMES = fields.names()["t5"]
FIELDS, FEEDFORWARDS, WITHOUT_EFFECT = (NAMES[table] for table in ("fields", "feedforwards", "without effect"))


def config_from_hf(hf: dict) -> T5Config:
    """Raises UserError naming the field of a feature that Gradus' T5 does not have.

    Before transformers 5 `tie_word_embeddings` said both whether the head is the embedding and whether the decoder's
    output is scaled; since then `scale_decoder_outputs` says the second. See also `with_tensors`.
    """
    fields.architecture("t5", hf, ARCHITECTURES)
    feedforward = fields.one_of("t5", "feed_forward_proj", hf.get("feed_forward_proj", "relu"), FEEDFORWARDS)
    gated = FEEDFORWARDS[feedforward]
    activation = {"is_gated_act": gated, "dense_act_fn": "gelu_new" if gated else "relu"}
    fields.only("t5", hf, activation | {"tie_encoder_decoder": False})
    if hf.get("decoder_start_token_id") not in (None, 0):
        start = hf["decoder_start_token_id"]
        raise fields.unsupported("t5", "decoder_start_token_id", start, " (only 0, the padding, is)")
    same, n_decoder_layers = fields.read(hf, FIELDS), hf.get("num_decoder_layers")
    tied = hf.get("tie_word_embeddings", True)
    scaled = hf.get("scale_decoder_outputs", tied)
    return T5Config(
        **same,
        n_decoder_layers=None if n_decoder_layers == same["n_layers"] else n_decoder_layers,
        gated=gated,
        tie_output=tied,
        scale_output=None if scaled == tied else scaled,
    )


def with_tensors(config: T5Config, tensors: Mapping[str, Stored]) -> T5Config:
    """The configuration of a file with these tensors. transformers 5 ties every T5 by its configuration, and leaves it
    to the file whether there is a head of its own: v1.1 has one, and older files have the embedding once more."""
    head, embedding, scaled = tensors.get("lm_head.weight"), tensors.get("shared.weight"), config.scales
    tied = head is None
    if head and embedding and config.tie_output and scaled:
        tied = head.read().equal(embedding.read())
    return config.model_copy(update={"tie_output": tied, "scale_output": None if scaled == tied else scaled})


def config_to_hf(config: T5Config) -> dict:
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **fields.written(config, FIELDS),
        "num_decoder_layers": config.n_decoder_layers or config.n_layers,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "tie_word_embeddings": config.tie_output,
        **({} if config.scale_output is None else {"scale_decoder_outputs": config.scale_output}),
        "pad_token_id": 0,
        "eos_token_id": None,  # its tokenizer's, which need not be T5's
        "decoder_start_token_id": 0,
    }


def rules(config: T5Config) -> list[Rule]:
    embeddings = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    table = [Rule("embedding.weight", f"{name}.weight") for name in embeddings]
    table.append(Rule("head.weight", "lm_head.weight"))  # when tied: the same tensor as shared.weight, so written once
    for stack, n_layers in (("encoder", config.n_layers), ("decoder", config.n_decoder_layers or config.n_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table.append(Rule(f"{stack}.relative_bias.table.weight", bias))
        last = 2 if stack == "decoder" else 1
        parts = NAMES["block"] | {"feedforward_norm": f"layer.{last}.layer_norm"}
        parts |= NAMES["cross"] if stack == "decoder" else {}
        wide = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if config.gated else {"up": "wi", "down": "wo"}
        parts |= {f"feedforward.{our}": f"layer.{last}.DenseReluDense.{their}" for our, their in wide.items()}
        names = fields.blocks(n_layers, f"{stack}.blocks", f"{stack}.block", parts)
        table += fields.layers({f"{stack}.norm": f"{stack}.final_layer_norm"} | names, ["weight"])
    return table
