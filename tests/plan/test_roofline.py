"""Seconds of one operation: against hand counts, limits and each other; and whose parameters a device takes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from gradus import hardware
from gradus.errors import UserError
from gradus.plan import roofline
from gradus.plan.roofline import matmul_share, op_seconds
from gradus.plan.work import Op

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import measured_device  # noqa: E402
from toy_operations import DEVICE, FIT, matmul, memory  # noqa: E402


def test_memory_bound_operations_take_their_bytes_over_the_bandwidth():
    assert op_seconds(memory(5e9), DEVICE, FIT) == pytest.approx(5e-3)
    assert op_seconds(memory(5e9), DEVICE, dataclasses.replace(FIT, bandwidth=0.5, kernel=1e-3)) == pytest.approx(11e-3)


@pytest.mark.parametrize("shape", [(64, 64, 64), (1024, 4096, 1024), (8192, 8192, 8192), (1000, 50_257, 768), (1, 4096, 4096)])
def test_no_product_is_faster_than_the_peak_or_than_its_bytes(shape):
    op = matmul(*shape)
    assert op_seconds(op, DEVICE, FIT) >= max(op.flops / 1e14, op.bytes / 1e12) * (1 - 1e-12)


SMS = {"V100-16GB": 80, "T4": 40, "A100-80GB": 108, "A10": 72, "A40": 84, "L4": 58, "L40S": 142, "H100": 132}  # NVIDIA's data sheets


@pytest.mark.parametrize("name", SMS)
def test_a_chip_has_its_own_multiprocessors(name):
    """Also where another's name begins as its own does."""
    assert roofline._units(hardware.find(name).name) == SMS[name]


def test_share_of_the_peak_whole_waves_of_whole_tiles():
    assert matmul_share(1, 256 * 10, 128 * 10, 4096, 100, 0.0) == 1.0  # 100 tiles on 100 units
    # 128 × 64: small tiles waste less of the last wave; k is too short to be cut
    assert matmul_share(1, 256 * 101, 128, 4096, 100, 1000.0) == pytest.approx(0.8 * 404 / 500 * 4096 / 5096)
    assert matmul_share(1, 2560, 1280, 1000, 100, 250.0) == pytest.approx(0.8)  # 1000 / (1000 + 250)


def test_a_long_k_is_cut_where_tiles_are_few():
    """One tile of 64 × 64 on 100 units, its k in 32 parts: each fills a pipeline of its own."""
    assert matmul_share(1, 64, 64, 2**20, 100, 512.0) == pytest.approx(0.65 * 32 / 100 * 2**20 / (2**20 + 32 * 512))
    assert matmul_share(1, 64, 64, 512, 100, 512.0) < 0.01


def test_a_product_with_rows_of_odd_length_is_slower():
    odd, even = matmul(8192, 50_257, 768), matmul(8192, 50_304, 768)
    assert op_seconds(odd, DEVICE, FIT) > 2 * op_seconds(even, DEVICE, FIT)
    assert op_seconds(odd._replace(dtype="fp32"), DEVICE, FIT) < 1.01 * op_seconds(even._replace(dtype="fp32"), DEVICE, FIT)


def test_the_nearest_dtype_that_a_device_has():
    assert roofline.peak_flops(DEVICE, "fp16") == 1e14
    assert roofline.peak_flops(DEVICE, "tf32") == 1e13
    assert roofline.peak_flops(DEVICE, "fp8") == 1e14
    assert roofline.peak_flops(hardware.find("P100"), "fp16") == 10.6e12  # no tensor cores
    assert roofline.peak_flops(hardware.find("V100"), "fp16") == 125e12


def test_what_was_not_fitted_is_said():
    _, notes = roofline.parameters(DEVICE)
    assert "general" in notes[0]
    assert not roofline.parameters(hardware.find("A100-80GB"))[1]
    assert "A100" in roofline.parameters(hardware.find("A800"))[1][0]


@pytest.mark.parametrize(("name", "chip"), [("A100-80GB", "A100"), ("H100-96GB-500W", "H100"), ("RTX-3090", "RTX3090"), ("GB200", "GB200"), ("L40S", "L40S"), ("Trainium1", "TRAINIUM1")])
def test_chip_of_a_device(name, chip):
    assert roofline.chip_of(name) == chip


def test_devices_are_compared_with_one_software():
    """A chip's parameters are the chip's: no fused kernels, fp8 recipes or the like of whoever measured on it."""
    shared = [dataclasses.asdict(roofline.parameters(hardware.find(name))[0]) for name in ("A100-80GB", "H100", "GB300", "MI300X", "RTX-3090")]
    for field in set(roofline.OF_SOFTWARE) - {"products", "fused"}:  # which one software has otherwise on a family of chips
        assert len({p[field] for p in shared}) == 1
    assert all(p["matmul"] < 1 for p in shared)
    large = matmul(16384, 16384, 16384)
    h100, mi300 = (op_seconds(large, hardware.find(name), roofline.parameters(hardware.find(name))[0]) for name in ("H100", "MI300X"))
    assert mi300 > 0.9 * h100  # its measured share of the peak is low
    assert "only matmul was measured" in roofline.parameters(hardware.find("MI300X"))[1][0]


def test_chains_of_elementwise_operations_are_what_fusing_saves():
    fused = dataclasses.replace(FIT, elementwise=0.5)
    assert op_seconds(memory(5e9), DEVICE, fused) == pytest.approx(2.5e-3)
    for name in ("native_layer_norm", "softmax", "embedding", "fused_adamw"):
        assert op_seconds(memory(5e9)._replace(name=name), DEVICE, fused) == pytest.approx(5e-3)
    assert op_seconds(memory(5e9, "optimizer"), DEVICE, fused) == pytest.approx(5e-3)


# ---------------------------------------------------------------- a measured machine


@pytest.mark.parametrize("batch", [1, 3])
def test_a_measured_product_takes_a_launch_and_its_operations_and_is_slower_where_it_is_short(batch):
    large = op_seconds(measured_device.product(4096, 300, 2**20, batch=batch), measured_device.device())
    assert large == pytest.approx(2 * batch * 4096 * 300 * 2**20 / 1e9, rel=1e-4)
    short = measured_device.product(64, 64, 64, batch=batch)
    assert op_seconds(short, measured_device.device()) == pytest.approx(1e-6 + 2 * 2 * batch * 64**3 / 1e9)


def test_measured_attention_by_its_operations_and_all_else_by_its_bytes():
    d = measured_device.device()
    attention = Op("attention", "sdpa", "fp32", "backward", 1e6, 1.0, (3, 5, 100, 100, 50))
    assert op_seconds(attention, d) == pytest.approx(1e-6 + 1e-3)
    assert op_seconds(measured_device.memory("gelu", 2000), d) == pytest.approx(3e-6)
    assert op_seconds(measured_device.memory("never_measured", 8, "int64"), d) == pytest.approx(1.008e-6)  # as fp32
    assert op_seconds(measured_device.memory("gelu", 2000, "fp16"), d) == pytest.approx(5e-6)  # as bf16
    assert op_seconds(measured_device.product(64, 64, 64, "tf32"), d) == op_seconds(measured_device.product(64, 64, 64), d)


def test_the_frameworks_time_adds_on_a_cpu_and_hides_behind_a_gpu():
    dispatch = {"forward": 1e-5, "backward": 2e-5}
    op = measured_device.memory("add", 4000, phase="backward")
    assert op_seconds(op, measured_device.device(dispatch=dispatch)) == pytest.approx(5e-6 + 2e-5)
    assert op_seconds(op, measured_device.device("gpu", dispatch)) == pytest.approx(2e-5)
    assert op_seconds(op._replace(phase="optimizer"), measured_device.device(dispatch=dispatch)) == pytest.approx(5e-6 + 1e-5)
    assert op_seconds(measured_device.memory("add", 4e6), measured_device.device("gpu", dispatch)) == pytest.approx(4.001e-3)


@pytest.mark.parametrize("measured", [
    {}, {"fits": None}, {"fits": {}}, {"fits": {"matmul fp32": 5}}, {"fits": {"matmul fp32": [1e-6]}}, {"fits": {"matmul fp32": [1e-6, 0.0]}},
    {"fits": {"matmul fp32": ["a", "b"]}}, {"fits": {"matmul fp32": [1e-6, 1e9]}, "dispatch": 5}, {"matmul": "mm fp32 nt 1 16 16 16 1e-6 0.01\n"},
])  # fmt: skip
def test_what_was_not_measured_is_one_line_that_says_what_to_do(measured):
    with pytest.raises(UserError, match=r"x: measured\.fits: nothing usable for mm in fp32 \(matmul\)\. Run gradus calibrate again\."):
        op_seconds(measured_device.product(64, 64, 64), dataclasses.replace(measured_device.device(), measured=measured))
