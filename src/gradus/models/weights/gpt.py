"""GPT-2's tensors and config.json as Hugging Face's GPT2LMHeadModel has them. Its matrices are stored (in, out), and q, k, v
as one (`c_attn`).

A model with bias=false has no tensors for the biases; Hugging Face's starts missing ones at zero, which is the same model.
Hugging Face has no GPT-2 with experts; it is saved with model_type gradus-gpt-moe: our configuration, its experts named and laid out as
ours, everything else as GPT-2's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradus.errors import UserError, did_you_mean
from gradus.models.weights import Rule
from gradus.recipe.schema import GPTConfig

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPES = ("gpt2", "gradus-gpt-moe")

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}  # theirs → ours
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def config_from_hf(hf: dict) -> GPTConfig:
    """Raises UserError naming the field of a feature that Gradus' GPT has not."""
    if hf.get("model_type") == "gradus-gpt-moe":
        return GPTConfig(**{k: v for k, v in hf.items() if k not in ("model_type", "architectures", "dtype")})
    for name, value in FIXED.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json: {name}={hf[name]} is not supported by family gpt (only {value} is)")
    architecture = (hf.get("architectures") or ARCHITECTURES)[0]
    if architecture not in ARCHITECTURES:
        raise UserError(f"config.json: architectures={architecture} is not supported by family gpt.{did_you_mean(architecture, ARCHITECTURES)}")
    activation = hf.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise UserError(f"config.json: activation_function={activation} is not supported by family gpt.{did_you_mean(activation, ACTIVATIONS)}")
    dropout = hf.get("resid_pdrop", 0.1)
    for name in ("embd_pdrop", "attn_pdrop"):
        if hf.get(name, 0.1) != dropout:
            raise UserError(f"config.json: {name}={hf.get(name, 0.1)} but resid_pdrop={dropout}; family gpt has one dropout. Make them equal there")
    return GPTConfig(
        vocab_size=hf.get("vocab_size", 50257),
        n_layers=hf.get("n_layer", 12),
        d_model=hf.get("n_embd", 768),
        n_heads=hf.get("n_head", 12),
        d_ff=hf.get("n_inner"),
        seq_len=hf.get("n_positions", 1024),
        dropout=dropout,
        activation=ACTIVATIONS[activation],
        tie_output=hf.get("tie_word_embeddings", True),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
    )


def config_to_hf(config: GPTConfig) -> dict:
    if config.n_experts is not None:
        return {"model_type": "gradus-gpt-moe", "architectures": ["GPT"], **config.model_dump(mode="json", exclude={"preset", "init"})}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_layer": config.n_layers,
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": config.seq_len,
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_output,
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
        Rule("norm.weight", "transformer.ln_f.weight"),
        Rule("norm.bias", "transformer.ln_f.bias"),
        Rule("head.weight", "lm_head.weight"),  # when tied: the same tensor as wte.weight, so written once
    ]
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        qkv = [f"{ours}.attention.{name}" for name in ("to_q", "to_k", "to_v")]
        table += [
            *(Rule(f"{ours}.attention_norm.{kind}", f"{theirs}.ln_1.{kind}") for kind in ("weight", "bias")),
            Rule(tuple(f"{name}.weight" for name in qkv), f"{theirs}.attn.c_attn.weight", _split_matrix, _fuse_matrices),
            Rule(tuple(f"{name}.bias" for name in qkv), f"{theirs}.attn.c_attn.bias", _split_bias, _fuse_biases),
            *_transposed(f"{ours}.attention.to_out", f"{theirs}.attn.c_proj"),
            *(Rule(f"{ours}.feedforward_norm.{kind}", f"{theirs}.ln_2.{kind}") for kind in ("weight", "bias")),
        ]
        if config.n_experts is None:
            table += _transposed(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc")
            table += _transposed(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj")
        else:
            names = ["router.weight", *(f"experts.{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias"))]
            table += [Rule(f"{ours}.feedforward.{name}", f"{theirs}.mlp.{name}") for name in names]
    return table if config.bias else [rule for rule in table if not rule.theirs.endswith(".bias")]


def _transposed(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", f"{theirs}.weight", _transpose, _transpose), Rule(f"{ours}.bias", f"{theirs}.bias")]


def _transpose(matrix: Tensor) -> Tensor:
    return matrix.T


def _split_matrix(fused: Tensor) -> tuple[Tensor, ...]:
    return fused.T.chunk(3)  # (d_model, 3 d_model) -> 3 × (d_model, d_model)


def _fuse_matrices(*parts: Tensor) -> Tensor:
    import torch

    return torch.cat(parts).T


def _split_bias(fused: Tensor) -> tuple[Tensor, ...]:
    return fused.chunk(3)


def _fuse_biases(*parts: Tensor) -> Tensor:
    import torch

    return torch.cat(parts)


def prefixes(keys: list[str]) -> str:
    return "transformer." if any(key.startswith("transformer.") for key in keys) else ""


def ignorable(key: str) -> bool:
    return key.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask
