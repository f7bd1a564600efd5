"""Attention in three ways of one result (Vaswani et al. 2017, section 3.2.1): softmax(q kᵀ · scale + bias) v.

All kernels have one signature:

    kernel(q, k, v, *, mask=None, bias=None, causal=False, scale=None, dropout=0.0, window=None)
        -> (out, weights | None)

    q        (batch, n_heads, q_len, head_dim)
    k, v     (batch, n_kv_heads, k_len, head_dim); n_kv_heads divides n_heads:
             query head i reads key head i // (n_heads / n_kv_heads)
    mask     boolean, True where a query may look; broadcastable to (batch, n_heads, q_len, k_len);
             or Documents, with causal
    bias     added to the scaled scores; broadcastable likewise
    causal   a query looks at no later key; only where q_len == k_len (otherwise give a mask)
    scale    None: head_dim ** -0.5
    dropout  probability with which a weight is dropped now (0 when evaluating)
    window   a query looks at no key `window` or more places from it; None: at all; only where q_len == k_len
    out      (batch, n_heads, q_len, head_dim). A query that may look nowhere gives zeros, and no gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradus import torch_private
from gradus.layers.capabilities import capabilities
from gradus.layers.masks import Documents, one_document
from gradus.torch_private import FLASH_CPU, FLASH_CPU_BACKWARD


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Documents | None = None, bias: Tensor | None = None,
    causal: bool = False, scale: float | None = None, dropout: float = 0.0, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The textbook's way: all scores at once. Also returns the weights before dropout, (batch, n_heads, q_len,
    k_len)."""
    k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    mask = _dense(mask, causal)
    allowed = _allowed(q, k, mask, causal, window)
    scores = (q * default_scale(q, scale)) @ k.transpose(-2, -1)  # (batch, n_heads, q_len, k_len)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        # not -inf: softmax of nothing would be NaN
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return F.dropout(weights, dropout).to(v.dtype) @ v, weights


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Documents | None = None, bias: Tensor | None = None,
    causal: bool = False, scale: float | None = None, dropout: float = 0.0, window: int | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """PyTorch's fused attention. It picks the fastest of its own kernels that can do what is asked; where it has none
    that is fast on a CPU, this is `naive` (`naive_is_faster`)."""
    extra, blind, device = None, None, capabilities(q.device)
    # an exported graph is of any length, and so has no loop over it
    exporting = torch.compiler.is_exporting() or torch.jit.is_tracing()
    window = window if exporting or window is None or window < q.shape[2] else None
    # all that flex_attention can do
    if bias is None and not dropout and q.shape[-1] >= 16:
        if isinstance(mask, Documents):
            assert causal, "packed documents need causal=True"
            return device.blocks(*autocast(q, k, v), mask.blocks, window, scale), None
        if mask is None and causal and window is not None and device.skips_blocks:
            blocks = functools.partial(one_document, len(q), q.shape[2], q.device)
            return device.blocks(*autocast(q, k, v), blocks, window, scale), None
    if device.plain_attention and window is not None and not exporting and q.shape[2] > max(2 * window, 256):
        if mask is None and bias is None and not dropout:
            return _banded(*autocast(q, k, v), causal, default_scale(q, scale), window), None
        rest = {"causal": causal, "scale": scale, "dropout": dropout, "window": window}
        return chunked()(q, k, v, mask=mask, bias=bias, **rest)
    if device.plain_attention and naive_is_faster(q, k, v, bias, dropout):
        return naive(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout, window=window)[0], None
    mask = _dense(mask, causal)
    if mask is not None or bias is not None or window is not None:
        extra = _allowed(q, k, mask, causal, window)
        # fused kernels disagree about a row that may look nowhere: it looks everywhere, and is cleared below
        if mask is not None:
            blind = ~extra.any(dim=-1, keepdim=True)
            extra = extra | blind
        if bias is not None:
            extra = bias.to(q.dtype) if extra is None else bias.to(q.dtype).masked_fill(~extra, float("-inf"))
        extra = extra[(None,) * (4 - extra.dim())]
        causal = False
    _aligned(q, k, causal, None)
    grouped = q.device.type == "cpu" or (extra is None and q.dtype != torch.float32)  # elsewhere only flash shares keys
    if not grouped:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    shares = bool(q.shape[1] != k.shape[1])  # a tensor where torch.jit traces

    out = device.attention(
        q, k, v, attn_mask=extra, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shares
    )
    return out if blind is None else out.masked_fill(blind, 0.0), None


def naive_is_faster(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """On a CPU, with dropout or a trained bias PyTorch computes the plain way too: 1.1 times as long as `naive` in
    fp32, 1.7 to 2 times in bf16, with dropout in twice the memory. Its flash kernel trains in bf16 3.5 times as long as
    `naive` with 128 tokens and 1.8 to 2.2 times with 256; with more, naive needs too much memory, 6 bytes a score.
    (AMD EPYC with bf16 units, one thread. fp16 could not hold the scores.)"""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    if dtype == torch.float16:
        return False
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    few = dtype == torch.bfloat16 and trains and max(q.shape[2], k.shape[2]) <= 256
    return dropout > 0 or (bias is not None and bias.requires_grad) or few


def chunked(chunk: int = 256) -> Callable[..., tuple[Tensor, None]]:
    """A kernel of `chunk` queries at a time: never more than chunk × k_len scores a head are alive, nor in the backward
    pass, which makes each chunk's weights again (and draws its dropout again from the generator's saved state)."""

    @torch_private.uncompiled  # a compiler would unroll the chunks and keep their buffers
    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | Documents | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, dropout: float = 0.0, window: int | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        _aligned(q, k, causal, window)
        some = chunk if window is None else min(chunk, max(64, window // 4))  # the fewer, the fewer keys they see
        q, k, v = autocast(q, k, v)
        mask = _dense(mask, causal)
        n_kv_heads = k.shape[1]
        group = q.unflatten(1, (n_kv_heads, -1))  # (batch, n_kv_heads, group, q_len, head_dim)
        mask, bias = (x if x is None else _split_heads(x, n_kv_heads) for x in (mask, bias))
        out = _Chunked.apply(group, k, v, mask, bias, (causal, default_scale(q, scale), dropout, some, window))
        return out.flatten(1, 2), None

    return attend


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores are made and become weights. mask, bias: broadcastable to (batch, n_kv_heads, group, q_len, k_len)."""

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    scale: float
    dropout: float
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of the scores that is alive at once. dropped: True where a weight of it is dropped, in the shape of its
    scores."""

    rows: slice  # queries
    cols: slice  # keys that any of them may look at
    dropped: Tensor | None = None

    @classmethod
    def draw(cls, q: Tensor, rows: slice, cols: slice, dropout: float) -> Chunk:
        """Draws what is dropped from the generator. q: (batch, n_kv_heads, group, q_len, head_dim)."""
        if not dropout:
            return cls(rows, cols)
        shape = (*q.shape[:3], rows.stop - rows.start, cols.stop - cols.start)
        return cls(rows, cols, torch.empty(shape, dtype=torch.bool, device=q.device).bernoulli_(dropout))

    def halves(self, chunk: int, k_len: int, how: Scores) -> Iterator[Chunk]:
        top, left = self.rows.start, self.cols.start
        for rows, cols in query_chunks(top, self.rows.stop, -(-chunk // 2), k_len, how.causal, how.window):
            dropped = self.dropped
            if dropped is not None:
                dropped = dropped[..., rows.start - top : rows.stop - top, cols.start - left : cols.stop - left]
            yield Chunk(rows, cols, dropped)


class _Banded(torch.autograd.Function):
    """Attention with a window by PyTorch's flash kernel for CPUs, a band of queries at a time: it is given the keys
    alone that lie in the window of one of them."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, window):
        ctx.settings = causal, scale, window
        q = q.unflatten(1, (k.shape[1], -1))  # (batch, n_kv_heads, group, seq, head_dim)
        out, sums = torch.empty_like(q), []
        for rows, cols, mask in _bands(q, causal, window):
            of_band = q[..., rows, :].flatten(2, 3), k[:, :, cols], v[:, :, cols]
            part, lse = FLASH_CPU(*of_band, 0.0, False, attn_mask=mask, scale=scale)
            out[..., rows, :] = part.unflatten(2, (q.shape[2], -1))
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, *sums = ctx.saved_tensors
        causal, scale, window = ctx.settings
        grad = grad.unflatten(1, q.shape[1:3])
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in (k, v))
        for (rows, cols, mask), lse in zip(_bands(q, causal, window), sums):
            got, of_q, kept = (x[..., rows, :].flatten(2, 3) for x in (grad, q, out))
            args = got, of_q, k[:, :, cols], v[:, :, cols], kept, lse, 0.0, False
            band, of_k, of_v = FLASH_CPU_BACKWARD(*args, attn_mask=mask, scale=scale)
            dq[..., rows, :] = band.unflatten(2, (q.shape[2], -1))
            dk[:, :, cols] += of_k
            dv[:, :, cols] += of_v
        return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype), None, None, None


@torch_private.uncompiled
def _banded(*args: Any) -> Tensor:
    return _Banded.apply(*args)


def _bands(q: Tensor, causal: bool, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys, and what is added to their scores: (group · queries, keys)."""
    mask, before = None, None
    band = max(64, min(192, window // 2) // q.shape[2])  # more are faster, and see more keys for nothing
    for rows, cols in query_chunks(0, q.shape[3], band, q.shape[3], causal, window):
        place = rows.start - cols.start, rows.stop - cols.start, cols.stop - cols.start
        if place != before:
            looks = _near(rows, cols, window, causal, q.device)
            mask = torch.zeros_like(looks, dtype=q.dtype).masked_fill_(~looks, float("-inf")).repeat(q.shape[2], 1)
        before = place
        yield rows, cols, mask


class _Chunked(torch.autograd.Function):
    """Softmax attention by chunks of queries. For a chunk with scores S = scale · q kᵀ + bias and output gradient dO:

        forward     P = softmax(S)           out = (P ∘ D) v         D = dropout's mask / (1 - dropout), or 1
        backward    P = exp(S - lse)         dv += (P ∘ D)ᵀ dO       lse = log Σ exp(S), kept from the forward pass
                    dS = P ∘ ((dO vᵀ) ∘ D - Σ dO ∘ out)              (Dao et al. 2022, appendix B.2)
                    dq = scale · dS k        dk += scale · dSᵀ q     dbias = dS summed over the broadcast dimensions

    q: (batch, n_kv_heads, group, q_len, head_dim); k, v: (batch, n_kv_heads, k_len, head_dim);
    mask, bias: broadcastable to (batch, n_kv_heads, group, q_len, k_len).
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, bias, settings):
        ctx.settings = causal, scale, dropout, chunk, window = settings
        ctx.rng_state = rng_state(q.device) if dropout else None
        how = Scores(mask, bias, causal, scale, dropout, window)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(*q.shape[:-1], 1, dtype=accumulator(q.dtype))
        with no_autocast(q.device):
            for rows, cols in query_chunks(0, q.shape[3], chunk, k.shape[2], causal, window):
                part = Chunk.draw(q, rows, cols, dropout)
                out[..., rows, :], lse[..., rows, :] = forward_chunk(q, k, v, how, part)
        ctx.save_for_backward(q, k, v, mask, bias, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, bias, out, lse = ctx.saved_tensors
        causal, scale, dropout, chunk, window = ctx.settings
        how, k_len = Scores(mask, bias, causal, scale, dropout, window), k.shape[2]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in (k, v))
        dbias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[4] else None
        with no_autocast(q.device), rng_restored(q.device, ctx.rng_state):
            for whole, width in query_chunks(0, q.shape[3], chunk, k_len, causal, window):
                drawn = Chunk.draw(q, whole, width, dropout)  # as in the forward pass
                for part in drawn.halves(chunk, k_len, how):  # P and dS live together
                    saved = tuple(x[..., part.rows, :] for x in (out, lse, grad))
                    dq[..., part.rows, :] = backward_chunk(q, k, v, how, part, saved, (dk, dv, dbias))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, dbias, None


def query_chunks(
    first: int, last: int, chunk: int, k_len: int, causal: bool, window: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Queries first .. last - 1 in chunks: the rows of each, and the columns that any of them may look at."""
    beyond = max(last, k_len) if window is None else window - 1  # places to either side
    for start in range(first, last, chunk):
        stop = min(start + chunk, last)
        yield slice(start, stop), slice(max(0, start - beyond), stop if causal else min(stop + beyond, k_len))


def _chunk_scores(q: Tensor, k: Tensor, how: Scores, part: Chunk) -> Tensor:
    """scale · q kᵀ + bias, (batch, n_kv_heads, group, chunk, columns): a new buffer, -inf where a query may not
    look."""
    rows, cols = part.rows, part.cols
    # (batch · n_kv_heads, group · chunk, head_dim): a group shares its keys
    rows_q = q[..., rows, :].flatten(2, 3).flatten(0, 1)
    cols_k = k[:, :, cols].flatten(0, 1).transpose(-2, -1)
    # Not rows_q @ cols_k: selective checkpointing keeps what that gives (and would keep it changed: it is worked on in
    # place).
    scores = torch.baddbmm(q.new_empty(1, 1, 1), rows_q, cols_k, beta=0, alpha=how.scale).to(accumulator(q.dtype))
    scores = scores.view(*q.shape[:3], -1, scores.shape[-1])
    if how.bias is not None:
        scores += _window(how.bias, rows, cols)
    if how.mask is not None:
        scores.masked_fill_(~_window(how.mask, rows, cols), float("-inf"))
    ahead = 1 if how.causal else how.window
    if ahead is not None:  # of the keys so many places later or more, a triangle
        later = scores[..., rows.start + ahead - cols.start :]
        later.masked_fill_(torch.ones_like(later[0, 0, 0], dtype=torch.bool).triu_(), float("-inf"))
    if how.window is not None:
        earlier = scores[..., : max(0, rows.stop - how.window - cols.start)]
        far = torch.ones_like(earlier[0, 0, 0], dtype=torch.bool).tril_(rows.start - how.window - cols.start)
        earlier.masked_fill_(far, float("-inf"))
    return scores


def forward_chunk(q: Tensor, k: Tensor, v: Tensor, how: Scores, part: Chunk) -> tuple[Tensor, Tensor]:
    """(out, log of the sum of exponentials) of a chunk's queries: (batch, n_kv_heads, group, chunk, head_dim), (...,
    1)."""
    p = _chunk_scores(q, k, how, part)
    # finite also for a row that may look nowhere
    top = p.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(p.dtype).min)
    p.sub_(top).exp_()
    # its largest term is 1, unless the row may look nowhere: 0 / 1 then
    total = p.sum(dim=-1, keepdim=True).clamp_min_(1.0)
    if part.dropped is not None:
        p.masked_fill_(part.dropped, 0.0)
    out = (p.flatten(2, 3).to(v.dtype) @ v[:, :, part.cols]).unflatten(2, (q.shape[2], -1))
    return out / (total * (1 - how.dropout)), top + total.log()


def backward_chunk(
    q: Tensor, k: Tensor, v: Tensor, how: Scores, part: Chunk, saved: tuple[Tensor, ...],
    into: tuple[Tensor | None, ...],
) -> Tensor:  # fmt: skip
    """dq of a chunk's queries. saved: its out, lse and dO; into: dk, dv and dbias or None, which are added to."""
    (out, lse, grad), (dk, dv, dbias), cols = saved, into, part.cols
    p = _chunk_scores(q, k, how, part).sub_(lse).exp_().to(v.dtype)
    delta = (grad * out).sum(dim=-1, keepdim=True, dtype=lse.dtype)
    grad = grad / (1 - how.dropout) if how.dropout else grad
    grad = grad.to(v.dtype).flatten(2, 3)  # (batch, n_kv_heads, group · chunk, head_dim)
    ds = (grad @ v[:, :, cols].transpose(-2, -1)).unflatten(2, (q.shape[2], -1))
    if part.dropped is not None:
        ds.masked_fill_(part.dropped, 0.0)
    ds.sub_(delta).mul_(p)
    if part.dropped is not None:
        p.masked_fill_(part.dropped, 0.0)
    _add_product(dv[:, :, cols], p.flatten(2, 3).transpose(-2, -1), grad)
    if dbias is not None:
        window = _window(dbias, part.rows, cols)
        window += ds.sum_to_size(window.shape)
    ds = ds.flatten(2, 3)
    _add_product(dk[:, :, cols], ds.transpose(-2, -1), (q[..., part.rows, :] * how.scale).flatten(2, 3))
    return (ds @ k[:, :, cols]).mul_(how.scale).unflatten(2, (q.shape[2], -1))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; without a buffer for the product where the dtypes allow it."""
    if total.dtype == b.dtype:
        total.view(-1, *total.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    else:
        total += a @ b


def _window(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a mask or bias, whose last two dimensions may be 1, that belongs to a chunk."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., cols]


def _split_heads(x: Tensor, n_kv_heads: int) -> Tensor:
    """A mask or bias as (batch | 1, n_kv_heads | 1, group | 1, q_len | 1, k_len | 1)."""
    x = x[(None,) * (4 - x.dim())]
    return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (n_kv_heads, -1))


def _repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _allowed(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    _aligned(q, k, causal, window)
    if window is not None:
        near = _near(slice(0, q.shape[2]), slice(0, k.shape[2]), window, causal, q.device)
    elif causal:
        near = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    else:
        return mask
    return near if mask is None else mask & near


def _near(rows: slice, cols: slice, window: int, causal: bool, device: torch.device) -> Tensor:
    """Whether these queries may look at these keys: (rows, columns)."""
    queries, keys = (torch.arange(x.start, x.stop, device=device) for x in (rows, cols))
    back = queries[:, None] - keys
    return (back < window) & (back >= 0 if causal else back > -window)


def _aligned(q: Tensor, k: Tensor, causal: bool, window: int | None) -> None:
    as_many = q.shape[2] == k.shape[2] or not (causal or window)
    assert as_many, f"{'causal' if causal else 'a window'} needs as many queries as keys; give a mask"


def _dense(mask: Tensor | Documents | None, causal: bool) -> Tensor | None:
    if not isinstance(mask, Documents):
        return mask
    assert causal, "packed documents need causal=True"
    return mask.dense()


@torch_private.constant_for_compiler
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)  # which PyTorch 2.11 cannot compile


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As PyTorch's own operators are given them: what is written in Python is not cast by itself."""
    kind = tensors[0].device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def default_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def no_autocast(device: torch.device):
    return torch.autocast(device.type if _has_autocast(device.type) else "cpu", enabled=False)


def rng_state(device: torch.device) -> Tensor | None:
    if device.type == "meta":
        return None
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def rng_restored(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Random numbers come from a saved state (None: none are drawn); afterwards they go on as if nothing had been
    drawn."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


KERNELS = {"naive": lambda chunk: naive, "chunked": chunked, "sdpa": lambda chunk: sdpa}


def get_kernel(name: str, chunk: int = 256) -> Callable:
    """The kernel of that name: naive, chunked (`chunk` queries at a time) or sdpa."""
    return KERNELS[name](chunk)
