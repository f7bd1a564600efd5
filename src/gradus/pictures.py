"""Pictures as SVG that stand alone: each has a title and a caption, and is legible on light and dark pages.

All that Gradus draws is drawn here: with one palette, one legend, one kind of axis. A picture is made of numbers by one
function (`heatmap`, `bars`, `lines`, `area`, `gantt`), of what goes between nodes by `network`; `beside` sets several
into one; `Picture.save` writes it. Values may be nested lists, NumPy arrays or tensors.
"""

from __future__ import annotations

import base64
import cmath
import dataclasses
import html
import itertools
import math
import os
import re
import struct
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus import errors, files
from gradus.text import rate

# the first eight of Okabe and Ito: distinct to all eyes
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442", "#882255", "#44AA99",
)  # fmt: skip
LIGHT = {"ink": "#111", "paper": "#fff", "line": "#ccc", "quiet": "#666"}
CLASSES = (
    "text{fill:var(--ink);font:11px system-ui,sans-serif}.quiet{fill:var(--quiet)}.black{fill:#000}.white{fill:#fff}"
    ".title{font-weight:600}.paper{fill:var(--paper)}.line{stroke:var(--line);fill:none}.head{fill:var(--quiet)}"
    ".arrow{stroke:var(--quiet);fill:none}"
)
STYLE = (
    f"svg{{{';'.join(f'--{name}:{colour}' for name, colour in LIGHT.items())}}}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6e6e6;--paper:#16181b;--line:#444;--quiet:#9a9a9a}}" + CLASSES
)
# a disc, a square, a triangle, a diamond: with the colours as many kinds of points
MARKS = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "M-3-3h6v6h-6z", "M0-4L3.5 3h-7z", "M0-4.5L4 0L0 4.5L-4 0z")
GAP = 14  # pixels around a picture and between two


@dataclasses.dataclass(frozen=True)
class Picture:
    """width, height: of the body, in pixels. body: SVG elements. title: what it shows, written above them. description:
    what is to be seen, written below them. scale: the values of the colours of `heatmap` at both ends, in words: from
    "0" blue alone, else from full orange."""

    width: float
    height: float
    body: str
    title: str
    description: str = ""
    scale: tuple[str, str] | None = None

    def drawn(self, captioned: bool = True) -> tuple[float, float, str]:
        """(width, height, elements) with title, scale and description."""
        words = self.description if captioned else ""
        width = max(self.width, width_of(self.title, bold=True) + 2 * GAP, 220 if words or self.scale else 0)
        top = 30 if self.title else 0
        body, y = [text(GAP, 20, self.title, kind="title")], top + self.height
        body.append(f'<g transform="translate(0 {top})">{self.body}</g>')
        if self.scale:
            low, high = self.scale
            x = GAP + width_of(low) + 4
            strip = shades([[i / 20 for i in range(0 if low == "0" else -20, 21)]], x, y, 80, 9)
            body += [text(GAP, y + 9, low, kind="quiet"), strip, text(x + 84, y + 9, high, kind="quiet")]
            y += 18
        for line in filter(str.strip, words.splitlines()):
            for row in textwrap.wrap(line, int(len(line) * (width - 2 * GAP) / width_of(line))):
                y += 15
                body.append(text(GAP, y, row))
        return width, y + 8 * bool(words), "".join(body)

    def svg(self, styled: bool = True) -> str:
        """The picture as a document of its own; unstyled, it is part of a page that has CLASSES and the colours of
        LIGHT as variables, and writes the description itself."""
        width, height, body = self.drawn(captioned=styled)
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        name = f"<title>{html.escape(self.title)}</title><desc>{html.escape(self.description)}</desc>"
        paper = f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(self.title)}" {size}>'
        style = f"<style>{STYLE}</style>" if styled else ""
        return f"{head}{name}{style}{paper}{body}</svg>\n"

    def save(self, path: str | os.PathLike) -> None:
        files.write_text(Path(path), self.svg())


def write(picture: Picture, asked: str | bool, name: str) -> Path:
    """Save it under the name that is asked for, or (True) in the working folder as NAME.svg; returns where. Raises
    UserError where it cannot be written."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "picture"
    path = files.writable(Path(f"{plain}.svg" if asked is True else os.path.expanduser(asked)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except OSError as e:
        raise errors.not_written(path, e, "the picture was not written. Give another name.") from e
    return path


# ---------------------------------------------------------------- words and numbers


def width_of(words: Any, bold: bool = False) -> float:
    """Pixels that a line takes at most: in DejaVu Sans, the widest of the usual fonts."""
    every = (
        4.6 if c in "fijlrtI .,:;'|!()[]/-" else 11 if c in "mwMW%@+=<>#" or c > "\x7f" else 8.5 if c.isupper() else 7
        for c in str(words)
    )
    return sum(every) * (1.15 if bold else 1)


def _label_width(words: Iterable[Any]) -> float:
    return max(map(width_of, words), default=0)


def number(value: float, unit: str = "") -> str:
    """At most three digits that count: 22,700 tokens; 0.000946; 1.03e-6."""
    return f"{'-' if value < 0 else ''}{rate(abs(value)).replace('e-0', 'e-')} {unit}".strip()


def bytes_in(most: float) -> tuple[float, str]:
    """(how many bytes the unit of a picture's numbers is, its name). most: the largest of them."""
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def ticks(low: float, high: float) -> list[float]:
    """Two to six round places from low to high: multiples of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    if not math.isfinite(span):
        return []
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * span / 5)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-6) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round places of a logarithmic axis: 1, 2 and 5 times the powers of ten or, of many, these alone."""
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)]
    places = [m * power for power in powers for m in (1, 2, 5) if low <= m * power <= high]
    return [place for place in places if place in powers] if len(places) > 8 else places or ticks(low, high)


# ---------------------------------------------------------------- elements


def text(x: float, y: float, words: Any, anchor: str = "start", kind: str = "") -> str:
    """A line of text whose baseline starts, is centred or ends ("start", "middle", "end") at (x, y)."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(str(words))}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, note: str = "", opacity: float = 1.0) -> str:
    """note: what a pointer that rests on it shows."""
    note = f"<title>{html.escape(note)}</title>" if note else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect {place} fill="{fill}" fill-opacity="{opacity:.3f}">{note}</rect>'


def frame(x: float, y: float, width: float, height: float) -> str:
    return f'<path class="line" d="M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"/>'


def arrow(*points: complex) -> str:
    """A line through the points, x + y i, with a head at the last."""
    before, end = points[-2:]
    along = 6 * (end - before) / (abs(end - before) or 1)
    line, head = ("L".join(f"{p.real:.1f} {p.imag:.1f}" for p in path) for path in (
        points, (end, end - along * (1 + 0.5j), end - along * (1 - 0.5j)),
    ))  # fmt: skip
    return f'<path class="arrow" d="M{line}"/><path class="head" d="M{head}z"/>'


def image(x: float, y: float, width: float, height: float, rows: Sequence[bytes]) -> str:
    """An image of a few pixels, each drawn as a sharp square, in a frame. rows: its lines, four bytes a pixel: RGB and
    opacity."""
    head = struct.pack(">2I5B", len(rows[0]) // 4, len(rows), 8, 6, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    drawn = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    return f'<image {place} {drawn} href="data:image/png;base64,{data}"/>{frame(x, y, width, height)}'


def photo(pixels: Any, x: float, y: float, size: float) -> str:
    """An image in a square. pixels: uint8 (1 or 3, height, width), an array or a tensor."""
    channels = pixels.tolist() if len(pixels) == 3 else pixels.tolist() * 3
    rows = [bytes(v for pixel in zip(*line) for v in (*pixel, 255)) for line in zip(*channels)]
    return image(x, y, size, size, rows)


def shades(values: Any, x: float, y: float, width: float, height: float, most: float | None = None) -> str:
    """A table as an image, in the colours of `heatmap`."""
    table = _numbers(values)
    most = most or _farthest(table)
    blue, orange = (bytes.fromhex(colour[1:]) for colour in COLOURS[:2])
    full = [[(blue if v >= 0 else orange, round(255 * min(abs(v) / most, 1.0))) for v in row] for row in table]
    return image(x, y, width, height, [b"".join(colour + bytes([opacity]) for colour, opacity in row) for row in full])


def _numbers(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _farthest(table: Sequence[Sequence[float]]) -> float:
    """The largest distance from zero; 1 where there is none."""
    return max((abs(v) for row in table for v in row), default=0) or 1.0


def _square(i: int, x: float, y: float) -> str:
    return rectangle(x, y - 9, 10, 10, COLOURS[i % len(COLOURS)])


def _legend(
    names: Sequence[str], width: float, swatch: Callable[[int, float, float], str] = _square
) -> tuple[str, float]:
    """(elements, height) of the names with their colours, in lines of that width. swatch: draws that of a name."""
    out, x, y = [], float(GAP), 9.0
    for i, name in enumerate(names):
        if x > GAP and x + 14 + width_of(name) > width:
            x, y = float(GAP), y + 17
        out.append(swatch(i, x, y) + text(x + 14, y, name, kind="quiet"))
        x += 30 + width_of(name)
    return "".join(out), y + 10 if names else 0.0


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Values from low to high at the pixels from begin to end. log: equal ratios are equally far. named: the places
    that have a tick, with its words; None: round ones. unit: of the numbers at round ones."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False
    named: Mapping[float, str] | None = None
    unit: str = ""

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.begin + (value - low) / ((high - low) or 1) * (self.end - self.begin)

    def ticks(self) -> dict[float, str]:
        if self.named is not None:
            return dict(self.named)
        return {value: _exact(value, self.unit) for value in (log_ticks if self.log else ticks)(self.low, self.high)}

    def lying(self, y: float, name: str, below: float = 17) -> Iterator[str]:
        """Words below the axis, those left out that would run into the one before; its name below their middle."""
        edge = -math.inf
        for value, words in self.ticks().items():
            half = width_of(words) / 2
            if self.at(value) - half > edge:
                yield text(self.at(value), y, words, "middle", "quiet")
                edge = self.at(value) + half + 3
        yield text((self.begin + self.end) / 2, y + below, name, "middle", "quiet")

    def levels(self, left: float, right: float) -> Iterator[str]:
        """Of an upright axis: words at the left of a plot, and a line across at each."""
        for value, words in self.ticks().items():
            yield f'<path class="line" d="M{left:.1f} {self.at(value):.1f}H{right:.1f}"/>'
            yield text(left - 6, self.at(value) + 4, words, "end", "quiet")


def _exact(value: float, unit: str = "") -> str:
    """A tick's number: as many digits as it has."""
    return number(value, unit) if math.isclose(float(f"{value:.3g}"), value) else f"{value:,.9g} {unit}".strip()


# ---------------------------------------------------------------- pictures


def heatmap(
    values: Any, rows: Sequence[Any], columns: Sequence[Any], title: str, description: str = "", *,
    axes: tuple[str, str] = ("", ""), cell: float = 22, numbers: bool = False, most: float | None = None,
) -> Picture:  # fmt: skip
    """A square a value: blue above zero, orange below, the fuller the farther from zero; below them a scale, if
    they are at least 90 pixels wide.

    values: (rows, columns). Of many numbered rows or columns some are named. axes: what the rows and what the columns
    are. cell: pixels. numbers: also written into the squares (three characters want cell >= 30). most: the value of a
    full colour, None for the largest distance from zero.
    """
    table, down, across = _numbers(values), _named(rows), _named(columns)
    most = most or _farthest(table)
    tilted = "" not in across and _label_width(across) > cell - 3  # 3: between neighbours
    of_rows, of_columns = (f"{words} {sign}" if words else "" for words, sign in zip(axes, "↓→"))
    left = GAP + max(_label_width(down), width_of(of_rows)) + 6
    top = (18 if any(axes) else 2) + ((_label_width(across) + 6 if tilted else 14) if any(across) else 0)
    width, height = cell * len(columns), cell * len(rows)
    body = [text(left - 6, 10, of_rows, "end", "quiet"), text(left, 10, of_columns, kind="quiet")] if any(axes) else []
    for j, word in enumerate(across):
        x, label = left + cell * (j + 0.5), text(0, 0, word, "start" if tilted else "middle")
        turn = f"translate({x + 4 * tilted:.1f} {top - 4:.1f}) rotate({-90 * tilted})"
        body.append(f'<g transform="{turn}">{label}</g>')
    body.append(shades(table, left, top, width, height, most))
    for i, (word, row) in enumerate(zip(down, table, strict=True)):
        y = top + cell * (i + 0.5) + 4
        body.append(text(left - 6, y, word, "end"))
        for j, value in enumerate(row if numbers else ()):
            kind = ("black" if value < 0 else "white") if abs(value) > 0.85 * most else ""  # on light and dark pages
            body.append(text(left + cell * (j + 0.5), y, f"{value:.2f}", "middle", kind))
    low = "0" if all(v >= 0 for row in table for v in row) else number(-most)
    whole = left + max(width, width_of(of_columns)) + GAP
    key = (low, number(most)) if width >= 90 else None
    return Picture(whole, top + height + 8, "".join(body), title, description, key)


def _named(names: Sequence[Any]) -> list[Any]:
    """Of many that are numbers every fifth or twentieth alone, so that they do not touch."""
    every = 1 if len(names) <= 10 or not isinstance(names[0], int) else 5 if len(names) <= 50 else 20
    return ["" if i % every else name for i, name in enumerate(names)]


def bars(
    values: Mapping[str, float | Mapping[str, float]], title: str, description: str = "", *, unit: str = "",
    width: float = 640, limit: tuple[str, float] | None = None, marks: Mapping[str, Sequence[float]] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Picture:  # fmt: skip
    """Lying bars, a name each. A value that is a mapping is a bar of several parts: part → value, those below zero to
    the left. limit: (name, value), a line across all bars. marks: name → values that are marked on its bar, and joined.
    notes: name → words behind the number. width: at least."""
    stacked = {name: value if isinstance(value, Mapping) else {"": value} for name, value in values.items()}
    parts = [part for part in dict.fromkeys(itertools.chain(*stacked.values())) if part]
    marks, notes = marks or {}, notes or {}
    labels = {name: textwrap.wrap(name, 44, break_on_hyphens=False) for name in stacked}
    said = {name: f"{number(sum(own.values()), unit)}{notes.get(name, '')}" for name, own in stacked.items()}
    least = min((sum(value for value in own.values() if value < 0) for own in stacked.values()), default=0)
    above = (sum(value for value in own.values() if value > 0) for own in stacked.values())
    most = max([*above, *itertools.chain(*marks.values()), *([limit[1]] if limit else [])], default=0) - least or 1.0
    left = GAP + _label_width(itertools.chain(*labels.values())) + 6
    right = max(90, _label_width(said.values()) + 6 + GAP)
    width = max(width, left + 120 + right)
    legend, top = _legend(parts if parts != list(values) else [], width - GAP)
    body, y, size = [legend], top + 2, (width - left - right) / most
    zero = left - least * size
    for name, own in stacked.items():
        extra = max(0, 7 * len(labels[name]) - 7)
        y, ends = y + extra, [zero, zero]  # of the parts below and above zero
        body += [text(left - 6, y + 13 - extra + 14 * i, line, "end") for i, line in enumerate(labels[name])]
        for part, value in own.items():
            fill = COLOURS[parts.index(part) % len(COLOURS)] if part else COLOURS[0]
            start, ends[value >= 0] = ends[value >= 0], ends[value >= 0] + value * size
            note = f"{name} {part}: {number(value, unit)}"
            body.append(rectangle(min(start, ends[value >= 0]), y, abs(value) * size, 18, fill, note))
        places = [zero + value * size for value in sorted(marks.get(name, ()))]
        if places:
            ticks_of = "".join(f"M{x:.1f} {y + 3:.1f}v12" for x in places)
            joined = f"M{places[0]:.1f} {y + 9:.1f}H{places[-1]:.1f}"
            body.append(f'<path style="stroke:var(--ink);fill:none" d="{ticks_of}{joined}"/>')
        body.append(text(max(ends[1], *places, 0) + 6, y + 13, said[name]))
        y += 24 + extra
    if limit:
        x, words = zero + limit[1] * size, f"{limit[0]}: {number(limit[1], unit)}"
        body.append(f'<path class="arrow" stroke-dasharray="4 3" d="M{x:.1f} {top}V{y:.1f}"/>')
        body.append(text(x, y + 10, words, "end" if x > width_of(words) else "start", "quiet"))
        y += 14
    return Picture(width, y + GAP / 2, "".join(body), title, description)


@dataclasses.dataclass(frozen=True)
class Curve:
    """points: (x, y). mark: one of MARKS at each point. joined: by a line. spreads: lines from (x, y) to (x, y), such
    as from the lowest to the highest of what a point is the mean of."""

    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False
    mark: str = ""
    joined: bool = True
    spreads: Sequence[tuple[tuple[float, float], tuple[float, float]]] = ()

    def drawn(self, name: str, across: _Axis, up: _Axis) -> Iterator[str]:
        pixels = [(across.at(a), up.at(b)) for a, b in self.points]
        note, dashes = f"<title>{html.escape(name)}</title>", ' stroke-dasharray="5 3"' * self.dashed
        if self.joined:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _fewer(pixels))
            drawn = f'fill="none" stroke="{self.colour}" stroke-width="2"{dashes}'
            yield f'<polyline {drawn} points="{path}">{note}</polyline>'
        for (a, b), (c, d) in self.spreads:
            path = f"M{across.at(a):.1f} {up.at(b):.1f}L{across.at(c):.1f} {up.at(d):.1f}"
            yield f'<path stroke="{self.colour}" d="{path}"/>'
        yield from (self.marked(a, b, note) for a, b in pixels if self.mark)

    def marked(self, x: float, y: float, note: str = "") -> str:
        shape = f'fill="{self.colour}" d="{self.mark}"'
        return f'<path transform="translate({x:.1f} {y:.1f})" {shape}>{note}</path>'

    def swatch(self, x: float, y: float) -> str:
        if self.mark:
            return self.marked(x + 5, y - 4)
        if self.dashed:
            return f'<path stroke="{self.colour}" stroke-width="2" stroke-dasharray="5 3" d="M{x:.1f} {y - 4:.1f}h12"/>'
        return rectangle(x, y - 9, 10, 10, self.colour)


def _fewer(pixels: list[tuple[float, float]], most: int = 1000) -> list[tuple[float, float]]:
    """Of many points the lowest and the highest of those side by side."""
    every = -(-2 * len(pixels) // most)
    groups = (pixels[i : i + every] for i in range(0, len(pixels), every))
    ends = ({min(of, key=lambda p: p[1]), max(of, key=lambda p: p[1])} for of in groups)
    return pixels if every < 3 else [point for two in ends for point in sorted(two)]


def lines(
    series: Mapping[str, Any], title: str, description: str = "", *, x: str = "", y: str = "", width: float = 640,
    height: float = 300, zero: bool = True, log: str = "", named: Mapping[float, str] | None = None,
) -> Picture:  # fmt: skip
    """Curves. series: name → values at 0, 1, 2, ..., or → pairs (x, y), or → a Curve. x, y: what the axes show, with
    the unit. zero: the upright axis begins there or below; else both axes end a little beyond the points. log: "x", "y"
    or "xy" are logarithmic. named: places of the lying axis, with their words. width: at least."""
    curves = {
        name: values if isinstance(values, Curve) else Curve(_pairs(values), COLOURS[i % len(COLOURS)])
        for i, (name, values) in enumerate(series.items())
    }
    every = [p for curve in curves.values() for p in itertools.chain(curve.points, *curve.spreads)]
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*every))
    if zero and not log:
        y0, y1 = min(y0, 0.0), y1 if y1 > y0 else y0 + 1.0
    else:
        measured = not any(curve.joined for curve in curves.values())  # else the lying axis is steps, years or sizes
        (x0, x1), (y0, y1) = _beyond(x0, x1, "x" in log, measured), _beyond(y0, y1, "y" in log)
    names = list(curves) if len(curves) > 1 else []
    width = max(width, 3 * GAP + _label_width(names))
    legend, top = _legend(names, width - GAP, lambda i, *at: curves[names[i]].swatch(*at))
    height += max(0, top - 19)  # of a legend's further lines
    right, top, bottom = width - 2 * GAP, top + (20 if y else 8), height - 40.0
    up = _Axis(y0, y1, bottom, top, "y" in log)
    left = max(64.0, GAP / 2 + _label_width(up.ticks().values()) + 6)
    across = _Axis(x0, x1, left, right, "x" in log, named)
    body = [legend, text(GAP, top - 10, y, kind="quiet"), *up.levels(left, right), *across.lying(bottom + 15, x)]
    for name, curve in curves.items():
        body += curve.drawn(name, across, up)
    return Picture(width, height, "".join(body), title, description)


def _pairs(values: Any) -> list[tuple[float, float]]:
    return [tuple(p) if isinstance(p, (list, tuple)) else (i, p) for i, p in enumerate(_numbers(values))]


def _beyond(low: float, high: float, log: bool, measured: bool = True) -> tuple[float, float]:
    """A little more on both sides; what was measured and is the same to 2 % looks so."""
    if log:
        factor = (high / low) ** 0.05 if high > low else 1.1
        return low / factor, high * factor
    more = max(0.04 * (high - low), measured * (0.01 * abs(low + high) - (high - low) / 2))
    return low - more, high + more


def area(
    series: Mapping[str, Sequence[float]], at: Sequence[float], title: str, description: str = "", *, x: str = "",
    unit: str = "", spans: Sequence[tuple[float, float, str]] = (), width: float = 760, height: float = 320,
) -> Picture:  # fmt: skip
    """Areas on top of one another. series: name → values at the places `at`; spans: (from, to, words), a band each
    below the axis, whose words stand there where they fit; without any, the axis has numbers. x: what it shows."""
    most = max(map(sum, zip(*series.values())), default=0) or 1.0
    legend, top = _legend(list(series), width - GAP)
    left, right, top, bottom = 74.0, width - GAP, top + 8, height - 48.0
    across, up = _Axis(at[0], at[-1], left, right, named={} if spans else None), _Axis(0, most, bottom, top, unit=unit)
    body, below = [legend, *up.levels(left, right)], [0.0] * len(at)
    for i, (name, values) in enumerate(series.items()):
        above = [a + b for a, b in zip(below, values, strict=True)]
        edge = [f"{across.at(p):.1f},{up.at(v):.1f}" for p, v in [*zip(at, above), *reversed([*zip(at, below)])]]
        shown = f"<title>{html.escape(f'{name}: at most {number(max(values), unit)}')}</title>"
        body.append(f'<polygon fill="{COLOURS[i % len(COLOURS)]}" points="{" ".join(edge)}">{shown}</polygon>')
        below = above
    greys = {words: 0.2 + 0.2 * (i % 3) for i, words in enumerate(dict.fromkeys(words for *_, words in spans))}
    for begin, end, words in spans:
        size = across.at(end) - across.at(begin)
        body.append(rectangle(across.at(begin), bottom + 4, size - 0.5, 16, COLOURS[6], words, greys[words]))
        if size > width_of(words):
            body.append(text(across.at(begin) + size / 2, bottom + 16, words, "middle"))
    body += across.lying(bottom + 21, x)
    return Picture(width, height, "".join(body), title, description)


def gantt(
    rows: Mapping[str, Sequence[tuple[float, float, str, str]]], title: str, description: str = "", *, unit: str = "",
    width: float = 760,
) -> Picture:  # fmt: skip
    """What each row does when. rows: name → (start, end, kind, label); a kind has a colour and stands in the legend."""
    kinds = list(dict.fromkeys(kind for own in rows.values() for _, _, kind, _ in own))
    end = max((stop for own in rows.values() for _, stop, _, _ in own), default=0) or 1.0
    left = GAP + _label_width(rows) + 6
    size, (legend, y) = (width - left - GAP) / end, _legend(kinds, width - GAP)
    body = [legend]
    for name, own in rows.items():
        body.append(text(left - 6, y + 16, name, "end"))
        for start, stop, kind, label in own:
            long, fill = (stop - start) * size, COLOURS[kinds.index(kind) % len(COLOURS)]
            note = f"{name}: {kind} {label}, {number(start)} to {number(stop, unit)}"
            body.append(rectangle(left + start * size, y, long - 1, 22, fill, note, 0.5))
            if long > width_of(label) + 2:
                body.append(text(left + start * size + long / 2, y + 15, label, "middle"))
        y += 26
    body += _Axis(0, end, left, width - GAP).lying(y + 12, unit, 16)
    return Picture(width, y + 36, "".join(body), title, description)


def network(
    nodes: Sequence[str], arrows: Sequence[tuple[int, int, str]], title: str, description: str = ""
) -> Picture:
    """Nodes on a circle, the first above, and what goes between them: (from, to, words)."""
    box, turn = _label_width(nodes) + 12, 2j * math.pi / len(nodes)
    radius = 60 + box / 2
    middle = complex(GAP + radius + box / 2, 14 + radius)
    at = [middle - radius * 1j * cmath.exp(i * turn) for i in range(len(nodes))]
    body = [frame(p.real - box / 2, p.imag - 12, box, 24) for p in at]
    body += [text(p.real, p.imag + 4, words, "middle") for p, words in zip(at, nodes)]
    for begin, end, words in arrows:
        way = at[end] - at[begin]
        side = -5j * way / abs(way)  # to its left: outside, for a clockwise one
        start, stop = (at[begin] + part * way + side for part in (0.3, 0.7))
        spot = (start + stop) / 2 + 1.5 * side
        anchor = "middle" if abs(side.real) < 2 else "start" if side.real > 0 else "end"
        body += [arrow(start, stop), text(spot.real, spot.imag + 4, words, anchor)]
    return Picture(2 * middle.real, max(p.imag for p in at) + 40, "".join(body), title, description)


def beside(pictures: Sequence[Picture], title: str, description: str = "", *, columns: int = 2) -> Picture:
    """Several pictures in one, in rows of `columns`, each with its title and its description."""
    body, y, width = [], 0.0, 0.0
    for start in range(0, len(pictures), columns):
        x = tall = 0.0
        for picture in pictures[start : start + columns]:
            wide, high, elements = picture.drawn()
            body.append(f'<g transform="translate({x:.1f} {y:.1f})">{elements}</g>')
            x, tall = x + wide, max(tall, high)
        width, y = max(width, x), y + tall
    return Picture(width, y, "".join(body), title, description)
