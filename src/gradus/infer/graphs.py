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

    def update(
        self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        seq = k.shape[2]
        self.past = torch.cat((self.past[0], k), dim=2), torch.cat((self.past[1], v), dim=2)
        if window is not None:
            slots = torch.arange(self.past[0].shape[2], device=k.device)
            mask = mask & (slots > slots[-seq:, None] - window)
        return *self.past, mask, None


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


class Graph:
    """name: of its file. inputs: name → an example. shapes: name → each dimension: its size, or the name of one that
    may change."""

    def __init__(self, name: str, module: nn.Module, inputs: dict[str, tuple], outputs: list[str]):
        """inputs: name → (a number that fills the example, in its type, *its shape)."""
        self.name, self.module, self.outputs = name, module.eval(), outputs
        self.shapes = {key: shape for key, (_, *shape) in inputs.items()}
        self.inputs = {
            key: number.expand([EXAMPLE.get(n, n) for n in shape]).contiguous()  # compilers keep the strides
            for key, (number, *shape) in inputs.items()
        }

    @property
    def dynamic(self) -> tuple:
        """torch.export's dynamic shapes of the module's arguments; what is beyond its named ones came in `*`."""
        named = [p for p in inspect.signature(self.module.forward).parameters.values() if p.kind != p.VAR_POSITIONAL]
        names = {n for shape in self.shapes.values() for n in shape if isinstance(n, str)}
        dims = {name: self._dim(name) for name in names}
        shapes = [{i: dims[n] for i, n in enumerate(shape) if n in dims} for shape in self.shapes.values()]
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
    if config.reads == "images":
        images = {"pixel_values": (torch.tensor(0.0), "batch", config.n_channels, *[config.image_size] * 2)}
        return [Graph("model", ImageGraph(model), images, ["logits" if config.n_classes else "features"])]
    one, dtype = torch.tensor(1), next(model.parameters()).dtype  # an id, or a token that is real
    row, read = (one, "batch", "seq"), (one, "batch", "source")
    if family.attention == "both":
        inputs = {"input_ids": row, "attention_mask": row}
        if "token_types" in inspect.signature(model.forward).parameters:
            inputs["token_type_ids"] = (0 * one, *row[1:])
        heads = {"none": ["last_hidden_state"], "pretraining": ["logits", "next_sentence_logits"]}
        return [Graph("model", EncoderGraph(model), inputs, heads.get(getattr(config, "head", ""), ["logits"]))]

    if not hasattr(model, "new_cache"):
        raise UserError(f"family {family.name}: its decoder has no cache of keys and values. Use --as hf.")
    shapes = [(layer.k.shape[1], layer.k.shape[3]) for layer in model.new_cache(1, 1).layers]

    def cached(names: str, axis: str) -> dict[str, tuple]:
        return {
            names.format(i, part): (torch.zeros((), dtype=dtype), "batch", heads, axis, size)
            for i, (heads, size) in enumerate(shapes) for part in ("key", "value")
        }  # fmt: skip

    if family.attention == "causal":
        past = cached("past_key_values.{}.{}", "past")
        inputs = {"input_ids": row, "attention_mask": (one, "batch", "total")} | past
        return [Graph("model", DecoderGraph(model), inputs, ["logits", *presents(past)])]
    own = cached("past_key_values.{}.decoder.{}", "past")
    cross = cached("past_key_values.{}.encoder.{}", "source")
    source, inputs = {"input_ids": read, "attention_mask": read}, {"input_ids": row, "encoder_attention_mask": read}
    return [
        Graph("encoder", CrossKVGraph(model, shapes, dtype), source, presents(cross)),
        Graph("decoder", DecoderWithCross(model), inputs | own | cross, ["logits", *presents(own)]),
    ]


def presents(past: dict[str, tuple]) -> list[str]:
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
