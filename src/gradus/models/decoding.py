"""Decoding, token by token, for decoders (GPT, Llama) and encoder-decoders (the original Transformer, T5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradus.errors import UserError

Choose = Callable[[Tensor], Tensor]  # logits (batch, vocab) -> ids (batch,)


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
        place = str(logits.device)
        if place not in generators:
            generators[place] = torch.Generator(logits.device).manual_seed(seed)
        logits = logits.float() / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            floor = logits.topk(top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if top_p is not None and top_p < 1.0:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p  # the first token always stays
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
        return torch.multinomial(logits.softmax(-1), 1, generator=generators[place])[:, 0]

    return choose


def pad_right(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids (batch, longest), lengths (batch,)) of rows of unequal length."""
    assert rows and all(len(r) for r in rows), "every row needs a token to start from"
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def latest(ids: Tensor, lengths: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` tokens of every row, or all of a shorter one: (ids (batch, <= window), lengths (batch,))."""
    start = (lengths - window).clamp_min(0)
    places = start[:, None] + torch.arange(min(window, ids.shape[1]), device=ids.device)
    return ids.gather(1, places.clamp_max(ids.shape[1] - 1)), lengths - start


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new: int, choose: Choose = greedy,
    sources: Sequence[Sequence[int]] | None = None, eos_id: int | None = None, cache: bool = True,
    window: int | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the next token of every row, (batch,), up to `max_new` times or until every row has ended with `eos_id`; a
    row that has ended yields it again.

    Decoders continue `prompts`; an encoder-decoder reads `sources` and continues `prompts` (its start tokens). Prompts
    may be of unequal length. cache=False computes everything again for every token, which is slower and gives the same
    tokens; a model without new_cache always does so.
    window: read only the last `window` tokens of a row, as if they were its first. The cache holds keys and values
    computed at their old positions, so everything is computed again for every token once a row is longer.
    """
    if max_new < 1:
        return
    device = next(model.parameters()).device
    ids, lengths = pad_right(prompts, 0, device)
    batch, longest = ids.shape
    if sources is None:
        forward = model
    else:
        source, source_lengths = pad_right(sources, 0, device)
        keep = torch.arange(source.shape[1], device=device) < source_lengths[:, None]  # (batch, source)
        memory = model.encode(source, keep)  # (batch, source, d_model)

        def forward(target: Tensor, **kwargs) -> Tensor:
            return model.decode(target, memory, keep, **kwargs)

    room = longest + max_new - 1  # the last token needs no slot
    cache = cache and hasattr(model, "new_cache")
    store = model.new_cache(batch, min(room, window or room)) if cache and longest <= (window or longest) else None
    rows = torch.arange(batch, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    new = None
    for _ in range(max_new):
        if store is not None and window is not None and int(lengths.max()) > window:
            store = None
        if store is not None and new is not None:  # decode: one token a row, at its own place
            logits = forward(new[:, None], positions=(lengths - 1)[:, None], cache=store)[:, -1]  # (batch, vocab)
        else:  # prefill, or everything again
            read, ends = (ids, lengths) if window is None else latest(ids, lengths, window)
            last = torch.zeros_like(read, dtype=torch.bool)
            last[rows, ends - 1] = True
            positions = torch.arange(read.shape[1], device=device).expand(batch, -1)
            stored = {"cache": store} if store is not None else {}
            logits = forward(read, positions=positions, select=last, **stored)  # (batch, vocab)
        new = choose(logits)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
        yield new
        if eos_id is not None:
            done |= new == eos_id
            if bool(done.all()):
                return
        if store is None or window is not None:
            full = int(lengths.max()) == ids.shape[1]
            ids = torch.cat((ids, torch.zeros_like(ids[:, :1])), 1) if full else ids
            ids[rows, lengths] = new
        lengths = lengths + 1


def complete(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, eos_id: int | None = None, **kwargs
) -> list[list[int]]:
    """The new tokens of every row, without the end token (see `generate`)."""
    steps = [new.tolist() for new in generate(model, prompts, eos_id=eos_id, **kwargs)]
    rows = [list(row) for row in zip(*steps)] if steps else [[] for _ in prompts]
    return [row[: row.index(eos_id)] if eos_id is not None and eos_id in row else row for row in rows]
