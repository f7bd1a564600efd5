"""A run folder as a report reads it: rows, summary, recipe, plan and proof. What a run did not write is absent."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradus import limits, models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.limits import CONFIG_FILE, RECIPE_FILE
from gradus.proof.results import INCOMPARABLE, MORE, MOST
from gradus.proof.timing import TAKEN
from gradus.rows import read_rows
from gradus.text import cell, short

# what a loss and a metric can stand above: its key in their rows → in words
X_AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}
COLUMNS = ("layout.precision", "processes", "train.steps")  # that a table of runs has
DIFFERENCES = 3  # keys in the name of a run
LARGEST = 1e39  # what fp32 holds is below
WORDS = {"train": "training", "valid": "validation", "lr": "learning rate", "grad_norm": "norm of the gradient"}
Amount = Annotated[float, Field(ge=0)]


class Content(BaseModel):
    """What a report takes of a JSON file; the file may hold more."""

    model_config = ConfigDict(allow_inf_nan=False, strict=True)


class Pair(Content):
    """A figure, planned and measured."""

    predicted: Amount | None = None
    measured: Amount | None = None
    batch: str = ""


class Load(Content):
    """Processors, and how many of them other programs used while a run trained."""

    processors: int | None = None
    during: Amount | None = None


class Energy(Content):
    """Of a whole run, in words."""

    text: str


class Prediction(Content):
    """A line of what `gradus predict --to` or `gradus evaluate --report` wrote."""

    input: str
    label: str | None = None  # of a class
    answer: str | None = None  # of an encoder-decoder
    filled: str | None = None  # of a masked word
    truth: str | None = None
    right: bool | None = None
    probability: float | None = None
    loss: float | None = None
    pixels: list[list[list[int]]] | None = None  # (channels, height, width)

    @property
    def cells(self) -> list[str]:
        """Input, answer, right answer, whether that is the answer, loss."""
        right = {True: "right", False: "wrong", None: ""}[self.right]
        answer = self.answer or self.label or self.filled or ""
        return [*(short(text, 120) for text in (self.input, answer, self.truth or "")), right, cell(self.loss, "")]


class Summary(Content):
    """summary.json, as train.run writes it."""

    layout: str = ""
    processes: Annotated[int, Field(ge=1, le=limits.AXIS)] = 1
    steps: Annotated[int, Field(ge=0, le=limits.STEPS)] | None = None
    epoch: Amount | None = None
    samples: Annotated[int, Field(ge=0, le=limits.FIGURE)] | None = None
    train_runtime: Amount | None = None
    train_samples_per_second: Amount | None = None
    train_loss: float | None = None
    metrics: dict[str, float | str] = {}
    proof: dict[str, Pair] = {}
    load: Load = Load()
    finished: str = ""
    energy: Energy | None = None


class Machine(Content):
    """What a report shows of a machine."""

    cpu: str = ""
    cpus_allowed: int | None = None
    cpu_flags: list[str] = []
    threads: int | None = None
    gpu: str | dict[str, Any] = ""
    device: str = ""
    memory_bytes: Amount | None = None
    os: str = ""
    python: str = ""
    versions: dict[str, str] = {}
    gradus: str = ""


class Environment(Machine):
    """environment.json, as train.run writes it."""

    command: str = ""


T = TypeVar("T", bound=Content)


def read_json(path: Path, kind: type[T], instead: str) -> T | None:
    """None where there is no such file. instead: what to do where it is damaged. Raises UserError."""
    if not path.is_file():
        return None
    try:
        content = limits.read_json(path, CONFIG_FILE)
    except UserError as e:
        raise UserError(f"{e} {instead}") from None
    return checked(content, kind, str(path), instead)


def checked(content: Any, kind: type[T], where: str, instead: str) -> T:
    """Raises UserError where the content is not of this kind."""
    try:
        return kind.model_validate(content)
    except ValidationError as e:
        first = e.errors()[0]
        place = "".join(f"{key}: " for key in [".".join(map(str, first["loc"]))] if key)
        wrong = re.sub(r"valid dictionary( or instance of \w+)?", "JSON object", first["msg"])
        raise UserError(f"{where}: {place}{wrong[:1].lower()}{wrong[1:]}. {instead}") from None


def is_number(value: Any) -> bool:
    """Whether a plot can hold it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def words(name: str) -> str:
    """A metric's name as a reader says it: valid/bits_per_byte → validation bits per byte."""
    return " ".join(WORDS.get(part, part.replace("_", " ")) for part in name.split("/"))


@dataclasses.dataclass
class Run:
    """`name` tells it from the others of the report. speed_up: against the first finished run of its recipe and model,
    where there are several. differs: from these, where the name does not say it."""

    name: str
    folder: Path
    speed_up: float | None = None
    differs: str = ""

    @functools.cached_property
    def finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    @functools.cached_property
    def summary(self) -> Summary:
        """Before the run's end, what follows from its last rows."""
        file, instead = self.folder / "summary.json", "Delete the file, or train again."
        if summary := read_json(file, Summary, instead):
            if summary.steps is None:
                raise UserError(f"{file}: steps is missing, which every run that finished has. {instead}")
            return summary
        names = [name for name in self.names if name.startswith(("valid/", "test/"))]
        samples, seconds = self.last("train/samples"), [*self.points("train/loss", "seconds")]
        return Summary(
            steps=max((rows[-1]["step"] for rows in self._metrics.values()), default=None),
            samples=None if samples is None else int(samples),
            train_runtime=self._metrics["train/loss"][-1]["seconds"] if seconds else None,
            metrics={name: float(self.last(name)) for name in names},
        )

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        environment = read_json(self.folder / "environment.json", Environment, "Delete the file, or train again.")
        return environment.model_dump() if environment else {}

    @functools.cached_property
    def recipe(self) -> str:
        return limits.read_text(self.folder / "recipe.yaml", RECIPE_FILE)

    @functools.cached_property
    def config(self) -> Any:
        return recipes.load(str(self.folder / "recipe.yaml"))

    @functools.cached_property
    def scripts(self) -> dict[str, str]:
        """Job scripts that lie in the folder: name → text."""
        return {
            path.name: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(self.folder.glob("*.sbatch"))
        }

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The rows that evaluate.answers kept."""
        return [row for row in self._rows if row["name"].startswith("answers/")]

    @functools.cached_property
    def predictions(self) -> list[Prediction]:
        file, rows = self.folder / "predictions.jsonl", []
        text = limits.read_text(file, limits.ROWS_FILE) if file.is_file() else ""
        for number, line in enumerate(filter(None, text.split("\n")), 1):  # JSON holds other ends of lines as they are
            try:
                rows.append(Prediction.model_validate_json(line))
            except ValueError:
                raise UserError(f"{file}: line {number} is no prediction ({line[:60]!r}). Delete the file.") from None
        return rows

    @functools.cached_property
    def model_code(self) -> str:
        """The file of the model's family."""
        return inspect.getsource(sys.modules[models.lookup(self.config.model.family).model.__module__])

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl")

    @functools.cached_property
    def _metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Name → the rows that hold a number and a step, by step."""
        metrics: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows:
            step = row.get("step")
            if step is not None and not (is_number(step) and step >= 0):
                text = f"{self.folder / 'metrics.jsonl'}: a row of {row['name'][:40]!r} has the step {str(step)[:40]!r}"
                raise UserError(f"{text}, which is not a number. Delete the line.")
            if step is not None and is_number(row["value"]):
                metrics.setdefault(row["name"], []).append(row)
        return {name: sorted(rows, key=lambda row: row["step"]) for name, rows in metrics.items()}

    def points(self, name: str, x: str) -> list[tuple[float, float]]:
        """(x, value) of a metric. x: of X_AXES."""
        rows = [row for row in self._metrics.get(name, []) if is_number(row.get(x))]
        points = [(row[x], row["value"]) for row in rows]
        return points if any(at for at, _ in points) else []  # tokens of what has none

    def last(self, name: str) -> float | None:
        """The metric's latest value."""
        return self._metrics[name][-1]["value"] if name in self._metrics else None

    def unit(self, name: str) -> str:
        return next((str(row.get("unit", "")) for row in self._metrics.get(name, [])), "")

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    @property
    def proved(self) -> list[tuple[str, float, float | None]]:
        """(figure, planned, measured) of what was planned; None: the measured step had another batch."""
        pairs = self.summary.proof.items()
        return [(name, p.predicted, p.measured) for name, p in pairs if p.predicted is not None and p.measured != 0]

    @property
    def speed(self) -> float | None:
        """Samples/s of training, over the whole run; None before its end."""
        return self.summary.train_samples_per_second

    @property
    def processes(self) -> int:
        return self.summary.processes


def read(folders: Iterable[str]) -> list[Run]:
    """Raises UserError for a folder that holds no run, and for one that is given twice."""
    runs: list[Run] = []
    for path in folders:
        folder = Path(path)
        if not (folder / "recipe.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
            raise UserError(
                f"{path}: holds neither a run (recipe.yaml and metrics.jsonl) nor a study (study.json). Give a folder "
                "that gradus train, study or scale wrote."
            )
        runs.append(Run(folder.resolve().name, folder))
    return with_distinct_names(runs)


def by_recipe(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one recipe's name, task and family together, with their speed-up: only these are compared."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.config.name, run.config.task.name, run.config.model.family), []).append(run)
    for group in groups.values():
        done = [run for run in group if run.speed]
        alike = [run for run in done if run.config.model == done[0].config.model]
        for run in alike if len(alike) > 1 else ():
            run.speed_up = run.speed / alike[0].speed
    return list(groups.values())


def uneven_load(group: Sequence[Run]) -> dict[str, str]:
    """Names of runs that cannot be compared with the first that can → why: other programs used more, or less, of the
    processors meanwhile, or n times as many processes are more than n times as fast."""
    compared, wrong = [run for run in group if run.speed_up], {}
    for run in compared[1:]:
        base, load = compared[0], run.summary.load
        loads = [load.during, base.summary.load.during]
        other = f"{INCOMPARABLE}: other programs ran"
        if None not in loads:
            other += f" (load {loads[0]:.1f} on {load.processors} cores, {loads[1]:.1f} during {base.name})"
        if None not in loads and abs(loads[0] - loads[1]) > TAKEN:
            wrong[run.name] = other
        elif run.processes > base.processes and run.speed_up * base.processes > MOST * run.processes:
            wrong[run.name] = f"{other}, or other things differ too: {MORE}"
    return wrong


def name_by_difference(group: Sequence[Run]) -> None:
    """Each of several runs of a recipe knows what differs among them, and is called by that, with its folder's name,
    where that name is a time."""
    keys = [flat(limits.parse_yaml(run.recipe, run.folder / "recipe.yaml")) for run in group]
    for run, own in zip(group, keys):
        own["processes"] = run.processes if run.finished else None  # its end says how many
    differ = [key for key in dict.fromkeys(itertools.chain(*keys)) if len({repr(own.get(key)) for own in keys}) > 1]
    differ = sorted((key for key in differ if not key.startswith(("name", "log."))), key=lambda k: "layout" not in k)
    for run, own in zip(group, keys):
        is_time = re.fullmatch(r"[\d-]+", run.name)
        keys_of_run = [key for key in differ if is_time or key not in COLUMNS][:DIFFERENCES]
        run.differs = ", ".join(f"{key.rpartition('.')[2]}={value_word(own.get(key))}" for key in keys_of_run)
        if run.differs and is_time:
            run.name, run.differs = f"{run.differs} ({run.name})", ""


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {at: value}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{at}.{key}".lstrip(".")).items()}


def value_word(value: Any) -> str:
    """As a recipe has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_distinct_names(entries: list[Any]) -> list[Any]:
    """Runs or studies, with names that tell them from each other. Raises UserError for a folder that is given twice."""
    places, names = [each.folder.resolve() for each in entries], [each.name for each in entries]
    for each, place in zip(entries, places):
        if places.count(place) > 1:
            raise UserError(f"{each.folder}: is given twice.")
        if names.count(each.name) > 1:  # runs/a/1 and runs/b/1
            each.name = "/".join(place.parts[-2:])
    return entries
