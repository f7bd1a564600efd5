"""Meta's own layout of Llama: params.json and consolidated.00.pth, consolidated.01.pth, ... (llama and llama-models
repositories).

Each shard holds one rank's part of every tensor-parallel matrix. Queries and keys rotate neighbouring channels (Su et
al. 2021); ours, like Hugging Face's, rotate channel i with channel i + head_dim/2, so their rows are put in another
order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.models.weights import Stored, fields, some, unpickle
from gradus.recipe.schema import LlamaConfig, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

NAMES = fields.names()["meta"]
LAYER, TOP = NAMES["layer"], NAMES["top"]
PARAMS = {*fields.theirs(NAMES["fields"]).values()} | {
    "vocab_size", "ffn_dim_multiplier", "use_scaled_rope", "max_seq_len", "max_batch_size"
}  # fmt: skip


def read(folder: Path) -> tuple[LlamaConfig, dict[str, Stored]]:
    """(configuration, tensors under Hugging Face's names). Shards are memory-mapped and merged one tensor at a time.

    Raises UserError for parameters of a model that is not a plain Llama, and for shards that are missing, refused or do
    not fit.
    """
    params = limits.read_object(folder / "params.json")
    for key in params:
        if key not in PARAMS:
            suggestion = did_you_mean(key, PARAMS)
            raise UserError(f"{folder / 'params.json'}: {key} is not supported by family llama.{suggestion}")
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{folder}: params.json but no consolidated.*.pth beside it. Copy them here")
    if absent := sorted({f"consolidated.{i:02}.pth" for i in range(len(files))} - {file.name for file in files}):
        raise UserError(f"{folder}: {some(absent)} missing beside {files[-1].name}. Copy all of its shards")
    shards = [unpickle(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if shard.keys() != shards[0].keys():
            differing = some(sorted(shard.keys() ^ shards[0].keys()))
            raise UserError(f"{file}: not the tensors of {files[0].name}; they differ in {differing}")
    config = _config(params, shards, folder / "params.json")
    names = [name for name in shards[0] if name != "rope.freqs"]
    return config, dict(merged(name, [shard[name] for shard in shards], config, folder) for name in names)


def _config(params: dict, shards: list[dict[str, Tensor]], where: Path) -> LlamaConfig:
    import torch

    first = shards[0]
    for key in ("tok_embeddings.weight", *(() if len(shards) == 1 else ("output.weight",))):
        if key not in first:
            raise UserError(f"{where.parent}: no {key} in its shards; they are not a whole Llama")
    # One shard may carry the embedding twice (3.2 is tied); whether it does is nowhere else written.
    embedding, output = first["tok_embeddings.weight"], first.get("output.weight")
    tied = output is None or (output.shape == embedding.shape and torch.equal(output, embedding))
    rows = len(embedding) if output is None else sum(len(shard["output.weight"]) for shard in shards)
    vocab_size = params.get("vocab_size", -1)
    scaled = params.get("use_scaled_rope", False)
    return LlamaConfig(
        vocab_size=rows if vocab_size == -1 else vocab_size,  # Llama 1 and 2 leave it to the tokenizer
        **fields.read(params, NAMES["fields"]),
        ffn_multiplier=params.get("ffn_dim_multiplier") or 1.0,
        seq_len=params.get("max_seq_len") or (131072 if scaled else 8192 if rows == 128256 else 4096),
        # The factor is not in params.json: 8 in Llama 3.1, 32 in 3.2, whose text models are the tied ones.
        rope_scaling=RopeScaling(factor=32.0 if tied else 8.0) if scaled else None,
        tie_output=tied,
    )


def merged(name: str, parts: list[Tensor], config: LlamaConfig, where: Path) -> tuple[str, Stored]:
    """(Hugging Face's name, tensor) of one of Meta's, of which `parts` lie in the shards."""
    from gradus.layers import interleaved_to_halves

    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if name == "tok_embeddings.weight":  # Llama 1 and 2 split the width, Llama 3 the vocabulary
        theirs, dim = "model.embed_tokens.weight", 0 if parts[0].shape[-1] == config.d_model else 1
    elif name in TOP:
        theirs, dim = TOP[name]
    elif layer and layer[2] in LAYER:
        theirs, dim = LAYER[layer[2]]
        theirs = f"model.layers.{layer[1]}.{theirs}"
    else:
        raise UserError(f"{where}: {name} is not a tensor of a plain Llama.{did_you_mean(name, [*TOP, *LAYER])}")
    n_heads = {"attention.wq.weight": config.n_heads, "attention.wk.weight": config.n_kv_heads}
    heads = n_heads.get(layer[2]) if layer else None

    def read() -> Tensor:
        import torch

        whole = parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim)
        return interleaved_to_halves(whole, heads) if heads else whole

    shape = list(parts[0].shape)
    if dim is not None:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return theirs, Stored(tuple(shape), read, dtype=str(parts[0].dtype))
