"""A picture of images with what a model says of each: green where that is right, red where it is wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from gradus import pictures
from gradus.pictures import Picture

TILE, BAND = 112, 34  # pixels of an image, and of the two lines above it
RIGHT, WRONG = "#1a8a3a", "#d6323a"  # legible on light and dark pages; a sign says the same


def of_predictions(records: Sequence[dict[str, Any]]) -> Picture:
    """About as many rows as columns. records: of images, as `gradus predict` makes them, with their pixels: uint8
    (channels, height, width)."""
    columns = math.ceil(math.sqrt(len(records)))
    words = [_words(record) for record in records]
    width = max(TILE, *(pictures.width_of(line) for lines in words for line in lines)) + pictures.GAP
    tiles = []
    for record, lines in zip(records, words):
        colour = {True: RIGHT, False: WRONG}.get(record.get("right"), "var(--ink)")
        said = pictures.text(pictures.GAP, 12, lines[0]).replace("<text", f'<text style="fill:{colour}"', 1)
        truth = pictures.text(pictures.GAP, 26, lines[1], kind="quiet")
        photo = pictures.photo(record["pixels"], pictures.GAP, BAND, TILE)
        tiles.append(Picture(width, BAND + TILE + pictures.GAP, said + truth + photo, ""))
    known = [record["right"] for record in records if "right" in record]
    title = f"{sum(known)} of {len(known)} right" if known else "What the model says"
    sheet = pictures.beside(tiles, title, "✓ right, ✗ wrong" if known else "", columns=columns)
    return dataclasses.replace(sheet, width=sheet.width + pictures.GAP)


def _words(record: dict[str, Any]) -> tuple[str, str]:
    """Two lines: what the model says, and what it is where that is something else."""
    sign = {True: "✓ ", False: "✗ "}.get(record.get("right"), "")
    score = f" ({record['probability']:.0%})" if "probability" in record else ""
    said = record["label"] if "label" in record else ", ".join(f"{k} {v:.2f}" for k, v in record["scores"].items())
    lines = (f"{sign}{said}", f"it is {record['truth']}" if record.get("right") is False else "")
    return lines[0][:32] + score, lines[1][:32]
