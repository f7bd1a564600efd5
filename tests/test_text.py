"""Tables and lines as they are printed: within the width that they are given, and nothing of them lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradus.text import table


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
