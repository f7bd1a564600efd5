"""Recipes as text: where one is found, YAML and `key=value` words to trees of plain values, and back.

Scalars are read as text, and the schema says what they are: `lr: 1e-4` is a number, `source: no` is Norwegian,
`compile: none` is a word. Only null (or nothing at all) is special: it unsets a key.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.recipe import check, presets
from gradus.recipe.conflicts import Problem, word
from gradus.recipe.fields import fields_of, holds_text, is_section, kinds_of, unsettable
from gradus.recipe.schema import Recipe

NULLS = ("", "~", "null", "Null", "NULL")
SUFFIXES = (".yaml", ".yml", ".json")
LIBRARY = Path(__file__).parent / "library"
GIVE = "Give a packaged recipe, a .yaml, .yml or .json file, or a run folder."


# ---------------------------------------------------------------- values


def get_key(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def set_key(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a key. None unsets it: a section is empty then, and a key that cannot be null is taken out."""
    *above, key = path.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if value is None and path != "tokenizer" and is_section(path):
        tree[key] = {}
    elif value is None and unsettable(path):
        tree.pop(key, None)
    else:
        tree[key] = value


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value), sections before what is in them."""
    for key, value in tree.items():
        yield above + key, value
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")


def stated(tree: Mapping[str, Any]) -> list[str]:
    """The dotted keys that are not null."""
    return [path for path, value in leaves(tree) if value is not None]


def flat(path: str, value: Any) -> dict[str, Any]:
    """Dotted key -> value, of what stands inside `path`."""
    return {key: v for key, v in leaves({path: value}) if not (v and isinstance(v, Mapping))}


def plain(value: Any) -> Any:
    """Python's values as a file would hold them: true and false are words for the schema to type, not 1 and 0. Raises
    UserError for a text that no file holds."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, str | Path):
        limits.words([value := str(value)])
    return str(value).lower() if isinstance(value, bool) else value


def show(value: Any) -> str:
    """A value as in a file, cut where it is long; text that is no number stands in quotes."""
    text = "nothing" if value is None else str(value)
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(show, value)) + "]"
    elif isinstance(value, str) and value not in ("true", "false") and as_number(value) is None:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def show_override(value: Any) -> str:
    """A value as after `key=`, cut where it is long."""
    return word(value) if value is None or isinstance(value, bool | str) else show(value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return str(a) == str(b) or (as_number(a) is not None and as_number(a) == as_number(b))


def as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# ---------------------------------------------------------------- where a recipe is


class Source(NamedTuple):
    """label: as messages call it. stem: the recipe's name where it states none. folder: of a file of one's own."""

    label: str
    text: str
    stem: str
    folder: Path | None = None


def names() -> list[str]:
    """The packaged recipes."""
    return sorted(file.stem for file in LIBRARY.glob("*.yaml"))


def header(name: str) -> list[str]:
    """The comment lines that open a packaged recipe: what it is, its command, and what was measured."""
    lines = (LIBRARY / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("#").removeprefix(" ") for line in comments]


def find(name_or_path: str | Path) -> Source:
    """The packaged recipe of that name, a file, or a run folder's recipe.yaml. Raises UserError where there is none."""
    name, path = str(name_or_path), Path(os.path.expanduser(name_or_path))
    if name in names():
        return Source(name, (LIBRARY / f"{name}.yaml").read_text(encoding="utf-8"), name)
    if not name:
        raise UserError(f"the recipe's name is empty. {GIVE}")
    if path.is_dir():
        name, path = str(path / "recipe.yaml"), path / "recipe.yaml"
        if not path.is_file():
            raise UserError(f"{path.parent}: a folder without recipe.yaml is not a run. {GIVE}")
    if not path.exists():
        raise UserError(_not_there(name, path))
    if path.suffix not in SUFFIXES:
        raise UserError(f"{name}: not a recipe. {GIVE}")
    return Source(name, limits.read_text(path, limits.RECIPE_FILE), path.stem, path.absolute().parent)


def _not_there(name: str, path: Path) -> str:
    files, known = [str(file) for file in path.parent.glob("*") if file.suffix in SUFFIXES], names()
    models = [*presets.PRESETS, *presets.ALIASES]
    if "=" in name:
        return f"{name}: a setting, where the recipe is expected: it comes first. {GIVE}"
    if name in models:
        return (
            f"{name}: the preset of a model, not a recipe: it has no task and no data. "
            f"Give a recipe and model.preset={name}; gradus plan {name} plans it."
        )
    near = difflib.get_close_matches(name, [*files, *known], n=1) or difflib.get_close_matches(name, models, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    if near and near[0] in models:
        meant = f" Did you mean a recipe with model.preset={near[0]}?"
    if path.suffix in SUFFIXES or "/" in name:
        return f"{name}: no such file.{meant}"
    return f"{name}: no such recipe.{meant or did_you_mean(name, names())} {GIVE}"


_ABSENT: dict[str, list[Path]] = {}  # a relative path that is nowhere → where it was looked for


def absolute(value: Any, folder: Path | None) -> str | None:
    """A relative path as an absolute one, so that a run can be resumed from any folder: below the working directory,
    else below `folder`. None where it is absolute already, or nowhere (a name on the hub, say)."""
    if not isinstance(value, str) or not value or value.startswith("hf:"):
        return None
    path = Path(os.path.expanduser(value))
    if path.is_absolute():
        return None
    tried = list(dict.fromkeys(Path(os.path.normpath(base / path)) for base in (Path.cwd(), folder or Path.cwd())))
    try:
        existing = next((p for p in tried if p.exists()), None)
    except (OSError, ValueError):  # too long, a zero byte: an error where it is opened
        return None
    if existing is None:
        _ABSENT[str(path)] = tried
    return str(existing) if existing else None


def looked_for(path: str | Path) -> str:
    """' (looked for A and B)': where a relative path of a recipe is not; for others nothing."""
    tried = _ABSENT.get(str(Path(os.path.expanduser(path))))
    return f" (looked for {' and '.join(map(str, tried))})" if tried else ""


# ---------------------------------------------------------------- text → tree


def read(text: str, source: str) -> dict[str, Any]:
    """The tree. Raises UserError for what is not YAML, and for what has no sections."""
    tree = _parse(text.replace("\t", " ") if source.endswith(".json") else text, source)  # JSON is indented by tabs too
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "nothing" if tree is None else f"only {show(tree)}"
        raise UserError(f"{source}: expected sections such as model, task and data, got {what}.")
    return {k: {} if v is None and is_section(k) and k != "tokenizer" else v for k, v in tree.items()}


def parse_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """`a.b=value` → {"a.b": value}; a value in brackets is read as YAML unless the key holds text. And what cannot be
    read."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            key = key.lstrip("-").replace("-", "_")
            hint = f" Write {key}={value or 'VALUE'}." if fields_of(key) else ""
            problems.append(Problem(text, f"not of the form section.key=value.{hint}"))
        elif value[:1] in ("[", "{") and not holds_text(key):
            try:
                values |= flat(key, _parse(value, text))
            except UserError as e:
                problems.append(Problem(text, str(e).removeprefix(f"{text}: ")))
        else:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            values[key] = value[1:-1] if quoted else None if value in NULLS else value
    return values, problems


def _parse(text: str, where: str) -> Any:
    tree = limits.parse_yaml(text, where, _Reader, limits.RECIPE_NODES)
    return json.loads(json.dumps(tree))  # aliases of one value become values of their own


class _Reader(yaml.BaseLoader):
    """Every scalar as text, but for null. Keys are words, each given once; a tag of its own is an error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag} is not supported", problem_mark=node.start_mark)
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        tree: dict[Hashable, Any] = {}
        for key, child in node.value:
            word = isinstance(key, yaml.ScalarNode)
            if not word or key.value in tree:
                what = f"{key.value} is given twice. Keep one" if word else "a key must be a word"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=key.start_mark)
            tree[key.value] = self.construct_object(child)
        return tree

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        if node.style is None and text in NULLS:
            return None
        if node.style is None and text.lower() in (".nan", ".inf", "-.inf", "+.inf"):
            return text.replace(".", "")
        if "\0" in text:
            raise yaml.MarkedYAMLError(problem="contains a zero byte", problem_mark=node.start_mark)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON's two surrogates are one


# ---------------------------------------------------------------- tree → text


class _Dumper(yaml.SafeDumper):
    """Sections a line a key, lists within the line."""


for _kind in (tuple, list):
    _Dumper.add_representer(_kind, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True))


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key but those that cannot take effect. `load` of it gives an equal one."""
    tree = recipe.model_dump()
    void = {p.path for p in check.problems(vars(recipe), stated(tree)) if p.void}
    filled = presets.fields(recipe.model.preset) if recipe.model.preset else {}  # an explicit null must win over it
    out: dict[str, Any] = {}
    for name, section in tree.items():
        if isinstance(section, dict):
            wins = filled if name == "model" else {}
            keys = (k for k, v in section.items() if v is not None or wins.get(k) is not None)
            kind = kinds_of(name)[0]
            section = {k: section[k] for k in sorted(keys, key=lambda k: k != kind) if f"{name}.{k}" not in void}
        if section not in (None, {}):
            out[name] = section
    return yaml.dump(out, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)
