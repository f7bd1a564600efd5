"""The page of `gradus look`: a pure function of what was seen."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator
from pathlib import PurePath

import torch
from torch import Tensor

from gradus import pictures
from gradus.pictures import Picture
from gradus.report.blocks import Block, Figure, Heading, Html, Table, Text, plain

LAYERS, HEADS = 6, 8  # of which a larger model's are chosen
ROWS, COLUMNS = 64, 128  # of a table


@dataclasses.dataclass
class Layer:
    """weights: (n_heads, q_len, k_len). number: from 1. causal: no token attends to a later one. texts: those of `Seen`
    that the queries and the keys are."""

    kind: str
    number: int
    weights: Tensor
    causal: bool
    texts: tuple[int, int] = (0, 0)


@dataclasses.dataclass
class Seen:
    """What a page shows. tables: learned or fixed, (positions, d_model) each. biases: of a kind of attention, (n_heads,
    q_len, k_len). rotary: cos and sin of rotations, (positions, head_dim) each. texts: the tokens that are read, and of
    an encoder-decoder those of its decoder. pixels: (3, height, width), uint8. nearest: of a table of embeddings a row
    for each token."""

    name: str
    about: str
    layers: list[Layer]
    tables: dict[str, Tensor]
    biases: dict[str, Tensor]
    rotary: tuple[Tensor, ...]
    input: str = ""
    says: str = ""
    cut: str = ""  # what of the input is left out
    texts: list[list[str]] = dataclasses.field(default_factory=list)
    pixels: Tensor | None = None
    nearest: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)


def evenly(n: int, most: int) -> list[int]:
    """At most `most` of 0 .. n-1, first and last among them."""
    return list(range(n)) if n <= most else [round(i * (n - 1) / (most - 1)) for i in range(most)]


def content(seen: Seen) -> Iterator[Block]:
    yield Heading(1, f"A look inside {'/'.join(PurePath(seen.name).parts[-2:])}")
    shown_input = seen.input if len(seen.input) <= 300 else f"{seen.input[:299]}…"
    yield Text([("plain", f"{seen.name}: {seen.about}. Input: "), ("strong", shown_input)])
    if seen.cut:
        yield plain(seen.cut)
    if seen.says:
        yield Text([("plain", "The model says: "), ("strong", seen.says)])
    for what, tokens in zip(("It reads", "Its decoder reads what it wrote before"), seen.texts):
        parts = [part for token in tokens for part in (("code", token), ("plain", "  "))]
        yield Text([("plain", f"{what}, {len(tokens)} tokens: "), *parts])
    if seen.pixels is not None:
        yield Heading(2, "Patches")
        yield Figure([patches(seen.pixels, seen.layers[0].weights.shape[-1])])
    yield Heading(2, "Attention")
    yield from attention(seen)
    yield Heading(2, "Positions")
    yield from positions(seen)
    if seen.nearest:
        yield Heading(2, "Nearest words")
        yield plain("For each token of the text: the rows of the table of embeddings nearest to its own, by cosine.")
    for name, rows in seen.nearest.items():
        head = ["token", *(f"nearest {i}" for i in range(1, len(rows[0])))]
        yield from folded(f"{name}: {len(rows)} tokens", Table(head, rows, words=True))


def folded(summary: str, block: Block) -> Iterator[Block]:
    yield from (Html(f"<details><summary>{html.escape(summary)}</summary>"), block, Html("</details>"))


# ---------------------------------------------------------------- attention


def attention(seen: Seen) -> Iterator[Block]:
    how = "Rows are queries (the tokens that look), columns keys (those that they look at); each row sums to 1"
    if seen.pixels is not None:
        who = "the class token" if _cut(seen.layers[0].weights)[1] else "the mean of all patches"
        how = f"The image is blue where {who} looks more than an even share (full: 4 times), orange where less"
    yield plain(f"{how}. Each caption says what is to be seen.")
    kinds: dict[str, list[Layer]] = {}
    for layer in seen.layers:
        kinds.setdefault(layer.kind, []).append(layer)
    for kind, every in kinds.items():
        layers, heads = [every[i] for i in evenly(len(every), LAYERS)], evenly(len(every[0].weights), HEADS)
        yield Heading(3, kind)
        sizes = (len(layers), len(every), "layers"), (len(heads), len(every[0].weights), "heads")
        if said := " and ".join(f"{n} of {of} {what}" for n, of, what in sizes if n < of):
            yield plain(f"A sample: {said}, evenly chosen, the first and the last among them.")
        yield Figure([overview(seen, kind, layers, heads)])
        for layer in layers:
            drawn = Figure([head_picture(seen, layer, head) for head in heads])
            yield from folded(f"Layer {layer.number} of {len(every)}, {len(heads)} heads", drawn)


def overview(seen: Seen, kind: str, layers: list[Layer], heads: list[int]) -> Picture:
    size, left, top = 64, 60, 22
    body = [
        pictures.text(left + (size + 6) * j + size / 2, top - 6, f"head {head + 1}", "middle")
        for j, head in enumerate(heads)
    ]
    for i, layer in enumerate(layers):
        y = top + (size + 6) * i
        body.append(pictures.text(left - 6, y + size / 2, f"layer {layer.number}", "end"))
        for j, head in enumerate(heads):
            x = left + (size + 6) * j
            if seen.pixels is not None:
                body.append(_over_image(seen.pixels, layer.weights[head], x, y, size))
            else:
                body.append(pictures.shades(layer.weights[head], x, y, size, size, 1.0))
    width, height = left + (size + 6) * len(heads) + 6, top + (size + 6) * len(layers)
    ends = ("0", "1") if seen.pixels is None else ("1/4", "4 × an even share")
    text = "All at once: a row a layer, a column a head. They are drawn larger below."
    return Picture(width, height, "".join(body), f"{kind}: overview", text, ends)


def head_picture(seen: Seen, layer: Layer, head: int) -> Picture:
    weights, title = layer.weights[head], f"Layer {layer.number}, head {head + 1}"
    if seen.pixels is not None:
        return Picture(220, 206, _over_image(seen.pixels, weights, 14, 0, 192), title, gaze(weights))
    rows, columns = (seen.texts[i] for i in layer.texts)
    cell = max(12.0, min(20.0, 180 / len(columns)))
    return pictures.heatmap(
        weights, rows, columns, title, habit(weights, rows, columns, layer), axes=("query", "key"), cell=cell, most=1.0,
    )  # fmt: skip


def habit(weights: Tensor, rows: list[str], columns: list[str], layer: Layer) -> str:
    """What a head mostly looks at, in words. weights: (q_len, k_len); the first row of a causal layer, which has no
    choice, is left out."""
    first, cross = int(layer.causal and len(rows) > 1), layer.texts[0] != layer.texts[1]
    w = weights[first:]
    steps = torch.arange(w.shape[1]) - torch.arange(first, len(rows))[:, None]  # (q, k): how far the key is after
    offsets = {0: "at the same place" if cross else "at the token itself", -1: "one token back", 1: "one token on"}
    shares = {what: float(w[steps == o].sum()) / max(1, int((steps == o).sum())) for o, what in offsets.items()}
    column = int(w.mean(0).argmax())
    shares[f"at ‘{columns[column]}’"] = float(w.mean(0)[column])
    what = max(shares, key=shares.__getitem__)
    i, j = divmod(int(w.argmax()), w.shape[1])
    allowed = torch.arange(first + 1, len(rows) + 1) if layer.causal else torch.tensor([w.shape[1]])
    parts = [
        f"{'Looks mostly' if shares[what] >= 0.5 else 'Spread out, most'} {what} ({shares[what]:.0%})",
        f"strongest pair {rows[first + i]} → {columns[j]} ({float(w[i, j]):.2f})",
        *([] if cross else [f"mean distance {float((w * steps.abs()).sum(1).mean()):.1f} tokens"]),
        f"entropy {entropy(w):.1f} of at most {float(allowed.float().log2().mean()):.1f} bits",
    ]
    return "; ".join(parts)


def entropy(weights: Tensor) -> float:
    """Of the rows, their mean in bits: 0 where each looks at one key alone."""
    return float(torch.special.entr(weights).sum(-1).mean()) / math.log(2)


# ---------------------------------------------------------------- an image


def _cut(weights: Tensor) -> tuple[int, int]:
    """(patches on a side, tokens before them)."""
    side = math.isqrt(weights.shape[-1])
    return side, weights.shape[-1] - side * side


def _look(weights: Tensor) -> Tensor:
    """Of the class token, else of the mean patch: (n_tokens,)."""
    return weights[0] if _cut(weights)[1] else weights.mean(0)


def gaze(weights: Tensor) -> str:
    """What a head looks at in an image, in words. weights: (n_tokens, n_tokens)."""
    (side, before), row = _cut(weights), _look(weights)
    i, j = divmod(int(row[before:].argmax()), side)
    itself = f"; {float(row[:before].sum()):.0%} at the class token itself" if before else ""
    text = f"Most at row {i + 1}, column {j + 1} ({float(row[before:].max()):.0%}){itself}"
    return f"{text}; entropy {entropy(row[None]):.1f} of at most {math.log2(len(row)):.1f} bits"


def _over_image(pixels: Tensor, weights: Tensor, x: float, y: float, size: float) -> str:
    (side, before), row = _cut(weights), _look(weights)
    times = (row[before:] * len(row)).clamp_min(1e-9).log2().clamp(-2, 2).view(side, side)
    grey = pixels.float().mean(0, keepdim=True).byte().expand(3, -1, -1)
    return pictures.photo(grey, x, y, size) + pictures.shades(0.8 * times, x, y, size, size, 2.0)


def patches(pixels: Tensor, n_tokens: int) -> Picture:
    side, before = _cut(torch.empty(n_tokens))
    size, gap, (height, width) = 280, 3 if side <= 32 else 1, pixels.shape[1:]
    body = [pictures.photo(pixels, 14, 0, size)]
    for i in range(1, side):
        at = size * i / side - gap / 2
        body.append(f'<rect class="paper" x="{at + 14:.1f}" y="0" width="{gap}" height="{size}"/>')
        body.append(f'<rect class="paper" x="14" y="{at:.1f}" width="{size}" height="{gap}"/>')
    text = f"{width} × {height} pixels, as the model reads them, are {side} × {side} patches, row by row"
    text += f": {n_tokens} tokens{', the first of them the class token' if before else ''}."
    return Picture(size + 28, size + 14, "".join(body), "The image as patches", text)


# ---------------------------------------------------------------- positions


def positions(seen: Seen) -> Iterator[Block]:
    if not (seen.tables or seen.biases or seen.rotary):
        yield plain("None was found: no table of positions, no rotation, no bias by distance.")
    for name, table in seen.tables.items():
        yield plain(f"{name}: a table, a row of {table.shape[1]} numbers for each of {len(table)} positions.")
        unit = torch.nn.functional.normalize(table, dim=-1)
        yield Figure((_grids if seen.pixels is not None else _table)(table, unit @ unit.T))
    if seen.rotary and len(seen.rotary[0]) > 1:
        yield Figure([_rotary(*seen.rotary)])
    for kind, bias in seen.biases.items():
        yield Figure([_bias(kind, bias)])


def _grids(table: Tensor, alike: Tensor) -> list[Picture]:
    side, before = _cut(alike)
    grids = alike[before:, before:].view(side, side, side, side).transpose(1, 2).flatten(0, 1).flatten(1)
    text = "For each patch, at its place in the image, a small map: the cosine of its position with all others."
    title, names, cell = "Positions of patches, compared", len(grids) * [""], 320 / len(grids)
    return [pictures.heatmap(grids, names, names, title, text, cell=cell, most=1.0)]


def _table(table: Tensor, alike: Tensor) -> list[Picture]:
    rows = evenly(len(table), ROWS)
    which = f"{len(rows)} of the {len(table)} positions" if len(rows) < len(table) else "all positions"
    numbers = table[rows, :COLUMNS]
    most = float(numbers.abs().quantile(0.98))  # a few outliers would leave the rest pale
    text = f"A row a position ({which}), a column a dimension (at most {COLUMNS}); blue above 0, orange below, "
    text += f"full from {most:.2g} on."
    near = float(alike.diagonal(1).mean()) if len(table) > 1 else 1.0
    far = f"That of neighbours is {near:.2f} on average, that of the first and the last {float(alike[0, -1]):.2f}."
    axes, every = ("position", "dimension"), range(numbers.shape[1])
    size = 320 / max(numbers.shape)
    return [
        pictures.heatmap(
            numbers, rows, every, "Table of positions", text, axes=axes, cell=size, most=most
        ),
        pictures.heatmap(
            alike[rows][:, rows], rows, rows, "Cosine of each position with each", far, axes=("position", "position"),
            cell=320 / len(rows), most=1.0,
        ),
    ]  # fmt: skip


def _rotary(cos: Tensor, sin: Tensor) -> Picture:
    half = cos.shape[-1] // 2
    turns = torch.atan2(sin[1, half:], cos[1, half:]).abs().clamp_min(1e-12)  # radians a position
    first, last = (2 * math.pi / float(turns[i]) for i in (0, -1))
    text = "A row a pair of dimensions of queries and keys, a column a position, which turns the pair by an angle: its "
    text += f"cosine. Pair 1 comes round every {first:.1f} tokens, pair {half} every {last:,.0f}."
    pairs = evenly(half, 16)
    return pictures.heatmap(
        cos[:, pairs].T, [f"pair {i + 1}" for i in pairs], range(len(cos)), "Rotary positions", text,
        axes=("pair", "position"), cell=14, most=1.0,
    )  # fmt: skip


def _bias(kind: str, bias: Tensor) -> Picture:
    heads, (q, k) = evenly(len(bias), HEADS), bias.shape[-2:]
    steps = range(1 - q, k if kind.startswith("Encoder") else 1)
    diagonals = (bias.double().diagonal(o, dim1=-2, dim2=-1) for o in steps)
    by_step = torch.stack([diagonal.mean(-1) for diagonal in diagonals], -1)[heads]  # (heads, steps)
    best = ", ".join(f"{steps[int(row.argmax())]:+d}" for row in by_step)
    text = "A row a head, a column a distance of the key in tokens, after (+) or before (-) the query: what is added "
    text += f"to the score, blue above 0, orange below. The distance that each head favours most: {best}."
    names = [f"{o:+d}" if o % 5 == 0 else "" for o in steps]
    return pictures.heatmap(
        by_step, [f"head {h + 1}" for h in heads], names, f"Relative bias, {kind}", text,
        axes=("head", "distance"), cell=max(12.0, min(22.0, 560 / len(steps))),
    )  # fmt: skip
