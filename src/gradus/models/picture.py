"""A model drawn: what stands before, in and after each stack of blocks, with the shape and number of every weight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from gradus import models, pictures
from gradus.errors import some
from gradus.models.family import Family, Stack
from gradus.pictures import COLOURS, GAP, Picture
from gradus.recipe.schema import ModelConfig
from gradus.text import parameters


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
class Group:
    """Parts that follow one another, `times` times. numbers: which blocks of their stack they are; () of no block.
    parameters: of all times together."""

    title: str
    parts: tuple[Part, ...]
    parameters: int
    times: int = 1
    numbers: tuple[int, ...] = ()


def groups(config: ModelConfig) -> list[list[Group]]:
    """Of each stack what stands before its blocks, the blocks, alike ones once, and what stands after them. A model in
    memory is not needed. Raises UserError as `models.build`."""
    model, family = models.build(config, "meta"), models.lookup(config.family)
    order, drawer = _order(model, family), _Parts(model)
    return [list(_of_stack(stack, model, config, order, drawer)) for stack in family.stacks]


def _of_stack(
    stack: Stack, model: nn.Module, config: ModelConfig, order: dict[str, int], drawer: _Parts
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
            inside = dict.fromkeys(f"{name}.{inner.partition('.')[0]}" for inner, _ in block.named_parameters())
            called = sorted(inside, key=lambda child: order.get(child, len(order)))
            every.append(tuple(part for child in called for part in drawer.of(child, f"{name}.")))
        kind, total = type(block).__name__, sum(part.parameters for part in itertools.chain(*every))
        yield Group(f"{stack.blocks}: {kind}", every[0], total, len(numbers), tuple(numbers))
    yield from alone("after the blocks", stack.after)


def _order(model: nn.Module, family: Family) -> dict[str, int]:
    """Name of a module → when it first computes, as the model runs on the meta device."""
    order, config = {}, model.config

    def watch(name: str) -> Callable[..., None]:
        def computes(*_: object) -> None:
            order.setdefault(name, len(order))

        return computes

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in model.named_modules()]
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            if config.reads == "images":
                model.features(torch.empty(1, config.n_channels, config.image_size, config.image_size, device="meta"))
            elif family.attention == "cross":
                model.decode(ids, model.encode(ids))
            else:
                model.hidden(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return order


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
    titles = [stack.blocks.rpartition(".")[0] for stack in family.stacks]
    states = f"↓ (batch, {config.n_tokens if config.reads == 'images' else 'seq'}, {config.d_model})"
    columns = [_column(of, title, states) for of, title in zip(stacks, titles)]
    rows = [pictures.beside(columns, "", columns=len(columns))]
    if len(columns) > 1:
        words = f"Every block of the {titles[1]} also reads what the {titles[0]} returns."
        rows.append(pictures.note(words, rows[0].width))
    shares = {part: float(count) for part, count in counts.items() if count}
    rows.append(_by_component(shares, max(rows[0].width, 460)))
    lines = [f"{g.title}{_times(g)} {g.parameters:,}" for of in stacks for g in of]
    head = f"{name}: {parameters(total, models.trainable(config))}, family {config.family}"
    return pictures.beside(rows, head, f"From the input down to the head: {'; '.join(lines)}.", columns=1)


def _times(group: Group) -> str:
    return f" × {group.times}" if group.times > 1 else ""


def _label(group: Group, only_kind: bool) -> str:
    which = "" if only_kind or not group.numbers else f" ({some([str(n) for n in group.numbers])})"
    return f"{group.title}{_times(group)}{which}"


def _colour(component: str) -> str:
    return COLOURS[models.COMPONENTS.index(component)]


LINE, PAD = 15, 8  # pixels: of a line, within a box


def _column(of: list[Group], title: str, states: str) -> Picture:
    """A stack's groups from top to bottom. states: the shape of what goes through its blocks."""
    kinds = sum(bool(group.numbers) for group in of)
    labels = [(_label(group, kinds == 1), _number(group)) for group in of]
    texts = [line for g in of for part in g.parts for line in (_head(part), *part.weights)]
    texts = [*(text + 12 * " " for text in texts), *(f"{label}{number}  " for label, number in labels)]
    whole = 1.1 * pictures.CHARACTER * max(map(len, texts)) + 4 * PAD
    body, y = [pictures.text(GAP, 14, title, kind="title")], 34.0 if title else 14.0
    for group, (label, number) in zip(of, labels):
        if group.numbers:
            body.append(pictures.text(GAP + whole / 2, y - 4, states, "middle", "quiet"))
            y += 26
        inset, top = (PAD if group.numbers else 0), y
        x, wide = GAP + inset, whole - 2 * inset
        body.append(pictures.text(x, y, label, kind="title"))
        body.append(pictures.text(x + wide, y, number, "end", "quiet"))
        y += 6
        for part in group.parts:
            height, colour = LINE * (1 + len(part.weights)) + PAD, _colour(part.component)
            body.append(pictures.rectangle(x, y, wide, height, colour, f"{part.name}: {part.component}", 0.18))
            body.append(pictures.rectangle(x, y, 4, height, colour))
            body.append(pictures.text(x + PAD + 4, y + LINE, _head(part)))
            body.append(pictures.text(x + wide - PAD, y + LINE, f"{part.parameters:,}", "end"))
            for i, line in enumerate(part.weights):
                body.append(pictures.text(x + PAD + 14, y + LINE * (i + 2), line, kind="quiet"))
            y += height + 4
        if group.numbers:  # a frame: what is repeated
            size = f'x="{GAP}" y="{top - 16:.1f}" width="{whole:.1f}" height="{y - top + 20:.1f}"'
            body.append(f'<rect class="line" rx="6" stroke-width="2" {size}/>')
            y += 8
        y += 22
    return Picture(whole + 3 * GAP, y - 14, "".join(body), title, title)


def _number(group: Group) -> str:
    each = sum(part.parameters for part in group.parts)
    return f"{group.parameters:,}" if group.times == 1 else f"{group.times} × {each:,} = {group.parameters:,}"


def _head(part: Part) -> str:
    return f"{part.name}: {part.kind}"


def _by_component(shares: dict[str, float], width: float) -> Picture:
    """The legend too: the colours of the parts."""
    total, left, body, y = sum(shares.values()), 130.0, [pictures.text(GAP, 20, "by component", kind="title")], 32.0
    for component, count in shares.items():
        size = count / total * (width - left - 180)
        body.append(pictures.text(left - 8, y + 13, component, "end"))
        body.append(pictures.rectangle(left, y, max(size, 1), 18, _colour(component), component))
        body.append(pictures.text(left + size + 6, y + 13, f"{count:,.0f} ({100 * count / total:.2g} %)"))
        y += 24
    return Picture(width, y + GAP, "".join(body), "by component")
