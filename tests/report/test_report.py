"""`gradus report`: what it says of runs is what their rows say, in one file that needs no other."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_parts import Tags, rows_of, variant
from svg_parts import texts

from gradus.errors import FAULT, UserError, exit_code
from gradus.report import first_page, plots
from gradus.report.blocks import Figure, Heading, Table
from gradus.report.report import SHOWN, compared, content, energy, planned, predictions, report
from gradus.report.runs import by_recipe, read
from gradus.text import duration


def test_a_page_of_several_runs_needs_no_other_file(folders, tmp_path):
    (tmp_path / "notes.md").write_text("# Why\n\nThe **second** is <script>alert(1)</script> longer.\n")
    runs = [str(folders / name) for name in ("short", "long")]
    said = list(report(runs, str(tmp_path / "out"), str(tmp_path / "notes.md"), code=True))
    text = (tmp_path / "out" / "report.html").read_text()
    tags = Tags(text)
    assert not tags.open and not tags.loads and "url(http" not in text and "@import" not in text
    assert said[0] == f"{tmp_path / 'out' / 'report.html'}: 2 runs; it needs no other file"
    for quoted in ("#SBATCH --time=1", "class Seq2Seq", "<strong>second</strong>", "&lt;script&gt;", "n_train: 64", json.loads((folders / "long/environment.json").read_text())["cpu"]):
        assert quoted in text, quoted
    metrics = json.loads((folders / "long/summary.json").read_text())["metrics"]
    assert text.count("<figure>") == -(-len(metrics) // plots.SIDE) + 2  # metrics, the loss one; rate and norm, throughput


def test_runs_and_studies_on_one_page(folders, tmp_path):
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "study.json").write_text("{}")
    rows = [{"name": "samples_per_s", "value": 3.0, "kind": "measured", "configuration": c} for c in "ab"]
    (tmp_path / "pair" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "notes.md").write_text("My words.\n")
    said = list(report([str(tmp_path / "pair"), str(folders / "short")], str(tmp_path / "out"), str(tmp_path / "notes.md")))
    text = (tmp_path / "out" / "report.html").read_text()
    assert said[0].endswith("1 run, 1 study; it needs no other file") and not Tags(text).open and not Tags(text).loads
    order = ("<h2>Recipe: copy-task</h2>", "<h2>Study: pair</h2>", "My words.", "<h2>Appendix: how it was measured</h2>", "cpus allowed")
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order) and "n_train: 64" not in text and "class Seq2Seq" not in text


def test_a_report_to_hand_in(folders, tmp_path):
    """Title, author and date, five sentences and one table; every table has a number, and the text refers to it."""
    pytest.importorskip("typst")
    runs = [variant(folders / name, tmp_path / f"20261128-18102{i}") for i, name in enumerate(("short", "long"))]
    said = list(report([str(run) for run in runs], str(tmp_path / "out"), title="Copying <2>", author="A. Student"))
    text, date = (tmp_path / "out" / "report.html").read_text(), json.loads((runs[0] / "summary.json").read_text())["finished"][:10]
    assert len(said) == 2 and "<h1>Copying &lt;2&gt;</h1>" in text and f"<p>A. Student · {date}</p>" in text
    first = text[: text.index("<h2>")]
    for part in ("This report shows 2 runs of copy-task (Table 1), measured on", "The best speed-up is", "The peak memory is", "The quality is", "The error of the plan is"):
        assert part in first, part
    numbers = [int(n) for n in re.findall(r'<p class="caption">Table (\d+)\. ', text)]
    assert numbers == list(range(1, len(numbers) + 1)) and all(f"Table {n} shows " in text for n in numbers[1:]) and len(numbers) > 3
    assert "precision=bf16, steps=8 (20261128-181021)" in text.replace("<wbr>", ""), "a run's name says what differs"
    assert (tmp_path / "out" / "report.pdf").is_file()


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


def test_a_run_has_the_figures_that_it_printed_at_its_end(folders):
    """Each of its last lines, and its plan beside what it measured."""
    (run,) = read([str(folders / "short")])
    screen = (folders / "short.txt").read_text().splitlines()
    printed = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in screen if re.search(r"\S  +\S", line))
    (speed, quality), metrics = compared([run]), list(run.summary.metrics)
    shown = {"train_samples_per_second": speed.rows[0][6], "train_loss": quality.rows[0][4], "epoch": quality.rows[0][2], **dict(zip(metrics, quality.rows[0][6:]))}
    for name, text in shown.items():
        assert float(text.replace(",", "")) == pytest.approx(float(printed[name]), rel=1e-3, abs=1e-4), name
    assert speed.rows[0][5] == duration(float(printed["train_runtime"]))
    (table,) = planned([run])
    assert len(table.rows) > 5
    for name, *cells in table.rows:
        assert re.split(r"  +", printed[name]) == cells, name


@pytest.mark.parametrize(
    ("loads", "processes", "said"),
    [
        ((0.1, 1.9), 1, "long: not comparable: other programs ran (load 1.9 on 2 cores, 0.1 during short)."),
        ((0.1, 0.2), 1, ""),
        ((0.1, 0.2), 2, "long: not comparable: other programs ran (load 0.2 on 2 cores, 0.1 during short), or other things differ too: more than 1.05 times"),
        ((None, None), 2, "long: not comparable: other programs ran, or other things differ too: more than 1.05 times as fast per process."),
    ],
)
def test_speeds_of_a_busy_machine_are_not_comparable(folders, tmp_path, loads, processes, said):
    for name, load in zip(("short", "long"), loads):
        shutil.copytree(folders / name, tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        summary["load"] = {} if load is None else {"processors": 2, "during": load}
        summary |= {"processes": processes, "train_samples_per_second": 1000.0} if name == "long" else {"train_samples_per_second": 100.0}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    (found,) = by_recipe(read([str(tmp_path / "short"), str(tmp_path / "long")]))
    speed, _ = compared(found)
    assert said in speed.caption if said else speed.caption.endswith("against short.")
    assert speed.rows[1][7:] == (["not comparable"] * 2 if said else ["10", "–"])
    assert first_page.of_runs(found)[1].startswith("not comparable: other programs ran" if said else "10 × the samples/s of short, by long")


def test_energy_is_what_the_summary_says_and_absent_where_it_is_not_known(folders, tmp_path):
    text = "16.7 Wh (65 W per device, PUE 1.1; energy.watts), 6.42 g CO2 (as stated: 0.385 kg/kWh)"
    known = variant(folders / "short", tmp_path / "known", energy={"text": text, "devices": 1}, energy_wh=16.7)
    unknown = variant(folders / "short", tmp_path / "unknown", energy=None)
    (table,) = energy(read([str(known), str(unknown)]))
    assert table.rows == [["known", text]] and not list(energy(read([str(unknown)])))
    assert table in list(content("", read([str(known)]), ""))


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
    assert made.rows[1][1:] == ["68 MB", "-", "-"] and [row[0].partition(" (")[2] for row in made.rows] == ["step 3: 16 × 24 tokens)", "16 × 48 tokens)"]
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
    headings = [block.text for block in content("t", found, "") if isinstance(block, Heading)]
    assert headings[:2] == ["t", "Results"]


def test_equal_rows_give_equal_bytes(folders, tmp_path):
    pytest.importorskip("typst")
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.0), (3, 0.5)]), *rows_of("valid/loss", [(1, 2.1), (2, 1.1)])]
    runs = [str(variant(folders / name, tmp_path / name, rows=rows)) for name in ("short", "stopped")]
    for name in ("a", "b"):
        list(report(runs, str(tmp_path / name)))
    for file in ("report.html", "report.pdf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_without_typst_the_page_is_there(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "typst", None)
    said = list(report([str(folders / "short")], str(tmp_path)))
    assert said[1].startswith("note: no PDF: a PDF needs the package typst") and (tmp_path / "report.html").is_file()


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


def test_runs_of_different_recipes_share_no_axis_and_no_speed_up(folders, tmp_path):
    other = variant(folders / "long", tmp_path / "other", {"name": "another-task"})
    rows = [row for name in ("train/loss", "valid/loss", "train/lr") for row in rows_of(name, [(1, 3.0), (2, 2.0), (3, 1.0)])]
    variant(folders / "short", tmp_path / "short", rows=rows)
    blocks = list(content("t", read([str(tmp_path / "short"), str(other)]), ""))
    assert [b.text for b in blocks if isinstance(b, Heading)][1:3] == ["Recipe: copy-task", "Recipe: another-task"]
    assert not any("speed-up" in [*b.head, *(row[0] for row in b.rows), b.caption] for b in blocks if isinstance(b, Table))
    sections = list(itertools.accumulate((isinstance(b, Heading) and b.level == 2 for b in blocks), int.__add__))
    drawn = [[[words for words, *_ in texts(b.panels[0].svg())] for b, n in zip(blocks, sections) if n == of and isinstance(b, Figure)] for of in (1, 2)]
    assert [{"training", "validation"} <= set(of_recipe[0]) for of_recipe in drawn] == [True, True]
    assert not any({"short", "other"} & set(words) for of_recipe in drawn for words in of_recipe), "a run alone has no legend"


# ---------------------------------------------------------------- faults


DAMAGED = {
    "summary.json": ["", "{}", "[]", "5", "null", "[" * 100_000, '{"metrics": [1]}', '{"metrics": null}', '{"metrics": {"a": {"b": 1}}}', '{"train_runtime": "x"}',
                     '{"train_runtime": -5}', '{"train_runtime": Infinity}', '{"train_samples_per_second": "x"}', '{"processes": 0}', '{"processes": "x"}', '{"proof": [1]}',
                     '{"proof": {"a": "b"}}', '{"proof": {"a": {"predicted": "x", "measured": 1}}}', '{"proof": {"a": {"predicted": 1, "measured": NaN}}}', '{"layout": [1]}',
                     *(f'{{"steps": 5, "{key}": {value}}}' for key in ("steps", "samples", "processes", "train_runtime") for value in (-1, f"1{'0' * 400}", "[5]"))],
    "environment.json": ["", '{"versions": {"numpy": []}}', "[]", "5", "null", '"x"', "[" * 100_000, '{"command": 5}', '{"cpu": [null]}', '{"memory_bytes": "x"}', '{"command": ["a"]}'],
    "metrics.jsonl": ["null\n", '{"name": "train/loss", "value": 1, "step": [1]}', '{"name": "train/loss", "value": 1, "step": "x"}', '{"name": 5, "value": 1}\n', "[]\n"],
    "recipe.yaml": ["", "[", "5", "\x00"],
}  # fmt: skip


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_file_is_one_line(folders, tmp_path, file):
    run = variant(folders / "short", tmp_path / "run")
    for text in DAMAGED[file]:
        (run / file).write_text(text)
        with pytest.raises(UserError, match=file) as caught:
            list(report([str(run)], str(tmp_path / "out")))
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists(), text[:60]


def test_what_is_not_a_number_of_a_plot_is_left_out(folders, tmp_path):
    values = [(1, 1e308), (2, -1e308), (3, float("inf")), (4, 10**400), (5, True), (6, 2.0), (7, 1.0), (8, 0.5)]
    memory = {"gpu": {"memory_bytes": [1]}}
    run = variant(folders / "short", tmp_path / "run", rows=rows_of("train/loss", values, unit=5), train_samples_per_second=0, proof={"memory/a": {"predicted": 0, "measured": 1}})
    (run / "environment.json").write_text(json.dumps(memory))
    found = read([str(run)])
    assert found[0].points("train/loss", "step") == [(6, 2.0), (7, 1.0), (8, 0.5)]
    assert sum(isinstance(block, Figure) for block in content("t", found, "")) == 1  # the loss


def test_names_are_text_wherever_they_stand(folders, tmp_path):
    """Of a run, a metric, a unit, a layout, a machine and a figure."""
    pytest.importorskip("typst")
    evil = '<script>alert(1)</script>"><img src=x onerror=a()> | # $x$ `y` *z* #panic("x") \\ </svg></title>--><b>'
    rows = [*rows_of("train/loss", [(1, 2.0), (2, 1.0), (3, 0.5)], unit=evil), *rows_of(f"valid/{evil}", [(1, 2.0), (2, 1.0), (3, 0.5)], unit=evil)]
    proof = {f"memory/{evil}": {"predicted": 1.0, "measured": 2.0}, evil: {"predicted": 1.0, "measured": 2.0}}
    run = variant(folders / "short", tmp_path / evil.replace("/", ""), rows=rows, layout=evil, metrics={evil: 1.0}, proof=proof)
    (run / "environment.json").write_text(json.dumps({"cpu": evil, "versions": {evil: evil}, "command": evil}))
    said = list(report([str(run)], str(tmp_path / "out"), title=evil, author=evil, code=True))
    tags = Tags((tmp_path / "out" / "report.html").read_text())
    assert not tags.open and not tags.loads and (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert len(said) == 2 and "no PDF" not in said[1]


def test_a_full_disk_leaves_nothing(folders, tmp_path, monkeypatch):
    pytest.importorskip("typst")
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


def test_efficiency_is_against_all_processes_of_the_first_run():
    def run(processes: int, speed_up: float) -> SimpleNamespace:
        summary = SimpleNamespace(steps=9, train_runtime=1.0, layout="", train_loss=1.0, metrics={}, epoch=1.0, samples=9, load=SimpleNamespace(during=None))
        config = SimpleNamespace(layout=SimpleNamespace(precision="fp32"), train=SimpleNamespace(steps=9))
        return SimpleNamespace(name=str(processes), summary=summary, config=config, processes=processes, speed_up=speed_up, speed=1.0, finished=True, differs="", last=lambda name: 1.0)

    speed = next(compared([run(2, 1.0), run(4, 1.6), run(8, 2.0)]))
    assert [row[-2:] for row in speed.rows] == [["1", "1"], ["1.6", "0.8"], ["2", "0.5"]]


def test_predictions_that_lie_in_a_runs_folder_are_a_table(folders, tmp_path):
    variant(folders / "long", tmp_path / "run")
    rows = [{"input": "1 2", "answer": "2 1", "truth": "1 2", "right": False}, *[{"input": f"{i} <", "label": "good", "truth": "good", "right": True} for i in range(40)]]
    (tmp_path / "run/predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read([str(tmp_path / "run")])
    *_, table = predictions([run])  # after the confusion matrix of those with a class
    assert table.head == ["input", "answer", "it is", ""] and len(table.rows) == SHOWN
    assert table.rows[:2] == [["1 2", "2 1", "1 2", "wrong"], ["0 <", "good", "good", "right"]]
    assert table.caption == f"Answers of {run.name}: 40 of 41 right; the first 32 of 41."
    (tmp_path / "run/predictions.jsonl").write_text('{"input": "a text", "loss": 2.5}\n')
    (table,) = predictions(read([str(tmp_path / "run")]))
    assert (table.head, table.rows) == (["input", "loss"], [["a text", "2.5"]])
    (tmp_path / "run/predictions.jsonl").write_text('{"input": 5}\n')
    with pytest.raises(UserError, match=r"predictions.jsonl: line 1 is no prediction"):
        list(predictions(read([str(tmp_path / "run")])))
