"""Profiles: what a process's part of a model does in one training step, read off the very modules under fake tensors.

A small model is stepped once with two micro-batches: of each stack the first block, one of each kind between, and the
last. It is split only as its blocks are: over tensor, context and expert. Its time line of memory, its operations and
its transfers are cut where a unit (a block, or an end that FSDP gathers by itself) begins and ends its forward and its
backward pass. `plan.compose` puts the pieces together for any number of layers, stages, shards, replicas and
micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.layers import Block
from gradus.layers.moe import Experts
from gradus.parallel import apply, engine, pipeline
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import replaced
from gradus.parallel.shard import ends
from gradus.plan import trace
from gradus.plan.work import COMPONENTS
from gradus.recipe.schema import Layout, ModelConfig, Recipe
from gradus.tasks.base import Task
from gradus.torch_private import tree_leaves

MiB = 2**20
NAMES = list(COMPONENTS)
INDEX = {name: i for i, name in enumerate(NAMES)}
N = len(NAMES)  # then come the bytes that each pool of PyTorch's caching allocator takes: see `pool`


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, or a buffer, as a process holds it before it is sharded."""

    shape: tuple[int, ...]
    expert: bool  # one of experts that are split over processes
    cut: bool  # along layout.tensor or layout.expert
    partial: bool  # its gradient is still to be summed along layout.tensor
    across: bool  # FSDP2 may cut it along any dimension: see parallel.shard
    width: int  # bytes of an element, as the model was built
    computed: int  # the same in the trace, where weights may have been cast
    buffer: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Units = dict[str, dict[str, Weight]]  # unit → name of a parameter → what it is, in the model's order
Edge = Literal[
    "pre_forward", "post_forward", "pre_backward", "post_backward", "forward", "backward", "weights", "idle", "end"
]


def pool(nbytes: float) -> tuple[int, float]:
    """(pool, bytes taken) of one tensor in PyTorch's caching allocator: small ones in segments of 2 MiB, those up to
    10 MiB in segments of 20 MiB, both in units of 512 bytes; larger ones in segments of their own, in units of 2 MiB
    (c10/cuda/CUDACachingAllocator)."""
    rounded = -(-nbytes // 512) * 512
    if rounded <= MiB:
        return 0, rounded
    return (1, rounded) if rounded < 10 * MiB else (2, -(-rounded // (2 * MiB)) * 2 * MiB)


@dataclasses.dataclass
class Stretch:
    """What happens between two edges. Bytes by component (work.COMPONENTS) and pool over what was there before."""

    peak: np.ndarray  # when they are most; of each pool when it is largest
    net: np.ndarray  # at its end
    ops: dict[tuple, float]  # as Traced.ops
    transfers: dict[tuple, float]  # as Traced.transfers


@dataclasses.dataclass
class Piece:
    """A stretch and the edge that it begins with. unit: "" is the root: all that is in no other unit."""

    unit: str
    edge: Edge
    stretch: Stretch


# ---------------------------------------------------------------- which blocks are traced


def block_kinds(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Of each stack the kind of each block. Blocks are of one kind where they have the same modules and parameters, the
    same of them frozen, where something is trained before all of them or before none, and where the family's `kind`
    says nothing else."""
    return _block_kinds(type(config), config.model_dump_json(exclude={"preset", "init"}))


@functools.lru_cache(maxsize=64)
def _block_kinds(config_type: type[ModelConfig], text: str) -> tuple[tuple[str, ...], ...]:
    config = config_type.model_validate_json(text)
    model, stacks = models.build(config, "meta"), models.lookup(config.family).stacks
    trained, kinds = False, []
    for stack in stacks:
        names = (f"{name}." for name in (*stack.before, *stack.beside))
        trained |= any(p.requires_grad for name, p in model.named_parameters() if f"{name}.".startswith(tuple(names)))
        kinds.append([])
        for i, block in enumerate(model.get_submodule(stack.blocks)):
            tensors = itertools.chain(block.named_parameters(), block.named_buffers())
            signature = (
                [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors],
                [type(module).__qualname__ for module in block.modules()],
                trained, stack.kind(config, i) if stack.kind else None,
            )  # fmt: skip
            kinds[-1].append(hashlib.sha256(repr(signature).encode()).hexdigest()[:8])
            trained |= any(p.requires_grad for p in block.parameters())
    return tuple(map(tuple, kinds))


def representatives(kinds: Sequence[str], ends: bool = True) -> list[int]:
    """Which of these blocks are traced for all: one of each kind; with `ends` the first one and the last one too."""
    inner = range(1, len(kinds) - 1) if ends else range(len(kinds))
    first_of = {kinds[i]: i for i in reversed(inner)}
    return sorted({*first_of.values(), *({0, len(kinds) - 1} if ends and kinds else ())})


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive blocks of a model and the ends that go with them. stacks: of each (blocks before them, own ones, blocks
    after them). kinds: of each stack that of every block. ends: whether first and last block are told from the others,
    as memory needs it."""

    stacks: tuple[tuple[int, int, int], ...]
    kinds: tuple[tuple[str, ...], ...]
    ends: bool = True

    @classmethod
    def of(cls, kinds: tuple[tuple[str, ...], ...], begin: int, end: int) -> Part:
        """Of the blocks from `begin` on, before `end`, counted through all stacks."""
        stacks, start = [], 0
        for stack in kinds:
            size = len(stack)
            before, after = (min(max(at - start, 0), size) for at in (begin, end))
            stacks.append((before, after - before, size - after))
            start += size
        return cls(tuple(stacks), kinds)

    @classmethod
    def whole(cls, kinds: tuple[tuple[str, ...], ...]) -> Part:
        """All blocks of a model, where only its operations count."""
        return cls(tuple((0, len(stack), 0) for stack in kinds), kinds, ends=False)

    @functools.cached_property
    def own_kinds(self) -> list[tuple[str, ...]]:
        return [kinds[before : before + own] for (before, own, _), kinds in zip(self.stacks, self.kinds)]

    @functools.cached_property
    def chosen(self) -> tuple[tuple[int, ...], ...]:
        """Of each stack the blocks that are traced. What has others on one side alone has two of them, so that there are
        three stages for all."""
        one_sided = len(self.stacks) == 1 and 0 in (self.stacks[0][0], self.stacks[0][2])
        most, out = 2 if one_sided else 1, []
        for (before, own, after), kinds in zip(self.stacks, self.own_kinds):
            first, last = min(before, most), min(after, most)
            inner = [before + i for i in representatives(kinds, self.ends)]
            out.append((*range(before - first, before), *inner, *range(before + own, before + own + last)))
        return tuple(out)

    @functools.cached_property
    def small(self) -> Part:
        """Of the chosen blocks alone."""
        stacks = []
        for (before, own, _), chosen in zip(self.stacks, self.chosen):
            first, last = sum(i < before for i in chosen), sum(i >= before + own for i in chosen)
            stacks.append((first, len(chosen) - first - last, last))
        kinds = tuple(tuple(kinds[i] for i in chosen) for kinds, chosen in zip(self.kinds, self.chosen))
        return Part(tuple(stacks), kinds, self.ends)

    @property
    def mixed(self) -> bool:
        """Whether a model that has as many blocks as are traced could be another."""
        return any(len(set(kinds)) > 1 for kinds in self.kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(sum, self.stacks))

    @property
    def bounds(self) -> list[int]:
        """Of the stages of this part and of what is before and after it."""
        first, own = sum(s[0] for s in self.stacks), sum(s[1] for s in self.stacks)
        inner = {1, first} if len(self.stacks) == 1 else {first}
        outer = {first + own, first + own + 1} if len(self.stacks) == 1 else {first + own}
        total = sum(self.sizes)
        return sorted({0, *(x for x in inner if x <= first), *(x for x in outer if x < total), total})

    @property
    def index(self) -> int:
        """Its stage."""
        return self.bounds.index(sum(s[0] for s in self.stacks))


@contextlib.contextmanager
def few_blocks(config: ModelConfig, part: Part) -> Iterator[None]:
    """Models are built with the chosen blocks of the whole model of this configuration; what is in `part.small` says how
    many these are."""
    build, stacks = models.build, models.lookup(config.family).stacks

    def chosen_alone(small: ModelConfig, device: str | torch.device = "cpu", seed: int | None = None) -> nn.Module:
        if str(device) != "meta":
            return models.deferred(small, seed).on(device)  # comes back for "meta"
        model = build(config, "meta")
        for stack, chosen in zip(stacks, part.chosen):
            owner, _, name = stack.blocks.rpartition(".")
            blocks = model.get_submodule(stack.blocks)
            setattr(model.get_submodule(owner), name, nn.ModuleList(blocks[i] for i in chosen))
        model.config = small
        return model

    with replaced(models, "build", chosen_alone):
        yield


# ---------------------------------------------------------------- a profile


@dataclasses.dataclass
class Profile:
    """first, later: the pieces of the first micro-batch and of any other, forward and backward; of a pipeline's stage
    also those of the weights' gradients, where the schedule makes them later."""

    first: dict[str, list[Piece]]
    later: dict[str, list[Piece]]
    prepare: dict[tuple, float]  # operations on a micro-batch before the first forward pass, as Traced.ops
    optimizer: Stretch  # norm, clipping, step
    units: Units  # what is trained
    frozen: Units  # parameters that are not, and buffers
    sent: dict[str, float]  # bytes that a stage sends after its forward and its backward pass
    batch: np.ndarray  # alive all the time, of every micro-batch that is given
    buffers: np.ndarray  # likewise, of every micro-batch that a pipeline runs
    pure: bool  # whether weights were in half
    stacks: dict[str, tuple[int, int]]  # name of the blocks → (number of the first, how many)


# ---------------------------------------------------------------- the edges


@dataclasses.dataclass
class Mark:
    """An edge: the events of the time line before it, and what is counted from it on."""

    events: int
    unit: str
    edge: Edge
    ops: dict[tuple, float]
    transfers: dict[tuple, float]


class _Marks:
    """Notes the edges while a step is traced."""

    def __init__(self, recorder: trace.Recorder):
        self.recorder, self.marks = recorder, []
        self.note("", "idle")

    def note(self, unit: str, edge: Edge) -> None:
        recorder = self.recorder
        recorder.ops, recorder.transfers = {}, {}
        self.marks.append(Mark(len(recorder.timeline.events), unit, edge, recorder.ops, recorder.transfers))

    def watch(self, name: str, module: nn.Module) -> None:
        def note_gradient(values: Any, edge: Edge) -> None:
            tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad)
            if (t := next(tensors, None)) is not None:
                t.register_hook(lambda gradient: self.note(name, edge))

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.note(name, "pre_forward")
            if name:
                note_gradient((args, kwargs), "post_backward")

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self.note(name, "post_forward")
            note_gradient(output, "pre_backward")

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def during(self, edge: Edge, function: Any) -> Any:
        def noting(*args, **kwargs):
            self.note("", edge)
            out = function(*args, **kwargs)
            self.note("", "idle")
            return out

        return noting


def modules_of(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """The units, by name; the root last."""
    kinds = (Block, Experts) if layout.expert > 1 else (Block,)
    units = {*(ends(model) if layout.pipeline == 1 else ()), *(m for m in model.modules() if isinstance(m, kinds))}
    return {name: m for name, m in model.named_modules() if m in units} | {"": model}


def weights_of(modules: dict[str, nn.Module], parallel: Parallel, built: dict[str, int]) -> tuple[Units, Units]:
    """(trained, frozen). built: bytes of an element as the model was built. After a backward pass, so that it can be
    told which gradients are parts of sums."""
    root_first = [("", modules[""]), *((unit, module) for unit, module in modules.items() if unit)]
    innermost = {id(p): unit for unit, module in root_first for p in (*module.parameters(), *module.buffers())}
    experts = (module for module in parallel.part.modules() if isinstance(module, Experts))
    across = {id(p) for module in experts for p in module.parameters()}
    trained: Units = {}
    frozen: Units = {}
    for name, p in itertools.chain(parallel.part.named_parameters(), parallel.part.named_buffers()):
        gradient = p.grad.placements if isinstance(p.grad, DTensor) else ()
        local = p.to_local() if isinstance(p, DTensor) else p
        weight = Weight(
            shape=tuple(local.shape),
            expert=parallel.is_expert(p),
            cut=isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements),
            partial=any(x.is_partial() for x in gradient),
            across=id(p) in across,
            width=built.get(name, p.element_size()),
            computed=p.element_size(),
            buffer=not isinstance(p, nn.Parameter),
        )
        (trained if p.requires_grad else frozen).setdefault(innermost[id(p)], {})[name] = weight
    return trained, frozen


# ---------------------------------------------------------------- the trace

BLOCK_KEYS = {  # of a layout, what splits a block or changes what it computes
    "device", "precision", "tensor", "sequence_parallel", "vocab_parallel", "context", "context_method", "expert",
    "checkpointing", "attention", "chunk", "tf32",
}  # fmt: skip


def small_recipe(recipe: Recipe, small: Part, split_backward: bool = False) -> Recipe:
    """The recipe with as many blocks as are traced, and of its layout what splits a block or changes what it computes."""
    sizes, layout, default = small.sizes, recipe.layout, Layout()
    update = {key: getattr(default, key) for key in Layout.model_fields if key not in BLOCK_KEYS}
    if layout.shard > 1 and layout.param_dtype in ("bf16", "fp16"):
        update["precision"] = f"pure_{layout.param_dtype}"
    stages = len(small.bounds) - 1
    if stages > 1:
        schedule = {"schedule": "zero_bubble", "stages": 1} if split_backward else {"schedule": "gpipe", "stages": None}
        update |= {"pipeline": stages, **schedule}
    layers = dict(zip(("n_layers", "n_decoder_layers"), sizes))
    model, layout = recipe.model.model_copy(update=layers), layout.model_copy(update=update)
    return recipe.model_copy(update={"model": model, "layout": layout})


def profile(
    recipe: Recipe, part: Part, batch: dict, *, target: trace.Target = "cuda", task: Task | None = None,
    split_backward: bool = False, micro: int = 2,
) -> Profile:  # fmt: skip
    """The pieces of this part of the recipe's model, under what of its layout splits a block.

    batch: a micro-batch. micro: how many are traced; of one alone the later ones are taken to be like it, which is
    enough for operations.
    """
    small = part.small
    few = small_recipe(recipe, small, split_backward)
    layout = few.layout
    within = layout.tensor * layout.context * layout.expert
    tracing = _Tracing(layout)
    with contextlib.ExitStack() as stack:
        if small.mixed:
            stack.enter_context(few_blocks(recipe.model, part))
        like = models.build(few.model, "meta")
        built = {name: t.element_size() for name, t in itertools.chain(like.named_parameters(), like.named_buffers())}
        # what depends on how many processes hold a parameter is arithmetic
        stack.enter_context(replaced(apply, "use_replicas", lambda p, model: None))
        stack.enter_context(replaced(engine, "sum_in_buckets", lambda gradients, *_: [None for _ in gradients]))
        stack.enter_context(replaced(pipeline.Pipeline, "reduce_tied", lambda pipeline: None))
        stack.enter_context(replaced(pipeline, "bounds", lambda n_blocks, n_stages: small.bounds))
        rank = small.index
        if not split_backward:  # the first process has this stage, so that one world, with what DTensor knows, does for all
            turned = [(s - small.index) % layout.pipeline for s in range(layout.pipeline)]
            stack.enter_context(replaced(pipeline, "ranks", lambda layout: turned))
            rank = 0
        traced = trace.trace_recipe(
            few, within * layout.pipeline, within * rank, target=target, task=task, micro_batches=[batch] * micro,
            watch=lambda recorder, stepper: tracing.watch(recorder, stepper.parallel, built, stack),
        )  # fmt: skip
    return _cut(recipe, small, traced, tracing, micro)


class _Tracing:
    """What is noted while a step is traced: the edges, and what is trained and what is frozen by then."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.marks: list[Mark] = []
        self.units: tuple[Units, Units] = {}, {}

    def watch(
        self, recorder: trace.Recorder, parallel: Parallel, built: dict[str, int], stack: contextlib.ExitStack
    ) -> None:
        modules = modules_of(parallel.part, self.layout)
        notes = _Marks(recorder)
        self.marks = notes.marks
        for name, module in modules.items():
            notes.watch(name, module)
        backward, finish = type(parallel).backward, parallel._finish_gradients
        if parallel.pipeline:
            from torch.distributed.pipelining import PipelineStage as Stage

            for edge, name in (
                ("forward", "forward_one_chunk"), ("backward", "backward_one_chunk"),
                ("weights", "backward_weight_one_chunk"),
            ):  # fmt: skip
                stack.enter_context(replaced(Stage, name, notes.during(edge, getattr(Stage, name))))
        else:
            sync = parallel.replicas.sync_on
            parallel.replicas.sync_on = lambda last: (sync(last), notes.note("", "forward"))
            parallel.backward = lambda loss: (notes.note("", "backward"), backward(parallel, loss))

        def finish_gradients() -> None:
            self.units = weights_of(modules, parallel, built)
            notes.note("", "end")
            finish()

        parallel._finish_gradients = finish_gradients


def _cut(recipe: Recipe, small: Part, traced: trace.Traced, tracing: _Tracing, micro: int) -> Profile:
    levels, marks = _levels(traced), tracing.marks
    stops = [mark.events for mark in marks[1:]] + [len(levels)]
    pieces = [Piece(mark.unit, mark.edge, _stretch(levels, mark, stop)) for mark, stop in zip(marks, stops)]
    for i, (a, b) in enumerate(itertools.pairwise(pieces)):
        # the hook on what one block gives and the next one takes tells the giver first; FSDP2's come the other way round
        if a.edge == "pre_backward" and b.edge == "post_backward" and not a.stretch.ops:
            pieces[i], pieces[i + 1] = Piece(b.unit, b.edge, a.stretch), Piece(a.unit, a.edge, b.stretch)
    passes: dict[str, list[list[Piece]]] = {"forward": [], "backward": [], "weights": []}
    now: list[Piece] | None = None
    sent: dict[str, float] = {}
    kind = ""
    for piece in pieces:
        if piece.edge in passes:
            kind = "forward" if piece.edge == "forward" else "backward"
            now = [piece]
            passes[piece.edge].append(now)
        elif piece.edge in ("idle", "end"):
            now = None
            for axis, _, payload, *_ in piece.stretch.transfers if piece.edge == "idle" else ():
                if axis == "pipeline":
                    sent[kind] = payload
        elif now is not None:
            now.append(piece)
    first, later = ({kind: runs[i] for kind, runs in passes.items() if runs} for i in (0, micro - 1))
    last = next(piece for piece in reversed(pieces) if piece.edge == "end")
    batch, buffers = _always_alive(traced, levels[traced.start - 1], pieces[0].stretch, micro)
    prepare = {key: count / micro for key, count in pieces[0].stretch.ops.items()}
    names = models.lookup(recipe.model.family).stacks
    stacks = {stack.blocks: (before, own) for stack, (before, own, _) in zip(names, small.stacks) if own}
    return Profile(first, later, prepare, last.stretch, *tracing.units, sent, batch, buffers, traced.pure, stacks)


def _always_alive(
    traced: trace.Traced, start: np.ndarray, ready: Stretch, micro: int
) -> tuple[np.ndarray, np.ndarray]:
    """(of every micro-batch that is given, of every one that a pipeline runs). ready: images become numbers before the
    first micro-batch."""
    batch, buffers = np.zeros(N + 3), start / micro
    batch[INDEX["activations"]] = traced.batch / micro
    for name in ("weights", "gradients", "optimizer"):
        buffers[INDEX[name]] = 0
    buffers = buffers - batch
    buffers[N:] = 0, 0, buffers[:N].sum()  # tensors of hidden states
    transient = INDEX["transient"]  # where the last step's images are there still, they go as this one's come
    buffers[transient] -= max(0.0, min(start[transient], ready.net[transient])) / micro
    return batch + ready.net / micro, buffers


def _stretch(levels: np.ndarray, mark: Mark, stop: int) -> Stretch:
    nothing, at = np.zeros(N + 3), mark.events
    before, rows = levels[at - 1] if at else nothing, levels[at:stop]
    if not len(rows):
        return Stretch(nothing, nothing, mark.ops, mark.transfers)
    peak = rows[rows[:, :N].sum(1).argmax()] - before
    peak = peak if peak[:N].sum() > 0 else nothing.copy()
    peak[N:] = np.maximum(rows[:, N:].max(0) - before[N:], 0)
    return Stretch(peak, rows[-1] - before, mark.ops, mark.transfers)


def _levels(traced: trace.Traced) -> np.ndarray:
    """Bytes by component and pool after each event."""
    timeline = traced.timeline
    borders = timeline.forward_ends()
    changes = np.zeros((len(timeline.events), N + 3))
    for i, (s, change) in enumerate(timeline.events):
        which, taken = pool(s.nbytes)
        changes[i, INDEX[s.tag or timeline.by_life(s, borders)]] = change
        changes[i, N + which] = math.copysign(taken, change)
    return changes.cumsum(0)


# ---------------------------------------------------------------- kept on disk


def to_json(p: Profile) -> dict[str, Any]:
    """As JSON can hold it."""

    def stretch(s: Stretch) -> list:
        return [s.peak.tolist(), s.net.tolist(), list(s.ops.items()), list(s.transfers.items())]

    def passes(runs: dict[str, list[Piece]]) -> dict:
        return {kind: [[x.unit, x.edge, stretch(x.stretch)] for x in pieces] for kind, pieces in runs.items()}

    def weights(units: Units) -> dict:
        return {unit: {name: dataclasses.astuple(w) for name, w in held.items()} for unit, held in units.items()}

    return {
        "first": passes(p.first), "later": passes(p.later), "prepare": list(p.prepare.items()),
        "optimizer": stretch(p.optimizer), "units": weights(p.units), "frozen": weights(p.frozen), "sent": p.sent,
        "batch": p.batch.tolist(), "buffers": p.buffers.tolist(), "pure": p.pure, "stacks": p.stacks,
    }  # fmt: skip


def from_json(plain: dict[str, Any]) -> Profile:
    def counted(rows: list) -> dict[tuple, float]:
        return {tuple(tuple(x) if isinstance(x, list) else x for x in key): count for key, count in rows}

    def stretch(peak: list, net: list, ops: list, transfers: list) -> Stretch:
        return Stretch(np.array(peak), np.array(net), counted(ops), counted(transfers))

    def passes(runs: dict) -> dict[str, list[Piece]]:
        return {kind: [Piece(unit, edge, stretch(*s)) for unit, edge, s in pieces] for kind, pieces in runs.items()}

    def weights(units: dict) -> Units:
        return {
            unit: {name: Weight(tuple(shape), *rest) for name, (shape, *rest) in held.items()}
            for unit, held in units.items()
        }

    read = {
        "first": passes, "later": passes, "prepare": counted, "optimizer": lambda s: stretch(*s), "units": weights,
        "frozen": weights, "batch": np.array, "buffers": np.array,
        "stacks": lambda stacks: {name: tuple(numbers) for name, numbers in stacks.items()},
    }  # fmt: skip
    return Profile(**{name: read.get(name, lambda value: value)(value) for name, value in plain.items()})
