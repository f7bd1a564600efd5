"""Weights that several processes wrote together: safetensors in which each process put its part of a tensor, with the
place of that part in the whole, as torch.distributed.checkpoint's HuggingFaceStorageWriter writes them."""

from __future__ import annotations

from pathlib import Path

from gradus.errors import UserError
from gradus.models.weights.stored import Chunked, read_files

FOLDER = "sharded"  # of a checkpoint; beside it config.json, the tokenizer, training.json


def read(checkpoint: Path) -> dict[str, Chunked]:
    """All tensors of a checkpoint's `sharded/`: `model.<name>`, `<optimizer state>.<name>`, `rng.<device>.<rank>`.

    Raises UserError where one is damaged or not whole.
    """
    files = sorted((checkpoint / FOLDER).glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{checkpoint / FOLDER}: no safetensors in it. "
            "Copy the checkpoint again with all its files, or use another one"
        )
    return read_files(files)


def model(checkpoint: Path) -> dict[str, Chunked]:
    """Those of the model alone, under their names."""
    return {k.removeprefix("model."): v for k, v in read(checkpoint).items() if k.startswith("model.")}
