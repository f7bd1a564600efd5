"""Workers on this machine: started by torchrun's elastic agent, watched, ended together, started again when asked."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.errors import FAULT, UserError, tell_error
from gradus.parallel import status

if TYPE_CHECKING:
    from gradus.launch.agent import Workers

GRACE = 5.0  # seconds that the other workers have to notice that one has died


def die_with_parent() -> None:
    """In a worker: end when the process that started it ends, however that ended."""
    parent = os.environ.get(status.PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    else:

        def watch() -> None:
            while os.getppid() == int(parent):
                time.sleep(1.0)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != int(parent):  # it ended before this was asked for
        os._exit(1)


def train(
    n: int, recipe: str, overrides: list[str], *, max_restarts: int = 0, resume: bool = False,
    auto_resume: bool = False, json_file: str | None = None, force: bool = False,
) -> int:  # fmt: skip
    """`gradus train RECIPE ... --processes n`. A mistake in the recipe is found here, before anything is started."""
    from gradus.parallel.check import validate
    from gradus.parallel.world import World, find
    from gradus.train import resolve
    from gradus.train.log import run_folder
    from gradus.train.precision import enough_devices

    world = find()
    if world.size > 1:
        raise UserError(
            f"--processes={n}: {world.launcher} started this, as process {world.rank} of {world.size}. Leave it out."
        )
    _check_counts(n, max_restarts)
    given = resolve.Given(json_file, World(size=n, local_size=n), resume)
    argv = ["train", recipe, *overrides, *(["--json_file", json_file] if json_file else [])]
    argv += ["--force"] if force else []
    argv += ["--resume"] if resume else ["--auto-resume"] if auto_resume else []
    folder = resolve.run_to_resume(recipe, overrides, given) if resume else None
    config = resolve.load(str(folder) if folder else recipe, overrides, given)[0]
    validate(config, n)
    if config.layout.transport == "mpi":
        raise UserError(
            f"--processes={n} with layout.transport=mpi: MPI's processes are started by mpirun: "
            f"mpirun -n {n} gradus train ..."
        )
    enough_devices(config.layout.device, n)
    if auto_resume and config.log.dir is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    with run_folder(config.log, config.name, folder) as folder:
        if not (resume or auto_resume) and (folder / "metrics.jsonl").exists():
            raise UserError(
                f"{folder}: there is a run already. "
                f"Go on with it: {status.command(folder, n)}; or set another log.dir."
            )
        if not resume and config.log.dir is None:
            argv.append(f"log.dir={folder}")
        again = () if resume or auto_resume else ("--auto-resume",)
        code = run(n, argv, folder=folder, timeout=config.layout.timeout, max_restarts=max_restarts, again=again)
    if code in (1, FAULT) and any((folder / "checkpoints").glob("step-*")):
        print(f"Go on from the last checkpoint with: {status.command(folder, n)}", file=sys.stderr, flush=True)
    return code


def run(
    n: int, argv: list[str], *, folder: Path, timeout: float, max_restarts: int = 0,
    command: Sequence[str] = (sys.executable, "-m", "gradus"), again: Sequence[str] = (), grace: float = GRACE,
) -> int:  # fmt: skip
    """Run `command + argv` as n workers, ranks 0 to n - 1 of one group, and return the exit code of the whole.

    Rank 0 writes straight to this process's output; the standard error of the others goes to `folder`/ranks. When a
    worker dies or hangs, the others are ended, and one sentence on standard error says which worker, where and how.
    Then all are started again, up to `max_restarts` times, with `again` added to their arguments and
    TORCHELASTIC_RESTART_COUNT > 0. A user's mistake (exit code 2) is reported once and starts nothing again. A fault of
    the machine has the exit code `errors.FAULT`, any other error 1.
    Ctrl-C and SIGTERM are passed on: workers have `timeout` seconds to save and end, and the exit code is 128 + the
    signal. A second Ctrl-C ends them at once. No worker outlives this process.
    """
    from gradus.launch.agent import Signals, Workers
    from gradus.train.log import LOCK

    _check_counts(n, max_restarts)
    folder = Path(folder)
    ranks = folder / "ranks"
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # from the deepest up
    try:
        with _quiet(), Signals() as signals:
            workers = Workers(n, folder, timeout, grace, signals)
            for restart in range(max_restarts + 1):
                outcome = _attempt(workers, [*command, *argv, *(again if restart else ())], restart)
                if outcome.code in (0, 2) or signals.came:
                    break
                if outcome.text:
                    tell_error(outcome.text)
                if restart < max_restarts:
                    text = f"starting again from the last checkpoint: {restart + 1} of {max_restarts}"
                    print(text, file=sys.stderr, flush=True)
        if signals.came:
            return outcome.code if outcome.code == 0 else 128 + signals.came[0]
        if outcome.code == 2 and outcome.text:
            tell_error(outcome.text)
        return outcome.code
    finally:
        names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        nothing = names == {"ranks", LOCK} or (made and names == {"ranks"})  # no run came of it
        if nothing and not any(ranks.glob("*.error*")):
            shutil.rmtree(folder / "ranks")
            for p in made:
                with contextlib.suppress(OSError):  # not empty
                    p.rmdir()


def _check_counts(n: int, max_restarts: int) -> None:
    if n < 1:
        raise UserError(f"--processes={n}: must be a positive whole number.")
    if max_restarts < 0:
        raise UserError(f"--max-restarts={max_restarts}: must be 0 or more.")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs what is said better here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Outcome:
    """How an attempt ended: the exit code of the whole, and what to tell the user (None: it has been told)."""

    def __init__(self, code: int, text: str | None = None):
        self.code, self.text = code, text


def _attempt(workers: Workers, command: list[str], restart: int) -> _Outcome:
    """Start the workers once and wait for their end."""
    from gradus.launch.agent import run_once

    folder = workers.folder
    try:
        status.clear(folder)
    except OSError as e:
        raise UserError(
            f"log.dir={folder}: cannot write there ({e.strerror}). Set log.dir to a folder you may write."
        ) from None
    agent = run_once(workers, command, restart)
    if not any(process.poll() for process in agent.processes.values()):
        return _Outcome(0)
    codes = status.with_word_left(folder, agent.codes)
    faulty = status.died(folder, codes)
    if faulty and codes[faulty[0]] == 2:
        return _Outcome(2, None if codes[0] == 2 else _mistake(folder, faulty[0]))
    if faulty and codes[faulty[0]] == FAULT:
        # rank 0, which writes no log, has said it on standard error
        said = agent.codes[0] == FAULT and not status.tail(status.log_path(folder, faulty[0]))
        return _Outcome(FAULT, None if said else agent.text)
    return _Outcome(1, agent.text)


def _mistake(folder: Path, rank: int) -> str:
    """What a rank other than 0 said of a user's mistake."""
    lines = status.tail(status.log_path(folder, rank)) or status.tail(status.error_path(folder, rank))[-1:]
    errors = (line.removeprefix("error:").strip() for line in reversed(lines) if line.startswith("error:"))
    said = next(errors, "\n".join(lines))
    return f"rank {rank} on {status.host()}: {said}"
