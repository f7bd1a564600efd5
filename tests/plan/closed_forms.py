"""Parameters and operations by the papers' shapes: what is counted and traced is held against them."""

from __future__ import annotations

import math

from gradus.plan.counts import Shape
from gradus.recipe.schema import ModelConfig


def two_sided(m: ModelConfig) -> bool:
    return m.family in ("t5", "seq2seq")


def head_products(m: ModelConfig, shape: Shape) -> list[tuple[float, int, int]]:
    """(places of a sample, inputs, outputs) of the matrices behind the blocks."""
    h = m.d_model
    if m.family == "vit":
        return [(1, h, m.n_classes or 0)]
    if m.family != "bert":
        return [(shape.target if two_sided(m) else shape.source, h, getattr(m, "target_vocab_size", None) or m.vocab_size)]
    classes = {"pretraining": 2, "classification": m.n_classes}.get(m.head)
    found = [(1, h, h), (1, h, classes)] if classes else []
    return found + ([(shape.selected, h, h), (shape.selected, h, m.vocab_size)] if m.head in ("masked_lm", "pretraining") else [])


def closed_form(m: ModelConfig, shape: Shape) -> int:
    """Operations of forward and backward pass over one sample, attention's full matrix: 6·N_mm a token, and 12·a·d a pair of query and key.

    N_mm are the weights that multiply (Chowdhery et al. 2022, appendix B). Of the encoder-decoder the encoder's weights, and those of the
    decoder that make keys and values of the encoder's output, act on the source, the rest on the target. A masked-LM head acts on the places
    it is asked for. Patches need no gradient of the image: 4 a weight instead of 6.
    """
    h, (s, t, _) = m.d_model, shape
    kv_heads, n_experts = getattr(m, "n_kv_heads", None) or m.n_heads, getattr(m, "n_experts", None) or 0
    queries, keys = m.n_heads * m.head_dim, kv_heads * m.head_dim
    gated = m.family == "llama" or getattr(m, "gated", False)
    layer = 2 * h * (queries + keys) + (3 if gated else 2) * h * m.d_ff * (m.top_k if n_experts else 1) + h * n_experts
    total = m.n_layers * (6 * layer * s + 12 * queries * s * s)
    if getattr(m, "d_expert", None):  # of a width of their own, in some layers, beside a shared one and its gate
        mixed = sum(map(m.has_experts, range(m.n_layers)))
        experts = 3 * (m.d_expert * m.top_k + (m.d_shared or 0)) + n_experts + bool(m.d_shared)
        total += 6 * h * s * (mixed * experts - m.n_layers * (3 * m.d_ff * m.top_k + n_experts) + (m.n_layers - mixed) * 3 * m.d_ff)
    if two_sided(m):  # cross-attention: keys and values of the source, queries and the output of the target
        total += (m.n_decoder_layers or m.n_layers) * (6 * layer * t + 12 * h * queries * (s + t) + 12 * queries * (t * t + t * s))
    if m.family == "vit" and m.patches == "stem":  # 3 × 3, each at the places where the one before was pooled to
        n = int(math.log2(m.patch_size))
        widths = [m.n_channels, *(h // 2**i for i in range(n - 1, -1, -1))]
        total += sum((6 if i else 4) * 9 * widths[i] * widths[i + 1] * (m.image_size // 2**i) ** 2 for i in range(n))
    elif m.family == "vit":
        total += 4 * m.n_channels * m.patch_size**2 * h * (m.image_size // m.patch_size) ** 2
    return total + 6 * sum(math.prod(product) for product in head_products(m, shape))
