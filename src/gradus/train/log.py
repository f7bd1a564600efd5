"""What a run says while it runs: one live line on a terminal, plain lines elsewhere, rows always."""

from __future__ import annotations

import datetime
import json
import os
import sys
import types
from pathlib import Path

import torch

from gradus.errors import need
from gradus.recipe.schema import Log
from gradus.rows import Row, RowFile
from gradus.train import machine


def human(value: float) -> str:
    """A short form of a count: 1234567 → 1.23M."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:g}" if isinstance(value, int) else f"{value:.3g}"


def environment(device: torch.device) -> dict:
    """The conditions of every number of this run: the machine as found, software, device, threads."""
    found = machine.describe() | {"device": str(device)}
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        found["gpu"] = {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}", "cuda": torch.version.cuda}
    return found


class RunLog:
    """Rows to `metrics.jsonl` and, when asked, to TensorBoard and W&B; a line to the terminal."""

    def __init__(self, folder: Path, config: Log, recipe: dict, position: int | None = None):
        self.live = sys.stdout.isatty()
        self.board = self.wandb = None
        if config.tensorboard:
            self.board = need("torch.utils.tensorboard", "track", "log.tensorboard=true").SummaryWriter(str(folder / "tensorboard"))
        if config.wandb:
            self.wandb = need("wandb", "track", "log.wandb").init(project=config.wandb, dir=str(folder), config=recipe, name=folder.name)
        self.rows = RowFile(folder / "metrics.jsonl", position)  # last: with it, there is a run

    def write(self, rows: list[Row]) -> None:
        self.rows.write(rows)
        numbers = [r for r in rows if isinstance(r.value, (int, float)) and r.step is not None]
        if self.board:
            for r in numbers:
                self.board.add_scalar(r.name, r.value, r.step)
        if self.wandb and numbers:
            self.wandb.log({r.name: r.value for r in numbers}, step=numbers[-1].step)

    def line(self, text: str, passing: bool = False) -> None:
        """Print a line. A `passing` one is overwritten by the next on a terminal."""
        if self.live:
            sys.stdout.write(f"\r\x1b[K{text}" + ("" if passing else "\n"))
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def close(self) -> None:
        self.rows.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


class Silence:
    """The log of a process that another one speaks for."""

    rows = types.SimpleNamespace(position=0)
    live = False

    def write(self, rows: list[Row]) -> None:
        pass

    def line(self, text: str, passing: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


def new_run_folder(config: Log, name: str) -> Path:
    """`log.dir`, or `runs/<recipe>/<time>`; never one that holds a run already."""
    if config.dir:
        return Path(config.dir)
    base = Path("runs") / name / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, n = base, 1
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return folder


def write_text(path: Path, text: str) -> None:
    """Written aside and renamed."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
