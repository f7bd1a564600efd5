"""A stage put together from its profile: any number of blocks, by arithmetic.

The pieces of a micro-batch follow each other as they were traced, those of a block between the first and the last as
often as there are blocks of its kind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from gradus.plan.profiles import INDEX, ROW, Part, Piece, Profile, Weight, representatives
from gradus.plan.work import OpCounts, TransferCounts, add_counts


@dataclasses.dataclass
class Run:
    """One pass of a micro-batch over a stage. peak, net: (pieces, components and pools), as in `Stretch`."""

    edges: list[tuple[str, str]]  # (unit, edge) of each piece; "blocks.1@3": of the fourth block after the first
    times: list[int]  # how often the pieces of a block follow each other: of many alike, those between two of them
    peak: np.ndarray
    net: np.ndarray


@dataclasses.dataclass(eq=False)
class Stage:
    """One stage of the process: its part of the model, and the profile of a few blocks of it."""

    part: Part
    profile: Profile
    _runs: dict[tuple[str, bool], Run] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _counts: dict[bool, tuple[OpCounts, TransferCounts]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def ends(self) -> dict[str, Weight]:
        """What is trained and in no unit of its own, by name."""
        return self.profile.units.get("", {})

    def _passes(self, later: bool) -> dict[str, list[Piece]]:
        """later: of another micro-batch than the first."""
        return self.profile.later if later else self.profile.first

    @functools.cached_property
    def stands_for(self) -> dict[str, list[int]]:
        """Name of a stack's blocks → of each own block, the number of the traced one that stands for it."""
        out = {}
        for stack, kinds in zip(self.profile.stacks, (kinds for kinds in self.part.own_kinds if kinds)):
            traced = representatives(kinds, self.part.ends)
            ends = {0, len(kinds) - 1} if self.part.ends else set()
            number_of = {kinds[i]: number for number, i in enumerate(traced) if i not in ends}
            out[stack] = [traced.index(i) if i in ends else number_of[kind] for i, kind in enumerate(kinds)]
        return out

    def run(self, kind: str, later: bool) -> Run:
        """kind: forward, backward or weights. later: of another micro-batch than the first."""
        if (kind, later) not in self._runs:
            every = list(self._all_blocks(self._passes(later)[kind], kind))
            edges, times = [(piece.unit, piece.edge) for piece, _ in every], [many for _, many in every]
            peak, net = ([getattr(piece.stretch, name) for piece, _ in every] for name in ("peak", "net"))
            self._runs[kind, later] = Run(edges, times, *(np.reshape(rows, (-1, ROW)) for rows in (peak, net)))
        return self._runs[kind, later]

    def _all_blocks(self, pieces: list[Piece], kind: str) -> Iterator[tuple[Piece, int]]:
        """Each piece, and how often its block follows itself."""
        between: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            between.setdefault(self.profile.block_of(piece.unit), []).append(piece)
        done = set()
        for (stack, number), group in itertools.groupby(pieces, lambda piece: self.profile.block_of(piece.unit)):
            if not stack or number in (0, max(self.stands_for[stack])):
                yield from ((piece, 1) for piece in group)
            elif stack not in done:
                done.add(stack)
                inner = list(_alike(self.stands_for[stack][1:-1]))
                for i, traced, times in inner if kind == "forward" else reversed(inner):
                    for piece in between.get((stack, traced), ()):  # none where nothing goes back
                        yield Piece(f"{piece.unit}@{i}", piece.edge, piece.stretch), times

    def counts(self, later: bool = False) -> tuple[OpCounts, TransferCounts]:
        """(operations, transfers) of a micro-batch. later: of another one than the first."""
        if later not in self._counts:
            ops: OpCounts = {}
            sent: TransferCounts = {}
            for piece, times in self._totals(later):
                add_counts(ops, piece.stretch.ops, times)
                add_counts(sent, piece.stretch.transfers, times)
            self._counts[later] = ops, sent
        return self._counts[later]

    def _totals(self, later: bool = True) -> Iterator[tuple[Piece, int]]:
        """Each piece of a micro-batch, and how often."""
        for piece in itertools.chain.from_iterable(self._passes(later).values()):
            yield piece, self._times(piece.unit, piece.edge)

    def _times(self, unit: str, edge: str = "") -> int:
        """How many blocks a traced one stands for; what comes after the outermost one is the end's."""
        stack, number = self.profile.block_of(unit)
        if not stack:
            return 1
        numbers = self.stands_for[stack]
        outermost = {"post_forward": max(numbers), "post_backward": 0}.get(edge)
        if number == outermost and unit.count(".") == stack.count(".") + 1:
            return 1
        return numbers.count(number)

    def autocast_copies(self) -> float:
        """Bytes of half copies of weights, of the blocks that were not traced, that autocast forgets at the end of the
        forward pass, since no backward pass gives them back."""
        return sum((times - 1) * piece.stretch.net[INDEX["gathered"]] for piece, times in self._totals())

    def left_behind(self) -> np.ndarray:
        """What a micro-batch leaves behind that is no gradient."""
        return sum((times * piece.stretch.net for piece, times in self._totals()), np.zeros(ROW))

    @functools.cached_property
    def units(self) -> list[tuple[str, dict[str, Weight], dict[str, Weight], int]]:
        """(name, what of it is trained, what is frozen, how often)."""
        trained, frozen = self.profile.units, self.profile.frozen
        names = {**trained, **frozen}
        return [(unit, trained.get(unit, {}), frozen.get(unit, {}), self._times(unit)) for unit in names]

    @functools.cached_property
    def backward_units(self) -> set[str]:
        """Those that have a backward pass, traced ones by name."""
        return {piece.unit for piece, _ in self._totals() if piece.edge == "pre_backward"}

    def backward_gathers(self, unit: str, trained: bool, times: int) -> int:
        """How often FSDP2 gathers a unit for a backward pass; what has none, for that of the unit that follows it."""
        if trained or unit in self.backward_units:
            return times
        order = [piece.unit for piece in self.profile.later["forward"] if piece.edge == "post_forward"]
        return int(any(a == unit and b in self.backward_units for a, b in itertools.pairwise(order)))


def _alike(blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """(number of a block, the traced block that stands for it, repetitions). Of four or more identical blocks in a row
    the middle ones are one entry, as memory changes by the same amount in each."""
    for traced, group in itertools.groupby(enumerate(blocks), lambda pair: pair[1]):
        numbers = [i for i, _ in group]
        many = len(numbers) - 2
        times = [1, many, 1] if many > 1 else [1] * len(numbers)
        yield from ((i, traced, n) for i, n in zip([*numbers[: len(times) - 1], numbers[-1]], times))
