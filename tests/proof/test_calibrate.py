"""A short calibration makes a usable device."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from gradus import cli, hardware
from gradus.cli import main
from gradus.parallel.processes import run_program
from gradus.parallel.world import World
from gradus.plan import roofline
from gradus.plan.trace import trace_recipe
from gradus.proof import calibrate, calibration_points
from gradus.proof.memory_budget import coarse_name, device_of

sys.path[:0] = [str(Path(__file__).parents[1])]

from measured_device import device, memory, product  # noqa: E402


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(device, hardware file) of a calibration of few and small points."""
    small = pytest.MonkeyPatch()
    link = lambda on, fine: (hardware.Link("test", 1e9), {})  # noqa: E731
    for name, value in {"SLICE": 1e-3, "this_link": link}.items():
        small.setattr(calibrate, name, value)
    few = {"SIDES": (16, 128), "BATCH": 4, "BATCHED": (16, 64), "FUSED": ((1, 8, 16), (8, 64, 32)), "ELEMENTS": (2**10, 2**15)}
    for name, value in few.items():
        small.setattr(calibration_points, name, value)
    small.setattr(calibration_points.Pool.__init__, "__defaults__", (2**22,))
    measure, steps = calibrate.measure, calibrate.tiny_steps
    small.setattr(calibrate, "measure", lambda on, seconds, say: measure(on, 0.0, say))  # one round
    small.setattr(calibrate, "tiny_steps", lambda on: itertools.islice(steps(on), 2))
    torch.set_num_threads(1)
    file = tmp_path_factory.mktemp("hardware") / "hardware.yaml"
    file.write_text("devices:\n  mine: {peaks: {fp32: 1 TFLOP/s}, memory: 1 GiB, bandwidth: 1 GB/s}\n")
    try:
        found = calibrate.calibrate(60.0, torch.device("cpu"), lambda line: None)
        hardware.add_device(found, file)
    finally:
        small.undo()
    return found, file


def test_calibration_is_read_back_as_this_and_keeps_the_users_entries(calibrated):
    device, file = calibrated
    found = hardware.find("this", file)
    assert found.name == device.name and found.kind == "cpu"
    assert found.measured == device.measured
    assert found.peaks == pytest.approx(device.peaks)
    assert hardware.find("mine", file).peaks == {"fp32": 1e12}
    assert {"date", "torch", "threads", "rounds", "spread"} <= set(found.measured)


def test_times_are_planned_with_as_many_threads_as_were_calibrated(calibrated, monkeypatch, capsys):
    device, file = calibrated
    monkeypatch.setenv("GRADUS_HARDWARE", str(file))
    assert device_of(torch.device("cpu"), 1).name == device.name and device_of(torch.device("cpu"), 2) is None
    for threads in (1, 2):
        assert main(["plan", "copy-task", "--on", "this", f"layout.threads={threads}"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("measured with --threads 1, not with layout.threads=2: gradus calibrate --threads 2" in out) == (threads == 2)
        assert "no fitted parameters" not in out and "multiprocessors" not in out


@pytest.mark.parametrize("numbers", [[3e-6, 2e11, 5.0, 20.0, 40.0], [2e-5, 1e12, 30.0, 60.0, 9.0]])
def test_a_fit_gives_points_of_known_numbers_back(numbers):
    sizes = [(batch, m, n, k) for batch in (1, 32) for m, n, k in itertools.product((16, 256, 1024), repeat=3)]
    points = [calibration_points.Point(tuple, tuple, op=product(m, n, k, batch=batch)) for batch, m, n, k in sizes]
    for p in points:
        p.times = [roofline.kernel_seconds(p.op, numbers)]
    found = calibrate.fit(points)
    assert all(roofline.kernel_seconds(p.op, found) == pytest.approx(p.median, rel=0.05) for p in points)


def test_each_kind_has_a_fit_in_each_dtype_that_has_the_operations_of_a_step(calibrated):
    device, _ = calibrated
    kinds = {"matmul", "attention", "memory"}
    assert set(device.measured["points"]) == kinds
    assert set(device.measured["fits"]) == {roofline.fit_key(kind, dtype) for kind in kinds for dtype in device.peaks}
    for step in itertools.islice(calibrate.tiny_steps(torch.device("cpu")), 2):
        work = trace_recipe(step.recipe, micro_batches=step.micro_batches).work
        assert all(0 < roofline.op_seconds(op, device) < 1 for op in [*work.micro, *work.step])


def test_larger_takes_longer(calibrated):
    device, _ = calibrated
    assert roofline.op_seconds(product(512, 512, 512), device) > roofline.op_seconds(product(64, 64, 64), device)
    assert roofline.op_seconds(memory("gelu", 1e8), device) > roofline.op_seconds(memory("gelu", 1e5), device)


def test_bandwidth_is_of_the_largest_operands():
    moved = {("add", 400): 4.0, ("gelu", 399): 2.0, ("add", 99): 0.1}
    points = [calibration_points.Point(tuple, tuple, op=memory(*name), times=[seconds]) for name, seconds in moved.items()]
    assert calibrate.bandwidth(points) == 399 / 2  # the small one lies in a cache


@pytest.mark.parametrize(("words", "said"), [(["--seconds", "5"], "too short"), (["--threads", "0"], "must be at least 1"), (["--second"], "")])
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.run(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- before the first run


@pytest.fixture
def newcomer(monkeypatch, own_files, tmp_path):
    """(a session of one thread on a machine that was never measured, what was started to measure it)."""
    started = []

    def run(command, env, **_):
        started.append((command, env))
        made = device()
        threads = int(command[-1])
        hardware.add_device(dataclasses.replace(made, name=coarse_name(threads), measured=made.measured | {"threads": threads, "coarse": True}))
        return 0, ""

    for name in ("CI", "GRADUS_NO_CALIBRATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "run_program", run)
    recipe, mesh = types.SimpleNamespace(layout=types.SimpleNamespace(timeout=600.0)), types.SimpleNamespace(world=World())
    return types.SimpleNamespace(recipe=recipe, mesh=mesh, device=torch.device("cpu")), started


def test_the_first_run_measures_this_machine_once_and_says_so(newcomer, monkeypatch, capsys):
    session, started = newcomer
    monkeypatch.setenv("LOCAL_RANK", "0")
    calibrate.calibrate_once(session)
    calibrate.calibrate_once(session)
    ((command, env),) = started
    assert command[1:] == ["-m", "gradus", "calibrate", "--seconds", "15", "--threads", "1"]
    assert "LOCAL_RANK" not in env and env["GRADUS_PARENT"] == str(os.getpid()), "it is none of the run's processes"
    out = capsys.readouterr().out
    assert out == "first run here with 1 thread: measuring this machine for the time of a step (skip it with GRADUS_NO_CALIBRATE=1) ...\nmeasured in 0 s\n"
    assert "coarse" in device_of(session.device, 1).measured and device_of(session.device, 2) is None
    torch.set_num_threads(2)
    calibrate.calibrate_once(session)
    assert len(started) == 2 and device_of(session.device, 1) and device_of(session.device, 2), "of each number of threads one"
    full = dataclasses.replace(device(), aliases=("this", "here", "cpu"))
    hardware.add_device(full)
    assert "coarse" not in device_of(session.device, 1).measured and "coarse" in device_of(session.device, 2).measured, "gradus calibrate replaces it"


def test_a_machine_whose_file_has_no_fits_is_measured_again(newcomer):
    session, started = newcomer
    old = dataclasses.replace(device(), name=coarse_name(1), measured={"threads": 1, "coarse": True, "matmul": "mm fp32 nt 1 16 16 16 1e-6 0.01\n"})
    hardware.add_device(old)
    assert device_of(session.device, 1) is None
    calibrate.calibrate_once(session)
    assert len(started) == 1 and "fits" in device_of(session.device, 1).measured


@pytest.mark.parametrize("off", [{"CI": "true"}, {"GRADUS_NO_CALIBRATE": "1"}, {"timeout": 20.0}])
def test_where_it_is_not_wanted_nothing_is_measured(newcomer, off, monkeypatch, capsys):
    session, started = newcomer
    if "timeout" in off:  # others would give this process up
        session.recipe.layout.timeout, session.mesh.world = 20.0, World(0, 2, 0, 2)
    else:
        monkeypatch.setenv(*next(iter(off.items())))
    calibrate.calibrate_once(session)
    assert not started and not capsys.readouterr().out


@pytest.mark.parametrize(("end", "why"), [((2, "one\nerror: no room\n"), "it failed: error: no room"), (None, "it took more than 60 s; run gradus calibrate")])
def test_a_calibration_that_fails_stops_no_run(end, why, newcomer, monkeypatch, capsys):
    def run(command, environment, **_):
        if end is None:
            raise TimeoutError
        return end

    session, _ = newcomer
    monkeypatch.setattr(calibrate, "run_program", run)
    monkeypatch.setattr(calibrate.OtherPrograms, "share", lambda self: 0.0)
    assert calibrate.calibrate_once(session) == why
    assert capsys.readouterr().out.endswith(f"\ngiven up after 0 s: {why}\n")


def test_a_calibration_is_given_up_once_others_have_the_processors_and_not_tried_again_for_an_hour(newcomer, monkeypatch, capsys, tmp_path):
    session, started = newcomer
    real, run = run_program, calibrate.run_program
    monkeypatch.setattr(calibrate, "run_program", lambda command, environment, **how: real([sys.executable, "-c", "import time; time.sleep(60)"], **how))
    monkeypatch.setattr(calibrate, "LOOK", 0.2)
    monkeypatch.setattr(calibrate.OtherPrograms, "share", lambda self: calibrate.limits.cores())
    began = time.monotonic()
    assert calibrate.calibrate_once(session) == calibrate.OTHERS and time.monotonic() - began < 15
    told = r"given up after \d+ s: other programs use the processors; run gradus calibrate when they do not"
    assert re.fullmatch(told, capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr(calibrate, "run_program", run)
    monkeypatch.setattr(calibrate.OtherPrograms, "share", lambda self: 0.0)
    assert calibrate.calibrate_once(session) == calibrate.OTHERS and not started and not capsys.readouterr().out, "remembered"
    (memo,) = (tmp_path / "cache").iterdir()
    os.utime(memo, (time.time() - 3601,) * 2)
    assert calibrate.calibrate_once(session) is None and len(started) == 1 and device_of(session.device, 1)


def test_none_is_begun_while_others_have_the_processors(newcomer, capsys, tmp_path):
    session, started = newcomer
    assert calibrate.calibrate_once(session, busy=True) == calibrate.OTHERS
    assert not started and not capsys.readouterr().out and not (tmp_path / "cache").exists(), "the next run looks again"


def test_a_machine_that_others_use_is_said(newcomer, monkeypatch, capsys):
    session, _ = newcomer
    monkeypatch.setattr(calibrate.OtherPrograms, "share", lambda self: 0.5)
    assert calibrate.calibrate_once(session) is None
    assert capsys.readouterr().out.endswith("\nmeasured in 0 s; other programs use the processors; run gradus calibrate when they do not\n")


@pytest.mark.parametrize(("share", "said"), [(0.05, ""), (0.5, "other programs used 0.5 processors"), (9.0, "other programs use 2.0 of the 2 processors; 1 thread (--threads 1) may be faster")])
def test_the_verb_says_that_others_use_the_machine(share, said, monkeypatch, own_files, capsys):
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: device())
    monkeypatch.setattr(calibrate, "lines", lambda _: [])
    monkeypatch.setattr(calibrate.limits, "cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if share > 1 else 1)
    monkeypatch.setattr(calibrate.OtherPrograms, "share", lambda self: share)
    assert main(["calibrate", "--seconds", "10"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"note: {said}: this machine is faster than measured. Calibrate when they do not.\n") if said else "note" not in out


@pytest.mark.parametrize("full", [False, True])
def test_a_coarse_calibration_takes_no_full_ones_place(full, calibrated, monkeypatch, own_files, capsys):
    found, _ = calibrated
    if full:
        hardware.add_device(found)
    coarse = dataclasses.replace(found, name=coarse_name(1), measured=found.measured | {"coarse": True})
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: coarse)
    assert main(["calibrate", "--seconds", "10", "--threads", "1"]) == 0
    assert hardware.find("this").name == (found.name if full else coarse.name)
    use = "--on this" if not full else f"--on '{coarse.name}'"
    assert capsys.readouterr().out.strip().endswith(f"use it with {use}")
