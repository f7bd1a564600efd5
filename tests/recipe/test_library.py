"""The packaged recipes: each loads, says its command, and is the setting its source describes."""

from __future__ import annotations

import re

import pytest

from gradus.recipe import dump, header, load, names, resolve

PACKAGED = """
copy-task copy-task-s1 digits-vit stdlib-gpt shakespeare-char-gpt wikitext2-gpt wikitext2-bert bert-pretrain wikitext2-t5 multi30k-seq2seq
imdb-bert sst2-bert stories-llama stories-qwen3 stdlib-gemma cifar10-vit-b16 cifar10-vit-l16 cifar10-vit-h14 cifar10-vit-g14
cifar10-vit-G14 cifar10-vit-small cifar10-vit-cpu
""".split()  # noqa: SIM905


def test_all_are_there():
    assert names() == sorted(PACKAGED)


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_recipe_loads_and_survives_being_saved(name, tmp_path):
    recipe = load(name)
    assert recipe.name == name
    (tmp_path / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    assert load(tmp_path) == recipe
    assert resolve(recipe.model_dump()) == recipe


@pytest.mark.parametrize("name", PACKAGED)
def test_its_header_says_what_it_is_its_command_and_its_result(name):
    lines = header(name)
    assert len(lines) >= 3 and lines[0][0].isupper()
    assert any(re.search(rf"gradus train {name}(\s|$)", line) for line in lines)
    assert "→" in lines[-1]  # hardware, time → result, or that it is not yet measured


@pytest.mark.parametrize("name", PACKAGED)
def test_the_commands_of_its_header_are_valid(name):
    for command in re.findall(rf"gradus train {name}((?: \S+=\S+)*)", "\n".join(header(name))):
        load(name, command.split())


@pytest.mark.parametrize("name", PACKAGED)
def test_it_can_be_shortened_for_a_trial(name):
    recipe = load(name, ["train.steps=2", "schedule.warmup_steps=1", "batch.samples=2", "layout.micro_batch=null", "data.workers=0"])
    assert recipe.train.steps == 2 and recipe.batch.tokens is None


def test_copy_task_as_the_source_coded_it():
    r = load("copy-task-s1")
    assert (r.model.n_layers, r.model.d_model, r.model.n_heads, r.model.d_ff, r.model.dropout, r.model.norm_first) == (2, 512, 8, 2048, 0.1, True)
    assert (r.model.share_embeddings, r.model.tie_output, r.model.output_bias) == (False, False, True)
    assert (r.task.n_symbols, r.task.length, r.task.start, r.batch.samples, r.train.steps) == (11, 10, "first", 80, 400)
    assert (r.optimizer.name, r.optimizer.lr, r.optimizer.betas, r.optimizer.eps) == ("adam", 0.5, (0.9, 0.98), 1e-9)
    assert (r.schedule.name, r.schedule.factor, r.schedule.warmup_steps) == ("noam", 1.0, 400)
    assert r.data.n_train == r.train.steps * r.batch.samples  # every batch is new
    # the rates of the source's log, which shows each after its step: 5.5e-6 (of the second step) to 1.1e-3
    rates = [r.optimizer.lr * r.model.d_model**-0.5 * min(s**-0.5, s * r.schedule.warmup_steps**-1.5) for s in (2, 400)]
    assert [f"{rate:.1e}" for rate in rates] == ["5.5e-06", "1.1e-03"]


def test_nanogpts_setting():
    r = load("shakespeare-char-gpt")
    assert (r.model.n_layers, r.model.n_heads, r.model.d_model, r.model.seq_len, r.model.bias, r.model.dropout) == (4, 4, 128, 64, False, 0.0)
    assert (r.batch.samples, r.train.steps, r.train.clip_norm, r.data.valid_fraction) == (12, 2000, 1.0, 0.1)
    assert (r.optimizer.name, r.optimizer.betas, r.optimizer.weight_decay) == ("adamw", (0.9, 0.99), 0.1)  # the rate is our own
    assert (r.schedule.name, r.schedule.warmup_steps) == ("cosine", 100)


def test_berts_pre_training():
    r = load("bert-pretrain")
    assert (r.model.d_model, r.model.n_heads, r.model.n_layers, r.model.d_ff, r.model.seq_len, r.model.dropout) == (768, 12, 12, 3072, 512, 0.1)
    assert (r.tokenizer.vocab_size, r.batch.samples, r.layout.precision) == (30_000, 32, "bf16")
    assert (r.optimizer.lr, r.optimizer.betas, r.optimizer.eps, r.optimizer.weight_decay) == (1e-4, (0.9, 0.999), 1e-6, 0.01)
    assert (r.schedule.name, r.schedule.warmup_steps, r.train.steps) == ("linear", 10_000, 1_000_000)
    assert (r.data.workers, r.data.prefetch, r.data.persistent, r.data.pin) == (8, 2, True, True)


def test_the_hands_on():
    r = load("imdb-bert")
    assert (r.model.preset, r.model.init, r.model.head, r.model.n_classes) == ("bert-base-cased", "bert-base-cased", "classification", 2)
    assert (r.train.epochs, r.batch.samples, r.optimizer.lr, r.data.max_len, r.data.pad) == (2, 16, 5e-5, 512, "bucket")
    assert load("imdb-bert", ["data.pad=max_length"]).data.pad == "max_length"


@pytest.mark.parametrize(("name", "size"), [("b16", (12, 768, 3072, 12)), ("l16", (24, 1024, 4096, 16)), ("h14", (32, 1280, 5120, 16)),
                                            ("g14", (40, 1408, 6144, 16)), ("G14", (48, 1664, 8192, 16))])  # fmt: skip
def test_the_articles_vits(name, size):
    r = load(f"cifar10-vit-{name}")
    assert (r.model.n_layers, r.model.d_model, r.model.d_ff, r.model.n_heads) == size
    assert (r.model.patch_size, r.model.image_size, r.model.n_classes, r.batch.samples) == (int(name[1:]), 224, 10, 32)
    assert (r.optimizer.name, r.optimizer.lr, r.optimizer.momentum, r.task.label_smoothing) == ("sgd", 1e-3, 0.9, 0.0)
    assert r.data.mean == [0.485, 0.456, 0.406] and r.data.std == [0.229, 0.224, 0.225]


def test_a_small_qwen3():
    from gradus.models import count

    m = load("stories-qwen3").model
    assert (m.qk_norm, m.tie_output, m.qkv_bias, m.rope_theta, m.norm_eps) == (True, True, False, 1e6, 1e-6)
    assert m.n_heads * m.head_dim == 2 * m.d_model and count(m.changed(vocab_size=4096))["total"] <= 15e6


def test_every_family_has_a_recipe():
    assert {load(name).model.family for name in PACKAGED} == {"seq2seq", "bert", "gpt", "t5", "llama", "gemma", "vit"}
