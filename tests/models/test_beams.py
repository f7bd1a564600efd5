"""Beam search: the tokens that transformers' generate(num_beams) gives, and what holds of any beam search."""

from __future__ import annotations

import pytest
import torch

from gradus import models
from gradus.errors import UserError
from gradus.models.decoding import beam_search, complete
from gradus.models.weights import to_hf
from gradus.recipe.schema import GPTConfig, Seq2SeqConfig, T5Config

VOCAB, EOS = 29, 1
T5 = T5Config(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, d_head=8, d_ff=64, n_buckets=8, max_distance=12, seq_len=24)
SOURCES = [[3, 2, 3, 8], [4, 6, 2, 6, 4, 3, 3], [8]]


def wild(config, seed, by=0.5):
    torch.manual_seed(seed)
    model = models.build(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=by)
    return model


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_t5_is_hugging_faces(beams, seed):
    transformers = pytest.importorskip("transformers")
    ours = wild(T5, seed, 0.3)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    theirs.tie_weights()
    together = beam_search(ours, [[0]] * 3, sources=SOURCES, beams=beams, max_new=12, eos_id=EOS)
    for i, source in enumerate(SOURCES):
        ids = torch.tensor([source])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, num_beams=beams, do_sample=False)[0, 1:].tolist()
        assert together[i] == (out[: out.index(EOS)] if EOS in out else out)


def test_gpt_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    ours = wild(GPTConfig(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, seq_len=24), 5, 0.3)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_layer=2, n_embd=32, n_head=4, n_positions=24, bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    theirs.tie_weights()
    prompt = [3, 1, 4, 1, 5]
    ids = torch.tensor([prompt])
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, num_beams=4, do_sample=False)[0, 5:].tolist()
    assert beam_search(ours, [prompt], beams=4, max_new=12, eos_id=EOS) == [out[: out.index(EOS)] if EOS in out else out]


def test_several_end_tokens_are_hugging_faces():
    transformers = pytest.importorskip("transformers")
    ours, prompt = wild(GPTConfig(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, seq_len=24), 5, 0.3), [3, 1, 4, 1, 5]
    ends = complete(ours, [prompt], max_new=12)[0][8:3:-2]
    config = transformers.GPT2Config(vocab_size=VOCAB, n_layer=2, n_embd=32, n_head=4, n_positions=24, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    theirs.tie_weights()
    ids, different = torch.tensor([prompt]), False
    for beams in (1, 3):
        how = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False, "eos_token_id": ends}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, 5:].tolist()
        found = beam_search(ours, [prompt], beams=beams, max_new=12, eos_id=ends)[0] if beams > 1 else complete(ours, [prompt], max_new=12, eos_id=ends)[0]
        assert found == next((out[:i] for i, token in enumerate(out) if token in ends), out)
        different |= len(found) < 12
    assert different, "a search that no end token ends proves nothing"


def test_a_limit_of_each_row_is_that_of_the_row_alone():
    model, limits = wild(T5, 1, 0.3), [3, 9, 5]
    together = beam_search(model, [[0]] * 3, sources=SOURCES, beams=3, max_new=limits, eos_id=EOS)
    for source, most, found in zip(SOURCES, limits, together):
        assert found == beam_search(model, [[0]], sources=[source], beams=3, max_new=most, eos_id=EOS)[0] and len(found) <= most


def likelihood(model, source, text):
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([[0, *text]]))[0].log_softmax(-1)
    return float(logits[torch.arange(len(text)), torch.tensor(text)].sum())


def test_as_many_beams_as_there_are_texts_find_the_likeliest():
    """Three tokens of a vocabulary of five: 125 texts, all of which are scored."""
    model = wild(Seq2SeqConfig(vocab_size=5, n_layers=1, d_model=16, n_heads=2, d_ff=16, seq_len=8), 3)
    source = [3, 1, 4]
    every = [[a, b, c] for a in range(5) for b in range(5) for c in range(5)]
    best = max(every, key=lambda text: likelihood(model, source, text))
    assert beam_search(model, [[0]], sources=[source], beams=25, max_new=3) == [best]
    greedy = complete(model, [[0]], sources=[source], max_new=3)[0]
    two = beam_search(model, [[0]], sources=[source], beams=2, max_new=3)[0]
    assert likelihood(model, source, two) >= likelihood(model, source, greedy)


@pytest.mark.parametrize("seed", [3, 24])  # 24: where the end did not count, "1" and its end would win
def test_of_all_texts_the_likeliest_by_token_is_found_and_its_end_is_one_of_them(seed):
    """So many beams that none is left: each text of two tokens, and each that ends before, by the mean over all that were written."""
    model, source = wild(Seq2SeqConfig(vocab_size=5, n_layers=1, d_model=16, n_heads=2, d_ff=16, seq_len=8), seed), [3, 1, 4]
    others = [token for token in range(5) if token != EOS]
    written = [[EOS], *([a, b] for a in others for b in range(5))]
    best = max(written, key=lambda text: likelihood(model, source, text) / len(text))
    assert beam_search(model, [[0]], sources=[source], beams=25, max_new=2, eos_id=EOS) == [[token for token in best if token != EOS]]


def test_one_beam_is_refused():
    with pytest.raises(UserError, match="at least 2"):
        beam_search(wild(T5, 0), [[0]], sources=[[2]], beams=1, max_new=3)
