"""A ViT (Dosovitskiy et al. 2021) and a step of its training as functions, in JAX and optax: what Gradus's model and step compute in PyTorch.

The parameters are the tensors of a model.safetensors by their names there, which are Hugging Face's: what Gradus wrote is read as it is, and what
JAX has trained is written back likewise. runners.py times a step, for vit-in-jax.yaml.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from safetensors.flax import load_file, save_file

Params = dict[str, jax.Array]  # name in the file → tensor
Config = dict[str, Any]  # of config.json

# ------------------------------------------------------------ the model


def load(folder: Path) -> tuple[Params, Config]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def save(p: Params, folder: Path) -> None:
    save_file(p, folder / "model.safetensors", {"format": "pt"})


def linear(p: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]  # a file's weight is (outputs, inputs)


def layer_norm(p: Params, name: str, x: jax.Array, eps: float) -> jax.Array:
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def patches(p: Params, name: str, images: jax.Array) -> jax.Array:
    """A linear embedding of each patch (equation 1): (batch, channels, height, width) → (batch, n_patches, d_model)."""
    weight, (batch, channels, height, width) = p[f"{name}.weight"], images.shape
    side = weight.shape[-1]
    grid = images.reshape(batch, channels, height // side, side, width // side, side)
    cut = grid.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * side * side)
    return cut @ weight.reshape(len(weight), -1).T + p[f"{name}.bias"]


def attention(p: Params, name: str, x: jax.Array, n_heads: int) -> jax.Array:
    heads = (*x.shape[:2], n_heads, -1)  # (batch, seq, n_heads, head_dim)
    q, k, v = (linear(p, f"{name}.attention.{part}", x).reshape(heads) for part in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])  # (batch, n_heads, seq, seq)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return linear(p, f"{name}.output.dense", mixed.reshape(x.shape))


def block(p: Params, name: str, x: jax.Array, config: Config) -> jax.Array:
    """Attention, then feed-forward, each on normed input and with a residual (equations 2 and 3)."""
    norm = functools.partial(layer_norm, p, eps=config["layer_norm_eps"])
    x = x + attention(p, f"{name}.attention", norm(f"{name}.layernorm_before", x), config["num_attention_heads"])
    up = jax.nn.gelu(linear(p, f"{name}.intermediate.dense", norm(f"{name}.layernorm_after", x)), approximate=False)
    return x + linear(p, f"{name}.output.dense", up)


def vit(p: Params, images: jax.Array, config: Config) -> jax.Array:
    """images (batch, n_channels, image_size, image_size) → scores (batch, n_classes), of the class token."""
    x = patches(p, "vit.embeddings.patch_embeddings.projection", images)
    token = jnp.broadcast_to(p["vit.embeddings.cls_token"], (len(x), 1, x.shape[-1]))
    x = jnp.concatenate((token, x), axis=1) + p["vit.embeddings.position_embeddings"]  # (batch, n_patches + 1, d_model)
    for i in range(config["num_hidden_layers"]):
        x = block(p, f"vit.encoder.layer.{i}", x, config)
    return linear(p, "classifier", layer_norm(p, "vit.layernorm", x, config["layer_norm_eps"])[:, 0])


# ------------------------------------------------------------ a step


def step_of(config: Config, optimizer: optax.GradientTransformation) -> Callable[..., tuple[Params, Any, jax.Array]]:
    """step(params, state, images, labels) → (params, state, loss). labels (batch,); the loss is the mean cross entropy, in nats/sample."""

    def loss(p: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(vit(p, images, config), labels).mean()

    def step(p: Params, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, images, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(p, updates), state, value

    return step
