"""The parts that models are made of. Norms are PyTorch's own: nn.LayerNorm and nn.RMSNorm."""

from gradus.layers.attention import Attention, observe_attention
from gradus.layers.bases import Block, Decoder, EncoderDecoder
from gradus.layers.cache import Cache, LayerCache, check_length, decoder_inputs
from gradus.layers.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from gradus.layers.kernels import KERNELS, chunked, get_kernel, naive, sdpa
from gradus.layers.latent import LatentAttention
from gradus.layers.linears import linears, use_linears
from gradus.layers.lora import LoRALinear
from gradus.layers.masks import attention_mask
from gradus.layers.moe import ExpertLinear, MixtureOfExperts, keep_balance
from gradus.layers.patches import ConvolutionalStem, Patches, extract
from gradus.layers.positions import (
    apply_rotary,
    interleaved_to_halves,
    relative_buckets,
    rotary_frequencies,
    rotary_table,
    sinusoidal,
)
from gradus.layers.small import SmallLinear, small
from gradus.layers.word_loss import Targets, summed_cross_entropy

__all__ = [
    "ACTIVATIONS", "KERNELS",
    "Attention", "Block", "Cache", "ConvolutionalStem", "Decoder", "EncoderDecoder", "ExpertLinear", "FeedForward",
    "GatedFeedForward", "LatentAttention", "LayerCache", "LoRALinear", "MixtureOfExperts", "Patches", "SmallLinear",
    "Targets",
    "apply_rotary", "attention_mask", "check_length", "chunked", "decoder_inputs", "extract", "get_kernel",
    "interleaved_to_halves", "keep_balance", "linears", "naive", "observe_attention", "relative_buckets",
    "rotary_frequencies", "rotary_table", "sdpa", "sinusoidal", "small", "summed_cross_entropy", "use_linears",
]  # fmt: skip
