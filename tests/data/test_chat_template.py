"""Ids and masks of chats against transformers with the templates that TRL ships, and their twins for training."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import re
import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradus import limits
from gradus.data import chat_template
from gradus.data.chat_template import TEMPLATES, ChatTemplate, of_tokenizer, special_tokens
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import TEMPLATE, ByteTokenizer, train_bpe
from gradus.errors import UserError

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
SHIPPED = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
TWINS = {name.removesuffix("_training"): text for name, text in SHIPPED.items() if name.endswith("_training")}
NAMES = [name for name in SHIPPED if not name.endswith("_training")]
MARKED = {"lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"}  # the template is its own twin
TOKENS = re.compile(r"<[|｜][^<>{}'\"\s]+[|｜]>|</?(?:start|end)_of_[a-z]+>|<\|?(?:turn|channel|image|sop)\|?>|\[gMASK\]")
DATE = "2026-07-04"


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def answer(content, thought=None):
    return {"role": "assistant", "content": content} | ({"reasoning_content": thought} if thought is not None else {})


CHATS = {
    "plain": [user("What is two?"), answer("It is 2.")],
    "system": [system("Be short."), user("What is two?"), answer("It is 2.")],
    "multi-turn": [user("What is two?"), answer("It is 2."), user("And three?"), answer("More.")],
    "thinking": [user("What is two?"), answer("It is 2.", "One and one."), user("And three?"), answer("More.", "Two and one.")],
}


@pytest.fixture(scope="module")
def ours():
    """A BPE with the special tokens of all templates."""
    named = sorted({token for text in SHIPPED.values() for token in TOKENS.findall(text)} | {t for name in TEMPLATES for t in special_tokens(name)})
    return train_bpe([SHIPPED["gptoss"], SHIPPED["qwen3_8"], "What is two? It is 2.\n\nMore. " * 20], 900, specials=named)


@pytest.fixture(scope="module")
def theirs(ours):
    """The same in transformers, whose clock stands still."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)

    roles = {f"{role}_token": ours.config[f"{role}_token"] for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Clock)
        yield PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(ours.rust.to_str()), **roles)


def their_ids(theirs, text, chat, prompt=False):
    return theirs.apply_chat_template(chat, chat_template=text, add_generation_prompt=prompt, return_dict=False)


def their_mask(theirs, text, chat):
    """The ids and the mask that TRL's collator makes from a template for training."""
    out = theirs.apply_chat_template(chat, chat_template=text, return_dict=True, return_assistant_tokens_mask=True)
    return out["input_ids"], [bool(n) for n in out["assistant_masks"]]


def runs(tokenizer, ids, mask):
    """The texts of the tokens that stand together in a mask."""
    texts, before = [], False
    for i, now in zip(ids, mask, strict=True):
        if now:
            texts = texts if before else [*texts, []]
            texts[-1].append(i)
        before = now
    return [tokenizer.rust.decode(text, skip_special_tokens=False) for text in texts]


# What a twin learns of the prompt for generation, which the model never writes: at each turn, by hand
PROMPT = {
    "deepseek_r1_distill": "<｜Assistant｜>", "deepseekv3": "<｜Assistant｜>", "gptoss": "<|start|>assistant", "muse_glimmer": "<|start|>assistant",
    "nemotron_3_5_lightning": "<think>", "nemotron_3_nano": "<think>", "nemotron_3_super": "<think>", "nemotron_3_ultra": "<think>",
    "qwen2_5": "\n", "qwen3_5_nothink": "<think>\n\n</think>\n\n", "qwen3_5_think": "<think>\n", "qwen3_6": "<think>\n", "qwen3_8": "<think>\n",
}  # fmt: skip
# Masks by hand: of templates without a twin, and where the twin writes another text
BY_HAND = {
    **{(name, chat): ["It is 2.<turn|>\n", "More.<turn|>\n"] for name in NAMES if name.startswith("gemma4") for chat in CHATS},
    **{(name, chat): ["It is 2.<|eot_id|>", "More.<|eot_id|>"] for name in ("llama3_1", "llama3_2") for chat in CHATS},
    **{("glm4moe", chat): ["\n<think></think>\nIt is 2.<|user|>", "\n<think></think>\nMore.<|user|>"] for chat in CHATS},
    ("qwen3", "multi-turn"): ["It is 2.<|im_end|>\n", "<think>\n\n</think>\n\nMore.<|im_end|>\n"],
    ("qwen3_5_nothink", "multi-turn"): ["It is 2.<|im_end|>\n", "More.<|im_end|>\n"],
    **{(name, "multi-turn"): ["It is 2.<|im_end|>\n", "\n</think>\n\nMore.<|im_end|>\n"] for name in ("qwen3_5_think", "qwen3_6")},
}
# A row per turn: chats whose earlier thoughts the template leaves out
PER_TURN = {"diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
            "qwen3", "qwen3_5_think", "qwen3_6"}  # fmt: skip
PARTS = dict.fromkeys(("idefics3", "smolvlm"), "leaves out or changes") | {"llava_next": "has no attribute 'text'"}  # they want contents in parts
THOUGHT_LEFT_OUT = "leaves out or changes reasoning_content of message 2"
REFUSED = {
    **{(name, chat): why for name, why in PARTS.items() for chat in CHATS},
    **{(name, "thinking"): THOUGHT_LEFT_OUT for name in NAMES if re.match("cohere|gemma|lfm2|llama3|phi3|qwen2|qwen3_vl|qwen3_instruct", name) and name not in PER_TURN | MARKED},
    ("gemma", "system"): "line 1 .*System role not supported",
    ("deepseek_r1_distill", "thinking"): "prompt .*<think>", ("deepseekv3", "thinking"): "prompt .*<think>",
    ("qwen3_5_nothink", "thinking"): r"line 147 \({%- if add_generation_prompt %}\): message 2 does not begin with the prompt",
}  # fmt: skip


def outcome(ours, theirs, name, chat):
    """Holds one chat's rows against the oracle; how it went."""
    text, messages = SHIPPED[name], CHATS[chat]
    template = ChatTemplate(text, name, ours, DATE)
    if reason := REFUSED.get((name, chat)):
        with pytest.raises(UserError, match=reason):
            template.learned(messages)
        return "refused"
    for prompt in (False, True):
        assert template.ids(messages, prompt) == their_ids(theirs, text, messages, prompt)
    rows = template.learned(messages)
    if name in PER_TURN and chat == "thinking":
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        assert [row.how for row in rows] == ["turns"] * len(answers)
        for row, n in zip(rows, answers):
            before, whole = their_ids(theirs, text, messages[:n], True), their_ids(theirs, text, messages[: n + 1])
            whole += template.ends() if name == "glm4moe" else []
            assert whole[: len(before)] == before and row.ids == whole and row.learn == [k >= len(before) for k in range(len(whole))]
        return "a row per turn"
    (row,) = rows
    assert row.how == ("marks" if name in MARKED else "sentinels")
    if wanted := BY_HAND.get((name, chat)):
        more = template.ends() if name == "glm4moe" else []  # as its twin has it
        assert not more or (row.ids, row.learn) == their_mask(theirs, TWINS[name], messages)
        assert row.ids == their_ids(theirs, text, messages) + more and runs(ours, row.ids, row.learn) == wanted[: len(messages) // 2]
        return "by hand"
    ids, mask = their_mask(theirs, TWINS.get(name, text), messages)
    assert row.ids == ids and any(mask)
    if name not in PROMPT:
        assert row.learn == mask
        return "equal"
    assert not any(a and not b for a, b in zip(row.learn, mask))
    assert runs(ours, ids, [b and not a for a, b in zip(row.learn, mask)]) == [PROMPT[name]] * (len(messages) // 2)
    return "equal but for the prompt"


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_shipped_templates(ours, theirs, name):
    for chat in CHATS:
        outcome(ours, theirs, name, chat)


def test_it_is_trl_1_16():
    assert importlib.metadata.version("trl").startswith("1.16.") and len(NAMES) == 41 and len(TWINS) == 31


WORDS = st.text(st.sampled_from("ab .,\n\t<|>é日🙂\u00a0\u0301\ue000\ue001") | st.characters(exclude_categories=["Cs"]), max_size=12)
CHAT = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3).map(lambda pairs: [m for a, b in pairs for m in (user(a), answer(b))])


@settings(max_examples=40)
@given(CHAT)
@example([user(""), answer("")])
@example([user("\ue000"), answer(" a <|im_end|> b\n")])
@example([user("".join(map(chr, range(0xE000, 0xE200)))), answer("b")])
def test_any_chat_in_chatml(ours, theirs, chat):
    text = (Path(chat_template.__file__).parent / "templates" / "chatml.jinja").read_text()
    template = of_tokenizer(ours, "chatml", DATE)
    for prompt in (False, True):
        assert template.ids(chat, prompt) == their_ids(theirs, text, chat, prompt)
    ids, mask = their_mask(theirs, TWINS["lfm2"].replace("{{- bos_token -}}", ""), chat)
    (row,) = template.learned(chat)
    assert row.how == "sentinels" and (row.ids, row.learn) == (ids, mask)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "phi3", "qwen3_instruct_2507"])
def test_any_answer(ours, theirs, name):
    """Sentinels give what a twin's marks give whatever the answer is, also where the template trims it."""

    @settings(max_examples=25)
    @given(CHAT)
    @example([user(" a "), answer("\n b  ")])
    def hold(chat):
        for template, how in (plain, "sentinels"), (twin, "marks"):
            (row,) = template.learned(chat)
            assert row.how == how and (row.ids, row.learn) == their_mask(theirs, TWINS[name], chat)

    plain, twin = ChatTemplate(SHIPPED[name], name, ours, DATE), ChatTemplate(TWINS[name], name, ours, DATE)
    hold()


@pytest.mark.parametrize(("name", "published"), [("llama3", "llama3"), ("qwen3", "qwen3"), ("gemma", "gemma3")])
def test_our_templates_render_the_published_ones(ours, theirs, name, published):
    odd = [user(" a \n"), answer("\n b "), user("c"), answer("<think>\nd\n</think>\n\ne"), user("f")]
    template = of_tokenizer(ours, name, DATE)
    for chat in (*CHATS.values(), odd, odd[:-1], odd[:-1] + [answer("g", "h\n")] * (name == "qwen3")):
        for prompt in (False, True):
            assert template.ids(chat, prompt) == their_ids(theirs, SHIPPED[published], chat, prompt)
    assert template.digest != ChatTemplate(SHIPPED[published], name, ours).digest and len(template.digest) == 64


def test_only_the_last_turn(ours):
    for name, how, wanted in (("lfm2_2_5", "marks", "More.<|im_end|>\n"), ("llama3", "sentinels", "More.<|eot_id|>"), ("phi3_training", "marks", "More.<|end|>\n</s>")):
        (row,) = ChatTemplate(SHIPPED[name], name, ours).learned(CHATS["multi-turn"], last=True)
        assert row.how == how and runs(ours, row.ids, row.learn) == [wanted]
    rows = of_tokenizer(ours, "qwen3", DATE).learned(CHATS["thinking"], last=True)
    assert [runs(ours, row.ids, row.learn) for row in rows] == [["<think>\nTwo and one.\n</think>\n\nMore.<|im_end|>\n"]] and rows[0].how == "turns"
    (row,) = of_tokenizer(ours, "chatml", DATE).learned([*CHATS["multi-turn"], user("Why?")], last=True)
    assert runs(ours, row.ids, row.learn) == ["More.<|im_end|>\n"]


def test_ends(ours):
    wanted = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "qwen3": "<|im_end|>", "gemma": "<end_of_turn>"}
    assert {name: ours.token(*of_tokenizer(ours, name, DATE).ends()) for name in TEMPLATES} == wanted
    shipped = {"glm4moe": "<|user|>", "gptoss": "<|return|>", "deepseekv3": "<｜end▁of▁sentence｜>", "phi3": "<|end|>"}
    assert {name: ours.token(*ChatTemplate(SHIPPED[name], name, ours).ends()) for name in shipped} == shipped
    bare = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "bare", ours)
    assert bare.ends() == []
    (row,) = bare.learned(CHATS["multi-turn"])
    assert runs(ours, row.ids, row.learn) == ["assistant: It is 2.\n", "assistant: More.\n"]  # it has no prompt for an answer


FORM = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"


def test_templates_that_change_contents(ours, theirs):
    def rows(written, chat, form=FORM):
        return ChatTemplate(form % written, "own", ours).learned(chat)

    assert [row.how for row in rows("m.content + m.content", CHATS["multi-turn"])] == ["turns", "turns"]
    (row,) = rows("m.content | upper", CHATS["plain"])
    assert row.how == "sentinels" and runs(ours, row.ids, row.learn) == ["IT IS 2.<|im_end|>"]
    for change in ("m.content[:3]", "'' if m.role == 'assistant' else m.content"):
        with pytest.raises(UserError, match=r"^own, line 2 \(.*\): it leaves out or changes content of message 2\.$"):
            rows(change, CHATS["plain"])
    with pytest.raises(UserError, match=r"^own, line 1 \(.*\): message 2 does not begin with the prompt"):  # the space and the word are one token
        rows("m.content + m.content", CHATS["plain"], FORM.replace("\n", " "))
    (row,) = rows("m.content | trim", [user("a"), answer("  b \n")])
    assert row.how == "sentinels" and runs(ours, row.ids, row.learn) == ["b<|im_end|>"]
    spaced, marked = FORM.replace("\n", " "), "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    (row,) = rows("m.content", CHATS["plain"], spaced)  # the same token belongs to the answer, as in transformers
    twin = (spaced % "m.content").replace("{{ m.content }}<|im_end|>", "{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% else %}" + marked + "{% endif %}")
    assert row.how == "sentinels" and (row.ids, row.learn) == their_mask(theirs, twin, CHATS["plain"]) and runs(ours, row.ids, row.learn) == [" It is 2.<|im_end|>"]
    with pytest.raises(UserError, match=r"own, line 2 .*message 2 does not begin with the prompt"):  # it writes what comes before anew
        rows("m.content", CHATS["plain"], "{{ messages | length }}" + FORM)
    once = "{% if messages | length > 2 %}{{ raise_exception('one answer') }}{% endif %}" + FORM.replace("%%", "%").replace("%s", "m.content")
    (row,) = ChatTemplate(once, "own", ours).learned(CHATS["plain"])  # what ends an answer is not known
    assert row.how == "turns" and runs(ours, row.ids, row.learn) == ["It is 2.<|im_end|>"]
    content = "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
    (row,) = ChatTemplate((FORM % "m.content").replace("{{ m.content }}<|im_end|>", content), "own", ours).learned(CHATS["plain"][1:])
    assert row.how == "marks" and runs(ours, row.ids, row.learn) == ["It is 2.<|im_end|>"]  # what ends a turn is learned, marked or not
    (row,) = rows("m.content", [answer("b"), user("a")])
    assert runs(ours, row.ids, row.learn) == ["b<|im_end|>"]
    with pytest.raises(UserError, match="nothing to learn"):
        rows("m.content", [user("a")])
    with pytest.raises(UserError, match="nothing to learn"):
        rows("", [answer("")], "{%% for m in messages %%}{{ m.content }}%s{%% endfor %%}")
    for body in ("{% generation %}{% endgeneration %}", "{% generation %}{% generation %}b{% endgeneration %}{% endgeneration %}", "{% if x %}{% generation %}b{% endgeneration %}{% endif %}"):
        with pytest.raises(UserError, match=r"^own, line 2 \(.*generation"):
            ChatTemplate("{{ messages[0].content }}\n" + body, "own", ours).learned(CHATS["plain"])


LOOP, GROW = "{{% for i in range(99999) %}}{}{{% endfor %}}", "{{% set ns = namespace(x='ab' * 99) %}}{{% for i in range(99) %}}{{% set ns.x = {} %}}{{% endfor %}}"


@pytest.mark.parametrize("text", [
    LOOP.format(LOOP.format(LOOP.format(""))), "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    GROW.format("ns.x + ns.x"), GROW.format("ns.x ~ ns.x"), GROW.format("ns.x * 2"), GROW.format("'%s%s' % (ns.x, ns.x)"), GROW.format("ns.x.replace('a', ns.x)"), GROW.format("ns.x | replace('a', ns.x)"),
    GROW.format("[ns.x, ns.x] | join"), GROW.format("'{0}{0}'.format(ns.x)"), GROW.format("[ns.x, ns.x]") + "{{ ns.x }}", GROW.format("[ns.x, ns.x]") + "{{ ns.x | tojson }}", GROW.format("ns.x | length ** 9"),
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}", "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' * 10**9 }}", "{{ 'a' | center(10**9) }}", "{{ 'a'.center(999999999) }}", "{{ 'a' | indent(999999999, true) }}", "{{ '%999999999d' % 1 }}", "{{ '%*d' % (999999999, 1) }}", "{{ '%999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}", "{{ ['a'] | batch(999999999, 'b') | list }}", "{{ 9 ** 9 ** 9 }}", "{{ lipsum(999999999) }}", "{{ messages | tojson(indent=999999999) }}", "{{ ([['a' * 99999] * 99999]) | string }}",
    LOOP.format("x" * 999), LOOP.format("{{ 'x' * 999 }}"), "{{ " + "(" * 9999 + ")" * 9999 + " }}", "a" * 2_000_000, "{{ ''.__class__.__mro__ }}", "{% for i in x %}", "{{ raise_exception('no') }}", "{{ x.y }}", "{{ 1 / 0 }}",
    "{{ messages.append(1) }}", "{{ 1 | nothing }}", "{% include 'x' %}", "{{ messages[0].update({}) }}",
])  # fmt: skip
def test_every_template_comes_to_an_end(ours, monkeypatch, text):
    monkeypatch.setattr(limits, "RENDERING", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"^own(, line 1 \(|:)") as error:
        ChatTemplate(text, "own", ours).render(CHATS["plain"])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize("name", ["gemma4_v5", "gptoss", "llama3_1", "qwen3", "qwen3_8"])
def test_long_chats(ours, theirs, name):
    """Far from the limits: hundreds of turns, a million characters, what looks like a format."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(SHIPPED[name], name, ours, DATE)
    for chat in ([user("ab " * 99), answer("{'year': 2026, '%9999d': 1}")] * (60 if name == "gemma4_v5" else 300), [user("a"), answer("b" * 1_000_000)]):
        assert template.render(chat) == render_jinja_template([chat], chat_template=SHIPPED[name], **theirs.special_tokens_map)[0][0]
        assert template._sandbox.left > 0.5 * limits.BUILT


def test_what_it_says_of_a_template(ours, monkeypatch):
    for text, why in (("a\n{{ b.c }}", r"line 2 \(.*\): 'b' is undefined"), ("\n\n{% if %}", "line 3 .*: Expected an expression"), ("{% if a %}\n", "line 1 .*: Unexpected end of template.*'if'\\.$"), ("{{ raise_exception('so ' ~ 1) }}", "line 1 .*: so 1"),
                      ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "line 1 .*: it calls itself too deeply")):  # fmt: skip
        with pytest.raises(UserError, match=f"^own, {why}"):
            ChatTemplate(text, "own", ours).render(CHATS["plain"])
    monkeypatch.setattr(limits, "RENDERED", 1000)
    with pytest.raises(UserError, match=r"^own: it writes 1,001 characters, more than 1,000\.$"):
        ChatTemplate("{{ 'a' * 1001 }}", "own", ours).render(CHATS["plain"])


def test_helpers_and_blocks_as_transformers_has_them(ours, theirs):
    text = """{%- macro said(m) -%}{% generation %}{{ m.content ~ eos_token }}{% endgeneration %}{%- endmacro -%}
    {% for m in messages if m.role != "system" %}
        {% if loop.index > 9 %}{% break %}{% endif %}
        {{ said(m) if m.role == "assistant" else m | tojson }}{{ m | tojson(indent=2, sort_keys=true) }}
        {{ strftime_now("%A %d %B %Y, %H:%M") }} {{ m.thought }} {{ dict(a=1).a }} {{ "%s-%d" % (m.role, 3) }}
    {% endfor %}
    {% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ tools is none }}{{ messages | map(attribute="role") | join(", ") }}"""
    chat = [user("Grüße, \"日本\" <b>"), answer("ja 🙂")]
    template = ChatTemplate(text, "own", ours, DATE)
    assert template.ids(chat) == their_ids(theirs, text, chat)
    (row,) = template.learned(chat)
    assert row.how == "marks" and runs(ours, row.ids, row.learn) == ["ja 🙂</s>"]


def test_whose_template(ours, theirs):
    published = train_bpe(["a b c " * 20], 300, specials=["<|im_start|>"])
    with pytest.raises(UserError, match=r"no chat template. Put its chat_template.jinja .*chatml, gemma, llama3 or qwen3"):
        of_tokenizer(published, None, DATE)
    with pytest.raises(UserError, match=r"task.template=chatml writes <\|im_end\|>: no special tokens"):
        of_tokenizer(published, "chatml", DATE)
    with pytest.raises(UserError, match=r"writes <start_of_turn>, <end_of_turn>: no special"):
        of_tokenizer(ByteTokenizer(["<start_of_turn>", "<end_of_turn>"]), "gemma", DATE)  # there, but not read in a text
    with pytest.raises(UserError, match=r"task.template='mistral': not known. Use chatml"):
        of_tokenizer(ours, "mistral", DATE)
    published.beside = {TEMPLATE: "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}{{ pad_token }}{{ cls_token }}"}
    assert of_tokenizer(published, None, DATE).render([user("a")]) == "<s>04 Jul 2026a<pad><s>"
    for name in TEMPLATES:
        made = train_bpe(["a b c " * 20], 300, specials=special_tokens(name))
        template = of_tokenizer(made, name, DATE)
        assert {made.token(i) for i in template.ids([user("a"), answer("b")])} >= {*special_tokens(name)} and len(template.ends()) == 1


def test_a_tokenizer_that_does_not_tell_where_tokens_stand(shared_data, tmp_path):
    """SentencePiece's: a row per turn."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def ids(chat):
        return ours.encode(render_jinja_template([chat], chat_template=text, bos_token="<s>", eos_token="</s>")[0][0])

    shutil.copy(shared_data / "tokenizers/llama2/tokenizer.model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ours = load(tmp_path)
    ours.beside = {TEMPLATE: text}
    template, chat = of_tokenizer(ours, None, DATE), CHATS["multi-turn"]
    rows = template.learned(chat)
    assert [ours.token(i) for i in template.ends()] == ["</s>"] and [row.how for row in rows] == ["turns", "turns"]
    for n, row in zip((1, 3), rows):
        before, whole = ids(chat[:n]), ids(chat[: n + 1])
        assert row.ids == whole and row.learn == [k >= len(before) for k in range(len(whole))] and before == whole[: len(before)]
        assert ours.decode(whole[len(before) :]) == chat[n]["content"] and whole[-1] == ours.eos_id
    ours.beside = {TEMPLATE: text.replace("{{ m.content }}{{ eos_token }}", "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}")}
    with pytest.raises(UserError, match=r"generation blocks need a tokenizer.json"):
        of_tokenizer(ours, None, DATE).learned(chat)
