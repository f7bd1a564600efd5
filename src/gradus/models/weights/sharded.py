"""Weights that several processes wrote together: safetensors in which each process put its part of a tensor, with the
place of that part in the whole, as torch.distributed.checkpoint's HuggingFaceStorageWriter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError
from gradus.models.weights import Stored, rules_of, some
from gradus.recipe.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "sharded"  # of a checkpoint; beside it config.json, the tokenizer, training.json


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor that one file holds."""

    file: Any  # safetensors' open file: memory-mapped, so that only what is asked for is read
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Chunked(Stored):
    """A stored tensor of which any rectangle can be read: `part(offset, shape)`."""

    part: Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


def read_files(files: Iterable[Path]) -> dict[str, Chunked]:
    """The tensors of all these files, each put together from its parts when it is read. A file without places holds
    whole tensors.

    Raises UserError for a damaged file, and for a tensor of which a part is in none of them.
    """
    from safetensors import SafetensorError, safe_open

    chunks: dict[str, list[Chunk]] = {}
    types: dict[str, str] = {}
    folder = Path()
    for path in files:
        folder = path.parent
        try:
            file = safe_open(path, framework="pt")
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shape = tuple(file.get_slice(name).get_shape())
                offset = tuple(places[name]["saved_offsets"]) if places else (0,) * len(shape)
                chunks.setdefault(name, []).append(Chunk(file, offset, shape))
                types[name] = file.get_slice(name).get_dtype()
        except (SafetensorError, OSError, ValueError, KeyError) as e:
            raise UserError(
                f"{path}: not a whole safetensors file ({e}). Copy the checkpoint again, or take another one"
            ) from None
    tensors, torn = {}, []
    for name, parts in chunks.items():
        offsets, shapes = zip(*(c.offset for c in parts)), zip(*(c.shape for c in parts))
        shape = tuple(max(o + n for o, n in zip(starts, sizes)) for starts, sizes in zip(offsets, shapes))
        if sum(math.prod(c.shape) for c in parts) != math.prod(shape):
            torn.append(name)
        rectangle = partial(_rectangle, name, parts)
        tensors[name] = Chunked(shape, partial(rectangle, (0,) * len(shape), shape), rectangle, dtype=types[name])
    if torn:
        raise UserError(
            f"{folder}: parts of {some(torn)} are missing. "
            "Copy the checkpoint again with all its files, or take another one"
        )
    return tensors


def _rectangle(name: str, chunks: list[Chunk], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The part of a tensor that begins at `offset`, put together from the chunks that it touches."""
    import torch

    for chunk in chunks:
        if (chunk.offset, chunk.shape) == (tuple(offset), tuple(shape)):
            return chunk.file.get_tensor(name)
    whole = None
    for chunk in chunks:
        low = [max(a, b) for a, b in zip(offset, chunk.offset)]
        high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, chunk.offset, chunk.shape)]
        if all(a < b for a, b in zip(low, high)):
            piece = chunk.file.get_slice(name)[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset))]
            if whole is None:
                whole = torch.empty(shape, dtype=piece.dtype)
            whole[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset))] = piece
    if whole is None:  # a process's part of a short tensor may be empty
        assert 0 in shape, f"{name}: nothing at {offset}"
        return torch.empty(shape, dtype=chunks[0].file.get_tensor(name).dtype)
    return whole


def read(checkpoint: Path) -> dict[str, Chunked]:
    """All tensors of a checkpoint's `sharded/`: `model.<name>`, `<optimizer state>.<name>`, `rng.<device>.<rank>`.

    Raises UserError where one is damaged or not whole.
    """
    files = sorted((checkpoint / FOLDER).glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{checkpoint / FOLDER}: no safetensors in it. "
            "Copy the checkpoint again with all its files, or take another one"
        )
    return read_files(files)


def under_their_names(config: ModelConfig, ours: Mapping[str, Chunked]) -> dict[str, Stored]:
    """The model's tensors (`model.<name>` of `read`) as Hugging Face names and stores them, each made from ours when it
    is read."""
    import torch

    ours = {key.removeprefix("model."): stored for key, stored in ours.items() if key.startswith("model.")}
    theirs: dict[str, Stored] = {}
    taken: set[tuple[str, int | None]] = set()
    for rule in rules_of(config.family).rules(config):
        keys = [(name, rule.index) for name in rule.names]
        if all(name in ours for name in rule.names) and not taken.issuperset(keys):
            taken.update(keys)
            parts = [_indexed(ours[name], rule.index) for name in rule.names]
            shape = tuple(rule.to_theirs(*(torch.empty(part.shape, device="meta") for part in parts)).shape)
            theirs[rule.theirs] = Stored(shape, partial(_fused, rule.to_theirs, parts), dtype=parts[0].dtype)
    used = {name for name, _ in taken}
    unused = {name: stored for name, stored in ours.items() if name not in used}  # `match` then calls these extra
    return theirs | unused


def _indexed(stored: Chunked, index: int | None) -> Stored:
    """One of the tensors that a stored one stacks."""
    if index is None:
        return stored
    shape = stored.shape[1:]
    return Stored(shape, lambda: stored.part((index, *(0 for _ in shape)), (1, *shape))[0], dtype=stored.dtype)


def _fused(to_theirs: Callable[..., Any], parts: list[Stored]) -> Tensor:
    return to_theirs(*(part.read() for part in parts))
