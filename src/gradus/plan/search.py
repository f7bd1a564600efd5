"""The search over layouts: every way to split a step over the devices that parallel.check allows.

Bounds say in which order they are looked at, and which not at all: bytes of weights, gradients and optimizer state,
seconds of the operations. What is looked at is composed of cuts of a small whole model (`plan.cut`), the best of it of
stages that are traced at their own positions, as `gradus plan` does for a layout that it is given: these are ranked and
printed. The same question has the same answer; the plan's own choice of a layout is the search's first.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any

from gradus.errors import UserError
from gradus.hardware import Cluster, price
from gradus.parallel import check
from gradus.plan import compose, engine
from gradus.plan.batches import size_of
from gradus.plan.budget import Failures, usual_goodput
from gradus.plan.case import Case
from gradus.plan.collectives import collective_seconds
from gradus.plan.cut import Cuts, between
from gradus.plan.figures import known_figure
from gradus.plan.keys import layout_keys
from gradus.plan.process import Process, bytes_per_weight, fsdp_widths, momenta, sharded_over
from gradus.plan.profiles import Part, Profile
from gradus.plan.roofline import parameters
from gradus.plan.show import TIGHT
from gradus.plan.stage import Stage
from gradus.plan.step import StepTime, Sums, step_time
from gradus.plan.store import progress, stored, versions
from gradus.plan.traffic import nearest
from gradus.plan.work import op_of, transfer_of
from gradus.recipe.axes import needed, sizes, strides
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row
from gradus.text import DAY, SIGNS, duration, money, size, table

CHOSEN = {  # what the search decides; all else of the layout stays as the recipe has it
    "micro_batch", "checkpointing", "precision", "replicate", "shard", "reshard", "param_dtype", "reduce_dtype",
    "offload", "shard_optimizer", "tensor", "sequence_parallel", "vocab_parallel", "pipeline", "schedule", "stages",
    "context", "context_method", "expert", "local_sgd", "diloco", "bucket_mb", "compress", "transport",
}  # fmt: skip
# of the micro-batches that are traced for all sizes; primes, whose tokens are hardly ever as many as a weight has rows:
# what is done with that many vectors and with the weight would count as one operation
SAMPLES = 7, 19
THIN = 2048  # tokens of a device's part of a sequence below which layout.context is not tried
HEADROOM = 0.8  # of a device's memory that a suggestion fills at most: weeks bring fragmentation and longer samples
SURE = 1.01  # estimates are within 1 % of one another: the search ends at one that is this much above the best
MOST = 20  # ways to split that are traced exactly, at most
SHOWN = 8  # of these
PARTS = 3  # that a search traces for what changes a block, about: each way of checkpointing, or exactly
CHECKPOINTING = ("none", "selective", "full")  # the first that fits: to compute more again is never faster
SCHEDULES = (("1f1b", None), ("interleaved", None), ("interleaved", 4), ("zero_bubble", None), ("zero_bubble", 1))
COARSE = 0.9  # of the seconds of a split without its bubble: no other schedule or sharding of it takes less
MOST_DEVICES = 2**17
NEAR = 0.9  # further devices save at most 10 % of the device-days
GIVEN_UP = 20  # numbers of devices without any gain, beyond as many as before


@dataclasses.dataclass
class Candidate:
    """A layout on n devices, evaluated by the engine. memory: bytes by component; needed: all that the device shows as
    taken; high: the upper end of that; time: of a step, None of what does not fit."""

    layout: Layout
    n: int
    memory: dict[str, int]
    needed: float
    high: float
    capacity: float
    time: StepTime | None = None
    money: float | None = None  # of a step
    run: float | None = None  # seconds of the whole run, where its length is known
    goodput: float = 1.0  # expected, of the whole run
    reason: str = ""  # why it loses
    plan: engine.Plan | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """By the upper end of its memory."""
        return self.high <= self.capacity

    @property
    def seconds(self) -> float:
        return self.time.total if self.time else math.inf

    @property
    def parts(self) -> dict[str, float]:
        return self.time.parts if self.time else {}

    @property
    def order(self) -> tuple:
        return not self.fits, self.seconds, self.n, self.keys

    @property
    def keys(self) -> str:
        """What of the layout is not the default, as words."""
        return layout_keys(self.layout)

    def describe(self) -> str:
        axes = [f"{axis} {k}" for axis, k in sizes(self.layout, self.n).items() if k > 1]
        return " × ".join(axes) or "one device"


# ---------------------------------------------------------------- all layouts


class Space:
    """All layouts of a case on the devices of a cluster. `limit`: bytes that a layout may need. stated: keys of the
    case's layout that stay. like: of the same case on others."""

    def __init__(self, case: Case, cluster: Cluster, stated: Collection[str] = (), like: Space | None = None):
        self.stated = like.stated if like else frozenset(stated)
        self.case, self.cluster, self.n = case.at(n=cluster.n), cluster, cluster.n
        self.recipe, self.limit = case.recipe, HEADROOM * cluster.capacity
        default = Layout()
        self.base = case.layout.model_copy(update={key: getattr(default, key) for key in CHOSEN - self.stated})
        self.checkpointing = (self.base.checkpointing,) if "checkpointing" in self.stated else CHECKPOINTING
        self.part = Part.whole(case.kinds)
        self.samples = self.case.at(self.base).samples
        self.cuts: dict[tuple, Cuts] = like.cuts if like else {}
        self.seconds_of: dict[tuple, float] = {}  # of the operations of a micro-batch
        self.estimates: dict[str, list[Process]] = {}
        self.times: dict[str, StepTime] = {}

    def splits(self) -> Iterator[Layout]:
        """Ways to split over the devices, simple ones first. Every number along an axis divides n."""
        n, m, node = self.n, self.recipe.model, self.cluster.device.node
        divisors = [k for k in range(1, n + 1) if n % k == 0]
        experts = [k for k in divisors if k == 1 or (getattr(m, "n_experts", None) or 1) % k == 0]
        length = getattr(self.recipe.data, "max_len", 0) or getattr(m, "seq_len", 0) or 0  # of the samples
        contexts = [k for k in divisors if k == 1 or (length // k >= THIN and k & (k - 1) == 0 and k <= 64)]
        for tensor in (k for k in divisors if k <= node and k & (k - 1) == 0):
            for pipeline in (k for k in divisors if k <= sum(self.part.sizes) and n % (k * tensor) == 0):
                for context in (k for k in contexts if n % (k * tensor * pipeline) == 0):
                    for expert in (k for k in experts if n % (k * tensor * pipeline * context) == 0):
                        left = n // (tensor * pipeline * context * expert)
                        inner = max(1, node // (tensor * context))
                        # none, all, a node's, and others between (HSDP)
                        some = {1, left, inner, *(4**i for i in range(1, 6))}
                        for method in ("ring", "ulysses") if context > 1 else ("ring",):
                            for shard in sorted(k for k in some if left % k == 0):
                                axes = {
                                    "tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert,
                                    "shard": shard, "context_method": method,
                                }  # fmt: skip
                                layout = self.base.model_copy(update=axes | self._numbers(shard > 1))
                                if self.allowed(layout.model_copy(update={"micro_batch": 1})):
                                    yield layout

    def _numbers(self, sharded: bool) -> dict[str, Any]:
        """The recipe's own precision; where it says nothing bf16, if the device has it. Sharded weights are gathered in
        half instead of cast: without copies that autocast keeps, and norms and residuals are computed in half too."""
        own = self.recipe.layout
        if self.stated & {"precision", "param_dtype"} and not sharded:
            return {"precision": own.precision, "param_dtype": None}
        if "param_dtype" in self.stated:
            return {}
        if own.precision == "fp32" and own.param_dtype:
            return {"precision": "fp32", "param_dtype": own.param_dtype if sharded else None}
        free = own.precision == "fp32" and "precision" not in own.model_fields_set
        half = own.precision == "bf16" or (free and "bf16" in self.cluster.device.peaks)
        if half and sharded:
            return {"precision": "fp32", "param_dtype": "bf16"}
        return {"precision": "bf16" if half else own.precision}

    def allowed(self, layout: Layout) -> bool:
        """parallel.check's rules, asked one after the other until one says no."""
        of_batch, of_model = check.batch(self.case.at(layout).recipe, self.n), check.fits(self.recipe.model, layout)
        rules = (check.processes(layout, self.n), of_batch, of_model)
        return not any(next(rule, None) for rule in rules)

    def micro_batch_sizes(self, layout: Layout) -> list[int]:
        share = math.ceil(self.samples / self.case.at(layout).data_parallel)
        return sorted({min(share, 2**i) for i in range(11)})

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The ways to run a split: schedules, reshard on or off, or ZeRO-1 on or off."""
        if layout.pipeline > 1:
            choices = ({"schedule": schedule, "stages": stages} for schedule, stages in SCHEDULES)
        elif layout.shard > 1:
            choices = ({"reshard": reshard} for reshard in (True, False))
        else:
            choices = ({"shard_optimizer": some} for some in (False, True))
        changed = (layout.model_copy(update=more) for more in choices)
        stays = self.stated & CHOSEN - {"param_dtype", "precision"}
        for variant in changed:
            if all(getattr(variant, key) == getattr(self.base, key) for key in stays) and self.allowed(variant):
                yield variant

    # ------------------------------------------------------------ bounds

    @property
    def one(self) -> Layout:
        """A sample on one device."""
        return self.base.model_copy(update={"micro_batch": 1} | self._numbers(sharded=False))

    def at_peak(self) -> float:
        """Seconds of a step on one device whose products reach its peak, recomputation left out."""
        ops, _ = self._whole(self.one).counts()
        return sum(key.flops * n for key, n in ops.items()) * self.samples / max(self.cluster.device.peaks.values())

    def least_devices(self) -> float:
        """Fewer cannot hold the weights, their gradients and the optimizer's state."""
        return self.least_bytes(self.one) / self.cluster.capacity

    def least_bytes(self, layout: Layout) -> float:
        """Of weights, gradients and the optimizer's state, where the stages of a pipeline hold equal parts."""
        replicas = self.case.at(layout).shape["replicate"] if layout.shard_optimizer else 1
        copies = 2 + momenta(self.recipe.optimizer) / replicas
        return self._least_elements(layout) * bytes_per_weight(layout) * copies

    def _least_elements(self, layout: Layout) -> float:
        """Of the parameters that a process holds."""
        units = self._whole(layout).units
        own = sum(w.size * n / sharded_over(layout, w.expert) for _, unit, _, n in units for w in unit.values())
        return own / layout.pipeline

    def least_seconds(self, layout: Layout) -> float:
        """Of a step's operations and of what is sent, nothing computed again, where the stages of a pipeline do equal
        parts and none waits."""
        key = self._key(layout.model_copy(update={"checkpointing": self.checkpointing[0]})), layout.micro_batch
        if key not in self.seconds_of:
            ops, sent = self._whole(layout).counts()
            fit = parameters(self.cluster.device)[0]
            sums = Sums().add_ops([op_of(key, n, tf32=layout.tf32) for key, n in ops.items()], self.cluster, fit)
            for t in (transfer_of(key, n) for key, n in sent.items()):
                seconds = collective_seconds(t.kind, t.payload, t.group, t.stride, self.cluster, fit)
                sums.on_all_stages += seconds * t.calls
            self.seconds_of[key] = sums.on_all_stages
        computing = self.seconds_of[key] * self.case.at(layout).batches.parts / layout.pipeline
        return max(computing, self._least_traffic(layout))

    def _least_traffic(self, layout: Layout) -> float:
        """Seconds of what keeps the parameters of all alike, all of one kind in one call."""
        kept, computed = self._least_elements(layout), fsdp_widths(layout)[0]
        case = self.case.at(layout)
        if layout.shard == 1:
            replicas = case.shape["replicate"], case.stride["replicate"]
            calls = [("all_reduce", kept * bytes_per_weight(layout), *replicas, 1)]
        else:
            ranks, spacing = sharded_over(layout, expert=False), nearest(case)
            gathers = case.batches.count * (2 if layout.reshard else 1)
            calls = [("all_gather", kept * ranks * computed, ranks, spacing, gathers)]
        return sum(n * collective_seconds(*call, self.cluster) for *call, n in calls)

    # ------------------------------------------------------------ estimates

    def _key(self, layout: Layout) -> tuple:
        """What changes a block."""
        axes = layout.tensor, layout.context, layout.context_method, layout.expert
        return *axes, layout.precision, _in_half(layout), layout.checkpointing

    def cut(self, layout: Layout, batch: dict[str, Any]) -> Cuts:
        """What a pass of this micro-batch over the whole model comes to, on one stage."""
        key = self._key(layout), size_of(batch)
        if key not in self.cuts:
            whole = Stage(self.part, self._profile(layout, batch))
            self.cuts[key] = Cuts(self.recipe.model.family, whole)
        return self.cuts[key]

    def _profile(self, layout: Layout, batch: dict[str, Any]) -> Profile:
        """On the straight line through two sizes that are traced; traced itself where these are not two, or do not the
        same."""
        low, high = (self._batch(layout, samples) for samples in SAMPLES)
        size, smaller, larger = map(size_of, (batch, low, high))
        line = None
        if smaller < larger:
            share = (size - smaller) / (larger - smaller)
            line = between(self._traced(layout, low), self._traced(layout, high), share)
        return line or self._traced(layout, batch)

    def _small(self, layout: Layout, samples: int) -> Case:
        """Whose model, on one stage, is traced with micro-batches of so many samples."""
        update = {"pipeline": 1, "schedule": "1f1b", "stages": None, "micro_batch": samples}
        update |= {} if _in_half(layout) else {"shard": 1, "param_dtype": None}
        small = self.case.at(layout.model_copy(update=update))
        return small.at(samples=samples * small.data_parallel)

    def _batch(self, layout: Layout, samples: int) -> dict[str, Any]:
        return self._small(layout, samples).batches.full

    def _traced(self, layout: Layout, batch: dict[str, Any]) -> Profile:
        return engine.profile_of(self._small(layout, 1), self.part, batch, micro=1)

    def _whole(self, layout: Layout) -> Stage:
        """One block of each kind stands for all, with the first way of checkpointing."""
        layout = layout.model_copy(update={"checkpointing": self.checkpointing[0]})
        return self.cut(layout, self.case.at(layout).batches.full).whole

    def _stage(self, layout: Layout, part: Part, batch: dict) -> Stage:
        in_pipeline = layout.pipeline > 1
        split = in_pipeline and layout.schedule == "zero_bubble"
        return self.cut(layout, batch).stage(part, self._hidden(layout, size_of(batch)), in_pipeline, split)

    def _hidden(self, layout: Layout, places: int) -> float:
        """Bytes of what a stage sends to the next one."""
        model = self.recipe.model
        width = 2 if _in_half(layout) else bytes_per_weight(layout)
        tokens = places * model.n_tokens if model.reads == "images" else places
        return tokens * model.d_model * width / layout.context / (layout.tensor if layout.sequence_parallel else 1)

    def estimated(self, layout: Layout) -> list[Process]:
        """As the engine's `processes`, of parts that are cut from one small whole."""
        if (key := layout.model_dump_json()) not in self.estimates:
            stage = lambda part, batch: self._stage(layout, part, batch)  # noqa: E731
            self.estimates[key] = engine.processes_of(self.case.at(layout), stage)
        return self.estimates[key]

    def time(self, layout: Layout) -> StepTime:
        """Of a step, estimated."""
        key = layout.model_dump_json()
        if key not in self.times:
            self.times[key] = step_time(engine.work_of(self.estimated(layout)), self.cluster)
        return self.times[key]

    def device_bytes(self, layout: Layout) -> float:
        """Estimated bytes of a device; a lower bound where that alone is beyond the limit."""
        processes = self.estimated(layout)
        least = max(p.param_bytes + p.optimizer_bytes + compose.left_by_forward(p) for p in processes)
        return least if least > self.limit else engine.memory_of(processes).device_total

    def walk(self) -> Iterator[tuple[int, Layout, float]]:
        """(number of the split, a layout that fits, its seconds), by estimate, fastest first.

        A best-first search: an entry of the queue is a lower bound (split), a bound of all ways to run it (variants),
        an estimate without checkpointing (timed), at last one with the least checkpointing that fits (fits)."""
        self.queue, self.count, self.nearest = [], itertools.count(), (math.inf, None)
        splits = list(self.splits())
        progress.expected = max(progress.expected, PARTS * len(set(map(self._key, splits))))
        for way, split in enumerate(splits):
            for micro in self.micro_batch_sizes(split):
                layout = split.model_copy(update={"micro_batch": micro})
                if (least := self.least_bytes(layout)) > self.limit:
                    self._miss(layout, least)
                    break
                self._push(self.least_seconds(layout), "split", way if self.n > 1 else micro, layout)
        while self.queue:
            seconds, _, state, way, layout = heapq.heappop(self.queue)
            if state == "fits":
                yield way, layout, seconds
            elif state == "split":
                for first in itertools.islice(self.variants(layout), 1):
                    time = self.time(first)
                    self._push(COARSE * (time.total - time.parts["bubble"]), "variants", way, layout)
            elif state == "variants":
                for other in self.variants(layout):
                    self._push(self.time(other).total, "timed", way, other)
            else:
                self.push_with_checkpointing(way, layout, 0)

    def push_with_checkpointing(self, way: int, layout: Layout, at: int) -> None:
        """Queues the layout with as much checkpointing as lets it fit. at: number of the first way that is tried."""
        zero_bubble = layout.schedule == "zero_bubble" and layout.pipeline > 1
        for checkpointing in self.checkpointing[at : 1 if zero_bubble else None]:
            other = layout.model_copy(update={"checkpointing": checkpointing})
            if (nbytes := self.device_bytes(other)) <= self.limit:
                return self._push(self.time(other).total, "fits", way, other)
            self._miss(other, nbytes)

    def quickest(self, chosen: bool) -> tuple[Layout, float] | None:
        """The first that fits, and its seconds; of the recipe's own, whether it does or not."""
        if chosen:
            for share in (HEADROOM, 1.0):
                self.limit = share * self.cluster.capacity
                for _, layout, seconds in self.walk():
                    return layout, seconds
            return None
        own = self.recipe.layout
        if not self.allowed(own):
            return None
        own = own.model_copy(update={"micro_batch": own.micro_batch or max(self.micro_batch_sizes(own))})
        return own, self.time(own).total

    def _push(self, seconds: float, state: str, way: int, layout: Layout) -> None:
        heapq.heappush(self.queue, (seconds, next(self.count), state, way, layout))

    def _miss(self, layout: Layout, nbytes: float) -> None:
        self.nearest = min(self.nearest, (nbytes, layout), key=lambda pair: pair[0])

    # ------------------------------------------------------------ exactly

    def evaluate(self, layout: Layout) -> Candidate:
        """Exactly, by the engine. Raises UserError for what cannot be traced."""
        plan = engine.plan(self.case.at(layout))
        memory = plan.memory
        needed, (_, high) = memory.device_total, engine.interval(memory, layout, self.case.target)
        c = Candidate(layout, self.n, memory.components, needed, high, self.cluster.capacity, plan=plan)
        if c.needed <= c.capacity:
            c.time = step_time(plan.work, self.cluster)
        return c


def _in_half(layout: Layout) -> bool:
    """Whether FSDP gathers the weights in half."""
    return layout.shard > 1 and bool(layout.param_dtype)


def ranked(space: Space, most: int = 1) -> tuple[list[Candidate], list[Candidate]]:
    """(the best of so many ways to split, fastest first; what the engine found too large). However many are asked for,
    the first is the same: all whose estimates are within SURE of the fastest are traced exactly. Which layouts they are
    is kept on disk, by what was asked."""
    won: dict[str, list[Candidate]] = {}

    def layouts() -> dict[str, Any]:
        won["good"], won["large"] = _contested(space, most)
        kept = {key: [c.layout.model_dump(mode="json") for c in candidates] for key, candidates in won.items()}
        return {"n_estimated": len(space.estimates)} | kept

    kept = layouts() if space.case.task else stored("layouts", _question(space, most), layouts)  # data are no question
    space.n_estimated = kept["n_estimated"]
    if not won:
        for key in ("good", "large"):
            won[key] = [space.evaluate(Layout.model_validate(layout)) for layout in kept[key]]
    return won["good"], [dataclasses.replace(c, time=None) for c in won["large"]]


def _contested(space: Space, most: int) -> tuple[list[Candidate], list[Candidate]]:
    """(layouts that fit, fastest first; what proved too large), by the engine: of every way to split the layout that is
    the fastest by estimate, in about this order. Where nothing leaves the head room, what fits, by the upper end of its
    memory before what does by the middle estimate alone."""
    from gradus.plan.trace import gc_paused

    good: list[Candidate] = []
    large: list[Candidate] = []
    with gc_paused():
        for limit in (HEADROOM * space.cluster.capacity, space.cluster.capacity):
            space.limit, taken = limit, set()
            for way, layout, seconds in space.walk():
                if way in taken:
                    continue
                enough = len(good) >= most and good[0].fits and seconds > SURE * good[0].seconds
                if len(good) == MOST or enough:
                    break
                try:
                    c = space.evaluate(layout)
                except UserError:  # it cannot be traced
                    continue
                if c.needed <= limit:
                    taken.add(way)
                    good = sorted([*good, c], key=lambda c: c.order)
                else:
                    large.append(c)
                    space.push_with_checkpointing(way, layout, space.checkpointing.index(layout.checkpointing) + 1)
            if good:
                return good, large
        if (layout := space.nearest[1]) is not None:
            c = space.evaluate(layout)
            (good if c.time else large).append(c)
    if not good and not large:
        check.validate(space.case.at(space.base).recipe, space.n)  # says what is wrong
        where = f"{space.recipe.name}: no layout is possible on {space.n} devices"
        raise UserError(f"{where}. Use another number of devices, or another batch.samples.")
    return good, large


def _question(space: Space, most: int) -> list[Any]:
    """All that the answer of `ranked` depends on."""
    recipe, device = space.recipe, dataclasses.asdict(space.cluster.device)
    text = recipe.model_dump_json(exclude={"name", "log", "energy"})
    about = space.n, most, device, *versions(recipe.model.family, priced=True)
    return [text, sorted(recipe.layout.model_fields_set), sorted(space.stated), *about]


# ---------------------------------------------------------------- what is asked


@dataclasses.dataclass
class SearchResult:
    """What a search came to. table: the best of every way to split, fastest first, then what does not fit, nearest
    first."""

    recipe: Recipe
    cluster: Cluster
    fastest: Candidate | None
    cheapest: Candidate | None
    fewest: Candidate | None
    table: list[Candidate]
    n_estimated: int
    currency: str = ""
    advice: list[str] = dataclasses.field(default_factory=list)  # where nothing fits
    steps: float | None = None  # of the whole run
    stated: frozenset[str] = frozenset()  # keys of the layout that the command line names

    def keys(self, c: Candidate) -> str:
        """`layout.*` words that give the recipe this layout."""
        return layout_keys(c.layout, self.recipe.layout, self.stated)

    def words(self, c: Candidate) -> str:
        """The same, with --on where it is on fewer devices."""
        return f"--on {c.n}x{self.cluster.device.name} " * (c.n != self.cluster.n) + self.keys(c)

    def lines(self) -> list[str]:
        on = f"{self.cluster.n:,} × {self.cluster.device.name}"
        out = [f"{self.recipe.name} on {on}: {self.n_estimated:,} layouts estimated, the best traced exactly"]
        if self.fastest is None:
            return [*out, "nothing fits", *self.advice, "", *self._table()]
        seen: dict[int, str] = {}
        for name, best in (("fastest", self.fastest), ("cheapest", self.cheapest), ("fewest devices", self.fewest)):
            if best is None:
                device = self.cluster.device.name
                out.append(f"{name:15} no price of {device} is known (gradus hardware {device})")
                continue
            if id(best) in seen:
                out.append(f"{name:15} the same as the {seen[id(best)]}")
                continue
            seen[id(best)] = name
            devices = f"{best.n:,} device{'s' * (best.n > 1)}: " * (best.n > 1)
            out.append(
                f"{name:15} {devices}{best.describe()}; {duration(best.seconds)} per step{self._cost(best)}; "
                f"{size(best.needed)} of {size(best.capacity)} per device{'' if best.fits else f': {TIGHT}'}"
            )
            out.append(f"{'':15} {self.words(best)}".rstrip())
        return [*out, "", *self._table()]

    def _cost(self, c: Candidate) -> str:
        steps = self.steps or 1000
        whole = f"; {duration(c.run)}" if c.run else ""
        cost = f"{', ' if c.run else '; '}{money(self.charge(c, steps), self.currency)}" if c.money else ""
        return f"{whole}{cost} {'in total' if self.steps else 'for 1,000 steps'}" if whole or cost else ""

    def charge(self, c: Candidate, steps: float) -> float:
        """Money of so many steps, and of the time that is lost beside them."""
        return c.money * steps / c.goodput

    def _table(self) -> list[str]:
        header, body = ["", "devices", "step", "memory", "layout: why it is slower"], []
        for i, c in enumerate(self.table, 1):
            more = [c.layout.schedule] if c.layout.pipeline > 1 else []
            more += [f"param_dtype {c.layout.param_dtype}"] if c.layout.param_dtype else []
            more += ["zero-1"] if c.layout.shard_optimizer else []
            more += [f"micro-batch {c.layout.micro_batch}"] if c.layout.micro_batch else []
            more += [f"checkpointing {c.layout.checkpointing}"] if c.layout.checkpointing != "none" else []
            text = ", ".join([c.describe(), *more]) + (f": {c.reason}" if c.reason else "")
            body.append([str(i), f"{c.n:,}", duration(c.seconds) if c.time else "-", f"{c.needed / 1e9:.1f} GB", text])
        lines = table(header, body, {1, 2, 3})
        keys = (f"{'':{len(str(len(body)))}}  {self.words(c)}".rstrip() for c in self.table)
        return [lines[0], *itertools.chain.from_iterable(zip(lines[1:], keys))]

    def rows(self) -> list[Row]:
        out = []
        for rank, c in enumerate(self.table, 1):
            names = [name for name in ("fastest", "cheapest", "fewest") if getattr(self, name) is c]
            conditions = {
                "rank": rank, "devices": c.n, "layout": self.keys(c), "fits": c.fits, "reason": c.reason or None,
                "best": names or None,
            }  # fmt: skip
            out.append(known_figure("search/memory", c.needed, c.memory, **conditions))
            if c.time:
                out.append(known_figure("search/step", c.seconds, c.parts, **conditions))
            if c.money is not None:
                steps = self.steps or 1000
                hourly = c.money / c.n / c.seconds * 3600
                inputs = {"devices": c.n, "seconds per step": c.seconds, f"{self.currency} per device-hour": hourly}
                conditions |= {"of": "the whole run" if self.steps else "1,000 steps"}
                priced = {
                    "unit": SIGNS.get(self.currency, self.currency),
                    "formula": f"price × devices × {'steps' if self.steps else '1,000 steps'} × seconds / goodput",
                }
                inputs |= {"steps": steps, "goodput": c.goodput}
                out.append(known_figure("search/money", self.charge(c, steps), inputs, **priced, **conditions))
            if c.run is not None:
                inputs = {"steps": self.steps, "seconds per step": c.seconds, "goodput": c.goodput}
                out.append(known_figure("search/time", c.run, inputs, **conditions))
        return out


def search(
    case: Case, cluster: Cluster, *, steps: float | None = None, stated: Collection[str] = (),
    paid: float | None = None, mtbf: float | None = None,
) -> SearchResult:  # fmt: skip
    """The best layouts of a case on `cluster`, and the best of each on n/2, n/4, ... devices of the kind: fastest,
    cheapest (price × devices × time) and on fewest devices.

    steps: of the whole run, where that is known: time and money are of it then. stated: keys of the recipe's layout
    that stay. paid: for a device-hour, in place of the quotes. mtbf: as of `budget.Failures`. Raises UserError where no
    layout is allowed at all.
    """
    space = Space(case, cluster, stated)
    good, large = ranked(space, SHOWN)
    good, n = good[:SHOWN], cluster.n
    while n > 1 and n % 2 == 0 and good:
        n //= 2
        try:
            best, miss = ranked(Space(case, Cluster(cluster.device, n), like=space))
        except UserError:  # not so few: the batch
            break
        good += best[:1]
        large += miss[:1] if not best else []
        if not best:
            break  # fewer devices hold less still
    cost = price(cluster.device, paid=paid)
    for c in good:
        c.money = None if cost is None else cost.expected * c.n * c.seconds / 3600
        lost = Failures.of(case.at(c.layout, n=c.n), mtbf)
        c.goodput = usual_goodput(Cluster(cluster.device, c.n), lost, steps or 1000, c.seconds)
        c.run = steps * c.seconds / c.goodput if steps else None
    good.sort(key=lambda c: c.order)
    fastest = good[0] if good else None
    priced = (c for c in good if c.money is not None)
    cheapest = min(priced, key=lambda c: (not c.fits, c.money / c.goodput, *c.order), default=None)
    fewest = min(good, key=lambda c: (not c.fits, c.n, *c.order), default=None)
    for c in good:
        c.reason = "" if c is fastest else _reason(c, fastest, cluster.device.node)
    large = sorted(large, key=lambda c: (c.needed, c.keys))[:3]
    for c in large:
        c.reason = _too_large(c)
    advice = [] if good else _advice(space, large[0])
    currency = cost.currency if cost else ""
    best = fastest, cheapest, fewest
    return SearchResult(case.recipe, cluster, *best, good + large, space.n_estimated, currency, advice, steps)


def _too_large(c: Candidate) -> str:
    if c.needed <= c.capacity:
        return f"fills {c.needed / c.capacity:.0%} of the memory: more than {HEADROOM:.0%} is not suggested"
    parts = sorted(((bytes_, name) for name, bytes_ in c.memory.items()), reverse=True)[:2]
    largest = ", ".join(f"{name} {bytes_ / 1e9:.0f}" for bytes_, name in parts)
    return f"does not fit: {c.needed / 1e9:.0f} GB of {c.capacity / 1e9:.0f}, {largest}"


def _reason(c: Candidate, best: Candidate, node: int) -> str:
    """The part of the step that costs most more than the winner's."""
    if c.n != best.n:
        return f"{c.seconds / best.seconds:.2f} × the time on {c.n:,} device{'s' * (c.n > 1)}"
    behind = {name: c.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in {*c.parts, *best.parts}}
    if (c.seconds - best.seconds) / best.seconds < 0.005:
        return "as fast, within 0.5 %"
    name = max(sorted(behind), key=lambda part: behind[part])
    percent = f"{100 * c.parts[name] / c.seconds:.0f} %"
    axis = name.removeprefix("comm/")
    if name == "bubble":
        return f"bubble {percent} of the step"
    if name.startswith("comm/"):
        within = "between nodes" if _crosses(c, axis, node) else "within a node"
        return f"{axis} traffic {within} {percent} of the step"
    if name in ("matmul", "attention") and c.layout.checkpointing == "full" != best.layout.checkpointing:
        return f"computes the forward pass again: matrix products {percent} of the step"
    if name == "matmul" and best.parts.get(name):
        return f"matrices too thin: {c.parts[name] / best.parts[name]:.2f} × the time for them"
    return {
        "matmul": f"matrix products {percent} of the step",
        "launch": f"too little work per launch: {percent} of the step waits for the host",
        "memory": f"memory-bound operations {percent} of the step",
        "optimizer": f"the optimizer's step {percent}: its state is not split",
    }.get(name, f"{name} {percent} of the step")


def _crosses(c: Candidate, axis: str, node: int) -> bool:
    stride, shape = strides(c.layout, c.n), sizes(c.layout, c.n)
    axis = {"sequence": "tensor"}.get(axis, axis)
    return stride.get(axis, 1) * shape.get(axis, c.n) > node


def _advice(space: Space, nearest: Candidate) -> list[str]:
    """What would make it fit."""
    out = [f"nearest: {nearest.describe()}: {_too_large(nearest)}"]
    state = sum(nearest.memory[name] for name in ("weights", "gradients", "optimizer"))
    if state < nearest.capacity:
        small = space.recipe.adapter and space.recipe.adapter.base  # which layout.offload leaves on the device
        fix = "use shorter samples (data.max_len)" + ("" if small else ", or layout.offload with layout.shard")
        out.append(f"weights, gradients and optimizer state would fit: {fix}")
    if more := on_more(space):
        out.append(f"it fits on {more.n:,} of them: --on {more.n}x{space.cluster.device.name} {more.keys}".rstrip())
    return out


def on_more(space: Space) -> Candidate | None:
    """The best layout on the fewest of twice, four times, ... as many devices that leave the head room; without that on
    the next that fits."""
    tight = None
    for i in range(1, 11):
        try:
            good, _ = ranked(Space(space.case, Cluster(space.cluster.device, space.n * 2**i), like=space))
        except UserError:
            continue  # the batch cannot be split so far
        if good and (tight or good[0].needed <= HEADROOM * good[0].capacity):
            return min((good[0], tight or good[0]), key=lambda c: (not c.fits, c.needed))
        tight = good[0] if good else None
    return tight


def best_layout(case: Case, cluster: Cluster, stated: Collection[str] = ()) -> engine.Plan:
    """Of the search's first; where none fits of the one that is nearest. stated: as of `Space`. Raises UserError where
    no layout is allowed."""
    good, large = ranked(Space(case, cluster, stated))
    return (good[0] if good else min(large, key=lambda c: (c.needed, c.keys))).plan


def remedy(case: Case, cluster: Cluster) -> Candidate | None:
    """What fits instead of the recipe's layout, the nearest: the loss by chunks, which takes no more time; a smaller
    micro-batch, more checkpointing, both; the best of all layouts on as many devices; then on the fewest more of
    them."""
    space, own = Space(case, cluster), case.layout
    chunked = own.model_copy(update={"loss": "chunked"})
    if own.loss != "chunked" and space.allowed(chunked) and (c := space.evaluate(chunked)).fits:
        return c
    *sizes, most = space.micro_batch_sizes(own)
    now = min(own.micro_batch or most, most)
    ways: tuple[str, ...] = (own.checkpointing,)
    if own.checkpointing in CHECKPOINTING and own.schedule != "zero_bubble":
        ways = CHECKPOINTING[CHECKPOINTING.index(own.checkpointing) :]
    smaller = [now, *(k for k in reversed(sizes) if k < now)]
    for micro, checkpointing in [(micro, way) for way in ways for micro in smaller][1:]:
        layout = own.model_copy(update={"micro_batch": micro, "checkpointing": checkpointing})
        if space.allowed(layout) and space.device_bytes(layout) <= cluster.capacity:
            c = space.evaluate(layout)
            if c.fits:
                return c
    try:
        good, _ = ranked(space)
    except UserError:
        good = []
    return good[0] if good else on_more(space)


def why_free(space: Space, chosen: Layout) -> str:
    """Why the search's first layout leaves much of the memory free: what less checkpointing needs, and how long a step
    takes then; also with the largest smaller micro-batch that leaves the head room, else with the next smaller one."""
    less = CHECKPOINTING[CHECKPOINTING.index(chosen.checkpointing) - 1]
    other = chosen.model_copy(update={"checkpointing": less})

    def takes(layout: Layout) -> str:
        plan = engine.plan(space.case.at(layout))
        seconds = step_time(plan.work, space.cluster).total
        return f"{size(plan.memory.device_total)} of {size(space.cluster.capacity)} and {duration(seconds)} per step"

    text = f"layout.checkpointing={less} would take {takes(other)}"
    micro = (k for k in reversed(space.micro_batch_sizes(chosen)) if k < chosen.micro_batch)
    if smaller := [other.model_copy(update={"micro_batch": k}) for k in micro]:
        limit = HEADROOM * space.cluster.capacity
        best = next((layout for layout in smaller if space.device_bytes(layout) <= limit), smaller[0])
        if space.device_bytes(best) < space.device_bytes(other):  # gradients that are accumulated may take more
            text += f"; with layout.micro_batch={best.micro_batch} also {takes(best)}"
    return text


def fewest_in_time(
    case: Case, cluster: Cluster, steps: float, days: float, *, chosen: bool = True, stated: Collection[str] = (),
    mtbf: float | None = None,
) -> Candidate:  # fmt: skip
    """The layout on the fewest devices, in whole nodes where there are several, with which `steps` are done in so many
    days, the expected goodput counted. chosen: of all layouts, but for the keys that are stated; else the recipe's own,
    which need not fit. mtbf: as of `budget.Failures`. Raises UserError where no number of devices is enough."""
    device = cluster.device
    lost = Failures.of(case, mtbf)
    multiple_of, quickest, n_tried, last_gain = 1 if chosen else needed(case.layout), math.inf, 0, 0

    def days_with(seconds: float, n: int) -> float:
        return seconds * steps / usual_goodput(Cluster(device, n), lost, steps, seconds) / DAY

    space = Space(case, Cluster(device, 1), stated)
    min_device_days, min_devices = days_with(space.at_peak(), 1), space.least_devices() if chosen else 1
    max_devices = device.node if device.network is None and device.kind != "cpu" else MOST_DEVICES
    parts_of_node = (k for k in range(1, device.node) if device.node % k == 0)
    for n in itertools.chain(parts_of_node, range(device.node, max_devices + 1, device.node)):
        if n % multiple_of or n < max(min_device_days / days, min_devices):
            continue
        n_tried += 1
        if n_tried > 2 * last_gain + GIVEN_UP:  # as many without any gain as before the last one
            break
        space = Space(case, Cluster(device, n), like=space)
        if (fastest := space.quickest(chosen)) is None:
            continue
        layout, seconds = fastest
        run_days = days_with(seconds, n)
        last_gain = n_tried if run_days < 0.99 * quickest else last_gain
        device_days = n * run_days * NEAR  # more devices do hardly more each
        min_device_days = min(min_device_days, device_days) if math.isfinite(quickest) else device_days
        quickest = min(quickest, run_days)
        if run_days <= 1.02 * days:
            good = ranked(space)[0][:1] if chosen else [space.evaluate(layout)]
            if good and (not good[0].time or days_with(good[0].seconds, n) <= days):
                return good[0]
    quickest_text = f" The quickest found takes {quickest:,.3g} days." if math.isfinite(quickest) else ""
    raise UserError(
        f"--days={days:g}: no number of {device.name} up to {n:,} finishes in time, given how the batch can be split."
        f"{quickest_text} Give more days, a larger batch.samples, or a faster device."
    )
