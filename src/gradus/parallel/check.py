"""Does a layout fit a model, a batch and a number of processes? Asked before anything is built or started."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradus.errors import UserError, divisors, either
from gradus.parallel.fits import AXES
from gradus.recipe.axes import DATA, needed, sizes
from gradus.recipe.conflicts import LAYOUT, conflicts
from gradus.recipe.schema import Layout, ModelConfig, Recipe


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
    layout, shape = recipe.layout, sizes(recipe.layout, n)
    data, samples = math.prod(shape[axis] for axis in DATA), recipe.batch.samples
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
    for where in ("train.checkpoint_every", "evaluate.every") if local else ():
        section, key = where.split(".")
        every = getattr(getattr(recipe, section), key)
        if every and every % local.every:
            name, near = "diloco" if layout.diloco else "local_sgd", max(1, round(every / local.every)) * local.every
            yield f"{where}={every}: workers sync every {local.every} steps (layout.{name}.every). Set {where}={near}."


def fits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Whether a layout can be applied to a model: what the table of recipe.conflicts says, and the axes' own sizes."""
    for p in conflicts({"model": config, "layout": layout}, rows=LAYOUT):
        yield f"{p.path}: {p.text}"
    for axis, problems in AXES.items():
        if getattr(layout, axis) > 1:
            yield from problems(config, layout)


def validate(recipe: Recipe, n_processes: int) -> None:
    """Raises one UserError with a line for everything that is wrong with the recipe's layout on so many processes."""
    layout = recipe.layout
    errors = [*fits(recipe.model, layout), *processes(layout, n_processes), *batch(recipe, n_processes)]
    if errors:
        raise UserError("\n".join(f"{recipe.name}: {line}" for line in dict.fromkeys(errors)))
