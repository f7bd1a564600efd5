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
    "Errors in percent. inside: points within the interval that the plan states (80 % expected). skill: 1 - error / "
    "mean error of a constant utilisation (or value) that was fitted to the other models.",
    "What this means: parameters were fitted without what was left out, but the formulas were chosen with all points "
    "in view.",
)
SHOWN = ("n", "mean", "median", "max", "bias", "inside", "skill")  # columns of the table; the file has more


def lines(path: str | None = None) -> Iterator[str]:
    """The kept tables. Raises UserError for a file, which is the benchmark's."""
    if path is not None:
        instead = f"python benchmarks/groundtruth.py {path} scores it, --fit fits on it"
        raise UserError(f"gradus plan --accuracy prints the packaged table and takes no file: {instead}.")
    file = fitted()
    yield f"Fitted {file.get('date', 'never')} on {file.get('data', 'nothing')}."
    yield from EXPLAINED
    for label in ("model", "source"):
        scores = dict(file.get(f"without its {label}", {}))
        columns = scores.pop("columns", [])
        places = {name: columns.index(name) for name in SHOWN} if columns else {}
        rows = [[group, *(_cell(name, row[i]) for name, i in places.items())] for group, row in scores.items()]
        head = [f"each point, its {label} left out", *SHOWN]
        yield from ("", *table(head, rows if columns else [], set(range(1, 8))))
    yield ""
    uncovered = sorted(file.get("uncovered", {}).items(), key=lambda item: -item[1])
    yield from (f"not predicted: {n:4d}  {why}" for why, n in uncovered)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if column == "n" else f"{value:.2f}" if column == "skill" else f"{100 * value:.1f}"
