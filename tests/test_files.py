"""What is written appears whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradus import files


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_replaces_the_old_one_whole(tmp_path):
    target = tmp_path / "a.json"
    files.write_json(target, {"old": 1})
    with pytest.raises(RuntimeError), files.aside(target) as path:
        path.write_text("half")
        assert target.read_text() == '{\n "old": 1\n}\n'
        raise RuntimeError
    assert target.read_text() == '{\n "old": 1\n}\n' and names(tmp_path) == ["a.json"]
    files.write_text(target, "new")
    assert target.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        assert not (tmp_path / "b").exists()
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with files.aside(tmp_path / "b") as path:
        (path / "below").mkdir(parents=True)
        (path / "below" / "x").write_text("1")
    assert {"below", "x"} < set(synced) and len(synced) == 3 and names(tmp_path) == ["b"]
    monkeypatch.undo()
    with pytest.raises(OSError), files.aside(tmp_path / "b") as path:  # a folder with files in it stays
        path.mkdir()
    assert (tmp_path / "b" / "below" / "x").read_text() == "1" and names(tmp_path) == ["b"]
    files.remove(tmp_path / "b")
    assert names(tmp_path) == []


KILLED = """
import os, pathlib, sys
from gradus import files
with files.aside(pathlib.Path(sys.argv[1])) as path:
    path.mkdir(), (path / "part").write_text("half")
    print(path.name, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_what_another_writes_stays(tmp_path):
    def writer() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "out"], stdin=-1, stdout=-1, text=True)

    killed, alive = writer(), writer()
    left, kept = killed.stdout.readline().strip(), alive.stdout.readline().strip()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert names(tmp_path) == sorted([left, kept])
    files.write_text(tmp_path / "other", "1")
    assert names(tmp_path) == [kept, "other"]
    foreign = [tmp_path / f".writing-x-0000aaaa-1-{n:016x}" for n in range(2)]  # of other machines
    for path, age in zip(foreign, (0, files.OLD + 60)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    files.sweep(tmp_path)
    assert names(tmp_path) == sorted([kept, foreign[0].name, "other"])
    files.sweep(tmp_path, locked=True)
    assert names(tmp_path) == [kept, "other"]
    alive.communicate()
    assert names(tmp_path) == ["other", "out"]


def test_the_one_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADUS_CACHE", "~/kept")
    assert files.cache_dir() == Path.home() / "kept" and files.cache_dir(tmp_path) == tmp_path
    monkeypatch.delenv("GRADUS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_dir() == Path.home() / ".cache" / "gradus"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / "gradus"
