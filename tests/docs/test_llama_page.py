"""docs/learn/13-from-text-to-llama.md on real files: its pieces are those of Llama 2's own tokenizer, its Llama computes what ours does from real weights."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from test_learn import FENCE, FOLDER

from gradus import models
from gradus.data import tokenizer_files
from gradus.models.decoding import complete

PAGE = FOLDER / "13-from-text-to-llama.md"
EXPERIMENT = FOLDER.parents[1] / "experiments/llama-in-metas-layout.py"


@pytest.fixture
def names_with(tmp_path, monkeypatch):
    """words -> the names that the page's Python leaves, run up to the block that has these words."""
    monkeypatch.chdir(tmp_path)  # where it draws

    def run(words: str) -> dict:
        names = {"__name__": "__main__"}
        for kind, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
            if kind == "python":
                exec(compile(text, PAGE.name, "exec"), names)
                if words in text:
                    return names
        raise AssertionError(f"no block of {PAGE.name} has {words!r}")

    return run


@pytest.mark.shared_data
def test_the_pieces_are_those_of_llamas_own_tokenizer(shared_data, names_with):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(str(shared_data / "tokenizers/llama2/tokenizer.model"))
    pieces = {theirs.id_to_piece(i): i for i in range(259, theirs.get_piece_size())}  # those before stand for bytes, <unk>, <s>, </s>
    names = names_with("llama_2 =")
    sentence, cut = "Eiffel Tower is in Paris", names["cut"]
    letters = "".join(names["steps"][-1])
    parts = {letters[i:j] for j in range(len(letters) + 1) for i in range(j - 1)}  # of two letters and more
    assert names["llama_2"] == {piece: i for piece, i in pieces.items() if piece in parts}
    assert names["steps"][-1] == theirs.encode(sentence, out_type=str) == ["▁E", "iff", "el", "▁Tower", "▁is", "▁in", "▁Paris"]
    assert [names["llama_2"][piece] for piece in names["steps"][-1]] == theirs.encode(sentence)
    assert all(theirs.get_score(i) == 259 - i for i in names["llama_2"].values()), "a number is no rank"
    assert theirs.get_piece_size() == 32_000 and theirs.bos_id() == 1
    assert [theirs.piece_to_id(f"<0x{i:02X}>") for i in range(256)] == list(range(3, 259))
    for text in ("The interesting life of the blue eyed child from a glass orb", "the kingdom had another ruler"):
        assert cut(text, pieces)[-1] == theirs.encode(text, out_type=str)


@pytest.mark.shared_data
def test_the_pages_llama_writes_what_ours_does_from_real_weights(shared_data, names_with, tmp_path):
    """stories260K in Meta's layout, as the page reads it, beside the package's Llama from its own file: 8 heads, 4 of keys."""
    spec = importlib.util.spec_from_file_location("llama_in_metas_layout", EXPERIMENT)
    spec.loader.exec_module(experiment := importlib.util.module_from_spec(spec))
    folder = shared_data / "stories260K"
    experiment.write_meta(folder / "stories260K.bin", folder / "tok512.bin", tmp_path)
    p, w = json.loads((tmp_path / "params.json").read_text()), torch.load(tmp_path / "consolidated.00.pth")
    llama, ours = names_with("def llama(")["llama"], models.load(folder / "stories260K.bin").eval()
    tokenizer = tokenizer_files.load(folder / "tok512.bin")
    for text in ("Once upon a time, there was", "The interesting life of the blue eyed child from a glass orb"):
        prompt = [tokenizer.bos_id, *tokenizer.encode(text)]
        ids = list(prompt)
        for _ in range(16):
            ids.append(int(llama(w, p, ids)[-1, -1].argmax()))
        assert ids[len(prompt) :] == complete(ours, [prompt], max_new=16)[0]
        with torch.no_grad():
            torch.testing.assert_close(llama(w, p, ids)[-1], ours(torch.tensor([ids]))[0], atol=1e-4, rtol=1e-4)
