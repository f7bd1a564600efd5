"""Threads that wait for each other: hardly spinning while other programs use the processors, and as they were before it and after it."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent)]

import distributed  # noqa: E402

from gradus import limits, models, spin  # noqa: E402
from gradus.recipe.schema import GPTConfig  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux" or spin._libgomp() is None, reason="PyTorch's threads are not libgomp's")
LINUX_TELLS = pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not tell how long threads wait")
SEVERAL = pytest.mark.skipif(limits.cores() < 2, reason="libgomp never spins long on one processor")
# Processor seconds of threads that wait while this one sleeps, with libgomp's own count and held short, once each in turns.
WAITING = """
import resource, statistics, threading, time, torch
from gradus import spin
torch.set_num_threads({threads})
parallel, x = spin._libgomp().GOMP_parallel, torch.zeros(1 << 18)
def used():
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(20):
        x.add_(1)
        time.sleep(0.02)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime - before.ru_utime
found = []
for _ in range(2):
    found.append(used())
    held = threading.Thread(target=spin.hold, args=(parallel, spin._threads(), end := threading.Event()))
    held.start()
    time.sleep(0.2)
    found.append(used())
    end.set()
    held.join()
print(*found)
"""


def run(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in (*spin.USERS, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@SEVERAL
def test_held_short_a_waiting_thread_sleeps_and_afterwards_it_spins_again():
    seconds = list(map(float, run(WAITING.format(threads=limits.cores())).split()))
    own, short = seconds[::2], seconds[1::2]
    assert min(own) > 4 * max(short), seconds


@SEVERAL
def test_one_thread_has_no_team_that_is_held():
    before = len(os.listdir("/proc/self/task"))
    held = threading.Thread(target=spin.hold, args=(spin._libgomp().GOMP_parallel, 1, end := threading.Event()))
    held.start()
    time.sleep(0.1)
    assert len(os.listdir("/proc/self/task")) == before + 1
    end.set()
    held.join()


@pytest.mark.parametrize(("variable", "value"), [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "7")])
def test_who_sets_how_long_threads_spin_is_left_alone(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(spin, "_watched", 0)
    assert not spin.watch()


@LINUX_TELLS
def test_whatever_computes_is_watched_also_in_a_worker():
    assert distributed.run(1, _watched_as_it_computes) == [[0, 1, 1, 1]]


def _alive(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def _built(config: GPTConfig) -> int:
    models.build(config)
    return _alive("gradus-spin")


def _watched_as_it_computes(world) -> list[int]:
    for name in spin.USERS:
        os.environ.pop(name, None)
    small = GPTConfig(vocab_size=8, n_layers=1, d_model=4, n_heads=1)
    models.build(small, "meta")
    seen = [_alive("gradus-spin"), _built(small), _built(small)]
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:  # as a worker is: no thread but this one is in it
        os.write(theirs, bytes([_built(small)]))
        os._exit(0)
    os.waitpid(pid, 0)
    return [*seen, os.read(ours, 1)[0]]


def _looks(world) -> tuple[list[int], list[int]]:
    import sklearn.utils  # noqa: F401  (which has a libgomp of its own)

    torch.set_num_threads(2)
    clock, waited, held, teams = itertools.count(), itertools.accumulate([0, 0.1, 0.3, 0.1, 0.1, 0.04, 0.1, 0.25]), [], []

    def look() -> float:
        held.append(_alive("gradus-spin-team"))
        if len(held) == 4:
            torch.set_num_threads(1)
        if len(held) == 5:
            torch.set_num_threads(3)
        if (found := next(waited, None)) is None:
            raise KeyboardInterrupt
        real(0.2)  # a thread that was let go ends
        return found

    real = time.sleep
    spin.EVERY, spin._waited, spin.time = 0.1, look, types.SimpleNamespace(sleep=real, perf_counter=lambda: next(clock))
    with contextlib.suppress(KeyboardInterrupt):
        spin._look(lambda function, data, count, flags: teams.append(count))
    return held, teams


def test_little_is_enough_to_stay_short():
    """Of looks that find so much waiting, each second: when a team is held, anew where PyTorch's threads are others."""
    ((held, teams),) = distributed.run(1, _looks)
    assert held == [0, 0, 0, 1, 1, 1, 0, 0, 1]
    assert teams == [max(2, limits.cores() + 2 - n) for n in (2, 3, 3)]


FOR_A_WHILE = "import time; end = time.monotonic() + 150\nwhile time.monotonic() < end: pass"


@SEVERAL
@LINUX_TELLS
@pytest.mark.slow
def test_beside_busy_programs_threads_spin_shortly():
    code = f"""
import subprocess, sys, threading, time, torch
from gradus import spin
torch.set_num_threads(2)
spin.watch()
busy = [subprocess.Popen([sys.executable, "-c", {FOR_A_WHILE!r}]) for _ in range({2 * limits.cores()})]
x, end = torch.randn(512, 512), time.monotonic() + 120
while "gradus-spin-team" not in [t.name for t in threading.enumerate()] and time.monotonic() < end:
    x @ x
print(time.monotonic() < end)
for program in busy:
    program.kill()
    program.wait()
"""
    assert run(code) == "True\n"


BUSY = Path(__file__).parents[1] / "benchmarks" / "busy.py"


def test_neighbours_of_the_benchmark_are_there_while_a_sample_is_taken_and_are_ended(monkeypatch, capsys):
    bench, started, popen = runpy.run_path(str(BUSY)), [], subprocess.Popen

    def start(command, *args, **more):
        program = popen(command, *args, **more)
        started.extend([program] * ("while True" in command[-1]))
        return program

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setitem(bench["main"].__globals__, "run_sample", lambda *_: float(sum(program.poll() is None for program in started)))
    monkeypatch.setattr(sys, "argv", ["busy.py", "--what", "decode", "--neighbours", "2", "--rounds", "1", "--seconds", "0.1"])
    bench["main"]()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2:5] for row in rows] == [[threads, spin, "2.0"] for threads, spin in (("1", "Gradus"), ("2", "0"), ("2", str(bench["DEFAULT"])), ("2", "Gradus"))]
    assert len(started) == 2 and all(program.returncode is not None for program in started)


@pytest.mark.slow
def test_a_sample_of_the_benchmark_is_taken():
    sample = runpy.run_path(str(BUSY))["run_sample"]
    assert sample("decode", 1, 0, 0.1) > 0 and sample("train", 1, 0, 0.1) > 0
