"""Which optimizations are tried, and why others are not."""

from __future__ import annotations

import sys
from pathlib import Path

from gradus.proof import optimizations
from gradus.proof.optimizations import OPTIMIZATIONS

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import KERNEL, NAIVE, context  # noqa: E402


def test_what_cannot_be_had_is_left_out(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("gradus.limits.processors", lambda: 1)
    monkeypatch.setattr(optimizations, "slower_in_bf16", lambda: 55.0)
    asked = context()
    found = {rung.name: rung.candidates(NAIVE, asked) for rung in OPTIMIZATIONS}
    assert found["fused optimizer"][0] == [] and "no key turns it off" in found["fused optimizer"][1][0]
    assert found["compile"][0] == [] and "C++ compiler" in found["compile"][1][0]
    assert found["loader"] == ([], ["data.workers: one processor"])
    slow = "layout.precision=bf16: a matrix product takes 55 times as long as in fp32 here"
    assert found["precision"] == ([], [slow, "layout.precision=fp16: few CPUs have units for it, and bf16 needs no loss scaling"])
    monkeypatch.setattr(optimizations, "slower_in_bf16", lambda: 0.5)
    assert OPTIMIZATIONS[1].candidates(NAIVE, asked)[0] == [{"layout.precision": "bf16"}]
    assert found["padding to the longest"] == ([], ["all samples have one length"])
    assert [keys["layout.micro_batch"] for keys in found["micro-batch"][0]] == [8, 4]
    again = KERNEL.candidates(optimizations.with_keys(NAIVE, {"layout.attention": "sdpa"}), asked)
    assert again == ([{"layout.attention": "chunked"}], ["layout.attention=sdpa: already set"])
    asked.data_wait = 0.001
    assert found != OPTIMIZATIONS[3].candidates(NAIVE, asked) == ([], ["data.workers: a step waits 0.1% of its time for data"])


def test_a_larger_micro_batch_where_the_share_did_not_fit(monkeypatch):
    monkeypatch.setattr(optimizations, "largest_micro_batch", lambda recipe, room, limit: 12)
    small = optimizations.with_keys(NAIVE, {"layout.micro_batch": 4})
    rung = next(r for r in OPTIMIZATIONS if r.name == "micro-batch")
    assert [keys["layout.micro_batch"] for keys in rung.candidates(small, context())[0]] == [12, 2, 1]
    rung = next(r for r in OPTIMIZATIONS if r.name == "checkpointing")
    assert rung.candidates(small, context())[0][2] == {"layout.checkpointing": "full", "layout.micro_batch": 12}
    assert rung.candidates(small, context("memory"))[0][2] == {"layout.checkpointing": "full"}
