"""Layouts priced roughly, some thousands a second: to choose which of them the engine prices.

From a trace with one block a stack and one micro-batch: what a block does, and what the ends do before and after the blocks. What ranks
layouts in the end, and what is printed, is the engine's (`plan.engine`); a sketch is within some per cent of it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from gradus import models
from gradus.hardware import Cluster, Device
from gradus.parallel.stages import bounds, needed
from gradus.plan.compose import fsdp_widths, sharded_over, stages_of
from gradus.plan.engine import MicroBatches
from gradus.plan.profiles import INDEX, MiB, N, Part, Profile, Stretch, Weight
from gradus.plan.roofline import parameters
from gradus.plan.step import StepTime, Sums, step_time
from gradus.plan.traffic import nearest
from gradus.plan.work import Op, Transfer, Work, op_of, transfer_of
from gradus.recipe.axes import sizes, stages_per_process, strides
from gradus.recipe.schema import Layout, Recipe

STEADY = np.ones(N + 3)  # of what comes and goes: gradients are counted by themselves
STEADY[INDEX["gradients"]] = STEADY[N:] = 0


@dataclasses.dataclass(eq=False)
class Section:
    """One block of a stack, or what is done before the first block or after the last one, by a micro-batch."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    kept: float = 0.0  # bytes that its forward pass leaves for its backward pass
    halves: float = 0.0  # bytes of half copies of weights that it leaves for its backward pass
    casts: float = 0.0  # and such as autocast forgets at the end of the forward pass
    rise: float = 0.0  # bytes that its backward pass needs at most beside what the forward passes have left
    weights: list[Weight] = dataclasses.field(default_factory=list)
    priced: tuple[Device, Sums] | None = None

    @functools.cached_property
    def elements(self) -> tuple[int, int]:
        """Of experts that are split over processes, and of all else."""
        return sum(w.size for w in self.weights if w.expert), sum(w.size for w in self.weights if not w.expert)

    def seconds(self, cluster: Cluster) -> Sums:
        """Of its operations, on a device of the cluster."""
        if self.priced is None or self.priced[0] is not cluster.device:
            self.priced = cluster.device, Sums().add_ops(self.ops, cluster, parameters(cluster.device)[0])
        return self.priced[1]

    def with_samples(self, factor: float, rows: set[int]) -> Section:
        """Of a micro-batch with so many times the samples. rows: how many vectors enter the linear layers."""
        sizes_of = {w.size for w in self.weights}
        own = {each * size for size in sizes_of for each in (6, 12)}  # bytes of a cast of a whole weight, and of a sum

        def grown(op: Op) -> Op:
            if op.kind == "memory":
                fixed = op.bytes if op.name in ("to_copy", "add") and op.bytes in own else 0.0
                if op.name == "embedding_dense_backward":
                    fixed = max((4 * size for size in sizes_of if 4 * size < op.bytes), default=0)
                return dataclasses.replace(op, bytes=fixed + (op.bytes - fixed) * factor)
            at = 0
            if op.kind == "matmul" and op.shape[0] == 1:
                order = (3, 1, 2) if op.phase == "backward" else (1, 3, 2)
                at = next((i for i in order if op.shape[i] in rows), 1)
            shape = tuple(round(size * factor) if i == at else size for i, size in enumerate(op.shape))
            moved = op.bytes * factor
            if at:  # the weight stays
                (_, m, n, k), (_, m2, n2, k2) = op.shape, shape
                moved = op.bytes * (m2 * k2 + k2 * n2 + m2 * n2) / (m * k + k * n + m * n)
            return dataclasses.replace(op, shape=shape, flops=op.flops * factor, bytes=moved)

        transfers = [dataclasses.replace(t, payload=t.payload * factor) for t in self.transfers]
        return Section([grown(op) for op in self.ops], transfers, self.kept * factor, self.halves, self.casts, self.rise * factor, self.weights)


class Sketch:
    """`blocks`: a section for each kind of block of each stack; `first`, `last`: the ends."""

    def __init__(self, family: str, profile: Profile, part: Part, tf32: bool):
        self.part = part
        self.first, self.last, self.pure = Section(), Section(), profile.pure
        traced = [(i, kind) for i, kinds in enumerate(part.small.kinds) for kind in kinds]
        self.kinds = {key: Section() for key in traced}  # (number of the stack, kind)
        self.blocks = list(self.kinds.values())
        names = [f"{stack}.{number}" for stack, (_, n) in profile.stacks.items() for number in range(n)]
        of = dict(zip(names, self.blocks))
        for kind, now in (("forward", self.first), ("backward", self.last)):
            level = 0.0
            for piece in profile.first[kind]:
                if piece.unit in of:
                    leaves_to = self.first if kind == "backward" and of[piece.unit] is self.blocks[0] else self.last
                    now = of[piece.unit] if piece.edge == f"pre_{kind}" else leaves_to
                self._add(now, piece.stretch, tf32)
                net, halves = float(piece.stretch.net @ STEADY), float(piece.stretch.net[INDEX["gathered"]])
                now.casts += halves
                if kind == "forward":
                    now.kept += net - halves
                    now.halves += halves
                else:
                    now.rise = max(now.rise, level + float(piece.stretch.peak @ STEADY))
                    level += net
        for section in self.blocks:
            section.halves -= section.casts
            self.last.halves += section.casts  # where they are forgotten
        known = models.lookup(family)
        before = tuple(f"{part}." for part in (*known.stacks[0].before, *known.stacks[0].beside))
        ends = {name: w for unit, weights in profile.units.items() for name, w in weights.items()}
        tied = known.head and not any(name.startswith(f"{known.head}.") for name in ends)
        self.tied = [ends[name] for name in (f"{part}.weight" for part in known.tokens[-1:]) if tied and name in ends]  # what the last end has too
        for unit, weights in profile.units.items():
            home = next((section for block, section in of.items() if f"{unit}.".startswith(f"{block}.")), None)
            for name, w in weights.items():
                (home or (self.first if f"{name}.".startswith(before) else self.last)).weights.append(w)
        self.last_with_tied = dataclasses.replace(self.last, weights=self.last.weights + self.tied)
        traced = sum(w.size for weights in profile.units.values() for w in weights.values())
        self.stepped = sum(key[6] * count for key, count in profile.optimizer.ops.items()) / traced  # bytes an element

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def with_samples(self, factor: float) -> Sketch:
        rows = {op.shape[1] for section in (*self.blocks, self.first, self.last) for op in section.ops if op.kind == "matmul" and op.phase == "forward" and op.shape[0] == 1}
        other = copy.copy(self)
        other.first, other.last = self.first.with_samples(factor, rows), self.last.with_samples(factor, rows)
        other.last_with_tied = dataclasses.replace(other.last, weights=self.last_with_tied.weights)
        other.kinds = {key: section.with_samples(factor, rows) for key, section in self.kinds.items()}
        other.blocks = list(other.kinds.values())
        return other

    @staticmethod
    def _add(section: Section, stretch: Stretch, tf32: bool) -> None:
        section.ops += [op_of(key, count, tf32=tf32) for key, count in stretch.ops.items()]
        section.transfers += [transfer_of(key, calls) for key, calls in stretch.transfers.items()]


@dataclasses.dataclass
class Rough:
    """A layout, roughly: of the first or the last process of the pipeline. `held`: its sections and how many of each."""

    recipe: Recipe
    layout: Layout
    n: int
    given: MicroBatches
    sketch: Sketch
    rank: int

    @functools.cached_property
    def held(self) -> list[tuple[Section, int]]:
        layout, kinds = self.layout, self.sketch.part.kinds
        limits = bounds(sum(map(len, kinds)), layout.pipeline * stages_per_process(layout))
        parts = [Part.of(kinds, limits[s], limits[s + 1]) for s in stages_of(self.rank, layout)]
        own = [part.stacks for part in parts]
        blocks = [
            (section, sum(part.own_kinds[i].count(kind) for part in parts))
            for (i, kind), section in self.sketch.kinds.items()
        ]
        last = self.sketch.last if layout.pipeline == 1 else self.sketch.last_with_tied
        ends = [(self.sketch.first, any(stage[0][0] == 0 for stage in own)), (last, any(stage[-1][2] == 0 for stage in own))]
        return [(section, int(many)) for section, many in (*blocks, *ends) if many]

    @property
    def width(self) -> int:
        return 2 if self.layout.precision.startswith("pure_") else 4

    @property
    def micro(self) -> int:
        return needed(self.layout, self.given.count)

    @functools.cached_property
    def wide(self) -> list[tuple[float, int, float]]:
        """(elements as the layout's blocks have them, over how many processes each is sharded, calls of a gather), experts first."""
        found = [sum(section.elements[i] * many for section, many in self.held) for i in (0, 1)]
        units = sum(many for _, many in self.held)
        return [(elements, sharded_over(self.layout, expert), units) for elements, expert in zip(found, (True, False)) if elements]

    @property
    def own(self) -> float:
        """Elements that the process holds."""
        return sum(elements / k for elements, k, _ in self.wide)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose forward passes are kept, at most."""
        layout, m, p, v = self.layout, self.micro, self.layout.pipeline, stages_per_process(self.layout)
        if p == 1 or layout.schedule == "gpipe":
            return 1 if p == 1 else m
        if layout.schedule == "1f1b":
            return min(m, p - self.rank)
        if layout.schedule == "zero_bubble":
            return min(m, p)
        return min(m * v, 2 * (p - self.rank - 1) + (v - 1) * p + 1) / v

    def state(self, momenta: int) -> float:
        """Bytes that are held whatever the micro-batch. momenta: numbers that the optimizer keeps of a parameter."""
        layout, width, own = self.layout, self.width, self.own
        replicas = sizes(layout, self.n)["replicate"]
        held = own * width * (1 + momenta / (replicas if layout.shard_optimizer else 1))
        full = sum(elements for elements, _, _ in self.wide)
        if layout.shard > 1:
            computed, reduced = fsdp_widths(layout, width)
            unit = max(sum(section.elements) for section, _ in self.held)
            held += unit * (3 * computed + reduced) + (0 if layout.reshard else full * computed)
            return held + (own * width if layout.pipeline > 1 or self.micro == 1 else full * reduced)
        return held + own * width * (2 if layout.pipeline == layout.tensor == layout.expert == 1 and replicas > 1 and self.micro > 1 else 1)

    def memory(self, momenta: int) -> float:
        """Bytes of tensors at the peak."""
        kept = sum((section.kept + section.halves) * many for section, many in self.held)
        casts = sum(section.casts * many for section, many in self.held if section in self.sketch.blocks)
        received = 0.0  # of every micro-batch its own, from both sides
        if self.layout.pipeline > 1:
            sides = 2 * stages_per_process(self.layout) - sum(section not in self.sketch.blocks for section, _ in self.held)
            received = sides * self.hidden() * self.micro
        return self.state(momenta) + kept * self.in_flight + max(casts, *(section.rise for section, _ in self.held)) + received

    def hidden(self) -> float:
        """Bytes of what a stage sends to the next one."""
        layout = self.layout
        split = layout.context * (layout.tensor if layout.sequence_parallel else 1)
        return self.given.tokens / self.given.parts * self.recipe.model.d_model * (2 if self.sketch.pure else 4) / split

    def transfers(self) -> Iterator[Transfer]:
        layout, m, stride, shape = self.layout, self.micro, strides(self.layout, self.n), sizes(self.layout, self.n)
        for section, many in self.held:
            for t in section.transfers:
                yield dataclasses.replace(t, calls=t.calls * many * m)
        if layout.pipeline > 1:
            calls = m * stages_per_process(layout)
            for phase in ("forward", "backward"):
                yield Transfer("pipeline", "send", self.hidden(), calls, layout.pipeline, stride["pipeline"], phase)
        if layout.shard > 1:
            computed, reduced = fsdp_widths(layout, self.width)
            scatters = m if layout.pipeline > 1 else 1
            for elements, k, units in self.wide:
                expert = len(self.wide) > 1 and elements == self.wide[0][0]
                each, apart = elements / units, stride["shard"] if expert else nearest(layout, stride)
                for phase in ("forward", "backward") if layout.reshard else ("forward",):
                    yield Transfer("shard", "all_gather", each * computed, units * m, k, apart, phase, phase)
                yield Transfer("shard", "reduce_scatter", each * reduced, units * scatters, k, apart, "backward", "backward")
                if shape["replicate"] > 1:
                    yield Transfer("replicate", "all_reduce", each / k * reduced, units * scatters, shape["replicate"], stride["replicate"], "backward", "backward")
            return
        alone = layout.tensor == layout.pipeline == layout.expert == 1
        for (elements, _, _), expert in zip(self.wide, (len(self.wide) > 1, False)):
            group = shape["replicate"] * layout.context * (1 if expert else layout.expert)
            apart = stride["context"] if layout.context > 1 else stride["expert"] if layout.expert > 1 and not expert else stride["replicate"]
            nbytes = elements * self.width
            late = nbytes if not alone else min(nbytes, max(sum(self.sketch.first.elements) * self.width, layout.bucket_mb * MiB))  # DDP's last bucket
            for part, hidden in ((nbytes - late, "backward"), (late, "")):
                calls = max(1, round(part / (layout.bucket_mb * MiB))) if hidden or not alone else 1
                if part and group > 1:
                    yield Transfer("replicate", "all_reduce", part / calls, calls, group, apart, "backward" if alone else "optimizer", hidden)
        if layout.shard_optimizer:
            yield Transfer("replicate", "broadcast", self.own * self.width / shape["replicate"], shape["replicate"], shape["replicate"], stride["replicate"], "optimizer")

    def copies(self) -> float:
        """Bytes that FSDP2 or DDP, and adding up gradients, read and write in a micro-batch."""
        layout, total = self.layout, 0.0
        if layout.shard == layout.tensor == layout.pipeline == layout.expert == 1 and self.n > 1:
            total = 8 * self.own * self.width / self.micro
        if layout.shard > 1:
            computed, reduced = fsdp_widths(layout, self.width)
            for elements, k, _ in self.wide:
                total += (4 if layout.reshard else 2) * elements * computed + 2 * elements / k * (computed + self.width)
                total += elements * (computed + reduced) * (1 if layout.pipeline > 1 else 1 / self.micro)
        return total + 3 * self.width * sum(elements for elements, _, _ in self.wide) * (self.micro - 1) / self.micro

    def step_time(self, cluster: Cluster) -> StepTime:
        layout, m = self.layout, self.micro
        total = Sums()
        for section, many in self.held:
            total.add(section.seconds(cluster), many, stage_only=section not in self.sketch.blocks)  # the others wait for what the ends do
        dtype = "bf16" if self.sketch.pure else "fp32"
        ops = [Op("memory", "add", dtype, "backward", 0.0, self.copies(), (), 1, 0)]
        replicas = sizes(layout, self.n)["replicate"] if layout.shard_optimizer else 1
        step = [Op("memory", "adamw", dtype, "optimizer", 0.0, self.sketch.stepped * self.own / replicas * self.width / (2 if self.sketch.pure else 4))]
        work = Work(
            micro=ops, step=step, transfers=[t for t in self.transfers() if t.group > 1], micro_batches=m, stages=layout.pipeline,
            virtual=stages_per_process(layout), schedule=layout.schedule, samples=self.given.samples, tokens=self.given.tokens,
            data_bytes=self.given.nbytes,
        )  # fmt: skip
        return step_time(work, cluster, more=total)
