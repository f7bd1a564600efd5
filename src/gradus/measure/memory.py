"""Where the memory goes: what the model's state holds, and the peak of any piece of work."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.torch_private import memory_id

MARK = "gradus/"  # how ranges that `Timeline` shall find are named


def component_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes of `weights` (buffers too), `gradients` and `optimizer` state as they are now; what is shared counts
    once."""
    weights = [*model.parameters(), *model.buffers()]
    state = (
        []
        if optimizer is None
        else [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    )
    return {
        "weights": sum(storages(weights).values()),
        "gradients": sum(storages(p.grad for p in model.parameters() if p.grad is not None).values()),
        "optimizer": sum(storages(state).values()),
    }


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory behind tensors, of a DTensor this process's part → its bytes: two that share it count once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return {memory_id(t): t.untyped_storage().nbytes() for t in local}


class Timeline:
    """On a CPU: every allocation within `with Timeline() as timeline:`, and its release, in bytes of tensor memory
    since the start.

    PyTorch keeps no count of a CPU's memory, but its profiler sees every change. Name places on the time line with
    `mark(name)`.
    """

    def __enter__(self) -> Timeline:
        # the profiler's library tells standard error of each start and stop
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        with torch.profiler.record_function(MARK + name):
            pass

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        events = self.profile.profiler.kineto_results.events()
        cpu = torch.autograd.DeviceType.CPU
        self.changes = sorted(
            (e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type() == cpu
        )
        self.marks = sorted((e.start_ns(), e.name().removeprefix(MARK)) for e in events if e.name().startswith(MARK))

    def phases(self) -> list[tuple[str, int, int]]:
        """(name of the mark that ends a phase, bytes allocated there, peak bytes since the mark before); "end" closes
        the last."""
        rows, now, peak, changes = [], 0, 0, iter([*self.changes, (float("inf"), 0)])
        at, change = next(changes)
        for until, name in [*self.marks, (float("inf"), "end")]:
            while at < until:
                now += change
                peak = max(peak, now)
                at, change = next(changes)
            rows.append((name, now, peak))
            peak = now
        return rows
