"""Seconds of one training step: operations by the roofline, the bubble of the pipeline, communication that nothing hides, the host."""

from __future__ import annotations

import dataclasses
import math

from gradus.hardware import Cluster
from gradus.plan.collectives import collective_seconds, unknown_links
from gradus.plan.roofline import Parameters, chained, fitted, op_seconds, parameters
from gradus.plan.work import Op, Transfer, Work

HOST_TO_DEVICE = 12e9  # bytes/s, from pinned memory over PCIe 4 (nominal 31e9 one way; what copies of batches reach)


@dataclasses.dataclass
class StepTime:
    """Seconds of a step by part: matmul, attention, memory, launch (the device waits for the host), bubble, optimizer, data, host (the
    same in the optimizer's step, and waiting for the slowest node), comm/<axis> (exposed only). low and high: see `interval`."""

    parts: dict[str, float]
    low: float
    high: float
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bubble_share(schedule: str, stages: int, virtual: int, micro_batches: int) -> float:
    """Idle time of a pipeline by the time of the work: (p-1)/m, divided by v where stages are interleaved (Narayanan et al. 2021); of the
    zero-bubble schedule H1 a third (Qi et al. 2023, table 2, with equal forward, backward and weight-gradient passes)."""
    if stages <= 1:
        return 0.0
    share = (stages - 1) / max(micro_batches, 1)
    if schedule == "interleaved":
        return share / max(virtual, 1)
    if schedule == "zero_bubble":
        return share / 3 / max(virtual, 1)
    return share


@dataclasses.dataclass
class Sums:
    """Seconds of operations: by kind; by phase, what the device takes and what the host takes to launch; and of those that all stages have."""

    kinds: dict[str, float] = dataclasses.field(default_factory=dict)
    phases: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    spread: float = 0.0

    def add(self, other: Sums, times: int, apart: bool = False) -> None:
        """apart: one stage alone does these."""
        for kind, seconds in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds * times
        for phase, (device, host) in other.phases.items():
            found = self.phases.setdefault(phase, [0.0, 0.0])
            found[0] += device * times
            found[1] += host * times
        self.spread += 0.0 if apart else other.spread * times

    def of(self, ops: list[Op], cluster: Cluster, fit: Parameters) -> Sums:
        """With these operations too."""
        for op in ops:
            seconds = op_seconds(op, cluster.device, fit) * op.count
            launching = op.launches * op.count * fit.host * (fit.elementwise if chained(op) else 1.0)
            self.add(Sums({op.kind: seconds}, {op.phase: [seconds, launching]}, seconds), 1, op.stage_only)
        return self


def _hide(hidden: list[tuple[Transfer, float]], room: dict[str, float], fit: Parameters, parts: dict[str, float]) -> None:
    """Adds what computing does not hide of the transfers, and what it loses beside them: first those of one pass, then those of either."""
    for able in (("forward",), ("backward",), ("forward", "backward")):
        among = [(t, seconds) for t, seconds in hidden if (("forward", "backward") if t.hidden_by == "both" else (t.hidden_by,)) == able]
        total, free = sum(seconds for _, seconds in among), sum(room[phase] for phase in able)
        covered = min(total, free)
        for phase in able:
            room[phase] -= covered * room[phase] / free if free > 0 else 0.0
        for t, seconds in among:
            axis = "comm/" + t.axis
            parts[axis] = parts.get(axis, 0.0) + seconds - (1 - fit.contention) * covered * (seconds / total if total else 0.0)


def step_time(work: Work, cluster: Cluster, fit: Parameters | None = None, known: Sums | None = None) -> StepTime:
    """Seconds of one optimizer step of `work` on `cluster`, and an interval.

    A micro-batch takes, phase by phase, the longer of what the device does (operations and the collectives it waits for) and of what the
    host launches. The pipeline's bubble, and the stages' waiting for one another, follow. Collectives with `hidden_by` run beside the
    computing of those phases; what is longer is exposed, and the computing meanwhile is slower by `contention`. known: of operations of a
    micro-batch besides those of `work`.
    """
    notes: tuple[str, ...] = ()
    if fit is None:
        fit, notes = parameters(cluster.device, work.software)
        notes += unknown_links(work.transfers, cluster)
    measured = cluster.device.measured is not None
    m = max(work.micro_batches, 1)
    micro = (known or Sums()).of(work.micro, cluster, fit)
    phases = micro.phases
    waited: dict[str, float] = {}  # by axis, of a micro-batch
    hidden = []
    for transfer in work.transfers:
        seconds = transfer.calls * collective_seconds(transfer.kind, transfer.payload, transfer.group, transfer.stride, cluster, fit)
        if not transfer.hidden_by and transfer.kind != "send":
            seconds += transfer.calls * fit.wait
        if transfer.hidden_by:
            hidden.append((transfer, seconds))
        elif transfer.phase == "optimizer":
            waited["/" + transfer.axis] = waited.get("/" + transfer.axis, 0.0) + seconds  # once a step
        else:
            waited[transfer.axis] = waited.get(transfer.axis, 0.0) + seconds / m
            phase = phases.setdefault(transfer.phase, [0.0, 0.0])
            phase[0] += seconds / m
            phase[1] += transfer.calls / m * fit.host
    behind = 0.0 if measured else sum(max(0.0, host - device) for device, host in phases.values())
    one = sum(device for device, _ in phases.values()) + behind  # seconds of a micro-batch
    body = micro.spread + behind + sum(v for k, v in waited.items() if not k.startswith("/"))  # without embedding and head

    parts = {kind: micro.kinds.get(kind, 0.0) * m for kind in ("matmul", "attention", "memory")}
    parts["launch"] = behind * m
    for axis, seconds in waited.items():
        parts["comm/" + axis.lstrip("/")] = parts.get("comm/" + axis.lstrip("/"), 0.0) + (seconds if axis.startswith("/") else seconds * m)
    parts["bubble"] = bubble_share(work.schedule, work.stages, work.virtual, m) * m * min(one, body)

    computing = {phase: device * m for phase, (device, _) in phases.items()}
    computing["forward"] = computing.get("forward", 0.0)
    computing["backward"] = computing.get("backward", 0.0) + computing.pop("recompute", 0.0)
    _hide(hidden, {phase: seconds * fit.overlap for phase, seconds in computing.items()}, fit, parts)

    stepped = Sums().of(work.step, cluster, fit)
    parts["optimizer"] = sum(stepped.kinds.values())
    parts["host"] = 0.0
    if not measured:
        parts["host"] += sum(max(0.0, host - device) for device, host in stepped.phases.values())
    parts["data"] = 0.0 if cluster.device.kind == "cpu" else work.data_bytes / HOST_TO_DEVICE
    nodes = -(-cluster.n // cluster.device.node)
    if nodes > 1 and fit.straggle:
        parts["host"] += sum(parts.values()) * fit.straggle * math.log2(nodes)
    total = sum(parts.values())
    low, high = interval(work, bool(notes))
    return StepTime(parts, total * low, total * high, notes)


def interval(work: Work, foreign: bool = False) -> tuple[float, float]:
    """Factors of the expected time between which 80 % of the published runs lie, each predicted with its source left out; the widest of
    Gradus, no step of which was measured on a GPU, and of a software that none of them used. A fifth more each way where the device's
    parameters are another's (`foreign`)."""
    table = fitted().get("intervals") or {"none": (0.75, 1.35)}
    low, high = table.get(work.software) or (min(v[0] for v in table.values()), max(v[1] for v in table.values()))
    return (low * 0.8, high * 1.2) if foreign else (low, high)
