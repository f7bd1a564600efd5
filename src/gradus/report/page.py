"""Blocks as one HTML file that needs nothing else, light and dark, and as a PDF."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradus.errors import need
from gradus.report.blocks import Block, Code, Figure, Heading, Inline, Text
from gradus.report.plots import INK

STYLE = """
:root { color-scheme: light dark; --ink: #111; --paper: #fff; --line: #ccc; --quiet: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --line: #444; --quiet: #9a9a9a; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
td { white-space: nowrap; }
.words td { white-space: normal; }
caption, figcaption { text-align: left; color: var(--quiet); font-size: .9rem; padding: .3rem 0; caption-side: bottom; }
figure { margin: 1.5rem 0; color: var(--ink); }
figure svg { width: 100%; height: auto; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .7rem; font-size: .8rem; }
summary { cursor: pointer; font-weight: 600; }
@media print {
  :root { --ink: #000; --paper: #fff; --line: #bbb; --quiet: #444; }
  body { font-size: 10pt; max-width: none; margin: 0; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  td { white-space: normal; }
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
    head += f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
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
    if isinstance(block, Figure):
        text = html.escape(block.caption)
        drawing = block.svg.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
        return f"<figure>{drawing}<figcaption>{text}</figcaption></figure>"
    if isinstance(block, Code):
        title = html.escape(block.title or "code")
        return f"<details><summary>{title}</summary><pre>{html.escape(block.text)}</pre></details>"

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    rows = "".join(cells("td", row) for row in block.rows)
    caption = f"<caption>{html.escape(block.caption)}</caption>" * bool(block.caption)
    kind = ' class="words"' * block.words
    head = f"<thead>{cells('th', block.head)}</thead>"
    return f'<div class="wide"><table{kind}>{caption}{head}<tbody>{rows}</tbody></table></div>'


# ---------------------------------------------------------------- paper

SHEET = """
#set page(paper: "a4", margin: 18mm, numbering: "1")
#set text(size: 9.5pt)
#set par(justify: true)
#set heading(numbering: none)
#show raw.where(block: true): set text(size: 7pt)
#show table: set text(size: 8pt)
#show figure: set block(breakable: true)
"""


def to_pdf(title: str, blocks: Sequence[Block], file: Path) -> None:
    """Raises UserError without typst."""
    typst = need("typst", "report", "a PDF")
    lines = [f"#set document(title: {_quoted(title)}, date: none)", SHEET, *map(_typst, blocks)]
    file.write_bytes(typst.compile("\n\n".join(lines).encode(), ignore_system_fonts=True, timestamp=0))


def _quoted(text: str) -> str:
    """As a string of Typst's, without control characters that it cannot hold."""
    return json.dumps("".join(c for c in text if c.isprintable() or c in "\n\t"), ensure_ascii=False)


def _typst(block: Block) -> str:
    if isinstance(block, Figure):
        image = f'image(bytes({_quoted(block.svg)}), format: "svg", width: 100%)'
        return f"#figure({image}, caption: text({_quoted(block.caption)}), numbering: none)"
    if isinstance(block, Heading):
        return f"#heading(level: {block.level}, text({_quoted(block.text)}))"
    if isinstance(block, Text):
        ways = {"strong": "strong", "emphasis": "emph", "code": "raw", "plain": "text"}
        text = "".join(f"#{ways[kind]}({_quoted(text)})" for kind, text in block.parts)
        return f"- {text}" if block.item else text
    if isinstance(block, Code):
        return f"#strong({_quoted(block.title or 'code')})\n\n#raw({_quoted(block.text)}, block: true)"
    cells = ", ".join(f"text({_quoted(cell)})" for row in (block.head, *block.rows) for cell in row)
    align = "left" if block.words else "(x, _) => if x == 0 { left } else { right }"
    table = f"#table(columns: {len(block.head)}, stroke: (_, _) => (bottom: 0.4pt + gray), align: {align}, {cells})"
    return f"{table}\n\n#text(size: 8pt, fill: gray.darken(30%), {_quoted(block.caption)})" if block.caption else table
