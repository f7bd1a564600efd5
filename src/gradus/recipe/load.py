"""A recipe from a name, a file or a run folder and `key=value` overrides, and back to text. Every problem is told at once, a line each.

Scalars are read as text, and the schema says what they are: `lr: 1e-4` is a number, `source: no` is Norwegian, `compile: none` is a word.
Only null (or nothing at all) is special: it unsets a key.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.recipe import check, presets
from gradus.recipe.check import Problem
from gradus.recipe.explain import (
    DEPENDENT,
    as_number,
    classes_of,
    discriminator,
    explain,
    fields_of,
    get,
    has,
    holds_text,
    is_section,
    kinds_of,
    needs,
    report,
    required,
    said,
    same,
    show,
    unknown_key,
    unsettable,
)
from gradus.recipe.schema import Recipe, right_name

NULLS = ("", "~", "null", "Null", "NULL")
EXCLUSIVE = (("train.steps", "train.epochs"), ("batch.samples", "batch.tokens"))
NOT_ARCHITECTURE = ("init", "dropout", "head", "pooler", "n_classes", "patches")  # what a recipe says about a model whatever its size
HEAD = ("head", "pooler", "n_classes")  # what task and data say where the recipe does not: a preset's or other weights' is for their own data
INPUTS = ("data.path", "tokenizer.path", "model.init")  # a relative one is looked for below the working directory, then in the recipe file's folder


# ---------------------------------------------------------------- the face


def _beside_weights(init: str) -> dict[str, Any] | None:
    """What config.json beside the weights says; None where only the hub has it (it is then read when the weights are).

    The room that reads weights stands above this one and is asked for by name, as `gradus.models` is, so that nothing here depends on it.
    Raises UserError for a path where there is nothing.
    """
    models = import_module("gradus.models")
    if not Path(os.path.expanduser(init)).exists():
        if init.startswith((".", "/", "~")):
            raise UserError(f"model.init={init}: no such file or folder.")
        with contextlib.suppress(UserError):
            return models.config_of(init).model_dump()
        return None
    return models.config_of(init).model_dump()


def names() -> list[str]:
    """The packaged recipes."""
    return sorted(f.name.removesuffix(".yaml") for f in _library().iterdir() if f.name.endswith(".yaml"))


def header(name: str) -> list[str]:
    """The comment lines that open a packaged recipe: what it is, its command, and what was measured."""
    lines = (_library() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").removeprefix(" ") for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]]


def load(
    name_or_path: str | Path,
    overrides: Iterable[str] = (),
    *,
    notes: list[str] | None = None,
    configure: Callable[[str], Mapping[str, Any] | None] | None = _beside_weights,
    text: str | None = None,
    **more: Any,
) -> Recipe:
    """A recipe: the packaged one of that name, a .yaml, .yml or .json file, or the recipe.yaml of a run folder.

    overrides: `section.key=value`, as on the command line; null unsets. `more`: the same as Python values, by section
    (`train={"steps": 5}`) or dotted key (`**{"train.steps": 5}`); overrides win over them, both win over the file.
    notes: a list that receives what overrides made meaningless in the file and was therefore left out.
    configure: from model.init, the configuration that comes with the weights (None: not to be had); it replaces the
    architecture, see `adopt`. None does not look: the architecture is the file's own, as in a run folder, which states it.
    text: the recipe as YAML, in place of what name_or_path names.

    Raises UserError with one line a problem, in the order of the file, then of the overrides.
    """
    notes = [] if notes is None else notes
    source, text, stem, folder = (str(name_or_path), text, str(name_or_path), None) if text is not None else _find(name_or_path)
    raw, order, found = _read(text, source, as_json=source.endswith(".json"))
    arguments, (flags, malformed) = _arguments(more), _parse(overrides)
    found += malformed
    for layer in (arguments, flags):
        found += _switch(raw, layer, source, notes)
        for path, value in layer.items():
            _put(raw, path, value)
        for path in [p for p, value in layer.items() if value is None and p.count(".") == 1 and fields_of(p)]:
            if not has(*path.split("."), raw):  # to unset what this kind does not know anyway is no mistake
                _remove(raw, path)
    given = {**arguments, **flags}
    labels = {**dict.fromkeys(arguments, "argument"), **dict.fromkeys([*flags, *(p.path for p in malformed)], "command line")}
    rank = {**dict.fromkeys(arguments, 1), **dict.fromkeys(flags, 2)}  # who said it last; the file: 0
    if raw.get("name") is None:
        raw["name"] = right_name(stem)
    _find_inputs(raw, folder)
    sizes_known, trouble = _architecture(raw, given, configure, notes)
    found += trouble
    while True:
        sections, trouble = _sections(raw, broken={p.path.split(".")[0] for p in found if p.path in ("model.preset", "model.init")})
        doubtful = {p.path.split(".")[0] for p in trouble if p.text.startswith("unknown key")}  # what was meant might give effect
        conflicts = check.problems(sections, set(_leaves(raw)), sizes_known)
        trouble += [p for p in conflicts if not any(b.split(".")[0] in doubtful for b in p.because)]
        # What an override robbed of its effect goes; what was asked for in vain is an error.
        robbed = [p for p in trouble if rank.get(p.path, 0) < max((rank.get(b, 0) for b in p.because), default=0) and get(raw, p.path) is not None]
        for p in robbed:
            notes.append(f"{source}: {p.path}={said(get(raw, p.path))} left out: it {p.text.split('. ')[0].rstrip('.')}")
            _remove(raw, p.path)
        if not robbed:
            break
    found += trouble
    if found:
        raise UserError("\n".join(report(found, source, order, labels)))
    return Recipe(**sections)


def resolve(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from a tree of plain values, such as `adopt` gives, with the same checks and error lines as `load`.

    Only values that differ from their defaults count as asked for."""
    raw = {name: dict(section) if isinstance(section, Mapping) else section for name, section in raw.items()}
    sections, found = _sections(raw)
    if not found:
        recipe = Recipe(**sections)
        found = check.problems(sections, check.changed(recipe))
    if found:
        raise UserError("\n".join(report(found, source, list(_leaves(raw)), {})))
    return recipe


def adopt(recipe: Mapping[str, Any], config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a recipe with the architecture of another model: `config_fields` (with `family`) replace the model section, except
    what is no matter of size: init, dropout, head, pooler, n_classes, patches. Fields that do not exist in that family are left out."""
    old = {k: v for k, v in (recipe.get("model") or {}).items() if k in NOT_ARCHITECTURE and v is not None}
    new = {k: v for k, v in config_fields.items() if k not in ("preset", "init")}
    known = classes_of("model")[new["family"]].model_fields
    return {**recipe, "model": {**new, **{k: v for k, v in old.items() if k in known}}}


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, everything said except what cannot take effect; `load` of it gives an equal recipe."""
    tree = recipe.model_dump()
    moot = {p.path for p in check.problems(vars(recipe), set(_leaves(tree))) if p.because}
    filled = _expand(tree["model"]["preset"]) if recipe.model.preset else {}  # an explicit null must win over the preset
    out: dict[str, Any] = {}
    for name, section in tree.items():
        if not isinstance(section, dict):
            out |= {name: section} if section is not None else {}
            continue
        section = {
            k: v for k, v in section.items() if f"{name}.{k}" not in moot and (v is not None or (name == "model" and filled.get(k) is not None))
        }
        kind = discriminator(name) or DEPENDENT.get(name, ("",))[0]
        out |= {name: {**{k: section[k] for k in (kind,) if k in section}, **section}} if section else {}
    return yaml.dump(out, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)


class _Dumper(yaml.SafeDumper):
    """Sections a line a key, lists within the line."""


_Dumper.add_representer(tuple, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(list, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


# ---------------------------------------------------------------- text → tree


def _library():
    return resources.files("gradus.recipe") / "library"


def _find(name_or_path: str | Path) -> tuple[str, str, str, Path | None]:
    """(what to call it in messages, its text, the recipe's default name, the folder of a file of one's own)"""
    name, path = str(name_or_path), Path(os.path.expanduser(name_or_path))
    if name in names():
        return name, (_library() / f"{name}.yaml").read_text(encoding="utf-8"), name, None
    if path.is_dir():
        name, path = str(path / "recipe.yaml"), path / "recipe.yaml"
        if not path.is_file():
            raise UserError(f"{path.parent}: a folder without recipe.yaml is not a run. Give a packaged recipe, a .yaml file or a run folder.")
    if not path.exists():
        if path.suffix in (".yaml", ".yml", ".json") or "/" in name:
            beside = [str(p) for p in path.parent.glob("*") if p.suffix in (".yaml", ".yml", ".json")] if path.parent.is_dir() else []
            near = difflib.get_close_matches(name, beside, n=1) or difflib.get_close_matches(path.stem, names(), n=1)
            raise UserError(f"{name}: no such file." + (f" Did you mean {near[0]}?" if near else ""))
        file = next((f for f in (path.with_suffix(s) for s in (".yaml", ".yml", ".json")) if f.is_file()), None)
        hint = f" Did you mean {file}?" if file else did_you_mean(name, names())
        raise UserError(f"{name}: no such recipe.{hint} Give a packaged recipe, a .yaml or .json file, or a run folder.")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"{name}: a recipe is a .yaml, .yml or .json file, or a run folder.")
    return name, limits.read_text(path, limits.RECIPE_FILE), path.stem, path.absolute().parent


def _read(text: str, source: str, as_json: bool = False) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """The tree, its dotted keys in the order of the file, and keys that stand there twice."""
    order: list[str] = []
    found: list[Problem] = []
    try:
        node = yaml.compose(text.replace("\t", " ") if as_json else text, Loader=yaml.SafeLoader)  # JSON may be indented by tabs
        if node is None:
            raise UserError(f"{source}: the file is empty. A recipe has the sections {', '.join(required())} and more.")
        tree = _tree(node, "", order, found, (), itertools.count(1))
    except (yaml.YAMLError, RecursionError) as e:
        raise UserError(f"{source}: {_syntax(e)}") from None
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "nothing but null" if tree is None else f"only {show(tree)}"
        raise UserError(f"{source}: expected sections such as {', '.join(required())}, got {what}.")
    return {k: {} if v is None and is_section(k) and k != "tokenizer" else v for k, v in tree.items()}, order, found


def _syntax(e: yaml.YAMLError | RecursionError) -> str:
    if isinstance(e, RecursionError):
        return f"not a recipe: nested deeper than {limits.DEPTH} levels."
    mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
    what = getattr(e, "problem", None) or getattr(e, "reason", None) or "cannot be read"
    return f"{f'line {mark.line + 1}, column {mark.column + 1}: ' if mark else ''}not valid YAML: {what}."


def _tree(node: yaml.Node, path: str, order: list[str], found: list[Problem], above: tuple[yaml.Node, ...], numbers: Iterator[int]) -> Any:
    """Plain values. numbers: counts the nodes, aliases written out."""
    if node in above or not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
        what = "an alias of itself" if node in above else f"the tag {node.tag} means nothing here"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    if len(above) > limits.DEPTH or next(numbers) > limits.RECIPE_NODES:
        what = f"nested deeper than {limits.DEPTH} levels" if len(above) > limits.DEPTH else f"more than {limits.RECIPE_NODES:,} values"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in NULLS:
            return None
        if node.style is None and node.value.lower() in (".nan", ".inf", "-.inf", "+.inf"):
            return node.value.replace(".", "")
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON writes one character as two surrogates
    if isinstance(node, yaml.SequenceNode):
        return [_tree(child, path, [], found, (*above, node), numbers) for child in node.value]
    tree, lines = {}, {}
    for key_node, child in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key_node.start_mark)
        key, line = key_node.value, key_node.start_mark.line + 1
        below = f"{path}.{key}" if path else key
        if key in tree:
            found.append(Problem(below, f"given twice, in lines {lines[key]} and {line}. Keep one."))
            continue
        order.append(below)
        lines[key] = line
        tree[key] = _tree(child, below, order, found, (*above, node), numbers)
    return tree


# ---------------------------------------------------------------- where inputs lie

_ABSENT: dict[str, list[Path]] = {}  # a relative path that is nowhere → where it was looked for, for the message of who opens it


def _find_inputs(raw: dict[str, Any], folder: Path | None) -> None:
    """Relative paths become absolute, so that a run can be resumed from any folder; what is nowhere (a name on the hub, say) stays."""
    for key in INPUTS:
        value = get(raw, key)
        if not isinstance(value, str) or value.startswith("hf:") or not value or (path := Path(os.path.expanduser(value))).is_absolute():
            continue
        tried = list(dict.fromkeys(Path(os.path.normpath(base / path)) for base in (Path.cwd(), folder or Path.cwd())))
        try:
            place = next((p for p in tried if p.exists()), None)
        except (OSError, ValueError):  # too long, a zero byte: told where it is opened
            continue
        if place is None:
            _ABSENT[str(path)] = tried
        else:
            _put(raw, key, str(place))


def looked_for(path: str | Path) -> str:
    """' (looked for A and B)': where a relative path of a recipe is not; for others nothing."""
    tried = _ABSENT.get(str(Path(os.path.expanduser(path))))
    return f" (looked for {' and '.join(map(str, tried))})" if tried else ""


# ---------------------------------------------------------------- overrides


def _parse(overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """`a.b=value` → {"a.b": value}; a value in brackets is read as YAML unless the key holds text. And what cannot be read."""
    given: dict[str, Any] = {}
    found: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            plain = key.lstrip("-").replace("-", "_")
            hint = f" Write {plain}={value or 'VALUE'}." if fields_of(plain) else ""
            found.append(Problem(text, f"not of the form section.key=value.{hint}"))
            continue
        if value[:1] in ("[", "{") and not holds_text(key):
            try:
                parsed = _tree(yaml.compose(value, Loader=yaml.SafeLoader), key, [], found, (), itertools.count(1))
            except (yaml.YAMLError, RecursionError) as e:
                found.append(Problem(text, _syntax(e)))
                continue
        else:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            parsed = value[1:-1] if quoted else None if value in NULLS else value
        given |= _flat(key, parsed)
    return given, found


def _arguments(more: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in more.items():
        given |= _flat(key, _plain(value))
    return given


def _plain(value: Any) -> Any:
    """Python's values as a file would hold them: true and false are words for the schema to type, not the numbers 1 and 0."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, Path) else value


def _flat(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, below in value.items() for k, v in _flat(f"{path}.{key}", below).items()}
    return {path: value}


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys that say something, sections before what is in them."""
    for key, value in tree.items():
        if value is not None:
            yield above + key
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *above, key = path.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if value is None and path not in ("tokenizer",) and is_section(path):
        tree[key] = {}
    elif value is None and unsettable(path):
        tree.pop(key, None)
    else:
        tree[key] = value


def _remove(tree: dict[str, Any], path: str) -> None:
    *above, key = path.split(".")
    for part in above:
        tree = tree.get(part, {})
    tree.pop(key, None)


def _switch(raw: dict[str, Any], given: Mapping[str, Any], source: str, notes: list[str]) -> list[Problem]:
    """Take out of the file's tree what the overrides put another thing in the place of."""

    def leave_out(section: str, keys: Iterable[str], why: str) -> None:
        out = {key: raw[section].pop(key) for key in list(keys)}
        if out:
            notes.append(f"{source}: {', '.join(f'{section}.{k}={said(v)}' for k, v in out.items())} left out: {why}")

    for pair in EXCLUSIVE:
        for path, other in (pair, pair[::-1]):
            section, key = other.split(".")
            if given.get(path) is not None and other not in given and get(raw, other) is not None:
                leave_out(section, [key], f"{path}={said(given[path])} takes its place")
    for section in Recipe.model_fields:
        kind, knows = kinds_of(section)
        new, file = given.get(f"{section}.{kind}"), raw.get(section)
        if not isinstance(new, str) or new not in knows or not isinstance(file, dict):
            continue
        old = file.get(kind) or (None if discriminator(section) else classes_of(section)[None].model_fields[kind].default)
        if section == "model" and old is None:
            old = _expand(file.get("preset")).get("family")
        if old == new:
            continue
        why = f"unknown with {section}.{kind}={new}"
        leave_out(section, [k for k in file if k in knows.get(old, ()) and k not in knows[new] and k != kind], why)
        if section == "model" and "preset" in file and "model.preset" not in given:
            leave_out("model", ["preset"], f"it is a preset of {old}")
    preset, model = given.get("model.preset"), raw.get("model")
    if preset is None or not isinstance(model, dict) or preset == model.get("preset"):
        return []
    if model.get("init") is not None and "model.init" not in given:
        text = (
            f"the recipe starts from model.init={model['init']}, whose configuration holds. Set model.init too, or model.init=null to start afresh."
        )
        return [Problem("model.preset", text)]
    known = knows_model.model_fields if (knows_model := classes_of("model").get(_expand(preset).get("family"))) else {}
    leave_out("model", [k for k in model if k not in NOT_ARCHITECTURE or k not in known], f"model.preset={preset} says what holds")
    return []


def _architecture(raw: dict[str, Any], given: Mapping[str, Any], configure: Callable | None, notes: list[str]) -> tuple[bool, list[Problem]]:
    """Fill the model section from the configuration of model.init, or from model.preset. Returns whether its sizes are known, and problems."""
    model = raw.get("model")
    if not isinstance(model, dict):
        return True, []
    init, asked_size = model.get("init"), "model.preset" in given or "model.family" in given
    try:
        fields = configure(init) if configure and isinstance(init, str) else None
    except UserError as e:
        return True, [Problem("model.init", re.sub(r"^model\.init[:=] ?", "", str(e)))]
    if fields is not None:
        fields = _plain({k: v for k, v in fields.items() if k not in ("preset", "init", *HEAD)})
        theirs = {**fields, "preset": "its own configuration"}
        clash = [k for k in model if f"model.{k}" in given and k not in NOT_ARCHITECTURE and k in theirs and not same(theirs[k], model[k])]
        trouble = [Problem(f"model.{k}", f"cannot take effect: model.init={init} has {said(theirs[k])}. Leave it out.") for k in clash]
        other = [k for k in model if k not in (*clash, *NOT_ARCHITECTURE) and k in theirs and not same(theirs[k], model[k])]
        if other:
            notes.append(f"{', '.join(f'model.{k}={said(model[k])}' for k in other)} left out: the configuration of model.init={init} holds")
        misspelt = {k: v for k, v in model.items() if not fields_of(f"model.{k}")}
        adopted = adopt(raw, fields)["model"]
        usual = {k: f.default for k, f in classes_of("model")[adopted["family"]].model_fields.items() if k != "family" and f"model.{k}" not in given}
        raw["model"] = {**misspelt, **{k: v for k, v in adopted.items() if k not in usual or v != usual[k]}}  # a default is asked for by nobody
        return True, trouble
    if isinstance(model.get("preset"), str):
        try:
            raw["model"] = {k: v for k, v in presets.expand(model).items() if k in model or k not in HEAD}
        except UserError as e:
            return True, [Problem("model.preset", re.sub(r"^model(\.preset)?[:=] ?", "", str(e)))]
        if given.get("model.init") is not None and not asked_size:
            notes.append(f"model.preset={raw['model'].pop('preset')} left out: the configuration of model.init={init} holds")
    return given.get("model.init") is None or asked_size, []


def _expand(preset: Any) -> dict[str, Any]:
    """The fields of a preset; none where there is no such preset (which is reported elsewhere)."""
    try:
        return presets.expand({"preset": preset}) if isinstance(preset, str) else {}
    except UserError:
        return {}


# ---------------------------------------------------------------- tree → sections


@cache
def _adapter(section: str) -> TypeAdapter:
    field = Recipe.model_fields[section]
    annotation = field.rebuild_annotation()
    return TypeAdapter(Annotated[annotation, Field(discriminator=field.discriminator)] if field.discriminator else annotation)


def _sections(raw: dict[str, Any], broken: Iterable[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Every section that is sound, and what is wrong with the others."""
    sections: dict[str, Any] = {}
    found = [unknown_key("", key, raw) for key in raw if key not in Recipe.model_fields]
    for name, field in Recipe.model_fields.items():
        if name in broken:
            continue
        if name not in raw:
            if field.is_required():
                found.append(Problem(name, f"missing. {needs(name)}"))
            else:
                sections[name] = field.default
            continue
        value = raw[name]
        if is_section(name) and not isinstance(value, dict) and value is not None:
            kind, knows = kinds_of(name)
            hint = f" Did you mean {name}.{kind}={value}?" if isinstance(value, str) and value in knows else ""
            found.append(Problem(name, f"expected keys, got {show(value)}.{hint or ' ' + needs(name)}"))
            continue
        try:
            sections[name] = _adapter(name).validate_python(value)
        except ValidationError as e:
            errors = e.errors()
            if errors[0]["type"] == "union_tag_invalid":  # tell what else is wrong with what was probably meant
                key, known = kinds_of(name)
                near = difflib.get_close_matches(str(value[key]), list(known), n=1)
                if near:
                    others = _sections({**raw, name: {**value, key: near[0]}}, broken=set(Recipe.model_fields) - {name})[1]
                    found += [p for p in others if not p.text.startswith(("missing", "unknown key with"))]
            if [_whole_number(raw, name, error) for error in errors].count(True):  # 1e6 for 1000000
                return _sections(raw, broken)
            found += [explain(name, error, raw) for error in errors]
            unknown = [error["loc"][-1] for error in errors if error["type"] == "extra_forbidden"]
            if len(unknown) == len(errors):  # the rest can still be held against the other sections
                with contextlib.suppress(ValidationError):
                    sections[name] = _adapter(name).validate_python({k: v for k, v in value.items() if k not in unknown})
    meant = " ".join(p.text for p in found)
    return sections, [
        p for p in dict.fromkeys(found) if not (p.text.startswith("missing") and re.search(rf"(mean|is) {re.escape(p.path)}[.?]", meant))
    ]


def _whole_number(raw: dict[str, Any], section: str, error: Any) -> bool:
    value = as_number(error["input"]) if error["type"] == "int_parsing" else None
    path = ".".join([section, *map(str, error["loc"][1 if discriminator(section) else 0 :])])
    if value is None or not math.isfinite(value) or value != int(value) or not isinstance(get(raw, path), str):
        return False
    _put(raw, path, int(value))
    return True
