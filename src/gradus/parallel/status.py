"""Where every process of a run stands, in one small file each; and, when a run ends badly, one plain sentence made from
them.

A collective that fails says that some peer is gone, not which, nor what it was doing. The records say it:
`RUN/ranks/rank-0001.json` holds rank, host, process, step and phase, rewritten in place at every phase. On several
hosts the run folder must be on a file system that all of them share. `rank-0001.error` holds the traceback of what
ended a rank; those of earlier starts are kept as `.error.1`, `.error.2`, ..., the oldest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.errors import UserError, either, exit_code, tell_error
from gradus.files import is_running

if TYPE_CHECKING:  # launch.local reads this module before torch is there
    from gradus.parallel.world import World

SIZE = 256  # bytes of a record
LOST = 75  # exit code of a process that ends only because another is gone; EX_TEMPFAIL of sysexits.h
PARENT = "GRADUS_PARENT"  # in a worker's environment: the process that started it and tells the user how it ended
COMMAND = "GRADUS_COMMAND"  # there too: what the user typed to start them
LINES = 12  # of a worker's log that are shown


def _paths(kind: str) -> Callable[[Path, int], Path]:
    return lambda folder, rank: Path(folder) / "ranks" / f"rank-{rank:04d}.{kind}"


record_path = _paths("json")
log_path = _paths("log")  # the standard error of a worker other than rank 0, where a parent keeps it
error_path = _paths("error")  # the traceback of the error that ended a rank


def set_aside(path: Path) -> None:
    """Keep a file of an earlier start under another name."""
    with contextlib.suppress(OSError):
        if path.stat().st_size:
            n = 1 + len(list(path.parent.glob(f"{path.name}.*")))
            path.rename(path.with_name(f"{path.name}.{n}"))


def clear(folder: Path) -> None:
    """Before a start: remove the records, and keep what was written about errors. Raises OSError."""
    ranks = Path(folder) / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    for path in [p for p in ranks.iterdir() if p.suffix in (".json", ".log", ".error")] + [_reported_path(folder)]:
        if path.suffix in (".log", ".error"):
            set_aside(path)
        path.unlink(missing_ok=True)


def typed(*verbs: str) -> str | None:
    """The `gradus VERB ...` that the user typed, here or to start this worker. None: not one of the verbs."""
    if text := os.environ.get(COMMAND):
        return text
    return shlex.join(["gradus", *sys.argv[1:]]) if sys.argv[1:2] and sys.argv[1] in verbs else None


def host() -> str:
    return socket.gethostname()[:48]


class Status:
    """This process's record in the run folder. A run of one process keeps none: there every method does nothing."""

    def __init__(self, folder: Path, world: World):
        self.count, self.step, self.file = 0, None, None
        if world.size == 1:
            return
        path = record_path(folder, world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            _reported_path(folder).unlink(missing_ok=True)
        set_aside(error_path(folder, world.rank))
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.head = {"rank": world.rank, "pid": os.getpid(), "host": host()}
        self.at("starting")

    def at(self, what: str, step: int | None = None) -> None:
        """Record that from now on this process is at `what`, in step `step` (None: in the last one named).

        `what` completes a sentence after "while": an activity ("reading data"), or a place that begins with "the" ("the
        gradient all-reduce"), which is how a collective must be named. Plain words, at most 64 characters. Costs one
        small write, a few microseconds.
        """
        if self.file is None:
            return
        assert len(what) <= 64, f"no name for a phase: {what}"
        self.count += 1
        self.step = self.step if step is None else step
        record = {"count": self.count, "step": self.step, "time": round(time.time(), 3), "what": what}
        os.pwrite(self.file, _line({**self.head, **record}), 0)

    def __enter__(self) -> Status:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(done=kind is None)

    def close(self, done: bool = True) -> None:
        """End the record of a run; it says so where the run went well."""
        if done:
            self.at("done")
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _line(record: Mapping[str, object]) -> bytes:
    """As long as any other, so that it covers what it is written over."""
    return json.dumps(record, separators=(",", ":")).encode().ljust(SIZE - 1) + b"\n"


@dataclasses.dataclass(frozen=True)
class Record:
    """What one process last recorded. `time` in seconds since the epoch; `lost`: it gave up waiting for others; `code`:
    the exit code that it ends with by an error of its own."""

    rank: int
    pid: int
    host: str
    count: int
    step: int | None
    time: float
    what: str
    lost: bool = False
    code: int | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def place(self) -> tuple[str, str]:
        """For example `at step 37` and `reading data`."""
        at = "before the first step" if self.step is None else f"at step {self.step}"
        return at, f"in {self.what}" if self.what.startswith("the ") else self.what

    @property
    def collective(self) -> str:
        """For example `the gradient all-reduce of step 37`."""
        what = self.what if self.what.startswith("the ") else f"what follows {self.what}"
        return what if self.step is None else f"{what} of step {self.step}"

    @property
    def progress(self) -> tuple[int, int]:
        return (-1 if self.step is None else self.step, self.count)


def read(folder: Path, rank: int) -> Record | None:
    """The record of one rank; None where it has written none."""
    for _ in range(3):  # a reader may meet a writer
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Record(**json.loads(record_path(folder, rank).read_text()))
        time.sleep(0.005)
    return None


def is_gone(record: Record) -> bool:
    """Whether its process has ended, where that is a process of this host."""
    return record.host == host() and not is_running(record.pid)


# ------------------------------------------------------------ what went wrong


def diagnose(folder: Path, size: int, codes: Mapping[int, int | None] | None = None) -> str:
    """What ended a run of `size` processes: a sentence, and the last lines that the process at fault wrote, if any.

    `codes`: rank → exit code, negative for a signal, None for one that has not ended, as its parent knows them. Without
    them (there is no parent under mpirun or srun), the records and this host's table of processes decide.
    """
    records = {rank: r for rank in range(size) if (r := read(folder, rank))}
    if codes is None:
        failed = [rank for rank, r in records.items() if r.code is not None]
        ended = [rank for rank, r in records.items() if is_gone(r) and not r.lost and r.what != "done"]
        gone = sorted(failed, key=lambda rank: _failed_at(folder, rank)) or ended
        codes = {rank: LOST if r.lost else r.code for rank, r in records.items()}
    else:
        codes = with_word_left(folder, codes)
        gone = died(folder, codes)
    if gone:
        return _lost_ranks(folder, records, gone, codes)
    if silent := [rank for rank in range(size) if rank not in records]:
        return f"{_ranks(silent)} never wrote a record in {Path(folder) / 'ranks'}, and the others waited in vain."
    gave_up = [r for r in records.values() if r.lost or codes[r.rank] in (LOST, -signal.SIGABRT)]
    if others := [r for r in records.values() if r not in gave_up]:
        late = min(others, key=lambda r: r.progress)
    else:  # all gave up: the last to come came too late
        late = min(gave_up, key=lambda r: (r.progress[0], -r.time))
    seen = f"it was last seen {max(0.0, time.time() - late.time):.0f} s ago {' '.join(late.place)}."
    if not gave_up:
        return f"{late.name} is the farthest behind: {seen}"
    first = max(gave_up, key=lambda r: r.progress)
    did_not = "did not leave" if (late.step, late.what) == (first.step, first.what) else "did not reach"
    text = f"{late.name} {did_not} {first.collective}: {seen}"
    first = min(gave_up, key=lambda r: _failed_at(folder, r.rank))
    lines = tail(error_path(folder, first.rank))
    if waited := re.search(r"tim(?:ed|e) ?out.{0,40}?(\d+) ?ms", lines[-1] if lines else "", re.IGNORECASE):
        seconds = f"{int(waited[1]) / 1000:g} s"
        text += f" {first.name} waited {seconds} (layout.timeout), after which a process counts as lost."
    elif lines and not others:  # the connection itself may have failed: the error that came first says how
        text += "\n  ".join([f"\nThe first error, of {first.name}:", *lines])
    return text


def with_word_left(folder: Path, codes: Mapping[int, int | None]) -> dict[int, int | None]:
    """Exit codes, with those that ranks which have failed, but not ended yet, wrote into their records."""
    left = {rank: read(folder, rank) for rank, code in codes.items() if code is None}
    return {**codes, **{rank: r.code for rank, r in left.items() if r is not None}}


def died(folder: Path, codes: Mapping[int, int | None]) -> list[int]:
    """The ranks that ended by their own fault, the first to fail first: by a signal, else by an error that they
    recorded, else by a mistake of the user (exit code 2), else by another error."""
    failed = [r for r, code in codes.items() if code is not None and code > 0 and code not in (2, LOST)]
    own = sorted((r for r in failed if error_path(folder, r).exists()), key=lambda r: _failed_at(folder, r))
    by_signal = [r for r, code in codes.items() if code is not None and code < 0]
    killed = [r for r in by_signal if not _aborted_waiting(folder, r, codes)]
    if own:  # an abort may follow from another's error
        killed = [r for r in killed if codes[r] != -signal.SIGABRT]
    mistaken = [r for r, code in codes.items() if code == 2]
    first = [r for r in failed if not speaks_of_peers("\n".join(tail(log_path(folder, r))))]
    return killed or own or mistaken or first or failed


def _failed_at(folder: Path, rank: int) -> float:
    """When a rank recorded its error, in seconds since the epoch; infinity where it did not."""
    try:
        return error_path(folder, rank).stat().st_mtime
    except OSError:
        return float("inf")


def _aborted_waiting(folder: Path, rank: int, codes: Mapping[int, int | None]) -> bool:
    """Whether NCCL's watchdog ended a rank with SIGABRT, since others did not come. Rank 0 keeps no log that would tell
    it."""
    if codes[rank] != -signal.SIGABRT:
        return False
    lines = tail(log_path(folder, rank))
    if lines:
        return speaks_of_peers("\n".join(lines))
    return None in codes.values() or set(codes.values()) == {-signal.SIGABRT}


def _lost_ranks(folder: Path, records: dict, gone: list[int], codes: Mapping[int, int | None]) -> str:
    rank = gone[0]
    record, code = records.get(rank), codes.get(rank)
    name = record.name if record else f"rank {rank} on {host()}"
    name_of = {number.value: number.name for number in signal.Signals}
    if code is None:
        how = f"is gone (its process {record.pid} has ended)"  # without a parent the cause is not known
    elif code < 0:
        how = f"was killed by {name_of.get(-code, f'signal {-code}')} (exit code {code})"
    else:
        how = f"ended with exit code {code}"
    text = f"{name} {how} {' while '.join(record.place) if record else 'while starting'}"
    if len(gone) > 1:
        text += f", and so did {_ranks(gone[1:])}"
    lines = tail(log_path(folder, rank))
    if not lines and record and record.host == host() and not is_gone(record):  # it has not come to write them
        lines = tail(error_path(folder, rank))
    if lines:
        text += "\n  ".join(["; the last lines it wrote:", *lines])
    elif code == -signal.SIGKILL:
        text += ". If nobody killed it, the host's memory was probably full: see dmesg."
    return text


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {either(ranks, 'and')}"


def tail(path: Path) -> list[str]:
    """The last lines of what a worker wrote; [] where no file keeps it: rank 0's standard error is on the screen."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LINES:]


# ------------------------------------------------------------ inside a worker

# What libraries say when another process is gone or does not come: nothing but the text tells it from another error.
# (gloo's flight recorder, in PyTorch 2.13, has a collective that failed as completed; torch's error files have whole
# seconds, too coarse for who failed first: they are written for torchrun, not read.)
# (library, where it was seen, pattern)
_PEER_TEXTS = (
    ("gloo", "PyTorch 2.13", r"gloo.{0,200}(closed|reset|timed? ?out|refused|broken pipe|connectFullMesh|EOF)"),
    ("gloo", "PyTorch 2.13", r"connection (was )?(closed|reset) by|timed out waiting \d+ ?ms"),
    ("gloo", "PyTorch 2.13", r"closed by peer|pair closure|connectFullMesh|broken pipe|socket timeout"),
    ("NCCL", "PyTorch 2.13, its source", r"ncclRemoteError|ncclSystemError"),
    ("NCCL", "PyTorch 2.13, its source", r"collective operation timeout|NCCL communicator was aborted"),
    ("TCPStore", "PyTorch 2.13", r"failed to recv|recvValue failed|wait timeout after"),
)
_PEERS = re.compile("|".join(pattern for *_, pattern in _PEER_TEXTS), re.IGNORECASE | re.DOTALL)


def speaks_of_peers(text: str) -> bool:
    """Whether an error's text is that of a collective whose other side is gone or late."""
    return bool(_PEERS.search(text))


def from_collective(error: BaseException) -> bool:
    """Whether an error came out of a collective, or of the store that processes meet in, since another is gone or late.

    gloo, NCCL and the store raise RuntimeError or a subclass of it, inside PyTorch or where this package waits for
    them. An error with the same words from elsewhere (a data set that is read over a network, a task) is none. An error
    that was made from such a one while a checkpoint was written, on this or another process, is one too.
    """
    import torch

    rooms = [Path(torch.__file__).parent, Path(__file__).parent]
    seen: BaseException | None = error
    while seen is not None:
        others = getattr(seen, "failures", {}).values()  # DCP's has every process's
        for cause, frames in [(seen, traceback.extract_tb(seen.__traceback__)), *others]:
            place = Path(frames[-1].filename) if frames else Path()
            inside = any(place.is_relative_to(room) for room in rooms) and "utils/data" not in place.as_posix()
            if isinstance(cause, RuntimeError) and inside and speaks_of_peers(str(cause)):
                return True
        seen = seen.__context__ if isinstance(seen, UserError) else None
    return False


def has_parent() -> bool:
    """Whether a parent process started this one, watches it, and tells the user how it ended."""
    return os.environ.get(PARENT) == str(os.getppid())


def command(folder: Path, processes: int | None) -> str:
    """The command that resumes a run, of so many workers that this program starts."""
    return f"gradus train {shlex.quote(str(folder))} --resume" + (f" --processes {processes}" if processes else "")


def lost(folder: Path, exception: BaseException, world: World, patience: float = 3.0) -> tuple[int, str | None] | None:
    """What an error of gloo, NCCL or the store means: which rank is gone or late, and where; None for any other error.

    Returns (the code to end with, what to tell the user; None: another process tells it). Writes into this process's
    record that it gave up, so that it differs from the one that it waited for. Without a parent to tell the user, waits
    up to `patience` seconds for the others' records; one of the ranks that gave up tells.
    """
    if world.size == 1 or not from_collective(exception):
        return None
    _leave_word(folder, world.rank, exception, lost=True)
    if has_parent():
        return LOST, None
    end = time.monotonic() + patience
    while time.monotonic() < end:
        records = [read(folder, rank) for rank in range(world.size)]
        if all(r and (r.lost or r.code is not None or is_gone(r)) for r in records):
            break
        time.sleep(0.05)
    text = diagnose(folder, world.size)
    # the same code on all ranks, since srun and mpirun report only one
    code = next((r.code for r in records if r is not None and r.code is not None), LOST)
    try:  # the first to come tells the user
        _reported_path(folder).touch(exist_ok=False)
    except OSError as e:  # a folder that is gone: better said twice than not at all
        return code, None if isinstance(e, FileExistsError) else text
    return code, text


def _reported_path(folder: Path) -> Path:
    return Path(folder) / "ranks" / "reported"


def _leave_word(folder: Path, rank: int, error: BaseException, **word: int) -> None:
    """Add to this process's record why it ends, and write the error's traceback beside it."""
    with contextlib.suppress(OSError):
        error_path(folder, rank).write_text(
            "".join(traceback.format_exception(error)), encoding="utf-8", errors="replace"
        )
    path = record_path(folder, rank)
    with contextlib.suppress(OSError, ValueError):
        line = _line(json.loads(path.read_text()) | word)
        with open(path, "r+b", buffering=0) as file:
            file.write(line)


@contextlib.contextmanager
def watched(folder: Path, world: World, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Around what all ranks do together: where an error means that another rank is gone, say which and end with LOST.
    Any other error is recorded in the run folder, except the `passing` ones, which are no errors."""
    try:
        yield
    except passing:
        raise
    except Exception as e:
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        from gradus.parallel.world import leave

        end = lost(folder, e, world)
        if end is None:
            if world.size > 1:
                _leave_word(folder, world.rank, e, code=exit_code(e))
                ErrorHandler().record_exception(e)  # where torchrun asks for it: it tells which rank failed first
            raise
        code, text = end
        if text:
            tell_error(text)
        leave(code)
