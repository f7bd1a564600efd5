"""Which single device: every device and precision it has, ranked; and the device to serve a decoder on."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from gradus import hardware
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.plan import devices as ranking
from gradus.plan.answer import Request, answer, open_recipe
from gradus.plan.devices import devices, in_tf32, lines, order, rank_devices, to_serve
from gradus.plan.serving import least
from gradus.plan.show import printed
from gradus.plan.work import Op, Work
from gradus.recipe.presets import config_of
from gradus.train.session import open_session

NAMES = ["P100", "V100", "T4", "A100", "H100", "RTX-4090"]


pytestmark = pytest.mark.usefixtures("own_files")


@pytest.fixture(scope="module")
def session():
    sizes = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 1000, "data.n_valid": 50}
    return open_session(recipes.load("copy-task", **sizes, **{"layout.device": "cpu", "batch.samples": 40}))


@pytest.fixture(scope="module")
def ranked(session):
    return rank_devices(session.recipe, session.task, names=NAMES)


@pytest.mark.slow
def test_every_precision_a_device_has_and_no_other(ranked):
    found = {(one["device"], one["precision"]) for one in ranked}
    has = {"P100": "fp32 fp16", "V100-32GB": "fp32 fp16", "T4": "fp32 fp16", "A100-80GB": "fp32 tf32 bf16 fp16",
           "H100-SXM": "fp32 tf32 bf16 fp16", "RTX-4090": "fp32 tf32 bf16 fp16"}  # fmt: skip
    assert found == {(name, numbers) for name, all_of_them in has.items() for numbers in all_of_them.split()}


def test_each_line_adds_up(session, ranked):
    from gradus.plan import engine
    from gradus.plan.budget import Failures, usual_goodput
    from gradus.plan.case import Case
    from gradus.plan.step import step_time

    one = next(one for one in ranked if (one["device"], one["precision"]) == ("H100-SXM", "bf16"))
    alone = ranking.on_one_device(session.recipe, "bf16")
    plan = engine.plan(Case.of(alone, 1, "cuda", session.task))
    memory, seconds = plan.memory, step_time(plan.work, hardware.cluster("H100")).total
    assert one["memory"] == memory.reserved + memory.framework
    assert one["seconds"] == seconds
    steps = math.ceil(1000 / 40)
    share = usual_goodput(hardware.cluster("H100"), Failures.of(plan.case), steps, seconds)
    assert 0.9 < share < 1 and (one["per"], one["hours"]) == ("epoch", pytest.approx(steps * seconds / 3600 / share))
    price = hardware.price("H100")
    assert one["cost"] == pytest.approx([one["hours"] * p for p in (price.low, price.expected, price.high)])
    assert one["fits"] and one["missing"] == 0 and one["capacity"] == pytest.approx(79.11 * 2**30)


def test_the_order_is_money_then_time_then_what_is_missing(ranked):
    assert [order(one) for one in ranked] == sorted(order(one) for one in ranked)
    priced = [one["cost"] is not None for one in ranked]
    assert priced == sorted(priced, reverse=True) and not all(priced), "a P100 has no price"
    small = {"fits": False, "missing": 5.0, "hours": 1.0, "cost": None}
    assert order({"fits": True, "hours": 1e9, "cost": None}) < order({**small, "missing": 4.0}) < order(small)


def test_what_does_not_fit_is_last_and_says_by_how_much(session, tmp_path, monkeypatch):
    file = tmp_path / "own.yaml"
    file.write_text("devices: {Thimble: {peaks: {fp32: 1 TFLOP/s, bf16: 2 TFLOP/s}, memory: 100 MB, bandwidth: 10 GB/s}}")
    monkeypatch.setenv("GRADUS_HARDWARE", str(file))
    found = [one for one in rank_devices(session.recipe, session.task, names=["Thimble", "P100"]) if one["precision"] == "fp32"]
    assert [(one["device"], one["fits"]) for one in found] == [("P100", True), ("Thimble", False)]
    assert found[1]["missing"] == found[1]["high"] - 100e6 > found[1]["memory"] - 100e6
    assert found[1]["seconds"] is found[1]["hours"] is found[1]["cost"] is None, "what does not fit takes no time and no money"
    line = next(line for line in lines(found, [])[0] if "Thimble" in line)
    assert "too much" in line and not re.search(r"\d m?s\b|\$", line)
    assert {row.name for row in ranking.rows(found, []) if row.conditions["device"] == "Thimble"} == {"device/memory"}


def test_each_device_once_at_its_best_and_all_of_them_with_their_keys(ranked):
    best = {}
    for one in ranked:
        best.setdefault(one["device"], one)
    shown = [line for line in printed(lines(ranked, [])[0]) if line.split()[:1] and line.split()[0] in best]
    assert [line.split()[:2] for line in shown] == [[one["device"], one["precision"]] for one in best.values()]
    many = [{**one, "device": f"{one['device']}-{i}"} for i in range(9) for one in ranked]
    assert len([line for line in lines(many, [])[0] if " fits" in line or "$" in line or "no price" in line]) >= ranking.FIRST
    assert sum(line.startswith(tuple(best)) for line in lines(many, [])[0]) == ranking.FIRST and "more devices" in " ".join(lines(many, [])[0])
    everything = list(printed(lines(ranked, [], everything=True)[0]))
    text = " ".join("\n".join(everything).replace("\\\n", " ").split())
    assert all(f"--on {one['device']} {one['layout']}".strip() in text for one, _ in ranking._joined(ranked))
    assert max(map(len, [*everything, *printed(lines(ranked, to_serve(config_of("llama2-7b")))[0])])) <= 80


def test_what_is_said_of_several_chips_is_said_once(ranked):
    said = {"L4": ("none for L4: A100's",), "A10": ("none for A10: A100's", "a word of all"), "T4": ("none for T4: V100's", "a word of all")}
    some = [{**ranked[0], "device": name, "notes": notes} for name, notes in said.items()]
    _, notes = lines(some, [])
    assert notes == ["none for L4, A10: A100's", "a word of all", "none for T4: V100's"]


def test_without_data_it_is_per_tokens(session):
    work = Work([], [], [], samples=8, tokens=1000)
    assert ranking.epoch_of(session.recipe, None, work) == (1e6, "1e9 tokens")
    assert ranking.epoch_of(session.recipe, None, Work([], [], [], samples=8)) == (125_000, "1e6 samples")


def test_tf32_is_of_matrix_products():
    ops = [Op(kind, name, "fp32", "forward", 2.0, 4.0) for kind, name in (("matmul", "mm"), ("attention", "efficient"), ("memory", "add"))]
    tf32 = in_tf32(Work([*ops, Op("matmul", "mm", "bf16", "forward", 2.0, 4.0)], [Op("memory", "adamw", "fp32", "optimizer", 0, 8.0)], []))
    assert [o.dtype for o in (*tf32.micro, *tf32.step)] == ["tf32", "fp32", "fp32", "bf16", "fp32"]


@pytest.mark.slow
def test_every_row_is_the_plan_of_its_keys(session):
    """`--on DEVICE` and the row's keys: the same memory, step and money."""
    sizes = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "data.n_train=1000", "data.n_valid=50", "batch.samples=40"]
    asked = Request("copy-task", (*sizes, "layout.device=cpu", "layout.checkpointing=full", "train.epochs=1", "train.steps=null"))
    recipe, task, _ = open_recipe(asked, [])
    found = rank_devices(recipe, task, names=["A100"])
    assert {one["precision"] for one in found} == {"fp32", "tf32", "bf16", "fp16"}
    for one in found[:2]:
        again = answer(dataclasses.replace(asked, overrides=(*asked.overrides, *one["layout"].split()), on=one["device"]))
        assert (again.fits, again.value("memory/device")) == (one["fits"], one["memory"])
        assert again.value("time/step") == pytest.approx(one["seconds"], rel=1e-12)
        assert again.value("budget/cost", case="expected") == pytest.approx(one["cost"][1], rel=1e-12)


def test_one_device_keeps_no_layout_of_many():
    recipe = recipes.load("copy-task", **{"layout.tensor": 2, "layout.shard": 2, "layout.micro_batch": 4, "layout.checkpointing": "full"})
    alone = ranking.on_one_device(recipe, "tf32").layout
    assert (alone.tensor, alone.shard, alone.precision, alone.tf32) == (1, 1, "fp32", True)
    assert (alone.micro_batch, alone.checkpointing) == (4, "full"), "what decides the memory of one device stays"


def test_mistakes(session):
    with pytest.raises(UserError, match="no such device"):
        rank_devices(session.recipe, session.task, names=["A1000"])


# ---------------------------------------------------------------- to serve


def test_the_rule_of_thumb_and_what_bf16_and_the_cache_change():
    """Llama-2-7B: 32.3 GB by the rule of thumb in fp32; half of it in bf16; the cache grows past any rule."""
    config = config_of("llama2-7b")
    fp32, bf16, fp16 = ({row.name.removeprefix("serving/"): row.value for row in precision} for precision in to_serve(config))
    assert fp32["rule"] == pytest.approx(6_738_415_616 * 4 * 1.2) and bf16["rule"] == pytest.approx(fp32["rule"] / 2)
    assert bf16["weights"] == 6_738_415_616 * 2 and bf16["kv_cache"] == 512 * 1024 * 4096
    assert hardware.find(bf16["device"]).memory == 16 * 2**30 and "bf16" in hardware.find(bf16["device"]).peaks
    assert hardware.find(fp16["device"]).memory == 16 * 2**30
    assert to_serve(config_of("bert-base-cased")) == []
    printed = "\n".join(lines([], to_serve(config))[0])
    assert "13.5 GB" in printed and "2.15 GB" in printed and bf16["device"] in printed
    assert "several" in lines([], to_serve(config_of("gpt3-175b")))[0][-1], "no single one"


def test_least_is_the_least_memory_then_the_least_money():
    for need, numbers in ((1e9, "fp32"), (20e9, "bf16"), (100e9, "fp8")):
        chosen = least(need, numbers)[0]
        assert chosen.memory * chosen.usable >= need and numbers in chosen.peaks
        for other in hardware.devices().values():
            proposed = other.kind == "gpu" and not other.name.endswith("Laptop")
            if proposed and numbers in other.peaks and other.memory * other.usable >= need:
                assert other.memory >= chosen.memory
                if other.memory == chosen.memory and hardware.price(other):
                    assert hardware.price(chosen).expected <= hardware.price(other).expected
    assert least(1e15, "fp32") == []


@pytest.mark.slow
def test_lines_and_rows(session):
    printed, rows, _ = devices(session.recipe, session.task, names=["A100"])
    text = "\n".join(printed)
    assert text.count("A100-80GB") == 2 and "layout.precision=fp32 layout.tf32=true" in text and "Time and expected cost per epoch" in text and "One device to serve it on" in text
    every = "\n".join(devices(session.recipe, session.task, names=["A100"], everything=True)[0])
    assert len(re.findall(r"^A100-80GB ", every, re.M)) == 4
    at = {"device": "A100-80GB", "precision": "bf16", "layout": "layout.precision=bf16"}
    found = {(r.name, r.conditions.get("case")): r for r in rows if all(r.conditions.get(k) == v for k, v in at.items())}
    assert set(found) == {(name, None) for name in ("device/memory", "device/step", "device/hours")} | {
        ("device/cost", case) for case in ("low", "expected", "high")
    }
    assert {r.unit for r in rows if r.name.startswith("device/")} == {"bytes", "s", "h", "$"}
    assert len([r for r in rows if r.name == "serving/kv_cache"]) == 3
