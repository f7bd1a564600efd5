"""Seconds of one operation: against hand counts, limits and each other; and whose parameters a device takes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from gradus import hardware
from gradus.plan import roofline
from gradus.plan.roofline import matmul_share, op_seconds

sys.path[:0] = [str(Path(__file__).parent)]

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
    assert matmul_share(1, 256 * 101, 128, 4096, 100, 0.0) == pytest.approx(0.8 * 404 / 500)  # 128 × 64: small tiles waste less of the last wave
    assert matmul_share(1, 2560, 1280, 1000, 100, 250.0) == pytest.approx(0.8)  # 1000 / (1000 + 250)


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


@pytest.mark.parametrize(("name", "chip"), [("A100-80GB", "A100"), ("H100-96GB-500W", "H100"), ("RTX-3090", "RTX3090"), ("GB200", "GB200"), ("L40S", "L40")])
def test_chip_of_a_device(name, chip):
    assert roofline.chip_of(name) == chip


def test_devices_are_compared_with_one_software():
    """A chip's parameters are the chip's: no fused kernels, fp8 recipes or the like of whoever measured on it."""
    shared = [dataclasses.asdict(roofline.parameters(hardware.find(name))[0]) for name in ("A100-80GB", "H100", "GB300", "MI300X", "RTX-3090")]
    for field in roofline.OF_SOFTWARE:
        assert len({p[field] for p in shared}) == 1
    assert shared[0]["elementwise"] == 1.0
    assert all(p["matmul"] < 0.95 for p in shared)
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
