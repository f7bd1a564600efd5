"""Which process this is, of how many: found in the environment that torchrun, mpirun or srun left, joined, and left cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradus.errors import UserError


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

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0


class Launcher(NamedTuple):
    """The environment variables in which a launcher tells rank, size, rank on this host and processes on this host."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None


# Looked through from the top: torchrun inside srun is torchrun. A batch script of Slurm has SLURM_PROCID too, but no step.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def find(environment: Mapping[str, str] = os.environ) -> World:
    """The world that the environment tells of; without any, this process alone.

    Raises UserError where a launcher has told half of it.
    """
    for launcher in LAUNCHERS:
        if launcher.rank not in environment or launcher.size not in environment:
            continue
        try:
            rank, size = int(environment[launcher.rank]), int(environment[launcher.size])
            local_rank = int(environment.get(launcher.local_rank, rank))
            local_size = _local_size(environment, launcher, size)
        except ValueError as e:
            raise UserError(f"{launcher.name}: its environment makes no sense ({e}). Start again, or unset {launcher.rank}.") from None
        if not 0 <= rank < size:
            raise UserError(f"{launcher.name}: {launcher.rank}={rank} is not below {launcher.size}={size}. Start again, or unset both.")
        address, port = (None, None) if size == 1 else _meeting_point(environment, launcher, size, local_size)
        return World(rank, size, local_rank, local_size, launcher.name, address, port)
    return World()


def _local_size(environment: Mapping[str, str], launcher: Launcher, size: int) -> int:
    told = environment.get(launcher.local_size or "", str(size))
    if launcher.name != "Slurm":
        return int(told)
    counts = []  # 2(x3),1: two tasks on each of three nodes, one on the fourth
    for part in told.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)]


def _meeting_point(environment: Mapping[str, str], launcher: Launcher, size: int, local_size: int) -> tuple[str, int]:
    """Where the processes find each other: MASTER_ADDR and MASTER_PORT, else the first node, at a port that the job's number gives."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address and port:
        return address, int(port)
    if launcher.name == "Slurm":
        job = environment.get("SLURM_JOB_ID", "0") + "." + environment.get("SLURM_STEP_ID", "0")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        address = address or environment.get("SLURM_LAUNCH_NODE_IPADDR") or first_host(nodes)
    elif local_size == size:
        job = next((environment[k] for k in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID", "HYDI_CONTROL_FD") if k in environment), "0")
        address = address or "127.0.0.1"
    else:
        raise UserError(f"{launcher.name} on several hosts: where is rank 0? Add -x MASTER_ADDR=HOST -x MASTER_PORT=29500, with the host of rank 0.")
    return address, int(port or 20_000 + sum(ord(c) * 31**i for i, c in enumerate(job)) % 40_000)


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: gpu[07-09,11],login1 → gpu07."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]


def join(world: World, device: str = "cpu", timeout: float = 600.0) -> None:
    """Meet the other processes (gloo on a CPU; NCCL on GPUs with gloo beside it for what lies on the host). `timeout` in seconds.

    Raises UserError where they cannot be met.
    """
    if world.size == 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    store = dist.TCPStore if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else None
    try:
        if store is None:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        else:
            meeting = store(world.address, world.port, world.size, is_master=world.first, timeout=datetime.timedelta(seconds=min(timeout, 300)))
            dist.init_process_group(backend, store=meeting, rank=world.rank, world_size=world.size, timeout=datetime.timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as e:
        reason = str(e).strip().splitlines()[0]
        raise UserError(
            f"rank {world.rank} on {socket.gethostname()}: the other {world.size - 1} processes were not met at {world.address}:{world.port} ({reason}). "
            "Were all of them started? Is MASTER_ADDR reachable from here?"
        ) from None


def leave(code: int = 0) -> NoReturn:
    """End this process at once, after the others are done too when all went well.

    Interpreters that shut down while gloo's threads still hold Python objects abort now and then, so nothing is finalised.
    """
    if dist.is_initialized() and code == 0:
        with contextlib.suppress(RuntimeError):  # the others are gone: they ended otherwise
            dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
