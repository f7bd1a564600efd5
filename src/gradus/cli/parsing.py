"""The command line as the verbs describe it: its parser, its first screen, and what was probably meant."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable

from gradus import __version__, files, limits
from gradus.cli import measure, move, plan, start, train, use
from gradus.cli.verb import ENERGY, Verb
from gradus.errors import UserError, did_you_mean, nearest

# group → its verbs, in the order of the journey; each has a file
GROUPS = {"start": start, "plan": plan, "train": train, "use": use, "measure": measure, "move": move}
JOURNEY = {name: [verb for verb in vars(file).values() if isinstance(verb, Verb)] for name, file in GROUPS.items()}
FIRST_SCREEN = """\
Plan it, train it, prove it: what a transformer will cost, its training, and what it did cost.

gradus COMMAND ...    gradus COMMAND --help opens with an example; gradus --version

{verbs}

For example: {examples}
"""


def first_screen() -> str:
    """What `gradus` shows: every verb, two a line."""
    lines = []
    for group, verbs in JOURNEY.items():
        texts = [f"{verb.name:13}{verb.brief}" for verb in verbs]
        pairs = itertools.zip_longest(texts[::2], texts[1::2], fillvalue="")
        lines += [f"{'' if n else group:9}{left:46}{right}".rstrip() for n, (left, right) in enumerate(pairs)]
    examples = f"\n{'':13}".join(verb.example for verb in (start.demo, plan.plan, train.train))
    return FIRST_SCREEN.format(verbs="\n".join(lines), examples=examples)


class Parser(argparse.ArgumentParser):
    """argparse with errors in the house's form: one line, exit code 2."""

    opening = ""  # of the help

    def format_help(self) -> str:
        return self.opening + super().format_help()

    def error(self, message: str):
        own = re.fullmatch(r"argument (?:\S+/)?(--[\w-]+): (=.*)", message, re.S)  # of gradus.options
        if own:
            raise UserError(f"{self.prog}: {own[1]}{own[2]}")
        raise UserError(f"{self.prog}: {message}. See {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """argparse's own, with the nearest choice in place of all of them; and no empty path."""
        if value == "" and action.option_strings and re.match("DIR|FILE|FOLDER|PATH", str(action.metavar)):
            raise UserError(f"{self.prog}: {action.option_strings[0]}=: an empty path. Name one, or leave it out.")
        if action.choices is None or value in action.choices:
            return
        if action.dest == "verb":
            from gradus.recipe import names

            recipe = value in names() or str(value).endswith((".yaml", ".yml", ".json"))
            near = next((verb for verb in action.choices if value in other_names(verb)), None)
            near = f" Did you mean {near}?" if near else did_you_mean(str(value), action.choices)
            meant = f" Did you mean gradus train {value}?" if recipe else near
            raise UserError(f"gradus {value}: no such command.{meant} See gradus --help")
        what = action.option_strings[0] if action.option_strings else action.metavar or action.dest
        known, near = ", ".join(map(str, action.choices)), nearest(str(value), action.choices)
        raise UserError(f"{self.prog}: {what}={value}: not one of {known}.{f' Did you mean {near}?' if near else ''}")


def parser() -> Parser:
    top = Parser(prog="gradus")
    top.format_help = first_screen
    top.add_argument("--version", action="version", version=f"gradus {__version__}")
    commands = top.add_subparsers(dest="verb", metavar="COMMAND")
    for verb in itertools.chain.from_iterable(JOURNEY.values()):
        verb.add_to(commands)
    top.set_defaults(parser=None, commands=commands.choices)
    return top


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Words may stand before, between and after options, which argparse does not allow below a verb."""
    argv = sys.argv[1:] if argv is None else argv
    limits.words(argv)
    runs = [files.run_of(word) for word in argv]
    words = {word.rstrip("/") for word in argv}  # a link beside its run, as in runs/copy-task/*, is one run
    argv = [run for word, run in zip(argv, runs) if run == word or run not in words]
    args, rest = parser().parse_known_args(argv)
    actions = args.parser._actions if args.parser else []
    several = next((a.dest for a in actions if a.nargs in ("*", "+") and not a.option_strings), None)
    for word in rest:
        if several is None or (word.startswith("-") and word != "-"):
            following = next(iter(argv[argv.index(word) + 1 :]), "")
            near = _option_for(word, following, actions)
            near = near or (_key_for(word, following, args.verb) if hasattr(args, "overrides") else "")
            known = [s[2:] for a in actions for s in a.option_strings if s.startswith("--") and s != "--help"]
            near = near or did_you_mean(word.split("=")[0].lstrip("-"), known).replace("mean ", "mean --")
            raise UserError(f"gradus {args.verb or ''}: {word}: unknown option.{near}")
        getattr(args, several).append(word)
    for key in ENERGY:
        if (value := getattr(args, key, None)) is not None:
            args.overrides.append(f"energy.{key}={value}")
    return args


def other_names(own: str) -> list[str]:
    """What other tools call a command, an option or an argument of one here."""
    return files.packaged("options.yaml").get(own, "").split()


def _option_for(option: str, following: str, actions: Iterable[argparse.Action]) -> str:
    """What to write in place of another tool's option that is an option or an argument here, or a value of one; ''
    where it is none."""
    name, _, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or following
    for action in sorted(actions, key=lambda a: (value in (a.choices or ()), a.option_strings != []), reverse=True):
        own, choices = next(iter(action.option_strings), action.dest), [*(action.choices or ())]
        if name in [own, *other_names(own), *choices]:
            shown = next((f" {word}" for word in (name, value) if word in choices), "")
            place = f"Write it without an option, in the place of {action.metavar or own}."
            return f" Did you mean {own}{shown}?" if action.option_strings else f" {place}"
    return ""


def _key_for(option: str, following: str, verb: str) -> str:
    """What to write in place of an option that is a key of a recipe here; '' where it is none."""
    from gradus.recipe.fields import key_of

    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not (key := (verb == "evaluate" and key_of(f"eval_{name}")) or key_of(name)):
        return ""
    value = name if name in ("fp16", "bf16") else value or following
    plain = value and not value.startswith("-") and "=" not in value
    same = plain and (not key.startswith("layout.") or name in (key, key.rpartition(".")[2], "fp16", "bf16"))
    return f" It is a key of the recipe, written without --: {key}={value if same and 'ratio' not in name else '...'}"
