"""`gradus train` as a user starts it, and the figures that the run folder holds at its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gradus import files
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.processes import run_program
from gradus.proof.timing import whole_rounds
from gradus.recipe.schema import Recipe
from gradus.rows import read_rows

SERIES = {"loss": "train/loss", "grad_norm": "train/grad_norm"}  # what is compared step by step
OF_SUMMARY = {  # in summary.json → (row, unit)
    "train_samples_per_second": ("samples_per_s", "samples/s"), "train_runtime": ("time/run", "s"), "train_loss": ("train/loss", ""),
    "hours_per_epoch": ("time/epoch", "h"), "parameters": ("parameters", ""), "energy_wh": ("energy/run", "Wh"),
}  # fmt: skip


def train(recipe: Recipe, processes: int, seed: int | None, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[float]]]:
    """(values measured, values planned: name → (value, unit); series of the logged steps) of a training to its end in `folder`, which is
    resumed there where it was stopped. Raises UserError with the run's own words where it fails."""
    more = {"log": recipe.log.model_copy(update={"dir": str(folder)})}
    more |= {} if seed is None else {"train": recipe.train.model_copy(update={"seed": seed})}
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(folder.name + ".yaml")
    files.write_text(file, recipes.dump(recipe.model_copy(update=more)))
    words = [sys.executable, "-m", "gradus", "train", str(file), "--auto-resume"]
    if recipe.layout.transport == "mpi":
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes), *words]
    elif processes > 1:
        words += ["--processes", str(processes)]
    before = loopback()
    try:
        code, told = run_program(words, capture=True, stopping="stopping: the training saves itself first")
    except FileNotFoundError:
        raise UserError(f"no {words[0]} here: layout.transport=mpi needs it") from None
    if code:
        said = [line for line in told.splitlines() if line.strip()] or ["no error message"]
        raise UserError(next((line for line in said if "error:" in line), said[-1]).removeprefix("error: "))
    measured, planned, series = of_run(folder)
    every = whole_rounds(1, recipe.layout)[1]  # what a synchronisation of local updates sends, by step
    for found in (measured, planned):
        found |= {name: (value / every, unit) for name, (value, unit) in found.items() if name.startswith("traffic/")}
    if before is not None and processes > 1:
        measured["traffic/loopback"] = (loopback() - before, "bytes")
    return measured, planned, series


def of_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, list[float]]]:
    """The same of a run that is there."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    measured = {name: (summary[key], unit) for key, (name, unit) in OF_SUMMARY.items() if summary.get(key) is not None}
    measured |= {name: (float(value), "") for name, value in summary["metrics"].items()}  # "nan" is written as text
    for key, name in (("memory_tensors_per_rank", "memory/allocated"), ("memory_process_per_rank", "memory/process")):
        if summary.get(key):
            measured[name] = (max(summary[key]), "bytes")
    rows = read_rows(folder / "metrics.jsonl")
    measured |= {row["name"]: (row["value"], row["unit"]) for row in rows if row["name"].startswith("traffic/")}
    units = {"memory": "bytes", "traffic": "bytes", "time": "s", "energy": "J"}
    proof = [(name, units.get(name.partition("/")[0], ""), pair) for name, pair in summary.get("proof", {}).items()]
    measured |= {name: (pair["measured"], unit) for name, unit, pair in proof if "measured" in pair}
    planned = {name: (pair["predicted"], unit) for name, unit, pair in proof if "predicted" in pair}
    series = {key: [float(row["value"]) for row in rows if row["name"] == name] for key, name in SERIES.items()}
    measured |= {"loss": (series["loss"][-1], "")} if series["loss"] else {}
    return measured, planned, series


def loopback() -> int | None:
    """Bytes sent over the loopback interface since the machine started, by all programs. None: not Linux."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), None)
