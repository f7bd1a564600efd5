"""The table of docs/layouts.md is the table that the code reads. `python tests/docs/test_layouts_page.py` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gradus.recipe.conflicts import LAYOUT, Condition, conflicts
from gradus.recipe.fields import alternatives
from gradus.recipe.schema import Adapter, BertConfig, DiLoCo, GPTConfig, Latent, Layout, LlamaConfig, LocalSGD

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
BETWEEN = re.compile(r"(?<=<!-- conflicts -->\n).*?(?=<!-- end of conflicts -->)", re.S)


def table() -> str:
    lines = ["| | beside | |", "|---|---|---|"]
    for row in LAYOUT:
        others = ", ".join(" and ".join(map(code, conditions)) for conditions in row.others)
        lines.append(f"| {', '.join(map(code, row.keys))} | {others} | {row.text.replace(' with {}', '')} |")
    return "\n".join(lines) + "\n"


def code(condition: Condition) -> str:
    if condition.values is None:
        return f"`{condition.path}`"
    if condition.negated:
        return f"`{condition.path}` other than {' or '.join(f'`{v}`' for v in sorted(condition.values))}"
    return " or ".join(f"`{condition.path}={v}`" for v in sorted(condition.values))


def test_the_page_shows_the_table():
    assert BETWEEN.search(PAGE.read_text(encoding="utf-8"))[0] == table()


CASES = [(row, key, conditions) for row in LAYOUT for key in row.keys for conditions in row.others]


@pytest.mark.parametrize(("row", "key", "conditions"), CASES)
def test_every_row_can_be_met(row, key, conditions):
    """Sections made as the row says meet it, and it is told with its keys."""
    asked: dict[str, dict] = {"layout": {}, "model": {}, "adapter": {}}
    for condition in (*conditions, key):
        asked[condition.section][condition.key] = value_of(condition)
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2}
    model = BertConfig(d_ff=8, **sizes) if "alternation" in asked["model"] else LlamaConfig(**sizes) if {"window", "latent"} & asked["model"].keys() else GPTConfig(**sizes)
    bare = {"model": model, "layout": Layout(), "adapter": Adapter(rank=4)}
    sections = {name: bare[name].model_copy(update=asked[name]) for name in bare}
    (problem,) = row.problems(sections, {key.path})
    assert (problem.path, problem.others) == (key.path, tuple(c.path for c in conditions)) and "{" not in problem.text
    assert problem in conflicts(sections, {key.path}) and not list(row.problems(bare, ()))


def value_of(condition: Condition) -> object:
    """One that meets the condition."""
    latent = Latent(kv_rank=4, nope_dim=4, rope_dim=4, v_dim=4)
    values, known = condition.values or set(), {"n_experts": 4, "latent": latent, "alternation": True, "window": 8, "base": "nf4", "rank": 4, "stages": 2, "local_sgd": LocalSGD(every=2), "diloco": DiLoCo(every=2)}
    if values and not condition.negated:
        word = min(values)
        return int(word) if word.isdigit() else word
    if condition.key in known:
        return known[condition.key]
    field = Layout.model_fields[condition.key]
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, int | float):
        return field.default * 2
    choices = [word for a in alternatives(field.annotation) for word in get_args(a)]
    return next(word for word in choices if word not in (*values, field.default))


if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
