"""Workers on this machine: started as torchrun starts them, watched, ended together, started again when asked."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gradus import limits
from gradus.errors import FAULT, UserError, tell_error
from gradus.launch import replicas
from gradus.parallel import status
from gradus.parallel.processes import GRACE, Programs, start_program
from gradus.recipe.axes import needed
from gradus.recipe.schema import Layout
from gradus.text import say


def train(
    n: int, recipe: str, overrides: list[str], json_file: str | None = None, max_restarts: int = 0, *,
    resume: bool = False, auto_resume: bool = False, **flags: bool,
) -> int:  # fmt: skip
    """`gradus train RECIPE ... --processes n`. A mistake in the recipe is found here, before anything is started.
    flags: more of the workers' options, by name."""
    from gradus.parallel.check import validate
    from gradus.parallel.device import enough_devices
    from gradus.parallel.world import World, find
    from gradus.train import resolve
    from gradus.train.folder import run_folder

    world = find()
    if world.size > 1:
        place = f"process {world.rank} of {world.size}"
        raise UserError(f"--processes={n}: {world.launcher} started this, as {place}. Leave it out.")
    context = resolve.RunContext(json_file, World(size=n, local_size=n), resume)
    folder = resolve.run_to_resume(recipe, overrides, context) if resume else None
    recipe = str(folder or recipe)  # of workers too, whose newest run may be another by then
    argv = ["train", recipe, *overrides, *(["--json_file", json_file] if json_file else [])]
    argv += [f"--{name.replace('_', '-')}" for name, is_set in flags.items() if is_set]
    argv += ["--resume"] if resume else ["--auto-resume"] if auto_resume else []
    config = resolve.load(recipe, overrides, context)[0]
    validate(config, n)
    if config.layout.transport == "mpi":
        raise UserError(f"--processes={n} with layout.transport=mpi: start it with mpirun -n {n} gradus train ...")
    enough_devices(config.layout.device, n)
    if auto_resume and config.log.dir is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    with run_folder(config.log, config.name, folder) as folder:
        if not (resume or auto_resume) and (folder / "metrics.jsonl").exists():
            again = status.command(folder, n)
            raise UserError(f"{folder}: there is a run already. Resume it: {again}; or set another log.dir.")
        if not resume and config.log.dir is None:
            argv.append(f"log.dir={folder}")
        again = () if resume or auto_resume else ("--auto-resume",)
        times = {"max_restarts": max_restarts, "elastic": config.layout if config.layout.elastic else None}
        return run(n, argv, folder=folder, timeout=config.layout.timeout, again=again, **times)


def run(
    n: int, argv: list[str], *, folder: Path, timeout: float, max_restarts: int = 0,
    command: Sequence[str] = (sys.executable, "-m", "gradus"), again: Sequence[str] = (), grace: float = GRACE,
    elastic: Layout | None = None,
) -> int:  # fmt: skip
    """Run `command + argv` as n workers, ranks 0 to n - 1 of one group, and return the exit code of the whole.

    Rank 0 writes straight to this process's output; the standard error of the others goes to `folder`/ranks. When a
    worker dies or hangs, the others are ended, and one sentence on standard error says which worker, where and how.
    Then all are started again, up to `max_restarts` times, with `again` added to their arguments and
    TORCHELASTIC_RESTART_COUNT > 0. A user's mistake (exit code 2) is reported once and starts nothing again. A fault of
    the machine has the exit code `errors.FAULT`, any other error 1.
    Ctrl-C and other signals that ask for an end are passed on: workers have `timeout` seconds to save and end, and the
    exit code is 128 + the signal. A second signal ends them within `grace` seconds. No worker outlives this process.
    Where they did not save themselves, the command that resumes the run from its last checkpoint is printed.
    """
    from gradus.train.folder import LOCK

    folder = Path(folder)
    new_folders = [p for p in (folder, *folder.parents) if not p.exists()]  # from the deepest up

    def waiting() -> str:
        most = f"stopping: the processes have {timeout:g} s (layout.timeout) to save and end"
        return f"{most}; {status.diagnose(folder, n, dict.fromkeys(range(n)))} A second signal ends all of them."

    programs = Programs(timeout, grace, waiting=waiting)
    try:
        with programs.passing_on_signals():
            for restart in range(max_restarts + 1):
                line = [*command, *argv, *(again if restart else ())]
                code, text = attempt(programs, n, line, folder, restart, elastic)
                if programs.signals:
                    code = code and 128 + programs.signals[0]
                    break
                if text:
                    tell_error(text)
                if code in (0, 2) or (code == 1 and text is None):  # a run that diverged was said by rank 0
                    break
                if restart < max_restarts:
                    attempts = f"{restart + 1} of {max_restarts}"
                    say(f"starting again from the last checkpoint: {attempts}", sys.stderr)
        unsaved = programs.killed or (code in (1, FAULT) and not (folder / "summary.json").exists())
        if unsaved and any((folder / "checkpoints").glob("step-*")):
            again = status.command(folder, n)
            say(f"Resume from the last checkpoint with: {again}", sys.stderr)
        return code
    finally:
        names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        nothing = names == {"ranks", LOCK} or (new_folders and names == {"ranks"})  # no run came of it
        if nothing and not any((folder / "ranks").glob("*.error*")):
            shutil.rmtree(folder / "ranks")
            for p in new_folders:
                with contextlib.suppress(OSError):  # not empty
                    p.rmdir()


def attempt(
    programs: Programs, n: int, command: list[str], folder: Path, restart: int, elastic: Layout | None = None
) -> tuple[int, str | None]:
    """Start the workers once and wait for their end. (The exit code of the whole, what to tell the user.) elastic: of
    replicas that come and go: `launch.replicas`."""
    from torch.distributed import TCPStore

    try:
        status.clear(folder)
    except OSError as e:
        why = f"cannot write there ({e.strerror})"
        raise UserError(f"log.dir={folder}: {why}. Set log.dir to a folder you may write.") from None
    # the workers meet here: the port is taken from the start, and the memory is of this attempt alone
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> subprocess.Popen:
        """Rank 0's output is this process's; of the others, standard error is kept. Of replicas that come and go any
        may become rank 0."""
        with open(status.log_path(folder, rank) if rank else os.devnull, "ab") as log:
            streams = {"stdout": None if elastic else subprocess.DEVNULL, "stderr": log} if rank else {}
            return start_program(command, environment_of(rank, n, store.port, restart), **streams)

    with programs.running(functools.partial(start, rank) for rank in range(n)) as processes:
        if elastic:
            replicas.watch(programs, start, folder, store, elastic.max_deaths, needed(elastic))
        codes = programs.wait()
        if elastic and any(replicas.diverged(folder, number, code) for number, code in codes.items()):
            return 1, None
        if elastic and 0 in codes.values():
            return 0, None
        text = status.diagnose(folder, n, codes) if set(codes.values()) != {0} else None
    return outcome(folder, codes, text) if any(process.returncode for process in processes) else (0, None)


def environment_of(rank: int, n: int, port: int, restart: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, limits.processors() // n)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "PYTHONUNBUFFERED": "1",
        status.PARENT: str(os.getpid()),
        status.COMMAND: status.typed("train") or "",
    }


def outcome(folder: Path, codes: dict[int, int | None], text: str | None) -> tuple[int, str | None]:
    """(The exit code of the whole, what to tell the user.) text: the diagnosis."""
    records = [status.read(folder, rank) for rank in codes]
    if set(codes.values()) <= {1, None} and all(r is not None and r.what == "done" for r in records):
        return 1, None  # the run came to its end, and diverged
    exit_codes = status.with_word_left(folder, codes)
    faulty = status.died(folder, exit_codes)
    first, code = (faulty[0], exit_codes[faulty[0]]) if faulty else (0, 1)
    if code == 2:
        return 2, None if exit_codes[0] == 2 else mistake(folder, first)
    if code == FAULT:
        # rank 0, which writes no log, has said it on standard error
        printed = codes[0] == FAULT and not status.tail(status.log_path(folder, first))
        return FAULT, None if printed else text
    return 1, text


def mistake(folder: Path, rank: int) -> str:
    """What a rank other than 0 said of a user's mistake."""
    log, error = status.log_path(folder, rank), status.error_path(folder, rank)
    lines = status.tail(log) or status.tail(error)[-1:]
    errors = (line.removeprefix("error:").strip() for line in reversed(lines) if line.startswith("error:"))
    message = next(errors, "\n".join(lines))
    return f"rank {rank} on {status.host()}: {message}"
