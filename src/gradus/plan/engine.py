"""The one engine: a recipe and its layout → memory and work of a step on the processes that need most.

Each kind of part (the blocks and ends that a process holds) is traced once for what changes it (`plan.profiles`), kept
on disk, and put together for the layout (`plan.compose`, `plan.peak`, `plan.traffic`). What is printed, what ranks
layouts and what a run is refused for is this.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gradus import __version__, models
from gradus.errors import UserError
from gradus.layers.small import BUFFERS
from gradus.parallel import check
from gradus.parallel import stages as pipelines
from gradus.plan import batches as making
from gradus.plan import compose, profiles, traffic
from gradus.plan import peak as peaks
from gradus.plan.compose import Stage
from gradus.plan.profiles import NAMES, MiB, Part, Profile, Weight
from gradus.plan.store import digest_of, stored
from gradus.plan.work import Op, OpCounts, Target, Work, op_of, transfer_of
from gradus.recipe.axes import data_parallel_size, sizes, strides
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task
from gradus.tasks.kinds import task_class
from gradus.text import size
from gradus.train import machine

# What a GPU's programs take besides tensors (CUDA context and kernels 0.3 to 2 GB, cuBLAS 32 MiB a handle on H100, NCCL
# about 0.5 GB a communicator, 1 GB and more seen).
CONTEXT, WORKSPACE, COMMUNICATOR = 0.5e9, 32 * MiB, 0.5e9
# What a process on a CPU takes besides what it had before the model and its tensors: what libraries allocate later, and
# where it keeps what it frees (train.machine) a part of the tensors: less where weights are sharded, more where every
# batch has another number of masked tokens, most with tensor parallelism, where gloo's threads free late. Fitted to the
# runs that docs/proof.md names.
LIBRARIES, FREED, FREED_SHARDED, FREED_MASKED, FREED_TENSOR = 0.1e9, 0.4, 0.2, 0.5, 1.0
# the most that was seen where batches have other shapes; a note says so where it makes 5 % of all
FREED_VARIED, NOTED = 0.8, 1.05
EVALUATION = "evaluation"  # where it needs more than a step: `Memory.at`
OWN = 0.22e9  # what Python, PyTorch and Gradus take at first, besides files that are mapped


@dataclasses.dataclass
class Memory:
    """Of the rank that needs most, in bytes."""

    components: dict[str, int]  # as work.COMPONENTS, at the peak; they sum to `allocated`
    allocated: int  # the peak of live tensors
    reserved: int  # what the caching allocator has taken for them
    framework: int  # of a GPU: CUDA context, libraries' workspaces, communicators; of a CPU: as `outside` says
    rank: int
    at: str  # what was going on at the peak
    state: dict[str, int]  # weights, gradients and optimizer state that the rank holds, live at the peak or not
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


@functools.cache
def code() -> str:
    """The digest of the package's sources: what a trace comes to may depend on any of them."""
    root = Path(__file__).parents[1]
    sources = sorted(path for path in root.rglob("*.[py]*") if path.suffix in (".py", ".yaml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def family_code(family: str) -> str:
    """The source of a family that is registered from elsewhere; '' of one that `code` covers."""
    model = models.lookup(family).model
    return "" if model.__module__.startswith("gradus.") else inspect.getsource(sys.modules[model.__module__])


def profile_of(
    recipe: Recipe, part: Part, batch: dict, target: Target, task: Task | None = None, split: bool = False,
    micro: int = 2,
) -> Profile:  # fmt: skip
    """The profile of a part of the model: kept in memory or on disk where this code and this PyTorch traced the same
    before, else traced."""

    def traced() -> dict[str, Any]:
        from gradus.plan import tracing  # half a second, which what is kept need not wait for

        profile = tracing.profile(recipe, part, batch, target=target, task=task, split_backward=split, micro=micro)
        return profiles.to_json(profile)

    question = _question(recipe, part, batch, target, split, micro)
    key = digest_of(question)
    if key not in _kept:
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[key] = profiles.from_json(stored("profiles", question, traced))
    return _kept[key]


def _question(recipe: Recipe, part: Part, batch: dict, target: Target, split: bool, micro: int) -> list:
    """All that a profile depends on."""
    few = profiles.small_recipe(recipe, part.small, split)
    sections = few.model.described(), *(section.model_dump(mode="json") for section in (few.layout, few.task))
    optimizer = few.optimizer.name, getattr(few.optimizer, "momentum", None)
    tensors = {k: v for k, v in sorted(batch.items()) if isinstance(v, torch.Tensor)}
    chosen = {k: int(v.sum()) for k, v in tensors.items() if k in ("select", "labels") and v.dtype == torch.bool}
    return [
        *sections, few.data.model_dump(mode="json", exclude={"path"}), optimizer, few.train.clip_norm, few.train.qat,
        part.small.stacks, part.small.kinds, part.ends, target, split, micro, family_code(few.model.family),
        [(k, list(v.shape), str(v.dtype), chosen.get(k, 0)) for k, v in tensors.items()],
        __version__, torch.__version__, code(),
    ]  # fmt: skip


# ---------------------------------------------------------------- one process


def momenta(optimizer: Any) -> int:
    """Optimizer states of a parameter (Adam: 2, SGD with momentum: 1). optimizer: a recipe's section."""
    return {"adamw": 2, "adam": 2, "sgd": 1 if getattr(optimizer, "momentum", 0) else 0}[optimizer.name]


@dataclasses.dataclass
class MicroBatches:
    """The micro-batches of a process."""

    full: dict[str, Any]  # the largest
    tail: dict[str, Any] | None  # the last, where it alone is smaller
    count: int
    parts: float  # all of them, in units of the largest
    samples: int
    tokens: int  # padding counted; of images the patches
    nbytes: int

    @classmethod
    def of(cls, batches: list[dict]) -> MicroBatches:
        full = max(batches, key=making.size_of)
        lengths = [making.size_of(b) for b in batches]
        uneven = lengths[-1] < lengths[0] and len(set(lengths[:-1])) == 1
        return cls(
            full=full,
            tail=batches[-1] if uneven else None,
            count=len(batches),
            parts=sum(lengths) / making.size_of(full),
            samples=sum(map(_samples, batches)),
            tokens=sum(map(tokens_in, batches)),
            nbytes=sum(map(_bytes, batches)),
        )


@dataclasses.dataclass
class Process:
    """One rank along the pipeline, with its stages. Its results: `peak` (memory), `state` (bytes that it keeps), `work`
    (operations and transfers)."""

    recipe: Recipe
    n: int
    rank: int  # along the pipeline
    micro_batches: MicroBatches
    target: Target
    task: Task | None
    stages_by_number: dict[int, Stage]  # of the pipeline, those that are looked at
    tail_by_number: dict[int, Stage]  # the same for a smaller last micro-batch; {} where there is none

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """The stages of this process."""
        return [self.stages_by_number[s] for s in compose.stages_of(self.rank, self.recipe.layout)]

    @functools.cached_property
    def weights(self) -> list[tuple[Weight, int]]:
        """(trained parameter, how often) in the model's order, but for the repeated blocks'."""
        return list(traffic.in_order(self.stages))

    @functools.cached_property
    def tail(self) -> list[Stage]:
        """The same, profiled for a smaller last micro-batch; [] where there is none."""
        numbers = compose.stages_of(self.rank, self.recipe.layout) if self.tail_by_number else []
        return [self.tail_by_number[s] for s in numbers]

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return compose.bytes_per_weight(self.recipe.layout)

    @property
    def on_host(self) -> bool:
        """Whether weights and the optimizer's state are kept in the host's memory."""
        return self.recipe.layout.offload and self.target == "cuda"

    @property
    def replicated(self) -> bool:
        """Whether DDP sums its gradients."""
        layout = self.recipe.layout
        several = sizes(layout, self.n)["replicate"] * layout.context > 1
        split = max(layout.shard, layout.tensor, layout.expert, layout.pipeline) > 1
        ddp = layout.replicate in ("auto", "ddp") and not (layout.local_sgd or layout.diloco)
        return several and not split and ddp

    @property
    def communicators(self) -> set[tuple[int, int]]:
        """(size, distance between neighbours) of the groups of processes that it sends to: each has a communicator."""
        shape, stride = sizes(self.recipe.layout, self.n), strides(self.recipe.layout, self.n)
        inner = {(shape[axis], stride[axis]) for axis in ("tensor", "context", "expert") if shape[axis] > 1}
        return inner | {(t.group, t.stride) for t in traffic.of_parameters(self)}

    @property
    def gradients_anew(self) -> bool:
        """Whether every micro-batch makes its gradients anew: FSDP2 has summed the last one's, or keeps them in another
        type."""
        layout = self.recipe.layout
        computed, reduced = compose.fsdp_widths(layout, self.width)
        return layout.shard > 1 and (layout.pipeline > 1 or computed != reduced)

    @property
    def data_parallel(self) -> int:
        """Into how many parts the samples of a step are split."""
        return data_parallel_size(self.recipe.layout, self.n)

    @property
    def n_micro_batches(self) -> int:
        """How many this process runs: at least those that it is given, and as many as the schedule needs."""
        return pipelines.needed(self.recipe.layout, self.micro_batches.count)

    @functools.cached_property
    def elements(self) -> list[tuple[int, int]]:
        """(elements of the usual width that this process holds of a parameter, how many such)."""
        layout = self.recipe.layout
        return [(compose.local_bytes(w, layout) // self.width, n) for w, n in self.weights]

    @functools.cached_property
    def frozen_bytes(self) -> int:
        """Bytes of the parameters and buffers that are not trained."""
        layout = self.recipe.layout
        return sum(compose.local_bytes(w, layout) * n for w, n in traffic.in_order(self.stages, frozen=True))

    @functools.cached_property
    def param_bytes(self) -> int:
        """Bytes of the parameters that this process holds."""
        return self.width * sum(size * times for size, times in self.elements)

    @functools.cached_property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state."""
        layout, optimizer = self.recipe.layout, self.recipe.optimizer
        replicas = sizes(layout, self.n)["replicate"]
        tensors = sum(times for _, times in self.elements) / (replicas if layout.shard_optimizer else 1)
        counts = 4 * tensors if optimizer.name != "sgd" else 0  # of steps
        outer = 1 + (layout.diloco.outer_momentum > 0) if layout.diloco else 0  # copies: anchors, momentum
        return self.stepped_elements * momenta(optimizer) * self.width + counts + outer * self.param_bytes

    @functools.cached_property
    def stepped_elements(self) -> int:
        """Elements that this process steps; of replicas that step a part each, that which steps most."""
        replicas = sizes(self.recipe.layout, self.n)["replicate"]
        every = [size for size, times in self.elements for _ in range(times)]
        shared = self.recipe.layout.shard_optimizer and replicas > 1
        return max(traffic.assign_owners(every, replicas)) if shared else sum(every)

    @functools.cached_property
    def peak(self) -> peaks.Peak:
        return peaks.peak(self)

    @property
    def state(self) -> dict[str, int]:
        weights = self.param_bytes + self.frozen_bytes
        state = {"weights": weights, "optimizer": self.optimizer_bytes, "gradients": self.peak.gradients}
        return {name: int(nbytes) for name, nbytes in state.items()}

    @functools.cached_property
    def work(self) -> Work:
        return _work(self)


def processes(
    recipe: Recipe, n: int, target: Target, task: Task | None, batches: list[dict] | None = None
) -> list[Process]:
    """The processes that may need most; each stage is traced at its own position in the pipeline. Raises UserError."""
    recipe = making.complete(recipe)
    check.validate(recipe, n)
    layout = recipe.layout
    if layout.replicate == "data_parallel" or layout.transport == "mpi":
        setting = f"layout.replicate={layout.replicate}, transport={layout.transport}"
        raise UserError(f"{setting}: it cannot be traced. Plan replicate=ddp instead.")
    own = MicroBatches.of(batches or making.micro_batches(recipe, n, task=task))
    split = layout.pipeline > 1 and layout.schedule == "zero_bubble"

    def stage(part: Part, batch: dict) -> Stage:
        return Stage(part, profile_of(recipe, part, batch, target, task, split))

    return processes_of(recipe, n, target, task, own, stage)


def processes_of(
    recipe: Recipe, n: int, target: Target, task: Task | None, own: MicroBatches,
    stage: Callable[[Part, dict], Stage],
) -> list[Process]:  # fmt: skip
    """Of a pipeline the first process and the last, that where the decoder begins, and the first with each mixture of
    kinds of blocks. stage: (part of the model, micro-batch) → its stage."""
    layout, kinds = recipe.layout, profiles.block_kinds(recipe.model)
    bounds = pipelines.bounds(sum(map(len, kinds)), layout.pipeline * layout.stages_per_process)
    parts = [Part.of(kinds, begin, end) for begin, end in itertools.pairwise(bounds)]
    ranks = _ranks_that_differ(layout, parts, bounds)
    if len(kinds) == 1:
        numbers = sorted(s for rank in ranks for s in compose.stages_of(rank, layout))
    else:  # others may share ends
        numbers = list(range(len(parts)))
    every, last = ({s: stage(parts[s], batch) for s in numbers} if batch else {} for batch in (own.full, own.tail))
    return [Process(recipe, n, rank, own, target, task, every, last) for rank in ranks]


def _ranks_that_differ(layout: Layout, parts: list[Part], bounds: list[int]) -> list[int]:
    ranks = {0, layout.pipeline - 1}
    if len(parts[0].kinds) > 1:
        decoder = bisect.bisect_right(bounds, len(parts[0].kinds[0])) - 1
        ranks.add(pipelines.ranks(layout)[decoder])
    if any(len(set(kinds)) > 1 for kinds in parts[0].kinds):
        mixtures: dict[tuple, int] = {}
        for rank in range(layout.pipeline):
            own = (parts[s].own_kinds for s in compose.stages_of(rank, layout))
            mixtures.setdefault(tuple(sorted(kind for stacks in own for kinds in stacks for kind in kinds)), rank)
        ranks |= set(mixtures.values())
    return sorted(ranks)


# ---------------------------------------------------------------- work


def _work(p: Process) -> Work:
    layout, micro, batches = p.recipe.layout, p.n_micro_batches, p.micro_batches
    whole = batches.count - 1 if p.tail else micro
    ops, sent = compose.operations(p.stages, whole, p.gradients_anew)
    parts = whole if p.tail else batches.parts + micro - batches.count
    if p.tail:
        for total, more in zip((ops, sent), compose.operations(p.tail, micro - whole, p.gradients_anew, first=False)):
            compose.add_counts(total, more)
    compose.add_counts(ops, compose.sharding_copies(p))
    return Work(
        micro=[op_of(key, count * parts / whole / micro, tf32=layout.tf32) for key, count in ops.items()],
        step=compose.optimizer_ops(p),
        transfers=[*(transfer_of(key, calls) for key, calls in sent.items()), *traffic.of_parameters(p)],
        micro_batches=micro,
        stages=layout.pipeline,
        virtual=layout.stages_per_process,
        schedule=layout.schedule,
        samples=batches.samples * p.data_parallel,
        tokens=batches.tokens * p.data_parallel,
        data_bytes=batches.nbytes,
    )


def model_flops(p: Process) -> float:
    """Operations of a step over all devices, forward and backward: no recomputation, attention's full matrix (Chowdhery
    et al. 2022, appendix B)."""
    ops = operations_of(p.recipe, Layout(device="cpu"), p.micro_batches.full, "cuda", p.task)
    each = (n * products(key.kind, key.name, key.flops, key.shape, 2, 4) for key, n in ops.items())
    return p.data_parallel * p.micro_batches.parts * sum(each)


def operations_of(
    recipe: Recipe, layout: Layout, batch: dict, target: Target, task: Task | None = None
) -> OpCounts:
    """Of a micro-batch through the whole model on one process: one block of each kind is traced."""
    every = Part.whole(profiles.block_kinds(recipe.model))
    profile = profile_of(recipe.model_copy(update={"layout": layout}), every, batch, target, task, micro=1)
    return compose.operations([Stage(every, profile)], 1)[0]


def products(kind: str, name: str, flops: float, shape: tuple[int, ...], forward: int, backward: int) -> float:
    """FLOPs of one operation; of attention over the full matrix of scores, with so many matrix products forward and
    backward (a fused kernel does two and five)."""
    if kind == "attention":
        batch, heads, queries, keys, dim = shape
        return 2 * batch * heads * queries * keys * dim * (backward if name.endswith("backward") else forward)
    return flops


def _samples(batch: dict) -> int:
    return len(next(v for v in batch.values() if hasattr(v, "nbytes")))


def _bytes(batch: dict) -> int:
    return sum(v.nbytes for v in batch.values() if hasattr(v, "nbytes"))


def tokens_in(batch: dict) -> int:
    """With padding; of images the patches."""
    return batch["n_tokens"] if "image" in batch or "images" in batch else making.size_of(batch)


# ---------------------------------------------------------------- answers


_planned: dict[tuple, tuple[list[Process], Any]] = {}


def planned(recipe: Recipe, n: int, target: Target, task: Task | None = None) -> list[Process]:
    """`processes`, the last few kept: memory and work are asked for one after the other."""
    key = (recipe.model_dump_json(exclude={"name", "log", "evaluate", "energy", "schedule"}), n, target, id(task))
    if key not in _planned:
        while len(_planned) >= 8:
            _planned.pop(next(iter(_planned)))
        _planned[key] = processes(recipe, n, target, task), task
    return _planned[key][0]


def plan_memory(
    recipe: Recipe, n: int = 1, *, target: Target = "cpu", task: Task | None = None, resident: int | None = None
) -> Memory:
    """The memory of one optimizer step of the rank that needs most, or of an evaluation where that needs more;
    resident: as `memory_of`. Raises UserError for what does not fit together."""
    resident = resident_before_model(task) if resident is None else resident  # before the trace
    composed = planned(recipe, n, target, task)
    full = composed[0].micro_batches.full
    return with_evaluation(memory_of(composed, resident), recipe, n, target, task, full, resident)


def with_evaluation(
    memory: Memory, recipe: Recipe, n: int, target: Target, task: Task | None, full: dict, resident: int
) -> Memory:
    """The memory of a step or, where an evaluation takes a larger batch than the step's largest micro-batch, `full`,
    and more memory for it, of that."""
    recipe = making.complete(recipe)
    batch = making.evaluation_batch(recipe, n, task)
    if batch is None or making.size_of(batch) <= making.size_of(full):
        return memory
    part = Part.whole(profiles.block_kinds(recipe.model))

    def traced() -> dict[str, int]:
        from gradus.plan import tracing

        return tracing.evaluation_memory(recipe, part, batch, target=target, task=task)

    question = [EVALUATION, *_question(recipe, part, batch, target, False, 1)]
    own = stored("profiles", question, traced)
    own |= memory.state | ({"gradients": 0} if n == 1 else {})  # DDP's buckets keep them
    own["gathered"] = max(own["gathered"], memory.components["gathered"])
    allocated = sum(own.values())
    more = {"reserved": max(memory.reserved, allocated), "at": EVALUATION}
    other = dataclasses.replace(memory, components=own, allocated=allocated, **more)
    other = other if target == "cuda" else with_process(other, resident, recipe)
    return max(memory, other, key=lambda m: m.device_total)


@functools.cache
def resident_at_start() -> int:
    """Bytes of this process when it was first asked for, so that what earlier plans have left does not count; of one
    that has computed before, no more than a new one has."""
    return int(min(machine.resident(), machine.resident(of_files=True) + OWN))


def resident_before_model(task: Task | None) -> int:
    """Bytes that a process on a CPU has before the model is built, as far as this one tells: its own, and the data that
    were opened."""
    return resident_at_start() + (task.opened if task else 0)


STEP = "before the model + libraries + kept of what is freed × allocated"
WRITING = "before the model + libraries + weights + optimizer + whole weights, written as the best - allocated"


def kept_share(recipe: Recipe) -> float:
    """What a process on a CPU keeps of freed memory, as a share of its tensors."""
    if not machine.has_glibc():
        return 0.0
    if recipe.layout.tensor > 1:
        return FREED_TENSOR
    return FREED_SHARDED if recipe.layout.shard > 1 else FREED_MASKED if task_class(recipe).varies else FREED


def shapes_vary(recipe: Recipe) -> bool:
    """Whether batches have other shapes from step to step."""
    return getattr(recipe.data, "pad", "max_length") != "max_length" or task_class(recipe).varies


def with_process(memory: Memory, resident: int, recipe: Recipe) -> Memory:
    """The memory, with the bytes that a training process on a CPU takes besides its tensors: in a step or, where that
    is more, as the first process writes weights that are split, whole (`weights.write`). resident: bytes that it has
    before the model is built."""
    layout, libraries, kept = recipe.layout, LIBRARIES if machine.has_glibc() else 0, kept_share(recipe)
    if memory.at == EVALUATION:  # what was freed before is released; batches of one shape take no more
        kept *= 2 * shapes_vary(recipe)
    tensors = memory.allocated
    inputs = {"allocated": tensors, "before the model": resident, "libraries": libraries}
    step, writing = resident + libraries + kept * tensors, 0.0
    if max(layout.shard, layout.tensor, layout.pipeline, layout.expert) > 1:
        whole = min(memory.parameters * compose.bytes_per_weight(layout), models.weights.SHARD)
        state = {name: memory.state[name] for name in ("weights", "optimizer")}
        writing = resident + libraries + sum(state.values()) + whole - tensors
    if writing <= step:
        formula = STEP, {**inputs, "kept of what is freed": kept}
        most, total = step + (FREED_VARIED - kept) * tensors, step + tensors
        notes = [*memory.notes]
        varied = shapes_vary(recipe) and layout.shard == 1 and 0 < kept < FREED_VARIED
        if varied and most + tensors > NOTED * total:
            why = "batches have other shapes from step to step, which kept memory does not always fit"
            notes.append(f"{why}: after many steps the process may take {size(most + tensors)}.")
        return dataclasses.replace(memory, framework=round(step), outside=formula, notes=notes)
    total = f"{(writing + tensors) / 1e9:,.1f} GB"
    note = f"the first process takes {total} as it writes the best weights whole: more than a step."
    formula = WRITING, {**inputs, **state, "whole weights, written as the best": whole}
    return dataclasses.replace(memory, framework=round(writing), outside=formula, notes=[*memory.notes, note])


def memory_of(composed: list[Process], resident: int | None = None) -> Memory:
    """Of the process that needs most. resident: bytes that a process on a CPU has before the model is built (None:
    `resident_before_model`).

    reserved: each pool of PyTorch's caching allocator at its own peak, as if free blocks of a pool were always used
    again; what fragmentation adds is not in it. On a CPU it is what is allocated.
    """
    p = max(composed, key=lambda p: p.peak.bytes)
    layout, peak = p.recipe.layout, p.peak
    components = {name: round(v) for name, v in zip(NAMES, peak.components)}
    allocated = reserved = sum(components.values())
    framework = 0
    if p.target == "cuda":
        reserved = max(peak.reserved, peak.bytes)
        framework = int(CONTEXT + WORKSPACE + COMMUNICATOR * len(p.communicators))
    memory = Memory(
        components, allocated, reserved, framework, p.rank * (p.n // layout.pipeline), peak.at, p.state,
        parameters(p.recipe), list(_notes(p, components["gradients"])),
    )  # fmt: skip
    if p.target == "cuda":
        return memory
    return with_process(memory, resident_before_model(p.task) if resident is None else resident, p.recipe)


def _notes(p: Process, gradients: int) -> Iterator[str]:
    layout = p.recipe.layout
    if layout.compile != "none":
        how = "planned without compiling, which fuses operations and mostly needs less"
        yield f"layout.compile={layout.compile}: {how}."
    if layout.offload and p.target == "cpu":
        yield "layout.offload: on a CPU nothing is offloaded: its memory is the host's."
    if layout.shard > 1 and layout.pipeline == 1 and p.n_micro_batches > 1:
        yield (
            f"FSDP keeps gradients whole while {p.n_micro_batches} micro-batches add up: "
            f"{gradients / 1e9:,.1f} GB at the peak. layout.micro_batch=null (all samples at once) or layout.pipeline "
            "keeps a part of them."
        )
    if getattr(p.recipe.model, "n_experts", None):
        yield (
            "experts are planned with equal shares of the tokens, in products as fast as dense ones: a router's uneven "
            "choice takes longer"
        )
    if layout.shard > 1 and p.recipe.adapter and p.recipe.adapter.base:
        base = sum(
            compose.local_bytes(w, layout) * times
            for stage in p.stages for _, _, frozen, times in stage.units for name, w in frozen.items()
            if name.rpartition(".")[2] in BUFFERS
        )  # fmt: skip
        yield (
            f"layout.shard splits no quantized weights: the base in {p.recipe.adapter.base}, {size(base)}, lies whole "
            "on every device."
        )
    replicas = sizes(layout, p.n)["replicate"]
    axes = [axis for axis in ("tensor", "pipeline", "expert") if getattr(layout, axis) > 1]
    if axes and replicas > 1 and layout.shard == 1 and p.optimizer_bytes:
        schedules = layout.pipeline > 1 and layout.schedule in ("interleaved", "zero_bubble")
        only = ", with layout.schedule=1f1b," * schedules
        yield (
            f"all {replicas} replicas keep the same optimizer state, {p.optimizer_bytes / 1e9:,.1f} GB per device: "
            f"ZeRO-1 (layout.shard_optimizer) is not combined with layout.{axes[0]}. "
            f"layout.shard={replicas}{only} splits it."
        )


def parameters(recipe: Recipe) -> int:
    return models.count(making.complete(recipe).model)["total"]


def traced_work(
    recipe: Recipe, n: int = 1, *, target: Target = "cuda", task: Task | None = None,
    micro_batches: list[dict] | None = None,
) -> Work:  # fmt: skip
    """The work of one optimizer step of the stage that computes most. Raises UserError as `plan_memory`."""
    if micro_batches is None:
        return work_of(planned(recipe, n, target, task))
    return work_of(processes(recipe, n, target, task, micro_batches))


def work_of(composed: list[Process]) -> Work:
    """Of the process that computes most. Operations that the pipeline's first process lacks are marked `stage_only`:
    the other stages wait for them."""
    first = composed[0].work
    work = max((p.work for p in composed), key=lambda work: sum(op.flops * op.count for op in work.micro))
    return work if work is first else dataclasses.replace(work, micro=mark_stage_only(work.micro, first.micro))


def mark_stage_only(ops: list[Op], others: list[Op]) -> list[Op]:
    """The operations, marked where they are not among the others."""
    left: dict[Op, float] = {}
    for op in others:
        kind = op._replace(count=0)
        left[kind] = left.get(kind, 0.0) + op.count
    out = []
    for op in ops:
        kind = op._replace(count=0)
        both = min(op.count, left.get(kind, 0.0))
        left[kind] = left.get(kind, 0.0) - both
        out += [op._replace(count=both)] * (both > 0)
        out += [op._replace(count=op.count - both, stage_only=True)] * (op.count > both)
    return out
