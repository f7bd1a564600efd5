"""A recipe from its layers, merged once: what a preset or the weights' configuration gives, the file, `key=value`.

One rule: a later layer wins. Where it sets another kind (a section's name, or any switch that other keys belong to),
the keys of earlier layers that the new kind lacks fall away, with one note; a derived value that no longer fits is
clamped (`Problem.instead`), with a note. Any other contradiction is an error that shows both places. Every problem is
reported at once, a line each.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gradus.errors import UserError
from gradus.recipe import check, presets
from gradus.recipe import text as texts
from gradus.recipe.conflicts import Problem
from gradus.recipe.explain import explain, needs
from gradus.recipe.fields import is_section, kinds_of, unknown_key
from gradus.recipe.presets import HEAD, NOT_ARCHITECTURE, beside_weights
from gradus.recipe.schema import Recipe, right_name
from gradus.recipe.text import get_key, same, set_key, show, show_override

EXCLUSIVE = (
    ("train.steps", "train.epochs"), ("batch.samples", "batch.tokens"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
)  # fmt: skip
INPUTS = ("model.init", "tokenizer.path", "data.path")  # paths: see text.absolute
DEFAULT, FILE, ARGUMENT, COMMAND_LINE = range(-1, 3)  # a key's origin: the earliest layer with its value

Configure = Callable[[str], Mapping[str, Any] | None]


# ---------------------------------------------------------------- the face


def load(
    name_or_path: str | Path, overrides: Iterable[str] = (), *, notes: list[str] | None = None,
    configure: Configure | None = beside_weights, text: str | None = None, **more: Any,
) -> Recipe:  # fmt: skip
    """A recipe: the packaged one of that name, a .yaml, .yml or .json file, or the recipe.yaml of a run folder.

    overrides: `section.key=value`, as on the command line; null unsets. `more`: the same as Python values, by section
    (`train={"steps": 5}`) or dotted key (`**{"train.steps": 5}`); overrides win over them, both win over the file.
    notes: a list that receives what a later layer made void in an earlier one and was therefore left out or clamped.
    configure: from model.init, the configuration that comes with the weights (None: not to be had), which is then the
    architecture. None does not look: the architecture is the file's own, as in a run folder, which states it.
    text: the recipe as YAML, in place of what name_or_path names.

    Raises UserError with one line a problem, in the order of the file, then of the overrides.
    """
    name = str(name_or_path)
    source = texts.find(name_or_path) if text is None else texts.Source(name, text, name)
    layers = Layers(source.label, texts.read(source.text, source.label), [] if notes is None else notes)
    for key, value in more.items():
        layers.override(texts.flat(key, texts.plain(value)), ARGUMENT)
    flags, malformed = texts.parse_overrides(overrides)
    layers.override(flags, COMMAND_LINE)
    layers.origin |= {p.path: COMMAND_LINE for p in malformed}
    tree = layers.tree
    if tree.get("name") is None:
        tree["name"] = right_name(source.stem)
    for key in INPUTS:
        if path := texts.absolute(get_key(tree, key), source.folder):
            set_key(tree, key, path)
    sizes_known, problems = layers.fill_model(configure)
    return layers.recipe([*malformed, *problems], lambda _: layers.stated(), sizes_known)


def resolve(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from a tree of plain values, with the same checks and error lines as `load`. Only values that differ
    from their defaults count as asked for."""
    return Layers(source, texts.plain(raw), []).recipe([], check.changed)


# ---------------------------------------------------------------- layers


class Layers:
    """The layers of a recipe, merged: `tree`. origin: stated dotted key → the earliest layer with its value, those of
    the file first. filled: key of the model that no layer states → the key (model.preset, model.init) that sets it.
    left_out: the key that made others void, with its value and place → each of them with its value → its layer."""

    def __init__(self, source: str, tree: dict[str, Any], notes: list[str]):
        self.labels = (source, "argument", "command line")
        self.places = (f"in {source}", "as an argument", "on the command line")
        self.tree, self.notes = tree, notes
        self.origin = {path: FILE for path, _ in texts.leaves(tree)}
        self.filled: dict[str, str] = {}
        self.left_out: dict[str, dict[str, str]] = {}

    def override(self, values: Mapping[str, Any], layer: int) -> None:
        """Merge the next layer, by dotted key. A value that stands already keeps its origin."""
        for path, value in values.items():
            section = path.split(".")[0]
            if "." in path and is_section(section) and not isinstance(self.tree.get(section), dict | None):
                continue  # a section that holds no keys stays, for its error
            if path not in self.origin or not same(get_key(self.tree, path), value):
                self._forget(path)
                self.origin[path] = layer
                set_key(self.tree, path, value)

    def _forget(self, path: str) -> None:
        for key in self._within(path):
            del self.origin[key]

    def _within(self, path: str) -> list[str]:
        return [key for key in self.origin if key == path or key.startswith(f"{path}.")]

    def key_of(self, path: str) -> str:
        """The stated key that gives `path` its value: itself or one in it, else what it stands in; "" for none."""
        path = self.filled.get(path, path)
        if within := self._within(path):
            return max(within, key=lambda key: self.origin[key])
        while path and path not in self.origin:
            path = path.rpartition(".")[0]
        return path

    def layer_of(self, path: str) -> int:
        return self.origin.get(self.key_of(path), DEFAULT)

    def stated(self) -> set[str]:
        return set(texts.stated(self.tree)) - self.filled.keys()

    def where(self, path: str) -> str:
        """`key=value` and its place, of the key that gives `path` its value."""
        key = self.key_of(path)
        return f"{key}={show_override(get_key(self.tree, key))} {self.places[self.origin[key]]}"

    # ---- the one rule

    def adjust(self, problems: list[Problem]) -> list[Problem]:
        """Leave out, or clamp, what a later layer made void; an unset key needs no note. Returns the other problems."""
        others: list[Problem] = []
        for p in problems:
            cause, value = max(p.others, key=self.layer_of, default=""), get_key(self.tree, p.path)
            outranked, label = self.layer_of(cause) > self.layer_of(p.path), self.labels[self.layer_of(p.path)]
            if p.instead not in (None, value) and outranked:
                change = f"{p.path}={p.instead} instead of {show_override(value)}"
                self.notes.append(f"{label}: {change}, to fit {self.where(cause)}")
                set_key(self.tree, p.path, p.instead)
            elif p.void and p.path in self.origin and (value is None or outranked):
                if value is not None:
                    self.left_out.setdefault(self.where(cause), {})[f"{p.path}={show_override(value)}"] = label
                self._forget(p.path)
                section, _, key = p.path.rpartition(".")
                (get_key(self.tree, section) if section else self.tree).pop(key, None)
            else:
                others.append(p)
        return others

    def recipe(self, problems: list[Problem], stated: Callable[[Any], set[str]], sizes_known: bool = True) -> Recipe:
        """The recipe. stated: of the sections that are sound, the keys that must take effect. Raises UserError for what
        is wrong, `problems` before."""
        broken = {"model"} if any(p.path in ("model.preset", "model.init") for p in problems) else set()
        while True:
            sections, wrong = _sections(self.tree, broken)
            doubtful = {p.path.split(".")[0] for p in wrong if p.text.startswith("unknown key")}
            for p in check.problems(sections, stated(sections), sizes_known):
                if not p.void or not doubtful & {key.split(".")[0] for key in p.others}:  # what was meant might be it
                    wrong.append(p)
            adjustable = [*_exclusive(self.tree), *wrong]
            if len(self.adjust(adjustable)) == len(adjustable):
                break
        if problems or wrong:
            raise UserError("\n".join(self.report([*problems, *wrong])))
        for cause, values in self.left_out.items():
            labels = ", ".join(dict.fromkeys(values.values()))
            self.notes.append(f"{labels}: {', '.join(values)} left out: no effect with {cause}")
        return Recipe(**sections)

    # ---- problems in lines

    def report(self, problems: list[Problem]) -> list[str]:
        """Lines in the order of the file, then of the overrides."""
        order, sections = list(self.origin), list(Recipe.model_fields)

        def position(p: Problem) -> tuple[bool, int]:
            section, key = p.path.split(".")[0], self.key_of(p.path)
            missing = len(order) + (sections.index(section) if section in sections else 0)
            return self.layer_of(p.path) > FILE, order.index(key) if key else missing

        return list(dict.fromkeys(self._line(p) for p in sorted(problems, key=position)))

    def _line(self, p: Problem) -> str:
        layer, section = max(FILE, self.layer_of(p.path)), p.path.split(".")[0]
        stated = [other for other in reversed(p.others) if other in self.origin or other in self.filled]
        contradicts = [other for other in stated if self.layer_of(other) != layer]
        if is_section(section) and self.layer_of(kind := f"{section}.{kinds_of(section)[0]}") > layer:
            contradicts.append(kind)
        elsewhere = f" ({self.where(contradicts[0])})" if contradicts else ""
        return f"{self.labels[layer]}: {p.path}: {p.text}{elsewhere}"

    # ---- the first layer

    def fill_model(self, configure: Configure | None) -> tuple[bool, list[Problem]]:
        """Fill the keys of the model that no layer states from the configuration of model.init, else from model.preset.

        Returns whether the sizes are known (not where a later layer asks for weights whose configuration is not to be
        had: the earlier sizes stand for theirs), and problems.
        """
        model = self.tree.get("model")
        if not isinstance(model, dict):
            return True, []
        init, preset, family = (model.get(key) for key in ("init", "preset", "family"))
        at_init, at_preset, at_family = (
            DEFAULT if model.get(key) is None else self.layer_of(f"model.{key}") for key in ("init", "preset", "family")
        )
        key = "model.init"
        try:
            config = configure(init) if configure and isinstance(init, str) else None
            key = "model.preset"
            size = presets.fields(preset) if isinstance(preset, str) else {}
        except UserError as e:
            return True, [Problem(key, str(e).removeprefix(key).lstrip("=: "))]
        if size and init is not None and at_preset > at_init:
            text = f"the recipe starts from model.init={init}, which sets these keys. "
            return True, [Problem(key, f"{text}Set model.init too, or model.init=null.", ("model.init",))]
        if size and config is None and family not in (None, size["family"]) and at_family >= at_preset:
            text = f"{preset} is of family {size['family']}, not {family}. Leave model.family out."
            return True, self.adjust([Problem(key, text, ("model.family",), void=True)])
        kind, at, values = key, at_preset, size
        if config is not None:
            kind, at, values = "model.init", at_init, texts.plain(config)
        problems = []
        for name, value in model.items():
            path, differs = f"model.{name}", config is not None and _differs(values, size, name, value)
            if name in NOT_ARCHITECTURE or path == kind or not (differs or self.layer_of(path) < at):
                continue
            has = "its own configuration" if name == "preset" else show_override(values.get(name))
            text = f"cannot take effect: {kind}={init} has {has}. Leave it out."
            problems.append(Problem(path, text, (kind,), void=True))
        if size and config is None and at_init > at_preset:  # the earlier size stands for the new weights'
            problems.append(Problem(kind, "", ("model.init",), void=True))
            kind = "model.init"
        problems = self.adjust(problems)
        for name, value in values.items():
            if name not in ("preset", "init", *HEAD) and f"model.{name}" not in self.origin:
                self.filled[f"model.{name}"], model[name] = kind, value
        return config is not None or init is None or at_init <= max(at_preset, at_family), problems


def _differs(config: Mapping[str, Any], size: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a key of the model says something else than the configuration beside the weights. size: the preset's."""
    if name == "preset":
        return any(not same(config.get(key), stated) for key, stated in size.items())
    open_vocabulary = name.endswith("vocab_size") and config.get(name) is None
    return name in config and not open_vocabulary and not same(config[name], value)


def _exclusive(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Each of two keys that mean the same is void where the other is set; both in one layer is an error of the
    schema."""
    for pair in EXCLUSIVE:
        if all(get_key(tree, path) is not None for path in pair):
            yield from (Problem(path, "", (other,), void=True) for path, other in (pair, pair[::-1]))


# ---------------------------------------------------------------- tree → sections


def _valid(name: str, value: Any) -> Any:
    """A section by the schema. Raises ValidationError."""
    return getattr(Recipe.__pydantic_validator__.validate_assignment(Recipe.model_construct(), name, value), name)


def _sections(raw: dict[str, Any], broken: Iterable[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Every section that is sound, and what is wrong with the others."""
    sections: dict[str, Any] = {}
    problems = [unknown_key("", key, raw) for key in raw if key not in Recipe.model_fields]
    for name, field in Recipe.model_fields.items():
        if name in broken:
            continue
        if name in raw:
            sound, wrong = _section(name, raw[name], raw)
            sections |= sound
            problems += wrong
        elif field.is_required():
            problems.append(Problem(name, f"missing. {needs(name)}"))
        else:
            sections[name] = field.default
    text = " ".join(p.text for p in problems)
    problems = [
        p for p in dict.fromkeys(problems)
        if not (p.text.startswith("missing") and re.search(rf"(mean|is) {re.escape(p.path)}[.?]", text))
    ]  # fmt: skip
    return sections, problems


def _section(name: str, value: Any, raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """{name: the section} where it is sound but for unknown keys, and what is wrong with it."""
    kind, known = kinds_of(name)
    if is_section(name) and not isinstance(value, dict) and value is not None:
        is_kind = isinstance(value, str) and value in known
        hint = f"Did you mean {name}.{kind}={value}?" if is_kind else needs(name)
        return {}, [Problem(name, f"expected keys, got {show(value)}. {hint}")]
    try:
        return {name: _valid(name, value)}, []
    except ValidationError as e:
        errors = e.errors()
    problems = [explain(name, error, raw) for error in errors]
    unknown = [error["loc"][-1] for error in errors if error["type"] == "extra_forbidden"]
    if len(unknown) == len(errors):  # the rest can still be compared with the other sections
        with contextlib.suppress(ValidationError):
            return {name: _valid(name, {k: v for k, v in value.items() if k not in unknown})}, problems
    return {}, problems
