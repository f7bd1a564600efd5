"""A model as graphs, for formats that know neither Python nor our modules: what goes in and out by name.

    encoder           model    input_ids, attention_mask[, token_type_ids] (batch, seq) or pixel_values -> logits
    decoder           model    input_ids (batch, seq), attention_mask (batch, total), past_key_values.I.key, .value
                               (batch, n_kv_heads, past, head_dim) -> logits (batch, seq, vocab), present.I.key, .value
                               (batch, n_kv_heads, total, head_dim), of past + seq = total tokens; a token's position
                               is the number of tokens before it in attention_mask
    encoder-decoder   encoder  input_ids, attention_mask (batch, source) -> present.I.encoder.key, .value
                      decoder  input_ids (batch, seq), encoder_attention_mask (batch, source),
                               past_key_values.I.decoder.key, .value (as a decoder's), past_key_values.I.encoder.key,
                               .value (batch, n_heads, source, head_dim) -> logits, present.I.decoder.key, .value

Names are those of transformers' own graphs. Masks are integers, 1 where a token is real. Images and logits are fp32
whatever the precision, keys and values of its type.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.layers import MixtureOfExperts
from gradus.models import lookup

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES["int8"] = torch.float32  # of what is no matrix product
EXAMPLE = {"batch": 2, "seq": 3, "past": 4, "source": 5, "total": 7}  # at least 2: a 1 or 0 would stay fixed


# ---------------------------------------------------------------- what stands in for a model


class KVLayer:
    """Stands in for layers.LayerCache: it appends new keys and values to the old ones, which stay as they are."""

    def __init__(self, past: tuple[Tensor, Tensor], cross: tuple[Tensor, Tensor] | None = None):
        self.past, self.cross = past, cross

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.past = torch.cat((self.past[0], k), dim=2), torch.cat((self.past[1], v), dim=2)
        return self.past


class KVInputs:
    """Stands in for layers.Cache. keep: boolean (batch, past + seq), where a token is real; None: everywhere."""

    def __init__(self, layers: list[KVLayer], seq: int, keep: Tensor | None = None):
        self.layers, self.keep = layers, keep
        self.before = layers[0].past[0].shape[2]
        self.length = self.before + seq

    def next_positions(self, batch: int, seq: int, device: torch.device | None = None) -> Tensor:
        return torch.arange(self.before, self.length, device=device).expand(batch, seq)

    def mask(self, positions: Tensor) -> Tensor:
        slots = torch.arange(self.length, device=positions.device)
        mask = (slots <= slots[self.before :, None])[None, None]  # (1, 1, seq, past + seq)
        return mask if self.keep is None else mask & self.keep[:, None, None, :]

    @property
    def present(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.past]


def pairs(flat: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


class ModelGraph(nn.Module):
    """A model with the inputs and outputs of a graph."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


class EncoderGraph(ModelGraph):
    """An encoder of tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *token_types: Tensor) -> tuple[Tensor, ...]:
        types = {"token_types": token_types[0]} if token_types else {}
        out = self.model(input_ids, keep=attention_mask.bool(), **types)
        return tuple(part.float() for part in (out if isinstance(out, tuple) else (out,)))


class ImageGraph(ModelGraph):
    """An encoder of images."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        return (self.model(pixel_values.to(next(self.model.parameters()).dtype)).float(),)


class DecoderGraph(ModelGraph):
    """A decoder."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = KVInputs([KVLayer(pair) for pair in pairs(past)], input_ids.shape[1], attention_mask.bool())
        positions = (attention_mask.cumsum(1) - 1).clamp_min(0).narrow(1, cache.before, input_ids.shape[1])
        return (self.model(input_ids, positions=positions, cache=cache).float(), *cache.present)


class CrossKVGraph(ModelGraph):
    """An encoder-decoder's encoder, with the keys and values that its decoder's cross-attention makes of the output."""

    def __init__(self, model: nn.Module, shapes: list[tuple[int, int]], dtype: torch.dtype):
        super().__init__(model)
        self.shapes, self.dtype = shapes, dtype

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        keep = attention_mask.bool()
        memory = self.model.encode(input_ids, keep)
        empty = [input_ids.new_zeros(input_ids.shape[0], n, 0, size, dtype=self.dtype) for n, size in self.shapes]
        cache = KVInputs([KVLayer((tensor, tensor)) for tensor in empty], 1)
        # Fills cache.cross; all else that it computes is unused, and compilers leave it out.
        self.model.decode(input_ids[:, :1], memory, keep, cache=cache)
        return tuple(tensor for layer in cache.layers for tensor in layer.cross)


class DecoderWithCross(ModelGraph):
    """An encoder-decoder's decoder."""

    def forward(self, input_ids: Tensor, encoder_attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        half = len(past) // 2  # the decoder's, then the encoder's
        layers = [KVLayer(own, cross) for own, cross in zip(pairs(past[:half]), pairs(past[half:]), strict=True)]
        cache = KVInputs(layers, input_ids.shape[1])
        keep = encoder_attention_mask.bool()
        # the memory itself is not read again: every layer has its keys and values
        return (self.model.decode(input_ids, keep, keep, cache=cache).float(), *cache.present)


# ---------------------------------------------------------------- their inputs and outputs


@dataclasses.dataclass
class Graph:
    """name: of its file. inputs: name → an example. axes: name → which of its dimensions may change, by name."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    axes: dict[str, dict[int, str]]
    outputs: list[str]

    def __post_init__(self):
        self.module.eval()
        self.inputs = {name: tensor.contiguous() for name, tensor in self.inputs.items()}  # compilers keep the strides

    @property
    def dynamic(self) -> tuple:
        """torch.export's dynamic shapes of the module's arguments; what is beyond its named ones came in `*`."""
        named = [p for p in inspect.signature(self.module.forward).parameters.values() if p.kind != p.VAR_POSITIONAL]
        dims = {name: self._dim(name) for name in {n for axes in self.axes.values() for n in axes.values()}}
        shapes = [{i: dims[name] for i, name in axes.items()} for axes in self.axes.values()]
        return (*shapes[: len(named)], *([tuple(shapes[len(named) :])] if len(shapes) > len(named) else []))

    def _dim(self, name: str) -> Any:
        longest = self.module.model.config.longest
        # Of the parts of a sequence of at most `longest` tokens each leaves 2 for the other, as torch.export counts.
        most = None if longest is None or name == "batch" else longest if name == "total" else longest - 2
        return torch.export.Dim(name, min={"past": 0, "total": 4}.get(name), max=most)


def graphs(model: nn.Module) -> list[Graph]:
    """The graphs of a model. Raises UserError where none can be made."""
    family, config = lookup(model.config.family), model.config
    if any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        raise UserError("a mixture of experts: only the format hf supports it. Use --as hf.")
    if config.longest is not None and config.longest < EXAMPLE["total"]:
        raise UserError(f"model.seq_len={config.longest}: too short to export; at least {EXAMPLE['total']}.")
    tokens = torch.arange(2 * 7).view(2, 7) % config.vocab_size if config.reads == "text" else torch.empty(2, 0)
    ids = {"input_ids": tokens[:, : EXAMPLE["seq"]]}
    if config.reads == "images":
        size = config.n_channels, config.image_size, config.image_size
        out = ["logits" if config.n_classes else "features"]
        images, axes = {"pixel_values": torch.zeros(2, *size)}, {"pixel_values": {0: "batch"}}
        return [Graph("model", ImageGraph(model), images, axes, out)]
    row, dtype = {0: "batch", 1: "seq"}, next(model.parameters()).dtype
    if family.attention == "both":
        inputs = ids | {"attention_mask": torch.ones_like(ids["input_ids"])}
        if "token_types" in inspect.signature(model.forward).parameters:
            inputs["token_type_ids"] = torch.zeros_like(ids["input_ids"])
        heads = {"none": ["last_hidden_state"], "pretraining": ["logits", "next_sentence_logits"]}
        out = heads.get(getattr(config, "head", ""), ["logits"])
        return [Graph("model", EncoderGraph(model), inputs, dict.fromkeys(inputs, row), out)]

    if not hasattr(model, "new_cache"):
        raise UserError(f"family {family.name}: its decoder has no cache of keys and values. Use --as hf.")
    shapes = [(layer.k.shape[1], layer.k.shape[3]) for layer in model.new_cache(1, 1).layers]

    def cached(names: str, axis: str) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
        tensors = {
            names.format(i, part): torch.zeros(2, heads, EXAMPLE[axis], size, dtype=dtype)
            for i, (heads, size) in enumerate(shapes) for part in ("key", "value")
        }  # fmt: skip
        return tensors, {name: {0: "batch", 2: axis} for name in tensors}

    if family.attention == "causal":
        past, axes = cached("past_key_values.{}.{}", "past")
        mask = torch.ones(2, EXAMPLE["total"], dtype=torch.long)
        axes = {"input_ids": row, "attention_mask": {0: "batch", 1: "total"}} | axes
        inputs = ids | {"attention_mask": mask} | past
        return [Graph("model", DecoderGraph(model), inputs, axes, ["logits", *presents(past)])]
    own, own_axes = cached("past_key_values.{}.decoder.{}", "past")
    cross, cross_axes = cached("past_key_values.{}.encoder.{}", "source")
    mask, mask_axes = torch.ones(2, EXAMPLE["source"], dtype=torch.long), {0: "batch", 1: "source"}
    source = {"input_ids": tokens[:, : EXAMPLE["source"]], "attention_mask": mask}
    inputs = ids | {"encoder_attention_mask": mask} | own | cross
    axes = {"input_ids": row, "encoder_attention_mask": mask_axes} | own_axes | cross_axes
    return [
        Graph("encoder", CrossKVGraph(model, shapes, dtype), source, dict.fromkeys(source, mask_axes), presents(cross)),
        Graph("decoder", DecoderWithCross(model), inputs, axes, ["logits", *presents(own)]),
    ]


def presents(past: dict[str, Tensor]) -> list[str]:
    return [name.replace("past_key_values", "present") for name in past]


def lower(model: nn.Module, precision: str) -> nn.Module:
    """The model in this precision; norms keep fp32 weights and compute in fp32."""
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        return model
    for module in model.to(dtype).modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.float()
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
            module.register_forward_hook(lambda module, inputs, out: out.to(dtype))
    return model
