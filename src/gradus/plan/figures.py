"""A planned figure: a row that knows how it came about."""

from __future__ import annotations

from typing import Any

from gradus import files
from gradus.rows import Row

AT_PEAK = "seconds at the peak"  # an input of the time of products
TEXTS = files.packaged("plan/figures.yaml")


def figure(
    name: str, value: float | str, unit: str = "", formula: str = "", inputs: dict[str, Any] | None = None,
    source: str = "", **conditions: Any,
) -> Row:  # fmt: skip
    """A predicted row. formula, inputs (name → number) and source are what `--explain` shows."""
    how = {"formula": formula, "inputs": inputs or {}, "source": source}
    return Row(name, value, unit, None, {"kind": "predicted", **conditions, "how": {k: v for k, v in how.items() if v}})


def known_figure(name: str, value: float | str, inputs: dict[str, Any], **more: Any) -> Row:
    """A figure whose unit, formula and source stand in figures.yaml, by its name or its group's. more: what does not,
    and conditions."""
    known = TEXTS["figures"].get(name) or TEXTS["figures"][name.rpartition("/")[0]]
    return figure(name, value, inputs=inputs, **{**known, **more})
