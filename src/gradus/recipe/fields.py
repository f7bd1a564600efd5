"""Questions to the schema: sections, their kinds, their keys, what values a key takes, and which key was meant."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gradus import files, limits
from gradus.errors import did_you_mean, nearest
from gradus.recipe.conflicts import DEPENDENT, Problem
from gradus.recipe.schema import Recipe, Section

NAMES: dict[str, Any] = files.packaged("recipe/names.yaml")
COMMON: dict[str, str] = NAMES["keys"]  # key → names of it in papers and other tools
SAME: dict[str, str] = NAMES["same"]  # Hugging Face's name → the key that means the same


def alternatives(annotation: Any) -> list[Any]:
    """The alternatives of a type but None."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [a for part in get_args(annotation) if part is not type(None) for a in alternatives(part)]
    return [annotation]


def classes_inside(annotation: Any) -> list[type[Section]]:
    """The classes of keys that a type holds."""
    return [a for a in alternatives(annotation) if isinstance(a, type) and issubclass(a, Section)]


def discriminator(section: str) -> str | None:
    key = Recipe.model_fields[section].discriminator
    return key if isinstance(key, str) else None


def classes_of(section: str) -> dict[str, type[Section]]:
    """Kind -> class, for a section with kinds; {"": class} for another."""
    key = discriminator(section)
    classes = classes_inside(Recipe.model_fields[section].annotation)
    return {c.model_fields[key].default if key else "": c for c in classes}


def kinds_of(section: str) -> tuple[str | None, dict[str, set[str]]]:
    """(the key that says the kind, kind -> known keys); (None, {}) for a section without kinds."""
    if section in DEPENDENT:
        kind_key, knows = DEPENDENT[section]
        return kind_key, {kind: {kind_key, *keys} for kind, keys in knows.items()}
    key = discriminator(section)
    return key, {kind: set(c.model_fields) for kind, c in classes_of(section).items()} if key else {}


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
        classes = [c for f in fields for c in classes_inside(f.annotation)]
    return fields


def elsewhere(word: str) -> str | None:
    """The key of a recipe that another tool calls `word`."""
    return next((key for key, words in COMMON.items() if word in words.split()), SAME.get(word))


def key_of(word: str) -> str | None:
    """The key that a word means which is no key of a recipe by itself: with its section, or as another tool says it."""
    if "." in word:
        return word if fields_of(word) else None
    places = (f"{s}.{word}" for s in Recipe.model_fields for c in classes_of(s).values() if word in c.model_fields)
    return elsewhere(word) or next((p for p in places if not p.startswith("energy.")), None)


def owner_of(section: str, raw: dict[str, Any]) -> type[Section] | None:
    """The class that a section of a recipe has, None where it does not say its kind."""
    key, stated = discriminator(section), raw.get(section)
    kind = stated.get(key) if key and isinstance(stated, dict) else ""
    return classes_of(section).get(kind) if isinstance(kind, str) else None


def unknown_key(above: str, key: str, raw: dict[str, Any], owner: type[Section] | None = None) -> Problem:
    """An unknown key: where it belongs, or what is nearest to it."""
    path, section = (f"{above}.{key}" if above else key), above.split(".")[0]
    if not above and "." in key and fields_of(key):
        first, rest = key.split(".", 1)
        return Problem(path, f"unknown key. In a file, write it inside its section: {first}: {{{rest}: ...}}.")
    if above and section == above and (kind := discriminator(section)):
        others = [name for name, c in classes_of(section).items() if key in c.model_fields]
        if others:
            text = f"unknown key with {section}.{kind}={raw[section][kind]}. It is for {', '.join(others)}."
            return Problem(path, text, (f"{section}.{kind}",), void=True)
    places = []
    for other in [s for s in Recipe.model_fields if s != section and key != kinds_of(s)[0]]:
        of_its_kind = owner_of(other, raw)
        if any(key in c.model_fields for c in ([of_its_kind] if of_its_kind else classes_of(other).values())):
            places.append(f"{other}.{key}")
    places += [key] if above and is_section(key) else []
    if not places and (ours := elsewhere(key)):
        places = [ours]
    if places:
        return Problem(path, f"unknown key. It is {' or '.join(places)}.")
    known, sections = list(owner.model_fields if owner else Recipe.model_fields), list(Recipe.model_fields)[:0:-1]
    everywhere = {k: f"{s}.{k}" for s in sections for c in classes_of(s).values() for k in c.model_fields}
    near = nearest(key, known)
    if near is not None:
        near = f"{above}.{near}" if above else near
    elif (far := nearest(key, everywhere)) is not None and (not above or set(key.split("_")) & set(far.split("_"))):
        near = everywhere[far]
    return Problem(path, f"unknown key. Did you mean {near}?" if near else f"unknown key.{did_you_mean(key, known)}")


def holds_text(path: str) -> bool:
    kinds = {get_origin(a) or a for f in fields_of(path) for a in alternatives(f.annotation)}
    return bool(kinds & {str, Literal}) and list not in kinds


def unsettable(path: str) -> bool:
    """Whether null takes the key out. Where the schema knows null it is kept, to win over a preset; an unknown key
    stays, for its error."""
    fields = fields_of(path)
    return bool(fields) and not any(type(None) in get_args(f.annotation) for f in fields)


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """The values that a key takes, in words."""
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
        return f"a list [a, b, ...] of {'numbers' if alternatives(parts[0])[0] in (int, float) else 'names'}"
    if get_origin(annotation) is tuple:
        return f"a list [a, b], each {expected(parts[0])}"
    if classes_inside(annotation):
        return f"keys ({', '.join(annotation.model_fields)})"
    if annotation not in (int, float):
        return {bool: "true or false", str: "text"}[annotation]
    bounds = [
        f"{sign} {limit:g}" for mark in marks for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if (limit := getattr(mark, name, None)) is not None
        and not (name == "le" and (annotation is int or limit >= limits.REAL))  # only a slip of the keyboard reaches it
    ]  # fmt: skip
    return " ".join(("a whole number" if annotation is int else "a number", " and ".join(bounds))).strip()
