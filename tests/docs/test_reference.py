"""docs/reference/ is what the code says of itself: verbs and options (gradus.cli), keys of a recipe (gradus.recipe) and the functions of
gradus.api. `python tests/docs/test_reference.py` writes the pages anew; with --check it says whether that is needed."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gradus import api, cli
from gradus.recipe.keys import entries, groups
from gradus.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
AGAIN = "python tests/docs/test_reference.py"
MARK = f"<!-- Made from the code by `{AGAIN}`: change the code, not this page. -->"
KEYS = {  # page: title, sections
    "keys-model": ("Recipe keys: the model", ["model"]),
    "keys-data": ("Recipe keys: task, data, tokenizer", ["task", "data", "tokenizer"]),
    "keys-training": ("Recipe keys: optimization, batch, evaluation, log, energy", ["adapter", "optimizer", "schedule", "batch", "train", "evaluate", "log", "energy"]),
    "keys-layout": ("Recipe keys: the layout", ["layout"]),
}


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    every = [head, ["---"] * len(head), *([shown(cell) for cell in row] for row in rows)]
    return ["", *("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in every)] if rows else []


def shown(cell: str) -> str:
    """As Markdown shows it in a table: code without a bar, which would end the cell."""
    parts = re.split(r"(`[^`]*`)", " ".join(cell.split()))
    plain = (re.sub(r"[|*]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(a + b for a, b in zip(plain, [*(re.sub(r" ?\| ?", " or ", part) for part in parts[1::2]), ""]))


def sentence(text: str) -> str:
    text = " ".join(text.split()).rstrip(".") + "."
    return text[:1].upper() + text[1:] if text.split()[0].strip(",;:.").isalpha() else text


def option(action: argparse.Action) -> list[str]:
    """How it is written, what it means, its default: what its help says, else argparse's."""
    value = action.metavar or ("" if action.nargs == 0 else ", ".join(map(str, action.choices)) if action.choices else action.dest.upper())
    written = f"{', '.join(action.option_strings)} {value}{' ...' * (action.nargs in ('*', '+'))}".strip()
    default = str(action.default) if action.option_strings and action.default not in (None, False, [], "") and action.nargs != 0 else ""
    meaning = (action.help or "").replace("%%", "%")
    if found := re.fullmatch(r"default:? (.*)", meaning) or re.search(r" ?\(default:? ([^()]*)\)", meaning):
        meaning, default = (meaning[: found.start()] + meaning[found.end() :]).strip(), found[1]
    return [f"`{written}`", meaning.replace(" (default)", ""), default]


def verbs(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """name -> (its parser, what it does)."""
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {line.dest: (a.choices[line.dest], sentence(line.help)) for a in found for line in a._choices_actions}


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction) and a.help != argparse.SUPPRESS]
    yield from table(["option", "meaning", "default"], [option(a) for a in actions])
    for below, line in verbs(parser).values():
        yield from ("", f"### {below.prog}", "", line, *options(below))


def group_page(name: str, of: list[cli.verb.Verb]) -> Iterator[str]:
    known = verbs(cli.parser())
    yield from (f"# {name.capitalize()}: {', '.join(verb.name for verb in of)}", "", MARK)
    for verb in of:
        p, line = known[verb.name]
        more = f"More: [{verb.page}](../{verb.page}.md)."
        yield from ("", f"## gradus {verb.name}", "", f"{line} {more}", "", "```", verb.example, "```", *options(p))


def keys_page(title: str, sections: list[str]) -> Iterator[str]:
    yield from (f"# {title}", "", MARK, "", "`gradus keys` prints the same. A key is set in the recipe's file, or on the command line as `key=value`.")
    top = [("name", "the one key outside the sections", list(entries("", Recipe, {"name"})))]
    for head, what, listed in [*(top if "train" in sections else []), *(group for section in sections for group in groups(section))]:
        parts = ((key, default, *rest.partition(": ")[::2]) for key, default, rest in listed)
        rows = [[f"`{key}`", meaning, default if default == "required" else f"`{default}`", kind] for key, default, kind, meaning in parts]
        yield from ("", f"## {head}", "", sentence(what), *table(["key", "meaning", "default", "what it takes"], rows))


def signature(name: str, of: object) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(of)))  # annotations are texts
    return f"`{name}{text.removesuffix(' -> None')}`"


def python_page() -> Iterator[str]:
    yield from ("# Python: gradus.api", "", MARK, "", inspect.getdoc(api), "", "More, with examples: [Gradus in Python](../python.md).")
    for name in sorted(api.__all__, key=lambda name: (isinstance(getattr(api, name), type), name)):
        of = getattr(api, name)
        yield from ("", f"## {name}", "", *([] if of is api.UserError else [signature(name, of), ""]), inspect.getdoc(of))
        members = {key: m for key, m in (vars(of) if isinstance(of, type) else {}).items() if not key.startswith("_") and inspect.getdoc(m)}
        rows = [[signature(key, m) if inspect.isfunction(m) else f"`{key}`", inspect.getdoc(m)] for key, m in members.items()]
        yield from table(["of it", "meaning"], rows)


def index_page() -> Iterator[str]:
    yield from ("# Reference", "", MARK, "", "Every verb, by the stage of a project it belongs to; then the keys of a recipe and the functions in Python.")
    known, each = verbs(cli.parser()), [(group, verb.name) for group, of in cli.JOURNEY.items() for verb in of]
    rows = [[f"[{group}]({group}.md)", f"[`gradus {verb}`]({group}.md#gradus-{verb})", known[verb][1]] for group, verb in each]
    yield from table(["stage", "verb", "what it does"], rows)
    yield from ("", *(f"- [{title}]({name}.md)" for name, (title, _) in KEYS.items()), "- [Python: gradus.api](python.md)")


def pages() -> dict[Path, str]:
    made = {"index": index_page(), "python": python_page()}
    made |= {group: group_page(group, of) for group, of in cli.JOURNEY.items()}
    made |= {name: keys_page(title, sections) for name, (title, sections) in KEYS.items()}
    return {DOCS / "reference" / f"{name}.md": "\n".join(lines) + "\n" for name, lines in made.items()}


def stale() -> list[str]:
    made, there = pages(), {file: file.read_text(encoding="utf-8") for file in (DOCS / "reference").glob("*.md")}
    return [file.name for file in sorted(made.keys() | there.keys()) if made.get(file) != there.get(file)]


def test_the_reference_is_what_the_code_says():
    assert not stale(), f"docs/reference/ is not what the code says. Run: {AGAIN}"


def test_every_option_says_what_it_means():
    def silent(parser: argparse.ArgumentParser) -> list[str]:
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction) and a.help != argparse.SUPPRESS]
        return [f"{parser.prog} {option(a)[0]}" for a in actions if not option(a)[1]] + [name for below, _ in verbs(parser).values() for name in silent(below)]

    assert silent(cli.parser()) == []


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"docs/reference/: {', '.join(stale())}: not what the code says. Run: {AGAIN}" if stale() else 0)
    for file, text in pages().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
