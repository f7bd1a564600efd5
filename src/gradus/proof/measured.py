"""What a step takes of memory, measured while it runs."""

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
    """Bytes by name, once the step within is done: weights, gradients (all of them, when the optimizer steps), optimizer, allocated (the
    peak), rest (the difference); on CUDA also reserved, and device: what all processes have of the GPU."""
    device, found, gradients, own = trainer.device, {}, {}, trainer.precision.step

    def step(optimizer: Any, bad: Tensor) -> None:
        gradients.update(storages(h.local.grad for h in trainer.parallel.local_parameters if h.local.grad is not None))
        own(optimizer, bad)

    with replaced(trainer.precision, "step", step):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin_peak(device)
            yield found
            torch.cuda.synchronize(device)
            found["allocated"] = torch.cuda.max_memory_allocated(device)
            found["reserved"] = torch.cuda.max_memory_reserved(device)
            free, whole = torch.cuda.mem_get_info(device)
            found["device"] = whole - free
        else:
            held = alive(micro_batches)
            with Timeline() as timeline:
                yield found
            if isinstance(trainer.parallel.model, nn.parallel.DistributedDataParallel):
                held |= gradients  # its buckets, which are there between steps too
            found["allocated"] = sum(held.values()) + max(peak for *_, peak in timeline.phases())
    state = component_bytes(trainer.parallel.part, trainer.optimizer) | {"gradients": sum(gradients.values())}
    found |= {**state, "rest": found["allocated"] - sum(state.values())}


def alive(micro_batches: list[Batch]) -> dict[int, int]:
    """Storage → bytes, on a CPU: of all tensors now whose memory PyTorch allocated itself (arrays of NumPy's and files that are mapped are
    others'), and of the step's batch."""
    found = storages(v for batch in micro_batches for v in batch.values() if isinstance(v, Tensor))
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.resizable():
                found[torch_private.storage_id(storage)] = storage.nbytes()
    return found
