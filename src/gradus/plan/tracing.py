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

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.layers import Block
from gradus.layers.moe import Experts
from gradus.parallel import apply, engine, pipeline
from gradus.parallel.engine import Parallel
from gradus.parallel.shard import ends
from gradus.patch import replaced
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
from gradus.torch_private import tree_leaves


@contextlib.contextmanager
def few_blocks(config: ModelConfig, part: Part) -> Iterator[None]:
    """While this lasts, models are built with the chosen blocks of the whole model of this configuration;
    `part.small` says how many these are."""
    build, stacks = models.build, models.lookup(config.family).stacks

    def chosen_alone(small: ModelConfig, device: str | torch.device = "cpu", seed: int | None = None) -> nn.Module:
        if str(device) != "meta":
            return models.deferred(small, seed, chosen_alone).on(device)
        model = build(config.trained(small.adapter, small.freeze), "meta")
        for stack, chosen in zip(stacks, part.chosen):
            owner, _, name = stack.blocks.rpartition(".")
            blocks = model.get_submodule(stack.blocks)
            setattr(model.get_submodule(owner), name, nn.ModuleList(blocks[i] for i in chosen))
        model.config = small
        return model

    with replaced(models, "build", chosen_alone):
        yield


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


def profile(
    recipe: Recipe, part: Part, batch: dict, *, target: Target = "cuda", task: Task | None = None,
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
        # patterns may name blocks that a smaller model has not
        if small.mixed or recipe.model.freeze or recipe.model.adapter:
            stack.enter_context(few_blocks(recipe.model, part))
        like = models.build(few.model, "meta")
        built = {name: t.element_size() for name, t in itertools.chain(like.named_parameters(), like.named_buffers())}
        # what depends on how many processes hold a parameter is arithmetic
        stack.enter_context(replaced(apply, "use_replicas", lambda p, model: None))
        stack.enter_context(replaced(engine, "sum_in_buckets", lambda gradients, *_: [None for _ in gradients]))
        stack.enter_context(replaced(pipeline.Pipeline, "reduce_tied", lambda pipeline: None))
        stack.enter_context(replaced(pipeline, "bounds", lambda n_blocks, n_stages: small.bounds))
        rank = small.index
        if not split_backward:  # the first process has this stage, so that one world serves for all parts
            turned = [(s - small.index) % layout.pipeline for s in range(layout.pipeline)]
            stack.enter_context(replaced(pipeline, "ranks", lambda layout: turned))
            rank = 0
        traced = trace.trace_recipe(
            few, within * layout.pipeline, within * rank, target=target, task=task, micro_batches=[batch] * micro,
            watch=lambda recorder, stepper: tracing.watch(recorder, stepper.parallel, built, stack),
        )  # fmt: skip
    return _cut(recipe, small, traced, tracing, micro)


def evaluation_memory(
    recipe: Recipe, part: Part, batch: dict, *, target: Target, task: Task | None = None
) -> dict[str, int]:
    """Component -> bytes at the peak of an evaluation of one batch, weights left out. One block of each kind stands
    for all: without a backward pass none leaves anything behind."""
    few = small_recipe(recipe, part.small)
    n = few.layout.tensor * few.layout.context * few.layout.expert
    with few_blocks(recipe.model, part):
        traced = trace.trace_recipe(few, n, target=target, task=task, micro_batches=[batch], evaluation=True)
    return traced.memory | {"weights": 0}


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
