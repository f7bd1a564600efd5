"""Profiles come from the modules that train, run under fake tensors.

A model of few blocks, of full width, takes two optimizer steps, the second of which is recorded, each with two
micro-batches (with one for the search, which derives the later ones). Of each stack it has the first block, one of each
kind between, and the last (`Part.chosen`), split as the layout splits a block: over tensor, context and expert. A stage
of a pipeline is traced in a small pipeline, between a block or two of its neighbours:

    first stage      [own blocks] → [block] → [block]
    inner stage      [block] → [own blocks] → [block]
    last stage       [block] → [block] → [own blocks]

The time line of memory, the operations and the transfers are cut at the edges of the units. Replicas, shards and the
schedule take no part: they are arithmetic (`plan.compose`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.layers import Block
from gradus.layers.moe import Experts
from gradus.parallel.engine import Parallel
from gradus.parallel.shard import ends
from gradus.parallel.stages import Stages, ranks
from gradus.plan import trace
from gradus.plan.profiles import (
    INDEX,
    ROW,
    Edge,
    N,
    Part,
    Piece,
    Profile,
    Stretch,
    Units,
    Weight,
    pool,
    small_recipe,
)  # fmt: skip
from gradus.plan.work import OpCounts, Target, TransferCounts
from gradus.recipe.schema import Layout, ModelConfig, Recipe
from gradus.tasks.base import Task
from gradus.torch_private import memory_id, tree_leaves


def few_blocks(config: ModelConfig, part: Part, small: ModelConfig) -> nn.Module:
    """On the meta device, the chosen blocks of the whole model of a configuration; `small` says how many these are."""
    model = models.build(config.trained(small.adapter, small.freeze), "meta")
    for stack, chosen in zip(models.lookup(config.family).stacks, part.chosen):
        blocks = model.get_submodule(stack.blocks)
        model.set_submodule(stack.blocks, nn.ModuleList(blocks[i] for i in chosen))
    model.config = small
    return model


# ---------------------------------------------------------------- the edges


@dataclasses.dataclass
class Mark:
    """An edge: the events of the time line before it, and what is counted from it on."""

    events: int
    unit: str
    edge: Edge
    ops: OpCounts
    transfers: TransferCounts


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


def modules_of(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """The units, by name; the root last."""
    kinds = (Block, Experts) if layout.expert > 1 else (Block,)
    units = {*(ends(model) if layout.pipeline == 1 else ()), *(m for m in model.modules() if isinstance(m, kinds))}
    return {name: m for name, m in model.named_modules() if m in units} | {"": model}


def weights_of(
    modules: dict[str, nn.Module], parallel: Parallel, built: dict[str, int], read: set[int]
) -> tuple[Units, Units]:
    """(trained, frozen). built: bytes of an element as the model was built. read: `Recorder.read`. After a backward
    pass, so that it can be told which gradients are parts of sums."""
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
            read=memory_id(local) in read,
        )
        (trained if p.requires_grad else frozen).setdefault(innermost[id(p)], {})[name] = weight
    return trained, frozen


# ---------------------------------------------------------------- the trace


def profile(
    recipe: Recipe, part: Part, batch: dict, *, target: Target = "cuda", task: Task | None = None,
    split_backward: bool = False, micro: int = 2,
) -> Profile:  # fmt: skip
    """The pieces of this part of the recipe's model, under what of its layout splits a block.

    batch: a micro-batch. micro: how many are traced; of one alone the later ones are taken to be like it, which is
    enough for operations.
    """
    few = small_recipe(recipe, part.small, split_backward)
    layout = few.layout
    within = layout.tensor * layout.context * layout.expert
    tracing, rank = _Tracing(recipe.model, part, layout), part.small.index
    if not split_backward:  # the first process has this stage, so that one world serves for all parts
        turned = [(s - rank) % layout.pipeline for s in range(layout.pipeline)]
        tracing.stages, rank = Stages(part.small.bounds, turned), 0
    traced = trace.trace_recipe(
        few, within * layout.pipeline, within * rank, target=target, task=task, micro_batches=[batch] * micro,
        subject=tracing,
    )  # fmt: skip
    return _cut(recipe, part.small, traced, tracing, micro)


def evaluation_memory(
    recipe: Recipe, part: Part, batch: dict, *, target: Target, task: Task | None = None
) -> dict[str, int]:
    """Component -> bytes at the peak of an evaluation of one batch, weights left out. One block of each kind stands
    for all: without a backward pass none leaves anything behind."""
    few = small_recipe(recipe, part.small)
    n = few.layout.tensor * few.layout.context * few.layout.expert
    traced = trace.trace_recipe(
        few, n, target=target, task=task, micro_batches=[batch], subject=_FewBlocks(recipe.model, part), evaluation=True
    )
    return traced.memory | {"weights": 0}


class _FewBlocks(trace.Subject):
    def __init__(self, config: ModelConfig, part: Part):
        self.config, self.part = config, part

    def build(self, config: ModelConfig) -> nn.Module:
        return few_blocks(self.config, self.part, config)


class _Tracing(_FewBlocks):
    """What is noted while a step is traced: the edges, and what is trained and what is frozen by then."""

    replicas = False  # what depends on how many processes hold a parameter is arithmetic

    def __init__(self, config: ModelConfig, part: Part, layout: Layout):
        super().__init__(config, part)
        self.layout, self.stages = layout, Stages(part.small.bounds, ranks(layout))
        self.marks: list[Mark] = []
        self.units: tuple[Units, Units] = {}, {}

    def build(self, config: ModelConfig) -> nn.Module:
        # patterns may name blocks that a smaller model has not
        chosen = self.part.small.mixed or self.config.freeze or self.config.adapter
        model = super().build(config) if chosen else models.build(config, "meta")
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        self.built = {name: t.element_size() for name, t in tensors}
        return model

    def start(self, recorder: trace.Recorder, parallel: Parallel) -> None:
        self.parallel, self.modules = parallel, modules_of(parallel.part, self.layout)
        self.notes = _Marks(recorder)
        self.marks = self.notes.marks
        for name, module in self.modules.items():
            self.notes.watch(name, module)

    def edge(self, unit: str, name: str) -> None:
        if name == "end":
            self.units = weights_of(self.modules, self.parallel, self.built, self.notes.recorder.read)
        if not unit and name != "begin":
            self.notes.note("", name)


def _cut(recipe: Recipe, small: Part, traced: trace.Traced, tracing: _Tracing, micro: int) -> Profile:
    levels, marks = _levels(traced), tracing.marks
    stops = [mark.events for mark in marks[1:]] + [len(levels)]
    pieces = [Piece(mark.unit, mark.edge, _stretch(levels, mark, stop)) for mark, stop in zip(marks, stops)]
    for i, (a, b) in enumerate(itertools.pairwise(pieces)):
        # of a tensor that one block gives the next, the giver's hook comes first; FSDP2 has them the other way round
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
    trained = [w for weights in tracing.units[0].values() for w in weights.values()]
    stepped = len(trained), sum(w.size * w.computed for w in trained)
    of_memory = batch, buffers, traced.pure, stacks, stepped
    return Profile(first, later, prepare, last.stretch, *tracing.units, sent, *of_memory)


def _always_alive(traced: trace.Traced, start: np.ndarray, ready: Stretch, micro: int) -> tuple[np.ndarray, np.ndarray]:
    """(of every micro-batch that is given, of every one that a pipeline runs). ready: images become numbers before the
    first micro-batch."""
    batch, buffers = np.zeros(ROW), start / micro
    batch[INDEX["activations"]] = traced.batch_bytes / micro
    for name in ("weights", "gradients", "optimizer"):
        buffers[INDEX[name]] = 0
    buffers = buffers - batch
    buffers[N:] = 0, 0, buffers[:N].sum()  # tensors of hidden states
    transient = INDEX["transient"]  # where the last step's images are there still, they go as this one's come
    buffers[transient] -= max(0.0, min(start[transient], ready.net[transient])) / micro
    return batch + ready.net / micro, buffers


def _stretch(levels: np.ndarray, mark: Mark, stop: int) -> Stretch:
    nothing, at = np.zeros(ROW), mark.events
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
    changes = np.zeros((len(timeline.events), ROW))
    for i, (s, change) in enumerate(timeline.events):
        which, taken = pool(s.nbytes)
        changes[i, INDEX[s.tag or timeline.component_by_lifetime(s, borders)]] = change
        changes[i, N + which] = math.copysign(taken, change)
    return changes.cumsum(0)
