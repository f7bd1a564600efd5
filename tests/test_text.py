"""Tables and lines as they are printed: within the width that they are given, and nothing of them lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus import errors
from gradus.text import fold, say, table, visible

sys.path.insert(0, str(Path(__file__).parent))

from terminals import Terminal


@given(st.lists(st.lists(st.text("ab", min_size=1, max_size=9), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(20, 50))
def test_a_table_that_is_too_wide_is_several_each_with_the_first_column(rows, width):
    header = ["name", "one", "two", "three"]
    lines = table(header, rows, width=width)
    assert all(len(line) <= width for line in lines)
    parts = "\n".join(lines).split("\n\n")
    tables = [[line.split() for line in part.splitlines()] for part in parts]
    assert [word for t in tables for word in t[0][1:]] == header[1:]
    for i, row in enumerate(rows, 1):
        assert [t[i][0] for t in tables] == [row[0]] * len(tables) and [word for t in tables for word in t[i][1:]] == row[1:]
    assert len(tables) == 1 or len(max(table(header, rows), key=len)) > width


WORDS = st.text("ab/-_=.(", min_size=1, max_size=30)


@given(st.lists(WORDS, min_size=1, max_size=12), st.integers(10, 100), st.sampled_from(["", "note: ", "the plan  "]))
def test_a_line_is_broken_between_words_alone(words, width, start):
    lines = fold(start + " ".join(words), width=width)
    assert " ".join(" ".join(lines).replace(" \\ ", " ").split()) == " ".join([*start.split(), *words])
    assert all(len(line) <= width or len(line.split()) == 1 + (line.endswith(" \\")) for line in lines[1:])


@pytest.mark.parametrize("command", ["pip install matplotlib 'typst>=0.13' markdown-it-py", "gradus train runs/a/b --resume --processes 2"])
def test_a_command_to_paste_stays_on_one_line(command):
    before = "stopped; saved runs/a/b/checkpoints/step-00000100. Resume with: " * command.startswith("gradus")
    assert fold(before + "of the extra x: " * (not before) + command, width=40)[-1].strip() == command


def test_a_terminal_gets_lines_as_wide_as_it_is(monkeypatch, capsys):
    text = "note: " + " ".join(["runs/copy-task/20260101-000000/checkpoints"] * 4)
    say(text)
    assert capsys.readouterr().out == f"{text}\n", "a file's lines may be long"
    screen = Terminal(60)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen.out)
    say(text)
    monkeypatch.setattr(sys, "stderr", screen.out)
    say(text, sys.stderr)
    errors.tell_error(text)
    lines = screen.close().splitlines()
    assert len(lines) == 12 and max(map(visible, lines)) <= 60 and lines[1] == f"      {text.split()[1]}"
    assert lines[8].removeprefix("\x1b[31merror:\x1b[0m") == " note: " + text.split()[1]
