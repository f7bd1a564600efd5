"""Equations of the pages (blocks of kind `math`, in LaTeX) as MathML: mkdocs.yml names `block`, so that browsers draw them without a script
or a font from another host."""

from __future__ import annotations

import re

from latex2mathml.converter import convert


def block(source: str, *_: object, **__: object) -> str:
    """MathML. Raises ValueError where a command is not known: the converter leaves it as it is."""
    math = convert(source.strip(), display="block")
    if unknown := re.search(r"\\\w+|&#x0005C;\w*", math):
        raise ValueError(f"an equation has an unknown command {unknown[0]}: {source}")
    return math
