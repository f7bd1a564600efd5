"""Decoding, token by token, for decoders (GPT, Llama) and encoder-decoders (the original Transformer, T5)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.layers import Cache
from gradus.models.finite import NotFinite, finite, first_not_finite, not_finite, spoiled

Choose = Callable[[Tensor], Tensor]  # logits (batch, vocab) -> ids (batch,)


@dataclasses.dataclass
class Encoded:
    """Texts ready for decoding: decoders continue `prompts`; encoder-decoders read `sources` and start from
    `prompts`."""

    prompts: list[list[int]]
    sources: list[list[int]] | None
    ends: list[int] | None  # any of them ends a text


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row: (batch, vocab) -> (batch,)."""
    return logits.argmax(-1)


def sampler(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0) -> Choose:
    """Draw from the distribution, cut to the `top_k` likeliest tokens and to the fewest that hold `top_p` of the mass
    (Fan et al. 2018; Holtzman et al. 2020, section 3.1). temperature 0 is greedy. Raises UserError for a value out of
    range."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature={temperature}: must be 0 (greedy) or a positive number.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: must be at least 1.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: must be above 0 and at most 1.")
    if temperature == 0:
        if top_k is not None or top_p is not None:
            raise UserError(
                "top_k and top_p have no effect at temperature 0, which is greedy. Set a temperature, e.g. 0.8."
            )
        return greedy
    generators: dict[str, torch.Generator] = {}

    def choose(logits: Tensor) -> Tensor:
        device = str(logits.device)
        if device not in generators:
            generators[device] = torch.Generator(logits.device).manual_seed(seed)
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
        if top_k is not None and top_k < logits.shape[-1]:
            floor = logits.topk(top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if top_p is not None and top_p < 1.0:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p
            beyond[:, 0] = False  # the likeliest token always stays
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
        chances = logits.softmax(-1).nan_to_num(1.0)  # all nan where logits are not finite, of which `generate` tells
        return torch.multinomial(chances, 1, generator=generators[device])[:, 0]

    return choose


def penalised(choose: Choose, penalty: float, prompts: Sequence[Sequence[int]]) -> Choose:
    """The same choice from scores of which those of tokens that a row has already, its prompt's too, are divided by
    `penalty` where they are positive, else multiplied by it (Keskar et al. 2019, section 4.1, as transformers does it).
    """
    seen: list[Tensor] = []  # (batch, vocab)

    def chosen(logits: Tensor) -> Tensor:
        if not seen:
            seen.append(torch.zeros_like(logits, dtype=torch.bool))
            for row, prompt in zip(seen[0], prompts):
                row[prompt] = True
        new = choose(torch.where(seen[0], torch.where(logits < 0, logits * penalty, logits / penalty), logits))
        seen[0].scatter_(1, new[:, None], True)
        return new

    return chosen if penalty != 1 else choose


def end_ids(eos_id: int | Sequence[int] | None) -> list[int]:
    return [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else list(eos_id)


def pad_right(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids (batch, longest), lengths (batch,)) of rows of unequal length."""
    assert rows and all(len(r) for r in rows), "every row needs a token to start from"
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def latest(ids: Tensor, lengths: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` tokens of every row, or all of a shorter one: (ids (batch, <= window), lengths (batch,))."""
    start = (lengths - window).clamp_min(0)
    positions = start[:, None] + torch.arange(min(window, ids.shape[1]), device=ids.device)
    return ids.gather(1, positions.clamp_max(ids.shape[1] - 1)), lengths - start


class Steps:
    """A model's decoding in two calls, `prefill` and `decode`, of which the second goes on where the last one stopped.
    `Engine` of gradus.infer has the same two for other ways to run a model.

    keeps: whether decode can follow prefill, else everything is prefilled anew for every token.
    """

    def __init__(self, model: nn.Module):
        self.model, self.keeps = model, hasattr(model, "new_cache")
        self.cache: Cache | None = None
        self.memory: tuple[Tensor, Tensor] | None = None  # an encoder's output, where it is real

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def prefill(
        self, ids: Tensor, lengths: Tensor, sources: Tensor | None = None, source_lengths: Tensor | None = None, *,
        room: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The logits of each row's last token: (batch, vocab). Forgets what was read before.

        ids: (batch, seq), padded on the right, of `lengths` (batch,). sources, source_lengths: what an encoder-decoder
        reads, likewise. room: how many tokens a row will have when the last one is decoded; None: no decode follows.
        """
        self.cache = None if room is None else self.model.new_cache(len(ids), room)
        self.memory = None
        if sources is not None:
            keep = torch.arange(sources.shape[1], device=ids.device) < source_lengths[:, None]  # (batch, source)
            self.memory = self.model.encode(sources, keep), keep
        if self.cache is not None:
            self.cache.lengths = lengths
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        return self._read(ids, positions, select=positions == lengths[:, None] - 1)

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits after one more token a row: (batch, vocab). ids, positions: (batch,), of the new tokens."""
        return self._read(ids[:, None], positions[:, None])[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from row rows[i] of the same source: rows (batch,)."""
        self.cache.reorder(rows)

    def not_finite(self, again: Callable[[Steps], Any]) -> NotFinite:
        """The error for logits that are not finite; again: reads once more what gave them."""
        return not_finite("the model", None, first_not_finite(self.model, lambda: again(self)))

    def _read(self, ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        if self.cache is not None:
            kwargs["cache"] = self.cache
        if self.memory is None:
            return self.model(ids, positions=positions, **kwargs)
        return self.model.decode(ids, *self.memory, positions=positions, **kwargs)


def to_host(ids: Tensor) -> Callable[[], Tensor]:
    """Starts a copy and waits for nothing; the call waits for the copy and for nothing that was asked for later."""
    if ids.device.type == "cpu":
        return lambda: ids
    there = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    there.copy_(ids, non_blocking=True)
    done = torch.Event(ids.device)
    done.record()

    def get() -> Tensor:
        done.synchronize()
        return there

    return get


@torch.no_grad()
def generate(
    model: nn.Module | Steps, prompts: Sequence[Sequence[int]], *, max_new: int, choose: Choose = greedy,
    sources: Sequence[Sequence[int]] | None = None, eos_id: int | Sequence[int] | None = None, cache: bool = True,
    window: int | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the next token of every row, (batch,) on the host, up to `max_new` times or until every row has ended with
    `eos_id` (several: any of them); a row that has ended yields the first of them from then on. An accelerator is one
    token ahead of what is yielded.

    model: a model, or whatever else has `prefill` and `decode` (see Steps). Decoders continue `prompts`; an
    encoder-decoder reads `sources` and continues `prompts` (its start tokens). Prompts may be of unequal length.
    cache=False computes everything again for every token, which is slower and gives the same tokens.
    window: read only the last `window` tokens of a row, as if they were its first. The cache holds keys and values
    computed at their old positions, so everything is computed again for every token once a row is longer.
    Raises NotFinite in place of a token whose logits are not finite.
    """
    if max_new < 1:
        return
    steps = Steps(model) if isinstance(model, nn.Module) else model
    device, ahead = steps.device, steps.device.type != "cpu"
    ids, lengths = pad_right(prompts, 0, device)
    source = () if sources is None else pad_right(sources, 0, device)
    batch, longest = ids.shape
    room = longest + max_new - 1  # the last token needs no slot
    text = F.pad(ids, (0, max_new))  # (batch, longest + max_new)
    rows, done = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.bool, device=device)
    ends = end_ids(eos_id)
    end_tokens = torch.tensor(ends, dtype=torch.long, device=device)
    cache = cache and steps.keeps and longest <= (window or longest)
    new, ended, waiting = None, torch.zeros(batch, dtype=torch.bool), []

    def again(s: Steps) -> Tensor:
        return s.prefill(*latest(text[:, :now], lengths.clamp_max(now), window or now), *source)

    def of_each_row(get: Callable[[], Tensor]) -> Tensor:
        tokens, bad = get().split([batch, 1])
        if bad:
            raise steps.not_finite(again)
        return tokens

    for now in range(longest, longest + max_new):  # tokens of the longest row
        if new is not None and cache and now <= (window or now):
            logits = steps.decode(new, lengths - 1)  # (batch, vocab)
        else:
            stored = min(room, window or room) if cache and new is None else None
            logits = steps.prefill(*latest(text[:, :now], lengths, window or now), *source, room=stored)
        new = choose(logits)
        if ends:
            new = torch.where(done, ends[0], new)
            done |= torch.isin(new, end_tokens)
        text[rows, lengths] = new
        lengths = lengths + 1
        waiting.append(to_host(torch.cat((new, spoiled(logits).isnan()[None]))))
        if len(waiting) > ahead:
            yield (tokens := of_each_row(waiting.pop(0)))
            ended |= torch.isin(tokens, torch.tensor(ends, dtype=torch.long))
            if bool(ended.all()):
                return
    yield from map(of_each_row, waiting)


def complete(
    model: nn.Module | Steps, prompts: Sequence[Sequence[int]], *, max_new: int | Sequence[int],
    eos_id: int | Sequence[int] | None = None, **kwargs: Any,
) -> list[list[int]]:  # fmt: skip
    """The new tokens of every row, without the end token (see `generate`). max_new: of all rows, or of each."""
    most, ends = limits(max_new, len(prompts)), end_ids(eos_id)
    steps = [new.tolist() for new in generate(model, prompts, max_new=max(most), eos_id=ends, **kwargs)]
    rows = zip(*steps) if steps else [() for _ in prompts]
    return [list(itertools.takewhile(lambda i: i not in ends, row[:n])) for row, n in zip(rows, most)]


def limits(max_new: int | Sequence[int], rows: int) -> list[int]:
    return [max_new] * rows if isinstance(max_new, int) else list(max_new)


@torch.no_grad()
def beam_search(
    model: nn.Module | Steps, prompts: Sequence[Sequence[int]], *, beams: int, max_new: int | Sequence[int],
    sources: Sequence[Sequence[int]] | None = None, eos_id: int | Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The new tokens of every row, without the end token, of the text whose mean log-probability is the highest among
    those found by keeping the `beams` likeliest beginnings (Sutskever et al. 2014, section 3.2; scores are divided by
    the length, end token included). A row is done when it has `beams` ended texts of which none could
    still be beaten by the best beginning at its present length. Arguments as of `complete`; prompts of one length
    where there is more than one.

    Raises UserError for fewer than 2 beams, and for a model that keeps no cache; NotFinite as `generate`.
    """
    steps = Steps(model) if isinstance(model, nn.Module) else model
    if beams < 2 or not steps.keeps:
        raise UserError(f"beams={beams}: beam search takes at least 2, and a model that keeps a cache. Use beams=1.")
    most, ends = limits(max_new, len(prompts)), end_ids(eos_id)
    if max(most) < 1:
        return [[] for _ in prompts]
    device, n = steps.device, len(prompts)
    ids, lengths = pad_right([p for p in prompts for _ in range(beams)], 0, device)
    source = () if sources is None else pad_right([s for s in sources for _ in range(beams)], 0, device)
    logits = steps.prefill(ids, lengths, *source, room=ids.shape[1] + max(most) - 1)
    scores = torch.full((n, beams), float("-inf"), device=device)
    scores[:, 0] = 0.0  # all beams are alike at first
    texts = torch.zeros(n, beams, 0, dtype=torch.long, device=device)
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in prompts]  # the best of each row, best first
    open_rows, end_tokens = set(range(n)), torch.tensor(ends, dtype=torch.long, device=device)
    first = torch.arange(n, device=device)[:, None] * beams
    for length in range(1, max(most) + 1):
        if not finite(logits):
            read = torch.cat((ids, texts.flatten(0, 1)), dim=1), lengths
            raise steps.not_finite(lambda s, read=read: s.prefill(*read, *source))
        each = scores[:, :, None] + logits.float().log_softmax(-1).view(n, beams, -1)  # (n, beams, vocab)
        vocab = each.shape[-1]
        best, where = each.flatten(1).topk(min((1 + max(1, len(ends))) * beams, beams * vocab), dim=1)
        parent, token = where // vocab, where % vocab  # (n, 2 beams or more): enough that are not the end
        is_end = torch.isin(token, end_tokens)
        _note_ended(ended, open_rows, beams, length, best, parent, is_end, texts)
        chosen = is_end.int().argsort(dim=1, stable=True)[:, :beams]  # the likeliest that go on
        scores, parent, token = (x.gather(1, chosen) for x in (best, parent, token))
        kept = texts.gather(1, parent[:, :, None].expand(-1, -1, length - 1))
        texts = torch.cat((kept, token[:, :, None]), dim=2)
        now = (scores / length).tolist()
        open_rows -= {i for i in open_rows if len(ended[i]) == beams and now[i][0] <= ended[i][-1][0]}
        for i in [i for i in open_rows if length == most[i]]:
            ended[i] += zip(now[i], texts[i].tolist())
            open_rows.remove(i)
        if not open_rows:
            break
        steps.reorder((first + parent).flatten())
        logits = steps.decode(token.flatten(), lengths)
        lengths = lengths + 1
    return [max(candidates, key=lambda one: one[0])[1] for candidates in ended]


def _note_ended(
    ended: list[list[tuple[float, list[int]]]], rows: set[int], beams: int, length: int, best: Tensor,
    parent: Tensor, is_end: Tensor, texts: Tensor,
) -> None:  # fmt: skip
    """Adds the texts that end now. One that is not among the `beams` likeliest is not followed."""
    for i, j in is_end[:, :beams].nonzero().tolist():
        if i in rows:
            ended[i].append((float(best[i, j]) / length, texts[i, int(parent[i, j])].tolist()))
            ended[i] = sorted(ended[i], key=lambda one: -one[0])[:beams]
