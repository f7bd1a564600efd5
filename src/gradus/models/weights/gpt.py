"""GPT-2's tensors and config.json as Hugging Face's GPT2LMHeadModel has them. Its matrices are stored (in, out), and
q, k, v as one (`c_attn`).

A model with bias=false has no tensors for the biases; Hugging Face's model starts missing ones at zero, which is the
same model.
Hugging Face has no GPT-2 with experts; Gradus saves it with model_type gradus-gpt-moe: our configuration, its experts
named and laid out as ours, everything else as GPT-2's.
"""

from __future__ import annotations

from pathlib import Path

from gradus.models.weights import Rule, Stored, fields, read_pickle, read_tensors, transpose
from gradus.recipe.schema import GPTConfig

MODEL_TYPES = ("gpt2", "gradus-gpt-moe")
PREFIXES = ("transformer.",)
IGNORABLE = (".attn.bias", ".attn.masked_bias")  # the causal mask

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
DROPOUTS = ("embd_pdrop", "attn_pdrop")
NAMES = fields.names()["gpt"]
WITHOUT_EFFECT = (*DROPOUTS, *NAMES["without effect"])


def config_from_hf(hf: dict) -> GPTConfig:
    """Raises UserError naming the field of a feature that Gradus' GPT does not have."""
    if hf.get("model_type") == "gradus-gpt-moe":
        return GPTConfig(**fields.from_ours(hf))
    fields.only("gpt", hf, NAMES["fixed"])
    fields.architecture("gpt", hf, ARCHITECTURES)
    activation = fields.activation("gpt", "activation_function", hf.get("activation_function", "gelu_new"))
    return GPTConfig(**fields.read(hf, NAMES["fields"]), activation=activation)


def from_nanogpt(file: Path) -> tuple[GPTConfig, dict[str, Stored]]:
    """(configuration, tensors as Hugging Face's) of nanoGPT's ckpt.pt, whose matrices lie (out, in). It does not say
    its activation: the exact gelu, as in nanoGPT since June 2023."""
    args = read_pickle(file)["model_args"]
    hf = {"n_positions": args["block_size"], "resid_pdrop": args["dropout"], **args}
    config = GPTConfig(**fields.read(hf, NAMES["fields"]), activation="gelu", bias=args.get("bias", True))
    tensors = read_tensors(file)
    for name, x in tensors.items():
        if ".c_" in name and len(x.shape) == 2:
            tensors[name] = x.changed(transpose, *x.shape[::-1])
    return config, tensors


def config_to_hf(config: GPTConfig) -> dict:
    if config.n_experts is not None:
        return fields.as_ours(config, "gradus-gpt-moe", "GPT")
    return {
        "model_type": "gpt2",
        "architectures": [ARCHITECTURES[0]],
        **fields.written(config, NAMES["fields"]),
        **dict.fromkeys(DROPOUTS, config.dropout),
        "activation_function": fields.their_activation(config),
        "bos_token_id": None,  # the tokenizer knows; without this, transformers assumes the published models'
        "eos_token_id": None,
    }


def unknown_to_transformers(config: GPTConfig) -> str:
    """What keeps GPT-2 from computing this configuration, and what to set."""
    return "experts in a GPT; set model.n_experts=null, or model.family=llama, whose experts are Mixtral's"


def rules(config: GPTConfig) -> list[Rule]:
    table = [
        Rule("token_embedding.weight", "transformer.wte.weight"),
        Rule("position_embedding.weight", "transformer.wpe.weight"),
        *fields.layers({"norm": "transformer.ln_f"}),
        Rule("head.weight", "lm_head.weight"),  # when tied: the same tensor as wte.weight, so written once
    ]
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        matrices, biases = (tuple(f"{ours}.attention.to_{x}.{kind}" for x in "qkv") for kind in ("weight", "bias"))
        table += [
            *fields.layers({f"{ours}.attention_norm": f"{theirs}.ln_1"}),
            Rule(
                matrices, f"{theirs}.attn.c_attn.weight",
                lambda fused: fused.T.chunk(3), lambda *parts: fields.joined(*parts).T,
            ),
            fields.fused(biases, f"{theirs}.attn.c_attn.bias"),
            *_transposed(f"{ours}.attention.to_out", f"{theirs}.attn.c_proj"),
            *fields.layers({f"{ours}.feedforward_norm": f"{theirs}.ln_2"}),
        ]
        if config.n_experts is None:
            table += _transposed(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc")
            table += _transposed(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj")
        else:
            experts = (f"experts.{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias"))
            names = ["router.weight", *experts]
            table += [Rule(f"{ours}.feedforward.{name}", f"{theirs}.mlp.{name}") for name in names]
    return table if config.bias else [rule for rule in table if not rule.theirs.endswith(".bias")]


def _transposed(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", f"{theirs}.weight", transpose, transpose), Rule(f"{ours}.bias", f"{theirs}.bias")]
