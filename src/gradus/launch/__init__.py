"""Starting a recipe elsewhere: as a Slurm job, on a rented machine over ssh, on Modal.

Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.errors import UserError
from gradus.options import FORCE, JSON_FILE, Option, option

if TYPE_CHECKING:
    from gradus.recipe.schema import Recipe

SAFE = r"[\w@%+,.][\w@%+,./-]*"  # a relative path that no shell and no copying program takes for something else
EXTRAS = ("hf", "vision")  # what a machine that was set up from here can read


def read(args: Namespace, processes: int) -> tuple[Recipe, str]:
    """Check here, before anything starts elsewhere, a command line that is to run on so many processes.

    Returns (recipe, run folder). Raises UserError for a mistake in it.
    """
    from gradus.parallel.check import validate
    from gradus.parallel.world import World
    from gradus.train.folder import new_run_folder
    from gradus.train.resolve import RunContext, load_and_print_notes

    for word in [args.recipe, *args.overrides, *([args.json_file] if args.json_file else [])]:
        one_line("RECIPE key=value", word)
    world = World(size=processes, local_size=-(-processes // getattr(args, "nodes", 1)))
    recipe = load_and_print_notes(args.recipe, args.overrides, RunContext(args.json_file, world))
    if recipe.layout.replicate != "data_parallel":  # which looks at the GPUs of this machine
        validate(recipe, processes)
    return recipe, str(new_run_folder(recipe.log, recipe.name))


def train_options(nargs: str | None = None) -> tuple[Option, ...]:
    """RECIPE key=value ... and options of `gradus train` that its other forms have too. nargs: of RECIPE."""
    recipe = option("recipe RECIPE", "a packaged recipe, a file or a run folder", nargs=nargs)
    return recipe, option("overrides key=value", "settings of the recipe", nargs="*"), JSON_FILE, FORCE


def train_words(
    args: Namespace, run: str, recipe: str | None = None, settings: dict[str, str] | None = None,
    arguments: str | None = None,
) -> list[str]:  # fmt: skip
    """The words that start the run, or go on with it:
    `train RECIPE key=value ... log.dir=RUN --auto-resume [--json_file FILE] [--force]`.

    settings: replace those of the command line. recipe, arguments: where RECIPE and FILE lie on the other machine.
    """
    settings = {**(settings or {}), "log.dir": run}
    kept = [word for word in args.overrides if word.split("=", 1)[0] not in settings]
    words = [
        "train", recipe or args.recipe, *kept, *(f"{key}={value}" for key, value in settings.items()),
        "--auto-resume",
    ]  # fmt: skip
    words += ["--json_file", arguments or args.json_file] if args.json_file else []
    return [one_line("RECIPE key=value", word) for word in [*words, *(["--force"] if args.force else [])]]


def travelling(args: Namespace) -> Path | None:
    """The file of TrainingArguments that is to be copied.

    Raises UserError where it names other files, which are not copied with it.
    """
    if args.json_file is None:
        return None
    from gradus.recipe import training_args

    arguments, above, _ = training_args.read(os.path.expanduser(args.json_file))
    for name in ("fsdp_config", "deepspeed"):
        if isinstance(arguments.get(name), str):
            text = f"{above}{name} names a file on this machine. Write its content there."
            raise UserError(f"{args.json_file}: {text}")
    return Path(os.path.expanduser(args.json_file)).resolve()


def inputs(recipe: Recipe) -> dict[str, list[Path]]:
    """Key of the recipe → the files and folders on this machine that it needs, without links, the one that the key
    names first.

    What is on the hub, or on the other machine, is not among them.
    """
    from gradus.train.fetch import TOKENIZERS

    by_key = {}
    for key, value in _named(recipe).items():
        path = Path(os.path.expanduser(value))
        if not path.exists():
            continue
        companions: list[Path] = []
        if path.is_file() and key == "data.path":
            names = (getattr(recipe.data, split, None) for split in ("train", "valid", "test"))
            companions = [path.parent / name for name in names if name]
        elif path.is_file():
            companions = [f for pattern in TOKENIZERS for f in sorted(path.parent.glob(pattern))]
        by_key[key] = list(dict.fromkeys(file.resolve() for file in (path, *companions)))
    return by_key


def _named(recipe: Recipe) -> dict[str, str]:
    """Key of the recipe → the weights, tokenizer and data that it names."""
    from gradus.recipe.load import INPUTS
    from gradus.recipe.text import get_key

    tree = recipe.model_dump()
    return {key: value for key in INPUTS if (value := get_key(tree, key))}


def preview(args: Namespace, recipe: Recipe, processes: int, gpu: str | None = None) -> Iterator[str]:
    """What a dry run adds, as a terminal shows it: which of the data and weights are not on this machine, and the plan.
    gpu: its kind, where it is known."""
    from gradus.plan import show

    with show.progress(args.recipe, False):
        lines = [*_absent(args, recipe), *_planned(args, processes, gpu)]
    return show.printed(lines)


def _absent(args: Namespace, recipe: Recipe) -> Iterator[str]:
    from gradus.train.fetch import HUB_NAME

    words = shlex.join([args.recipe, *args.overrides])
    for key, value in _named(recipe).items():
        hub = value.startswith("hf:") if key == "data.path" else HUB_NAME.fullmatch(value)
        if Path(os.path.expanduser(value)).exists():
            continue
        first = "" if value.startswith("hf:") else "no such file or folder here"
        from_hub = f"it is taken from the hub; for a machine without internet: gradus fetch {words} --to DIR"
        yield f"note: {key}={value}: " + (f"{first}{', so ' * bool(first)}{from_hub}" if hub else f"missing: {first}")


def _planned(args: Namespace, processes: int, gpu: str | None) -> Iterator[str]:
    from gradus import hardware
    from gradus.plan import answer

    on, words = None, shlex.join([args.recipe, *args.overrides])
    with contextlib.suppress(UserError):
        on = gpu and f"{processes}x{hardware.cluster(gpu).device.name}"
    try:
        planned = answer.answer(answer.Request(args.recipe, args.overrides, on, json_file=args.json_file))
    except UserError as e:
        yield f"no plan: {e}"
        return
    yield "the plan:"
    yield from (line for line in planned.headline if on or not line.startswith("how long"))
    if not on:
        yield f"how long  on which devices is not known here: gradus plan {words} --on {processes}xDEVICE"


def recipe_file(name: str) -> Path | None:
    """The file behind RECIPE; None for a packaged recipe, which every machine has."""
    with contextlib.suppress(OSError):
        return next((path for path in (Path(name) / "recipe.yaml", Path(name)) if path.is_file()), None)
    return None


def checkout() -> Path | None:
    """The folder of sources that this gradus runs from; None where it was installed from a package."""
    import gradus

    root = Path(gradus.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "src" / "gradus").is_dir() else None


def one_line(option: str, value: str) -> str:
    """The value. Raises UserError where it would break out of its line, or cannot be written in a script."""
    if not value.strip() or any(c in value for c in "\n\r\0"):
        raise UserError(f"{option}={value!r}: must be one line.")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(f"{option}={value!r}: cannot be written in UTF-8. Rename it.")
    return value


def below(path: str) -> bool:
    """Whether a path stays below the folder that it is relative to, and means the same to every program."""
    return bool(re.fullmatch(SAFE, path)) and ".." not in Path(path).parts


def portable(run: str) -> None:
    """Raises UserError for a run folder that cannot be the same below another machine's folder."""
    if not below(run):
        text = "the run folder has the same path here and there. Give a relative path without spaces."
        raise UserError(f"log.dir={run}: {text}")
