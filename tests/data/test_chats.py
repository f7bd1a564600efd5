"""Chats: four forms of rows, what is refused and left out, and rows packed so that no chat is lost or cut."""

from __future__ import annotations

import json
import pickle
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.cli import start
from gradus.data import chat_template, chats
from gradus.data.chats import ChatsDataset, Packed, form_of, messages_of
from gradus.data.tokenizers import FastTokenizer, train_bpe
from gradus.errors import UserError
from gradus.recipe.schema import ChatsData

SAID = ["what is one and one?", "two", "and two more?", "four"]
PLAIN = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, SAID)]
SYSTEM = {"role": "system", "content": "count"}


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    return train_bpe([*SAID, "a b c d e f g"] * 5, 300, specials=chat_template.special_tokens("chatml"))


@pytest.fixture(scope="module")
def template(tokenizer):
    return chat_template.of_tokenizer(tokenizer, "chatml", "2026-01-01")


def put(rows: list) -> Path:
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path("c.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


FORMS = {
    "messages": {"messages": PLAIN},
    "sharegpt": {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in PLAIN]},
    "sharegpt of roles": {"conversations": PLAIN},
    "prompt": {"prompt": PLAIN[:3], "completion": SAID[3]},
    "prompt of lists": {"prompt": PLAIN[:3], "completion": PLAIN[3:]},
    "alpaca": {"instruction": "and two", "input": "more?", "output": "four", "history": [SAID[:2]]},
    "texts in parts": {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in PLAIN]},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_says_the_same(name):
    row = FORMS[name]
    form = form_of("c.jsonl", row)
    expected = [m | ({"content": "and two\nmore?"} if name == "alpaca" and m["content"] == SAID[2] else {}) for m in PLAIN]
    assert messages_of(row, form) == expected
    assert messages_of(row, form, "count") == [SYSTEM, *expected], "the default where the system says nothing"
    assert messages_of(row | {"system": "own"}, form, "count")[0]["content"] == ("count" if form == "messages" else "own")


def test_the_forms_are_the_same_wherever_they_are_named():
    assert {*chats.FORMS} == {*start.CHATS} == {*typing.get_args(typing.get_type_hints(ChatsData)["form"].__args__[0])}


def test_which_form_is_asked_where_it_is_not_known():
    both = {"messages": PLAIN, "prompt": "a", "completion": "b"}
    with pytest.raises(UserError, match=r"its columns may be messages \(messages\) or prompt \(prompt, completion\). Choose one: data.form=messages"):
        form_of("c.jsonl", both)
    assert form_of("c.jsonl", both, "prompt") == "prompt"
    with pytest.raises(UserError, match="need the columns instruction and output; there are: messages, prompt, completion"):
        form_of("c.jsonl", both, "alpaca")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": PLAIN, "tools": [{"name": "search"}]}, "tools: only texts are learned"),
        ({"messages": PLAIN, "images": ["a.png"]}, "images: only texts are learned"),
        ({"messages": [*PLAIN, {"role": "tool", "content": "3"}]}, "message 5: role 'tool' is none of system, user and assistant"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "message 1: tool_calls: only texts are learned"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"message 1: its content is \[\{'type': 'image'\}\], not text"),
        ({"messages": [{"role": "user"}]}, "message 1: .* has no role and content"),
        ({"messages": [{**PLAIN[1], "weight": 0}]}, "message 1: a weight of its own"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "sequence item 0: expected str instance, NoneType found"),
        ({"messages": []}, r"\[\] is no list of messages"),
        ({"messages": "hello"}, "'hello' is no list of messages"),
    ],
)  # fmt: skip
def test_what_is_no_chat_of_texts_is_refused_with_its_row(template, row, why):
    with pytest.raises(UserError, match=rf"^c.jsonl: row 2: {why}"):
        ChatsDataset(put([{"messages": PLAIN}, row]), template, 100)


@pytest.mark.parametrize("history", [PLAIN[:2], [SAID[:3]], "[]", [{"user": "one", "assistant": "two"}]])
def test_a_history_is_of_pairs(history):
    with pytest.raises(ValueError, match=r"history: .* is no list of pairs, a question and its answer"):
        messages_of(FORMS["alpaca"] | {"history": history}, "alpaca")


def test_fields_of_sharegpts_turns_are_those_of_messages():
    turns = FORMS["sharegpt"]["conversations"]
    for field, why in (({"weight": 0}, "message 4: a weight of its own"), ({"images": ["a.png"]}, "message 4: images: only texts are learned")):
        with pytest.raises(ValueError, match=why):
            messages_of({"conversations": [*turns[:3], turns[3] | field]}, "sharegpt")
    with pytest.raises(ValueError, match="message 0: its content is 5, not text"):
        messages_of({"conversations": turns, "system": 5}, "sharegpt")
    for weights in ({"human": None, "gpt": None}, {"human": 0.0, "gpt": 1.0}):  # as Parquet has what is not there, and as SlimOrca has them
        assert messages_of({"conversations": [turn | {"weight": weights[turn["from"]]} for turn in turns]}, "sharegpt") == PLAIN


def test_thoughts_are_found_as_transformers_finds_them():
    from transformers.utils.chat_template_utils import render_jinja_template

    text = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    names = ("reasoning_content", "thinking", "reasoning")
    for fields in ({name: "why"} for name in names), ({"thinking": None, "reasoning": "why"}, {"thinking": "why", "reasoning": "no"}):
        for field in fields:
            theirs = [PLAIN[0], PLAIN[1] | field]
            (message,) = messages_of({"messages": theirs}, "messages")[1:]
            assert message["reasoning_content"] == render_jinja_template([theirs], chat_template=text)[0][0] == "why"


@pytest.mark.parametrize("weight", [None, float("nan"), -1, "much", [1], pytest.param(10**400, id="huge")])
def test_a_weight_that_is_none_is_told_with_its_row_and_column(template, weight):
    with pytest.raises(UserError, match=r"^c.jsonl: row 2: w=.*: a weight is a number, 0 or more. Correct or remove it.$"):
        ChatsDataset(put([{"messages": PLAIN, "w": 1}, {"messages": PLAIN, "w": weight}]), template, 100, weight="w")


def test_a_copy_of_the_data_is_called_by_its_own_name(template):
    file = put([{"messages": PLAIN}, {"messages": PLAIN[:1]}])
    ChatsDataset(file, template, 100)
    file.rename("d.jsonl")
    assert ChatsDataset("d.jsonl", template, 100).notes == ["d.jsonl: 1 of 2 chats without a turn of the assistant's, left out"]


def test_a_chat_of_many_turns_is_cut_soon(template, monkeypatch):
    """The prompts for each turn are rendered of what is kept alone."""
    calls, render, kept = [], chat_template.ChatTemplate.render, template.ids(PLAIN[:2])
    monkeypatch.setattr(chat_template.ChatTemplate, "render", lambda self, *args, **more: calls.append(1) or render(self, *args, **more))
    data = ChatsDataset(put([{"messages": PLAIN[:2] * 60}]), template, len(kept))
    assert data[0]["ids"].tolist() == kept and len(calls) < 60 + 10


def test_a_first_chat_that_the_assistant_begins(tokenizer):
    """There is no prompt before it, and many templates cannot render one."""
    text = "{% if messages[0].role == 'system' %}{{ '' }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    text += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    data = ChatsDataset(put([{"messages": PLAIN[1:]}]), chat_template.ChatTemplate(text, "t", tokenizer), 100)
    assert tokenizer.decode(data[0]["ids"][data[0]["learn"]]) == "twofour" and data.notes == []


def test_workers_are_given_the_name_of_the_tokens_files_alone(template):
    data = ChatsDataset(put([{"messages": [{"role": "user", "content": "a " * 9000}, PLAIN[1]]}]), template, 100_000)
    sent = pickle.dumps(data)
    assert len(sent) < len(data[0]["ids"]) / 2
    there = pickle.loads(sent)[0]
    assert all((there[key] == data[0][key]).all() for key in ("ids", "learn")) and there["learn"].sum() == 3


def test_what_is_left_out_is_counted(template):
    long = [{"role": "user", "content": "a " * 200}, {"role": "assistant", "content": "two"}]
    rows = [{"messages": PLAIN, "w": 1}, {"messages": PLAIN[:1], "w": 1}, {"messages": PLAIN, "w": 0}, {"messages": [*PLAIN[:2], *long], "w": 2},
            {"messages": long, "w": 1}]  # fmt: skip
    data = ChatsDataset(put(rows), template, 60, weight="w")
    assert [note.removeprefix("c.jsonl: ") for note in data.notes] == [
        "1 of 5 chats without a turn of the assistant's, left out", "1 of 5 chats of weight 0, left out",
        "1 of 5 chats longer than 60 tokens, cut at a turn", "1 of 5 chats longer than 60 tokens up to the first answer, left out",
    ]  # fmt: skip
    whole, cut = data[0], data[1]
    assert whole["weight"] == 1 and cut["weight"] == 2 and len(data) == 2 and data.lengths.tolist() == [len(whole["ids"]), len(cut["ids"])]
    assert cut["ids"].tolist() == template.ids(PLAIN[:2]) == whole["ids"][: len(cut["ids"])].tolist()
    assert whole["learn"].sum() > cut["learn"].sum() > 0
    with pytest.raises(UserError, match="1 of 1 chats without a turn of the assistant's, left out: nothing to learn"):
        ChatsDataset(put(rows[1:2]), template, 60)


def test_only_the_last_turn(template, tokenizer):
    data, every = (ChatsDataset(put([{"messages": PLAIN}]), template, 100, last=last)[0] for last in (True, False))
    assert (data["ids"] == every["ids"]).all()
    assert tokenizer.decode(data["ids"][data["learn"]]).split() == ["four"] and tokenizer.decode(every["ids"][every["learn"]]).split() == ["two", "four"]


def test_a_chat_is_held_out_whole(tokenizer):
    """A template that drops what was said before gives a row for each turn: those of one chat stay together."""
    text = "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    template = chat_template.ChatTemplate(text + "{% if add_generation_prompt %}<|im_start|>{% endif %}", "t", tokenizer)
    data = ChatsDataset(put([{"messages": PLAIN}] * 20), template, 100)
    assert len(data) == 40 and data.chats.tolist() == [i // 2 for i in range(40)]
    train, valid = data.every(10)
    assert len(train) == 36 and valid.indices.tolist() == [18, 19, 38, 39] and train.content != valid.content
    rows = [{"messages": PLAIN[:1] if i == 9 else PLAIN} for i in range(11)]
    assert [len(part) for part in ChatsDataset(put(rows), template, 100).every(10)] == [18, 2], "of those that are kept"
    with pytest.raises(UserError, match="too few to hold out every 10th"):
        ChatsDataset(put([{"messages": PLAIN}] * 9), template, 100).every(10)


class Rows:
    content, notes = "x", ()

    def __init__(self, lengths: list[int]):
        self.lengths = np.array(lengths)

    def __getitem__(self, i: int) -> dict:
        return {"ids": np.full(self.lengths[i], i), "learn": np.arange(self.lengths[i]) > 0, "weight": float(i)}


@given(st.lists(st.integers(2, 20), min_size=1, max_size=60))
def test_packed_rows_hold_every_chat_once(lengths):
    packed = Packed(Rows(lengths), 20)
    rows = [packed[i] for i in range(len(packed))]
    assert packed.lengths.tolist() == [len(row["ids"]) for row in rows] and packed.lengths.max() <= 20
    seen = []
    for row in rows:
        for number in np.unique(row["segments"]):
            own = row["segments"] == number
            chat = row["ids"][own][0]
            assert (row["ids"][own] == chat).all() and (row["positions"][own] == np.arange(lengths[chat])).all()
            assert (row["weight"][own] == chat).all() and not row["learn"][own][0]
            seen.append(int(chat))
    assert sorted(seen) == list(range(len(lengths)))
    assert 20 * len(rows) < 2 * sum(lengths) + 20, "at most one row is less than half full"


def test_answers_that_do_not_stand_behind_their_prompt_are_told(tokenizer, template):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    other = chat_template.ChatTemplate(text, "own.jinja", tokenizer)
    file = put([{"messages": PLAIN}])
    assert ChatsDataset(file, template, 100).notes == []
    assert ChatsDataset(file, other, 100).notes == ["c.jsonl: own.jinja does not write a chat's answers behind its prompt for one"]
