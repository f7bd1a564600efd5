"""Which model a name means, which tokenizer is its own, and what its texts become before the model reads them."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from small_models import LLAMA, flip, saved

from gradus import models
from gradus.data import tokenizers
from gradus.data.tokenizers import ByteTokenizer, CharTokenizer, train_bpe
from gradus.errors import InputError, UserError
from gradus.infer import Encoded, encode, end_tokens, find, fits, readable, sidecar, special
from gradus.infer.quantized import write as write_quantized
from gradus.models.weights import checksums
from gradus.recipe.schema import Adapter, LlamaConfig

WORDS = ["the ball she saw was red and round", "a red ball and a round one"] * 3


@pytest.fixture(scope="module")
def bpe() -> tokenizers.FastTokenizer:
    return train_bpe(WORDS, 280)


def published(family: str, folder, tokenizer, **more):
    """A model without a recipe, with a tokenizer beside it."""
    saved(family, folder, **{"vocab_size": tokenizer.vocab_size, **more})
    tokenizer.save(folder)
    source = find(str(folder))
    return source, source.tokenizers()


def test_a_run_is_its_best_checkpoint_with_its_recipe(tmp_path):
    from gradus import recipe as recipes

    run = tmp_path / "run"
    for name in ("step-00000002", "step-00000010"):
        saved("seq2seq", run / "checkpoints" / name)
    (run / "recipe.yaml").write_text(recipes.dump(recipes.load("copy-task", ["train.seed=7"])))
    newest = find(str(run))
    assert newest.path == run / "checkpoints" / "step-00000010" and newest.recipe.train.seed == 7, "10 comes after 2"
    saved("seq2seq", run / "checkpoints" / "best")
    assert find(str(run)).path == run / "checkpoints" / "best"
    assert find(str(run / "checkpoints" / "step-00000002")).recipe.train.seed == 7, "a checkpoint belongs to its run"
    saved("seq2seq", tmp_path / "alone" / "checkpoints" / "best")
    assert find(str(tmp_path / "alone" / "checkpoints" / "best")).recipe is None


def test_weights_are_the_files_that_are_read(tmp_path):
    saved("gpt", tmp_path)
    for name in ("training.safetensors", "optimizer.bin", "rng_state.pth"):
        (tmp_path / name).write_bytes(b"moments")
    assert [p.name for p in find(str(tmp_path)).weights()] == ["model.safetensors"]
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "shard-1.safetensors").write_bytes(b"part")
    assert [p.name for p in find(str(tmp_path)).weights()] == ["shard-1.safetensors"]


def test_what_is_kept_of_a_model_is_of_all_that_it_computes_with(tmp_path):
    """Graphs, checks and the fastest engine are kept by this: of an adapter also by its base and its scale."""
    saved("gpt", tmp_path / "base")
    start = models.config_of(tmp_path / "base").model_copy(update={"init": str(tmp_path / "base")}).trained(Adapter(rank=2))
    models.save(models.load_start(start, 0).on("cpu"), tmp_path / "adapter")
    (tmp_path / "adapter" / "gradus_config.json").unlink()  # as PEFT's own
    about, seen = tmp_path / "adapter" / "adapter_config.json", []
    for change in (lambda: None, lambda: about.write_text(about.read_text().replace("16.0", "32")), lambda: flip(tmp_path / "base" / "model.safetensors")):
        change()
        seen.append(find(str(tmp_path / "adapter")).content())
    folder = tmp_path / "made"
    quantized = write_quantized(folder, models.load(tmp_path / "base"), "int8", {})
    for told in ("checked", "checked again"):
        (folder / "quantized.json").write_text(json.dumps(quantized | {"told": told}))
        checksums.write(folder)
        seen.append(find(str(folder)).content())
    assert all(one != other for one, other in itertools.combinations(seen, 2))


def test_a_peft_folder_takes_from_its_base_what_it_lacks(tmp_path, bpe):
    published("gpt", tmp_path / "base", bpe)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    start = models.config_of(tmp_path / "base").model_copy(update={"init": str(tmp_path / "base")}).trained(Adapter(rank=2))
    models.save(models.load_start(start, 0).on("cpu"), tmp_path / "adapter")
    source = find(str(tmp_path / "adapter"))
    assert end_tokens(source, source.tokenizers()[""]) == [7, 9]
    sidecar.write(source, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "generation_config.json").read_text()) == {"eos_token_id": [7, 9]}


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path, bpe):
    source, own = published("gpt", tmp_path / "model", bpe)
    assert own[""].fingerprint == bpe.fingerprint and source.tokenizers() is own, "read once"
    ByteTokenizer().save(tmp_path / "bytes")
    assert source.tokenizers(str(tmp_path / "bytes"))[""].vocab_size == 260, "fewer are none of the model's business"
    train_bpe(WORDS, 284).save(tmp_path / "more")
    with pytest.raises(UserError, match=r"this tokenizer has 284 tokens and the model 280.* Leave --tokenizer out"):
        source.tokenizers(str(tmp_path / "more"))
    train_bpe(WORDS, 284).save(tmp_path / "model")
    with pytest.raises(UserError, match=r"gradus generate takes another: --tokenizer PATH"):
        find(str(tmp_path / "model")).tokenizers()


def test_a_precision_that_only_a_quantized_folder_has(tmp_path):
    saved("gpt", tmp_path)
    with pytest.raises(UserError, match=r"precision='int8': .* gradus quantize .* writes a folder that has it"):
        find(str(tmp_path)).load("int8")
    half = find(str(tmp_path)).load("bf16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and not half.training


def test_a_folder_for_engines_is_as_it_was_written_or_refused(tmp_path):
    folder = tmp_path / "made"
    model = saved("bert", tmp_path / "model")
    about = write_quantized(folder, model, "int8", {})
    (folder / "quantized.json").write_text(json.dumps(about | {"told": "checked"}))
    with pytest.raises(UserError, match=r"checksums\.json is missing, so it cannot be verified"):
        find(str(folder))
    checksums.write(folder)
    assert find(str(folder)).export_info["told"] == "checked"
    (folder / "quantized.json").write_text(json.dumps(about | {"told": "changed"}))
    with pytest.raises(UserError, match=r"quantized\.json (is not what was written|has \d+ bytes).* gradus quantize"):
        find(str(folder))
    (folder / "quantized.json").write_text(json.dumps({"told": "of another version"}))
    checksums.write(folder)
    with pytest.raises(UserError, match=r"quantized\.json has another version"):
        find(str(folder))


def with_template(bpe: tokenizers.FastTokenizer, first: int | None, last: int | None) -> tokenizers.FastTokenizer:
    again = copy.deepcopy(bpe)
    again.around(first, last)
    return again


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_published_decoders_texts_begin_and_end_as_its_tokenizer_says(tmp_path, bpe, family):
    for begin, end in ((bpe.bos_id, None), (None, None), (None, bpe.eos_id), (bpe.bos_id, bpe.eos_id)):
        source, own = published(family, tmp_path / f"{begin} {end}", with_template(bpe, begin, end))
        (row,) = encode(source, own, ["red ball"]).prompts
        assert row == [i for i in (begin, *bpe.encode("red ball"), end) if i is not None]
        (empty,) = encode(source, own, [""]).prompts
        assert empty == ([i for i in (begin, end) if i is not None] or [bpe.bos_id]), "it has something to start from"


def test_an_encoder_decoder_reads_what_its_tokenizer_says_and_starts_from_its_own_token(tmp_path, bpe):
    for family, start, begin in (("t5", bpe.pad_id, None), ("seq2seq", bpe.bos_id, bpe.bos_id)):
        source, own = published(family, tmp_path / family, with_template(bpe, begin, bpe.eos_id))
        want = [[i for i in (begin, *bpe.encode(text), bpe.eos_id) if i is not None] for text in WORDS[:2]]
        assert encode(source, own, WORDS[:2]) == Encoded([[start]] * 2, want, [bpe.eos_id])
        with pytest.raises(InputError, match="an empty text"):
            encode(source, own, ["red", ""])


def test_what_ends_a_text(tmp_path, bpe):
    source, own = published("gpt", tmp_path, bpe)
    file = tmp_path / "generation_config.json"
    assert end_tokens(source, own[""]) == [bpe.eos_id]
    for said, ends in ((7, [7]), ([7, 9], [7, 9]), (None, [bpe.eos_id]), (0, [0])):
        file.write_text(json.dumps({"eos_token_id": said}))
        assert end_tokens(source, own[""]) == ends
    config = json.loads((tmp_path / "config.json").read_text())
    for said, ends in (([7, 9], [7, 9]), (5, [5]), (None, [bpe.eos_id])):  # with none there, config.json's count
        (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": said}))
        for file_says in ({}, {"eos_token_id": 3}):
            file.write_text(json.dumps(file_says))
            assert end_tokens(source, own[""]) == ([3] if file_says else ends)
    for wrong in (280, -1, "</s>", True, [3, 280], 1.0):
        file.write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(UserError, match="eos_token_id: expected an id below 280 or a list of them"):
            end_tokens(source, own[""])


def test_the_first_role_that_a_tokenizer_has(bpe):
    assert special(bpe, "cls", "bos") in (bpe.cls_id, bpe.bos_id)
    letters = CharTokenizer("abc", ("<pad>",))
    assert special(letters, "eos", "sep") is None and special(letters, "eos", "pad") == 0, "0 is an id"


def test_texts_that_do_not_fit(tmp_path, bpe):
    source, own = published("gpt", tmp_path, bpe, seq_len=8)
    long = "red ball and a round one the ball she saw"
    n = len(bpe.encode(long))
    assert n > 8
    with pytest.raises(InputError, match=rf"text 2 \('red ball and a round one the b…'\) has {n} tokens, more than the 8"):
        encode(source, own, ["red", long])
    assert encode(source, own, [long], fit=False).prompts == [bpe.encode(long)]
    fits(["x"], [[1] * 8], 8)
    fits(["x"], [[1] * 10_000], None)
    with pytest.raises(InputError, match="text 1 "):
        fits(["x"], [[1] * 9], 8)
    readable(["x" * 2048], 8)  # 256 characters a token
    with pytest.raises(InputError, match="has 2,049 characters, more than fit into 8 tokens"):
        readable(["x" * 2049], 8)


def test_the_files_of_llama2c_end_at_the_next_texts_begin(tmp_path, bpe):
    """Its .bin has no end token: a text ends where the next would begin."""
    config = LlamaConfig(**LLAMA.model_dump() | {"vocab_size": bpe.vocab_size})
    models.save(models.build(config, seed=0), tmp_path / "folder")
    bpe.save(tmp_path / "folder")
    source = find(str(tmp_path / "folder"))
    assert end_tokens(source, bpe) == [bpe.eos_id]
    source.path = tmp_path / "folder" / "model.safetensors"  # a file, as a .bin is
    assert end_tokens(source, bpe) == [bpe.bos_id]
