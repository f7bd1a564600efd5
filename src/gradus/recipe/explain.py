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
    elsewhere,
    every_key,
    expected,
    fields_of,
    is_section,
    kinds_of,
)
from gradus.recipe.schema import Recipe, Section
from gradus.recipe.text import get, show


def needs(section: str) -> str:
    kind, knows = kinds_of(section)
    if kind and discriminator(section):
        return f"It needs {section}.{kind}: {', '.join(knows)}."
    classes = classes_of(section)
    return f"It has the keys {', '.join(classes[None].model_fields)}." if classes else ""


def explain(section: str, error: Any, raw: dict[str, Any]) -> Problem:
    """A problem in our words from one of pydantic's errors."""
    kind, loc, key = error["type"], list(error["loc"]), discriminator(section)
    if kind == "union_tag_not_found":
        return Problem(f"{section}.{key}", f"missing. Give one of {', '.join(classes_of(section))}.")
    if kind == "union_tag_invalid":
        tag = get(raw, f"{section}.{key}")
        near = did_you_mean(tag, classes_of(section))
        return Problem(f"{section}.{key}", f"no such {section}: {show(tag)}.{near}")
    owner, parts, field = owner_of(section, raw), [section], Recipe.model_fields[section]
    for part in loc[1:] if key else loc:
        if isinstance(part, int) or owner is None:
            break
        if part not in owner.model_fields:
            return unknown_key(".".join(parts), part, raw, owner)
        parts.append(part)
        field = owner.model_fields[part]
        owner = next(iter(classes_inside(field.annotation)), None)
    path = ".".join(parts)
    if kind == "value_error":
        return Problem(path, f"{error['ctx']['error']}.")
    return Problem(path, _wrong_value(error, field, get(raw, path)))


def _wrong_value(error: Any, field: Any, value: Any) -> str:
    kind, wanted = error["type"], expected(field.annotation, field.metadata)
    if kind == "missing":
        return f"missing. Give {wanted}."
    if kind == "finite_number":
        return f"must be a finite number, got {show(value)}."
    if kind in ("less_than_equal", "int_parsing_size"):
        most = error.get("ctx", {}).get("le", limits.SEED)
        most = f"{most:,.0f}" if 1 <= most < 1e15 else f"{most:g}"
        return f"{show(value)} is more than a size one could mean: at most {most}."
    near = unset = ""
    if isinstance(value, str):
        words = get_args(alternatives(field.annotation)[0]) if wanted.startswith("one of") else ()
        near = did_you_mean(value, words)
        near = near if "Did you" in near else ""
        unset = " Use null to unset it." if value.lower() == "none" and not near else ""
    return f"expected {wanted}, got {show(value)}.{near}{unset}"


def unknown_key(above: str, key: str, raw: dict[str, Any], owner: type[Section] | None = None) -> Problem:
    """An unknown key: where it belongs, or what is nearest to it."""
    path, section = (f"{above}.{key}" if above else key), above.split(".")[0]
    if not above and "." in key and fields_of(key):
        first, rest = key.split(".", 1)
        return Problem(path, f"unknown key. In a file, write it inside its section: {first}: {{{rest}: ...}}.")
    if above and section == above and (kind := discriminator(section)):
        others = [name for name, c in classes_of(section).items() if key in c.model_fields]
        if others:
            text = f"unknown key with {section}.{kind}={get(raw, f'{section}.{kind}')}. It is for {', '.join(others)}."
            return Problem(path, text, (f"{section}.{kind}",), void=True)
    others = [s for s in Recipe.model_fields if s != section]
    places = [f"{s}.{key}" for s in others if key != kinds_of(s)[0] and _has(s, key, raw)]
    places += [key] if above and is_section(key) else []
    if not places and (other := elsewhere(key)):
        places = [other]
    if places:
        return Problem(path, f"unknown key. It is {' or '.join(places)}.")
    known, everywhere = list(owner.model_fields if owner else Recipe.model_fields), every_key()
    near = nearest(key, known)
    if near is not None:
        near = f"{above}.{near}" if above else near
    elif (far := nearest(key, everywhere)) is not None and (not above or set(key.split("_")) & set(far.split("_"))):
        near = everywhere[far]
    return Problem(path, f"unknown key. Did you mean {near}?" if near else f"unknown key.{did_you_mean(key, known)}")


def _has(section: str, key: str, raw: dict[str, Any]) -> bool:
    """Whether the section, of the kind it has in this recipe, knows the key."""
    owner = owner_of(section, raw)
    return any(key in c.model_fields for c in ([owner] if owner else classes_of(section).values()))


def owner_of(section: str, raw: dict[str, Any]) -> type[Section] | None:
    """The class of a section, None where it does not say its kind."""
    key = discriminator(section)
    kind = get(raw, f"{section}.{key}") if key else None
    return classes_of(section).get(kind) if kind is None or isinstance(kind, str) else None
