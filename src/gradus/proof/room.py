"""What a process may use of this machine, what the plan says that it needs, and with which settings that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster, Device
from gradus.parallel.mesh import DATA, sizes
from gradus.parallel.processes import uninterrupted
from gradus.plan.engine import Memory, plan_memory, traced_work
from gradus.plan.show import size
from gradus.plan.step import step_time
from gradus.recipe.schema import Recipe
from gradus.tasks.base import Task
from gradus.train import machine
from gradus.train.session import Session

TRACES = 12  # of a search along the line; then by halves


@dataclasses.dataclass
class Room:
    budget: int  # bytes a process
    n: int  # processes
    local: int  # of them on this host
    target: str  # cpu, cuda
    device: Device | None  # None: the hardware file does not know it
    resident: int  # bytes that a process has on a host before the model is built
    task: Task | None

    def memory(self, recipe: Recipe) -> Memory:
        """The plan of the largest batch, of the rank that needs most."""
        with uninterrupted():
            return plan_memory(recipe, self.n, target=self.target, task=self.task, resident=self.resident)

    def need(self, recipe: Recipe) -> int:
        """Bytes of the device (of a CPU: of the process) at the peak of the largest batch, on the rank that needs most."""
        return self.memory(recipe).device_total

    def step_time(self, recipe: Recipe) -> float | None:
        """Seconds of a step; None where the device is not known."""
        if self.device is None:
            return None
        with uninterrupted():
            return step_time(traced_work(recipe, self.n, target=self.target, task=self.task), Cluster(self.device, self.n)).total


def room_of(session: Session, local: int | None = None) -> Room:
    """Of the session's processes on this host (local: of so many)."""
    world, kind = session.mesh.world, session.device.type
    local = local or world.local_size
    budget = capacity(session.device) // (local if kind == "cpu" else 1)
    threads = session.recipe.layout.threads or max(1, torch.get_num_threads() * world.local_size // local)
    return Room(budget, world.size, local, kind, device_of(session.device, threads), machine.resident(), session.task)


def device_of(device: torch.device, threads: int) -> Device | None:
    """This device as the hardware file has it; the CPU where it was calibrated with as many threads, coarsely if not otherwise. None: not
    known, so no time is predicted."""
    if device.type == "cuda":
        return hardware.by_driver(torch.cuda.get_device_name(device))
    for name in ("this", coarse_name(threads)):
        with contextlib.suppress(UserError):
            found = hardware.find(name)
            measured = found.measured or {}
            if measured.get("threads", threads) == threads and (found.name == name or "coarse" not in measured):
                return found
    return None


def coarse_name(threads: int) -> str:
    """What a coarse calibration of this machine is called: a file may be of several machines, each with several numbers of threads."""
    return f"{machine.cpu_name()}, coarsely, threads: {threads}"


def capacity(device: torch.device) -> int:
    """Bytes: of a GPU as PyTorch sees it, else of this host, or of this container where it may use less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory, limit = machine.memory_bytes()
    return limit or memory or 0


# ---------------------------------------------------------------- what fits


def ways(recipe: Recipe, n: int) -> int:
    """Among how many processes a batch is dealt out."""
    return math.prod(sizes(recipe.layout, n)[axis] for axis in DATA)


def share_of(recipe: Recipe, n: int, task: Task | None) -> int:
    """Samples of a step that one process takes, at most."""
    samples = recipe.batch.samples
    if samples is None:
        samples = max(len(b) for b in task.plan("train", None, recipe.batch.tokens).epoch(0))
    elif task is not None:
        samples = min(samples, len(task.splits["train"]))
    return -(-samples // ways(recipe, n))


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with other values of these keys in these sections."""
    return recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()})


def with_micro_batch(recipe: Recipe, k: int, n: int, share: int) -> Recipe:
    """The recipe with micro-batches of k samples. More than its share of the batch: the batch grows until each process has k."""
    larger = {"batch": {"samples": k * ways(recipe, n), "tokens": None}} if k > share else {}
    return changed(recipe, layout={"micro_batch": k}, **larger)


def largest_micro_batch(recipe: Recipe, room: Room, limit: int | None = None, need: Callable[[int], int] | None = None) -> int | None:
    """The largest layout.micro_batch whose step fits; None where not even one sample does. limit: where to stop (None: the batch's share).

    What is needed grows nearly linearly with the micro-batch, so the next one to try lies on the line through the last two.
    """
    share, known = share_of(recipe, room.n, room.task), {}
    need = need or (lambda k: room.need(with_micro_batch(recipe, k, room.n, share)))

    def fits(k: int) -> bool:
        known[k] = known.get(k) or need(k)
        return known[k] <= room.budget

    low, high = 0, limit or share  # what fits, and what does not
    if fits(high):
        return high
    guess = high // 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = (low + high) // 2
        near = sorted((k for k in known if k < share or k == limit), key=lambda k: abs(known[k] - room.budget))[:2]
        if len(near) == 2 and len(known) < TRACES and known[near[0]] != known[near[1]]:
            k, other = near
            line = k + (room.budget - known[k]) * (other - k) / (known[other] - known[k])
            guess = math.floor(line) if math.floor(line) > low else low + 1  # below the line first, then the one above it
    return low or None


def fix_of(recipe: Recipe, room: Room, least: int = 0) -> str:
    """The settings with which it fits, or what else would help. Takes some traces. least: bytes that are needed without any activation."""
    for changes in ({}, {"checkpointing": "full"}, {"checkpointing": "full", "precision": "bf16"}):
        if least >= room.budget or any(getattr(recipe.layout, k) == v for k, v in changes.items()):
            continue
        if found := largest_micro_batch(changed(recipe, layout=changes), room):
            return "Set " + " ".join([*(f"layout.{k}={v}" for k, v in changes.items()), f"layout.micro_batch={found}"])
    if room.target == "cuda":
        return "Not even one sample fits: set layout.shard=N over N GPUs or use a smaller model"
    if room.resident >= room.budget:
        return f"Python and its libraries alone take {size(room.resident)} per process: start fewer on this host"
    return "Not even one sample fits: use a smaller model or layout.shard=N over N hosts"
