"""The work of one training step on a device: `engine` composes it from traced profiles, `step` turns it into seconds.

Units: bytes, floating-point operations, seconds. One multiply-add is two operations.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeVar

Target = Literal["cpu", "cuda"]  # what kind of device a step is planned for
Kind = Literal["matmul", "attention", "memory"]
Phase = Literal["forward", "backward", "recompute", "optimizer"]

# The components of memory; one set of names in the plan, in the measurement and in the report (`memory/<component>`).
COMPONENTS = {
    "weights": "parameters and buffers as this device holds them",
    "gradients": "gradients as this device holds them, buckets of DDP included",
    "optimizer": "the optimizer's state",
    "activations": "what the forward pass keeps for the backward pass",
    "logits": "logits and what the loss makes of them",
    "gathered": "weights gathered temporarily (FSDP), casts kept by autocast, a head's gradient (layout.loss=chunked)",
    "communication": "buffers of collectives",
    "transient": "everything else alive at the peak: intermediate results, the optimizer's temporaries",
}


class Op(NamedTuple):
    """One kind of operation on one device, `count` times.

    shape: of a matmul (batch, m, n, k): `batch` products of m × k by k × n; of attention (batch, heads, queries, keys,
    head_dim of keys, of values); of memory-bound operations (), as `bytes` alone counts.
    """

    kind: Kind
    name: str  # aten's or a plain name: "addmm", "layer_norm", "adamw"
    dtype: str  # in which it computes: fp32, tf32, bf16, fp16, fp8
    phase: Phase
    flops: float  # of one; what the device does (a causal kernel that skips half counts half)
    bytes: float  # of one, read and written
    shape: tuple[int, ...] = ()
    count: float = 1  # type: ignore[assignment]  # in place of a tuple's method
    launches: float = 1  # kernels per operation
    stage_only: bool = False  # a single stage of a pipeline does it


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind along one axis of the layout, of one device in one optimizer step."""

    axis: str  # replicate, shard, tensor, sequence, pipeline, context, expert, control
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    payload: float  # bytes of one call; of gathers and scatters the whole that is gathered or scattered
    calls: float  # per step, over all micro-batches
    group: int  # ranks that take part
    stride: int = 1  # between neighbouring ranks of the group: it tells which links they share
    phase: Phase = "backward"
    hidden_by: Literal["", "forward", "backward", "both"] = ""  # the computing that can hide it; "": it is exposed

    @property
    def sent(self) -> float:
        """Bytes that this device sends per step in a bandwidth-optimal ring (Patarasuk & Yuan 2009)."""
        part = (self.group - 1) / self.group
        return self.payload * self.calls * {"all_reduce": 2 * part, "send": 1.0}.get(self.kind, part)


@dataclasses.dataclass
class Work:
    """One optimizer step of the busiest device: the stage that takes longest."""

    micro: list[Op]  # of one micro-batch on this stage
    step: list[Op]  # once per step: optimizer, norm, clipping
    transfers: list[Transfer]
    micro_batches: int = 1  # of a device, per step
    stages: int = 1  # of the pipeline
    virtual: int = 1  # interleaved stages per device
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved, zero_bubble
    samples: float = 0  # of the whole step, over all devices
    tokens: float = 0  # of the whole step, over all devices, padding included
    # of the whole step, over all devices, for comparison with published figures: without
    # recomputation, with attention's full matrix (Chowdhery et al. 2022)
    model_flops: float = 0
    data_bytes: float = 0  # of a device's batch, copied from host to device
    software: str = "gradus"  # the one with fitted parameters: gradus, megatron, mosaic


class OpKey(NamedTuple):
    """What tells an operation of a trace from another: alike ones are counted. Fields as `Op`'s."""

    scope: str  # micro: of a micro-batch; step: once per step
    kind: str
    name: str
    dtype: str
    phase: str  # loss is one of its own here
    flops: float
    bytes: float
    shape: tuple[int, ...]


class TransferKey(NamedTuple):
    """As OpKey, of a collective. Fields as `Transfer`'s."""

    axis: str
    kind: str
    payload: float
    group: int
    stride: int
    phase: str
    hidden_by: str


OpCounts = dict[OpKey, float]
TransferCounts = dict[TransferKey, float]
K = TypeVar("K")


def op_of(key: OpKey, count: float, *, tf32: bool = False, phase: str | None = None) -> Op:
    """tf32: the layout computes fp32 products in tf32. phase: in place of the key's own."""
    dtype = "tf32" if tf32 and key.dtype == "fp32" and key.kind == "matmul" else key.dtype
    phase = phase or ("forward" if key.phase == "loss" else key.phase)
    return Op(key.kind, key.name, dtype, phase, key.flops, key.bytes, key.shape, count)


def transfer_of(key: TransferKey, calls: float) -> Transfer:
    return Transfer(key.axis, key.kind, key.payload, calls, *key[3:])


def add_counts(total: dict[K, float], counts: dict[K, float], times: float = 1) -> None:
    for key, count in counts.items():
        total[key] = total.get(key, 0) + count * times


def memory_op(name: str, width: int, phase: str, nbytes: float) -> OpKey:
    """Of an operation bound by memory. width: bytes of an element."""
    return OpKey("micro", "memory", name, "bf16" if width == 2 else "fp32", phase, 0.0, nbytes, ())
