"""`gradus report`: what it says of runs is what their rows say, in one file that needs no other."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus import cli
from gradus.errors import FAULT, UserError, exit_code
from gradus.report import page, plots
from gradus.report.blocks import Code, Figure, Heading, Key, Table, Text, from_markdown, narrow
from gradus.report.report import compared, content, planned, report
from gradus.report.runs import by_recipe, read

pytest.importorskip("matplotlib")
TINY = "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 data.n_train=64 data.n_valid=16 batch.samples=16 evaluate.samples=0"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two finished runs and one that is not finished."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        for name, more in (("short", "train.steps=4"), ("long", "train.steps=8 layout.precision=bf16")):
            words = ["copy-task", *TINY.split(), *more.split(), "schedule.warmup_steps=2", "log.every=2", "evaluate.every=3"]
            assert cli.run(["train", *words, f"log.dir={folder / name}"]) == 0
            patch.setattr("gradus.proof.prove.Planner", None)  # one of them has a plan
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
        if tag not in ("meta", "br", "hr", "wbr"):
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


def test_runs_of_two_machines_are_each_named_with_theirs(folders, tmp_path):
    places = [shutil.copytree(folders / name, tmp_path / name) for name in ("short", "long")]
    environment = json.loads((places[1] / "environment.json").read_text()) | {"gpu": {"name": "H100"}}
    assert [run.name for run in found_in(places)] == ["short", "long"]
    (places[1] / "environment.json").write_text(json.dumps(environment))
    here = f"{environment['cpu']}, {environment['cpus_allowed']} processors"
    assert [run.name for run in found_in(places)] == [f"short ({here})", "long (H100)"]


def found_in(places: list[Path]) -> list:
    found = read(map(str, places))
    list(content("title", found, ""))
    return found


def test_the_promise_of_the_largest_batch_is_reported_beside_the_step(folders, tmp_path):
    place = shutil.copytree(folders / "short", tmp_path / "short")
    summary = json.loads((place / "summary.json").read_text())
    step = {"predicted": 50e6, "measured": 50e6, "error": 0.0, "batch": "step 3: 16 × 24 tokens"}
    summary["proof"] = {"memory/allocated": step, "memory/largest": {"predicted": 68e6, "batch": "16 × 48 tokens"}}
    (place / "summary.json").write_text(json.dumps(summary))
    (made,) = planned(read([str(place)]))
    assert made.rows[1][1:] == ["68 MB", "–", "–"] and [row[0].partition(" (")[2] for row in made.rows] == ["step 3: 16 × 24 tokens)", "16 × 48 tokens)"]
    list(content("title", read([str(place)]), ""))


def test_an_unfinished_run_shows_where_it_stands_under_its_recipe(folders, monkeypatch):
    """Its last step, loss and metrics are those of its last rows; it has no speed-up."""
    found = read([str(folders / "stopped"), str(folders / "short"), str(folders / "long")])
    speed, quality = compared(by_recipe(found)[0])
    rows = {(r["name"], r["step"]): r["value"] for r in map(json.loads, (folders / "stopped/metrics.jsonl").read_text().splitlines())}
    stopped, _, finished = quality.rows
    assert stopped[1] == "not finished: at step 8 of 8" and finished[1] == "finished" and stopped[3] == "128"
    assert float(stopped[5]) == pytest.approx(rows["train/loss", 8], rel=1e-3) and stopped[4] == "–"
    assert stopped[6:] == finished[6:] and float(stopped[quality.head.index("validation loss")]) == pytest.approx(rows["valid/loss", 8], rel=1e-3)
    assert [row[3] for row in speed.rows] == ["–", "1", "1"]  # only its end says how many processes
    assert speed.rows[0][4] == "8" and speed.rows[0][5] != "–" and speed.rows[0][6:] == ["–"] * 3 and "against short" in speed.caption
    monkeypatch.setattr(plots, "drawn", lambda made: [])
    headings = [block.text for block in content("t", found, "") if isinstance(block, Heading)]
    assert headings[:2] == ["t", "Results"]


def test_equal_rows_give_equal_bytes(folders, tmp_path):
    pytest.importorskip("typst")
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.0)]), *rows_of("valid/loss", [(1, 2.1), (2, 1.1)])]
    runs = [str(variant(folders / name, tmp_path / name, rows=rows)) for name in ("short", "stopped")]
    for name in ("a", "b"):
        list(report(runs, str(tmp_path / name)))
    for file in ("report.html", "report.pdf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_without_typst_the_page_is_there(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "typst", None)
    monkeypatch.setattr(plots, "drawn", lambda made: [])
    said = list(report([str(folders / "short")], str(tmp_path)))
    assert said[1].startswith("note: no PDF: a PDF needs the package typst") and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("x", ["tokens", "seconds"])
def test_every_evaluation_has_its_tokens_and_seconds(folders, x):
    """Also those between two logged steps: evaluations come every 3 steps there, log lines every 2."""
    run = read([str(folders / "long")])[0]
    assert [at for at, _ in run.points("valid/loss", "step")] == [3, 6, 8] and [at for at, _ in run.points("train/loss", "step")] == [2, 4, 6, 8]
    evaluated, logged = [at for at, _ in run.points("valid/loss", x)], [at for at, _ in run.points("train/loss", x)]
    assert 0 < logged[0] < evaluated[0] < logged[1] < logged[2] <= evaluated[1] < logged[3] <= evaluated[2]
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


# ---------------------------------------------------------------- what is compared, and what is drawn


def variant(source, target, recipe=None, rows=None, **summary):
    """A copy of a run with other keys of the recipe, other rows, other entries of the summary."""
    shutil.copytree(source, target)
    if recipe:
        held = yaml.safe_load((target / "recipe.yaml").read_text())
        for key, value in recipe.items():
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, held)[last] = value
        (target / "recipe.yaml").write_text(yaml.safe_dump(held, allow_unicode=True))
    if rows is not None:
        (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        held = json.loads((target / "summary.json").read_text())
        (target / "summary.json").write_text(json.dumps(held | summary))
    return target


def rows_of(name, values, **more):
    return [{"name": name, "value": value, "step": step, "tokens": step * 100, "seconds": step / 10, **more} for step, value in values]


def test_runs_of_different_recipes_share_no_axis_and_no_speed_up(folders, tmp_path, monkeypatch):
    other = variant(folders / "long", tmp_path / "other", {"name": "another-task"})
    drawn = []
    monkeypatch.setattr(plots, "drawn", lambda made: drawn.append([[line.get_label() for line in axes[0].lines] for _, axes in made]) or [])
    blocks = list(content("t", read([str(folders / "short"), str(other)]), ""))
    assert [b.text for b in blocks if isinstance(b, Heading)][1:3] == ["Recipe: copy-task", "Recipe: another-task"]
    assert not any("speed-up" in [*b.head, *(row[0] for row in b.rows), b.caption] for b in blocks if isinstance(b, Table))
    assert [of_recipe[0] for of_recipe in drawn] == [["training", "validation"]] * 2
    assert [{label for labels in of_recipe for label in labels} & {"short", "other"} for of_recipe in drawn] == [{"short"}, {"other"}]


def test_a_run_of_another_model_has_no_speed_up(folders, tmp_path):
    wider = variant(folders / "long", tmp_path / "wider", {"model.d_ff": 64})
    (group,) = by_recipe(read([str(folders / "short"), str(wider), str(folders / "long")]))
    speed, _ = compared(group)
    assert speed.rows[1][7:] == ["–", "–"] and "–" not in speed.rows[2][7:] and "a run of another model" in speed.caption


def test_what_was_measured_once_is_in_the_table_alone(folders, tmp_path):
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.5)], unit="nats"), *rows_of("valid/loss", [(2, 1.6)]), *rows_of("valid/exact_match", [(2, 0.5)])]
    run = variant(folders / "short", tmp_path / "once", rows=rows)
    found = read([str(run)])
    captions = [caption for caption, _ in plots.of_runs(found)]
    assert captions[0].startswith("The panels show the loss by step, by tokens and by seconds of training; solid lines")
    assert not any("exact match" in caption for caption in captions) and not any("learning rate" in caption for caption in captions)
    assert plots.not_drawn(found) == "The report has no plot of exact match, measured once only."


def test_a_report_of_many_metrics_draws_some_and_says_so(folders, tmp_path):
    rows = [row for i in range(300) for row in rows_of(f"valid/m{i}", [(1, i), (2, i + 1)])]
    found = read([str(variant(folders / "short", tmp_path / "many", rows=rows))])
    assert sum("by step" in caption for caption, _ in plots.of_runs(found)) == plots.METRICS
    assert plots.not_drawn(found) == f"The report has plots of the first {plots.METRICS} metrics only, {300 - plots.METRICS} more are in the table."


@pytest.mark.parametrize("most", [3, 12_345, 1_234_567_890, 1e-7])
def test_tick_labels_do_not_run_into_each_other(most):
    (left, right), named = plots.panels(2), plots.bars(["a", "b"], 0.3)
    left.plot([0, most], [most, most * 1.001])
    plots._lay_out(left)
    right.plot([0, 1], [0, 1])
    right.set_xticks([i / 30 for i in range(31)], [f"label {i}" for i in range(31)])
    plots.drawn([("caption", [left, right, named])])
    assert len(right.get_xticks()) < 31 and [label.get_text() for label in named.get_yticklabels()] == ["a", "b"]
    for axes in (left, right):
        for labels, start, end in ((axes.get_xticklabels(), "x0", "x1"), (axes.get_yticklabels(), "y0", "y1")):
            boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: getattr(box, start))
            assert len(boxes) > 1 and all(getattr(a, end) < getattr(b, start) for a, b in itertools.pairwise(boxes))


def test_tables_stand_or_lie_and_wrap():
    one = Table(["run", "a long name of a metric", "another long name"], [["r", "1", "2"]])
    assert narrow(one).head == ["run", "r"] and narrow(one).rows == [["a long name of a metric", "1"], ["another long name", "2"]]
    long = Table(["run", "time"], [[f"run {i}", "1.5 s"] for i in range(9)])
    assert narrow(long) is long and long.left() == [True, False]
    text = page.to_html("t", [Table(["run"], [["a-very-long-name/of_a_run=that.never/ends"], ["1.5 s"]])])
    assert "a-<wbr>very-<wbr>long-<wbr>name/<wbr>of_<wbr>a_<wbr>run=<wbr>that.<wbr>never/<wbr>ends" in text and "nowrap" not in text.split("</style>")[1]
    assert f"name/{page.BREAK}of_" in page._typst(Table(["run"], [["a-very-long-name/of_a_run"]]))


# ---------------------------------------------------------------- faults


DAMAGED = {
    "summary.json": ["", "{}", "[]", "5", "null", "[" * 100_000, '{"metrics": [1]}', '{"metrics": null}', '{"metrics": {"a": {"b": 1}}}', '{"train_runtime": "x"}',
                     '{"train_runtime": -5}', '{"train_runtime": Infinity}', '{"train_samples_per_second": "x"}', '{"processes": 0}', '{"processes": "x"}', '{"proof": [1]}',
                     '{"proof": {"a": "b"}}', '{"proof": {"a": {"predicted": "x", "measured": 1}}}', '{"proof": {"a": {"predicted": 1, "measured": NaN}}}', '{"layout": [1]}'],
    "environment.json": ["", '{"versions": {"numpy": []}}', "[]", "5", "null", '"x"', "[" * 100_000, '{"command": 5}', '{"cpu": [null]}', '{"memory_bytes": "x"}', '{"command": ["a"]}'],
    "metrics.jsonl": ["null\n", '{"name": "train/loss", "value": 1, "step": [1]}', '{"name": "train/loss", "value": 1, "step": "x"}', '{"name": 5, "value": 1}\n', "[]\n"],
    "recipe.yaml": ["", "[", "5", "\x00"],
}  # fmt: skip


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_file_is_one_line(folders, tmp_path, monkeypatch, file):
    monkeypatch.setattr(plots, "drawn", lambda made: [])
    run = variant(folders / "short", tmp_path / "run")
    for text in DAMAGED[file]:
        (run / file).write_text(text)
        with pytest.raises(UserError, match=file) as caught:
            list(report([str(run)], str(tmp_path / "out")))
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists(), text[:60]


def test_what_is_not_a_number_of_a_plot_is_left_out(folders, tmp_path):
    values = [(1, 1e308), (2, -1e308), (3, float("inf")), (4, 10**400), (5, True), (6, 2.0), (7, 1.0)]
    memory = {"gpu": {"memory_bytes": [1]}}
    run = variant(folders / "short", tmp_path / "run", rows=rows_of("train/loss", values, unit=5), train_samples_per_second=0, proof={"memory/a": {"predicted": 0, "measured": 1}})
    (run / "environment.json").write_text(json.dumps(memory))
    found = read([str(run)])
    assert found[0].points("train/loss", "step") == [(6, 2.0), (7, 1.0)]
    assert sum(isinstance(block, Figure) for block in content("t", found, "")) == 2  # the loss, the memory


def test_names_are_text_wherever_they_stand(folders, tmp_path):
    """Of a run, a metric, a unit, a layout, a machine and a figure."""
    pytest.importorskip("typst")
    evil = '<script>alert(1)</script>"><img src=x onerror=a()> | # $x$ `y` *z* #panic("x") \\ </svg></title>--><b>'
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.0)], unit=evil), *rows_of(f"valid/{evil}", [(1, 2.0), (2, 1.0)], unit=evil)]
    proof = {f"memory/{evil}": {"predicted": 1.0, "measured": 2.0}, evil: {"predicted": 1.0, "measured": 2.0}}
    run = variant(folders / "short", tmp_path / evil.replace("/", ""), rows=rows, layout=evil, metrics={evil: 1.0}, proof=proof)
    (run / "environment.json").write_text(json.dumps({"cpu": evil, "versions": {evil: evil}, "command": evil}))
    said = list(report([str(run)], str(tmp_path / "out")))
    tags = Tags((tmp_path / "out" / "report.html").read_text())
    assert not tags.open and not tags.loads and (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert len(said) == 2 and "no PDF" not in said[1]


def test_a_full_disk_leaves_nothing(folders, tmp_path, monkeypatch):
    pytest.importorskip("typst")
    monkeypatch.setattr(plots, "drawn", lambda made: [])
    write = Path.write_bytes

    def full(path, content):
        if "report.pdf" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"the disk is full .* nothing was written") as caught:
        list(report([str(folders / "short")], str(tmp_path / "out")))
    assert exit_code(caught.value) == FAULT and not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("before")
    with pytest.raises(UserError, match="the disk is full"):
        list(report([str(folders / "short")], str(tmp_path / "out")))
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"report.html": "before"}
