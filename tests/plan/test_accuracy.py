"""Published measurements: how they are read, how parameters are fitted, and how far the plan is off."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.errors import UserError
from gradus.plan import accuracy, roofline
from gradus.plan.accuracy import Case, NotCovered

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "groundtruth.py"


def point(**fields):
    return {"id": "x", "model": "GPT 3.6B", "params": 3.6e9, "config": {}, "hardware": "A100", "n_devices": 64, "batch": 512, "seq": 2048,
            "metric": "step_time", "value": 4.0, "unit": "s", "kind": "measured", "source": "", "note": None, **fields}  # fmt: skip


MULTI = {"source": "VIA-Research/vTrain@f8dda84 data/ground_truth_multi.csv",
         "config": {"hidden": 3072, "heads": 32, "layers": 30, "tp": 2, "dp": 32, "pp": 1, "micro_batch": 8, "recompute": "full", "vocab": 50257}}  # fmt: skip


@pytest.fixture(scope="module")
def points(shared_data):
    path = shared_data.parent / "groundtruth" / "calibration.json"
    if not path.exists():
        pytest.skip("no calibration points beside the data")
    return accuracy.load(path)


# ---------------------------------------------------------------- without the file


def test_a_point_becomes_work():
    case = accuracy.case(point(**MULTI))
    assert case.profile == "A100/megatron@vtrain-multi"
    assert case.work.micro_batches == 2
    assert {t.axis for t in case.work.transfers} == {"tensor", "replicate"}
    assert case.predict(accuracy.committed(case.profile)) == pytest.approx(3.98, rel=0.1)  # measured


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"metric": "loss"}, "metric loss"),
        ({**MULTI, "config": {"hidden": 3072}}, "step_time"),  # no layers
        ({**MULTI, "n_devices": None, "config": {**MULTI["config"], "dp": None}}, "n_devices not given"),
        ({**MULTI, "value": None}, "the value is None"),
        ({"hardware": "Unheard-of 9", "config": MULTI["config"]}, "Unheard-of 9"),
        ({"source": "mosaicml/llm-foundry", "metric": "tokens_per_s_per_gpu", "model": "MPT-9t"}, "MPT-9t"),
        ({"source": "", "metric": "parameter_count", "model": "Unheard-of 3B"}, "Unheard-of 3B"),
    ],
)
def test_what_cannot_be_predicted_is_counted_with_its_reason(fields, why):
    with pytest.raises(NotCovered, match=why):
        if "config" in fields and "layers" not in fields["config"] and fields.get("n_devices", 1):
            fields = {**fields, "params": None}
        accuracy.case(point(**fields))
    results, reasons = accuracy.score([point(**fields), point(**MULTI)])
    assert len(results) == 1
    assert sum(map(len, reasons.values())) == 1


def test_fitting_finds_the_parameters_that_made_the_points():
    truth = {"matmul": 0.7, "bandwidth": 0.6}
    start, _ = accuracy.specification("A100/mosaic")
    cases = []
    for size, micro, seq in (("125m", 32, 2048), ("350m", 16, 1024), ("1b", 8, 512), ("7b", 4, 2048), ("125m", 64, 512), ("7b", 2, 4096)):
        config = {"micro_batch": micro, "mixed_precision_mode": "DEFAULT", "precision": "amp_bf16", "activation_checkpointing": size == "7b"}
        case = accuracy.case(point(source="mosaicml/llm-foundry", metric="tokens_per_s_per_gpu", model=f"MPT-{size}", hardware="a100_80gb", n_devices=8,
                                   batch=8 * micro, seq=seq, config=config))  # fmt: skip
        case.measured = case.predict({**start, **truth})
        cases.append(case)
    found = accuracy.fit(cases, "A100/mosaic")
    for case in cases:
        assert case.predict(found) == pytest.approx(case.measured, rel=0.03)  # each parameter is drawn towards its start
    assert found["matmul"] == pytest.approx(0.7, rel=0.05)
    assert accuracy.fit(cases, "A100/mosaic") == found  # the same again


def test_outliers_count_less_than_squares():
    cases = [Case({}, "g", str(i), 0.5 if i else 5.0, "matmul/x", direct=lambda v: v["share"]) for i in range(9)]
    assert accuracy.fit(cases, "matmul/x")["share"] == pytest.approx(0.5, rel=0.02)


def test_left_out_means_left_out():
    """Ten points of one model at another share: predicted from the other's alone, and so is the constant."""
    source = {"source": "MAMF", "metric": "max_achievable_matmul_tflops", "config": {"theoretical": 100}}
    points = [point(**source, hardware="A100 one", value=80.0)] + [point(**source, hardware="H100 two", value=40.0) for _ in range(10)]
    results, _ = accuracy.leave_one_out(points)
    one = next(r for r in results if r.case.measured == 80.0)
    two = next(r for r in results if r.case.measured == 40.0)
    assert one.predicted == pytest.approx(40.0, rel=0.03)
    assert one.baseline == pytest.approx(40.0)
    assert two.baseline == pytest.approx(80.0)


def test_summary_by_hand():
    def result(measured, predicted, baseline):
        return accuracy.Result(Case({}, "g", "m", measured), predicted, baseline)

    row = accuracy.summary([result(10.0, 11.0, 14.0), result(10.0, 8.0, 8.0)])
    assert row["mean"] == pytest.approx(0.15)
    assert row["max"] == pytest.approx(0.2)
    assert row["baseline"] == pytest.approx(0.3)
    assert row["skill"] == pytest.approx(0.5)
    assert row["bias"] == pytest.approx(math.sqrt(1.1 * 0.8) - 1)


def test_the_constant_is_a_utilisation_whatever_the_metric():
    """A time and a rate of the same run mean the same utilisation."""
    seconds = accuracy.case(point(**MULTI))
    rate = accuracy.case(point(**MULTI))
    rate.value, rate.measured = (lambda t: 100 / t), 25.0
    assert accuracy._constant(seconds) == pytest.approx(accuracy._constant(rate))
    assert accuracy._baseline(seconds, accuracy._constant(seconds)) == pytest.approx(4.0)
    assert accuracy._baseline(rate, accuracy._constant(rate)) == pytest.approx(25.0)


def test_korthikantis_own_bars():
    source = "Korthikanti et al. 2022 Figure 1"
    for metric, value in (("params_optimizer_memory", 45.5625), ("activation_memory_no_recompute", 59.25), ("activation_memory_seq_parallel+selective", 9.5625)):
        case = accuracy.case(point(source=source, metric=metric, model="GPT-22B", value=value, config={}))
        assert case.predict({}) == pytest.approx(value, rel=1e-6)


def test_without_a_file_the_kept_table_is_printed():
    text = "\n".join(accuracy.lines())
    assert roofline.fitted()["date"] in text
    for group in ("vtrain-multi", "vtrain-single", "mosaic (all)", "bloom memory", "parameters (exact)", "not predicted"):
        assert group in text


def test_every_parameter_has_a_meaning_and_its_data():
    file = roofline.fitted()
    for name, profile in file["profiles"].items():
        assert profile["data"], name
        assert profile["points"] >= len(profile["fitted"]) or profile["points"] >= 1
        for parameter in profile["fitted"]:
            assert parameter in file["meanings"], f"{name}: {parameter}"


def test_a_file_that_is_no_list_of_points(tmp_path):
    for text in ("{", "{}", "[1]"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(UserError, match=r"p\.json"):
            accuracy.load(tmp_path / "p.json")
    with pytest.raises(UserError, match=r"none\.json"):
        accuracy.load(tmp_path / "none.json")


def test_the_script_scores_any_file(tmp_path):
    file, rows = tmp_path / "points.json", tmp_path / "rows.jsonl"
    file.write_text(json.dumps([point(**MULTI), point(metric="loss"), {"metric": "nothing else"}]))
    run = subprocess.run([sys.executable, SCRIPT, file, "--to", rows], capture_output=True, text=True, timeout=60, check=True)
    assert "3 points, 1 predicted, 2 not" in run.stdout
    first, *rest = map(json.loads, rows.read_text().splitlines())
    assert first["group"] == "vtrain-multi"
    assert [row["metric"] for row in rest] == ["loss", "nothing else"]
    assert all(row["not_predicted"] for row in rest)


def test_a_run_of_any_software_is_predicted_and_said_to_be_foreign():
    config = {"hidden": 3072, "heads": 32, "layers": 30, "tp": 2, "recompute": "full", "micro_batch": 8}
    times = [point(source="elsewhere/trainer@1", hardware="A100", config=config, metric=metric) for metric in ("step_time", "tokens_per_s", "mfu", "hfu")]
    cases = [accuracy.case(p) for p in times]
    step, rate, mfu, hfu = (c.predict(accuracy.committed(c.profile)) for c in cases)
    assert rate == pytest.approx(512 * 2048 / step)
    assert mfu == pytest.approx(100 * cases[0].work.model_flops / step / 64 / 312e12)
    assert hfu == pytest.approx(mfu * 4 / 3)
    assert any("without parameters of its own" in remark for remark in accuracy.remarks(times, accuracy.score(times)[0]))


@pytest.mark.parametrize("field", ["config", "n_devices", "batch", "seq", "model", "params", "hardware", "source", "unit", "value", "id"])
def test_no_field_makes_it_fail(field):
    """Whatever stands in a field, a point is predicted or its reason is told."""
    odd = [{**point(**MULTI), field: value} for value in (None, "", "many", [], {"tp": None, "layers": -1}, -1, 0, 2.5, True, float("nan"), 1e300)]
    odd.append({k: v for k, v in point(**MULTI).items() if k != field})
    results, reasons = accuracy.score(odd)
    assert len(results) + sum(map(len, reasons.values())) == len(odd)
    assert accuracy.remarks(odd, results) is not None
    assert len(list(accuracy.not_predicted(reasons))) == len(reasons)


# ---------------------------------------------------------------- with the calibration points


@pytest.mark.shared_data
def test_bars_with_the_model_left_out(points):
    """The bars of docs/accuracy.md on the groups that are fitted in seconds; the others are in the kept table, below."""
    wanted = [p for p in points if any(text in p["source"] for text in ("ground_truth_multi", "llm-foundry")) or (p["metric"] == "peak_memory" and "bigscience" in p["source"])]
    table = accuracy.grouped(accuracy.leave_one_out(wanted)[0])
    assert table["vtrain-multi"]["n"] == 62
    assert table["vtrain-multi"]["mean"] <= 0.10
    assert table["mosaic (all)"]["n"] == 77
    assert table["mosaic (all)"]["mean"] <= 0.07
    assert table["bloom memory"]["n"] == 28
    assert table["bloom memory"]["mean"] <= 0.06
    for group in ("vtrain-multi", "mosaic (all)", "bloom memory"):
        assert table[group]["skill"] > 0.2
        assert table[group]["mean"] == pytest.approx(roofline.fitted()["accuracy"][group]["mean"], abs=0.005)  # the kept table is this code's


@pytest.mark.shared_data
def test_the_kept_table_and_the_committed_parameters(points):
    kept = roofline.fitted()["accuracy"]
    assert kept["vtrain-single"]["n"] == 360
    assert kept["vtrain-single"]["mean"] <= 0.12
    assert kept["multi-node A100, Megatron (all)"]["mean"] <= 0.10
    results, reasons = accuracy.score(points)
    assert len(results) + sum(map(len, reasons.values())) == len(points)
    table = accuracy.grouped(results)
    for group in ("vtrain-multi", "vtrain-single", "mosaic (all)", "bloom memory", "bloom time"):
        assert table[group]["mean"] <= kept[group]["mean"] + 0.01, group  # seen points are not worse than left out ones


@pytest.mark.shared_data
def test_all_26_counts_are_exact(points):
    counts = [p for p in points if p["metric"] == "parameter_count"]
    results, reasons = accuracy.score(counts)
    assert len(results) == 26
    assert not reasons
    assert all(r.predicted == r.case.measured for r in results)
