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
from gradus.hardware import Device
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.process import Memory
from gradus.recipe.axes import data_parallel_size, evaluation_samples
from gradus.recipe.schema import Adapter, Recipe
from gradus.signals import uninterrupted
from gradus.tasks.base import Task
from gradus.text import size
from gradus.train import machine
from gradus.train.session import Session

TRACES = 12  # of a search along the line; then by halves


@dataclasses.dataclass
class MemoryBudget:
    """The memory that each process of a run may use, and what a plan for these processes depends on."""

    available: int  # bytes a process
    processes: int
    local_processes: int  # of them on this host
    target: str  # cpu, cuda
    device: Device | None  # None: the hardware file does not know it
    resident: int  # bytes that a process has on a host before the model is built
    task: Task | None

    def case(self, recipe: Recipe, micro_batches: list[dict[str, Any]] | None = None) -> Case:
        """Of the largest batch, or of these micro-batches."""
        return Case.of(recipe, self.processes, self.target, self.task, micro_batches)

    def memory(self, recipe: Recipe) -> Memory:
        """The plan of the largest batch, of the rank that needs most."""
        with uninterrupted():
            return engine.plan(self.case(recipe), self.resident).memory

    def need(self, recipe: Recipe) -> int:
        """Bytes of the device (of a CPU: of the process) at the peak of the largest batch, on the rank that needs
        most."""
        return self.memory(recipe).device_total


def budget_of(session: Session, local_processes: int | None = None) -> MemoryBudget:
    """The budget of the session's processes, of which `local_processes` share this host (None: as the session's do)."""
    world, kind = session.mesh.world, session.device.type
    local = local_processes or world.local_size
    available = capacity(session.device) // (local if kind == "cpu" else 1)
    threads = session.recipe.layout.threads or max(1, torch.get_num_threads() * world.local_size // local)
    device = device_of(session.device, threads)
    return MemoryBudget(available, world.size, local, kind, device, machine.resident(), session.task)


def powered(processes: int, local_processes: int, kind: str) -> int:
    """How many devices' watts count: GPUs, one a process; or hosts, each with its CPUs."""
    return -(-processes // local_processes) if kind == "cpu" else processes


def device_of(device: torch.device, threads: int) -> Device | None:
    """This device as the hardware file has it; the CPU where it was calibrated with as many threads, coarsely if not
    otherwise. None: not known, so no time is predicted."""
    if device.type == "cuda":
        return hardware.by_driver(torch.cuda.get_device_name(device))
    for name in ("this", coarse_name(threads)):
        with contextlib.suppress(UserError):
            entry = hardware.find(name)
            measured = entry.measured or {}
            if measured and "fits" not in measured:  # written when times were interpolated between points
                continue
            if measured.get("threads", threads) == threads and (entry.name == name or "coarse" not in measured):
                return entry
    return None


def coarse_name(threads: int) -> str:
    """The name of a coarse calibration of this machine. A file may be of several machines, each with several numbers
    of threads."""
    return f"{machine.cpu_name()}, coarsely, threads: {threads}"


def capacity(device: torch.device) -> int:
    """Bytes: of a GPU as PyTorch sees it, else of this host, or of this container where it may use less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory, limit = machine.memory_bytes()
    return limit or memory or 0


# ---------------------------------------------------------------- what fits


def local_batch(recipe: Recipe, processes: int, task: Task | None) -> int:
    """Samples of a step that one process takes, at most."""
    samples = recipe.batch.samples
    if samples is None:
        samples = max(len(batch) for batch in task.plan("train", None, recipe.batch.tokens).epoch(0))
    elif task is not None:
        samples = min(samples, len(task.splits["train"]))
    return -(-samples // data_parallel_size(recipe.layout, processes))


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with other values of these keys in these sections."""
    there = {name: getattr(recipe, name) or Adapter(**sections[name]) for name in sections}  # it alone may be missing
    copies = {name: there[name].model_copy(update=values) for name, values in sections.items()}
    recipe = recipe.model_copy(update=copies)
    return recipe.model_copy(update={"model": recipe.model.trained(recipe.adapter, recipe.train.freeze)})


def with_micro_batch(recipe: Recipe, k: int, processes: int, share: int) -> Recipe:
    """The recipe with micro-batches of k samples. Where k is more than `share`, a process's part of the batch, the
    batch grows until each process has k."""
    samples = k * data_parallel_size(recipe.layout, processes)
    larger = {"batch": {"samples": samples, "tokens": None}} if k > share else {}
    return changed(recipe, layout={"micro_batch": k}, **larger)


def largest_micro_batch(
    recipe: Recipe, budget: MemoryBudget, limit: int | None = None, need: Callable[[int], int] | None = None
) -> int | None:
    """The largest layout.micro_batch whose step fits; None where not even one sample does.

    limit: where to stop (None: the process's part of the batch). need: micro-batch → bytes.
    Bytes grow nearly linearly with the micro-batch, so the next one to try lies on the line through the last two.
    """
    share, needs = local_batch(recipe, budget.processes, budget.task), {}
    need = need or (lambda k: budget.need(with_micro_batch(recipe, k, budget.processes, share)))

    def fits(k: int) -> bool:
        needs[k] = needs.get(k) or need(k)
        return needs[k] <= budget.available

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
        on_line = (k for k in needs if k < share or k == limit)
        nearest = sorted(on_line, key=lambda k: abs(needs[k] - budget.available))[:2]
        if len(nearest) == 2 and len(needs) < TRACES and needs[nearest[0]] != needs[nearest[1]]:
            k, other = nearest
            crossing = math.floor(k + (budget.available - needs[k]) * (other - k) / (needs[other] - needs[k]))
            guess = crossing if crossing > low else low + 1  # below the line first, then the one above it
    return low or None


def largest_evaluation(recipe: Recipe, budget: MemoryBudget) -> int | None:
    """The largest half, quarter, ... of evaluate.batch that fits; None where none does."""
    samples = evaluation_samples(recipe, data_parallel_size(recipe.layout, budget.processes))
    while samples := samples // 2:
        if budget.need(changed(recipe, evaluate={"batch": samples})) <= budget.available:
            return samples
    return None


def suggested_fix(recipe: Recipe, budget: MemoryBudget, least: int = 0) -> str:
    """The settings with which it fits, or what else would help. Takes some traces. least: bytes that are needed
    without any activation."""
    for changes in ({}, {"checkpointing": "full"}, {"checkpointing": "full", "precision": "bf16"}):
        if least >= budget.available or any(getattr(recipe.layout, k) == v for k, v in changes.items()):
            continue
        if micro_batch := largest_micro_batch(changed(recipe, layout=changes, evaluate={"batch": None}), budget):
            keys = {**changes, "micro_batch": micro_batch}
            fix = "Set " + " ".join(f"layout.{key}={value}" for key, value in keys.items())
            stated = recipe.evaluate.batch and budget.need(changed(recipe, layout=keys)) > budget.available
            return f"{fix} evaluate.batch={micro_batch}" if stated else fix
    if recipe.adapter and recipe.adapter.base:  # which layout.shard does not split
        return "Not even one sample fits: use a smaller model"
    if budget.target == "cuda":
        return "Not even one sample fits: set layout.shard=N over N GPUs or use a smaller model"
    if budget.resident >= budget.available:
        resident = size(budget.resident)
        return f"Python and its libraries alone take {resident} per process: start fewer on this host"
    return "Not even one sample fits: use a smaller model or layout.shard=N over N hosts"
