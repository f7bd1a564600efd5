"""`gradus keys`: every key of a recipe with its default, type and meaning: the comment beside it in schema.py."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from functools import cache, partial

from gradus.errors import UserError, nearest
from gradus.recipe.conflicts import DEPENDENT
from gradus.recipe.fields import classes_inside, classes_of, discriminator, elsewhere, expected, is_section, kinds_of
from gradus.recipe.schema import Recipe, Section
from gradus.recipe.text import show_override
from gradus.text import width

WIDTH = 100  # columns at most


@cache
def _comments(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment at the end of the field's line."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment_at = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = [(c.name, line) for c in classes for line in c.body if isinstance(line, ast.AnnAssign)]
    return {(name, ast.unparse(line.target)): comment_at.get(line.end_lineno or 0, "") for name, line in fields}


def meaning(owner: type[Section], key: str) -> str:
    """What a key means; a class that only changes a default has it from the one above it."""
    comments = (_comments(c.__module__).get((c.__name__, key)) for c in owner.__mro__ if issubclass(c, Section))
    return next(filter(None, comments), "").replace("None:", "null:")


def entries(path: str, owner: type[Section], only: set[str] | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, type and meaning) of every key of a class, and of what lies inside it."""
    for key, field in owner.model_fields.items():
        if (only is not None and key not in only) or (is_section(path) and key == discriminator(path)):
            continue
        name = f"{path}.{key}" if path else key
        inside = classes_inside(field.annotation)
        default = "required" if field.is_required() else show_override(field.default)
        kind = expected(field.annotation, field.metadata)
        yield name, default, f"{kind}: {meaning(owner, key)}{_of_kinds(path, key)}"
        for c in inside:
            yield from entries(name, c)


def _of_kinds(section: str, key: str) -> str:
    kind, knows = DEPENDENT.get(section, ("", {}))
    having = [name for name, keys in knows.items() if key in keys]
    return "" if key == kind or len(having) == len(knows) else f" ({kind}={' or '.join(having)})"


def groups(section: str) -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """(title, what it is, entries): of a section with kinds first what all of them share, then each kind's own."""
    classes, kind = classes_of(section), discriminator(section)
    if kind is None:
        yield section, _doc(classes[""]), list(entries(section, classes[""]))
        return
    listed = {name: list(entries(section, c)) for name, c in classes.items()}
    common = [entry for entry in next(iter(listed.values())) if all(entry in other for other in listed.values())]
    what = meaning(Recipe, section)
    first = (f"{section}.{kind}", "required", f"one of {', '.join(classes)}: {what}")
    yield section, f"{what}; keys that every {section}.{kind} has", [first, *common]
    for name, c in classes.items():
        yield f"{section}.{kind}={name}", _doc(c), [e for e in listed[name] if e not in common]


def _doc(owner: type[Section]) -> str:
    return " ".join((owner.__doc__ or "").split())


def keys(asked: str | None = None) -> list[str]:
    """The lines of `gradus keys`, of at most WIDTH columns: of the whole recipe, a section (layout), a kind of one
    (model.gpt) or a key (layout.precision).

    Raises UserError for a name that is none of these, with the nearest one.
    """
    sections = [name for name in Recipe.model_fields if is_section(name)]
    top = ("recipe", "the keys outside the sections", list(entries("", Recipe, {"name"})))
    every = [top, *(group for section in sections for group in groups(section))]
    asked = asked or ""
    section, _, rest = asked.replace("=", ".").partition(".")
    kind, known = kinds_of(section) if is_section(section) else (None, {})
    rest = rest.removeprefix(f"{kind}.") if rest.count(".") else rest
    if asked in ("", *sections):
        selected = list(groups(asked)) if asked else every
    elif rest in known:
        owner = classes_of(section).get(rest) or classes_of(section)[""]
        selected = [(f"{section}.{kind}={rest}", _doc(owner), list(entries(section, owner, known[rest])))]
    else:
        inside = ((title, "", [e for e in of if f"{e[0]}.".startswith(f"{asked}.")]) for title, _, of in every)
        selected = [group for group in inside if group[2]]
    if not selected:
        kinds = [f"{s}.{name}" for s in sections for name in (classes_of(s) if discriminator(s) else ())]
        names = [*sections, *kinds, *(e[0] for group in every for e in group[2])]
        near = elsewhere(asked.rpartition(".")[2]) or nearest(asked, names)
        hint = f"Did you mean {near}?" if near else f"Sections: {', '.join(sections)}."
        raise UserError(f"gradus keys {asked}: no such section or key. {hint}")
    return [line for group in selected for line in _lines(*group)]


def _lines(title: str, text: str, listed: list[tuple[str, str, str]]) -> Iterator[str]:
    name_room, default_room = (max([len(e[i]) for e in listed], default=0) for i in (0, 1))
    wide = int(min(WIDTH, width()))
    wrap = partial(textwrap.wrap, width=wide, break_long_words=False, break_on_hyphens=False)
    yield from wrap(f"# {title}: {text}" if text else f"# {title}", subsequent_indent="#   ")
    for name, default, rest in listed:
        head = f"{name:{name_room}}  {default:{default_room}}  "
        first, *more = wrap(rest, initial_indent=" " * len(head), subsequent_indent=" " * min(len(head), wide // 2))
        yield from (head + first.lstrip(), *more)
    yield ""
