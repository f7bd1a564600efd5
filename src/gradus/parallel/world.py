"""Which process this is, of how many: found in the environment that torchrun, mpirun or srun left, joined, and left
cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing.util
import os
import random
import re
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradus.errors import EnvironmentFault, UserError, need
from gradus.parallel.device import pick_device
from gradus.recipe.schema import Layout
from gradus.torch_private import default_store, quiet_redistribution


@dataclasses.dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, and `local_rank` of `local_size` on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    address: str | None = None  # where rank 0 listens
    port: int | None = None
    newcomer: bool = False  # to a run of replicas that is under way; no member yet
    groups: tuple[dist.ProcessGroup, ...] = ()  # of split replicas that come and go: across them, and within its own

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all processes."""
        return self.rank == 0 and not self.newcomer


class Launcher(NamedTuple):
    """The environment variables of a launcher for rank, size, rank on this host and processes on this host."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# Looked through from the top: torchrun or mpirun inside srun are themselves. A batch script of Slurm has SLURM_PROCID
# too, but no step. srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but not Hydra's MPI_LOCALRANKID. MPICH and Intel MPI
# both start by Hydra.
LAUNCHERS = (
    Launcher("replicas", "GRADUS_REPLICA", "GRADUS_REPLICAS", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # one job each
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # asks PyTorch for pages of 2 MB; it reads this at its first tensor
PORTS = range(20_000, 32_768)  # below those that Linux assigns by itself, to any connection at any moment


def find(environment: Mapping[str, str] = os.environ) -> World:
    """The world that a launcher has described in the environment; a world of one process where none has. Raises
    UserError where the description is incomplete."""
    half = None
    for launcher in LAUNCHERS:
        missing = [name for name in launcher[1:] if name not in environment]
        if not missing:
            return _described(environment, launcher)
        if launcher.rank not in missing and launcher.size not in missing and environment[launcher.size] != "1":
            text = f"{launcher.rank} and {launcher.size} are set, but not {missing[0]}"
            half = half or UserError(f"{text}. Set it too, or unset {launcher.rank}.")
    if half:
        raise half
    return World()


def _described(environment: Mapping[str, str], launcher: Launcher) -> World:
    try:
        rank, size, local_rank = (int(environment[name]) for name in launcher[1:4])
        if not 0 <= rank < size:
            raise ValueError(f"{launcher.rank}={rank} is not below {launcher.size}={size}")
        if launcher.name == "replicas":  # each of as many processes as its job has
            parts = int(environment.get("WORLD_SIZE", 1))
            rank, size = rank * parts + int(environment.get("RANK", 0)), size * parts
        local_size = _local_size(environment, launcher)
        address, port = (None, None) if size == 1 else _meeting_point(environment, launcher, size, local_size)
    except ValueError as e:
        text = f"{launcher.name}: its environment is inconsistent ({e}). Start again, or unset {launcher.rank}."
        raise UserError(text) from None
    return World(rank, size, local_rank, local_size, launcher.name, address, port)


def _local_size(environment: Mapping[str, str], launcher: Launcher) -> int:
    text = environment[launcher.local_size]
    if launcher.name != "Slurm":
        return int(text)
    counts = []  # 2(x3),1: two tasks on each of three nodes, one on the fourth
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]


def _meeting_point(environment: Mapping[str, str], launcher: Launcher, size: int, local_size: int) -> tuple[str, int]:
    """Where the processes connect: MASTER_ADDR and MASTER_PORT, else the host of rank 0, at a port computed from the
    job's name."""
    if launcher.name == "replicas":
        host, _, number = environment.get("GRADUS_STORE", "").rpartition(":")
        if not host or not number.isdigit():
            raise ValueError("GRADUS_STORE is to be HOST:PORT, where python -m gradus.parallel.quorum PORT runs")
        return host, int(number)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address and local_size == size:
        address = "127.0.0.1"
    elif not address and launcher.name == "Slurm":
        address = first_host(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    elif not address:
        options = {"Open MPI": "-x MASTER_ADDR=HOST", "Hydra": "-genv MASTER_ADDR HOST"}
        text = f"{launcher.name}: {size} processes on several hosts, and the host of rank 0 is not known"
        raise UserError(f"{text}. Name it with {options.get(launcher.name, 'MASTER_ADDR=HOST')}.")
    job = zlib.crc32(_job(environment, launcher, local_size == size).encode())  # the same for all processes of a job
    return address, int(port or PORTS[job % len(PORTS)])


def _job(environment: Mapping[str, str], launcher: Launcher, one_host: bool) -> str:
    """What distinguishes this job from others on the same host; equal for all of its processes."""
    if launcher.name == "Slurm":
        return environment.get("SLURM_JOB_ID", "") + "." + environment.get("SLURM_STEP_ID", "")
    if launcher.name == "Hydra":
        return _hydra() if one_host else ""
    return environment.get("PMIX_NAMESPACE" if launcher.name == "Open MPI" else "TORCHELASTIC_RUN_ID", "")


def _hydra() -> str:
    """The process that started this job's processes on this host: Hydra's environment names no job."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
        except OSError:  # not Linux
            break
        if name.startswith("hydra"):
            return str(pid)
        pid = int(rest.split()[1])
    return str(os.getppid())


def free_port() -> int:
    """A port where nothing listens on this host. Other programs may take it, but no mere connection."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port
    raise UserError(f"{socket.gethostname()}: no free port from {PORTS[0]} to {PORTS[-1]}. Stop what listens there.")


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: gpu[07-09,11],login1 → gpu07; rack[1-2]n[01-16] → rack1n01."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def meet(world: World, layout: Layout) -> None:
    """`join`, as the layout has it."""
    join(world, open_kind(layout), layout.timeout)


def open_kind(layout: Layout) -> str:
    """The kind of device. Where weights are sharded on a CPU, PyTorch is asked for large pages: here, since the
    processes have made no tensor yet (`machine.tune_memory`)."""
    device = pick_device(layout.device).type
    if device == "cpu" and layout.shard > 1:
        os.environ.setdefault(LARGE_PAGES, "1")
    return device


def join(world: World, device: str = "cpu", timeout: float = 600.0) -> None:
    """Join the process group (gloo on a CPU; NCCL on GPUs with gloo beside it for what lies on the host). `timeout` in
    seconds. Raises UserError where the other processes cannot be reached."""
    if world.size == 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        # a launcher may show each process one GPU only
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    limit = datetime.timedelta(seconds=timeout)
    quiet_redistribution()
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            dist.init_process_group(backend, timeout=limit)
        else:
            meet = datetime.timedelta(seconds=min(timeout, 300))
            store = dist.TCPStore(world.address, world.port, world.size, is_master=world.first, timeout=meet)
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    except (RuntimeError, ValueError) as e:
        reason, host = str(e).strip().splitlines()[0], socket.gethostname()
        if "EADDRINUSE" in reason:
            text = f"{host}: port {world.port} is in use. Start again, with MASTER_PORT set to a free one."
            raise UserError(text) from None
        text = f"rank {world.rank} on {host}: {world.size - 1} other processes were not reached at "
        text += f"{world.address}:{world.port} ({reason}). Were all started? Is MASTER_ADDR reachable from here?"
        raise EnvironmentFault(text) from None


@contextlib.contextmanager
def one_first(world: World) -> Iterator[None]:
    """Rank 0 of this host runs this part before the others, which then use what it has made. That may take hours (to
    tokenize a large text), longer than any collective waits."""
    if not joined() or dist.get_backend() == "fake":
        yield
        return
    store, done = default_store(), f"gradus/made/{socket.gethostname()}"
    if world.local_rank:
        store.wait([done], datetime.timedelta(days=7))
    yield
    if not world.local_rank:
        store.set(done, "")


def from_first(value: Any) -> Any:
    """Rank 0's value, on every process."""
    return gathered(value)[0]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every process of the group, by rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def joined() -> bool:
    """Whether this is one of several processes that have met."""
    return dist.is_available() and dist.is_initialized()


def mistake(text: str) -> str | None:
    """What this process says of a user's mistake: rank 0 says it, another only what rank 0 does not say (then with its
    own name)."""
    rank, mine = dist.get_rank(), f"gradus/mistake/{zlib.crc32(text.encode())}"
    store = default_store()
    with contextlib.suppress(RuntimeError):
        if rank == 0:
            store.set(mine, "said")
            return text
        for _ in range(10):
            if store.check([mine]):
                return None
            time.sleep(0.1)
    return f"rank {rank} on {socket.gethostname()}: {text}"


def load_mpi(what: str) -> ModuleType:
    """mpi4py's MPI, which `what` asks for. Raises UserError where the package is missing, or the MPI library that it
    loads."""
    need("mpi4py", "mpi", what)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # its wheels bring no MPI library and look for one when they are imported
        text = f"{what}: mpi4py is installed, but no MPI library ({str(e).splitlines()[0]}). Install one (Debian: "
        raise UserError(f"{text}apt-get install openmpi-bin) and start with mpirun -n 2 gradus ...") from None
    return MPI


def leave(code: int = 0) -> NoReturn:
    """End this process at once, after the others are done too when all went well, or when all were stopped by SIGTERM
    or SIGUSR1.

    mpirun and srun terminate the others as soon as one process ends with a code; that must not change their own codes
    any more. Interpreters that shut down while gloo's threads still hold Python objects abort now and then, so nothing
    is finalised but what multiprocessing made.
    """
    if dist.is_initialized() and code in (0, 128 + signal.SIGTERM, 128 + signal.SIGUSR1):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(RuntimeError):  # the others are gone: they ended otherwise
            dist.barrier()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and code == 0 and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # else mpirun reports an abnormal end
    multiprocessing.util._run_finalizers(0)  # named semaphores (tqdm's), of which a warning would else be printed
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
