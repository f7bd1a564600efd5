"""The record of a number: every figure Gradus prints or keeps is a row with its unit and its conditions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError


@dataclasses.dataclass
class Row:
    """One number. `name` is a path such as `train/loss`; `unit` is plain text (`nats/token`, `s`, `bytes`); `step` is
    the optimizer step it belongs to (None for a figure of the whole run); `conditions` says what, where and how."""

    name: str
    value: float | int | str
    unit: str = ""
    step: int | None = None
    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "step": self.step, **self.conditions}

    def known(self) -> dict[str, Any]:
        """The record as a file has it: without what is None."""
        record = self.record()
        if isinstance(self.value, float) and not math.isfinite(self.value):
            record["value"] = str(self.value)  # JSON has no NaN
        return {k: v for k, v in record.items() if v is not None}

    def json(self) -> str:
        return json.dumps(self.known())


def as_lines(rows: Iterable[Row]) -> str:
    """The content of a file of rows."""
    return "".join(row.json() + "\n" for row in rows)


class RowFile:
    """An append-only `metrics.jsonl`. `position` is kept in every checkpoint, so that a resume drops the rows of steps
    that will be taken again."""

    def __init__(self, path: Path, position: int | None = None):
        self.path = Path(path)
        if position is not None and self.path.exists():
            os.truncate(self.path, min(position, self.path.stat().st_size))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (open as long as the run)

    def write(self, rows: list[Row]) -> None:
        """Raises OSError with the file's name where the disk is full or fails; then the file is closed."""
        try:
            self.file.write(as_lines(rows))
            self.file.flush()
        except OSError as e:
            with contextlib.suppress(OSError):  # it tries to write once more
                self.file.close()
            e.filename = str(self.path)
            raise

    @property
    def position(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()  # every write has flushed


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last line that a kill cut short. Raises UserError for any other line that is no
    row."""
    text = limits.read_text(path, limits.ROWS_FILE)
    lines = text.splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not text.endswith("\n"):
                break
            row = None
        named = isinstance(row, dict) and isinstance(row.get("name"), str) and row["name"].isprintable()
        if named and isinstance(row.get("value"), int | float | str):
            rows.append(row)
        else:
            text = "is not a row with a name and a value that is a number or a word"
            raise UserError(f"{path}: line {number} {text} ({line[:60]!r}). Remove it.")
    return rows
