"""What to learn from which data: one file a task, from batch to loss and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradus.recipe.schema import Recipe
    from gradus.tasks.base import Task


def open_task(recipe: Recipe, tokenizers: dict | None = None) -> Task:
    """The recipe's task with its data opened. `tokenizers` (by place below a checkpoint) replace those that the recipe
    would make."""
    from gradus.tasks.causal_lm import CausalLM
    from gradus.tasks.classification import ImageClassification, TextClassification
    from gradus.tasks.masked_lm import MaskedLM
    from gradus.tasks.span_corruption import SpanCorruption
    from gradus.tasks.translation import Copy, Translation

    kinds = {"copy": Copy, "translation": Translation, "causal_lm": CausalLM, "masked_lm": MaskedLM,
             "span_corruption": SpanCorruption}  # fmt: skip
    images = recipe.data.kind == "images"
    kind = kinds.get(recipe.task.name) or (ImageClassification if images else TextClassification)
    return kind(recipe, tokenizers)


def load_tokenizers(checkpoint: Path) -> dict | None:
    """The tokenizers saved with a checkpoint, or None where it has none."""
    from gradus.data import tokenizer_files

    tokenizers = {}
    for place in ("", "target"):
        folder = checkpoint / place
        if any((folder / name).exists() for name in tokenizer_files.FILES):
            tokenizers[place] = tokenizer_files.load(folder)
    return tokenizers or None


def save_tokenizers(folder: Path, tokenizers: dict) -> None:
    """Write tokenizers as `load_tokenizers` finds them: a second one, for the target language, in `target/`."""
    for place, tokenizer in tokenizers.items():
        tokenizer.save(folder / place)
