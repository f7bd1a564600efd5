"""Files and folders that appear whole or not at all, and the folder where what was made once is kept."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cache_dir(cache: str | Path | None = None) -> Path:
    """Where made things are kept: `cache` if given, else $GRADUS_CACHE, else ~/.cache/gradus."""
    return Path(os.path.expanduser(cache or os.environ.get("GRADUS_CACHE") or "~/.cache/gradus"))


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Yields a name beside `target`, used by no other writer, to write a file or a folder under; it then becomes
    `target`.

    Where the block fails, nothing is left of it and an old `target` stays; a kill leaves at most `.writing-NAME-...`
    behind.
    """
    path = target.with_name(f".writing-{target.name}-{secrets.token_hex(8)}")
    try:
        yield path
        appear(path, target)
    finally:
        _delete(path)


def appear(path: Path, target: Path) -> None:
    """Force a file or a folder onto the disk and rename it. Raises OSError; a folder does not replace one with files in
    it."""
    below = [p for p in path.rglob("*") if not p.is_symlink()] if path.is_dir() else []
    for each in [*below, path]:
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.replace(path, target)


def remove(folder: Path) -> None:
    """Delete a folder so that half of it never looks whole: first out of sight, then away."""
    out = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(8)}")
    os.replace(folder, out)
    _delete(out)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_text(target: Path, text: str) -> None:
    with aside(target) as path:
        path.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    write_text(target, json.dumps(value, indent=1) + "\n")
