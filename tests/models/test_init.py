"""A model by its name: where it lies, what it is, and what is said where there is none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from weight_parts import LLAMA, random_model

from gradus import models
from gradus.errors import UserError
from gradus.models import weights


def test_dtype(tmp_path):
    models.save(random_model(LLAMA).bfloat16(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(models.load(tmp_path).parameters()).dtype == torch.float32
    assert next(models.load(tmp_path, dtype=torch.float16).parameters()).dtype == torch.float16


def test_load_holds_one_copy(tmp_path):
    """Allocated at the peak: the model and no more than its largest tensor, besides one memory-mapped file at a time."""
    config = LLAMA.model_copy(update={"n_layers": 8, "d_model": 64, "d_ff": 256, "n_kv_heads": 4})
    models.save(random_model(config), tmp_path, max_shard_bytes=200_000)
    models.load(tmp_path)  # imports and first-time allocations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = models.load(tmp_path)
    events = sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    sizes = [p.numel() * 4 for p in model.parameters()]
    mapped = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert sum(sizes) <= peak <= sum(sizes) + max(sizes) + mapped


def test_unknown_override(tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    with pytest.raises(UserError, match=r"droput is not a field of a llama model. Did you mean dropout\?"):
        models.load(tmp_path, droput=0.1)
    with pytest.raises(UserError, match=r"dropout: Input should be less than 1"):
        models.load(tmp_path, dropout=1.5)


def test_absent_folders(tmp_path):
    (tmp_path / "bert").mkdir()
    with pytest.raises(UserError, match=r"brt: no such file or folder. Did you mean bert\?"):
        models.load(tmp_path / "brt")
    (tmp_path / "bert" / "vocab.txt").write_text("")
    with pytest.raises(UserError, match=r"neither config.json .* nor params.json .* nor checkpoints/ .*; it holds vocab.txt"):
        models.load(tmp_path / "bert")
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(UserError, match=r"no weights: neither model.safetensors nor pytorch_model.bin"):
        models.load(tmp_path / "bert")
    (tmp_path / "version_0" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="a run without a checkpoint yet"):
        models.load(tmp_path / "version_0")
    torch.save({"state_dict": {}}, tmp_path / "version_0" / "checkpoints" / "epoch=0.ckpt")  # as Lightning's logger lays it
    with pytest.raises(UserError, match=r"epoch=0\.ckpt: weights alone do not say what model they are"):
        models.load(tmp_path / "version_0")
    (tmp_path / "some.yaml").write_text("task: {name: lm}")
    with pytest.raises(UserError, match=r"some\.yaml: a recipe\. Give its run"):
        models.load(tmp_path / "some.yaml")
    for i in range(2):
        torch.save({}, tmp_path / f"consolidated.0{i}.pth")
    with pytest.raises(UserError, match=r"nor params\.json \(Meta\).*consolidated\.00\.pth"):
        models.load(tmp_path)
    for folder, error in (("bert", "not a whole safetensors file"), ("alone", "Give a folder that holds them and config.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match=error):
            models.load(tmp_path / folder / "model.safetensors")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "config.json: line 1, column 2: not valid JSON"),
        ("[]", "config.json: not a JSON object"),
        ("{}", "no model_type.* Known: bert, camembert, distilbert, gemma3, gemma3_text, gpt2, "),
        ('{"model_type": "gtp2"}', r"model_type=gtp2 is not one of Gradus's families, nor similar to one. Known: bert, camembert, distilbert, gemma3, gemma3_text, gpt2, "),
        ('{"model_type": "opt"}', r"model_type=opt can be planned, not trained: family gpt has the same .* Plan it: gradus plan hf:/\S+$"),
        ('{"model_type": "deepseek_v3"}', r"model_type=deepseek_v3 can be planned, not trained: multi-head latent attention \(kv_lora_rank\) "),
        ('{"model_type": "deepseek_v32"}', r"model_type=deepseek_v32 can be neither planned nor trained: index_topk: "),
        ('{"model_type": "olmo2"}', r"model_type=olmo2 can be planned, not trained: it is planned as family llama without the norms of queries and keys \(q_norm, k_norm\), "),
        ('{"model_type": "llama", "sliding_window": 8}', "sliding_window=8 is not supported by family llama"),
        ('{"model_type": "vit"}', "config.json: num_hidden_layers is missing"),
        ('{"model_type": "gpt2", "n_head": 7}', "config.json: d_model=768 is not a multiple of n_heads=7"),
        ('{"model_type": "gpt2", "gradus": -1}', "config.json: gradus: expected an object, got -1"),
        ('{"model_type": "gpt2", "gradus": {"freeze": [null]}}', r"config.json: a value of the wrong kind \(gradus.freeze=\[None\]\)"),
        ('{"model_type": "gpt2", "gradus": {"adapter": {}}}', "gradus.base in config.json: expected the folder or name of the base, got None"),
        ('{"model_type": "gpt2", "vocab_size": null}', "config.json: vocab_size is missing, and the model cannot be built without it"),
    ],
)
def test_broken_config(content, error, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=error) as e:
        models.config_of(tmp_path)
    assert "\n" not in str(e.value)


def test_hub_name_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for read in (models.load, models.config_of):
        with pytest.raises(UserError, match=r"some-one/some-bert: no such folder.*HF_HUB_OFFLINE=1.*gradus fetch") as e:
            read("some-one/some-bert")
        assert "\n" not in str(e.value)


def test_hub_name_in_the_local_copy(monkeypatch, tmp_path):
    import huggingface_hub

    models.save(random_model(LLAMA), tmp_path)
    asked = []

    def snapshot_download(name, allow_patterns, local_files_only):
        asked.append((name, local_files_only, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.load("some-one/llama").config.vocab_size == 31
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert models.config_of("llama").vocab_size == 31
    assert asked == [("some-one/llama", True, True), ("llama", False, False)]


def test_a_configuration_needs_no_torch(tmp_path):
    models.save(random_model(LLAMA), tmp_path)
    code = "import sys; from gradus import models; models.config_of(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


# ---------------------------------------------------------------- a Gradus run


def test_run_folder(tmp_path):
    with_step = {step: random_model(LLAMA) for step in (9, 10)}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="a run without a checkpoint yet"):
        models.load(tmp_path / "run")
    for step, model in with_step.items():
        models.save(model, tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "run" / "checkpoints" / "step-00000011").mkdir()  # not whole
    assert torch.equal(models.load(tmp_path / "run").norm.weight, with_step[10].norm.weight)
    (tmp_path / "run" / "checkpoints" / "best").symlink_to("step-00000009")
    assert torch.equal(models.load(tmp_path / "run").norm.weight, with_step[9].norm.weight)
    model = random_model(LLAMA)
    assert models.load_weights(model, tmp_path / "run") == weights.LoadReport()
    assert torch.equal(model.norm.weight, with_step[9].norm.weight)
