"""The folder of a run: its name, who writes there, and files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from gradus import files
from gradus.errors import UserError, check_working_folder, reason, writing
from gradus.recipe.schema import Log

RESUME = "nothing up to the last checkpoint is lost. Free some space, then continue with --resume."


def new_run_folder(config: Log, name: str) -> Path:
    """`log.dir`, or a `runs/<recipe>/<time>` that is not there yet; `own` makes it."""
    if config.dir:
        return Path(config.dir)
    base = Path("runs") / name / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return next(p for n in itertools.count() if not (p := base.with_name(f"{base.name}-{n}") if n else base).exists())


def own(config: Log, folder: Path) -> bool:
    """Make the folder that `new_run_folder` named. False where another run has taken its name since."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=config.dir is not None)
        return True
    except (FileExistsError, FileNotFoundError):  # another's; or another took the empty parent away
        check_working_folder()
        if config.dir or any(os.path.lexists(p) and not p.is_dir() for p in folder.parents):
            raise
        return False


LOCK = ".lock"  # in a run folder, while a run writes there
_LOCKED: dict[str, object] = {}  # folder → its owner among this process's threads: the system's lock keeps none out


@contextlib.contextmanager
def run_folder(config: Log, name: str, resume: Path | None = None) -> Iterator[Path]:
    """The folder of a run, made here and locked for this process inside the context: `resume`, `log.dir`, or a
    `runs/<recipe>/<time>` that no other run gets. Where it stays empty, it is removed again with the folders above that
    were made for it.

    Raises UserError where another process has it, or where it cannot be written.
    """
    try:
        while True:
            folder = resume or new_run_folder(config, name)
            missing = [p for p in (folder, *folder.parents) if not p.exists()]  # from the deepest up
            if resume or own(config, folder):
                break
        lock = _lock(folder, "run", "set another log.dir")
    except OSError as e:
        text = f"log.dir={folder}: cannot write there ({reason(e)}). Set log.dir to a folder you may write."
        raise UserError(text) from None
    with _unlocked_after(folder, lock, missing):
        yield folder


@contextlib.contextmanager
def locked(folder: Path, what: str, instead: str) -> Iterator[None]:
    """The folder, made here and locked for this process inside the context; removed again, with those above that were
    made for it, where it stays empty. what, instead: of the message where another process has it.

    Raises UserError then, and OSError where it cannot be written.
    """
    missing = [p for p in (folder, *folder.parents) if not p.exists()]  # from the deepest up
    folder.mkdir(parents=True, exist_ok=True)
    with _unlocked_after(folder, _lock(folder, what, instead), missing):
        yield


@contextlib.contextmanager
def _unlocked_after(folder: Path, lock: int, new_folders: list[Path]) -> Iterator[None]:
    key = os.path.realpath(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(lock)
        _LOCKED.pop(key)
        for path in new_folders:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def _lock(folder: Path, what: str, instead: str) -> int:
    """The open file whose lock says that this process writes into the folder. The lock ends with the process, however
    the process ends."""
    key, owner = os.path.realpath(folder), object()
    if _LOCKED.setdefault(key, owner) is not owner:
        raise UserError(f"{folder}: another {what} of this process writes there. Wait until it ends, or {instead}.")
    try:
        return _lock_file(folder, what, instead)
    except BaseException:
        _LOCKED.pop(key)
        raise


def _lock_file(folder: Path, what: str, instead: str) -> int:
    while True:
        file, owner = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.pread(file, 200, 0).decode(errors="replace")
            os.close(file)
        except OSError:
            return file  # a file system without locks
        if owner is not None:  # raised out here: that error is none of the machine's faults
            text = f"{folder}: another {what} writes there{f' ({owner})' if owner else ''}. Wait until it ends, or "
            raise UserError(f"{text}{instead}; if its host is gone for good, delete {folder / LOCK}.")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(folder / LOCK)):  # not what the owner before just deleted
                with contextlib.suppress(OSError):  # a full disk: the lock is there without its owner's name
                    os.truncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return file
        os.close(file)


def write_text(path: Path, text: str) -> None:
    """Written aside and renamed. Raises EnvironmentFault where the disk fails."""
    with writing(path, RESUME):
        files.write_text(path, text)


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
