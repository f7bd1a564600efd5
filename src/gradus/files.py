"""Files and folders that appear whole or not at all, and the folder where what was made once is kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradus.errors import UserError

OLD = 86_400.0  # s without a change, after which the process of another machine that wrote there has ended


@functools.cache
def packaged(name: str) -> Any:
    """The content of one of the package's own YAML files, by its path below src/gradus."""
    import yaml

    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def cache_dir(cache: str | Path | None = None) -> Path:
    """Where made things are kept: `cache` if given, else $GRADUS_CACHE, else $XDG_CACHE_HOME/gradus, else
    ~/.cache/gradus."""
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gradus")
    return Path(os.path.expanduser(cache or os.environ.get("GRADUS_CACHE") or usual))


def remembered(path: Path, kind: str, least: float, compute: Callable[[Path], str]) -> str:
    """What `compute` makes of a file's content, in hexadecimal: of a file of at least `least` bytes it is kept in the
    cache, under `kind`, as long as the file's size and dates stay. Raises OSError."""
    about = path.stat()
    if about.st_size < least:
        return compute(path)
    stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    name = hashlib.sha256(f"{kind} {path.resolve()}".encode()).hexdigest()[:40]
    memo = cache_dir() / "files" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):  # none, or damaged
        match json.loads(memo.read_text()):
            case {"stamp": kept, "value": str(known)} if kept == stamp and re.fullmatch("[0-9a-f]+", known):
                return known
    value = compute(path)
    # a younger file may change again without its dates showing it
    if time.time() - about.st_mtime > 5:
        with contextlib.suppress(OSError):  # only a convenience
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_json(memo, {"stamp": stamp, "value": value})
    return value


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Yields a name beside `target`, used by no other writer, to write a file or a folder under; it then becomes
    `target`.

    Where the block fails, nothing is left of it and an old `target` stays; what a kill leaves behind (`.writing-...`)
    is deleted by the next writer into that folder.
    """
    path = temporary(target)
    try:
        yield path
        appear(path, target)
    finally:
        _delete(path)


def temporary(target: Path, doing: str = "writing") -> Path:
    """A name beside `target` that no other writer uses; what killed writers left beside it is deleted."""
    sweep(target.parent)
    return target.with_name(f".{doing}-{target.name}-{_machine()}-{os.getpid()}-{secrets.token_hex(8)}")


def sweep(folder: Path, locked: bool = False) -> None:
    """Delete what killed processes left half written or half deleted in a folder: processes of this machine that have
    ended, and of other machines where nothing changed for a day. locked: no other process may write there, so
    everything but what processes of this machine are writing."""
    with contextlib.suppress(OSError):
        left = [p for p in folder.iterdir() if p.name.startswith((".writing-", ".removing-"))]
        for path in left:
            owner = re.search(r"-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}$", path.name)
            if owner and owner[1] == _machine():
                ended = not is_running(int(owner[2]))
            else:
                ended = locked or time.time() - max(p.lstat().st_mtime for p in (path, *path.rglob("*"))) > OLD
            if ended:
                _delete(path)


def _machine() -> str:
    """This machine, or container, within which process ids are unique."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # two containers may share a host's name
        name += os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Whether a process of this machine has not ended."""
    try:
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError as e:
        return not isinstance(e, ProcessLookupError)


def numbered(folder: Path, prefix: str) -> list[Path]:
    """What is called PREFIX and a number in a folder, by the number."""
    paths = (p for p in folder.glob(f"{prefix}*") if p.name.removeprefix(prefix).isdecimal())
    return sorted(paths, key=lambda p: int(p.name.removeprefix(prefix)))


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
    out = temporary(folder, "removing")
    os.replace(folder, out)
    _delete(out)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


LATEST = "latest"  # in runs/<recipe>: the link to the newest run folder there


def link_latest(folder: Path, runs: Path) -> None:
    """From now on `latest` in `runs` (runs/<recipe>) links to a new run folder that lies there, also one that log.dir
    names. The link is relative and replaced as a whole: of two runs that start at once, one stays. Nothing happens
    where the file system has no links, where `latest` is no link but somebody's file or folder, or for a run folder
    that lies elsewhere. A run that is resumed stays as old as it is: the link does not move.
    """
    latest = runs / LATEST
    if folder.absolute().parent != runs.absolute() or (latest.exists() and not latest.is_symlink()):
        return
    link = temporary(latest)
    with contextlib.suppress(OSError):
        link.symlink_to(folder.name)
        os.replace(link, latest)
    _delete(link)


def run_of(word: str) -> str:
    """The run folder that the link runs/<recipe>/latest means now: it may move while a verb reads or writes there. Any
    other word as it is."""
    path = word.rstrip("/")
    linked = os.path.basename(path) == LATEST and os.path.islink(path)
    run = os.path.join(os.path.dirname(path), os.readlink(path)) if linked else word
    return run if os.path.isfile(os.path.join(run, "recipe.yaml")) else word


def writable(path: Path) -> Path:
    """The path. Raises UserError where something stands there that is no file: a folder, a pipe, a device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a file. Give another name.")
    return path


def write_text(target: Path, text: str) -> None:
    with aside(target) as path:
        path.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    write_text(target, json.dumps(value, indent=1) + "\n")
