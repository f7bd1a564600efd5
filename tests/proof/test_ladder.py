"""The ladder: what it keeps, what it refuses, and that nothing is measured twice."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main
from gradus.parallel.world import World
from gradus.proof import harness, ladder, optimizations, results, study_store
from gradus.proof.ladder import LadderBench
from gradus.proof.ladder_search import Climbed, Trial
from gradus.proof.optimizations import OPTIMIZATIONS
from gradus.proof.timing import Timed
from gradus.report import studies
from gradus.report.blocks import Table, Text
from gradus.text import visible
from gradus.train.session import open_for

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import COPY, NAIVE  # noqa: E402

# ------------------------------------------------------------ with the harness


def fake(recipe) -> Timed:
    """As if naive attention took twice as long as the others, and checkpointing less memory."""
    step = 0.2 if recipe.layout.attention == "naive" else 0.1
    memory = {"process": 1000, "allocated": 500 if recipe.layout.checkpointing == "full" else 800}
    return Timed([step, step], 2 * step, [[0.0, step, 0.0, 0.0]] * 2, 32, [2.0, 1.0], memory, 0.0, 0, facts={"loss_unit": "nats/token"})


@pytest.fixture
def taken(monkeypatch):
    """What is measured, in place of measuring it."""
    seen: list[tuple] = []

    def take(made, c, number, folder):
        if len(seen) == getattr(take, "stop_at", None):
            raise KeyboardInterrupt
        seen.append((folder.name, c.name, number))
        return study_store.Sample(number, ranks=[fake(c.recipe)], elapsed=1.0)

    monkeypatch.setattr(harness, "measure", take)
    monkeypatch.setattr(harness, "planned", lambda *_: ([], {}))
    monkeypatch.setattr(ladder, "largest_micro_batch", lambda recipe, room: 16)
    monkeypatch.setattr(optimizations, "slower_in_bf16", lambda: 1.0)  # else two starts may find other rungs
    seen.append(take)
    return seen


def test_a_ladder_that_was_stopped_goes_on_and_measures_nothing_twice(taken, tmp_path, capsys):
    take = taken.pop()
    asked = ["ladder", *COPY, "--steps", "2", "--rounds", "2", "--to", str(tmp_path / "ladder")]
    take.stop_at = 9
    assert main(asked) == 130
    del take.stop_at
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert len(taken) == len(set(taken)) > 9
    assert "layout.attention=sdpa" in out.split("keys: ")[1] and "2.00× [2.00, 2.00]" in out
    assert f"gradus train {' '.join(COPY)} layout.attention=sdpa" in re.sub(r"\s*\\\n\s*", " ", out)
    n = len(taken)
    assert main([*asked, "--json"]) == 0
    assert len(taken) == n
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [json.loads(line) for line in (tmp_path / "ladder" / "rows.jsonl").read_text().splitlines()]
    assert {"01-attention-kernel", "07-checkpointing", "first-and-last"} <= {row["rung"] for row in rows}
    assert any(row["name"] == "verdict" and row["kept"] and row["configuration"] == "layout.attention=sdpa" for row in rows)
    assert main([*asked[:-2], "--rounds", "3", "--to", str(tmp_path / "ladder")]) == 2
    assert "holds another ladder, or this one with other settings" in capsys.readouterr().err


def test_what_is_not_faster_at_the_end_is_not_recommended_and_the_report_has_the_same_ratio(taken, tmp_path, monkeypatch, capsys):
    """Other programs take half of the time of the last rung, which is no faster than the first; of one round."""
    monkeypatch.delenv("COLUMNS", raising=False)  # no terminal: a table is not divided
    taken.pop()
    quiet = harness.measure

    def take(made, c, number, folder):
        sample = quiet(made, c, number, folder)
        if folder.name == "first-and-last" and c.name != "before":
            busy = dataclasses.replace(sample.ranks[0], elapsed=0.6, spent=[[0.0, 0.15, 0.15, 0.0]] * 2, others=0.9)
            sample = study_store.Sample(number, ranks=[busy], elapsed=1.0)
        return sample

    monkeypatch.setattr(harness, "measure", take)
    assert main(["ladder", *COPY, "--steps", "2", "--rounds", "1", "--to", str(tmp_path / "ladder")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing is faster here" in out and "measured on a busy machine, run it again" in out
    assert "keys: " not in out and "gradus train" not in out and "helped" not in out
    assert "1.33× [1.33, 1.33] the samples/s (0.67× by the wall clock" in out and "note: one round has no spread" in out
    [study] = studies.read([str(tmp_path / "ladder")])
    blocks = list(studies.tables(study))
    assert any("1.33× [1.33, 1.33] the samples/s (0.67× by the wall clock" in text for block in blocks if isinstance(block, Text) for _, text in block.parts)
    assert study.trials[-1].rung == "first-and-last" and study.trials[-1].kept is False
    (table,) = (block for block in blocks if isinstance(block, Table))
    for _, tried, *cells in table.rows:
        assert f"{tried} {' '.join(filter(None, cells))}" in out, "a line of the report's table is one of the screen's"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["copy-tusk"], "Did you mean copy-task?"),
        ([*COPY, "--for", "beauty"], "--for=beauty: not one of speed, memory"),
        ([*COPY, "layout.tensor=2"], "measures one process, and this layout needs 2"),
        ([*COPY, "--processes", "2"], "--processes: unknown option"),
        ([*COPY, "--steps", "0"], "--steps=0"),
        ([*COPY, "--to", "."], "is not empty, and holds no ladder"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, said, capsys):
    assert main(["ladder", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error


def test_measured_for_real_sdpa_takes_less_memory_than_naive(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "run_group", lambda n, function, *args, log: [function(*args, World())])  # no process of its own: quick
    long = recipes.load("copy-task", [*COPY[1:], "task.length=96", "model.seq_len=96", "layout.attention=naive"])
    bench = LadderBench(tmp_path, "memory", steps=2, rounds=1, samples=32, say=lambda line: None)
    monkeypatch.setattr(harness, "planned", lambda *_: ([], {}))
    monkeypatch.setitem(ladder.PATIENCE, "memory", 0.0)  # one round of two steps says nothing of speed
    [f] = bench("01-attention", long, [{"layout.attention": "sdpa"}], True)
    assert f.failed is None and f.saved > 0.1 and f.loss < 1e-5 and f.ratio > 0 and f.first_call > 0
    assert {row.conditions["rung"] for row in bench.rows} == {"01-attention"}


# ------------------------------------------------------------ every kind of recipe

LINES = [f"{word} film number {i} of many" for i in range(30) for word in ("good", "bad")]


def written(kind: str, folder) -> list[str]:
    """RECIPE key=value of a task whose vocabulary or classes only its data know, the data in `folder`."""
    (folder / "train.txt").write_text("\n".join(LINES))
    (folder / "train.csv").write_text("text,label\n" + "\n".join(f"{line},{line.split()[0]}" for line in LINES))
    for language in ("de", "en"):
        (folder / f"train.{language}").write_text("\n".join(LINES))
    bpe, text, pad = ["tokenizer.kind=bpe", "tokenizer.path=null", "tokenizer.vocab_size=400"], f"data.path={folder / 'train.txt'}", "data.workers=0"
    if kind == "new":
        assert main(["new", str(folder / "own.yaml"), "--data", str(folder / "train.csv")]) == 0
        return [str(folder / "own.yaml"), pad]
    return {
        "images": ["digits-vit"], "next token": ["shakespeare-char-gpt", text], "masked": ["wikitext2-bert", text, "data.valid=train.txt", "evaluate.test=false", *bpe],
        "spans": ["wikitext2-t5", text, "data.valid=train.txt", "evaluate.test=false", *bpe], "translation": ["multi30k-seq2seq", f"data.path={folder}", *bpe[::2], "evaluate.test=false", "data.test=null"],
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["images", "next token", "masked", "spans", "translation", "new"])
def test_every_kind_of_recipe_is_completed_from_its_data(kind, taken, tmp_path, monkeypatch, capsys):
    taken.pop()
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ladder, "OPTIMIZATIONS", OPTIMIZATIONS[:1])
    monkeypatch.setattr(ladder, "largest_micro_batch", lambda recipe, room: models.count(recipe.model) and 16)  # raises where a size is not known
    (tmp_path / "data").mkdir()
    fake = harness.measure
    opened: set[str] = set()

    def take(made, c, number, folder):
        if made.name == "ladder" and not opened:
            opened.add(open_for(c.recipe, 1).recipe.name)  # with a limit on the samples, as the rounds are timed
        return fake(made, c, number, folder)

    monkeypatch.setattr(harness, "measure", take)
    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "layout.device=cpu", "layout.threads=1", "batch.samples=16", "batch.tokens=null"]
    code = main(["ladder", *written(kind, tmp_path / "data"), *small, "--steps", "1", "--rounds", "1", "--to", str(tmp_path / "ladder")])
    assert code == 0, capsys.readouterr().err
    assert opened and "layout.attention=sdpa" in capsys.readouterr().out.split("keys: ")[1]


def test_nothing_breaks_inside_a_word_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    long = {"layout.checkpointing": "selective", "layout.micro_batch": 12}
    found = [
        Trial("01-attention-kernel", {"layout.attention": "sdpa"}, 1234.5, 1.5, 1.49, 1.51, 8.61e8, 8.6e8, 1.2e9, 0.24, 2.2, 0.1, 1e-7, None, True, "faster"),
        Trial("07-checkpointing", long, 7.3, 0.87, 0.86, 0.87, verdict="refused: a loss is off by 1.0e-02, more than 1e-03; another is better by far"),
        Trial("04-loader", {}, verdict="left out: data.workers: a step waits 0.1% of its time for data, and so on"),
    ]
    start = Trial("00-first", {}, tensors=8e8, planned=8e8, process=1e9)
    lines = [*ladder.table(start, found)]
    lines += ladder.summary(found[0], start, Climbed(NAIVE, {}, found), found[0].keys, ["gradus", "train", "sst2-bert", "model.init=a folder", *long])
    assert results.print_lines(iter(lines), False) == 0
    out = capsys.readouterr().out
    assert max(map(visible, out.splitlines())) <= 80
    assert "\x1b[32myes\x1b[0m" in out and "\x1b[31mno\x1b[0m" in out
    words = set(re.sub("\x1b.*?m", "", out).split())
    assert {word for line in lines for word in re.sub("\x1b.*?m", "", line).split()} <= words, "none is broken"
    command = out[out.index("gradus train") : out.index("first against last")]
    assert shlex.split(command.replace("\\\n", "")) == ["gradus", "train", "sst2-bert", "model.init=a folder", *long, "layout.attention=sdpa"]
