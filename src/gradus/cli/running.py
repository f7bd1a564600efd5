"""A command line run: the verb called, what it yields printed, its errors told, its exit code."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback

from gradus import errors, limits
from gradus.cli.parsing import first_screen, parse
from gradus.errors import FAULT, UserError, disk_full, exit_code, tell_error
from gradus.text import plain_where_needed, say


def main(argv: list[str] | None = None) -> int:
    """Parse, call the verb, turn a user's mistake into one line on standard error and exit code 2 (a fault of the
    machine: `errors.FAULT`). One of several processes does not come back from here: it ends when the others do."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # the Pythons started from here import nothing from the working folder
    _open_streams()
    code, joined = 1, lambda: (world := sys.modules.get("gradus.parallel.world")) and world.joined()
    try:
        with plain_where_needed():
            code = run(argv)
    except Exception:  # a bug
        if not joined():
            raise
        traceback.print_exc()
    if joined():
        sys.modules["gradus.parallel.world"].leave(code)
    return code


def _open_streams() -> None:
    """Standard streams that whoever started this closed (`>&-`) lead to nothing."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            with contextlib.suppress(OSError):  # its number may be another file's by now
                os.fstat(number)
                number = handle
            if number != handle:
                os.dup2(handle, number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def run(argv: list[str] | None) -> int:
    try:
        args = parse(argv)
        if args.verb is None:
            print(first_screen(), end="")
            return 0
        errors.check_working_folder()
        answer = args.function(args)  # an exit code, or lines
        if not isinstance(answer, int):
            whole = getattr(args, "json", False) or args.pasted
            for line in answer or ():
                print(line, flush=True) if whole else say(line)
            answer = 0
        sys.stdout.flush()  # here, so that a reader who has gone is heard of below
        return answer
    except UserError as e:
        world = sys.modules.get("gradus.parallel.world")
        text = world.mistake(str(e)) if world is not None and world.joined() else str(e)
        if text is not None:
            tell_error(limits.shown(text))
        return exit_code(e)
    except MemoryError as e:
        tell_error(f"not enough memory{f' ({e})' if str(e) else ''}. Use smaller sizes, or a machine with more memory.")
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Exception as e:  # a file that may not be read, a disk that fails: where nothing nearer by has a message
        unread, code = isinstance(e, BrokenPipeError) and _nobody_reads(), exit_code(e)
        if code == 1:
            raise
        _forget_unwritable_output()
        if unread:
            return 0
        if code == FAULT and not getattr(e, "filename", None) and not disk_full(e):  # its text does not say where
            traceback.print_exc()
        tell_error(limits.shown(str(errors.of_system(e))))
        return code


def _forget_unwritable_output() -> None:
    """What cannot be written to standard output (its reader has gone, or its disk is full) goes nowhere, so that
    Python does not try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(ValueError):  # it may be no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone (`gradus ... | head`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False
