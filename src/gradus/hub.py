"""The Hugging Face hub: files of a repository, and data sets, from the net or from their local copies."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.errors import DataError, EnvironmentFault, UserError, disk_full, first_line, need


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the clients' warnings of each retry: what comes of them is one error."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


def download(
    name: str, patterns: Sequence[Sequence[str]], enough: Callable[[Path], bool], where: str, to: Path | None = None
) -> Path:
    """The folder of a repository's files: of the first patterns, and while these are not `enough`, of the next too.

    where: begins the error, e.g. `model.init=NAME`. to: download into this folder, not into the hub's own local copy.
    Raises UserError where there is no such repository, or no way to it.
    """
    offline = _is_set("HF_HUB_OFFLINE")
    hub = need("huggingface_hub", "hf", f"{where}: not a local folder, and reading it from the hub")
    place: dict[str, Any] = {"local_files_only": offline} if to is None else {"local_dir": str(to)}
    try:
        with _quiet():
            for allowed in patterns:
                folder = Path(hub.snapshot_download(name, allow_patterns=list(allowed), **place))
                if enough(folder):
                    break
            return folder
    except Exception as e:  # the hub's client raises its own, requests', httpx' and the system's errors
        why = f"no such file or folder, and not available from the hub ({_reason(e, where)})"
        if offline and to is None:
            why = "no such folder, and not in the local copy of the hub (HF_HUB_OFFLINE=1)"
    # outside of the handler: a name or a connection that is wrong is no fault of the machine
    raise UserError(f"{where}: {why}. Check the name and the connection, or `gradus fetch RECIPE --to DIR` elsewhere.")


def is_saved(folder: Path) -> bool:
    """Did `datasets.save_to_disk` write this folder?"""
    parts = [(folder / f"{name}.json").is_file() for name in ("dataset_dict", "dataset_info", "state")]
    return parts[0] or all(parts[1:])


def data_set(name: str, where: str) -> dict[str, Any]:
    """The splits of `NAME[:CONFIG]`, or of a folder that `save_to_disk` wrote, as tables of the package `datasets`.
    where: begins the error. Raises DataError where it cannot be loaded."""
    datasets = need("datasets", "hf", where, DataError)
    folder = Path(os.path.expanduser(name))
    try:
        with _quiet():
            if is_saved(folder):
                loaded = datasets.load_from_disk(str(folder))
            else:
                loaded = datasets.load_dataset(*name.split(":", 1))
            return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    except Exception as e:  # of many kinds: offline, unknown, gated, no such configuration
        why = _reason(e, where)
    help = "Check the name and the connection."
    if _is_set("HF_HUB_OFFLINE") or _is_set("HF_DATASETS_OFFLINE"):
        help = "Give a local folder, or where there is internet, stage it first: gradus fetch"
    raise DataError(f"{where}: cannot be loaded ({why}). {help}")


def _reason(e: Exception, where: str) -> str:
    """Raises EnvironmentFault where the disk is full."""
    reason = first_line(e)[:200]
    if disk_full(e):
        fix = "Free some space, or set HF_HOME to a folder with enough space."
        raise EnvironmentFault(f"{where}: {reason}. {fix}") from None
    return reason
