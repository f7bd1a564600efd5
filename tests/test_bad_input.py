"""None of the generated bad inputs (bad_input.py) ends in a traceback, a hang or a dead process; and what is accepted is known."""

# ruff: noqa: E402
from __future__ import annotations

import fnmatch
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]
import bad_input

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/statm").exists(), reason="forks, and reads /proc: Linux")

# What is right to accept: the value is a good one there, or nothing of the file is read.
RIGHT = (
    "json_file/weight_decay='1.5'", "json_file/max_grad_norm='1.5'", "json_file/output_dir=*", "json_file/report_to=*",  # said in a note: not to be had here
    "config/*_pdrop=*/plan", "config/embd_pdrop='0'/*", "config/[be]os_token_id=*", "config/dtype=*", "config/tie_word_embeddings='0'/*",  # planned as the other and said; not read; 0 is false
    "accuracy/points", "data/label-float.csv/*", "data/bool.jsonl/*", "text/nul.txt", "text/lone.txt",  # not predicted, and why; a name; fetched as it is
    "tokenizer_config/{\"bos_token\": {\"content\": null}}", "run/*",  # none; damaged, and not read by this verb
    "override/data.path=*/show", "override/model.init=*/show", "override/data.text=*", "override/log.*", "name",  # names, which --no-data does not look for
    "override/*=/show", "override/*=null/*", "override/evaluate.batch=١٢/*", "override/evaluate.samples=1e-400/*",  # unset; digits; 0
    "override/'batch.samples=1073741824*", "override/long copies",  # large, and answered
    "option/tokenizer --text=*", "option/launch slurm --*", "option/launch ssh --*", "words/'generate run-gpt '", "words/'predict run-bert *",  # names; empty texts
    "config/architectures='{}'/plan", "config/n_positions='True'/plan", "word/hardware",  # none; 1, as transformers reads it; -- and no name
    "option/plan --days=1.5", "option/bench --seconds=1.5", "page/tokens='4000000000'",  # days, seconds and tokens that one may mean
)  # fmt: skip

SMALL = (
    "recipe/bomb/*", "recipe/mapping-bomb/*", "recipe/deep-lists/*", "recipe-file/'fifo.yaml'/*", "json_file/deep", "config/rope", "config/type",
    "data/label-3e9.csv/*", "data/label-huge.csv/*", "data/surrogate.jsonl/*", "option/launch slurm --time=999*", "text/'fifo.txt'/*", "tokenizer.json/added-id/*", "tokenizer.json/vocab-size/*", "tokenizer.json/vocab-id/*",
    "tokenizer/spiece.model*", "GRADUS_HARDWARE/fifo", "override/'model.n_layers=99999999999'/*", "override/'model.d_model=1e18*", "override/'layout.threads=1e8'/*",
    "words/*--sweep*", "words/*nan*", "words/*1e200*", "words/*--processes 0*", "page/bracket", "page/a byte at a time", "page/override 'model.n_layers*",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    bad_input.prepare()
    there = os.getcwd()
    world = bad_input.built(tmp_path_factory.mktemp("bad"))
    yield world, bad_input.table(world)
    os.chdir(there)


def wrong(found: list[bad_input.Outcome]) -> str:
    return "\n\n".join(f"{o.verdict}: {o.case.name}: {' '.join(o.case.argv or [])[:300]}\n{o.text[-800:]}" for o in found)


def test_the_worst_of_them_are_one_clear_error(cases):
    world, every = cases
    chosen = [c for c in every if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in SMALL)]
    assert len(chosen) >= len(SMALL)
    found = bad_input.run_all(chosen, world)
    assert all(o.verdict == "clear" for o in found), wrong([o for o in found if o.verdict != "clear"])


@pytest.mark.slow
def test_every_bad_input_is_one_clear_error(cases):
    world, every = cases
    assert len(every) >= 600 and len({c.name for c in every}) > 0.97 * len(every)
    some = every[::3]  # `python tests/bad_input.py` runs all of them
    found = bad_input.run_all(some, world)
    print(Counter(o.verdict for o in found))
    assert not (bad := [o for o in found if o.verdict not in ("clear", "accepted")]), wrong(bad)
    surprising = [o for o in found if o.verdict == "accepted" and not any(fnmatch.fnmatchcase(o.case.name, pattern) for pattern in RIGHT)]
    assert not surprising, wrong(surprising)


def test_the_judge_tells_the_kinds_apart(tmp_path):
    """The table is worth what its judge is: each kind of end is made here on purpose."""
    world = tmp_path / "world"
    world.mkdir()
    made = {
        "traceback": lambda: 1 // 0, "abort": lambda: os.kill(os.getpid(), signal.SIGKILL), "accepted": lambda: 0, "other": lambda: 2,
        "clear": lambda: __import__("gradus.cli").cli.main(["nothing"]),
    }  # fmt: skip
    kinds = [bad_input.Case(kind, run=run) for kind, run in made.items()]
    assert {o.case.name: o.verdict for o in bad_input.run_all(kinds, world)} == {kind: kind for kind in made}


def test_a_hang_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(bad_input, "WALL", 0.5)
    world = tmp_path / "world"
    world.mkdir()
    ours, theirs = socket.socketpair()
    found = bad_input.run_all([bad_input.Case("hang", run=lambda: len(ours.recv(1)))], world)
    assert [o.verdict for o in found] == ["hang"]
    theirs.close()
