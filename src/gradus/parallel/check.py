"""Does a layout fit a model, a batch and a number of processes? Every reason why not, one line each, before anything is
built or started. Nothing here imports torch, so that a search asks it thousands of times."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradus import models
from gradus.errors import UserError, divisors, either
from gradus.recipe.axes import batch, processes
from gradus.recipe.conflicts import LAYOUT, conflicts
from gradus.recipe.schema import MODELS, ExpertsConfig, Layout, ModelConfig, Recipe


def fits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Whether a layout can be applied to a model: what the table of recipe.conflicts says, and the axes' own sizes."""
    for p in conflicts({"model": config, "layout": layout, "adapter": config.adapter}, rows=LAYOUT):
        yield f"{p.path}: {p.text}"
    if layout.loss == "chunked" and not models.lookup(config.family).head:
        yield f"layout.loss=chunked: {config.family} has no logits over words. Set layout.loss=whole."
    for axis, problems in AXES.items():
        if getattr(layout, axis) > 1:
            yield from problems(config, layout)


def validate(recipe: Recipe, n_processes: int) -> None:
    """Raises one UserError with a line for everything that is wrong with the recipe's layout on so many processes."""
    layout = recipe.layout
    errors = [*fits(recipe.model, layout), *processes(layout, n_processes), *batch(recipe, n_processes)]
    if errors:
        raise UserError("\n".join(f"{recipe.name}: {line}" for line in dict.fromkeys(errors)))


# ---------------------------------------------------------------- the axes


def context(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Every reason why this model cannot be trained with this layout.context, one line each."""
    n = layout.context
    if reason := models.lookup(model.family).whole_sequence:
        others = ", ".join(family.name for family in models.families() if not family.whole_sequence)
        yield f"layout.context={n}: {reason}; layout.context is for {others}. Set layout.context=1."
    elif (model.longest or n) < n:
        yield f"layout.context={n}: model.seq_len={model.longest} is fewer tokens than processes. Set layout.context=1."
    elif layout.context_method == "ulysses":
        heads, kv_heads = model.n_heads, getattr(model, "n_kv_heads", None) or model.n_heads
        possible = [m for m in divisors(kv_heads) if kv_heads % (m * layout.tensor) == 0]
        if n not in possible:
            named = f"model.n_heads={heads}" if kv_heads == heads else f"model.n_kv_heads={kv_heads}"
            tensor = f" / layout.tensor={layout.tensor}" if layout.tensor > 1 else ""
            fits = f"Use {either(possible)}, or" if possible else "Use"
            yield (
                f"layout.context={n} does not divide {named}{tensor}, and ulysses splits the heads. "
                f"{fits} layout.context_method=ring."
            )


def expert(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Why this model's experts cannot be split so, one line per reason."""
    n, n_experts = layout.expert, getattr(model, "n_experts", None)
    if n_experts is None:
        able = [family for family, config in MODELS.items() if issubclass(config, ExpertsConfig)]
        more = f"Set layout.expert=1, or, for {either(able)}, model.n_experts={4 * n}, say."
        yield f"layout.expert={n}: this {model.family} has no experts. {more}"
    elif n_experts % n:
        yield f"layout.expert={n} does not divide model.n_experts={n_experts}. Use {either(divisors(n_experts))}."


def tensor(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Every reason why this model cannot be split over this layout.tensor, one line each."""
    n = layout.tensor
    heads = {"n_heads": model.n_heads, "n_kv_heads": getattr(model, "n_kv_heads", None) or model.n_heads}
    good = either(divisors(math.gcd(*heads.values())))
    for name, value in heads.items():
        if value % n and (name == "n_heads" or value != model.n_heads):
            yield f"layout.tensor={n} does not divide model.{name}={value}. Use {good}."
    for name in ("d_ff", "vocab_size", "target_vocab_size"):
        size = getattr(model, name, None)
        if size is not None and -(-size // n) * (n - 1) >= size:
            yield (
                f"layout.tensor={n}: model.{name}={size} leaves the last process without a part. "
                "Use a smaller layout.tensor."
            )


def pipeline(model: ModelConfig, layout: Layout) -> Iterator[str]:
    """Every reason why this model cannot be split over this layout.pipeline, one line each."""
    n = layout.pipeline
    per_process, family = layout.stages_per_process, models.lookup(model.family)
    n_blocks = sum(family.n_blocks(model))
    if n * per_process > n_blocks:
        yield (
            f"layout.pipeline={n} with {per_process} stages per process: {n * per_process} stages, and the model has "
            f"{n_blocks} blocks. Use layout.pipeline={max(1, n_blocks // per_process)} or less"
            f"{', or layout.schedule=1f1b with layout.stages=1' if per_process > 1 else ''}."
        )
    if layout.schedule == "zero_bubble" and len(family.stacks) > 1:
        yield (
            "layout.schedule=zero_bubble: it computes the gradients of inputs and of weights in two passes, and "
            "PyTorch's second one fails where weights enter a stage in several places, as "
            f"{model.family}'s decoder embedding and biases do. Use layout.schedule=interleaved."
        )


AXES = {"context": context, "expert": expert, "tensor": tensor, "pipeline": pipeline}
