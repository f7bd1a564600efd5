"""GGUF files: names by the tables of the package gguf, keys as stated, weights and rotary frequencies by transformers."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    FastTokenizer,
    WordTokenizer,
    package_tokenizers,
    train_bpe,
)
from gradus.errors import UserError
from gradus.infer import export_gguf, find, gguf_tokenizer
from gradus.models.weights import checksums
from gradus.models.weights.gguf import Layout
from gradus.recipe.schema import Adapter, Model

sys.path.insert(0, str(Path(__file__).parent))
from gguf_parts import CASES, CHAT, LLAMA3_SPLIT, QWEN_SPLIT, TEXT, bpe, pieces, saved, spaced, write
from small_models import flip

gguf = pytest.importorskip("gguf", reason="the extra gguf brings it")
transformers = pytest.importorskip("transformers")
MODEL = transformers.AutoModelForCausalLM

@pytest.mark.parametrize("arch", CASES)
def test_names_and_logits_are_those_of_others(arch, tmp_path, capsys):
    from safetensors import safe_open

    model = saved(tmp_path / "model", **CASES[arch])
    keys, tensors = write(tmp_path / "model", tmp_path / "out")
    assert "checked against PyTorch in fp32" in capsys.readouterr().out and keys["general.architecture"] == arch
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        theirs = file.keys()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    stacked = {re.sub(r"experts\.\d+", "experts", name) for name in theirs}
    assert {*tensors} == {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in stacked}
    fp32 = {name for name, tensor in tensors.items() if tensor.tensor_type.name == "F32"}
    assert {tensor.tensor_type.name for name, tensor in tensors.items() if name not in fp32} == {"F16"}
    routers = {f"blk.{i}.ffn_gate_inp.weight" for i in range(2)}
    assert {name for name in fp32 if len(tensors[name].shape) > 1} == {*tensors} & {"position_embd.weight", *routers}
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")  # its own reading of the keys lacks some of them
    read = MODEL.from_pretrained(tmp_path / "out", gguf_file="model.gguf", config=config, dtype=torch.float32)
    ids = torch.randint(400, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids=ids).logits, model(ids=ids), rtol=0, atol=2e-3)


def test_keys_say_what_the_model_is(tmp_path):
    saved(tmp_path / "moe", **CASES["qwen3moe"], rope_theta=5e5, rope_scaling={"type": "yarn", "factor": 4.0, "original_seq_len": 24})
    (tmp_path / "moe" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    keys, _ = write(tmp_path / "moe", tmp_path / "a", "--type", "bf16")
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert {name.removeprefix("qwen3moe."): value for name, value in keys.items() if name.startswith("qwen3moe.")} == {
        "block_count": 2, "context_length": 96, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 416,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "rope.freq_base": 5e5, "rope.dimension_count": 32,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
    }  # fmt: skip
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items() if name.startswith("tokenizer.ggml.")}
    assert (own["model"], own["pre"], own["eos_token_id"], own["eot_token_id"], own["padding_token_id"]) == ("gpt2", "qwen2", 2, 0, 0)
    assert (own["add_bos_token"], own["add_eos_token"]) == (False, False) and keys["tokenizer.chat_template"] == CHAT
    state = json.loads((tmp_path / "moe" / "tokenizer.json").read_text())["model"]
    assert own["merges"] == [" ".join(pair) for pair in state["merges"]]
    assert dict(zip(own["tokens"], range(416))) == state["vocab"] | {f"[PAD{i}]": i for i in range(len(state["vocab"]), 416)}
    kinds = gguf.TokenType
    assert own["token_type"] == [kinds.CONTROL] * 3 + [kinds.NORMAL] * (len(state["vocab"]) - 3) + [kinds.UNUSED] * (416 - len(state["vocab"]))
    own = {"n_layers": 3, "full_every": 3, "local_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 8.0}}
    saved(tmp_path / "gemma", **CASES["gemma3"] | own)
    keys, _ = write(tmp_path / "gemma", tmp_path / "b")
    local = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False], "rope.freq_base_swa": 5e3}
    expected = {**local, "rope.freq_base": 1e6}
    assert {name: keys[f"gemma3.{name}"] for name in expected} == expected and keys["gemma3.rope.scaling.factor"] == 8.0


def test_several_chat_templates_have_names(tmp_path):
    tokenizer, folder = bpe(QWEN_SPLIT), tmp_path / "model"
    tokenizer.beside |= {f"additional_chat_templates/{name}.jinja": f"{{# {name} #}}" for name in ("rag", "tool-use")}
    saved(folder, tokenizer, **CASES["qwen3"])
    keys, _ = write(folder, tmp_path / "out")
    theirs = {one["name"]: one["template"] for one in gguf.SpecialVocab(folder).chat_template}  # as llama.cpp's own conversion reads them
    assert sorted(keys["tokenizer.chat_templates"]) == ["rag", "tool_use"] and keys["tokenizer.chat_template"] == theirs["default"] == CHAT
    assert [keys[f"tokenizer.chat_template.{name}"] for name in ("rag", "tool_use")] == [theirs["rag"], theirs["tool-use"]]


def test_frequencies_of_llama_3_are_a_tensor(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"type": "llama3", "factor": 8.0, "original_seq_len": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    saved(tmp_path / "model", **CASES["llama"], rope_theta=5e5, rope_scaling=scaling)
    keys, tensors = write(tmp_path / "model", tmp_path / "out")
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path / "model")
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(torch.from_numpy(tensors["rope_freqs.weight"].data.copy()), plain / stretched)
    assert "llama.rope.scaling.type" not in keys and keys["llama.rope.freq_base"] == 5e5


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantized_weights_keep_the_perplexity(kind, tmp_path):
    model = saved(tmp_path / "model", alpha=0.1, **CASES["qwen3"])
    _, tensors = write(tmp_path / "model", tmp_path / "out", "--type", kind)
    types = {name.rpartition("blk.0.")[2]: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert (types["attn_q.weight"], types["token_embd.weight"], types["attn_q_norm.weight"]) == (kind.upper(), "Q8_0", "F32")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    read = MODEL.from_pretrained(tmp_path / "out", gguf_file="model.gguf", config=config, dtype=torch.float32)
    ids = torch.randint(400, (16, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        draws = torch.distributions.Categorical(logits=model(ids=ids))
        torch.manual_seed(0)
        wanted = draws.sample()
        losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), wanted.flatten()).exp() for x in (read(input_ids=ids).logits, draws.logits)]
    assert losses[0] / losses[1] - 1 < {"q8_0": 0.01, "q4_0": 0.25}[kind]


def test_an_adapter_is_merged(tmp_path):
    saved(tmp_path / "base", **CASES["llama"])
    start = models.config_of(tmp_path / "base").model_copy(update={"init": str(tmp_path / "base")}).trained(Adapter(rank=2))
    adapted = models.load_start(start, 0).on("cpu")
    with torch.no_grad():
        for p in adapted.parameters():
            p.add_(0.05 * p.requires_grad)
    models.save(adapted, tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    (of_adapter, of_base, of_merged) = (write(tmp_path / name, tmp_path / f"{name}-gguf")[1] for name in ("adapter", "base", "merged"))
    assert all((of_adapter[name].data == of_merged[name].data).all() for name in of_merged)
    assert not (of_adapter["blk.0.attn_q.weight"].data == of_base["blk.0.attn_q.weight"].data).all()


WORDS = {"words": WordTokenizer(["a"]), "characters": CharTokenizer("ab"), "bytes": ByteTokenizer()}


@pytest.mark.parametrize(("config", "tokenizer", "words", "told"), [
    ({"family": "bert"}, None, (), "--as gguf: bert is not written, but llama, qwen2, qwen3, qwen3_moe, gemma3_text, gpt2. Use --as hf"),
    ({"family": "llama", "window": 8}, None, (), "--as gguf: mistral is not written"),
    ({**CASES["qwen3"], "window": 8}, None, (), "llama.cpp computes qwen3 with model.window=None alone, not 8"),
    ({**CASES["qwen3moe"], "norm_top_k": False}, None, (), "computes qwen3moe with model.norm_top_k=True alone, not False"),
    ({**CASES["gemma3"], "query_width": 48}, None, (), "computes gemma3 with model.query_width=32 alone, not 48"),
    ({**CASES["gemma3"], "n_layers": 62}, None, (), "computes gemma3 with model.query_width=16 alone, not 32"),  # as Gemma 3 27B
    ({"family": "gpt", "activation": "relu"}, None, (), "computes gpt2 with model.activation=gelu_tanh alone, not relu"),
    ({**CASES["qwen2"], "rope_scaling": {"type": "llama3"}}, None, (), "computes qwen2 with model.rope_scaling=None alone, not type='llama3'"),
    ({**CASES["llama"], "rope_scaling": {"type": "yarn", "beta_fast": 16.0}}, None, (), "alone, not type='yarn'"),
    (CASES["gpt2"], "words", (), "--as gguf: llama.cpp has no tokenizer of kind word"),
    (CASES["gpt2"], "characters", (), "--as gguf: llama.cpp has no tokenizer of kind char"),
    (CASES["gpt2"], "bytes", (), "--as gguf: llama.cpp has no tokenizer of kind byte"),
    (CASES["gpt2"], None, ("--type", "q4_k_m"), "--type=q4_k_m: f32, f16, bf16, q8_0, q4_0 are written; K-quants and others are made of f16: llama-"),
    (CASES["gpt2"], None, ("--precision", "fp16"), "--as gguf: --as gguf has --type, all others --precision"),
])  # fmt: skip
def test_what_llama_cpp_does_not_have_is_told(config, tokenizer, words, told, tmp_path, capsys):
    saved(tmp_path / "model", WORDS.get(tokenizer), **config)
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert told in err[-1] and not (tmp_path / "out").exists()


def test_a_type_is_of_gguf_alone(tmp_path, capsys):
    saved(tmp_path / "model", **CASES["gpt2"])
    for kind in ("q8_0", "f16"):  # a later one takes the place of an earlier one
        assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "file"), "--as", "gguf", "--type", kind]) == 0
        assert f"gpt2, {kind}" in capsys.readouterr().out and (tmp_path / "file/model.gguf").is_file()
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--type", "q8_0"]) == 2
    assert "--as hf: --as gguf has --type, all others --precision" in capsys.readouterr().err


def test_a_tokenizer_that_is_spelt_otherwise_is_refused():
    split = r"\d+|\D+"
    normalizers = package_tokenizers().normalizers
    composing = [spaced(kind()) for kind in (normalizers.Lowercase, normalizers.NFC, normalizers.NFD, normalizers.NFKC)]
    for tokenizer in (bpe(split), train_bpe(TEXT, 300, lowercase=True), *composing):
        with pytest.raises(UserError, match="has no tokenizer that splits or normalises a text as this one does"):
            gguf_tokenizer.of_merges(tokenizer)


@pytest.mark.parametrize(("tokenizer", "pre"), [
    (lambda: train_bpe(TEXT, 300), "gpt-2"), (lambda: bpe(QWEN_SPLIT), "qwen2"),
    (lambda: bpe(LLAMA3_SPLIT, True), "llama-bpe"), (lambda: bpe(LLAMA3_SPLIT), "dbrx"),
])  # fmt: skip
def test_how_a_text_is_split_has_a_name(tokenizer, pre):
    assert gguf_tokenizer.of_merges(tokenizer())[0]["pre"] == pre


def test_a_prompt_is_not_ended(tmp_path):
    tokenizer = train_bpe(TEXT, 300)
    saved(tmp_path / "model", tokenizer, **CASES["gpt2"])
    keys, _ = write(tmp_path / "model", tmp_path / "out")
    assert tokenizer.sep_id == keys["tokenizer.ggml.eos_token_id"] and not keys["tokenizer.ggml.add_eos_token"]
    assert "tokenizer.ggml.seperator_token_id" not in keys  # llama-cpp-python puts it behind a prompt, as of an encoder


def test_pieces_have_scores_and_kinds(tmp_path):
    from sentencepiece import SentencePieceProcessor

    model = saved(tmp_path / "model", **CASES["llama"])
    sp, n = SentencePieceProcessor(str(pieces(tmp_path / "model"))), model.config.vocab_size
    keys, _ = write(tmp_path / "model", tmp_path / "out")
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items() if name.startswith("tokenizer.ggml.")}
    size = sp.get_piece_size()
    assert (own["model"], own["pre"], own["add_space_prefix"], own["add_bos_token"]) == ("llama", "default", True, True)
    assert (own["unknown_token_id"], own["bos_token_id"], own["eos_token_id"]) == (0, 1, 2)
    assert own["tokens"] == [*map(sp.id_to_piece, range(size)), *(f"[PAD{i}]" for i in range(size, n))]
    merged = [i for i in range(259, size) if len(sp.id_to_piece(i)) > 1]
    assert sorted(merged, key=lambda i: -own["scores"][i]) == sorted(merged, key=lambda i: -sp.get_score(i))
    assert own["token_type"][:4] == [2, 3, 3, 6] and {*own["token_type"][259:size]} == {1} and {*own["token_type"][size:]} == {5}
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "pieces" / "tokenizer.model").rename(tmp_path / "model" / "tokenizer.model")
    with pytest.raises(UserError, match=r"has no tokenizer of kind SentencePiece without tokenizer\.json"):
        gguf_tokenizer.keys(find(str(tmp_path / "model")))


def test_a_file_that_reads_otherwise_is_not_kept(tmp_path, monkeypatch, capsys):
    saved(tmp_path / "model", **CASES["llama"])
    moved = Layout.moved
    as_they_are = lambda self, name, x, back=False: moved(self, name, x, back) if back else x  # noqa: E731
    monkeypatch.setattr(Layout, "moved", as_they_are)  # rows of q and k
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf"]) == 2
    assert "weights read back differ from the model's by" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.setattr(Layout, "moved", moved)
    monkeypatch.setitem(export_gguf.LIMITS, "q4_0", (0.13, 1e-6))
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf", "--type", "q4_0"]) == 2
    assert "perplexity read back differ" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_digests_are_kept(tmp_path, capsys):
    saved(tmp_path / "model", **CASES["gpt2"])
    write(tmp_path / "model", tmp_path / "out")
    for given in (tmp_path / "out", tmp_path / "out" / "model.gguf"):
        assert main(["generate", str(given), "a"]) == 2
        assert f"GGUF is run by llama.cpp: llama-cli -m {tmp_path / 'out' / 'model.gguf'}. Or give the run" in capsys.readouterr().err
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["checksums.json", "export.json", "model.gguf"]
    assert checksums.damage(tmp_path / "out", needs="model.gguf") is None
    flip(tmp_path / "out" / "model.gguf")
    assert "model.gguf is not what was written" in checksums.damage(tmp_path / "out")
    write(tmp_path / "model", tmp_path / "out")  # in its place
    assert checksums.damage(tmp_path / "out") is None


def test_in_fp32_weights_are_as_they_are(tmp_path):
    model = saved(tmp_path / "model", **CASES["gemma3"])
    keys, tensors = write(tmp_path / "model", tmp_path / "out", "--type", "f32")
    assert keys["general.file_type"] == gguf.LlamaFileType.ALL_F32
    assert torch.equal(torch.from_numpy(tensors["token_embd.weight"].data.copy()), model.token_embedding.weight)
    assert torch.equal(torch.from_numpy(tensors["output_norm.weight"].data.copy()), model.norm.weight + 1)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, capsys):
    state = json.loads(bpe(QWEN_SPLIT).rust.to_str()) | {"added_tokens": []}
    saved(tmp_path / "model", FastTokenizer(package_tokenizers().Tokenizer.from_str(json.dumps(state))), **CASES["qwen3"])
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf"]) == 2  # llama.cpp would end at token 11
    assert "llama.cpp has no tokenizer without a token that ends a text" in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert write(tmp_path / "model", tmp_path / "out")[0]["tokenizer.ggml.eos_token_id"] == 2


def test_runs_of_spaces_are_no_added_tokens():
    kinds = {token: kind for token, kind, _ in gguf_tokenizer.of_merges(spaced())[1].values()}  # llama.cpp prints those as they are, with ▁
    assert {token: kind for token, kind in kinds.items() if token.startswith("▁▁")} == dict.fromkeys(("▁▁", "▁▁▁", "▁▁▁▁"), gguf.TokenType.NORMAL)


def test_of_a_run_the_name_is_its_folder(tmp_path):
    saved(tmp_path / "run" / "checkpoints" / "best", **CASES["gpt2"])
    source = dataclasses.replace(find(str(tmp_path / "run" / "checkpoints" / "best")), run=tmp_path / "run")
    list(export_gguf.write(source, tmp_path / "out"))
    assert gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields["general.name"].contents() == "run"


def test_what_lies_beside_an_export_is_not_deleted(tmp_path, capsys):
    saved(tmp_path / "model", **CASES["gpt2"])
    write(tmp_path / "model", tmp_path / "out")
    (tmp_path / "out" / "q4_k_m.gguf").write_bytes(b"of llama-quantize")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf"]) == 2
    assert "does not list q4_k_m.gguf. Give a new folder" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "out" / "q4_k_m.gguf").is_file()


@pytest.mark.filterwarnings("error")
def test_weights_beyond_fp16_are_told_in_one_line(tmp_path, capsys):
    model = saved(tmp_path / "model", **CASES["gpt2"])
    with torch.no_grad():
        model.blocks[0].feedforward.up.weight[0, 0] = 1e5
    models.save(model, tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "gguf"]) == 2
    assert capsys.readouterr().err.startswith("error: --as gguf --type f16: weights read back differ from the model's by inf")
    write(tmp_path / "model", tmp_path / "out", "--type", "bf16")


def test_gemma_3_27b_is_known_by_its_layers():
    """llama.cpp scales queries by the width per head of a Gemma 3 of 62 layers, and of all others by the head's own."""
    shape = {"family": "gemma", "n_layers": 62, "d_model": 5376, "n_heads": 32, "n_kv_heads": 16, "d_ff": 21504, "vocab_size": 262208, "seq_len": 1024}
    config = TypeAdapter(Model).validate_python({**shape, "d_head": 128, "query_width": 168, "window": 1024, "full_every": 6})
    assert Layout(config).keys["attention.key_length"] == 128
