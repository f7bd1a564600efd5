"""The README's measure, and its picture: what is drawn is what the committed rows say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from gradus.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_narrow():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


def test_the_comparison_says_of_adapters_what_the_recipes_have():
    row = next(line for line in README.splitlines() if line.startswith("| LoRA"))
    assert row.split("|")[2].split(";")[0].strip() == ("yes" if "adapter" in Recipe.model_fields else "–")


def test_every_file_it_links_to_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", README)
    assert len(links) > 20
    assert [a or b for a, b in links if not (ROOT / (a or b)).is_file()] == []


def test_no_page_names_a_stranger_s_package():
    """`gradus` on PyPI is another project: the distribution is gradus-ml."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if re.search(r"pip install ['\"]?gradus(?!-ml)\b", page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("door", ["understand", "train", "cost"])
def test_a_door_has_at_most_five_commands(door):
    text = (ROOT / "docs" / f"{door}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    typed = [line for block in blocks for line in block.splitlines() if re.match(r"(\$ )?gradus ", line)]
    assert 3 <= len(typed) <= 5


def test_the_measured_table_is_of_the_committed_rows():
    """Each rate of the table stands in a row of its study, rounded as shown."""
    table = README[README.index("| | other | Gradus | ratio |") :].split("\n\n")[0]
    measured = {f"{row['value']:,.{digits}f}" for name in ("train_step-cpu-1-thread", "train_step-bf16-cpu-1-thread", "decode-cpu")
                for line in (ROOT / "benchmarks/results" / f"{name}.jsonl").read_text().splitlines()
                if (row := json.loads(line)).get("name") in ("samples_per_s",) for digits in (0, 2)}  # fmt: skip
    rates = [cell.split()[-1] for line in table.splitlines()[2:] for cell in line.split("|")[2:4]]
    assert len(rates) == 10 and [rate for rate in rates if rate not in measured] == []


@pytest.fixture
def picture():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("picture", ROOT / "benchmarks" / "picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_goodput_is_todays(picture):
    assert picture.failing().svg() == (ROOT / "docs" / "images" / "goodput.svg").read_text(encoding="utf-8"), "python benchmarks/picture.py"


def test_the_picture_shows_every_row(picture, tmp_path, monkeypatch):
    points = picture.memory()
    assert {name: len(of) for name, of in points.items()} == dict.fromkeys(picture.LAYOUTS, 24) and len(picture.step_time()) == 24
    assert all(abs(planned / measured - 1) < 0.02 for planned, measured in points["one"])
    monkeypatch.setattr(picture, "IMAGES", tmp_path)
    for theme in picture.INK:
        drawn, committed = picture.draw(theme).read_text(), (ROOT / "docs" / "images" / f"proof-{theme}.svg").read_text()
        assert drawn.count("<use ") == committed.count("<use ") >= 96 + 24
        assert picture.INK[theme] in committed
