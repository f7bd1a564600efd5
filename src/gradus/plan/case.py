"""A question completed once: what is planned, on how many devices, of what kind. What a session is for a run, a case is
for a plan; the cases of other layouts are derived from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from gradus.parallel import stages as pipelines
from gradus.plan import batches as making
from gradus.plan.batches import Batch
from gradus.plan.profiles import block_kinds
from gradus.plan.work import Target
from gradus.recipe.axes import data_parallel_size, needed, sizes, strides
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task
from gradus.text import size


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a process."""

    full: Batch  # the largest
    tail: Batch | None  # the last, where it alone is smaller
    count: int
    parts: float  # all of them, in units of the largest
    samples: int
    tokens: int  # padding counted; of images the patches
    nbytes: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> MicroBatches:
        full, lengths = max(batches, key=making.size_of), [making.size_of(batch) for batch in batches]
        uneven = lengths[-1] < lengths[0] and len(set(lengths[:-1])) == 1
        tensors = [[value for value in batch.values() if hasattr(value, "nbytes")] for batch in batches]
        return cls(
            full=full,
            tail=batches[-1] if uneven else None,
            count=len(batches),
            parts=sum(lengths) / making.size_of(full),
            samples=sum(len(of_batch[0]) for of_batch in tensors),
            tokens=sum(map(_tokens_in, batches)),
            nbytes=sum(value.nbytes for of_batch in tensors for value in of_batch),
        )


def where_fewest(layout: Layout, n: int, each: str, need: int) -> str:
    """What a plan of n processes says of those that are left where layout.min_replicas are: each needs `need` bytes."""
    least, n = layout.min_replicas, n // needed(layout)
    left = f"{least} replica{'s are' if least > 1 else ' is'} left (layout.min_replicas)"
    return f"where {left}, {each} {size(need)}, and {-(-n // least)} × as many micro-batches"


def _tokens_in(batch: Batch) -> int:
    """With padding; of images the patches."""
    return batch["n_tokens"] if "image" in batch or "images" in batch else making.size_of(batch)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """recipe: as `batches.complete` returns it. n: devices. target: their kind. task: with its data opened; None: of
    samples of full length. given: micro-batches, in place of the task's."""

    recipe: Recipe
    n: int
    target: Target
    task: Task | None
    given: Sequence[Batch] | None = None
    _batches: dict[tuple, MicroBatches] = dataclasses.field(default_factory=dict, repr=False)  # of all derived ones too

    @classmethod
    def of(
        cls, recipe: Recipe, n: int = 1, target: Target = "cpu", task: Task | None = None,
        given: Sequence[Batch] | None = None,
    ) -> Case:  # fmt: skip
        """Raises UserError for what the recipe does not say and only the data could tell."""
        return cls(making.complete(recipe), n, target, task, given)

    def at(self, layout: Layout | None = None, n: int | None = None, samples: int | None = None) -> Case:
        """The same question of another layout, of other devices, of so many samples a step."""
        update: dict[str, Any] = {"layout": layout} if layout else {}
        if samples:
            update["batch"] = self.recipe.batch.model_copy(update={"samples": samples, "tokens": None})
        return dataclasses.replace(self, recipe=self.recipe.model_copy(update=update), n=n or self.n)

    def fewest(self) -> Case | None:
        """Of replicas that come and go: where layout.min_replicas are left, which take the step in as large
        micro-batches, and more of them. None where none may be missing."""
        layout, samples = self.layout, self.recipe.batch.samples
        least = layout.min_replicas * needed(layout)
        if not layout.elastic or least >= self.n:
            return None
        micro = layout.micro_batch or -(-self.samples // self.data_parallel)
        even = samples and -(-samples // least) * least  # a plan is of equal shares
        return self.at(layout.model_copy(update={"micro_batch": micro}), n=least, samples=even)

    @property
    def layout(self) -> Layout:
        return self.recipe.layout

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Axis → processes along it."""
        return sizes(self.layout, self.n)

    @functools.cached_property
    def stride(self) -> dict[str, int]:
        """Axis → distance between neighbouring ranks along it."""
        return strides(self.layout, self.n)

    @functools.cached_property
    def data_parallel(self) -> int:
        """Into how many parts the samples of a step are split."""
        return data_parallel_size(self.layout, self.n)

    @property
    def ddp(self) -> bool:
        """Whether DDP sums the gradients."""
        layout = self.layout
        several = self.shape["replicate"] * layout.context > 1
        split = max(layout.shard, layout.tensor, layout.expert, layout.pipeline) > 1
        return several and not split and layout.replicate in ("auto", "ddp") and not (layout.local_sgd or layout.diloco)

    @functools.cached_property
    def rank_of(self) -> list[int]:
        """The process of the pipeline that has each stage."""
        return pipelines.ranks(self.layout)

    @functools.cached_property
    def bounds(self) -> list[int]:
        """The first block of each stage, and the number of all, counted through all stacks."""
        return pipelines.bounds(sum(map(len, self.kinds)), len(self.rank_of))

    @property
    def n_micro_batches(self) -> int:
        """That a process runs: at least those that it is given, and as many as the schedule needs."""
        return pipelines.needed(self.layout, self.batches.count)

    @functools.cached_property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Of each stack the kind of each block."""
        return block_kinds(self.recipe.model)

    @functools.cached_property
    def batches(self) -> MicroBatches:
        """The micro-batches of a step."""
        if self.given:
            return MicroBatches.of(self.given)
        batch, ways = self.recipe.batch, self.data_parallel
        alike = (batch.samples, batch.tokens, ways) if self.task or batch.tokens else (-(-batch.samples // ways),)
        key = *alike, self.layout.micro_batch
        if key not in self._batches:
            self._batches[key] = MicroBatches.of(self._made())
        return self._batches[key]

    def _made(self) -> list[Batch]:
        return making.micro_batches(self.recipe, self.n, task=self.task)

    @functools.cached_property
    def samples(self) -> int:
        """Of a step; where it is stated in tokens, as many as fit."""
        if self.recipe.batch.samples:
            return self.recipe.batch.samples
        (one, *_) = self.at(self.layout.model_copy(update={"micro_batch": 1}), n=1)._made()
        return max(1, self.recipe.batch.tokens // making.size_of(one))

    @functools.cached_property
    def one_sample(self) -> Case:
        """One sample of full length on one device. Its batches raise UserError for a length that the model has no
        positions for."""
        return dataclasses.replace(self.at(Layout(device="cpu"), n=1, samples=1), task=None, given=None)

    def evaluation_batch(self) -> Batch | None:
        """The largest of an evaluation; None where the task writes its answers token by token."""
        return making.evaluation_batch(self.recipe, self.n, self.task)
