"""A run folder as a report reads it: rows, summary, recipe, plan and proof. What a run did not write is absent."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.rows import read_rows


@dataclasses.dataclass
class Run:
    """`name` tells it from the others of the report."""

    name: str
    folder: Path

    def _json(self, file: str) -> dict[str, Any]:
        return read_json(self.folder / file, "Take the file out, or train again.")

    def _rows(self, file: str) -> list[dict[str, Any]]:
        path = self.folder / file
        return read_rows(path) if path.is_file() else []

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Empty before the run's end."""
        return self._json("summary.json")

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @functools.cached_property
    def recipe(self) -> str:
        return (self.folder / "recipe.yaml").read_text(encoding="utf-8")

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

    @functools.cached_property
    def model_code(self) -> str:
        """The file of the model's family."""
        return inspect.getsource(sys.modules[models.lookup(self.config.model.family).model.__module__])

    @functools.cached_property
    def _metrics(self) -> dict[str, list[tuple[int, float, str]]]:
        found: dict[str, list[tuple[int, float, str]]] = {}
        for row in self._rows("metrics.jsonl"):
            if isinstance(row["value"], int | float) and row.get("step") is not None:
                found.setdefault(row["name"], []).append((row["step"], row["value"], row.get("unit", "")))
        return found

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, in the order of the steps."""
        return sorted((step, value) for step, value, _ in self._metrics.get(name, []))

    def unit(self, name: str) -> str:
        return next((unit for *_, unit in self._metrics.get(name, [])), "")

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    @functools.cached_property
    def axes(self) -> dict[str, dict[int, float]]:
        """Step → tokens seen, and seconds of training: what was logged of a stretch, over its mean speed."""
        tokens, samples, speed = (dict(self.series(f"train/{name}")) for name in ("tokens", "samples", "samples_per_s"))
        seconds, now, before = {}, 0.0, 0.0
        for step in sorted(samples):
            if speed.get(step):
                now += (samples[step] - before) / speed[step]
                before = samples[step]
                seconds[step] = now
        return {"tokens": tokens, "seconds of training": seconds}

    @property
    def proved(self) -> list[tuple[str, float, float]]:
        """(figure, planned, measured) of what was both."""
        pairs = self.summary.get("proof", {}).items()
        return [
            (name, p["predicted"], p["measured"])
            for name, p in pairs
            if p.get("predicted") is not None and p.get("measured")
        ]

    @property
    def speed(self) -> float | None:
        """Samples/s of training, over the whole run."""
        return self.summary.get("train_samples_per_second")

    @property
    def processes(self) -> int:
        return self.summary.get("processes", 1)


def read_json(path: Path, instead: str) -> dict[str, Any]:
    """Empty where there is no such file. instead: what to do where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        raise UserError(f"{path}: is no JSON. {instead}") from None


def read(folders: Iterable[str]) -> list[Run]:
    """Raises UserError for a folder that holds no run, and for one that is given twice."""
    runs: list[Run] = []
    for given in folders:
        folder = Path(given)
        if not (folder / "recipe.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
            raise UserError(
                f"{given}: holds neither a run (recipe.yaml and metrics.jsonl) nor a study (study.json). Give a folder "
                "that gradus train, study or scale wrote."
            )
        runs.append(Run(folder.resolve().name, folder))
    return apart(runs)


def apart(found: list[Any]) -> list[Any]:
    """Runs or studies, with names that tell them from each other. Raises UserError for a folder that is given twice."""
    places, names = [each.folder.resolve() for each in found], [each.name for each in found]
    for each, place in zip(found, places):
        if places.count(place) > 1:
            raise UserError(f"{each.folder}: is given twice.")
        if names.count(each.name) > 1:  # runs/a/1 and runs/b/1
            each.name = "/".join(place.parts[-2:])
    return found
