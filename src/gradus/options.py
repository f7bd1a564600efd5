"""Options of the command line: how one is written, what it means, and what it takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from gradus.limits import REAL, SEED

Option = Callable[[Any], argparse.Action]  # adds itself to a parser, or to a group of one


def option(written: str, help: str, type: Callable[[str], Any] | None = None, *, only: str = "", **more: Any) -> Option:
    """An option, or an argument without a name. written: as in "--to DIR" or "recipe RECIPE"; an option without a value
    is a flag. only: the questions of its verb that it has an effect on, where it has none on the others. more: what
    argparse takes."""
    words = written.split()
    names = [word for word in words if word.startswith("-")] or words[:1]
    if len(words) > len(names):
        more["metavar"] = words[-1]
    if type is not None:
        more["type"] = type
    if not more and written.startswith("-"):
        more["action"] = "store_true"

    def add(to: Any) -> argparse.Action:
        action = to.add_argument(*names, help=help, **more)
        action.only = only
        return action

    return add


def whole(most: int = SEED, least: int = 1) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`."""
    return real(None, least, most, int)


def real(
    above: float | None = None, least: float = -math.inf, most: float = REAL, kind: type = float
) -> Callable[[str], Any]:
    """Reads a finite number above `above`, of at least `least` and at most `most`. An error's text begins with "="; the
    parser (cli.parsing.Parser) puts the option's name before it."""

    def read(text: str) -> Any:
        try:
            digits = text.encode("ascii")
            number = kind(digits) if len(digits) < 40 else float(digits)
        except ValueError:
            number = math.nan
        wrong = None
        if math.isnan(number) or (above is not None and number <= above):
            wrong = f"a {'positive ' if above == 0 else ''}{'whole ' if kind is int else ''}number"
        elif not least <= number <= most:
            wrong = f"at least {least:,.15g}" if number < least else f"at most {most:,.15g}"
        if wrong:
            raise argparse.ArgumentTypeError(f"={text[:40]}: must be {wrong}.")
        return number

    return read


def svg_file(name: str) -> str:
    """Reads the name of a file for a picture."""
    if name and not name.lower().endswith(".svg"):
        last = "Name it so, or put the option last, without a name"
        raise argparse.ArgumentTypeError(f"={name[:40]}: a picture is an SVG, whose name ends in .svg. {last}.")
    return name


# of every verb that takes a recipe
JSON_FILE = option(
    "--json_file --json-file FILE",
    'a JSON file of Hugging Face\'s TrainingArguments, or with them in an object "TrainingArgs"',
)
FORCE = option("--force", "start even if the plan says that the run will not fit")
