"""`gradus generate`: every kind of model folder, streaming that shows what decoding gives, and one clear line for what cannot be."""

from __future__ import annotations

import copy
import json
import random
import types

import pytest
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.cli import main, parse
from gradus.data import tokenizer_files, tokenizers
from gradus.infer import encode, find
from gradus.infer.generate import Continuation, Stream, generate
from gradus.infer.predict import records_of
from gradus.models.decoding import beam_search, complete, greedy
from gradus.recipe.schema import BertConfig, GPTConfig, LlamaConfig, Seq2SeqConfig, T5Config, ViTConfig

TEXT = ["once upon a time there was a little girl named Lily", "the café costs 5 € – naïve 日本語 🙂 and more", "she saw a big, red ball."] * 4
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2}


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe(TEXT, 300)


def noisy(config):
    torch.manual_seed(2)
    model = models.build(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model


def saved(folder, config, tokenizer=None):
    model = noisy(config)
    models.save(model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)
    return model


def run(*words: str, capsys) -> tuple[str, str]:
    generate(parse(["generate", *map(str, words)]))
    out = capsys.readouterr()
    return out.out, out.err


def fails(*words: str, capsys) -> str:
    assert main(["generate", *map(str, words)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    return out.err


@pytest.fixture
def gpt(tmp_path, bpe):
    model = saved(tmp_path / "gpt", GPTConfig(**TINY, vocab_size=bpe.vocab_size, seq_len=48), bpe)
    return tmp_path / "gpt", model


# ---------------------------------------------------------------- streaming


def every_tokenizer(bpe):
    yield bpe
    yield tokenizers.ByteTokenizer()
    yield tokenizers.CharTokenizer("".join(sorted(set("".join(TEXT)))))


def test_a_stream_writes_what_decoding_gives_and_no_half_characters(bpe):
    for tokenizer in every_tokenizer(bpe):
        for text in TEXT[:3]:
            parts: list[str] = []
            stream, ids = Stream(tokenizer, parts.append), tokenizer.encode(text)
            for n in range(len(ids) + 1):
                stream.show(ids[:n])
            assert "".join(parts) == tokenizer.decode(ids), "all is there before the end, for whole characters"
            stream.show(ids, end=True)
            assert "".join(parts) == tokenizer.decode(ids) == text
            assert not any("\ufffd" in part for part in parts)
            assert sum(map(bool, parts)) > 3, "in parts, as it comes"


def test_a_stream_of_broken_characters_is_written_once_it_is_known_to_be_broken(bpe):
    rng = random.Random(0)
    for tokenizer in every_tokenizer(bpe):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(80)]
        parts: list[str] = []
        stream = Stream(tokenizer, parts.append)
        for n in range(len(ids) + 1):
            stream.show(ids[:n])
        stream.show(ids, end=True)
        assert "".join(parts) == tokenizer.decode(ids)


# ---------------------------------------------------------------- what is printed


def test_the_prompt_and_its_greedy_continuation(gpt, bpe, capsys):
    folder, model = gpt
    prompt = bpe.encode("once upon")
    out, err = run(folder, "once upon", "--max-new", "20", capsys=capsys)
    assert out == bpe.decode(prompt + complete(model, [prompt], max_new=20, eos_id=bpe.eos_id)[0]) + "\n"
    assert "20 tokens in" in err and f"prefill {len(prompt)} tokens" in err and "tokens/s" in err
    assert run(folder, "--no-cache", "--max-new", "20", "once upon", capsys=capsys)[0] == out


def test_several_prompts_are_one_batch_and_each_is_as_alone(gpt, capsys):
    folder, _ = gpt
    prompts = ["once", "the little girl", "she saw a big"]
    out, _ = run(folder, *prompts, "--max-new", "12", capsys=capsys)
    alone = [run(folder, prompt, "--max-new", "12", capsys=capsys)[0] for prompt in prompts]
    assert out == "".join(f"── {i}/3 ── {prompt}\n{text}" for i, (prompt, text) in enumerate(zip(prompts, alone), 1))


def test_a_seed_repeats_itself_and_another_does_not(gpt, capsys):
    folder, _ = gpt
    words = [folder, "once", "--max-new", "30", "--temperature", "1.2", "--top-k", "50", "--top-p", "0.95"]
    first, second, other = (run(*words, "--seed", seed, capsys=capsys)[0] for seed in (1, 1, 2))
    assert first == second != other


def test_half_precision_continues_too(gpt, capsys):
    assert "3 tokens" in run(gpt[0], "once", "--max-new", "3", "--precision", "bf16", capsys=capsys)[1]


def test_the_end_token_ends_the_text(tmp_path, bpe, capsys):
    model = noisy(GPTConfig(**TINY, vocab_size=bpe.vocab_size, seq_len=48, tie_output=False))
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.head.weight.zero_()
        model.head.weight[bpe.eos_id] = 1.0
    models.save(model, tmp_path / "ending")
    bpe.save(tmp_path / "ending")
    assert run(tmp_path / "ending", "once upon", "--max-new", "20", capsys=capsys)[0] == "once upon\n"


def test_any_end_token_of_generation_config_ends_the_text_and_an_export_keeps_them(gpt, bpe, tmp_path, capsys):
    folder, model = gpt
    prompt = bpe.encode("once upon")
    free = complete(model, [prompt], max_new=20)[0]
    file, ends = folder / "generation_config.json", [bpe.eos_id, free[9]]
    file.write_text(json.dumps({"eos_token_id": ends}))
    expected = bpe.decode(prompt + free[: free.index(free[9])]) + "\n"
    assert run(folder, "once upon", "--max-new", "20", capsys=capsys)[0] == expected
    assert run(folder, "once upon", "--max-new", "20", "--beams", "2", capsys=capsys)[0] == bpe.decode(
        prompt + beam_search(model, [prompt], beams=2, max_new=20, eos_id=ends)[0]) + "\n"  # fmt: skip
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == ends
    assert run(tmp_path / "out", "once upon", "--max-new", "20", capsys=capsys)[0].endswith(expected)
    for wrong in ({"eos_token_id": [10**6]}, {"eos_token_id": "x"}, [1]):
        file.write_text(json.dumps(wrong))
        said = "not a JSON object" if wrong == [1] else "eos_token_id: expected an id below 300"
        assert f"generation_config.json: {said}" in fails(folder, "once upon", capsys=capsys)


def test_what_generation_config_asks_for_and_is_not_done_is_told(gpt, capsys):
    folder, _ = gpt
    file = folder / "generation_config.json"
    usual = {"eos_token_id": 2, "max_length": 20, "temperature": 1.0, "top_p": 1.0, "do_sample": False, "repetition_penalty": 1.0}
    for asked in ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"no_repeat_ngram_size": 3}, {"num_beams": 4}, {"guidance_scale": 2.0}):
        file.write_text(json.dumps(usual | asked))
        told = run(folder, "once", "--max-new", "1", capsys=capsys)[1]
        assert ("not applied" in told) == bool(asked) and all(f"{key}={value}" in told for key, value in asked.items())
        assert "max_length" not in told and "eos_token_id" not in told
    file.write_text(json.dumps({"repetition_penalty": 1.1}))
    assert "not applied: repetition_penalty=1.1" in run(folder, "once", "--max-new", "2", "--beams", "2", capsys=capsys)[1]
    file.unlink()


@pytest.mark.parametrize("penalty", [5.0, 0.5])
@pytest.mark.parametrize("family", ["gpt", "llama", "t5"])
def test_a_repetition_penalty_is_transformers_on_each_text_alone(tmp_path, bpe, family, penalty, capsys):
    import transformers

    config = {"gpt": GPTConfig, "llama": LlamaConfig, "t5": T5Config}[family](**TINY, d_ff=32, vocab_size=bpe.vocab_size, seq_len=48)
    saved(tmp_path, config, bpe)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty, "eos_token_id": bpe.eos_id}))
    prompts, kind = ["once upon a time", "she", "a big, red ball. she saw"], "AutoModelForSeq2SeqLM" if family == "t5" else "AutoModelForCausalLM"
    theirs, own = getattr(transformers, kind).from_pretrained(tmp_path), find(str(tmp_path))
    encoded = encode(own, own.tokenizers(), prompts)
    start = {"decoder_start_token_id": encoded.prompts[0][0]} if family == "t5" else {}
    for cache, plain in ((True, False), (False, False), (True, True)):
        growing = Continuation(own, prompts, max_new=16)
        growing.penalty = 1 if plain else growing.penalty
        for _ in growing.steps(greedy, cache=cache):
            pass
        wanted = []
        for row in encoded.sources or encoded.prompts:
            out = theirs.generate(torch.tensor([row]), max_new_tokens=16, do_sample=False, pad_token_id=0, repetition_penalty=1.0 if plain else penalty, **start)[0]
            wanted.append([i for i in out.tolist()[1 if family == "t5" else 0 :] if i != bpe.eos_id])
        assert growing.rows == wanted
        if family == "t5" and not plain:
            answered = [record["answer"] for record in records_of(own, prompts, top=1)]
            assert all(a.startswith(bpe.decode(w[:12])) for a, w in zip(answered, wanted)), "predict too"
    assert f"repetition_penalty={penalty} is applied" in capsys.readouterr().err


def test_a_repetition_penalty_that_is_none(gpt, capsys):
    folder, _ = gpt
    for wrong in (0, -1.5, "1.1", True):
        (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": wrong}))
        assert "must be a positive number" in fails(folder, "once", capsys=capsys)


def test_several_end_tokens_of_config_json_alone_are_exported(tmp_path, bpe):
    saved(tmp_path / "gpt", GPTConfig(**TINY, vocab_size=bpe.vocab_size, seq_len=48), bpe)
    file = tmp_path / "gpt" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 9]}))
    assert main(["export", str(tmp_path / "gpt"), "--to", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 9]


def test_an_export_over_another_has_nothing_of_its_tokenizer(gpt, bpe, tmp_path):
    letters, (one, _) = tokenizers.CharTokenizer("abc", tokenizers.SPECIALS), gpt
    saved(tmp_path / "other", GPTConfig(**TINY, vocab_size=letters.vocab_size, seq_len=48), letters)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    for source in ("other", one):
        assert main(["export", str(tmp_path / source), "--to", str(tmp_path / "out")]) == 0
        assert (tmp_path / "out" / "chat_template.jinja").exists() == (source == "other")
    assert find(str(tmp_path / "out")).tokenizers()[""].fingerprint == bpe.fingerprint


def test_a_stream_decodes_a_few_tokens_each_time(bpe):
    """Not all from the beginning, whose time would be the square of the length."""
    ids, read = bpe.encode(" ".join(TEXT)), []
    count = types.SimpleNamespace(decode=lambda part: read.append(len(part)) or bpe.decode(part))
    stream = Stream(count, lambda text: None)
    for n in range(len(ids) + 1):
        stream.show(ids[:n])
    assert sum(read) < 20 * len(ids) < len(ids) ** 2 / 4


def test_an_empty_prompt_begins_with_the_begin_token(gpt, bpe, capsys):
    folder, model = gpt
    expected = bpe.decode(complete(model, [[bpe.bos_id]], max_new=10, eos_id=bpe.eos_id)[0])
    assert run(folder, "--max-new", "10", capsys=capsys)[0] == expected + "\n"


def test_a_prompt_begins_with_the_begin_token_where_the_tokenizer_says_so(tmp_path, bpe, capsys):
    bpe = copy.deepcopy(bpe)
    bpe.around(bpe.bos_id, None)
    model = saved(tmp_path / "llama", LlamaConfig(**TINY, vocab_size=bpe.vocab_size, multiple_of=8, seq_len=48), bpe)
    prompt = [bpe.bos_id, *bpe.encode("the ball")]
    expected = bpe.decode(prompt + complete(model, [prompt], max_new=10, eos_id=bpe.eos_id)[0])
    assert run(tmp_path / "llama", "the ball", "--max-new", "10", capsys=capsys)[0] == expected + "\n"


@pytest.mark.parametrize(
    "config",
    [
        T5Config(**TINY, vocab_size=300, d_head=8, d_ff=32, tie_output=False),
        Seq2SeqConfig(**TINY, vocab_size=300, d_ff=32, tie_output=False, seq_len=48),
    ],
)
def test_an_encoder_decoder_reads_the_prompt_and_answers(config, tmp_path, bpe, capsys):
    assert bpe.vocab_size == 300
    bpe = copy.deepcopy(bpe)
    bpe.around(None, bpe.eos_id)
    model = saved(tmp_path / "model", config, bpe)
    source = [*bpe.encode("she saw a ball"), bpe.eos_id]
    start = bpe.pad_id if config.family == "t5" else bpe.bos_id
    expected = bpe.decode(complete(model, [[start]], sources=[source], max_new=12, eos_id=bpe.eos_id)[0])
    assert run(tmp_path / "model", "she saw a ball", "--max-new", "12", capsys=capsys)[0] == expected + "\n"
    assert "an empty text" in fails(tmp_path / "model", capsys=capsys)


def test_metas_own_layout(tmp_path, capsys):
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXT[::3] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "spm"), vocab_size=40, model_type="bpe", minloglevel=2, hard_vocab_limit=False
    )  # fmt: skip
    folder = tmp_path / "meta"
    folder.mkdir()
    (tmp_path / "spm.model").rename(folder / "tokenizer.model")
    tokenizer = tokenizer_files.load(folder)
    v, d, f = tokenizer.vocab_size, 16, 24
    torch.manual_seed(0)
    matrix = lambda *shape: torch.randn(*shape) * 0.3  # noqa: E731
    layer = {
        "attention.wq": (d, d),
        "attention.wk": (d, d),
        "attention.wv": (d, d),
        "attention.wo": (d, d),
        "feed_forward.w1": (f, d),
        "feed_forward.w2": (d, f),
        "feed_forward.w3": (f, d),
    }
    state = {f"layers.0.{name}.weight": matrix(*shape) for name, shape in layer.items()}
    state |= {f"layers.0.{name}.weight": torch.ones(d) for name in ("attention_norm", "ffn_norm")}
    state |= {"tok_embeddings.weight": matrix(v, d), "output.weight": matrix(v, d), "norm.weight": torch.ones(d)}
    torch.save(state, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(
        json.dumps({"dim": d, "n_layers": 1, "n_heads": 2, "vocab_size": -1, "multiple_of": 24, "ffn_dim_multiplier": 0.5, "norm_eps": 1e-5})
    )
    model = find(str(folder)).load()
    prompt = [tokenizer.bos_id, *tokenizer.encode("once upon")]
    expected = tokenizer.decode(prompt + complete(model, [prompt], max_new=15, eos_id=tokenizer.eos_id)[0])
    assert run(folder, "once upon", "--max-new", "15", capsys=capsys)[0] == expected + "\n"


@pytest.mark.shared_data
def test_stories260k_tells_its_story(shared_data, capsys):
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
    model = shared_data / "stories260K" / "stories260K.bin"
    out, err = run(model, "--max-new", "70", capsys=capsys)
    assert out.startswith(story)
    assert "prefill 1 tokens" in err
    assert run(model, "--max-new", "70", "--tokenizer", model.parent / "tok512.bin", "--no-cache", capsys=capsys)[0] == out
    longer, _ = run(model, "Once upon a time, there was", "--max-new", "20", capsys=capsys)
    assert longer.strip() in story


def test_a_run_folder_gives_its_best_checkpoint_and_tokenizer(tmp_path, capsys):
    from gradus.train.run import train

    (tmp_path / "text.txt").write_text("\n".join(TEXT) * 8)
    recipe = recipes.load(
        "shakespeare-char-gpt", [f"data.path={tmp_path}/text.txt", f"data.cache={tmp_path}/cache", f"log.dir={tmp_path}/run"],
        model={"n_layers": 1, "d_model": 16, "n_heads": 2, "seq_len": 24}, train={"steps": 4}, evaluate={"every": 2, "samples": 0},
        schedule={"warmup_steps": 0}, layout={"device": "cpu"}, data={"max_len": None},
    )  # fmt: skip
    train(recipe)
    tokenizer = tokenizer_files.load(tmp_path / "run" / "checkpoints" / "best")
    model = models.load(tmp_path / "run" / "checkpoints" / "best").eval()
    capsys.readouterr()
    for words, start in ((["once"], "once"), ([], "\n")):  # an empty prompt: a line begins, as lines did in training
        ids = tokenizer.encode(start)
        expected = tokenizer.decode(ids + complete(model, [ids], max_new=8, eos_id=tokenizer.eos_id)[0])
        assert run(tmp_path / "run", *words, "--max-new", "8", capsys=capsys)[0] == expected + "\n"


# ---------------------------------------------------------------- what cannot be


def test_the_room_left_is_used_and_said(gpt, bpe, capsys):
    n = len(bpe.encode("once upon"))
    assert f"--max-new=500 cut to {48 - n + 1}" in run(gpt[0], "once upon", "--max-new", "500", capsys=capsys)[1]
    assert "cut" not in run(gpt[0], "once upon", "--max-new", str(48 - n + 1), capsys=capsys)[1]


def test_a_sliding_window_goes_on_beyond_the_positions(gpt, bpe, tmp_path, capsys):
    folder, model = gpt
    ids = bpe.encode("once upon")
    assert "--sliding-window continues" in run(folder, "once upon", "--max-new", "100", capsys=capsys)[1]
    out, err = run(folder, "once upon", "--max-new", "100", "--sliding-window", capsys=capsys)
    assert out == bpe.decode(ids + complete(model, [ids], max_new=100, eos_id=bpe.eos_id, window=48)[0]) + "\n"
    assert "100 tokens in" in err and "cut" not in err
    assert run(folder, "once upon", "--max-new", "100", "--sliding-window", "--no-cache", capsys=capsys)[0] == out
    prompt = "a big red ball " * 30  # longer than the model
    ids = bpe.encode(prompt)
    expected = bpe.decode(ids + complete(model, [ids[-48:]], max_new=9, window=48)[0])
    assert run(folder, prompt, "--max-new", "9", "--sliding-window", capsys=capsys)[0] == expected + "\n"
    saved(tmp_path / "s2s", Seq2SeqConfig(**TINY, vocab_size=bpe.vocab_size, d_ff=32, seq_len=48), bpe)
    assert "--sliding-window: it is for decoders, which seq2seq is not" in fails(tmp_path / "s2s", "once", "--sliding-window", capsys=capsys)


def test_a_prompt_longer_than_the_model(gpt, bpe, capsys):
    prompt = "a big red ball " * 30
    said = fails(gpt[0], "short", prompt, capsys=capsys)
    assert f"{len(bpe.encode(prompt))} tokens, more than the 48" in said and "text 2" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("config", [BertConfig(**TINY, vocab_size=300, d_ff=32), ViTConfig(**TINY, d_ff=32, image_size=8, patch_size=4, n_classes=3)])
def test_families_that_cannot_generate_name_predict(config, tmp_path, bpe, capsys):
    saved(tmp_path / "m", config, bpe)
    assert f"gradus predict {tmp_path}/m" in fails(tmp_path / "m", "text", capsys=capsys)


def test_tokenizers_that_are_missing_or_anothers(tmp_path, bpe, capsys):
    saved(tmp_path / "bare", GPTConfig(**TINY, vocab_size=260, seq_len=48))
    assert "--tokenizer PATH" in fails(tmp_path / "bare", "text", capsys=capsys)
    tokenizers.ByteTokenizer().save(tmp_path / "bytes")
    assert run(tmp_path / "bare", "text", "--max-new", "2", "--tokenizer", tmp_path / "bytes", capsys=capsys)[0].startswith("text")
    bpe.save(tmp_path / "bpe")
    assert "300 tokens and the model 260" in fails(tmp_path / "bare", "text", "--tokenizer", tmp_path / "bpe", capsys=capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-new", "0"], "--max-new=0"),
        (["--top-k", "5"], "no effect at temperature 0"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--temperature", "1", "--top-p", "2"], "--top-p=2: must be at most 1"),
    ],
)
def test_settings_out_of_range(gpt, words, said, capsys):
    assert said in fails(gpt[0], "once", *words, capsys=capsys)


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert "no such file or folder" in fails(tmp_path / "nowhere", "once", capsys=capsys)
