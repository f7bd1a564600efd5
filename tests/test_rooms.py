"""The size of the house is counted as it says, and a room over its budget is named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rooms


@pytest.mark.parametrize("source, n", [
    ("x = 1\n", 3), ("# a comment\n\nx = 1  # and one\n", 3), ('"""A docstring."""\nx = "a text"\n', 3),
    ('def f(x):\n    """What it does."""\n    return x\n', 8), ('def f():\n    "one"\n    "two"\n', 6), ("x = (\n    1,\n)\n", 6),
])  # fmt: skip
def test_a_token_is_code(source, n):
    assert rooms.tokens(source) == n


@pytest.mark.parametrize("budgets, code, said", [
    ("top = 3\ndata = 5", 0, ["data", "5 of", "all", "8 of"]),
    ("top = 3\ndata = 4", 1, ["over its budget by 1"]),
    ("top = 3", 1, ["over its budget by 5"]),
])  # fmt: skip
def test_a_room_over_its_budget_is_named(tmp_path, monkeypatch, capsys, budgets, code, said):
    src = tmp_path / "src/gradus"
    (src / "data/kinds").mkdir(parents=True)
    for file, text in (("a.py", "x = 1\n"), ("data/b.py", "y\n"), ("data/kinds/c.py", "f(x)\n")):
        (src / file).write_text(text)
    (tmp_path / "pyproject.toml").write_text(f"[tool.rooms]\n{budgets}\n")
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    assert rooms.main() == code
    out = capsys.readouterr().out
    assert all(word in out for word in said), out
