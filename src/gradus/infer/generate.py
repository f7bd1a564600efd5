"""`gradus generate`: continue a text, as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.infer import ModelSource, encode, note, repetition_penalty, sources
from gradus.infer.checked import checked
from gradus.models.decoding import Choose, Encoded, beam_search, penalised, sampler
from gradus.models.decoding import generate as decode
from gradus.models.finite import NotFinite


class Continuation:
    """Texts that grow: each step of an iteration adds a token to each; `texts` are prompt and continuation (or an
    encoder-decoder's answer) so far.

    prompts: none means one empty text. sliding: a decoder continues beyond its positions, reading only the latest
    tokens that fit them. encoded: the prompts as the model reads them; the texts are then its answers alone. Raises
    UserError for a model that cannot generate, a setting out of range, or a prompt that
    does not fit.
    """

    def __init__(
        self, source: ModelSource, prompts: list[str], *, max_new: int, tokenizer: str | None = None,
        precision: str | None = None, sliding: bool = False, engine: str | None = None, beams: int = 1,
        encoded: Encoded | None = None,
    ):  # fmt: skip
        family, self.prompts = source.family, prompts or [""]
        if max_new < 1:
            raise UserError(f"--max-new={max_new}: must be at least 1.")
        if family.attention == "both" or (source.recipe is not None and source.recipe.task.vocabulary):  # numbers
            use = f"gradus predict {source.name} INPUT"
            raise UserError(f"{source.name}: this model does not generate text. Use {use}.")
        if sliding and family.attention != "causal":
            raise UserError(f"--sliding-window: it is for decoders, which {family.name} is not. Leave it out.")
        tokenizers = source.tokenizers(tokenizer)
        self.penalty = repetition_penalty(source, applied=beams == 1)
        self.encoded = encoded or encode(source, tokenizers, self.prompts, fit=not sliding)
        self.max_new = self._new_that_fit(source, max_new, sliding)
        self.window = source.config.seq_len if sliding else None
        if beams > 1 and sliding:
            raise UserError("--beams: not with --sliding-window. Leave one out.")
        self.beams, self.engine = beams, checked(source, engine, precision, self.encoded)
        self.tokenizer = tokenizers.get("target", tokenizers[""])
        answers = encoded or self.encoded.sources is not None
        self.before = [[] for _ in self.prompts] if answers else [list(row) for row in self.encoded.prompts]
        self.rows = [list(row) for row in self.before]

    def _new_that_fit(self, source: ModelSource, max_new: int, sliding: bool) -> int:
        longest, context = max(map(len, self.encoded.prompts)), source.config.longest
        if sliding or context is None or longest + max_new - 1 <= context:  # the last new token is not read again
            return max_new
        fitting = context - longest + 1
        hint = "; --sliding-window continues" if source.family.attention == "causal" else ""
        why = f"the context length is {context:,} tokens, and the prompt has {longest:,}{hint}"
        note(f"--max-new={max_new} cut to {fitting}: {why}")
        return fitting

    def steps(self, choose: Choose, cache: bool = True) -> Iterator[None]:
        """Add a token to every text that has not ended, as often as asked."""
        encoded, ended = self.encoded, [False] * len(self.rows)
        if self.beams > 1:
            new = beam_search(
                self.engine, encoded.prompts, beams=self.beams, max_new=self.max_new, sources=encoded.sources,
                eos_id=encoded.ends,
            )  # fmt: skip
            self.rows = [row + more for row, more in zip(self.rows, new)]
            yield
            return
        choose = penalised(choose, self.penalty, encoded.prompts)
        for new in decode(
            self.engine, encoded.prompts, max_new=self.max_new, choose=choose, sources=encoded.sources,
            eos_id=encoded.ends, cache=cache, window=self.window,
        ):  # fmt: skip
            for i, token in enumerate(new.tolist()):
                ended[i] = ended[i] or token in encoded.ends
                if not ended[i]:
                    self.rows[i].append(token)
            yield

    @property
    def texts(self) -> list[str]:
        return [self.tokenizer.decode(row) for row in self.rows]


def generate(args: Any) -> None:
    """Print the continuation of `args.prompt` on standard output: one prompt as it comes, several as one batch at the
    end. One line of timing goes to standard error. The arguments are those of `gradus generate`; errors as of
    `Continuation`."""
    choose = sampler_of(args)
    if args.beams > 1 and (args.temperature or args.no_cache):
        other = "--temperature" if args.temperature else "--no-cache"
        raise UserError(f"--beams={args.beams}: not with {other}. Leave one out.")
    for source in sources_of(args):
        if args.adapter and len(args.adapter) > 1:
            print(f"── {source.name} ──", flush=True)
        continuation = Continuation(
            source, args.prompt, max_new=args.max_new, tokenizer=args.tokenizer, precision=args.precision,
            sliding=args.sliding_window, engine=args.engine, beams=args.beams,
        )  # fmt: skip
        print_answer(continuation, choose, cache=not args.no_cache)


def sampler_of(args: Any) -> Choose:
    return sampler(args.temperature, args.top_k, args.top_p, args.seed)


def sources_of(args: Any) -> list[ModelSource]:
    return sources(args.model, args.adapter, args.engine, args.precision)


def print_answer(continuation: Continuation, choose: Choose, cache: bool) -> None:
    """Print one text as it comes, several when all are there, and the time that they took."""
    stream = Stream(continuation.tokenizer, sys.stdout.write) if len(continuation.prompts) == 1 else None
    first, start = None, time.perf_counter()
    if stream:
        stream.show(continuation.rows[0])
    try:
        for _ in continuation.steps(choose, cache):
            first = first or time.perf_counter()
            if stream:
                stream.show(continuation.rows[0])
    except NotFinite:
        if stream:
            print(flush=True)
        raise
    end = time.perf_counter()
    first = start if first is None or continuation.beams > 1 else first  # a search yields all at once
    if stream:
        stream.show(continuation.rows[0], end=True)
        print(flush=True)
    else:
        for i, (prompt, text) in enumerate(zip(continuation.prompts, continuation.texts), 1):
            print(f"── {i}/{len(continuation.prompts)} ── {prompt if len(prompt) <= 60 else prompt[:59] + '…'}")
            print(text, flush=True)

    new_tokens = sum(len(row) - len(before) for row, before in zip(continuation.rows, continuation.before))
    read = sum(map(len, continuation.encoded.sources or continuation.encoded.prompts))
    later = max(0, new_tokens - len(continuation.prompts))
    rate = f", {later / (end - first):,.1f} tokens/s" if later and end > first else ""
    print(
        f"{new_tokens:,} tokens in {end - start:.2f} s: prefill {read:,} tokens in {first - start:.3f} s, "
        f"then decode {end - first:.2f} s{rate}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


class Stream:
    """Writes the text of a growing list of ids, each part once; text that a later token may still change waits.

    A character of several bytes can take several tokens, which read as U+FFFD until the last one is there.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], Any]):
        self.tokenizer, self.write = tokenizer, write
        self.before, self.written = 0, 0  # ids written by the call before the last one, and by the last one

    def show(self, ids: list[int], end: bool = False) -> None:
        """end: no more ids follow, and the text that waited is written as it is."""
        # Decoders put or take spaces by what stands before: the last part is decoded again, before the new.
        known = len(self.tokenizer.decode(ids[self.before : self.written]))
        text = self.tokenizer.decode(ids[self.before :])
        if len(text) > known and (end or not text.endswith("\ufffd")):
            self.write(text[known:])
            self.before, self.written = self.written, len(ids)
            sys.stdout.flush()
