"""The checkpoints of llama2.c, version 0 (`stories15M.bin` and the like): seven int32, then fp32 tensors in a fixed
order.

The header is d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; a negative vocab_size says that the
output projection is a matrix of its own. Rotary channels are interleaved, as in Meta's layout.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.errors import UserError
from gradus.models.weights import Stored
from gradus.recipe.schema import LlamaConfig

if TYPE_CHECKING:
    from torch import Tensor

HEADER = struct.Struct("<7i")


def read(file: Path, weights_too: bool = True) -> tuple[LlamaConfig, dict[str, Stored]]:
    """(configuration, tensors under Hugging Face's names, memory-mapped). Raises UserError for a file that is cut or
    not of this format."""
    config, layout = _read_header(file)
    if not weights_too:
        return config, {}
    import torch

    from gradus.layers import interleaved_to_halves

    values = torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32)
    heads = {"self_attn.q_proj": config.n_heads, "self_attn.k_proj": config.n_kv_heads}

    def stored(offset: int, shape: tuple[int, ...], name: str) -> Stored:
        def read_one() -> Tensor:
            tensor = values[offset : offset + math.prod(shape)].view(shape)
            n_heads = next((n for part, n in heads.items() if part in name), None)
            return interleaved_to_halves(tensor, n_heads) if n_heads else tensor

        return Stored(shape, read_one)

    tensors = {}
    offset = HEADER.size // 4
    for name, shape in layout:
        if name:
            tensors[name] = stored(offset, shape, name)
        offset += math.prod(shape)
    return config, tensors


def _read_header(file: Path) -> tuple[LlamaConfig, list[tuple[str | None, tuple[int, ...]]]]:
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = f.read(HEADER.size)
    numbers = HEADER.unpack(start) if len(start) == HEADER.size else (0,) * 7
    d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = numbers
    positive = min(d_model, d_ff, n_layers, n_heads, n_kv_heads, abs(vocab_size), seq_len) > 0
    # The last test comes before billions of layers are listed.
    if not positive or d_model % n_heads or n_heads % n_kv_heads or 4 * n_layers * d_model > size:
        why = "its first 28 bytes are not the header of a whole llama2.c checkpoint (version 0)"
        if start[:4] == b"24ka":  # "ak42", little-endian
            why = "a later version of llama2.c's format; only 0 is read. Export it again with --version 0"
        elif start[:2] in (b"PK", b"\x80\x02"):
            why = "a PyTorch file, which does not say what model it is. Give the folder that holds config.json too"
        raise UserError(f"{file}: {why}")
    config = LlamaConfig(
        vocab_size=abs(vocab_size), n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads,
        d_ff=d_ff, seq_len=seq_len, tie_output=vocab_size > 0,
    )  # fmt: skip
    layout = _layout(config)
    expected = HEADER.size + 4 * sum(math.prod(shape) for _, shape in layout)
    if size != expected:
        raise UserError(f"{file}: {size} bytes, where its header asks for {expected}. Copy or download it again")
    return config, layout


def _layout(config: LlamaConfig) -> list[tuple[str | None, tuple[int, ...]]]:
    """(Hugging Face's name, shape) in the order of the file; the rotary tables have no name: the model computes its
    own."""
    d, f, kv = config.d_model, config.d_ff, config.n_kv_heads * config.head_dim

    def layers(name: str, *shape: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"model.layers.{i}.{name}.weight", shape) for i in range(config.n_layers)]

    return [
        ("model.embed_tokens.weight", (config.vocab_size, d)),
        *layers("input_layernorm", d),
        *layers("self_attn.q_proj", d, d),
        *layers("self_attn.k_proj", kv, d),
        *layers("self_attn.v_proj", kv, d),
        *layers("self_attn.o_proj", d, d),
        *layers("post_attention_layernorm", d),
        *layers("mlp.gate_proj", f, d),
        *layers("mlp.down_proj", d, f),
        *layers("mlp.up_proj", f, d),
        ("model.norm.weight", (d,)),
        (None, (config.seq_len, config.head_dim // 2)),
        (None, (config.seq_len, config.head_dim // 2)),
        *([] if config.tie_output else [("lm_head.weight", (config.vocab_size, d))]),
    ]
