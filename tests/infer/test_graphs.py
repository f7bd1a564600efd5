"""Graphs of every family in every format: checked at other sizes than they were traced at, used without gradus and torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.infer import engines, find, graphs
from gradus.models.decoding import complete
from gradus.recipe.schema import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))
from small_models import PROMPTS, exported, needs_onnx, saved

slow = pytest.mark.slow
EVERYTHING = (slow, pytest.mark.everything)  # what two other families of the same kind, or another format of this one, show too


@pytest.mark.parametrize("family", ["gpt", "vit", *(pytest.param(name, marks=slow) for name in ("bert", "llama", "gemma", "t5")), pytest.param("seq2seq", marks=EVERYTHING)])
def test_onnx(family, tmp_path, capsys):
    """Every case within 1e-4, named axes, and where it writes the tokens that PyTorch writes."""
    needs_onnx()
    import onnx

    model, out, about = exported(family, tmp_path, "--as", "onnx", n_layers=1)  # of two: the tests of int8 and of a decoder without gradus
    told = capsys.readouterr().out
    assert "checked against PyTorch in fp32: max |Δ|" in told and about["format"] == "onnx"
    decodes = models.lookup(family).attention != "both"
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"]) and {row["batch"] for row in about["check"]} == {1, 3}
    assert not decodes or {row["past"] for row in about["check"]} == {0, 1, 9}
    file = onnx.load(out / list(about["graphs"].values())[-1]["file"])
    names = {d.dim_param for i in file.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    assert names == ({"batch"} if family == "vit" else {"batch", "seq"} if not decodes else {"batch", "seq", "past", "source" if "encoder" in about["graphs"] else "total"})
    if decodes:
        sources = {"sources": PROMPTS} if "encoder" in about["graphs"] else {}
        prompts = [[0], [0]] if sources else PROMPTS
        engine = engines.open(find(str(out)), "onnx")
        assert complete(engine, prompts, max_new=6, **sources) == complete(model, prompts, max_new=6, **sources)


@pytest.mark.parametrize("family", ["vit", pytest.param("bert", marks=slow)])
def test_onnx_runtimes_int8_of_encoders(family, tmp_path, monkeypatch):
    needs_onnx()
    import onnx

    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    model = saved(family, tmp_path / "model", d_model=64, d_ff=256)
    engine = engines.open(find(str(tmp_path / "model")), "onnx", "int8")
    operators = [node.op_type for node in onnx.load(engine.folder / "model.onnx").graph.node]
    assert operators.count("MatMulInteger") >= 12 and engine.computes == "int8"
    assert engine.weight_bytes() < 0.7 * sum(4 * p.numel() for p in model.parameters()), "of so small a model the graph itself is half"
    given = {"images": torch.randn(2, 3, 8, 8)} if family == "vit" else {"ids": torch.arange(10).view(2, 5)}
    wanted, found = model(**given), engine.forward(**given)
    assert (found - wanted).abs().max() < 0.1 * wanted.abs().max()


ALONE = """
import json, sys
import numpy as np, onnxruntime as ort

folder = sys.argv[1]
session = ort.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
ids = np.array([[3, 1, 4]])
past = {i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in session.get_inputs() if i.name.startswith("past")}
mask, tokens = np.ones_like(ids), []
for _ in range(8):
    logits, *kept = session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
    ids = logits[:, -1].argmax(-1)[:, None]
    past, mask = dict(zip(past, kept)), np.concatenate((mask, ids * 0 + 1), axis=1)
    tokens.append(int(ids[0, 0]))
assert not {"torch", "gradus"} & set(sys.modules)
print(json.dumps(tokens))
"""


@pytest.mark.slow
def test_an_onnx_decoder_without_gradus_and_torch(tmp_path):
    needs_onnx()
    model, out, _ = exported("gpt", tmp_path, "--as", "onnx")
    done = subprocess.run([sys.executable, "-c", ALONE, str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == complete(model, [[3, 1, 4]], max_new=8)[0]


@pytest.mark.parametrize("family", ["gpt", "t5", pytest.param("seq2seq", marks=slow), pytest.param("llama", marks=EVERYTHING)])
def test_torchscript_of_a_decoder(family, tmp_path):
    """A trace at a past of 4 serves every other, and generates the tokens that PyTorch generates."""
    model, out, about = exported(family, tmp_path, "--as", "torchscript")
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"]) and {row["past"] for row in about["check"]} == {0, 1, 9}
    sources = {"sources": PROMPTS} if "encoder" in about["graphs"] else {}
    prompts = [[0], [0]] if sources else PROMPTS
    engine = engines.open(find(str(out)), "torchscript")
    assert complete(engine, prompts, max_new=20, **sources) == complete(model, prompts, max_new=20, **sources)


def test_torchscript(tmp_path):
    model, out, about = exported("vit", tmp_path, "--as", "torchscript")
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"])
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(torch.jit.load(out / "model.pt")(images)[0], model(images))


@pytest.mark.parametrize("family", [pytest.param("gpt", marks=slow), pytest.param("vit", marks=EVERYTHING)])
def test_pt2(family, tmp_path):
    from torch._inductor import config

    with config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # of what calls the kernels
        _, _, about = exported(family, tmp_path, "--as", "pt2", n_layers=1)
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"])


def test_a_model_that_is_compiled_for_a_gpu_is_checked_against_one_that_stays(vit, tmp_path, monkeypatch):
    """By a stand-in for the GPU, and for the machine code."""
    from gradus.infer import export_pt2, graphs

    monkeypatch.setattr(export_pt2, "pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(export_pt2, "compile_ahead", lambda *_: b"code")
    model = models.load(vit / "model").eval()
    (graph,) = graphs.graphs(model)
    assert export_pt2.Pt2.write(graph, tmp_path)["device"] == "meta"
    assert {p.device.type for p in model.parameters()} == {"cpu"} and (tmp_path / "model.pt2").read_bytes() == b"code"


def test_a_decoder_with_windows_as_a_graph_past_their_edge():
    """Which keeps all keys and values, with a mask: several tokens and one at a time, against the model."""
    config = LlamaConfig(vocab_size=41, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_ff=56, seq_len=64, window=5, full_every=2)
    model, ids, logits = models.build(config).eval().requires_grad_(False), torch.randint(0, 41, (2, 20)), []
    (graph,), past, done = graphs.graphs(model), [torch.zeros(2, 2, 0, 8)] * 4, 0
    for new in ids.split((9, 1, 1, 6, 3), dim=1):
        done += new.shape[1]
        one, *past = graph.module(new, torch.ones(2, done, dtype=torch.long), *past)
        logits.append(one)
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids), atol=1e-5, rtol=1e-4)
