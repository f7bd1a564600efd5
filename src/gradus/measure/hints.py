"""What to try next, from measured shares of a step alone: each hint with its number, none for what is on already or
cannot work on this device."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from gradus import models
from gradus.measure.trace import AGAIN, IDLE, POINTWISE, PYTHON, WAITING
from gradus.parallel.apply import has_compiler
from gradus.parallel.check import fits
from gradus.recipe.schema import Recipe
from gradus.train.machine import bf16_units


class Hint(NamedTuple):
    """key: of the recipe. share: of the step, that it is about."""

    key: str
    share: float
    text: str


def hints(recipe: Recipe, device: torch.device, shares: Mapping[str, float], free_cores: int) -> list[Hint]:
    """The most promising first. shares: of the step by category and, of recomputation, by phase. free_cores: processors
    that training leaves to others."""
    candidates = [
        hint
        for make in (_data, _attention, _fusing, _gpu, _precision, _casts, _recomputation, _optimizer)
        for hint in make(recipe, device.type == "cuda", lambda name: shares.get(name, 0.0), free_cores)
    ]
    return sorted((hint for hint in candidates if _allowed(hint.key, recipe)), key=lambda hint: -hint.share)


def _allowed(key: str, recipe: Recipe) -> bool:
    section, key, value = re.split("[.=]", key)
    changed = recipe.layout.model_copy(update={key: int(value) if value.isdigit() else value})
    return section != "layout" or not list(fits(recipe.model, changed))


def _data(recipe, cuda, share, free_cores) -> Iterator[Hint]:
    part, workers = share(WAITING), recipe.data.workers
    more = min(free_cores, 2 * workers or 2)
    if part >= 0.05 and more > workers:
        how = f"with {workers} worker{'s' * (workers > 1)}" if workers else "which the training process prepares itself"
        yield Hint(f"data.workers={more}", part, f"{part:.0%} of the step waits for data, {how}")


def _attention(recipe, cuda, share, _) -> Iterator[Hint]:
    part, layout = share("attention"), recipe.layout
    # what PyTorch has no fast kernel for on a CPU (layers.kernels.naive_is_faster)
    tokens = getattr(recipe.data, "max_len", None) or getattr(recipe.model, "seq_len", None) or recipe.model.n_tokens
    few = layout.precision.endswith("bf16") and tokens <= 256
    biased = any(stack.shared for stack in models.lookup(recipe.model.family).stacks)  # a trained bias for every block
    slow = getattr(recipe.model, "dropout", 0) or biased or few
    if part >= 0.1 and layout.attention != "sdpa" and (cuda or not slow):
        text = f"attention takes {part:.0%}, {layout.attention}: PyTorch has it as one fused kernel"
        yield Hint("layout.attention=sdpa", part, text)


def _fusing(recipe, cuda, share, _) -> Iterator[Hint]:
    fused, called = share(POINTWISE) + share("normalisation") + share("softmax and loss"), share(PYTHON)
    possible = importlib.util.find_spec("triton") is not None if cuda else has_compiler()
    if fused + called >= 0.25 and recipe.layout.compile == "none" and possible:
        text = f"element-wise operations, norms and softmax take {fused:.0%}"
        text += "" if cuda else f", Python and dispatch {called:.0%}"
        yield Hint("layout.compile=default", fused + called, f"{text}: compiled, many become one kernel")


def _gpu(recipe, cuda, share, _) -> Iterator[Hint]:
    layout, idle, copied = recipe.layout, share(IDLE), share("copies and memory")
    if cuda and idle >= 0.2 and (small := _next_micro_batch(recipe)):
        text = f"the GPU is idle for {idle:.0%}: larger kernels, and fewer of them, keep it busy"
        yield Hint(f"layout.micro_batch={small}", idle, text)
    elif cuda and idle >= 0.2 and layout.compile in ("none", "default") and importlib.util.find_spec("triton"):
        text = f"the GPU is idle for {idle:.0%}: CUDA graphs launch a block's kernels at once"
        yield Hint("layout.compile=reduce-overhead", idle, text)
    if cuda and copied >= 0.05 and not recipe.data.pin:
        yield Hint("data.pin=true", copied, f"copies take {copied:.0%}: from page-locked memory they are faster")


def _precision(recipe, cuda, share, _) -> Iterator[Hint]:
    part, layout = share("matrix products") + share("convolution"), recipe.layout
    if part < 0.3 or layout.precision not in ("fp32", "bf16") or (cuda and layout.tf32):
        return
    if cuda:
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = bf16_units()
    text = f"matrix products take {part:.0%}, in {layout.precision}: this {'GPU' if cuda else 'CPU'} has"
    if fast and layout.precision == "fp32":
        yield Hint("layout.precision=bf16", part, f"{text} instructions for bf16")
    elif fast is False and layout.precision == "bf16":
        yield Hint("layout.precision=fp32", part, f"{text} no instructions for bf16")


def _casts(recipe, cuda, share, _) -> Iterator[Hint]:
    part, more = share("copies and memory"), _next_micro_batch(recipe)
    if part >= 0.1 and recipe.layout.precision in ("bf16", "fp16") and more:
        text = f"copies and casts take {part:.0%}: autocast casts the weights once per micro-batch"
        yield Hint(f"layout.micro_batch={more}", part, text)


def _next_micro_batch(recipe: Recipe) -> int | None:
    size, samples = recipe.layout.micro_batch, recipe.batch.samples
    return min(samples, 2 * size) if size and samples and size < samples else None


def _recomputation(recipe, cuda, share, _) -> Iterator[Hint]:
    if (part := share(AGAIN)) >= 0.1 and recipe.layout.checkpointing != "none":  # chunked attention computes again too
        text = f"recomputing activations takes {part:.0%} of the step: not needed where they fit into memory"
        yield Hint("layout.checkpointing=none", part, text)


def _optimizer(recipe, cuda, share, _) -> Iterator[Hint]:
    part, samples = share("optimizer"), recipe.batch.samples
    if part >= 0.2 and samples:
        text = f"the optimizer takes {part:.0%} of every step, whatever its batch: larger ones spend less on it (this"
        yield Hint(f"batch.samples={2 * samples}", part, f"{text} changes training: the learning rate may need tuning)")
