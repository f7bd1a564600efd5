"""Every experiment can be read, its page is what its committed rows say, and the index names each."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.proof import results, study_file
from gradus.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments").glob("*.yaml"))
PAGES = ROOT / "docs/experiments"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_read_and_its_page_is_its_rows(file):
    study, told = study_file.load(file)
    assert told.about.startswith("# "), "what the source did, and what is changed"
    assert f"make experiment NAME={file.stem}" in file.read_text(encoding="utf-8")
    rows, page = ROOT / "experiments/results" / f"{file.stem}.jsonl", PAGES / f"{file.stem}.md"
    assert rows.exists() == page.exists()
    if not rows.exists():
        return
    table = "\n".join(results.markdown(read_rows(rows), told.columns))
    assert f"<!-- {file.stem} -->\n{table}\n<!-- end of {file.stem} -->" in page.read_text(encoding="utf-8")
    assert {r["configuration"] for r in read_rows(rows)} == {c.name for c in study.configurations}


def test_the_index_names_each():
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for file in FILES:
        link = f"[{file.stem}]({file.stem}.md)" if (PAGES / f"{file.stem}.md").exists() else f"`{file.stem}`"
        assert link in index, f"docs/experiments/README.md: no {link}"
