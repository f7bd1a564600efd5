"""What travels between processes, counted as it is called: every collective, its payload, and what this process sends
for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradus.torch_private import TorchDispatchMode, group_of, schema, tree_leaves

# collective → what a process of n sends for a payload of one byte by the bandwidth-optimal ring. The payload of gathers
# and scatters is the whole that is gathered or scattered.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


def collective(operator: str) -> str | None:
    """The collective that an operator of PyTorch's is: `_allgather_base_`, `all_gather_into_tensor_out` → all_gather.
    None: it sends nothing."""
    plain = (
        operator.strip("_")
        .replace("allgather", "all_gather")
        .replace("allreduce", "all_reduce")
        .replace("alltoall", "all_to_all")
    )
    return next((name for name in _SENT if plain.startswith(name)), None)


@dataclasses.dataclass
class Counted:
    """Of one kind of collective: how often, payload in bytes, and bytes that this process sends."""

    calls: int = 0
    payload: int = 0
    sent: float = 0.0


class Traffic(TorchDispatchMode):
    """While active, counts the collectives that this process calls, in forward and backward passes alike, by name, in
    `.by_kind`. Code that does not go through PyTorch (MPI) counts its own with `Traffic.now`."""

    now: Traffic | None = None

    def __init__(self):
        super().__init__()
        self.by_kind: dict[str, Counted] = {}
        self.parts = False  # what is called now is a part of a collective that has been counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what DTensor makes of it comes by here again, its own collectives among it
        out = function(*args, **(kwargs or {}))
        namespace, name = schema(function).name.split("::")
        kind = collective(name) if namespace in ("c10d", "_c10d_functional") else None
        if kind is not None and not self.parts:
            self.count(kind, payload_of(kind, args, out), dist.get_world_size(group_among(args, kwargs or {})))
        return out

    def count(self, kind: str, payload: int, n: int) -> None:
        """One call of a collective among n processes."""
        counted = self.by_kind.setdefault(kind, Counted())
        counted.calls += 1
        counted.payload += payload
        counted.sent += _SENT[kind](n) * payload

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, and its collectives are counted as it runs."""
        return True

    @classmethod
    @contextlib.contextmanager
    def as_one(cls, kind: str, payload: int, n: int) -> Iterator[None]:
        """The calls within are one such collective among n processes."""
        if (now := cls.now) is not None:
            now.count(kind, payload, n)
            now.parts = True
        try:
            yield
        finally:
            if now is not None:
                now.parts = False

    def __enter__(self):
        Traffic.now = self
        return super().__enter__()

    def __exit__(self, *error):
        Traffic.now = None
        return super().__exit__(*error)

    @property
    def sent(self) -> float:
        """Bytes that this process sends, all kinds together."""
        return sum(c.sent for c in self.by_kind.values())


def payload_of(kind: str, args: tuple, out: Any) -> int:
    """Bytes of a collective of this kind: of gathers and scatters the whole, which is their largest argument or their
    result."""
    values = args[:1] if kind == "all_reduce" else (*args, out)
    return max((sum(t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor)) for value in values), default=0)


def group_among(args: tuple, kwargs: dict) -> dist.ProcessGroup | None:
    """The group among the arguments of a collective operator; None where it is of all processes."""
    return next((group for value in (*args, *kwargs.values()) if (group := group_of(value)) is not None), None)
