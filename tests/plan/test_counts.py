"""Parameters against published counts; operations of the counted module against closed forms and hand counts; utilisation."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.errors import UserError
from gradus.hardware import Cluster, Device
from gradus.measure.flops import count_flops
from gradus.parallel.apply import use_kernel
from gradus.plan.batches import complete, task_without_data
from gradus.plan.case import Case
from gradus.plan.counts import (
    Shape,
    active,
    flops,
    operations,
    parameters,
    shape_of,
    tokens_a_sample,
    utilisation,
)
from gradus.recipe.presets import config_of
from gradus.recipe.schema import BertConfig, GPTConfig, Layout, LlamaConfig, Recipe, Seq2SeqConfig, T5Config, ViTConfig

sys.path[:0] = [str(Path(__file__).parent)]

from closed_forms import closed_form  # noqa: E402

KINDS = {"causal_lm": "text", "masked_lm": "text", "span_corruption": "text", "translation": "pairs", "copy": "synthetic"}


def on_gpu(r: Recipe) -> Case:
    return Case.of(r, target="cuda")


def recipe(model, task: str, *, samples: int = 4, layout: dict | None = None, data: dict | None = None, **more) -> Recipe:
    kind = KINDS.get(task) or ("images" if model.family == "vit" else "labelled")
    return Recipe(
        model=model, task={"name": task, **more}, data={"kind": kind, **(data or {})}, optimizer={"name": "adamw", "lr": 1e-3},
        batch={"samples": samples}, train={"steps": 1}, layout=layout or {},
    )  # fmt: skip


def value(rows, name):
    return next(r.value for r in rows if r.name == name)


# ---------------------------------------------------------------- parameters

BERT_PRETRAINING = {"head": "pretraining"}
TINY_LLAMA = LlamaConfig(vocab_size=32_000, n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, seq_len=2048)
# As their papers and the released weights have them. BART is not a family of ours; below it is counted from what it shares with one.
COUNTS = {
    "GPT-2 small": ("gpt2-small", {}, 124_439_808),
    "GPT-2 medium": ("gpt2-medium", {}, 354_823_168),
    "GPT-2 large": ("gpt2-large", {}, 774_030_080),
    "GPT-2 XL": ("gpt2-xl", {}, 1_557_611_200),
    "GPT-3 175B (V=50257,s=2048)": ("gpt3-175b", {}, 174_604_259_328),
    "Llama-2-7B": ("llama2-7b", {}, 6_738_415_616),
    "Llama-2-13B": ("llama2-13b", {}, 13_015_864_320),
    "Llama-2-70B": ("llama2-70b", {}, 68_976_648_192),
    "Llama-3.1-8B": ("llama3.1-8b", {}, 8_030_261_248),
    "Llama-3.1-70B": ("llama3.1-70b", {}, 70_553_706_496),
    "Llama-3.1-405B": ("llama3.1-405b", {}, 405_853_388_800),
    "TinyLlama-1.1B": (TINY_LLAMA, {}, 1_100_048_384),
    "BERT-base BertModel": ("bert-base", {}, 109_482_240),
    "BERT-base ForPreTraining": ("bert-base", BERT_PRETRAINING, 110_106_428),
    "BERT-large BertModel": ("bert-large", {}, 335_141_888),
    "BERT-large ForPreTraining": ("bert-large", BERT_PRETRAINING, 336_226_108),
    "T5-small": ("t5-small", {}, 60_506_624),
    "T5-base": ("t5-base", {}, 222_903_552),
    "T5-large": ("t5-large", {}, 737_668_096),
    "T5-3B": ("t5-3b", {}, 2_851_598_336),
    "T5-11B": ("t5-11b", {}, 11_307_321_344),
    "ViT-B/16 (1000 cls)": ("vit-b16", {}, 86_567_656),
    "ViT-L/16 (1000 cls)": ("vit-l16", {}, 304_326_632),
    "ViT-H/14 (1000 cls)": ("vit-h14", {}, 632_045_800),
    "Mixtral-8x7B total": ("mixtral-8x7b", {}, 46_702_792_704),
}


@functools.cache
def counted(name: str) -> int:
    if name == "BART-large":  # the original Transformer, and learned positions and a norm for each of two embeddings
        h = 1024
        same = Seq2SeqConfig(vocab_size=50_265, n_layers=12, d_model=h, n_heads=16, d_ff=4096)
        return models.count(same)["total"] + 2 * (1026 * h + 2 * h)
    preset, fields, _ = COUNTS[name]
    rows = parameters(config_of(preset, **fields) if isinstance(preset, str) else preset)
    parts = [r.value for r in rows if r.name.removeprefix("parameters/") in ("embeddings", "attention", "feedforward", "norms", "head")]
    assert sum(parts) == value(rows, "parameters/total") == value(rows, "parameters/trainable")
    return value(rows, "parameters/total")


@pytest.mark.parametrize("name", [*COUNTS, "BART-large"])
def test_published_parameter_counts_are_exact(name):
    assert counted(name) == (406_291_456 if name == "BART-large" else COUNTS[name][2])


@pytest.mark.shared_data
def test_all_26_counts_of_the_calibration_points(shared_data):
    points = json.loads((shared_data.parent / "groundtruth" / "calibration.json").read_text())
    counts = {p["model"]: p["value"] for p in points if p["metric"] == "parameter_count"}
    assert len(counts) == 26
    assert {name: counted(name) for name in counts} == counts


def test_experts_are_counted_whole_and_active():
    mixtral = config_of("mixtral-8x7b")
    rows = parameters(mixtral)
    assert value(rows, "parameters/active") == active(mixtral) == 12_879_925_248
    assert value(rows, "parameters/total") == 46_702_792_704
    assert value(parameters(config_of("llama2-7b")), "parameters/total") == active(config_of("llama2-7b"))


# ---------------------------------------------------------------- operations

GPT = GPTConfig(vocab_size=97, n_layers=3, d_model=24, n_heads=4, seq_len=16)
LLAMA = LlamaConfig(vocab_size=97, n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, d_ff=56, seq_len=16)
WIDE = LlamaConfig(vocab_size=97, n_layers=2, d_model=32, n_heads=4, n_kv_heads=1, d_head=12, d_ff=56, seq_len=16, tie_output=True, qkv_bias=True)
MOE = LlamaConfig(vocab_size=97, n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, d_ff=56, seq_len=16, n_experts=4, top_k=2)
QWEN = MOE.model_copy(update={"qk_norm": True, "d_expert": 24, "d_shared": 40, "experts_every": 2, "norm_top_k": False})
GPT_MOE = GPTConfig(vocab_size=97, n_layers=2, d_model=24, n_heads=4, seq_len=16, n_experts=3, top_k=1)
BERT = BertConfig(vocab_size=97, n_layers=3, d_model=24, n_heads=4, d_ff=80, seq_len=16)
T5 = T5Config(vocab_size=97, n_layers=2, n_decoder_layers=3, d_model=24, n_heads=4, d_head=5, d_ff=80, seq_len=32)
T5_GATED = T5Config(vocab_size=97, n_layers=3, d_model=24, n_heads=4, d_head=5, d_ff=80, seq_len=32, gated=True, tie_output=False)
SEQ2SEQ = Seq2SeqConfig(
    vocab_size=97, target_vocab_size=103, share_embeddings=False, n_layers=3, n_decoder_layers=2, d_model=24, n_heads=4, d_ff=80, seq_len=16
)
VIT = ViTConfig(image_size=32, patch_size=8, n_layers=3, d_model=24, n_heads=4, d_ff=80, n_classes=7)
FAMILIES = {
    "gpt": recipe(GPT, "causal_lm"),
    "llama": recipe(LLAMA, "causal_lm"),
    "llama-wide": recipe(WIDE, "causal_lm"),
    "mixtral": recipe(MOE, "causal_lm"),
    "gpt-moe": recipe(GPT_MOE, "causal_lm"),
    "qwen-moe": recipe(QWEN, "causal_lm"),
    "bert": recipe(BERT, "masked_lm"),
    "bert-pairs": recipe(BERT, "masked_lm", next_sentence=True),
    "bert-classes": recipe(BERT.model_copy(update={"n_classes": 5}), "classification"),
    "t5": recipe(T5, "span_corruption"),
    "t5-gated": recipe(T5_GATED, "span_corruption"),
    "seq2seq": recipe(SEQ2SEQ, "translation"),
    "copy": recipe(Seq2SeqConfig(n_layers=2, d_model=24, n_heads=4, d_ff=80), "copy"),
    "vit": recipe(VIT, "classification"),
    "vit-mean": recipe(VIT.model_copy(update={"pool": "mean", "patches": "unfold"}), "classification"),
    "vit-stem": recipe(VIT.model_copy(update={"patches": "stem"}), "classification"),
}


def whole_step(r: Recipe, kernel: str = "naive") -> int:
    """The task's own losses over one real sample on the real model, every layer, on the CPU: nothing extended, nothing of meta."""
    r = complete(r)
    task = task_without_data(r)
    sample = task.splits["train"][0]
    if task.prepare is not None:
        import numpy as np

        sample = task.prepare(sample, np.random.default_rng(0))
    batch = task.to_device(task.collate([sample]), torch.device("cpu"))
    model = models.build(r.model)
    use_kernel(model, kernel, 256)
    return count_flops(lambda: sum(task.losses(model, batch).values()).backward())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_counted_closed_and_whole_steps_agree(name):
    r = FAMILIES[name]
    shape = shape_of(Case.of(r))
    found = operations(on_gpu(r))
    assert found.model == closed_form(complete(r).model, shape) == whole_step(r)


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_are_those_that_the_task_makes(name):
    import numpy as np

    r = complete(FAMILIES[name])
    task = task_without_data(r)
    sample = task.splits["train"][0]
    batch = task.collate([task.prepare(sample, np.random.default_rng(1)) if task.prepare is not None else sample])
    shape = shape_of(Case.of(r))
    if r.model.family == "vit":
        assert shape == Shape(16 + (r.model.pool == "class_token"))
    elif "source" in batch:
        assert (shape.source, shape.target) == (batch["source"].shape[1], batch["target"].shape[1])
    else:
        assert (shape.source, shape.selected) == (batch["ids"].shape[1], int(batch["select"].sum()) if "select" in batch else 0)
    assert tokens_a_sample(r) == batch["n_tokens"]


def test_gpt2_small_is_6_n_and_12_l_h_s():
    """Chowdhery et al. 2022, appendix B: N_mm = 12·768²·12 + 50257·768."""
    r = recipe(config_of("gpt2-small"), "causal_lm", samples=8)
    n = 12 * 12 * 768**2 + 50_257 * 768
    expected = 8 * 1024 * (6 * n + 12 * 12 * 768 * 1024)
    rows = flops(on_gpu(r))
    assert value(rows, "flops/model") == expected
    assert value(rows, "flops/per_token") == expected / (8 * 1024)
    assert value(rows, "flops/model_causal") == expected - 8 * 1024 * 6 * 12 * 768 * 1024
    row = next(row for row in rows if row.name == "flops/model")
    assert row.conditions["how"]["inputs"]["N_mm"] == n
    assert row.conditions["convention"] == "no recomputation, attention's full matrix"


def test_narayanans_formula_is_full_recomputation():
    """Narayanan et al. 2021, section 3 and appendix: 96·B·s·L·h²·(1 + s/6h + V/16Lh), all blocks computed twice; the same without: 72."""
    L, h, s, v, batch = 24, 2304, 2048, 51_200, 512
    config = GPTConfig(vocab_size=v, n_layers=L, d_model=h, n_heads=24, seq_len=s)
    common = batch * s * L * h**2
    assert batch * closed_form(config, Shape(s)) == pytest.approx(common * 72 * (1 + s / (6 * h) + v / (12 * L * h)))
    again = batch * (closed_form(config, Shape(s)) - 6 * v * h * s) / 3
    assert batch * closed_form(config, Shape(s)) + again == pytest.approx(common * 96 * (1 + s / (6 * h) + v / (16 * L * h)))


def test_berts_head_only_where_words_are_masked():
    r = recipe(config_of("bert-base"), "masked_lm")
    gathered = shape_of(Case.of(r))
    assert gathered == Shape(512, selected=round(0.15 * 510))
    c = complete(r).model
    everywhere = closed_form(c, gathered._replace(selected=512)) - closed_form(c, gathered)
    assert everywhere == 6 * (512 - gathered.selected) * (768**2 + 768 * 30_522)
    assert everywhere / closed_form(c, gathered) > 0.2  # a head at all places would be a fifth more


def test_t5_is_not_6_n_d():
    """Encoder weights act on the source, decoder weights on the target: by hand."""
    s, t, h, wide, ff, v = 20, 7, 24, 20, 80, 97
    encoder = 2 * (s * 6 * (4 * h * wide + 2 * h * ff) + 12 * wide * s * s)
    decoder = 3 * (t * 6 * (4 * h * wide + 2 * h * ff) + 12 * wide * t * t)
    cross = 3 * (6 * t * 2 * h * wide + 6 * s * 2 * h * wide + 12 * wide * t * s)
    assert closed_form(T5, Shape(s, t)) == encoder + decoder + cross + 6 * h * v * t
    n = models.count(T5)["total"]
    assert closed_form(T5, Shape(s, t)) < 0.8 * 6 * n * (s + t)


def test_span_corruption_shortens_the_source():
    """Of a row of 512 that ends with an end token: 77 noise tokens in 26 spans (Raffel et al. 2020, section 3.1.4)."""
    assert shape_of(Case.of(recipe(config_of("t5-small"), "span_corruption"))) == Shape(511 - 77 + 26 + 1, 77 + 26 + 1)


def test_vit_counts_patches_the_class_token_and_no_gradient_of_the_image():
    """ViT-B/16 on 224 pixels, by hand: 197 places, 17.56 G multiply-adds forward."""
    n, s, h, f = 196, 197, 768, 3072
    patches = 2 * 3 * 16**2 * h * n
    blocks = 12 * (2 * s * (4 * h * h + 2 * h * f) + 4 * h * s * s)
    forward = patches + blocks + 2 * h * 1000
    c = config_of("vit-b16")
    assert closed_form(c, Shape(s)) == 3 * forward - patches
    assert forward / 2e9 == pytest.approx(17.56, abs=0.03)
    r = recipe(c, "classification")
    assert value(flops(on_gpu(r)), "flops/model") == 4 * closed_form(c, Shape(s))
    assert tokens_a_sample(r) == 196


def test_experts_cost_what_a_token_takes_and_the_router():
    dense = LLAMA.model_copy(update={"d_ff": 2 * 56})  # two experts of 56 do what one of 112 does
    s = 16
    router = 6 * 3 * 32 * 4 * s
    assert closed_form(MOE, Shape(s)) == closed_form(dense, Shape(s)) + router


def test_grouped_queries_save_projections_and_no_scores():
    many = LLAMA.model_copy(update={"n_kv_heads": 4})
    assert closed_form(many, Shape(16)) - closed_form(LLAMA, Shape(16)) == 6 * 3 * 16 * 2 * 32 * 16


# ---------------------------------------------------------------- what is computed again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "mixtral", "t5"])
def test_checkpointing_in_order(name):
    """none ≤ selective < attention < full; a fused kernel's backward pass computes the scores again: a sixth of attention's operations."""
    r = FAMILIES[name]
    found = {}
    for mode in ("none", "selective", "attention", "full"):
        found[mode] = operations(on_gpu(r.model_copy(update={"layout": r.layout.model_copy(update={"checkpointing": mode})})))
    assert len({o.model for o in found.values()}) == 1
    none = found["none"]
    assert none.hardware == none.model + none.attention / 6
    assert none.hardware == found["selective"].hardware < found["attention"].hardware < found["full"].hardware


def test_full_checkpointing_is_nearly_four_thirds():
    """All blocks again but for the last matrix of each, whose result the backward pass does not need."""
    r = recipe(GPT, "causal_lm", layout={"checkpointing": "full", "attention": "naive"})
    s, h, L = 16, 24, 3
    again = s * (2 * L * (4 * h * h + 4 * h * h) + 4 * L * h * s)
    found = operations(on_gpu(r))
    assert found.hardware == found.model + again


def test_attention_checkpointing_computes_projections_and_scores_again():
    r = recipe(GPT, "causal_lm", layout={"checkpointing": "attention", "attention": "naive"})
    s, h, L = 16, 24, 3
    found = operations(on_gpu(r))
    assert found.hardware == found.model + s * (2 * L * 3 * h * h + 4 * L * h * s)


def test_a_cpus_attention_with_dropout_is_not_fused():
    r = recipe(GPT.model_copy(update={"dropout": 0.1}), "causal_lm")
    fused, plain = operations(on_gpu(r)), operations(Case.of(r))
    assert plain.hardware == plain.model == fused.model < fused.hardware


def test_a_cpus_attention_of_few_tokens_in_bf16_is_not_fused():
    r = recipe(GPT, "causal_lm", layout={"precision": "bf16"})
    fused, plain = operations(on_gpu(r)), operations(Case.of(r))
    assert plain.hardware == plain.model == fused.model < fused.hardware


@pytest.mark.parametrize(("name", "kernel"), [("gpt", "sdpa"), ("gpt", "naive"), ("llama", "sdpa"), ("bert", "sdpa"), ("t5", "sdpa")])
def test_hardware_operations_are_those_of_a_real_step(name, kernel):
    """On the CPU, every layer, real tensors; with dropout and with a trained bias its attention is not the fused one."""
    r = FAMILIES[name]
    r = r.model_copy(update={"layout": r.layout.model_copy(update={"attention": kernel})})
    assert operations(Case.of(r)).hardware == whole_step(r, kernel)


def test_a_kernel_by_chunks_computes_the_scores_again():
    """Five products backwards, as a fused one. (PyTorch's counter takes one of them, done in place, for none.)"""
    found = operations(Case.of(FAMILIES["gpt"].model_copy(update={"layout": Layout(attention="chunked")})))
    assert found.hardware == found.model + found.attention / 6


def test_large_models_are_counted_in_seconds():
    import time

    r = recipe(config_of("llama3.1-405b"), "causal_lm", data={"max_len": 8192})
    start = time.perf_counter()
    total, rows = value(parameters(r.model), "parameters/total"), flops(on_gpu(r))
    assert time.perf_counter() - start < 30
    assert total == 405_853_388_800
    assert value(rows, "flops/model") == 4 * closed_form(r.model, Shape(8192))


# ---------------------------------------------------------------- utilisation, and errors

A100 = Device("A100-80GB", {"bf16": 312e12, "fp32": 19.5e12}, 80 * 2**30, 2039e9)


def test_mfu_and_its_convention():
    """A PaLM-style figure: 6N + 12LHQT a token over the dense peak (Chowdhery et al. 2022, appendix B)."""
    r = recipe(config_of("gpt2-small"), "causal_lm", samples=64)
    operations_a_step = value(flops(on_gpu(r)), "flops/model")
    row = utilisation("mfu", operations_a_step, 1.0, Cluster(A100, 2), "bf16")
    assert row.name == "time/mfu"
    assert row.value == pytest.approx(operations_a_step / (2 * 312e12))
    assert "full matrix" in row.conditions["convention"] and row.conditions["dtype"] == "bf16"
    assert utilisation("hfu", 2 * operations_a_step, 1.0, Cluster(A100, 2), "bf16").value == pytest.approx(2 * row.value)
    assert "recomputation included" in utilisation("hfu", 1.0, 1.0, Cluster(A100, 1), "bf16").conditions["convention"]
    with pytest.raises(UserError, match="A100-80GB: its peak in fp8 is not known"):
        utilisation("mfu", 1.0, 1.0, Cluster(A100, 1), "fp8")


def test_lengths_that_cannot_be():
    def of(n: int) -> Recipe:
        return recipe(GPT, "causal_lm", data={"max_len": n})

    with pytest.raises(UserError, match=r"a sequence of 17 tokens is longer than model\.seq_len=16"):
        shape_of(Case.of(of(17)))
    with pytest.raises(UserError, match="n_classes"):
        flops(on_gpu(recipe(VIT.model_copy(update={"n_classes": None}), "classification")))
    assert shape_of(Case.of(of(8))) == Shape(8)
    assert value(flops(on_gpu(of(8))), "flops/model") == 4 * closed_form(GPT, Shape(8))
