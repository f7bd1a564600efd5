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
from gradus.patch import replaced
from gradus.train.clock import begin_peak
from gradus.train.loop import Trainer

Batch = dict[str, Any]


@contextlib.contextmanager
def memory_of_step(trainer: Trainer, micro_batches: list[Batch]) -> Iterator[dict[str, int]]:
    """Bytes by name, complete once the step within is done: weights, gradients (all of them, when the optimizer steps),
    optimizer, allocated (the peak), rest (the difference); on CUDA also reserved, and device: what all processes have
    of the GPU."""
    memory: dict[str, int] = {}
    gradients: dict[int, int] = {}
    optimizer_step = trainer.precision.step

    def step(optimizer: Any, bad: Tensor) -> None:
        parameters = trainer.parallel.local_parameters
        gradients.update(storages(p.local.grad for p in parameters if p.local.grad is not None))
        optimizer_step(optimizer, bad)

    with replaced(trainer.precision, "step", step):
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
            begin_peak(trainer.device)
            yield memory
            memory |= _cuda_peaks(trainer.device)
        else:
            storage_bytes = allocated_storages(micro_batches)
            with Timeline() as timeline:
                yield memory
            if isinstance(trainer.parallel.model, nn.parallel.DistributedDataParallel):
                storage_bytes |= gradients  # its buckets, which are there between steps too
            memory["allocated"] = sum(storage_bytes.values()) + max(peak for *_, peak in timeline.phases())
    state = component_bytes(trainer.parallel.part, trainer.optimizer) | {"gradients": sum(gradients.values())}
    memory |= {**state, "rest": memory["allocated"] - sum(state.values())}


def _cuda_peaks(device: torch.device) -> dict[str, int]:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated": allocated, "reserved": reserved, "device": total - free}


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
