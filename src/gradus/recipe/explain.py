"""The schema, looked at, and what is wrong with a recipe, in words: where, what was expected, what was given, what is nearest."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from gradus import limits
from gradus.errors import did_you_mean, nearest
from gradus.recipe.check import Problem
from gradus.recipe.schema import Recipe, Section
from gradus.recipe.training_args import SAME

# Sections whose keys depend on one of them though the schema holds them in one class: kind -> the keys it knows.
DEPENDENT = {
    "schedule": ("name", {"constant": {"warmup_steps"}, "linear": {"warmup_steps", "final", "end_step"},
                          "cosine": {"warmup_steps", "final", "end_step"}, "noam": {"warmup_steps", "factor"}}),
    "tokenizer": ("kind", {"char": {"shared"}, "word": {"lowercase", "shared"}, "byte": {"shared"},
                           "bpe": {"vocab_size", "lowercase", "shared"}, "file": {"path", "shared"}}),
}  # fmt: skip
COMMON = {  # names in papers and other tools, by the key here; training_args.SAME has more
    "model.d_model": "hidden_size n_embd embed_dim d_embed dim",
    "model.n_layers": "num_hidden_layers num_layers depth", "model.n_heads": "num_attention_heads num_heads",
    "model.n_kv_heads": "num_key_value_heads", "model.d_ff": "intermediate_size mlp_dim n_inner",
    "model.seq_len": "block_size max_position_embeddings n_positions n_ctx context_length",
    "model.n_classes": "num_labels num_classes", "model.dropout": "hidden_dropout_prob resid_pdrop",
    "model.norm_eps": "layer_norm_eps layer_norm_epsilon rms_norm_eps", "model.tie_output": "tie_word_embeddings",
    "model.n_experts": "num_local_experts num_experts", "model.top_k": "num_experts_per_tok",
    "model.init": "model_name_or_path pretrained from_pretrained", "task.mask_rate": "mlm_probability",
    "data.path": "dataset dataset_name train_file", "data.max_len": "max_length max_seq_length",
    "tokenizer.path": "tokenizer_name", "optimizer.name": "optim", "optimizer.betas": "adam_beta1 adam_beta2",
    "schedule.name": "scheduler lr_scheduler lr_scheduler_type", "schedule.warmup_steps": "warmup warmup_ratio",
    "batch.samples": "batch_size train_batch_size per_device_train_batch_size global_batch_size",
    "train.epochs": "num_epochs n_epochs", "train.steps": "max_steps max_iters iterations",
    "train.seed": "random_seed manual_seed", "train.clip_norm": "grad_clip max_grad_norm gradient_clip_val",
    "train.checkpoint_every": "save_steps", "evaluate.every": "eval_steps eval_interval",
    "evaluate.batch": "eval_batch_size", "evaluate.best": "metric_for_best_model",
    "layout.micro_batch": "accumulation gradient_accumulation_steps accumulate_grad_batches micro_batch_size",
    "layout.precision": "dtype torch_dtype fp16 bf16 amp mixed_precision",
    "layout.checkpointing": "gradient_checkpointing activation_checkpointing", "layout.compile": "torch_compile",
    "layout.attention": "attn_implementation flash_attention", "layout.shard": "fsdp zero zero_stage",
    "layout.tensor": "tensor_parallel tp_size", "layout.pipeline": "pipeline_parallel pp_size",
    "layout.context": "context_parallel cp_size", "layout.expert": "expert_parallel ep_size",
    "log.every": "logging_steps log_interval", "log.wandb": "wandb_project", "name": "run_name",
    "data.workers": "num_workers",
}  # fmt: skip


# ---------------------------------------------------------------- the schema, looked at


def _inner(annotation: Any) -> list[Any]:
    """The alternatives of a type but None."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [a for part in get_args(annotation) if part is not type(None) for a in _inner(part)]
    return [annotation]


def _is_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def classes_inside(annotation: Any) -> list[type[Section]]:
    """The classes of keys that a key itself takes."""
    return [c for c in _inner(annotation) if _is_class(c)]


def discriminator(section: str) -> str | None:
    return Recipe.model_fields[section].discriminator


@cache
def classes_of(section: str) -> dict[str | None, type[Section]]:
    """Kind -> class, for a section with kinds; {None: class} for another."""
    key = discriminator(section)
    classes = [c for c in _inner(Recipe.model_fields[section].annotation) if _is_class(c)]
    return {c.model_fields[key].default if key else None: c for c in classes}


@cache
def kinds_of(section: str) -> tuple[str | None, dict[str, set[str]]]:
    """(the key that says the kind, kind -> known keys); (None, {}) for a section without kinds."""
    if section in DEPENDENT:
        key, knows = DEPENDENT[section]
        return key, {kind: {key, *keys} for kind, keys in knows.items()}
    key = discriminator(section)
    return key, {kind: set(c.model_fields) for kind, c in classes_of(section).items()} if key else {}


def required() -> list[str]:
    return [name for name, field in Recipe.model_fields.items() if field.is_required()]


def is_section(path: str) -> bool:
    return path in Recipe.model_fields and path != "name"


def fields_of(path: str) -> list[FieldInfo]:
    """The fields a dotted key can mean, whatever the kinds."""
    section, *parts = path.split(".")
    if section not in Recipe.model_fields:
        return []
    fields, classes = [Recipe.model_fields[section]], list(classes_of(section).values())
    for part in parts:
        fields = [c.model_fields[part] for c in classes if part in c.model_fields]
        classes = [c for f in fields for c in _inner(f.annotation) if _is_class(c)]
    return fields


def holds_text(path: str) -> bool:
    return any(a is str or get_origin(a) is Literal for f in fields_of(path) for a in _inner(f.annotation))


def unsettable(path: str) -> bool:
    """Whether null takes the key out. Where the schema knows null it is kept, to win over a preset; an unknown key stays, to be told."""
    fields = fields_of(path)
    return bool(fields) and not any(type(None) in get_args(f.annotation) for f in fields)


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a key takes, in words."""
    marks = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks += more
    marks = [m for mark in marks for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    parts = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(expected(a, marks) for a in parts)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(annotation) is list:
        return f"a list [a, b, ...] of {'numbers' if parts[0] in (int, float) else 'names'}"
    if get_origin(annotation) is tuple:
        return f"a list [a, b], each {expected(parts[0])}"
    if _is_class(annotation):
        return f"keys ({', '.join(annotation.model_fields)})"
    if annotation not in (int, float):
        return {bool: "true or false", str: "text"}[annotation]
    bounds = []
    for m in marks:
        if isinstance(m, annotated_types.Gt):
            bounds.append(f"≥ {m.gt + 1}" if annotation is int else f"> {m.gt:g}")
        elif isinstance(m, annotated_types.Ge):
            bounds.append(f"≥ {m.ge:g}")
        elif isinstance(m, annotated_types.Lt):
            bounds.append(f"< {m.lt:g}")
        elif isinstance(m, annotated_types.Le) and annotation is float and m.le < limits.REAL:
            bounds.append(f"≤ {m.le:g}")
    return " ".join(["a whole number" if annotation is int else "a number", *([" and ".join(bounds)] if bounds else [])])


# ---------------------------------------------------------------- values


def get(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def show(value: Any) -> str:
    """A value as in a file, cut where it is long; text that is no number stands in quotes."""
    if value is None:
        text = "nothing"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(show, value)) + "]"
    elif isinstance(value, str) and value not in ("true", "false") and as_number(value) is None:
        text = repr(value)
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def said(value: Any) -> str:
    """A value as after `key=`."""
    return value if isinstance(value, str) else show(value)


def same(a: Any, b: Any) -> bool:
    return str(a) == str(b) or (as_number(a) is not None and as_number(a) == as_number(b))


def as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# ---------------------------------------------------------------- problems in words


def needs(section: str) -> str:
    kind, knows = kinds_of(section)
    if kind and discriminator(section):
        return f"It needs {section}.{kind}: {', '.join(knows)}."
    return f"It has the keys {', '.join(c for c in classes_of(section)[None].model_fields)}." if classes_of(section) else ""


def explain(section: str, error: Any, raw: dict[str, Any]) -> Problem:
    """A problem in our words from one of pydantic's errors."""
    kind, loc = error["type"], list(error["loc"])
    key = discriminator(section)
    if kind == "union_tag_not_found":
        return Problem(f"{section}.{key}", f"missing. Give one of {', '.join(classes_of(section))}.")
    if kind == "union_tag_invalid":
        tag = get(raw, f"{section}.{key}")
        return Problem(f"{section}.{key}", f"no such {section}: {show(tag)}.{did_you_mean(tag, classes_of(section))}")
    if key:
        loc = loc[1:]
    owner = _owner(section, raw)
    parts, field = [section], Recipe.model_fields[section]
    for part in loc:
        if isinstance(part, int) or owner is None:
            break
        parts.append(part)
        if part not in owner.model_fields:
            return unknown_key(".".join(parts[:-1]), part, raw, owner)
        field = owner.model_fields[part]
        owner = next((c for c in _inner(field.annotation) if _is_class(c)), None)
    path = ".".join(parts)
    if kind == "value_error":
        return Problem(path, f"{error['ctx']['error']}.")
    wanted = expected(field.annotation, field.metadata)
    if kind == "missing":
        return Problem(path, f"missing. Give {wanted}.")
    value = get(raw, path)
    if kind == "finite_number":
        return Problem(path, f"must be a finite number, got {show(value)}.")
    if kind == "less_than_equal" or kind == "int_parsing_size":
        most = error.get("ctx", {}).get("le", limits.SEED)
        return Problem(path, f"{show(value)} is more than a size one could mean: at most {f'{most:,.0f}' if 1 <= most < 1e15 else f'{most:g}'}.")
    near = did_you_mean(value, get_args(_inner(field.annotation)[0])) if wanted.startswith("one of") and isinstance(value, str) else ""
    unset = " Use null to unset it." if isinstance(value, str) and value.lower() == "none" and not near else ""
    return Problem(path, f"expected {wanted}, got {show(value)}.{near if 'Did you' in near else ''}{unset}")


def elsewhere(word: str) -> str | None:
    """The key of a recipe that another tool calls `word`."""
    return next((key for key, words in COMMON.items() if word in words.split()), SAME.get(word))


def every_key() -> dict[str, str]:
    """Key -> dotted key, of all sections and kinds; of a key that several sections have, the first."""
    found: dict[str, str] = {}
    for section in filter(is_section, Recipe.model_fields):
        for c in classes_of(section).values():
            for key in c.model_fields:
                found.setdefault(key, f"{section}.{key}")
    return found


def unknown_key(above: str, key: str, raw: dict[str, Any], owner: type[Section] | None = None) -> Problem:
    """An unknown key: where it belongs, or what is nearest to it."""
    path, section = (f"{above}.{key}" if above else key), above.split(".")[0]
    known = list(owner.model_fields if owner else Recipe.model_fields)
    if not above and "." in key and fields_of(key):
        first, rest = key.split(".", 1)
        return Problem(path, f"unknown key. In a file, write it inside its section: {first}: {{{rest}: ...}}.")
    if above and section == above and discriminator(section):
        kind = discriminator(section)
        others = [name for name, c in classes_of(section).items() if key in c.model_fields]
        if others:
            return Problem(path, f"unknown key with {section}.{kind}={get(raw, f'{section}.{kind}')}. It is for {', '.join(others)}.")
    places = [f"{s}.{key}" for s in Recipe.model_fields if s != section and key != kinds_of(s)[0] and has(s, key, raw)]
    places += [key] if above and is_section(key) else []
    if not places and (other := elsewhere(key)):
        places = [other]
    if places:
        return Problem(path, f"unknown key. It is {' or '.join(places)}.")
    near, others = nearest(key, known), every_key()
    if near is not None:
        near = f"{above}.{near}" if above else near
    elif (far := nearest(key, others)) is not None and (not above or set(key.split("_")) & set(far.split("_"))):
        near = others[far]
    return Problem(path, f"unknown key. Did you mean {near}?" if near else f"unknown key.{did_you_mean(key, known)}")


def has(section: str, key: str, raw: dict[str, Any]) -> bool:
    """Whether the section, of the kind it has in this recipe, knows the key."""
    owner = _owner(section, raw)
    return any(key in c.model_fields for c in ([owner] if owner else classes_of(section).values()))


def _owner(section: str, raw: dict[str, Any]) -> type[Section] | None:
    """The class of a section, None where it does not say its kind."""
    key = discriminator(section)
    kind = get(raw, f"{section}.{key}") if key else None
    return classes_of(section).get(kind) if kind is None or isinstance(kind, str) else None


def report(found: list[Problem], source: str, order: list[str], labels: Mapping[str, str]) -> list[str]:
    """Problems in the order of the file, then of the overrides. labels: who wrote a dotted key, where it was not the file."""
    sections, given = list(Recipe.model_fields), list(labels)

    def written(path: str) -> str | None:
        """The override that wrote the key, something inside it, or what it is inside of."""
        found = path if path in labels else next((key for key in labels if key.startswith(f"{path}.")), None)
        while path and not found:
            path = path.rpartition(".")[0]
            found = path if path in labels else None
        return found

    def place(problem: Problem) -> tuple[int, int]:
        path, flag = problem.path, written(problem.path)
        if flag is not None:
            return (1, given.index(flag))
        while path and path not in order:
            path = path.rpartition(".")[0]
        head = problem.path.split(".")[0]
        return (0, order.index(path) if path else len(order) + (sections.index(head) if head in sections else 0))

    ordered = sorted(found, key=place)
    return list(dict.fromkeys(f"{labels.get(written(p.path), source)}: {p.path}: {p.text}" for p in ordered))
