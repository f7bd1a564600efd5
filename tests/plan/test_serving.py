"""The cache against the real one, byte by byte; the rule of thumb; bounds of time; a model split over a node; compute-optimal sizes."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gradus import cli, models
from gradus.errors import UserError
from gradus.hardware import cluster, find
from gradus.models.decoding import generate
from gradus.plan import serving as room
from gradus.plan.collectives import collective_seconds
from gradus.plan.passes import Pass, Usage
from gradus.plan.roofline import op_seconds, parameters
from gradus.plan.serving import BYTES, Use, expected, kernel_seconds, lines, optimal, serving, usage_of
from gradus.plan.work import Op
from gradus.recipe.presets import config_of
from gradus.recipe.schema import (
    BertConfig,
    GemmaConfig,
    GPTConfig,
    LlamaConfig,
    ModelConfig,
    Seq2SeqConfig,
    T5Config,
    ViTConfig,
)
from gradus.text import rate

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402

SMALL = {
    "mha": GPTConfig(vocab_size=31, n_layers=3, d_model=24, n_heads=4, seq_len=20),
    "gqa": LlamaConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40, seq_len=20),
    "mqa-wide": LlamaConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, n_kv_heads=1, d_head=10, d_ff=40, seq_len=20),
    "moe": LlamaConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40, seq_len=20, n_experts=4),
    "windows": LlamaConfig(vocab_size=31, n_layers=5, d_model=24, n_heads=4, n_kv_heads=2, d_head=16, d_ff=40, seq_len=20, window=4, full_every=2),
    "gemma": GemmaConfig(vocab_size=31, n_layers=4, d_model=24, n_heads=4, n_kv_heads=1, d_head=16, d_ff=40, seq_len=20, window=5, full_every=3),
    "t5": T5Config(vocab_size=31, n_layers=2, n_decoder_layers=3, d_model=24, n_heads=4, d_head=5, d_ff=40, seq_len=20),
    "seq2seq": Seq2SeqConfig(vocab_size=31, n_layers=3, n_decoder_layers=2, d_model=24, n_heads=4, d_ff=40, seq_len=20),
}

# ---------------------------------------------------------------- closed forms, by the papers' shapes


class Closed(NamedTuple):
    """A pass over a batch of one, over all devices."""

    operations: int
    weights: int  # that are read
    sums: int  # all-reduces
    tokens: int  # of a row in each


def two_sided(c: ModelConfig) -> bool:
    return c.family in ("t5", "seq2seq")


def deep(c: ModelConfig) -> int:
    """Layers that make tokens."""
    return getattr(c, "n_decoder_layers", None) or c.n_layers


def layer(c: ModelConfig) -> int:
    """Elements of a layer's matrices, without cross-attention, that a token is multiplied by."""
    h, experts = c.d_model, getattr(c, "n_experts", None) or 0
    matrices = 3 if c.family in ("llama", "gemma") or getattr(c, "gated", False) else 2
    attention = 2 * h * c.head_dim * (c.n_heads + (getattr(c, "n_kv_heads", None) or c.n_heads))
    shared = getattr(c, "d_shared", None) or 0
    width = (getattr(c, "d_expert", None) or c.d_ff) * (c.top_k if experts else 1) + shared
    return attention + matrices * h * width + h * (experts + bool(shared))


def classes(c: ModelConfig) -> int:
    if c.family == "vit" or getattr(c, "head", None) == "classification":
        return c.n_classes or c.d_model
    return c.d_model if getattr(c, "head", None) == "none" else getattr(c, "target_vocab_size", None) or c.vocab_size


def decode_weights(c: ModelConfig) -> int:
    """Elements of the matrices that a new token is multiplied by: of an encoder-decoder the decoder's, without the projections of the
    encoder's output, which are done once."""
    cross = 2 * c.d_model * c.n_heads * c.head_dim if two_sided(c) else 0
    return deep(c) * (layer(c) + cross) + classes(c) * c.d_model


def vectors(c: ModelConfig) -> int:
    """Elements of norms and biases that a new token meets."""
    h, f = c.d_model, c.d_ff
    if c.family == "llama":
        return (2 * h + 2 * c.head_dim * c.qk_norm) * c.n_layers + h
    if c.family == "gemma":
        return (4 * h + 2 * c.head_dim) * c.n_layers + h
    if c.family == "t5":
        return 3 * h * deep(c) + h
    if c.family == "gpt":
        return c.n_layers * (4 * h + 4 * h + (c.top_k if c.n_experts else 1) * (f + h)) + 2 * h
    return deep(c) * (4 * h + 2 * h + 6 * h + f + h) + (2 * h if c.norm_first else 0) + (classes(c) if c.output_bias else 0)


def source_vectors(c: ModelConfig) -> int:
    h, f = c.d_model, c.d_ff
    if c.family == "t5":
        return 2 * h * c.n_layers + h
    return c.n_layers * (4 * h + 4 * h + f + h) + deep(c) * 2 * h + (2 * h if c.norm_first else 0)


def head_products(c: ModelConfig, s: int) -> int:
    """Products behind (of ViT: and before) an encoder's blocks."""
    h, head = c.d_model, getattr(c, "head", None)
    if c.family == "vit":
        return c.n_channels * c.image_size**2 * h + h * (c.n_classes or 0)  # the patches have all pixels
    answers = {"pretraining": 2, "classification": c.n_classes}.get(head)
    words = s * (h * h + h * c.vocab_size) if head in ("masked_lm", "pretraining") else 0
    return words + (h * h + h * answers if answers else 0)


def kept(c: ModelConfig, s: int) -> list[int]:
    """Of each layer that makes tokens, those of s that its keys are kept of."""
    full_first, every, window = (getattr(c, name, None) for name in ("full_first", "full_every", "window"))
    full = (i < (full_first or 0) or (every and i % every == every - 1) for i in range(deep(c)))
    return [s if whole or not window else min(window, s) for whole in full]


def looked_up(c: ModelConfig) -> int:
    """Parameters of an encoder that its forward pass multiplies by nothing."""
    if c.family == "vit":
        return 0
    words = 0 if c.head in ("masked_lm", "pretraining") else c.vocab_size
    pooler = c.d_model**2 + c.d_model if c.head == "none" and c.pooler else 0
    return (words + c.seq_len + c.n_token_types) * c.d_model + pooler


def passes(c: ModelConfig, s: int, source: int = 0) -> list[Closed]:
    """Of a decoder the prompt, then a token; of an encoder its forward pass."""
    wide, layers = c.n_heads * c.head_dim, c.n_layers
    sums = 2 * layers + (c.family != "vit")  # after attention and feed-forward network; and of the words' table, cut by words
    if c.family in ("bert", "vit"):
        operations = 2 * (layers * (layer(c) * s + 2 * wide * s**2) + head_products(c, s))
        return [Closed(operations, models.count(c)["total"] - looked_up(c), sums, s)]
    n, head = decode_weights(c), classes(c) * c.d_model
    if two_sided(c):  # the encoder, and the decoder's keys and values of its output
        acting = layers * layer(c) + deep(c) * 2 * c.d_model * wide
        prompt = Closed(2 * acting * source + 4 * layers * wide * source**2, acting + source_vectors(c), sums, source)
    else:  # causal: half of the scores, with a window half of those of its first tokens; the last position's logits
        scores = sum(w * s - w**2 / 2 for w in kept(c, s))
        prompt = Closed(2 * (n - head) * s + 2 * head + 4 * wide * scores, n + vectors(c), sums, s)
    token = 2 * n + 4 * wide * sum(w + source for w in kept(c, s))
    return [prompt, Closed(token, n + vectors(c), (2 + two_sided(c)) * deep(c) + 1, 1)]


MORE = {
    "gpt-moe": GPTConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, seq_len=20, n_experts=3, top_k=1),
    "qwen-moe": LlamaConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, d_head=10, d_ff=40, seq_len=20, qk_norm=True, n_experts=4, d_expert=16, d_shared=12),
    "t5-gated": T5Config(vocab_size=31, n_layers=3, d_model=24, n_heads=4, d_head=5, d_ff=40, seq_len=20, gated=True, tie_output=False),
    "seq2seq-pre-norm": Seq2SeqConfig(
        vocab_size=31, target_vocab_size=37, share_embeddings=False, tie_output=False, output_bias=True, norm_first=True, n_layers=2,
        d_model=24, n_heads=4, d_ff=40, seq_len=20,
    ),
    **{
        f"bert-{head}": BertConfig(vocab_size=31, n_layers=2, d_model=24, n_heads=4, d_ff=40, seq_len=20, head=head, n_classes=3)
        for head in ("none", "masked_lm", "pretraining", "classification")
    },
    "vit": ViTConfig(image_size=16, patch_size=4, n_layers=2, d_model=24, n_heads=4, d_ff=40, n_classes=3),
    "vit-features": ViTConfig(image_size=16, patch_size=4, n_layers=2, d_model=24, n_heads=4, d_ff=40, pool="mean", n_channels=1),
    "405b": config_of("llama3.1-405b"), "mixtral": config_of("mixtral-8x7b"), "t5-base": config_of("t5-base"), "gpt2-xl": config_of("gpt2-xl"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SMALL, *MORE])
def test_what_is_traced_is_the_closed_form(name):
    """Operations, parameters that are read, all-reduces and their sizes. The closed form of parameters has the norms and biases, too."""
    config, batch = (SMALL | MORE)[name], 3
    tokens = config.n_tokens if config.reads == "images" else 17
    source = 9 if two_sided(config) else 0
    usage = usage_of(config, batch, tokens, source)
    assert usage.classes == classes(config)
    for traced, closed in itertools.zip_longest(filter(None, (usage.prefill, usage.decode)), passes(config, tokens, source)):
        assert (traced.operations, traced.weights) == (batch * closed.operations, closed.weights)
        assert [tuple(pair) for pair in traced.sums] == [(batch * closed.tokens * config.d_model, closed.sums)]


def whole_and_by_kind(world) -> list[tuple]:
    """What passes of models of several kinds of blocks do: every block traced, and one of each kind."""
    from test_profiles import ALTERNATING, EXPERTS, FAMILY, FROZEN, MixedConfig
    from test_profiles import SMALL as SIZES

    from gradus.patch import replaced
    from gradus.plan import pass_tracing

    models.register(FAMILY)
    found = []
    for more in (EXPERTS, FROZEN, {**EXPERTS, **ALTERNATING, "dense_every": 2}):
        config = MixedConfig(**{**SIZES, "n_layers": 6}, **more)
        few = pass_tracing.PassTracer(config, 2)
        with replaced(pass_tracing, "_keep_one_of_each_kind", lambda model, family: dict.fromkeys(model.blocks, 1)):
            whole = pass_tracing.PassTracer(config, 2)
        found.append((len(few.times), few.usage(8, 0), whole.usage(8, 0)))
    return found


def test_one_block_of_each_kind_counts_for_all_of_its_kind():
    (found,) = run(1, whole_and_by_kind)
    assert [kinds for kinds, *_ in found] == [2, 2, 4]
    assert all(few == whole for _, few, whole in found)


def test_a_stem_of_convolutions_is_counted():
    """3 × 3 at every place of what comes out: the first at 16 · 16 places from 3 channels, the second at 8 · 8 (layers/patches.py)."""
    linear, stem = (ViTConfig(image_size=16, patch_size=4, n_layers=1, d_model=24, n_heads=4, d_ff=40, patches=p) for p in ("unfold", "stem"))
    both = [usage_of(config, 1, config.n_tokens).prefill.operations for config in (linear, stem)]
    assert both[1] - both[0] == 2 * 9 * (3 * 12 * 16 * 16 + 12 * 24 * 8 * 8) - 2 * 3 * 16 * 16 * 24


def test_it_is_read_from_disk_where_it_was_traced_before(tmp_path, monkeypatch):
    from gradus.plan import pass_tracing

    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    config = SMALL["gqa"].model_copy(update={"seq_len": 19})
    first = usage_of(config, 1, 4)
    (file,) = (tmp_path / "profiles").iterdir()
    room.usage_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(pass_tracing, "PassTracer", None)
        assert usage_of(config, 1, 4) == first
    room.usage_of.cache_clear()
    file.write_text(file.read_text().replace("0", "1"))
    assert usage_of(config, 1, 4) == first


# ---------------------------------------------------------------- the cache, the weights


def value(rows, name, **conditions):
    return next(r.value for r in rows if r.name == name and all(r.conditions.get(k) == v for k, v in conditions.items()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_cache_is_the_real_one_to_the_byte(name, precision):
    """Rows are decoded by the model's own `generate`, and the tensors that its cache then holds are measured."""
    config, batch, source = SMALL[name], 3, 7
    model = models.build(config).eval().to(torch.float32 if precision == "fp32" else torch.bfloat16)
    made, new_cache = [], model.new_cache
    model.new_cache = lambda *args: made.append(new_cache(*args)) or made[-1]
    sources = [[1] * source] * batch if name in ("t5", "seq2seq") else None
    list(generate(model, [[1, 2]] * batch, max_new=5, sources=sources))
    (cache,) = made
    own = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.k, layer.v))
    cross = sum(t.numel() * t.element_size() for layer in cache.layers for t in layer.cross or ())
    usage, width = usage_of(config, batch, cache.max_len, source), BYTES[precision]
    assert (usage.own * width, usage.cross * width) == (own, cross)
    heads = (getattr(config, "n_kv_heads", None) or config.n_heads) * config.head_dim
    assert [2 * layer.k.nbytes for layer in cache.layers] == [2 * batch * n * heads * width for n in kept(config, cache.max_len)]
    rows = serving(config, batch=batch, seq_len=cache.max_len, precision=precision)
    assert value(rows, "serving/kv_cache") == own
    cross = value(rows, "serving/cross_cache") if sources else 0
    assert cross == usage_of(config, batch, 1, cache.max_len).cross * width
    assert value(rows, "serving/weights") == sum(p.numel() * p.element_size() for p in model.parameters())
    assert value(rows, "serving/total") == sum(value(rows, f"serving/{part}") for part in ("weights", "kv_cache", "logits")) + cross


@pytest.mark.parametrize(("name", "length", "tokens"), [
    ("gemma3-1b", 4096, {512: 22, 4096: 4}), ("gemma3-1b", 300, {300: 26}), ("mistral-7b-v0.1", 32_768, {4096: 32}),
])  # fmt: skip
def test_a_cache_with_windows(name, length, tokens):
    """Of published models: tokens that are kept of a text → layers that keep so many. The text says that a token's bytes are a mean, and that of a
    text no longer than the window they are not; a longer text is no new token's to look at."""
    config, on = config_of(name), cluster("H100")
    rows = serving(config, batch=2, seq_len=length, on=on)
    of_a_token = 2 * config.n_kv_heads * config.head_dim * 2
    total = sum(n * layers for n, layers in tokens.items()) * of_a_token
    assert value(rows, "serving/kv_cache") == 2 * total and value(rows, "serving/kv_per_token") == total // length
    told = [line for line in lines(name, rows, on) if line.startswith("cache ")]
    mean = len(tokens) > 1 or length not in tokens
    assert len(told) == 1 and ("on average: layers with a window keep no more than it" in told[0]) == mean
    assert any(row.name == "serving/rule_tokens" for row in rows) != mean
    read = 2 * (decode_weights(config) + vectors(config)) + 2 * total
    assert value(rows, "serving/decode_time") == pytest.approx(read / on.device.bandwidth)


def test_a_windows_prompt_costs_what_lies_in_it():
    """Mistral-7B's 32,768 tokens, of which each of 32 layers looks at 4,096: the bound is less than that of attention to all, never more."""
    mistral, on = config_of("mistral-7b-v0.1"), cluster("H100")
    windows, everywhere = (usage_of(c, 1, 32_768).prefill.operations for c in (mistral, mistral.model_copy(update={"window": None})))
    assert everywhere - windows == 32 * 4 * 4096 * (32_768**2 / 2 - (4096 * 32_768 - 4096**2 / 2))
    assert value(serving(mistral, on=on), "serving/prefill_time") == pytest.approx(windows / on.device.peaks["bf16"])


def test_llama_2_70b():
    """320 KiB a token; 32 rows of 4,096 are 40 GiB, more than the rule's 20 % of the weights."""
    rows = serving(config_of("llama2-70b"), batch=32, seq_len=4096)
    assert value(rows, "serving/kv_per_token") == 320 * 1024
    assert value(rows, "serving/kv_cache") == 40 * 2**30
    assert value(rows, "serving/rule") == pytest.approx(68_976_648_192 * 4 / (32 / 16) * 1.2)
    rule = next(r for r in rows if r.name == "serving/rule")
    assert rule.conditions["holds"] is False and "31%" in rule.conditions["why"]
    assert value(rows, "serving/kv_cache") > 0.2 * value(rows, "serving/weights")
    assert value(rows, "serving/rule_tokens") == int(0.2 * 2 * 68_976_648_192 / (320 * 1024))
    holds = next(r for r in serving(config_of("llama2-70b"), batch=1, seq_len=4096) if r.name == "serving/rule")
    assert holds.conditions["holds"] is True


def test_a_cache_has_keys_and_values_of_the_key_heads_alone():
    """Llama-2-70B, 4,096 tokens, one row: 1.25 GiB. Without the factor 2, and with all 64 heads, it would be 5 GiB."""
    llama = config_of("llama2-70b")
    usage = usage_of(llama, 1, 4096)
    assert (usage.own * BYTES["bf16"], usage.cross) == (1.25 * 2**30, 0)
    assert usage_of(llama.model_copy(update={"n_kv_heads": 64}), 1, 4096).own * BYTES["bf16"] == 8 * 1.25 * 2**30


def test_encoders_have_no_cache():
    assert usage_of(config_of("bert-base"), 1, 1).own == usage_of(config_of("vit-b16"), 1, 1).own == 0
    names = {r.name for r in serving(config_of("vit-b16"), on=cluster("T4"), precision="fp16")}
    assert "serving/kv_cache" not in names and "serving/decode_time" not in names and "serving/forward_time" in names


def test_the_rule_of_thumb_and_what_bf16_changes():
    """Llama-2-7B at 32 bits: 6.74e9 · 4 · 1.2 = 32.3 GB (33.6 from the rounded 7e9); in bf16 half."""
    full, half = (serving(config_of("llama2-7b"), bits=bits, seq_len=1) for bits in (32, 16))
    assert value(full, "serving/rule") == pytest.approx(32.34e9, rel=1e-3)
    assert value(half, "serving/rule") == value(full, "serving/rule") / 2
    assert value(serving(config_of("llama2-7b"), bits=4), "serving/weights") == 6_738_415_616 / 2


def test_the_device_is_the_smallest_that_holds_all():
    small, large = (serving(config_of("llama2-7b"), batch=batch) for batch in (1, 64))
    for rows in (small, large):
        row = next(r for r in rows if r.name == "serving/device")
        need, device = value(rows, "serving/total"), find(row.value)
        assert device.memory * device.usable >= need
        fits = row.conditions["how"]["inputs"]["fits"]
        assert all(find(name).memory >= device.memory and "bf16" in find(name).peaks for name in fits)
    by_rule = next(r for r in large if r.name == "serving/device")
    assert find(by_rule.conditions["by_rule"]).memory < find(by_rule.value).memory  # the rule's device would run out of memory
    none = next(r for r in serving(config_of("llama3.1-405b")) if r.name == "serving/device")
    assert none.value.startswith("none") and none.conditions["fits"] == 0


def test_memory_of_experts_is_that_of_all_of_them():
    rows = serving(config_of("mixtral-8x7b"))
    assert value(rows, "serving/weights") == 2 * 46_702_792_704
    assert decode_weights(config_of("mixtral-8x7b")) < 12_879_925_248  # but a token reads those of two


def test_bounds_of_time():
    """Decoding one row reads every weight once: 13.2 GB (no embedding) and the cache at 3.35 TB/s."""
    h100, llama = find("H100"), config_of("llama2-7b")
    rows = serving(llama, seq_len=4096, on=cluster("H100"))
    n = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 32_000 * 4096
    assert decode_weights(llama) == n
    norms = (2 * 32 + 1) * 4096
    assert value(rows, "serving/decode_time") == pytest.approx((2 * (n + norms) + 4096 * 512 * 1024) / h100.bandwidth)
    prefill = 2 * (n - 32_000 * 4096) * 4096 + 2 * 32_000 * 4096 + 2 * 32 * 4096 * 4096**2
    assert value(rows, "serving/prefill_time") == pytest.approx(prefill / h100.peaks["bf16"])
    many = serving(llama, batch=16, seq_len=4096, on=cluster("H100"))
    assert value(many, "serving/tokens_per_s") > value(rows, "serving/tokens_per_s")
    assert value(many, "serving/decode_time") > value(rows, "serving/decode_time")
    half = serving(llama, seq_len=4096, on=cluster("H100"), bits=8)
    assert value(half, "serving/decode_time") < value(rows, "serving/decode_time")


def test_encoder_decoders_project_the_source_once():
    h100, t5 = find("H100"), config_of("t5-base")
    rows = serving(t5, seq_len=512, on=cluster("H100"))
    layer = 6 * 768 * 768 + 2 * 768 * 3072  # its own attention, queries and output of the other, feed-forward
    assert decode_weights(t5) == 12 * layer + 32_128 * 768
    weights, cache = 2 * (decode_weights(t5) + vectors(t5)), 12 * 2 * 768 * 2 * (512 + 512)
    assert value(rows, "serving/decode_time") == pytest.approx((weights + cache) / h100.bandwidth)
    source = 12 * (2 * 512 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 768 * 512**2) + 12 * 2 * 512 * 2 * 768**2
    acting = 12 * (4 * 768**2 + 2 * 768 * 3072) + 12 * 2 * 768**2
    assert value(rows, "serving/prefill_time") == pytest.approx(max(source / h100.peaks["bf16"], 2 * acting / h100.bandwidth))


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("llama2-7b", {"seq_len": 5000}, "seq_len=5000: the model has 4096 positions"),
        ("vit-b16", {"seq_len": 50}, "an image's length is its patches"),
        ("llama2-7b", {"on": "T4"}, "T4: its peak in bf16 is not known"),
        ("llama2-7b", {"on": "16xH100"}, "a node has 8: .* Use --on 8xH100-SXM"),
        ("gpt2-xl", {"on": "4xH100"}, "n_heads=25 is not a multiple of 4. Use --on 5xH100-SXM"),
    ],
)
def test_mistakes_are_told_in_one_line(name, more, text):
    more = more | ({"on": cluster(more["on"])} if "on" in more else {})
    with pytest.raises(UserError, match=text) as e:
        serving(config_of(name), bits=4 if "T4" in text else None, **more)
    assert "\n" not in str(e.value)


# ---------------------------------------------------------------- what is expected


def use(batch: int = 1, on: str = "H100") -> Use:
    return Use(SMALL["gqa"].model_copy(update={"seq_len": 200}), batch, 200, 0, 16, "bf16", cluster(on))


def test_kernels_of_a_token_by_hand():
    """Of Llama-2-7B's products by the roofline's own function, their weights' bytes alone; between them a kernel moves what they read and write."""
    llama, on = config_of("llama2-7b"), cluster("H100")
    fit = parameters(on.device, "")[0]
    of = {(4096, 4096): 4 * 32, (11008, 4096): 2 * 32, (4096, 11008): 32, (32000, 4096): 1}
    products = sum(times * op_seconds(Op("matmul", "", "bf16", "forward", 2 * n * k, 2 * n * k, (1, 1, n, k)), on.device, fit) for (n, k), times in of.items())
    moved = 4096 * 512 * 1024 + sum(times * 2 * (n + k) for (n, k), times in of.items())
    found = kernel_seconds(usage_of(llama, 1, 4096).decode, Use(llama, 1, 4096, 0, 16, "bf16", on), 4096 * 512 * 1024)
    assert found == pytest.approx(products + moved / on.device.bandwidth / fit.bandwidth + 32 * fit.decode, rel=1e-3)


def test_rows_of_a_batch_choose_experts():
    """Mixtral: one row reads two of eight experts a layer, as many as 1,000 rows all of them."""
    mixtral, on = config_of("mixtral-8x7b"), cluster("8xH100")
    one, many = (kernel_seconds(usage_of(mixtral, rows, 8).decode, Use(mixtral, rows, 8, 0, 16, "bf16", on)) for rows in (1, 1000))
    expert = 32 * 3 * 4096 * 14336 * 2 / 8 / (on.device.bandwidth * parameters(on.device, "")[0].bandwidth)  # on one of eight devices
    assert one > 1.5 * expert and many > 8 * expert > one


@pytest.fixture
def constants(monkeypatch):
    """A pass with prompts takes 0.1 s and has one; a token of one row takes 0.01 s, and 0.001 for each other."""
    monkeypatch.setattr(room, "PASS", 1)
    monkeypatch.setattr(room, "usage_of", lambda config, rows, tokens: Usage(Pass([], 0, []), Pass([], rows, []), 1))
    monkeypatch.setattr(room, "kernel_seconds", lambda done, use, cache=0: 0.009 + 0.001 * done.weights if done.weights else 0.1)


def test_one_row_is_the_queue_of_one_server(constants):
    """M/D/1: a request of 0.1 + 50 · 0.01 s, 1.2 a second, waits D · ρ / 2 (1 - ρ)."""
    most = expected(use(), 50)["requests_per_s"]
    assert most == pytest.approx(1 / 0.6)
    found, load = expected(use(), 50, 1.2), 1.2 * 0.6
    assert found["itl"] == pytest.approx(0.01)
    assert found["ttft"] == pytest.approx(0.6 * load / (2 * (1 - load)) + 0.1 + 0.01)


def test_rows_share_a_device(constants):
    """Five rows: a token takes 0.014 s, and a row waits for four prompts while it makes its 50."""
    found = expected(use(5), 50)
    assert found == pytest.approx({"requests_per_s": 5 / (50 * 0.014 + 5 * 0.1), "ttft": 0.3 + 0.014, "itl": 0.014 + 4 * 0.1 / 50})
    few = expected(use(5), 50, 0.01)
    assert few["itl"] == pytest.approx(0.01, rel=0.01) and few["ttft"] == pytest.approx(0.11, rel=0.01)
    times = [expected(use(5), 50, share * found["requests_per_s"]) for share in (0.2, 0.5, 0.9, 0.99)]
    for name in ("ttft", "itl"):
        assert [t[name] for t in times] == sorted(t[name] for t in times)
    assert times[-1]["itl"] <= found["itl"]


def test_short_prompts_share_a_pass(constants, monkeypatch):
    """Of 150 tokens: three where a pass has 450 to 599."""
    monkeypatch.setattr(room, "PASS", 599)
    assert expected(use(5), 50)["requests_per_s"] == pytest.approx(5 / (50 * 0.014 + 5 * 0.1 / 3))
    assert expected(use(2), 50)["requests_per_s"] == pytest.approx(2 / (50 * 0.011 + 0.1))


@pytest.mark.parametrize("share", [1.1, 1.0, 0.9])
def test_more_than_is_served_is_saturated(capsys, share):
    """At 110 % of what the plan itself says that is served, no time is stated, and the answer is no error; at 90 % both are."""
    words = ["plan", "llama3.1-8b", "--serve", "--on", "H100", "--batch", "16", "--length", "2048", "--new", "512", "--json"]
    assert cli.run(words) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    most = next(row["value"] for row in said if row["name"] == "serving/requests_per_s")
    assert cli.run([*words[:-1], "--rate", repr(share * most)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("SATURATED" in text) == (share >= 1) and ("the first of 512 new tokens after" in text) == (share < 1)
    assert f"at most {rate(most)} requests/s" in text
    rows = {r.name for r in serving(config_of("llama3.1-8b"), batch=16, seq_len=2048, on=cluster("H100"), new=512, rate=share * most)}
    assert "serving/requests_per_s" in rows and (("serving/itl" in rows), ("serving/ttft" in rows)) == (share < 1,) * 2


@pytest.mark.parametrize("more", [{"rate": 1.0}, {"new": 4}, {"on": "H100", "new": 9000}, {"on": "H100", "rate": 2.0}, {"name": "t5-base", "on": "H100", "new": 4}])
def test_a_requests_time_needs_a_device_and_an_answer(more):
    more = {key: cluster(value) if key == "on" else value for key, value in more.items()}
    with pytest.raises(UserError, match=r"--new and --rate: a request's time needs --on DEVICE, --new N"):
        serving(config_of(more.pop("name", "llama2-7b")), **more)


# ---------------------------------------------------------------- several devices


def test_weights_and_heads_are_split_over_a_node():
    """Llama-2-70B in bf16 fits no H100, and four of them: a quarter of the weights, two of its eight key heads each."""
    llama, four = config_of("llama2-70b"), cluster("4xH100")
    rows, whole = serving(llama, batch=8, on=four), serving(llama, batch=8)
    for part in ("weights", "kv_cache", "kv_per_token"):
        assert value(rows, f"serving/{part}") == value(whole, f"serving/{part}") / 4
    assert value(rows, "serving/total") < four.device.capacity < value(whole, "serving/total")
    assert not any("time" in row.name for row in serving(llama, batch=8, on=cluster("H100"))), "one does not hold it"
    assert value(rows, "serving/rule") == value(whole, "serving/rule") and value(rows, "serving/device") == value(whole, "serving/device")
    assert all(row.conditions["devices"] == 4 for row in rows)


def test_keys_are_split_as_far_as_their_heads_divide():
    llama = config_of("llama2-70b").model_copy(update={"n_kv_heads": 2})
    whole, four = (value(serving(llama, on=on), "serving/kv_cache") for on in (None, cluster("4xH100")))
    assert four == whole / 2, "each of two heads lies on two devices"


def test_a_token_takes_its_share_of_the_bytes_and_the_all_reduces():
    llama, four = config_of("llama2-7b"), cluster("4xH100")
    rows = serving(llama, batch=2, on=four)
    n = decode_weights(llama) + vectors(llama)
    sent = (2 * 32 + 1) * collective_seconds("all_reduce", 2 * 4096 * 2, 4, 1, four)
    read = (2 * n + 2 * 4096 * 512 * 1024) / 4 / four.device.bandwidth
    assert value(rows, "serving/decode_time") == pytest.approx(read + sent)
    prompt = (2 * 32 + 1) * collective_seconds("all_reduce", 2 * 4096 * 4096 * 2, 4, 1, four)
    one = serving(llama, batch=2, on=cluster("H100"))
    assert value(rows, "serving/prefill_time") == pytest.approx(value(one, "serving/prefill_time") / 4 + prompt)
    encoder = serving(config_of("bert-base"), batch=64, on=four)
    assert value(encoder, "serving/samples_per_s") == 64 / value(encoder, "serving/forward_time")


# ---------------------------------------------------------------- compute-optimal sizes


@pytest.mark.parametrize("fit", ["Hoffmann 2022", "Besiroglu 2024"])
def test_optimal_is_a_minimum_and_both_ways_agree(fit):
    rows = optimal(parameters=7e10)
    n, d, best, flops = (value(rows, f"optimal/{x}", fit=fit) for x in ("parameters", "tokens", "loss", "flops"))
    assert n == pytest.approx(7e10) and 6 * n * d == flops
    inputs = next(r for r in rows if r.conditions["fit"] == fit).conditions["how"]["inputs"]
    loss = lambda n: inputs["E"] + inputs["A"] / n ** inputs["alpha"] + inputs["B"] / (flops / 6 / n) ** inputs["beta"]  # noqa: E731
    assert best == pytest.approx(loss(n))
    assert all(best < loss(n * x) for x in (0.5, 0.9, 1.1, 2))
    assert value(optimal(tokens=d), "optimal/parameters", fit=fit) == pytest.approx(n)


def test_the_refit_gives_about_20_tokens_a_parameter_and_the_first_does_not():
    """At Chinchilla's 70B the refit agrees with Hoffmann's other two approaches, which the printed fit does not (Besiroglu 2024)."""
    rows = optimal(parameters=70e9)
    assert value(rows, "optimal/tokens_per_parameter", fit="Besiroglu 2024") == pytest.approx(20, abs=3)
    assert value(rows, "optimal/tokens_per_parameter", fit="Hoffmann 2022") > 60
    assert math.isclose(value(rows, "optimal/flops", fit="Besiroglu 2024"), 5.76e23, rel_tol=0.1)


def test_a_classifier_answers_with_its_classes():
    bert = BertConfig(vocab_size=100, n_layers=1, d_model=8, n_heads=2, d_ff=16, head="classification", n_classes=3)
    assert value(serving(bert, batch=2, seq_len=4), "serving/logits") == 2 * 3 * (2 + 4)
