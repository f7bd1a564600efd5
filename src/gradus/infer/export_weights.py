"""`gradus export`: any checkpoint, of one process or of many in any layout, as a folder in Hugging Face's layout
(docs/export.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from gradus import models, tasks
from gradus.errors import UserError
from gradus.infer import Place, find, note
from gradus.models import weights


def export(name: str, to: Path, shard_gb: float = 5.0) -> Iterator[str]:
    """Write config.json, model.safetensors (in shards above shard_gb, in 10^9 bytes) and the tokenizer to the folder
    `to`.

    name: as `infer.find`; of a run, its best checkpoint or else its newest. One stored tensor is read at a time, and
    memory holds one shard of the result, never the model. Values and dtype stay as they are. Yields lines for the user.
    Raises UserError where there is no model, or where `to` is the folder that is read or holds something else.
    """
    place = find(name)
    read = place.folder.resolve()
    for wrong, what in (
        (to.is_file(), "this is a file"),
        (to.resolve() in (read, *read.parents), "it holds the checkpoint that is read"),
        ((to / "training.json").is_file(), "this is a checkpoint of a run"),
        (to.is_dir() and os.listdir(to) and not (to / "config.json").is_file(), "it holds other files and no model"),
    ):
        if wrong:
            raise UserError(f"--to={to}: {what}. Give a new folder, or an empty one.")
    tokenizers = {}
    if place.config.reads == "text":
        try:
            tokenizers = place.tokenizers()
        except UserError as e:
            note(f"without a tokenizer: {str(e).removesuffix(' Give one with --tokenizer PATH.')}")
    tasks.save_tokenizers(to, tokenizers)
    models.convert(place.path, to, shard_gb * 1e9)
    if place.recipe is not None and place.config.reads == "images":
        (to / "preprocessor_config.json").write_text(json.dumps(image_processor(place), indent=2) + "\n")
    size = sum(file.stat().st_size for file in to.glob("*.safetensors"))
    n, beside = len(list(to.glob("*.safetensors"))), ", tokenizer" if tokenizers else ""
    yield f"{place.path} → {to}: {size / 1e6:,.1f} MB of weights in {n} file(s){beside}"
    known, why = weights.loads_in_transformers(place.config)
    unknown = f"transformers does not know this architecture ({why}); gradus loads it"
    yield f"transformers loads this as {known}" if known else unknown


def image_processor(place: Place) -> dict:
    """The settings by which transformers prepares an image as we do: the shorter side to image_size, the centre cut
    out, (x / 255 - mean) / std."""
    size, data = place.config.image_size, place.recipe.data
    return {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": size},
        "resample": 2, "do_center_crop": True, "crop_size": {"height": size, "width": size}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": data.mean, "image_std": data.std,
        "do_convert_rgb": place.config.n_channels == 3,
    }  # fmt: skip
