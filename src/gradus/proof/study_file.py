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
from gradus.proof.harness import exit_code, label, run
from gradus.proof.study import Configuration, ReferenceHardware, Study, with_fixed_threads
from gradus.proof.study_store import keep
from gradus.rows import Row
from gradus.train import resolve

Count = Annotated[int, Field(ge=1, le=limits.STEPS)]
Processes = Annotated[int, Field(ge=1, le=limits.PROCESSES)]
Figure = Annotated[float, Field(ge=0, le=limits.FIGURE, allow_inf_nan=False)]
MANY = 20  # configurations from which on their number is printed first
OF_A_RECIPE = ("steps", "loader", "train", "none")  # runners


class Settings(BaseModel):
    """Settings of one configuration, of all that have a name on an axis, or of the whole study. `set` is added to that
    of the outer levels."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str | None = Field(None, description="a packaged recipe, a file beside this one, or a run folder")
    set: list[str] = Field([], description="key=value, as after gradus train RECIPE")
    runner: str | None = Field(
        None,
        description="steps (default), loader, train, none (planned only), or FILE.py:FUNCTION beside this file",
    )
    processes: Processes | None = Field(None, description="how many (default 1)")
    options: dict[str, Any] = Field({}, description="for your own runner")
    source: dict[str, Figure] = Field(
        {}, description="what a source says: row of the table → value, in s, bytes or samples/s"
    )
    source_devices: str | None = Field(
        None, description="of the source, as gradus plan --on has them; planned for these too"
    )
    source_set: list[str] = Field(
        [], description="key=value that holds for the plan on the source's devices alone"
    )
    source_price: Figure | None = Field(
        None, description="USD per hour of all these devices: the plan's cost of an epoch"
    )
    against: str | None = Field(None, description="the name that ratios are against (default: the first)")
    only_with: list[str] = Field([], description="in a grid: only with these names of the other axes")


class StudyFile(Settings):
    configurations: dict[str, Settings | None] = Field({}, description="name: settings")
    grid: dict[str, dict[str, Settings | None]] = Field(
        {}, description="axis: {name: settings}; every combination is a configuration"
    )
    steps: Count = Field(10, description="steps that are timed in a round")
    warm_up: Annotated[int, Field(ge=0, le=limits.STEPS)] = Field(3, description="steps before them")
    rounds: Annotated[int, Field(ge=1, le=limits.ROUNDS)] = Field(
        3, description="rounds, each with every configuration"
    )
    seeds: list[Annotated[int, Field(ge=0, le=limits.SEED)]] = Field(
        [], description="of whole trainings: one round for each"
    )
    plan: bool = Field(True, description="also say before what each will take")
    columns: list[str] = Field([], description="rows to show (default: all that are known)")
    about: str = Field(
        "", description="Markdown: what is above the table on a page of its own, its first line the title"
    )
    note: str = Field("", description="Markdown: what is below the table")


class _Reader(yaml.SafeLoader):
    """1e9 is a number, as in YAML 1.2; each key is given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is given twice. Keep one", problem_mark=key.start_mark
                )
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


# ------------------------------------------------------------ reading


def load(
    path: Path, overrides: Sequence[str] = (), rounds: int | None = None, steps: int | None = None
) -> tuple[Study, StudyFile]:
    """The study in a file. overrides: of every recipe. Raises UserError."""
    file = read(path)
    axes = file.grid or {"configuration": file.configurations}
    check_names(path, file, axes)
    cells = combinations(path, axes)
    configurations = [configuration(path, [file, *settings], at, overrides) for at, settings in cells]
    check_labels(path, configurations)
    trainings = all(c.runner == "train" for c in configurations)
    if len(set(file.seeds)) < len(file.seeds):
        raise UserError(f"{path}: seeds={file.seeds}: give each once.")
    if file.seeds and not trainings:
        raise UserError(f"{path}: seeds are of whole trainings. Set runner: train, or rounds instead of seeds.")
    if trainings and not file.seeds and "rounds" not in file.model_fields_set:
        file.rounds = 1
    steps, rounds = steps or file.steps, rounds or file.rounds
    study = Study(path.stem, configurations, steps, file.warm_up, rounds, file.seeds, plan=file.plan)
    for c in configurations:
        study.base_of(c)
    return study, file


def read(path: Path) -> StudyFile:
    """Raises UserError for what is no study file."""
    content = limits.parse_yaml(limits.read_text(path, limits.RECIPE_FILE), path, _Reader)
    if not isinstance(content, dict):
        keys = ", ".join(StudyFile.model_fields)
        raise UserError(f"{path}: expected keys: configurations or grid, and {keys}.")
    try:
        file = StudyFile.model_validate(content)
    except ValidationError as e:
        raise UserError("\n".join(f"{path}: {_wrong(error)}" for error in e.errors())) from None
    if bool(file.configurations) == bool(file.grid):
        raise UserError(f"{path}: give configurations or grid{', not both' if file.grid else ''}.")
    return file


def _wrong(error: Any) -> str:
    """One of pydantic's errors in a line."""
    location = error["loc"] or ("keys",)  # of a key that is no text
    dotted, key = ".".join(map(str, location)), str(location[-1])
    if error["type"] == "extra_forbidden":
        known = StudyFile.model_fields if len(location) == 1 else Settings.model_fields
        return f"{dotted}: unknown key." + (did_you_mean(key, known) or f" Known: {', '.join(known)}.")
    field = StudyFile.model_fields.get(str(location[0]))
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{dotted}: {message}" + (f" ({field.description})" if field else "")


Axes = dict[str, dict[str, Settings | None]]  # axis → name → settings


def check_names(path: Path, file: StudyFile, axes: Axes) -> None:
    """Raises UserError for a name that cannot be one, is on two axes, or is meant and is not there."""
    names = [name for axis in axes.values() for name in axis]
    for name in (name for name in names if not name.strip() or not name.isprintable()):
        raise UserError(f"{path}: {name!r}: not a name. Write one on one line.")
    settings = [file, *(cell for axis in axes.values() for cell in axis.values() if cell)]
    by_setting = ([*(("only_with", name) for name in s.only_with), ("against", s.against)] for s in settings)
    for key, name in itertools.chain.from_iterable(by_setting):
        if name not in (None, *names):
            raise UserError(f"{path}: {key}={name}: no such name.{did_you_mean(name, names)}")
        if key == "only_with" and (not file.grid or file.only_with):
            raise UserError(f"{path}: only_with takes effect only at a name of the grid. Leave it out here.")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: {twice[0]} is a name on two axes. Give each its own.")


def combinations(path: Path, axes: Axes) -> list[tuple[dict[str, str], list[Settings]]]:
    """(axis → name, settings) of each configuration. Raises UserError where there are none, or too many."""
    if empty := [axis for axis, names in axes.items() if not names]:
        raise UserError(f"{path}: grid.{empty[0]}: has no names. Write one, or leave it out.")
    n = math.prod(map(len, axes.values()))
    if n > limits.GRID:
        few = f"at most {limits.GRID:,}. Leave names of an axis out."
        raise UserError(f"{path}: the grid has {n:,} combinations; {few}")
    cells = []
    for names in itertools.product(*axes.values()):
        at = dict(zip(axes, names))
        settings = [axes[axis][name] or Settings() for axis, name in at.items()]
        if all(set(names).intersection(s.only_with) for s in settings if s.only_with):
            cells.append((at, settings))
    if not cells:
        raise UserError(f"{path}: only_with leaves no configuration.")
    if len(cells) > limits.CONFIGURATIONS:
        few = f"at most {limits.CONFIGURATIONS:,}. Leave names out, or use only_with."
        raise UserError(f"{path}: {len(cells):,} configurations; {few}")
    return cells


def check_labels(path: Path, configurations: Sequence[Configuration]) -> None:
    """Raises UserError where two configurations would have one folder."""
    by_label: dict[str, Configuration] = {}
    for c in configurations:
        if other := by_label.get(label(c.name)):
            clash = f"too like {other.name!r}: both would have one folder"
            if c.name == other.name:
                clash = f"the name of two configurations: {c.at} and {other.at}"
            raise UserError(f"{path}: {c.name!r} is {clash}. Rename one.")
        by_label[label(c.name)] = c


# ------------------------------------------------------------ a configuration


def configuration(
    path: Path, levels: Sequence[Settings], at: dict[str, str], overrides: Sequence[str]
) -> Configuration:
    """The configuration that these settings make: the further in a level, the more it counts. Raises UserError."""

    def last(key: str, default: Any = None) -> Any:
        return next((value for level in reversed(levels) if (value := getattr(level, key)) is not None), default)

    def merged(key: str) -> dict[str, Any]:
        return {k: v for level in levels for k, v in getattr(level, key).items()}

    name, recipe, processes, options = " · ".join(at.values()), last("recipe"), last("processes", 1), merged("options")
    runner = last("runner", "steps")
    loaded = reference = None
    try:
        if runner not in OF_A_RECIPE:
            runner = own_runner(path.parent, runner)
        elif recipe is None:
            raise UserError("no recipe. Name one, for all or for this one.")
        elif options:
            raise UserError(f"options are for your own runner; {runner} has none. Use set.")
        price = last("source_price")
        if recipe is not None:
            file, devices = path.parent / recipe, last("source_devices")
            recipe = str(file) if file.is_file() else recipe
            words = [*(word for level in levels for word in level.set), *overrides]
            loaded = with_fixed_threads(resolve.load(recipe, words)[0], processes)
            if devices is not None:
                words += [word for level in levels for word in level.source_set]
                cluster, there = hardware.cluster(devices), resolve.load(recipe, words)[0]
                reference = ReferenceHardware(devices, cluster, there, price)
        elif any(level.set for level in levels):
            raise UserError("set is of a recipe, and there is none. Name one, or use options.")
        if price is not None and not (reference and reference.recipe.data.limit):
            raise UserError("source_price is of an epoch on source_devices. Name them, and set data.limit.")
    except UserError as e:
        raise UserError(f"{path}: {name}: {e}") from None
    how = {"source": merged("source"), "reference": reference, "against": last("against")}
    return Configuration(name, loaded, at, runner, processes, options, **how)


def own_runner(folder: Path, runner: str) -> str:
    """FILE.py:FUNCTION with the whole path. Raises UserError for what is none."""
    file, _, function = runner.rpartition(":")
    if not (folder / file).is_file() or not file.endswith(".py") or not function.isidentifier():
        known = f"{', '.join(OF_A_RECIPE)}, or FILE.py:FUNCTION of a file beside it"
        raise UserError(f"runner={runner}: no such runner. Known: {known}.")
    return f"{(folder / file).resolve()}:{function}"


# ------------------------------------------------------------ the verb


def study(args: Any) -> Iterator[str]:
    """The verb. Yields what is printed; returns the exit code."""
    path = Path(args.file)
    study, file = load(path, args.overrides, args.rounds, args.steps)
    folder = Path(args.to or Path("studies") / study.name)
    around = around_table(Path(args.page), path, file) if args.page is not None else None
    only = [word.strip() for word in args.only.split(",")] if args.only is not None else []
    if "" in only:
        example = study.configurations[0].name.split()[0]
        raise UserError(f"--only={args.only}: a name is empty. Write for example --only {example}")
    if len(study.configurations) > MANY and not args.json:
        rounds = len(file.seeds) or study.rounds
        yield f"{len(study.configurations):,} configurations, {rounds:,} rounds"
    rows = run(study, folder, results.quiet if args.json else results.say, only)
    if args.json:
        yield from (row.json() for row in rows)
        return exit_code(rows)
    yield from shown(rows, file)
    yield f"rows: {folder / 'rows.jsonl'}"
    if around is not None:
        table = "\n".join(results.markdown([row.known() for row in rows], file.columns)) + "\n"
        keep(Path(args.page), table.join(around))
        yield f"page: {args.page}"
    return exit_code(rows)


def shown(rows: Sequence[Row], file: StudyFile) -> Iterator[str]:
    """The table, the file's note, and a note for each column that no row has."""
    yield from ("", *results.lines([row.known() for row in rows], file.columns), *([file.note] if file.note else []))
    known = sorted({row.name for row in rows})
    for name in (name for name in file.columns if name not in known):
        yield f"note: columns: {name}: nothing has that name.{did_you_mean(name, known)}"


def around_table(page: Path, path: Path, file: StudyFile) -> tuple[str, str]:
    """(what stands before, after) the table of a page, which is between the lines `<!-- NAME -->` and
    `<!-- end of NAME -->`; where there is no page, and the study says what it is about, of one of its own. Raises
    UserError for a page without these lines."""
    first, last = f"<!-- {path.stem} -->\n", f"<!-- end of {path.stem} -->\n"
    if not page.exists() and file.about:
        command = f"`gradus study {path.parent.name}/{path.name}` makes this table again:"
        parts = [file.about.strip(), "", command, "", first + last, file.note.strip()]
        text = "\n".join(parts).strip() + "\n"
    else:
        text = limits.read_text(page, limits.RECIPE_FILE)
    before, first_mark, rest = text.partition(first)
    _, last_mark, after = rest.partition(last)
    if not (first_mark and last_mark):
        marks = f"{first.strip()} and {last.strip()}"
        raise UserError(f"{page}: has no lines {marks}. Put them where the table belongs.")
    return before + first, last + after
