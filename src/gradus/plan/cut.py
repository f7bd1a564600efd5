"""Stages of a pipeline, and other micro-batches, from one profile of a small whole model: what the search estimates
layouts by.

The engine traces every stage at its position and every size of a micro-batch by itself; its figures are printed. A cut
is near them at once: a stage has the pieces of its blocks and of its ends, and what it does lies on a line between what
is done with fewer samples and with more. Without cuts a search of GPT-2's layouts on 8 devices traced 83 parts, not 23,
and took five times as long.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradus import models
from gradus.models.family import Family
from gradus.plan.profiles import INDEX, ROW, Edge, N, Part, Piece, Profile, Stretch, Units, representatives
from gradus.plan.stage import Stage
from gradus.plan.work import OpCounts, TransferCounts, add_counts, memory_op

GRADIENTS, GATHERED, TRANSIENT = (INDEX[name] for name in ("gradients", "gathered", "transient"))
LARGE = N + 2  # the caching allocator's pool of large tensors


# ---------------------------------------------------------------- other micro-batches


def between(low: Profile, high: Profile, share: float) -> Profile | None:
    """Of a micro-batch whose number of samples is as far between those of two profiles: all that is counted lies on a
    line. None where the two did not do the same operations."""

    def line(a: Any, b: Any) -> Any:
        return a + (b - a) * share

    def row(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """All in the allocator's pool of large tensors: how a pool rounds lies on no line."""
        out = line(a, b)
        out[N:] = 0.0
        out[LARGE] = out[:N].sum()
        return out

    def field(a: Any, b: Any) -> Any:
        """Names stay; numbers, and those of a shape, lie between."""
        if isinstance(a, str):
            return a
        return tuple(map(field, a, b)) if isinstance(a, tuple) else round(line(a, b), 3)

    def of(a: Stretch, b: Stretch) -> Stretch:
        both = (a.ops, b.ops), (a.transfers, b.transfers)
        counts: tuple[OpCounts, TransferCounts] = {}, {}
        for total, (u, v) in zip(counts, both):
            for (x, m), (y, n) in zip(u.items(), v.items()):  # which may meet: as many tokens as a weight has rows
                add_counts(total, {type(x)(*map(field, x, y)): line(m, n)})
        return Stretch(row(a.peak, b.peak), row(a.net, b.net), *counts)

    def names(profile: Profile) -> list:
        pieces = [piece for run in profile.first.values() for piece in run]
        done = ([(k.kind, k.name, k.dtype, k.phase) for k in piece.stretch.ops] for piece in pieces)
        return [(x.unit, x.edge, ops, len(x.stretch.transfers)) for x, ops in zip(pieces, done)]

    if names(low) != names(high):
        return None
    first = {
        kind: [Piece(a.unit, a.edge, of(a.stretch, b.stretch)) for a, b in zip(run, high.first[kind])]
        for kind, run in low.first.items()
    }
    batch, buffers = row(low.batch, high.batch), row(low.buffers, high.buffers)
    return dataclasses.replace(low, first=first, later=first, batch=batch, buffers=buffers)


# ---------------------------------------------------------------- a stage


@dataclasses.dataclass
class _Pass:
    """The pieces of a pass over a small whole model. gaps: of each stack what comes before its first block, then what
    comes after all; they begin with the edge that leaves a block. blocks: (stack, number of its kind) → its own."""

    gaps: list[list[Piece]]
    blocks: dict[tuple[str, int], list[Piece]]


def _taken_apart(profile: Profile, kind: str) -> _Pass:
    names = list(profile.stacks)
    out = _Pass([[] for _ in range(len(names) + 1)], {})
    gap, outermost = (0, "post_forward") if kind == "forward" else (len(names), "post_backward")
    for piece in profile.first[kind]:
        name, number = profile.block_of(piece.unit)
        if not name:
            out.gaps[gap].append(piece)
            continue
        end = profile.stacks[name][1] - 1 if kind == "forward" else 0
        if piece.edge == outermost and piece.unit == f"{name}.{number}":
            gap = names.index(name) + (kind == "forward")
            if number == end:
                out.gaps[gap].append(piece)
        else:
            out.blocks.setdefault((name, number), []).append(piece)
    return out


class Cuts:
    """All stages that can be cut from a whole model, of one block of each kind and of one micro-batch."""

    def __init__(self, family: str, whole: Stage):
        self.family, self.whole = models.lookup(family), whole
        self.passes = {kind: _taken_apart(whole.profile, kind) for kind in ("forward", "backward")}
        self._stages: dict[tuple, Stage] = {}

    def stage(self, part: Part, hidden: float, in_pipeline: bool, split: bool = False) -> Stage:
        """hidden: bytes of what a stage sends to the next one for a micro-batch. split: whether the schedule makes
        the weights' gradients later than the others."""
        ends = ((not before, not after) for before, _, after in part.stacks)
        key = in_pipeline, split, *part.own_kinds, *ends
        if key not in self._stages:
            self._stages[key] = Stage(part, _Cut(self, part, hidden, in_pipeline).profile(split))
        return self._stages[key]


def _empty() -> Stretch:
    return Stretch(np.zeros(ROW), np.zeros(ROW), {}, {})


class _Cut:
    def __init__(self, cuts: Cuts, part: Part, hidden: float, in_pipeline: bool):
        self.whole, self.passes, self.family = cuts.whole.profile, cuts.passes, cuts.family
        self.part, self.hidden, self.in_pipeline = part, hidden, in_pipeline
        # name of a stack → of each block that is traced for the part, the number of the whole's block of its kind
        self.numbers: dict[str, list[int]] = {}
        for name, kinds, own in zip(self.whole.stacks, part.kinds, part.own_kinds):
            if own:
                order = list(dict.fromkeys(kinds))
                self.numbers[name] = [order.index(own[i]) for i in representatives(own, part.ends)]

    def profile(self, split: bool) -> Profile:
        first = {kind: list(self._pieces(kind)) for kind in ("forward", "backward")}
        units, frozen = self._units(self.whole.units), self._units(self.whole.frozen)
        stacks = {name: (0, len(numbers)) for name, numbers in self.numbers.items()}
        profile = dataclasses.replace(self.whole, units=units, frozen=frozen, stacks=stacks)
        adding = [_adding(piece, profile) for piece in first["backward"]]
        later = {"forward": first["forward"][:], "backward": adding}
        self._leave_nothing(first)
        self._leave_nothing(later)
        for runs in (first, later) if split else ():
            _keep_for_weights(runs)
        is_first, is_last = self.has_gap(0), self.has_gap(len(self.whole.stacks))
        sent = {"forward": self.hidden * (not is_last), "backward": self.hidden * (not is_first)}
        buffers = self.whole.buffers.copy()
        for at in (INDEX["activations"], LARGE):
            buffers[at] += sum(sent.values())
        sent = {kind: nbytes for kind, nbytes in sent.items() if nbytes}
        return dataclasses.replace(profile, first=first, later=later, buffers=buffers, sent=sent)

    def has_gap(self, gap: int) -> bool:
        """Whether the part has what comes before the first block of this stack, or after all."""
        stacks = self.part.stacks
        if gap == len(stacks):
            _, own, after = stacks[-1]
            return bool(own) and not after
        before, own, _ = stacks[gap]
        return bool(own) and not before

    def _pieces(self, kind: str) -> Iterator[Piece]:
        names = list(self.whole.stacks)
        gaps = list(range(len(names) + 1))
        last_edge: Edge = "post_forward" if kind == "forward" else "post_backward"
        left: Piece | None = None  # what happens as a block is left, which its neighbour in the whole may say better
        for gap in gaps if kind == "forward" else reversed(gaps):
            own = self.has_gap(gap)
            for i, piece in enumerate(self.passes[kind].gaps[gap]):
                leaves = piece.edge == last_edge and bool(piece.unit) and not i
                if leaves and left:
                    yield Piece(left.unit, last_edge, piece.stretch) if own else left
                elif own:
                    yield Piece("", "idle", piece.stretch) if leaves else piece
                elif not piece.unit:
                    yield Piece("", piece.edge, _empty())
            at = gap if kind == "forward" else gap - 1
            name, left = names[at] if 0 <= at < len(names) else "", None
            numbers = list(enumerate(self.numbers.get(name, ())))
            for new, number in numbers if kind == "forward" else reversed(numbers):
                if left:
                    yield left
                for piece in self.passes[kind].blocks.get((name, number), ()):
                    yield Piece(_renamed(piece.unit, name, number, new), piece.edge, piece.stretch)
                left = Piece(f"{name}.{new}", last_edge, _empty())
                if kind == "forward":
                    left.stretch.net[[TRANSIENT, LARGE]] -= self._released(name, number)

    def _released(self, name: str, number: int) -> float:
        """Bytes that a block gives back as it is left: intermediate results that its backward pass does not give
        back."""
        passes = (self.passes[kind].blocks.get((name, number), ()) for kind in ("forward", "backward"))
        return max(0.0, sum(piece.stretch.net[TRANSIENT] for pieces in passes for piece in pieces))

    def _leave_nothing(self, run: dict[str, list[Piece]]) -> None:
        """What autocast forgets at the end of the forward pass, and all else that was taken and no gradient, is given
        back: in the whole model by an end that the part may not have."""
        total = sum((piece.stretch.net for pieces in run.values() for piece in pieces), np.zeros(ROW))
        casts = np.zeros(ROW)
        casts[GATHERED] = casts[LARGE] = total[GATHERED]
        rest = total - casts
        rest[GRADIENTS] = 0.0
        rest[N:] = 0, 0, rest[:N].sum()
        for kind, by in (("forward", casts), ("backward", rest)):
            last = run[kind][-1]
            stretch = dataclasses.replace(last.stretch, net=last.stretch.net - by)
            run[kind][-1] = dataclasses.replace(last, stretch=stretch)

    def _units(self, units: Units) -> Units:
        out: Units = {}
        for unit, weights in units.items():
            name, number = self.whole.block_of(unit)
            if not name:
                own = {key: w for key, w in weights.items() if not self.in_pipeline or self._needs(key)}
                out.setdefault("" if self.in_pipeline else unit, {}).update(own)
                continue
            for new, of in enumerate(self.numbers.get(name, ())):
                if of == number:
                    of_block = {_renamed(key, name, of, new): w for key, w in weights.items()}
                    out[_renamed(unit, name, of, new)] = of_block
        return out

    @functools.cached_property
    def _needed(self) -> tuple[str, ...]:
        """Names of the modules besides its blocks that the part has, as `parallel.pipeline.Cutter` says."""
        needed: list[str] = []
        for stack, (before, own, after) in zip(self.family.stacks, self.part.stacks):
            if own:
                needed += stack.around(not before, not after)
        if self.has_gap(len(self.part.stacks)) and not _has_own_head(self.family, self.whole.units):
            needed += self.family.tokens[-1:]
        return tuple(f"{name}." for name in needed)

    def _needs(self, parameter: str) -> bool:
        return f"{parameter}.".startswith(self._needed)


def _has_own_head(family: Family, units: Units) -> bool:
    """Whether the projection to the vocabulary, if there is one, is not the embedding's weight."""
    names = [name for weights in units.values() for name in weights]
    return not family.head or any(name.startswith(f"{family.head}.") for name in names)


def _keep_for_weights(runs: dict[str, list[Piece]]) -> None:
    """What the forward pass has left stays until the weights' gradients are computed, in a pass of their own."""
    freed, backward = np.zeros(ROW), []
    for piece in runs["backward"]:
        s = piece.stretch
        kept = np.minimum(s.net, 0.0)
        freed += kept
        backward.append(Piece(piece.unit, piece.edge, dataclasses.replace(s, net=s.net - kept)))
    runs |= {"backward": backward, "weights": [Piece("", "weights", dataclasses.replace(_empty(), net=freed))]}


def _renamed(name: str, stack: str, number: int, new: int) -> str:
    return f"{stack}.{new}{name.removeprefix(f'{stack}.{number}')}"


def _adding(piece: Piece, profile: Profile) -> Piece:
    """A piece of a backward pass whose gradients are added to those that are there."""
    s, block = piece.stretch, profile.block_of(piece.unit)
    gradients = s.net[GRADIENTS]
    if not gradients:
        return piece
    own = (w for unit, weights in profile.units.items() if profile.block_of(unit) == block for w in weights.values())
    each = [w.size * w.computed for w in own] if block[0] and piece.edge == "pre_backward" else [gradients]
    peak, net, ops = s.peak.copy(), s.net.copy(), dict(s.ops)
    peak[GRADIENTS] = net[GRADIENTS] = 0.0
    peak[TRANSIENT] += min(gradients, max(each, default=0))
    net[LARGE] -= gradients
    width = 2 if profile.pure else 4
    for nbytes in each:
        add_counts(ops, {memory_op("add", width, "backward", 3 * nbytes): 1})
    return Piece(piece.unit, piece.edge, Stretch(peak, net, ops, s.transfers))
