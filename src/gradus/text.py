"""How numbers and tables are written, everywhere: on the screen, in rows' columns, in reports."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import math
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Container, Iterator, Sequence
from typing import TextIO

# ---------------------------------------------------------------- numbers

DAY = 86_400.0  # s
SIGNS = {"USD": "$", "EUR": "€"}
UNITS = {  # a row's unit → (from how many on, how many make one, its name), the largest first
    "bytes": [(0.9995 * 10**n, 10**n, name) for n, name in zip(range(15, -1, -3), ("PB", "TB", "GB", "MB", "kB", "B"))],
    "binary": [(2**n, 2**n, name) for n, name in zip(range(30, -1, -10), ("GiB", "MiB", "KiB", "B"))],
    "s": (
        (2 * 365 * DAY, 365 * DAY, "years"), (2 * DAY, DAY, "days"), (7200, 3600, "h"), (120, 60, "min"),
        (0.9995, 1, "s"), (0.9995e-3, 1e-3, "ms"), (0, 1e-6, "µs"),
    ),
    "kg": ((1e3, 1e3, "t"), (1, 1, "kg"), (0, 1e-3, "g")),
    # money is counted so
    "J": ((3.6e12, 3.6e12, "GWh"), (3.6e9, 3.6e9, "MWh"), (3.6e6, 3.6e6, "kWh"), (3.6e3, 3.6e3, "Wh"), (0, 1, "J")),
    "prefix": [(10**n, 10**n, name) for n, name in zip(range(18, -1, -3), (*"EPTGMk", ""))],
}  # fmt: skip


def in_unit(n: float, unit: str, like: float | None = None) -> str:
    """Three digits in the unit of UNITS that a person would take, for `like` where that is given."""
    units = UNITS[unit]
    _, one, name = next((entry for entry in units if abs(n if like is None else like) >= entry[0]), units[-1])
    return f"{rate(n / one)} {name}"


def parameters(total: int, trained: int) -> str:
    """How many a model has, and how many of them are trained where it is a part."""
    return f"{total:,} parameters" + (f" ({trained:,} trained)" if trained != total else "")


def size(n: float) -> str:
    """Bytes in decimal units: 1.5e9 → 1.5 GB."""
    return in_unit(n if abs(n) >= 999.5 else round(n), "bytes")


def duration(seconds: float) -> str:
    """From two of a unit on in it: 90 s, 1.5 h as 90 min."""
    return in_unit(seconds, "s")


def money(amount: float, currency: str) -> str:
    """Cents where they matter: $0.0066, $13.44, $2,130, $1.85 million."""
    sign = SIGNS.get(currency, currency if len(currency) == 1 else f"{currency} ")
    if amount >= 100:
        return f"{sign}{rate(amount)}"
    return f"{sign}{amount:.2f}" if amount >= 0.1 or not amount else f"{sign}{amount:.2g}"


def rate(n: float) -> str:
    """Three digits: 22,700; 4.31 million; 1.65 billion."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if n >= unit:
            return f"{n / unit:.3g} {name}" if n < 1000 * unit else f"{n / unit:,.0f} {name}"
    return f"{float(f'{n:.3g}'):,.0f}" if n >= 100 else f"{n:.3g}"


def count(value: float, digits: int = 3) -> str:
    """A short form of a count: 1234567 → 1.23M."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:g}" if isinstance(value, int) else f"{value:.{digits}g}"


def milliseconds(seconds: float) -> str:
    """A cell of a column in ms: 1,234; 12.34."""
    value = max(0.0, seconds * 1e3)  # clocks differ by microseconds
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def cell(value: float | str | None, nothing: str = "-") -> str:
    """A cell: 1,234; 12.34; a text as it is; `nothing` for None."""
    if value is None or isinstance(value, str):
        return nothing if value is None else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---------------------------------------------------------------- tables, lines


def short(text: str, width: int = 80) -> str:
    """On one line, cut to the width."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def visible(text: str) -> int:
    """Its columns on a terminal, without the marks of a colour."""
    return len(re.sub("\x1b\\[[0-9;]*m", "", text))


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] | None = None, width: float = math.inf
) -> list[str]:
    """Aligned columns; right: those aligned to the right, by default all. Where that is wider than `width`, several
    tables one below the other, each with the first column."""
    widths = [max(visible(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def padded(text: str, i: int) -> str:
        space = " " * (widths[i] - visible(text))
        return space + text if right is None or i in right else text + space

    blocks: list[list[int]] = [[]]
    for i in range(1, len(header)):
        if blocks[-1] and widths[0] + sum(2 + widths[j] for j in (*blocks[-1], i)) > width:
            blocks.append([])
        blocks[-1].append(i)
    parts = (["  ".join(padded(row[i], i) for i in (0, *b)).rstrip() for row in [header, *rows]] for b in blocks)
    return [line for n, part in enumerate(parts) for line in ([""] * (n > 0) + part)]


WIDTH = 80  # of a terminal
SETTING = r"(--\w|[a-z_]+\.\w+=)"


def fold(line: str, indent: int | None = None, width: float = WIDTH) -> list[str]:
    """A line in as many of `width` columns as it takes, broken between words. What follows stands below the last column
    that begins in the first half of the line, or at `indent`. Settings to paste stay one command: a backslash marks
    the break between two of them. A command to paste behind a colon stays on one line, as one of pip does."""
    if visible(line) <= width:
        return [line]
    if indent is None:
        columns = [m.end() for m in re.finditer(r"  +|^\w+: ", line[: int(width / 2)])]
        indent = columns[-1] if columns else 2
    number = r"[\d.]+ (?:[kMGT]?B|[mµ]?s|min|h|days)\b"
    whole = rf"\[[^\]]{{,40}}\]|--on \S|{number}|pip install .+|(?<=: )gradus \w+ \S+ --.+"  # these are not broken
    line = re.sub(whole, lambda m: m[0].replace(" ", "\xa0"), line)
    options = {"subsequent_indent": " " * indent, "break_on_hyphens": False, "break_long_words": False}
    lines = [text.replace("\xa0", " ") for text in textwrap.wrap(line, width - 2, **options)]
    for i, (text, following) in enumerate(itertools.pairwise(lines)):
        if re.match(SETTING, following.lstrip()) and re.search(rf"(^|\s){SETTING}\S*( \S+)?$", text):
            lines[i] = f"{text} \\"
    return lines


# ---------------------------------------------------------------- streams


def width(stream: TextIO | None = None) -> float:
    """Columns of the terminal that a stream is; without a stream what COLUMNS says, else those of standard output.
    Infinity where there is none: lines of a file may be long."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, or no file
        stated = None if stream else os.environ.get("COLUMNS")
        columns = int(stated or os.get_terminal_size((stream or sys.stdout).fileno()).columns)
        return columns if columns > 2 else math.inf
    return math.inf


def wrapped(text: str, stream: TextIO | None = None, indent: int | None = None) -> str:
    """The lines of a text as that stream's terminal holds them, each as `fold` breaks it."""
    return "\n".join(piece for line in text.split("\n") for piece in fold(line, indent, width(stream or sys.stdout)))


def say(text: str, stream: TextIO | None = None, indent: int | None = None) -> None:
    """Print a text as that stream's terminal holds it."""
    print(wrapped(text, stream, indent), file=stream, flush=True)


PLAIN = str.maketrans({
    "×": "x", "·": "*", "→": "->", "←": "<-", "↓": "v", "…": "...", "–": "-", "—": "-", "−": "-", "─": "-", "━": "=",
    "│": "|", "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "µ": "u", "°": "", "‘": "'", "’": "'", "“": '"',
    "”": '"', "€": "EUR", "▁": "_", "␣": "_", "⏎": "/",
})  # fmt: skip


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: signs as PLAIN has them, letters without their accents, anything else as ?."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    letters = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return letters.encode("ascii", "replace").decode(), error.end


codecs.register_error("gradus.plain", _in_plain)


@contextlib.contextmanager
def plain_where_needed() -> Iterator[None]:
    """While this lasts, what the encoding of standard output or error lacks is printed in signs that it has: no end of
    a run that has done all its work."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    before = [(stream, stream.errors) for stream in streams]
    try:
        for stream in streams:
            stream.reconfigure(errors="gradus.plain")
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it was closed
                stream.reconfigure(errors=errors)
