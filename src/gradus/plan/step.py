"""Seconds of one training step: operations by the roofline, the pipeline's bubble, exposed communication, the host."""

from __future__ import annotations

import dataclasses
import math

from gradus.hardware import Cluster
from gradus.plan.collectives import collective_seconds, unknown_links
from gradus.plan.roofline import Parameters, fitted, fusible, op_seconds, parameters
from gradus.plan.work import Op, Transfer, Work

HOST_TO_DEVICE = 12e9  # bytes/s that copies of batches from pinned memory reach over PCIe 4 (nominal 31e9 one way)


@dataclasses.dataclass
class StepTime:
    """Seconds of a step by part.

    parts: matmul, attention, memory, launch (the device waits for the host), bubble, optimizer, data, host (the same in
    the optimizer's step, and waiting for the slowest node), comm/<axis> (exposed only). low and high: see `interval`.
    """

    parts: dict[str, float]
    low: float
    high: float
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bubble_share(schedule: str, stages: int, virtual: int, micro_batches: int) -> float:
    """Idle time of a pipeline by the time of the work.

    It is (p-1)/m, divided by v where stages are interleaved (Narayanan et al. 2021), and a third of it with the
    zero-bubble schedule H1 (Qi et al. 2023, table 2, with equal forward, backward and weight-gradient passes).
    """
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
    """Seconds of operations."""

    kinds: dict[str, float] = dataclasses.field(default_factory=dict)  # kind → on the device
    phases: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # phase → [device, host launching]
    on_all_stages: float = 0.0  # of operations that every stage of the pipeline has

    def add_ops(self, ops: list[Op], cluster: Cluster, fit: Parameters) -> Sums:
        """Add these operations; returns itself."""
        for op in ops:
            seconds = op_seconds(op, cluster.device, fit) * op.count
            self.kinds[op.kind] = self.kinds.get(op.kind, 0.0) + seconds
            phase = self.phases.setdefault(op.phase, [0.0, 0.0])
            phase[0] += seconds
            phase[1] += op.launches * op.count * fit.host * (fit.elementwise if fusible(op) else 1.0)
            self.on_all_stages += 0.0 if op.stage_only else seconds
        return self

    @property
    def waiting_for_host(self) -> float:
        """Seconds that the device waits for launches."""
        return sum(max(0.0, host - device) for device, host in self.phases.values())


def _add_exposed(
    hidden: list[tuple[Transfer, float]], free: dict[str, float], fit: Parameters, parts: dict[str, float]
) -> None:
    """Add to `parts` what computing does not hide of the transfers, and what contention costs it.

    free: seconds of each phase that can hide communication. Transfers that one pass alone can hide come first, then
    those that either can.
    """
    for hidden_by in ("forward", "backward", "both"):
        phases = ("forward", "backward") if hidden_by == "both" else (hidden_by,)
        group = [(transfer, seconds) for transfer, seconds in hidden if transfer.hidden_by == hidden_by]
        total, available = sum(seconds for _, seconds in group), sum(free[phase] for phase in phases)
        covered = min(total, available)
        for phase in phases:
            free[phase] -= covered * free[phase] / available if available > 0 else 0.0
        for transfer, seconds in group:
            axis, share = "comm/" + transfer.axis, seconds / total if total else 0.0
            parts[axis] = parts.get(axis, 0.0) + seconds - (1 - fit.contention) * covered * share


def _add_transfers(
    work: Work, cluster: Cluster, fit: Parameters, phases: dict[str, list[float]]
) -> tuple[dict[tuple[str, bool], float], list[tuple[Transfer, float]]]:
    """Add to `phases` the transfers that a micro-batch waits for.

    Returns ((axis, whether once per step) → seconds waited, per step or per micro-batch; transfers that computing can
    hide, each with its seconds per step).
    """
    micro = max(work.micro_batches, 1)
    waited: dict[tuple[str, bool], float] = {}
    hidden = []
    for t in work.transfers:
        seconds = t.calls * collective_seconds(t.kind, t.payload, t.group, t.stride, cluster, fit)
        if t.hidden_by:
            hidden.append((t, seconds))
            continue
        if t.kind != "send":
            seconds += t.calls * fit.wait
        once = t.phase == "optimizer"
        if not once:
            seconds /= micro
            phase = phases.setdefault(t.phase, [0.0, 0.0])
            phase[0] += seconds
            phase[1] += t.calls / micro * fit.host
        waited[t.axis, once] = waited.get((t.axis, once), 0.0) + seconds
    return waited, hidden


def step_time(work: Work, cluster: Cluster, fit: Parameters | None = None) -> StepTime:
    """Seconds of one optimizer step of `work` on `cluster`, and an interval.

    A micro-batch takes, phase by phase, the longer of what the device does (operations and the collectives it waits
    for) and of what the host launches. The pipeline's bubble, and the stages' waiting for one another, follow.
    Collectives with `hidden_by` overlap the computing of those phases; the rest is exposed, and the computing meanwhile
    is slower by `contention`.
    """
    notes: tuple[str, ...] = ()
    if fit is None:
        fit, notes = parameters(cluster.device, work.software)
        notes += unknown_links(work.transfers, cluster)
    measured = cluster.device.measured is not None  # its operations hold the host's time too
    m = max(work.micro_batches, 1)
    micro = Sums().add_ops(work.micro, cluster, fit)
    waited, hidden = _add_transfers(work, cluster, fit, micro.phases)
    launch = 0.0 if measured else micro.waiting_for_host
    one = sum(device for device, _ in micro.phases.values()) + launch  # seconds of a micro-batch
    # without embedding and head
    blocks = micro.on_all_stages + launch + sum(seconds for (_, once), seconds in waited.items() if not once)

    parts = {kind: micro.kinds.get(kind, 0.0) * m for kind in ("matmul", "attention", "memory")}
    parts["launch"] = launch * m
    for (axis, once), seconds in waited.items():
        parts["comm/" + axis] = parts.get("comm/" + axis, 0.0) + (seconds if once else seconds * m)
    parts["bubble"] = bubble_share(work.schedule, work.stages, work.virtual, m) * m * min(one, blocks)

    computing = {"forward": 0.0, "backward": 0.0} | {phase: device * m for phase, (device, _) in micro.phases.items()}
    computing["backward"] += computing.pop("recompute", 0.0)
    _add_exposed(hidden, {phase: seconds * fit.overlap for phase, seconds in computing.items()}, fit, parts)

    step = Sums().add_ops(work.step, cluster, fit)
    parts["optimizer"] = sum(step.kinds.values())
    parts["host"] = 0.0 if measured else step.waiting_for_host
    parts["data"] = 0.0 if cluster.device.kind == "cpu" else work.data_bytes / HOST_TO_DEVICE
    nodes = -(-cluster.n // cluster.device.node)
    if nodes > 1 and fit.straggle:
        parts["host"] += sum(parts.values()) * fit.straggle * math.log2(nodes)
    total = sum(parts.values())
    low, high = interval(work, bool(notes))
    return StepTime(parts, total * low, total * high, notes)


def interval(work: Work, other_device: bool = False) -> tuple[float, float]:
    """Factors of the expected time between which 80 % of the published runs lie, each predicted without its source.

    Gradus has its own entry, wider than the others, as no step of it was measured on a GPU; a software that is not in
    the file takes the widest. The
    interval is a fifth wider each way where the device's parameters are another's (`other_device`).
    """
    table = fitted().get("intervals") or {"none": (0.75, 1.35)}
    widest = min(low for low, _ in table.values()), max(high for _, high in table.values())
    low, high = table.get(work.software) or widest
    return (low * 0.8, high * 1.2) if other_device else (low, high)
