"""`gradus train` as a user starts it, and the figures that the run folder holds at its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gradus import files
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.processes import run_program
from gradus.proof.study import Values, unit_of
from gradus.proof.study_store import Sample
from gradus.recipe.schema import Recipe
from gradus.rows import read_rows

SERIES = {"loss": "train/loss", "grad_norm": "train/grad_norm"}  # what is compared step by step
OF_SUMMARY = {  # in summary.json → row; of a list the largest counts
    "train_samples_per_second": "samples_per_s", "train_runtime": "time/run", "train_loss": "train/loss",
    "hours_per_epoch": "time/epoch", "parameters": "parameters", "train_tokens_per_second": "tokens_per_s",
    "energy_wh": "energy/run", "co2_kg": "co2/run", "memory_tensors_per_rank": "memory/allocated",
    "memory_process_per_rank": "memory/process",
}  # fmt: skip


def train(recipe: Recipe, processes: int, seed: int | None, folder: Path, number: int) -> Sample:
    """The sample of a training to its end in `folder`, which is resumed there where it was stopped; number: of its
    round. Raises UserError with the run's own words where it fails."""
    words = command(recipe, processes, seed, folder)
    sent_before = loopback_bytes()
    try:
        code, errors = run_program(words, capture=True, stopping="stopping: the training saves itself first")
    except FileNotFoundError:
        raise UserError(f"no {words[0]} here: layout.transport=mpi needs it") from None
    if code:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no error message"]
        raise UserError(next((line for line in lines if "error:" in line), lines[-1]).removeprefix("error: "))
    sample = read_sample(folder, number)
    if sent_before is not None and processes > 1:
        sample.values["traffic/loopback"] = (loopback_bytes() - sent_before, "bytes")
    return sample


def command(recipe: Recipe, processes: int, seed: int | None, folder: Path) -> list[str]:
    """The command that trains the recipe, which is written beside the folder."""
    sections = {"log": recipe.log.model_copy(update={"dir": str(folder)})}
    if seed is not None:
        sections["train"] = recipe.train.model_copy(update={"seed": seed})
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(folder.name + ".yaml")
    files.write_text(file, recipes.dump(recipe.model_copy(update=sections)))
    words = [sys.executable, "-m", "gradus", "train", str(file), "--auto-resume"]
    if recipe.layout.transport == "mpi":
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes), *words]
    return [*words, "--processes", str(processes)] if processes > 1 else words


def read_sample(folder: Path, number: int) -> Sample:
    """The figures of the finished run in this folder; its series are of the logged steps."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    measured: Values = {}
    for key, name in OF_SUMMARY.items():
        if (value := summary.get(key)) not in (None, []):
            measured[name] = (max(value) if isinstance(value, list) else value, unit_of(name))
    measured |= {name: (float(value), "") for name, value in summary["metrics"].items()}  # "nan" is written as text
    rows = read_rows(folder / "metrics.jsonl")
    measured |= {row["name"]: (row["value"], row["unit"]) for row in rows if row["name"].startswith("traffic/")}
    proof = summary.get("proof", {}).items()
    measured |= {name: (pair["measured"], unit_of(name)) for name, pair in proof if "measured" in pair}
    planned = {name: (pair["predicted"], unit_of(name)) for name, pair in proof if "predicted" in pair}
    series = {key: [float(row["value"]) for row in rows if row["name"] == name] for key, name in SERIES.items()}
    rates = [row["value"] for row in rows if row["name"] == "train/lr"]
    for name, values in (("loss", series["loss"]), ("lr", rates)):
        if values:
            measured |= {f"{name}/first": (values[0], ""), name: (values[-1], "")}
    return Sample(number, values=measured, planned=planned, series=series)


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback interface since the machine started, by all programs. None: not Linux."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), None)
