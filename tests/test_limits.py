"""What comes in has limits, and what passes them is one line."""

from __future__ import annotations

import pytest

from gradus import cli, limits
from gradus.errors import UserError


def test_numbers():
    assert limits.numbers("8,16, 32,8", "--sweep") == [8, 16, 32]
    for text in ("", "8,,16", "0", "x", "-8", "9" * 5000, "²"):
        with pytest.raises(UserError, match="--sweep"):
            limits.numbers(text, "--sweep")


def test_a_word_with_a_zero_byte_is_one_error(capsys):
    assert cli.main(["profile", "copy-task", "--to=a\0b"]) == 2
    assert capsys.readouterr().err == "error: '--to=a\\x00b': contains a zero byte. Remove it.\n"
