"""Time, money, energy and CO2: the sums, the published points."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus import hardware
from gradus.hardware import Cluster, Price
from gradus.plan import budget as budgets
from gradus.plan.budget import CASES, KWH, Failures, budget, busy_share, energy_and_carbon, power
from gradus.recipe.schema import Energy

GB = 1e9


pytestmark = pytest.mark.usefixtures("own_files")


def cases(rows, name):
    return tuple(next(r.value for r in rows if r.name == name and r.conditions["case"] == case) for case in CASES)


PRICE = Price(1.0, 2.0, 4.0, "EUR", "2026-01-01", "a contract")


# ---------------------------------------------------------------- sums by hand


def test_every_sum_by_hand(monkeypatch):
    monkeypatch.setattr(hardware, "price", lambda device, paid: PRICE)
    monkeypatch.setattr(hardware, "pue", lambda: (1.0, 1.1, 1.5, "a meter"))
    france = hardware.grid("FR")
    monkeypatch.setattr(hardware, "grid", lambda name: france)
    own = budgets.goodput
    monkeypatch.setattr(budgets, "goodput", lambda *given: own(*given)._replace(share=(0.5, 0.8, 1.0)))
    device = dataclasses.replace(hardware.find("A100"), power=100.0)
    rows = budget(cluster=Cluster(device, 16), steps=1000, seconds_per_step=(9.0, 10.0, 12.0), days=0.01)
    assert cases(rows, "budget/time") == pytest.approx((9_000, 12_500, 24_000))
    hours = (9_000 * 16 / 3600, 12_500 * 16 / 3600, 24_000 * 16 / 3600)
    assert cases(rows, "budget/device_hours") == pytest.approx(hours)
    assert cases(rows, "budget/devices") == tuple(math.ceil(h / 0.24) for h in hours)
    assert cases(rows, "budget/cost") == pytest.approx(tuple(2 * h for h in hours))
    assert cases(rows, "budget/cost_extremes") == pytest.approx((hours[0], 2 * hours[1], 4 * hours[2]))
    watts = (76.0, 92.0, 100.0)
    assert cases(rows, "energy/step") == pytest.approx((76 * 9 * 16, 92 * 10 * 16, 100 * 12 * 16))
    devices = tuple(w * h * 3600 for w, h in zip(watts, hours))
    assert cases(rows, "budget/energy_device") == pytest.approx(devices)
    node = tuple(e * f for e, f in zip(devices, (1.4, 1.5, 1.8)))
    assert cases(rows, "budget/energy_node") == pytest.approx(node)
    facility = tuple(e * f for e, f in zip(node, (1.0, 1.1, 1.5)))
    assert cases(rows, "budget/energy") == pytest.approx(facility)
    assert cases(rows, "budget/co2") == pytest.approx(tuple(e / 3.6e6 * 0.056 for e in facility))
    units = {r.name: r.unit for r in rows}
    assert units == {
        "budget/time": "s", "budget/device_hours": "h", "budget/devices": "devices", "budget/cost": "€", "budget/cost_extremes": "€", "energy/step": "J",
        "budget/energy_device": "J", "budget/energy_node": "J", "budget/energy": "J", "budget/co2": "kg", "budget/goodput": "",
        "budget/between_failures": "s", "budget/recovery": "s", "budget/lost_beside": "", "budget/checkpoint": "bytes", "budget/checkpoint_write": "s",
        "budget/checkpoint_young": "s", "budget/checkpoint_daly": "s", "budget/checkpoint_every": "s",
    }  # fmt: skip


def test_every_row_can_be_explained():
    elastic = Failures({"weights": 1e9}, elastic=True, replicas=8)
    rows = (budget(cluster=hardware.cluster("64xH100"), steps=10, seconds_per_step=1.0, days=1, lost=lost) for lost in (Failures({"weights": 1e9}), elastic))
    for row in itertools.chain(*rows):
        assert row.conditions["kind"] == "predicted"
        assert row.conditions["how"]["formula"] and row.conditions["how"]["inputs"], row.name
        assert len(row.conditions["how"]["source"]) > 10, row.name
    co2 = next(r for r in budget(cluster=hardware.cluster("8xH100"), steps=10, seconds_per_step=1.0) if r.name == "budget/co2")
    assert co2.conditions["grid"] == "world mean" and "2019" in co2.conditions["how"]["source"]


def test_stated_watts_building_and_grid_count_as_they_are():
    """Three hours of 8 devices: 24 h × 0.4 kW × 1.1 × 0.385, whatever the device, and no node on top."""
    unpowered = dataclasses.replace(hardware.find("A100"), power=None)
    for device in (unpowered, hardware.find("H100")):
        rows = budget(cluster=Cluster(device, 8), steps=3, seconds_per_step=3600.0 * 0.999, keys=Energy(watts=400, pue=1.1, grid="385 g/kWh"))
        low, hours, _ = cases(rows, "budget/device_hours")
        assert (low, hours) == pytest.approx((24 * 0.999,) * 2, rel=2e-4), "little is lost of so short a run"
        assert cases(rows, "budget/energy")[:2] == pytest.approx((low * 0.4 * 1.1 * 3.6e6, hours * 0.4 * 1.1 * 3.6e6))
        assert cases(rows, "budget/co2")[1] == pytest.approx(hours * 0.4 * 1.1 * 0.385)
    assert hardware.grid("385 g/kWh").intensity * KWH == pytest.approx(0.385)


def test_what_is_not_known_has_no_row():
    names = {r.name for r in budget(cluster=hardware.cluster("8xP100"), steps=10, seconds_per_step=1.0)}
    assert "budget/cost" not in names and "budget/co2" in names
    unpowered = dataclasses.replace(hardware.find("A100"), power=None)
    names = {r.name for r in budget(cluster=Cluster(unpowered, 1), steps=10, seconds_per_step=1.0)}
    of_failures = {"goodput", "between_failures", "recovery", "lost_beside", *(f"checkpoint{name}" for name in ("", "_write", "_young", "_daly", "_every"))}
    assert names == {"budget/time", "budget/device_hours", "budget/cost", "budget/cost_extremes", *(f"budget/{name}" for name in of_failures)}


def test_time_is_the_steps_by_the_goodput():
    lost = Failures({"weights": 1e12}, mtbf=3.6e7)
    rows = budget(cluster=hardware.cluster("4096xA100"), steps=1e5, seconds_per_step=10.0, lost=lost)
    shares, between = cases(rows, "budget/goodput"), cases(rows, "budget/between_failures")
    assert between == pytest.approx((3.6e7 / 4096,) * 3)
    assert cases(rows, "budget/time") == pytest.approx(tuple(1e6 / share for share in reversed(shares)))
    assert shares == budgets.goodput(hardware.cluster("4096xA100"), lost, 1e5, (10.0,) * 3).share


def test_the_power_of_a_device():
    h100 = hardware.find("H100")
    assert power(h100) == pytest.approx((0.76 * 700, 0.92 * 700, 700))
    assert power(h100, busy=0.0) == pytest.approx((0.22 * 700, 0.22 * 700, 700)), "the high case is the limit, whatever it does"
    assert power(h100, busy=0.5)[1] == pytest.approx(700 * (0.22 + 0.92) / 2)
    assert 8 * power(h100)[1] * 1.5 == pytest.approx(0.76 * 10.2e3, rel=0.01), "the measured node"
    assert busy_share({"matmul": 3, "memory": 1, "comm/shard": 4, "optimizer": 2}) == 0.6
    assert busy_share(None) == busy_share({}) == 1.0


positive = st.floats(1e-3, 1e3)


@settings(max_examples=50)
@given(step=st.tuples(positive, positive, positive).map(sorted), steps=st.floats(1, 1e6), n=st.integers(1, 4096), busy=st.floats(0, 1))
def test_low_is_never_more_than_expected_and_that_than_high(step, steps, n, busy):
    rows = budget(
        cluster=Cluster(hardware.find("H100"), n), steps=steps, seconds_per_step=tuple(step), days=3.0, parts={"matmul": busy, "host": 1 - busy}
    )
    for name in {r.name for r in rows if "case" in r.conditions}:
        low, expected, high = cases(rows, name)
        assert 0 <= low <= expected <= high, name
    twice = budget(cluster=Cluster(hardware.find("H100"), n), steps=2 * steps, seconds_per_step=tuple(step))
    least = zip(cases(twice, "budget/time"), cases(rows, "budget/time"))
    assert all(longer >= 2 * t * (1 - 1e-9) for longer, t in least), "twice as long, or more: a longer run loses more beside failures"


# ---------------------------------------------------------------- published points


def points():
    file = Path(__file__).resolve().parents[3] / "shared" / "groundtruth" / "calibration.json"
    return {p["id"]: p for p in json.loads(file.read_text())} if file.exists() else {}


@pytest.mark.shared_data
def test_published_energy_and_carbon_are_their_own_book_keeping(shared_data):
    """Inputs (hours, watts, PUE, intensity) are the authors': this proves the sum, and predicts nothing."""
    known, found = points(), {}
    for card, hours in (("llama1-LLaMA-65B", "llama1-LLaMA-65B-gpuh"), ("llama2-13B", "llama2-13B-gpuh")):
        joules, kg = energy_and_carbon(known[hours]["value"], 400, 1.1, 0.385)
        found[card] = kg / 1000 / known[f"{card}-co2"]["value"]
        if f"{card}-mwh" in known:
            found[f"{card}-mwh"] = joules / 3.6e9 / known[f"{card}-mwh"]["value"]
    for model in ("T5", "GPT3", "XLM"):
        point = known[f"patterson-{model}-energy"]
        config = point["config"]
        hours = point["n_devices"] * known[f"patterson-{model}-days"]["value"] * 24
        joules, kg = energy_and_carbon(hours, config["avg_system_w"], config["pue"], config["kg_per_kwh"])
        found[f"{model}-energy"] = joules / 3.6e9 / point["value"]
        found[f"{model}-carbon"] = kg / 1000 / known[f"patterson-{model}-carbon"]["value"]
    assert len(found) == 9
    assert all(abs(ratio - 1) < 0.012 for ratio in found.values()), found


@pytest.mark.shared_data
def test_llama_31s_carbon_from_our_own_figures(shared_data):
    """Only the GPU-hours are theirs: the limit of an H100, our PUE and the grid of the United States give what the card says."""
    known = points()
    _, kg = energy_and_carbon(known["llama31-70B-gpuh"]["value"], hardware.find("H100").power, hardware.pue()[1], hardware.grid("US").intensity * KWH)
    assert kg / 1000 == pytest.approx(known["llama31-70B-co2"]["value"], rel=0.02)


def test_book_keeping_of_the_cards():
    """The figures printed in the documents (LLaMA table 15; Llama 2's card; Patterson's GPT-3)."""
    joules, kg = energy_and_carbon(82_432, 400, 1.1, 0.385)
    assert (joules / 3.6e9, kg / 1000) == pytest.approx((36, 14), rel=0.01)
    assert energy_and_carbon(184_320, 400, 1.1, 0.385)[1] / 1000 == pytest.approx(31.22, rel=0.001)
    assert energy_and_carbon(10_000 * 14.8 * 24, 330, 1.1, 0.429)[1] / 1000 == pytest.approx(552.1, rel=0.005)
