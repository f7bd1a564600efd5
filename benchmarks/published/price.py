"""Seconds of a step of many runs at once: what `gradus.plan.step.step_time` says of each, in arrays. A test holds the two together.

How shapes count (`depth`, `keys`, `decode`) is the device's: kernels say it, no run.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from gradus.hardware import Cluster
from gradus.plan import roofline
from gradus.plan.collectives import HOST_LINK, intra_node_seconds, ring_factor
from gradus.plan.roofline import Parameters
from gradus.plan.step import HOST_TO_DEVICE, bubble_share
from gradus.plan.work import Op, Transfer, Work

PHASES = {"forward": 0, "backward": 1, "recompute": 2, "optimizer": 3}
KINDS = {"matmul": 0, "fp8": 1, "attention": 2, "memory": 3}
NAMES = [f.name for f in dataclasses.fields(Parameters)]
ABLE = ("forward", "backward", "both")


def _row(op: Op, cluster: Cluster, shaped: bool) -> tuple:
    """kind, phase, seconds at the peak and its share by shape, misaligned, grouped, seconds of its bytes and of an fp8 product's casts, chained, head, launches, count."""
    device, odd, cast, fit = cluster.device, False, 0.0, roofline.parameters(cluster.device)[0]
    kind, peak = KINDS[op.kind], roofline.peak_flops(device, op.dtype)
    if op.kind == "matmul":
        batch, m, n, k = op.shape
        peak *= roofline.matmul_share(batch, m, n, k, roofline.units(device), fit.depth) if shaped else 1.0
        odd = op.dtype in ("bf16", "fp16") and n % 8 != 0 and min(m, n, k) > 64
        if op.dtype in ("fp8", "fp4"):
            kind, cast = KINDS["fp8"], batch * m * k / device.bandwidth
    elif op.kind == "attention" and shaped:
        peak *= roofline.attention_share(op.shape[3], op.shape[4], fit.keys, peak / roofline.units(device))
    return (kind, PHASES[op.phase], op.flops / peak, odd, op.name.startswith("grouped"), op.bytes / device.bandwidth, cast, roofline.fusible(op), op.stage_only, op.launches, op.count)


def _sent(t: Transfer, cluster: Cluster) -> tuple:
    """phase, which computing hides it (-1: none), seconds between nodes at the full bandwidth, seconds within a node, doublings, waits, calls."""
    outside = doublings = inside = 0.0
    if t.group > 1 and t.payload > 0:
        local, nodes = cluster.link_of(t.group, t.stride)
        if nodes <= 1:
            inside = intra_node_seconds(t.kind, t.payload, t.group, cluster)
        else:
            rate = (cluster.device.network or cluster.device.link or HOST_LINK).bandwidth
            outside = t.payload * ((nodes - 1) / nodes if t.kind == "all_to_all" else ring_factor(t.kind, nodes) / (1 if t.kind == "send" else local)) / rate
            inside = intra_node_seconds(t.kind, t.payload, local, cluster) if local > 1 and t.kind != "send" else 0.0
            doublings = max(1.0, math.log2(nodes))
    hidden = ABLE.index(t.hidden_by) if t.hidden_by else -1
    return PHASES[t.phase], hidden, outside, inside, doublings, not t.hidden_by and t.kind != "send", t.calls


class Runs:
    """Runs that are priced together. `seconds(P)`: of each, P being its parameters (a row each, in the order of NAMES). shaped: whether a product's
    shape counts."""

    def __init__(self, runs: list[tuple[Work, Cluster]], shaped: bool = True):
        self.n = len(runs)
        rows: dict[tuple, float] = {}
        sent: dict[tuple, float] = {}
        for i, (work, cluster) in enumerate(runs):
            for op in (*work.micro, *work.step):
                *row, count = _row(op if op.phase != "optimizer" else op._replace(phase="optimizer"), cluster, shaped)
                rows[i, *row] = rows.get((i, *row), 0.0) + count
            for t in work.transfers:
                *row, calls = _sent(t, cluster)
                sent[i, *row] = sent.get((i, *row), 0.0) + calls
        ops = np.array([(*row, count) for row, count in rows.items()], dtype=float).reshape(-1, 12).T
        self.case, self.kind, self.phase = ops[:3].astype(int)
        self.peak, self.odd, self.grouped, self.bytes, self.cast, self.chained, self.head, self.launches, self.count = ops[3:]
        by = np.array([(*row, calls) for row, calls in sent.items()], dtype=float).reshape(-1, 8).T
        self.of, self.when, self.hidden = by[:3].astype(int)
        self.outside, self.inside, self.doublings, self.waits, self.calls = by[3:]
        self.m = np.array([max(work.micro_batches, 1) for work, _ in runs], dtype=float)
        self.bubble = np.array([bubble_share(w.schedule, w.stages, w.virtual, int(m)) for (w, _), m in zip(runs, self.m)])
        self.nodes = np.array([math.log2(-(-c.n // c.device.node)) for _, c in runs])
        self.data = np.array([0.0 if c.device.kind == "cpu" else w.data_bytes / HOST_TO_DEVICE for w, c in runs])

    def _sum(self, values, where, chosen, width: int = 4):
        return np.bincount(self.case[chosen] * width + where[chosen], values[chosen], self.n * width).reshape(self.n, width)

    def seconds(self, parameters: np.ndarray) -> np.ndarray:
        p = {name: parameters[:, i] for i, name in enumerate(NAMES)}
        of = {name: p[name][self.case] for name in ("matmul", "fp8", "products", "attention", "fused", "bandwidth", "kernel", "misaligned", "grouped", "cast", "elementwise", "host")}
        rate = np.choose(self.kind, [of["matmul"] * of["products"], of["fp8"] * of["products"], of["attention"] * of["fused"], np.ones(len(self.case))])
        rate = rate * np.where(self.odd > 0, of["misaligned"], 1.0) * np.where(self.grouped > 0, of["grouped"], 1.0)
        memory = self.bytes / of["bandwidth"]
        fused = np.where(self.chained > 0, of["elementwise"], 1.0)
        each = roofline.together(self.peak / rate, memory) + of["kernel"] * self.launches + self.cast * of["cast"] / of["bandwidth"]
        each = each * fused * self.count
        launch = self.launches * self.count * of["host"] * fused
        every = np.ones(len(self.case), bool)
        device, host = self._sum(each, self.phase, every), self._sum(launch, self.phase, every)
        micro = device[:, :3].sum(1)
        spread = np.bincount(self.case, each * ((self.phase < 3) & (self.head == 0)), self.n)
        q = {name: p[name][self.of] for name in ("network", "latency", "wait", "host")}
        sent = np.maximum(self.outside / q["network"], self.inside) + q["latency"] * self.doublings + q["wait"] * self.waits
        sent = sent * self.calls
        waited = (self.hidden < 0) & (self.when < 3)
        once = (self.hidden < 0) & (self.when == 3)

        def by_phase(values):
            return np.bincount(self.of[waited] * 4 + self.when[waited], values[waited], self.n * 4).reshape(self.n, 4)

        m = self.m[:, None]
        device[:, :3] += by_phase(sent)[:, :3] / m
        host[:, :3] += by_phase(self.calls * q["host"])[:, :3] / m
        behind = np.maximum(0.0, host[:, :3] - device[:, :3]).sum(1)
        waits = by_phase(sent).sum(1) / self.m
        one, body = device[:, :3].sum(1) + behind, spread + behind + waits
        total = (micro + behind + waits) * self.m + np.bincount(self.of[once], sent[once], self.n) + self.bubble * self.m**2 / self.m * np.minimum(one, body)
        forward, backward = (x * self.m * p["overlap"] for x in (device[:, 0], device[:, 1] + device[:, 2]))
        total = total + self._exposed(sent, forward, backward, p["contention"])
        total = total + device[:, 3] + np.maximum(0.0, host[:, 3] - device[:, 3]) + self.data
        return total * (1 + p["straggle"] * self.nodes)

    def _exposed(self, sent, forward, backward, contention):
        by = [np.bincount(self.of[self.hidden == i], sent[self.hidden == i], self.n) for i in range(3)]
        covered = [np.minimum(by[0], forward), np.minimum(by[1], backward)]
        covered.append(np.minimum(by[2], forward - covered[0] + backward - covered[1]))
        return sum(by) - (1 - contention) * sum(covered)
