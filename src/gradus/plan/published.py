"""How far the plan's times are off what others published: the table that was kept when the parameters were fitted.

`gradus plan --accuracy` prints it, with `--on` what concerns a device; `python benchmarks/groundtruth.py POINTS.json`
scores any file of points, and fits the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradus import hardware
from gradus.errors import UserError
from gradus.plan.roofline import chip_of, fitted, parameters
from gradus.text import table

EXPLAINED = (
    "Errors in percent. inside: points within the interval that the plan states (80 % expected). skill: 1 - error / "
    "mean error of a constant utilisation (or value) that was fitted to the other models.",
    "What this means: parameters were fitted without what was left out, but the formulas were chosen with all points "
    "in view.",
)
SHOWN = ("n", "mean", "median", "max", "bias", "inside", "skill")  # columns of the table; the file has more


def lines(path: str | None = None, on: str | None = None) -> Iterator[str]:
    """The kept tables. on: as of `--on`, what of them concerns its chip. Raises UserError for a file, which is the
    benchmark's, and for a device that is not known."""
    if path is not None:
        instead = f"python benchmarks/groundtruth.py {path} scores it, --fit fits on it"
        raise UserError(f"gradus plan --accuracy prints the packaged table and takes no file: {instead}.")
    file = fitted()
    if on is not None:
        yield from _of(hardware.cluster(on).device, file)
        return
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


def _of(device: hardware.Device, file: dict) -> Iterator[str]:
    chip = chip_of(device)
    notes = parameters(device)[1] or (f"{chip}: its parameters are fitted to measurements of its own",)
    rows = file.get("by chip", {}).get(chip, {})
    if not rows:
        known = ", ".join(file.get("by chip", {}))
        yield f"{chip}: the plan is compared with no published run of it, but with some of {known}"
    else:
        yield f"{chip}: published runs, each predicted without those of its model; errors of a step in percent."
        head = ["program", "runs", "models", "median", "inside", "width"]
        body = [
            [name, str(n), str(models), *(_cell("", x) for x in shares), f"{width:.2f}"]
            for name, (n, models, *shares, width) in rows.items()
        ]
        yield from ("", *table(head, body, set(range(1, 6))), "")
        yield "inside: runs within an 80 % interval of the others' errors; width: its upper end by its lower."
    yield from (f"note: {note}" for note in notes)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if column == "n" else f"{value:.2f}" if column == "skill" else f"{100 * value:.1f}"
