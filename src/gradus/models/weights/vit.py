"""ViT's tensors and config.json as Hugging Face's ViTForImageClassification has them, or without a classifier ViTModel.
With mean pooling it is the encoder of I-JEPA (Assran et al. 2023), which has no class token and averages the patches
after the final norm: IJepaForImageClassification or IJepaModel.
Hugging Face has no ViT with a convolutional stem; Gradus saves it with model_type gradus-vit: our configuration, the
stem's convolutions named as ours, everything else as ViT's."""

from __future__ import annotations

from collections.abc import Iterable

from gradus.models.weights import Rule, fields
from gradus.recipe.schema import ViTConfig

MODEL_TYPES = ("vit", "ijepa", "gradus-vit")
PREFIXES = ("vit.", "ijepa.")
IGNORABLE = ("pooler.dense.weight", "pooler.dense.bias")  # which neither the classifier nor our features read

NAMES = fields.names()["vit"]
ARCHITECTURES, MODULES, WITHOUT_EFFECT = (NAMES[table] for table in ("architectures", "modules", "without effect"))


def config_from_hf(hf: dict) -> ViTConfig:
    """Raises UserError naming the field of a feature that Gradus' ViT does not have."""
    if hf["model_type"] == "gradus-vit":
        return ViTConfig(**fields.from_ours(hf))
    known = ARCHITECTURES[hf["model_type"]]
    architecture = fields.architecture("vit", hf, known)
    fields.only("vit", hf, NAMES["fixed"])
    return ViTConfig(
        **fields.read(hf, NAMES["fields"]),
        image_size=_side(hf, "image_size", 224),
        patch_size=_side(hf, "patch_size", 16),
        n_classes=fields.n_classes(hf) if architecture == known[0] else None,
        pool="mean" if hf["model_type"] == "ijepa" else "class_token",
    )


def _side(hf: dict, name: str, default: int) -> int:
    """A length, or a pair of two equal ones."""
    value = hf.get(name, default)
    sides = set(value) if isinstance(value, Iterable) else {value}
    if len(sides) > 1:
        raise fields.unsupported("vit", name, value, ", whose images and patches are squares")
    return sides.pop()


def config_to_hf(config: ViTConfig) -> dict:
    if config.patches == "stem":
        return fields.as_ours(config, "gradus-vit", "ViT")
    kind = _model_type(config)
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0 if config.n_classes else 1]],
        **fields.written(config, NAMES["fields"]),
        **NAMES["fixed"],
        "attention_probs_dropout_prob": 0.0,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        **(fields.labels(config) if config.n_classes else {}),
    }


def unknown_to_transformers(config: ViTConfig) -> str:
    """What keeps transformers' ViT from computing this configuration, and what to set."""
    return "a convolutional stem; set model.patches=convolution"


def _model_type(config: ViTConfig) -> str:
    return "ijepa" if config.pool == "mean" else "vit"


def rules(config: ViTConfig) -> list[Rule]:
    body = f"{_model_type(config)}." if config.n_classes else ""
    table = [Rule("class_token", f"{body}embeddings.cls_token")] if config.pool == "class_token" else []
    table.append(Rule("positions", f"{body}embeddings.position_embeddings"))
    if config.patches == "stem":
        stem = (f"convolutions.{i}" for i in range(config.patch_size.bit_length() - 1))
        table += fields.layers({f"patches.{name}": f"{body}embeddings.patch_embeddings.{name}" for name in stem})
    else:
        table += fields.layers({"patches": f"{body}embeddings.patch_embeddings.projection"})
    names = {"norm": f"{body}layernorm"} | ({"head": "classifier"} if config.n_classes else {})
    table += fields.layers(fields.blocks(config.n_layers, "blocks", f"{body}encoder.layer", NAMES["block"]) | names)
    return table
