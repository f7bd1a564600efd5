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
    "Runs count once; n: how many. Errors are medians in percent, of a model on a chip with as many devices and "
    "samples one. covered: the rest is refused, an error of 100 %. bias: measured by predicted time. inside: within "
    "the interval (80 % expected) that others' errors make, as wide as the factor.",
    "What this means: parameters were fitted without what was left out, but the formulas were chosen with all points "
    "in view.",
)


BY_CHIP = "chip and program, each model left out"


def lines(path: str | None = None, on: str | None = None) -> Iterator[str]:
    """The kept tables. on: as of `--on`, what of them concerns its chip. Raises UserError for a file, which is the
    benchmark's, and for a device that is not known."""
    if path is not None:
        instead = f"python benchmarks/groundtruth.py {path} scores it, --fit fits on it"
        raise UserError(f"gradus plan --accuracy prints the packaged table and takes no file: {instead}.")
    file = fitted()
    yield f"Fitted {file.get('date', 'never')} on {file.get('data', 'nothing')}."
    yield from EXPLAINED
    if on is not None:
        yield from _of(hardware.cluster(on).device, file.get(BY_CHIP, {}))
        return
    for title in [name for name, entry in file.items() if isinstance(entry, dict) and "columns" in entry]:
        scores = dict(file[title])
        yield from ("", *_table(title, scores.pop("columns"), scores))
    yield ""
    uncovered = sorted(file.get("uncovered", {}).items(), key=lambda item: -item[1])
    yield from (f"not predicted: {n:4d}  {why}" for why, n in uncovered)


def _of(device: hardware.Device, kept: dict[str, list]) -> Iterator[str]:
    """kept: of all chips."""
    chip = chip_of(device)
    if rows := {name: row for name, row in kept.items() if name.startswith(f"{chip} ")}:
        yield from ("", *_table(BY_CHIP, kept["columns"], rows), "")
    else:
        known = ", ".join(sorted({name.partition(" ")[0] for name in kept} - {"columns"}))
        yield f"note: the plan is compared with no published run on {chip}; there are some on {known}"
    yield from (f"note: {note}" for note in parameters(device)[1])


def _table(title: str, columns: list[str], scores: dict[str, list]) -> Iterator[str]:
    rows = [[group, *map(cell_text, columns, row)] for group, row in scores.items()]
    return table([title, *columns], rows, set(range(1, 1 + len(columns))))


def cell_text(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if column == "n" else f"{value:.2f}" if column == "width" else f"{100 * value:.1f}"
