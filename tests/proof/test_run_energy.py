"""Energy and CO2 of a finished run: the arithmetic of published tables in closed form, and which watts count."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import pytest
import torch

from gradus import cli, hardware
from gradus.measure import energy as meters
from gradus.parallel.world import World
from gradus.proof import run_energy
from gradus.proof.prove import Energy, energy_rows
from gradus.proof.run_energy import add_energy
from gradus.recipe.schema import Energy as Keys
from gradus.rows import read_rows

pytestmark = pytest.mark.usefixtures("own_files")

SOURCE = {"pue": 1.1, "grid": "385 g/kWh"}  # of "Train Transformer Models", which took 14 minutes at 65 W
TINY = "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 data.n_train=64 data.n_valid=16 batch.samples=16 evaluate.samples=0"
TINY += " train.steps=4 schedule.warmup_steps=2 log.every=2 layout.device=cpu layout.threads=1"


def finished(minutes: float, world: World = World(), device: str = "cpu", **keys):
    """A trainer at the end of a run, in whose minutes a third is not training."""
    clock = types.SimpleNamespace(seconds={"train": minutes * 40, "evaluate": minutes * 20})
    mesh = types.SimpleNamespace(world=world)
    return types.SimpleNamespace(
        clock=clock, recipe=types.SimpleNamespace(energy=Keys(**keys)), parallel=types.SimpleNamespace(mesh=mesh),
        device=torch.device(device), folder="runs/a",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The device that the hardware files know: none, until a test names one."""
    known = types.SimpleNamespace(device=None)
    monkeypatch.setattr(run_energy, "device_of", lambda device, threads: known.device)
    return known


def test_the_sources_watt_hours_and_tonnes():
    summary = {}
    line = add_energy(finished(14, watts=65, **SOURCE), summary, None)
    assert summary["energy_wh"] == pytest.approx(65 * 14 / 60 * 1.1) == pytest.approx(16.7, abs=0.05)
    assert summary["co2_kg"] / 1000 == pytest.approx(0.065 * 14 / 60 * 1.1 * 0.385 / 1000) == pytest.approx(6.4e-6, abs=0.05e-6)
    assert line.split(maxsplit=1) == ["energy", "16.7 Wh (65 W per device, PUE 1.1; energy.watts), 6.42 g CO2 (as stated: 0.385 kg/kWh)"]
    assert summary["energy"]["text"] in line and summary["energy"]["power"] == "energy.watts"


def test_of_the_usual_buildings_and_of_a_country():
    summary = {}
    line = add_energy(finished(60, watts=100, grid="France"), summary, None)
    low, expected, high, _ = hardware.pue()
    assert summary["energy"]["wh"] == pytest.approx({"low": 100 * low, "expected": 100 * expected, "high": 100 * high})
    assert summary["co2_kg"] == pytest.approx(0.1 * expected * 0.056) and "France: 0.056 kg/kWh" in line and f"PUE {low} to {high}" in line


def test_a_meter_counts_before_what_is_stated(device):
    device.device = dataclasses.replace(hardware.find("A100"), power=300.0)
    metered = {"name": "energy/run", "value": 7200.0, "meter": "RAPL, whole machine", "share": 1.0}
    summary = {}
    line = add_energy(finished(14, watts=65, **SOURCE), summary, metered)
    assert summary["energy_wh"] == pytest.approx(2 * 1.1), "7,200 J are 2 Wh"
    assert "measured: RAPL, whole machine, so that energy.watts=65 has no effect)" in line
    assert "in 25% of the time)" in add_energy(finished(14, **SOURCE), {}, metered | {"share": 0.25})


def test_of_a_known_limit_the_range_from_idle(device):
    device.device = dataclasses.replace(hardware.find("A100"), power=300.0)
    summary = {}
    line = add_energy(finished(60, device="cuda", **SOURCE), summary, None)
    wh = {"low": 0.22 * 300 * 1.4 * 1.1, "expected": 0.92 * 300 * 1.5 * 1.1, "high": 300 * 1.8 * 1.1}
    assert summary["energy"]["wh"] == pytest.approx(wh) and summary["energy_wh"] == pytest.approx(wh["expected"])
    assert "66 to 300 W per device, × 1.4 to 1.8 for its node, PUE 1.1; A100-80GB, not measured" in line


def test_what_is_not_known_is_not_guessed():
    summary = {}
    line = add_energy(finished(14), summary, None)
    assert summary == {} and "not known" in line and "gradus train runs/a --resume --watts W" in line


@pytest.mark.parametrize(("kind", "devices"), [("cpu", 2), ("cuda", 8)])
def test_a_host_has_one_set_of_processors_and_each_process_a_gpu(kind, devices):
    summary = {}
    add_energy(finished(60, World(size=8, local_size=4), kind, watts=50, **SOURCE), summary, None)
    assert summary["energy"]["devices"] == devices and summary["energy_wh"] == pytest.approx(50 * devices * 1.1)


def test_joules_of_the_part_that_was_metered_stand_for_the_whole():
    rows = {row.name: row for row in energy_rows([Energy(20.0, 10, "RAPL", 30.0, 0.25), Energy(40.0, 10, "RAPL", 60.0, 0.25)])}
    assert rows["energy/step"].value == 6.0 and rows["energy/run"].value == 360.0 and rows["energy/run"].conditions["share"] == 0.25
    assert not list(energy_rows([Energy(20.0, 10, "RAPL", 30.0), Energy(0.0, 0)])), "one of two is silent"
    replicas = {row.name: row for row in energy_rows([Energy(20.0, 10, "NVML", 100.0), Energy(4.0, 2, "NVML", 10.0, 0.1)])}
    assert replicas["energy/run"].value == pytest.approx(200.0) and replicas["energy/run"].conditions["share"] == 0.1, "one came back for the last tenth"


# ------------------------------------------------------------ whole runs


def test_a_run_with_a_meter_and_the_same_again_for_another_country(tmp_path, monkeypatch, capsys):
    """A stand-in for RAPL whose every reading is 9 J after the one before."""
    readings = itertools.count(0, 9_000_000)
    monkeypatch.setattr(meters, "rapl", lambda: {"package-0": (next(readings), 2**40)})
    monkeypatch.setattr("gradus.proof.prove.Planner", None)
    folder = tmp_path / "run"
    assert cli.run(["train", "copy-task", *TINY.split(), f"log.dir={folder}", "--pue", "1.1", "--grid", "FR"]) == 0
    row = next(r for r in read_rows(folder / "proof.jsonl") if r["name"] == "energy/run")
    assert row["value"] == next(readings) / 1e6 - 9 and row["share"] == 1.0 and row["meter"] == "RAPL, whole machine"
    first = json.loads((folder / "summary.json").read_text())
    assert first["energy_wh"] == pytest.approx(row["value"] / 3600 * 1.1) and first["co2_kg"] == pytest.approx(first["energy_wh"] * 0.056 / 1000)
    assert first["energy"]["text"] in capsys.readouterr().out
    assert cli.run(["train", str(folder), "--resume", "--grid", "DE"]) == 0
    again = json.loads((folder / "summary.json").read_text())
    assert again["energy_wh"] == pytest.approx(first["energy_wh"]) and again["co2_kg"] == pytest.approx(first["co2_kg"] * 381 / 56)
    assert "Germany: 0.381 kg/kWh" in capsys.readouterr().out


def test_options_set_the_keys_and_a_plan_counts_with_them():
    words = ["copy-task", "--on", "A100", "--watts", "65", "--pue", "1.1", "--grid", "385 g/kWh"]
    for verb in (["plan"], ["train"]):
        rest = words[:1] + words[3:] if verb == ["train"] else words
        assert cli.parse([*verb, *rest]).overrides == ["energy.watts=65", "energy.pue=1.1", "energy.grid=385 g/kWh"]


@pytest.mark.parametrize(("words", "says"), [
    (["train", "copy-task", "--grid", "Frence"], "energy.grid: grid 'Frence': not known. Did you mean France?"),
    (["train", "copy-task", "--grid", "0.385"], "energy.grid: '0.385': 'no unit' is not a unit of kg/J."),
    (["train", "copy-task", "--pue", "0.9"], "energy.pue: expected a number ≥ 1"),
    (["train", "copy-task", "--watts", "0"], "energy.watts: expected a number > 0"),
    (["plan", "copy-task", "--watts", "65"], "energy.watts: devices of which kind? Give --on"),
    (["plan", "copy-task", "--serve", "--on", "A100", "--watts", "65"], "--watts has no effect with --serve"),
])  # fmt: skip
def test_mistakes(words, says, capsys):
    assert cli.run(words) == 2
    assert says in capsys.readouterr().err
