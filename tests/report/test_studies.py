"""`gradus report` of studies: what it says is what their rows say, and what it draws is what they have rows for."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
from study_parts import captions, folder_of, row

from gradus.errors import UserError
from gradus.proof import results
from gradus.proof.study_store import claimed
from gradus.report import studies
from gradus.report.blocks import Code, Table, Text
from gradus.report.report import report

pytest.importorskip("matplotlib")


def blocks_of(folder, kind):
    study = studies.read([str(folder)])[0]
    return [block for block in (*studies.tables(study), *studies.appendix(study)) if isinstance(block, kind)]


def test_the_folder_of_the_harness_keeps_how_it_was_done(harness):
    about = json.loads((harness / "study.json").read_text())
    assert list(about["configurations"]) == ["fp32 · 1 of them", "fp32 · 2 of them", "bf16 · 1 of them", "bf16 · 2 of them"]
    differs = next(t for t in blocks_of(harness, Table) if t.head[0:2] == ["configuration", "measured by"])
    assert differs.rows[0][2:] == ["1", "–"] and differs.rows[3] == ["bf16 · 2 of them", "steps", "2", "layout.precision=bf16"]
    assert any(code.title == "pair: recipe of fp32 · 1 of them" and "precision: fp32" in code.text for code in blocks_of(harness, Code))


def test_the_command_is_kept_and_is_in_the_appendix(harness, tmp_path, monkeypatch):
    for words in (["study", "a b.yaml"], ["study", "a b.yaml", "--only", "a"]):
        monkeypatch.setattr(sys, "argv", ["gradus", *words])
        with claimed(tmp_path / "s", "study", {"study": "s", "digest": "1"}, {}):
            (tmp_path / "s" / "rows.jsonl").write_text(json.dumps(row("samples_per_s", 1.0, "a")) + "\n")
    assert [code.text for code in blocks_of(tmp_path / "s", Code)] == ["gradus study 'a b.yaml' --only a"]
    with pytest.raises(UserError, match="holds another study"), claimed(harness, "study", {"study": "another"}, {}):
        pass


def test_the_tables_say_what_the_rows_say(harness):
    speed, memory, *_ = blocks_of(harness, Table)
    assert speed.head[:3] == ["configuration", "samples/s", "×"] and speed.rows[0][1] == "750 [500, 1,000]"
    assert speed.rows[2][2] == "0.3333 [0.3333, 0.3333]" and "bf16 · 1 of them against fp32 · 1 of them" in speed.caption
    assert memory.rows[0][:4] == ["fp32 · 1 of them", "8 MB", "9 MB", "-11.1%"]
    items = ["".join(text for _, text in block.parts) for block in blocks_of(harness, Text)]
    assert "bf16 · 2 of them: failed: the <memory> is full" in items
    assert any(line.startswith("tensors: planned with a median error of 11.1%") for line in items)
    assert all(max(map(len, t.rows)) == len(t.head) for t in blocks_of(harness, Table))


def test_equal_rows_give_equal_bytes(harness, tmp_path):
    pytest.importorskip("typst")
    for name in ("a", "b"):
        said = list(report([str(harness)], str(tmp_path / name)))
    assert said[0].endswith("report.html: 1 study; it needs no other file")
    for file in ("report.html", "report.pdf"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    text = (tmp_path / "a" / "report.html").read_text()
    assert "&lt;memory&gt;" in text and "<script" not in text and "<memory>" not in text


def test_what_was_lost_on_several_processes(tmp_path):
    rows = []
    for n, speed in ((1, 100.0), (2, 160.0), (4, 200.0)):
        c, more = f"{n} processes", {"processes": n, "against": "1 processes"}
        rows += [row("samples_per_s", speed, c, "samples/s", samples=[speed, speed + 9], at={"processes": c}, runner="steps", **more)]
        rows += [row("ratio", speed / 100, c, **more), row("speed_up", speed / 100, c, **more), row("efficiency", speed / 100 / n, c, **more)]
        rows += [row("time/step", 10 / speed, c, "s", samples=[9 / speed, 10 / speed, 11 / speed], **more)]
        rows += [row(f"time/step/{part}", 0.01, c, "s", **more) for part in ("computing", "waiting")]
        rows += [row("lost/computing", -0.05, c, **more), row("lost/data", 0.12, c, **more), row("lost/waiting", 0.25, c, **more)] if n > 1 else []
        rows += [row("collective/all_reduce", 0.02, c, "s", calls=3, bytes=1e6, **more)] if n > 1 else []
        rows += [row("samples_per_s", speed, f"{c}, to the end", "samples/s", processes=n, runner="train", at={"processes": f"{c}, to the end"})]
    folder = folder_of(tmp_path / "scale", rows)
    found = blocks_of(folder, Table)
    assert found[0].head == ["configuration", "samples/s", "speed-up", "efficiency", "step"]  # which is the ratio
    lost = next(t for t in found if "what was lost" in t.caption)
    assert lost.rows[1] == ["2 processes", "+20.0", "noise", "-", "+25.0", "+12.0", "-"]  # as on the screen
    assert "noise: less than the rounds differ among themselves (1 processes ±10.0, 2 processes ±10.0" in lost.caption
    assert next(t for t in found if "collective" in t.head).rows[0] == ["2 processes", "all_reduce", "3", "20 ms", "1 MB"]
    assert captions(folder)[-1].endswith("Bars show a step by its parts, and what was lost by name.")


def test_a_ladder_of_one_round_has_the_speed_of_its_timed_steps(tmp_path):
    """Not that of the first steps, which are taken once for losses and memory, the compilation with them."""
    rows = []
    for c, first, timed in (("before", 5.0, 10.0), ("compile", 0.1, 12.0)):
        rows.append(row("samples_per_s", first, c, "samples/s", samples=[first], rung="00-first", study="once", steps=3, warm_up=0))
        rows.append(row("samples_per_s/undisturbed", first + 1, c, "samples/s", samples=[first + 1], rung="00-first", study="once", steps=3, warm_up=0))
        rows.append(row("samples_per_s", timed, c, "samples/s", samples=[timed], rung="00-first", study="ladder", steps=8, warm_up=2))
        rows.append(row("memory/allocated", 1e6, c, "bytes", rung="00-first", study="once", steps=3, warm_up=0))
    folder = folder_of(tmp_path / "ladder", rows)
    assert studies.read([str(folder)])[0].values("samples_per_s") == {"00-first · before": 10.0, "00-first · compile": 12.0}
    text = " ".join(text for block in blocks_of(folder, Text) for _, text in block.parts)
    assert "8 steps" in text and "3 steps" not in text


def test_a_ladder_rung_by_rung(tmp_path):
    """A configuration that is there on several rungs is one on each; memory is that of the whole batch, speed that of all rounds."""
    rows = []
    for rung, option, kept in (("01-attention", "sdpa", True), ("02-precision", "bf16", False)):
        for c in ("before", option):
            rows.append(row("samples_per_s", 10.0, c, "samples/s", samples=[9.0, 10.0, 11.0], rung=rung, study="ladder"))
            rows.append(row("memory/allocated", 1e6, c, "bytes", rung=rung, study="ladder"))
            for name in (c, f"{c}, without dropout"):
                rows.append(row("samples_per_s", 3.0, name, "samples/s", samples=[3.0], rung=rung, study="once"))
                rows.append(row("memory/allocated", 2e6, name, "bytes", rung=rung, study="once"))
        rows.append(row("verdict", "as it is", option, rung=rung, kept=kept))
    folder = folder_of(tmp_path / "ladder", rows)
    speed, memory, *_ = blocks_of(folder, Table)
    assert [r[0] for r in speed.rows] == ["01-attention · before", "01-attention · sdpa", "02-precision · bf16"]
    assert {r[1] for r in speed.rows} == {"10 [9, 11]"} and {r[1] for r in memory.rows} == {"2 MB"}
    assert ["".join(text for _, text in block.parts) for block in blocks_of(folder, Text)][:2] == [
        "01-attention · sdpa: kept: as it is", "02-precision · bf16: not kept: as it is",
    ]  # fmt: skip
    (tmp_path / "ladder" / "study.json").rename(tmp_path / "ladder" / "ladder.json")
    (caption,) = captions(folder)
    assert studies.is_study(tmp_path / "ladder") and "a faint bar was not kept" in caption


@pytest.mark.parametrize(
    "rows, wrong",
    [
        (None, r"this study is not finished. Start it again: gradus study x.yaml$"),
        ([], r"nothing was measured in this study. Start it again: gradus study x.yaml$"),
        ([row("failed", "no room.", "a")], r"nothing was measured in this study. a: no room. Start it again: gradus"),
        ([{"name": "a", "value": 1}], r"has rows without a configuration. Give the folder that gradus study wrote"),
    ],
)
def test_a_study_without_finished_rows(tmp_path, rows, wrong):
    folder = folder_of(tmp_path / "s", rows or [], command="gradus study x.yaml")
    if rows is None:
        (tmp_path / "s" / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=wrong):
        list(report([folder], str(tmp_path / "out")))
    if rows and "kind" not in rows[0]:
        return  # a damaged file, not an unfinished study
    whole = folder_of(tmp_path / "whole", [row("samples_per_s", 1.0, "a")])
    said = list(report([folder, whole], str(tmp_path / "out")))  # the others are shown, and this one is named
    assert "1 study" in said[0] and re.search(f"^note: left out: .*{wrong}", said[-1])


def test_wrong_folders(tmp_path):
    folder = folder_of(tmp_path / "s", [row("samples_per_s", 1.0, "a")])
    with pytest.raises(UserError, match=r"neither a run \(recipe.yaml and metrics.jsonl\) nor a study"):
        list(report([str(tmp_path)], str(tmp_path / "out")))
    with pytest.raises(UserError, match="is given twice"):
        list(report([folder, f"{folder}/."], str(tmp_path / "out")))
    (tmp_path / "s" / "study.json").write_text("{")
    with pytest.raises(UserError, match=r"study.json: line 1, column 2: not valid JSON.* Delete the file, or measure again"):
        list(report([folder], str(tmp_path / "out")))


@pytest.mark.parametrize("text", ["[]", "5", "null", "[" * 100_000, '{"study": 5}', '{"command": 5}', '{"configurations": 5}', '{"configurations": {"a": {"recipe": 5}}}'])
def test_a_damaged_study_is_one_line(tmp_path, text):
    folder = folder_of(tmp_path / "s", [row("samples_per_s", 1.0, "a")])
    (tmp_path / "s" / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"study.json: .* Delete the file, or measure again") as caught:
        list(report([folder], str(tmp_path / "out")))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{"configuration": [1]}, {"kind": [1]}, {"unit": 5}, {"processes": 0}, {"at": [1]}, {"samples": 5}, {"std": "x"}, {"low": "x"}, {"versions": 5}])
def test_a_damaged_row_is_one_line(tmp_path, more):
    folder = folder_of(tmp_path / "s", [row("samples_per_s", 1.0, "a"), row("samples_per_s", 1.0, "b") | more])
    with pytest.raises(UserError, match=r"rows.jsonl: a row of 'samples_per_s': .* Delete the line, or measure again") as caught:
        list(report([folder], str(tmp_path / "out")))
    assert "\n" not in str(caught.value)


def test_numbers_that_no_plot_holds(tmp_path):
    values = (1.0, float("nan"), float("inf"), 10**400, 1e308, True)
    folder = folder_of(tmp_path / "s", [row("samples_per_s", value, f"c{i}") for i, value in enumerate(values)])
    assert studies.read([folder])[0].values("samples_per_s") == {"c0": 1.0} and len(captions(folder)) == 1
    assert blocks_of(folder, Table)[0].rows[3][1].startswith("1000")
    words = [row(name, "nan", "c", **more) for name in ("memory/allocated", "collective/all_reduce", "time/step") for more in ({}, {"kind": "predicted"})]
    folder = folder_of(tmp_path / "words", [row("samples_per_s", 1.0, "c"), *words, row("memory/allocated", 5.0, "c", kind="predicted")])
    assert blocks_of(folder, Table)[1].rows[0][1:] == ["5", "nan"] and len(captions(folder)) == 1


def test_names_are_text_in_markdown():
    """Of a configuration, a figure and a failure, on the page of `gradus study --page`."""
    evil = "<img src=x>|a\nb `c` [d](e) *f* $g$"
    rows = [row(f"valid/{evil}", 1.0, evil), row("failed", "no <b> room", evil), row("valid/a_b", 1.0, "fp32 [1, 2]")]
    head, rule, first, second, _, failed = list(results.markdown(rows))[:6]
    escaped = r"\<img src=x\>\|a b \`c\` [d\](e) \*f\* \$g\$"
    assert head == rf"| configuration | valid/{escaped} | valid/a_b |" and rule == "|---|---:|---:|"
    assert first == f"| {escaped} | 1 | - |" and second == "| fp32 [1, 2] | - | 1 |" and failed == rf"{escaped}: no \<b\> room  "


def test_the_appendix_names_what_the_first_configuration_has_not(tmp_path):
    recipe = "optimizer: {name: sgd, lr: 0.1"
    of = lambda text: SimpleNamespace(recipe=text, runner="steps", processes=1, options={})  # noqa: E731
    configurations = {"plain": of(recipe + "}"), "momentum": of(recipe + ", momentum: 0.9}"), "none": of("optimizer: {name: sgd}")}
    study = SimpleNamespace(name="s", folder=tmp_path, about=SimpleNamespace(command=None, configurations=configurations))
    table = next(block for block in studies.appendix(study) if isinstance(block, Table))
    assert [row[-1] for row in table.rows[:2]] == ["–", "optimizer.momentum=0.9"] and "optimizer.lr=" in table.rows[2][-1]
