"""The largest micro-batch by the plan, confirmed by one step; sweeps beside the plan; sizes and numbers as a user writes them."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import UserError
from gradus.plan.process import Memory
from gradus.proof import fit
from gradus.proof.fit import memory_pairs, pairs_text, parse_size
from gradus.proof.memory_budget import (
    MemoryBudget,
    budget_of,
    with_micro_batch,
)
from gradus.text import size
from gradus.train import machine
from gradus.train.session import open_session

TINY = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 4096, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 64, "train.steps": 12, "layout.device": "cpu"}  # fmt: skip
WORDS = ["copy-task", *(f"{k}={v}" for k, v in TINY.items())]


@pytest.fixture(scope="module")
def budget():
    recipe = recipes.load("copy-task", **TINY)
    session = open_session(recipe)
    return session.recipe, budget_of(session)


@pytest.mark.slow
def test_fit_is_confirmed_by_one_step_in_another_process(capsys, monkeypatch, budget):
    recipe, r = budget
    fixed = machine.resident()  # the traces of other tests have left memory in this process
    monkeypatch.setattr(machine, "resident", lambda: fixed)
    budget = r.need(with_micro_batch(recipe, 64, 1, 64)) - r.resident + fixed + 28_000_000
    assert main(["fit", *WORDS, "--memory", f"{budget} B", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (found,) = (x for x in rows if x["name"] == "fit/micro_batch")
    predicted, measured = (next(x for x in rows if x["name"] == "fit/need" and x["kind"] == kind) for kind in ("predicted", "measured"))
    assert found["value"] > 64 and predicted["micro_batch"] == measured["micro_batch"] == found["value"]
    assert budget - 1_000_000 < predicted["value"] <= budget, "one sample more would not fit"
    assert predicted["peak"] == pytest.approx(measured["peak"], rel=0.02)
    assert measured["value"] > measured["resident"], "of the process, with what it had before"


def test_fit_tells_tensors_and_process_planned_and_measured():
    told = {"allocated": 100e6, "need": 400e6}
    on_cpu = MemoryBudget(10**10, 1, 1, "cpu", None, 200_000_000, None)
    memory = Memory({}, 50_000_000, 50_000_000, 320_000_000, 0, "", {}, 0, [])
    assert pairs_text(memory_pairs(memory, None, on_cpu)) == "tensors 50 MB, process 370 MB"
    assert pairs_text(memory_pairs(memory, told, on_cpu)) == "tensors 100 MB (planned -50.0%), process 400 MB (planned -7.5%)"
    assert [(m.name, m.predicted, m.measured) for m in memory_pairs(memory, told, on_cpu)] == [("tensors", 50e6, 100e6), ("process", 370e6, 400e6)]
    assert [(m.measured, m.error) for m in memory_pairs(memory, None, on_cpu)] == [(None, None)] * 2, "what was not measured is absent"
    on_gpu, memory = dataclasses.replace(on_cpu, target="cuda"), Memory({}, 50_000_000, 60_000_000, 230_000_000, 0, "", {}, 0, [])
    assert pairs_text(memory_pairs(memory, told, on_gpu)) == "device 400 MB (planned -27.5%)"


@pytest.mark.slow
def test_a_sweep_measures_beside_the_plan(capsys, monkeypatch):
    monkeypatch.setattr(fit, "ROUNDS", 1)
    assert main(["fit", *WORDS, "--sweep", "8,32", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    peaks = {}
    for k in (8, 32):
        of_k = [x for x in rows if x["configuration"] == f"micro-batch {k}"]
        by = {(x["name"], x["kind"]): x for x in of_k if x["kind"] == "measured" or x.get("of") == "largest batch"}
        peaks[k] = by["memory/allocated", "measured"]["value"]
        assert by["memory/allocated", "predicted"]["value"] == pytest.approx(peaks[k], rel=0.02)
        assert by["samples_per_s", "measured"]["value"] > 0 and len(by["samples_per_s", "measured"]["samples"]) == 1
    assert peaks[8] < peaks[32]


@pytest.mark.slow
def test_what_cannot_fit_is_said(capsys):
    assert main(["fit", *WORDS, "batch.samples=2", "--memory", "1MB"]) == 2
    assert "not even one sample fits" in capsys.readouterr().out


def test_what_is_left_of_the_budget_is_said_in_bytes_and_as_its_share(budget, monkeypatch):
    recipe, r = budget
    monkeypatch.setattr(r, "available", 1_000_000_000)
    monkeypatch.setattr(r, "memory", lambda recipe: Memory({}, 50_000_000, 50_000_000, 320_000_000, 0, "", {}, 0, []))
    line = "layout.micro_batch=8: tensors 50 MB, process 370 MB of 1 GB by the plan, 630 MB (63.0%) to spare; 1 traces"
    assert fit.Search(recipe, r).line(8) == line


@pytest.mark.slow
def test_what_is_found_pastes_back(budget, monkeypatch, tmp_path):
    """The words before the colon, given to the recipe, are the recipe whose need is printed."""
    recipe, r = budget
    monkeypatch.setattr(fit, "run_in_processes", lambda *_: "not run")
    for samples in (20, 100):  # within the batch of 64, and beyond it
        r.available = r.need(with_micro_batch(recipe, samples, 1, 64)) + 1
        line = fit.largest(recipe, r, 1e12, str(tmp_path))[1][0]
        words = [word for word in line.partition(": ")[0].split() if "=" in word]
        again = recipes.load("copy-task", [*WORDS[1:], *words])
        assert again.layout.micro_batch >= samples and f"{size(r.need(again))} of" in line and r.need(again) <= r.available


def test_a_step_that_fails_is_no_crash(tmp_path, monkeypatch):
    def start(*arguments, **more):
        raise UserError("rank 0 of 1 was killed by SIGKILL.")

    monkeypatch.setattr(fit, "run_group", start)
    assert fit.run_in_processes(1, fit.measured_step, None, str(tmp_path)) == "rank 0 of 1 was killed by SIGKILL."


def test_what_is_free_now_is_the_budget_of_a_host(monkeypatch):
    on_cpu = MemoryBudget(25 * 10**9, 2, 2, "cpu", None, 200_000_000, None)
    monkeypatch.setattr(machine, "free_bytes", lambda: 20 * 10**9)
    assert fit.free_now(on_cpu) == (
        8 * 10**9,
        ["20 GB of memory are free now; 20% of it is left to other programs: 8 GB for each of 2 processes"],
    )
    assert fit.free_now(dataclasses.replace(on_cpu, target="cuda")) == (25 * 10**9, []), "there running out is an error"
    monkeypatch.setattr(machine, "free_bytes", lambda: None)
    assert fit.free_now(on_cpu) == (25 * 10**9, [])


def _takes(recipe, folder, world):
    fit.take_no_more(300_000_000, 2)
    kept = [torch.ones(20_000_000)]  # 80 MB
    return {"more": len([*kept, torch.ones(40_000_000)])}  # 160 MB


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what is free")
def test_a_step_that_takes_more_than_is_free_is_told_and_not_killed(tmp_path):
    assert (
        fit.run_in_processes(1, _takes, None, str(tmp_path))
        == "it took more than the memory that was free. Use a smaller one."
    )


@pytest.mark.parametrize(("text", "expected"), [("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), ("1.5 MiB", 1_572_864), ("500 B", 500), ("2TB", 2 * 10**12)])
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "8", "1.5", "8 gigs", "-1GB", "0 GB", "GiB", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError, match="8GiB"):
        parse_size(text)


def test_two_questions_at_once(capsys):
    assert main(["fit", *WORDS, "--sweep", "8", "--memory", "8GiB"]) == 2
    assert "different questions" in capsys.readouterr().err
