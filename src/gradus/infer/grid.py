"""A picture of many images with their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradus import files
from gradus.errors import need


def picture_grid(images: Sequence[np.ndarray], titles: Sequence[str], colours: Sequence[str], path: str | Path) -> None:
    """Write a PNG of images with titles above them, about as many rows as columns.

    images: uint8 (channels, height, width), 1 or 3 channels, of any sizes; small ones are enlarged to be seen, large
    ones reduced. colours: of the titles, by name ("green", "red") or #rrggbb. The file is written aside and renamed.
    """
    what = "a picture of images"
    Image, ImageDraw, ImageFont = (need(f"PIL.{m}", "vision", what) for m in ("Image", "ImageDraw", "ImageFont"))
    assert len(images) == len(titles) == len(colours) > 0
    tile, gap, font = 128, 12, ImageFont.load_default(size=15)
    band = 2 + sum(font.getmetrics())
    titles = [t if len(t) <= 48 else t[:47] + "…" for t in titles]
    width = max([tile] + [math.ceil(font.getlength(t)) for t in titles])
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (gap + columns * (width + gap), gap + rows * (band + tile + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, title, colour) in enumerate(zip(images, titles, colours)):
        left, top = gap + i % columns * (width + gap), gap + i // columns * (band + tile + gap)
        draw.text((left, top), title, fill=colour, font=font)
        picture = Image.fromarray(np.ascontiguousarray(image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)))
        scale = tile / max(picture.size)
        smooth = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS  # single pixels stay visible
        sheet.paste(picture.resize([max(1, round(side * scale)) for side in picture.size], smooth), (left, top + band))
    with files.aside(Path(path)) as aside:
        sheet.save(aside, format="PNG")
