"""Memory and work of a step too large to trace whole: few layers, stages and micro-batches are traced, and extended exactly.

A step's allocations and releases repeat with every layer and every micro-batch: with one layer more, a stretch is inserted into the
sequence of events, and the bytes alive at any other event change by a fixed amount. So of two traces, with k and k + 1 layers, the
events are matched from the front and from the back, and the bytes at each are a straight line in the number of layers. Those of the
layers in between lie between their ends, as they are a straight line too; so the largest of the matched ones is the peak. That the two
traces match in full is checked (`Unequal`); where they do not, the step is traced whole. The same goes, one after the other, for the
layers of a decoder, the stages of a pipeline and the micro-batches, and for operations and transfers, which are only counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from gradus import models
from gradus.errors import UserError
from gradus.hardware import Device
from gradus.plan import batches as making
from gradus.plan.trace import Target, Traced, collecting, notes_of, trace_recipe
from gradus.plan.work import COMPONENTS, Op, Transfer, Work
from gradus.recipe.axes import sizes, stages_per_process
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task

MiB = 2**20
NAMES = list(COMPONENTS)
# What a GPU's programs take besides tensors (PLANNING: CUDA context and kernels 0.3 to 2 GB, cuBLAS 32 MiB a handle on H100, NCCL about
# 0.5 GB a communicator, 1 GB and more seen).
CONTEXT, WORKSPACE, COMMUNICATOR = 0.5e9, 32 * MiB, 0.5e9


@dataclasses.dataclass
class Memory:
    """Of the rank that needs most, in bytes."""

    components: dict[str, int]  # as work.COMPONENTS, at the peak; they sum to `allocated`
    allocated: int  # the peak of live tensors
    reserved: int  # what the caching allocator has taken for them
    framework: int  # CUDA context, libraries' workspaces, communicators; 0 on a CPU, whose processes were not measured
    capacity: float | None  # what a program can have of the device
    rank: int
    at: str  # what was going on at the peak
    held: dict[str, int]  # weights, gradients and optimizer state that the rank holds, live at the peak or not
    parameters: int
    notes: list[str]

    @property
    def device_total(self) -> int:
        """What the device shows as taken."""
        return self.reserved + self.framework


class Unequal(Exception):
    """Two traces do not match: they cannot be extended."""


# ---------------------------------------------------------------- a trace as a sequence

SMALL = 1024  # bytes


@dataclasses.dataclass
class Steps:
    """The allocations of a step, and what is alive after each: bytes by component, then by pool of the caching allocator. Those below
    SMALL have no row of their own; a row is of the moment with most between its allocation and the next."""

    keys: list[tuple]  # (operation, bytes)
    levels: np.ndarray  # (allocations + 1, components + 3); the first row is the start
    at: list[str]  # phase of each row
    # each → (how often, bytes of all); the size in the key is None where sizes differ
    ops: dict[tuple, tuple[float, float]]  # (scope, kind, name, dtype, phase, flops, bytes, shape)
    transfers: dict[tuple, tuple[float, float]]  # (axis, kind, payload, group, stride, phase, hidden)
    held: dict[str, int]


def _pool(nbytes: int) -> tuple[int, int]:
    """(pool, bytes taken) of one tensor in PyTorch's caching allocator: small ones in segments of 2 MiB, those up to 10 MiB in segments
    of 20 MiB, both in units of 512 bytes; larger ones in segments of their own, in units of 2 MiB (c10/cuda/CUDACachingAllocator)."""
    rounded = -(-nbytes // 512) * 512
    if rounded <= MiB:
        return 0, rounded
    if rounded < 10 * MiB:
        return 1, rounded
    return 2, -(-rounded // (2 * MiB)) * 2 * MiB


def steps_of(traced: Traced) -> Steps:
    timeline, start = traced.timeline, traced.start
    ends = timeline.forward_ends()
    columns: dict[int, tuple[int, int, int]] = {}
    for s in timeline.all:
        columns[id(s)] = (NAMES.index(s.tag or timeline.by_life(s, ends)), *_pool(s.nbytes))
    width = len(NAMES) + 3
    level = np.zeros(width, np.int64)
    for s, change in timeline.events[:start]:
        component, pool, rounded = columns[id(s)]
        level[component] += change
        level[len(NAMES) + pool] += rounded if change > 0 else -rounded
    phase_at = _phases(timeline, start)
    keys, rows, at, best = [], [level.copy()], [phase_at(start)], 0
    for i, (s, change) in enumerate(timeline.events[start:], start):
        component, pool, rounded = columns[id(s)]
        level[component] += change
        level[len(NAMES) + pool] += rounded if change > 0 else -rounded
        if change <= 0:
            continue
        total = level[: len(NAMES)].sum()
        if change >= SMALL:
            keys.append((s.name, s.nbytes))
            rows.append(level.copy())
            at.append(phase_at(i))
            best = total
            continue
        pools = np.maximum(rows[-1][len(NAMES) :], level[len(NAMES) :])
        if total > best:
            rows[-1], at[-1], best = level.copy(), phase_at(i), total
        rows[-1][len(NAMES) :] = pools
    ops = {key: (count, count * key[6]) for key, count in traced.ops.items()}
    transfers = {key: (calls, calls * key[2]) for key, calls in traced.transfers.items()}
    return Steps(keys, np.array(rows), at, ops, transfers, dict(traced.held))


def _phases(timeline: Any, start: int) -> Callable[[int], str]:
    starts = np.array([i for i, _ in timeline.phases])
    names = [name for _, name in timeline.phases]
    return lambda i: names[int(np.searchsorted(starts, i, side="right")) - 1]


# ---------------------------------------------------------------- the extension


def combine(a: Steps, b: Steps, k: float) -> Steps:
    """From steps with x and x + 1 of something to those with x + k. Raises Unequal."""
    pairs = matched(a.keys, b.keys)
    of_a, of_b = (np.array([0, *(pair[i] + 1 for pair in pairs)]) for i in (0, 1))
    levels = a.levels[of_a] + k * (b.levels[of_b] - a.levels[of_a])

    def line(x: dict, y: dict) -> dict:
        none = (0,) * 2
        return {key: tuple(u + k * (v - u) for u, v in zip(x.get(key, none), y.get(key, none))) for key in {**x, **y}}

    ops, transfers = line(*_alike(a.ops, b.ops, 6)), line(*_alike(a.transfers, b.transfers, 2))
    held = {key: int(value + k * (b.held[key] - value)) for key, value in a.held.items()}
    return Steps([a.keys[i] for i, _ in pairs], levels, [a.at[i] for i in of_a], ops, transfers, held)


WINDOWS = (24, 8, 3)  # events by which a place is known again: fewer where the next insertion is near


def matched(a: list[tuple], b: list[tuple]) -> list[tuple[int, int]]:
    """Which events of `a` are which of `b`, where b has stretches inserted that a has at that place one time less, and a few tensors of
    other sizes (with one number a parameter). Before an insertion the events are matched twice: from the front, and from behind it.
    Raises Unequal."""
    pairs: list[tuple[int, int]] = []
    i = j = since = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        shifts = [d for d in range(len(b) - j + 1) if _like_before(a, b, i, j, d, since)]
        skip = next((d for n in WINDOWS for strict in (True, False) for d in shifts if _again(a, b, i, j + d, n, strict)), None)
        if skip is None:
            raise Unequal(f"event {i} of {len(a)}: {a[i : i + 3]} against {b[j : j + 3]}")
        if skip == 0:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        # the last of what is repeated is told from behind, by its end; what comes before it may be the first, and unlike
        pairs += [(i - t, j + skip - t) for t in range(skip, 0, -1)]
        since, j = i, j + skip
    return pairs


def _like_before(a: list[tuple], b: list[tuple], i: int, j: int, n: int, since: int) -> bool:
    """Whether n events inserted in b are those that a has before this place."""
    return i - since >= n and all(a[i - t][0] == b[j + n - t][0] for t in range(1, n + 1))


def _again(a: list[tuple], b: list[tuple], i: int, j: int, window: int, strict: bool) -> bool:
    """Whether the next `window` events are the same, or all to the end; unless strict, but for a few sizes."""
    n = min(window, len(a) - i)
    if len(b) - j < n or (n < window and len(b) - j != n):
        return False
    if strict:
        return a[i : i + n] == b[j : j + n]
    pairs = list(zip(a[i : i + n], b[j : j + n]))
    return all(x[0] == y[0] for x, y in pairs) and sum(x == y for x, y in pairs) >= min(n - 4, 0.6 * n)


def _alike(a: dict, b: dict, place: int) -> tuple[dict, dict]:
    """Where those of one kind have other sizes in the two (buckets of gradients, lists of all parameters), all of that kind are taken
    together. place: where in a key the size stands; None stands there then."""

    def bare(key: tuple) -> tuple:
        return (*key[:place], None, *key[place + 1 :])

    found: list[dict[tuple, set]] = [{}, {}]
    for of, counted in zip(found, (a, b)):
        for key in counted:
            of.setdefault(bare(key), set()).add(key[place])
    uneven = {key for key in {**found[0], **found[1]} if found[0].get(key) != found[1].get(key)}
    out: list[dict] = [{}, {}]
    for merged, counted in zip(out, (a, b)):
        for key, (count, total) in counted.items():
            to = bare(key) if bare(key) in uneven else key
            old = merged.get(to, (0, 0))
            merged[to] = (old[0] + count, old[1] + total)
    return out[0], out[1]


@dataclasses.dataclass
class Dimension:
    name: str
    base: int  # traced with base and base + 1
    target: int


def extend(dimensions: list[Dimension], trace: Callable[[dict[str, int]], Steps]) -> Steps:
    """What `trace` would give at all targets. The last dimension is the outermost. Raises Unequal."""
    if not dimensions:
        return trace({})
    *inner, d = dimensions

    def at(value: int) -> Steps:
        return extend(inner, lambda values: trace({**values, d.name: value}))

    if d.target <= d.base + 1:
        return at(d.target)
    return combine(at(d.base), at(d.base + 1), d.target - d.base)


# ---------------------------------------------------------------- what is traced of a recipe


@dataclasses.dataclass
class Case:
    """One rank, and how to trace it small."""

    rank: int
    dimensions: list[Dimension]
    trace: Callable[[dict[str, int]], Steps]
    micro_batches: int  # that are traced
    more: int = 0  # that there are besides: each adds its operations, and its batch and buffers to what is alive
    each: Callable[[], np.ndarray] | None = None  # what it adds


def _layers(recipe: Recipe) -> tuple[int, int | None]:
    model = recipe.model
    decoder = (getattr(model, "n_decoder_layers", None) or model.n_layers) if len(models.lookup(model.family).stacks) > 1 else None
    return model.n_layers, decoder


def _resized(recipe: Recipe, encoder: int, decoder: int | None, **layout: Any) -> Recipe:
    update = {"n_layers": encoder} | ({"n_decoder_layers": decoder} if decoder is not None else {})
    return recipe.model_copy(
        update={"model": recipe.model.model_copy(update=update), "layout": recipe.layout.model_copy(update=layout)}
    )


BASE = 3  # layers: FSDP keeps what it reduces for as long as two blocks take


def cases(recipe: Recipe, n: int, target: Target, task: Task | None, given: list[dict] | None = None) -> list[Case]:
    """The ranks that may need most: of a pipeline the first stage and the last."""
    recipe = recipe if task is not None else making.complete(recipe)
    layout = recipe.layout
    given = given or making.micro_batches(recipe, n, task=task)
    full = max(given, key=making.size_of)
    tail = given[-1] if making.size_of(given[-1]) < making.size_of(full) and task is None else None
    whole = len(given) - (tail is not None)
    encoder, decoder = _layers(recipe)

    def batches(count: int) -> list[dict]:
        return [full] * count + ([tail] if tail is not None else [])

    if layout.pipeline == 1:
        base = BASE if layout.shard > 1 else 2
        dimensions = [Dimension("encoder", base, encoder)]
        if decoder is not None:
            dimensions.append(Dimension("decoder", base, decoder))
        dimensions.append(Dimension("micro", 2 if n == 1 else 3, whole))  # of several the first and the last are unlike the others

        def trace(v: dict[str, int]) -> Steps:
            small = _resized(recipe, v["encoder"], v.get("decoder"))
            return steps_of(trace_recipe(small, n, 0, target=target, task=task, micro_batches=batches(v["micro"])))

        return [Case(0, dimensions, trace, len(given))]
    return _pipeline_cases(recipe, n, target, task, full, len(given), encoder, decoder)


def _pipeline_cases(
    recipe: Recipe, n: int, target: Target, task: Task | None, full: dict, count: int, encoder: int, decoder: int | None
) -> list[Case]:
    layout = recipe.layout
    stages, each = layout.pipeline, n // layout.pipeline
    blocks = encoder + (decoder or 0)
    per = stages_per_process(layout)
    bounds = [-(-blocks * s // (stages * per)) for s in range(stages * per + 1)]
    first, last = bounds[1], bounds[-1] - bounds[-2]
    simple = per == 1 and layout.schedule in ("1f1b", "gpipe")
    inside = decoder is None or (first < encoder and last < decoder and stages >= 3)
    if not (simple and inside):
        ranks = (0, n - each) if per == 1 else (0,)

        traced = min(count, 2 * stages) if layout.schedule != "gpipe" else count  # more are not under way at a time

        def whole(rank: int) -> Callable[[dict[str, int]], Steps]:
            return lambda v: steps_of(trace_recipe(recipe, n, rank, target=target, task=task, micro_batches=[full] * traced))

        def of_one() -> np.ndarray:
            level = np.zeros(len(NAMES) + 3, np.int64)
            size = _bytes(full) + (4 * full["image"].numel() if "image" in full else 0)  # of images also the numbers made of them
            level[NAMES.index("activations")], level[len(NAMES) + _pool(size)[0]] = size, _pool(size)[1]
            return level

        return [Case(rank, [], whole(rank), traced, count - traced, of_one) for rank in ranks]

    if layout.schedule == "1f1b":
        count = max(count, stages)  # the schedule is filled up with idle ones
    least = 2 if decoder is None else 3

    def small(v: dict[str, int], rank_of: Callable[[int], int], micro: int) -> Steps:
        p, per_stage = v.get("pipeline", least), v["blocks"]
        if decoder is None:
            sized = _resized(recipe, p * per_stage, None, pipeline=p)
        elif rank_of(p) == 0:
            sized = _resized(recipe, 2 * per_stage, (p - 2) * per_stage, pipeline=p)
        else:
            sized = _resized(recipe, per_stage, (p - 1) * per_stage, pipeline=p)
        return steps_of(trace_recipe(sized, each * p, rank_of(p), target=target, task=task, micro_batches=[full] * micro))

    last_rank = lambda p: each * (p - 1)  # noqa: E731
    if layout.schedule == "gpipe":
        micro = Dimension("micro", least, count)
        return [
            Case(rank(stages), [Dimension("blocks", BASE, held), micro], lambda v, rank=rank: small(v, rank, v["micro"]), count)
            for rank, held in ((lambda p: 0, first), (last_rank, last))
        ]
    # 1f1b: the first stage has as many micro-batches under way as there are stages, the last one has one
    base = BASE if layout.shard > 1 else 2
    more = min(1, count - stages)  # with one more than stages the first micro-batches' gradients are there while the last is under way
    front = [Dimension("blocks", base, first), Dimension("pipeline", least, stages)]
    rear = [Dimension("blocks", base, last), Dimension("micro", least, count)]

    def of_another() -> np.ndarray:
        few, many = (small({"blocks": 1, "pipeline": least}, lambda p: 0, least + i).levels[0] for i in (0, 1))
        return many - few

    def at_front(v: dict[str, int]) -> Steps:
        return small(v, lambda p: 0, v["pipeline"] + more)

    return [
        Case(0, front, at_front, stages + more, count - stages - more, of_another),
        Case(last_rank(stages), rear, lambda v: small(v, last_rank, v["micro"]), count),
    ]


WHOLE = 256  # blocks, times micro-batches, that are traced whole where nothing can be extended


def extended(recipe: Recipe, case: Case, notes: list[str]) -> Steps:
    """The case's step; whole where it cannot be extended. Raises UserError where that would take too long."""
    steps = None
    for later in (0, 1, 2):  # what is repeated may show only after a few
        dimensions = [dataclasses.replace(d, base=min(d.base + later, d.target)) for d in case.dimensions]
        with contextlib.suppress(Unequal):
            steps = extend(dimensions, case.trace)
            break
    if steps is None:
        targets = {d.name: d.target for d in case.dimensions}
        blocks = sum(v for k, v in targets.items() if k in ("encoder", "decoder", "blocks"))
        if blocks * case.micro_batches > WHOLE:
            layout = ", ".join(f"{k}={v}" for k, v in recipe.layout.model_dump(exclude_defaults=True).items())
            raise UserError(f"layout ({layout}): a step of this model does not repeat layer by layer, and is too large to trace whole.")
        notes.append("The step does not repeat layer by layer: it was traced whole.")
        steps = case.trace(targets)
    if not case.more:
        return steps
    levels, times = steps.levels + case.more * case.each(), (case.micro_batches + case.more) / case.micro_batches
    ops = {key: tuple(x * times for x in v) if key[0] == "micro" else v for key, v in steps.ops.items()}
    transfers = {key: tuple(x * times for x in v) if key[5] != "optimizer" else v for key, v in steps.transfers.items()}
    return dataclasses.replace(steps, levels=levels, ops=ops, transfers=transfers)


# ---------------------------------------------------------------- answers


_kept: dict[tuple, tuple[Steps, list[str], Any]] = {}  # of the last recipes asked for: memory and work come from one trace


def _steps(recipe: Recipe, n: int, target: Target, task: Task | None, given: list[dict] | None, notes: list[str]) -> list[tuple[Case, Steps]]:
    """The step of each case. given: micro-batches to trace with; None: the recipe's own."""
    out = []
    with collecting():
        for case in cases(recipe, n, target, task, given):
            if given is not None:
                out.append((case, extended(recipe, case, notes)))
                continue
            text = making.complete(recipe).model_dump_json(exclude={"name", "log", "evaluate", "schedule"})
            key = (text, n, case.rank, target, id(task))
            if key not in _kept:
                while len(_kept) >= 8:
                    _kept.pop(next(iter(_kept)))
                told: list[str] = []
                _kept[key] = extended(recipe, case, told), told, task
            steps, told, _ = _kept[key]
            notes += (note for note in told if note not in notes)
            out.append((case, steps))
    return out


def plan_memory(recipe: Recipe, n: int = 1, *, target: Target = "cpu", device: Device | None = None, task: Task | None = None) -> Memory:
    """The memory of one optimizer step of the rank that needs most. Raises UserError as `trace_recipe`.

    reserved: each pool of PyTorch's caching allocator at its own peak, as if free blocks of a pool were always used again; what
    fragmentation adds is not in it. On a CPU it is what is allocated.
    """
    found = []
    notes = notes_of(recipe)
    for case, steps in _steps(recipe, n, target, task, None, notes):
        totals = steps.levels[:, : len(NAMES)].sum(1)
        top = int(totals.argmax())
        found.append((round(totals[top]), top, case, steps))
    peak, top, case, steps = max(found, key=lambda f: f[0])
    components = {name: round(v) for name, v in zip(NAMES, steps.levels[top])}
    layout = recipe.layout
    if layout.shard > 1 and layout.pipeline == 1 and case.micro_batches > 1:
        notes.append(
            f"FSDP keeps gradients whole while {case.micro_batches} micro-batches add up: {components['gradients'] / 1e9:,.1f} GB at the peak. "
            "layout.micro_batch=null (all samples at once) or layout.pipeline keeps a part of them."
        )
    reserved, framework = peak, 0
    if target == "cuda":
        small, middle, large = (float(x) for x in steps.levels[:, len(NAMES) :].max(0))
        reserved = int(-(-small // (2 * MiB)) * 2 * MiB + -(-middle // (20 * MiB)) * 20 * MiB + large)
        groups = {(key[0], key[3]) for key in steps.transfers}
        framework = int(CONTEXT + WORKSPACE + COMMUNICATOR * len(groups))
    return Memory(
        components, peak, reserved, framework, device.capacity if device else None, case.rank, steps.at[top], steps.held,
        parameters(recipe), notes,
    )  # fmt: skip


def parameters(recipe: Recipe) -> int:
    return models.count(making.complete(recipe).model)["total"]


def traced_work(
    recipe: Recipe, n: int = 1, *, target: Target = "cuda", task: Task | None = None, micro_batches: list[dict] | None = None
) -> Work:
    """The work of one optimizer step of the stage that computes most. Raises UserError as `trace_recipe`."""
    recipe = recipe if task is not None else making.complete(recipe)
    given = micro_batches or making.micro_batches(recipe, n, task=task)
    best = None
    for case, steps in _steps(recipe, n, target, task, given if micro_batches is not None else None, []):
        operations = sum(key[5] * count for key, (count, _) in steps.ops.items())
        if best is None or operations > best[0]:
            best = operations, case, steps
    _, case, steps = best
    return work_of(recipe, n, case, steps, given, model_flops(recipe, n, given, task))


def work_of(recipe: Recipe, n: int, case: Case, steps: Steps, given: list[dict], flops: float) -> Work:
    layout = recipe.layout
    micro, step = [], []
    for (scope, kind, name, dtype, phase, operations, _, shape), (count, total) in steps.ops.items():
        if count <= 0:
            continue
        moved = total / count
        dtype = "tf32" if layout.tf32 and dtype == "fp32" and kind == "matmul" else dtype
        if scope == "micro":
            phase = "forward" if phase == "loss" else phase
            micro.append(Op(kind, name, dtype, phase, operations, moved, shape, count / (case.micro_batches + case.more)))
        else:
            step.append(Op(kind, name, dtype, "optimizer", operations, moved, shape, count))
    size = sizes(layout, n)
    world = {"pipeline": layout.pipeline}
    transfers = []
    for (axis, kind, _, group, stride, phase, hidden), (calls, total) in steps.transfers.items():
        if calls > 0:
            group = n if axis == "control" and group > max(size.values()) else world.get(axis, group)
            transfers.append(Transfer(axis, kind, total / calls, calls, group, stride, phase, hidden))
    ranks = size["replicate"] * size["expert"] * size["shard"]
    samples = sum(_samples(b) for b in given)
    return Work(
        micro=micro, step=step, transfers=transfers, micro_batches=case.micro_batches + case.more, stages=layout.pipeline,
        virtual=stages_per_process(layout), schedule=layout.schedule, samples=samples * ranks,
        tokens=sum(places(b) for b in given) * ranks, model_flops=flops * ranks, data_bytes=sum(_bytes(b) for b in given),
    )  # fmt: skip


def _samples(batch: dict) -> int:
    return len(next(v for v in batch.values() if hasattr(v, "nbytes")))


def _bytes(batch: dict) -> int:
    return sum(v.nbytes for v in batch.values() if hasattr(v, "nbytes"))


def places(batch: dict) -> int:
    """Tokens with padding; of images the patches."""
    return batch["n_tokens"] if "image" in batch or "images" in batch else making.size_of(batch)


def model_flops(recipe: Recipe, n: int, given: list[dict], task: Task | None = None) -> float:
    """Of these micro-batches, forward and backward: no recomputation, attention's full matrix (Chowdhery et al. 2022, appendix B)."""
    plain = recipe.model_copy(update={"layout": Layout(device="cpu")})
    full = max(given, key=making.size_of)
    encoder, decoder = _layers(recipe)
    dimensions = [Dimension("encoder", 1, encoder)] + ([Dimension("decoder", 1, decoder)] if decoder is not None else [])

    def trace(v: dict[str, int]) -> Steps:
        return steps_of(trace_recipe(_resized(plain, v["encoder"], v.get("decoder")), task=task, micro_batches=[full]))

    def count(dimensions: list[Dimension], values: dict[str, int]) -> float:
        if not dimensions:
            return sum(_model_operations(key) * times for key, (times, _) in trace(values).ops.items())
        *inner, d = dimensions
        low = count(inner, {**values, d.name: d.base})
        return low if d.target == d.base else low + (d.target - d.base) * (count(inner, {**values, d.name: d.base + 1}) - low)

    of_full = count(dimensions, {})
    return sum(of_full * making.size_of(b) / making.size_of(full) for b in given)


def _model_operations(key: tuple) -> float:
    scope, kind, name, _, phase, flops, _, shape = key
    if scope != "micro" or phase == "recompute" or kind == "memory":
        return 0.0
    if kind == "attention":  # backwards four products; that fused kernels compute the scores again is no work of the model
        batch, heads, queries, keys, dim = shape
        return 2 * batch * heads * queries * keys * dim * (4 if name.endswith("backward") else 2)
    return flops


