"""What the tests of pictures share: the elements and the words of one, and where these stand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from gradus import pictures

SVG = "{http://www.w3.org/2000/svg}"
# thousandths of the font's size that DejaVu Sans gives the characters from the space to the tilde, and its bold ones more of it
WIDTHS = dict(zip(map(chr, range(32, 127)), map(int, re.findall(r"\d+", (
    "318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337 337 838 838 838 531 "
    "1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732 684 989 685 611 685 390 337 390 838 500 "
    "500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635 635 411 521 392 634 592 818 592 592 525 636 337 636 838 "
)))))  # fmt: skip
BOLD = 1.11


def elements(picture: pictures.Picture, tag: str) -> list[ElementTree.Element]:
    """The elements of that kind that are the picture's own: without its paper."""
    return [e for e in ElementTree.fromstring(picture.svg()).iter(SVG + tag) if e.get("class") != "paper"]


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """(words, left, top, right, bottom) of each text, in the picture's pixels, drawn in DejaVu Sans."""
    found = []

    def walk(element: ElementTree.Element, x: float, y: float, turned: bool) -> None:
        if move := re.match(r"translate\(([-\d.]+) ([-\d.]+)\)(?: rotate\((-90|0)\))?$", element.get("transform", "")):
            x, y, turned = x + float(move[1]), y + float(move[2]), turned or move[3] == "-90"
        if element.tag == SVG + "text":
            words, bold = element.text or "", element.get("class") == "title"
            long = 0.011 * sum(WIDTHS.get(c, 900) for c in words) * (BOLD if bold else 1)
            start = float(element.get("x")) - {"start": 0, "middle": long / 2, "end": long}[element.get("text-anchor")]
            base = float(element.get("y"))
            box = (x + start, y + base - 8, x + start + long, y + base + 3)
            found.append((words, *((x - 8, y - start - long, x + 3, y - start) if turned else box)))
        for child in element:
            walk(child, x, y, turned)

    walk(ElementTree.fromstring(svg), 0, 0, False)
    return found


def check_texts(svg: str) -> None:
    """None leaves the picture, and title and description are among them."""
    root = ElementTree.fromstring(svg)
    *_, width, height = map(float, root.get("viewBox").split())
    found = texts(svg)
    for words, left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, f"{words!r} leaves the picture of {width} x {height}"
    every = " ".join(words for words, *_ in found)
    assert root[0].text in every and all(word in every for word in (root[1].text or "").split())
