"""What a verb is: a function, and beside it its options, an example and its words on the first screen."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Any

from gradus.options import JSON_FILE, Option, option, svg_file


@dataclasses.dataclass(frozen=True)
class Verb:
    """page: of the documentation, which says more. pasted: what it prints is a script, a command or YAML, whose lines
    stay whole."""

    function: Callable[[Namespace], int | Iterable[str]]  # the exit code, or what is printed
    brief: str
    example: str
    page: str
    options: tuple[Option, ...]
    pasted: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def add_to(self, commands: Any) -> None:
        """commands: argparse's subparsers."""
        p = add_command(commands, self.name, " ".join(self.function.__doc__.split()), self.options)
        p.opening = f"example: {self.example}\nmore:    the documentation, page {self.page}\n\n"
        p.set_defaults(function=self.function, pasted=self.pasted)


def verb(brief: str, example: str, page: str, *options: Option, pasted: bool = False) -> Callable[[Callable], Verb]:
    """Makes a verb of a function, by its name. Its docstring is what the verb's help says."""
    return lambda function: Verb(function, brief, example, page, options, pasted)


def add_command(commands: Any, name: str, text: str, options: Iterable[Option]) -> ArgumentParser:
    p = commands.add_parser(name, help=text, description=text)
    for add in options:
        add(p)
    p.set_defaults(parser=p)
    return p


# ---------------------------------------------------------------- options of several verbs


def overrides(example: str) -> Option:
    return option("overrides key=value", f"settings of the recipe, e.g. {example}", nargs="*")


def picture(text: str, name: str, **more: Any) -> Option:
    """text: what is drawn; name: of the file, unless one is given."""
    return option("--picture FILE", f"{text} (default {name})", svg_file, nargs="?", const=True, **more)


RECIPE = (
    option("recipe RECIPE", "a packaged recipe (gradus recipes), a YAML or JSON file, or a run folder"),
    overrides("train.steps=100 optimizer.lr=1e-3"), JSON_FILE,
)  # fmt: skip
JSON = option("--json", "the rows as JSON lines")
ENERGY = {  # options that set a key of the recipe's energy
    "watts": ("W", "of one GPU, or of one host's CPUs, where no meter reads it (default: the device's)"),
    "pue": ("X", "power of the data centre over its computers' (default: the usual range)"),
    "grid": ("COUNTRY", "its electricity's CO2, e.g. FR, or '385 g/kWh' (default: the world's mean)"),
}


def energy(**more: Any) -> list[Option]:
    return [option(f"--{key} {value}", text, **more) for key, (value, text) in ENERGY.items()]


# ---------------------------------------------------------------- what several verbs do


def is_given(args: Namespace, name: str) -> bool:
    """Whether an option without a default is on the command line."""
    value = getattr(args, name, None)
    return value is not None and value is not False and value != []


def load_recipe(args: Namespace, processes: int | None = None):
    """The recipe with its overrides and --json_file; what an earlier layer lost to a later one is printed. processes:
    of the run, on this machine (None: one)."""
    from gradus.parallel.world import World
    from gradus.train.resolve import RunContext, load_and_print_notes

    world = World(size=processes or 1, local_size=processes or 1)
    return load_and_print_notes(args.recipe, args.overrides, RunContext(args.json_file, world))


def print_all(lines: Iterable[str], as_json: bool = False) -> int:
    """Print lines as a terminal holds them, or as they are. Returns the exit code that they end with."""
    from gradus.proof.results import print_lines

    return print_lines(lines, as_json)
