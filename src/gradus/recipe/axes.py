"""The axes along which a layout splits the work, and how many processes lie along each. Without torch."""

from __future__ import annotations

import math

from gradus.recipe.schema import Layout

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")  # from the farthest to the nearest ranks
DATA = ("replicate", "shard", "expert")  # along these, processes see different samples


def sizes(layout: Layout, n_processes: int) -> dict[str, int]:
    """Axis → processes along it. What the named axes leave over is `replicate`, so the product is n_processes.
    n_processes must be a multiple of `needed(layout)`; parallel.check tells the user where it is not."""
    named = {axis: getattr(layout, axis) for axis in AXES if axis != "replicate"}
    replica = needed(layout)
    assert n_processes % replica == 0, f"{replica} does not divide {n_processes}"
    return {axis: n_processes // replica if axis == "replicate" else named[axis] for axis in AXES}


def needed(layout: Layout) -> int:
    """The fewest processes that the layout can have: one replica."""
    return math.prod(getattr(layout, axis) for axis in AXES if axis != "replicate")


def strides(layout: Layout, n_processes: int) -> dict[str, int]:
    """Axis → distance between neighbouring ranks along it."""
    shape = sizes(layout, n_processes)
    return {axis: math.prod(shape[nearer] for nearer in AXES[i + 1 :]) for i, axis in enumerate(AXES)}


def stages_per_process(layout: Layout) -> int:
    """Stages of the pipeline that a process has."""
    if layout.pipeline <= 1:
        return 1
    return layout.stages or (2 if layout.schedule in ("interleaved", "zero_bubble") else 1)
