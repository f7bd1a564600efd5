"""Verbs of a project's start: see what it is like, and write a recipe."""

from __future__ import annotations

from argparse import Action
from collections.abc import Iterable
from typing import Any

from gradus.cli.verb import RECIPE, is_given, load_recipe, picture, verb
from gradus.errors import UserError
from gradus.limits import AXIS
from gradus.options import option, whole

CHATS = ("messages", "sharegpt", "prompt", "alpaca")  # data.form


@verb("all of it, in two minutes", "gradus demo", "start")
def demo(args) -> int:
    """plan, check, train, prove and report the copy task, in about two minutes: each command before it runs"""
    from gradus.demo import demo

    return demo()


def _labels(p: Any) -> Action:
    add = p.add_mutually_exclusive_group()
    option("--label COLUMN", "of a table: the label column (default: the only candidate)")(add)
    return option(
        "--no-label", "of a table: use the text alone, to train a model that predicts the next token",
        dest="label", action="store_const", const=False,
    )(add)  # fmt: skip


@verb(
    "a recipe for your own data", "gradus new mine.yaml --data reviews.csv", "your-data",
    option("file FILE.yaml", "the recipe to write"),
    option(
        "--data PATH",
        "a table (CSV, TSV, JSONL, Parquet), chats, a text, a folder of these or of images, or two files of parallel "
        "text",
        nargs="+", required=True,
    ),
    option("--init FOLDER", "weights to fine-tune (Hugging Face layout) in place of a small new model"),
    option("--lora", "with --init: train an adapter, small matrices beside its weights"),
    option("--text COLUMN", "of a table: the text column (default: the only candidate)"),
    _labels,
    option("--form NAME", "of chats: which columns hold them (default: the only candidate)", choices=[*CHATS]),
)  # fmt: skip
def new(args) -> Iterable[str]:
    """a recipe for your own data"""
    from gradus.train.new import new

    return new(args.file, args.data, args.init, args.text, args.label, args.lora, args.form)


@verb("the packaged recipes", "gradus recipes", "results")
def recipes(args) -> Iterable[str]:
    """list the packaged recipes"""
    from gradus.recipe import header, names

    return (f"{name:22} {header(name)[0]}" for name in names())


@verb(
    "a recipe with all it leads to", "gradus show copy-task train.steps=100", "recipes",
    *RECIPE,
    option("--no-data", "only what is known without opening the data"),
    option("--modules", "instead, the module tree as the layout splits it: each parameter's shape and part"),
    picture("instead, draw the model: its blocks, each weight's shape; also of a preset", "RECIPE.svg"),
    option("--processes N", "as one of N processes (default: as many as the layout's axes need)", whole(AXIS)),
    option("--rank R", "with --modules: the process to show (default 0)", whole(AXIS, 0)),
    pasted=True,
)  # fmt: skip
def show(args) -> Iterable[str]:
    """print the resolved recipe and everything derived from it"""
    import yaml

    from gradus.parallel import check
    from gradus.recipe import axes, dump

    if args.picture:
        return _shown(args)
    recipe = load_recipe(args, args.processes)
    if args.modules:
        from gradus.measure.modules import modules

        return modules(recipe, args.processes, args.rank or 0, data=not args.no_data)
    if args.rank is not None:
        raise UserError("--rank has no effect without --modules. Leave it out.")
    if args.no_data:
        check.validate(recipe, args.processes or axes.needed(recipe.layout))
        return dump(recipe).splitlines()
    from gradus.train import session

    opened = session.open_for(recipe, args.processes)
    derived = yaml.safe_dump({"derived": session.derive(opened)}, sort_keys=False)
    return [*dump(opened.recipe).splitlines(), "", "# derived", *derived.splitlines()]


def _shown(args) -> Iterable[str]:
    from gradus import pictures
    from gradus.models import picture
    from gradus.plan.answer import Request, of_model, open_recipe

    for name in ("modules", "no_data", "processes", "rank"):
        if is_given(args, name):
            why = "it draws the whole model, and opens the data only for sizes that the recipe does not say"
            raise UserError(f"--{name.replace('_', '-')} has no effect with --picture: {why}. Leave it out.")
    recipe, *_ = open_recipe(Request(args.recipe, tuple(args.overrides), json_file=args.json_file), notes := [])
    path = pictures.write(picture.draw(recipe.model, recipe.name), args.picture, recipe.name)
    return [*(f"note: {note}" for note in of_model(notes)), f"{path}: the model drawn"]


@verb(
    "every key of a recipe", "gradus keys layout", "recipes",
    option("section SECTION", "e.g. layout, optimizer.adamw, layout.precision (default: all)", nargs="*"),
)  # fmt: skip
def keys(args) -> Iterable[str]:
    """every key of a recipe: its default, type and meaning"""
    from gradus.recipe.keys import keys

    lines = (line for asked in args.section or [None] for line in keys(asked))
    return "\n".join(lines).rstrip().splitlines()


@verb(
    "for bash, zsh and fish", "gradus completion bash", "install",
    option("shell", "fish: in ~/.config/fish/completions/gradus.fish", choices=["bash", "zsh", "fish"]),
    pasted=True,
)  # fmt: skip
def completion(args) -> Iterable[str]:
    """a script that completes verbs, options, recipes and keys: eval "$(gradus completion bash)" in ~/.bashrc"""
    from gradus.completion import script

    return [script(args.shell, args.commands)]
