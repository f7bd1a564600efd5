"""What a run says while it runs: one live line on a terminal, plain lines elsewhere, rows always."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from gradus import files
from gradus.errors import EnvironmentFault, UserError, first_line, need, writing
from gradus.recipe.schema import Log
from gradus.rows import Row, RowFile, read_rows
from gradus.text import say, wrapped
from gradus.train import machine
from gradus.train.folder import RESUME
from gradus.train.loop import Hook, Taken, Trainer


def environment(device: torch.device) -> dict:
    """The conditions of every number of this run: the machine as found, software, device, threads."""
    facts = machine.describe() | {"device": str(device)}
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        facts["gpu"] = {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}",
                        "cuda": torch.version.cuda}  # fmt: skip
    return facts


TICK = 1.0  # seconds between two drawings of the live line
SLOW = 2.0  # seconds without a step from which on they are shown


def fitted(text: str, done: float, waited: float, width: int) -> str:
    """The live line on a terminal `width` columns wide: a bar, and of `text`, whose parts have two spaces between
    them, as many as there is room for; the last one (the time left) and the first go last. done: the share of the run.
    waited: seconds since a step."""
    size = 10 if width >= 70 else 5
    bar = f"[{'#' * int(done * size):.<{size}}] {int(100 * done)}%"
    parts = text.split("  ")
    if waited >= SLOW:
        parts.insert(1, f"last step {waited:.0f} s ago")
    # shorter than the width: in the last column some terminals begin a new line
    while len(line := "  ".join([bar, *parts])) >= width and parts:
        parts.pop(-2 if len(parts) > 2 else -1)
    return line[: width - 1]


class LiveLine:
    """The last line of a terminal, drawn again and again by a thread of its own, so that a slow step is not taken for a
    stopped one."""

    def __init__(self, stream: TextIO):
        self.stream, self.text, self.done, self.stepped_at = stream, "", 0.0, time.monotonic()
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._keep_drawing, name="live line", daemon=True)
        self.thread.start()

    def show(self, text: str, done: float) -> None:
        """Draw this from now on; "" nothing."""
        with self.lock:
            self.text, self.done = text, done
            self._write("")

    def stepped(self, text: str, done: float) -> None:
        """A step is done. `text` is shown where there is nothing better yet. Draws nothing, and costs a microsecond."""
        self.text, self.done, self.stepped_at = self.text or text, done, time.monotonic()

    def above(self, text: str) -> None:
        """Print a line that stays."""
        with self.lock:
            self._write(f"{text}\n")

    def close(self) -> None:
        self.ended.set()
        self.thread.join()
        if self.text:
            self._write("")
            self.stream.write("\n")
            self.stream.flush()

    def _keep_drawing(self) -> None:
        while not self.ended.wait(TICK):
            try:
                with self.lock:
                    self._write("")
            except (OSError, ValueError):  # the terminal is gone
                return

    def _write(self, text: str) -> None:
        try:
            width = os.get_terminal_size(self.stream.fileno()).columns or 80
        except OSError:
            width = 80
        live = fitted(self.text, self.done, time.monotonic() - self.stepped_at, width) if self.text else ""
        if text or live:
            self.stream.write(f"\r\x1b[K{text}{live}")
            self.stream.flush()


def check_trackers(config: Log) -> None:
    """Before anything is planned or measured: raises UserError where what `log` names is not installed, or W&B knows no
    key (on a terminal it asks for one), or cannot be reached and is not set to offline."""
    if config.tensorboard:
        need("tensorboard", "track", "log.tensorboard=true")
    if config.wandb:
        wandb = need("wandb", "track", "log.wandb")
        with _wandb_errors():
            wandb.login(verify=True)


@contextlib.contextmanager
def _wandb_errors() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        why = first_line(e).partition(". ")[0].rstrip(".")
        raise UserError(f"log.wandb: {why}. Log in once with wandb login, or set WANDB_MODE=offline.") from None


def _key(name: str, step: int | None, value: Any) -> tuple:
    """Of rows that are written once, by their first."""
    return name, step, value if name.startswith("elastic/") else None


def _own_file(path: Path, position: int | None) -> list[dict]:
    """The rows that another process has written up to `position` (None: all), in a new file under the same name: what
    that process, should it wake up, still writes goes to the old one."""
    if not path.exists():
        return []
    data = path.read_bytes()[:position]
    files.write_text(path, data[: data.rfind(b"\n") + 1].decode())
    return read_rows(path)


class RunLog(Hook):
    """Rows to `metrics.jsonl` and, when asked, to TensorBoard and W&B; a line to the terminal."""

    def __init__(self, folder: Path, config: Log, recipe: dict, position: int | None = None, once: bool = False):
        """once: of replicas that come and go: no row twice, whoever wrote it."""
        self.live = self.board = self.wandb = None
        self.known: set[tuple] | None = None
        if once:
            same = {"id": f"{folder.name}-{zlib.crc32(str(folder.resolve()).encode())}", "resume": "allow"}
            rows = _own_file(folder / "metrics.jsonl", position)
            self.known = {_key(row["name"], row.get("step"), row["value"]) for row in rows}
        else:
            same = {}
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))
        if config.wandb:
            import wandb

            project = recipe["name"] if config.wandb == "true" else config.wandb
            with _wandb_errors():
                self.wandb = wandb.init(project=project, dir=str(folder), config=recipe, name=folder.name, **same)
        self.file = RowFile(folder / "metrics.jsonl", position)  # last: with it, there is a run
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self.live = LiveLine(sys.stdout)

    def start(self, trainer: Trainer) -> None:
        trainer.metrics_position = self.file.position
        self.stepped(trainer.progress.step, trainer.last_step)

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        self.stepped(taken.step, trainer.last_step)

    def stepped(self, step: int, last: int) -> None:
        """A step of the run is done."""
        if self.live is not None:
            self.live.stepped(f"step {step}/{last}", step / last)

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        """Raises EnvironmentFault where the disk is full or fails."""
        if self.known is not None:
            key = _key(rows[0].name, rows[0].step, rows[0].value)
            if key in self.known:
                return
            self.known.add(key)
        self.write(rows)
        trainer.metrics_position = self.file.position
        if line is not None:
            done = trainer.progress.step / trainer.last_step if rows[0].name == "train/loss" else None
            self.line(line, done)

    def write(self, rows: list[Row]) -> None:
        with writing(self.file.path, RESUME):
            self.file.write(rows)
        numbers = [r for r in rows if isinstance(r.value, (int, float)) and r.step is not None]
        if self.board:
            with writing(self.file.path.with_name("tensorboard"), RESUME):
                for r in numbers:
                    self.board.add_scalar(r.name, r.value, r.step)
        if self.wandb and numbers:
            self.wandb.log({r.name: r.value for r in numbers}, step=numbers[-1].step)

    def line(self, text: str, done: float | None = None) -> None:
        """Print a line. done: the share of the run that is done, for the line which on a terminal is drawn in place
        until the end."""
        if self.live is None:
            say(text, indent=2)
        elif done is not None and done < 1:
            self.live.show(text, done)
        else:
            if done is not None:
                self.live.show("", done)
            self.live.above(wrapped(text, indent=2))

    def close(self) -> None:
        """Raises EnvironmentFault where what is left cannot be written, unless another error is on its way."""
        if self.live is not None:
            self.live.close()
        with contextlib.suppress(EnvironmentFault) if sys.exception() else contextlib.nullcontext():
            with writing(self.file.path, RESUME):
                self.file.close()
            if self.board:
                with writing(self.file.path.with_name("tensorboard"), RESUME):
                    self.board.close()
        if self.wandb:
            self.wandb.finish()
