"""Chats: rows of several forms as messages, and their tokens, of which the assistant's are learned."""

from __future__ import annotations

import bisect
import collections
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradus import files, limits
from gradus.data import readers
from gradus.data.cache import digest, identity, keep
from gradus.data.corpus import Corpus, TokenFile
from gradus.data.readers import Readable, Row, kind_of, numbered
from gradus.data.splits import Part
from gradus.errors import UserError, either
from gradus.recipe.schema import ChatsData

if TYPE_CHECKING:  # it imports jinja2, which other tasks do without
    from gradus.data.chat_template import ChatTemplate, LearnedRow

Message = dict[str, str]  # role, content, and where the assistant thought first reasoning_content
# form (data.form) → the columns that it is known by
FORMS = {"messages": ("messages",), "sharegpt": ("conversations",), "prompt": ("prompt", "completion"),
         "alpaca": ("instruction", "output")}  # fmt: skip
ROLES = {role: role for role in ("system", "user", "assistant")} | ChatsData.roles
NOT_TEXT = ("tools", "images", "image", "videos", "audio", "audios")  # columns, and fields of a message
CALLS = ("tool_calls", "function_call")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields of a message, in transformers' order


def forms_of(columns: Iterable[str]) -> list[str]:
    """The forms that a row with these columns may have."""
    there = set(columns)
    return [form for form, names in FORMS.items() if there.issuperset(names)]


def form_of(name: str, row: Mapping[str, Any], asked: str | None = None, option: str = "data.form") -> str:
    """The form of a file's rows, by the first. Raises UserError where it has not the columns of the one that is asked
    for, of none, or of several."""
    found, there = forms_of(row), ", ".join(row)[:200]
    if asked in found or (len(found) == 1 and asked is None):
        return asked or found[0]
    if len(found) > 1 and asked is None:
        several = either([f"{form} ({', '.join(FORMS[form])})" for form in found])
        raise UserError(f"{name}: its columns may be {several}. Choose one: {option}={found[0]}, say.")
    wanted = either([" and ".join(FORMS[form]) for form in ([asked] if asked else FORMS)])
    raise UserError(f"{name}: no chats in it: they need the columns {wanted}; there are: {there}.")


def messages_of(row: Row, form: str, system: str | None = None) -> list[Message]:
    """The messages of a row: role (system, user or assistant) and content; where the system says nothing, `system`.
    Raises ValueError for what is not learned here (tools, images), an unknown role and a content that is no text."""
    if there := [name for name in NOT_TEXT if row.get(name)]:
        raise ValueError(f"{there[0]}: only texts are learned")
    if form in ("messages", "sharegpt"):
        turns = row[FORMS[form][0]]
    elif form == "prompt":
        sides = (("user", row["prompt"]), ("assistant", row["completion"]))
        turns = [turn for role, x in sides for turn in (x if isinstance(x, list) else [_turn(role, x)])]
    else:
        pairs = row.get("history") or ()
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"history: {pairs!r:.40} is no list of pairs, a question and its answer")
        history = [_turn(*said) for pair in pairs for said in zip(("user", "assistant"), pair)]
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        turns = [*history, _turn("user", question), _turn("assistant", row["output"])]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{turns!r:.40} is no list of messages")
    messages = [_message(i, turn) for i, turn in enumerate(turns, 1)]
    if messages[0]["role"] != "system" and (system := (form != "messages" and row.get("system")) or system):
        messages.insert(0, _message(0, _turn("system", system)))
    return messages


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _message(number: int, turn: Any) -> Message:
    if isinstance(turn, dict) and "from" in turn:  # ShareGPT's
        turn = _turn(turn["from"], turn.get("value")) | turn
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        raise ValueError(f"message {number}: {turn!r:.60} has no role and content")
    role, content = ROLES.get(str(turn["role"]).lower()), turn["content"]
    if called := [name for name in (*CALLS, *NOT_TEXT) if turn.get(name)]:
        raise ValueError(f"message {number}: {called[0]}: only texts are learned")
    if role is None:
        raise ValueError(f"message {number}: role {turn['role']!r:.40} is none of system, user and assistant")
    if role == "assistant" and turn.get("weight") not in (None, 1):  # of others it changes nothing
        raise ValueError(f"message {number}: a weight of its own. Weights are of rows: name their column, data.weight")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part.get("text") for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number}: its content is {content!r:.40}, not text")
    thoughts = [turn[name] for name in THOUGHTS if isinstance(turn.get(name), str)]
    return _turn(role, content) | ({THOUGHTS[0]: thoughts[0]} if thoughts else {})


def rows_of(
    path: Readable, form: str | None, system: str | None = None, weight: str | None = None
) -> Iterator[tuple[str, list[Message], float]]:
    """(file and row, messages, weight) of each row. Raises UserError for one that cannot be learned from."""
    for file, number, row in numbered(path):
        if isinstance(row, str):
            raise readers.no_columns(file, "chats")
        form, where = form or form_of(str(file), row), f"{file}: row {number}"
        if missing := [name for name in (*FORMS[form], *([weight] if weight else [])) if name not in row]:
            raise readers.no_column(file, number, missing[0], row)
        try:
            messages, of_row = messages_of(row, form, system), _weight(row, weight) if weight else 1.0
        except (ValueError, TypeError) as e:
            raise UserError(f"{where}: {e}. Correct or remove it.") from None
        yield where, messages, of_row


def _weight(row: Row, column: str) -> float:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if 0 <= (weight := float(row[column])) <= limits.REAL:
            return weight
    raise ValueError(f"{column}={row[column]!r:.40}: a weight is a number, 0 or more")


def texts(path: Readable, form: str | None) -> Corpus:
    """What is said in the chats, each message a document: what a tokenizer is trained on."""
    content, said = identity(path), lambda: (turn["content"] for _, chat, _ in rows_of(path, form) for turn in chat)
    return Corpus(said, digest("chats", kind_of(path), form, content), str(path), True, content)


class ChatsDataset:
    """Rows of chats: item i is {"ids": (n,) int64, "learn": (n,) bool, of the tokens to predict}, n <= longest; with
    `weight`, a column, also "weight": float, of the row's loss. One chat is one row, or one for each of the assistant's
    turns where its template writes earlier turns anew (see `ChatTemplate.learned`).

    Of a longer chat the last turns are cut off, up to one that fits; chats that cannot be cut, have no turn of the
    assistant's or no weight are left out. `notes`: how many. lengths: (rows,) tokens; chats: (rows,) the number of
    each one's chat, of those that are kept. Raises UserError, with file and row, for one that is no chat, and where no
    row is left.
    """

    def __init__(
        self, path: Readable, template: ChatTemplate, longest: int, *, last: bool = False, system: str | None = None,
        form: str | None = None, weight: str | None = None, cache: str | Path | None = None,
    ):  # fmt: skip
        self.name, self.content, self.weight = str(path), identity(path), weight
        how = (template.digest, template.date, template.tokenizer.fingerprint, longest, last, system, form, weight)
        folder = files.cache_dir(cache) / "chats" / digest(2, kind_of(path), self.content, *how)
        rows = rows_of(path, form, system, weight)
        self.tokens = TokenFile(keep(folder, lambda aside: _write(aside, rows, template, longest, last, self.name)))
        self.weights = np.fromfile(self.tokens.folder / "weights.bin", "<f4")
        self.chats = np.fromfile(self.tokens.folder / "chats.bin", "<i8")
        self.lengths, self.notes = self.tokens.lengths(), [f"{path}: {note}" for note in self.tokens.about["notes"]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        more = {"weight": float(self.weights[i])} if self.weight else {}
        start, n = int(self.tokens.offsets[i]), int(self.lengths[i])  # a map of the file would go to workers by pickle
        learn = np.fromfile(self.tokens.folder / "learn.bin", bool, n, offset=start)
        return {"ids": self.tokens.text(i), "learn": learn, **more}

    def every(self, n: int) -> tuple[Part, Part]:
        """All but every n-th chat, and the rest."""
        held_out = self.chats % n == n - 1
        if not held_out.any():
            raise UserError(f"{self.name}: {len(self)} chats are too few to hold out every {n}th. Give a valid split.")
        first, rest = (Part(self, np.flatnonzero(rows)) for rows in (~held_out, held_out))
        first.content, rest.content = (digest(self.content, n, held) for held in (False, True))
        return first, rest


def _rows(
    messages: list[Message], weight: float, template: ChatTemplate, longest: int, last: bool
) -> tuple[str, list[LearnedRow]]:
    """(what becomes of a chat, its rows), cut at a turn where it is too long."""
    if not weight:
        return "of weight 0, left out", []
    ends = [i for i, message in enumerate(messages, 1) if message["role"] == "assistant"]
    for end in reversed(ends):
        if len(template.ids(messages[:end])) > longest:  # quick to see, of a chat of hundreds of turns too
            continue
        rows = template.learned(messages[:end], last)
        if all(len(row.ids) <= longest for row in rows):
            return "" if end == ends[-1] else f"longer than {longest:,} tokens, cut at a turn", rows
    first = f"longer than {longest:,} tokens up to the first answer, left out"
    return first if ends else "without a turn of the assistant's, left out", []


def _answers_its_prompt(template: ChatTemplate, messages: list[Message], row: LearnedRow) -> bool:
    """Whether the first answer that is learned stands behind what the model will read before one, if anything."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = template.ids(messages[:first], add_generation_prompt=True) if first else []
    return row.ids[: len(prompt)] == prompt


def _write(
    folder: Path, chats: Iterable[tuple[str, list[Message], float]], template: ChatTemplate, longest: int, last: bool,
    name: str,
) -> None:  # fmt: skip
    dtype = "<u2" if template.tokenizer.vocab_size <= 1 << 16 else "<u4"
    offsets, weights, chat, number, became, notes = [0], [], [], -1, collections.Counter(), []
    with open(folder / "ids.bin", "wb") as ids, open(folder / "learn.bin", "wb") as learn:
        for where, messages, weight in chats:
            try:
                what, rows = _rows(messages, weight, template, longest, last)
            except UserError as e:
                raise UserError(f"{where}: {e}") from None
            became[what] += 1
            number += bool(rows)
            if rows and not weights and not _answers_its_prompt(template, messages, rows[0]):
                notes.append(f"{template.where} does not write a chat's answers behind its prompt for one")
            for row in rows:
                if not any(row.learn[1:]):
                    raise UserError(f"{where}: not one of its tokens would be learned. Look at it with gradus check.")
                ids.write(np.array(row.ids, dtype).tobytes())
                learn.write(np.array(row.learn, bool).tobytes())
                offsets.append(offsets[-1] + len(row.ids))
                weights.append(weight)
                chat.append(number)
    total = became.total()
    notes += [f"{n:,} of {total:,} chats {what}" for what, n in became.items() if what]
    if not weights:
        raise UserError(f"{name}: {'; '.join(notes)}: nothing to learn. Look at the data, data.max_len, model.seq_len.")
    arrays = {"offsets": np.array(offsets, "<i8"), "weights": np.array(weights, "<f4"), "chats": np.array(chat, "<i8")}
    for file, numbers in arrays.items():
        (folder / f"{file}.bin").write_bytes(numbers.tobytes())
    (folder / "about.json").write_text(json.dumps({"dtype": dtype, "notes": notes}))


class Packed:
    """Rows of several chats each, that do not see each other: item i is {"ids", "learn", "weight" as `ChatsDataset`'s,
    "segments": number of the chat in the row from 0, "positions": from 0 in each chat}, each (n,), n <= longest.

    The longest chat that is left goes where the least room is left (best fit): no chat is cut.
    """

    def __init__(self, rows: Any, longest: int):
        self.rows, self.content, self.notes = rows, rows.content, rows.notes
        rooms: list[tuple[int, int]] = []  # (left, which), sorted
        self.places: list[list[int]] = []
        for i in np.argsort(-np.asarray(rows.lengths), kind="stable").tolist():
            length = int(rows.lengths[i])
            at = bisect.bisect_left(rooms, (length, -1))
            left, place = rooms.pop(at) if at < len(rooms) else (longest, len(self.places))
            if place == len(self.places):
                self.places.append([])
            self.places[place].append(i)
            bisect.insort(rooms, (left - length, place))
        self.lengths = np.array([rows.lengths[place].sum() for place in self.places])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> dict[str, Any]:
        chats = [self.rows[j] for j in self.places[i]]
        lengths = [len(chat["ids"]) for chat in chats]
        out = {key: np.concatenate([chat[key] for chat in chats]) for key in ("ids", "learn")}
        if "weight" in chats[0]:
            out["weight"] = np.repeat([chat["weight"] for chat in chats], lengths)
        positions = np.concatenate([np.arange(n) for n in lengths])
        return {**out, "segments": np.repeat(range(len(chats)), lengths), "positions": positions}
