"""Every test and command that the errata name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradus import cli, hardware
from gradus import recipe as recipes
from gradus.recipe.presets import ALIASES, PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
COMMANDS = sorted(set(re.findall(r"`(gradus [a-z][^`]*)`", PAGE)))


def test_every_test_named_is_there():
    assert len(TESTS) > 30
    for file, name in TESTS:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert name == "" or re.search(rf"^def {name}\(", text, re.M), f"{file}::{name}"
    for name in re.findall(r"`::(\w+)`", PAGE):
        assert any(f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") for file, _ in TESTS), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_named_is_one(command):
    words = command.split()[1:]
    args = cli.parse(words)
    assert args.verb == words[0]
    for word in getattr(args, "names", []) or []:
        assert word in PRESETS or word in ALIASES, word
    recipe = getattr(args, "recipe", None)
    if recipe and recipe != "RECIPE":
        assert recipe in recipes.names() or recipe in PRESETS, recipe
    if getattr(args, "on", None):
        hardware.cluster(args.on)
    if args.verb == "hardware":
        hardware.lines(" ".join(args.name))


def test_tables_are_whole():
    for line in PAGE.splitlines():
        assert not line.startswith("|") or line.count("|") == 5, line
