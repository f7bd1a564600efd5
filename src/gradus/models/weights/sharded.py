"""Weights that several processes wrote together: safetensors in which each process put its part of a tensor, with the
place of that part in the whole, as torch.distributed.checkpoint's HuggingFaceStorageWriter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError
from gradus.models.weights import Stored, identity, read_files, rules_of
from gradus.models.weights.stored import Chunked
from gradus.recipe.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "sharded"  # of a checkpoint; beside it config.json, the tokenizer, training.json


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
            if rule.index is None and rule.to_theirs is identity:
                theirs[rule.theirs] = ours[rule.names[0]]
                continue
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
