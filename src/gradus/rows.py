"""The record of a number: every figure Gradus prints or keeps is a row with its unit and its conditions."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Row:
    """One number. `name` is a path such as `train/loss`; `unit` is plain text (`nats/token`, `s`, `bytes`); `step` is the
    optimizer step it belongs to (None for a figure of the whole run); `conditions` says what, where and how."""

    name: str
    value: float | int | str
    unit: str = ""
    step: int | None = None
    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)

    def json(self) -> str:
        record = {"name": self.name, "value": self.value, "unit": self.unit, "step": self.step, **self.conditions}
        if isinstance(self.value, float) and not math.isfinite(self.value):
            record["value"] = str(self.value)  # JSON has no NaN
        return json.dumps({k: v for k, v in record.items() if v is not None})


class RowFile:
    """An append-only `metrics.jsonl`. `position` is kept in every checkpoint, so that a resume drops the rows of steps
    that will be taken again."""

    def __init__(self, path: Path, position: int | None = None):
        self.path = Path(path)
        if position is not None and self.path.exists():
            os.truncate(self.path, min(position, self.path.stat().st_size))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (open as long as the run)

    def write(self, rows: list[Row]) -> None:
        self.file.writelines(row.json() + "\n" for row in rows)
        self.file.flush()

    @property
    def position(self) -> int:
        self.file.flush()
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line cut short by a kill is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
