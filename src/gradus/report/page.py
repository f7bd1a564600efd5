"""Blocks as one HTML file that needs nothing else, light and dark, and as a PDF."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence

from gradus.errors import need
from gradus.pictures import CLASSES, LIGHT
from gradus.report.blocks import Block, Code, Figure, Heading, Html, Inline, Text

ROWS = 16  # of a table that stays on one sheet
SHORT = 12  # characters of a cell that stays on one line: a number with its unit
BREAK, TOGETHER = "\N{ZERO WIDTH SPACE}", "\N{NO-BREAK SPACE}"
STYLE = """
:root { color-scheme: light dark; --ink: #111; --paper: #fff; --line: #ccc; --quiet: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181b; --line: #444; --quiet: #9a9a9a; }
}
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
h2 { border-top: 1px solid var(--line); padding-top: 1rem; }
.wide { overflow-x: auto; margin: 1rem 0 0; overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.left { text-align: left; min-width: 5rem; }
.caption, figcaption { color: var(--quiet); font-size: .9rem; margin: .3rem 0 0; max-width: 44rem; }
figure { margin: 1.5rem 0; color: var(--ink); }
.short { white-space: nowrap; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: flex-start; }
.panels > div { max-width: 100%; width: min-content; }
.panels div div { overflow-x: auto; }
.panels svg { display: block; }
.panels .caption { min-width: 13rem; }
@media (max-width: 40rem) { table { font-size: .8rem; } th, td { padding: .3rem; } }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .7rem; font-size: .8rem; }
summary { cursor: pointer; font-weight: 600; }
@media print {
  :root { --ink: #000; --paper: #fff; --line: #bbb; --quiet: #444; }
  .panels svg { max-width: 100%; height: auto; }
  body { font-size: 10pt; max-width: none; margin: 0; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""


def to_html(title: str, blocks: Iterable[Block]) -> str:
    body: list[str] = []
    for block in blocks:
        if isinstance(block, Text) and block.item and not (body and body[-1].endswith("</ul>")):
            body.append("<ul></ul>")
        if isinstance(block, Text) and block.item:
            body[-1] = body[-1].removesuffix("</ul>") + f"<li>{_inline(block.parts)}</li></ul>"
        else:
            body.append(_html(block))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{html.escape(title)}</title><style>{STYLE}{CLASSES}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _inline(parts: Inline) -> str:
    tags = {"strong": "strong", "emphasis": "em", "code": "code"}
    return "".join(
        f"<{tags[kind]}>{html.escape(text)}</{tags[kind]}>" if kind in tags else html.escape(text)
        for kind, text in parts
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_inline(block.parts)}</p>"
    if isinstance(block, Html):
        return block.text
    if isinstance(block, Figure):
        drawn = ((p.svg(styled=False), html.escape(p.description)) for p in block.panels)
        about = '<p class="caption">{}</p>'.format
        panels = "".join(f"<div><div>{svg}</div>{about(text) * bool(text)}</div>" for svg, text in drawn)
        caption = f"<figcaption>{html.escape(block.caption)}</figcaption>" * bool(block.caption)
        return f'<figure><div class="panels">{panels}</div>{caption}</figure>'
    if isinstance(block, Code):
        title = html.escape(block.title or "code")
        return f"<details><summary>{title}</summary><pre>{html.escape(block.text)}</pre></details>"

    left = block.left()

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(_cell(tag, *cell) for cell in zip(row, left)) + "</tr>"

    rows = "".join(cells("td", row) for row in block.rows)
    caption = f'<p class="caption">{html.escape(block.caption)}</p>' * bool(block.caption)
    head = f"<thead>{cells('th', block.head)}</thead>"
    return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>{caption}'


def _cell(tag: str, text: str, left: bool) -> str:
    kinds = " ".join(["left"] * left + ["short"] * (len(text) <= SHORT and " " in text))
    kind = f' class="{kinds}"' if kinds else ""
    return f"<{tag}{kind}>{html.escape(_breakable(text)).replace(BREAK, '<wbr>')}</{tag}>"


def _breakable(cell: str) -> str:
    """Marks where long words may break."""
    words = re.split(r"(\s+)", cell)
    places = r"[/._=:,-]+(?=\w)|[^\W_]{24}(?=\w)"
    return "".join(re.sub(places, rf"\g<0>{BREAK}", word) if len(word) > SHORT else word for word in words)


# ---------------------------------------------------------------- paper

SHEET = """
#set page(paper: "a4", margin: 18mm, numbering: "1")
#set text(size: 9.5pt)
#set par(justify: true)
#set heading(numbering: none)
#show raw.where(block: true): set text(size: 7pt)
#show table: set text(size: 8pt, hyphenate: false)
#show table: set par(justify: false)
#show figure: set block(breakable: false)
"""


def to_pdf(title: str, blocks: Sequence[Block], author: str = "") -> bytes:
    """Raises UserError without typst."""
    typst = need("typst", "report", "a PDF")
    about = f"title: {_quoted(title)}, author: {_quoted(author)}, date: none"
    lines = [f"#set document({about})", SHEET, *map(_typst, blocks)]
    return typst.compile("\n\n".join(lines).encode(), ignore_system_fonts=True, timestamp=0)


def _quoted(text: str) -> str:
    """As a string of Typst's, without control characters that it cannot hold."""
    return json.dumps("".join(c for c in text if c.isprintable() or c in f"\n\t{BREAK}{TOGETHER}"), ensure_ascii=False)


def _typst(block: Block) -> str:
    assert not isinstance(block, Html), "no block of a PDF"
    if isinstance(block, Figure):
        return _typst_figure(block)
    if isinstance(block, Heading):
        start = "#pagebreak(weak: true)\n" * block.new_page
        return f"{start}#heading(level: {block.level}, text({_quoted(block.text)}))"
    if isinstance(block, Text):
        ways = {"strong": "strong", "emphasis": "emph", "code": "raw", "plain": "text"}
        text = "".join(f"#{ways[kind]}({_quoted(text)})" for kind, text in block.parts)
        return f"- {text}" if block.item else text
    if isinstance(block, Code):
        return f"#strong({_quoted(block.title or 'code')})\n\n#raw({_quoted(block.text)}, block: true)"
    head, *rows = (
        ", ".join(f"text({_quoted(_breakable(c.replace(' ', TOGETHER) if len(c) <= SHORT else c))})" for c in row)
        for row in (block.head, *block.rows)
    )
    align = "(" + "".join("left, " if left else "right, " for left in block.left()) + ")"
    cells = ", ".join([f"table.header({head})", *rows])
    table = f"#table(columns: {len(block.head)}, stroke: (_, _) => (bottom: 0.4pt + gray), align: {align}, {cells})"
    if block.caption:
        table += f"\n\n#text(size: 8pt, fill: gray.darken(30%), {_quoted(block.caption)})"
    return table if len(rows) > ROWS else f"#block(breakable: false)[{table}]"


def _typst_figure(block: Figure) -> str:
    """With the colours of pictures written out: Typst has no variables."""
    width = ", width: 100%" if len(block.panels) > 1 else ""
    drawn = (re.sub(r"var\(--(\w+)\)", lambda name: LIGHT[name[1]], panel.svg()) for panel in block.panels)
    images = ", ".join(f'image(bytes({_quoted(svg)}), format: "svg"{width})' for svg in drawn)
    body = f"grid(columns: {min(2, len(block.panels))}, gutter: 6pt, {images})"
    return f"#figure({body}, caption: text({_quoted(block.caption)}), numbering: none)"
