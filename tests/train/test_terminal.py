"""What a terminal shows of a run: one line that never wraps, the seconds since the last step, colour where it is wanted."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading
import time

import pytest

from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import colour
from gradus.recipe import schema
from gradus.train import log as logs
from gradus.train.run import train

TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=5",
    "batch.samples=16", "layout.micro_batch=8", "layout.device=cpu", "train.steps=12", "evaluate.every=5", "evaluate.samples=0", "log.every=1",
]  # fmt: skip
LINE = "step 120/2000  accumulation 240  loss 2.3456  lr 1.00e-04  123k tokens/s  MFU 41.2%  1.23M tokens  1.59 GB  ETA 12:34"


class Terminal:
    """Standard output on a pseudo-terminal of so many columns; `text` is all that was written to it."""

    def __init__(self, columns: int):
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.out, self.master, self.read = os.fdopen(slave, "w"), master, []
        self.thread = threading.Thread(target=self._drain, daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        try:
            while piece := os.read(self.master, 4096):
                self.read.append(piece)
        except OSError:  # the other end is closed
            pass

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + 30
        while not re.search(pattern, b"".join(self.read).decode(errors="replace")) and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> str:
        self.out.close()
        self.thread.join()
        os.close(self.master)
        return b"".join(self.read).decode()


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal; the value gives what it was told, and ends it."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def make(columns: int) -> Terminal:
        made = Terminal(columns)
        monkeypatch.setattr(sys, "stdout", made.out)
        return made

    return make


def drawn(text: str) -> list[str]:
    """Every state of the live line: they begin with its bar."""
    return [piece for piece in re.split(r"\r\x1b\[K|\r?\n", text) if piece.startswith("[")]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_the_live_line_of_a_run_never_wraps(terminal, columns, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "TICK", 0.01)
    screen = terminal(columns)
    train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}"]))
    text = screen.close()
    lines = drawn(text)
    assert len(lines) >= 11 and max(map(len, lines)) < columns
    assert all(re.match(r"\[#*\.*\] \d+%  step \d+/12", line) for line in lines)
    assert {re.match(r"\[(#*)", line)[1] for line in lines} >= {"#", "##", "###", "####"}  # the bar grows
    assert any("ETA" in line for line in lines) and "\r\x1b[Kstep 12/12  accumulation 24" in text, "the last one stays, whole"
    assert re.search(r"\r\x1b\[Kstep 5  valid/loss [^\r\n]*\r\n\[", text), "an evaluation stays above it"
    assert re.search(r"\r\n\x1b\[32mbest +valid/\w+ \d\.\d{4}, at step \d+ of 12\x1b\[0m\r\n", text)


@pytest.mark.parametrize("columns", [200, 120, 80, 60, 40, 20, 5])
@pytest.mark.parametrize("waited", [0.0, 75.0])
def test_a_line_is_shortened_to_the_width(columns, waited):
    line = logs.fitted(LINE, 0.06, waited, columns)
    assert len(line) < columns and line.startswith("[..."[: columns - 1])
    if columns >= 60:
        assert "step 120/2000" in line and line.endswith("ETA 12:34") and ("last step 75 s ago" in line) == (waited > 0)
    if columns == 200:
        assert line == f"[..........] 6%  {LINE.replace('/2000', '/2000  last step 75 s ago') if waited else LINE}"
    assert logs.fitted(LINE, 0.9999, 0.0, 80).startswith("[#########.] 99%  "), "not done before it is"


def test_a_slow_step_shows_the_seconds_since_the_last(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "TICK", 0.02)
    monkeypatch.setattr(logs, "SLOW", 0.1)
    screen = terminal(80)
    first, later = r"step 0/10  last step \d+ s ago", r"step 4/10  last step \d+ s ago  loss 1.0  ETA 0:06"
    log = logs.RunLog(tmp_path, schema.Log(), {})
    log.stepped(0, 10)  # nothing is known yet but that it has begun
    screen.wait_for(first)
    log.line("step 4/10  loss 1.0  ETA 0:06", done=0.4)
    log.stepped(4, 10)
    log.line("step 4  valid/loss 2.0")
    screen.wait_for(later)
    log.close()
    assert not any(t.name == "live line" for t in threading.enumerate())
    text = screen.close()
    assert re.search(first, text) and re.search(later, text)
    assert "step 4  valid/loss 2.0\r\n" in text and text.endswith("\r\n"), "what is printed next begins a line"


def test_elsewhere_lines_are_plain_and_no_thread_runs(tmp_path, capsys, monkeypatch):
    def told() -> str:
        log = logs.RunLog(tmp_path, schema.Log(), {})
        assert not any(t.name == "live line" for t in threading.enumerate())
        log.stepped(1, 2)
        log.line("step 1/2  loss 1.0", done=0.5)
        log.close()

    told()
    assert capsys.readouterr().out == "step 1/2  loss 1.0\n"
    screen = Terminal(80)
    monkeypatch.setattr(sys, "stdout", screen.out)
    monkeypatch.setenv("TERM", "dumb")
    told()
    assert screen.close() == "step 1/2  loss 1.0\r\n"


def test_colour_is_for_terminals_and_hears_no_color(monkeypatch):
    screen = Terminal(80)
    for environment, wanted in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert (colour("error:", "red", screen.out) == "\x1b[31merror:\x1b[0m") == wanted, environment
    monkeypatch.delenv("NO_COLOR")
    with open(os.devnull, "w") as file:
        assert colour("x", "green", file) == "x"
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert colour("x", "green", file) == "\x1b[32mx\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert colour("x", "green", file) == "x"
    screen.close()


def test_an_error_is_red_on_a_terminal_and_plain_in_a_file(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["models", "gpt9"]) == 2
    assert capsys.readouterr().err.startswith("error: model.preset=gpt9: unknown preset.")
    screen = Terminal(80)
    monkeypatch.setattr(sys, "stderr", screen.out)
    assert main(["models", "gpt9"]) == 2
    assert screen.close().startswith("\x1b[31merror:\x1b[0m model.preset=gpt9: unknown preset.")


def test_the_end_says_which_step_was_best_and_by_what(tmp_path, capsys):
    outcome = train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}"]))
    best = outcome.summary["best"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best "))
    assert line.split(maxsplit=1)[1] == f"{best['metric']} {best['value']:.4f}, at step {best['step']} of 12"
