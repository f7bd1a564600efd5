"""From a recipe's data and tokenizer sections to opened data sets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradus import limits, models
from gradus.data.chats import ChatsDataset, Packed, texts
from gradus.data.corpus import Corpus, TokenFile, cached_bpe
from gradus.data.readers import Readable
from gradus.data.splits import find_pairs, find_splits, hold_out, limited, print_left_out
from gradus.data.text import DocumentsDataset, LabelledDataset, LMDataset, PairsDataset, has_labels
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import TEMPLATE, ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from gradus.errors import DataError, UserError
from gradus.models.decoding import end_ids
from gradus.recipe.schema import Recipe
from gradus.tasks import GENERATION, beside
from gradus.tasks.made import Unopened
from gradus.text import say

if TYPE_CHECKING:
    from gradus.data.chat_template import ChatTemplate

Tokenizers = dict[str, Tokenizer]  # by place below a checkpoint: "" and, for a second language, "target"


def make_tokenizer(recipe: Recipe, texts: Callable[[], Sequence[Corpus]]) -> Tokenizer:
    """The tokenizer of the recipe: read from a file, or made from `texts` and kept in the cache by their content."""
    config = recipe.tokenizer
    if config is None or (config.kind == "file" and config.path is None):
        place = models.locate(recipe.model.init)
        return load(place if place.is_dir() else place.parent)
    if config.kind == "file":
        return load(config.path)
    if config.kind == "byte":
        return ByteTokenizer()
    corpora = texts()
    if config.kind == "char":
        return CharTokenizer.from_texts(itertools.chain.from_iterable(corpora))
    if config.kind == "word":
        return WordTokenizer.from_texts(itertools.chain.from_iterable(corpora), config.lowercase)
    specials = [f"<extra_id_{i}>" for i in range(100)] if recipe.task.name == "span_corruption" else []
    if recipe.data.kind == "chats":
        from gradus.data.chat_template import special_tokens

        specials = special_tokens(recipe.task.template)
    return cached_bpe(corpora, config.vocab_size, config.lowercase, specials, recipe.data.cache)


def needs_path(recipe: Recipe) -> str:
    if recipe.data.path is None:
        raise DataError(f"data.path: not given. Set data.path=FILE_OR_FOLDER (or hf:NAME) for {recipe.name}.")
    return recipe.data.path


def _files(recipe: Recipe) -> dict[str, Readable]:
    """The file of each split that the data have. Raises UserError where there is no training split."""
    return find_splits(needs_path(recipe), recipe.data)


def running_text(recipe: Recipe, documents: bool) -> dict[str, Corpus]:
    """The corpora of a language model: files by split, or the end of one text held out for validation."""
    data = recipe.data
    if data.source == "stdlib":
        corpora = {"train": Corpus.stdlib()}
    else:
        corpora = {split: Corpus.open(file, data.text, documents) for split, file in _files(recipe).items()}
    if "valid" not in corpora:
        corpora["train"], corpora["valid"] = corpora["train"].split(data.valid_fraction)
    return corpora


def in_documents(recipe: Recipe) -> bool:
    """Whether a language model's texts have the special tokens that the tokenizer's files put around a text: documents
    do, and so does all that continues from published weights."""
    whole = recipe.data.kind != "text" or recipe.data.source == "stdlib" or recipe.data.pack == "documents"
    return whole or recipe.model.init is not None


def open_running_text(
    recipe: Recipe, saved: Tokenizers | None, seq_len: int
) -> tuple[Tokenizers, dict[str, Any], dict[str, dict[str, int]]]:
    """Return (tokenizers, splits of windows, sizes of the evaluated texts) for next-token prediction. saved: tokenizers
    of a checkpoint, used in place of new ones."""
    data = recipe.data
    if isinstance(saved, Unopened):
        ones = np.ones(seq_len + 1, np.int64)
        more = {"segments": ones, "positions": np.arange(seq_len + 1)} if data.pack == "documents" else {}
        return saved, saved.splits(lambda i: {"ids": saved.words(i, seq_len + 1), **more}), {}
    corpora = running_text(recipe, documents=data.pack == "documents")
    # a character table must know every character of the text, as in char-rnn; a BPE is trained on the training text
    seen = list(corpora) if recipe.tokenizer is not None and recipe.tokenizer.kind == "char" else ["train"]
    tokenizers = saved or {"": make_tokenizer(recipe, lambda: [corpora[s] for s in seen])}
    splits, sizes = {}, {}
    for split, corpus in corpora.items():
        end = corpus.separate and tokenizers[""].eos_id is not None
        begin = tokenizers[""].before if corpus.separate and in_documents(recipe) else ()
        tokens = TokenFile.of(corpus, tokenizers[""], end, data.cache, begin=begin)
        splits[split] = LMDataset(tokens, seq_len, recipe.train.seed, data.pack, shuffle_phase=split == "train")
        if split != "train" and not (split == "valid" and data.limit_valid):
            about, targets = tokens.about, splits[split].n_targets
            words = about["n_words"] + about["n_lines"]
            sizes[split] = {"bytes": about["n_bytes"], "words": words, "targets": targets}
    return tokenizers, limited(splits, data), sizes


def open_chats(
    recipe: Recipe, saved: Tokenizers | None, longest: int
) -> tuple[Tokenizers, dict[str, Any], ChatTemplate | None]:
    """Return (tokenizers, splits of chats of at most `longest` tokens, the template; None: of made samples without
    one). The template and the tokens that end an answer are kept beside the tokenizer. Without a valid split every
    tenth chat is held out."""
    from gradus.data import chat_template

    data, task = recipe.data, recipe.task
    if isinstance(saved, Unopened):
        every = {"learn": np.ones(longest, bool)}
        if data.pack == "documents":
            every |= {"segments": np.ones(longest, np.int64), "positions": np.arange(longest)}
        own = TEMPLATE in saved[""].beside
        template = chat_template.of_tokenizer(saved[""], None, task.date) if own else None
        return saved, saved.splits(lambda i: {"ids": saved.words(i, longest), **every}), template
    files = _files(recipe)
    tokenizers = saved or {"": make_tokenizer(recipe, lambda: [texts(files["train"], data.form)])}
    template = chat_template.of_tokenizer(tokenizers[""], task.template, task.date)
    _keep_beside(tokenizers[""], template, recipe)
    options = {"last": task.learn == "last", "system": task.system, "form": data.form, "weight": data.weight}
    chats = {split: ChatsDataset(file, template, longest, cache=data.cache, **options) for split, file in files.items()}
    splits: dict[str, Any] = dict(chats)
    if "valid" not in splits:
        splits["train"], splits["valid"] = chats["train"].every(10)
    if data.pack == "documents":
        splits["train"] = Packed(splits["train"], longest)
    return tokenizers, limited(splits, data), template


def _keep_beside(tokenizer: Tokenizer, template: ChatTemplate, recipe: Recipe) -> None:
    """Keep the template and what ends an answer with the tokenizer, as each checkpoint and export has them."""
    there, init = dict(tokenizer.beside), recipe.model.init
    if init is not None and GENERATION not in there and (place := models.locate(init)).is_dir():
        there = beside(place) | there
    asked = json.loads(there.get(GENERATION, "{}"))
    ends = [*template.ends(), *end_ids(asked.get("eos_token_id", tokenizer.eos_id))]
    asked["eos_token_id"] = list(dict.fromkeys(ends))
    tokenizer.beside = {**there, TEMPLATE: template.text, GENERATION: json.dumps(asked, indent=2) + "\n"}


def open_documents(recipe: Recipe, saved: Tokenizers | None, room: int) -> tuple[Tokenizers, dict[str, Any]]:
    """Return (tokenizers, splits of rows of at most `room` tokens) for masked language models and span corruption."""
    if isinstance(saved, Unopened):
        return saved, saved.splits(lambda i: {"ids": saved.words(i, room)})
    data, corpora = recipe.data, running_text(recipe, documents=True)
    tokenizers = saved or {"": make_tokenizer(recipe, lambda: [corpora["train"]])}
    tokens = {split: TokenFile.of(corpus, tokenizers[""], cache=data.cache) for split, corpus in corpora.items()}
    splits = {split: DocumentsDataset(t, room, across=data.pack == "stream") for split, t in tokens.items()}
    return tokenizers, limited(splits, data)


def open_labelled(recipe: Recipe, saved: Tokenizers | None, room: int) -> tuple[Tokenizers, dict[str, Any], list[str]]:
    """Return (tokenizers, splits, class names) of labelled texts. Without a valid split the test split serves as one,
    and a note says so; without both, a fixed tenth of the training rows of every class. A split without any label is
    not used."""
    if isinstance(saved, Unopened):
        return saved, *saved.labelled(lambda i: {"ids": saved.words(i, room)})
    data, files = recipe.data, _files(recipe)
    asked = {"valid": data.valid, "test": recipe.evaluate.test or data.test}
    if "valid" in files and not asked["test"]:
        files.pop("test", None)
    for split in [s for s in ("valid", "test") if s in files and not has_labels(files[s], data.label)]:
        what = f"{files.pop(split)}: no row has a label"
        if asked[split]:
            raise UserError(f"{what}: nothing to evaluate. Leave out data.{split} or evaluate.test (--split test).")
        rest = "" if {"valid", "test"} & files.keys() else " A tenth of the training rows is held out."
        say(f"note: {what}, so it is not used as the {split} split.{rest}")
    if "valid" not in files and "test" in files:
        say(f"note: {data.path} has no valid split: test is evaluated instead. Do not tune on it.")
        files["valid"] = files.pop("test")
    print_left_out(data.path)
    corpus = Corpus.column(files["train"], data.text, limits.FIELD)
    tokenizers = saved or {"": make_tokenizer(recipe, lambda: [corpus])}
    options = {"columns": (data.text, data.label), "n_classes": recipe.model.n_classes, "cache": data.cache}
    train = LabelledDataset(files["train"], tokenizers[""], room, names=recipe.task.classes, **options)
    splits: dict[str, Any] = {"train": train}
    for split in ("valid", "test"):
        if split in files:
            splits[split] = LabelledDataset(files[split], tokenizers[""], room, like=train, **options)
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(train)
    return tokenizers, limited(splits, data), train.classes


def open_pairs(
    recipe: Recipe, saved: Tokenizers | None, room: int
) -> tuple[Tokenizers, dict[str, Any], dict[str, tuple[Corpus, Corpus]]]:
    """Return (tokenizers, splits, the raw corpora by split) of parallel text. Without a valid split, every tenth
    training pair is held out."""
    if isinstance(saved, Unopened):
        splits = saved.splits(lambda i: {"source": saved.words(i, room + 1), "target": saved.words(i + 1, room)})
        return saved, splits, {}
    data, path = recipe.data, needs_path(recipe)
    corpora = {}
    for split in ("train", "valid", "test"):
        required = split == "train" or (split == "test" and recipe.evaluate.test)
        pair = find_pairs(path, split, data.source, data.target, getattr(data, split), required)
        if pair is not None:
            corpora[split] = pair
    if "valid" not in corpora:
        corpora["train"], corpora["valid"] = zip(*(side.every(10) for side in corpora["train"]))
    shared = recipe.tokenizer is None or recipe.tokenizer.shared
    if recipe.tokenizer is not None and recipe.tokenizer.kind == "file" and not recipe.tokenizer.shared:
        raise UserError("tokenizer.shared=false has no effect with tokenizer.kind=file, one file for both languages.")
    sides = {"": corpora["train"]} if shared else {"": corpora["train"][:1], "target": corpora["train"][1:]}
    tokenizers = saved or {place: make_tokenizer(recipe, lambda of=of: list(of)) for place, of in sides.items()}
    source, target = tokenizers[""], tokenizers.get("target", tokenizers[""])
    splits = {split: PairsDataset(*pair, source, target, room, data.cache) for split, pair in corpora.items()}
    return tokenizers, limited(splits, data), corpora
