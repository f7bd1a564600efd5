"""Where a token stands: sinusoidal tables, rotary embeddings, T5's relative buckets."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from gradus.errors import UserError


def sinusoidal(
    seq_len: int, d_model: int, layout: Literal["interleaved", "halves"] = "interleaved", device=None
) -> Tensor:
    """(seq, d_model) fp32: sin and cos of position / 10000^(2i / d_model) (Vaswani et al. 2017, section 3.5).

    interleaved: sin and cos alternate, as in the paper. halves: all sin, then all cos.
    Raises UserError for an odd d_model.
    """
    if d_model % 2:
        raise UserError(f"sinusoidal positions need an even d_model, not {d_model}; use {d_model + 1}")
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model
    # (seq, d_model / 2)
    angle = torch.arange(seq_len, dtype=torch.float64, device="cpu")[:, None] * 10_000.0**-exponent
    parts = angle.sin(), angle.cos()
    table = torch.stack(parts, dim=-1).flatten(1) if layout == "interleaved" else torch.cat(parts, dim=-1)
    return table.to(device=device or torch.get_default_device(), dtype=torch.float32)


def rotary_frequencies(head_dim: int, theta: float, scaling: Any = None, device=None) -> Tensor:
    """(head_dim / 2,) fp32: radians a position, theta^(-2i / head_dim) (Su et al. 2021, equation 15).

    scaling: a recipe.schema.RopeScaling. linear: all are divided by `factor` (Chen et al. 2023). llama3 (Grattafiori et
    al. 2024): wavelengths longer than original_seq_len / low_freq_factor are stretched by `factor`, those shorter than
    original_seq_len / high_freq_factor stay, and between the two the stretch fades in. yarn (Peng et al. 2023, section
    3.2): it fades in between those that turn beta_fast and beta_slow times within original_seq_len, by their number.
    """
    if head_dim % 2:
        raise UserError(f"rotary positions need an even head size (d_model / n_heads), not {head_dim}")
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is None:
        return frequency
    if scaling.type == "linear":
        return frequency / scaling.factor
    if scaling.type == "llama3":
        turns = scaling.original_seq_len * frequency / (2 * math.pi)  # of this wave within the original length
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        fast, slow = (  # the waves, by number, that turn so often
            head_dim * math.log(scaling.original_seq_len / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
        number = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        keep = 1 - (number - first) / max(last - first, 1e-3)
    keep = keep.clamp(0, 1)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rotary_table(positions: Tensor, head_dim: int, theta: float, scaling: Any = None) -> tuple[Tensor, Tensor]:
    """Rotations for `apply_rotary`: (cos, sin), each positions.shape + (head_dim,) in fp32, the first half of sin
    negated.

    positions: integers (seq,) or (batch, seq); for q and k of shape (batch, n_heads, seq, head_dim) give (batch, 1,
    seq). YaRN multiplies both by its attention_factor (Peng et al. 2023, section 3.4).
    """
    # (..., seq, head_dim / 2)
    angle = positions[..., None].float() * rotary_frequencies(head_dim, theta, scaling, positions.device)
    cos, sin = angle.cos(), angle.sin()
    if factor := scaling and scaling.attention_factor:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) by its position's angle (Su et al. 2021, equation 34, in the
    half-split layout).

    x: (batch, n_heads, seq, head_dim); cos, sin: from `rotary_table`. Same shape and dtype as x; computed in fp32.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def interleaved_to_halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a q or k projection (weight or bias) from the layout that rotates neighbours (2i, 2i+1) (Meta's) to the
    half-split one (ours)."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def relative_buckets(
    query_pos: Tensor, key_pos: Tensor, bidirectional: bool, n_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """T5's buckets of the distance from a query to a key (Raffel et al. 2020, section 2.1): one each for near keys,
    logarithmic ones up to max_distance, one for all that is farther; half of them for later keys when bidirectional,
    else later keys count as distance 0.

    query_pos: integers (..., q_len); key_pos: (..., k_len). Returns long (..., q_len, k_len) in [0, n_buckets).
    """
    distance = query_pos[..., :, None] - key_pos[..., None, :]  # positive: the key is earlier
    offset = 0
    if bidirectional:
        n_buckets //= 2
        offset = (distance < 0).long() * n_buckets
        distance = distance.abs()
    else:
        distance = distance.clamp_min(0)
    exact = n_buckets // 2
    log = (distance.clamp_min(exact).float() / exact).log() / math.log(max_distance / exact) * (n_buckets - exact)
    far = (exact + log.long()).clamp_max(n_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
