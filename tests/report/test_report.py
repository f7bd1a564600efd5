"""`gradus report`: what it says of runs is what their rows say, in one file that needs no other."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus import cli
from gradus.errors import UserError
from gradus.report import page, plots
from gradus.report.blocks import Code, Figure, Heading, Key, Table, Text, from_markdown
from gradus.report.report import compared, content, report
from gradus.report.runs import by_recipe, read

pytest.importorskip("matplotlib")
TINY = "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 data.n_train=64 data.n_valid=16 batch.samples=16 evaluate.samples=0"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three finished runs and one that is not finished."""
    folder = tmp_path_factory.mktemp("report")
    for name, more in (("short", "train.steps=4"), ("long", "train.steps=8 layout.precision=bf16")):
        words = ["copy-task", *TINY.split(), *more.split(), "schedule.warmup_steps=2", "log.every=2", "evaluate.every=4"]
        assert cli.run(["train", *words, f"log.dir={folder / name}"]) == 0
    words = ["copy-task", *TINY.split(), "train.steps=8", "schedule.warmup_steps=2", "log.every=2", "evaluate.every=3"]
    assert cli.run(["train", *words, f"log.dir={folder / 'between'}"]) == 0
    shutil.copytree(folder / "long", folder / "stopped")
    (folder / "stopped" / "summary.json").unlink()
    (folder / "short" / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    return folder


class Tags(HTMLParser):
    """Which tags are open at the end, and what any of them would load."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.loads = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for key, value in attributes if key in ("src", "href", "xlink:href") and not value.startswith("#")]
        if tag in ("script", "link", "iframe", "object"):
            self.loads.append(tag)
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_of_several_runs_needs_no_other_file(folders, tmp_path):
    (tmp_path / "notes.md").write_text("# Why\n\nThe **second** is <script>alert(1)</script> longer.\n")
    runs = [str(folders / name) for name in ("short", "long")]
    said = list(report(runs, str(tmp_path / "out"), str(tmp_path / "notes.md")))
    text = (tmp_path / "out" / "report.html").read_text()
    tags = Tags(text)
    assert not tags.open and not tags.loads and "url(http" not in text and "@import" not in text
    assert said[0] == f"{tmp_path / 'out' / 'report.html'}: 2 runs; it needs no other file"
    for quoted in ("#SBATCH --time=1", "class Seq2Seq", "<strong>second</strong>", "&lt;script&gt;", "n_train: 64", json.loads((folders / "long/environment.json").read_text())["cpu"]):
        assert quoted in text, quoted
    metrics = json.loads((folders / "long/summary.json").read_text())["metrics"]
    assert text.count("<figure>") == len(metrics) + 4  # each metric, the loss one; rate and norm, throughput, memory, speed-up


def test_runs_and_studies_on_one_page(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "drawn", lambda made: [])
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "study.json").write_text("{}")
    rows = [{"name": "samples_per_s", "value": 3.0, "kind": "measured", "configuration": c} for c in "ab"]
    (tmp_path / "pair" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "notes.md").write_text("My words.\n")
    said = list(report([str(tmp_path / "pair"), str(folders / "short")], str(tmp_path / "out"), str(tmp_path / "notes.md")))
    text = (tmp_path / "out" / "report.html").read_text()
    assert said[0].endswith("1 run, 1 study; it needs no other file") and not Tags(text).open and not Tags(text).loads
    order = ("<h2>Recipe: copy-task</h2>", "<h2>Study: pair</h2>", "My words.", "<h2>Appendix: machine, recipe, code</h2>", "n_train: 64")
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_the_table_is_what_the_summaries_say(folders):
    (found,) = by_recipe(read([str(folders / "short"), str(folders / "long")]))
    speed, quality = compared(found)
    summaries = [json.loads((folders / name / "summary.json").read_text()) for name in ("short", "long")]
    assert [row[0] for row in speed.rows] == ["short", "long"] and [row[4] for row in speed.rows] == ["4", "8"]
    assert [row[2] for row in speed.rows] == ["fp32", "bf16"]
    ratio = summaries[1]["train_samples_per_second"] / summaries[0]["train_samples_per_second"]
    assert float(speed.rows[1][7]) == pytest.approx(ratio, rel=1e-3) and speed.rows[0][7:] == ["1", "1"]
    assert [float(row[4]) for row in quality.rows] == pytest.approx([s["train_loss"] for s in summaries], rel=1e-3)
    assert quality.head[6:] == [name.replace("valid/", "validation ").replace("_", " ") for name in summaries[0]["metrics"]]
    assert [float(value) for value in quality.rows[0][6:]] == pytest.approx(list(summaries[0]["metrics"].values()), rel=1e-3)


def test_an_unfinished_run_shows_where_it_stands_under_its_recipe(folders):
    """Its last step, loss and metrics are those of its last rows; it has no speed-up."""
    found = read([str(folders / "stopped"), str(folders / "short"), str(folders / "long")])
    speed, quality = compared(by_recipe(found)[0])
    rows = {(r["name"], r["step"]): r["value"] for r in map(json.loads, (folders / "stopped/metrics.jsonl").read_text().splitlines())}
    stopped, _, finished = quality.rows
    assert stopped[1] == "not finished: at step 8 of 8" and finished[1] == "finished" and stopped[3] == "128"
    assert float(stopped[5]) == pytest.approx(rows["train/loss", 8], rel=1e-3) and stopped[4] == "–"
    assert stopped[6:] == finished[6:] and float(stopped[quality.head.index("validation loss")]) == pytest.approx(rows["valid/loss", 8], rel=1e-3)
    assert speed.rows[0][4] == "8" and speed.rows[0][5] != "–" and speed.rows[0][6:] == ["–"] * 3 and "against short" in speed.caption
    headings = [block.text for block in content("t", found, "") if isinstance(block, Heading)]
    assert headings[:2] == ["t", "Results"]


def test_equal_rows_give_equal_bytes(folders, tmp_path):
    pytest.importorskip("typst")
    for name in ("a", "b"):
        list(report([str(folders / "short"), str(folders / "stopped")], str(tmp_path / name)))
    for file in ("report.html", "report.pdf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_without_typst_the_page_is_there(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "typst", None)
    said = list(report([str(folders / "short")], str(tmp_path)))
    assert said[1].startswith("note: no PDF: a PDF needs the package typst") and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("x", ["tokens", "seconds"])
def test_every_evaluation_has_its_tokens_and_seconds(folders, x):
    """Also those between two logged steps: evaluations come every 3 steps there, log lines every 2."""
    run = read([str(folders / "between")])[0]
    assert [at for at, _ in run.points("valid/loss", "step")] == [3, 6, 8] and [at for at, _ in run.points("train/loss", "step")] == [2, 4, 6, 8]
    evaluated, logged = [at for at, _ in run.points("valid/loss", x)], [at for at, _ in run.points("train/loss", x)]
    assert 0 < logged[0] < evaluated[0] < logged[1] < logged[2] == evaluated[1] < logged[3] == evaluated[2]
    if x == "tokens":
        assert evaluated == [step * run.last("train/tokens") / 8 for step in (3, 6, 8)]


@pytest.mark.parametrize(
    "runs, wrong",
    [(["nowhere"], "nowhere: holds neither a run"), (["short", "short"], "is given twice"), (["broken"], r"summary\.json: line 1, column 2: not valid JSON")],
)
def test_wrong_folders(folders, tmp_path, monkeypatch, runs, wrong):
    monkeypatch.chdir(folders)
    if runs == ["broken"]:
        shutil.copytree("short", "broken")
        Path("broken/summary.json").write_text("{")
    with pytest.raises(UserError, match=wrong):
        list(report(runs, str(tmp_path)))
    assert not list(tmp_path.iterdir())
    shutil.rmtree("broken", ignore_errors=True)


def test_runs_of_one_name_are_told_apart(folders, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folders / "short", tmp_path / name / "1")
    assert [run.name for run in read([str(tmp_path / "a/1"), str(tmp_path / "b/1")])] == ["a/1", "b/1"]


def test_markdown():
    text = "# One\n\nA *b* `c`\nd\n\n- e\n- f\n\n| g | h |\n|---|---|\n| 1 | 2 |\n\n```py\ni\n```\n"
    blocks = list(from_markdown(text))
    assert blocks == [
        Heading(3, "One"),
        Text([("plain", "A "), ("emphasis", "b"), ("plain", " "), ("code", "c"), ("plain", " "), ("plain", "d")]),
        Text([("plain", "e")], item=True),
        Text([("plain", "f")], item=True),
        Table(["g", "h"], [["1", "2"]], words=True),
        Code("py", "i"),
    ]
    assert "<ul><li>e</li><li>f</li></ul>" in page.to_html("t", blocks)


@settings(max_examples=30)
@given(st.text(max_size=40))
def test_any_text_is_text(text):
    """In HTML, and in Typst, which has a meaning for #, $, *, _, @ and more."""
    blocks = [Heading(1, text), Text([("plain", text), ("code", text)]), Table(["a"], [[text]], text), Code(text, text)]
    tags = Tags(page.to_html(text, blocks))
    assert not tags.open and not tags.loads


def test_typst_reads_what_it_has_a_meaning_for():
    pytest.importorskip("typst")
    text = '#let $x$ *a* _b_ @c <d> "e" \\f \x00 \u2028 // g /* h */ `i` [j] {k}'
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9pt" height="9pt"/>'
    figure = Figure([svg], text, [Key("#0072b2ff", "━", text), Key("#111111ff", "■", text)])
    blocks = [Heading(1, text), Text([("plain", text), ("code", text)], item=True), Table([text], [[text]], text), figure, Code(text, text)]
    assert re.match(rb"%PDF-1\.\d", page.to_pdf(text, blocks))
