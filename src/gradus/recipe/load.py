"""A recipe from a name, a file or a run folder and `key=value` overrides, and back to text. Every problem is told at once, a line each.

Scalars are read as text, and the schema says what they are: `lr: 1e-4` is a number, `source: no` is Norwegian, `compile: none` is a word.
Only null (or nothing at all) is special: it unsets a key.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from gradus.errors import UserError, did_you_mean
from gradus.recipe import check
from gradus.recipe.check import Problem, validate  # noqa: F401  (validate is part of this module's face)
from gradus.recipe.schema import Recipe, Section

NULLS = ("", "~", "null", "Null", "NULL")
EXCLUSIVE = (("train.steps", "train.epochs"), ("batch.samples", "batch.tokens"))
NOT_ARCHITECTURE = ("init", "dropout", "head", "n_classes", "patches")  # what a recipe says about a model whatever its size
# Sections whose keys depend on one of them though the schema holds them in one class: kind -> the keys it knows.
DEPENDENT = {
    "schedule": ("name", {"constant": {"warmup_steps"}, "linear": {"warmup_steps", "final", "end_step"},
                          "cosine": {"warmup_steps", "final", "end_step"}, "noam": {"warmup_steps", "factor"}}),
    "tokenizer": ("kind", {"char": {"shared"}, "word": {"lowercase", "shared"}, "byte": {"shared"},
                           "bpe": {"vocab_size", "lowercase", "shared"}, "file": {"path", "shared"}}),
}  # fmt: skip
ELSEWHERE = {  # names from other tools
    "learning_rate": "optimizer.lr", "batch_size": "batch.samples", "max_steps": "train.steps", "num_epochs": "train.epochs",
    "warmup": "schedule.warmup_steps", "grad_clip": "train.clip_norm", "max_grad_norm": "train.clip_norm", "num_workers": "data.workers",
    "accumulation": "layout.micro_batch", "gradient_accumulation_steps": "layout.micro_batch", "dtype": "layout.precision",
    "fp16": "layout.precision", "bf16": "layout.precision", "hidden_size": "model.d_model", "block_size": "model.seq_len", "output_dir": "log.dir",
}  # fmt: skip


# ---------------------------------------------------------------- the face


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
    configure: Callable[[str], Mapping[str, Any] | None] | None = None,
    **more: Any,
) -> Recipe:
    """A recipe: the packaged one of that name, a .yaml, .yml or .json file, or the recipe.yaml of a run folder.

    overrides: `section.key=value`, as on the command line; null unsets. `more`: the same as Python values, by section
    (`train={"steps": 5}`) or dotted key (`**{"train.steps": 5}`); overrides win over them, both win over the file.
    notes: a list that receives what overrides made meaningless in the file and was therefore left out.
    configure: from model.init, the configuration that comes with the weights (None: not to be had); it replaces the
    architecture, see `adopt`. Without it, the architecture in the result is a stand-in where model.init is overridden.

    Raises UserError with one line a problem, in the order of the file, then of the overrides.
    """
    notes = [] if notes is None else notes
    source, text, stem = _find(name_or_path)
    raw, order, found = _read(text, source, as_json=source.endswith(".json"))
    arguments, (flags, malformed) = _arguments(more), _parse(overrides)
    given = {**arguments, **flags}
    labels = {**dict.fromkeys(arguments, "argument"), **dict.fromkeys([*flags, *(p.path for p in malformed)], "command line")}

    found += malformed
    found += _switch(raw, given, source, notes)
    for path, value in given.items():
        _put(raw, path, value)
    for path in [p for p, value in given.items() if value is None and p.count(".") == 1 and _fields(p)]:
        if not _has(*path.split("."), raw):  # to unset what this kind does not know anyway is no mistake
            _remove(raw, path)
    raw.setdefault("name", stem)
    sizes_known, trouble = _architecture(raw, given, configure, notes)
    found += trouble
    while True:
        sections, trouble = _sections(raw, broken={p.path.split(".")[0] for p in found if p.path.startswith("model.preset")})
        doubtful = {p.path.split(".")[0] for p in trouble if p.text.startswith("unknown key")}  # what was meant might give effect
        conflicts = check.problems(sections, set(_leaves(raw)), sizes_known)
        trouble += [p for p in conflicts if not any(b.split(".")[0] in doubtful for b in p.because)]
        # What the file says and an override robbed of its effect goes; what was asked for in vain is an error.
        robbed = [p for p in trouble if p.path not in given and any(b in given for b in p.because) and _get(raw, p.path) is not None]
        for p in robbed:
            notes.append(f"{source}: {p.path}={_said(_get(raw, p.path))} left out: it {p.text.split('. ')[0].rstrip('.')}")
            _remove(raw, p.path)
        if not robbed:
            break
    found += trouble
    if found:
        raise UserError("\n".join(_lines(found, source, order, labels)))
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
        raise UserError("\n".join(_lines(found, source, list(_leaves(raw)), {})))
    return recipe


def adopt(recipe: Mapping[str, Any], config_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a recipe with the architecture of another model: `config_fields` (with `family`) replace the model section, except
    what is no matter of size: init, dropout, head, n_classes, patches. Fields that do not exist in that family are left out."""
    old = {k: v for k, v in (recipe.get("model") or {}).items() if k in NOT_ARCHITECTURE and v is not None}
    new = {k: v for k, v in config_fields.items() if k not in ("preset", "init")}
    known = _classes("model")[new["family"]].model_fields
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
        kind = _discriminator(name) or DEPENDENT.get(name, ("",))[0]
        out |= {name: {**{k: section[k] for k in (kind,) if k in section}, **section}} if section else {}
    return yaml.dump(out, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)


class _Dumper(yaml.SafeDumper):
    """Sections a line a key, lists within the line."""


_Dumper.add_representer(tuple, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(list, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


# ---------------------------------------------------------------- text → tree


def _library():
    return resources.files("gradus.recipe") / "library"


def _find(name_or_path: str | Path) -> tuple[str, str, str]:
    """(what to call it in messages, its text, the recipe's default name)"""
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in names():
        return name, (_library() / f"{name}.yaml").read_text(encoding="utf-8"), name
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
    try:
        return name, path.read_text(encoding="utf-8"), path.stem
    except UnicodeDecodeError as e:
        raise UserError(f"{name}: not a text file in UTF-8 (byte {e.start}).") from None
    except OSError as e:
        raise UserError(f"{name}: cannot be read: {e.strerror}.") from None


def _read(text: str, source: str, as_json: bool = False) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """The tree, its dotted keys in the order of the file, and keys that stand there twice."""
    order: list[str] = []
    found: list[Problem] = []
    try:
        node = yaml.compose(text.replace("\t", " ") if as_json else text, Loader=yaml.SafeLoader)  # JSON may be indented by tabs
        if node is None:
            raise UserError(f"{source}: the file is empty. A recipe has the sections {', '.join(_required())} and more.")
        tree = _tree(node, "", order, found, ())
    except yaml.YAMLError as e:
        raise UserError(f"{source}: {_syntax(e)}") from None
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "nothing but null" if tree is None else f"only {_show(tree)}"
        raise UserError(f"{source}: expected sections such as {', '.join(_required())}, got {what}.")
    return {k: {} if v is None and _is_section(k) and k != "tokenizer" else v for k, v in tree.items()}, order, found


def _syntax(e: yaml.YAMLError) -> str:
    mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
    what = getattr(e, "problem", None) or getattr(e, "reason", None) or "cannot be read"
    return f"{f'line {mark.line + 1}, column {mark.column + 1}: ' if mark else ''}not valid YAML: {what}."


def _tree(node: yaml.Node, path: str, order: list[str], found: list[Problem], above: tuple[yaml.Node, ...]) -> Any:
    if node in above or not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
        what = "an alias of itself" if node in above else f"the tag {node.tag} means nothing here"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in NULLS:
            return None
        if node.style is None and node.value.lower() in (".nan", ".inf", "-.inf", "+.inf"):
            return node.value.replace(".", "")
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON writes one character as two surrogates
    if isinstance(node, yaml.SequenceNode):
        return [_tree(child, path, [], found, (*above, node)) for child in node.value]
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
        tree[key] = _tree(child, below, order, found, (*above, node))
    return tree


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
            hint = f" Write {plain}={value or 'VALUE'}." if _fields(plain) else ""
            found.append(Problem(text, f"not of the form section.key=value.{hint}"))
            continue
        if value[:1] in ("[", "{") and not _holds_text(key):
            try:
                parsed = _tree(yaml.compose(value, Loader=yaml.SafeLoader), key, [], found, ())
            except yaml.YAMLError as e:
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


def _get(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *above, key = path.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if value is None and path not in ("tokenizer",) and _is_section(path):
        tree[key] = {}
    elif value is None and _unsettable(path):
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
            notes.append(f"{source}: {', '.join(f'{section}.{k}={_said(v)}' for k, v in out.items())} left out: {why}")

    for pair in EXCLUSIVE:
        for path, other in (pair, pair[::-1]):
            section, key = other.split(".")
            if given.get(path) is not None and other not in given and _get(raw, other) is not None:
                leave_out(section, [key], f"{path}={_said(given[path])} takes its place")
    for section in Recipe.model_fields:
        kind, knows = _kinds(section)
        new, file = given.get(f"{section}.{kind}"), raw.get(section)
        if new not in knows or not isinstance(file, dict):
            continue
        old = file.get(kind) or (None if _discriminator(section) else _classes(section)[None].model_fields[kind].default)
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
    known = knows_model.model_fields if (knows_model := _classes("model").get(_expand(preset).get("family"))) else {}
    leave_out("model", [k for k in model if k not in NOT_ARCHITECTURE or k not in known], f"model.preset={preset} says what holds")
    return []


def _architecture(raw: dict[str, Any], given: Mapping[str, Any], configure: Callable | None, notes: list[str]) -> tuple[bool, list[Problem]]:
    """Fill the model section from the configuration of model.init, or from model.preset. Returns whether its sizes are known, and problems."""
    from gradus.recipe import presets

    model = raw.get("model")
    if not isinstance(model, dict):
        return True, []
    init, asked_size = model.get("init"), "model.preset" in given or "model.family" in given
    fields = configure(init) if configure and isinstance(init, str) else None
    if fields is not None:
        fields = _plain(dict(fields))
        clash = [k for k in model if f"model.{k}" in given and k not in NOT_ARCHITECTURE and k in fields and not _same(fields[k], model[k])]
        trouble = [Problem(f"model.{k}", f"cannot take effect: model.init={init} has {k}={_show(fields[k])}. Leave it out.") for k in clash]
        other = [k for k in model if k not in (*clash, *NOT_ARCHITECTURE) and not _same(fields.get(k), model[k]) and (k in fields or k == "preset")]
        if other:
            notes.append(f"{', '.join(f'model.{k}={_said(model[k])}' for k in other)} left out: the configuration of model.init={init} holds")
        misspelt = {k: v for k, v in model.items() if not _fields(f"model.{k}")}
        raw["model"] = {**misspelt, **adopt(raw, fields)["model"]}
        return True, trouble
    if isinstance(model.get("preset"), str):
        try:
            raw["model"] = {**presets.expand(model)}
        except UserError as e:
            return True, [Problem("model.preset", re.sub(r"^model(\.preset)?[:=] ?", "", str(e)))]
        if given.get("model.init") is not None and not asked_size:
            notes.append(f"model.preset={raw['model'].pop('preset')} left out: the configuration of model.init={init} holds")
    return given.get("model.init") is None or asked_size, []


@cache
def _expand(preset: Any) -> dict[str, Any]:
    """The fields of a preset; none where there is no such preset (which is reported elsewhere)."""
    from gradus.recipe import presets

    try:
        return presets.expand({"preset": preset}) if isinstance(preset, str) else {}
    except UserError:
        return {}


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


def _discriminator(section: str) -> str | None:
    return Recipe.model_fields[section].discriminator


@cache
def _classes(section: str) -> dict[str | None, type[Section]]:
    """Kind -> class, for a section with kinds; {None: class} for another."""
    key = _discriminator(section)
    classes = [c for c in _inner(Recipe.model_fields[section].annotation) if _is_class(c)]
    return {c.model_fields[key].default if key else None: c for c in classes}


@cache
def _kinds(section: str) -> tuple[str | None, dict[str, set[str]]]:
    """(the key that says the kind, kind -> known keys); (None, {}) for a section without kinds."""
    if section in DEPENDENT:
        key, knows = DEPENDENT[section]
        return key, {kind: {key, *keys} for kind, keys in knows.items()}
    key = _discriminator(section)
    return key, {kind: set(c.model_fields) for kind, c in _classes(section).items()} if key else {}


@cache
def _adapter(section: str) -> TypeAdapter:
    field = Recipe.model_fields[section]
    annotation = field.rebuild_annotation()
    return TypeAdapter(Annotated[annotation, Field(discriminator=field.discriminator)] if field.discriminator else annotation)


def _required() -> list[str]:
    return [name for name, field in Recipe.model_fields.items() if field.is_required()]


def _is_section(path: str) -> bool:
    return path in Recipe.model_fields and path != "name"


def _fields(path: str) -> list[FieldInfo]:
    """The fields a dotted key can mean, whatever the kinds."""
    section, *parts = path.split(".")
    if section not in Recipe.model_fields:
        return []
    fields, classes = [Recipe.model_fields[section]], list(_classes(section).values())
    for part in parts:
        fields = [c.model_fields[part] for c in classes if part in c.model_fields]
        classes = [c for f in fields for c in _inner(f.annotation) if _is_class(c)]
    return fields


def _holds_text(path: str) -> bool:
    return any(a is str or get_origin(a) is Literal for f in _fields(path) for a in _inner(f.annotation))


def _unsettable(path: str) -> bool:
    """Whether null takes the key out. Where the schema knows null it is kept, to win over a preset; an unknown key stays, to be told."""
    fields = _fields(path)
    return bool(fields) and not any(type(None) in get_args(f.annotation) for f in fields)


def _expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a key takes, in words."""
    marks = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks += more
    marks = [m for mark in marks for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    parts = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_expected(a, marks) for a in parts)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(annotation) is list:
        return f"a list [a, b, ...] of {'numbers' if parts[0] in (int, float) else 'names'}"
    if get_origin(annotation) is tuple:
        return f"a list [a, b], each {_expected(parts[0])}"
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
    return " ".join(["a whole number" if annotation is int else "a number", *([" and ".join(bounds)] if bounds else [])])


def _show(value: Any) -> str:
    """A value as in a file, cut where it is long; text that is no number stands in quotes."""
    if value is None:
        text = "nothing"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k}: {_show(v)}" for k, v in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(_show, value)) + "]"
    elif isinstance(value, str) and value not in ("true", "false") and _number(value) is None:
        text = repr(value)
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _said(value: Any) -> str:
    """A value as after `key=`."""
    return value if isinstance(value, str) else _show(value)


def _same(a: Any, b: Any) -> bool:
    return str(a) == str(b) or (_number(a) is not None and _number(a) == _number(b))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# ---------------------------------------------------------------- tree → sections


def _sections(raw: dict[str, Any], broken: Iterable[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Every section that is sound, and what is wrong with the others."""
    sections: dict[str, Any] = {}
    found = [_unknown("", key, raw) for key in raw if key not in Recipe.model_fields]
    for name, field in Recipe.model_fields.items():
        if name in broken:
            continue
        if name not in raw:
            if field.is_required():
                found.append(Problem(name, f"missing. {_needs(name)}"))
            else:
                sections[name] = field.default
            continue
        value = raw[name]
        if _is_section(name) and not isinstance(value, dict) and value is not None:
            kind, knows = _kinds(name)
            hint = f" Did you mean {name}.{kind}={value}?" if isinstance(value, str) and value in knows else ""
            found.append(Problem(name, f"expected keys, got {_show(value)}.{hint or ' ' + _needs(name)}"))
            continue
        try:
            sections[name] = _adapter(name).validate_python(value)
        except ValidationError as e:
            errors = e.errors()
            if errors[0]["type"] == "union_tag_invalid":  # tell what else is wrong with what was probably meant
                key, kinds = _kinds(name)
                near = difflib.get_close_matches(str(value[key]), list(kinds), n=1)
                if near:
                    found += _sections({**raw, name: {**value, key: near[0]}}, broken=set(Recipe.model_fields) - {name})[1]
            if [_whole_number(raw, name, error) for error in errors].count(True):  # 1e6 for 1000000
                return _sections(raw, broken)
            found += [_explain(name, error, raw) for error in errors]
            unknown = [error["loc"][-1] for error in errors if error["type"] == "extra_forbidden"]
            if len(unknown) == len(errors):  # the rest can still be held against the other sections
                with contextlib.suppress(ValidationError):
                    sections[name] = _adapter(name).validate_python({k: v for k, v in value.items() if k not in unknown})
    meant = " ".join(p.text for p in found)
    return sections, [
        p for p in dict.fromkeys(found) if not (p.text.startswith("missing") and re.search(rf"(mean|is) {re.escape(p.path)}[.?]", meant))
    ]


def _whole_number(raw: dict[str, Any], section: str, error: Any) -> bool:
    number = _number(error["input"]) if error["type"] == "int_parsing" else None
    path = ".".join([section, *map(str, error["loc"][1 if _discriminator(section) else 0 :])])
    if number is None or not math.isfinite(number) or number != int(number) or not isinstance(_get(raw, path), str):
        return False
    _put(raw, path, int(number))
    return True


def _needs(section: str) -> str:
    kind, knows = _kinds(section)
    if kind and _discriminator(section):
        return f"It needs {section}.{kind}: {', '.join(knows)}."
    return f"It has the keys {', '.join(c for c in _classes(section)[None].model_fields)}." if _classes(section) else ""


def _explain(section: str, error: Any, raw: dict[str, Any]) -> Problem:
    """A problem in our words from one of pydantic's errors."""
    kind, loc = error["type"], list(error["loc"])
    key = _discriminator(section)
    if kind == "union_tag_not_found":
        return Problem(f"{section}.{key}", f"missing. Give one of {', '.join(_classes(section))}.")
    if kind == "union_tag_invalid":
        tag = _get(raw, f"{section}.{key}")
        return Problem(f"{section}.{key}", f"no such {section}: {_show(tag)}.{did_you_mean(tag, _classes(section))}")
    if key:
        loc = loc[1:]
    classes = _classes(section)
    owner = classes.get(_get(raw, f"{section}.{key}") if key else None)
    parts, field = [section], Recipe.model_fields[section]
    for part in loc:
        if isinstance(part, int) or owner is None:
            break
        parts.append(part)
        if part not in owner.model_fields:
            return _unknown(".".join(parts[:-1]), part, raw, owner)
        field = owner.model_fields[part]
        owner = next((c for c in _inner(field.annotation) if _is_class(c)), None)
    path = ".".join(parts)
    if kind == "value_error":
        return Problem(path, f"{error['ctx']['error']}.")
    expected = _expected(field.annotation, field.metadata)
    if kind == "missing":
        return Problem(path, f"missing. Give {expected}.")
    value = _get(raw, path)
    if kind == "finite_number":
        return Problem(path, f"must be a finite number, got {_show(value)}.")
    near = did_you_mean(value, get_args(_inner(field.annotation)[0])) if expected.startswith("one of") and isinstance(value, str) else ""
    unset = " Use null to unset it." if isinstance(value, str) and value.lower() == "none" and not near else ""
    return Problem(path, f"expected {expected}, got {_show(value)}.{near if 'Did you' in near else ''}{unset}")


def _unknown(above: str, key: str, raw: dict[str, Any], owner: type[Section] | None = None) -> Problem:
    """An unknown key: where it belongs, or what is nearest to it."""
    path, section = (f"{above}.{key}" if above else key), above.split(".")[0]
    known = list(owner.model_fields if owner else Recipe.model_fields)
    if not above and "." in key and _fields(key):
        first, rest = key.split(".", 1)
        return Problem(path, f"unknown key. In a file, write it inside its section: {first}: {{{rest}: ...}}.")
    if above and section == above and _discriminator(section):
        kind = _discriminator(section)
        others = [name for name, c in _classes(section).items() if key in c.model_fields]
        if others:
            return Problem(path, f"unknown key with {section}.{kind}={_get(raw, f'{section}.{kind}')}. It is for {', '.join(others)}.")
    elsewhere = [f"{s}.{key}" for s in Recipe.model_fields if s != section and key != _kinds(s)[0] and _has(s, key, raw)]
    elsewhere += [key] if above and _is_section(key) else []
    if not elsewhere and key in ELSEWHERE:
        elsewhere = [ELSEWHERE[key]]
    if elsewhere:
        return Problem(path, f"unknown key. It is {' or '.join(elsewhere)}.")
    near = did_you_mean(key, known)
    return Problem(path, f"unknown key.{near.replace('Did you mean ', f'Did you mean {above}.' if above else 'Did you mean ', 1)}")


def _has(section: str, key: str, raw: dict[str, Any]) -> bool:
    """Whether the section, of the kind it has in this recipe, knows the key."""
    classes, kind = _classes(section), _discriminator(section)
    of_kind = classes.get(_get(raw, f"{section}.{kind}")) if kind else None
    return any(key in c.model_fields for c in ([of_kind] if of_kind else classes.values()))


def _lines(found: list[Problem], source: str, order: list[str], labels: Mapping[str, str]) -> list[str]:
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
