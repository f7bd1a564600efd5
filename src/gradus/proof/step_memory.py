"""The memory that a step takes, measured while it runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradus import torch_private
from gradus.measure.memory import Timeline, component_bytes, storages
from gradus.parallel.observe import Observer
from gradus.train.clock import begin_peak
from gradus.train.loop import Trainer

Batch = dict[str, Any]


@contextlib.contextmanager
def memory_of_step(trainer: Trainer, micro_batches: list[Batch]) -> Iterator[dict[str, int]]:
    """Bytes by name, complete once the step within is done: weights, gradients (all of them, when the optimizer steps),
    optimizer (an outer one too), what `peak_memory_of` measures, and rest (the difference)."""
    gradients: dict[int, int] = {}

    class Gradients(Observer):
        def step(self, before: bool) -> None:
            if before:
                local = (p.local.grad for p in trainer.parallel.local_parameters)
                gradients.update(storages(grad for grad in local if grad is not None))

    before = allocated_storages(micro_batches)
    with trainer.parallel.observed(Gradients()), peak_memory_of(trainer.device, before) as memory:
        yield memory
        if isinstance(trainer.parallel.model, nn.parallel.DistributedDataParallel):
            before |= gradients  # its buckets, which are there between steps too
    state = component_bytes(trainer.parallel.part, trainer.optimizer) | {"gradients": sum(gradients.values())}
    if local_updates := trainer.parallel.local_updates:
        state["optimizer"] += sum(storages(local_updates.kept()).values())
    memory |= {**state, "rest": memory["allocated"] - sum(state.values())}


@contextlib.contextmanager
def peak_memory_of(device: torch.device, before: dict[int, int]) -> Iterator[dict[str, int]]:
    """Bytes by name, complete after the block: allocated, of tensors at the peak; on CUDA also reserved, and device:
    what all processes have of the GPU. before: of a CPU, storage → bytes that are there already."""
    memory: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        begin_peak(device)
        yield memory
        torch.cuda.synchronize(device)
        memory["allocated"] = torch.cuda.max_memory_allocated(device)
        memory["reserved"] = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        memory["device"] = total - free
    else:
        with Timeline() as timeline:
            yield memory
        memory["allocated"] = sum(before.values()) + max((peak for *_, peak in timeline.phases()), default=0)


def allocated_storages(micro_batches: list[Batch]) -> dict[int, int]:
    """Storage → bytes, on a CPU: of all tensors now whose memory PyTorch allocated itself (arrays of NumPy's and files
    that are mapped are others'), and of the step's batch."""
    storage_bytes = storages(v for batch in micro_batches for v in batch.values() if isinstance(v, Tensor))
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.resizable():
                storage_bytes[torch_private.storage_id(storage)] = storage.nbytes()
    return storage_bytes
