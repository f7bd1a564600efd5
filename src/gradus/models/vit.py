"""The Vision Transformer (Dosovitskiy et al. 2021): an image is a sequence of patches; sizes g and G of Zhai et al.
2022.

Pre-norm blocks, learned positions in one dimension, GELU. `pool="class_token"` classifies by a learned token put before
the patches (section 3.1); `pool="mean"` has no such token and averages the patches' states after the final norm (Zhai
et al. 2022, section 3.2).
With `patches="stem"` convolutions make the tokens in place of the linear embedding (Hassani et al. 2021; Xiao et al.
2021).
Dropout follows appendix B.1: after every dense layer except the one to q, k, v, and directly after the positions are
added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradus.layers import Attention, Block, ConvolutionalStem, FeedForward, Patches
from gradus.layers.init import Draw, normal, norms_and_biases, truncated_normal, zeros
from gradus.models.family import Family, Stack
from gradus.models.weights import vit as weights
from gradus.recipe.schema import ViTConfig


class ViTBlock(Block):
    """Attention, then feed-forward, each on normed input and with a residual (equations 2 and 3)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config.d_model, config.n_heads)
        self.feedforward_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.feedforward = FeedForward(config.d_model, config.d_ff, "gelu", dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))  # (batch, n_tokens, d_model)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class ViT(nn.Module):
    """The encoder and a linear classifier; without `config.n_classes` there is no classifier, and the model returns the
    pooled features."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        sizes = config.image_size, config.patch_size, config.n_channels, config.d_model
        self.patches = ConvolutionalStem(*sizes) if config.patches == "stem" else Patches(*sizes, config.patches)
        has_token = config.pool == "class_token"
        self.class_token = nn.Parameter(torch.empty(1, 1, config.d_model)) if has_token else None
        self.positions = nn.Parameter(torch.empty(1, self.patches.n_patches + has_token, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.n_classes) if config.n_classes else None

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Matrices and positions from a normal of 0.02 cut off at two standard deviations; biases, class token and the
        classifier 0 (the classifier as in section 3.2), so that the first scores are all equal. A stem's convolutions
        from a normal of sqrt(2 / inputs), for ReLU (He et al. 2015, equation 10)."""
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | Patches):
                yield module.weight, truncated_normal(0.02)
            if isinstance(module, nn.Conv2d):
                yield module.weight, normal(math.sqrt(2 / module.weight[0].numel()))
        yield self.positions, truncated_normal(0.02)
        if self.class_token is not None:
            yield self.class_token, zeros
        if self.head is not None:
            yield self.head.weight, zeros

    def features(self, images: Tensor) -> Tensor:
        """images (batch, n_channels, image_size, image_size) -> states after the final norm (batch, n_tokens, d_model);
        the class token, if there is one, comes first. Raises UserError for images of another size."""
        x = self.patches(images)  # (batch, n_patches, d_model)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)  # (batch, n_patches + 1, d_model)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        """images (batch, n_channels, image_size, image_size) -> scores (batch, n_classes), or without a classifier
        (batch, d_model)."""
        x = self.features(images)
        pooled = x.mean(dim=1) if self.class_token is None else x[:, 0]  # (batch, d_model)
        return pooled if self.head is None else self.head(pooled)


FAMILY = Family(
    config=ViTConfig, model=ViT, weights=weights, attention="both",
    stacks=(Stack("blocks", before=("patches", "class_token", "positions"), norm="norm", heads=("head",)),),
    entry=("dropout",),
)  # fmt: skip
