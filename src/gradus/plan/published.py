"""How far the plan's times are off what others published: the table that was kept when the parameters were fitted.

`gradus plan --accuracy` prints it; `python benchmarks/groundtruth.py POINTS.json` scores any file of points, and fits
the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradus.errors import UserError
from gradus.plan.roofline import fitted
from gradus.text import table

EXPLAINED = (
    "Runs count once; n: how many. Errors are medians in percent, of a model on a chip with as many devices and "
    "samples one. covered: the rest is refused, an error of 100 %. bias: measured by predicted time. inside: within "
    "the interval (80 % expected) that others' errors make, as wide as the factor.",
    "What this means: parameters were fitted without what was left out, but the formulas were chosen with all points "
    "in view.",
)


def lines(path: str | None = None) -> Iterator[str]:
    """The kept tables. Raises UserError for a file, which is the benchmark's."""
    if path is not None:
        instead = f"python benchmarks/groundtruth.py {path} scores it, --fit fits on it"
        raise UserError(f"gradus plan --accuracy prints the packaged table and takes no file: {instead}.")
    file = fitted()
    yield f"Fitted {file.get('date', 'never')} on {file.get('data', 'nothing')}."
    yield from EXPLAINED
    for title in [name for name, entry in file.items() if isinstance(entry, dict) and "columns" in entry]:
        scores = dict(file[title])
        columns = scores.pop("columns")
        rows = [[group, *map(_cell, columns, row)] for group, row in scores.items()]
        yield from ("", *table([title, *columns], rows, set(range(1, 1 + len(columns)))))
    yield ""
    uncovered = sorted(file.get("uncovered", {}).items(), key=lambda item: -item[1])
    yield from (f"not predicted: {n:4d}  {why}" for why, n in uncovered)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if column == "n" else f"{value:.2f}" if column == "width" else f"{100 * value:.1f}"
