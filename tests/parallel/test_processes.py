"""Planning for the page in processes that can be ended: by time, when nobody waits any more, when they die."""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.files import is_running
from gradus.parallel.processes import Fault, Pool, run_program


@pytest.fixture
def one():
    workers = Pool(seconds=60, most=1)
    assert workers.run(operator.neg, 1) == -1  # so that what follows does not time how long a process takes to start
    yield workers
    workers.end()


def test_what_takes_too_long_is_ended_and_the_next_is_answered(one):
    one.seconds = 0.5
    began = time.monotonic()
    with pytest.raises(UserError, match="stopped after"):
        one.run(time.sleep, 600)
    assert time.monotonic() - began < 30
    one.seconds = 60
    assert one.run(operator.neg, 2) == -2


def test_a_worker_is_kept_and_one_that_dies_is_replaced(one):
    process = one.idle[0].process
    assert one.run(operator.neg, 3) == -3 and one.idle[0].process is process
    with pytest.raises(UserError, match=r"ended \(exit code -9\)"):
        one.run(signal.raise_signal, signal.SIGKILL)
    assert one.run(operator.neg, 4) == -4


def test_a_fault_is_told_and_the_worker_goes_on(one):
    with pytest.raises(Fault, match="TypeError"):
        one.run(operator.neg, "x")
    assert one.run(operator.neg, 5) == -5


def test_nobody_waits_behind_a_plan_that_was_given_up(one):
    left, first = threading.Event(), []
    slow = threading.Thread(target=lambda: first.append(one.run(time.sleep, 600, left.is_set)))
    slow.start()
    time.sleep(0.3)
    left.set()  # its visitor has gone; nobody waits yet, so it may go on
    began = time.monotonic()
    assert one.run(operator.neg, 6) == -6
    slow.join(30)
    assert first == [None] and time.monotonic() - began < 50


def test_several_plan_at_a_time(tmp_path):
    two, fifo, first = Pool(seconds=60, most=2), tmp_path / "fifo", []
    os.mkfifo(fifo)
    busy = threading.Thread(target=lambda: first.append(two.run(Path.read_bytes, fifo)))
    busy.start()
    with fifo.open("wb") as pipe:  # as soon as the first worker reads; it reads until this is closed
        assert two.run(operator.neg, 7) == -7
        pipe.write(b"x")
    busy.join()
    assert first == [b"x"]
    two.end()


def test_ctrl_c_is_not_for_workers(one):
    process = one.idle[0].process
    os.kill(process.pid, signal.SIGINT)
    assert one.run(operator.neg, 8) == -8 and one.idle[0].process is process


# ---- programs

def test_a_program_says_how_it_ended():
    assert run_program([sys.executable, "-c", "import sys; print('out'); sys.exit('no room')"], capture=True) == (1, "no room\n")
    with pytest.raises(FileNotFoundError):
        run_program(["gradus-no-such-program"])


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    code = f"import subprocess, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run_program([sys.executable, "-c", code], seconds=2.0)
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() - began < 30
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_then_holds_for_this_process(number, tmp_path):
    """The program ends in its own time, with its own exit code; then this process ends by the signal."""
    code = f"import pathlib, signal; got = signal.sigwait([{int(number)}]); pathlib.Path({str(tmp_path / 'got')!r}).write_text(str(int(got)))"
    blocked = [sys.executable, "-c", f"import signal; signal.pthread_sigmask(0, [{int(number)}]); open({str(tmp_path / 'up')!r}, 'w'); {code}"]

    def send():
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
        run_program(blocked)
    assert (tmp_path / "got").read_text() == str(int(number))
    assert number == signal.SIGINT or ended.value.code == 128 + number


def test_under_nohup_a_hangup_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGHUP)"
        assert run_program([sys.executable, "-c", code]) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, before)
