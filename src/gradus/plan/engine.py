"""The one engine: a recipe and its layout → the memory and the work of a step on the processes that need most.

Each kind of part (the blocks and ends that a process holds) is traced once for what changes it (`plan.profiles`), kept on disk, and put
together for the layout (`plan.compose`, `plan.traffic`). What is printed, what ranks layouts and what a run is refused for is this.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from gradus import __version__, files, limits, models
from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel import pipeline as pipelines
from gradus.plan import batches as making
from gradus.plan import compose, profiles, traffic
from gradus.plan.compose import Stage
from gradus.plan.profiles import NAMES, MiB, Part, Profile
from gradus.plan.trace import Target
from gradus.plan.work import Op, Work, op_of, transfer_of
from gradus.recipe.axes import sizes, stages_per_process, strides
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task
from gradus.train import machine

# What a GPU's programs take besides tensors (CUDA context and kernels 0.3 to 2 GB, cuBLAS 32 MiB a handle on H100, NCCL about 0.5 GB a
# communicator, 1 GB and more seen).
CONTEXT, WORKSPACE, COMMUNICATOR = 0.5e9, 32 * MiB, 0.5e9
# What a process on a CPU takes besides what it had before the model and its tensors: what libraries allocate later, and where it keeps what
# it frees (train.machine) a part of the tensors, less where weights are sharded. Fitted to the runs that docs/proof.md names.
LIBRARIES, FREED, FREED_SHARDED = 0.1e9, 0.4, 0.2


@dataclasses.dataclass
class Memory:
    """Of the rank that needs most, in bytes."""

    components: dict[str, int]  # as work.COMPONENTS, at the peak; they sum to `allocated`
    allocated: int  # the peak of live tensors
    reserved: int  # what the caching allocator has taken for them
    framework: int  # of a GPU: CUDA context, libraries' workspaces, communicators; of a CPU: as `outside` says
    rank: int
    at: str  # what was going on at the peak
    held: dict[str, int]  # weights, gradients and optimizer state that the rank holds, live at the peak or not
    parameters: int
    notes: list[str]
    outside: tuple[str, dict[str, float]] = ("", {})  # of a CPU: `framework` as a formula, and what stands in it

    @property
    def device_total(self) -> int:
        """What the device shows as taken."""
        return self.reserved + self.framework


# ---------------------------------------------------------------- profiles, kept

_kept: dict[str, Profile] = {}
KEPT = 2000  # in memory


TRACED_ROOMS = "models", "layers", "parallel", "tasks", "train"


@functools.cache
def code(*more: str) -> str:
    """Of all that a profile depends on, the model, the layout, the step, and how they are traced; and of further rooms."""
    root = Path(__file__).parents[1]
    rooms = [path for room in (*TRACED_ROOMS, *more) for path in sorted((root / room).glob("*.[py]*")) if path.is_file()]
    own = [root / "plan" / f"{name}.py" for name in ("trace", "profiles", "batches")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*rooms, *own))).hexdigest()[:16]


def _family_code(family: str) -> str:
    """Of a family that is registered from elsewhere."""
    model = models.lookup(family).model
    return "" if model.__module__.startswith("gradus.") else inspect.getsource(sys.modules[model.__module__])


def profile_of(
    recipe: Recipe, part: Part, batch: dict, target: Target, task: Task | None = None, split: bool = False, micro: int = 2
) -> Profile:
    """Of a small part: from memory or from disk where the same was traced before, by this code and this PyTorch."""
    small = profiles.small_recipe(recipe, part, split)
    known = "select", "labels"
    what = [
        small.model.model_dump(mode="json"), small.layout.model_dump(mode="json"), small.task.model_dump(mode="json"),
        small.data.model_dump(mode="json", exclude={"path"}), small.optimizer.name,
        getattr(small.optimizer, "momentum", None), small.train.clip_norm, small.train.qat, part.stacks, target, split, micro, _family_code(small.model.family),
        [(k, list(v.shape), str(v.dtype), int(v.sum()) if k in known and v.dtype == torch.bool else 0) for k, v in sorted(batch.items())
         if isinstance(v, torch.Tensor)], __version__, torch.__version__, code(),
    ]  # fmt: skip
    key = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:32]
    if key in _kept:
        return _kept[key]
    path = files.cache_dir() / "profiles" / f"{key}.json"
    try:
        digest, _, text = limits.regular(path).read_text().partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("the text is not what was written")
        found = profiles.from_plain(json.loads(text))
    except (OSError, ValueError, UserError):  # absent, torn or changed
        found = profiles.profile(recipe, part, batch, target=target, task=task, split_backward=split, micro=micro)
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(profiles.to_plain(found))
            files.write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    if len(_kept) >= KEPT:
        _kept.clear()
    _kept[key] = found
    return found


# ---------------------------------------------------------------- one process


def blocks_of(recipe: Recipe) -> tuple[int, ...]:
    """Of each stack."""
    model = recipe.model
    decoder = getattr(model, "n_decoder_layers", None) or model.n_layers
    return (model.n_layers, decoder)[: len(models.lookup(model.family).stacks)]


def momenta(optimizer: Any) -> int:
    """Numbers that it keeps of a parameter (a recipe's section)."""
    return {"adamw": 2, "adam": 2, "sgd": 1 if getattr(optimizer, "momentum", 0) else 0}[optimizer.name]


@dataclasses.dataclass
class Given:
    """The micro-batches of a process."""

    full: dict[str, Any]  # the largest
    tail: dict[str, Any] | None  # the last, where it alone is smaller
    count: int
    parts: float  # all of them, in units of the largest
    samples: int
    places: int  # padding counted; of images the patches
    nbytes: int

    @classmethod
    def of(cls, batches: list[dict]) -> Given:
        full = max(batches, key=making.size_of)
        sizes_of = [making.size_of(b) for b in batches]
        uneven = sizes_of[-1] < sizes_of[0] and len(set(sizes_of[:-1])) == 1
        return cls(
            full, batches[-1] if uneven else None, len(batches), sum(making.size_of(b) for b in batches) / making.size_of(full), sum(map(_samples, batches)), sum(map(places, batches)),
            sum(_bytes(b) for b in batches),
        )  # fmt: skip


@dataclasses.dataclass
class Process:
    """A process of the pipeline, composed. Ask for `alive`, `held` and `work`."""

    recipe: Recipe
    n: int
    rank: int  # along the pipeline
    given: Given
    target: Target
    task: Task | None
    every: dict[int, Stage]  # of the pipeline: those that are looked at, by number
    last: dict[int, Stage]  # the same for a smaller last micro-batch; {} where there is none

    @property
    def stages(self) -> list[Stage]:
        return [self.every[s] for s in compose.stages_of(self.rank, self.recipe.layout)]

    @property
    def tail(self) -> list[Stage]:
        return [self.last[s] for s in compose.stages_of(self.rank, self.recipe.layout)] if self.last else []

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 2 if self.recipe.layout.precision.startswith("pure_") else 4

    @property
    def replicated(self) -> bool:
        """Whether DDP sums its gradients."""
        layout = self.recipe.layout
        several = sizes(layout, self.n)["replicate"] * layout.context > 1
        split = max(layout.shard, layout.tensor, layout.expert, layout.pipeline) > 1
        return several and not split and layout.replicate in ("auto", "ddp") and not (layout.local_sgd or layout.diloco)

    @property
    def groups(self) -> set[tuple[int, int]]:
        """(size, distance between neighbours) of the groups of processes that it sends to: each has a communicator."""
        shape, stride = sizes(self.recipe.layout, self.n), strides(self.recipe.layout, self.n)
        inner = {(shape[axis], stride[axis]) for axis in ("tensor", "context", "expert") if shape[axis] > 1}
        return inner | {(t.group, t.stride) for t in traffic.holding(self)}

    @property
    def fresh(self) -> bool:
        """Whether every micro-batch makes its gradients anew: FSDP2 has summed the last one's, or keeps them in another type."""
        layout = self.recipe.layout
        computed, reduced = compose.widths(layout, self.width)
        return layout.shard > 1 and (layout.pipeline > 1 or computed != reduced)

    @property
    def shares(self) -> int:
        """Into how many the samples of a step are split."""
        layout = self.recipe.layout
        return self.n // (layout.tensor * layout.pipeline * layout.context)

    @property
    def micro(self) -> int:
        return pipelines.needed(self.recipe.layout, self.given.count)

    @functools.cached_property
    def elements(self) -> list[tuple[int, int]]:
        """(elements of the usual width that this process holds of a parameter, how many such)."""
        found = []
        for w, times in traffic.in_order(self.stages):
            found.append((compose.held(w, self.recipe.layout) // self.width, times))
        return found

    @functools.cached_property
    def frozen(self) -> int:
        """Bytes of the parameters and buffers that are not trained."""
        return sum(compose.held(w, self.recipe.layout) * times for w, times in traffic.in_order(self.stages, frozen=True))

    @functools.cached_property
    def own(self) -> int:
        """Bytes of the parameters that this process holds."""
        return self.width * sum(size * times for size, times in self.elements)

    @functools.cached_property
    def state(self) -> float:
        """Bytes of the optimizer's state."""
        layout, optimizer = self.recipe.layout, self.recipe.optimizer
        each = momenta(optimizer) * self.width
        replicas = sizes(layout, self.n)["replicate"]
        tensors = sum(times for _, times in self.elements)
        if optimizer.name != "sgd":
            each += 4 * tensors / replicas / self.stepped if layout.shard_optimizer else 4 * tensors / self.stepped  # counts of steps
        outer = 2 * self.own if layout.diloco else 0
        return self.stepped * each + outer

    @functools.cached_property
    def stepped(self) -> int:
        """Elements that this process steps."""
        replicas = sizes(self.recipe.layout, self.n)["replicate"]
        found = [size for size, times in self.elements for _ in range(times)]
        return traffic.dealt(found, replicas)[0] if self.recipe.layout.shard_optimizer and replicas > 1 else sum(found)

    @functools.cached_property
    def alive(self) -> compose.Alive:
        return compose.peak(self)

    @property
    def held(self) -> dict[str, int]:
        return {"weights": int(self.own + self.frozen), "optimizer": int(self.state), "gradients": int(self.alive.gradients)}

    @functools.cached_property
    def work(self) -> Work:
        return _work(self)


def processes(recipe: Recipe, n: int, target: Target, task: Task | None, batches: list[dict] | None = None) -> list[Process]:
    """The processes that may need most: of a pipeline the first and the last, and where the decoder begins. Raises UserError."""
    recipe = making.complete(recipe)
    check.validate(recipe, n)
    layout = recipe.layout
    if layout.replicate == "data_parallel" or layout.transport == "mpi":
        raise UserError(f"layout.replicate={layout.replicate}, transport={layout.transport}: it cannot be traced. Plan replicate=ddp instead.")
    given = Given.of(batches or making.micro_batches(recipe, n, task=task))
    blocks = blocks_of(recipe)
    bounds = pipelines.bounds(sum(blocks), layout.pipeline * stages_per_process(layout))
    split = layout.pipeline > 1 and layout.schedule == "zero_bubble"
    parts = [Part.of(blocks, begin, end) for begin, end in itertools.pairwise(bounds)]
    ranks = {0, layout.pipeline - 1}
    if len(blocks) > 1:
        decoder = bisect.bisect_right(bounds, blocks[0]) - 1
        ranks.add(next(r for r in range(layout.pipeline) if decoder in compose.stages_of(r, layout)))
    own = {s for rank in ranks for s in compose.stages_of(rank, layout)} if len(blocks) == 1 else range(len(parts))  # others may share ends
    every, last = (
        {s: Stage(parts[s], profile_of(recipe, parts[s].small, batch, target, task, split)) for s in sorted(own)} if batch is not None else {}
        for batch in (given.full, given.tail)
    )
    return [Process(recipe, n, rank, given, target, task, every, last) for rank in sorted(ranks)]


# ---------------------------------------------------------------- work


def _work(p: Process) -> Work:
    layout, micro = p.recipe.layout, p.micro
    whole = p.given.count - 1 if p.tail else micro
    ops, sent = compose.operations(p.stages, whole, p.fresh)
    parts = whole if p.tail else p.given.parts + micro - p.given.count
    if p.tail:
        for found, more in zip((ops, sent), compose.operations(p.tail, micro - whole, p.fresh, first=False)):
            for key, count in more.items():
                found[key] = found.get(key, 0) + count
    for key, count in compose.holding(p).items():
        ops[key] = ops.get(key, 0) + count
    found = [op_of(key, count * parts / whole / micro, tf32=layout.tf32) for key, count in ops.items()]
    transfers = [*(transfer_of(key, calls) for key, calls in sent.items()), *traffic.holding(p)]
    return Work(
        micro=found, step=compose.optimizer(p), transfers=transfers, micro_batches=micro, stages=layout.pipeline, virtual=stages_per_process(layout),
        schedule=layout.schedule, samples=p.given.samples * p.shares, tokens=p.given.places * p.shares, data_bytes=p.given.nbytes,
    )  # fmt: skip


def model_flops(p: Process) -> float:
    """Of a step over all devices, forward and backward: no recomputation, attention's full matrix (Chowdhery et al. 2022, appendix B)."""
    ops = operations_of(p.recipe, Layout(device="cpu"), p.given.full, "cuda", p.task)
    return p.shares * p.given.parts * sum(count * products(kind, name, flops, shape, 2, 4) for (_, kind, name, _, _, flops, _, shape), count in ops.items())


def operations_of(recipe: Recipe, layout: Layout, batch: dict, target: Target, task: Task | None = None) -> dict[tuple, float]:
    """Of a micro-batch through the whole model on one process, as Traced.ops: one block a stack is traced."""
    blocks = blocks_of(recipe)
    one = Part(tuple((0, 1, 0) for _ in blocks))
    profile = profile_of(recipe.model_copy(update={"layout": layout}), one, batch, target, task, micro=1)
    return compose.operations([Stage(Part(tuple((0, n, 0) for n in blocks)), profile)], 1)[0]


def products(kind: str, name: str, flops: float, shape: tuple[int, ...], forward: int, backward: int) -> float:
    """Operations of an operation: of attention's full matrix, so many products a pass; a fused kernel's own two and five."""
    if kind == "attention":
        batch, heads, queries, keys, dim = shape
        return 2 * batch * heads * queries * keys * dim * (backward if name.endswith("backward") else forward)
    return flops


def _samples(batch: dict) -> int:
    return len(next(v for v in batch.values() if hasattr(v, "nbytes")))


def _bytes(batch: dict) -> int:
    return sum(v.nbytes for v in batch.values() if hasattr(v, "nbytes"))


def places(batch: dict) -> int:
    """Tokens with padding; of images the patches."""
    return batch["n_tokens"] if "image" in batch or "images" in batch else making.size_of(batch)


# ---------------------------------------------------------------- answers


_planned: dict[tuple, tuple[list[Process], Any]] = {}


def planned(recipe: Recipe, n: int, target: Target, task: Task | None = None) -> list[Process]:
    """`processes`, the last few kept: memory and work are asked for one after the other."""
    key = (recipe.model_dump_json(exclude={"name", "log", "evaluate", "schedule"}), n, target, id(task))
    if key not in _planned:
        while len(_planned) >= 8:
            _planned.pop(next(iter(_planned)))
        _planned[key] = processes(recipe, n, target, task), task
    return _planned[key][0]


def plan_memory(recipe: Recipe, n: int = 1, *, target: Target = "cpu", task: Task | None = None, resident: int | None = None) -> Memory:
    """The memory of one optimizer step of the rank that needs most; resident: as `memory_of`. Raises UserError for what does not fit together."""
    resident = before(task) if resident is None else resident  # before the trace
    return memory_of(planned(recipe, n, target, task), resident)


@functools.cache
def alone() -> int:
    """Bytes of this process when it was first asked for, so that what earlier plans have left does not count."""
    return machine.resident()


def before(task: Task | None) -> int:
    """Bytes that a process on a CPU has before the model is built, as far as this one tells: its own, and the data that were opened."""
    return alone() + (task.opened if task else 0)


STEP = "before the model + libraries + kept of what is freed × allocated"
WRITING = "before the model + libraries + weights + optimizer + whole weights, written as the best - allocated"


def outside(memory: Memory, resident: int, layout: Layout) -> Memory:
    """With the bytes that a training process on a CPU takes besides its tensors: of a step or, where that is more, of the first process
    as it writes the weights that are split, whole (`weights.write`). resident: what it has before the model is built."""
    libraries, freed = (LIBRARIES, FREED_SHARDED if layout.shard > 1 else FREED) if machine.has_glibc() else (0, 0)
    tensors, given = memory.allocated, {"allocated": memory.allocated, "before the model": resident, "libraries": libraries}
    step, writing = resident + libraries + freed * tensors, 0.0
    if max(layout.shard, layout.tensor, layout.pipeline, layout.expert) > 1:
        whole = min(memory.parameters * (2 if layout.precision.startswith("pure") else 4), models.weights.SHARD)
        held = {name: memory.held[name] for name in ("weights", "optimizer")}
        writing = resident + libraries + sum(held.values()) + whole - tensors
    if writing <= step:
        return dataclasses.replace(memory, framework=round(step), outside=(STEP, {**given, "kept of what is freed": freed}))
    note = f"the first process takes {(writing + tensors) / 1e9:,.1f} GB as it writes the best weights whole: more than a step."
    how = WRITING, {**given, **held, "whole weights, written as the best": whole}
    return dataclasses.replace(memory, framework=round(writing), outside=how, notes=[*memory.notes, note])


def memory_of(found: list[Process], resident: int | None = None) -> Memory:
    """Of the process that needs most. resident: bytes that a process on a CPU has before the model is built (None: `before`).

    reserved: each pool of PyTorch's caching allocator at its own peak, as if free blocks of a pool were always used again; what
    fragmentation adds is not in it. On a CPU it is what is allocated.
    """
    p = max(found, key=lambda p: p.alive.bytes)
    layout, alive = p.recipe.layout, p.alive
    components = {name: round(v) for name, v in zip(NAMES, alive.most)}
    notes = []
    if layout.compile != "none":
        notes.append(f"layout.compile={layout.compile}: planned without compiling, which fuses operations and mostly needs less.")
    if layout.offload and p.target == "cpu":
        notes.append("layout.offload: on a CPU nothing is offloaded: its memory is the host's.")
    if layout.shard > 1 and layout.pipeline == 1 and p.micro > 1:
        notes.append(
            f"FSDP keeps gradients whole while {p.micro} micro-batches add up: {components['gradients'] / 1e9:,.1f} GB at the peak. "
            "layout.micro_batch=null (all samples at once) or layout.pipeline keeps a part of them."
        )
    if getattr(p.recipe.model, "n_experts", None):
        notes.append("experts are planned with equal shares of the tokens, in products as fast as dense ones: a router's uneven choice takes longer")
    replicas = sizes(layout, p.n)["replicate"]
    if (axes := [axis for axis in ("tensor", "pipeline", "expert") if getattr(layout, axis) > 1]) and replicas > 1 and layout.shard == 1 and p.state:
        only = ", with layout.schedule=1f1b," * (layout.pipeline > 1 and layout.schedule in ("interleaved", "zero_bubble"))
        notes.append(
            f"all {replicas} replicas keep the same optimizer state, {p.state / 1e9:,.1f} GB per device: ZeRO-1 (layout.shard_optimizer) is not "
            f"combined with layout.{axes[0]}. layout.shard={replicas}{only} splits it."
        )
    allocated = reserved = sum(components.values())
    if p.target == "cuda":
        reserved = max(alive.reserved, alive.bytes)
        framework = int(CONTEXT + WORKSPACE + COMMUNICATOR * len(p.groups))
    else:
        framework = 0
    rank = p.rank * (p.n // layout.pipeline)
    memory = Memory(components, allocated, reserved, framework, rank, alive.at, p.held, parameters(p.recipe), notes)
    return memory if p.target == "cuda" else outside(memory, before(p.task) if resident is None else resident, layout)


def parameters(recipe: Recipe) -> int:
    return models.count(making.complete(recipe).model)["total"]


def traced_work(
    recipe: Recipe, n: int = 1, *, target: Target = "cuda", task: Task | None = None, micro_batches: list[dict] | None = None
) -> Work:
    """The work of one optimizer step of the stage that computes most. Raises UserError as `plan_memory`."""
    found = planned(recipe, n, target, task) if micro_batches is None else processes(recipe, n, target, task, micro_batches)
    return work_of(found)


def work_of(found: list[Process]) -> Work:
    """Of the process that computes most; what the first of the pipeline does not do is told apart: it waits for that meanwhile."""
    work = max((p.work for p in found), key=lambda work: sum(op.flops * op.count for op in work.micro))
    return work if work is found[0].work else dataclasses.replace(work, micro=told_apart(work.micro, found[0].work.micro))


def told_apart(ops: list[Op], others: list[Op]) -> list[Op]:
    """The operations, marked where they are not among the others."""

    def kind(op: Op) -> Op:
        return dataclasses.replace(op, count=0)

    left: dict[Op, float] = {}
    for op in others:
        left[kind(op)] = left.get(kind(op), 0.0) + op.count
    out = []
    for op in ops:
        both = min(op.count, left.get(kind(op), 0.0))
        left[kind(op)] = left.get(kind(op), 0.0) - both
        out += [dataclasses.replace(op, count=both)] * (both > 0)
        out += [dataclasses.replace(op, count=op.count - both, apart=True)] * (op.count > both)
    return out
