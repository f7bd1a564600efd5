"""The size of the house: tokens of code per room of src beside its budget.

    python tests/rooms.py

A token is what `tokenize` gives, without comments, docstrings, line ends and indents. The budgets stand in pyproject.toml, under [tool.rooms]; a
room over its budget, or one without, is exit code 1.
"""

from __future__ import annotations

import ast
import collections
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPACE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def tokens(source: str) -> int:
    """Tokens of a file's code."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in SPACE and token.start not in docstrings for token in found)


def by_room(src: Path) -> dict[str, int]:
    """Tokens of each room: a folder of `src`, or `top` for the files beside them."""
    sizes: collections.Counter[str] = collections.Counter()
    for file in src.rglob("*.py"):
        *folders, _ = file.relative_to(src).parts
        sizes[folders[0] if folders else "top"] += tokens(file.read_text())
    return dict(sizes)


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rooms"]
    sizes = by_room(ROOT / "src" / "gradus")
    for room in sorted(sizes | budgets, key=lambda room: -sizes.get(room, 0)):
        size, budget = sizes.get(room, 0), budgets.get(room, 0)
        over = f"  over its budget by {size - budget:,}: take out what this room does twice" if size > budget else ""
        print(f"{room:10} {size:8,} of {budget:8,}{over}")
    print(f"{'all':10} {sum(sizes.values()):8,} of {sum(budgets.values()):8,}")
    return int(any(size > budgets.get(room, 0) for room, size in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())
