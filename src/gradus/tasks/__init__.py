"""What to learn from which data: one file a task, from batch to loss and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gradus import limits
from gradus.tasks.kinds import task_class

if TYPE_CHECKING:
    from gradus.data.tokenizers import Tokenizer
    from gradus.recipe.schema import Recipe
    from gradus.tasks.base import Task


GENERATION = "generation_config.json"  # Hugging Face's: the tokens that end a text


def open_task(recipe: Recipe, tokenizers: dict | None = None) -> Task:
    """The recipe's task with its data opened. `tokenizers` (by place below a checkpoint) replace those that the recipe
    would make."""
    return task_class(recipe)(recipe, tokenizers)


def load_tokenizers(checkpoint: Path) -> dict | None:
    """The tokenizers saved with a checkpoint, or None where it has none."""
    from gradus.data import tokenizer_files

    tokenizers = {}
    for place in ("", "target"):
        folder = checkpoint / place
        if any((folder / name).exists() for name in tokenizer_files.FILES):
            tokenizers[place] = tokenizer_files.load(folder)
    if "" in tokenizers:
        tokenizers[""].beside = beside(checkpoint)
    return tokenizers or None


def beside(folder: Path) -> dict[str, str]:
    """Chat templates and settings of generation beside the weights of a folder, by the names of their files. Several
    end tokens of a config.json alone are kept as generation_config.json has them."""
    from gradus.data import tokenizer_files

    kept, file, config = tokenizer_files.chat_templates(folder), folder / GENERATION, folder / "config.json"
    if file.is_file():
        kept[GENERATION] = limits.read_text(file, limits.CONFIG_FILE)
    elif config.is_file() and isinstance(ends := limits.read_object(config).get("eos_token_id"), list):
        kept[GENERATION] = json.dumps({"eos_token_id": ends})
    return kept


def inherit(tokenizers: dict, folder: Path) -> list[str]:
    """Keep with the tokenizers of a run what lies in the folder of the weights that it starts from. Returns the names
    of the files that are left out, since the tokens there are others."""
    if not (kept := beside(folder)) or "" not in tokenizers:
        return []
    own, theirs = tokenizers[""], load_tokenizers(folder)
    if theirs and (theirs.keys() != tokenizers.keys() or any(_other(theirs[p], tokenizers[p]) for p in theirs)):
        return sorted(kept.keys() - own.beside.keys())
    own.beside = {**kept, **own.beside}
    return []


def _other(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether an id means another token."""
    n = one.vocab_size
    return n != other.vocab_size or [one.token(i) for i in range(n)] != [other.token(i) for i in range(n)]


def save_tokenizers(folder: Path, tokenizers: dict) -> None:
    """Write tokenizers as `load_tokenizers` finds them: a second one, for the target language, in `target/`."""
    for place, tokenizer in tokenizers.items():
        tokenizer.save(folder / place)
