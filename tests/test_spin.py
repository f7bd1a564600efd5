"""Threads that wait for each other: hardly spinning while other programs use the processors, and as they were before it and after it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from gradus import limits, spin

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
for _ in range(3):
    found.append(used())
    held = threading.Thread(target=spin.hold, args=(parallel, end := threading.Event()))
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
    held = threading.Thread(target=spin.hold, args=(spin._libgomp().GOMP_parallel, end := threading.Event()))  # tests have one thread
    held.start()
    time.sleep(0.1)
    assert len(os.listdir("/proc/self/task")) == before + 1
    end.set()
    held.join()


@pytest.mark.parametrize(("variable", "value"), [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "7")])
def test_who_sets_how_long_threads_spin_is_left_alone(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert spin.watch() is None


@LINUX_TELLS
def test_whatever_computes_is_watched():
    code = "import threading\ndef watched(): return 'gradus-spin' in [t.name for t in threading.enumerate()]\nimport gradus.cli; print(watched())"
    assert run(f"{code}\nimport gradus.models.gpt; print(watched())\nimport gradus.infer.predict, gradus.train.loop") == "False\nTrue\n"


def test_little_is_enough_to_stay_short():
    middle = (spin.MUCH + spin.LITTLE) / 2
    assert [spin.wanted(short, middle) for short in (False, True)] == [False, True]
    assert spin.wanted(False, spin.MUCH + 0.1) and not spin.wanted(True, spin.LITTLE - 0.01)


@SEVERAL
@LINUX_TELLS
@pytest.mark.slow
def test_beside_busy_programs_threads_spin_shortly_and_again_when_these_have_ended():
    """How many threads the process has tells: those that are held come and go."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * limits.cores())]
    code = """
import os, sys, threading, time, torch
import gradus.layers
torch.set_num_threads(2)
x = torch.randn(512, 512)
def until(there):
    end = time.monotonic() + 60
    while ("gradus-spin-team" in [t.name for t in threading.enumerate()]) != there:
        x @ x
        assert time.monotonic() < end, there
    print(there, flush=True)
until(True)
sys.stdin.readline()
until(False)
"""
    clean = {k: v for k, v in os.environ.items() if k not in (*spin.USERS, "OMP_NUM_THREADS")}
    with subprocess.Popen([sys.executable, "-c", code], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "True\n"
        finally:
            for program in busy:
                program.kill()
                program.wait()
        if sum(os.getloadavg()[:1]) < 3 * limits.cores():  # else others, which no test ends, may go on
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "False\n"
        else:
            process.kill()
