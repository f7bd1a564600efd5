"""Pictures as SVG that stand alone: each has a title and a description, and is legible on light and dark pages.

A picture is made of numbers by one function (`heatmap`, `bars`, `lines`, `area`, `gantt`), or of words by `note`;
`beside` sets several into one; `Picture.save` writes it. Values may be nested lists, NumPy arrays or tensors.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import os
import re
import struct
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus import errors, files

# the first eight of Okabe and Ito: distinct to all eyes
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442", "#882255", "#44AA99",
)  # fmt: skip
STYLE = (
    "svg{--ink:#111;--paper:#fff;--line:#ccc;--quiet:#666}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6e6e6;--paper:#16181b;--line:#444;--quiet:#9a9a9a}"
    ".map{filter:brightness(1.6)}}"
    "text{fill:var(--ink);font:11px system-ui,sans-serif}.quiet{fill:var(--quiet)}"
    ".title{font-weight:600}.paper{fill:var(--paper)}.line{stroke:var(--line);fill:none}"
)
CHARACTER = 6.2  # pixels that a character of a label takes
GAP = 14  # pixels around a picture and between two


@dataclasses.dataclass(frozen=True)
class Picture:
    """width, height: in pixels. body: SVG elements. title: what it shows; description: what is to be seen in it."""

    width: float
    height: float
    body: str
    title: str
    description: str = ""

    def svg(self, styled: bool = True) -> str:
        """The picture as a document of its own; unstyled, it is part of a page that has STYLE."""
        size = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        name = f"<title>{html.escape(self.title)}</title><desc>{html.escape(self.description)}</desc>"
        paper = f'<rect class="paper" width="{self.width:.0f}" height="{self.height:.0f}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(self.title)}" {size}>'
        style = f"<style>{STYLE}</style>" if styled else ""
        return f"{head}{name}{style}{paper}{self.body}</svg>\n"

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


def note(words: str, width: float = 640) -> Picture:
    """Sentences, as lines of a picture; a new line begins where they have one."""
    rows = [row for line in words.splitlines() for row in textwrap.wrap(line, int((width - 2 * GAP) / CHARACTER))]
    body = "".join(text(GAP, 14 + 15 * i, row, kind="quiet") for i, row in enumerate(rows))
    return Picture(width, 15 * len(rows) + 8, body, words.partition(". ")[0], words)


def text(x: float, y: float, words: Any, anchor: str = "start", kind: str = "") -> str:
    """A line of text whose baseline starts, is centred or ends ("start", "middle", "end") at (x, y)."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(str(words))}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, note: str = "", opacity: float = 1.0) -> str:
    """note: what a pointer that rests on it shows."""
    note = f"<title>{html.escape(note)}</title>" if note else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect {place} fill="{fill}" fill-opacity="{opacity:.3f}">{note}</rect>'


def image(x: float, y: float, width: float, height: float, rows: Sequence[bytes], kind: str = "map") -> str:
    """An image of a few pixels, each drawn as a sharp square. rows: its lines, four bytes a pixel: RGB and opacity.
    kind: "map" of `shades`, which are brighter on dark pages."""
    head = struct.pack(">2I5B", len(rows[0]) // 4, len(rows), 8, 6, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"'
    drawn = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    return f'<image {place} {drawn} href="data:image/png;base64,{data}"/>'


def photo(pixels: Any, x: float, y: float, size: float) -> str:
    """An image in a square. pixels: uint8 (1 or 3, height, width), an array or a tensor."""
    channels = pixels.tolist() if len(pixels) == 3 else pixels.tolist() * 3
    rows = [bytes(v for pixel in zip(*line) for v in (*pixel, 255)) for line in zip(*channels)]
    return image(x, y, size, size, rows, "photo")


def shades(values: Any, most: float | None = None) -> list[bytes]:
    """Rows for `image`, in the colours of `heatmap`."""
    table = _numbers(values)
    most = most or _farthest(table)
    blue, orange = (bytes.fromhex(colour[1:]) for colour in COLOURS[:2])
    full = [[(blue if v >= 0 else orange, round(255 * min(abs(v) / most, 1.0))) for v in row] for row in table]
    return [b"".join(colour + bytes([opacity]) for colour, opacity in row) for row in full]


def shaded(values: Any, x: float, y: float, width: float, height: float, most: float | None = None) -> str:
    """`shades` as an image in a frame."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return image(x, y, width, height, shades(values, most)) + f'<rect class="line" {place}/>'


def _numbers(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _farthest(table: Sequence[Sequence[float]]) -> float:
    """The largest distance from zero; 1 where there is none."""
    return max((abs(v) for row in table for v in row), default=0) or 1.0


def _label_width(words: Sequence[Any]) -> float:
    return CHARACTER * max((len(str(word)) for word in words), default=0)


def heatmap(
    values: Any, rows: Sequence[Any], columns: Sequence[Any], title: str, description: str = "", *,
    cell: float = 22, numbers: bool = False, most: float | None = None, as_image: bool = False,
) -> Picture:  # fmt: skip
    """A square a value: blue above zero, orange below, the fuller the farther from zero.

    values: (rows, columns). cell: pixels. numbers: also written into the squares (three characters want cell >= 30).
    most: the value of a full colour, None for the largest distance from zero. as_image: all squares as one image, which
    is small however many they are, without notes of their values.
    """
    table = _numbers(values)
    most = most or _farthest(table)
    tilted = any(len(str(word)) * CHARACTER > cell - 3 for word in columns)  # 3: between neighbours
    left = GAP + _label_width(rows) + 6
    top = 34 + (_label_width(columns) if tilted else 12)
    body = [text(GAP, 20, title, kind="title")]
    for j, word in enumerate(columns):
        x = left + cell * (j + 0.5)
        if word == "":
            continue
        if tilted:
            turn = f'transform="rotate(-90 {x + 4:.1f} {top - 4:.1f})"'
            body.append(text(x + 4, top - 4, word).replace("<text", f"<text {turn}", 1))
        else:
            body.append(text(x, top - 4, word, "middle"))
    if as_image:
        body.append(shaded(table, left, top, cell * len(columns), cell * len(rows), most))
    for i, (word, row) in enumerate(zip(rows, table, strict=True)):
        y = top + cell * i
        if word != "":
            body.append(text(left - 6, y + cell / 2 + 4, word, "end"))
        for j, value in enumerate(() if as_image else row):
            fill = COLOURS[0] if value >= 0 else COLOURS[1]
            note = f"{word}, {columns[j]}: {value:.3g}"
            body.append(rectangle(left + cell * j, y, cell - 1, cell - 1, fill, note, min(abs(value) / most, 1.0)))
            if numbers:
                body.append(text(left + cell * (j + 0.5), y + cell / 2 + 4, f"{value:.2f}", "middle"))
    width = max(left + cell * len(columns), GAP + _label_width([title])) + GAP
    return Picture(width, top + cell * len(rows) + GAP, "".join(body), title, description)


def bars(
    values: Mapping[str, float | Mapping[str, float]], title: str, description: str = "", *, unit: str = "",
    width: float = 640, limit: tuple[str, float] | None = None,
) -> Picture:  # fmt: skip
    """Lying bars, a name each. A value that is a mapping is a bar of several parts: part → value. limit: (name, value),
    a line across all bars."""
    parts = list(dict.fromkeys(part for value in values.values() if isinstance(value, Mapping) for part in value))
    stacked = {name: value if isinstance(value, Mapping) else {"": value} for name, value in values.items()}
    most = max([sum(parts.values()) for parts in stacked.values()] + ([limit[1]] if limit else []), default=0) or 1.0
    left, right = GAP + _label_width(list(values)) + 6, 90
    scale = (width - left - right) / most
    body = [text(GAP, 20, title, kind="title"), _legend(parts, 38)]
    y = 54.0 if parts else 32.0
    for name, own in stacked.items():
        x = left
        body.append(text(left - 6, y + 13, name, "end"))
        for part, value in own.items():
            fill = COLOURS[parts.index(part) % len(COLOURS)] if part else COLOURS[0]
            body.append(rectangle(x, y, value * scale, 18, fill, f"{name} {part}: {value:.4g} {unit}".strip()))
            x += value * scale
        body.append(text(x + 6, y + 13, f"{sum(own.values()):,.4g} {unit}".strip()))
        y += 24
    if limit:
        x, top = left + limit[1] * scale, 50.0 if parts else 28.0
        body.append(f'<path class="line" style="stroke:var(--ink)" stroke-dasharray="4 3" d="M{x:.1f} {top}V{y:.1f}"/>')
        body.append(text(x, y + 10, f"{limit[0]}: {limit[1]:,.4g} {unit}".strip(), "end", "quiet"))
        y += 14
    return Picture(width, y + GAP / 2, "".join(body), title, description)


def _legend(names: Sequence[str], y: float) -> str:
    out, x = [], float(GAP)
    for i, name in enumerate(names):
        out.append(rectangle(x, y - 9, 10, 10, COLOURS[i % len(COLOURS)]) + text(x + 14, y, name, kind="quiet"))
        x += 30 + CHARACTER * len(name)
    return "".join(out)


def lines(
    series: Mapping[str, Any], title: str, description: str = "", *, x: str = "", y: str = "", width: float = 640,
    height: float = 300,
) -> Picture:  # fmt: skip
    """Curves. series: name → values at 0, 1, 2, ..., or → pairs (x, y). x, y: what the axes show, with the unit."""
    curves = {}
    for name, values in series.items():
        points = _numbers(values)
        curves[name] = [tuple(p) if isinstance(p, (list, tuple)) else (i, p) for i, p in enumerate(points)]
    every = [point for points in curves.values() for point in points]
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*every))
    y0, y1 = min(y0, 0.0), y1 if y1 > y0 else y0 + 1.0
    left, top, right, bottom = 64.0, 50.0, width - GAP, height - 40.0
    at = lambda p: (  # noqa: E731
        left + (p[0] - x0) / ((x1 - x0) or 1) * (right - left), bottom - (p[1] - y0) / (y1 - y0) * (bottom - top),
    )  # fmt: skip
    body = [text(GAP, 20, title, kind="title"), _legend(list(curves) if len(curves) > 1 else [], 38)]
    body.append(f'<path class="line" d="M{left} {top}V{bottom}H{right}"/>')
    body += [text(left - 6, at((x0, v))[1] + 4, f"{v:.3g}", "end", "quiet") for v in (y0, (y0 + y1) / 2, y1)]
    body += [text(at((v, y0))[0], bottom + 14, f"{v:.3g}", "middle", "quiet") for v in (x0, (x0 + x1) / 2, x1)]
    body += [text((left + right) / 2, bottom + 30, x, "middle"), text(GAP, top - 2, y) if len(curves) == 1 else ""]
    body.append(text(right, top - 12, y, "end", "quiet") if len(curves) > 1 else "")
    for i, (name, points) in enumerate(curves.items()):
        path = " ".join("{:.1f},{:.1f}".format(*at(point)) for point in points)
        note, colour = f"<title>{html.escape(name)}</title>", COLOURS[i % len(COLOURS)]
        body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}">{note}</polyline>')
    return Picture(width, height, "".join(body), title, description)


def area(
    series: Mapping[str, Sequence[float]], at: Sequence[float], title: str, description: str = "", *, x: str = "",
    unit: str = "", spans: Sequence[tuple[float, float, str]] = (), width: float = 760, height: float = 320,
) -> Picture:  # fmt: skip
    """Areas on top of one another. series: name → values at the places `at`; spans: (from, to, words), a band each
    below the axis, whose words stand there where they fit. x: what the axis shows."""
    left, top, right, bottom = 64.0, 50.0, width - GAP, height - 56.0
    most = max(map(sum, zip(*series.values())), default=0) or 1.0
    first, extent = at[0], (at[-1] - at[0]) or 1.0
    place = lambda value: left + (value - first) / extent * (right - left)  # noqa: E731
    body, below = [text(GAP, 20, title, kind="title"), _legend(list(series), 38)], [0.0] * len(at)
    for i, (name, values) in enumerate(series.items()):
        above = [a + b for a, b in zip(below, values, strict=True)]
        up = [f"{place(p):.1f},{bottom - v / most * (bottom - top):.1f}" for p, v in zip(at, above)]
        down = [f"{place(p):.1f},{bottom - v / most * (bottom - top):.1f}" for p, v in zip(at, below)]
        shown = f"<title>{html.escape(f'{name}: at most {max(values):.4g} {unit}'.strip())}</title>"
        points, fill = " ".join(up + down[::-1]), COLOURS[i % len(COLOURS)]
        body.append(f'<polygon fill="{fill}" points="{points}">{shown}</polygon>')
        below = above
    body.append(f'<path class="line" d="M{left} {top}V{bottom}H{right}"/>')
    ticks = (0.0, most / 2, most)
    for v in ticks:
        body.append(text(left - 6, bottom - v / most * (bottom - top) + 4, f"{v:.3g} {unit}".strip(), "end", "quiet"))
    shades = {words: 0.2 + 0.2 * (i % 3) for i, words in enumerate(dict.fromkeys(words for *_, words in spans))}
    for begin, end, words in spans:
        size = place(end) - place(begin)
        body.append(rectangle(place(begin), bottom + 4, size - 0.5, 16, COLOURS[6], words, shades[words]))
        if size > _label_width([words]):
            body.append(text(place(begin) + size / 2, bottom + 16, words, "middle"))
    body.append(text((left + right) / 2, bottom + 38, x, "middle", "quiet"))
    return Picture(width, height, "".join(body), title, description)


def gantt(
    rows: Mapping[str, Sequence[tuple[float, float, str, str]]], title: str, description: str = "", *, unit: str = "",
    width: float = 760,
) -> Picture:  # fmt: skip
    """What each row does when. rows: name → (start, end, kind, label); a kind has a colour and stands in the legend."""
    kinds = list(dict.fromkeys(kind for own in rows.values() for _, _, kind, _ in own))
    end = max((stop for own in rows.values() for _, stop, _, _ in own), default=0) or 1.0
    left = GAP + _label_width(list(rows)) + 6
    scale = (width - left - GAP) / end
    body, y = [text(GAP, 20, title, kind="title"), _legend(kinds, 38)], 50.0
    for name, own in rows.items():
        body.append(text(left - 6, y + 16, name, "end"))
        for start, stop, kind, label in own:
            fill, size = COLOURS[kinds.index(kind) % len(COLOURS)], (stop - start) * scale
            note = f"{name}: {kind} {label}, {start:.4g} to {stop:.4g} {unit}".strip()
            body.append(rectangle(left + start * scale, y, size - 1, 22, fill, note, 0.75))
            if size > CHARACTER * len(label) + 2:
                body.append(text(left + start * scale + size / 2, y + 15, label, "middle"))
        y += 26
    body.append(text(left, y + 12, f"0 {unit}".strip(), kind="quiet"))
    body.append(text(width - GAP, y + 12, f"{end:.4g} {unit}".strip(), "end", "quiet"))
    return Picture(width, y + 22, "".join(body), title, description)


def beside(pictures: Sequence[Picture], title: str, description: str = "", *, columns: int = 2) -> Picture:
    """Several pictures in one, in rows of `columns`."""
    body, y, width = [text(GAP, 20, title, kind="title")], 28.0 if title else 0.0, GAP + _label_width([title])
    for start in range(0, len(pictures), columns):
        row, x = pictures[start : start + columns], 0.0
        for picture in row:
            body.append(f'<g transform="translate({x:.1f} {y:.1f})">{picture.body}</g>')
            x += picture.width
        width, y = max(width, x), y + max(picture.height for picture in row)
    return Picture(width, y, "".join(body), title, description)
