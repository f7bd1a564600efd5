"""The sequence split over processes, attention included: ring attention (Liu et al. 2023) and Ulysses (Jacobs et al.
2023).

Everything in a model but attention treats each token by itself, so it runs unchanged on a part of the sequence.
Attention is replaced.

    ring      keys and values travel round the processes while each attends from its own queries; softmax is put
              together from parts. Causal: the sequence is cut in 2n chunks and process r has chunks r and 2n-1-r, so
              that all have equal work. It has its own kernel, which needs as little memory as `chunked`: layout.chunk
              queries at a time.
    ulysses   an all-to-all changes "all heads, a part of the sequence" into "a part of the heads, the whole sequence"
              and back; in between runs the layout's ordinary kernel.

Decoders read a part of the sequence: ids, labels and positions are split (`Context.prepare`), and so are embedding,
head and logits. Encoders, whose heads read one token or chosen ones, read the whole batch; hidden states are split
between first and last block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from gradus import models, torch_private
from gradus.data.collate import IGNORE
from gradus.layers import Attention, Block, attention_mask, check_length, get_kernel, kernels
from gradus.recipe.schema import Layout
from gradus.torch_private import all_gather, all_to_all


@dataclasses.dataclass(frozen=True)
class Split:
    """How a sequence of `length` tokens lies on `n` processes: in chunks of equal size, the last of them padded.

    folded: process r has chunks r and 2n-1-r; else chunk r.
    """

    length: int
    n: int
    folded: bool

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return -(-self.length // (self.n * (1 + self.folded)))

    @property
    def local(self) -> int:
        """Tokens of a process, padding included."""
        return self.chunk * (1 + self.folded)

    @property
    def padding(self) -> int:
        """Tokens put behind the whole sequence."""
        return self.local * self.n - self.length

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a process, in the order in which it holds them."""
        return (rank, 2 * self.n - 1 - rank) if self.folded else (rank,)

    def pad(self, x: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Pad the sequence, which is dimension `dim` of x."""
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, self.padding), value=fill) if self.padding else x

    def take(self, x: Tensor, rank: int, fill: int = 0) -> Tensor:
        """What a process has of x (batch, seq, ...): (batch, local, ...)."""
        x = self.pad(x, 1, fill)
        return torch.cat([x[:, i * self.chunk : (i + 1) * self.chunk] for i in self.chunks(rank)], dim=1)


class WholeSequence(NamedTuple):
    """What attention needs of a batch's whole sequences; stands in the place of its segments, and of a mask."""

    split: Split
    segments: Tensor | None = None  # (batch, seq)
    keep: Tensor | None = None  # (batch or 1, seq)


class Context:
    """Splits the sequences of `model` (unedited) over the processes of `group`, in place.

    All processes of the group must be given the same samples, and must call the model equally often, also when
    evaluating. Before each call, in training and in evaluation, `prepare` the batch; batches may differ in length.

    Gradients of every parameter must be *summed* over the group (besides the ranks with other samples).
    `batch["counts"]` and `batch["n_tokens"]` stay those of the whole samples: count them once, over the ranks with
    different samples.

        redundant   False: a decoder. Loss and metrics of a process are sums over its own tokens: sum them over the
                    group, as they are.
                    True: an encoder. Every process computes head, loss and metrics of all tokens. Divide the loss by
                    the group's size before the backward pass, and do not sum metrics over the group.

    Why this is right for `redundant`: with the loss L / n on each of n processes, the gather's backward pass sums n
    equal gradients (1 / n) dL/dh and hands each process the gradient of its own tokens, dL/dh. So inside the blocks and
    before them a process computes the share of its own tokens, and after them 1 / n of the whole: in each case the sum
    over the group is dL/dw.

    Dropout draws from each process's own generator: its masks differ from those of one process.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, layout: Layout):
        self.config, self.group, self.chunk = model.config, group, layout.chunk
        self.n, self.rank = dist.get_world_size(group), dist.get_rank(group)
        family = models.lookup(self.config.family)
        self.redundant = family.attention == "both"
        self.ring = layout.context_method == "ring"
        self.ordinary = get_kernel(layout.attention, layout.chunk)
        self.sequence: WholeSequence | None = None  # of an encoder, from the first block to the last
        for module in model.modules():
            if isinstance(module, Attention):
                module.kernel = self.attend
        if self.redundant:
            blocks = [m for m in model.modules() if isinstance(m, Block)]
            blocks[0].register_forward_pre_hook(self._before_first, with_kwargs=True)
            blocks[-1].register_forward_hook(self._after_last)

    # ------------------------------------------------------------ what is split

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process's part of a batch, which lies on its device already.

        For a decoder, every tensor (batch, seq, ...) becomes (batch, local, ...), in the order of `Split`; padding has
        the label IGNORE. `positions` is made where it is absent. In the place of `segments` and `keep` stands a
        `WholeSequence`, which must reach the model as its segments: with it attention knows the whole sequence.
        For an encoder, the batch as it is. Raises UserError for sequences longer than the model's.
        """
        if self.redundant:
            return batch
        ids = batch["ids"]  # (batch, seq)
        length = ids.shape[1]
        check_length(length, self.config.seq_len)
        batch = {"positions": torch.arange(length, device=ids.device).expand(ids.shape), **batch}
        split = Split(length, self.n, folded=self.ring)
        sequence = WholeSequence(split, batch.pop("segments", None), batch.pop("keep", None))
        for key, value in batch.items():
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                batch[key] = split.take(value, self.rank, IGNORE if key == "labels" else 0)
        return batch | {"segments": sequence}

    @torch_private.uncompiled
    def _before_first(self, block: nn.Module, args: tuple, kwargs: dict):
        x, *rest = args or (kwargs.pop("x"),)  # (batch, seq, d_model)
        self.sequence = WholeSequence(Split(x.shape[1], self.n, folded=False))
        local = _on_whole(lambda x: self.sequence.split.take(x, self.rank), x)  # (batch, local, d_model)
        return (local, *rest), kwargs

    @torch_private.uncompiled
    def _after_last(self, block: nn.Module, args: tuple, out: Tensor):
        length = self.sequence.split.length
        return _on_whole(lambda x: all_gather(x, 1, self.group)[:, :length], out)  # (batch, seq, d_model)

    # ------------------------------------------------------------ attention

    @torch_private.uncompiled
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | WholeSequence | None = None,
        bias: Tensor | None = None, causal: bool = False, scale: float | None = None, dropout: float = 0.0,
        window: int | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """The kernel (gradus.layers.kernels) that replaces the model's own.

        q (batch, n_heads, local, head_dim); k, v likewise; mask: of a decoder the batch's WholeSequence, of an encoder
        None or of all keys (batch, 1, 1, seq). A decoder that asks without `causal` decodes from a cache, which every
        process has whole.
        """
        if not self.redundant and not causal:
            kwargs = {"bias": bias, "causal": causal, "scale": scale, "dropout": dropout, "window": window}
            return self.ordinary(q, k, v, mask=mask, **kwargs)
        sequence, mask = (self.sequence, mask) if self.redundant else (mask, None)
        assert isinstance(sequence, WholeSequence), (
            "the batch was not prepared: call Context.prepare, and hand its segments to the model"
        )
        split, segments, keep = sequence
        assert q.shape[2] == k.shape[2] == split.local, f"{q.shape[2]} queries and {k.shape[2]} keys for {split}"
        assert bias is None, "a split sequence takes no bias on the scores"
        if mask is not None:
            of_all_keys = mask.shape[1:] == (1, 1, split.length)
            assert of_all_keys, f"mask {tuple(mask.shape)}: it must cover all keys"
            keep = mask[:, 0, 0]  # (batch, seq)
        if not self.ring:
            kwargs = {"causal": causal, "scale": scale, "dropout": dropout, "window": window}
            return self._ulysses(q, k, v, WholeSequence(split, segments, keep), **kwargs), None
        assert window is None, "the ring takes no window"
        q, k, v = kernels.autocast(q, k, v)
        if keep is None and not causal and split.padding:  # causal queries never attend to the padding at the end
            keep = torch.ones(1, split.length, dtype=torch.bool, device=q.device)
        keep, segments = (x if x is None else split.pad(x, 1) for x in (keep, segments))
        scale = kernels.default_scale(q, scale)
        ring = _Ring(self.group, self.rank, split, causal, segments, keep, scale, dropout, self.chunk, q.device)
        grouped = q.unflatten(1, (k.shape[1], -1))  # (batch, n_kv_heads, group, local, head_dim)
        return _RingAttention.apply(grouped, torch.stack((k, v)), ring).flatten(1, 2), None

    def _ulysses(self, q, k, v, sequence: WholeSequence, **kwargs: Any) -> Tensor:
        """All heads of `local` tokens → some heads of all tokens, the ordinary kernel, and back (Jacobs et al. 2023,
        section 3.1)."""
        n, (split, segments, keep) = self.n, sequence
        # parts: each (n, batch, heads / n, local, head_dim)
        parts = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in (q, k, v)]
        mixed = all_to_all(torch.cat(parts, dim=2), None, None, self.group)  # from process i its tokens
        heads = [x.shape[2] for x in parts]
        q, k, v = (x.movedim(0, 2).flatten(2, 3)[:, :, : split.length] for x in mixed.split(heads, dim=2))
        mask = attention_mask(segments, keep)
        # out: (batch, n_heads / n, seq, head_dim)
        out, _ = self.ordinary(q, k, v, mask=mask, **kwargs)
        out = split.pad(out, 2).unflatten(2, (n, -1)).movedim(2, 0)  # (n, batch, n_heads / n, local, head_dim)
        # (batch, n_heads, local, head_dim)
        return all_to_all(out.contiguous(), None, None, self.group).movedim(0, 1).flatten(1, 2)


def _on_whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x); what tensor parallelism has split is put together before and split again after."""
    if not isinstance(x, DTensor):
        return function(x)
    whole = DTensor.from_local(function(x.full_tensor()), x.device_mesh, [Replicate()])
    return whole.redistribute(placements=x.placements)


class _Tile(NamedTuple):
    """Queries against keys, as many as are computed at once."""

    queries: slice  # among this process's
    keys: slice  # among the holder's
    mask: Tensor | None  # where they may attend, broadcastable to (batch, n_kv_heads, group, queries, keys)


@dataclasses.dataclass(frozen=True, eq=False)
class _Ring:
    """What a ring needs besides queries, keys and values; and the order of its work, which is one for both passes."""

    group: dist.ProcessGroup
    rank: int
    split: Split
    causal: bool
    segments: Tensor | None  # (batch, seq), padded
    keep: Tensor | None  # (batch or 1, seq), padded
    scale: float
    dropout: float
    chunk: int  # queries at a time
    device: torch.device

    def send(self, x: Tensor, tag: int) -> Callable[[], Tensor]:
        """Send x to the next process; the function returned waits for what the process before sends."""
        n, arriving = self.split.n, torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=(self.rank + 1) % n, tag=tag),
                dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(self.rank - 1) % n, tag=tag),
            ]
        )

        def wait(sent: Tensor = x) -> Tensor:  # which must live until then
            for work in works:
                work.wait()
            return arriving

        return wait

    def rounds(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(holder, its keys and values) of all processes, this one's first. While they are used, the next are on their
        way."""
        for step in range(self.split.n):
            wait = self.send(kv, tag=0) if step < self.split.n - 1 else None
            yield (self.rank - step) % self.split.n, kv
            if wait is not None:
                kv = wait()

    def tiles(self, holder: int) -> Iterator[_Tile]:
        """The work on a holder's keys. Tiles that are wholly masked, because their keys come later, are left out."""
        size = self.split.chunk
        for a, i in enumerate(self.split.chunks(self.rank)):
            for b, j in enumerate(self.split.chunks(holder)):
                if self.causal and j > i:
                    continue
                for rows, cols in kernels.query_chunks(0, size, self.chunk, size, self.causal and i == j):
                    place = i * size, j * size, a * size, b * size
                    of_queries, of_keys, queries, keys = (
                        slice(p + x.start, p + x.stop) for p, x in zip(place, (rows, cols, rows, cols))
                    )
                    yield _Tile(queries, keys, self.mask(of_queries, of_keys, self.causal and i == j))

    def of_tile(self, t: _Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple:
        """q, k, v, Scores and Chunk, as gradus.layers.kernels takes them; what dropout drops is drawn."""
        q, k, v = q[..., t.queries, :], k[..., t.keys, :], v[..., t.keys, :]
        rows, cols = slice(0, q.shape[-2]), slice(0, k.shape[-2])
        how = kernels.Scores(t.mask, None, False, self.scale, self.dropout)
        return q, k, v, how, kernels.Chunk.draw(q, rows, cols, self.dropout)

    def mask(self, queries: slice, keys: slice, diagonal: bool) -> Tensor | None:
        """Where these queries may attend to these keys, both counted in the whole sequence; diagonal: only to earlier
        ones."""
        parts = []
        if self.keep is not None:
            parts.append(self.keep[:, None, None, None, keys])
        if self.segments is not None:
            parts.append(self.segments[:, None, None, queries, None] == self.segments[:, None, None, None, keys])
        if diagonal:
            n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
            ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=self.device)
            parts.append(ones.tril_(queries.start - keys.start))
        return functools.reduce(torch.logical_and, parts) if parts else None


class _RingAttention(torch.autograd.Function):
    """Ring attention (Liu et al. 2023, section 3). The softmax is put together from parts and taken apart again in the
    backward pass, as in FlashAttention (Dao et al. 2022, appendix B). Never more than chunk × (seq / n) scores a head
    are alive.

    q: (batch, n_kv_heads, group, local, head_dim). kv: (2, batch, n_kv_heads, local, head_dim). Parts are summed in
    fp32 or wider. In the backward pass keys and values go round again, and their gradient travels with them, one
    process behind, until it reaches the process that holds them.
    """

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, ring: _Ring) -> Tensor:
        ctx.ring, ctx.rng_state = ring, kernels.rng_state(q.device) if ring.dropout else None
        out = torch.zeros(q.shape, dtype=kernels.accumulator(q.dtype), device=q.device)
        # not -inf: a query that may attend to nothing gives 0, not NaN
        lse = out.new_full((*q.shape[:-1], 1), torch.finfo(out.dtype).min)
        with kernels.no_autocast(q.device):
            for holder, (k, v) in ring.rounds(kv):
                for t in ring.tiles(holder):
                    part, part_lse = kernels.forward_chunk(*ring.of_tile(t, q, k, v))
                    now, before = out[..., t.queries, :], lse[..., t.queries, :]
                    total = torch.logaddexp(before, part_lse)
                    now.mul_((before - total).exp_()).add_(part.mul_((part_lse - total).exp_()))
                    before.copy_(total)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        ring = ctx.ring
        dq, wait = torch.zeros(q.shape, dtype=lse.dtype, device=q.device), None
        with kernels.no_autocast(q.device), kernels.rng_restored(q.device, ctx.rng_state):
            for holder, (k, v) in ring.rounds(kv):
                dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
                for t in ring.tiles(holder):
                    inputs = ring.of_tile(t, q, k, v)  # dropout is drawn in the order of the forward pass
                    saved = tuple(x[..., t.queries, :] for x in (out, lse, grad))
                    dq[..., t.queries, :] += kernels.backward_chunk(*inputs, saved, (*dkv[..., t.keys, :], None))
                if wait is not None:
                    dkv += wait()  # the sum of the processes before, for the same keys and values
                wait = ring.send(dkv, tag=1)
        return dq.to(q.dtype), wait().to(kv.dtype), None
