"""The search over layouts: every way to split a step over the devices that parallel.check allows, priced in closed form.

Memory first (plan.formulas.memory), for most layouts fall there; then time (plan.analytic and plan.step, with the exact traffic of
plan.formulas.traffic). Nothing is traced unless it is asked for: `confirm=True` traces the memory of the fastest.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.parallel import check
from gradus.plan import formulas
from gradus.plan.keys import layout_keys
from gradus.recipe.axes import DATA, sizes, strides
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row

if TYPE_CHECKING:
    from gradus.tasks.base import Task

SPLIT = {  # what the search decides; all else of the layout stays as the recipe has it
    "micro_batch", "checkpointing", "precision", "replicate", "shard", "reshard", "param_dtype", "reduce_dtype", "offload", "shard_optimizer",
    "tensor", "sequence_parallel", "vocab_parallel", "pipeline", "schedule", "stages", "context", "context_method", "expert", "local_sgd", "diloco",
    "bucket_mb", "compress", "transport",
}  # fmt: skip
ROUNDING = 1.03  # of what tensors take: segments of the caching allocator that are not full (512 bytes, 2 and 20 MiB)
THIN = 512  # tokens of a device's part of a sequence below which layout.context is not tried


@dataclasses.dataclass
class Candidate:
    """A layout on n devices. memory: bytes by component; needed: with rounding and what the framework takes; seconds: of a step, None where
    it was not priced, since it does not fit."""

    layout: Layout
    n: int
    memory: dict[str, float]
    needed: float
    capacity: float
    seconds: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    money: float | None = None  # of a step
    run: float | None = None  # seconds of the whole run, where its length is known
    reason: str = ""  # why it loses
    traced: float | None = None  # bytes of the traced step at its peak, where that was asked for

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    @property
    def keys(self) -> str:
        """What of the layout is not the default, as words."""
        return layout_keys(self.layout)

    def describe(self) -> str:
        axes = [f"{axis} {k}" for axis, k in sizes(self.layout, self.n).items() if k > 1]
        return " × ".join(axes) or "one device"


@dataclasses.dataclass
class Found:
    """What a search came to. table: the best of every way to split, fastest first, then what does not fit, nearest first."""

    recipe: Recipe
    cluster: Cluster
    fastest: Candidate | None
    cheapest: Candidate | None
    fewest: Candidate | None
    table: list[Candidate]
    tried: int
    seconds: float
    complete: bool  # False: the time was up before all were tried
    currency: str = ""
    advice: list[str] = dataclasses.field(default_factory=list)  # where nothing fits
    steps: float | None = None  # of the whole run
    confirmed: str = ""  # what the trace of the fastest says
    said: frozenset[str] = frozenset()  # keys of the layout that the command line names

    def keys(self, c: Candidate) -> str:
        """`layout.*` words that give the recipe this layout."""
        return layout_keys(c.layout, self.recipe.layout, self.said)

    def words(self, c: Candidate) -> str:
        """The same, with --on where it is on fewer devices."""
        return f"--on {c.n}x{self.cluster.device.name} " * (c.n != self.cluster.n) + self.keys(c)

    def lines(self) -> list[str]:
        from gradus.plan.show import size

        on = f"{self.cluster.n:,} × {self.cluster.device.name}"
        cut = "" if self.complete else "; the time was up before all were tried"
        out = [f"{self.recipe.name} on {on}: {self.tried:,} layouts in {self.seconds:.1f} s{cut}"]
        if self.fastest is None:
            return [*out, "nothing fits", *self.advice, "", *self._table()]
        seen: dict[int, str] = {}
        for name, best in (("fastest", self.fastest), ("cheapest", self.cheapest), ("fewest devices", self.fewest)):
            if best is None:
                out.append(f"{name:15} no price of {self.cluster.device.name} is known (gradus hardware {self.cluster.device.name})")
                continue
            if id(best) in seen:
                out.append(f"{name:15} the same as the {seen[id(best)]}")
                continue
            seen[id(best)] = name
            devices = f"{best.n:,} device{'s' * (best.n > 1)}: " * (best.n > 1)
            out.append(
                f"{name:15} {devices}{best.describe()}; {_time(best.seconds)} a step{self._cost(best)}; "
                f"{size(best.needed)} of {size(best.capacity)} a device"
            )
            out.append(f"{'':15} {self.words(best)}")
        if self.confirmed:
            out.append(f"{'traced':15} {self.confirmed}")
        return [*out, "", *self._table()]

    def _cost(self, c: Candidate) -> str:
        from gradus.plan.show import duration, money

        steps = self.steps or 1000
        whole = f"; {duration(c.run)}" if c.run else ""
        cost = f"{', ' if c.run else '; '}{money(self.charge(c, steps), self.currency)}" if c.money else ""
        return f"{whole}{cost} {'in all' if self.steps else 'for 1,000 steps'}" if whole or cost else ""

    def charge(self, c: Candidate, steps: float) -> float:
        """Money of so many steps, and of the time that is lost beside them (`budget.goodput`)."""
        from gradus.plan.budget import usual_goodput

        return c.money * steps / usual_goodput(Cluster(self.cluster.device, c.n))

    def _table(self) -> list[str]:
        rows = [("", "devices", "layout", "micro-batch", "recompute", "step", "GB", "why not")]
        for i, c in enumerate(self.table, 1):
            more = [c.layout.schedule] if c.layout.pipeline > 1 else []
            more += [c.layout.param_dtype + " shards"] if c.layout.param_dtype else []
            more += ["zero-1"] if c.layout.shard_optimizer else []
            step = _time(c.seconds) if c.seconds else "-"
            rows.append((str(i), str(c.n), ", ".join([c.describe(), *more]), str(c.layout.micro_batch or ""), c.layout.checkpointing, step,
                         f"{c.needed / 1e9:.1f}", c.reason))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[7]]).rstrip() for row in rows]
        return [lines[0], *(line for i, c in enumerate(self.table, 1) for line in (lines[i], f"{'':{widths[0]}}  {self.words(c)}"))]

    def rows(self) -> list[Row]:
        from gradus.plan.budget import SIGNS
        from gradus.plan.figures import figure

        out = []
        for rank, c in enumerate(self.table, 1):
            names = [name for name in ("fastest", "cheapest", "fewest") if getattr(self, name) is c]
            conditions = {"rank": rank, "devices": c.n, "layout": self.keys(c), "fits": c.fits, "reason": c.reason or None, "best": names or None}
            source = "closed forms of plan/formulas.py" + ("" if c.traced is None else f"; traced: {c.traced:,.0f} bytes")
            out.append(figure("search/memory", c.needed, "bytes", "components × rounding + framework", c.memory, source, **conditions))
            if c.seconds is not None:
                out.append(figure("search/step", c.seconds, "s", "sum of the parts", c.parts, "plan.step of plan.analytic", **conditions))
            if c.money is not None:
                given = {"devices": c.n, "seconds a step": c.seconds, f"{self.currency} a device-hour": c.money / c.n / c.seconds * 3600}
                source = "the price file (gradus hardware NAME), the usual goodput (plan/budget.py)"
                unit, steps = SIGNS.get(self.currency, self.currency), self.steps or 1000
                text = f"price × devices × {'steps' if self.steps else '1,000 steps'} × seconds / goodput"
                conditions |= {"of": "the whole run" if self.steps else "1,000 steps"}
                out.append(figure("search/money", self.charge(c, steps), unit, text, {**given, "steps": steps}, source, **conditions))
            if c.run is not None:
                given = {"steps": self.steps, "seconds a step": c.seconds}
                out.append(figure("search/time", c.run, "s", "steps × seconds / goodput", given, "plan/budget.py", **conditions))
        return out


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


CONFIRM_S = 15.0  # no further trace is begun after so long


# ---------------------------------------------------------------- one recipe on one kind of device


class _Space:
    """All layouts of a recipe on n devices of a cluster."""

    def __init__(self, recipe: Recipe, cluster: Cluster, quick: bool = False):
        from gradus.plan.counts import shape_of

        shape = shape_of(recipe)
        self.recipe, self.cluster, self.m, self.quick = recipe, cluster, recipe.model, quick
        self.seq_len, self.target_len = shape.source, shape.target or None
        self.selected = shape.selected / shape.source if shape.selected else None
        self.samples = recipe.batch.samples or max(1, recipe.batch.tokens // (shape.source + shape.target))
        device = cluster.device
        self.target = "cpu" if device.kind == "cpu" else "cuda"
        self.capacity = device.capacity
        default = Layout()
        self.base = recipe.layout.model_copy(update={key: getattr(default, key) for key in SPLIT})
        self.precisions = list(self._precisions())
        self.tried = 0

    def _precisions(self) -> Iterator[dict[str, Any]]:
        """The recipe's own; where it says nothing also bf16, if the device has it. Sharded weights may be gathered in half instead of
        cast: the same numbers, without copies that autocast keeps."""
        own, device = self.recipe.layout.precision, self.cluster.device
        has_bf16 = "bf16" in device.peaks or device.kind == "cpu"
        if own == "fp32" and self.recipe.layout.param_dtype:
            yield {"precision": "fp32", "param_dtype": self.recipe.layout.param_dtype}
            return
        yield {"precision": own}
        free = own == "fp32" and "precision" not in self.recipe.layout.model_fields_set and "bf16" in device.peaks
        if free:
            yield {"precision": "bf16"}
        if (own == "bf16" and has_bf16) or free:
            yield {"precision": "fp32", "param_dtype": "bf16"}

    def splits(self, n: int) -> Iterator[dict[str, Any]]:
        """Ways to split over n devices, simple ones first. Every number along an axis divides n."""
        m, node = self.m, self.cluster.device.node
        divisors = [k for k in range(1, n + 1) if n % k == 0]
        experts = [k for k in divisors if k == 1 or (m_experts(m) and m_experts(m) % k == 0)]
        length = self.seq_len
        methods = ("ulysses",) if self.quick else ("ring", "ulysses")
        contexts = [k for k in divisors if k == 1 or (length // k >= THIN and k & (k - 1) == 0 and k <= 64)]
        n_blocks = formulas.anatomy(m).n_blocks
        for tensor in (k for k in divisors if k <= node and (k == 1 or k & (k - 1) == 0)):
            for pipeline in (k for k in divisors if k <= n_blocks and n % (k * tensor) == 0):
                for context in (k for k in contexts if n % (k * tensor * pipeline) == 0):
                    for expert in (k for k in experts if n % (k * tensor * pipeline * context) == 0):
                        left = n // (tensor * pipeline * context * expert)
                        axes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
                        for method in methods if context > 1 else ("ring",):
                            for shard in self._shards(left, tensor * context):
                                yield {**axes, "shard": shard, "context_method": method}

    def _shards(self, left: int, inner: int) -> list[int]:
        """All, none, a node's, and powers of four in between (HSDP)."""
        node = max(1, self.cluster.device.node // inner)
        some = [k for k in (1, left, node, *([] if self.quick else [4**i for i in range(1, 6)])) if k <= left and left % k == 0]
        return sorted(set(some))

    def layouts(self, split: dict[str, Any]) -> Iterator[Layout]:
        """Layouts of a split but for micro-batch and checkpointing."""
        for precision in self.precisions:
            plain = {**split, **precision}
            if split["pipeline"] > 1:
                yield self.base.model_copy(update=plain)
                for schedule, stages in () if self.quick else (("interleaved", 2), ("interleaved", 4), ("zero_bubble", 2), ("zero_bubble", 1)):
                    yield self.base.model_copy(update={**plain, "schedule": schedule, "stages": stages if stages != 2 else None})
            else:
                yield self.base.model_copy(update=plain)
                if split["shard"] > 1:
                    yield self.base.model_copy(update={**plain, "reshard": False})
                else:
                    yield self.base.model_copy(update={**plain, "shard_optimizer": True})

    def allowed(self, layout: Layout, n: int) -> bool:
        """parallel.check's rules, asked one after the other until one says no."""
        recipe = self.recipe.model_copy(update={"layout": layout})
        rules = (check.processes(layout, n), check.fits(self.m, layout), check.batch(recipe, n))
        return not any(next(rule, None) for rule in rules)

    def share(self, layout: Layout, n: int) -> int:
        shape = sizes(layout, n)
        return math.ceil(self.samples / math.prod(shape[axis] for axis in DATA))

    def micro_batches(self, share: int) -> list[int]:
        return sorted({min(share, 2**i) for i in range(0, 8 if self.quick else 11)})

    def price_memory(self, layout: Layout, n: int) -> Candidate:
        self.tried += 1
        recipe = self.recipe
        parts = formulas.memory(
            self.m, layout, n, micro_batch=layout.micro_batch, seq_len=self.seq_len, samples=self.samples, optimizer=recipe.optimizer.name,
            momentum=getattr(recipe.optimizer, "momentum", 0.0), target_len=self.target_len, selected=self.selected,
            label_smoothing=getattr(recipe.task, "label_smoothing", 0.0), target=self.target,
        )  # fmt: skip
        return Candidate(layout, n, parts, sum(parts.values()) * ROUNDING + self.framework(layout, n), self.capacity)

    def framework(self, layout: Layout, n: int) -> float:
        if self.target == "cpu":
            return 0.0
        from gradus.plan.engine import COMMUNICATOR, CONTEXT, WORKSPACE

        axes = sum(k > 1 for k in sizes(layout, n).values())
        return CONTEXT + WORKSPACE + COMMUNICATOR * axes

    def price_time(self, c: Candidate) -> None:
        cluster = Cluster(self.cluster.device, c.n)
        c.seconds, c.parts = _seconds(self, c.layout, cluster)

    def best(self, split: dict[str, Any], n: int, until: float) -> tuple[list[Candidate], Candidate | None]:
        """Of one split: those that fit, priced; and the nearest that does not."""
        fit: list[Candidate] = []
        nearest: Candidate | None = None
        for layout in self.layouts(split):
            share = self.share(layout, n)
            first = layout.model_copy(update={"micro_batch": 1, "checkpointing": "full" if layout.schedule != "zero_bubble" else "none"})
            if not self.allowed(first, n):
                continue
            least = self.price_memory(first, n)
            if not least.fits:
                nearest = least if nearest is None or least.needed < nearest.needed else nearest
                continue
            ways = ("none", "selective", "full") if layout.schedule != "zero_bubble" else ("none",)
            for micro in self.micro_batches(share):
                for checkpointing in ways:  # the first that fits: to compute more again is never faster
                    c = self.price_memory(layout.model_copy(update={"micro_batch": micro, "checkpointing": checkpointing}), n)
                    if c.fits:
                        self.price_time(c)
                        fit.append(c)
                        break
                else:
                    break  # a larger micro-batch needs more
                ways = ways[ways.index(checkpointing) :]
                if time.perf_counter() > until:
                    return fit, nearest
        return fit, nearest


def m_experts(m) -> int | None:
    return getattr(m, "n_experts", None)


def _seconds(space: _Space, layout: Layout, cluster: Cluster) -> tuple[float, dict[str, float]]:
    from gradus.plan.analytic import analytic_work
    from gradus.plan.step import step_time

    known = {"micro_batch": layout.micro_batch or space.share(layout, cluster.n), "seq_len": space.seq_len, "samples": space.samples,
             "target_len": space.target_len, "selected": space.selected}  # fmt: skip
    transfers = formulas.traffic(space.m, layout, cluster.n, **known)
    found = step_time(analytic_work(space.m, layout, cluster.n, transfers=transfers, **known), cluster)
    if layout.context > 1 and layout.context_method == "ring":
        found.parts["memory"] = found.parts.get("memory", 0.0) + _ring_seconds(space, layout, cluster)
    return found.total, found.parts


RING_BYTES = 80  # that a score of the ring's attention, which no fused kernel computes, is read and written, forwards and backwards (traced)


def _ring_seconds(space: _Space, layout: Layout, cluster: Cluster) -> float:
    from gradus.plan.roofline import parameters

    m = space.m
    samples = space.samples / math.prod(sizes(layout, cluster.n)[axis] for axis in DATA)
    layers = formulas.anatomy(m).n_blocks / layout.pipeline
    scores = samples * layers * m.n_heads / layout.tensor * space.seq_len**2 / layout.context
    return scores * RING_BYTES / (cluster.device.bandwidth * parameters(cluster.device)[0].bandwidth)


# ---------------------------------------------------------------- the search


def search(
    recipe: Recipe,
    cluster: Cluster,
    *,
    steps: float | None = None,
    limit_s: float = 30.0,
    top: int = 10,
    fewer: bool = True,
    confirm: bool = False,
    task: Task | None = None,
) -> Found:
    """The best layouts of `recipe` on `cluster`: fastest, cheapest (price × devices × time) and on fewest devices.

    steps: of the whole run, where that is known: time and money are of it then. fewer: also on 1, 2, 4, ... devices of the kind. confirm:
    the memory of the fastest is traced too (task: with its data opened); what then does not fit gives way to the next. The same question has the same
    answer, unless the time (`limit_s`) is up before all layouts are tried. Raises UserError where no layout is allowed at all.
    """
    from gradus.hardware import price

    started = time.perf_counter()
    until = started + limit_s
    space = _Space(recipe, cluster)
    counts = [cluster.n, *([2**i for i in range(cluster.n.bit_length()) if 2**i < cluster.n][::-1] if fewer else [])]
    groups: dict[tuple, Candidate] = {}
    misses: dict[tuple, Candidate] = {}
    complete = True
    cost = price(cluster.device)
    for n in counts:
        space.quick = n != cluster.n
        any_fits = False
        for split in space.splits(n):
            if time.perf_counter() > until:
                complete = False
                break
            fit, nearest = space.best(split, n, until)
            key = (n, *split.values())
            if fit:
                groups[key] = min(fit, key=_fastest_first)
                any_fits = True
            elif nearest is not None:
                misses[key] = nearest
        if not any_fits and n != cluster.n:
            break  # fewer devices hold less still
    if not groups and not misses:
        check.validate(recipe.model_copy(update={"layout": space.base}), cluster.n)  # says what is wrong
        raise UserError(f"{recipe.name}: no layout is allowed on {cluster.n} devices. Take another number of devices, or another batch.samples.")
    for c in groups.values():
        c.money = None if cost is None else cost.expected * c.n * c.seconds / 3600
    ranked = sorted(groups.values(), key=lambda c: (c.seconds, c.n, c.keys))
    searched = time.perf_counter() - started
    confirmed = _confirm(recipe, ranked, misses, cluster, task) if confirm else ""
    if steps:
        from gradus.plan.budget import usual_goodput

        for c in ranked:
            c.run = steps * c.seconds / usual_goodput(Cluster(cluster.device, c.n))
    fastest = ranked[0] if ranked else None
    cheapest = min((c for c in ranked if c.money is not None), key=lambda c: (c.money, c.seconds, c.keys), default=None)
    fewest = min(ranked, key=lambda c: (c.n, c.seconds, c.keys), default=None)
    nearest = sorted(misses.values(), key=lambda c: (c.needed, c.keys))
    for c in ranked:
        c.reason = "" if c is fastest else _reason(c, fastest)
    for c in nearest:
        c.reason = _too_large(c)
    winners = [c for c in (cheapest, fewest) if c is not None]
    table = ranked[:top] + [c for i, c in enumerate(winners) if c not in ranked[:top] and c not in winners[:i]]
    table += nearest[: max(3, top - len(table))]
    found = Found(recipe, cluster, fastest, cheapest, fewest, table, space.tried, searched, complete)
    found.currency, found.steps, found.confirmed = cost.currency if cost else "", steps, confirmed
    if fastest is None:
        space.quick = True
        found.advice = _advice(space, nearest[0])
    return found


def _confirm(recipe: Recipe, ranked: list[Candidate], misses: dict[tuple, Candidate], cluster: Cluster, task: Task | None) -> str:
    """Traces the fastest; one that does not fit so is taken out of `ranked` into `misses`. Returns what to say."""
    from gradus.plan.show import size

    said, more, started = "", 1.0, time.perf_counter()
    while ranked and time.perf_counter() - started < CONFIRM_S:
        c = ranked[0]
        if c.needed * more > c.capacity:  # by as much more as the trace of its like takes
            ranked.pop(0)
            c.needed, c.seconds, c.money = c.needed * more, None, None
            misses[(c.n, c.keys)] = c
            continue
        try:
            c.traced = _traced(recipe, c, cluster, task)
        except UserError as e:
            return f"{said}the fastest could not be traced ({str(e).rstrip('.')}); its memory is by closed forms"
        if c.traced <= c.capacity:
            return f"{said}the fastest takes {size(c.traced)} a device; the closed form says {size(c.needed)}"
        said += f"{c.describe()}, micro-batch {c.layout.micro_batch}, does not fit: {size(c.traced)}, {size(c.needed)} by the closed form; "
        more = max(more, c.traced / c.needed)
        ranked.pop(0)
        c.needed, c.seconds, c.money = c.traced, None, None
        misses[(c.n, c.keys)] = c
    return f"{said}nothing else fits" if not ranked else f"{said}the rest was not traced: gradus plan with the keys does it"


def _traced(recipe: Recipe, c: Candidate, cluster: Cluster, task: Task | None) -> float:
    """Bytes that the device shows as taken."""
    from gradus.plan.engine import plan_memory

    target = "cpu" if cluster.device.kind == "cpu" else "cuda"
    return plan_memory(recipe.model_copy(update={"layout": c.layout}), c.n, target=target, device=cluster.device, task=task).device_total


def _too_large(c: Candidate) -> str:
    parts = sorted(((bytes_, name) for name, bytes_ in c.memory.items()), reverse=True)[:2]
    largest = ", ".join(f"{name} {bytes_ / 1e9:.0f}" for bytes_, name in parts)
    return f"does not fit: {c.needed / 1e9:.0f} GB of {c.capacity / 1e9:.0f}, {largest}"


def _reason(c: Candidate, best: Candidate) -> str:
    """The part of the step that costs most more than the winner's."""
    if c.n != best.n:
        return f"{c.n} device{'s' * (c.n > 1)}: {c.seconds / best.seconds:.2f} × the time"
    behind = {name: c.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in {*c.parts, *best.parts}}
    if (c.seconds - best.seconds) / best.seconds < 0.005:
        return "as fast, within half a per cent"
    name = max(sorted(behind), key=lambda part: behind[part])
    percent = f"{100 * c.parts[name] / c.seconds:.0f} %"
    axis = name.removeprefix("comm/")
    if name == "bubble":
        return f"bubble {percent} of the step"
    if name.startswith("comm/"):
        within = "between nodes" if _crosses(c, axis) else "within a node"
        return f"{axis} traffic {within} {percent} of the step"
    if name in ("matmul", "attention") and c.layout.checkpointing == "full" != best.layout.checkpointing:
        return f"computes the forward pass again: matrix products {percent} of the step"
    return {
        "matmul": f"matrices too thin: {c.parts['matmul'] / best.parts['matmul']:.2f} × the time for them" if best.parts.get("matmul") else "matmul",
        "launch": f"too little work a launch: {percent} of the step waits for the host",
        "memory": f"memory-bound operations {percent} of the step",
        "optimizer": f"the optimizer's step {percent}: its state is not split",
    }.get(name, f"{name} {percent} of the step")


def _crosses(c: Candidate, axis: str) -> bool:
    stride, shape = strides(c.layout, c.n), sizes(c.layout, c.n)
    axis = {"sequence": "tensor"}.get(axis, axis)
    return stride.get(axis, 1) * shape.get(axis, c.n) > 8


def _advice(space: _Space, nearest: Candidate) -> list[str]:
    """What would make it fit."""
    out = [f"nearest: {nearest.describe()}: {_too_large(nearest)}"]
    state = sum(nearest.memory[name] for name in ("weights", "gradients", "optimizer"))
    if state < nearest.capacity:
        out.append("weights, gradients and optimizer state would fit: take shorter samples (data.max_len), or layout.offload with layout.shard")
    more = next((space.cluster.n * 2**i for i in range(1, 11) if _fits_on(space, space.cluster.n * 2**i)), None)
    if more:
        out.append(f"by closed forms it fits on {more:,} of them: --on {more}x{space.cluster.device.name}")
    return out


def _fits_on(space: _Space, n: int) -> bool:
    wide = _Space(space.recipe, Cluster(space.cluster.device, n), quick=True)
    for split in wide.splits(n):
        for layout in wide.layouts(split):
            layout = layout.model_copy(update={"micro_batch": 1, "checkpointing": "full"})
            if wide.allowed(layout, n) and wide.price_memory(layout, n).fits:
                return True
    return False


def _fastest_first(c: Candidate) -> tuple:
    return c.seconds, c.keys


def best_candidates(recipe: Recipe, cluster: Cluster, *, limit_s: float = 6.0) -> list[Candidate]:
    """The best of each way to split that fits, of fewer kinds (schedules of a pipeline are varied for the three fastest alone), fastest
    first, in some seconds; where none fits the one that needs least. Raises UserError as `search`."""
    until = time.perf_counter() + limit_s
    space = _Space(recipe, cluster, quick=True)
    best: list[Candidate] = []
    nearest: Candidate | None = None
    for split in space.splits(cluster.n):
        fit, miss = space.best(split, cluster.n, until)
        if fit:
            best.append(min(fit, key=_fastest_first))
        if miss is not None and (nearest is None or miss.needed < nearest.needed):
            nearest = miss
        if time.perf_counter() > until and (best or nearest):
            break
    best.sort(key=_fastest_first)
    for c in [c for c in best[:3] if c.layout.pipeline > 1]:
        for stages in (None, 4):
            layout = c.layout.model_copy(update={"schedule": "interleaved", "stages": stages})
            if space.allowed(layout, cluster.n) and (other := space.price_memory(layout, cluster.n)).fits:
                space.price_time(other)
                best.append(other)
    found = sorted(best, key=_fastest_first) or ([nearest] if nearest else [])
    if not found:
        check.validate(recipe.model_copy(update={"layout": space.base}), cluster.n)
        raise UserError(f"{recipe.name}: no layout is allowed on {cluster.n} devices. Take another number of devices, or another batch.samples.")
    return found


def remedies(recipe: Recipe, cluster: Cluster) -> Iterator[Candidate]:
    """What would fit instead of the recipe's layout, by closed form, nearest first: other checkpointing, a smaller micro-batch, both; the
    best of all layouts on as many devices; then the fewest more of them."""
    own, n = recipe.layout, cluster.n
    space = _Space(recipe, cluster, quick=True)
    share = space.share(own, n)
    now = min(own.micro_batch or share, share)
    stronger = ("none", "selective", "full")
    ways = stronger[stronger.index(own.checkpointing) :] if own.schedule != "zero_bubble" else (own.checkpointing,)
    smaller = [now, *(2**i for i in range(12, -1, -1) if 2**i < now)]
    for micro, checkpointing in [(now, way) for way in ways[1:]] + [(micro, way) for way in ways for micro in smaller[1:]]:
        layout = own.model_copy(update={"micro_batch": micro, "checkpointing": checkpointing})
        if space.allowed(layout, n) and (c := space.price_memory(layout, n)).fits:
            yield c
    for more in (n, *(n * 2**i for i in range(1, 11))):
        try:
            c = best_candidates(recipe, Cluster(cluster.device, more))[0]
        except UserError:
            continue  # the batch cannot be split so far
        if c.fits:
            yield c
            return


def quick_time(recipe: Recipe, cluster: Cluster) -> float:
    """Seconds of one step of the recipe's own layout, in closed form."""
    space = _Space(recipe, cluster)
    return _seconds(space, recipe.layout, cluster)[0]
