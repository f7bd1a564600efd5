"""Seconds of a step and of its collectives: against hand counts, limits and each other."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from gradus import hardware
from gradus.hardware import Cluster, Device, Link
from gradus.plan import collectives, engine
from gradus.plan.case import Case
from gradus.plan.collectives import collective_seconds
from gradus.plan.roofline import Parameters
from gradus.plan.step import bubble_share, interval, step_time
from gradus.plan.work import Transfer, Work
from gradus.recipe.schema import Recipe

sys.path[:0] = [str(Path(__file__).parent)]

from toy_operations import DEVICE, FIT, matmul, memory  # noqa: E402

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
    assert seconds > collectives.ring_factor("all_reduce", 8) * 2.0**30 / device.link.bandwidth


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


@pytest.mark.parametrize("name", ["Unheard-of 9", "MI250X", "TPU-v3"])
def test_what_is_not_known_of_a_chip_is_said(name):
    """Never an A100's multiprocessors, or the host's memory for a link, in silence."""
    device = hardware.find(name) if name != "Unheard-of 9" else Device(name, {"bf16": 1e14}, 80e9, 1e12)
    work = Work([matmul(2560, 1280, 1000)], [], [Transfer("tensor", "all_reduce", 1e8, 8, 2), Transfer("replicate", "all_reduce", 1e8, 8, 2, device.node)])
    step = step_time(work, Cluster(device, 2 * device.node))
    assert any("no fitted parameters" in note for note in step.notes)
    assert any("multiprocessors" in note for note in step.notes) == (name != "MI250X")
    assert any("between the devices" in note and "GB/s are assumed" in note for note in step.notes) == (device.link is None)
    assert any("between nodes" in note and "GB/s are assumed" in note for note in step.notes) == (device.network is None)
    low, high = interval(work, True)
    assert (step.low, step.high) == (step.total * low, step.total * high)


# ---------------------------------------------------------------- the step of a recipe


def recipe(layout: dict, samples: int = 16) -> Recipe:
    model = {"family": "gpt", "n_layers": 4, "d_model": 512, "n_heads": 8, "seq_len": 512, "vocab_size": 1024}
    return Recipe.model_validate({
        "name": "x", "model": model, "task": {"name": "causal_lm"}, "data": {"kind": "text", "path": "-"}, "optimizer": {"name": "adamw", "lr": 1e-4},
        "batch": {"samples": samples}, "train": {"steps": 10}, "layout": {"device": "cuda", "precision": "bf16"} | layout,
    })  # fmt: skip


def test_a_slow_network_and_checkpointing_cost_time_and_more_devices_save_it():
    device = hardware.find("A100-80GB")
    slow = dataclasses.replace(device, network=Link("slow", 1e8, 1.0, 1e-3))

    def seconds(device: Device, n: int, **layout) -> float:
        return step_time(engine.plan(Case.of(recipe({"micro_batch": 1} | layout), n, "cuda")).work, Cluster(device, n)).total

    assert seconds(device, 1) > seconds(device, 4) > 0
    assert seconds(slow, 16) > seconds(device, 16)
    assert seconds(device, 1, checkpointing="full") > seconds(device, 1)
