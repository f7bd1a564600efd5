"""Checksums of a checkpoint's files, written beside them and compared before they are read:

    checksums.json    {"model.safetensors": {"bytes": 1234, "crc32": "9ae0daaf"}, "sharded/shard-00001-...": ..., ...}

A checkpoint of another program, or of a version of this one that wrote none, has no such file, and nothing is compared.
Hidden files and .md are nobody's to check: a card, what git keeps.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from gradus import files, limits
from gradus.errors import UserError, disk_full, not_written, some

FILE = "checksums.json"


def of(file: Path) -> dict[str, int | str]:
    """{"bytes", "crc32"} of a file."""
    size, crc, buffer = 0, 0, memoryview(bytearray(1 << 20))
    with open(file, "rb", buffering=0) as f:
        while n := f.readinto(buffer):
            size, crc = size + n, zlib.crc32(buffer[:n], crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def names(folder: Path) -> list[str]:
    """Every file below a folder that checksums are kept of."""
    paths = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.name != FILE)
    return sorted(str(p) for p in paths if p.suffix != ".md" and not any(part.startswith(".") for part in p.parts))


def write(folder: Path, known: Mapping[str, dict] = {}) -> None:
    """Write checksums.json for the files below `folder`. known: checksums computed already, by path below `folder`."""
    sums = {name: known.get(name) or of(folder / name) for name in names(folder)}
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
        if target.exists():  # a replica that the others gave up has written it after all
            return
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
    for entry in sums.values() if isinstance(sums, dict) else [None]:
        match entry:
            case {"bytes": int(), "crc32": str(), **others} if not others:
                continue
        raise ValueError(FILE)
    return sums


def damage(
    folder: Path, chosen: Callable[[list[str]], Iterable[str]] = list, needs: str | None = None,
    listed: Collection[str] = (), least: float = math.inf,
) -> str | None:  # fmt: skip
    """What is wrong with the chosen files of a folder, in words; None where they are as they were written. needs: a
    file whose checksum must be known. listed: those that must be where there are any. least: files of so many bytes
    are read once, and not again while their dates stay."""
    try:
        sums = read(folder)
    except ValueError:
        return f"{FILE} is not readable"
    except OSError as e:
        return f"{FILE} cannot be read ({e.strerror})"
    if needs is not None and needs not in (sums or {}):
        return f"{FILE} is missing" if sums is None else f"{FILE} does not list {needs}"
    if sums is not None and (unknown := [name for name in listed if name not in sums]):
        return f"{FILE} does not list {some(unknown)}"
    for name in chosen(sorted(sums or {})):
        try:
            size = (folder / name).stat().st_size
            if size != sums[name]["bytes"]:
                return f"{name} has {size:,} bytes and was written with {sums[name]['bytes']:,}"
            crc = files.remembered(folder / name, "crc32", least, lambda file: str(of(file)["crc32"]))
            if crc != sums[name]["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
    return None


def verify(folder: Path, wanted: Callable[[str], bool], listed: Collection[str] = ()) -> None:
    """Raises UserError where a file with such a name is not as it was written, and where one of `listed` is in none of
    the checksums."""
    if problem := damage(folder, lambda names: filter(wanted, names), listed=listed, least=1 << 26):
        raise UserError(
            f"{folder}: {problem}. Copy the folder again, or use another checkpoint; "
            f"after a change by hand, delete its {FILE}"
        )
