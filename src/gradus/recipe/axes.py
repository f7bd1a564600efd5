"""The axes along which a layout splits the work, how many processes lie along each, and why so many cannot be arranged
so. Torch is imported to count GPUs alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradus.errors import divisors, either
from gradus.recipe.schema import Layout, Recipe

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")  # from the farthest to the nearest ranks
DATA = ("replicate", "shard", "expert")  # along these, processes see different samples


def sizes(layout: Layout, n_processes: int) -> dict[str, int]:
    """Axis → processes along it. What the named axes leave over is `replicate`, so the product is n_processes.
    n_processes must be a multiple of `needed(layout)`; parallel.check tells the user where it is not."""
    replica = needed(layout)
    assert n_processes % replica == 0, f"{replica} does not divide {n_processes}"
    return {axis: n_processes // replica if axis == "replicate" else getattr(layout, axis) for axis in AXES}


def needed(layout: Layout) -> int:
    """The fewest processes that the layout can have: one replica."""
    return math.prod(getattr(layout, axis) for axis in AXES if axis != "replicate")


def data_parallel_size(layout: Layout, n_processes: int) -> int:
    """How many processes, or groups of them, each take their own part of a batch."""
    shape = sizes(layout, n_processes)
    return math.prod(shape[axis] for axis in DATA)


def evaluation_samples(recipe: Recipe, parts: int) -> int:
    """Samples per process that an evaluation takes at a time; parts: processes that share the batch."""
    return recipe.evaluate.batch or recipe.layout.micro_batch or -(-(recipe.batch.samples or 64) // parts)


def strides(layout: Layout, n_processes: int) -> dict[str, int]:
    """Axis → distance between neighbouring ranks along it."""
    shape = sizes(layout, n_processes)
    return {axis: math.prod(shape[nearer] for nearer in AXES[i + 1 :]) for i, axis in enumerate(AXES)}


def processes(layout: Layout, n: int) -> Iterator[str]:
    """Whether n processes can be arranged so."""
    axes = ("pipeline", "expert", "shard", "context", "tensor")
    named = {axis: getattr(layout, axis) for axis in axes if getattr(layout, axis) > 1}
    taken = needed(layout)
    product = " × ".join(f"{axis} {k}" for axis, k in named.items())
    if n % taken:
        started = f"{n} {'was' if n == 1 else 'were'} started"
        start = f"Start {taken}, or a multiple: --processes {taken}"
        keys = " or ".join(f"layout.{axis}" for axis in named)
        yield f"layout: {product} = {taken} processes, and {started}. {start}; or change {keys}."
        return
    left = n // taken
    if left > 1 and layout.replicate == "none":
        in_use, other = (f" beside {product}", "") if named else ("", f" or layout.shard={n}")
        yield (
            f"layout.replicate=none: {left} processes are left over{in_use}. "
            f"Start {taken}, or set layout.replicate=ddp{other}."
        )
    if left == 1:
        one = f"one replica ({n} process{'es' if n > 1 else ''})"
        of_replicas = ["shard_optimizer", "local_sgd", "diloco"]
        of_replicas += ["compress", "bucket_mb"] if layout.context == layout.expert == 1 else []
        for key in of_replicas:
            if getattr(layout, key) != type(layout).model_fields[key].default:
                yield f"layout.{key}: cannot take effect with {one}. Start {2 * taken}, or leave it out."
        if layout.replicate in ("manual", "parameter_server", "ddp"):
            yield f"layout.replicate={layout.replicate}: there is {one}. Start {2 * taken}: --processes {2 * taken}."
    if layout.min_replicas > left:
        yield f"layout.min_replicas={layout.min_replicas}: there are {left} replicas. Set at most {left}."
    if layout.replicate == "data_parallel":
        import torch

        devices = 0 if layout.device == "cpu" else torch.cuda.device_count()
        if n > 1 or devices < 2:
            yield (
                "layout.replicate=data_parallel: one process splits a batch over several GPUs "
                f"(processes here: {n}, GPUs: {devices}). Use layout.replicate=ddp."
            )


def batch(recipe: Recipe, n: int) -> Iterator[str]:
    """Whether the batch divides among the processes that see different samples."""
    if recipe.train.qat and n > 1:
        yield f"train.qat=true: the ranges of inputs need one process, and {n} were started. Start 1, or leave it out."
    if n % needed(recipe.layout):
        return
    layout, samples = recipe.layout, recipe.batch.samples
    data = data_parallel_size(layout, n)
    if samples and samples % data:
        good = divisors(samples)
        near = either(k for k in (samples // data * data, -(-samples // data) * data) if k)
        yield (
            f"batch.samples={samples} does not divide among {data} processes that each take a share. "
            f"Use {either([*good[:8], '...'] if len(good) > 8 else good)} processes, or batch.samples={near}."
        )
    elif samples and layout.micro_batch and layout.micro_batch > (share := samples // data):
        more = f"is more than a process's share of {share} samples. Set at most {share}."
        yield f"layout.micro_batch={layout.micro_batch} {more}"
    local = layout.local_sgd or layout.diloco
    if local is None:
        return
    periods = {"train.checkpoint_every": recipe.train.checkpoint_every, "evaluate.every": recipe.evaluate.every}
    for where, every in periods.items():
        if every and every % local.every:
            name = "diloco" if layout.diloco else "local_sgd"
            best = max(1, round(every / local.every)) * local.every
            yield f"{where}={every}: workers sync every {local.every} steps (layout.{name}.every). Set {where}={best}."
