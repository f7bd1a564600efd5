"""GGUF's layout of a model, as llama.cpp computes it: architecture, keys, and tensors that lie otherwise than Hugging
Face's. names.yaml has what differs between models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradus.errors import UserError
from gradus.models.family import rules_of
from gradus.models.weights import fields
from gradus.recipe.schema import RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

    from gradus.recipe.schema import ModelConfig


SENTENCEPIECE = "llama"  # tokenizer.ggml.model of pieces with scores


class Layout:
    """arch: GGUF's name of the architecture. keys: of its configuration, without the name before them. Raises UserError
    for a model that llama.cpp does not compute."""

    def __init__(self, config: ModelConfig):
        hf, known = rules_of(config.family).config_to_hf(config), fields.names()["gguf"]
        if hf["model_type"] not in known:
            what = f"--as gguf: {hf['model_type']} is not written, but {', '.join(known)}"
            raise UserError(f"{what}. Use --as hf, and llama.cpp's convert_hf_to_gguf.py.")
        table = known[hf["model_type"]]
        self.arch, self.how, self.config = table["arch"], table.get("tensors", {}), config
        only = {name: (getattr(config, name), getattr(config, str(one), one)) for name, one in table["only"].items()}
        if config.n_layers == 62 and "query_width" in only:  # llama.cpp takes it for Gemma 3 27B, and scales as that
            only["query_width"] = config.query_width, config.d_model // config.n_heads
        self.keys: dict[str, Any] = {key: hf[field] for key, field in table["keys"].items()}
        self.scaling: RopeScaling | None = getattr(config, "rope_scaling", None)
        if usual := self.scaling:
            kind, fields_of = usual.type, table["rope"]
            if kind == "yarn":  # llama.cpp has its other numbers as constants
                usual = RopeScaling(type=kind, factor=usual.factor, original_seq_len=usual.original_seq_len)
            only["rope_scaling"] = (self.scaling, usual if kind in fields_of else None)
            own = fields_of.get(kind, {}).items()
            self.keys |= {f"rope.scaling.{key}": hf["rope_scaling"][field] for key, field in own}
        for name, (value, one) in only.items():
            if value != one:
                what = f"--as gguf: llama.cpp computes {self.arch} with model.{name}={one} alone, not {value}"
                raise UserError(f"{what}. Use --as hf.")
        if local := [kind == "sliding_attention" for kind in hf.get("layer_types", [])]:
            self.keys["attention.sliding_window_pattern"] = local
        if not any(local):
            self.keys.pop("attention.sliding_window", None)

    def moved(self, name: str, x: Tensor, back: bool = False) -> Tensor:
        """Hugging Face's tensor of this name as it lies in GGUF, or back."""
        how = next((how for end, how in self.how.items() if name.endswith(end)), None)
        if how == "neighbours":  # rows of a head's first half and second that rotate together
            half = self.config.head_dim // 2
            return x.unflatten(0, (-1, half, 2) if back else (-1, 2, half)).transpose(1, 2).flatten(0, 2)
        return x + (-1 if back else 1) if how == "plus one" else x.T if how == "transposed" else x

    def frequency_factors(self) -> Tensor | None:
        """(head_dim / 2,) what rotary frequencies are divided by, where that is a tensor and no key."""
        from gradus.layers.positions import rotary_frequencies

        if not self.scaling or self.scaling.type != "llama3":
            return None
        size, theta = self.config.head_dim, self.config.rope_theta
        return rotary_frequencies(size, theta) / rotary_frequencies(size, theta, self.scaling)
