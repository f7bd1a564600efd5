"""A model drawn: what stands before, in and after each stack of blocks, with the shape and number of every weight, and
what each part of a block reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gradus import models, pictures
from gradus.errors import some
from gradus.models.family import Family, Stack
from gradus.pictures import COLOURS, GAP, Picture
from gradus.recipe.schema import ModelConfig
from gradus.text import parameters

INPUT, MEMORY = -1, -2  # what a step of a block reads besides earlier steps
READ = {"x": INPUT, "memory": MEMORY}  # what every block calls them


@dataclasses.dataclass(frozen=True)
class Part:
    """A module, or a parameter that stands alone, of the model or of a block. weights: a line for each module in it.
    parameters: its own; those of an earlier part that it shares are counted there."""

    name: str
    kind: str  # its class
    component: str  # as `models.count`
    weights: tuple[str, ...]
    parameters: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a block that computes, or an operation on what several of them gave ("+": a residual is added).
    reads: the numbers of the steps whose results it takes, INPUT, MEMORY. causal: no token sees a later one."""

    name: str
    reads: tuple[int, ...]
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Parts that follow one another, `times` times. numbers: which blocks of their stack they are; () of no block.
    parameters: of all times together. steps: of a block, in the order in which they compute."""

    title: str
    parts: tuple[Part, ...]
    parameters: int
    times: int = 1
    numbers: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()


def groups(config: ModelConfig) -> list[list[Group]]:
    """Of each stack what stands before its blocks, the blocks, alike ones once, and what stands after them. A model in
    memory is not needed. Raises UserError as `models.build`."""
    model, family = models.build(config, "meta"), models.lookup(config.family)
    steps, drawer = _steps(config, family), _Parts(model)
    return [list(_of_stack(stack, model, config, steps, drawer)) for stack in family.stacks]


def _of_stack(
    stack: Stack, model: nn.Module, config: ModelConfig, steps: Mapping[str, list[Step]], drawer: _Parts
) -> Iterator[Group]:
    def alone(title: str, names: tuple[str, ...]) -> Iterator[Group]:
        if parts := tuple(part for name in names for part in drawer.of(name)):
            yield Group(title, parts, sum(part.parameters for part in parts))

    yield from alone("before the blocks", stack.before)
    yield from alone("what every block reads", stack.shared)
    kinds: dict[str, list[int]] = {}
    for i, block in enumerate(model.get_submodule(stack.blocks)):
        kinds.setdefault(repr(stack.signature(config, i, block)), []).append(i)
    for numbers in kinds.values():
        every = []
        for i in numbers:
            name, block = f"{stack.blocks}.{i}", model.get_submodule(f"{stack.blocks}.{i}")
            inside = [*(step.name for step in steps.get(name, ())), *(key for key, _ in block.named_parameters())]
            called = dict.fromkeys(f"{name}.{inner.partition('.')[0]}" for inner in inside)
            every.append(tuple(part for child in called for part in drawer.of(child, f"{name}.")))
        kind, total = type(block).__name__, sum(part.parameters for part in itertools.chain(*every))
        own = tuple(steps.get(f"{stack.blocks}.{numbers[0]}", ()))
        yield Group(f"{stack.blocks}: {kind}", every[0], total, len(numbers), tuple(numbers), own)
    yield from alone("after the blocks", stack.after)


def _steps(config: ModelConfig, family: Family) -> dict[str, list[Step]]:
    """Name of a block → its steps, as autograd keeps them while a model runs on the meta device."""
    model, ids = models.build(config, "meta").requires_grad_(), torch.zeros(1, 2, dtype=torch.long, device="meta")
    steps: dict[str, list[Step]] = {}
    own: list[Step] = []  # of the block that runs
    made: dict[Any, int] = {}  # the node of autograd's graph that a step's result comes from → the step

    def sources(node: Any) -> list[int]:
        """The step that a tensor comes from; what joins several is a step too."""
        if node not in made:
            found = dict.fromkeys(step for above, _ in node.next_functions if above for step in sources(above))
            if len(found) < 2:  # what takes one passes it on: dropout, a cast
                return list(found)
            made[node] = len(own)
            own.append(Step("+" if "Add" in node.name() else node.name(), tuple(found)))
        return [made[node]]

    def begins(name: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal own
        own = steps[name] = []
        for key, value in {"x": args[0] if args else None, **kwargs}.items():
            if key in READ and value is not None:
                made[value.grad_fn] = READ[key]

    def ends(name: str, child: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        nodes = [getattr(value, "grad_fn", None) for value in (*args, *kwargs.values())]
        reads = dict.fromkeys(step for node in nodes if node for step in sources(node))
        made[getattr(out, "grad_fn", None)] = len(own)
        own.append(Step(name, tuple(reads), bool(kwargs.get("causal"))))

    for stack in family.stacks:
        for i, block in enumerate(model.get_submodule(stack.blocks)):
            block.register_forward_pre_hook(partial(begins, f"{stack.blocks}.{i}"), with_kwargs=True)
            for name, child in block.named_children():
                if any(True for _ in child.parameters()):
                    child.register_forward_hook(partial(ends, name), with_kwargs=True)
            block.register_forward_hook(lambda block, args, out: sources(out.grad_fn) and None)
    if config.reads == "images":
        model.features(torch.empty(1, config.n_channels, config.image_size, config.image_size, device="meta"))
    elif family.attention == "cross":
        model.decode(ids, model.encode(ids))
    else:
        model.hidden(ids)
    return steps


class _Parts:
    """What is shared is counted where it comes first."""

    def __init__(self, model: nn.Module):
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}  # of each module, by their names in the model
        for key, p in model.named_parameters(remove_duplicate=False):
            for owner in itertools.accumulate(key.split("."), "{}.{}".format):
                self.parameters.setdefault(owner, {})[key] = p
        self.counted: dict[int, str] = {}

    def of(self, name: str, prefix: str = "") -> Iterator[Part]:
        """The part of this name, if the model has it and it has parameters. prefix: what its name is shown without."""
        own = self.parameters.get(name, {})
        count, lines = 0, {}
        for key, p in own.items():
            new = id(p) not in self.counted
            first = self.counted.setdefault(id(p), key)
            count += p.numel() if new else 0
            owner, _, leaf = key.removeprefix(name).removeprefix(".").rpartition(".")
            shared = "" if new else f", counted before as {first}" if first != key else ", counted before"
            lines.setdefault(owner, []).append(f"{leaf} ({', '.join(map(str, p.shape))}){shared}".strip())
        if own:
            kind = type(self.modules[name]).__name__ if name in self.modules else "Parameter"
            text = tuple(f"{owner}: {'; '.join(of)}" if owner else "; ".join(of) for owner, of in lines.items())
            component = models.component(next(iter(own)), self.modules)
            yield Part(name.removeprefix(prefix), kind, component, text, count)


# ---------------------------------------------------------------- drawn


def draw(config: ModelConfig, name: str) -> Picture:
    """The model from its input, above, to its head, below; the stacks of an encoder-decoder beside each other, and last
    the parameters by component. Errors as in `groups`."""
    stacks, counts = groups(config), models.count(config)
    total, family = counts.pop("total"), models.lookup(config.family)
    shares = {part: count for part, count in counts.items() if count}
    titles = [stack.blocks.rpartition(".")[0] for stack in family.stacks]
    columns = [_Column(of, title, _states(config), shares) for of, title in zip(stacks, titles)]
    words = "Arrows in a block: what each part reads."
    if len(columns) > 1:
        words += f" Every block of the {titles[1]} also reads what the {titles[0]} returns (memory)."
    whole = pictures.beside([column.picture for column in columns], "", columns=len(columns))
    x, out = columns[0].picture.width, columns[0].out
    for at in columns[-1].memory:
        way = pictures.arrow(out, complex(x - GAP, out.imag), complex(x - GAP, at.imag), x + at)
        whole = dataclasses.replace(whole, body=whole.body + way)
    by_component = pictures.bars({part: {part: count} for part, count in shares.items()}, "by component")
    head = f"{name}: {parameters(total, models.trainable(config))}, family {config.family}"
    return pictures.beside([whole, by_component], head, words, columns=1)


def blocks(configs: Mapping[str, ModelConfig], title: str, description: str = "") -> Picture:
    """A block of each kind of several models beside each other, below the models' names. Errors as in `groups`."""
    columns, bare = [], partial(dataclasses.replace, weights=())
    for name, config in configs.items():
        for of in groups(config):
            one = [
                dataclasses.replace(g, parts=tuple(map(bare, g.parts)), parameters=g.parameters // g.times, times=1)
                for g in of if g.numbers
            ]  # fmt: skip
            columns.append(_Column(one, name, _states(config)).picture)
    return pictures.beside(columns, title, description, columns=len(columns))


def _states(config: ModelConfig) -> str:
    """The shape of what goes through the blocks."""
    return f"(batch, {config.n_tokens if config.reads == 'images' else 'seq'}, {config.d_model})"


def _times(group: Group) -> str:
    return f" × {group.times}" if group.times > 1 else ""


def _label(group: Group, only_kind: bool) -> str:
    which = "" if only_kind or not group.numbers else f" ({some([str(n) for n in group.numbers])})"
    return f"{group.title}{_times(group)}{which}"


LINE, PAD = 15, 8  # pixels: of a line, within a box
SPACE = 20  # left of a block's parts, for the arrows past them


class _Column:
    """A stack's groups from top to bottom. states: the shape of what goes through its blocks. components: the first
    to be coloured. out: where what the stack returns leaves its last part; memory: where an encoder's is read."""

    def __init__(self, of: list[Group], title: str, states: str, components: Iterable[str] = ()):
        self.colours = dict(zip(dict.fromkeys([*components, *models.COMPONENTS]), COLOURS))
        every = [part for group in of for part in group.parts]
        kinds = sum(bool(group.numbers) for group in of)
        labels = [(_label(group, kinds == 1), _number(group)) for group in of]
        lines = [label + number for label, number in labels]
        lines += [line for part in every for line in (f"{_head(part)}{part.parameters:,}", *part.weights)]
        whole = 1.1 * max(map(pictures.width_of, lines)) + 4 * PAD + SPACE
        self.body, self.memory = [pictures.text(GAP, 14, title, kind="title")], []
        y = 34.0 if title else 14.0
        for group, (label, number) in zip(of, labels):
            inset, top = (PAD if group.numbers else 0), y - 15
            x, wide = GAP + inset, whole - 2 * inset
            self.body.append(pictures.text(x, y, label, kind="title"))
            self.body.append(pictures.text(x + wide, y, number, "end", "quiet"))
            if group.numbers:
                self.body.append(pictures.text(x + (wide + SPACE) / 2 + 8, y + 18, states, kind="quiet"))
                x, wide = x + SPACE, wide - SPACE
            y = self.draw(group, x, y + 6, wide)
            if group.numbers:  # what is repeated
                y += 8
                self.body.append(pictures.frame(GAP, top, whole, y - top))
            y += 26
        self.picture = Picture(whole + 3 * GAP, y - 10, "".join(self.body), "")

    def draw(self, group: Group, x: float, y: float, wide: float) -> float:
        """The parts of a group and what goes from one to another, from y down; returns where they end."""
        parts, middle, ends = {part.name: part for part in group.parts}, x + wide / 2, {INPUT: y}
        called = {step.name for step in group.steps}
        for i, step in enumerate([*group.steps, *(Step(name, ()) for name in parts if name not in called)]):
            y += 4 if not step.reads else 16 if i else 24
            left, height = middle - 9, 18
            if part := parts.get(step.name):
                left, height = x, LINE * (1 + len(part.weights)) + PAD
                self.box(part, x, y, wide, height, step.causal)
            else:
                circle = f'<circle class="arrow" cx="{middle:.1f}" cy="{y + 9:.1f}" r="9"/>'
                self.body += [circle, pictures.text(middle, y + 13, step.name, "middle")]
            at = complex(left, y + height / 2)
            for read in step.reads:
                start, lane = complex(middle, ends.get(read, 0)), x - SPACE / 2
                if read == MEMORY:
                    self.memory.append(at)
                elif read == i - 1:
                    self.body.append(pictures.arrow(start, complex(middle, y)))
                else:  # past the steps between
                    start += 6j
                    self.body.append(pictures.arrow(start, complex(lane, start.imag), complex(lane, at.imag), at))
            y += height
            ends[i] = y
        self.out = complex(x + wide, y - 9)
        return y

    def box(self, part: Part, x: float, y: float, width: float, height: float, causal: bool) -> None:
        colour, head = self.colours[part.component], _head(part) + ", causal" * causal
        self.body += [
            pictures.rectangle(x, y, width, height, colour, f"{part.name}: {part.component}", 0.18),
            pictures.rectangle(x, y, 4, height, colour),
            pictures.text(x + PAD + 4, y + LINE, head),
            pictures.text(x + width - PAD, y + LINE, f"{part.parameters:,}", "end"),
        ]
        for i, line in enumerate(part.weights):
            self.body.append(pictures.text(x + PAD + 14, y + LINE * (i + 2), line, kind="quiet"))


def _number(group: Group) -> str:
    each = sum(part.parameters for part in group.parts)
    return f"{group.parameters:,}" if group.times == 1 else f"{group.times} × {each:,} = {group.parameters:,}"


def _head(part: Part) -> str:
    return f"{part.name}: {part.kind}"
