"""Every experiment can be read, its page is what its committed rows say, and the index names each. A script beside the studies writes what is
no study; its page is what it says too."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

from gradus.plan.answer import Request, answer
from gradus.proof import results, study_file
from gradus.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments").glob("*.yaml"))
PAGES = ROOT / "docs/experiments"
RECIPES = ROOT / "src/gradus/recipe/library"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_read_and_its_page_is_its_rows(file):
    study, told = study_file.load(file)
    assert told.about.startswith("# "), "what the source did, and what is changed"
    assert f"make experiment NAME={file.stem}" in file.read_text(encoding="utf-8")
    rows, page = ROOT / "experiments/results" / f"{file.stem}.jsonl", PAGES / f"{file.stem}.md"
    if not rows.exists():
        assert not page.exists() or f"<!-- {file.stem} -->\nnot yet run\n<!-- end of {file.stem} -->" in page.read_text(encoding="utf-8")
        return
    table = "\n".join(results.markdown(read_rows(rows), told.columns))
    assert f"<!-- {file.stem} -->\n{table}\n<!-- end of {file.stem} -->" in page.read_text(encoding="utf-8")
    assert {r["configuration"] for r in read_rows(rows)} == {c.name for c in study.configurations}


def test_the_index_names_each():
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for file in FILES:
        link = f"[{file.stem}]({file.stem}.md)" if (PAGES / f"{file.stem}.md").exists() else f"`{file.stem}`"
        assert link in index, f"docs/experiments/README.md: no {link}"
    for script in (ROOT / "experiments").glob("*.py"):
        assert f"[{script.stem}]({script.stem}.md)" in index


def test_the_page_of_claims_is_what_committed_rows_say():
    made = runpy.run_path(str(ROOT / "experiments/s4-claims.py"))
    table = made["FIRST"] + "\n".join(made["table"]()) + "\n" + made["LAST"]
    assert table in (PAGES / "s4-claims.md").read_text(encoding="utf-8"), "python experiments/s4-claims.py"


def test_claims_are_told_from_rows(tmp_path):
    made = runpy.run_path(str(ROOT / "experiments/s4-claims.py"))
    place = made["told"].__globals__
    assert made["told"]("none", "a")() == "not measured yet: `none`"
    place["HERE"] = tmp_path
    (tmp_path / "results").mkdir()
    common = {"kind": "measured", "processes": 2, "cpu": "CPU", "threads": 1, "at": {"x": "b"}, "configuration": "b", "against": "a"}
    rows = [Row("ratio", 1.5, conditions=common), Row("ratio/memory", 0.25, conditions=common), Row("memory/rest", 3, conditions=common),
            Row("memory/rest", 6, conditions={**common, "configuration": "a"})]  # fmt: skip
    (tmp_path / "results/s.jsonl").write_text("".join(row.json() + "\n" for row in rows), encoding="utf-8")
    assert made["told"]("s", "b", rest=True)() == "b: speed × 1.50, tensors × 0.25, activations and the rest × 0.50 (CPU, 1 thread; `s`)"
    assert made["told"]("s", "b", each=True)() == "b: efficiency 0.75 (CPU, 1 thread a process; `s`)"


def test_the_lectures_page_is_its_rows():
    made = runpy.run_path(str(ROOT / "experiments/s5-lecture.py"))
    found = read_rows(made["ROWS"])
    assert made["page"](found) == made["PAGE"].read_text(encoding="utf-8"), "python experiments/s5-lecture.py"
    assert made["CHART"].read_text(encoding="utf-8").startswith("<svg")
    of = {(r["name"], r.get("kind"), r.get("model"), r.get("factor")): r["value"] for r in found}
    for name in made["SIZES"]:
        assert of["parameters/total/all", "formula", name, None] == of["parameters/total", "built", name, None]
        assert of["parameters/n_mlp", "formula", name, None] == of["parameters/n_mlp", "built", name, None]
    assert [of["devices", "formula", None, factor] for factor in (6, 8)] == [760, 1013]
    sent = {r["link"]: r["value"] for r in found if r["name"] == "link/all-reduce of 8"}
    assert sent["InfiniBand NDR"] == pytest.approx(2 * 7 / 8 * 350e9 / 50e9)


def test_the_road_is_planned_in_hours_an_epoch():
    """As `gradus plan` says of the first row, with the number of images of an epoch."""
    study, _ = study_file.load(ROOT / "experiments/s3-road.yaml")
    first = study.configurations[0].foreign
    values = first.values()
    step = answer(Request(str(RECIPES / "cifar10-vit-l16.yaml"), ("data.path=null", "layout.device=cuda", "layout.precision=fp32"), "1xA40")).value("time/step")
    assert values["time/step"][0] == pytest.approx(step, rel=1e-6)
    assert values["time/epoch"] == (pytest.approx(math.ceil(50_000 / 32) * step / 3600, rel=1e-3), "h")
