"""Each name of prices.txt is a test's or a fixture's that is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_what_may_take_more_is_there():
    lines = (HERE / "prices.txt").read_text().splitlines()
    for line in (line for line in lines if line and line[0] != "#"):
        file, _, name = line.partition("::")
        assert re.search(rf"\ndef {name}\(", (HERE / file).read_text()), f"tests/prices.txt: {line}: no such test or fixture"
