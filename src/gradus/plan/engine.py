"""The one engine: a case → memory and work of a step on the processes that need most.

Each kind of part (the blocks and ends that a process holds) is traced once for what changes it (`plan.profiles`), kept
on disk, and put together for the layout (`plan.compose`, `plan.peak`, `plan.traffic`). What is printed, what ranks
layouts and what a run is refused for is this.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradus import models
from gradus.errors import UserError
from gradus.layers.small import BUFFERS
from gradus.parallel import check
from gradus.plan import compose, profiles, traffic
from gradus.plan.batches import size_of
from gradus.plan.case import Case
from gradus.plan.peak import Peak, peak_of
from gradus.plan.process import Memory, Process, bytes_per_weight, local_bytes, reduces_each, stages_of
from gradus.plan.profiles import NAMES, MiB, Part, Profile
from gradus.plan.stage import Stage
from gradus.plan.store import digest_of, stored, versions
from gradus.plan.work import Op, OpCounts, Target, Work, add_counts, op_of, transfer_of
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task
from gradus.tasks.kinds import task_class
from gradus.text import size
from gradus.train import machine

# What a GPU's programs take besides tensors (CUDA context and kernels 0.3 to 2 GB, cuBLAS 32 MiB a handle on H100, NCCL
# about 0.5 GB a communicator, 1 GB and more seen).
CONTEXT, WORKSPACE, COMMUNICATOR = 0.5e9, 32 * MiB, 0.5e9
# The ends of 80 % intervals. Of a process's tensors on a CPU, measured by planned, the upper one, and where layers are
# split (benchmarks/results/accuracy-cpu*.jsonl: docs/accuracy.md). Of a GPU the lower and the upper one: of what the
# allocator has taken by what is planned, of a published program whose step is as Gradus's (Nanotron); of a context, and
# of a communicator (Megatron-DeepSpeed).
HELD, HELD_SPLIT = 1.01, 1.4
RESERVED, CONTEXTS, COMMUNICATORS = (0.99, 1.05), (0.3e9, 1e9), (0.25e9, 1.1e9)
# What a process on a CPU takes besides what it had before the model and its tensors: what libraries allocate later, and
# where it keeps what it frees (train.machine) a part of the tensors: less where weights are sharded, more where every
# batch has another number of masked tokens, most with tensor parallelism, where gloo's threads free late. Fitted to the
# runs that docs/proof.md names.
LIBRARIES, FREED, FREED_SHARDED, FREED_MASKED, FREED_TENSOR = 0.1e9, 0.4, 0.2, 0.5, 1.0
# the most that was seen where batches have other shapes; a note says so where it makes 5 % of all
FREED_VARIED, NOTED = 0.8, 1.05
EVALUATION = "evaluation"  # where it needs more than a step: `Memory.at`
OWN = 0.22e9  # what Python, PyTorch and Gradus take at first, besides files that are mapped


# ---------------------------------------------------------------- profiles, kept

_kept: dict[str, Profile] = {}
KEPT = 2000  # in memory


def profile_of(case: Case, part: Part, batch: dict, split: bool = False, micro: int = 2) -> Profile:
    """The profile of a part of the model: kept in memory or on disk where this code and this PyTorch traced the same
    before, else traced."""

    def traced() -> dict[str, Any]:
        from gradus.plan import tracing  # half a second, which what is kept need not wait for

        about = {"target": case.target, "task": case.task, "split_backward": split, "micro": micro}
        return profiles.to_json(tracing.profile(case.recipe, part, batch, **about))

    question = _question(case, part, batch, split, micro)
    key = digest_of(question)
    if key not in _kept:
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[key] = profiles.from_json(stored("profiles", question, traced))
    return _kept[key]


def _question(case: Case, part: Part, batch: dict, split: bool = False, micro: int = 2) -> list:
    """All that a profile depends on."""
    few = profiles.small_recipe(case.recipe, part.small, split)
    sections = few.model.described(), *(section.model_dump(mode="json") for section in (few.layout, few.task))
    optimizer = few.optimizer.name, getattr(few.optimizer, "momentum", None)
    tensors = {k: v for k, v in sorted(batch.items()) if isinstance(v, torch.Tensor)}
    chosen = {k: int(v.sum()) for k, v in tensors.items() if k in ("select", "labels") and v.dtype == torch.bool}
    return [
        *sections, few.data.model_dump(mode="json", exclude={"path"}), optimizer, few.train.clip_norm, few.train.qat,
        part.small.stacks, part.small.kinds, part.ends, case.target, split, micro,
        [(k, list(v.shape), str(v.dtype), chosen.get(k, 0)) for k, v in tensors.items()],
        *versions(few.model.family),
    ]  # fmt: skip


# ---------------------------------------------------------------- one process


def processes(case: Case) -> list[Process]:
    """The processes that may need most; each stage is traced at its own position in the pipeline. Raises UserError."""
    check.validate(case.recipe, case.n)
    layout = case.layout
    if layout.replicate == "data_parallel" or layout.transport == "mpi":
        setting = f"layout.replicate={layout.replicate}, transport={layout.transport}"
        raise UserError(f"{setting}: it cannot be traced. Plan replicate=ddp instead.")
    split = layout.pipeline > 1 and layout.schedule == "zero_bubble"
    return processes_of(case, lambda part, batch: Stage(part, profile_of(case, part, batch, split)))


def processes_of(case: Case, stage: Callable[[Part, dict], Stage]) -> list[Process]:
    """Of a pipeline the first process and the last, that where the decoder begins, and the first with each mixture of
    kinds of blocks. stage: (part of the model, micro-batch) → its stage."""
    kinds, batches, rank_of = case.kinds, case.batches, case.rank_of
    parts = [Part.of(kinds, begin, end) for begin, end in itertools.pairwise(case.bounds)]
    ranks = _ranks_that_differ(case, parts)
    # with several stacks others may share ends
    numbers = [s for s, rank in enumerate(rank_of) if rank in ranks or len(kinds) > 1]
    full, tail = batches.full, batches.tail
    every, last = ({s: stage(parts[s], batch) for s in numbers} if batch else {} for batch in (full, tail))
    holders: dict[str, set[int]] = {}
    for s, one in every.items():
        for name in one.ends:
            holders.setdefault(name, set()).add(rank_of[s])
    own = [(rank, stages_of(rank, rank_of)) for rank in ranks]
    return [
        Process.of(case, rank, [every[s] for s in of_rank], [last[s] for s in of_rank if last], holders)
        for rank, of_rank in own
    ]


def _ranks_that_differ(case: Case, parts: list[Part]) -> list[int]:
    last = case.layout.pipeline - 1
    ranks = {0, last}
    if len(case.kinds) > 1:
        decoder = bisect.bisect_right(case.bounds, len(case.kinds[0])) - 1
        ranks.add(case.rank_of[decoder])
    if any(len(set(kinds)) > 1 for kinds in case.kinds):
        mixtures: dict[tuple, int] = {}
        for rank in range(last + 1):
            own = (parts[s].own_kinds for s in stages_of(rank, case.rank_of))
            mixtures.setdefault(tuple(sorted(kind for stacks in own for kinds in stacks for kind in kinds)), rank)
        ranks |= set(mixtures.values())
    return sorted(ranks)


# ---------------------------------------------------------------- work


def step_work(p: Process) -> Work:
    """Of one process."""
    layout, micro, batches = p.layout, p.n_micro_batches, p.case.batches
    ops, sent = compose.operations(p)
    add_counts(ops, compose.sharding_copies(p))
    parts = p.n_whole if p.tail else batches.parts + micro - batches.count
    return Work(
        micro=[op_of(key, count * parts / p.n_whole / micro, tf32=layout.tf32) for key, count in ops.items()],
        step=compose.optimizer_ops(p),
        transfers=[*(transfer_of(key, calls) for key, calls in sent.items()), *traffic.of_parameters(p)],
        micro_batches=micro,
        stages=layout.pipeline,
        virtual=layout.stages_per_process,
        schedule=layout.schedule,
        samples=batches.samples * p.case.data_parallel,
        tokens=batches.tokens * p.case.data_parallel,
        data_bytes=batches.nbytes,
    )


def operations_of(case: Case, batch: dict) -> OpCounts:
    """Of a micro-batch through the whole model on one process: one block of each kind is traced."""
    every = Part.whole(case.kinds)
    return Stage(every, profile_of(case, every, batch, micro=1)).counts()[0]


def products(kind: str, name: str, flops: float, shape: tuple[int, ...], forward: int, backward: int) -> float:
    """FLOPs of one operation; of attention over the full matrix of scores, with so many matrix products forward and
    backward (a fused kernel does two and five)."""
    if kind == "attention":
        batch, heads, queries, keys, dim, v_dim = shape
        of_values = 2 if name.endswith("backward") else 1  # products
        of_keys = (backward if name.endswith("backward") else forward) - of_values
        return 2 * batch * heads * queries * keys * (of_keys * dim + of_values * v_dim)
    return flops


# ---------------------------------------------------------------- answers


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a case comes to. resident: bytes that a process on a CPU has before the model is built."""

    case: Case
    processes: list[Process]
    resident: int

    @functools.cached_property
    def memory(self) -> Memory:
        """Of one optimizer step of the rank that needs most, or of an evaluation where that needs more."""
        return with_evaluation(memory_of(self.processes, self.resident), self.case, self.resident)

    @functools.cached_property
    def work(self) -> Work:
        """Of one optimizer step of the stage that computes most."""
        return work_of(self.processes)


def plan(case: Case, resident: int | None = None) -> Plan:
    """resident: None: `resident_before_model`. Raises UserError for what does not fit together."""
    resident = resident_before_model(case.task) if resident is None else resident  # before the trace
    return Plan(case, processes(case), resident)


def with_evaluation(memory: Memory, case: Case, resident: int) -> Memory:
    """The memory of a step or, where an evaluation takes a larger batch than the step's largest micro-batch and more
    memory for it, of that. resident: as of `Plan`."""
    batch = case.evaluation_batch()
    if batch is None or size_of(batch) <= size_of(case.batches.full):
        return memory
    part = Part.whole(case.kinds)

    def traced() -> dict[str, int]:
        from gradus.plan import tracing

        return tracing.evaluation_memory(case.recipe, part, batch, target=case.target, task=case.task)

    own = stored("profiles", [EVALUATION, *_question(case, part, batch, micro=1)], traced)
    own |= memory.state | ({"gradients": 0} if case.n == 1 else {})  # DDP's buckets keep them
    own["gathered"] = max(own["gathered"], memory.components["gathered"])
    allocated = sum(own.values())
    more = {"reserved": max(memory.reserved, allocated), "at": EVALUATION}
    other = dataclasses.replace(memory, components=own, allocated=allocated, **more)
    other = other if case.target == "cuda" else with_process(other, resident, case.recipe)
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
        whole = min(memory.parameters * bytes_per_weight(layout), models.weights.SHARD)
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
    """Of the process that needs most. resident: as of `plan`.

    reserved: each pool of PyTorch's caching allocator at its own peak, as if free blocks of a pool were always used
    again; what fragmentation adds is not in it. On a CPU it is what is allocated.
    """
    peak, p = max(((peak_of(p), p) for p in composed), key=lambda pair: pair[0].bytes)
    case, components = p.case, {name: round(v) for name, v in zip(NAMES, peak.components)}
    allocated = reserved = sum(components.values())
    framework = 0
    if case.target == "cuda":
        reserved = max(peak.reserved, peak.bytes)
        framework = int(CONTEXT + WORKSPACE + COMMUNICATOR * len(_communicators(p)))
    memory = Memory(
        components, allocated, reserved, framework, p.rank * (case.n // p.layout.pipeline), peak.at, state_of(p, peak),
        models.count(case.recipe.model)["total"], list(_notes(p, components["gradients"])),
    )  # fmt: skip
    if case.target == "cuda":
        return memory
    return with_process(memory, resident_before_model(case.task) if resident is None else resident, case.recipe)


def interval(memory: Memory, layout: Layout, target: Target) -> tuple[int, int]:
    """Bytes of `device_total` between which 80 % of the runs lie."""
    if target == "cpu":
        held = HELD_SPLIT if layout.tensor > 1 else HELD
        return memory.device_total, round(memory.device_total + (held - 1) * memory.allocated)
    many = (memory.framework - CONTEXT - WORKSPACE) / COMMUNICATOR
    ends = zip(RESERVED, CONTEXTS, COMMUNICATORS)
    low, high = (round(share * memory.reserved + context + WORKSPACE + each * many) for share, context, each in ends)
    return low, high


def state_of(p: Process, peak: Peak) -> dict[str, int]:
    """Bytes that it keeps, alive at the peak or not."""
    state = {"weights": p.param_bytes + p.frozen_bytes, "optimizer": p.optimizer_bytes, "gradients": peak.gradients}
    return {name: int(nbytes) for name, nbytes in state.items()}


def _communicators(p: Process) -> set[tuple[int, int]]:
    """(size, distance between neighbours) of the groups of processes that it sends to: each has a communicator."""
    shape, stride = p.case.shape, p.case.stride
    inner = {(shape[axis], stride[axis]) for axis in ("tensor", "context", "expert") if shape[axis] > 1}
    return inner | {(t.group, t.stride) for t in traffic.of_parameters(p)}


def _notes(p: Process, gradients: int) -> Iterator[str]:
    layout, recipe = p.layout, p.case.recipe
    for key, usual in (("compile", "none"), ("shard_with", "fsdp2")):
        if (value := getattr(layout, key)) != usual:
            how = "planned without compiling, which fuses operations and mostly needs less"
            yield f"layout.{key}={value}: {how}."
    if layout.offload and p.case.target == "cpu":
        yield "layout.offload: on a CPU nothing is offloaded: its memory is the host's."
    if layout.context > 1 and layout.context_method == "ring" and p.case.target == "cuda":
        yield "layout.context_method=ring writes attention's scores out, chunk by chunk: ulysses keeps the fused kernel"
    if layout.shard > 1 and not reduces_each(layout) and p.n_micro_batches > 1:
        yield (
            f"FSDP keeps gradients whole while {p.n_micro_batches} micro-batches add up: "
            f"{gradients / 1e9:,.1f} GB at the peak. layout.micro_batch=null (all samples at once) or layout.pipeline "
            "keeps a part of them."
        )
    if getattr(recipe.model, "n_experts", None):
        yield (
            "experts are planned with equal shares of the tokens, in products as fast as dense ones: a router's uneven "
            "choice takes longer"
        )
    if layout.shard > 1 and recipe.adapter and recipe.adapter.base:
        base = sum(
            local_bytes(w, layout) * times
            for stage in p.stages for _, _, frozen, times in stage.units for name, w in frozen.items()
            if name.rpartition(".")[2] in BUFFERS
        )  # fmt: skip
        yield (
            f"layout.shard splits no quantized weights: the base in {recipe.adapter.base}, {size(base)}, lies whole "
            "on every device."
        )
    replicas = p.case.shape["replicate"]
    axes = [axis for axis in ("tensor", "pipeline", "expert") if getattr(layout, axis) > 1]
    if axes and replicas > 1 and layout.shard == 1 and p.optimizer_bytes:
        schedules = layout.pipeline > 1 and layout.schedule in ("interleaved", "zero_bubble")
        only = ", with layout.schedule=1f1b," * schedules
        yield (
            f"all {replicas} replicas keep the same optimizer state, {p.optimizer_bytes / 1e9:,.1f} GB per device: "
            f"ZeRO-1 (layout.shard_optimizer) is not combined with layout.{axes[0]}. "
            f"layout.shard={replicas}{only} splits it."
        )


def work_of(composed: list[Process]) -> Work:
    """Of the process that computes most. Operations that the pipeline's first process lacks are marked `stage_only`:
    the other stages wait for them."""
    every = [step_work(p) for p in composed]
    first, work = every[0], max(every, key=lambda work: sum(op.flops * op.count for op in work.micro))
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
