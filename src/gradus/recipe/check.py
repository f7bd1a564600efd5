"""What a recipe's parts must agree on. Looks only at the recipe, never at data or weights.

What cannot be combined is the table of `recipe.conflicts`; here is what needs numbers or names compared. Each check is
a generator of problems whose parameters name what it reads: sections of the recipe, `sizes` (the model, where its sizes
are known already). A check whose sections are not all there is left out, so that one broken section does not hide what
is wrong with the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from gradus.errors import UserError
from gradus.recipe.conflicts import Problem, conflicts
from gradus.recipe.schema import MODELS, TASKS, Recipe, Section


def learners(task: str) -> dict[str, list[str]]:
    """Kind of data → the families that learn this task from it."""
    kinds: dict[str, list[str]] = {}
    for family, config in MODELS.items():
        if task in config.learns:
            kinds.setdefault(config.learns[task], []).append(family)
    return kinds


def problems(sections: Mapping[str, Any], stated: Collection[str], sizes_known: bool = True) -> list[Problem]:
    """What is wrong between the sections that are there. stated: the keys somebody wrote, which must take effect."""
    known = {**sections, **({"sizes": sections["model"]} if sizes_known and "model" in sections else {})}
    wrong: list[Problem] = []
    for check in CHECKS:
        arguments = inspect.signature(check).parameters
        if arguments.keys() <= known.keys():
            wrong += check(**{name: known[name] for name in arguments})
    return [*wrong, *conflicts(sections, stated)]


def clamped_warmup(end: int) -> int:
    """Steps of a warm-up in place of one that a run, or a schedule, of `end` steps is too short for."""
    return min(max(1, end // 10), end - 1)


def changed(sections: Mapping[str, Any]) -> set[str]:
    """The dotted keys whose values are not the defaults."""
    sections = {name: section for name, section in sections.items() if isinstance(section, Section)}
    differ = ((name, key) for name, s in sections.items() for key in s.model_dump(exclude_defaults=True))
    return {*sections, *(f"{name}.{key}" for name, key in differ)}


def with_warmup_below(recipe: Recipe, last_step: int) -> Recipe:
    """The recipe, for a run of so many steps: a warm-up that is not shorter is clamped. Not noam's, whose length sets
    the highest rate. Raises UserError for a share of the steps that is beyond schedule.end_step."""
    schedule, end = recipe.schedule, recipe.schedule.end_step or last_step
    for problem in _warmup(schedule, recipe.train.model_copy(update={"steps": last_step})):
        if schedule.warmup_ratio:
            raise UserError(f"{problem.path}: {problem.text}")
    if schedule.name == "noam" or schedule.warmup_steps < end:
        return recipe
    shorter = schedule.model_copy(update={"warmup_steps": clamped_warmup(end)})
    return recipe.model_copy(update={"schedule": shorter})


# ---------------------------------------------------------------- task, model, data


def _task_and_data(task, data) -> Iterator[Problem]:
    kinds = learners(task.name)
    if data.kind not in kinds:
        others = [name for name in TASKS if data.kind in learners(name)]
        text = f"task {task.name} needs {' or '.join(kinds)}, not {data.kind}. "
        yield Problem("data.kind", f"{text}{data.kind} is for task.name={' or '.join(others)}.", ("task.name",))


def _task_and_family(task, data, model) -> Iterator[Problem]:
    kinds = learners(task.name)
    families = kinds.get(data.kind) or [f for k in kinds.values() for f in k]
    if model.family not in families:
        what = task.name if len(kinds) == 1 or data.kind not in kinds else f"{task.name} of {data.kind}"
        text = f"task {what} needs {' or '.join(families)}, not {model.family}. "
        text += f"{model.family} is for task.name={' or '.join(model.learns)}."
        yield Problem("model.family", text, ("task.name", "data.kind"))


def _head(task, model) -> Iterator[Problem]:
    if not hasattr(model, "head"):
        return
    wanted = task.head
    if wanted and model.head not in ("none", wanted):
        what = f"{task.name}{' with next_sentence' if getattr(task, 'next_sentence', False) else ''}"
        text = f"task {what} trains {wanted}, not {model.head}. Set model.head={wanted} or leave it out."
        yield Problem("model.head", text, ("task.name",))
    if wanted in ("classification", "pretraining") and not model.pooler:
        yield Problem("model.pooler", f"head {wanted} reads the pooler. Set model.pooler=true.", ("task.name",))


def _copy(task, sizes) -> Iterator[Problem]:
    if task.name != "copy":
        return
    if task.length > getattr(sizes, "seq_len", task.length):
        text = f"{task.length} is more than model.seq_len={sizes.seq_len}. Set model.seq_len={task.length}."
        yield Problem("task.length", text, ("model.seq_len",))
    if sizes.vocab_size is not None and sizes.vocab_size < task.n_symbols:
        text = f"{sizes.vocab_size} is less than task.n_symbols={task.n_symbols}. Leave it out."
        yield Problem("model.vocab_size", text, ("task.n_symbols",))


def _max_len(data, sizes) -> Iterator[Problem]:
    max_len, seq_len = getattr(data, "max_len", None), sizes.longest
    if max_len and seq_len and max_len > seq_len:
        text = f"{max_len} is more than model.seq_len={seq_len}. Set data.max_len={seq_len} or a longer model.seq_len."
        yield Problem("data.max_len", text, ("model.seq_len",))


def _tokenizer(task, data, model, tokenizer) -> Iterator[Problem]:
    if data.kind not in learners(task.name) or data.kind not in ("text", "chats", "labelled", "pairs"):
        return
    if data.kind == "chats" and tokenizer and tokenizer.kind not in ("bpe", "file"):
        text = f"{tokenizer.kind} has no tokens that begin and end a turn. Set tokenizer.kind=bpe or file."
        yield Problem("tokenizer.kind", text, ("data.kind",))
    if data.kind == "chats" and tokenizer and tokenizer.kind == "bpe" and not task.template:
        text = "missing: a tokenizer made from text has none of its own. Set task.template=chatml, say."
        yield Problem("task.template", text, ("tokenizer.kind",))
    if tokenizer is None:
        if model.init is None:
            text = f"missing. {data.kind} data needs one, such as tokenizer.kind=byte, "
            yield Problem("tokenizer", f"{text}or tokenizer.path=FOLDER with kind=file.", ("data.kind",))
        return
    if tokenizer.kind == "file" and tokenizer.path is None and model.init is None:
        yield Problem("tokenizer.path", "missing. kind=file needs a path where there is no model.init to lie beside.")
    if data.kind != "pairs" or tokenizer.shared:
        return
    if not hasattr(model, "target_vocab_size"):
        text = f"{model.family} has one vocabulary for both languages. Set tokenizer.shared=true."
        yield Problem("tokenizer.shared", text, ("model.family",))
    elif getattr(model, "share_embeddings", False):
        text = "two vocabularies need two embeddings. Set model.share_embeddings=false or tokenizer.shared=true."
        yield Problem("tokenizer.shared", text, ("model.share_embeddings",))


# ---------------------------------------------------------------- data


def _pairs(data) -> Iterator[Problem]:
    if data.kind != "pairs":
        return
    if data.source == data.target:
        text = f"{data.target} is the source too. Name two languages (or columns)."
        yield Problem("data.target", text, ("data.source",))
    if data.pad == "max_length" and data.max_len is None:
        yield Problem("data.max_len", "missing. data.pad=max_length needs it.", ("data.pad",))


def _images(data, sizes) -> Iterator[Problem]:
    if data.kind != "images" or sizes.reads != "images":
        return
    for key in ("mean", "std"):
        values = getattr(data, key)
        if values is not None and len(values) != sizes.n_channels:
            text = f"{len(values)} numbers for model.n_channels={sizes.n_channels}. Give one per channel."
            yield Problem(f"data.{key}", text, ("model.n_channels",))
        if key == "std" and values is not None and min(values, default=1.0) <= 0:
            yield Problem("data.std", f"the images are divided by it: {values} must all be > 0.")


# ---------------------------------------------------------------- optimisation


def _warmup(schedule, train) -> Iterator[Problem]:
    key = "schedule.end_step" if schedule.end_step else "train.steps"
    end = schedule.end_step or train.steps
    if schedule.warmup_ratio and schedule.end_step and train.steps:
        if (warmup := schedule.warmup(train.steps)) >= end:
            text = f"is {warmup} steps of train.steps={train.steps}, not below {key}={end}. "
            text += f"Set a smaller one or a larger {key}."
            yield Problem("schedule.warmup_ratio", text, (key,))
    elif schedule.name != "noam" and end and schedule.warmup_steps >= end:
        tenth = clamped_warmup(end)
        text = f"is {schedule.warmup_steps}, not below {key}={end}. "
        text += f"Set schedule.warmup_steps={tenth}, say, or a larger {key}."
        yield Problem("schedule.warmup_steps", text, (key,), instead=tenth)


def _batch(batch, data, sizes) -> Iterator[Problem]:
    if batch.tokens is None:
        return
    if data.kind == "images":
        yield Problem("batch.tokens", "images are counted in samples. Set batch.samples.", ("data.kind",))
    row = getattr(data, "max_len", None) or getattr(sizes, "seq_len", None)
    if data.kind in ("text", "chats") and row and batch.tokens < row:
        text = f"{batch.tokens} is less than one row of {row} tokens. "
        text += f"Set batch.tokens={row} or more, or a shorter data.max_len."
        yield Problem("batch.tokens", text, ("data.max_len",) if getattr(data, "max_len", None) else ("model.seq_len",))


def _micro_batch(batch, layout) -> Iterator[Problem]:
    if layout.micro_batch and batch.samples and layout.micro_batch > batch.samples:
        text = f"{layout.micro_batch} is more than batch.samples={batch.samples}. Set at most {batch.samples}."
        yield Problem("layout.micro_batch", text, ("batch.samples",), instead=batch.samples)


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    _task_and_data, _task_and_family, _head, _copy, _max_len, _tokenizer, _pairs, _images, _warmup, _batch,
    _micro_batch,
)  # fmt: skip
