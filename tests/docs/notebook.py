"""A line `{{ FILE.ipynb }}` of a page of docs/ becomes that notebook, its code and what it printed and drew: mkdocs.yml names this extension."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

DOCS = Path(__file__).resolve().parents[2] / "docs"


def as_markdown(name: str) -> str:
    parts = []
    for cell in nbformat.read(DOCS / name, 4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if "text" in output:
                parts.append(f"```measured\n{output.text.rstrip()}\n```")
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f'<img alt="What the cell above draws" src="data:image/png;base64,{"".join(picture.split())}">')
    return "\n\n".join(parts)


class Notebook(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        found = (re.fullmatch(r"\{\{ ([\w-]+\.ipynb) \}\}", line) for line in lines)
        return [new for line, match in zip(lines, found) for new in (as_markdown(match[1]).split("\n") if match else [line])]


class NotebookExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Notebook(md), "notebook", 28)  # after white space is made even (30), before blocks of code are read (25)


def makeExtension(**config: object) -> NotebookExtension:
    return NotebookExtension(**config)
