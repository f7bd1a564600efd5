"""Pictures: what is drawn is what was given, and each stands alone."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus import pictures

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


def elements(picture: pictures.Picture, tag: str) -> list[ElementTree.Element]:
    """The elements of that kind that are the picture's own: without its paper."""
    return [e for e in ElementTree.fromstring(picture.svg()).iter(SVG + tag) if e.get("class") != "paper"]


def size(rectangle: ElementTree.Element, name: str) -> float:
    return float(rectangle.get(name))


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_a_heatmap_has_a_square_a_value_and_the_fullest_is_the_farthest_from_zero(values):
    picture = pictures.heatmap(values, range(len(values)), range(len(values[0])), "a <b> & c", "what is seen")
    squares, flat = elements(picture, "rect"), [value for row in values for value in row]
    assert len(squares) == len(flat)
    assert [square.get("fill") for square in squares] == [pictures.COLOURS[value < 0] for value in flat]
    most = max(abs(value) for value in flat)
    assert all(size(square, "fill-opacity") == pytest.approx(abs(value) / (most or 1), abs=1e-3) for square, value in zip(squares, flat))
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
