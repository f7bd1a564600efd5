"""Profiles: what a process's part of a model does in one training step, read off the very modules under fake tensors.

A small model of the same kind, with at most EACH blocks a stack, is stepped once with two micro-batches, split only as its blocks are: over
tensor, context and expert. Its time line of memory, its operations and its transfers are cut where a unit (a block, or an end that FSDP
gathers by itself) begins and ends its forward and its backward pass. `plan.compose` puts the pieces together for any number of layers,
stages, shards, replicas and micro-batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from typing import Any, Literal

import numpy as np
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
from gradus.recipe.schema import Layout, Recipe
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
EACH = 3  # blocks of a stack that are traced: the first, one of those between, the last
Edge = Literal["pre_forward", "post_forward", "pre_backward", "post_backward", "forward", "backward", "weights", "idle", "end"]


def pool(nbytes: float) -> tuple[int, float]:
    """(pool, bytes taken) of one tensor in PyTorch's caching allocator: small ones in segments of 2 MiB, those up to 10 MiB in segments
    of 20 MiB, both in units of 512 bytes; larger ones in segments of their own, in units of 2 MiB (c10/cuda/CUDACachingAllocator)."""
    rounded = -(-nbytes // 512) * 512
    if rounded <= MiB:
        return 0, rounded
    return (1, rounded) if rounded < 10 * MiB else (2, -(-rounded // (2 * MiB)) * 2 * MiB)


@dataclasses.dataclass
class Stretch:
    """What happens between two edges. Bytes by component (work.COMPONENTS) and pool over what was there before."""

    rise: np.ndarray  # at its peak; of each pool at its own
    net: np.ndarray  # at its end
    ops: dict[tuple, float]  # as Traced.ops
    transfers: dict[tuple, float]  # as Traced.transfers


@dataclasses.dataclass
class Piece:
    """A stretch and the edge that it begins with. unit: "" is the root: all that is in no other unit."""

    unit: str
    edge: Edge
    stretch: Stretch


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive blocks of a model, for each stack (blocks before them, own ones, blocks after them), and the ends that go with them."""

    stacks: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, sizes: tuple[int, ...], begin: int, end: int) -> Part:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        own = [range(max(begin, start), max(begin, start, min(end, start + size))) for start, size in zip(starts, sizes)]
        return cls(tuple(
            (min(max(begin - start, 0), size), len(mine), size - len(mine) - min(max(begin - start, 0), size))
            for start, size, mine in zip(starts, sizes, own)
        ))  # fmt: skip

    @property
    def small(self) -> Part:
        """The same kind of part with few blocks. What has others on one side alone has two of them, so that there are three stages for all."""
        ends = [sum(stack[i] for stack in self.stacks) for i in (0, 2)]
        beside = 2 if len(self.stacks) == 1 and 0 in ends else 1
        return Part(tuple((min(before, beside), min(own, EACH), min(after, beside)) for before, own, after in self.stacks))

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


@dataclasses.dataclass
class Profile:
    """first, later: the pieces of the first micro-batch and of any other, forward and backward; of a pipeline's stage also those of the
    weights' gradients, where the schedule makes them later."""

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


class _Marks:
    """Notes the edges while a step is traced."""

    def __init__(self, recorder: trace.Recorder):
        self.recorder, self.found = recorder, []
        self.note("", "idle")

    def note(self, unit: str, edge: Edge) -> None:
        self.recorder.ops, self.recorder.transfers = {}, {}
        self.found.append((len(self.recorder.timeline.events), unit, edge, self.recorder.ops, self.recorder.transfers))

    def watch(self, name: str, module: nn.Module) -> None:
        def hooked(values: Any, edge: Edge) -> None:
            t = next((t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad), None)
            if t is not None:
                t.register_hook(lambda gradient: self.note(name, edge))

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.note(name, "pre_forward")
            if name:
                hooked((args, kwargs), "post_backward")

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            self.note(name, "post_forward")
            hooked(output, "pre_backward")

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
    alone = {*(ends(model) if layout.pipeline == 1 else ()), *(m for m in model.modules() if isinstance(m, kinds))}
    return {name: m for name, m in model.named_modules() if m in alone} | {"": model}


def weights_of(modules: dict[str, nn.Module], parallel: Parallel, built: dict[str, int]) -> tuple[Units, Units]:
    """(trained, frozen). built: bytes of an element as the model was built. After a backward pass, so that it can be told which gradients are parts of sums."""
    inner = [("", modules[""]), *((unit, module) for unit, module in modules.items() if unit)]
    where = {id(p): unit for unit, module in inner for p in (*module.parameters(), *module.buffers())}  # the innermost
    across = {id(p) for module in parallel.part.modules() if isinstance(module, Experts) for p in module.parameters()}
    trained: Units = {}
    frozen: Units = {}
    for name, p in itertools.chain(parallel.part.named_parameters(), parallel.part.named_buffers()):
        placed = p.grad.placements if isinstance(p.grad, DTensor) else ()
        local = p.to_local() if isinstance(p, DTensor) else p
        weight = Weight(
            tuple(local.shape), parallel.is_expert(p), isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements),
            any(x.is_partial() for x in placed), id(p) in across, built.get(name, p.element_size()), p.element_size(), not isinstance(p, nn.Parameter),
        )  # fmt: skip
        (trained if p.requires_grad else frozen).setdefault(where[id(p)], {})[name] = weight
    return trained, frozen


# ---------------------------------------------------------------- the trace


def small_recipe(recipe: Recipe, part: Part, split_backward: bool = False) -> Recipe:
    """The recipe with few blocks, and of its layout what splits a block or changes what it computes."""
    sizes, layout, default = part.sizes, recipe.layout, Layout()
    kept = {"device", "precision", "tensor", "sequence_parallel", "vocab_parallel", "context", "context_method", "expert", "checkpointing", "attention", "chunk", "tf32"}
    update = {key: getattr(default, key) for key in Layout.model_fields if key not in kept}
    if layout.shard > 1 and layout.param_dtype in ("bf16", "fp16"):
        update["precision"] = f"pure_{layout.param_dtype}"
    stages = len(part.bounds) - 1
    if stages > 1:
        update |= {"pipeline": stages, "schedule": "zero_bubble" if split_backward else "gpipe", "stages": 1 if split_backward else None}
    layers = {"n_layers": sizes[0]} | ({"n_decoder_layers": sizes[1]} if len(sizes) > 1 else {})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=layers), "layout": layout.model_copy(update=update)})


def profile(
    recipe: Recipe, part: Part, batch: dict, *, target: trace.Target = "cuda", task: Task | None = None, split_backward: bool = False, micro: int = 2
) -> Profile:
    """The pieces of this part (a small one) of the recipe's model, under what of its layout splits a block. batch: a micro-batch. micro: how
    many are traced; of one alone the later ones are taken to be like it, for a sketch."""
    small = small_recipe(recipe, part, split_backward)
    layout = small.layout
    within = layout.tensor * layout.context * layout.expert
    marks: list[_Marks] = []
    units: list[Units] = []
    like = models.build(small.model, "meta")
    built = {name: t.element_size() for name, t in itertools.chain(like.named_parameters(), like.named_buffers())}

    def watch(recorder: trace.Recorder, stepper: Any, stack: contextlib.ExitStack) -> None:
        parallel = stepper.parallel
        modules = modules_of(parallel.part, layout)
        mark = _Marks(recorder)
        for name, module in modules.items():
            mark.watch(name, module)
        backward, finish = type(parallel).backward, parallel._finish_gradients
        if parallel.pipeline:
            from torch.distributed.pipelining import PipelineStage

            for edge, name in (("forward", "forward_one_chunk"), ("backward", "backward_one_chunk"), ("weights", "backward_weight_one_chunk")):
                stack.enter_context(replaced(PipelineStage, name, mark.during(edge, getattr(PipelineStage, name))))
        else:
            sync = parallel.replicas.sync_on
            parallel.replicas.sync_on = lambda last: (sync(last), mark.note("", "forward"))
            parallel.backward = lambda loss: (mark.note("", "backward"), backward(parallel, loss))
        parallel._finish_gradients = lambda: (units.extend(weights_of(modules, parallel, built)), mark.note("", "end"), finish())
        marks.append(mark)

    with contextlib.ExitStack() as stack:
        # what depends on how many processes hold a parameter is arithmetic
        stack.enter_context(replaced(apply, "use_replicas", lambda p, model: None))
        stack.enter_context(replaced(engine, "sum_in_buckets", lambda gradients, group, nbytes: [None for _ in gradients]))
        stack.enter_context(replaced(pipeline.Pipeline, "reduce_tied", lambda pipeline: None))
        stack.enter_context(replaced(pipeline, "bounds", lambda n_blocks, n_stages: part.bounds))
        place = part.index
        if not split_backward:  # the first process has this stage: so that one world, and what DTensor knows in it, serves for all
            stack.enter_context(replaced(pipeline, "ranks", lambda layout: [(s - part.index) % layout.pipeline for s in range(layout.pipeline)]))
            place = 0
        traced = trace.trace_recipe(
            small, within * layout.pipeline, within * place, target=target, task=task, micro_batches=[batch] * micro,
            watch=lambda recorder, stepper: watch(recorder, stepper, stack),
        )  # fmt: skip
    return _cut(recipe, part, traced, marks[0].found, *units, micro)


def _cut(recipe: Recipe, part: Part, traced: trace.Traced, found: list[tuple], units: Units, frozen: Units, micro: int) -> Profile:
    levels = _levels(traced)
    stops = [at for at, *_ in found[1:]] + [len(levels)]
    pieces = [Piece(unit, edge, _stretch(levels, at, stop, ops, sent)) for (at, unit, edge, ops, sent), stop in zip(found, stops)]
    for i, (a, b) in enumerate(itertools.pairwise(pieces)):
        # the hook on what one block gives and the next one takes tells the one that gives first; FSDP2's come the other way round
        if a.edge == "pre_backward" and b.edge == "post_backward" and not a.stretch.ops:
            pieces[i], pieces[i + 1] = dataclasses.replace(b, stretch=a.stretch), dataclasses.replace(a, stretch=b.stretch)
    passes: dict[str, list[list[Piece]]] = {"forward": [], "backward": [], "weights": []}
    now: list[Piece] | None = None
    sent: dict[str, float] = {}
    kind = ""
    last: Piece | None = None
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
            last = piece if piece.edge == "end" else last
        elif now is not None:
            now.append(piece)
    first, later = ({kind: runs[i] for kind, runs in passes.items() if runs} for i in (0, micro - 1))
    start = levels[traced.start - 1]
    ready = pieces[0].stretch  # images become numbers before the first micro-batch
    given, buffers = np.zeros(N + 3), start / micro
    given[INDEX["activations"]] = traced.batch / micro
    for name in ("weights", "gradients", "optimizer"):
        buffers[INDEX[name]] = 0
    buffers = buffers - given
    buffers[N:] = 0, 0, buffers[:N].sum()  # tensors of hidden states
    given = given + ready.net / micro
    made = INDEX["transient"]  # where the last step's images are there still, they go as this one's come
    buffers[made] -= max(0.0, min(start[made], ready.net[made])) / micro
    names = models.lookup(recipe.model.family).stacks
    stacks = {stack.blocks: (before, own) for stack, (before, own, _) in zip(names, part.stacks) if own}
    return Profile(first, later, {key: count / micro for key, count in ready.ops.items()}, last.stretch, units, frozen, sent, given, buffers, traced.pure, stacks)


def _stretch(levels: np.ndarray, at: int, stop: int, ops: dict, transfers: dict) -> Stretch:
    nothing = np.zeros(N + 3)
    before, rows = levels[at - 1] if at else nothing, levels[at:stop]
    if not len(rows):
        return Stretch(nothing, nothing, ops, transfers)
    rise = rows[rows[:, :N].sum(1).argmax()] - before
    rise = rise if rise[:N].sum() > 0 else nothing.copy()
    rise[N:] = np.maximum(rows[:, N:].max(0) - before[N:], 0)
    return Stretch(rise, rows[-1] - before, ops, transfers)


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


def to_plain(p: Profile) -> dict[str, Any]:
    """As JSON can hold it."""

    def stretch(s: Stretch) -> list:
        return [s.rise.tolist(), s.net.tolist(), list(s.ops.items()), list(s.transfers.items())]

    def passes(runs: dict[str, list[Piece]]) -> dict:
        return {kind: [[x.unit, x.edge, stretch(x.stretch)] for x in pieces] for kind, pieces in runs.items()}

    def weights(units: Units) -> dict:
        return {unit: {name: dataclasses.astuple(w) for name, w in found.items()} for unit, found in units.items()}

    return {
        "first": passes(p.first), "later": passes(p.later), "prepare": list(p.prepare.items()), "optimizer": stretch(p.optimizer), "units": weights(p.units),
        "frozen": weights(p.frozen), "sent": p.sent, "batch": p.batch.tolist(), "buffers": p.buffers.tolist(),
        "pure": p.pure,
        "stacks": p.stacks,
    }  # fmt: skip


def from_plain(plain: dict[str, Any]) -> Profile:
    def counted(rows: list) -> dict[tuple, float]:
        return {tuple(tuple(x) if isinstance(x, list) else x for x in key): count for key, count in rows}

    def stretch(rise: list, net: list, ops: list, transfers: list) -> Stretch:
        return Stretch(np.array(rise), np.array(net), counted(ops), counted(transfers))

    def passes(runs: dict) -> dict[str, list[Piece]]:
        return {kind: [Piece(unit, edge, stretch(*s)) for unit, edge, s in pieces] for kind, pieces in runs.items()}

    def weights(units: dict) -> Units:
        return {unit: {name: Weight(tuple(shape), *rest) for name, (shape, *rest) in found.items()} for unit, found in units.items()}

    stacks = {name: tuple(place) for name, place in plain["stacks"].items()}
    return Profile(
        passes(plain["first"]), passes(plain["later"]), counted(plain["prepare"]), stretch(*plain["optimizer"]), weights(plain["units"]), weights(plain["frozen"]),
        plain["sent"], np.array(plain["batch"]), np.array(plain["buffers"]), plain["pure"], stacks,
    )  # fmt: skip
