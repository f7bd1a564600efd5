"""Single kernels that were measured → a chip's parameters; whose parameters a chip takes; collectives inside a node."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.plan import roofline
from gradus.plan.collectives import collective_seconds, measured_links
from gradus.plan.roofline import OF_CHIP, find_parameters, op_seconds

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

from published import kernels  # noqa: E402

KEPT = roofline.fitted(roofline.KERNELS)
H100 = hardware.find("H100")


def product(m: int, n: int, k: int, dtype: str = "bfloat16", **more) -> dict:
    return {"op": "gemm", "hardware": "h100_sxm", "dtype": dtype, "m": m, "n": n, "k": k, "time_s": 1.0, **more}


def attention(batch: int, seq: int, step: int = 0, **more) -> dict:
    return {"op": f"attention_{'prefill' if seq > 1 else 'decode'}", "hardware": "h100_sxm", "kv_dtype": "bfloat16", "batch": batch, "seq": seq, "step": step,
            "heads": 32, "kv_heads": 8, "head_dim": 128, "time_s": 1.0, **more}  # fmt: skip


# ---------------------------------------------------------------- reading


def test_rows_become_the_operations_that_a_plan_prices():
    (one,) = kernels.kernels([product(64, 512, 4096)])["H100"]
    assert (one.kind, one.op.flops, one.op.bytes, one.op.shape) == ("product", 2.0 * 64 * 512 * 4096, 2.0 * (64 * 4096 + 512 * 4096 + 64 * 512), (1, 64, 512, 4096))
    (low,) = kernels.kernels([product(64, 512, 4096, "fp8")])["H100"]
    assert low.op.bytes == 64 * 4096 + 512 * 4096 + 2 * 64 * 512  # what it gives is in bf16
    prefill, decode = kernels.kernels([attention(2, 1024), attention(2, 1, 1023)])["H100"]
    assert prefill.op.flops == 4 * 2 * 32 * 128 * 1024 * 1025 / 2  # each query looks at the keys before it
    assert decode.op.flops == 4 * 2 * 32 * 128 * 1024 and decode.op.shape[2:4] == (1, 1024)
    assert decode.op.bytes == 2 * 2 * 128 * (2 * 32 + 2 * 1024 * 8)
    norm = {"op": "fused_rms_norm", "hardware": "h100_sxm", "x": 4096.0, "shape": json.dumps({"M": 2048, "dtype": "torch.bfloat16"}), "pass_": "forward", "kernel": "liger", "time_s": 1.0}
    (memory,) = kernels.kernels([norm])["H100"]
    assert memory.op.bytes == 2 * 2 * 2048 * 4096
    assert not kernels.kernels([norm | {"kernel": "huggingface"}, product(1, 2, 3, "nvfp4"), attention(1, 8, head_dim=512)])["H100"]


# ---------------------------------------------------------------- fitting


def test_the_fit_finds_what_made_the_rows():
    true = dict(zip(kernels.PRIOR, (start for start, _ in kernels.PRIOR.values()))) | {"matmul": 0.7, "bandwidth": 0.9, "fp8": 0.6, "cast": 5.0, "decode": 2e-5}
    sizes = [(64, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 1024), (1, 8192, 8192), (16, 256, 64), (2048, 512, 16384), (8192, 4096, 256)]
    rows = [product(*size, dtype) for size in sizes for dtype in ("bfloat16", "fp8")] + [attention(b, s) for b, s in ((1, 8192), (8, 512), (32, 64))]
    rows += [attention(b, 1, s) for b, s in ((1, 15), (64, 4095))]
    made = [kernel._replace(seconds=kernels.modelled(kernel, true, H100)) for kernel in kernels.kernels(rows)["H100"]]
    fit = kernels.ChipFit(H100, made)
    x = fit.solve(made)
    assert np.abs(fit.errors(x)).max() < 0.05
    for name in ("matmul", "bandwidth", "fp8", "cast", "decode"):
        assert fit.values(x)[name] == pytest.approx(true[name], rel=0.08), name
    assert "around memory" not in fit.own  # none was measured
    (operator, row), *_ = kernels.table(fit, np.array([0.1] * len(made)), np.array([-0.2] * len(made)))
    assert (operator, row[1:]) == ("decode", [0.1, 0.1, 0.1, 0.2, 0.2, 0.2])


def test_collectives_are_fitted_by_ranks():
    def seconds(op: str, ranks: int, size: int) -> float:
        crossed = kernels.ring_factor(kernels.NCCL[op], ranks) * size / 3e11
        latency = 1e-5 if op == "all_reduce" else 1e-5 * (ranks + 2) / (2 * ranks)
        return (latency**kernels.BEND + crossed**kernels.BEND) ** (1 / kernels.BEND)

    rows = [{"op": op, "hardware": "h100_sxm", "ranks": n, "bytes": 4**i, "time_s": seconds(op, n, 4**i)} for n in (2, 8) for i in (5, 10, 14) for op in kernels.NCCL]
    found, errors = kernels.links(rows)
    assert max(np.abs(e).max() for e in errors.values()) < 0.02
    for n in (2, 8):
        assert found["H100"]["latency"][n] == pytest.approx(1e-5, rel=0.03)
        assert found["H100"]["bandwidth"][n] == pytest.approx(3e11, rel=0.03)


def test_a_file_without_a_chips_kernels_leaves_the_table_as_it_is():
    with pytest.raises(UserError, match="no kernels of A100, B200, L40S, MI355 in the file"):
        kernels.fitted([product(64, 512, 4096), {"id": "a point of a run", "hardware": "A100"}])


@pytest.mark.slow
@pytest.mark.shared_data
def test_the_kept_table_is_this_codes_and_says_unseen_shapes_well(shared_data):
    path = shared_data.parent / "groundtruth" / "kernels-2026.json"
    if not path.exists():
        pytest.skip("no kernels beside the data")
    rows = json.loads(path.read_text())
    chip = kernels.ChipFit(H100, kernels.kernels(rows)["H100"])
    x = chip.solve(chip.measured)
    assert {field: chip.values(x)[field] for field in OF_CHIP} == pytest.approx(KEPT["chips"]["H100"], rel=1e-3)
    table = dict(kernels.table(chip, chip.errors(x), chip.left_out(x)))
    assert table["product ≥ 1e+09"][4] < 0.15 and table["fp8 ≥ 1e+09"][4] < 0.15


# ---------------------------------------------------------------- what the plan takes


def test_every_measured_chip_has_its_own_of_all_that_was_measured():
    for chip in ("A100", "H100", "B200", "L40S"):
        assert set(KEPT["chips"][chip]) == set(OF_CHIP) - ({"fp8"} if chip == "A100" else set()), chip
        assert all(0.4 < KEPT["chips"][chip].get(field, 0.5) <= 1 for field in ("matmul", "fp8", "attention", "bandwidth"))
        assert not roofline.parameters(hardware.find(chip))[1]


@pytest.mark.parametrize(("chip", "near"), [("H200", "H100"), ("GB300", "B200"), ("RTX4090", "RTX3090"), ("RTX3090", "A100"), ("T4", "V100"), ("L4", "L40S"),
                                            ("RTX-PRO-6000-SERVER", "L40S"), ("MI300", "MI355"), ("A100", ""), ("TPUV7X", ""), ("TRAINIUM1", "")])  # fmt: skip
def test_whose_parameters_a_chip_takes(chip, near):
    assert roofline.nearest(chip) == near
    assert roofline.family(chip) in {"", *KEPT["chips"]}


def test_a_chip_takes_the_nearest_ones_kernels_and_all_chips_where_none_is_near():
    own, near = (find_parameters(chip, "gradus", roofline.FITTED)[0] for chip in ("H20", "H100"))
    assert dataclasses.asdict(own) == dataclasses.asdict(near)
    general, notes = find_parameters("INFERENTIA2", "gradus", roofline.FITTED)
    assert {field: getattr(general, field) for field in OF_CHIP} == KEPT["chips"]["any"]
    assert "general ones" in notes[0]


def test_what_networks_reach_is_of_a_family_of_chips_and_of_a_program_that_is_known_for_it():
    reached = {chip: find_parameters(chip, "mcore", roofline.FITTED)[0].network for chip in ("A100", "A800", "H100", "H200", "TPUV4")}
    assert reached["A800"] == reached["A100"] < reached["H100"] == reached["H200"] <= 1
    assert reached["TPUV4"] == roofline.fitted()["network"]["network"]
    assert find_parameters("A100", "zero3", roofline.FITTED)[0].network < 0.2


def test_a_kernel_written_for_ampere_is_slower_on_what_came_later():
    """FlashAttention 2, which PyTorch has, and cuDNN's or FlashAttention 3."""
    a100, h100 = (find_parameters(chip, "gradus", roofline.FITTED)[0] for chip in ("A100", "H100"))
    assert h100.fused < 0.7 * a100.fused
    assert find_parameters("GH200", "mcore", roofline.FITTED)[0].fused == find_parameters("A100", "mcore", roofline.FITTED)[0].fused


def test_wide_heads_keep_fast_multiprocessors_busier():
    """The exponentials of attention cost a faster multiprocessor more of its products' time."""
    shares = {(dim, chip): roofline.attention_share(8192, dim, 0.0, peak / units) for dim in (64, 128, 256) for chip, peak, units in (("A100", 312e12, 108), ("B200", 2250e12, 148))}
    assert shares[128, "A100"] == shares[128, "B200"] == pytest.approx(1)
    assert shares[64, "B200"] < shares[64, "A100"] < 1 < shares[256, "A100"] < shares[256, "B200"]


def test_attention_of_one_query_takes_its_keys_and_some_kernels():
    (decode,) = kernels.kernels([attention(64, 1, 8191)])["H100"]
    fit = find_parameters("H100", "gradus", roofline.FITTED)[0]
    assert op_seconds(decode.op, H100, fit) == pytest.approx(decode.op.bytes / (3350e9 * fit.bandwidth) + fit.decode, rel=0.01)


# ---------------------------------------------------------------- collectives inside a node


def test_links_are_measured_ones_in_the_ratio_of_what_their_makers_say():
    cluster = {name: Cluster(hardware.find(name), 8) for name in ("H100", "H200", "H800", "H100-PCIe", "RTX-3090")}
    whole = {name: collective_seconds("all_reduce", 1e9, 8, 1, c) for name, c in cluster.items()}
    assert whole["H200"] == whole["H100"] == pytest.approx(1.75e9 / KEPT["links"]["H100"]["bandwidth"][8], rel=0.1)
    assert whole["H800"] == pytest.approx(whole["H100"] * 450 / 200, rel=0.1)
    assert measured_links(cluster["H100-PCIe"].device, cluster["H100-PCIe"].device.link) is None
    assert measured_links(cluster["RTX-3090"].device, hardware.links()["NVLink 3 bridge"]) is None
