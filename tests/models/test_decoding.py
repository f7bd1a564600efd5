"""Decoding: the cache and the padding change nothing, the sampler draws what it says, Hugging Face decodes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradus import models
from gradus.errors import UserError
from gradus.models.decoding import complete, generate, greedy, pad_right, sampler
from gradus.models.weights import to_hf
from gradus.parallel.apply import use_kernel
from gradus.recipe.schema import GPTConfig, LlamaConfig, Seq2SeqConfig, T5Config

VOCAB = 29
CONFIGS = {
    "gpt": GPTConfig(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, seq_len=24),
    "llama": LlamaConfig(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, multiple_of=8, seq_len=24, qkv_bias=True),
    "seq2seq": Seq2SeqConfig(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, d_ff=64, tie_output=False, seq_len=24),
    "t5": T5Config(vocab_size=VOCAB, n_layers=2, d_model=32, n_heads=4, d_head=8, d_ff=64, n_buckets=8, max_distance=12, seq_len=24),
}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7]]
SOURCES = [[3, 2, 3, 8], [4, 6, 2, 6, 4, 3, 3], [8]]


def wild(config, seed: int = 29) -> nn.Module:
    """A model whose greedy text is no mere repetition, so that what it says depends on all that was read."""
    torch.manual_seed(seed)
    model = models.build(config).eval()
    with torch.no_grad():
        if config.family == "seq2seq":
            model.target_embedding.tokens.weight.mul_(3)
            return model
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.7 if config.family == "t5" else 0.3)
    return model


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family) -> nn.Module:
    return wild(CONFIGS[family])


def sources(family: str) -> dict:
    return {"sources": SOURCES} if family in ("seq2seq", "t5") else {}


def test_cache_changes_nothing(family, model):
    cached = complete(model, PROMPTS, max_new=14, **sources(family))
    assert cached == complete(model, PROMPTS, max_new=14, cache=False, **sources(family))
    assert [len(row) for row in cached] == [14] * 3
    assert len({token for row in cached for token in row}) > 3, "a model that says one thing proves nothing"


def test_a_ragged_batch_is_each_row_alone(family, model):
    together = complete(model, PROMPTS, max_new=12, **sources(family))
    for i, prompt in enumerate(PROMPTS):
        alone = {"sources": [SOURCES[i]]} if sources(family) else {}
        assert complete(model, [prompt], max_new=12, **alone)[0] == together[i]


def test_each_step_is_the_argmax_of_the_plain_forward_pass(family, model):
    new = complete(model, PROMPTS[:1], max_new=8, **({"sources": SOURCES[:1]} if sources(family) else {}))[0]
    row = torch.tensor([PROMPTS[0] + new])
    with torch.no_grad():
        logits = model(torch.tensor(SOURCES[:1]), row) if sources(family) else model(row)
    start = len(PROMPTS[0]) - 1
    assert logits[0, start : start + 8].argmax(-1).tolist() == new


def test_the_whole_length_of_the_model_can_be_used(family, model):
    config = CONFIGS[family]
    assert len(complete(model, [[1]], max_new=config.seq_len, **({"sources": [[2, 3]]} if sources(family) else {}))[0]) == config.seq_len
    if family in ("gpt", "seq2seq"):  # learned and sinusoidal positions end
        with pytest.raises(UserError, match="longer"):
            complete(model, [[1]], max_new=config.seq_len + 1, **({"sources": [[2, 3]]} if sources(family) else {}))


@pytest.mark.parametrize("cache", [True, False])
def test_end_token_stops_a_row_and_then_all(family, model, cache):
    free = complete(model, PROMPTS, max_new=12, cache=cache, **sources(family))
    eos = free[0][2]
    steps = torch.stack(list(generate(model, PROMPTS, max_new=12, eos_id=eos, cache=cache, **sources(family))), 1).tolist()
    ends = [row.index(eos) if eos in row else 12 for row in free]
    assert len(steps[0]) == min(12, max(ends) + 1), "goes on until the last row has ended, and no longer"
    for row, expected, end in zip(steps, free, ends):
        assert row[: end + 1] == expected[: end + 1]
        assert set(row[end + 1 :]) <= {eos}
    assert complete(model, PROMPTS, max_new=12, eos_id=eos, cache=cache, **sources(family)) == [row[:end] for row, end in zip(free, ends)]


def test_any_of_several_end_tokens_ends_a_row(family, model):
    free = complete(model, PROMPTS, max_new=12, **sources(family))
    unused = next(token for token in range(VOCAB) if not any(token in row for row in free))
    ends = [unused, free[0][2]]
    first = [next((i for i, token in enumerate(row) if token in ends), 12) for row in free]
    found = complete(model, PROMPTS, max_new=12, eos_id=ends, **sources(family))
    assert found == [row[:n] for row, n in zip(free, first)]


def test_a_limit_of_each_row_is_that_of_the_row_alone(family, model):
    free = complete(model, PROMPTS, max_new=12, **sources(family))
    assert complete(model, PROMPTS, max_new=[3, 12, 7], **sources(family)) == [free[0][:3], free[1], free[2][:7]]


def test_nothing_asked_nothing_given(family, model):
    assert complete(model, PROMPTS, max_new=0, **sources(family)) == [[], [], []]


def test_sampling_is_the_same_with_and_without_cache(family, model):
    def draw(cache):
        return complete(model, PROMPTS, max_new=10, choose=sampler(1.0, top_k=10, top_p=0.95, seed=5), cache=cache, **sources(family))

    assert draw(True) == draw(False)


# ---------------------------------------------------------------- the sampler

P = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
LOGITS = P.log()[[3, 0, 5, 1, 4, 2]]  # not in order
PLACE = [1, 3, 5, 0, 4, 2]  # where the likeliest, second ... stand


def frequencies(choose, n: int = 40_000) -> torch.Tensor:
    ids = choose(LOGITS.expand(n, -1))
    assert ids.shape == (n,)
    return torch.bincount(ids, minlength=6)[PLACE] / n  # in order of probability


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, P**2 / (P**2).sum()),
        ({"temperature": 2.0}, P.sqrt() / P.sqrt().sum()),
        ({"top_k": 2}, torch.tensor([0.40, 0.25, 0, 0, 0, 0]) / 0.65),
        ({"top_k": 1}, torch.tensor([1.0, 0, 0, 0, 0, 0])),
        ({"top_k": 100}, P),
        ({"top_p": 0.7}, torch.tensor([0.40, 0.25, 0.15, 0, 0, 0]) / 0.80),  # the fewest that hold 0.7
        ({"top_p": 0.3}, torch.tensor([1.0, 0, 0, 0, 0, 0])),
        ({"top_p": 1.0}, P),
        ({"top_k": 3, "top_p": 0.8}, torch.tensor([0.40, 0.25, 0, 0, 0, 0]) / 0.65),  # 0.5 + 0.3125 of what top_k left hold 0.8
        ({"temperature": 0.5, "top_p": 0.85}, torch.tensor([0.16, 0.0625, 0, 0, 0, 0]) / 0.2225),  # after the temperature: 0.61, 0.24, ...
    ],
)
def test_sampler_draws_the_distribution_it_says(settings, expected):
    found = frequencies(sampler(**settings, seed=3))
    assert (found[expected == 0] == 0).all()
    spread = (expected * (1 - expected) / 40_000).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread + 1e-9).all(), found


def test_same_seed_same_draws_another_seed_others():
    logits = torch.randn(200, 50)
    assert torch.equal(sampler(1.0, seed=7)(logits), sampler(1.0, seed=7)(logits))
    assert not torch.equal(sampler(1.0, seed=7)(logits), sampler(1.0, seed=8)(logits))
    state = torch.get_rng_state()
    sampler(1.0, seed=7)(logits)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


@pytest.mark.parametrize("settings", [{"temperature": 1e-40}, {"temperature": 5e-324}, {"top_p": 1e-300}])
def test_the_smallest_settings_leave_the_likeliest(settings):
    assert set(sampler(**settings, seed=3)(LOGITS.expand(50, -1)).tolist()) == {PLACE[0]}


def test_temperature_zero_is_greedy():
    logits = torch.randn(20, 50)
    assert torch.equal(sampler(0.0)(logits), logits.argmax(-1))
    assert sampler(0.0) is greedy


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 0.0, "top_p": 0.9}, "no effect"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, said):
    with pytest.raises(UserError, match=said):
        sampler(**settings)


def test_pad_right():
    ids, lengths = pad_right([[1, 2, 3], [4]], 0, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert lengths.tolist() == [3, 1]


# ---------------------------------------------------------------- Hugging Face's own generate


def test_gpt_greedy_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    ours = wild(CONFIGS["gpt"])
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_layer=2, n_embd=32, n_head=4, n_positions=24, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    missing = theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)[0, len(prompt) :].tolist()
        assert complete(ours, [prompt], max_new=14)[0] == expected


def test_t5_greedy_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    ours = wild(CONFIGS["t5"], seed=22)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    report = theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    assert not report.unexpected_keys
    theirs.tie_weights()
    together = complete(ours, [[0]] * 3, sources=SOURCES, max_new=14)
    assert len({t for row in together for t in row}) > 3
    for i, source in enumerate(SOURCES):
        ids = torch.tensor([source])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)[0, 1:].tolist()
        assert together[i] == expected


# ---------------------------------------------------------------- beyond the positions


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_sliding_window_reads_the_last_tokens_as_if_they_were_the_first(family, cache):
    """The oracle computes the last 24 tokens (all the positions that there are) from nothing for every token; prompts shorter and longer."""
    model, window = wild(CONFIGS[family]), 24
    prompts = [PROMPTS[0], PROMPTS[2] * 4, PROMPTS[1]]
    for kept in (prompts, prompts[:1]):
        expected = []
        for prompt in kept:
            row = list(prompt)
            with torch.no_grad():
                for _ in range(60):
                    row.append(int(model(torch.tensor([row[-window:]]))[0, -1].argmax()))
            expected.append(row[len(prompt) :])
        assert complete(model, kept, max_new=60, cache=cache, window=window) == expected
        assert all(len(set(row[30:])) > 3 for row in expected), "a model that says one thing proves nothing"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_window_changes_nothing_while_there_are_positions(family):
    model = wild(CONFIGS[family])
    assert complete(model, PROMPTS, max_new=14, window=24) == complete(model, PROMPTS, max_new=14)
    with pytest.raises(UserError, match="seq_len=24"):
        complete(model, PROMPTS, max_new=40)


def test_a_sliding_window_is_hugging_faces_model_on_the_last_tokens():
    transformers = pytest.importorskip("transformers")
    ours = wild(CONFIGS["gpt"])
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_layer=2, n_embd=32, n_head=4, n_positions=24)).eval()
    theirs.load_state_dict(dict(to_hf(ours)), strict=False)
    theirs.tie_weights()
    row = list(PROMPTS[0])
    with torch.no_grad():
        for _ in range(50):
            row.append(int(theirs(torch.tensor([row[-24:]])).logits[0, -1].argmax()))
    assert complete(ours, [PROMPTS[0]], max_new=50, window=24)[0] == row[len(PROMPTS[0]) :]


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize("how", ["autocast", "cast"])
@pytest.mark.parametrize("kernel", ["sdpa", "naive", "chunked"])
def test_half_precision_decodes_with_every_kernel(family, how, kernel):
    """Scores of half precision may swap near ties, so that it is the logits of the first steps that are compared."""
    model = models.build(CONFIGS[family]).eval()
    use_kernel(model, kernel, 4)
    seen: dict[str, list[torch.Tensor]] = {"full": [], "half": []}

    def watched(kind):
        def choose(logits):
            seen[kind].append(logits.float())
            return torch.full((len(logits),), 5)  # the same token whatever the scores, so that both read the same text

        return choose

    complete(model, PROMPTS, max_new=4, choose=watched("full"), **sources(family))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        complete(model.bfloat16() if how == "cast" else model, PROMPTS, max_new=4, choose=watched("half"), **sources(family))
    for full, half in zip(seen["full"], seen["half"], strict=True):
        assert (full - half).abs().max() < 0.05 * full.abs().max()
