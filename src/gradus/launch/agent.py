"""torchrun's elastic agent for workers of this machine: where they write, what they hear, how long they may hang."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters

from gradus.parallel import status
from gradus.torch_private import worker_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # passed on to the workers


class Signals:
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


@dataclasses.dataclass(frozen=True)
class Workers:
    """What all attempts have in common. timeout, grace: see `local.run`."""

    n: int
    folder: Path
    timeout: float
    grace: float
    signals: Signals


class Logs(LogsSpecs):
    """Rank 0's output is this process's; of the others, standard error is kept. Also sets the workers' environment."""

    def __init__(self, workers: Workers, restart: int):
        super().__init__()
        self.workers, self.restart = workers, restart

    @property
    def root_log_dir(self) -> str:
        return str(self.workers.folder / "ranks")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        n = self.workers.n
        threads = max(1, len(os.sched_getaffinity(0)) // n) if hasattr(os, "sched_getaffinity") else 1
        for environment in envs.values():
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self.restart)
            environment["TORCHELASTIC_MAX_RESTARTS"] = str(self.restart)
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            environment["PYTHONUNBUFFERED"] = "1"
            environment[status.PARENT] = str(os.getpid())
        out = {r: "" if r == 0 else os.devnull for r in range(n)}
        error = {r: "" if r == 0 else str(status.log_path(self.workers.folder, r)) for r in range(n)}
        return LogsDest(out, error, {}, {}, dict.fromkeys(range(n), os.devnull), os.devnull, os.devnull)


class Agent(LocalElasticAgent):
    """Where one worker dies, the others get `grace` to notice and to say where they waited, before they are killed.

    codes: rank → exit code, None for one that has not ended. text: what went wrong, once it is known.
    """

    def __init__(self, spec: WorkerSpec, workers: Workers, restart: int):
        super().__init__(spec, Logs(workers, restart))
        self.workers, self.signals = workers, workers.signals
        self.processes: dict = {}
        self.codes: dict[int, int | None] = {}
        self.deadline: float | None = None
        self.text: str | None = None

    def _start_workers(self, worker_group):
        started = super()._start_workers(worker_group)
        self.processes = worker_processes(self)
        self.signals.receiver = self.send
        self.signals.take()
        for number in self.signals.came[:1]:
            self.send(number)
        return started

    def send(self, number: int) -> None:
        """Pass a signal on; a second one shortens the time that the workers have to end."""
        wait = self.workers.timeout if len(self.signals.came) == 1 else self.workers.grace
        self.deadline = time.monotonic() + wait
        for process in self.processes.values():
            _kill(process, number)

    def _monitor_workers(self, worker_group):
        self.codes = {rank: process.poll() for rank, process in self.processes.items()}
        if any(self.codes.values()) and self.deadline is None:
            self.deadline = time.monotonic() + self.workers.grace
        if None in self.codes.values() and (self.deadline is None or time.monotonic() < self.deadline):
            # not asked of the agent, which may see an end that `codes` does not have yet
            return RunResult(state=WorkerState.HEALTHY)
        if self.deadline is not None:
            if self.text is None and any(code != 0 for code in self.codes.values()):
                self.text = status.diagnose(self.workers.folder, self.workers.n, self.codes)
            self.end()
        return super()._monitor_workers(worker_group)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                _kill(process, signal.SIGKILL)
                process.wait(30)


def _kill(process, number: int) -> None:
    """Send a signal to a worker and all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def run_once(workers: Workers, command: list[str], restart: int) -> Agent:
    """Start the workers, wait for their end, and return the agent that has watched them."""
    # The workers meet in the agent's own store: its port is taken from the start, its memory is of this attempt alone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
    rendezvous = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint="127.0.0.1:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1,
            local_addr="127.0.0.1", timeout=60,
        )
    )  # fmt: skip
    spec = WorkerSpec(
        role="gradus",
        local_world_size=workers.n,
        entrypoint=command[0],
        args=tuple(word.replace("$", "$$") for word in command[1:]),  # the agent takes $ for a name of its own
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
    )
    agent = Agent(spec, workers, restart)
    try:
        agent.run()
    except SignalException as e:  # between the agent's handlers and ours
        workers.signals.came.append(e.sigval)
    finally:
        workers.signals.receiver = None
        agent.end()
        rendezvous.shutdown()
    return agent
