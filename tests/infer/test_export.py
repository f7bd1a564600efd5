"""Exported graphs: checked at other sizes than they were traced at, used without gradus and torch, built by a stand-in of TensorRT; what transformers reads of a folder."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.data import tokenizers
from gradus.infer import engines, find
from gradus.models.decoding import complete
from gradus.models.weights import checksums
from gradus.recipe.schema import Model

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 24}
SIX = {
    "seq2seq": {"vocab_size": 40, "seq_len": 32}, "t5": {"vocab_size": 40, "d_head": 6},
    "bert": {"vocab_size": 40, "seq_len": 32, "head": "classification", "n_classes": 3},
    "gpt": {"vocab_size": 40, "seq_len": 32}, "llama": {"vocab_size": 40, "seq_len": 32, "n_kv_heads": 2},
    "vit": {"image_size": 8, "patch_size": 4, "n_classes": 3},
}  # fmt: skip
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6]]


def saved(family: str, folder: Path, **more) -> torch.nn.Module:
    model = models.build(TypeAdapter(Model).validate_python({"family": family, **SMALL, **SIX[family], **more}), seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    models.save(model, folder)
    return model.eval()


def exported(family: str, folder: Path, *words: str, **more) -> tuple[torch.nn.Module, Path, dict]:
    model = saved(family, folder / "model", **more)
    assert main(["export", str(folder / "model"), "--to", str(folder / "out"), *words]) == 0
    return model, folder / "out", json.loads((folder / "out" / "export.json").read_text())


def needs_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra onnx brings it")


slow = pytest.mark.slow


@pytest.mark.parametrize("family", ["gpt", "vit", *(pytest.param(name, marks=slow) for name in ("bert", "llama", "t5", "seq2seq"))])
def test_onnx(family, tmp_path, capsys):
    """Every case within 1e-4, named axes, and where it writes the tokens that PyTorch writes."""
    needs_onnx()
    import onnx

    model, out, about = exported(family, tmp_path, "--as", "onnx")
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


def test_torchscript(tmp_path):
    model, out, about = exported("vit", tmp_path, "--as", "torchscript")
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"])
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(torch.jit.load(out / "model.pt")(images)[0], model(images))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "vit"])
def test_pt2(family, tmp_path):
    _, _, about = exported(family, tmp_path, "--as", "pt2")
    assert all(row["max_abs_delta"] <= 1e-4 for row in about["check"])


@pytest.mark.parametrize(("family", "words", "told"), [
    ("gpt", ["--as", "torchscript"], "--as torchscript: for encoders"),
    ("gpt", ["--as", "pt2", "--opset", "18"], "--opset=18: it is ONNX's, and --as pt2 has none"),
    ("gpt", ["--opset", "18"], "--opset=18: it is ONNX's"),
    ("gpt", ["--as", "onnx", "--opset", "13"], "--opset=13: the exporter writes no operators older than 18's"),
])  # fmt: skip
def test_what_does_not_fit_is_told(family, words, told, tmp_path, capsys):
    if "onnx" in words:
        needs_onnx()
    saved(family, tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), *words]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_outputs_that_are_off_are_refused(tmp_path, capsys, monkeypatch):
    from gradus.infer import export_torchscript

    run = export_torchscript.TorchScript.run
    monkeypatch.setattr(export_torchscript.TorchScript, "run", lambda self, *a: {k: v + 0.01 for k, v in run(self, *a).items()})
    saved("vit", tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "torchscript"]) == 2
    assert "outputs differ from PyTorch's by" in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- a check holds for the bytes that it was made with


def flip(file: Path) -> None:
    """The signs of some weights."""
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    content[at : at + 400 : 4] = bytes(b ^ 0x80 for b in content[at : at + 400 : 4])
    file.write_bytes(content)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """An image classifier, exported, and an image."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("vit")
    saved("vit", folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    assert main(["export", str(folder / "model"), "--to", str(folder / "out"), "--as", "torchscript"]) == 0
    Image.new("RGB", (8, 8), (9, 99, 199)).save(folder / "a.png")
    return folder


def predicted(model: Path, vit: Path, capsys, engine: str = "torchscript") -> tuple[int, str, str]:
    code, told = main(["predict", str(model), str(vit / "a.png"), "--engine", engine]), capsys.readouterr()
    return code, told.out, told.err


def changed(**more):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | more))


@pytest.mark.parametrize(("name", "change"), [
    ("model.pt", flip), ("model.pt", Path.unlink), ("model.pt", lambda file: file.write_bytes(file.read_bytes()[:1000])),
    ("export.json", changed(told="checked: perfect")), ("export.json", changed(graphs=[1])), ("export.json", lambda file: file.write_text("5")),
    ("config.json", changed(id2label={"0": "a"}, num_labels=1)), ("checksums.json", Path.unlink), ("checksums.json", lambda file: file.write_text("[]")),
])  # fmt: skip
def test_an_export_of_other_bytes_is_refused(vit, tmp_path, name, change, capsys):
    assert predicted(vit / "out", vit, capsys)[0] == 0
    shutil.copytree(vit / "out", tmp_path / "out")
    change(tmp_path / "out" / name)
    code, out, err = predicted(tmp_path / "out", vit, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and f"{name} " in err
    assert "it cannot be verified. Copy it again, or make it again with gradus export" in err


def test_an_export_whose_checksums_are_of_another_version_of_its_json(vit, tmp_path, capsys):
    shutil.copytree(vit / "out", tmp_path / "out")
    (tmp_path / "out" / "export.json").write_text("{}")
    checksums.write(tmp_path / "out")
    assert "export.json has another version" in predicted(tmp_path / "out", vit, capsys)[2]


def test_damaged_files_of_the_cache_are_made_anew(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    whole = predicted(vit / "model", vit, capsys)
    (graph,), (check,) = tmp_path.glob("exports/*/model.pt"), tmp_path.glob("engines/*")
    for damage in (flip, Path.unlink, lambda file: file.with_name("export.json").write_text("{}"), lambda file: file.with_name("checksums.json").write_text("[")):
        damage(graph)
        assert predicted(vit / "model", vit, capsys) == whole
    kept = check.read_text()
    for text in ("", "[", "[]\n", kept[: len(kept) // 2], "\0", kept.replace('"value": ', '"value": "x", "v": '), kept.splitlines()[0] + "\n"):
        for file in tmp_path.glob("engines/*"):
            file.write_text(text)
        assert predicted(vit / "model", vit, capsys)[:2] == whole[:2]
    best = engines.best_at(find(str(vit / "model")))
    best.parent.mkdir()
    for text in ("", "{", "[]", "5", "null", '{"any": ["torchscript", "fp32"]}', '{"any": ["zzz", "fp32"], "when": 1}', '{"any": "torch", "when": 1}'):
        best.write_text(text)
        code, _, err = predicted(vit / "model", vit, capsys, "auto")
        assert (code, "--engine auto: torch fp32 (no gradus bench" in err) == (0, True)


def test_a_check_is_of_the_graph_that_it_was_made_with(vit, tmp_path, monkeypatch, capsys):
    """A graph that is made anew is compared anew, since its bytes may be others."""
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    predicted(vit / "model", vit, capsys)
    (graph,) = tmp_path.glob("exports/*/model.pt")
    flip(graph)
    checksums.write(graph.parent)  # as if it had been made so
    code, _, err = predicted(vit / "model", vit, capsys)
    assert code == 2 and "differs from PyTorch in fp32" in err


@pytest.mark.parametrize("kind", ["hf", "torchscript"])
def test_a_full_disk_leaves_nothing_of_an_export(kind, vit, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gradus.infer.sidecar.write", full)  # the weights are written by then
    assert main(["export", str(vit / "model"), "--to", str(tmp_path / "out"), "--as", kind]) == 74
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the disk is full" in err and "nothing was written" in err and not list(tmp_path.iterdir())


def test_a_model_that_is_compiled_for_a_gpu_is_checked_against_one_that_stays(vit, tmp_path, monkeypatch):
    """By a stand-in for the GPU, and for the machine code."""
    from gradus.infer import export_pt2, graphs

    monkeypatch.setattr(export_pt2, "pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(export_pt2, "compile_ahead", lambda *_: b"code")
    model = models.load(vit / "model").eval()
    (graph,) = graphs.graphs(model)
    assert export_pt2.Pt2.write(graph, tmp_path)["device"] == "meta"
    assert {p.device.type for p in model.parameters()} == {"cpu"} and (tmp_path / "model.pt2").read_bytes() == b"code"


def test_without_a_compiler_what_needs_one_is_told(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/none/g++")
    code, out, err = predicted(vit / "model", vit, capsys, "compiled")
    assert (code, out) == (2, "") and "--engine compiled: torch.compile finds no C++ compiler here. Install g++" in err and err.count("\n") == 1
    assert main(["export", str(vit / "model"), "--to", str(tmp_path / "out"), "--as", "pt2"]) == 2
    assert "--as pt2: AOTInductor finds no C++ compiler here" in capsys.readouterr().err


# ---------------------------------------------------------------- TensorRT, by a stand-in


def stand_in(calls: list, errors: list[str]) -> types.SimpleNamespace:
    """The parts of TensorRT 10.12's and 11's API that the builder calls; any other name is an error."""

    class Parser:
        num_errors = len(errors)

        def __init__(self, network, logger):
            pass

        def parse_from_file(self, path):
            calls.append(("parse", Path(path).name))
            return not errors

        def get_error(self, i):
            return errors[i]

    class Builder:
        def __init__(self, logger):
            pass

        def create_network(self, flags):
            calls.append(("network", flags))
            return object()

        def create_builder_config(self):
            return types.SimpleNamespace(
                set_memory_pool_limit=lambda pool, n: calls.append((pool, n)), add_optimization_profile=lambda p: calls.append("profile")
            )

        def create_optimization_profile(self):
            return types.SimpleNamespace(set_shape=lambda name, *shapes: calls.append((name, shapes)))

        def build_serialized_network(self, network, config):
            return b"plan"

    logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
    return types.SimpleNamespace(
        __version__="10.12.0", Logger=logger, Builder=Builder, OnnxParser=Parser,
        NetworkDefinitionCreationFlag=types.SimpleNamespace(STRONGLY_TYPED=1), MemoryPoolType=types.SimpleNamespace(WORKSPACE="workspace"),
    )  # fmt: skip


def test_a_plan_is_built_strongly_typed():
    from gradus.errors import UserError
    from gradus.infer import export_tensorrt, graphs

    model = models.build(TypeAdapter(Model).validate_python({"family": "gpt", **SMALL, **SIX["gpt"]}), seed=1)
    (graph,) = graphs.graphs(model)
    recipe = export_tensorrt.build_recipe(graph, "fp16", "model.onnx", "model.plan")
    assert recipe["profile"]["past_key_values.0.key"] == {"min": [1, 4, 0, 4], "opt": [1, 4, 32, 4], "max": [32, 4, 32, 4]}
    assert "--stronglyTyped" in recipe["command"] and "fp16" not in recipe["command"]
    calls: list = []
    assert export_tensorrt.build(stand_in(calls, []), Path("model.onnx"), recipe) == b"plan"
    assert ("network", 1 << 1) in calls and ("workspace", 4 << 30) in calls and "profile" in calls
    assert {call[0] for call in calls if isinstance(call, tuple)} >= set(graph.inputs)
    with pytest.raises(UserError, match=r"does not read model\.onnx: no Foo; no Bar"):
        export_tensorrt.build(stand_in([], ["no Foo", "no Bar"]), Path("model.onnx"), recipe)


# ---------------------------------------------------------------- what transformers and vLLM read


def test_transformers_generates_with_nothing_more(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.train_bpe(["to be or not to be, that is the question "] * 4, 300)
    model = saved("gpt", tmp_path / "model", vocab_size=tokenizer.vocab_size)
    tokenizer.save(tmp_path / "model")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "model"), "--to", str(out), "--precision", "bf16"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["dtype"] == "bfloat16"  # vLLM picks the model by the first
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"} <= {p.name for p in out.iterdir()}
    ids = json.loads((out / "generation_config.json").read_text())
    assert ids["eos_token_id"] == tokenizer.eos_id and "pad_token_id" in ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    given = transformers.AutoTokenizer.from_pretrained(out)("to be", return_tensors="pt")
    found = theirs.generate(**given, do_sample=False, max_new_tokens=5)[0, given["input_ids"].shape[1] :].tolist()
    wanted = complete(models.load(out).eval(), given["input_ids"].tolist(), max_new=5, eos_id=tokenizer.eos_id)[0]
    assert found[: len(wanted)] == wanted and model.config == models.load(out).config
