"""Pictures: what is drawn is what was given, and each stands alone."""

from __future__ import annotations

import base64
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gradus import pictures

sys.path.insert(0, str(Path(__file__).parent))

from svg_parts import check_texts, elements

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


def size(rectangle: ElementTree.Element, name: str) -> float:
    return float(rectangle.get(name))


def pixels(picture: pictures.Picture) -> list[np.ndarray]:
    """Of each image in it, (height, width, 4)."""
    hrefs = [image.get("href") for image in elements(picture, "image")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(href.partition(",")[2])))) for href in hrefs]


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_a_heatmap_has_a_square_a_value_and_the_fullest_is_the_farthest_from_zero(values):
    picture = pictures.heatmap(values, range(len(values)), range(len(values[0])), "a <b> & c", "what is seen")
    squares, most = pixels(picture)[0], max(abs(value) for row in values for value in row) or 1
    colours = [[tuple(bytes.fromhex(pictures.COLOURS[value < 0][1:])) for value in row] for row in values]
    assert np.array_equal(squares[..., :3], np.array(colours))
    assert np.allclose(squares[..., 3] / 255, np.abs(values) / most, atol=1 / 255)
    root = ElementTree.fromstring(picture.svg())
    assert (root[0].text, root[1].text, root.get("aria-label")) == ("a <b> & c", "what is seen", "a <b> & c")


def test_a_tensor_is_drawn_as_its_list():
    values = torch.tensor([[0.25, -0.5]])
    assert pictures.heatmap(values, "a", "bc", "t") == pictures.heatmap(values.tolist(), "a", "bc", "t")
    assert pictures.lines({"a": values[0]}, "t") == pictures.lines({"a": [0.25, -0.5]}, "t")


def test_bars_are_as_long_as_their_values_and_their_parts_join():
    whole = elements(pictures.bars({"a": 1.0, "b": 4.0}, "t"), "rect")
    assert size(whole[1], "width") == pytest.approx(4 * size(whole[0], "width"), abs=0.4)
    parts = elements(pictures.bars({"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0}}, "t"), "rect")[2:]  # after the legend
    assert [size(part, "width") / size(parts[0], "width") for part in parts] == pytest.approx([1, 3, 2], rel=1e-2)
    assert size(parts[1], "x") == pytest.approx(size(parts[0], "x") + size(parts[0], "width"), abs=0.2)
    assert parts[1].get("fill") == parts[2].get("fill") != parts[0].get("fill")


def test_a_schedule_is_drawn_to_scale():
    rows = {"one": [(0.0, 1.0, "forward", "0"), (2.0, 4.0, "backward", "0")], "two": [(1.0, 2.0, "forward", "0")]}
    one, back, two = elements(pictures.gantt(rows, "t", unit="s"), "rect")[2:]
    assert size(two, "x") - size(one, "x") == pytest.approx(size(back, "width") / 2 + 0.5, abs=0.2)
    assert size(one, "y") == size(back, "y") < size(two, "y")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_pictures_stand_beside_each_other_without_overlap(count):
    one = pictures.bars({"a": 1.0}, "t")
    picture = pictures.beside([one] * count, "all", "each", columns=2)
    assert len(elements(picture, "rect")) == count
    assert picture.width >= one.width * min(count, 2) and picture.height >= one.height * ((count + 1) // 2)


def test_a_saved_picture_stands_alone(tmp_path):
    pictures.lines({"loss": [(0, 3.0), (10, 1.0)]}, "Loss", "It falls.", x="step", y="nats").save(tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "docs" / "learn" / "pictures").glob("*.svg")), ids=lambda file: file.stem)
def test_no_text_leaves_a_picture_of_the_pages(file):
    check_texts(file.read_text(encoding="utf-8"))


LONG = "a name that is much longer than what it names"


@pytest.mark.parametrize("picture", [
    pictures.heatmap([[1.0]], [LONG], [LONG], LONG, LONG * 9, axes=(LONG, LONG)),
    pictures.heatmap([[-1.0, 0.5]] * 60, range(60), range(2), "t", axes=("position", "dimension"), cell=5),
    pictures.bars({LONG: {LONG: 1e-7, "b": 2.0}, "b": {"c" * 60: 1.0}}, LONG * 3, unit="tokens", limit=("all", 0.1)),
    pictures.lines({LONG + str(i): [(0, 1e-6), (5, 21.6)] for i in range(9)}, "t", x="ms", y="MB"),
    pictures.area({f"{LONG} {i}": [1.0, 91.2] for i in range(9)}, [0, 1], "t", x="pieces", unit="GB", spans=[(0, 1, "forward")]),
    pictures.gantt({LONG: [(0.0, 91.2, f"{LONG} {i}", "1") for i in range(5)]}, "t", LONG, unit="s"),
    pictures.network([LONG, "b", "c"], [(i, j, "words") for i in range(3) for j in range(3) if i != j], "t", "d"),
    pictures.Picture(10, 10, "", "t", "d", ("-0.000946", "1.03e-6")),
], ids=lambda picture: "")  # fmt: skip
def test_a_picture_is_as_wide_as_its_words(picture):
    check_texts(picture.svg())
    check_texts(pictures.beside([picture, picture, picture], "all", LONG).svg())


def test_a_part_of_a_page_leaves_the_description_to_the_page():
    picture = pictures.bars({"a": 1.0}, "t", "what is seen")
    assert "what is seen</text>" in picture.svg() and "what is seen</text>" not in picture.svg(styled=False)


@pytest.mark.parametrize(("low", "high", "places"), [
    (0, 21.6, [0, 5, 10, 15, 20]), (0, 91.2, [0, 20, 40, 60, 80]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 8, [0, 5]),
    (0, 0.3, [0, 0.1, 0.2, 0.3]), (99, 1234, [500, 1000]), (0, 3e-6, [0, 1e-6, 2e-6, 3e-6]), (5, 5, [5]),
])  # fmt: skip
def test_ticks_are_round(low, high, places):
    assert pictures.ticks(low, high) == pytest.approx(places)


@pytest.mark.parametrize(("value", "said"), [
    (1.029e-06, "1.03e-6"), (0.0009455, "0.000946"), (-0.31415, "-0.314"), (21.6, "21.6"), (1024, "1,020"), (0, "0"),
    (-1234567, "-1.23 million"), (1e-12, "1e-12"),
])  # fmt: skip
def test_a_number_has_three_digits(value, said):
    assert pictures.number(value) == said


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Of two colours, by WCAG 2.2."""
    linear = [[c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour] for colour in (a, b)]
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), colour)) for colour in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", re.findall(r"--ink:(#\w+);--paper:(#\w+)", pictures.STYLE), ids=["light", "dark"])
def test_a_number_in_a_square_can_be_read(theme):
    """On every colour that a square can have, by the contrast that WCAG asks of large text (3) and nearly that of small text (4.5)."""

    def colour(code: str) -> tuple[float, ...]:
        return tuple(int(c[0] + c[-1], 16) / 255 for c in re.findall("." if len(code) == 4 else "..", code[1:]))

    ink, paper = map(colour, theme)
    values = [[i / 100 for i in range(-100, 101)]]
    picture = pictures.heatmap(values, ["r"], [""] * 201, "t", numbers=True, most=1.0)
    numbered = [e for e in elements(picture, "text") if e.text and re.fullmatch(r"-?\d\.\d\d", e.text)]
    assert len(numbered) == 201
    for element, value in zip(numbered, values[0]):
        fill = {None: ink, "white": (1, 1, 1), "black": (0, 0, 0)}[element.get("class")]
        full = colour(pictures.COLOURS[value < 0])
        assert contrast(fill, tuple(abs(value) * f + (1 - abs(value)) * p for f, p in zip(full, paper))) > 3.6, value
