"""llama.cpp runs what is exported as GGUF: the same tokens, the same ids, the same chat. Where llama-cpp-python is installed, or lies in the folder
$GRADUS_PEERS (pip install --no-deps --target FOLDER llama-cpp-python diskcache: it is built from source, ten minutes on one core)."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.data import tokenizer_files
from gradus.data.tokenizers import train_bpe
from gradus.models.decoding import complete

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(os.environ.get("GRADUS_PEERS", "/nonexistent"))
from gguf_parts import CASES, CHAT, LLAMA3_SPLIT, QWEN_SPLIT, bpe, pieces, saved, spaced, write

pytest.importorskip("gguf", reason="the extra gguf brings it")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not here")
PAGES = [page.read_text() for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))]
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()  # what models learn: pages change, and with them how near two tokens are
SPLITS = {"gpt2": None, "llama3": (LLAMA3_SPLIT, True), "qwen": (QWEN_SPLIT, False)}


def texts(n: int = 200) -> list[str]:
    """Pieces of pages, and a quarter of them of drawn characters."""
    draw, pages = random.Random(0), "".join(PAGES)
    drawn = "".join(chr(draw.choice((draw.randrange(32, 0x3000), draw.randrange(0x1F300, 0x1F650)))) for _ in range(4000))
    whole = (pages, pages, pages, drawn)
    starts = (draw.randrange(len(whole[i % 4]) - 200) for i in range(n))
    return [whole[i % 4][start : start + draw.randrange(1, 200)] for i, start in enumerate(starts)]


def tokenizer(kind: str):
    return train_bpe(PAGES[:12], 400) if kind == "gpt2" else bpe(*SPLITS[kind], PAGES[:12])


@contextlib.contextmanager
def loaded(folder: Path, **settings):
    there = llama_cpp.Llama(str(folder / "model.gguf"), n_threads=1, verbose=False, **settings)
    yield there
    there.close()


def learnt(model: torch.nn.Module, ids: list[int], steps: int = 400) -> None:
    """The model after some steps on windows of these ids."""
    rows, length = torch.tensor(ids), model.config.seq_len
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(rows) - length, (8,), generator=draw)
        batch = torch.stack([rows[start : start + length] for start in starts])
        loss = torch.nn.functional.cross_entropy(model(ids=batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in CASES if arch != "gpt2"])
def test_the_same_greedy_tokens(arch, tmp_path):
    own = bpe(*SPLITS["qwen"], [LICENSE])
    model = saved(tmp_path / "model", own, alpha=0.0, **CASES[arch])
    learnt(model.train(), own.encode(LICENSE))
    models.save(model.eval(), tmp_path / "model")
    write(tmp_path / "model", tmp_path / "out")
    prompts = [own.encode(text)[:24] for text in ("You may reproduce", "Contribution", "any such warranty")]
    wanted = complete(model, prompts, max_new=64)
    with loaded(tmp_path / "out", n_ctx=96) as there:
        tokens = [[token for token, _ in zip(there.generate(prompt, temp=0.0, repeat_penalty=1.0), range(64))] for prompt in prompts]
    assert tokens == wanted and all(len(row) == 64 and len(set(row)) > 20 for row in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "scaling"), [
    ("gpt2", None),  # its gelu is a table in fp16 there: likeliest tokens that are nearly as likely as others may change
    *(("llama", {"type": kind, "factor": 4.0, "original_seq_len": 24}) for kind in ("llama3", "yarn")),
    ("qwen3", {"type": "yarn", "factor": 4.0, "original_seq_len": 24}), ("gemma3", {"type": "linear", "factor": 4.0}),
])  # fmt: skip
def test_the_same_logits(arch, scaling, tmp_path):
    model = saved(tmp_path / "model", alpha=0.1, **CASES[arch], **({"rope_scaling": scaling} if scaling else {}))
    write(tmp_path / "model", tmp_path / "out")
    ids = torch.randint(400, (1, 96), generator=torch.Generator().manual_seed(0))
    with loaded(tmp_path / "out", n_ctx=96, logits_all=True) as there, torch.no_grad():
        there.eval(ids[0].tolist())
        wanted = model(ids=ids)[0]
        torch.testing.assert_close(torch.from_numpy(there.scores[:96].copy()), wanted, rtol=0, atol=5e-3 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SPLITS, "pieces"])
def test_the_same_ids(kind, tmp_path):
    saved(tmp_path / "model", tokenizer("gpt2" if kind == "pieces" else kind), **CASES["llama"])
    if kind == "pieces":
        pieces(tmp_path / "model", vocab_size=400, add_dummy_prefix=True)
    write(tmp_path / "model", tmp_path / "out")
    own, given = tokenizer_files.load(tmp_path / "model"), texts()
    if kind == "pieces":  # llama.cpp puts a space before one that is there
        given = [text.lstrip() for text in given]
    with loaded(tmp_path / "out", vocab_only=True) as there:
        assert [there.tokenize(text.encode(), add_bos=False, special=True) for text in given] == own.encode_batch(given)
        assert there.tokenize(b"A word") == own.with_special_tokens(own.encode("A word"))


@pytest.mark.slow
def test_the_same_chat(tmp_path):
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter
    from transformers import AutoTokenizer

    saved(tmp_path / "model", tokenizer("qwen"), **CASES["qwen3"])
    write(tmp_path / "model", tmp_path / "out")
    chat = [{"role": "user", "content": "How many\n steps?"}, {"role": "assistant", "content": "<1234>"}, {"role": "user", "content": " Thanks."}]
    wanted = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    with loaded(tmp_path / "out", vocab_only=True) as there:
        assert there.metadata["tokenizer.chat_template"] == CHAT
        text = Jinja2ChatFormatter(there.metadata["tokenizer.chat_template"], "<|im_end|>", "")(messages=chat).prompt
        assert there.tokenize(text.encode(), add_bos=False, special=True) == wanted
        assert there.token_eos() == 2


@pytest.mark.slow
def test_runs_of_spaces(tmp_path):
    saved(tmp_path / "model", own := spaced(), **CASES["gemma3"])
    write(tmp_path / "model", tmp_path / "out")
    with loaded(tmp_path / "out", vocab_only=True) as there:
        for text in ("a" + " " * n + "ab" for n in range(12)):
            ids = there.tokenize(text.encode(), add_bos=False, special=True)
            assert ids == own.encode(text) and there.detokenize(ids).decode() == text
