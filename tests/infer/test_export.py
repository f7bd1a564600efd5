"""The verb: what it refuses, a full disk, a plan of TensorRT built by a stand-in, what transformers reads of a folder."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.data import tokenizers
from gradus.errors import UserError
from gradus.models.decoding import complete
from gradus.recipe.schema import Adapter, Model

sys.path.insert(0, str(Path(__file__).parent))
from small_models import SIX, SMALL, flip, needs_onnx, predicted, saved


@pytest.mark.parametrize(("family", "words", "told"), [
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


@pytest.mark.parametrize("kind", ["hf", "torchscript"])
def test_a_full_disk_leaves_nothing_of_an_export(kind, vit, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gradus.infer.sidecar.write", full)  # the weights are written by then
    assert main(["export", str(vit / "model"), "--to", str(tmp_path / "out"), "--as", kind]) == 74
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the disk is full" in err and "nothing was written" in err and not list(tmp_path.iterdir())


def test_without_a_compiler_what_needs_one_is_told(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/none/g++")
    code, out, err = predicted(vit / "model", vit, capsys, "compiled")
    assert (code, out) == (2, "") and "--engine compiled: torch.compile finds no C++ compiler here. Install g++" in err and err.count("\n") == 1
    assert main(["export", str(vit / "model"), "--to", str(tmp_path / "out"), "--as", "pt2"]) == 2
    assert "--as pt2: AOTInductor finds no C++ compiler here" in capsys.readouterr().err


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


def test_a_folder_of_weights_keeps_checksums_of_what_is_read(tmp_path):
    saved("gpt", tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "base")]) == 0
    start = models.config_of(tmp_path / "base").model_copy(update={"init": str(tmp_path / "base")}).trained(Adapter(rank=2))
    models.save(models.load_start(start, 0).on("cpu"), tmp_path / "adapted")
    words = {"base": (), "shards": ("--shard-gb", "1e-6"), "adapter": (), "merged": ("--merge",)}
    for name, more in words.items():
        source = tmp_path / ("adapted" if name in ("adapter", "merged") else "model")
        assert main(["export", str(source), "--to", str(tmp_path / name), *more]) == 0
        (tmp_path / name / "README.md").write_text("a card")
        (tmp_path / name / "optimizer.pt").write_bytes(b"of somebody's training")
        models.load(tmp_path / name)
    for name in words:
        file = next((tmp_path / name).glob("*.safetensors"))
        content = file.read_bytes()
        flip(file)
        with pytest.raises(UserError, match=rf"{file.name} is not what was written .*after a change by hand, delete its checksums"):
            models.load(tmp_path / name)
        file.write_bytes(content)
    shutil.copy(tmp_path / "merged" / "model.safetensors", tmp_path / "shards")  # which is read in their place
    with pytest.raises(UserError, match=r"checksums\.json does not list model\.safetensors"):
        models.load(tmp_path / "shards")
    sums = tmp_path / "merged" / "checksums.json"
    for entry in ({"bytes": None, "crc32": "0"}, {"bytes": "x", "crc32": "0"}, {"bytes": 1, "crc32": 5}, {"bytes": 1}, [], {"bytes": 1, "crc32": "0", "x": 1}):
        sums.write_text(json.dumps({**json.loads(sums.read_text()), "config.json": entry}))
        with pytest.raises(UserError, match=r"checksums\.json is not readable"):
            models.load(tmp_path / "merged")
    about = tmp_path / "adapter" / "adapter_config.json"
    (tmp_path / "base").rename(tmp_path / "moved")
    about.write_text(about.read_text().replace(str(tmp_path / "base"), str(tmp_path / "moved")))
    models.load(tmp_path / "adapter")
    about.write_text(about.read_text().replace('"lora_alpha": 16.0', '"lora_alpha": 32'))
    with pytest.raises(UserError, match=r"lora_alpha=32 in adapter_config\.json, 16\.0 by gradus_config\.json"):
        models.load(tmp_path / "adapter")


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
