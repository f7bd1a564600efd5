"""The cross entropy of a head over words; by chunks of rows its logits are never whole in memory, neither is their
gradient: a chunk's gradients are made with its loss, while its logits are there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradus.layers.capabilities import capabilities
from gradus.layers.kernels import no_autocast

IGNORE = -100  # a target that does not count
ROWS = 2048  # of a chunk: the weight's gradient is read and written once a chunk, beside products over so many rows


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, reduction: str = "sum"
) -> Tensor:
    """Cross entropy summed over the targets that count (those not IGNORE), in fp32, of float64 in that. logits (n,
    classes), targets (n,). reduction: none: one value a target, 0 where it does not count."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        exact, targets, reduction=reduction, label_smoothing=label_smoothing, ignore_index=IGNORE
    )


@dataclasses.dataclass
class Targets:
    """What a model is to predict, known to its head while the model is called in `given`, in that thread alone. A head
    that computes by chunks (layout.loss) then gives their loss in place of logits.

    ids: IGNORE where there is none; shaped as the logits without their last dimension. count_right: whether right
    predictions are counted. each: whether a loss is asked for each of them, shaped as ids, and not their sum: of
    label_smoothing=0 what a preference is learned from, the words' negative log-probabilities.
    """

    ids: Tensor
    label_smoothing: float = 0.0
    count_right: bool = False
    each: bool = False
    answered: bool = False
    right: Tensor | None = None

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        before = _given.set(self)
        try:
            yield
        finally:
            _given.reset(before)

    @staticmethod
    def now() -> Targets | None:
        """Those given to the model that is called in this thread. A backward pass, whose threads are others, does not
        ask: no head is computed again in it."""
        return _given.get()

    def loss(self, output: Tensor) -> Tensor:
        """The summed loss, a fp32 scalar, or those of `each`, of what the model gave: logits (..., vocab), or that."""
        if self.answered:
            return output
        reduction = "none" if self.each else "sum"
        loss = summed_cross_entropy(output.flatten(0, -2), self.ids.flatten(), self.label_smoothing, reduction)
        return loss.view_as(self.ids) if self.each else loss

    def sums(self, output: Tensor, n: int) -> dict[str, tuple[Tensor, int]]:
        """Loss and accuracy as (sum, count) over n targets. Needs `count_right`."""
        right = self.right if self.answered else (output.argmax(-1) == self.ids).sum()
        return {"loss": (self.loss(output), n), "accuracy": (right, n)}


_given: ContextVar[Targets | None] = ContextVar("targets", default=None)


@dataclasses.dataclass(frozen=True)
class Words:
    """The words that a process has the logits of: from number `first` on. group: the processes that have the others."""

    vocabulary: int
    first: int = 0
    group: dist.ProcessGroup | None = None

    def reduce(self, x: Tensor, how: Any) -> Tensor:
        """Over the processes, in place."""
        if self.group is not None:
            dist.all_reduce(x, how, self.group)
        return x


def chunked_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, own: Words) -> Tensor:
    """The loss, fp32, that `targets` ask for, of hidden states x (..., d_model). weight (words, d_model), bias
    (words,): of the process's own words. The gradient of x is that of these words alone."""
    targets.answered = True
    return _ChunkedLoss.apply(x, weight, bias, targets, own, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    """The loss is a sum, so its gradients are known but for one factor, which the backward pass brings. Of each loss
    that is asked for it brings a factor of its own: logits are then computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, own: Words,
                train: bool) -> Tensor:  # fmt: skip
        wanted = tuple(train and needed and not targets.each for needed in ctx.needs_input_grad[:3])
        if targets.each:
            kind = x.device.type
            ctx.save_for_backward(x, weight, bias)
            ctx.rest, ctx.cast = (targets, own), (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        loss, ctx.gradients = summed_by_chunks(x, weight, bias, targets, own, wanted)
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            with torch.autocast(*ctx.cast):
                given = *ctx.saved_tensors, *ctx.rest, ctx.needs_input_grad[:3], factor.flatten()
                _, ctx.gradients = summed_by_chunks(*given)
            factor = torch.ones((), device=factor.device)
        (by_x, *by_parameters), ctx.gradients = ctx.gradients, None
        if by_x is not None:
            by_x *= factor
        scaled = (
            None if g is None else torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(by_parameters, ctx.dtypes)
        )
        return by_x, *scaled, None, None, None


def summed_by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, own: Words, wanted: tuple[bool, ...],
    factors: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """(summed loss, or each as targets.ids; its gradients by x, weight and bias; None of what is not wanted). Gradients
    of parameters are added up in fp32. Matrix products are computed as autocast would. factors (rows,): of each loss in
    the gradients."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with no_autocast(x.device):
        w, b = weight.to(dtype), bias if bias is None else bias.to(dtype)
        by_x, by_weight, by_bias = (
            torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, least), device=t.device) if want else None
            for t, want, least in zip((x, weight, bias), wanted, (x.dtype, torch.float32, torch.float32))
        )
        loss = torch.zeros(targets.ids.numel() if targets.each else (), device=x.device)
        right = torch.zeros((), dtype=torch.int64, device=x.device)
        states, words = x.flatten(0, -2), targets.ids.flatten()
        for rows in (slice(at, at + ROWS) for at in range(0, len(words), ROWS)):
            chunk = states[rows].to(dtype)  # (rows, d_model)
            of_chunk, n_right, gradient = _of_chunk(F.linear(chunk, w, b), words[rows], targets, own)
            right = right + n_right
            if targets.each:
                loss[rows] = of_chunk
            else:
                loss = loss + of_chunk
            if factors is not None:
                gradient *= factors[rows, None]
            if by_x is not None:
                by_x.view(states.shape)[rows] = gradient @ w
            if by_bias is not None:
                by_bias += gradient.sum(0)
            if by_weight is not None and by_weight.dtype == dtype:
                torch.addmm(by_weight, gradient.T, chunk, out=by_weight)
            elif by_weight is not None:
                step = ROWS if capabilities(x.device).casts_first else len(w)
                for own_words in (slice(at, at + step) for at in range(0, len(w), step)):
                    by_weight[own_words] += gradient[:, own_words].T @ chunk
            del gradient  # or it would be there beside the next chunk's logits
    targets.right = right if targets.count_right else None
    return loss.view_as(targets.ids) if targets.each else loss, [by_x, by_weight, by_bias]


def _of_chunk(logits: Tensor, words: Tensor, targets: Targets, own: Words) -> tuple[Tensor, Tensor | int, Tensor]:
    """(summed loss or each, right predictions, gradient) of logits (rows, words), which are not kept: in fp32 the
    gradient takes their memory.

    It is softmax - (1 - smoothing) · one-hot - smoothing / vocabulary in the rows that count, 0 in the others (label
    smoothing: Szegedy et al. 2016, section 7; over processes: Shoeybi et al. 2019, section 3).
    """
    smoothing, dtype = targets.label_smoothing, logits.dtype
    right = _right(logits, words, own) if targets.count_right else 0
    counts, index = words != IGNORE, words - own.first
    here = counts & (index >= 0) & (index < logits.shape[1])
    index = index.masked_fill(~here, 0)[:, None]
    highest = own.reduce(logits.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX)
    in_fp32 = dtype == torch.float32 or capabilities(logits.device).casts_first
    p = logits.float().sub_(highest) if in_fp32 else logits - highest
    del logits
    local = p.gather(1, index)[:, 0]  # (rows,)
    target = local.masked_fill(~here, 0.0)
    mean = p.sum(-1) / own.vocabulary if smoothing else torch.zeros_like(target)
    total, target, mean = own.reduce(torch.stack([p.exp_().sum(-1), target, mean]), dist.ReduceOp.SUM)
    losses = total.log() - (1 - smoothing) * target - smoothing * mean
    factor, shift = counts / total, counts * (-smoothing / own.vocabulary)
    of_target = local.exp() * factor + shift - (1 - smoothing) * here
    gradient = p if in_fp32 else torch.empty_like(p, dtype=dtype)
    torch.addcmul(shift[:, None], p, factor[:, None], out=gradient)
    gradient.scatter_(1, index, of_target[:, None].to(gradient.dtype))
    loss = losses.masked_fill(~counts, 0.0)
    loss = loss if targets.each else loss.sum()
    return loss, right, gradient.to(dtype)


def _right(logits: Tensor, words: Tensor, own: Words) -> Tensor:
    """How many of the words are the likeliest, the first of those that are equally likely. logits: (rows, words)."""
    highest, place = logits.max(-1)
    of_all = own.reduce(highest.clone(), dist.ReduceOp.MAX)
    place = (place + own.first).masked_fill(highest != of_all, own.vocabulary)
    return (own.reduce(place, dist.ReduceOp.MIN) == words).sum()
