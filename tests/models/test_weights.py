"""Weights in and out. Oracles: transformers' own models and files, Meta's complex rotary embedding written out, safetensors' own reader."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from weight_parts import LLAMA, random_model

from gradus import models
from gradus.errors import UserError
from gradus.models import weights
from gradus.models.weights import checksums
from gradus.recipe.schema import (
    MODELS,
    BertConfig,
    GPTConfig,
    Model,
    RopeScaling,
    Seq2SeqConfig,
    T5Config,
    ViTConfig,
)

CONFIGS = [
    Seq2SeqConfig(vocab_size=13, n_layers=1, d_model=8, n_heads=2, d_ff=16, seq_len=32),
    Seq2SeqConfig(vocab_size=13, n_layers=1, n_decoder_layers=2, d_model=8, n_heads=2, d_ff=16, positions="halves", output_bias=True),
    BertConfig(vocab_size=13, n_layers=2, d_model=8, n_heads=2, d_ff=16, seq_len=32, head="pretraining"),
    BertConfig(vocab_size=13, n_layers=1, d_model=8, n_heads=2, d_ff=16, pooler=False),
    GPTConfig(vocab_size=13, n_layers=2, d_model=8, n_heads=2, seq_len=32),
    GPTConfig(vocab_size=13, n_layers=1, d_model=8, n_heads=2, bias=False, tie_output=False),
    T5Config(vocab_size=13, n_layers=1, n_decoder_layers=2, d_model=8, n_heads=2, d_head=3, d_ff=16, seq_len=99),
    T5Config(vocab_size=13, n_layers=1, d_model=8, n_heads=2, d_ff=16, gated=True, tie_output=False),
    LLAMA,
    LLAMA.model_copy(update={"tie_output": True, "rope_scaling": RopeScaling(factor=32.0)}),
    ViTConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16, image_size=8, patch_size=4, n_classes=3, patches="rearrange"),
    ViTConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16, image_size=8, patch_size=4, pool="mean"),
    ViTConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16, image_size=8, patch_size=4, n_classes=3, patches="stem"),
]


def hf_llama(folder: Path, **more) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=32, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.family}")
def test_saved_and_loaded_is_the_same(config, tmp_path):
    model = random_model(config)
    models.save(model, tmp_path / "a")
    loaded = models.load(tmp_path / "a")
    skipped = {"pooler"} if config.family == "bert" else set()
    assert loaded.config.model_dump(exclude=skipped) == config.model_dump(exclude=skipped)
    assert models.config_of(tmp_path / "a") == loaded.config
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(list(model.parameters())) == len(list(loaded.parameters())), "tied stays tied"
    assert loaded.load_report == weights.LoadReport()
    stored = sum(t.numel() for t in load_file(tmp_path / "a" / "model.safetensors").values())
    assert stored == models.count(config)["total"], "each tensor stored once"


def test_a_model_type_is_read_by_one_family():
    types = [kind for family in models.families() for kind in family.weights.MODEL_TYPES]
    assert len(set(types)) == len(types) and set(types) == set(weights.model_types())
    assert all(family.weights is weights.rules_of(family.name) for family in models.families())


# ---------------------------------------------------------------- the table of docs/export.md


TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parents[2] / "docs" / "export.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| family") and line.count("|") == 4
]


SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 24, "dropout": 0.0}


SIZES = {"vit": {"image_size": 8, "patch_size": 4}, "t5": {"vocab_size": 40, "d_head": 6}}


def of_the_table(family: str, settings: str):
    """The small configuration of a row."""
    given = dict(setting.removeprefix("model.").split("=") for setting in re.findall(r"model\.\w+=\S+(?=[ `])", settings))
    given = {key: {} if value == "{}" else value for key, value in given.items()}
    config = {"family": family, **SMALL, **SIZES.get(family, {"vocab_size": 40, "seq_len": 32}), **given}
    return TypeAdapter(Model).validate_python(config)


def auto_class(name: str):
    endings = {"LMHeadModel": "ForCausalLM", "MTModel": "ForSeq2SeqLM", "ForConditionalGeneration": "ForSeq2SeqLM"}
    kind = re.search(r"(LMHeadModel|MTModel|For\w+|Model)$", name)[1]
    return getattr(transformers, "AutoModel" + endings.get(kind, kind.removeprefix("Model")))


def outputs(ours, theirs) -> tuple[torch.Tensor, torch.Tensor]:
    """The same inputs through both: scores, or of a body the last hidden states. 1 is RoBERTa's padding."""
    config = ours.config
    ids, images = torch.randint(2, 30, (2, 9)), torch.randn(2, 3, 8, 8)
    if config.family in ("seq2seq", "t5"):
        return ours(ids, ids[:, :7]), theirs(input_ids=ids, decoder_input_ids=ids[:, :7]).logits
    if config.family == "vit":
        out = theirs(images)
        return (ours(images), out.logits) if config.n_classes else (ours.features(images), out.last_hidden_state)
    got, out = ours(ids), theirs(input_ids=ids)
    if config.family == "bert" and config.head == "pretraining":
        return torch.cat([part.flatten() for part in got]), torch.cat([out.prediction_logits.flatten(), out.seq_relationship_logits.flatten()])
    return got, out.last_hidden_state if getattr(config, "head", "") == "none" else out.logits


@pytest.mark.parametrize(("family", "settings", "known"), TABLE, ids=[f"{family} {settings}" for family, settings, _ in TABLE])
def test_what_transformers_loads_is_what_the_table_says(family, settings, known, tmp_path):
    config = of_the_table(family, settings)
    ours = random_model(config)
    models.save(ours, tmp_path)
    again = models.load(tmp_path).eval()
    assert again.config == config and all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    name, why = weights.loads_in_transformers(config)
    if known == "no":
        assert name is None and "set model." in why
        with pytest.raises(ValueError, match="gradus-"):
            transformers.AutoConfig.from_pretrained(tmp_path)
        return
    assert (name, why) == (known, "")
    theirs, info = auto_class(known).from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == known and not info["unexpected_keys"] and not info["mismatched_keys"]
    got, want = outputs(ours, theirs.eval())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()))


def test_the_table_has_every_family_and_every_class_that_is_written():
    assert {family for family, *_ in TABLE} == set(MODELS)
    assert len(TABLE) == 44


# ---------------------------------------------------------------- shards


def test_transformers_reads_our_shards(tmp_path):
    model = random_model(LLAMA)
    models.save(model, tmp_path, max_shard_bytes=5000)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(sum(t.numel() * 4 for t in load_file(tmp_path / s).values()) <= 5000 for s in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * models.count(LLAMA)["total"]
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(31, (2, 9))
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    again = models.load(tmp_path)
    assert torch.equal(again(ids), model(ids))


def test_we_read_shards_of_transformers(tmp_path):
    theirs = hf_llama(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    ids = torch.randint(31, (2, 9))
    for folder in ("whole", "shards"):
        torch.testing.assert_close(models.load(tmp_path / folder).eval()(ids), theirs(ids).logits)


@pytest.mark.parametrize("protocol", [True, False], ids=["zip", "before torch 1.6"])
def test_pytorch_bin(tmp_path, protocol):
    theirs = hf_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=protocol)
    ids = torch.randint(31, (2, 9))
    torch.testing.assert_close(models.load(tmp_path).eval()(ids), theirs(ids).logits)


# ---------------------------------------------------------------- tied tensors


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_under_either_name(kept, tmp_path):
    theirs = hf_llama(tmp_path, tie_word_embeddings=True)

    def change(tensors):
        table = tensors.pop("model.embed_tokens.weight")
        tensors |= {name: table.clone() for name in ("model.embed_tokens.weight", "lm_head.weight") if kept in (name, "both")}

    rewrite(tmp_path / "model.safetensors", change)
    model = models.load(tmp_path).eval()
    assert model.head.weight is model.token_embedding.weight
    ids = torch.randint(31, (1, 5))
    torch.testing.assert_close(model(ids), theirs(ids).logits)


def test_tied_but_different_is_an_error(tmp_path):
    hf_llama(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.ones(31, 16)}))
    with pytest.raises(UserError, match=r"model.embed_tokens.weight and lm_head.weight differ|lm_head.weight and model.embed_tokens.weight differ"):
        models.load(tmp_path)
    model = models.load(tmp_path, tie_output=False)
    assert model.head.weight.eq(1).all() and not model.token_embedding.weight.eq(1).all()


# ---------------------------------------------------------------- what does not fit


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    hf_llama(tmp_path)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.up_prj.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(17)

    rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(UserError) as e:
        models.load(tmp_path)
    text = str(e.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in text and "extra model.layers.1.mlp.up_prj.weight" in text
    assert "misshapen model.norm.weight (17,) where the model has (16,)" in text and "\n" not in text
    with pytest.raises(UserError, match=r"misshapen model.norm.weight"):  # also when not strict
        models.load(tmp_path, strict=False)


def test_many_missing_tensors_are_counted(tmp_path):
    hf_llama(tmp_path)
    with pytest.raises(UserError, match=r"missing (model\.layers\.2[^,]*, ){5}\.\.\. \(9 in all\)"):
        models.load(tmp_path, n_layers=3)


def test_not_strict_says_what_is_new_and_what_is_unused(tmp_path):
    models.save(random_model(BertConfig(vocab_size=13, n_layers=1, d_model=8, n_heads=2, d_ff=16, head="masked_lm")), tmp_path)
    with pytest.raises(UserError, match=r"missing bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight, classifier.bias; extra cls"):
        models.load(tmp_path, head="classification", n_classes=3, pooler=True)
    model = models.load(tmp_path, strict=False, head="classification", n_classes=3, pooler=True, dropout=0.25)
    assert model.load_report.new == ["pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"]
    assert "cls.predictions.bias" in model.load_report.unused and not model.load_report.reshaped
    assert model.classifier.weight.std() < 0.1 and model.classifier.bias.eq(0).all(), "the paper's initialisation, not memory"
    assert model.dropout.p == 0.25
    assert torch.equal(model.word_embedding.weight, models.load(tmp_path).word_embedding.weight)


def test_a_head_of_another_size(tmp_path):
    models.save(random_model(CONFIGS[-3]), tmp_path)
    with pytest.raises(UserError, match=r"misshapen classifier.* classifier.weight \(3, 8\) where the model has \(5, 8\).*strict=False"):
        models.load(tmp_path, n_classes=5)
    model = models.load(tmp_path, strict=False, n_classes=5)
    assert model.load_report.reshaped == ["classifier.bias", "classifier.weight"] and model.load_report.new == ["head.weight", "head.bias"]
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 5)


def test_weights_of_something_else(tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    save_file({"something": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"none of its tensors belongs to a llama; it holds something"):
        models.load(tmp_path, strict=False)


# ---------------------------------------------------------------- damaged, refused, absent


def test_truncated_safetensors(tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 5, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model.safetensors: not a whole safetensors file .*Copy or download it again") as e:
            models.load(tmp_path)
        assert "\n" not in str(e.value)


def test_checksums_are_those_of_what_lies_there(tmp_path):
    model = random_model(LLAMA)
    models.save(model, tmp_path)
    checksums.write(tmp_path)
    zlib_says = f"{zlib.crc32((tmp_path / 'model.safetensors').read_bytes()):08x}"
    assert json.loads((tmp_path / checksums.FILE).read_text())["model.safetensors"]["crc32"] == zlib_says
    models.load(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors["model.norm.weight"].neg_())
    models.config_of(tmp_path)
    with pytest.raises(UserError, match=r"model\.safetensors is not what was written"):
        models.load(tmp_path)
    models.save(model, tmp_path)
    models.load(tmp_path)


def test_a_pipe_in_the_place_of_checksums_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / checksums.FILE)
    with pytest.raises(UserError, match=r"checksums\.json is not readable"):
        checksums.verify(tmp_path, lambda name: True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_quantized_weight_is_refused_by_name(dtype, kind, tmp_path):
    model = random_model(LLAMA)
    models.save(model, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    if kind == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    fresh = models.build(LLAMA)
    for use in (
        lambda: models.load(tmp_path), lambda: models.load(tmp_path, strict=False), lambda: models.load_weights(fresh, tmp_path),
        lambda: models.convert(tmp_path, tmp_path / "out"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"{name} is stored as \w+: quantized checkpoints are not loaded\. .*float32"):
            use()


def test_missing_shard(tmp_path):
    models.save(random_model(LLAMA), tmp_path, max_shard_bytes=5000)
    next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"model-00002-of-\d+.safetensors: this shard is missing"):
        models.load(tmp_path)


def test_index_that_promises_too_much(tmp_path):
    models.save(random_model(LLAMA), tmp_path, max_shard_bytes=5000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["ghost"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index.json: ghost in none of its shards"):
        models.load(tmp_path)


class Ran:
    """Unpickling this runs code, which weights_only must not do."""

    def __reduce__(self):
        return (os.makedirs, ("ran",))


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models.save(random_model(LLAMA), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2), "b": Ran()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: refused.*Convert it where you trust its author: safetensors"):
        models.load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", b"task: {name: causal_lm}", b"\xd3\x8c"])
def test_damaged_pytorch_bin(content, tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"pytorch_model.bin: refused: not a PyTorch file, or not a whole one"):
        models.load(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_what_git_lfs_leaves_in_a_files_place_is_named(name, tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    if name.endswith(".bin"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS, not the file itself. In its folder: git lfs pull"):
        models.load(tmp_path)


def train_checkpoint(state: dict) -> dict:
    """What Lightning writes beside a state_dict (its documentation, "Contents of a checkpoint")."""
    return {
        "epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.6.6", "state_dict": state, "loops": {}, "callbacks": {}, "lr_schedulers": [],
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}], "hyper_parameters": {"lr": 1e-3, "name": "tiny"},
    }  # fmt: skip


WRAPPED = {
    "DDP": ("pytorch_model.bin", lambda name: f"module.{name}", dict),
    "compiled": ("model.safetensors", lambda name: f"_orig_mod.{name}", dict),
    "both": ("pytorch_model.bin", lambda name: f"module._orig_mod.{name}", dict),
    "layers compiled": ("pytorch_model.bin", lambda name: re.sub(r"(layers\.\d+)", r"\1._orig_mod", name), dict),
    "Lightning": ("epoch=1-step=20.ckpt", lambda name: f"model.{name}", train_checkpoint),
    "Lightning, compiled": ("last.ckpt", lambda name: f"net._orig_mod.{name}", train_checkpoint),
    "Lightning under a usual name": ("pytorch_model.bin", lambda name: f"model.{name}", train_checkpoint),
    "a state_dict of the model itself": ("pytorch_model.bin", str, train_checkpoint),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_what_a_training_program_wraps_is_read_and_said(how, tmp_path, capsys):
    file, named, inside = WRAPPED[how]
    theirs = hf_llama(tmp_path)
    state = {named(name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    if file.endswith(".safetensors"):
        save_file(state, tmp_path / file)
    else:
        torch.save(inside(state), tmp_path / file)
    ids = torch.randint(0, 31, (2, 9))
    for given in (tmp_path, tmp_path / file):
        with torch.no_grad():
            torch.testing.assert_close(models.load(given).eval()(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    said = re.findall(r"^note: (\S+): prefixes of wrappers are removed from the tensors' names: (\S+) is read as (\S+), and so on$", capsys.readouterr().err, re.M)
    assert len(said) == (named is not str), "once"
    for where, stored, read in said:
        assert where in map(str, (tmp_path, tmp_path / file)) and named(read) == stored


def test_what_else_a_training_program_keeps_is_refused_by_name(tmp_path):
    hf_llama(tmp_path)
    state = {f"model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(train_checkpoint({**state, "criterion.weight": torch.ones(3)}), tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"extra .*model\.model\.embed_tokens\.weight"):
        models.load(tmp_path)
    torch.save({**train_checkpoint(state), "hyper_parameters": {"by": Ran()}}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt: refused"):
        models.load(tmp_path)
    (tmp_path / "best.ckpt").touch()
    with pytest.raises(UserError, match=r"Give one of \S+best\.ckpt, \S+last\.ckpt$"):
        models.load(tmp_path)
    torch.save(train_checkpoint(state), tmp_path / "last.ckpt")
    assert torch.equal(models.load(tmp_path / "last.ckpt").head.weight, state["model.lm_head.weight"]), "one of several, by its name"
    for content, why in (({"state_dict": None}, "tensors: state_dict"), ({"state_dict": {1: torch.ones(2)}}, "tensors: 1"), ([1], "not a dictionary")):
        torch.save(content, tmp_path / "a.pth")
        with pytest.raises(UserError, match=why):
            weights.read_tensors(tmp_path / "a.pth")


def test_pickle_of_more_than_tensors(tmp_path):
    torch.save({"model": {"a": torch.ones(2)}, "step": 3}, tmp_path / "a.pth")
    with pytest.raises(UserError, match="not a flat dictionary of tensors: model, step"):
        weights.read_tensors(tmp_path / "a.pth")


# ---------------------------------------------------------------- saving over something, and being killed


def test_saving_over_shards_leaves_none_behind(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    models.save(random_model(LLAMA), tmp_path, max_shard_bytes=5000)
    model = random_model(LLAMA)
    models.save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert torch.equal(models.load(tmp_path).norm.weight, model.norm.weight)


@pytest.mark.parametrize("max_shard_bytes", [5000, 5e9])
def test_killed_at_any_rename(max_shard_bytes, tmp_path, monkeypatch):
    """Whatever the instant, the folder loads as the old model or the new one, or is refused; never as a mixture."""
    old, new = random_model(LLAMA), random_model(LLAMA.model_copy(update={"norm_eps": 0.5}))
    outcomes = set()
    for fatal in range(1, 30):
        folder = tmp_path / str(fatal)
        models.save(old, folder, max_shard_bytes)
        calls = iter(range(1, 1000))

        def dying(function, calls=calls, fatal=fatal):
            def call(*args, **kwargs):
                if next(calls) >= fatal:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying(os.replace))
            patch.setattr(Path, "unlink", dying(Path.unlink))
            patch.setattr(os, "fsync", dying(os.fsync))
            try:
                models.save(new, folder, max_shard_bytes)
                whole = True
            except KeyboardInterrupt:
                whole = False
        try:
            loaded = models.load(folder)
        except UserError:
            outcomes.add("refused")
        else:
            state = loaded.state_dict()
            equal = {name: all(torch.equal(state[k], v) for k, v in m.state_dict().items()) for name, m in (("old", old), ("new", new))}
            which = [name for name, m in (("old", old), ("new", new)) if equal[name] and loaded.config == m.config]
            assert which == ["new"] if whole else which, "a mixture"
            outcomes.update(which)
        models.save(new, folder, max_shard_bytes)  # and the next save mends it
        assert torch.equal(models.load(folder).norm.weight, new.norm.weight)
        if whole:
            break
    assert whole and outcomes == {"old", "refused", "new"}


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write the weights .*No space left on device"):
        models.save(random_model(LLAMA), tmp_path / "a")
    assert not list((tmp_path / "a").iterdir())


# ---------------------------------------------------------------- Meta's layout and llama2.c's


def reference(state: dict[str, torch.Tensor], ids: torch.Tensor, n_heads: int, theta: float = 10_000.0, eps: float = 1e-5) -> torch.Tensor:
    """Llama from Meta's tensors by complex rotation of neighbouring channels (Su et al. 2021, equation 13; Touvron et al. 2023).

    ids (seq) -> logits (seq, vocab)."""

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    x = state["tok_embeddings.weight"][ids]  # (seq, d)
    head_dim = x.shape[1] // n_heads
    angle = torch.arange(len(ids))[:, None] * theta ** -(torch.arange(0, head_dim, 2) / head_dim)  # (seq, head_dim / 2)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # (seq, 1, head_dim / 2)
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    layer = 0
    while f"layers.{layer}.attention.wq.weight" in state:
        part = {k.removeprefix(f"layers.{layer}."): v for k, v in state.items()}
        y = norm(x, part["attention_norm.weight"])
        q, k, v = (F.linear(y, part[f"attention.{w}.weight"]).unflatten(1, (-1, head_dim)) for w in ("wq", "wk", "wv"))  # (seq, heads, head_dim)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(2, (-1, 2))) * turn).flatten(2) for t in (q, k))
        k, v = (t.repeat_interleave(n_heads // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        attention = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", attention, v).flatten(1), part["attention.wo.weight"])
        y = norm(x, part["ffn_norm.weight"])
        gate, up = (F.linear(y, part[f"feed_forward.{w}.weight"]) for w in ("w1", "w3"))
        x = x + F.linear(F.silu(gate) * up, part["feed_forward.w2.weight"])
        layer += 1
    return F.linear(norm(x, state["norm.weight"]), state["output.weight"])


V, D, FF, H, KV, LAYERS = 30, 16, 24, 4, 2, 2


SPLIT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}  # Touvron's tensor parallelism


def meta_state() -> dict[str, torch.Tensor]:
    shapes = {"tok_embeddings.weight": (V, D), "norm.weight": (D,), "output.weight": (V, D)}
    kv = KV * D // H
    for i in range(LAYERS):
        part = {"attention.wq": (D, D), "attention.wk": (kv, D), "attention.wv": (kv, D), "attention.wo": (D, D), "attention_norm": (D,),
                "feed_forward.w1": (FF, D), "feed_forward.w2": (D, FF), "feed_forward.w3": (FF, D), "ffn_norm": (D,)}  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in part.items()}
    return {name: torch.randn(shape) / 2 for name, shape in shapes.items()}


def write_meta(folder: Path, state: dict, n_shards: int, embedding_dim: int, **params) -> None:
    given = {"dim": D, "n_layers": LAYERS, "n_heads": H, "n_kv_heads": KV, "vocab_size": -1}
    given |= {"multiple_of": 8, "ffn_dim_multiplier": 0.56, "norm_eps": 1e-5}
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps({k: v for k, v in {**given, **params}.items() if v is not None}))
    for rank in range(n_shards):
        shard = {}
        for name, tensor in state.items():
            dim = {**SPLIT, "tok_embeddings": embedding_dim}.get(name.split(".")[-2])
            shard[name] = tensor if dim is None else tensor.chunk(n_shards, dim)[rank].clone()
        torch.save({**shard, "rope.freqs": torch.ones(2)}, folder / f"consolidated.{rank:02}.pth")


@pytest.mark.parametrize("n_shards", [1, 2])
@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["Llama 3 splits the vocabulary", "Llama 2 the width"])
def test_meta_layout(n_shards, embedding_dim, tmp_path):
    state = meta_state()
    write_meta(tmp_path / "meta", state, n_shards, embedding_dim, rope_theta=500.0)
    model = models.load(tmp_path / "meta").eval()
    assert (model.config.vocab_size, model.config.d_ff, model.config.tie_output) == (V, FF, False)
    ids = torch.randint(V, (9,))
    torch.testing.assert_close(model(ids[None])[0], reference(state, ids, H, theta=500.0), atol=1e-4, rtol=1e-4)
    models.save(model, tmp_path / "hf")  # and on to Hugging Face
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(theirs(ids[None]).logits[0], reference(state, ids, H, theta=500.0), atol=1e-4, rtol=1e-4)
    assert models.config_of(tmp_path / "meta") == model.config


def test_meta_layout_tied_and_scaled(tmp_path):
    state = meta_state()
    state["output.weight"] = state["tok_embeddings.weight"]
    write_meta(tmp_path, state, 1, 0, use_scaled_rope=True, vocab_size=V)
    config = models.config_of(tmp_path)
    assert config.tie_output and config.rope_scaling == RopeScaling(factor=32.0) and config.seq_len == 131072  # Llama 3.2
    model = models.load(tmp_path)
    assert model.head.weight is model.token_embedding.weight
    write_meta(tmp_path, meta_state(), 1, 0, use_scaled_rope=True, vocab_size=V)
    assert models.config_of(tmp_path).rope_scaling == RopeScaling(factor=8.0)  # Llama 3.1


def test_meta_layout_mistakes(tmp_path):
    write_meta(tmp_path / "a", meta_state(), 2, 1)
    (tmp_path / "a" / "consolidated.01.pth").rename(tmp_path / "a" / "consolidated.02.pth")
    with pytest.raises(UserError, match=r"consolidated.01.pth missing beside consolidated.02.pth"):
        models.load(tmp_path / "a")
    (tmp_path / "a" / "consolidated.02.pth").unlink()
    with pytest.raises(UserError, match=r"misshapen model.embed_tokens.weight \(30, 8\) where the model has"):
        models.load(tmp_path / "a")
    for params, error in [
        ({"moe": {}}, "params.json: moe is not supported by family llama"),
        ({"dim": None}, "params.json: dim is missing"),
        ({"n_kv_heads": 3}, "params.json: n_heads=4 is not a multiple of n_kv_heads=3"),
    ]:
        write_meta(tmp_path / "b", meta_state(), 1, 0, **params)
        with pytest.raises(UserError, match=error):
            models.load(tmp_path / "b")
    torch.save({"norm.weight": Ran()}, tmp_path / "b" / "consolidated.00.pth")
    with pytest.raises(UserError, match=r"consolidated.00.pth: refused"):
        models.load(tmp_path / "b")
    (tmp_path / "b" / "consolidated.00.pth").unlink()
    with pytest.raises(UserError, match=r"params.json but no consolidated.\*.pth"):
        models.load(tmp_path / "b")


def write_llama2c(file: Path, state: dict, tied: bool) -> None:
    """Version 0, in the order of llama2.c's memory_map_weights."""

    def stack(name):
        return [state[f"layers.{i}.{name}.weight"] for i in range(LAYERS)]

    order = [state["tok_embeddings.weight"], *stack("attention_norm"), *stack("attention.wq"), *stack("attention.wk"), *stack("attention.wv"),
             *stack("attention.wo"), *stack("ffn_norm"), *stack("feed_forward.w1"), *stack("feed_forward.w2"), *stack("feed_forward.w3"),
             state["norm.weight"], torch.zeros(2, 10, D // H // 2), *([] if tied else [state["output.weight"]])]  # fmt: skip
    header = struct.pack("<7i", D, FF, LAYERS, H, KV, V if tied else -V, 10)
    file.write_bytes(header + b"".join(t.contiguous().numpy().tobytes() for t in order))


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c(tied, tmp_path):
    state = meta_state()
    if tied:
        state["output.weight"] = state["tok_embeddings.weight"]
    write_llama2c(tmp_path / "a.bin", state, tied)
    model = models.load(tmp_path / "a.bin").eval()
    assert model.config.seq_len == 10 and model.config.tie_output is tied and models.config_of(tmp_path / "a.bin") == model.config
    ids = torch.randint(V, (9,))
    torch.testing.assert_close(model(ids[None])[0], reference(state, ids, H), atol=1e-4, rtol=1e-4)


def test_llama2c_mistakes(tmp_path):
    file = tmp_path / "a.bin"
    write_llama2c(file, meta_state(), tied=False)
    whole = file.read_bytes()
    for content, error in [
        (whole[:-4], r"a.bin: \d+ bytes, where its header asks for \d+. Copy or download it again"),
        (whole[:20], "not the header of a whole llama2.c checkpoint"),
        (b"x" * 100, "not the header of a whole llama2.c checkpoint"),
        (struct.pack("<Ii", 0x616B3432, 2) + whole, "Export it again with --version 0"),
    ]:
        file.write_bytes(content)
        with pytest.raises(UserError, match=error):
            models.load(file)
    torch.save({"a": torch.ones(2)}, file)
    with pytest.raises(UserError, match="give the folder that also holds"):
        models.load(file)


# ---------------------------------------------------------------- fields of config.json

PUBLISHED = {
    "Bert": ("BertForMaskedLM", "BertForSequenceClassification", "BertModel", "BertForPreTraining"), "GPT2": ("GPT2LMHeadModel",),
    "T5": ("T5ForConditionalGeneration",), "Llama": ("LlamaForCausalLM",), "Mistral": ("MistralForCausalLM",), "Mixtral": ("MixtralForCausalLM",),
    **{kind: (f"{kind}ForCausalLM",) for kind in ("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")}, "ViT": ("ViTForImageClassification",), "IJepa": ("IJepaModel",), "Marian": ("MarianMTModel",),
    "Pegasus": ("PegasusForConditionalGeneration",),
    **{kind: tuple(f"{kind}For{head}" for head in ("MaskedLM", "SequenceClassification"))
       for kind in ("Roberta", "XLMRoberta", "Camembert", "DistilBert", "ModernBert")},
}  # fmt: skip
NEEDED = {"Mistral": {"sliding_window": None}, "Marian": {"scale_embedding": True}, "Pegasus": {"scale_embedding": True}}  # what ours is


def written(folder: Path, hf: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(hf, default=str))
    return folder


@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_field_of_a_published_configuration_is_known_and_an_invented_one_is_refused(kind, tmp_path):
    usual = getattr(transformers, f"{kind}Config")(**NEEDED.get(kind, {})).to_dict()
    for architecture in PUBLISHED[kind]:
        hf = usual | {"architectures": [architecture]}
        config = models.config_of(written(tmp_path, hf))
        assert config == models.config_of(written(tmp_path, hf | {"invented": None, "_of_a_library": 3, "pruned_heads": {}}))
        for name, value in (("invented", 0.5), ("quantization_config", {"quant_method": "gptq", "bits": 4}), ("auto_map", {"AutoModel": "m.M"})):
            with pytest.raises(UserError, match=rf"{name}=.*: unknown for model_type={usual['model_type']}"):
                models.config_of(written(tmp_path, hf | {name: value}))


MIXED = transformers.Qwen2Config(
    num_hidden_layers=4, use_sliding_window=True, sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
).to_dict()  # fmt: skip


def test_an_unknown_field_of_rotary_positions_is_refused(tmp_path):
    hf = transformers.LlamaConfig().to_dict()
    with pytest.raises(UserError, match=r"attention_factor=0\.5: unknown for rope_parameters"):
        models.config_of(written(tmp_path, hf | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "attention_factor": 0.5}}))
    with pytest.raises(UserError, match="layer_types"):
        models.config_of(written(tmp_path, MIXED))


# theirs, of which each is said to change nothing of what a model computes; another value than the usual one
HARMLESS = {
    "Bert": {"classifier_dropout": 0.4, "attention_probs_dropout_prob": 0.5, "initializer_range": 3.0, "directionality": "left", "use_cache": False},
    "GPT2": {"n_ctx": 4, "reorder_and_upcast_attn": True, "summary_type": "mean", "embd_pdrop": 0.7, "is_decoder": True, "top_k": 3},
    "T5": {"n_positions": 3, "classifier_dropout": 0.4, "initializer_factor": 5.0, "is_decoder": True, "max_length": 3},
    "Llama": {"pretraining_tp": 2, "attention_dropout": 0.5, "add_cross_attention": True, "is_encoder_decoder": True},
    "Mixtral": {"router_aux_loss_coef": 0.9, "output_router_logits": True},
    "Qwen3Moe": {"router_aux_loss_coef": 0.9, "output_router_logits": True, "max_window_layers": 1, "sliding_window": 2},
    "ViT": {"encoder_stride": 3, "pooler_act": "relu", "attention_probs_dropout_prob": 0.5},
    "Marian": {"attention_dropout": 0.5, "normalize_before": True, "static_position_embeddings": True, "num_beams": 4},
}  # fmt: skip
THEIR_SIZES = {
    **{
        kind: {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        for kind in ("Bert", "Llama", "Mixtral", "Qwen3Moe", "ViT")
    },
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2}, "T5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "Marian": {"d_model": 16, "pad_token_id": 29, "decoder_start_token_id": 29, "decoder_vocab_size": 30, "scale_embedding": True} | {
        f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_field_said_to_be_without_effect_changes_no_output_of_theirs_or_ours(kind, tmp_path):
    size = THEIR_SIZES[kind] | ({"image_size": 8, "patch_size": 4} if kind == "ViT" else {"vocab_size": 30})
    size |= {"num_key_value_heads": 2} if kind in ("Llama", "Mixtral", "Qwen3Moe") else {}
    size |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if kind == "Qwen3Moe" else {}
    make = getattr(transformers, PUBLISHED[kind][0])
    theirs = make(getattr(transformers, f"{kind}Config")(**size)).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(1, 29, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": torch.ones(2, 3, 8, 8)} if kind == "ViT" else {"input_ids": ids}
    inputs |= {"decoder_input_ids": ids} if kind in ("T5", "Marian") else {}
    with torch.no_grad():
        expected, ours = theirs(**inputs).logits, models.load(tmp_path).eval()(*inputs.values())
        hf = json.loads((tmp_path / "config.json").read_text())
        for name, value in HARMLESS[kind].items():
            written(tmp_path, hf | {name: value})
            torch.testing.assert_close(make.from_pretrained(tmp_path).eval()(**inputs).logits, expected, msg=name)
            assert models.load(tmp_path).eval()(*inputs.values()).equal(ours), name


# ---------------------------------------------------------------- what training starts from


def test_a_start_that_lacks_more_than_a_classifiers_head_is_refused(tmp_path):
    hf_llama(tmp_path / "whole")
    config = models.config_of(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    faults = {
        "twice": ({f"model.{name}": tensor for name, tensor in tensors.items()}, r"20 of the model's 21 tensors are not in it, which has model\.model"),
        "headless": ({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, r"head\.weight would start from random values"),
    }
    for name, (stored, said) in faults.items():
        (tmp_path / name).mkdir()
        save_file(stored, tmp_path / name / "model.safetensors")
        written(tmp_path / name, json.loads((tmp_path / "whole" / "config.json").read_text()))
        with pytest.raises(UserError, match=said):
            models.load_start(config.model_copy(update={"init": str(tmp_path / name)}), seed=0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    transformers.BertForMaskedLM(transformers.BertConfig(**small, attention_probs_dropout_prob=0.3, classifier_dropout=0.5)).save_pretrained(tmp_path / "bert")
    start = models.config_of(tmp_path / "bert").model_copy(update={"init": str(tmp_path / "bert"), "head": "classification", "n_classes": 2})
    report = models.load_start(start, seed=0).report
    assert report.new == ["pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"]
    assert report.unused[-1] == "attention_probs_dropout_prob=0.3 (config.json)", "which training has not"
