"""The checkpoints of llama2.c, version 0 (`stories15M.bin` and the like): seven int32, then fp32 tensors in a fixed
order.

The header is d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; a negative vocab_size says that the
output projection is a matrix of its own. The tensors are those of Meta's layout, all layers' of one kind after another.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from gradus.errors import UserError
from gradus.models.weights import Stored, meta_llama
from gradus.recipe.schema import LlamaConfig

HEADER = struct.Struct("<7i")


def read(file: Path) -> tuple[LlamaConfig, dict[str, Stored]]:
    """(configuration, tensors under Hugging Face's names, memory-mapped). Raises UserError for a file that is cut or
    not of this format."""
    import torch

    config, layout = _read_header(file)
    values = torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32)
    tensors, offset = [], HEADER.size // 4
    for name, shape in layout:
        n = math.prod(shape)
        if name:
            tensors.append(meta_llama.merged(name, [values[offset : offset + n].view(shape)], config, file))
        offset += n
    return config, dict(tensors)


def _read_header(file: Path) -> tuple[LlamaConfig, list[tuple[str, tuple[int, ...]]]]:
    """(configuration, (Meta's name, shape) in the order of the file; the rotary tables have no name: the model computes
    its own)."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = f.read(HEADER.size)
    numbers = HEADER.unpack(start) if len(start) == HEADER.size else (0,) * 7
    d_model, d_ff, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = numbers
    positive = min(d_model, d_ff, n_layers, n_heads, n_kv_heads, abs(vocab_size), seq_len) > 0
    # The last test comes before billions of layers are listed.
    if not positive or d_model % n_heads or n_heads % n_kv_heads or 4 * n_layers * d_model > size:
        raise UserError(
            f"{file}: its first {HEADER.size} bytes are not the header of a whole llama2.c checkpoint (version 0). "
            "Export it again with --version 0; for PyTorch's weights give the folder that also holds config.json"
        )
    tied, kv, table = vocab_size > 0, n_kv_heads * (d_model // n_heads), (seq_len, d_model // n_heads // 2)
    config = LlamaConfig(
        vocab_size=abs(vocab_size), n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads,
        d_ff=d_ff, seq_len=seq_len, tie_output=tied,
    )  # fmt: skip
    vector, square, to_kv, up, down = (d_model,), (d_model, d_model), (kv, d_model), (d_ff, d_model), (d_model, d_ff)
    kinds = zip(meta_llama.LAYER, (vector, square, to_kv, to_kv, square, vector, up, down, up), strict=True)
    layout = [
        ("tok_embeddings.weight", (abs(vocab_size), d_model)),
        *((f"layers.{i}.{name}", shape) for name, shape in kinds for i in range(n_layers)),
        *(("norm.weight", vector), ("", table), ("", table)),
        *([] if tied else [("output.weight", (abs(vocab_size), d_model))]),
    ]
    expected = HEADER.size + 4 * sum(math.prod(shape) for _, shape in layout)
    if size != expected:
        raise UserError(f"{file}: {size} bytes, where its header asks for {expected}. Copy or download it again")
    return config, layout
