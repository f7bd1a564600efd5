"""Blocks as a page and as Typst: any text is text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_parts import Tags

from gradus.pictures import bars
from gradus.report import page
from gradus.report.blocks import Code, Figure, Heading, Table, Text, from_markdown, narrow


def test_markdown():
    text = "# One\n\nA *b* `c`\nd\n\n- e\n- f\n\n| g | h |\n|---|---|\n| 1 | 2 |\n\n```py\ni\n```\n"
    blocks = list(from_markdown(text))
    assert blocks == [
        Heading(3, "One"),
        Text([("plain", "A "), ("emphasis", "b"), ("plain", " "), ("code", "c"), ("plain", " "), ("plain", "d")]),
        Text([("plain", "e")], item=True),
        Text([("plain", "f")], item=True),
        Table(["g", "h"], [["1", "2"]], words=True),
        Code("py", "i"),
    ]
    assert "<ul><li>e</li><li>f</li></ul>" in page.to_html("t", blocks)


@settings(max_examples=30)
@given(st.text(max_size=40))
def test_any_text_is_text(text):
    """In HTML, and in Typst, which has a meaning for #, $, *, _, @ and more."""
    blocks = [Heading(1, text), Text([("plain", text), ("code", text)]), Table(["a"], [[text]], text), Code(text, text)]
    tags = Tags(page.to_html(text, blocks))
    assert not tags.open and not tags.loads


def test_typst_reads_what_it_has_a_meaning_for():
    pytest.importorskip("typst")
    text = '#let $x$ *a* _b_ @c <d> "e" \\f \x00 \u2028 // g /* h */ `i` [j] {k}'
    figure = Figure([bars({text: 1.0}, text)], text)
    blocks = [Heading(1, text), Text([("plain", text), ("code", text)], item=True), Table([text], [[text]], text), figure, Code(text, text)]
    assert re.match(rb"%PDF-1\.\d", page.to_pdf(text, blocks))


def test_tables_stand_or_lie_and_wrap():
    one = Table(["run", "a long name of a metric", "another long name"], [["r", "1", "2"]])
    assert narrow(one).head == ["run", "r"] and narrow(one).rows == [["a long name of a metric", "1"], ["another long name", "2"]]
    long = Table(["run", "time"], [[f"run {i}", "1.5 s"] for i in range(9)])
    assert narrow(long) is long and long.left() == [True, False]
    text = page.to_html("t", [Table(["run"], [["a-very-long-name/of_a_run=that.never/ends"], ["1.5 s"]])])
    assert "a-<wbr>very-<wbr>long-<wbr>name/<wbr>of_<wbr>a_<wbr>run=<wbr>that.<wbr>never/<wbr>ends" in text and "nowrap" not in text.split("</style>")[1]
    assert f"name/{page.BREAK}of_" in page._typst(Table(["run"], [["a-very-long-name/of_a_run"]]))
