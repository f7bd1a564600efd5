"""Every test and command that the errata name is there, the commands run as they stand, and each row says where it is from (errata_sources.yaml)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gradus import cli, hardware
from gradus import recipe as recipes
from gradus.recipe.presets import ALIASES, PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
COMMANDS = sorted(set(re.findall(r"`(gradus [a-z][^`]*)`", PAGE)))
AS_THEY_STAND = [c for c in COMMANDS if re.match(r"gradus (plan|show|models|hardware|keys) ", c) and not re.search(r"\b(RECIPE|RUN|FILE)\b", c)]
SOURCES = yaml.safe_load((ROOT / "tests/docs/errata_sources.yaml").read_text(encoding="utf-8"))
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| (?!the source says|they say)", line)]


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


@pytest.mark.docs
@pytest.mark.parametrize("command", AS_THEY_STAND)
def test_a_command_that_needs_no_data_runs_as_it_stands(command, tmp_path, monkeypatch, capsys):
    """At its own size, in an empty folder without the hub; test_commands.py runs the others at small sizes and with data. A plan that is not of
    several devices to compare fits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(command.split()[1:]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    if not re.search("--devices|--accuracy|--explain", command):
        assert "NO FIT" not in out
    for said in re.findall(rf"`{re.escape(command)}`: (\d+ %) of ([\d.]+ GB) are (\w+)", PAGE):
        share, size, part = said
        assert f"{part} {share.replace(' ', '')}" in out and size in out, out


def test_the_commands_that_run_as_they_stand_are_some():
    assert len(AS_THEY_STAND) > 12


def test_tables_are_whole():
    for line in PAGE.splitlines():
        assert not line.startswith("|") or line.count("|") == 5, line
    for row in ROWS:
        assert all(row), row


def test_each_row_says_where_it_is_from():
    assert [row[0] for row in ROWS] == list(SOURCES), "the rows of docs/errata.md, in their order"
    for row, entry in SOURCES.items():
        assert set(entry) in ({"place", "words"}, {"place", "fact"}), row
        assert all(str(value).strip() for value in entry.values()), row
        assert len(str(entry.get("words", "")).split()) <= 12, row


def test_only_words_that_were_noted_are_quoted():
    words = [entry["words"] for entry in SOURCES.values() if "words" in entry]
    quoted = [text for row in ROWS for cell in row[:3] for text in re.findall(r'"([^"]+)"', cell)]
    assert len(quoted) > 5
    assert [text for text in quoted if text not in words] == []


def test_words_are_those_that_were_noted():
    notes = [ROOT.parent / "shared" / name for name in ("SOURCES.md", "TABLES.md")]
    if not all(note.is_file() for note in notes):
        pytest.skip("no notes on the sources in ../shared beside the checkout")
    text = " ".join(" ".join(note.read_text(encoding="utf-8") for note in notes).split())
    assert [e["words"] for e in SOURCES.values() if "words" in e and e["words"] not in text] == []
