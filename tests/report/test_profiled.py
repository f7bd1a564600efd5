"""The page of a profile is what its rows say, in one file."""

from __future__ import annotations

import pytest

from gradus.report.profiled import page
from gradus.rows import Row

WHERE = {"recipe": "tiny", "device": "cpu", "precision": "fp32", "recorded_steps": 6, "versions": {"torch": "2"}}


@pytest.fixture
def folder(tmp_path):
    rows = [Row(f"memory/{name}", 10**6, "bytes", conditions=WHERE) for name in ("weights", "gradients", "optimizer", "activations", "peak")]
    rows += [Row("memory/forward/allocated", 2_500_000, "bytes", 1, WHERE), Row("memory/allocations", 12.0, "a step", conditions=WHERE)]
    rows += [Row("time/step", 0.025, "s", conditions=WHERE), Row("time/step/recorded", 0.04, "s", conditions=WHERE)]
    for name, share in (("phase/forward", 0.75), ("phase/data", 0.25), ("category/attention", 0.75), ("category/data loading", 0.25)):
        rows.append(Row(f"time/{name}", 0.04 * share, "s", conditions=WHERE | {"share": share, "calls": 2.0}))
    more = {"share": 0.5, "calls": 3.0, "category": "attention", "place": "Block / <Attention>", "source": "", "shapes": ""}
    rows += [Row(f"time/{name}", 0.02, "s", conditions=WHERE | more) for name in ("operation/aten::bmm", "place/Block / <Attention>")]
    for ms in (1.0, 2.0):
        rows += [Row(f"memory/timeline/{name}", 10**6, "bytes", conditions=WHERE | {"ms": ms}) for name in ("weights", "other")]
    rows.append(Row("hint/layout.attention=sdpa", 0.75, "of the step", conditions=WHERE | {"text": "attention takes 75%"}))
    (tmp_path / "rows.jsonl").write_text("".join(row.json() + "\n" for row in rows))
    return tmp_path


def test_page(folder):
    (said,) = page(folder)
    assert said == f"{folder / 'profile.html'}: the page; it needs no other file"
    text = (folder / "profile.html").read_text()
    for shown in ("takes 25.00 ms, and 40.00 ms while", "<code>layout.attention=sdpa</code>: attention takes 75%.", "aten::bmm", "other: at most 1 MB", "Block / &lt;Attention&gt;"):
        assert shown in text, shown
    assert text.count("<figure>") == 2 and "<script" not in text and "src=" not in text and "memory_summary" not in text
    list(page(folder))
    assert (folder / "profile.html").read_text() == text, "equal rows give equal bytes"
    (folder / "memory_summary.txt").write_text("| Allocated |")
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().replace('"cpu"', '"cuda:0"'))
    list(page(folder))
    assert "| Allocated |" in (folder / "profile.html").read_text()
