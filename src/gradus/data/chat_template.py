"""Conversations to ids, by the template of a model, and which of them are learnt.

A template is a program that came with a model: it runs in jinja2's sandbox, with an end to its time and its memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import os.path
import re
import time
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gradus import limits
from gradus.data.sentencepiece import SentencePieceTokenizer
from gradus.data.tokenizers import ROLES, TEMPLATE, Tokenizer
from gradus.errors import UserError, either, first_line

Messages = list[dict[str, str]]
THOUGHT = "reasoning_content"
# our own templates (templates/NAME.jinja), and the special tokens that each writes beside the tokenizer's bos_token
TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}


@dataclasses.dataclass(frozen=True)
class Learnt:
    """The ids of one row, and which of them are learnt."""

    ids: list[int]
    learn: list[bool]  # same length: what the assistant writes, and what ends its turn
    how: str  # "marks" (the template's own), "sentinels" or "turns" (a row per turn)


# ---------------------------------------------------------------- the sandbox


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers gives a template, with an end: `spend` counts what is built, in characters, and
    looks at the clock; it is asked by every loop, call, filter and operator that can make a text longer."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, date: str):
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=self._output)
        self.add_extension("jinja2.ext.loopcontrols")
        self.add_extension(_Generation)
        self.marks, self.has_marks = ("", ""), False
        self.begin(math.inf)
        day = datetime.date.fromisoformat(date)
        del self.globals["lipsum"], self.filters["random"]  # chance
        self.filters |= {"tojson": _to_json, "~": lambda parts: "".join(map(str, parts))}
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": day.strftime, "dict": lambda *a, **k: dict(*a, **k)}

    def begin(self, seconds: float) -> None:
        self.deadline, self.left = time.monotonic() + seconds, limits.BUILT

    def spend(self, n: int) -> str:
        self.left -= n
        if self.left < 0 or time.monotonic() > self.deadline:
            what = f"{limits.RENDERING:.0f} s" if self.left >= 0 else f"{limits.BUILT:,} characters in all"
            raise SecurityError(f"it took more than {what}, which no template for a chat needs")
        return ""

    def product(self, first: Any, *others: Any) -> None:
        """Spend what a function can make of a text and a number, or of a text in place of each character of another."""
        if isinstance(first, str) and others and re.search(r"[%{][^%{}]*(\d{4}|\*)", first):
            raise SecurityError("a format with a width of four digits")
        self.spend(_size(first) * max(map(_size, others), default=1))

    def _bounded(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def bounded(*args: Any, **options: Any) -> Any:
            self.product(*[a for a in (*args, *options.values()) if isinstance(a, SIZED)] or [""])
            return function(*args, **options)

        return bounded

    def _output(self, value: Any) -> Any:
        self.spend(_size(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.spend(_size(left) + _size(right))
        else:
            self.product(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        owner = getattr(function, "__self__", None)
        self.product(owner if isinstance(owner, SIZED) else 1, *args, *options.values())
        return super().call(context, function, *args, **options)


SIZED = (str, int, list, tuple, dict)


def _size(value: Any) -> int:
    """Characters of a text, the amount of a number, 64 for each entry of what holds others; above the limit, any."""
    total, left = 1, [value]
    while left and total <= limits.BUILT:
        one = left.pop()
        total += len(one) if isinstance(one, str) else abs(one) if isinstance(one, int) else 64
        left += one if isinstance(one, list | tuple) else itertools.chain(*one.items()) if isinstance(one, dict) else ()
    return total


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}`: what the assistant writes. Puts the environment's marks around it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        opening, closing = self.environment.marks  # type: ignore[attr-defined]
        return opening + caller() + closing


class _Ends(NodeTransformer):
    """Puts `spend` before each body that may run often, for itself and the plain text in it, and our function in the
    place of `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "~", [], [], None, None)

    def visit_For(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        plain = 64 + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Call(nodes.EnvironmentAttribute("spend"), [nodes.Const(plain)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call))
        return node

    visit_Macro = visit_CallBlock = visit_For


# ---------------------------------------------------------------- a template


class ChatTemplate:
    """The template `text` (its file or model: `where`) with a tokenizer. date: what `strftime_now` takes for today.

    Raises UserError, which names the template's line, for one that is not valid, fails, says itself that it cannot
    render a chat (raise_exception), or builds more than any chat needs.
    """

    def __init__(self, text: str, where: str, tokenizer: Tokenizer, date: str = "2026-01-01"):
        self.text, self.where, self.tokenizer, self.date = text, where, tokenizer, date
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._sandbox = _Sandbox(date)
        self._template = self._run(self._compile)
        config = getattr(tokenizer, "config", {})
        self._tokens = {f"{role}_token": token for role in ROLES if (token := config.get(f"{role}_token"))}

    def __reduce__(self):
        return ChatTemplate, (self.text, self.where, self.tokenizer, self.date)

    def _compile(self) -> Any:
        if len(self.text) > limits.MB:
            raise SecurityError(f"{len(self.text):,} characters; a template has at most {limits.MB:,}")
        tree = _Ends().visit(self._sandbox.parse(self.text))
        for node in tree.find_all(nodes.Node):
            node.environment, node.lineno = self._sandbox, node.lineno or 1
        return self._sandbox.from_string(tree)

    def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            self._sandbox.begin(limits.RENDERING)
            return work(*args)
        except Exception as e:  # whatever a program in a template can do wrong
            line = getattr(e, "lineno", None)
            for frame, number in traceback.walk_tb(e.__traceback__):
                line = number if frame.f_code.co_filename == "<template>" else line
            reason = "it calls itself too deeply" if isinstance(e, RecursionError) else first_line(e)[:300]
        raise self._refused(reason, line)

    def _refused(self, reason: str, line: int | str | None) -> UserError:
        """line: its number, or a word that is in it."""
        lines = self.text.splitlines()
        if isinstance(line, str):
            line = next((n for n, written in enumerate(lines, 1) if line in written), None)
        place = f"line {line}: " if line else ""
        written = f" (`{lines[line - 1].strip()[:100]}`)" if line and line <= len(lines) else ""
        return UserError(f"{self.where}: {place}{reason}{written}.")

    def _render(self, messages: Messages, prompt: bool) -> str:
        given = [{"thinking": m[THOUGHT], **m} if THOUGHT in m else m for m in messages]
        blocks, written = [], 0
        for block in self._template.generate(
            messages=given, tools=None, documents=None, add_generation_prompt=prompt, **self._tokens
        ):
            blocks.append(block)
            if (written := written + len(block)) > limits.RENDERED:
                raise SecurityError(f"it writes more than {limits.RENDERED:,} characters")
        return "".join(blocks)

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The text of a chat; of it with what stands before an answer."""
        return self._run(self._render, self._checked(messages), add_generation_prompt)

    def ids(self, messages: list[dict], add_generation_prompt: bool = False) -> list[int]:
        """The ids of `render`: those of transformers' `apply_chat_template`."""
        return self.tokenizer.encode(self.render(messages, add_generation_prompt))

    def _checked(self, messages: list[dict]) -> Messages:
        """Raises UserError for messages of another form."""
        checked = []
        for n, message in enumerate(messages, 1):
            one = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
            if not {"role", "content"} <= one.keys() <= {"role", "content", THOUGHT}:
                what = f"has {', '.join(map(str, one)) or 'nothing'}"
                raise UserError(f"message {n} {what}: it needs role and content, and may have {THOUGHT}.")
            if wrong := [key for key, value in one.items() if not isinstance(value, str)]:
                raise UserError(f"message {n}: its {wrong[0]} is not a text.")
            checked.append(one)
        return checked

    # ------------------------------------------------------------ what is learnt

    def learnt(self, messages: list[dict], last: bool = False) -> list[Learnt]:
        """The rows of a chat: one, or one for each turn of the assistant. last: only its last turn is learnt.

        Learnt is what stands in the template's `generation` blocks; where it has none, each turn from behind the prompt
        for generation, as far as the chat has it, up to and with the token that ends the turn and the text behind that.
        Where the turns stand is seen from sentinels around the contents. A template that rewrites them gives a row per
        turn: the prompt of that turn as the model will see it, and the answer. Raises UserError where neither is exact.
        """
        messages = self._checked(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError("a chat without an answer of the assistant: nothing to learn from.")
        turns = turns[-1:] if last else turns
        whole = self.render(messages)
        if self._sandbox.has_marks:
            return [self._by_marks(messages, whole, turns[0] if last else 0)]
        spans = self._contents(messages, whole, "assistant")
        row = spans and self._by_contents(messages, whole, {i: spans[i] for i in turns})
        return [row] if row else [self._turn(messages, i) for i in turns]

    def _by_marks(self, messages: Messages, whole: str, first: int) -> Learnt:
        """first: the turn from which on it is learnt."""
        opening, closing = self._sandbox.marks = self._private(messages)[:2]
        try:
            before = self.render(messages[:first], True).count(opening) if first else 0
            plain, order, places = _taken_out(self.render(messages), opening + closing)
        finally:
            self._sandbox.marks = ("", "")
        if plain != whole or order != (opening + closing) * (len(order) // 2):
            raise self._refused("generation blocks inside one another, or changed by what is around", "generation")
        row = _Row(*self._encoded(whole))
        for start, stop in list(zip(places[::2], places[1::2]))[before:]:
            row.learn_text(start, stop)
        if not any(row.learn):
            raise self._refused("its generation blocks hold nothing of this chat", "generation")
        return Learnt(row.ids, row.learn, "marks")

    def _private(self, messages: Messages) -> str:
        """Four characters that are nowhere in a chat, for sentinels."""
        used = set(self.text).union(*(text for message in messages for text in message.values()))
        return "".join(itertools.islice((c for c in map(chr, range(0xE000, 0xF900)) if c not in used), 4))

    def _contents(self, messages: Messages, whole: str, *roles: str) -> dict[int, tuple[int, int]] | None:
        """Where the contents of these roles stand in the text of a chat, by the number of the message. None where the
        template leaves out or changes one, or what was thought before it, so that they cannot be seen."""
        a, b, *around_thought = self._private(messages)
        for core in (str, str.strip):  # a template that trims what it writes would not see the white space inside
            marked, expected = [], ""
            for message in messages:
                marked.append(dict(message))
                for key, (opening, closing) in ((THOUGHT, around_thought), ("content", (a, b))):
                    text = core(message.get(key, ""))
                    if message["role"] in roles and (text or key == "content"):
                        marked[-1][key] = message[key].replace(text, opening + text + closing, 1)
                        expected += opening + closing
            plain, order, places = _taken_out(self.render(marked), "".join((a, b, *around_thought)))
            if plain == whole and order == expected:
                starts, stops = ([at for mark, at in zip(order, places) if mark == side] for side in (a, b))
                return dict(zip((i for i, m in enumerate(messages) if m["role"] in roles), zip(starts, stops)))
        return None

    def _by_contents(self, messages: Messages, whole: str, spans: dict[int, tuple[int, int]]) -> Learnt | None:
        row = _Row(*self._encoded(whole))
        for i, (start, stop) in spans.items():
            if i:
                prompt, before = self.render(messages[:i], True), ""
                if not whole.startswith(prompt) and not whole.startswith(before := self.render(messages[:i])):
                    return None
                start = max(len(os.path.commonprefix([prompt, whole])), len(before))
            for closing in self._closings:
                stop = row.border(stop, stop + len(os.path.commonprefix([closing, whole[stop:]])))
            row.learn_text(start, stop)
        return self._ended(row.ids, row.learn, "sentinels")

    def _ended(self, ids: list[int], learn: list[bool], how: str) -> Learnt:
        """Where no token ends a chat's last turn but the next one's role, that one is added."""
        more = [] if self._special(self._closings[0]) or not learn[-1] else self.ends()
        return Learnt(ids + more, learn + [True] * len(more), how)

    def _turn(self, messages: Messages, i: int) -> Learnt:
        """The row of one turn: what the model will see before it, and the answer."""
        answer, whole = messages[i], self.render(messages[: i + 1])
        prompt = self.render(messages[:i], True) if i else ""
        for key in ("content", THOUGHT):
            if answer.get(key, "").strip() not in whole[len(prompt) :]:
                raise self._refused(f"the {key} of message {i + 1} is not in what it writes", key)
        ids, before = self.tokenizer.encode(whole), self.tokenizer.encode(prompt)
        if ids[: len(before)] != before or not i:
            what = f"message {i + 1}, written, does not begin with the prompt for it, which ends in {prompt[-40:]!r}"
            raise self._refused(what, "add_generation_prompt")
        return self._ended(ids, [n >= len(before) for n in range(len(ids))], "turns")

    def ends(self) -> list[int]:
        """The id of the token that ends a turn of the assistant: the first special one behind a last answer, else
        behind an earlier one. Empty where there is none."""
        return next(([first[0]] for closing in self._closings if (first := self._special(closing))), [])

    @functools.cached_property
    def _closings(self) -> tuple[str, str]:
        """What stands behind a last answer, and what behind an earlier one up to its first special token."""
        probe = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
        try:
            whole = self.render(probe)
            spans = self._contents(probe, whole, "user", "assistant") or {}
        except UserError:
            spans = {}
        if not spans:
            return "", ""
        between = whole[spans[1][1] : spans[2][0]]
        first = self._special(between)
        return whole[spans[3][1] :], between[: first[1] if first else 0]

    def _special(self, text: str) -> tuple[int, int] | None:
        """The first special token in a text: its id, and where it stops."""
        ids, places = self._encoded(text)
        return next(((i, stop) for i, (_, stop) in zip(ids, places) if i in self._specials), None)

    @functools.cached_property
    def _specials(self) -> set[int]:
        if isinstance(self.tokenizer, SentencePieceTokenizer):
            return {i for i, token in self.tokenizer.added.items() if token.get("special")}
        return {i for i, token in self.tokenizer.rust.get_added_tokens_decoder().items() if token.special}

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and where each stands in it."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, SentencePieceTokenizer):
            ids, places, at = [], [], 0
            for n, part in enumerate(tokenizer.split.split(text)):
                if n % 2:
                    ids, places = ids + tokenizer.encode(part), [*places, (at, at + len(part))]
                else:
                    spaced = tokenizer._spaced(part, n == 0)
                    shift = at + len(part) - len(spaced)
                    for piece in tokenizer.sp.encode(spaced, out_type="immutable_proto").pieces:
                        ids.append(piece.id)
                        places.append((max(at, shift + piece.begin), max(at, shift + piece.end)))
                at += len(part)
        else:
            encoding = tokenizer.rust.encode(text, add_special_tokens=False)
            ids, places = encoding.ids, encoding.offsets
        if ids != tokenizer.encode(text):
            raise UserError(f"{self.where}: where the tokens of this tokenizer stand in a text is not known.")
        return ids, places


class _Row:
    """ids: of a text. places: where each begins and stops in it."""

    def __init__(self, ids: list[int], places: list[tuple[int, int]]):
        self.ids, self.learn = ids, [False] * len(ids)
        self.starts, self.stops = [start for start, _ in places], [stop for _, stop in places]

    def learn_text(self, start: int, stop: int) -> None:
        """The tokens that have a character of text[start:stop], as transformers counts them."""
        tokens = range(bisect_right(self.stops, start), bisect_left(self.starts, stop))
        for n in tokens:
            self.learn[n] = True

    def border(self, start: int, stop: int) -> int:
        """The last end of a token in text[start:stop]; `start` where there is none."""
        return max(start, self.stops[n - 1] if (n := bisect_right(self.stops, stop)) else 0)


def _taken_out(text: str, marks: str) -> tuple[str, str, list[int]]:
    """The text without the marks, the marks in their order, and where in the text without them each stood."""
    parts = re.split(f"([{marks}])", text)
    return "".join(parts[::2]), "".join(parts[1::2]), list(itertools.accumulate(map(len, parts[:-1:2])))


# ---------------------------------------------------------------- whose template


def of_tokenizer(tokenizer: Tokenizer, name: str | None, date: str) -> ChatTemplate:
    """The template that a tokenizer brings, or our own of this name. date: of `ChatTemplate`.

    Raises UserError where it brings none, and where it lacks a special token that ours writes.
    """
    names = either(TEMPLATES)
    if name is None:
        if TEMPLATE not in tokenizer.beside:
            mend = f"put its {TEMPLATE} beside it, or set task.template={names}, which it must be made for"
            raise UserError(f"the tokenizer has no chat template: {mend}.")
        return ChatTemplate(tokenizer.beside[TEMPLATE], TEMPLATE, tokenizer, date)
    if name not in TEMPLATES:
        raise UserError(f"task.template={name!r:.60}: not known. Use {names}.")
    text = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(text, f"task.template={name}", tokenizer, date)
    if lacks := [t for t in TEMPLATES[name] if [i in template._specials for i in tokenizer.encode(t)] != [True]]:
        mend = "Use the template that the model was made for, or train a tokenizer with them"
        raise UserError(f"task.template={name} writes {', '.join(lacks)}: no special tokens of the tokenizer. {mend}.")
    return template


def special_tokens(name: str) -> list[str]:
    """The special tokens that our template of this name writes, beside the tokenizer's bos_token."""
    return list(TEMPLATES[name])
