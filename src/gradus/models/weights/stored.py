"""Tensors in files, read one at a time, and of safetensors only the part that is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from gradus import limits
from gradus.errors import UserError, some

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor that is read, or computed, when it is asked for: its shape and type are known before."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor] | None
    dtype: str = field(default="float32", kw_only=True)  # as safetensors or PyTorch call it

    def read(self) -> Tensor:
        return self.part((0,) * len(self.shape), self.shape) if self.make is None else self.make()

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The rectangle of this shape that begins at `offset`."""
        return self.read()[tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """A tensor that is in memory."""
        return cls(tuple(tensor.shape), lambda: tensor, dtype=str(tensor.dtype))

    def changed(self, change: Callable[[Tensor], Tensor], *shape: int) -> Stored:
        """What `change` makes of it when it is read, of this shape."""
        return Stored(shape, lambda: change(self.read()), dtype=self.dtype)

    def rows(self, start: int, n: int) -> Stored:
        """Its n rows from `start` on, of which no more is read."""
        shape = (n, *self.shape[1:])
        return Stored(shape, lambda: self.part((start, *(0 for _ in shape[1:])), shape), dtype=self.dtype)

    def layer(self, index: int) -> Stored:
        """One of the tensors that this one stacks."""
        return self.rows(index, 1).changed(itemgetter(0), *self.shape[1:])


@dataclass(frozen=True)
class Stacked(Stored):
    """Several tensors of one shape as one."""

    layers: list[Stored] = field(kw_only=True)

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        import torch

        layers = self.layers[offset[0] : offset[0] + shape[0]]
        return torch.stack([layer.part(offset[1:], shape[1:]) for layer in layers])


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor that one file holds."""

    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Chunked(Stored):
    """A tensor that lies in one safetensors file or, in parts, in several: `part` reads no more than it returns."""

    name: str = field(kw_only=True)
    chunks: list[Chunk] = field(kw_only=True)

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        import torch
        from safetensors import safe_open

        def read(chunk: Chunk, low: Iterable[int], high: Iterable[int]) -> Tensor:
            # opened anew each time: what an open file has read stays in the process's memory
            with safe_open(chunk.file, framework="pt") as file:
                if not chunk.shape:
                    return file.get_tensor(self.name)
                own = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset))
                return file.get_slice(self.name)[own]

        if 0 in shape:  # a process's part of a short tensor may be empty
            with safe_open(self.chunks[0].file, framework="pt") as file:
                return torch.empty(shape, dtype=file.get_tensor(self.name).dtype)
        end, whole = tuple(o + n for o, n in zip(offset, shape)), None
        for chunk in self.chunks:
            low = tuple(map(max, offset, chunk.offset))
            high = tuple(min(a, o + n) for a, o, n in zip(end, chunk.offset, chunk.shape))
            if all(a < b for a, b in zip(low, high)):
                piece = read(chunk, low, high)
                if piece.shape == shape:
                    return piece
                whole = torch.empty(shape, dtype=piece.dtype) if whole is None else whole
                whole[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset))] = piece
        return whole


def read_files(files: Iterable[Path]) -> dict[str, Chunked]:
    """The tensors of all these safetensors. Parts of tensors carry their places, as torch.distributed.checkpoint's
    HuggingFaceStorageWriter writes them; a file without places holds whole tensors.

    Raises UserError for a damaged file, and for a tensor of which a part is in none of them.
    """
    from safetensors import SafetensorError, safe_open

    chunks: dict[str, list[Chunk]] = {}
    types: dict[str, str] = {}
    folder = Path()
    for path in files:
        folder = path.parent
        try:
            with safe_open(limits.regular(path), framework="pt") as file:
                places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    shape = tuple(file.get_slice(name).get_shape())
                    offset = tuple(places[name]["saved_offsets"]) if places else (0,) * len(shape)
                    chunks.setdefault(name, []).append(Chunk(path, offset, shape))
                    types[name] = file.get_slice(name).get_dtype()
        except (SafetensorError, OSError, ValueError, KeyError) as e:
            raise UserError(f"{path}: not a whole safetensors file ({e}). Copy or download it again") from None
    tensors, torn = {}, []
    for name, parts in chunks.items():
        offsets, shapes = zip(*(c.offset for c in parts)), zip(*(c.shape for c in parts))
        shape = tuple(max(o + n for o, n in zip(starts, sizes)) for starts, sizes in zip(offsets, shapes))
        if sum(math.prod(c.shape) for c in parts) != math.prod(shape):
            torn.append(name)
        tensors[name] = Chunked(shape, None, dtype=types[name], name=name, chunks=parts)
    if torn:
        raise UserError(
            f"{folder}: parts of {some(torn)} are missing. "
            "Copy the checkpoint again with all its files, or use another one"
        )
    return tensors
