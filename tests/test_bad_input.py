"""A sample of the bad inputs that are made from a seed (bad_input.py): one clear error, or accepted with a reason."""

# ruff: noqa: E402
from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]
import bad_input
import bad_input_cases

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/statm").exists(),
                                reason="forks, and reads /proc: Linux")

LONG = ("train ", "report ", "study ", "quantize ", "check ", "profile ", "bench ", "scale ", "ladder ", "fit ",
        "calibrate", "--search", "onnx", "long-", "word", "bomb")


@pytest.fixture(scope="module")
def prepared():
    bad_input.prepare()


@pytest.fixture(scope="module")
def world(prepared, tmp_path_factory):
    """Few of the good things; what is made of others is refused, as they are not there."""
    return bad_input.built(tmp_path_factory.mktemp("bad"), bad_input.QUICK)


def wrong(found: list[bad_input.Outcome]) -> str:
    return "\n\n".join(str(o) for o in found if o.verdict not in ("clear", "accepted"))


@pytest.fixture(scope="module")
def table(world):
    return [case for case in bad_input_cases.table(world, seed=0, n=200) if not any(word in case.name for word in LONG)]


@pytest.mark.parametrize("kind", ["world", "written", "override", "option", "line", "path", "stdin", "api", "page"])
def test_a_sample_is_refused_clearly_or_accepted_with_a_reason(kind, world, table):
    cases = [case for case in table if case.name.startswith(kind)][:2]
    assert len(cases) == 2
    assert not (text := wrong(bad_input.run_all(cases, world))), text


@pytest.mark.slow
def test_many_are_refused_clearly_or_accepted_with_a_reason(tmp_path):
    """Of the whole world; `python tests/bad_input.py SEED` runs a thousand."""
    bad_input.prepare()
    world = bad_input.built(tmp_path)
    found = bad_input.run_all(bad_input_cases.table(world, seed=4, n=20), world)
    assert not (text := wrong(found)), text


def test_seeds_differ_and_are_the_same_again(world):
    one, again, two = ([case.name for case in bad_input_cases.table(world, seed, 60)] for seed in (1, 1, 2))
    assert one == again and len(set(one)) == 60 and len(set(one) - set(two)) > 40


def test_each_end_has_its_name(world):
    """The table is worth what its judge is: each kind of end is made here on purpose."""
    made = {
        "traceback": lambda: 1 // 0, "abort": lambda: os.kill(os.getpid(), signal.SIGKILL), "unexplained": lambda: 0,
        "other": lambda: 2,
        "clear": lambda: bad_input.commands(["nothing"]),
    }  # fmt: skip
    kinds = [bad_input.Case(kind, run=run) for kind,
             run in made.items()] + [bad_input.Case("accepted", run=lambda: 0, fine=["a word"])]
    assert {o.case.name: o.verdict for o in bad_input.run_all(kinds, world)} == {kind: kind for kind in [*made,
        "accepted"]}


def test_another_answer_than_that_of_the_whole_is_unexplained(world):
    """What `same` is for: tampered weights that give another answer in silence, beside damage that nothing reads."""
    words = ["generate", "exported", "line", "--max-new", "8"]
    weights = Path(world / "exported" / "model.safetensors").read_bytes()
    tampered = bad_input_cases.put("exported/model.safetensors", bad_input_cases.signs(weights))
    damage = {"weights": lambda: (tampered(), Path("exported/checksums.json").unlink()),  # which would refuse it
              "beside": bad_input_cases.put("exported/notes.txt", b"x")}
    cases = [bad_input.Case(name, words, before=before, fine=[bad_input.same]) for name, before in damage.items()]
    assert [o.verdict for o in bad_input.run_all(cases, world)] == ["unexplained", "accepted"]


def test_what_the_first_of_two_commands_wrote_must_be_taken_by_the_second(world):
    words = ["show", "gpt.yaml", "--no-data", "&&", "show", "nowhere.yaml"]
    assert [o.verdict for o in bad_input.run_all([bad_input.Case("two", words)], world)] == ["other"]


def test_a_hang_is_ended(world, monkeypatch):
    monkeypatch.setattr(bad_input, "WALL", 0.5)
    ours, theirs = socket.socketpair()
    assert [o.verdict for o in bad_input.run_all([bad_input.Case("hang", run=lambda: len(ours.recv(1)))],
                                                 world)] == ["hang"]
    theirs.close()
