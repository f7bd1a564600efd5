"""A translation's metrics are of the texts that were translated."""

from __future__ import annotations

import pytest

from gradus import recipe as recipes
from gradus import tasks
from gradus.data.tokenizers import ByteTokenizer

LINES = {
    split: [f"{split} line {i} has a word of its own: {'abcdefghij'[i % 10] * 4}{i}" for i in range(n)]
    for split, n in (("train", 20), ("val", 12))
}


def opened(tmp_path, *more: str):
    for split, lines in LINES.items():
        for language in ("de", "en"):
            text = "".join(f"{line} in {language}\n" for line in lines)
            (tmp_path / f"{split}.{language}").write_text(text)
    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "evaluate.test=false", "data.test=null"]
    words = [*small, f"data.path={tmp_path}", f"data.cache={tmp_path / 'cache'}", "tokenizer={kind: byte}", *more]
    return tasks.open_task(recipes.load("multi30k-seq2seq", words), {"": ByteTokenizer()})


@pytest.mark.parametrize("more", [[], ["data.limit_valid=5"]])
def test_a_translation_is_compared_with_its_own_line(tmp_path, more):
    task = opened(tmp_path, *more)
    data, tokenizer = task.splits["valid"], task.target_tokenizer
    right = {i: tokenizer.decode(data[i]["target"].tolist()) for i in range(len(data))}
    assert len(right) == (5 if more else 12)
    assert task.decoded_metrics(right, "valid")["bleu"] == pytest.approx(100)
    assert task.decoded_metrics({i: right[len(data) - 1 - i] for i in right}, "valid")["bleu"] < 90
