"""The files beside exported weights: tokenizer or normalisation, and the ids that generation starts and ends with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from gradus import errors, files, tasks
from gradus.data.preprocessor import FILE as PREPROCESSOR
from gradus.data.preprocessor import RESAMPLE
from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.infer import PUT_TOKENIZER, ModelSource, decoder_start, end_tokens, note, special
from gradus.models.weights import checksums
from gradus.recipe.schema import Preprocess
from gradus.tasks import GENERATION


@contextlib.contextmanager
def folder(to: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `to`, with the checksums of its files, in place of what an earlier call left
    there. Where the block fails nothing is left of it. Raises EnvironmentFault where the disk is full."""
    with writing(to), files.aside(to) as aside:
        aside.mkdir(parents=True)
        yield aside
        checksums.write(aside)
        if to.is_dir():
            files.remove(to)


def writing(to: Path) -> contextlib.AbstractContextManager[None]:
    return errors.writing(to, "nothing was written. Free some space, or give another folder.")


def write(source: ModelSource, to: Path) -> bool:
    """Write them into the folder `to`. Returns whether there is a tokenizer."""
    tokenizers: dict[str, Tokenizer] = {}
    if source.config.reads == "text":
        try:
            tokenizers = source.tokenizers()
        except UserError as e:
            note(f"without a tokenizer: {str(e).removesuffix(f' {PUT_TOKENIZER}')}")
    tasks.save_tokenizers(to, tokenizers)
    copied = source.beside(GENERATION, PREPROCESSOR)
    for file in copied:
        (to / file.name).write_bytes(file.read_bytes())
    if source.recipe is not None and source.config.reads == "images":
        (to / PREPROCESSOR).write_text(json.dumps(image_processor(source), indent=2) + "\n")
    if tokenizers and GENERATION not in [f.name for f in copied] and source.family.attention != "both":
        (to / GENERATION).write_text(json.dumps(generation(source, tokenizers), indent=2) + "\n")
    return bool(tokenizers)


def generation(source: ModelSource, tokenizers: dict[str, Tokenizer]) -> dict[str, int | list[int]]:
    """The settings by which `generate` of transformers and vLLM begin, end and pad as we do."""
    tokenizer = tokenizers.get("target", tokenizers[""])
    ends, pad = end_tokens(source, tokenizer), special(tokenizer, "pad")
    end = next(iter(ends), None)
    settings = {
        "bos_token_id": special(tokenizer, "bos", "cls"), "eos_token_id": ends if len(ends) > 1 else end,
        "pad_token_id": end if pad is None else pad,
        "decoder_start_token_id": decoder_start(source, tokenizer) if source.family.attention == "cross" else None,
    }  # fmt: skip
    return {name: value for name, value in settings.items() if value is not None}


def image_processor(source: ModelSource) -> dict:
    """The settings by which transformers prepares an image as we do: scaled, cut, (x / 255 - mean) / std."""
    size, data = source.config.image_size, source.recipe.data
    how = data.preprocess or Preprocess(resize=size)
    sides = how.resize or size
    return {
        "image_processor_type": "CLIPImageProcessor", "do_resize": how.resize is not None,
        "size": {"shortest_edge": sides} if isinstance(sides, int) else dict(zip(("height", "width"), sides)),
        "resample": RESAMPLE.index(how.resample),
        "do_center_crop": how.center_crop, "crop_size": {"height": size, "width": size}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": data.mean, "image_std": data.std,
        "do_convert_rgb": source.config.n_channels == 3,
    }  # fmt: skip
