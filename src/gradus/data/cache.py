"""What was made once and is kept: folders by the hash of what they are made of."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus import files, limits
from gradus.data.readers import Readable, Shards, expanded, hub_split, is_hub, near
from gradus.errors import DataError, UserError


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def identity(path: Readable) -> str:
    """A hash of a source's content, whatever its name or date.

    That of a large file is remembered as long as size and date stay.
    """
    if isinstance(path, Shards):
        return digest([(identity(file), file.parent.name if path.labelled else None) for file in path.files])
    if is_hub(path):
        return digest("hf", hub_split(path)._fingerprint)
    path = expanded(path)
    try:
        return files.remembered(limits.regular(path), "sha256", 1 << 26, files.content_hash)
    except OSError as e:
        meant = near(path) if isinstance(e, FileNotFoundError) else ""
        raise DataError(f"{path}: cannot be read ({e.strerror}).{meant}") from None


MADE = "made.json"  # in a kept folder: of each of its files the mark
SMALL = 1 << 24  # bytes of a file that is looked through each time


def _mark(file: Path) -> list[Any]:
    """Size, and of a small file the hash."""
    size = limits.regular(file).stat().st_size
    return [size, hashlib.sha256(file.read_bytes()).hexdigest() if size < SMALL else None]


def unchanged(folder: Path) -> bool:
    """Whether its files are those that `keep` has made."""
    try:
        marks = json.loads(limits.regular(folder / MADE).read_text())
        return bool(marks) and marks == {name: _mark(folder / name) for name in marks}
    except (OSError, ValueError, TypeError, RecursionError, UserError):
        return False


def keep(
    folder: Path, write: Callable[[Path], None], setting: str = "data.cache",
    whole: Callable[[Path], bool] = unchanged,
) -> Path:  # fmt: skip
    """The folder, made by `write` unless it is there and whole.

    Several processes may make the same one at the same time, in other containers and on other hosts that share the
    disk. Raises UserError where the cache cannot be written or the disk is full; `setting` names it.
    """
    if whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.aside(folder) as aside:
            aside.mkdir()
            write(aside)
            if whole is unchanged:
                files.write_json(aside / MADE, {file.name: _mark(file) for file in aside.iterdir()})
            if not whole(folder):
                with contextlib.suppress(FileNotFoundError):
                    files.remove(folder)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST) and whole(folder):  # another process made it first
            return folder
        why = f"cannot write the cache ({e.strerror or e})"
        raise UserError(f"{folder.parent}: {why}. Set {setting} to a folder with enough space.") from None
    return folder
