"""Does a layout fit a model, a batch and a number of processes? Asked before anything is built or started."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradus.errors import UserError
from gradus.parallel.mesh import needed, sizes
from gradus.recipe.schema import Layout, ModelConfig, Recipe

# pairs that do not compose, with the reason; each is a key of the layout that is more than 1, or set
APART = {
    ("expert", "tensor"): "a token would have to be sent to several processes of two axes. Use expert alone",
    ("expert", "pipeline"): "the load-balancing loss arises in middle stages, which have no loss. Use expert alone",
    ("expert", "context"): "the load-balancing loss is of whole sequences. Use expert alone",
    ("pipeline", "context"): "stages pass on whole sequences. Use one of them",
    ("pipeline", "offload"): "stages keep their weights where they compute. Set layout.offload=false",
    ("shard_optimizer", "shard"): "sharding splits the optimizer's state already. Set layout.shard_optimizer=false",
    ("shard_optimizer", "tensor"): "it deals out whole weights, and tensor splits them. Set layout.shard_optimizer=false",
    ("shard_optimizer", "pipeline"): "stages hold different weights, which its replicas do not know of. Set layout.shard_optimizer=false",
    ("shard_optimizer", "expert"): "processes hold different experts. Set layout.shard_optimizer=false",
    ("local_sgd", "diloco"): "they are two answers to one question. Choose one",
}


def processes(layout: Layout, n: int) -> Iterator[str]:
    """Whether n processes can be arranged so."""
    named = {axis: getattr(layout, axis) for axis in ("pipeline", "expert", "shard", "context", "tensor") if getattr(layout, axis) > 1}
    taken = math.prod(named.values())
    product = " × ".join(f"{axis} {k}" for axis, k in named.items())
    if n % taken:
        started = f"{n} {'was' if n == 1 else 'were'} started"
        keys = " or ".join(f"layout.{axis}" for axis in named)
        yield f"layout: {product} = {taken} processes, and {started}. Start {taken}, or a multiple: --processes {taken}; or change {keys}."
        return
    left = n // taken
    if left > 1 and layout.replicate == "none":
        yield (
            f"layout.replicate=none: {left} processes are left over{f' beside {product}' if named else ''}. Start {taken}, "
            f"or set layout.replicate=ddp{'' if named else f' or layout.shard={n}'}."
        )
    if left == 1:
        one = f"one replica ({n} process{'es' if n > 1 else ''})"
        for key in ("shard_optimizer", "local_sgd", "diloco"):
            if getattr(layout, key):
                yield f"layout.{key}: cannot take effect with {one}. Start {2 * taken}, or leave it out."
        for key in ("compress", "bucket_mb"):
            if getattr(layout, key) != type(layout).model_fields[key].default and layout.context == layout.expert == 1:
                yield f"layout.{key}: cannot take effect with {one}. Start {2 * taken}, or leave it out."
        if layout.replicate in ("manual", "parameter_server", "ddp"):
            yield f"layout.replicate={layout.replicate}: there is {one}. Start {2 * taken}: --processes {2 * taken}."
    if layout.replicate == "data_parallel":
        yield from _data_parallel(layout, n)


def _data_parallel(layout: Layout, n: int) -> Iterator[str]:
    import torch

    devices = torch.cuda.device_count()
    if n > 1:
        yield f"layout.replicate=data_parallel: it is one process with several GPUs, and {n} were started. Use layout.replicate=ddp."
    elif devices < 2 or layout.device == "cpu":
        there = "is one" if devices == 1 else "is none"
        yield f"layout.replicate=data_parallel: it splits a batch over several GPUs, and there {there} here. Use layout.replicate=ddp."


def combinations(layout: Layout) -> Iterator[str]:
    """What does not compose, and what cannot take effect."""
    on = {key for key, field in type(layout).model_fields.items() if getattr(layout, key) != field.default}
    for (a, b), reason in APART.items():
        if a in on and b in on:
            yield f"layout.{a} with layout.{b}: {reason}."
    split = [a for a in ("pipeline", "expert", "shard", "context", "tensor") if a in on]
    rep = layout.replicate
    if rep in ("manual", "parameter_server", "data_parallel") and split:
        yield f"layout.replicate={rep} with layout.{split[0]}: it is for replicas alone. Use layout.replicate=ddp."
    if layout.transport == "mpi" and rep != "manual":
        yield f"layout.transport=mpi cannot take effect with layout.replicate={rep}. It is for manual."
    if rep == "parameter_server" and layout.precision == "fp16":
        yield "layout.replicate=parameter_server with layout.precision=fp16: the server alone has the loss scale. Use bf16."
    plain_ddp = rep in ("auto", "ddp") and not set(split) - {"context"} and not layout.local_sgd and not layout.diloco
    if layout.compress != "none" and not plain_ddp:
        yield f"layout.compress={layout.compress} cannot take effect here: it is a hook of DDP, for replicas of whole weights. Leave it out."
    if "bucket_mb" in on and (rep in ("manual", "parameter_server") or "shard" in on):
        other = "layout.shard" if "shard" in on else f"layout.replicate={rep}"
        yield f"layout.bucket_mb cannot take effect with {other}, which sends gradients in its own way. Leave it out."
    if layout.shard_optimizer and rep not in ("auto", "ddp", "manual"):
        yield f"layout.shard_optimizer cannot take effect with layout.replicate={rep}. Use ddp or manual."
    for key in ("local_sgd", "diloco"):
        if getattr(layout, key) is None:
            continue
        if split:
            yield f"layout.{key} with layout.{split[0]}: workers that meet now and then hold whole weights. Leave layout.{split[0]} out."
        if rep not in ("auto", "none"):
            yield f"layout.{key} with layout.replicate={rep}: its workers are the replicas. Leave layout.replicate out."
        if layout.shard_optimizer:
            yield f"layout.{key} with layout.shard_optimizer: every worker steps all weights. Leave shard_optimizer out."
        if layout.precision == "fp16":
            yield f"layout.{key} with layout.precision=fp16: each worker would scale its loss by itself. Use bf16."
    needs = {
        "reshard": "shard", "param_dtype": "shard", "reduce_dtype": "shard", "offload": "shard", "sequence_parallel": "tensor",
        "vocab_parallel": "tensor", "schedule": "pipeline", "stages": "pipeline", "context_method": "context",
    }  # fmt: skip
    for key, axis in needs.items():
        if getattr(layout, key) != type(layout).model_fields[key].default and axis not in on:
            yield f"layout.{key} cannot take effect without layout.{axis}. Set layout.{axis}=2, say, or leave it out."
    if layout.param_dtype and layout.precision != "fp32":
        yield f"layout.param_dtype={layout.param_dtype} with layout.precision={layout.precision}: both say what is computed in. Set precision=fp32."
    if layout.offload and layout.precision == "fp16":
        yield "layout.offload with layout.precision=fp16: the loss scale lies on the GPU and the gradients on the host. Use bf16."
    if layout.precision == "fp16" and layout.param_dtype:
        return
    if layout.param_dtype == "fp16":
        yield "layout.param_dtype=fp16: gradients would underflow without a loss scale. Use bf16, or layout.precision=fp16."


def batch(recipe: Recipe, n: int) -> Iterator[str]:
    """Whether the batch divides among the processes that see different samples."""
    if n % needed(recipe.layout):
        return
    shape = sizes(recipe.layout, n)
    data, samples = shape["replicate"] * shape["expert"] * shape["shard"], recipe.batch.samples
    if samples and samples % data:
        divisors = [str(d) for d in range(1, samples + 1) if samples % d == 0]
        some = f"{', '.join(divisors[:8])}, ..." if len(divisors) > 8 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
        near = [str(k) for k in (samples // data * data, -(-samples // data) * data) if k]
        yield (
            f"batch.samples={samples} does not divide among {data} processes that each take a share. "
            f"Use {some} processes, or batch.samples={' or '.join(near)}."
        )
    elif samples and recipe.layout.micro_batch and recipe.layout.micro_batch > samples // data:
        share = samples // data
        yield f"layout.micro_batch={recipe.layout.micro_batch} is more than a process's share of {share} samples. Set at most {share}."
    apart = recipe.layout.local_sgd or recipe.layout.diloco
    if apart:
        key = "diloco" if recipe.layout.diloco else "local_sgd"
        for where, every in (("train.checkpoint_every", recipe.train.checkpoint_every), ("evaluate.every", recipe.evaluate.every)):
            if every and every % apart.every:
                near = max(1, round(every / apart.every)) * apart.every
                yield f"{where}={every}: workers meet every {apart.every} steps (layout.{key}.every). Set {where}={near}."


def model(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Whether the axes fit the family and its sizes."""
    if layout.context > 1:
        from gradus.parallel.context import problems

        yield from problems(config, layout)
    if layout.expert > 1 or getattr(config, "n_experts", None):
        from gradus.parallel.expert import problems

        yield from problems(config, layout)
    if layout.tensor > 1:
        from gradus.parallel.tensor import problems

        yield from problems(config, layout)
    if layout.pipeline > 1:
        from gradus.parallel.pipeline import problems

        yield from problems(config, layout)


def validate(recipe: Recipe, n_processes: int) -> None:
    """Raises one UserError with a line for everything that is wrong with the recipe's layout on so many processes."""
    layout = recipe.layout
    found = [*model(recipe.model, layout), *combinations(layout), *processes(layout, n_processes), *batch(recipe, n_processes)]
    if found:
        raise UserError("\n".join(f"{recipe.name}: {line}" for line in dict.fromkeys(found)))
