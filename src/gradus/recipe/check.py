"""What a recipe's parts must agree on. Looks at the recipe alone, never at data or weights.

Each check is a generator of problems whose parameters name what it reads: sections of the recipe, `given` (the dotted keys
that somebody wrote down), `sizes` (the model, where its sizes are known already). A check whose sections are not all there is left out, so
that one broken section does not hide what is wrong with the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from gradus.errors import UserError
from gradus.recipe.schema import MODELS, TASKS, Recipe, Section


def learners(task: str) -> dict[str, list[str]]:
    """Kind of data → the families that learn this task from it."""
    kinds: dict[str, list[str]] = {}
    for family, config in MODELS.items():
        if task in config.learns:
            kinds.setdefault(config.learns[task], []).append(family)
    return kinds


class Problem(NamedTuple):
    """`path`: the dotted key. `because`: for a setting that cannot take effect, the dotted keys that stand in its way."""

    path: str
    text: str
    because: tuple[str, ...] = ()


def problems(sections: Mapping[str, Any], given: Collection[str], sizes_known: bool = True) -> list[Problem]:
    """What is wrong between the sections that are there. `given`: the keys somebody wrote, which must take effect."""
    known = {**sections, "given": given, **({"sizes": sections["model"]} if sizes_known and "model" in sections else {})}
    found = []
    for check in CHECKS:
        wanted = inspect.signature(check).parameters
        if all(name in known for name in wanted):
            found += check(**{name: known[name] for name in wanted})
    return found


def validate(recipe: Recipe) -> None:
    """Raise one UserError with a line for everything in the recipe that does not fit together."""
    found = problems(vars(recipe), changed(recipe))
    if found:
        raise UserError("\n".join(f"{recipe.name}: {p.path}: {p.text}" for p in found))


def changed(recipe: Recipe) -> set[str]:
    """The dotted keys whose values are not the defaults."""
    sections = {name: section for name, section in recipe if isinstance(section, Section)}
    return set(sections) | {
        f"{name}.{key}"
        for name, section in sections.items()
        for key, field in type(section).model_fields.items()
        if getattr(section, key) != field.default
    }


def _moot(key: str, given: Collection[str], text: str, *because: str) -> Iterator[Problem]:
    if key in given:
        yield Problem(key, f"cannot take effect{text}", because)


# ---------------------------------------------------------------- task, model, data


def _task_and_data(task, data) -> Iterator[Problem]:
    kinds = learners(task.name)
    if data.kind not in kinds:
        others = [name for name in TASKS if data.kind in learners(name)]
        yield Problem(
            "data.kind", f"task {task.name} needs {' or '.join(kinds)}, not {data.kind}. {data.kind} is for task.name={' or '.join(others)}."
        )


def _task_and_family(task, data, model) -> Iterator[Problem]:
    kinds = learners(task.name)
    families = kinds.get(data.kind) or [f for k in kinds.values() for f in k]
    if model.family not in families:
        what = task.name if len(kinds) == 1 or data.kind not in kinds else f"{task.name} of {data.kind}"
        text = f"task {what} needs {' or '.join(families)}, not {model.family}. {model.family} is for task.name={' or '.join(model.learns)}."
        yield Problem("model.family", text)


def _head(task, model, given) -> Iterator[Problem]:
    if not hasattr(model, "head"):
        return
    pretraining = getattr(task, "next_sentence", False)
    wanted = {"masked_lm": "pretraining" if pretraining else "masked_lm", "classification": "classification"}.get(task.name)
    if wanted and model.head not in ("none", wanted):
        what = f"{task.name}{' with next_sentence' if pretraining else ''}"
        yield Problem("model.head", f"task {what} trains {wanted}, not {model.head}. Set model.head={wanted} or leave it out.")
    if wanted in ("classification", "pretraining") and not model.pooler:
        yield Problem("model.pooler", f"head {wanted} reads the pooler. Set model.pooler=true.")
    if wanted in ("masked_lm", "pretraining"):
        yield from _moot("model.n_classes", given, f" with task {task.name}. It is for classification.", "task.name", "model.head")


def _copy(task, data, sizes) -> Iterator[Problem]:
    if task.name != "copy":
        return
    if task.length > getattr(sizes, "seq_len", task.length):
        yield Problem("task.length", f"{task.length} is more than model.seq_len={sizes.seq_len}. Set model.seq_len={task.length}.")
    if sizes.vocab_size is not None and sizes.vocab_size < task.n_symbols:
        yield Problem("model.vocab_size", f"{sizes.vocab_size} is less than task.n_symbols={task.n_symbols}. Leave it out.")


def _max_len(data, sizes) -> Iterator[Problem]:
    max_len, seq_len = getattr(data, "max_len", None), sizes.longest
    if max_len and seq_len and max_len > seq_len:
        yield Problem("data.max_len", f"{max_len} is more than model.seq_len={seq_len}. Set data.max_len={seq_len} or a longer model.seq_len.")


def _no_vocabulary(model, given) -> Iterator[Problem]:
    if model.reads == "images":
        yield from _moot("model.vocab_size", given, f": {model.family} reads images. Leave it out.", "model.family")


def _experts(model, given) -> Iterator[Problem]:
    if getattr(model, "n_experts", None) is None:
        for key in ("top_k", "balance"):
            yield from _moot(f"model.{key}", given, " without experts. Set model.n_experts=8, say, or leave it out.", "model.n_experts")


# ---------------------------------------------------------------- tokenizer


def _tokenizer(task, data, model, tokenizer, given) -> Iterator[Problem]:
    if data.kind not in learners(task.name):
        return  # first of all that
    text = data.kind in ("text", "labelled", "pairs")
    if tokenizer is None:
        if text and model.init is None:
            yield Problem("tokenizer", f"missing. {data.kind} data needs one, such as tokenizer.kind=byte, or tokenizer.path=FOLDER with kind=file.")
        return
    if not text:
        return (yield from _moot("tokenizer", given, f" with {data.kind} data. Leave it out.", "data.kind", "task.name"))
    if tokenizer.kind == "file" and tokenizer.path is None and model.init is None:
        yield Problem("tokenizer.path", "missing. kind=file needs a path where there is no model.init to lie beside.")
    if data.kind != "pairs":
        yield from _moot("tokenizer.shared", given, f" with {data.kind} data. It is for pairs.", "data.kind")
    elif not tokenizer.shared and not hasattr(model, "target_vocab_size"):
        yield Problem("tokenizer.shared", f"{model.family} has one vocabulary for both languages. Set tokenizer.shared=true.")
    elif not tokenizer.shared and getattr(model, "share_embeddings", False):
        yield Problem("tokenizer.shared", "two vocabularies need two embeddings. Set model.share_embeddings=false or tokenizer.shared=true.")


# ---------------------------------------------------------------- data


def _workers(data, given) -> Iterator[Problem]:
    if data.workers == 0:
        for key in ("prefetch", "persistent"):
            yield from _moot(f"data.{key}", given, " with data.workers=0. Set data.workers=2, say, or leave it out.", "data.workers")


def _source(data, given) -> Iterator[Problem]:
    source = getattr(data, "source", "path")
    if data.kind in ("text", "images") and source != "path":
        for key in ("path", "train", "valid", "test", "text", "image", "label"):
            yield from _moot(f"data.{key}", given, f" with data.source={source}. Set data.source=path or leave it out.", "data.source")
    if data.kind == "text" and data.valid is not None:
        yield from _moot("data.valid_fraction", given, f" with data.valid={data.valid}. Leave one of the two out.", "data.valid")
    if data.kind == "pairs" and data.source == data.target:
        yield Problem("data.target", f"{data.target} is the source too. Name two languages (or columns).")
    if data.kind == "pairs" and data.pad == "max_length" and data.max_len is None:
        yield Problem("data.max_len", "missing. data.pad=max_length needs it.")


def _images(data, sizes) -> Iterator[Problem]:
    if data.kind != "images" or sizes.reads != "images":
        return
    for key in ("mean", "std"):
        values = getattr(data, key)
        if values is not None and len(values) != sizes.n_channels:
            yield Problem(f"data.{key}", f"{len(values)} numbers for model.n_channels={sizes.n_channels}. Give one a channel.")
        if key == "std" and values is not None and min(values, default=1.0) <= 0:
            yield Problem("data.std", f"the images are divided by it: {values} must all be > 0.")


# ---------------------------------------------------------------- optimisation, evaluation, layout


def _schedule(schedule, given) -> Iterator[Problem]:
    if schedule.name != "noam":
        yield from _moot("schedule.factor", given, f" with schedule.name={schedule.name}. It is for noam.", "schedule.name")
    if schedule.name not in ("linear", "cosine"):
        for key in ("final", "end_step"):
            yield from _moot(f"schedule.{key}", given, f" with schedule.name={schedule.name}. It is for linear and cosine.", "schedule.name")


def _warmup(schedule, train) -> Iterator[Problem]:
    end, key = (schedule.end_step, "schedule.end_step") if schedule.end_step else (train.steps, "train.steps")
    if schedule.name != "noam" and end and schedule.warmup_steps >= end:
        text = f"is {schedule.warmup_steps}, not below {key}={end}. Set schedule.warmup_steps={end // 10}, say, or a larger {key}."
        yield Problem("schedule.warmup_steps", text, because=(key,))


def _batch(batch, data, sizes) -> Iterator[Problem]:
    if batch.tokens is None:
        return
    if data.kind == "images":
        yield Problem("batch.tokens", "images are counted in samples. Set batch.samples.")
    row = getattr(data, "max_len", None) or getattr(sizes, "seq_len", None)
    if data.kind == "text" and row and batch.tokens < row:
        yield Problem(
            "batch.tokens", f"{batch.tokens} is less than one row of {row} tokens. Set batch.tokens={row} or more, or a shorter data.max_len."
        )


def _micro_batch(batch, layout) -> Iterator[Problem]:
    if layout.micro_batch and batch.samples and layout.micro_batch > batch.samples:
        yield Problem("layout.micro_batch", f"{layout.micro_batch} is more than batch.samples={batch.samples}. Set at most {batch.samples}.")


def _chunk(layout, given) -> Iterator[Problem]:
    if layout.attention != "chunked":
        text = f" with layout.attention={layout.attention}. Set layout.attention=chunked or leave it out."
        yield from _moot("layout.chunk", given, text, "layout.attention")


def _evaluate(task, evaluate, given) -> Iterator[Problem]:
    if task.name == "copy" and evaluate.test:
        yield Problem("evaluate.test", "cannot take effect with task copy: made data has no test split. Leave it out.", ("task.name",))
    if task.name != "translation":
        yield from _moot("evaluate.decode", given, f" with task {task.name}. It is for translation.", "task.name")
    if task.name not in ("translation", "causal_lm"):
        yield from _moot("evaluate.max_new", given, f" with task {task.name}. It is for translation and causal_lm.", "task.name")
    elif task.name == "causal_lm" and evaluate.samples == 0:
        yield from _moot("evaluate.max_new", given, " with evaluate.samples=0. Set evaluate.samples=1, say.", "evaluate.samples", "task.name")


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    _task_and_data, _task_and_family, _head, _copy, _max_len, _no_vocabulary, _experts, _tokenizer, _workers, _source, _images,
    _schedule, _warmup, _batch, _micro_batch, _chunk, _evaluate,
)  # fmt: skip
