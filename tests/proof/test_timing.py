"""Clocks, other programs, and when a window has enough."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest

from gradus.proof import (
    timing,
)
from gradus.proof.timing import Window


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_below_the_study_are_its_own():
    """What a child computes counts as its parent's, and not as another child's; and the processors were busy with it."""
    codes = ("print(flush=True)\nwhile True: pass", "import time\nprint(flush=True)\ntime.sleep(60)")
    burn, idle = (subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes)
    try:
        for p in (burn, idle):
            p.stdout.readline()  # it has started
        busy = timing._busy_ticks()  # the whole is read before its parts, and after them: what is computed meanwhile is no part's alone
        before = {pid: sum(timing._ticks_below(pid)) for pid in (os.getpid(), burn.pid, idle.pid)}
        end = time.monotonic() + 30
        while (done := sum(timing._ticks_below(burn.pid)) - before[burn.pid]) < 20 and time.monotonic() < end:
            time.sleep(0.05)
        assert done >= 20 and timing._busy_ticks() - busy >= done - 2
        assert sum(timing._ticks_below(os.getpid())) - before[os.getpid()] >= done and sum(timing._ticks_below(idle.pid)) - before[idle.pid] <= 2
    finally:
        for p in (burn, idle):
            p.kill()
            p.communicate()


def test_steps_are_taken_again_where_others_disturb(monkeypatch):
    shares = iter([0.8, 0.05])
    monkeypatch.setattr(timing.OtherPrograms, "share", lambda self: next(shares))
    taken = []
    subject = timing.Subject(lambda: None, lambda batch: taken.append(1) or float(len(taken)), lambda: len(taken))
    found = timing.time_it(subject, timing.Window(2, 1, os.getpid()))
    assert found.retaken == 1 and found.others == 0.05 and len(taken) == 5 and found.samples == 2
    assert found.losses == [2.0, 3.0], "of the first two timed steps, disturbed or not"


def test_clocks_tell_computing_from_sleeping():
    before = timing._clocks()
    time.sleep(0.2)
    slept = timing._clocks()
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        math.sqrt(2.0)
    worked = timing._clocks()
    wall, processor, _ = (b - a for a, b in zip(before, slept))
    assert wall >= 0.2 and processor < 0.1
    assert worked[1] - slept[1] >= 0.1


def test_a_window_has_enough_by_number_and_time():
    window = Window(10, 0, 0, seconds=10.0)
    assert not window.enough(9, 11) and not window.enough(11, 9) and window.enough(10, 10)
    assert window.enough(100, 1) and window.enough(1, 60) and not window.enough(0, 99)
    assert Window(3, 0, 0).enough(3, 0.0) and not Window(3, 0, 0).enough(2, 99.0)


@pytest.mark.parametrize(
    ("others", "threads", "processes", "line"),
    [
        (None, 2, 1, None),
        (0.2, 2, 1, None),
        (1.2, 1, 1, None),
        (1.9, 2, 1, "other programs use 1.9 of the 2 processors; 1 thread (layout.threads=1) may be faster"),
        (2.3, 1, 1, "other programs use 2.0 of the 2 processors"),
        (1.9, 1, 2, "other programs use 1.9 of the 2 processors"),
    ],
)
def test_processors_that_others_have_are_told_with_what_helps(others, threads, processes, line, monkeypatch):
    monkeypatch.setattr(timing.limits, "cores", lambda: 2)
    assert timing.taken(others, threads, processes) == line
