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
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradus.errors import FAULT, UserError
from gradus.parallel import status
from gradus.torch_private import worker_processes

GRACE = 5.0  # seconds that the other workers have to notice that one has died
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # passed on to the workers


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
    n: int, recipe: str, overrides: list[str], *, max_restarts: int = 0, resume: bool = False, auto_resume: bool = False,
    json_file: str | None = None, force: bool = False,
) -> int:  # fmt: skip
    """`gradus train RECIPE ... --processes n`. A mistake in the recipe is found here, before anything is started."""
    from gradus.parallel.check import validate
    from gradus.parallel.world import World, find
    from gradus.train import resolve
    from gradus.train.log import run_folder
    from gradus.train.precision import enough_devices

    world = find()
    if world.size > 1:
        raise UserError(f"--processes={n}: {world.launcher} started this, as process {world.rank} of {world.size}. Leave it out.")
    _check_counts(n, max_restarts)
    given = resolve.Given(json_file, World(size=n, local_size=n), resume)
    argv = ["train", recipe, *overrides, *(["--json_file", json_file] if json_file else [])]
    argv += ["--force"] if force else []
    argv += ["--resume"] if resume else ["--auto-resume"] if auto_resume else []
    folder = resolve.run_to_resume(recipe, overrides, given) if resume else None
    config = resolve.load(str(folder) if folder else recipe, overrides, given)[0]
    validate(config, n)
    if config.layout.transport == "mpi":
        raise UserError(f"--processes={n} with layout.transport=mpi: MPI's processes are started by mpirun: mpirun -n {n} gradus train ...")
    enough_devices(config.layout.device, n)
    if auto_resume and config.log.dir is None:
        raise UserError("--auto-resume: which run? Set log.dir=FOLDER, the same at every start.")
    with run_folder(config.log, config.name, folder) as folder:
        if not (resume or auto_resume) and (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: there is a run already. Go on with it: {status.command(folder, n)}; or set another log.dir.")
        if not resume and config.log.dir is None:
            argv.append(f"log.dir={folder}")
        again = () if resume or auto_resume else ("--auto-resume",)
        code = run(n, argv, folder=folder, timeout=config.layout.timeout, max_restarts=max_restarts, again=again)
    if code in (1, FAULT) and any((folder / "checkpoints").glob("step-*")):
        print(f"Go on from the last checkpoint with: {status.command(folder, n)}", file=sys.stderr)
    return code


def run(
    n: int, argv: list[str], *, folder: Path, timeout: float, max_restarts: int = 0, command: Sequence[str] = (sys.executable, "-m", "gradus"),
    again: Sequence[str] = (), grace: float = GRACE,
) -> int:  # fmt: skip
    """Run `command + argv` as n workers that meet as ranks 0 to n - 1, and return the exit code of the whole.

    Rank 0 writes straight to this process's output; of the others, standard error goes to `folder`/ranks. When a worker dies or hangs,
    the others are ended and standard error says in one sentence who, where and how; then up to `max_restarts` times all are started
    again, with `again` added to their arguments and TORCHELASTIC_RESTART_COUNT > 0. A user's mistake (exit code 2) is said once and
    starts nothing again; a fault of the machine is `errors.FAULT`, any other error 1.
    Ctrl-C and SIGTERM are passed on; workers have `timeout` seconds to save and end, and the exit code is 128 + the
    signal.
    A second Ctrl-C ends them at once. No worker outlives this process.
    """
    from gradus.train.log import LOCK

    _check_counts(n, max_restarts)
    folder = Path(folder)
    ranks = folder / "ranks"
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # from the deepest up
    try:
        with _quiet(), _Signals() as signals:
            for restart in range(max_restarts + 1):
                outcome = _attempt(n, [*command, *argv, *(again if restart else ())], folder, timeout, grace, restart, signals)
                if outcome.code in (0, 2) or signals.came:
                    break
                if outcome.text:
                    print(f"error: {outcome.text}", file=sys.stderr, flush=True)
                if restart < max_restarts:
                    then = f"starting again from the last checkpoint: {restart + 1} of {max_restarts}"
                    print(then, file=sys.stderr, flush=True)
        if signals.came:
            return outcome.code if outcome.code == 0 else 128 + signals.came[0]
        if outcome.code == 2 and outcome.text:
            print(f"error: {outcome.text}", file=sys.stderr, flush=True)
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


class _Signals:
    """Notes the signals that come while it lasts, and tells `receiver` of each."""

    def __init__(self):
        self.came: list[int] = []
        self.receiver = None
        self.old: dict = {}

    def __enter__(self):
        self.take()
        return self

    def take(self) -> None:
        """Become the handler (again: the agent sets its own when it starts workers)."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self._note)
                self.old.setdefault(number, before)

    def _note(self, number, frame) -> None:
        self.came.append(number)
        if self.receiver is not None:
            self.receiver(number)

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)


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


def _attempt(n: int, command: list[str], folder: Path, timeout: float, grace: float, restart: int, signals: _Signals) -> _Outcome:
    """Start n workers once and wait for their end."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    ranks = folder / "ranks"
    try:
        status.clear(folder)
    except OSError as e:
        raise UserError(f"log.dir={folder}: cannot write there ({e.strerror}). Set log.dir to a folder you may write.") from None
    threads = max(1, len(os.sched_getaffinity(0)) // n) if hasattr(os, "sched_getaffinity") else 1

    class Logs(LogsSpecs):
        """Rank 0's output is this process's; of the others, standard error is kept. Also the last hand on a worker's environment."""

        root_log_dir = str(ranks)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for environment in envs.values():
                environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
                environment["TORCHELASTIC_MAX_RESTARTS"] = str(restart)
                environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
                environment["PYTHONUNBUFFERED"] = "1"
                environment[status.PARENT] = str(os.getpid())
            out = {r: "" if r == 0 else os.devnull for r in range(n)}
            error = {r: "" if r == 0 else str(status.log_path(folder, r)) for r in range(n)}
            return LogsDest(out, error, {}, {}, dict.fromkeys(range(n), os.devnull), os.devnull, os.devnull)

    class Agent(LocalElasticAgent):
        """Where one worker dies, the others get `grace` to notice and to say where they waited, before what is left is killed."""

        deadline: float | None = None
        codes: dict[int, int | None]
        text: str | None = None

        def _start_workers(self, worker_group):
            found = super()._start_workers(worker_group)
            self.processes = worker_processes(self)
            signals.receiver = self.send
            signals.take()
            for number in signals.came[:1]:
                self.send(number)
            return found

        def send(self, number: int) -> None:
            wait = timeout if len(signals.came) == 1 else grace
            self.deadline = time.monotonic() + wait
            for process in self.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)

        def _monitor_workers(self, worker_group):
            self.codes = {rank: process.poll() for rank, process in self.processes.items()}
            if any(self.codes.values()) and self.deadline is None:
                self.deadline = time.monotonic() + grace
            if None in self.codes.values() and (self.deadline is None or time.monotonic() < self.deadline):
                return RunResult(state=WorkerState.HEALTHY)  # not asked of the agent, which may see an end that `codes` does not have yet
            if self.deadline is not None:
                if self.text is None and any(code != 0 for code in self.codes.values()):
                    self.text = status.diagnose(folder, n, self.codes)
                self.end()
            return super()._monitor_workers(worker_group)

        def end(self) -> None:
            for process in self.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait(30)

    # the workers meet in the agent's own store: its port is taken from the start, and its memory is of this attempt alone
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
    run_id = uuid.uuid4().hex
    meeting = RendezvousParameters(
        backend="c10d", endpoint="127.0.0.1:0", run_id=run_id, min_nodes=1, max_nodes=1, local_addr="127.0.0.1", timeout=60
    )  # fmt: skip
    handler = registry.get_rendezvous_handler(meeting)
    # the agent takes a $ in an argument for a name of its own
    arguments = tuple(word.replace("$", "$$") for word in command[1:])
    spec = WorkerSpec(
        role="gradus", local_world_size=n, entrypoint=command[0], args=arguments, rdzv_handler=handler, max_restarts=0, monitor_interval=0.05,
        local_addr="127.0.0.1",
    )  # fmt: skip
    agent = Agent(spec, Logs())
    try:
        agent.run()
    except SignalException as e:  # between the agent's handlers and ours
        signals.came.append(e.sigval)
    finally:
        signals.receiver = None
        if hasattr(agent, "processes"):
            agent.end()
        handler.shutdown()
    if not any(process.poll() for process in agent.processes.values()):
        return _Outcome(0)
    codes = status.with_word_left(folder, agent.codes)
    faulty = status.died(folder, codes)
    if faulty and codes[faulty[0]] == 2:
        return _Outcome(2, None if codes[0] == 2 else _mistake(folder, faulty[0]))
    if faulty and codes[faulty[0]] == FAULT:
        said = agent.codes[0] == FAULT and not status.last_lines(folder, faulty[0])  # by rank 0, which writes no log
        return _Outcome(FAULT, None if said else agent.text)
    return _Outcome(1, agent.text)


def _mistake(folder: Path, rank: int) -> str:
    """What a rank other than 0 said of a user's mistake."""
    lines = status.last_lines(folder, rank) or status.error_lines(folder, rank)[-1:]
    said = next((line.removeprefix("error:").strip() for line in reversed(lines) if line.startswith("error:")), "\n".join(lines))
    return f"rank {rank} on {status.host()}: {said}"
