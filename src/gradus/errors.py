"""What a user did wrong, or a machine, said in one line."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from gradus.text import wrapped

FAULT = 74  # exit code where the machine is at fault; EX_IOERR of sysexits.h
# Errors of the system that a user mends: a path or a port that is wrong. All others are the machine's faults.
MISTAKES = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EROFS, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY,
    errno.ESPIPE, errno.EBADF, errno.ENOEXEC, errno.EADDRINUSE, errno.EADDRNOTAVAIL,
}  # fmt: skip


class UserError(Exception):
    """A mistake the user can mend. The command line prints it as one line and exits with 2, without a traceback. The
    text says what is wrong, where, the nearest right thing, and what to do."""


class InputError(UserError):
    """One of several inputs that a model cannot read. The others are not affected."""


class DataError(UserError):
    """Data, or a tokenizer, that are not at hand here: a plan does without them, a run cannot."""


class Diverged(UserError):
    """A run that came to its end with no weights whose validation loss is finite. The exit code is 1."""


class EnvironmentFault(UserError):
    """A fault of the machine (a full disk, a file system or a connection that is gone). One line too, but the exit code
    is FAULT, after which whatever restarts a run starts it again."""


def _number(error: BaseException) -> int | None:
    """The system's number of an error; what is written in Rust (safetensors, tokenizers) has it in its text."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\(os error (\d+)\)", str(error)) if not isinstance(error, UserError) else None
    return int(number[1]) if number else None


def is_fault(error: BaseException) -> bool:
    """Whether an error of the system is the machine's fault, and not that of a path or a port that the user gave."""
    number = _number(error)
    if number is None:  # some of Python's own say so only by their class; those of libraries have other reasons too
        own = type(error).__module__ in ("builtins", "http.client")
        return own and isinstance(error, ConnectionError | TimeoutError)
    return number not in MISTAKES


def exit_code(error: BaseException) -> int:
    """FAULT for a fault of the machine and for a UserError made from one, 2 for other mistakes and errors of the
    system, 1 for a bug and for a run that diverged."""
    if isinstance(error, Diverged):
        return 1
    if not isinstance(error, UserError):
        return FAULT if is_fault(error) else 2 if isinstance(error, OSError) and error.errno is not None else 1
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, EnvironmentFault) or is_fault(cause)):
        cause = cause.__cause__ or cause.__context__
    return 2 if cause is None else FAULT


def disk_full(error: BaseException) -> bool:
    """Whether no room was left. A UserError made from such an error says so in its text."""
    return _number(error) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of one that says nothing its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def not_written(where: Path, error: BaseException, then: str) -> UserError:
    """What to raise where `where` could not be written: 'WHERE: the disk is full (0.00 GB free): THEN'."""
    reason = getattr(error, "strerror", None) or first_line(error)
    if disk_full(error):
        there = next(p for p in (Path(where), *Path(where).absolute().parents) if p.exists())
        reason = "the quota is used up" if _number(error) == errno.EDQUOT else "the disk is full"
        with contextlib.suppress(OSError):
            reason += f" ({shutil.disk_usage(there).free / 1e9:.2f} GB free)"
        return EnvironmentFault(f"{where}: {reason}: {then}")
    kind = EnvironmentFault if is_fault(error) else UserError
    return kind(f"{where}: cannot write there ({reason}): {then}")


def check_working_folder() -> None:
    """Raises UserError where it was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder was deleted. Change to one that is there (cd), and start again.") from None


def reason(error: BaseException) -> str:
    """Why the system refused, in its own words, or what stands where a folder should. Raises UserError where it is that
    the working folder was deleted."""
    file, number = getattr(error, "filename", None), getattr(error, "errno", None)
    if number == errno.ENOENT:
        check_working_folder()
    if number in (errno.EEXIST, errno.ENOTDIR) and isinstance(file, str | os.PathLike):
        for path in (*reversed(Path(file).parents), Path(file)):
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to {os.readlink(path)}, which is not there"
            if path.exists() and not path.is_dir():
                return f"{path} is not a folder"
    return getattr(error, "strerror", None) or str(error)


def of_system(error: BaseException) -> UserError:
    """What to raise, or to say, of an error of the system without a message nearer by."""
    file, fault = getattr(error, "filename", None), exit_code(error) == FAULT
    if disk_full(error) and file:
        return not_written(Path(file), error, "free some space; --resume continues a run from its last checkpoint.")
    why = reason(error)
    text = f"{file}: {why}" if file and not why.startswith(str(file)) else why
    if fault:
        then = "a fault of the machine, not of the recipe. Try again; --resume continues a run."
        return EnvironmentFault(f"{text}: {then}")
    return UserError(text + ". Give another name." * (why != getattr(error, "strerror", None)))


@contextlib.contextmanager
def writing(where: Path, then: str) -> Iterator[None]:
    """Raises EnvironmentFault, as `not_written` words it, where the machine fails inside."""
    try:
        yield
    except Exception as e:
        if not (is_fault(e) or disk_full(e)):
            raise
        raise not_written(where, e, then) from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one of which the word is a part (patch → patch_size), else the one spelt
    most like it, else one that holds it or that it holds (mixed_precision → precision). None where nothing is near."""

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), lower).ratio()

    def parts(name: str) -> str:
        return "_" + re.sub(r"\W", "_", name.lower()) + "_"

    lower, known = str(word).lower(), sorted({str(k) for k in known})
    near = (
        [k for k in known if k == lower or (len(lower) > 1 and parts(lower) in parts(k))]
        or [k for k in known if likeness(k) >= 0.5]
        or [k for k in known if (len(lower) > 2 and lower in k.lower()) or (len(k) > 1 and parts(k) in parts(lower))]
    )
    return max(near, key=likeness, default=None)


def some(names: list[str]) -> str:
    """The first five names, and how many there are in all."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")


def either(values: Iterable[object], word: str = "or") -> str:
    """'1, 2 or 4'."""
    *others, last = map(str, values)
    return f"{', '.join(others)} {word} {last}" if others else last


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest known name, else ' Known: a, b, c.'"""
    known = sorted({str(k) for k in known})
    near = nearest(word, known)
    if near is not None:
        return f" Did you mean {near}?"
    more = f", ... ({len(known)} in all)" if len(known) > 60 else ""
    return f" Known: {', '.join(known[:60])}{more}." if known else ""


COLOURS = {"red": 31, "green": 32}


def colour(text: str, name: str, stream: TextIO | None = None) -> str:
    """The text in "red" or "green" where the stream (default: standard output) is a terminal, not for TERM=dumb;
    NO_COLOR: never, FORCE_COLOR: always."""
    stream = stream or sys.stdout
    wanted = os.environ.get("FORCE_COLOR") or (stream.isatty() and os.environ.get("TERM") != "dumb")
    return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if wanted and not os.environ.get("NO_COLOR") else text


def tell_error(text: str) -> None:
    """One error on standard error in one write, so that the lines of several processes do not run into each other."""
    text = wrapped(f"error: {text}", sys.stderr).removeprefix("error:")
    sys.stderr.write(f"{colour('error:', 'red', sys.stderr)}{text}\n")
    sys.stderr.flush()


def requirements(*extras: str) -> list[str]:
    """What these extras need, as pip names it ("": the core); none where gradus runs without having been installed."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = [line.partition(";") for line in importlib.metadata.requires("gradus-ml") or ()]
        markers = [f'extra == "{extra}"' if extra else "" for extra in extras]
        return list(dict.fromkeys(name.strip() for name, _, marker in lines if marker.strip() in markers))
    return []


def how_to_install(extra: str) -> str:
    """Right for a wheel and for a checkout, and whatever index pip asks: it names the packages, not gradus."""
    packages = requirements(extra)
    return f"pip install {shlex.join(packages)}" if packages else f"pip install -e '.[{extra}]' in the checkout"


def need(package: str, extra: str, what: str, error: type[UserError] = UserError):
    """Import an optional package. Raises `error`, which says what extra brings it, where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as e:
        why = f"{what} needs the package {package.split('.')[0]} ({e})"
        raise error(f"{why}, of the extra {extra}: {how_to_install(extra)}") from None
