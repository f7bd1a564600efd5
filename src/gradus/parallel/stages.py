"""The stages of a pipeline: which blocks each has, which process, and how many micro-batches a schedule takes. Nothing
here imports torch."""

from __future__ import annotations

import dataclasses

from gradus.recipe.schema import Layout


@dataclasses.dataclass(frozen=True)
class Stages:
    """bounds: the first block of each stage, and the number of all. ranks: the process that has each."""

    bounds: list[int]
    ranks: list[int]


def bounds(n_blocks: int, n_stages: int) -> list[int]:
    """The first block of each stage, and the number of all. Rounded up, so that the last stage, which has the head, is
    never the one with a block more."""
    return [-(-n_blocks * s // n_stages) for s in range(n_stages + 1)]


def needed(layout: Layout, n: int) -> int:
    """The fewest micro-batches, at least n, that the schedule takes."""
    p, per_process = layout.pipeline, layout.stages_per_process
    if p == 1 or layout.schedule == "gpipe" or (layout.schedule == "zero_bubble" and per_process == 2):
        return n
    return max(n, p * per_process) if layout.schedule == "1f1b" else -(-n // p) * p


def ranks(layout: Layout) -> list[int]:
    """The process of the pipeline that has each stage: round the processes, or with two zero-bubble stages down and up
    again in a V (Qi et al. 2024)."""
    n, per_process = layout.pipeline, layout.stages_per_process
    v_shaped = layout.schedule == "zero_bubble" and per_process == 2
    return [2 * n - 1 - s if v_shaped and s >= n else s % n for s in range(n * per_process)]
