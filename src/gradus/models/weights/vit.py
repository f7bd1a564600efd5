"""ViT's tensors and config.json as Hugging Face's ViTForImageClassification has them, or without a classifier ViTModel. With mean
pooling it is the encoder of I-JEPA (Assran et al. 2023), which has no class token and averages the patches after the final norm:
IJepaForImageClassification or IJepaModel. gradus-vit, our own configuration with ViT's names, is how mean pooling was once written."""

from __future__ import annotations

from collections.abc import Iterable

from gradus.errors import UserError, did_you_mean
from gradus.models.weights import Rule
from gradus.recipe.schema import ViTConfig

MODEL_TYPES = ("vit", "ijepa", "gradus-vit")

ARCHITECTURES = {"vit": ("ViTForImageClassification", "ViTModel"), "ijepa": ("IJepaForImageClassification", "IJepaModel")}


def config_from_hf(hf: dict) -> ViTConfig:
    """Raises UserError naming the field of a feature that Gradus' ViT has not."""
    if hf["model_type"] == "gradus-vit":
        return ViTConfig(**{k: v for k, v in hf.items() if k not in ("model_type", "architectures", "dtype", "id2label", "label2id")})
    known = ARCHITECTURES[hf["model_type"]]
    architecture = (hf.get("architectures") or known)[0]
    if architecture not in known:
        raise UserError(f"config.json: architectures={architecture} is not supported by family vit.{did_you_mean(architecture, known)}")
    fixed = {"hidden_act": ("gelu", "gelu"), "qkv_bias": (True, True), "attention_probs_dropout_prob": (0.0, 0.0)}  # default, ours
    for name, (default, ours) in fixed.items():
        if hf.get(name, default) != ours:
            raise UserError(f"config.json: {name}={hf[name]} is not supported by family vit, which has {ours}")
    n_classes = len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)
    return ViTConfig(
        n_layers=hf["num_hidden_layers"],
        d_model=hf["hidden_size"],
        n_heads=hf["num_attention_heads"],
        d_ff=hf["intermediate_size"],
        dropout=hf.get("hidden_dropout_prob", 0.0),
        image_size=_side(hf, "image_size", 224),
        patch_size=_side(hf, "patch_size", 16),
        n_channels=hf.get("num_channels", 3),
        n_classes=n_classes if architecture == known[0] else None,
        pool="mean" if hf["model_type"] == "ijepa" else "class_token",
        norm_eps=hf.get("layer_norm_eps", 1e-12),
    )


def _side(hf: dict, name: str, default: int) -> int:
    """A length, or a pair of two equal ones."""
    value = hf.get(name, default)
    sides = set(value) if isinstance(value, Iterable) else {value}
    if len(sides) > 1:
        raise UserError(f"config.json: {name}={value} is not supported by family vit, whose images and patches are squares")
    return sides.pop()


def config_to_hf(config: ViTConfig) -> dict:
    kind = _model_type(config)
    hf = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0 if config.n_classes else 1]],
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": True,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.n_channels,
        "layer_norm_eps": config.norm_eps,
    }
    if config.n_classes:
        hf["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.n_classes)}
        hf["label2id"] = {name: int(i) for i, name in hf["id2label"].items()}
    return hf


def _model_type(config: ViTConfig) -> str:
    return "ijepa" if config.pool == "mean" else "vit"


def rules(config: ViTConfig) -> list[Rule]:
    body = f"{_model_type(config)}." if config.n_classes else ""
    table = [Rule("class_token", f"{body}embeddings.cls_token")] if config.pool == "class_token" else []
    table.append(Rule("positions", f"{body}embeddings.position_embeddings"))
    table += _layer("patches", f"{body}embeddings.patch_embeddings.projection")
    parts = {
        "attention_norm": "layernorm_before",
        "attention.to_q": "attention.attention.query",
        "attention.to_k": "attention.attention.key",
        "attention.to_v": "attention.attention.value",
        "attention.to_out": "attention.output.dense",
        "feedforward_norm": "layernorm_after",
        "feedforward.up": "intermediate.dense",
        "feedforward.down": "output.dense",
    }
    for i in range(config.n_layers):
        for our, their in parts.items():
            table += _layer(f"blocks.{i}.{our}", f"{body}encoder.layer.{i}.{their}")
    table += _layer("norm", f"{body}layernorm")
    return table + (_layer("head", "classifier") if config.n_classes else [])


def _layer(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def prefixes(keys: Iterable[str]) -> str:
    return next((body for body in ("vit.", "ijepa.") if any(key.startswith(body) for key in keys)), "")


def ignorable(key: str) -> bool:
    """The pooler, which neither the classifier nor our features read."""
    return key.removeprefix(prefixes([key])).startswith("pooler.dense.")
