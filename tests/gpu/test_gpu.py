"""What a GPU does otherwise than a CPU. Every test runs on both: on the CPU so that it cannot rot, on a GPU where there is one.

pytest tests/gpu -rs        # on a machine with a GPU: a few minutes
"""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradus import models
from gradus import recipe as recipes
from gradus.layers import MixtureOfExperts, attention_mask, masks
from gradus.measure.energy import Meter
from gradus.models.decoding import generate
from gradus.parallel.apply import apply
from gradus.parallel.precision import Precision
from gradus.plan import batches
from gradus.recipe import schema
from gradus.rows import read_rows
from gradus.train import run
from gradus.train.optim import make_optimizer
from gradus.train.sampler import Sampler
from gradus.train.step import Stepper

SIZE = {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128}
TEXT = {"vocab_size": 256, "seq_len": 32}
FAMILIES = {
    "gpt": ({"family": "gpt", **TEXT}, {"name": "causal_lm"}, {"kind": "text", "path": "-"}),
    "llama": ({"family": "llama", "n_kv_heads": 1, **TEXT}, {"name": "causal_lm"}, {"kind": "text", "path": "-"}),
    "experts": ({"family": "llama", "n_kv_heads": 1, "n_experts": 4, **TEXT}, {"name": "causal_lm"}, {"kind": "text", "path": "-"}),
    "bert": ({"family": "bert", "dropout": 0.0, **TEXT}, {"name": "masked_lm"}, {"kind": "text", "path": "-"}),
    "t5": ({"family": "t5", "dropout": 0.0, **TEXT}, {"name": "span_corruption"}, {"kind": "text", "path": "-"}),
    "seq2seq": ({"family": "seq2seq", "dropout": 0.0, **TEXT}, {"name": "translation"}, {"kind": "pairs", "path": "-"}),
    "vit": ({"family": "vit", "image_size": 16, "patch_size": 4, "n_classes": 3}, {"name": "classification"}, {"kind": "images", "path": "-"}),
}
COPY = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 16, "train.steps": 8, "evaluate.samples": 0, "evaluate.batch": 8}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device(request.param, 0) if request.param == "cuda" else CPU


def stepper(family: str, device: torch.device, **layout) -> tuple[Stepper, list[dict]]:
    model, task, data = FAMILIES[family]
    recipe = batches.complete(schema.Recipe.model_validate({
        "name": family, "model": SIZE | model, "task": task, "data": data, "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4},
        "train": {"steps": 4, "clip_norm": 1.0}, "layout": {"device": device.type, "micro_batch": 2, **layout},
    }))  # fmt: skip
    torch.manual_seed(0)
    precision = Precision(recipe.layout.precision, device)
    parallel = apply(precision.cast(models.build(recipe.model)).to(device), recipe.layout)
    parallel.bare.train()
    return Stepper(recipe, batches.task_without_data(recipe), parallel, device, precision), batches.micro_batches(recipe)


def losses(family: str, device: torch.device, **layout) -> list[float]:
    """The loss and the gradient norm of each of three steps."""
    s, given = stepper(family, device, **layout)
    counts = {kind: sum(b["counts"][kind] for b in given) for kind in given[0]["counts"]}
    found = []
    for _ in range(3):
        loss, norm = s.step(given, counts)
        assert loss.device == norm.device == device
        found += [float(loss), float(norm)]
    return found


# ------------------------------------------------------------ one step


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_follows_the_cpus_fp32(family, device):
    assert losses(family, device, precision="bf16") == pytest.approx(losses(family, CPU), rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_documents_train_as_on_the_cpu(precision, device):
    """On a GPU by blocks of scores, on a CPU with a dense mask; both compiled and not."""
    torch.manual_seed(0)
    model = models.build(schema.LlamaConfig(vocab_size=64, seq_len=512, n_kv_heads=1, **SIZE))
    segments = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in ([200, 12, 300], [5, 250, 257])])
    ids, positions = torch.randint(64, segments.shape), torch.cat([torch.arange(512)[None]] * 2)

    def step(model: nn.Module, where: torch.device) -> list[torch.Tensor]:
        with torch.autocast(where.type, torch.bfloat16, enabled=precision == "bf16"):
            out = model(ids.to(where), segments=segments.to(where), positions=positions.to(where))
        out.float().square().mean().backward()
        return [out, *(p.grad for p in model.parameters())]

    wanted = step(copy.deepcopy(model), CPU)
    assert isinstance(attention_mask(segments.to(device), None), masks.Documents) == (device != CPU)
    for compiled in (False, True) if device != CPU else (False,):
        one = copy.deepcopy(model).to(device)
        for block in one.blocks if compiled else ():
            block.compile()
        for got, expected in zip(step(one, device), wanted, strict=True):
            assert (got.float().to(CPU) - expected.float()).norm() <= (1e-3 if precision == "fp32" else 0.05) * expected.float().norm()


def test_packed_documents_need_no_scores(device):
    """32,768 tokens in a row: a dense mask alone would be 1 GiB, and as much again for each layer in the scores' dtype."""
    if device == CPU:
        pytest.skip("a CPU has the dense mask")
    model = models.build(schema.LlamaConfig(vocab_size=64, seq_len=32768, n_kv_heads=1, **SIZE)).to(device)
    segments = (torch.arange(32768, device=device) // 1000)[None]
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        model(segments % 64, segments=segments, positions=torch.arange(32768, device=device)[None] % 1000).float().mean().backward()
    assert torch.cuda.max_memory_allocated() < 2**30


def test_experts_never_wait_for_the_device(device):
    mixture = MixtureOfExperts(64, 128, 4, 2, "silu", gated=True).to(device)
    x = torch.randn(2, 32, 64, device=device, requires_grad=True)
    if device != CPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast(device.type, torch.bfloat16):
            out = mixture(x)
        out.float().square().sum().backward()
    finally:
        if device != CPU:
            torch.cuda.set_sync_debug_mode("default")
    plain = copy.deepcopy(mixture).to(CPU)
    plain.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x.detach().to(CPU))
    expected.float().square().sum().backward()
    for got, wanted in zip((out, *(p.grad for p in mixture.parameters())), (expected, *(p.grad for p in plain.parameters())), strict=True):
        assert (got.float().to(CPU) - wanted.float()).norm() <= 0.05 * wanted.float().norm()


@pytest.mark.parametrize("layout", [{"checkpointing": "attention"}, {"checkpointing": "selective"}, {"checkpointing": "full"},
                                    {"attention": "naive"}, {"attention": "chunked", "chunk": 8}])  # fmt: skip
def test_what_saves_memory_changes_nothing(layout, device):
    assert losses("llama", device, **layout) == pytest.approx(losses("llama", CPU), rel=1e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps(mode, device, monkeypatch):
    if device == CPU and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("compiling for a CPU needs a C++ compiler")
    if device == CPU:  # without the compiler's back end, which takes a minute
        own = nn.Module.compile
        monkeypatch.setattr(nn.Module, "compile", lambda self, mode=None: own(self, backend="eager"))
    assert losses("gpt", device, compile=mode) == pytest.approx(losses("gpt", CPU), rel=1e-3)


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "adam"}, {"name": "sgd", "momentum": 0.9}])
def test_a_bad_gradient_never_reaches_the_weights(optimizer, device):
    layer = nn.Linear(4, 4).to(device)
    before, recipe = copy.deepcopy(layer.state_dict()), recipes.load("copy-task", **{"optimizer": {"lr": 0.1, **optimizer}})
    step = make_optimizer(layer.named_parameters(), recipe.optimizer)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    Precision("fp32", device).step(step, torch.ones((), device=device))
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    Precision("fp32", device).step(step, torch.zeros((), device=device))
    assert not any(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_fp16_backs_off_and_goes_on(device):
    s, given = stepper("gpt", device, precision="fp16")
    s.precision.scaler.update(2.0**40)
    counts = {"tokens": sum(b["counts"]["tokens"] for b in given)}
    weights = [p.detach().clone() for p in s.parallel.bare.parameters()]
    s.step(given, counts)
    assert all(torch.equal(a, b) for a, b in zip(weights, s.parallel.bare.parameters())) and s.precision.scaler.get_scale() < 2.0**40
    s.precision.scaler.update(2.0**10)
    s.step(given, counts)
    assert not all(torch.equal(a, b) for a, b in zip(weights, s.parallel.bare.parameters()))


# ------------------------------------------------------------ a run


@pytest.mark.slow
def test_a_run_is_planned_and_proved(device, tmp_path):
    """In a process of its own: the plan is made in a fork, and a fork of a process that has computed on a GPU cannot."""
    settings = {**COPY, "layout.device": device.type, "log.dir": tmp_path / "run", "log.every": 3}
    subprocess.run([sys.executable, "-m", "gradus", "train", "copy-task", *(f"{k}={v}" for k, v in settings.items())], check=True)
    measured = {r["name"]: r["value"] for r in read_rows(tmp_path / "run/proof.jsonl")}
    planned = {r["name"]: r["value"] for r in read_rows(tmp_path / "run/plan.jsonl") if r.get("step") is not None}
    for name in ("weights", "gradients", "optimizer"):
        assert measured[f"memory/{name}"] == pytest.approx(planned[f"memory/{name}"], rel=0.01)
    assert 0 < measured["time/step"] < 60 and measured["memory/allocated"] > measured["memory/weights"]


def test_a_resumed_run_ends_in_the_same_bits(device, tmp_path):
    settings = {**COPY, "model.dropout": 0.1, "layout.device": device.type, "layout.attention": "naive", "train.checkpoint_every": 4}
    for name in ("whole", "cut"):
        run.train(recipes.load("copy-task", **settings, **{"log.dir": str(tmp_path / name)}))
    shutil.rmtree(tmp_path / "cut/checkpoints/step-00000008")
    run.train(recipes.load(tmp_path / "cut"), resume=tmp_path / "cut")
    whole, cut = ((tmp_path / name / "checkpoints/step-00000008/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_generation_gives_the_cpus_tokens(device):
    torch.manual_seed(0)
    model = models.build(schema.Recipe.model_validate({**recipes.load("copy-task").model_dump(), "model": SIZE | FAMILIES["gpt"][0]}).model).eval()
    prompts = [[1, 2, 3], [4, 5]]
    expected = torch.stack(list(generate(model, prompts, max_new=8)))
    assert torch.equal(torch.stack(list(generate(model.to(device), prompts, max_new=8))).cpu(), expected)


# ------------------------------------------------------------ meters and processes


def test_meters_tell_what_they_read_or_nothing(device):
    sampler = Sampler(device)
    with Meter(device) as meter:
        x = torch.randn(512, 512, device=device)
        for _ in range(20):
            x = x @ x / 512
        float(x.sum())
    assert (meter.source is None) == (meter.joules is None) and (meter.joules is None or meter.joules >= 0)
    assert [row.name for row in sampler.read() if row.name.startswith("gpu")] if sampler.gpus else True
    sampler.close()


@pytest.mark.parametrize("offload", [False, True])
def test_shards_are_summed_and_saved_in_a_world_of_one(offload, device, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    from gradus.parallel.shard import shard
    from gradus.train import sharded

    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        s, given = stepper("gpt", device)
        model = s.parallel.bare
        want = [p.detach().clone().cpu() for p in model.parameters()]
        shard(model, init_device_mesh(device.type, (1,)), schema.Layout(shard=2, offload=offload))
        loss = sum(s.task.losses(model, s.task.to_device(given[0], device)).values())
        loss.backward()
        grads = [p.grad.full_tensor() for p in model.parameters()]
        assert all(torch.isfinite(g).all() for g in grads) and {g.device.type for g in grads} == {"cpu" if offload else device.type}
        held = {f"model.{name}": p for name, p in model.named_parameters()}
        target = tmp_path / "step-00000001"
        sharded.save(target, model.config, held, lambda aside: (aside / "training.json").write_text("{}"), dist.new_group(backend="gloo")).finish()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        sharded.load(target, held)
        assert all(torch.equal(p.full_tensor().cpu(), w) for p, w in zip(model.parameters(), want))
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------ the benchmark


@pytest.mark.slow
def test_the_benchmark_writes_what_it_predicts_and_measures(device, tmp_path):
    path = Path(__file__).resolve().parents[2] / "benchmarks/gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--tiny", "--device", device.type, "--models", "gpt2", "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in rows if r["name"] == "gpu/memory"] == ["predicted", "measured"] * 2
    assert all(r["value"] > 0 and r["torch"] == torch.__version__ for r in rows)
