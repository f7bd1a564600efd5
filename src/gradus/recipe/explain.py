"""What is wrong with a recipe, in words: where, what was expected, what was given, what is nearest."""

from __future__ import annotations

from typing import Any, get_args

from gradus import limits
from gradus.errors import did_you_mean, nearest
from gradus.recipe.conflicts import Problem
from gradus.recipe.fields import (
    alternatives,
    classes_inside,
    classes_of,
    discriminator,
    expected,
    kinds_of,
    owner_of,
    unknown_key,
)
from gradus.recipe.schema import Recipe
from gradus.recipe.text import get_key, show


def needs(section: str) -> str:
    kind, knows = kinds_of(section)
    if kind and discriminator(section):
        return f"It needs {section}.{kind}: {', '.join(knows)}."
    classes = classes_of(section)
    return f"It has the keys {', '.join(classes[''].model_fields)}." if classes else ""


def explain(section: str, error: Any, raw: dict[str, Any]) -> Problem:
    """A problem in our words from one of pydantic's errors."""
    kind, loc, key = error["type"], error["loc"][1:], discriminator(section)
    if kind == "union_tag_not_found":
        return Problem(f"{section}.{key}", f"missing. Give one of {', '.join(classes_of(section))}.")
    if kind == "union_tag_invalid":
        tag = get_key(raw, f"{section}.{key}")
        return Problem(f"{section}.{key}", f"no such {section}: {show(tag)}.{did_you_mean(tag, classes_of(section))}")
    owner, path, field = owner_of(section, raw), section, Recipe.model_fields[section]
    for part in loc[1:] if key else loc:
        if isinstance(part, int) or owner is None:
            break
        if part not in owner.model_fields:
            return unknown_key(path, part, raw, owner)
        path, field = f"{path}.{part}", owner.model_fields[part]
        owner = next(iter(classes_inside(field.annotation)), None)
    if kind == "value_error":
        return Problem(path, f"{error['ctx']['error']}.")
    return Problem(path, _wrong_value(error, field, get_key(raw, path)))


def _wrong_value(error: Any, field: Any, value: Any) -> str:
    kind, wanted = error["type"], expected(field.annotation, field.metadata)
    if kind == "missing":
        return f"missing. Give {wanted}."
    if kind == "finite_number":
        return f"must be a finite number, got {show(value)}."
    if kind in ("less_than_equal", "int_parsing_size"):
        most = error.get("ctx", {}).get("le", limits.SEED)
        most = f"{most:,.0f}" if 1 <= most < 1e15 else f"{most:g}"
        return f"{show(value)} is more than a plausible size: at most {most}."
    hint = ""
    if isinstance(value, str):
        near = nearest(value, get_args(alternatives(field.annotation)[0])) if wanted.startswith("one of") else None
        hint = f" Did you mean {near}?" if near else " Use null to unset it." if value.lower() == "none" else ""
    return f"expected {wanted}, got {show(value)}.{hint}"
