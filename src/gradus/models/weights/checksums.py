"""Checksums of a checkpoint's files, written beside them and compared before they are read:

    checksums.json    {"model.safetensors": {"bytes": 1234, "crc32": "9ae0daaf"}, "sharded/shard-00001-...": ..., ...}

A checkpoint of another program, or of a version of this one that wrote none, has no such file, and nothing is compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from gradus import files, limits
from gradus.errors import UserError, disk_full, not_written

FILE = "checksums.json"


def of(file: Path) -> dict[str, int | str]:
    """{"bytes", "crc32"} of a file."""
    size, crc, buffer = 0, 0, memoryview(bytearray(1 << 20))
    with open(file, "rb", buffering=0) as f:
        while n := f.readinto(buffer):
            size, crc = size + n, zlib.crc32(buffer[:n], crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def write(folder: Path, known: Mapping[str, dict] = {}) -> None:
    """Write checksums.json for every file below `folder`. known: checksums computed already, by path below `folder`."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != FILE)
    sums = {name: known.get(name) or of(folder / name) for name in names}
    (folder / FILE).write_text(json.dumps(sums, indent=1) + "\n")


def write_aside(target: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `target` appear whole, with the checksums of its files, or not at all; one that is there already
    stays.

    Raises UserError when the disk is not writable, EnvironmentFault when it is full.
    """
    if target.exists():
        return
    try:
        with files.aside(target) as aside:
            aside.mkdir(parents=True)
            fill(aside)
            write(aside)
    except (OSError, SafetensorError, UserError) as e:
        if isinstance(e, UserError) and not disk_full(e):
            raise
        then = "the checkpoint was not written; earlier ones are complete. Free some space, then use --resume."
        raise not_written(target.parent, e, then) from None


def read(folder: Path) -> dict[str, dict] | None:
    """The checksums by path below `folder`, None where there are none. Raises ValueError where checksums.json is
    damaged."""
    try:
        sums = json.loads(limits.regular(folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (RecursionError, UserError):  # UserError: a pipe or a device, which could be read without end
        raise ValueError(FILE) from None
    if not (
        isinstance(sums, dict) and all(isinstance(v, dict) and v.keys() == {"bytes", "crc32"} for v in sums.values())
    ):
        raise ValueError(FILE)
    return sums


def damage(
    folder: Path, chosen: Callable[[list[str]], Iterable[str]] = list, needs: str | None = None
) -> str | None:
    """What is wrong with the chosen files of a folder, in words; None where they are as they were written. needs: a
    file whose checksum must be known."""
    try:
        sums = read(folder)
    except ValueError:
        return f"{FILE} is not readable"
    except OSError as e:
        return f"{FILE} cannot be read ({e.strerror})"
    if needs is not None and needs not in (sums or {}):
        return f"{FILE} is missing" if sums is None else f"{FILE} does not list {needs}"
    for name in chosen(sorted(sums or {})):
        try:
            size = (folder / name).stat().st_size
            if size != sums[name]["bytes"]:
                return f"{name} has {size:,} bytes and was written with {sums[name]['bytes']:,}"
            if of(folder / name) != sums[name]:
                return f"{name} is not what was written (its checksum differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
    return None


def verify(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Raises UserError where a file with such a name is not as it was written."""
    if problem := damage(folder, lambda names: filter(wanted, names)):
        raise UserError(
            f"{folder}: {problem}. Copy the folder again, or use another checkpoint; "
            f"after a change by hand, delete its {FILE}"
        )
