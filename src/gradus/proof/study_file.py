"""`gradus study FILE`: compare any configurations, as a YAML file says."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradus import hardware, limits
from gradus.errors import UserError, did_you_mean
from gradus.proof import results
from gradus.proof.study import RUNNERS, Configuration, Foreign, Study, exit_code, keep, label, run, steady
from gradus.train import resolve

Count = Annotated[int, Field(ge=1, le=limits.STEPS)]
MANY = 20  # configurations from which on their number is printed first


class Settings(BaseModel):
    """Of one configuration, of all that have a name on an axis, or of the whole study. `set` is added to what stands further out."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str | None = Field(None, description="a packaged recipe, a file beside this one, or a run folder")
    set: list[str] = Field([], description="key=value, as after gradus train RECIPE")
    runner: str | None = Field(None, description="steps (default), loader, train, none (planned only), or FILE.py:FUNCTION beside this file")
    processes: Annotated[int, Field(ge=1, le=limits.PROCESSES)] | None = Field(None, description="how many (default 1)")
    options: dict[str, Any] = Field({}, description="for your own runner")
    source: dict[str, Annotated[float, Field(ge=0, le=limits.FIGURE, allow_inf_nan=False)]] = Field({}, description="what a source says: row of the table → value, in s, bytes or samples/s")
    source_devices: str | None = Field(None, description="of the source, as gradus plan --on has them; planned for these too")
    source_set: list[str] = Field([], description="key=value that holds for the plan on the source's devices alone")
    against: str | None = Field(None, description="the name that ratios are against (default: the first)")
    only_with: list[str] = Field([], description="in a grid: only with these names of the other axes")


class StudyFile(Settings):
    configurations: dict[str, Settings | None] = Field({}, description="name: settings")
    grid: dict[str, dict[str, Settings | None]] = Field({}, description="axis: {name: settings}; every combination is a configuration")
    steps: Count = Field(10, description="steps that are timed in a round")
    warm_up: Annotated[int, Field(ge=0, le=limits.STEPS)] = Field(3, description="steps before them")
    rounds: Annotated[int, Field(ge=1, le=limits.ROUNDS)] = Field(3, description="rounds, each with every configuration")
    seeds: list[Annotated[int, Field(ge=0, le=limits.SEED)]] = Field([], description="of whole trainings: one round for each")
    plan: bool = Field(True, description="also say before what each will take")
    columns: list[str] = Field([], description="rows to show (default: all that are known)")
    about: str = Field("", description="Markdown: what is above the table on a page of its own, its first line the title")
    note: str = Field("", description="Markdown: what is below the table")


class _Reader(yaml.SafeLoader):
    """1e9 is a number, as in YAML 1.2; each key is given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice. Keep one", problem_mark=key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789"))


def load(path: Path, more: Sequence[str] = (), rounds: int | None = None, steps: int | None = None) -> tuple[Study, StudyFile]:
    """The study in a file. more: overrides of every recipe. Raises UserError."""
    found = limits.parse_yaml(limits.read_text(path, limits.RECIPE_FILE), path, _Reader)
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected keys: configurations or grid, and {', '.join(StudyFile.model_fields)}.")
    try:
        told = StudyFile.model_validate(found)
    except ValidationError as e:
        raise UserError("\n".join(f"{path}: {_wrong(error)}" for error in e.errors())) from None
    if bool(told.configurations) == bool(told.grid):
        raise UserError(f"{path}: give configurations or grid{', not both' if told.grid else ''}.")
    axes = told.grid or {"configuration": told.configurations}
    names = [name for axis in axes.values() for name in axis]
    for name in (name for name in names if not name.strip() or not name.isprintable()):
        raise UserError(f"{path}: {name!r}: not a name. Write one on one line.")
    for key, word in told_names([told, *(cell for axis in axes.values() for cell in axis.values() if cell)]):
        if word not in names:
            raise UserError(f"{path}: {key}={word}: no such name.{did_you_mean(word, names)}")
        if key == "only_with" and (not told.grid or told.only_with):
            raise UserError(f"{path}: only_with takes effect only at a name of the grid. Leave it out here.")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: {twice[0]} is a name on two axes. Give each its own.")
    made = [_configuration(path, told, dict(zip(axes, cell)), cells, more) for cell, cells in _combinations(path, axes)]
    of_label: dict[str, Configuration] = {}
    for c in made:
        if other := of_label.get(label(c.name)):
            what = f"the name of two configurations: {c.at} and {other.at}" if c.name == other.name else f"too like {other.name!r}: both would have one folder"
            raise UserError(f"{path}: {c.name!r} is {what}. Rename one.")
        of_label[label(c.name)] = c
    if len(set(told.seeds)) < len(told.seeds):
        raise UserError(f"{path}: seeds={told.seeds}: give each once.")
    if told.seeds and any(c.runner != "train" for c in made):
        raise UserError(f"{path}: seeds are of whole trainings. Set runner: train, or rounds instead of seeds.")
    if told.rounds and not told.seeds and all(c.runner == "train" for c in made):
        told.rounds = rounds or (told.rounds if "rounds" in told.model_fields_set else 1)
    study = Study(path.stem, made, steps or told.steps, told.warm_up, rounds or told.rounds, told.seeds, plan=told.plan)
    for c in made:
        study.base_of(c)
    return study, told


def _combinations(path: Path, axes: dict[str, dict[str, Settings | None]]) -> list[tuple[tuple[str, ...], list[Settings | None]]]:
    """(its names, their settings) of each configuration. Raises UserError where there are none, or too many."""
    if empty := [axis for axis, names in axes.items() if not names]:
        raise UserError(f"{path}: grid.{empty[0]}: has no names. Write one, or leave it out.")
    n = math.prod(map(len, axes.values()))
    if n > limits.GRID:
        raise UserError(f"{path}: the grid has {n:,} combinations; at most {limits.GRID:,}. Leave names of an axis out.")
    every = [(cell, [axes[axis][name] for axis, name in zip(axes, cell)]) for cell in itertools.product(*axes.values())]
    kept = [(cell, cells) for cell, cells in every if all(set(cell).intersection(s.only_with) for s in cells if s and s.only_with)]
    if not kept:
        raise UserError(f"{path}: only_with leaves no configuration.")
    if len(kept) > limits.CONFIGURATIONS:
        raise UserError(f"{path}: {len(kept):,} configurations; at most {limits.CONFIGURATIONS:,}. Leave names out, or use only_with.")
    return kept


def told_names(settings: Sequence[Settings]) -> Iterator[tuple[str, str]]:
    """(key, name) wherever one speaks of another."""
    for s in settings:
        yield from (("only_with", name) for name in s.only_with)
        yield from [("against", s.against)] if s.against is not None else []


def _wrong(error: Any) -> str:
    """One of pydantic's errors in a line."""
    where = error["loc"] or ("keys",)  # a key that is no text has no place
    place, key = ".".join(map(str, where)), str(where[-1])
    if error["type"] == "extra_forbidden":
        known = StudyFile.model_fields if len(where) == 1 else Settings.model_fields
        return f"{place}: unknown key." + (did_you_mean(key, known) or f" Known: {', '.join(known)}.")
    field = StudyFile.model_fields.get(str(where[0]))
    return f"{place}: {error['msg'][:1].lower()}{error['msg'][1:]}" + (f" ({field.description})" if field else "")


def _configuration(path: Path, told: StudyFile, at: dict[str, str], cells: Sequence[Settings | None], more: Sequence[str]) -> Configuration:
    levels = [told, *(cell or Settings() for cell in cells)]  # the further in, the more it counts

    def last(key: str, default: Any = None) -> Any:
        return next((value for level in reversed(levels) if (value := getattr(level, key)) is not None), default)

    name, runner, processes, recipe = " · ".join(at.values()), last("runner", "steps"), last("processes", 1), last("recipe")
    options = {k: v for level in levels for k, v in level.options.items()}
    if runner not in (*RUNNERS, "train", "none"):
        file, _, function = runner.rpartition(":")
        if not (path.parent / file).is_file() or not file.endswith(".py") or not function.isidentifier():
            known = f"{', '.join(RUNNERS)}, train, none, or FILE.py:FUNCTION of a file beside it"
            raise UserError(f"{path}: {name}: runner={runner}: no such runner. Known: {known}.")
        runner = f"{(path.parent / file).resolve()}:{function}"
    elif recipe is None:
        raise UserError(f"{path}: {name}: no recipe. Name one, for all or for this one.")
    elif options:
        raise UserError(f"{path}: {name}: options are for your own runner; {runner} has none. Use set.")
    loaded, on, foreign = None, last("source_devices"), None
    if recipe is not None:
        beside = path.parent / recipe
        words = [word for level in levels for word in level.set]
        given = [str(beside) if beside.is_file() else recipe, [*words, *more]]
        try:
            loaded = steady(resolve.load(*given)[0], processes)
            if on is not None:
                there = [word for level in levels for word in level.source_set]
                foreign = Foreign(on, hardware.cluster(on), resolve.load(given[0], [*given[1], *there])[0])
        except UserError as e:
            raise UserError(f"{path}: {name}: {e}") from None
    elif any(level.set for level in levels):
        raise UserError(f"{path}: {name}: set is of a recipe, and there is none. Name one, or use options.")
    source = {k: v for level in levels for k, v in level.source.items()}
    return Configuration(name, loaded, at, runner, processes, options, source=source, foreign=foreign, against=last("against"))


def study(args: Any) -> Iterator[str]:
    """The verb. Yields what is printed; returns the exit code."""
    path = Path(args.file)
    made, told = load(path, args.overrides, args.rounds, args.steps)
    folder = Path(args.to or Path("studies") / made.name)
    before, after = around(Path(args.page), path, told) if args.page is not None else ("", "")
    only = [word.strip() for word in args.only.split(",")] if args.only is not None else []
    if "" in only:
        raise UserError(f"--only={args.only}: a name is empty. Write for example --only {made.configurations[0].name.split()[0]}")
    if len(made.configurations) > MANY and not args.json:
        yield f"{len(made.configurations):,} configurations, {len(told.seeds) or made.rounds:,} rounds"
    rows = run(made, folder, results.quiet if args.json else results.say, only)
    if args.json:
        yield from (row.json() for row in rows)
        return exit_code(rows)
    records = [row.known() for row in rows]
    yield from ("", *results.lines(records, told.columns), *([told.note] if told.note else []))
    known = sorted({row.name for row in rows})
    for name in (name for name in told.columns if name not in known):
        yield f"note: columns: {name}: nothing has that name.{did_you_mean(name, known)}"
    yield f"rows: {folder / 'rows.jsonl'}"
    if args.page is not None:
        keep(Path(args.page), before + "\n".join(results.markdown(records, told.columns)) + "\n" + after)
        yield f"page: {args.page}"
    return exit_code(rows)


def around(page: Path, path: Path, told: StudyFile) -> tuple[str, str]:
    """What is before and after the table of a page: between the lines `<!-- NAME -->` and `<!-- end of NAME -->`. Where there is no page, and
    the study says what it is about, one of its own. Raises UserError for a page without the marks."""
    first, last = f"<!-- {path.stem} -->\n", f"<!-- end of {path.stem} -->\n"
    if not page.exists() and told.about:
        command = f"`gradus study {path.parent.name}/{path.name}` makes this table again:"
        text = "\n".join([told.about.strip(), "", command, "", first + last, told.note.strip()]).strip() + "\n"
    else:
        text = limits.read_text(page, limits.RECIPE_FILE)
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not (found and ended):
        raise UserError(f"{page}: has no lines {first.strip()} and {last.strip()}. Put them where the table belongs.")
    return before + first, last + after
