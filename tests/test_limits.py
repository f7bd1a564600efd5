"""What comes in has limits, and what passes them is one line."""

from __future__ import annotations

import argparse
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus import cli, limits, options
from gradus.errors import UserError


def test_numbers():
    assert limits.numbers("8,16, 32,8", "--sweep") == [8, 16, 32]
    for text in ("", "8,,16", "0", "x", "-8", "9" * 5000, "²"):
        with pytest.raises(UserError, match="--sweep"):
            limits.numbers(text, "--sweep")


def test_a_word_with_a_zero_byte_is_one_error(capsys):
    assert cli.main(["profile", "copy-task", "--to=a\0b"]) == 2
    assert capsys.readouterr().err == "error: '--to=a\\x00b': contains a zero byte. Remove it.\n"


@pytest.mark.parametrize("parse", [limits.parse_json, limits.parse_yaml])
def test_a_tree_is_as_deep_as_it_may_be_and_no_deeper(parse):
    assert parse("[" * limits.DEPTH + "]" * limits.DEPTH, "f") == json.loads("[" * limits.DEPTH + "]" * limits.DEPTH)
    for n in (limits.DEPTH + 1, 50_000):
        with pytest.raises(UserError, match=r"^f: nested deeper than 64 levels"):
            parse("[" * n + "]" * n, "f")


def test_an_alias_counts_each_time():
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(f"{x}: &{x} [{', '.join([f'*{y}'] * 10)}]\n" for y, x in zip("abcdef", "bcdefg"))
    with pytest.raises(UserError, match=r"^f: more than 2,000,000 values, with aliases expanded"):
        limits.parse_yaml(bomb, "f")


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("12345")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="cannot be read: a folder, pipe, socket or device"):
            limits.read_text(path, 100)
    assert limits.read_text(tmp_path / "text", 5) == "12345"
    with pytest.raises(UserError, match="5 bytes; such a file has at most 4"):
        limits.read_text(tmp_path / "text", 4)


@given(st.integers(-10, 10**7) | st.integers(-(10**45), 10**45), st.integers(0, 10**6))
def test_a_whole_number_of_the_command_line_is_what_it_says_or_refused(number, most):
    try:
        assert options.whole(most, 0)(str(number)) == number and 0 <= number <= most
    except argparse.ArgumentTypeError as e:
        assert not 0 <= number <= most
        assert str(e).endswith("must be at least 0." if number < 0 else f"must be at most {most:,.15g}.")


@pytest.mark.parametrize("text", ["", "x", "nan", "1_0_", "\u0663", "0", "-1"])
def test_what_is_no_positive_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a positive number"):
        options.real(above=0)(text)


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1),  # a group has what those above it leave
        ("0::/not/in/this/container", {"cpu.max": "300000 100000"}, 3),
        ("4:memory:/x\n1:cpu,cpuacct:/x\n0::/", {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("", {}, None),
    ],
)
def test_processors_are_those_of_the_affinity_and_of_the_quota(tmp_path, monkeypatch, groups, files, quota):
    for name, text in {"groups": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n" if text else "")
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "cores", lambda: 3)
    assert limits.cpu_quota() == (quota or float("inf")) and limits.processors() == min(3, quota or 3)


def test_threads_that_cannot_start_are_one_error(monkeypatch):
    """Beyond the limit PyTorch's threads (libgomp) end the process with exit code 1 and no line of ours."""
    start, started = threading.Thread.start, []

    def third_fails(thread):
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(limits, "processors", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", third_fails)
    limits.start_threads(2, "layout.threads=2")
    assert not started, "as many as there are processors need no trial"
    with pytest.raises(UserError, match=r"layout\.threads=4: this process can start 3 threads .* Use 2"):
        limits.start_threads(4, "layout.threads=4")
    assert len(started) == 3 and not any(thread.is_alive() for thread in started)
