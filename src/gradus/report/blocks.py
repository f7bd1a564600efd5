"""What a report is made of, whether it becomes a page or a PDF."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from gradus.errors import need
from gradus.pictures import Picture

Inline = list[tuple[str, str]]  # (plain, strong, emphasis or code; text)


@dataclasses.dataclass
class Heading:
    """new_page: in the PDF."""

    level: int
    text: str
    new_page: bool = False


@dataclasses.dataclass
class Text:
    parts: Inline
    item: bool = False  # of a list


@dataclasses.dataclass
class Table:
    """rows: the first cell of each names it. words: no column holds numbers. The first sentence of a caption names what
    is shown, so that the text can refer to it: "The speed of each run. Times are without evaluations."."""

    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    words: bool = False

    def left(self) -> list[bool]:
        """Of each column, whether it is aligned to the left: the first one, and those without a number."""
        columns = list(zip(*self.rows)) or [()] * len(self.head)
        numbers = [any(cell.lstrip("+-")[:1].isdigit() for cell in column) for column in columns]
        return [not i or self.words or not number for i, number in enumerate(numbers)]


@dataclasses.dataclass
class Figure:
    """Pictures, side by side where there is room, each with its description. caption: as of a table."""

    panels: list[Picture]
    caption: str = ""


@dataclasses.dataclass
class Code:
    title: str
    text: str


@dataclasses.dataclass
class Html:
    """Of a page that does not become a PDF: as it is, whoever makes it has escaped what is text in it."""

    text: str


Block = Heading | Text | Table | Figure | Code | Html


def numbered(blocks: Iterable[Block]) -> list[Block]:
    """Tables and figures with their numbers in the captions; a section begins with sentences that refer to each."""
    shown, references = [], []
    numbers = {Table: itertools.count(1), Figure: itertools.count(1)}
    for block in blocks:
        if isinstance(block, Table | Figure) and block.caption:
            number = f"{type(block).__name__} {next(numbers[type(block)])}"
            what = re.split(r"[.:;](?= |$)", block.caption)[0]
            what = what[0].lower() + what[1:] if what[1:2].islower() else what
            references.append(("plain", f"{number} shows {what}. "))
            block = dataclasses.replace(block, caption=f"{number}. {block.caption}")
        shown.append(block)
        if isinstance(block, Heading) and block.level == 2:
            references = []
            shown.append(Text(references))  # filled by what follows
    return [block for block in shown if not isinstance(block, Text) or block.parts]


def narrow(table: Table) -> Table:
    """The same table, lying or standing: whichever has fewer characters in a line."""
    lying = [table.head, *table.rows]
    standing = [list(column) for column in zip(*lying)]
    widths = [sum(max(map(len, column)) for column in zip(*rows)) for rows in (lying, standing)]
    return table if widths[0] <= widths[1] else dataclasses.replace(table, head=standing[0], rows=standing[1:])


def plain(text: str) -> Text:
    return Text([("plain", text)])


def from_markdown(text: str) -> Iterator[Block]:
    """Headings (from the third level on), paragraphs, lists, tables and code of a text; HTML in it is text."""
    parser = (
        need("markdown_it", "report", "notes in Markdown").MarkdownIt("commonmark", {"html": False}).enable("table")
    )
    kind, level, depth = "", 0, 0
    rows: list[list[str]] = []
    for token in parser.parse(text):
        if token.type in ("fence", "code_block"):
            yield Code(token.info.strip(), token.content.rstrip("\n"))
        elif token.type in ("bullet_list_open", "ordered_list_open", "bullet_list_close", "ordered_list_close"):
            depth += token.nesting
        elif token.type == "table_close":
            yield Table(rows[0], rows[1:], words=True)
        elif token.type in ("table_open", "tr_open"):
            rows = [*rows, []] if token.type == "tr_open" else []
        elif token.nesting == 1:
            kind, level = token.type, token.markup.count("#")
        elif token.type == "inline":
            parts = list(_inline(token.children))
            if kind == "heading_open":
                yield Heading(min(6, 2 + max(1, level)), "".join(text for _, text in parts))
            elif kind in ("th_open", "td_open"):
                rows[-1].append("".join(text for _, text in parts))
            else:
                yield Text(parts, depth > 0)


def _inline(tokens: list[Any]) -> Iterator[tuple[str, str]]:
    kind = "plain"
    for token in tokens:
        if token.type in ("strong_open", "em_open"):
            kind = {"strong_open": "strong", "em_open": "emphasis"}[token.type]
        elif token.type in ("strong_close", "em_close"):
            kind = "plain"
        elif token.type == "code_inline":
            yield "code", token.content
        elif token.type in ("softbreak", "hardbreak"):
            yield "plain", " "
        elif token.content:
            yield kind, token.content
