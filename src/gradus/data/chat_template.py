"""Conversations to ids, by the template of a model, and which of them are learned.

A template is a program that came with a model: it runs in jinja2's sandbox, with an end to its time and its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os.path
import re
import time
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gradus import limits
from gradus.data.tokenizers import ROLES, TEMPLATE, FastTokenizer, Tokenizer
from gradus.errors import UserError, either, first_line

common_prefix = os.path.commonprefix  # of any texts, not of paths only
THOUGHT = "reasoning_content"  # of a message: what was thought before its content
OWN = Path(__file__).parent / "templates"  # our own templates
TEMPLATES = sorted(file.stem for file in OWN.glob("*.jinja"))


# functions by name: what puts a value for each character of another, what reads a width from a text, and filters that
# look at no text of a list
MULTIPLY = re.compile(r"\*\*?|expandtabs|indent|join|replace|tojson|translate|urlize|wordwrap|xmlattr")
FORMAT = re.compile("%|format|format_map")
OF_LISTS = re.compile("count|d|default|dictsort|first|items|last|length|list|map|(reject|select)(attr)?|reverse")


@dataclasses.dataclass(frozen=True)
class LearnedRow:
    """The ids of one row, and which of them are learned."""

    ids: list[int]
    learn: list[bool]  # same length: what the assistant writes, and what ends its turn
    how: str  # "marks" (the template's own), "sentinels" or "turns" (a row per turn)


# ---------------------------------------------------------------- the sandbox


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers gives a template, with an end: `spend` counts what is built, in characters, and
    looks at the clock; it is asked by every loop, call, filter and operator that can make a text longer."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    has_marks = False  # is there a generation block?

    def __init__(self, today: datetime.date):
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=lambda value: self.count("", value) or value)
        self.add_extension("jinja2.ext.loopcontrols")
        self.add_extension(_Generation)
        self.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        counted = [name for name in self.filters if not OF_LISTS.fullmatch(name)]
        self.filters |= {name: self._counted(name, self.filters[name]) for name in counted}
        self.globals |= {"raise_exception": _raise, "strftime_now": today.strftime}

    def spend(self, n: int) -> None:
        self.left -= n
        if self.left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("it takes more time or memory than any chat needs")

    def count(self, name: str, *values: Any) -> None:
        """Spend what a function of this name can make of its values."""
        sizes = [_size(value) for value in values]
        if FORMAT.fullmatch(name) and isinstance(values[0], str) and re.search(r"[%{][^%{}]*(\d{4}|\*)", values[0]):
            raise SecurityError("a format with a width of four digits")
        self.spend(sizes[0] * max(sizes[1:], default=1) if MULTIPLY.fullmatch(name) else sum(sizes))

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            self.count(name, *args[hasattr(function, "jinja_pass_arg") :], *options.values())
            return function(*args, **options)

        return counted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.spend(sum(len(side) for side in (left, right) if isinstance(side, str | list | tuple)))
        else:
            self.count(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        if function == self.spend:  # in each turn of each loop
            return self.spend(*args)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", "")  # the sandbox wraps str.format
        text = owner if isinstance(owner, str) else ""
        self.count(getattr(function, "__name__", ""), text, *args, *options.values())
        return super().call(context, function, *args, **options)


def _size(value: Any) -> int:
    """Characters of a text, the amount of a number, 256 for all else, with each entry; above the limit, any."""
    total, left = 0, [value]
    while left and total <= limits.BUILT:
        one = left.pop()
        total += max(1, len(one) if isinstance(one, str) else abs(one) if isinstance(one, int) else 256)
        left += one if isinstance(one, list | tuple) else itertools.chain(*one.items()) if isinstance(one, dict) else ()
    return total


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}`: what the assistant writes. Puts the environment's marks around it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        return caller().join(self.environment.marks)  # type: ignore[attr-defined]


class _Counted(NodeTransformer):
    """Puts `spend` before each body that may run often, for itself and the plain text in it; a ~ b becomes a + b."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return functools.reduce(nodes.Add, [nodes.Filter(one, "string", [], [], None, None) for one in node.nodes])

    def visit_For(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        n = nodes.Const(64 + sum(len(plain.data) for plain in node.find_all(nodes.TemplateData)))
        node.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("spend"), [n], [], None, None)))
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
        self._sandbox = sandbox = _Sandbox(datetime.date.fromisoformat(date))
        with self._bounded():
            if len(text) > limits.MB:
                raise SecurityError(f"{len(text):,} characters; a template has at most {limits.MB:,}")
            tree = _Counted().visit(sandbox.parse(text)).set_environment(sandbox).set_lineno(1)
            self._template = sandbox.from_string(tree)

    def __reduce__(self):
        return ChatTemplate, (self.text, self.where, self.tokenizer, self.date)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        self._sandbox.left, self._sandbox.deadline = limits.BUILT, time.monotonic() + limits.RENDERING
        try:
            yield
        except Exception as e:  # whatever a program in a template can do wrong
            frames = traceback.walk_tb(e.__traceback__)
            lines = [n for frame, n in frames if frame.f_code.co_filename == "<template>"]
            reason = "it calls itself too deeply" if isinstance(e, RecursionError) else first_line(e)[:300]
            raise self._refused(reason, [getattr(e, "lineno", 0), *lines][-1]) from None

    def _refused(self, reason: str, line: int | str) -> UserError:
        """line: its number, or what is in it; 0 or what is nowhere: none."""
        if isinstance(line, str):
            line = self.text.partition(line)[0].count("\n") + 1 if line in self.text else 0
        written = f", line {line} ({''.join(self.text.splitlines()[line - 1 : line]).strip()[:100]})" if line else ""
        return UserError(f"{self.where}{written}: {reason.rstrip('.')}.")

    def render(
        self, messages: list[dict], add_generation_prompt: bool = False, marks: Iterable[str] = ("", "")
    ) -> str:
        """The text of a chat, and of what stands before an answer; with `marks` around each generation block.

        messages: with role, content and, where the assistant thought first, reasoning_content.
        """
        given = [{"thinking": m[THOUGHT], **m} if THOUGHT in m else m for m in messages]  # as transformers does
        self._sandbox.marks, config = marks, getattr(self.tokenizer, "config", {})
        tokens = {f"{role}_token": token for role in ROLES if (token := config.get(f"{role}_token"))}
        options = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        with self._bounded():
            text = self._template.render(messages=given, **options, **tokens)
            if len(text) > limits.RENDERED:
                raise SecurityError(f"it writes {len(text):,} characters, more than {limits.RENDERED:,}")
        return text

    def ids(self, messages: list[dict], add_generation_prompt: bool = False) -> list[int]:
        """The ids of `render`: those of transformers' `apply_chat_template`."""
        return self.tokenizer.encode(self.render(messages, add_generation_prompt))

    def learned(self, messages: list[dict], last: bool = False) -> list[LearnedRow]:
        """The rows of a chat: one, or one for each turn of the assistant. last: only its last turn is learned.

        Learned is what stands in the template's `generation` blocks; without any, each turn from behind the prompt for
        it, as far as the chat has that, found by sentinels around the contents; both up to and with the token that ends
        a turn and the text behind that, if any. A template that rewrites earlier turns gives a row per turn:
        the prompt for it as the model will see it, and the answer. Raises UserError where that is not exact either.
        """
        whole = self.render(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or not whole:
            raise UserError("a chat without an answer of the assistant: nothing to learn from.")
        turns = turns[-1:] if last else turns
        if self._sandbox.has_marks:
            spans, closings = self._marked(messages, whole, turns[0] if last else 0), self._endings[0] or [""]
        else:
            spans, closings = self._answers(messages, whole, turns), self._endings[0]
        if not spans or not closings or type(self.tokenizer) is not FastTokenizer:
            return [self._turn(messages, i) for i in turns]
        encoding, learn = self.tokenizer.rust.encode(whole, add_special_tokens=False), set()
        starts, stops = zip(*encoding.offsets)
        for start, stop in spans:  # the tokens that have a character of it, as transformers has it
            ends = [bisect_right(stops, stop + len(common_prefix([text, whole[stop:]]))) for text in closings]
            learn |= {*range(bisect_right(stops, start), max(bisect_left(starts, stop), *ends))}
        how = "marks" if self._sandbox.has_marks else "sentinels"
        return [self._ended(encoding.ids, [n in learn for n in range(len(starts))], how)]

    def _marked(self, messages: list[dict], whole: str, first: int) -> list[tuple[int, int]]:
        """Where the generation blocks stand in the text of a chat, from this message on."""
        a, b = marks = self._private(whole)[:2]
        plain, order, places = _taken_out(self.render(messages, False, marks), marks)
        before = self.render(messages[:first], True, marks).count(a) if first else 0
        spans = list(zip(places[::2], places[1::2]))[before:]
        if plain != whole or order != (a + b) * (len(order) // 2) or all(start == stop for start, stop in spans):
            raise self._refused("generation blocks without text, or within something that changes it", "generation")
        return spans

    def _answers(self, messages: list[dict], whole: str, turns: list[int]) -> list[tuple[int, int]] | None:
        """Where these turns stand in the text of a chat, from behind their prompts to their contents' ends."""
        contents, spans = self._contents(messages, whole), []
        for i in turns if contents else ():
            start, stop = contents[i]
            if i:
                start = self.answer_start(messages[:i], whole)
                if start < contents[i - 1][1]:
                    return None
            spans.append((start, stop))
        return spans

    def answer_start(self, asked: list[dict], whole: str) -> int:
        """Where the answer to these messages begins in the text of them and more: behind the prompt for it, as far as
        that text has it."""
        prompt = self.render(asked, True)
        return len(prompt if whole.startswith(prompt) else common_prefix([prompt, whole]))

    def _contents(self, messages: list[dict], whole: str) -> list[tuple[int, int]] | None:
        """Where the contents stand in the text of a chat; None where the template leaves out or changes one, or a
        thought."""
        sentinels = self._private(whole + "".join(text for message in messages for text in message.values()))
        for core in (str, str.strip):  # a template that trims what it writes would not see white space inside
            marked, expected = [], ""
            for message in messages:
                marked.append(dict(message))
                for key, (opening, closing) in ((THOUGHT, sentinels[2:]), ("content", sentinels[:2])):
                    text = core(message.get(key, ""))
                    if text or key == "content":
                        marked[-1][key] = message[key].replace(text, opening + text + closing, 1)
                        expected += opening + closing
            plain, order, places = _taken_out(self.render(marked), sentinels)
            if plain == whole and order == expected:
                stops = [n for n, sentinel in enumerate(order) if sentinel == sentinels[1]]
                return [(places[n - 1], places[n]) for n in stops]
        return None

    def _private(self, text: str) -> list[str]:
        """Four characters that are neither in a text nor in the template."""
        free = (c for c in map(chr, range(0xE000, 0xF900)) if c not in text and c not in self.text)
        return list(itertools.islice(free, 4))

    def _ended(self, ids: list[int], learn: list[bool], how: str) -> LearnedRow:
        """Where nothing ends a chat's last turn but what begins the next one, that is added."""
        more = self._endings[2] if learn[-1] else []
        return LearnedRow(ids + more, learn + [True] * len(more), how)

    def _turn(self, messages: list[dict], i: int) -> LearnedRow:
        """The row of one turn: what the model will see before it, and the answer."""
        if self._sandbox.has_marks:
            raise self._refused("generation blocks need a tokenizer.json, which tells where tokens stand", "generation")
        prompt, whole = self.render(messages[:i], True), self.render(messages[: i + 1])
        before, ids = self.tokenizer.encode(prompt), self.tokenizer.encode(whole)
        if not whole.startswith(prompt) or ids[: len(before)] != before:
            what = f"message {i + 1} does not begin with the prompt for it, which ends in {prompt[-40:]!r}"
            raise self._refused(what, "add_generation_prompt")
        for key in ("content", THOUGHT):
            if messages[i].get(key, "").strip() not in whole[len(prompt) :]:
                raise self._refused(f"it leaves out or changes {key} of message {i + 1}", key)
        return self._ended(ids, [n >= len(before) for n in range(len(ids))], "turns")

    def ends(self) -> list[int]:
        """The id of the token that ends a turn of the assistant: the first special one behind a last answer, else
        behind an earlier one. Empty where there is none."""
        return self._endings[1]

    @functools.cached_property
    def _endings(self) -> tuple[list[str], list[int], list[int]]:
        """What stands behind a last answer, and behind an earlier one up to its first special token; `ends`; those of
        them that a last answer lacks. All are empty where that cannot be seen."""
        chat = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
        with contextlib.suppress(UserError):
            if spans := self._contents(chat, whole := self.render(chat)):
                behind = [whole[spans[3][1] :], whole[spans[1][1] : spans[2][0]]]
                last, earlier = (_special(self.tokenizer, text) for text in behind)
                name = "" if earlier is None else self.tokenizer.token(earlier)
                behind[1] = behind[1].partition(name)[0] + name if name else ""
                ends = [i for i in (last, earlier) if i is not None][:1]
                return behind, ends, ends if last is None else []
        return [], [], []


def _special(tokenizer: Tokenizer, text: str) -> int | None:
    """The first special token in a text."""
    ids = tokenizer.encode(text)
    return next((i for i in ids if not tokenizer.decode([i]) and tokenizer.token(i) in text), None)


def _taken_out(text: str, marks: list[str]) -> tuple[str, str, list[int]]:
    """The text without the marks, the marks in their order, and where in the text without them each stood."""
    parts = re.split(f"([{''.join(marks)}])", text)
    return "".join(parts[::2]), "".join(parts[1::2]), list(itertools.accumulate(map(len, parts[:-1:2])))


# ---------------------------------------------------------------- whose template


def of_tokenizer(tokenizer: Tokenizer, name: str | None, date: str) -> ChatTemplate:
    """The template that a tokenizer brings, or our own of this name. date: of `ChatTemplate`.

    Raises UserError where it brings none, and where it lacks a special token that ours writes.
    """
    names = either(TEMPLATES)
    if name is None:
        if TEMPLATE not in tokenizer.beside:
            mend = f"Put its {TEMPLATE} beside it, or set task.template={names}: the one that the model knows"
            raise UserError(f"the tokenizer has no chat template. {mend}, or any for a model that knows none.")
        return ChatTemplate(tokenizer.beside[TEMPLATE], TEMPLATE, tokenizer, date)
    if name not in TEMPLATES:
        raise UserError(f"task.template={name!r:.60}: not known. Use {names}.")
    if lacks := [token for token in special_tokens(name) if [_special(tokenizer, token)] != tokenizer.encode(token)]:
        mend = "Use the template that the model knows, or train a tokenizer with them"
        raise UserError(f"task.template={name} writes {', '.join(lacks)}: no special tokens of the tokenizer. {mend}.")
    text = (OWN / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(text, f"task.template={name}", tokenizer, date)


def special_tokens(name: str) -> list[str]:
    """The special tokens that our template of this name writes, beside the tokenizer's bos_token."""
    text = (OWN / f"{name}.jinja").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"<\|\w+\|>|<\w+_of_turn>", text)))
