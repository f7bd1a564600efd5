"""The pages of docs/learn: their Python runs in order in an empty folder, prints what the page says and draws its pictures.

    python tests/docs/test_learn.py [PAGE ...]     writes the outputs and pictures of the pages anew; PAGE as 02-attention

A block ```output after a block of Python is what it prints: words as they stand, numbers within a hundredth (they come from a processor's
rounding). One of kind ```measured is a time, a size or what training led to on one machine: its words are compared.
Each page leaves `model` and `draw`, and `draw(model)` is a picture: another one when the weights are others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import mathml
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "learn"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
PROGRAMS = {file.read_text(encoding="utf-8") for file in (FOLDER.parent / "programs").glob("*.py")}
FENCE = re.compile(r"^```(python|output|measured)\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def run(page: Path) -> tuple[list[str], dict]:
    """(what each block of Python prints, the names that they leave), run in the folder where the process is."""
    torch.set_num_threads(1)  # small models beside other tests: two threads would wait for each other
    printed, names = [], {"__name__": "__main__"}
    for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                if text not in PROGRAMS:  # those are started as they are: test_collectives_page.py
                    exec(compile(text, page.name, "exec"), names)
            printed.append("".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()))
    return printed, names


def outputs(page: Path) -> list[tuple[int, str, str]]:
    """(number of the block of Python before it, kind, text) of what the page says that is printed."""
    found, number = [], -1
    for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
        number += kind == "python"
        found += [(number, kind, text)] if kind != "python" else []
    return found


def close(said: str, printed: str) -> bool:
    a, b = ([float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (said, printed))
    return len(a) == len(b) and all(abs(x - y) <= 0.01 * max(abs(x), 1.0) for x, y in zip(a, b))


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(?<= )(?:[µm]?s|[kKMG]i?B)\b", "", NUMBER.sub("0", text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_equations_of_a_page_are_drawn(page):
    """Each as MathML that holds nothing that the converter did not know."""
    for equation in re.findall(r"^```math\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        drawn = ElementTree.fromstring(mathml.block(equation))
        assert (drawn.tag, [child.tag for child in drawn]) == ("div", [f"{{{mathml.XMLNS}}}math"])


def test_brackets_are_as_high_as_what_they_hold():
    def brackets(equation):
        root = ElementTree.fromstring(mathml.block(equation))
        return {(mo.text, mo.get("style")) for mo in root.iter(f"{{{mathml.XMLNS}}}mo") if mo.text in "()"}

    assert brackets(r"\max\left(\frac{F}{P}, g(x)\right)") == {("(", "font-size: 2.6em"), (")", "font-size: 2.6em"), ("(", None), (")", None)}
    assert brackets(r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}") == {("(", "font-size: 2.6em"), (")", "font-size: 2.6em")}
    assert brackets(r"f(x) + \frac{1}{2}") == {("(", None), (")", None)}


def test_a_word_is_one_name():
    assert "<mi>softmax</mi>" in mathml.block(r"\mathrm{softmax}(x)")


def test_an_equation_with_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match="unknown command"):
        mathml.block(r"\sqroot{2}")


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says_and_draws_its_pictures_from_its_model(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        printed, names = run(page)
        assert outputs(page), "nothing that the page's code prints is shown"
        for number, kind, said in outputs(page):
            now = printed[number]
            assert words(said) == words(now), f"block {number + 1} of {page.name} prints\n{now}"
            assert kind == "measured" or close(said, now), f"block {number + 1} of {page.name} prints\n{now}"
        check_pictures(page, tmp_path, names)
        if page.stem == "05-bert" and importlib.util.find_spec("transformers"):
            check_pipeline(tmp_path / "sentiment", names)
    finally:
        torch.set_num_threads(threads)


def check_pictures(page: Path, folder: Path, names: dict) -> None:
    """Those that the page shows are drawn, with title and text, and come from the model's weights."""
    shown = set(re.findall(r"\]\(pictures/([\w.-]+\.svg)\)", page.read_text(encoding="utf-8")))
    assert shown and shown == {svg.name for svg in folder.glob("*.svg")} and all(name.startswith(page.stem[:2]) for name in shown)
    for name in shown:
        root = ElementTree.parse(folder / name).getroot()
        assert root[0].tag.endswith("title") and root[0].text and root[1].tag.endswith("desc") and root[1].text, f"{name}: no title or no text"
        assert (FOLDER / "pictures" / name).is_file(), f"no {name}: run python tests/docs/test_learn.py {page.stem}"
    model, draw = names["model"], names["draw"]
    before = draw(model).svg()
    assert before == draw(model).svg()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    assert draw(model).svg() != before


def check_pipeline(folder: Path, names: dict) -> None:
    """The page's three steps are transformers' own: the same tokens, and the same probability."""
    import transformers

    theirs, tokenizer = transformers.pipeline("sentiment-analysis", model=str(folder)), names["tokenizer"]
    for text, label in (("the cake was good and great", "LABEL_1"), ("the soup was awful and dull", "LABEL_0")):
        assert theirs.tokenizer(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        answer = theirs(text)[0]
        assert answer["label"] == label and abs(answer["score"] - names["pipeline"](text)["score"]) < 1e-5


def write(page: Path) -> None:
    """The page's outputs and pictures, anew."""
    here, number = os.getcwd(), -1
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        printed, _ = run(page)
        os.chdir(here)
        for old in (FOLDER / "pictures").glob(f"{page.stem[:2]}*.svg"):
            old.unlink()
        for svg in Path(folder).glob("*.svg"):
            shutil.copy(svg, FOLDER / "pictures" / svg.name)

    def replace(found: re.Match) -> str:
        nonlocal number
        number += found[1] == "python"
        return found[0] if found[1] == "python" else f"```{found[1]}\n{printed[number]}```"

    page.write_text(FENCE.sub(replace, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        if not sys.argv[1:] or page.stem in sys.argv[1:]:
            write(page)
