"""`gradus generate`: continue a text, as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.infer import encode, find, note
from gradus.models.decoding import generate as decode
from gradus.models.decoding import sampler

GENERATING = ("gpt", "llama", "seq2seq", "t5")


def generate(args: Any) -> None:
    """Print the continuation of `args.prompt` (an encoder-decoder's answer to it) on standard output: one prompt as it comes,
    several as one batch at the end. One line of timing goes to standard error. The arguments are those of `gradus generate`.

    Raises UserError for a model that cannot generate, a setting out of range, or a prompt that does not fit.
    """
    choose = sampler(args.temperature, args.top_k, args.top_p, args.seed)
    if args.max_new < 1:
        raise UserError(f"--max-new={args.max_new}: must be at least 1.")
    place = find(args.model)
    family = place.config.family
    if family not in GENERATING:
        raise UserError(f"{args.model}: {family} does not generate text. Use gradus predict {args.model} INPUT.")
    if place.recipe is not None and place.recipe.task.name == "copy":
        raise UserError(f"{args.model}: this model copies numbers and knows no text. Use gradus predict {args.model} '1 2 3'.")
    tokenizers = place.tokenizers(args.tokenizer)
    prompts = args.prompt or [""]
    encoded = encode(place, tokenizers, prompts)
    longest = max(map(len, encoded.prompts))
    max_new = args.max_new
    if family != "t5" and longest + max_new - 1 > place.config.seq_len:  # the last new token is not read again
        max_new = place.config.seq_len - longest + 1
        note(f"--max-new={args.max_new} cut to {max_new}: the model has {place.config.seq_len:,} places, of which the prompt takes {longest:,}")
    model = place.load(args.precision)

    tokenizer = tokenizers.get("target", tokenizers[""])
    before = [[] for _ in prompts] if encoded.sources is not None else [list(row) for row in encoded.prompts]
    rows = [list(row) for row in before]
    stream = Stream(tokenizer, sys.stdout.write) if len(prompts) == 1 else None
    ended = [False] * len(prompts)
    start = time.perf_counter()
    first = start
    steps = decode(
        model, encoded.prompts, max_new=max_new, choose=choose, sources=encoded.sources,
        eos_id=encoded.eos_id, pad_id=encoded.pad_id, cache=not args.no_cache,
    )  # fmt: skip
    if stream is not None:
        stream.show(rows[0])
    for n, new in enumerate(steps):
        for i, token in enumerate(new.tolist()):
            ended[i] = ended[i] or token == encoded.eos_id
            if not ended[i]:
                rows[i].append(token)
        if n == 0:
            first = time.perf_counter()
        if stream is not None:
            stream.show(rows[0])
    end = time.perf_counter()
    if stream is not None:
        stream.end(rows[0])
        print(flush=True)
    else:
        for i, (prompt, row) in enumerate(zip(prompts, rows), 1):
            print(f"── {i}/{len(prompts)} ── {prompt if len(prompt) <= 60 else prompt[:59] + '…'}")
            print(tokenizer.decode(row), flush=True)

    new_tokens = sum(len(row) - len(start_row) for row, start_row in zip(rows, before))
    read = sum(map(len, encoded.sources or encoded.prompts))
    later = max(0, new_tokens - len(prompts))
    rate = f", {later / (end - first):,.1f} tokens/s" if later and end > first else ""
    print(
        f"{new_tokens:,} tokens in {end - start:.2f} s: prefill {read:,} tokens in {first - start:.3f} s, then decode {end - first:.2f} s{rate}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


class Stream:
    """Writes the text of a growing list of ids, each part once: what a later token may still change waits.

    A character of several bytes can take several tokens, which read as U+FFFD until the last one is there.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], Any]):
        self.tokenizer, self.write, self.written = tokenizer, write, ""

    def show(self, ids: list[int]) -> None:
        self._put(self.tokenizer.decode(ids).rstrip("\ufffd"))

    def end(self, ids: list[int]) -> None:
        """Nothing comes any more: what waited is written as it is."""
        self._put(self.tokenizer.decode(ids))

    def _put(self, text: str) -> None:
        # a tokenizer that tidies its text may take something back (a space before a full stop); what is written stays
        if len(text) > len(self.written):
            self.write(text[len(self.written) :])
            self.written = text
            sys.stdout.flush()
