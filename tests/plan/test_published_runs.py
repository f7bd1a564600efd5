"""Published training runs are read by their fields: no name of a source decides what is predicted, and a program is known without its name."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

from published import runs, scoring, study  # noqa: E402
from published.points import NotCovered, cleaned, load, named, stated  # noqa: E402

from gradus import hardware  # noqa: E402


def point(config=None, **fields):
    config = {"hidden": 256, "layers": 2, "heads": 4, "vocab": 1024, **(config or {})}
    return {"id": "i", "model": "some model", "params": 3e6, "config": config, "hardware": "DGX-H100", "n_devices": 8, "batch": 16, "seq": 128, "metric": "step_time",
            "value": 0.01, "unit": "s", "kind": "measured", "source": "s", "group": "g", **fields}  # fmt: skip


def run_of(p) -> runs.Run:
    found = []
    was, runs.made = runs.made, lambda point, run: found.append(run) or was(point, run)
    try:
        runs.training(cleaned(p))
    finally:
        runs.made = was
    return found[0]


@pytest.mark.parametrize(
    ("config", "hardware_name", "program"),
    [
        ({"framework": "NeMo Megatron", "tp": 1}, "DGX-H100", "mcore"),
        ({"framework": "Megatron-Bridge (NeMo)"}, "DGX-B200", "mcore"),
        ({"tp": 2, "pp": 1, "ep": 1}, "DGX-H100", "mcore"),  # by its degrees alone
        ({"tp": 2, "pp": 1, "recompute": "full"}, "A100", "megatron"),
        ({"framework": "NeMo AutoModel (PyTorch DTensor/FSDP2)", "zero": "FSDP2 8"}, "DGX-H100", "automodel"),
        ({"framework": "torchtitan", "zero": "FSDP2"}, "DGX-H100", "titan"),
        ({"compile": True, "zero": "FSDP2"}, "DGX-H100", "titan"),
        ({"framework": "MaxText"}, "TPU v5p", "maxtext"),
        ({}, "TPU v5p", "maxtext"),
        ({"sharding": "FULL_SHARD"}, "A100", "mosaic"),
    ],
)  # fmt: skip
def test_a_program_is_known_by_its_name_or_its_features(config, hardware_name, program):
    device = hardware.find(hardware_name.removeprefix("DGX-"))
    p = cleaned(point(config))
    assert runs.program_of(p, device, runs.whole_sharded(p, device, 1)) == program


@pytest.mark.parametrize(
    ("text", "way"),
    [("none (no recompute setting in the recipe)", "none"), ("full", "full"), ("selective", "selective"), ("selective (per-op SAC)", "half"), ("remat_policy=full", "full"),
     ("remat_policy=minimal_flash", "cheap"), ('recompute_granularity=selective recompute_modules=["layernorm", "moe_act"]', "none"), (None, "")],
)  # fmt: skip
def test_what_is_computed_again_as_a_row_says_it(text, way):
    assert runs.recomputed(cleaned(point({"recompute": text}))) == way


@pytest.mark.slow
def test_eight_bits_are_products_of_linear_layers_alone():
    both = [run_of(point({"framework": "NeMo", "tp": 1, "precision": precision})) for precision in ("BF16", "MXFP8")]
    bf16, mxfp8 = ([op for op in runs.software.work_of(run).micro if op.kind == "matmul"] for run in both)
    assert {op.dtype for op in bf16} == {"bf16"}
    assert {op.dtype for op in mxfp8} == {"bf16", "fp8"}
    assert all(1024 in op.shape for op in mxfp8 if op.dtype == "bf16")  # the head


@pytest.mark.slow
def test_an_adapters_base_is_frozen_in_its_stored_type():
    run = run_of(point({"framework": "NeMo", "tp": 1, "method": "LoRA"}))
    assert run.recipe.adapter.base is None
    assert run.recipe.layout.precision == "pure_bf16"
    work, whole = runs.software.work_of(run), runs.software.work_of(run_of(point({"framework": "NeMo", "tp": 1})))
    flops = [sum(op.flops * op.count for op in w.micro if op.kind == "matmul") for w in (work, whole)]
    assert 0.6 < flops[0] / flops[1] < 0.8  # two thirds, and the adapter's own
    assert run_of(point({"compile": True, "method": "QLoRA"}, n_devices=1)).recipe.adapter.base == "nf4"


EXPERTS = {"model": "Mixtral-8x7B", "seq": 256, "params": 47e9, "batch": 32, "n_devices": 32}


@pytest.mark.slow
def test_a_pipeline_of_experts_is_read_as_stages_of_their_own():
    run = run_of(point({"framework": "NeMo", "pp": 4, "ep": 8, "vp": 2, "micro_batch": 1}, **EXPERTS))
    assert (run.sliced, run.recipe.layout.expert, run.recipe.model.n_layers, run.virtual) == (4, 8, 8, 2)
    work = runs.software.work_of(run)
    assert work.stages == 4
    assert {t.axis for t in work.transfers} >= {"expert", "pipeline"}
    assert any(op.stage_only for op in work.micro)
    plain = runs.software.work_of(run_of(point({"framework": "NeMo", "pp": 1, "ep": 8, "micro_batch": 1}, **EXPERTS)))
    assert work.model_flops == pytest.approx(plain.model_flops, rel=0.02)


def test_sizes_are_those_of_the_name_else_those_that_are_stated():
    assert named("Llama 3.1 8B pre-training").d_ff == named("LLAMA3_8B").d_ff == 14336
    assert named("Qwen3_30B_a3B (tokendrop)").n_experts == 128
    assert named("some model") is None
    assert stated(cleaned(point())).family == "gpt"
    assert stated(cleaned(point({"kv_heads": 2, "ffn": 700}))).n_kv_heads == 2


def test_what_is_not_stated_and_cannot_be_assumed_is_refused():
    with pytest.raises(NotCovered, match="the batch"):
        study.case(point(batch=None))
    with pytest.raises(NotCovered, match="sizes not known"):
        study.case(point({"hidden": None}))


def test_a_run_counts_once_and_a_cell_weighs_one():
    rows = [point(metric=metric, id=metric) for metric in ("mfu", "tokens_per_s_per_gpu", "model_tflops_per_gpu")] + [point({"container": "new"}, metric="mfu")]
    kept = scoring.once(rows)
    assert [p["metric"] for p in kept] == ["tokens_per_s_per_gpu", "mfu"]
    entries = scoring.weigh([scoring.Entry(p, "g", error=e) for p, e in zip([*kept, point(batch=64)], (0.1, 0.3, 0.5))])
    assert [e.weight for e in entries] == [0.5, 0.5, 1.0]
    assert scoring.row([*entries, scoring.Entry(point(batch=65), "g")])["covered"] == 0.75


def test_no_residual_stands_in_its_own_interval():
    entries = [scoring.Entry(point(batch=8 * i), "g", "H100", "mcore", 0.01 * i, label="a" if i < 20 else "b") for i in range(1, 40)]
    entries[0].error = 9.0
    scoring.intervals(scoring.weigh(entries))
    assert entries[0].between[1] < 0.4  # of b's
    assert entries[0].inside is False
    assert entries[-1].between[1] > entries[-1].between[0]


# ---------------------------------------------------------------- with the published points

# of each program one that is small: what no name may decide
SMALL = ("nemo2407-a-LLAMA2-7B-pre-training-8", "mbridge-26.08-Qwen3_30B_a3B-DGX-GB300-8-MXFP8", "automodel-Llama3 8B-1-lora-step", "titan-mx-mxfp8_cublas", "tune-ladder-3-tps",
         "maxtext-v4-22B-1x-v4-128-TFLOP")  # fmt: skip


def _errors(points) -> float:
    out = []
    for p in points:
        try:
            case = study.case(p)
            out.append(abs(math.log(study.predicted(case) / case.measured)))
        except NotCovered:
            out.append(scoring.REFUSED)
    return sum(out) / len(out)


@pytest.fixture(scope="module")
def small(shared_data):
    folder = shared_data.parent / "groundtruth"
    if not (folder / "training-2026.json").exists():
        pytest.skip("no published points beside the data")
    every = [p for name in ("training-2026.json", "calibration.json") for p in load(folder / name)]
    return [p for p in every if p["id"] in SMALL] + [p for p in every if "ground_truth_single" in p["source"]][:2]


@pytest.mark.slow
@pytest.mark.shared_data
def test_no_name_of_a_source_decides_what_is_predicted(small):
    assert len(small) >= 7
    renamed = [{**p, "source": "x", "group": "x", "id": "x"} for p in small]
    assert _errors(renamed) == pytest.approx(_errors(small), abs=0.01)


@pytest.mark.slow
@pytest.mark.shared_data
def test_a_program_is_predicted_without_its_name(small):
    renamed = [{**p, "config": {**p["config"], **({"framework": "x"} if "framework" in p["config"] else {})}} for p in small]
    assert _errors(renamed) <= 1.5 * _errors(small)
