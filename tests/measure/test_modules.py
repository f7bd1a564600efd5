"""`gradus show --modules`: what each process of a layout holds, told by one."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from gradus import models
from gradus.cli import main
from gradus.recipe.schema import GPTConfig

GPT = ["shakespeare-char-gpt", "--no-data", "model.vocab_size=65", "model.n_layers=2", "--modules"]


def told(capsys, *argv: str) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """(all lines, parameter → what is said of it, totals)."""
    assert main(["show", *argv]) == 0
    assert not dist.is_initialized()
    lines = capsys.readouterr().out.splitlines()
    path, found = [], {}
    for line in lines[2 : lines.index("", 2)]:
        depth = (len(line) - len(line.lstrip())) // 2
        name, rest = re.fullmatch(r" *(\w+):? +(.*)|(\w+).*", line).group(1, 2)
        path[depth:] = [name or ""]
        if "  " in line.strip():
            found[".".join(path[1:])] = " ".join(rest.split())
    return lines, found, {line[:24].strip(): int(line[24:42].replace(",", "")) for line in lines[-2:]}


def test_shard_and_tensor(capsys):
    lines, found, totals = told(capsys, *GPT, "layout.shard=2", "layout.tensor=2", "--processes", "4")
    assert lines[0] == "shakespeare-char-gpt, process 0 of 4: shard 2 × tensor 2"
    assert found["token_embedding.weight"] == "(65, 128) → (17, 128) float32 tensor: Shard(0), shard: Shard(0)"
    assert found["blocks.1.attention.to_q.weight"] == "(128, 128) → (32, 128) float32 tensor: Shard(0), shard: Shard(0)"
    assert found["blocks.1.feedforward.down.weight"] == "(128, 512) → (64, 256) float32 tensor: Shard(1), shard: Shard(0)"
    assert found["norm.weight"] == "(128,) → (64,) float32 tensor: Replicate(), shard: Shard(0)"
    assert found["head.weight"] == "shared: token_embedding.weight"
    assert "    1: GPTBlock, gathered as one" in lines
    named = dict(models.build(GPTConfig(n_layers=2, d_model=128, n_heads=4, seq_len=64, vocab_size=65, bias=False)).named_parameters())
    assert found.keys() == named.keys() | {"head.weight"}
    assert totals["parameters in total"] == sum(p.numel() for p in named.values())
    parts = [told(capsys, *GPT, "layout.shard=2", "layout.tensor=2", "--rank", str(r))[2]["on this process"] for r in range(4)]
    twice = sum(p.numel() for name, p in named.items() if "norm" in name or "position" in name)
    assert parts[0] == totals["on this process"] and sum(parts) == totals["parameters in total"] + twice


def test_pipeline_shows_the_stage(capsys):
    lines, found, totals = told(capsys, *GPT, "layout.pipeline=2", "--rank", "1")
    assert lines[0].endswith("process 1 of 2: pipeline 2; stage 1 (blocks 1 to 1) of 2")
    assert found["token_embedding.weight"] == "(65, 128) float32 whole, tied: on pipeline processes 0, 1"
    assert "blocks.1.attention.to_q.weight" in found and not any(name.startswith(("blocks.0", "position")) for name in found)
    assert not any(line.strip().partition(": ")[2][:1] == "_" for line in lines)  # nothing that stands in the place of something
    _, other, before = told(capsys, *GPT, "layout.pipeline=2")
    assert not any(name.startswith(("blocks.1", "norm", "head")) for name in other) and "position_embedding.weight" in other
    assert totals["on this process"] + before["on this process"] == totals["parameters in total"] + 65 * 128


def test_other_layouts(capsys):
    _, found, totals = told(capsys, *GPT)
    assert found["norm.weight"] == "(128,) float32 whole" and len(set(totals.values())) == 1
    _, found, totals = told(capsys, *GPT, "--processes", "2", "layout.precision=pure_bf16")
    assert found["norm.weight"] == "(128,) bfloat16 replicated" and len(set(totals.values())) == 1
    _, found, _ = told(capsys, *GPT, "--processes", "8", "--rank", "7", "layout.shard=2", "layout.context=2")
    assert found["norm.weight"] == "(128,) → (32,) float32 shard × context: Shard(0), replicate: Replicate()"
    _, found, _ = told(capsys, *GPT, "layout.expert=2", "model.n_experts=4")
    assert {words for name, words in found.items() if ".experts." in name} == {
        "(4, 512, 128) → (2, 512, 128) float32 expert: Shard(0)",
        "(4, 128, 512) → (2, 128, 512) float32 expert: Shard(0)",
    }
    assert found["norm.weight"] == "(128,) float32 replicated"
    _, found, _ = told(capsys, *GPT, "--processes", "2", "layout.shard_optimizer=true", "layout.compress=powersgd")
    assert {words[-21:] for name, words in found.items() if name != "head.weight"} == {f", stepped by replica {r}"[-21:] for r in (0, 1)}
    lines, found, _ = told(capsys, "copy-task", "--modules", "layout.shard=2", "--rank", "1")  # the vocabulary is the task's
    assert lines[0].startswith("copy-task, process 1 of 2: shard 2") and found["source_embedding.tokens.weight"].startswith("(11, ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*GPT, "model.vocab_size=null"], "model.vocab_size: only the data tell it. Set model.vocab_size, or leave out --no-data."),
        (["digits-vit", "--modules", "--no-data", "model.n_classes=null"], "model.n_classes: only the data tell it. Set model.n_classes"),
        (["wikitext2-bert", "--modules", "--no-data", "model.vocab_size=99", "model.head=none"], "model.head: only the data tell it."),
        ([*GPT, "--rank", "2", "--processes", "2"], "--rank=2 of --processes=2: ranks go from 0 to processes - 1."),
        ([*GPT, "--processes", "3", "layout.shard=2"], "shard 2 = 2 processes, and 3 were started"),
        ([*GPT, "layout.tensor=3"], "layout.tensor=3 does not divide model.n_heads=4. Use 1, 2 or 4."),
        (["copy-task", "layout.shard=2", "--processes", "3"], "shard 2 = 2 processes, and 3 were started"),
    ],
)
def test_mistakes(argv, said, capsys):
    assert main(["show", *argv]) == 2
    assert said in capsys.readouterr().err
