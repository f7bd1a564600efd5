"""Equations of the pages (blocks of kind `math`, in LaTeX) as MathML: mkdocs.yml names `block`, so that browsers draw them without a script
or a font from another host."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from latex2mathml.converter import convert

XMLNS = "http://www.w3.org/1998/Math/MathML"
CLOSED_BY = {"(": ")", "[": "]"}
TALL = 2.6  # how many times as high as a letter a bracket round a fraction or a matrix is


def block(source: str, *_: object, **__: object) -> str:
    """MathML in a block that scrolls. Raises ValueError where a command is not known: the converter leaves it as it is."""
    math = convert(source.strip(), display="block")
    if unknown := re.search(r"\\\w+|&#x0005C;\w*", math):
        raise ValueError(f"an equation has an unknown command {unknown[0]}: {source}")
    root = ElementTree.fromstring(math)
    for row in list(root.iter()):
        join_words(row)
        enlarge_brackets(row)
    ElementTree.register_namespace("", XMLNS)
    return f'<div class="equation">{ElementTree.tostring(root, encoding="unicode")}</div>'


def join_words(row: ElementTree.Element) -> None:
    """The letters of an upright word, which the converter takes for names of their own, as one name."""
    if len(row) > 1 and all(child.tag == f"{{{XMLNS}}}mi" and child.get("mathvariant") == "normal" for child in row):
        row[0].text = "".join(child.text or "" for child in row)
        del row[0].attrib["mathvariant"], row[1:]


def enlarge_brackets(row: ElementTree.Element) -> None:
    """Brackets round a fraction or a matrix, as high as it is: a browser stretches them in a font for mathematics alone, which many have not."""
    children, opened = list(row), []
    for at, child in enumerate(children):
        if child.tag != f"{{{XMLNS}}}mo" or child.text not in {*CLOSED_BY, *CLOSED_BY.values()}:
            continue
        child.set("stretchy", "false")
        if child.text in CLOSED_BY:
            opened.append(at)
        if child.text in CLOSED_BY or not opened:  # `)^2` closes within the power alone
            continue
        start = opened.pop()
        if any(part.tag in (f"{{{XMLNS}}}mfrac", f"{{{XMLNS}}}mtable") for inner in children[start:at] for part in inner.iter()):
            for place in (start, at):
                row[place] = raised = ElementTree.Element(f"{{{XMLNS}}}mpadded", voffset=f"{-0.25 * (TALL - 1):.2f}em")
                raised.append(children[place])
                children[place].set("style", f"font-size: {TALL}em")
