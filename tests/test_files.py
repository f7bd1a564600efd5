"""What is written appears whole or not at all."""

from __future__ import annotations

import os
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


def test_the_one_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADUS_CACHE", "~/kept")
    assert files.cache_dir() == Path.home() / "kept" and files.cache_dir(tmp_path) == tmp_path
    monkeypatch.delenv("GRADUS_CACHE")
    assert files.cache_dir() == Path.home() / ".cache" / "gradus"
