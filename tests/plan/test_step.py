"""Seconds of a step, of its operations and of its collectives: against hand counts, limits and each other."""

from __future__ import annotations

import dataclasses
import time

import pytest

from gradus import hardware
from gradus.hardware import Cluster, Device, Link
from gradus.plan import analytic, collectives, roofline
from gradus.plan.analytic import analytic_work, shape_of, stacks_of
from gradus.plan.collectives import collective_seconds
from gradus.plan.roofline import Parameters, matmul_share, op_seconds
from gradus.plan.step import bubble_share, step_time
from gradus.plan.work import Op, Transfer, Work
from gradus.recipe.presets import config_of
from gradus.recipe.schema import GPTConfig, Layout

DEVICE = Device("X1", {"bf16": 1e14, "fp32": 1e13}, 80e9, 1e12, link=Link("inside", 1e11, 1.0, 1e-6), network=Link("outside", 1e10, 1.0, 1e-6))
FIT = Parameters(matmul=1.0, depth=0.0, bandwidth=1.0, kernel=0.0, host=0.0, network=1.0, latency=0.0, overlap=1.0, contention=0.0, wait=0.0, attention=1.0)


def matmul(m: float, n: float, k: float, count: float = 1, phase: str = "forward") -> Op:
    return Op("matmul", "mm", "bf16", phase, 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), (1, m, n, k), count)


def memory(size: float, phase: str = "forward", launches: float = 1) -> Op:
    return Op("memory", "add", "bf16", phase, 0.0, size, launches=launches)


FAMILIES = {
    "gpt": ("gpt2-small", {}), "llama": ("llama2-7b", {}), "experts": ("mixtral-8x7b", {}), "bert": ("bert-base", {}), "vit": ("vit-b16", {"n_classes": 10}),
    "t5": ("t5-base", {}), "seq2seq": ("seq2seq-base", {"vocab_size": 32_000}),
}  # fmt: skip


# ---------------------------------------------------------------- operations


def test_memory_bound_operations_take_their_bytes_over_the_bandwidth():
    assert op_seconds(memory(5e9), DEVICE, FIT) == pytest.approx(5e-3)
    assert op_seconds(memory(5e9), DEVICE, dataclasses.replace(FIT, bandwidth=0.5, kernel=1e-3)) == pytest.approx(11e-3)


@pytest.mark.parametrize("shape", [(64, 64, 64), (1024, 4096, 1024), (8192, 8192, 8192), (1000, 50_257, 768), (1, 4096, 4096)])
def test_no_product_is_faster_than_the_peak_or_than_its_bytes(shape):
    op = matmul(*shape)
    assert op_seconds(op, DEVICE, FIT) >= max(op.flops / 1e14, op.bytes / 1e12) * (1 - 1e-12)


def test_share_of_the_peak_whole_waves_of_whole_tiles():
    assert matmul_share(1, 256 * 10, 128 * 10, 4096, 100, 0.0) == 1.0  # 100 tiles on 100 units
    assert matmul_share(1, 256 * 101, 128, 4096, 100, 0.0) == pytest.approx(0.8 * 404 / 500)  # 128 × 64: small tiles waste less of the last wave
    assert matmul_share(1, 2560, 1280, 1000, 100, 250.0) == pytest.approx(0.8)  # 1000 / (1000 + 250)


def test_a_product_with_rows_of_odd_length_is_slower():
    odd, even = matmul(8192, 50_257, 768), matmul(8192, 50_304, 768)
    assert op_seconds(odd, DEVICE, FIT) > 2 * op_seconds(even, DEVICE, FIT)
    assert op_seconds(dataclasses.replace(odd, dtype="fp32"), DEVICE, FIT) < 1.01 * op_seconds(dataclasses.replace(even, dtype="fp32"), DEVICE, FIT)


def test_the_nearest_dtype_that_a_device_has():
    assert roofline.peak(DEVICE, "fp16") == 1e14
    assert roofline.peak(DEVICE, "tf32") == 1e13
    assert roofline.peak(DEVICE, "fp8") == 1e14


def test_what_was_not_fitted_is_said():
    _, notes = roofline.parameters(DEVICE)
    assert "general" in notes[0]
    assert not roofline.parameters(hardware.find("A100-80GB"))[1]
    assert "A100" in roofline.parameters(hardware.find("A800"))[1][0]


@pytest.mark.parametrize(("name", "chip"), [("A100-80GB", "A100"), ("H100-96GB-500W", "H100"), ("RTX-3090", "RTX3090"), ("GB200", "GB200"), ("L40S", "L40")])
def test_family(name, chip):
    assert roofline.family(name) == chip


# ---------------------------------------------------------------- collectives


def test_an_all_reduce_between_nodes_by_hand():
    cluster = Cluster(DEVICE, 32)  # 4 nodes of 8
    assert collective_seconds("all_reduce", 8e9, 32, 1, cluster, FIT) == pytest.approx(2 * 3 / 4 * 8e9 / 8 / 1e10)  # each carries an eighth
    assert collective_seconds("all_reduce", 8e9, 4, 8, cluster, FIT) == pytest.approx(2 * 3 / 4 * 8e9 / 1e10)  # one rank a node
    assert collective_seconds("send", 1e9, 4, 8, cluster, FIT) == pytest.approx(0.1)


def test_collectives_grow_and_one_rank_says_nothing():
    cluster = Cluster(hardware.find("A100-80GB"), 64)
    assert collective_seconds("all_reduce", 1e9, 1, 1, cluster) == 0.0
    times = [collective_seconds("all_reduce", size, 8, 1, cluster) for size in (1e6, 1e7, 1e8, 1e9)]
    assert times == sorted(times)
    assert collective_seconds("all_gather", 1e9, 8, 1, cluster) < times[-1] < collective_seconds("all_reduce", 1e9, 8, 8, cluster)


def test_a_link_that_was_measured_comes_before_its_nominal_bandwidth():
    device = hardware.find("A100-80GB")
    seconds = collective_seconds("all_reduce", 2.0**30, 8, 1, Cluster(device, 8))
    assert seconds == pytest.approx(0.008193, rel=0.1)  # nccl-tests on A100 (vTrain)
    assert seconds > collectives.passes("all_reduce", 8) * 2.0**30 / device.link.bandwidth


# ---------------------------------------------------------------- the step


def test_the_parts_add_up_and_are_counted_by_hand():
    work = Work([matmul(2560, 1280, 1000, 2), memory(1e9, "backward")], [memory(2e9, "optimizer")],
                [Transfer("tensor", "all_reduce", 1e8, 8, 8)], micro_batches=4)  # fmt: skip
    step = step_time(work, Cluster(DEVICE, 8), FIT)
    assert sum(step.parts.values()) == pytest.approx(step.total)
    assert step.parts["memory"] == pytest.approx(4e-3)
    assert step.parts["optimizer"] == pytest.approx(2e-3)
    assert step.parts["comm/tensor"] == pytest.approx(8 * (collectives.NODE_LATENCY + 2 * 7 / 8 * 1e8 / 1e11))
    assert step.low < step.total < step.high


@pytest.mark.parametrize(("schedule", "virtual", "expected"), [("1f1b", 1, 7 / 32), ("gpipe", 1, 7 / 32), ("interleaved", 2, 7 / 64), ("zero_bubble", 1, 7 / 96)])
def test_bubble(schedule, virtual, expected):
    assert bubble_share(schedule, 8, virtual, 32) == pytest.approx(expected)
    assert bubble_share(schedule, 1, 1, 32) == 0.0
    work = Work([memory(1e9), memory(2e9, "backward")], [], [], 32, 8, virtual, schedule)
    assert step_time(work, Cluster(DEVICE, 8), FIT).parts["bubble"] == pytest.approx(expected * 32 * 3e-3)


def test_communication_hides_behind_computing_and_only_the_rest_shows():
    def exposed(payload: float, fit: Parameters = FIT) -> float:
        work = Work([memory(1e10, "backward")], [], [Transfer("replicate", "all_reduce", payload, 1, 2, 8, "backward", "backward")])
        return step_time(work, Cluster(DEVICE, 16), fit).parts["comm/replicate"]

    assert exposed(5e7) == pytest.approx(0.0, abs=1e-9)  # 5 ms beside 10 ms
    assert exposed(2e8) == pytest.approx(0.01)  # 20 ms beside 10 ms
    assert exposed(5e7, dataclasses.replace(FIT, contention=0.1)) == pytest.approx(0.0005)


def test_a_step_is_never_faster_than_its_host():
    slow = dataclasses.replace(FIT, host=1e-3)
    work = Work([memory(1e6, launches=10), memory(1e9, "backward", 10)], [], [], 3)
    step = step_time(work, Cluster(DEVICE, 1), slow)
    assert step.total == pytest.approx(3 * 20e-3)
    assert step.parts["launch"] == pytest.approx(3 * (20e-3 - 1e-6 - 1e-3))


def test_the_interval_is_wider_where_less_is_known():
    known, unknown = (dataclasses.replace(Work([memory(1e9)], [], []), software=name) for name in ("megatron", "unheard-of"))
    a100 = Cluster(hardware.find("A100-80GB"), 8)
    widths = [(t.high - t.low) / t.total for t in (step_time(known, a100), step_time(unknown, a100), step_time(unknown, Cluster(hardware.find("MI300X"), 8)))]
    assert 0 < widths[0] < widths[1] < widths[2]


# ---------------------------------------------------------------- the work, from sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_products_and_attention_of_one_device_are_the_model_flops(family):
    """Forward and backward without recomputation; attention's backward pass does 5 products where the convention counts 4."""
    name, fields = FAMILIES[family]
    model = config_of(name, **fields)
    work = analytic_work(model, Layout(precision="bf16"), 1, samples=4, seq_len=512, micro_batch=4)
    total = sum(op.flops * op.count for op in work.micro if op.kind == "matmul")
    for stack in stacks_of(model, shape_of(model, 512)):
        pairs = stack.tokens**2 + stack.tokens * stack.memory
        total += 12 * 4 * stack.layers * model.n_heads * model.head_dim * pairs
    assert total == pytest.approx(work.model_flops, rel=1e-9)


def test_model_flops_of_gpt2_by_hand():
    layers, h, s, vocab = 12, 768, 1024, 50_257
    work = analytic_work(config_of("gpt2-small"), Layout(), 1, samples=1, seq_len=s, micro_batch=1)
    assert work.model_flops == pytest.approx(s * (6 * (layers * 12 * h * h + h * vocab) + 12 * layers * h * s))


def test_megatron_with_full_recomputation_does_what_narayanan_counts():
    layers, h, s, batch, vocab = 24, 2304, 2048, 8, 51_200
    model = GPTConfig(n_layers=layers, d_model=h, n_heads=24, seq_len=s, vocab_size=vocab)
    layout = Layout(precision="fp16", checkpointing="full", attention="naive")
    work = analytic_work(model, layout, 1, samples=batch, seq_len=s, micro_batch=batch, style="megatron")
    done = sum(op.flops * op.count for op in work.micro)
    assert done == pytest.approx(96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h)), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_takes_less_than_a_millisecond(family):
    name, fields = FAMILIES[family]
    model, layout = config_of(name, **fields), Layout(precision="bf16", tensor=2, shard=4)
    best = min(_seconds(lambda: analytic_work(model, layout, 8, samples=16, seq_len=512, micro_batch=2)) for _ in range(20))
    assert best < 1e-3


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_more_devices_and_longer_links_mean_what_they_should():
    model, device = config_of("llama2-7b"), hardware.find("A100-80GB")
    layout = Layout(precision="bf16", shard=8, checkpointing="full")
    seconds = {}
    for n in (8, 16, 64):
        work = analytic_work(model, layout, n, samples=512, seq_len=2048, micro_batch=1)
        seconds[n] = step_time(work, Cluster(device, n)).total
    assert seconds[8] > seconds[16] > seconds[64]
    slow = dataclasses.replace(device, network=Link("slow", 1e8, 1.0, 1e-3))
    work = analytic_work(model, layout, 64, samples=512, seq_len=2048, micro_batch=1)
    assert step_time(work, Cluster(slow, 64)).total > seconds[64]


def test_checkpointing_costs_time_and_frozen_weights_save_it():
    model, cluster = config_of("llama2-7b"), Cluster(hardware.find("A100-80GB"), 1)

    def seconds(frozen: bool = False, **layout) -> float:
        work = analytic_work(model, Layout(precision="bf16", **layout), 1, samples=4, seq_len=2048, micro_batch=1, frozen=frozen)
        return step_time(work, cluster).total

    assert seconds(checkpointing="full") > seconds(checkpointing="selective") > seconds() > seconds(frozen=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_175_billion_on_512_devices_lies_where_it_was_measured(schedule):
    """54.3 to 58.2 s with 1F1B (vTrain's table, 8 × 8 × 8): other schedules are faster, none by more than the bubble."""
    layout = Layout(precision="fp16", tensor=8, pipeline=8, checkpointing="full", attention="naive", schedule=schedule, sequence_parallel=False)
    device = dataclasses.replace(hardware.find("A100-80GB"), network=Link("800 Gb/s a node", 12.5e9))
    work = analytic_work(config_of("gpt3-175b"), layout, 512, samples=1536, seq_len=2048, micro_batch=2, style="megatron")
    assert 45 < step_time(work, Cluster(device, 512)).total < 62


def test_every_axis_has_its_transfers():
    layout = Layout(precision="bf16", tensor=2, pipeline=2, context=2, shard=2, expert=2)
    work = analytic_work(config_of("mixtral-8x7b"), layout, 64, samples=64, seq_len=4096, micro_batch=1)
    assert {t.axis for t in work.transfers} == {"tensor", "pipeline", "context", "shard", "expert", "replicate"}
    assert work.micro_batches == 64 // (2 * 2 * 2)
    assert analytic.analytic_work(config_of("gpt2-small"), Layout(), 1, samples=8, seq_len=64, micro_batch=8).transfers == []
