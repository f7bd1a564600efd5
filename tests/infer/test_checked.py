"""An engine is compared with PyTorch in fp32 before its first use."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.cli import main
from gradus.data.tokenizers import WordTokenizer
from gradus.infer import engines
from gradus.infer.checked import checked, compare

sys.path.insert(0, str(Path(__file__).parent))
from small_models import INPUTS, saved


def test_an_engine_is_checked_once_and_told_each_time(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    checked(source, "torch", "bf16", INPUTS)
    first = capsys.readouterr().err
    assert "computes in bf16" in first and re.search(r"same prediction for \d+ of 48 ", first)
    monkeypatch.setattr("gradus.infer.checked.compare", lambda *_: pytest.fail("checked twice"))
    checked(source, "torch", "bf16", INPUTS)
    assert capsys.readouterr().err == first


def test_a_check_finds_what_is_wrong(source):
    right, wrong = engines.open(source), engines.open(source)
    found = {row.name: row.value for row in compare(right, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] == 0 and found["check/greedy"] == 1
    wrong.decode = lambda ids, positions: -type(right).decode(wrong, ids, positions)
    found = {row.name: row.value for row in compare(wrong, right, INPUTS, 8)}
    assert found["check/max_abs_delta"] > 1 and found["check/cosine"] < 0 and found["check/greedy"] < 1


def spoil(model: torch.nn.Module, module: str, fault: str) -> None:
    """One weight is nan; or all are finite, and the module's products overflow."""
    with torch.no_grad():
        if fault == "weights":
            model.get_submodule(module).weight.view(-1)[3] = math.nan
        else:
            model.get_submodule(module).weight.fill_(1e30)
            up = model.get_submodule(module.replace("down", "up")).weight
            up.copy_(torch.full_like(up, 1e30) * torch.tensor([1.0, -1.0]).repeat(len(up) // 2)[:, None])


WRITING = [["generate", "--max-new", "3", *more] for more in ([], ["--temperature", "1"], ["--beams", "2"], ["--no-cache"], ["--precision", "bf16"])]


@pytest.mark.parametrize(
    ("family", "module", "fault"),
    [
        ("gpt", "blocks.1.feedforward.down", "products"),
        ("bert", "blocks.0.attention.to_k", "weights"),
        ("t5", "encoder.blocks.1.feedforward.down", "weights"),
        ("vit", "blocks.1.feedforward.down", "weights"),
    ],
)
def test_a_model_whose_logits_are_not_finite_answers_in_no_verb(family, module, fault, tmp_path, monkeypatch, capsys):
    """Every verb says so in one line, which names the module that was spoilt."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    model = saved(family, tmp_path / "model")
    spoil(model, module, fault)
    models.save(model, tmp_path / "model")
    WordTokenizer(["a", "cat"]).save(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    Image.new("RGB", (8, 8), (9, 99, 199)).save("a.png")
    answering = WRITING if family in ("gpt", "t5") else [["predict"]]
    verbs = [[verb, "model", "a.png" if family == "vit" else "a cat", *more] for verb, *more in [*answering, ["look"]]]
    verbs += [["export", "model", "--to", "x"], ["export", "model", "--to", "y", "--as", "torchscript"], ["bench", "model", "--to", "z"]]
    for words in verbs:
        code, errors = main(words), capsys.readouterr().err.splitlines()
        assert code == 2 and len(errors) == 1, (words, errors)
        where = f"{'weights of ' * (fault == 'weights')}module {module}"
        assert f"its logits are not finite ({where})" in errors[0], (words, errors)
    assert not {"x", "y", "look.html"} & {p.name for p in tmp_path.iterdir()}


@pytest.mark.usefixtures("no_plan")
def test_a_run_that_diverged_keeps_no_best_and_says_so(tmp_path, monkeypatch, capsys):
    """Adam's first step moves every weight by the learning rate: all are finite, no logit is."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    words = ["digits-vit", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16", "data.limit=32", "data.limit_valid=24"]
    words += ["train.steps=4", "train.epochs=null", "evaluate.every=2", "evaluate.test=false", "evaluate.samples=2", "train.on_nonfinite=skip"]
    words += ["optimizer.lr=1e30", "schedule={name: constant}", "log.dir=run", "layout.device=cpu"]
    assert main(["train", *words]) == 1
    said = capsys.readouterr()
    assert re.search(r"error: run: its logits are not finite \(step 4, module .+\), and no checkpoint is better", said.err)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best"] is None and set(summary["metrics"].values()) == {"nan"} and not Path("run/checkpoints/best").exists()
    for verb in (["evaluate", "run"], ["predict", "run", "--split", "valid"], ["quantize", "run", "--to", "q", "--as", "dynamic", "--force"]):
        code, said = main(verb), capsys.readouterr().err.splitlines()
        errors = [line for line in said if not line.startswith("note: ")]
        assert code == 2 and len(errors) == 1 and "run: its logits are not finite (step 4, module " in errors[0], verb
