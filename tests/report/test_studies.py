"""`gradus report` of studies: what it says is what their rows say, and what it draws is what they have rows for."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
from study_parts import captions, folder_of, row

from gradus.errors import UserError
from gradus.proof import bench, ladder, results, scale
from gradus.proof.ladder_search import Climbed, Trial
from gradus.proof.study_store import claimed
from gradus.report import first_page, studies
from gradus.report.blocks import Code, Table, Text
from gradus.report.report import report


def blocks_of(folder, kind):
    study = studies.read([str(folder)])[0]
    return [block for block in (*studies.tables(study), *studies.appendix(study, code=True)) if isinstance(block, kind)]


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
    lost = next(t for t in found if "What was lost" in t.caption)
    assert lost.rows[1] == ["2 processes", "+20.0", "noise", "-", "+25.0", "+12.0", "-"]  # as on the screen
    assert "Noise: less than the rounds differ among themselves (1 processes ±10.0, 2 processes ±10.0" in lost.caption
    assert next(t for t in found if "collective" in t.head).rows[0] == ["2 processes", "all_reduce", "3", "20.00", "977 KiB"]  # as on the screen
    assert captions(folder)[-1].endswith("Bars show a step by its parts, and what was lost by name.")


# ---------------------------------------------------------------- what the screen says, number by number


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])[+-]?\d[\d,.]*(?:e-?\d+)?", text)


def said_by(folder):
    """All that the report's tables and texts say of a study."""
    study = studies.read([str(folder)])[0]
    blocks = [*studies.tables(study), *studies.appendix(study)]
    cells = [cell for block in blocks if isinstance(block, Table) for row in (block.head, *block.rows, [block.caption]) for cell in row]
    return " ".join([*cells, *(text for block in blocks if isinstance(block, Text) for _, text in block.parts)])


def trial(rung, keys, **more):
    figures = {"speed": 9.5, "ratio": 1.25, "low": 1.2, "high": 1.31, "tensors": 2e6, "planned": 2.1e6, "saved": 0.33, "process": 5e8, "first_call": 0.7, "loss": 1.5e-5}
    about = {"rung": rung, "keys": keys, "verdict": "faster and smaller", "kept": True, "wall_clock": [0.91, 0.92]}
    return Trial(**{**figures, **about, **more})


def test_a_ladder_is_one_table_as_on_the_screen(tmp_path):
    """With all that was kept beside the first rung, and the time of other programs with and without."""
    start = Trial("00-first", {}, tensors=3e6, planned=3.1e6, process=6e8, verdict="the first rung")
    long = {"layout.checkpointing": "selective", "layout.micro_batch": 12}
    tried = [trial("01-attention-kernel", {"layout.attention": "sdpa"}), trial("07-checkpointing", long, kept=False, speed=None, failed="no room", verdict="not possible: no room"),
             trial("07-checkpointing", {"layout.checkpointing": "full"}, ratio=0.83, loss=float("nan"), kept=False), Trial("08-loader", {}, verdict="left out: no wait")]  # fmt: skip
    whole = trial(ladder.LAST, {"layout.attention": "sdpa"}, ratio=1.41)
    records = [r.known() for t in (start, *tried, whole) for r in ladder.verdict_rows(t)]
    screen = "\n".join([*ladder.table(start, tried), *ladder.summary(whole, start, Climbed(None, {}, tried), whole.keys, ["gradus", "train"])])
    folder = folder_of(tmp_path / "digits", [json.loads(json.dumps(r)) for r in records], study=None)
    (tmp_path / "digits" / "study.json").rename(tmp_path / "digits" / "ladder.json")
    table, *others = blocks_of(folder, Table)
    assert not others and table.head == ["rung", *ladder.HEAD] and [r[1:] for r in table.rows] == ladder.body_of(start, tried)
    assert table.rows[2][:2] == ["07-checkpointing", "layout.checkpointing=selective layout.micro_batch=12"]
    report_says = said_by(folder)
    missing = [n for n in numbers(screen) if n not in numbers(report_says)]
    assert not missing and "0.92" in numbers(screen) and "by the wall clock: other programs" in report_says, missing
    assert [caption.partition(".")[0] for caption in captions(folder)] == ["The speed of each rung against the best before"]
    study = studies.read([str(folder)])[0]
    assert study.name == "ladder digits" and first_page.of_study(study)[1].startswith("first against last, side by side: 1.41×")


def scaling(ratio):
    """Rows of one and two processes as gradus scale leaves them; others ran during the second."""
    for n, speed, quiet in ((1, 100.0, 100.0), (2, 100 * ratio, 110 * ratio)):
        c, more = f"{n} process{'es' * (n > 1)}", {"processes": n, "against": "1 process", "load": 14.0, "others": [0.0, 3.1 * (n - 1)]}
        values = {"samples_per_s": speed, "samples_per_s/undisturbed": quiet}
        values |= {"ratio": ratio, "ratio/undisturbed": 1.1 * ratio} if n > 1 else {}
        yield from (row(name, value, c, samples=[0.9 * value, value, 1.2 * value], **more) for name, value in values.items())
        figures = {"speed_up": ratio ** (n - 1), "efficiency": (ratio / 2) ** (n - 1), "memory/process": 3e8, "loss": 2.0, "traffic/sent": 1e6}
        yield from (row(name, value, c, "bytes" if "m" in name[:2] or "sent" in name else "", **more) for name, value in figures.items())
        yield row("time/step", 8 / speed, c, "s", samples=[7 / speed, 8 / speed, 9 / speed], **more)
        yield from (row(f"time/step/{part}", 0.01, c, "s", **more) for part in ("computing", "data"))
        if n > 1:
            yield from (row(f"lost/{part}", share, c, **more) for part, share in (("computing", 0.005), ("waiting", 0.37)))
            yield row("collective/all_reduce", 0.0123, c, "s", calls=3, bytes=1.3e6, **more)


@pytest.mark.parametrize("ratio", [1.6, 2.4])
def test_a_scaling_says_what_the_screen_says(tmp_path, ratio):
    rows = list(scaling(ratio))
    folder = folder_of(tmp_path / "scale", rows)
    screen, told = "\n".join(scale.lines(rows)), said_by(folder)
    missing = [n for n in numbers(screen) if n not in numbers(told)]
    assert not missing and "noise" in screen and "noise" in told, missing
    assert all("undisturbed samples/s" in text.lower() and "8 processors, of which other programs used up to 3.1; PyTorch" in text for text in (screen, told))
    wrong = "2 processes: not comparable: other programs ran (load 14 on 8 cores), or other things differ too"
    assert (wrong in screen, wrong in told) == (ratio > 2, ratio > 2)
    assert ("not comparable" in first_page.of_study(studies.read([folder])[0])[1]) == (ratio > 2)


def test_a_bench_and_a_study_say_what_the_screen_says(tmp_path, harness):
    rows = []
    for i, c in enumerate(("torch fp32 · batch 1", "onnx fp32 · batch 1")):
        figures = {"latency/median": 0.0123 + i, "latency/p90": 0.0145, "decode/tokens_per_s": 4321.0 + i, "memory/process": 4e8, "size/weights": 1e8, "time/load": 0.3, "roof": 0.417}
        unit = {"size/weights": "bytes", "memory/process": "bytes"}
        rows += [row(name, value, c, unit.get(name, "s" if name.startswith(("lat", "time")) else ""), steps=7, warm_up=2) for name, value in figures.items()]
        rows += [row(name, value, c, samples=[0.9 * value, value], steps=7, warm_up=2) for name, value in (("samples_per_s", 81.3 + i), ("ratio", 1 + 1.4 * i))]
    for folder, columns in ((folder_of(tmp_path / "bench", rows), bench.COLUMNS), (harness, ())):
        screen, told = "\n".join(results.lines(studies.read([str(folder)])[0].rows, columns)), said_by(folder)
        missing = [n for n in numbers(screen) if n not in numbers(told)]
        assert len(numbers(screen)) > 20 and not missing, missing


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


@pytest.mark.parametrize("more", [{"configuration": [1]}, {"kind": [1]}, {"unit": 5}, {"processes": 0}, {"at": [1]}, {"samples": 5}, {"std": "x"}, {"low": "x"}, {"versions": 5}, {"trial": {"rung": 1}}, {"others": 5}])
def test_a_damaged_row_is_one_line(tmp_path, more):
    folder = folder_of(tmp_path / "s", [row("samples_per_s", 1.0, "a"), row("samples_per_s", 1.0, "b") | more])
    with pytest.raises(UserError, match=r"rows.jsonl: (a row of 'samples_per_s'|an option of the ladder): .* Delete the line, or measure again") as caught:
        list(report([folder], str(tmp_path / "out")))
    assert "\n" not in str(caught.value)


def test_numbers_that_no_plot_holds(tmp_path):
    values = (1.0, float("nan"), float("inf"), 10**400, 1e308, True)
    folder = folder_of(tmp_path / "s", [row("samples_per_s", value, f"c{i}") for i, value in enumerate(values)])
    assert studies.read([folder])[0].values("samples_per_s") == {"c0": 1.0} and not captions(folder)
    assert blocks_of(folder, Table)[0].rows[3][1].startswith("1000")
    words = [row(name, "nan", "c", **more) for name in ("memory/allocated", "collective/all_reduce", "time/step") for more in ({}, {"kind": "predicted"})]
    folder = folder_of(tmp_path / "words", [row("samples_per_s", 1.0, "c"), *words, row("memory/allocated", 5.0, "c", kind="predicted")])
    assert blocks_of(folder, Table)[0].rows[0][1:] == ["1", "nan", "nan", "5", "nan"] and not captions(folder)


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
