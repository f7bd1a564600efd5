"""`gradus generate --chat`: a conversation, each answer as it comes, written as the model was trained to read it."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterator
from typing import Any

from gradus.data import chat_template
from gradus.errors import InputError, UserError
from gradus.infer import ModelSource, end_tokens, fits, note
from gradus.infer.generate import Continuation, print_answer, sampler_of, sources_of
from gradus.models.decoding import Encoded

RESET = "/reset"  # begins anew


class Conversation:
    """The messages so far, by the template beside the weights. system: what the system says; None: as in training.

    Raises UserError for a model without a template.
    """

    def __init__(self, source: ModelSource, tokenizer: str | None = None, system: str | None = None):
        task = getattr(source.recipe, "task", None)
        self.source, self.tokenizer = source, source.tokenizers(tokenizer)[""]
        date = getattr(task, "date", datetime.date.today().isoformat())
        self.template = chat_template.of_tokenizer(self.tokenizer, None, date)
        if (trained := getattr(task, "digest", None)) not in (None, self.template.digest):
            note(f"the chat template ({self.template.digest[:12]}) is not the one of training ({trained[:12]})")
        system = getattr(task, "system", None) if system is None else system
        self.first = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.first)

    def encoded(self, question: str) -> Encoded:
        """The whole conversation with this question, ready to be answered. Raises InputError where it is too long."""
        ids = self.template.ids([*self.messages, _says("user", question)], add_generation_prompt=True)
        said = f"after {len(self.messages)} messages: {question}" if self.messages else question
        fits([said], [ids], self.source.config.longest)
        ends = [*self.template.ends(), *end_tokens(self.source, self.tokenizer)]
        return Encoded([ids], None, list(dict.fromkeys(ends)))

    def keep(self, question: str, answer: str) -> None:
        self.messages += [_says("user", question), _says("assistant", answer)]


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(args: Any) -> None:
    """Answer the questions in `args.prompt`, in turn, or lines of standard input until it ends. The arguments are those
    of `gradus generate`. Raises UserError as `Conversation`, for an option that has no effect, and for a question that
    does not fit, unless more can be asked."""
    without = {"--beams": args.beams > 1, "--sliding-window": args.sliding_window, "--adapter": args.adapter}
    for name in (name for name, given in without.items() if given):
        raise UserError(f"{name}: not with --chat. Leave one out.")
    choose, [source] = sampler_of(args), sources_of(args)
    conversation = Conversation(source, args.tokenizer, args.system)
    for question in args.prompt or _lines(conversation):
        if len(args.prompt) > 1:
            print(f"> {question}", flush=True)
        try:
            encoded = conversation.encoded(question)
        except InputError as e:
            if args.prompt:
                raise
            print(f"{e} {RESET} begins anew.", file=sys.stderr, flush=True)
            continue
        room = (source.config.longest or math.inf) - len(encoded.prompts[0]) + 1
        continuation = Continuation(
            source, [question], encoded=encoded, max_new=min(args.max_new, room), tokenizer=args.tokenizer,
            precision=args.precision, engine=args.engine,
        )  # fmt: skip
        print_answer(continuation, choose, cache=not args.no_cache)
        conversation.keep(question, continuation.texts[0].strip())


def _lines(conversation: Conversation) -> Iterator[str]:
    """The questions on standard input, without what is meant for us."""
    shown = "you> " if sys.stdin.isatty() else ""
    if shown:
        print(f"{RESET} begins anew; Ctrl-D ends.", file=sys.stderr)
    while True:
        print(shown, end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if (text := line.strip()) == RESET:
            conversation.reset()
            note("the conversation begins anew")
        elif text:
            yield text
