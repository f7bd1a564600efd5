"""A recipe from its layers, merged once: what a preset or the weights' configuration brings, the file, `key=value`.

A key holds as the highest layer says it. What this makes void in the layers below (a setting that the new kind does not
know or that takes no effect beside it) is left out, with a note; any other conflict is an error that shows both places.
Every problem is reported at once, a line each.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from gradus.errors import UserError
from gradus.recipe import check, presets
from gradus.recipe import text as texts
from gradus.recipe.conflicts import Problem
from gradus.recipe.explain import explain, needs
from gradus.recipe.fields import is_section, kinds_of, unknown_key
from gradus.recipe.presets import HEAD, NOT_ARCHITECTURE, beside_weights
from gradus.recipe.schema import Recipe, right_name
from gradus.recipe.text import get, put, said, same, show

EXCLUSIVE = (("train.steps", "train.epochs"), ("batch.samples", "batch.tokens"))
INPUTS = ("data.path", "tokenizer.path", "model.init")  # paths: see text.absolute
FILE, ARGUMENT, COMMAND_LINE = 0, 1, 2

Configure = Callable[[str], Mapping[str, Any] | None]


# ---------------------------------------------------------------- the face


def load(
    name_or_path: str | Path, overrides: Iterable[str] = (), *, notes: list[str] | None = None,
    configure: Configure | None = beside_weights, text: str | None = None, **more: Any,
) -> Recipe:  # fmt: skip
    """A recipe: the packaged one of that name, a .yaml, .yml or .json file, or the recipe.yaml of a run folder.

    overrides: `section.key=value`, as on the command line; null unsets. `more`: the same as Python values, by section
    (`train={"steps": 5}`) or dotted key (`**{"train.steps": 5}`); overrides win over them, both win over the file.
    notes: a list that receives what a higher layer made void in a lower one and was therefore left out.
    configure: from model.init, the configuration that comes with the weights (None: not to be had), which is then the
    architecture. None does not look: the architecture is the file's own, as in a run folder, which states it.
    text: the recipe as YAML, in place of what name_or_path names.

    Raises UserError with one line a problem, in the order of the file, then of the overrides.
    """
    name = str(name_or_path)
    source = texts.find(name_or_path) if text is None else texts.Source(name, text, name)
    tree = texts.read(source.text, source.label)
    layers = Layers(source.label, tree, [path for path, _ in texts.leaves(tree)], [] if notes is None else notes)
    arguments = (texts.flat(key, texts.plain(value)) for key, value in more.items())
    flags, malformed = texts.words(overrides)
    for layer, given in ((ARGUMENT, arguments), (COMMAND_LINE, [flags])):
        for path, value in itertools.chain.from_iterable(words.items() for words in given):
            layers.put(path, value, layer)
    layers.said |= {p.path: Said(COMMAND_LINE, COMMAND_LINE) for p in malformed}
    if tree.get("name") is None:
        tree["name"] = right_name(source.stem)
    for key in INPUTS:
        if path := texts.absolute(get(tree, key), source.folder):
            put(tree, key, path)
    sizes_known, trouble = _fill(layers, configure)
    return layers.recipe([*malformed, *trouble], lambda _: layers.stated(), sizes_known)


def resolve(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from a tree of plain values, with the same checks and error lines as `load`. Only values that differ
    from their defaults count as asked for."""
    tree = {name: dict(section) if isinstance(section, Mapping) else section for name, section in raw.items()}
    layers = Layers(source, tree, texts.stated(tree), [])
    return layers.recipe([], check.changed)


# ---------------------------------------------------------------- layers


class Said(NamedTuple):
    """The layer that says a key, and the one that gave it the value it has (a higher one may repeat it). by: of what a
    preset or model.init brings, that key; it lies just below the layer that says it."""

    layer: float
    since: float
    by: str | None = None


NOBODY = Said(-1, -1)


class Layers:
    """What is said of a recipe, and where. tree: all of it; `said`: its dotted keys, those of the file first."""

    def __init__(self, source: str, tree: dict[str, Any], order: list[str], notes: list[str]):
        self.labels = (source, "argument", "command line")
        self.places = (f"in {source}", "as an argument", "on the command line")
        self.tree, self.notes = tree, notes
        self.said = dict.fromkeys(order, Said(FILE, FILE))

    def put(self, path: str, value: Any, layer: int) -> None:
        section = path.split(".")[0]
        if "." in path and is_section(section) and not isinstance(self.tree.get(section), dict | None):
            return  # a section that holds no keys stays, for its error
        repeated = path in self.said and same(get(self.tree, path), value)
        since = self.said[path].since if repeated else layer
        self._forget(path)
        self.said[path] = Said(layer, since)
        put(self.tree, path, value)

    def bring(self, fields: Mapping[str, Any], by: str, layer: float) -> None:
        """Fill in what a preset or the configuration of weights has under what is said."""
        for key, value in fields.items():
            if f"model.{key}" not in self.said:
                self.said[f"model.{key}"] = Said(layer, layer, by)
                self.tree["model"][key] = value

    def _forget(self, path: str) -> None:
        for key in [key for key in self.said if key == path or key.startswith(f"{path}.")]:
            del self.said[key]

    def key_of(self, path: str) -> str:
        """What was said that gives `path` its value: itself or something in it, else what it stands in; '' for none."""
        inside = [key for key in self.said if key == path or key.startswith(f"{path}.")]
        if inside:
            return max(inside, key=lambda key: self.said[key].layer)
        while path and path not in self.said:
            path = path.rpartition(".")[0]
        return path

    def who(self, path: str) -> Said:
        return self.said.get(self.key_of(path), NOBODY)

    def stated(self) -> set[str]:
        return {path for path in texts.stated(self.tree) if self.said.get(path, NOBODY).by is None}

    # ---- the one rule

    def settle(self, problems: list[Problem]) -> list[Problem]:
        """Leave out, or change, what a higher layer made void, with one note per cause; what was unset needs none.
        Returns what stays."""
        rest: list[Problem] = []
        out: dict[str, dict[str, Any]] = {}
        instead = {p.path: p.instead for p in problems if p.instead is not None}
        for p in problems:
            cause = max(p.others, key=lambda key: self.who(key).since, default="")
            value, by = get(self.tree, p.path), self.who(p.path)
            if p.void and p.path in self.said and (value is None or self.who(cause).since > by.layer):
                out.setdefault(cause, {})[p.path] = value
            else:
                rest.append(p)
        for cause, values in out.items():
            left = {path: value for path, value in values.items() if value is not None and path not in instead}
            where = ", ".join({self.labels[math.ceil(self.who(path).layer)]: 0 for path in left or values})
            if what := ", ".join(f"{path}={said(value)}" for path, value in left.items()):
                self.notes.append(f"{where}: {what} left out: no effect with {self.beside(cause)}")
            for path in values.keys() & instead.keys():
                change = f"{path}={instead[path]} instead of {said(values[path])}"
                self.notes.append(f"{where}: {change}, to fit {self.beside(cause)}")
        for path in itertools.chain.from_iterable(out.values()):
            if path in instead:
                put(self.tree, path, instead[path])
                continue
            self._forget(path)
            above, _, key = path.rpartition(".")
            (get(self.tree, above) if above else self.tree).pop(key, None)
        return rest

    def beside(self, path: str) -> str:
        key = self.key_of(path)
        key = self.said[key].by or key
        return f"{key}={said(get(self.tree, key))} {self.places[math.ceil(self.said[key].layer)]}"

    def recipe(self, found: list[Problem], stated: Callable[[Any], set[str]], sizes_known: bool = True) -> Recipe:
        """The recipe. stated: of the sections that are sound, the keys that must take effect. Raises UserError for what
        is wrong, `found` before."""
        broken = {"model"} if any(p.path in ("model.preset", "model.init") for p in found) else set()
        while True:
            sections, trouble = _sections(self.tree, broken)
            doubtful = {p.path.split(".")[0] for p in trouble if p.text.startswith("unknown key")}
            for p in check.problems(sections, stated(sections), sizes_known):
                if not p.void or not doubtful & {key.split(".")[0] for key in p.others}:  # what was meant might be it
                    trouble.append(p)
            problems = [*_exclusive(self.tree), *trouble]
            if len(self.settle(problems)) == len(problems):
                break
        if found or trouble:
            raise UserError("\n".join(self.report([*found, *trouble])))
        return Recipe(**sections)

    # ---- problems in lines

    def report(self, found: list[Problem]) -> list[str]:
        """Lines in the order of the file, then of the overrides."""
        order, sections = list(self.said), list(Recipe.model_fields)

        def place(p: Problem) -> tuple[bool, int]:
            section = p.path.split(".")[0]
            missing = len(order) + (sections.index(section) if section in sections else 0)
            key = self.key_of(p.path)
            return self.who(p.path).layer > FILE, order.index(key) if key else missing

        return list(dict.fromkeys(self._line(p) for p in sorted(found, key=place)))

    def _line(self, p: Problem) -> str:
        at, other = max(FILE, math.ceil(self.who(p.path).layer)), p.others[-1] if p.others else ""
        elsewhere = other in self.said and math.ceil(self.said[other].layer) != at
        return f"{self.labels[at]}: {p.path}: {p.text}" + (f" ({self.beside(other)})" if elsewhere else "")


def _exclusive(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Each of two keys that mean the same is void beside the other; both in one layer is an error of the schema."""
    for pair in EXCLUSIVE:
        if all(get(tree, path) is not None for path in pair):
            yield from (Problem(path, "", (other,), void=True) for path, other in (pair, pair[::-1]))


# ---------------------------------------------------------------- the lowest layer


def _fill(layers: Layers, configure: Configure | None) -> tuple[bool, list[Problem]]:
    """Take the configuration of model.init, else model.preset, as the lowest layer.

    Returns whether the sizes are known (not where other weights than the file's were asked for, whose configuration is
    not to be had: the file's sizes stand for them), and problems.
    """
    model = layers.tree.get("model")
    if not isinstance(model, dict):
        return True, []
    init, preset, family = values = [model.get(key) for key in ("init", "preset", "family")]
    since = (layers.said.get(f"model.{key}", NOBODY).since for key in ("init", "preset", "family"))
    at_init, at_preset, at_family = (NOBODY.since if v is None else at for v, at in zip(values, since))
    key = "model.init"
    try:
        config = configure(init) if configure and isinstance(init, str) else None
        key = "model.preset"
        published = presets.fields(preset) if isinstance(preset, str) else {}
    except UserError as e:
        return True, [Problem(key, re.sub(rf"^{re.escape(key)}[:=] ?", "", str(e)))]
    if published and init is not None and at_preset > at_init:
        text = f"the recipe starts from model.init={init}, which sets these keys. "
        return True, [Problem(key, f"{text}Set model.init too, or model.init=null.", ("model.init",))]
    if published and config is None and family not in (None, published["family"]) and at_family >= at_preset:
        text = f"{preset} is of family {published['family']}, not {family}. Leave model.family out."
        return True, layers.settle([Problem(key, text, ("model.family",), void=True)])
    brings, by, at = (published, key, at_preset) if config is None else (texts.plain(config), "model.init", at_init)
    found = []
    for key, ours in model.items():
        path, theirs = f"model.{key}", brings.get(key)
        if key in NOT_ARCHITECTURE or path == by:
            continue
        if key == "preset":
            unlike = any(not same(brings.get(k), value) for k, value in published.items())
        else:
            unlike = key in brings and not same(theirs, ours) and not (theirs is None and key.endswith("vocab_size"))
        if layers.who(path).layer < at or (unlike and config is not None):
            has = "its own configuration" if key == "preset" else said(theirs)
            text = f"cannot take effect: {by}={init} has {has}. Leave it out."
            found.append(Problem(path, text, (by,), void=True))
    known = config is not None or init is None or at_init <= max(at_preset, at_family)
    if published and config is None and at_init > at_preset:  # the old weights' sizes stand for the new ones'
        found.append(Problem(by, "", ("model.init",), void=True))
        by = "model.init"
    found = layers.settle(found)
    layers.bring({k: v for k, v in brings.items() if k not in ("preset", "init", *HEAD)}, by, at - 0.5)
    return known, found


# ---------------------------------------------------------------- tree → sections


def _valid(name: str, value: Any) -> Any:
    """A section by the schema. Raises ValidationError."""
    return getattr(Recipe.__pydantic_validator__.validate_assignment(Recipe.model_construct(), name, value), name)


def _sections(raw: dict[str, Any], broken: Iterable[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Every section that is sound, and what is wrong with the others."""
    sections: dict[str, Any] = {}
    found = [unknown_key("", key, raw) for key in raw if key not in Recipe.model_fields]
    for name, field in Recipe.model_fields.items():
        if name in broken:
            continue
        value = raw.get(name)
        if name in raw:
            sound, problems = _section(name, value, raw)
            sections |= sound
            found += problems
        elif field.is_required():
            found.append(Problem(name, f"missing. {needs(name)}"))
        else:
            sections[name] = field.default
    meant = " ".join(p.text for p in found)
    found = [
        p for p in dict.fromkeys(found)
        if not (p.text.startswith("missing") and re.search(rf"(mean|is) {re.escape(p.path)}[.?]", meant))
    ]  # fmt: skip
    return sections, found


def _section(name: str, value: Any, raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """{name: the section} where it is sound but for unknown keys, and what is wrong with it."""
    kind, known = kinds_of(name)
    if is_section(name) and not isinstance(value, dict) and value is not None:
        meant = isinstance(value, str) and value in known
        hint = f"Did you mean {name}.{kind}={value}?" if meant else needs(name)
        return {}, [Problem(name, f"expected keys, got {show(value)}. {hint}")]
    try:
        return {name: _valid(name, value)}, []
    except ValidationError as e:
        errors = e.errors()
    found = [explain(name, error, raw) for error in errors]
    unknown = [error["loc"][-1] for error in errors if error["type"] == "extra_forbidden"]
    if len(unknown) == len(errors):  # the rest can still be held against the other sections
        with contextlib.suppress(ValidationError):
            return {name: _valid(name, {k: v for k, v in value.items() if k not in unknown})}, found
    return {}, found
