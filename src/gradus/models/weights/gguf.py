"""GGUF's layout of a model, as llama.cpp computes it: architecture, keys, and how tensors lie where they do not lie as
Hugging Face's. names.yaml has what differs between models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError, some
from gradus.models.family import rules_of
from gradus.models.weights import fields

if TYPE_CHECKING:
    from torch import Tensor

    from gradus.recipe.schema import ModelConfig

KNOWN = fields.names()["gguf"]
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # which llama.cpp does not read


class Layout:
    """Raises UserError for a model that llama.cpp does not compute.

    arch: GGUF's name of the architecture. keys: without the name before them. stretched: factors, by which rotary
    frequencies are divided, go into the file as a tensor."""

    def __init__(self, config: ModelConfig):
        hf = rules_of(config.family).config_to_hf(config)
        if hf["model_type"] not in KNOWN:
            what = f"--as gguf: {hf['model_type']} is not written; {some(list(KNOWN))} are"
            raise UserError(f"{what}. Use --as hf, and what llama.cpp converts it with.")
        self.config, self.table = config, KNOWN[hf["model_type"]]
        self.arch: str = self.table["arch"]
        scaling = getattr(config, "rope_scaling", None)
        self.stretched = scaling is not None and scaling.type == "llama3"
        own = {name: (getattr(config, name), value) for name, value in self.table["only"].items()}
        if scaling is not None:
            own["rope_scaling.type"] = (scaling.type, scaling.type if scaling.type in self.table["rope"] else "linear")
            if scaling.type == "yarn":
                own |= {f"rope_scaling.{name}": (getattr(scaling, name), value) for name, value in YARN.items()}
        for name, (value, computed) in own.items():
            if value != (computed := getattr(config, str(computed), computed)):
                what = f"--as gguf: llama.cpp computes {self.arch} with model.{name}={computed} alone, not {value}"
                raise UserError(f"{what}. Use --as hf.")
        self.keys: dict[str, Any] = {key: hf[field] for key, field in self.table["keys"].items()}
        local = [kind == "sliding_attention" for kind in hf.get("layer_types", [])]
        if any(local):
            self.keys["attention.sliding_window_pattern"] = local
        else:
            self.keys.pop("attention.sliding_window", None)
        if scaling is not None and not self.stretched:
            self.keys |= {"rope.scaling.type": scaling.type, "rope.scaling.factor": scaling.factor}
            if scaling.type == "yarn":
                usual = 0.1 * math.log(scaling.factor) + 1.0
                self.keys["rope.scaling.original_context_length"] = scaling.original_seq_len
                self.keys["rope.scaling.attn_factor"] = scaling.attention_factor / usual

    def has(self, what: str, name: str) -> bool:
        return name.endswith(tuple(self.table.get(what, ())))

    def written(self, name: str, x: Tensor) -> Tensor:
        """Hugging Face's tensor of this name as GGUF has it."""
        if self.has("neighbours", name):  # of a head's rows the first half, then the second
            x = x.unflatten(0, (-1, 2, self.config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        return x + 1 if self.has("shifted", name) else x.T if self.has("turned", name) else x

    def read(self, name: str, x: Tensor) -> Tensor:
        """The reverse of `written`."""
        from gradus.layers.positions import interleaved_to_halves

        if self.has("neighbours", name):
            x = interleaved_to_halves(x, len(x) // self.config.head_dim)
        return x - 1 if self.has("shifted", name) else x.T if self.has("turned", name) else x

    def frequencies(self) -> Tensor:
        """(head_dim / 2,) what rotary frequencies are divided by, where they are `stretched`."""
        from gradus.layers.positions import rotary_frequencies

        plain, own = (
            rotary_frequencies(self.config.head_dim, self.config.rope_theta, scaling)
            for scaling in (None, self.config.rope_scaling)
        )
        return plain / own
