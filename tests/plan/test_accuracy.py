"""Published measurements: how they are read and priced, how parameters are fitted, and how far the plan is off."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.plan import published as kept
from gradus.plan import roofline
from gradus.plan.roofline import Parameters
from gradus.plan.step import step_time
from gradus.plan.work import Op, Transfer, Work

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "groundtruth.py"
sys.path[:0] = [str(ROOT / "benchmarks")]

import groundtruth  # noqa: E402
from published import fit as fitting  # noqa: E402
from published import price, scoring, software, study  # noqa: E402
from published.points import Case, NotCovered, load  # noqa: E402


def point(**fields):
    return {"id": "x", "model": "GPT 3.6B", "params": 3.6e9, "config": {}, "hardware": "A100", "n_devices": 64, "batch": 512, "seq": 2048,
            "metric": "step_time", "value": 4.0, "unit": "s", "kind": "measured", "source": "", "note": None, **fields}  # fmt: skip


SMALL = {"hidden": 512, "heads": 8, "layers": 4, "tp": 2, "pp": 1, "micro_batch": 4, "recompute": "full", "vocab": 1000}
MULTI = {"source": "VIA-Research/vTrain@f8dda84 data/ground_truth_multi.csv", "config": SMALL, "n_devices": 8, "batch": 32, "seq": 256, "value": 0.05}
ALONE = MULTI | {"config": SMALL | {"tp": 1}}  # no tensor parallelism, which takes long to trace
MOSAIC = {"source": "mosaicml/llm-foundry", "metric": "tokens_per_s_per_gpu", "hardware": "a100_80gb", "n_devices": 8, "seq": 512}
PRODUCT = {"source": "MAMF", "metric": "max_achievable_matmul_tflops", "config": {"theoretical": 100}}


@pytest.fixture(scope="module")
def points(shared_data):
    path = shared_data.parent / "groundtruth" / "calibration.json"
    if not path.exists():
        pytest.skip("no calibration points beside the data")
    return load(path)


# ---------------------------------------------------------------- reading


def test_a_point_becomes_work():
    case = study.case(point(**MULTI))
    assert (case.group, case.chip, case.work.software) == ("vtrain-multi", "A100", "megatron")
    assert case.work.micro_batches == 2
    assert {t.axis for t in case.work.transfers} == {"tensor", "replicate", "control"}
    assert not [op for op in case.work.micro if op.name in software.MASKS and op.bytes > 1e6]  # fused with the softmax
    assert next(op for op in case.work.step if op.name == "adam").bytes == pytest.approx(46 * 12 * 512**2 * 4 / 2, rel=0.15)
    assert study.predicted(case) > 0


def test_a_pipelines_head_is_the_last_stages():
    case = study.case(point(**MULTI | {"config": SMALL | {"tp": 1, "pp": 2}, "n_devices": 4}))
    assert any(op.stage_only and op.kind == "matmul" for op in case.work.micro)
    assert case.work.stages == 2
    assert case.work.micro_batches == 4


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"metric": "loss"}, "metric loss"),
        ({**MULTI, "config": {"hidden": 3072}, "params": None}, "step_time"),  # no layers
        ({**MULTI, "n_devices": None, "config": {**SMALL, "dp": None}}, "the number of devices is not given"),
        ({**MULTI, "value": None}, "the value is None"),
        ({"hardware": "Unheard-of 9", "config": SMALL}, "Unheard-of 9"),
        ({**MOSAIC, "model": "MPT-9t"}, "MPT-9t"),
        ({"source": "", "metric": "parameter_count", "model": "Unheard-of 3B"}, "Unheard-of 3B"),
    ],
)
def test_what_cannot_be_predicted_is_counted_with_its_reason(fields, why):
    with pytest.raises(NotCovered, match=why):
        study.case(point(**fields))
    results, reasons = study.score([point(**fields), point(**PRODUCT, hardware="A100 SXM")])
    assert len(results) == 1
    assert sum(map(len, reasons.values())) == 1


@pytest.mark.parametrize("field", ["config", "n_devices", "batch", "seq", "model", "params", "hardware", "source", "unit", "value", "id"])
def test_no_field_makes_it_fail(field):
    """Whatever stands in a field, a point is predicted or its reason is told."""
    odd = [{**point(**ALONE), field: value} for value in (None, "", "many", [], {"tp": None, "layers": -1}, -1, 0, 2.5, True, float("nan"), 1e300)]
    odd.append({k: v for k, v in point(**ALONE).items() if k != field})
    results, reasons = study.score(odd)
    assert len(results) + sum(map(len, reasons.values())) == len(odd)
    assert study.remarks(results) is not None
    assert len(list(scoring.not_predicted(reasons))) == len(reasons)


def test_a_run_of_any_source_is_predicted_in_any_metric():
    times = [point(**{**ALONE, "source": "elsewhere/trainer@1"}, metric=metric) for metric in ("step_time", "tokens_per_s", "mfu", "hfu")]
    cases = [study.case(p) for p in times]
    step, rate, mfu, hfu = map(study.predicted, cases)
    assert rate == pytest.approx(32 * 256 / step)
    assert mfu == pytest.approx(100 * cases[0].work.model_flops / step / 8 / 312e12)
    assert hfu == pytest.approx(mfu * 4 / 3)
    assert step == pytest.approx(study.predicted(study.case(point(**ALONE))))


def test_context_parallel_runs_see_all_keys():
    llama = {"source": "pytorch/torchtitan", "model": "Llama 3 8B", "hardware": "H100", "metric": "tokens_per_s_per_gpu", "n_devices": 8, "seq": 2048}
    whole, parts = (study.case(point(**llama, batch=8, config={"cp": k, "local_batch": k})) for k in (1, 2))
    attention = [sum(op.flops * op.count for op in c.work.micro if op.kind == "attention") * c.work.micro_batches for c in (whole, parts)]
    assert attention[0] == pytest.approx(attention[1], rel=1e-6)
    assert whole.work.model_flops == pytest.approx(parts.work.model_flops, rel=1e-6)
    assert [t for t in parts.work.transfers if t.axis == "context"]


def test_a_file_that_is_no_list_of_points(tmp_path):
    for text in ("{", "{}", "[1]"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(UserError, match=r"p\.json"):
            load(tmp_path / "p.json")
    with pytest.raises(UserError, match=r"none\.json"):
        load(tmp_path / "none.json")


# ---------------------------------------------------------------- pricing


def made_work(software: str = "megatron") -> Work:
    """A bit of everything."""
    ops = [Op("matmul", "mm", dtype, phase, 2.0 * m * 50_257 * 512, 1e8, (1, m, 50_257, 512), 3) for m in (64, 4096) for dtype in ("bf16", "fp8")
           for phase in ("forward", "backward", "recompute")]  # fmt: skip
    ops += [Op("matmul", "grouped_mm", "bf16", "forward", 2.0 * 8 * 512**3, 1e7, (8, 512, 512, 512), 5), Op("attention", "flash", "bf16", "forward", 1e12, 1e8, (1, 8, 512, 512, 64), 4), Op("memory", "gelu", "bf16", "backward", 0.0, 1e8, (), 7, 3),
            Op("memory", "add", "bf16", "forward", 0.0, 3e8, stage_only=True), Op("memory", "softmax", "bf16", "recompute", 0.0, 1e6, (), 500)]  # fmt: skip
    sent = [Transfer(axis, kind, payload, 8, group, stride, phase, hidden) for axis, kind, payload, group, stride, phase, hidden in (
        ("tensor", "all_reduce", 1e8, 8, 1, "forward", ""), ("replicate", "all_reduce", 1e9, 4, 8, "optimizer", ""), ("shard", "all_gather", 1e9, 32, 1, "forward", "forward"),
        ("shard", "reduce_scatter", 2e9, 32, 1, "backward", "backward"), ("pipeline", "send", 1e8, 4, 8, "backward", "both"), ("expert", "all_to_all", 1e8, 16, 2, "backward", ""))]  # fmt: skip
    step = [Op("memory", "adam", "fp32", "optimizer", 0.0, 1e9, (), 1, 300)]
    return Work(ops, step, sent, 8, 4, 2, "interleaved", 64, 1e6, 1e15, 1e6, software)


@pytest.mark.parametrize("device", ["A100-80GB", "H100", "RTX-3090", "MI300X"])
def test_many_runs_at_once_are_what_step_time_says_of_each(device):
    """How shapes count is the device's, as kernels say it."""
    cluster = Cluster(hardware.find(device), 32)
    shapes = {name: getattr(roofline.parameters(cluster.device)[0], name) for name in ("depth", "keys", "decode")}
    works = [made_work(), dataclasses.replace(made_work(), micro_batches=1, schedule="1f1b"), dataclasses.replace(made_work(), transfers=[]), study.case(point(**MULTI)).work]
    fits = [Parameters(**shapes, **own) for own in ({}, {"host": 1e-3, "elementwise": 0.5}, {"network": 0.05, "contention": 0.4, "straggle": 0.02, "overlap": 0.1},
                                                    {"wait": 1e-3, "products": 0.6, "fused": 0.3, "cast": 9.0, "fp8": 0.4, "grouped": 0.5})]  # fmt: skip
    seconds = price.Runs([(w, cluster) for w in works]).seconds(np.array([[getattr(f, name) for name in price.NAMES] for f in fits]))
    assert seconds == pytest.approx([step_time(w, cluster, f).total for w, f in zip(works, fits)], rel=1e-12)


# ---------------------------------------------------------------- fitting


def cases_of(truth: Parameters) -> list[Case]:
    found = []
    for size, micro, seq in (("125m", 8, 512), ("350m", 8, 512), ("1b", 4, 512)):
        config = {"micro_batch": micro, "mixed_precision_mode": "DEFAULT", "precision": "amp_bf16", "sharding": "FULL_SHARD"}
        case = study.case(point(**MOSAIC | {"seq": seq}, model=f"MPT-{size}", batch=8 * micro, config=config))
        case.measured = case.value(step_time(case.work, case.cluster, truth).total)
        found.append(case)
    return found


def test_fitting_finds_the_parameters_that_made_the_points_and_the_same_again():
    truth = dataclasses.replace(roofline.parameters(hardware.find("A100"))[0], products=0.87, contention=0.3)
    of = study.Study(cases_of(truth))
    assert np.abs(of.fit.errors(of.x)).max() < 0.06  # each parameter is drawn towards its prior
    keys = fitting.keys_of("A100", of.priced[0].work.software)
    assert 0.87 < of.fit.entry(of.x, keys, ["products"])["products"] < 0.94 < fitting.SOFTWARE["products"][1]
    assert not of.fit.entry(of.x, {"A100"}, roofline.OF_CHIP)  # its kernels were measured
    assert (study.Study(of.cases).x == of.x).all()


def test_outliers_count_less_than_squares():
    values = np.array([math.log(5.0)] + [math.log(0.5)] * 8)
    x = fitting.minimise(lambda x: (x[0] - values) / 0.05, np.zeros(1), np.ones(1), np.ones(9), np.zeros(1))
    assert math.exp(x[0]) == pytest.approx(0.5, rel=0.02)


def test_left_out_means_left_out():
    """Products of a chip whose kernels were measured, and of one that is then predicted by them."""
    points = [point(**PRODUCT, hardware="H100 one", value=500.0), point(**PRODUCT, hardware="GH200 two", value=500.0)]
    of = study.Study([study.case(p) for p in points])
    one, two = np.exp(of.without(["one", "two"])) * [c.seconds for c in of.priced]
    assert one == pytest.approx(two, rel=1e-4)
    assert of.priced[0].value(one) == pytest.approx(0.85 * 989, rel=0.03)
    assert of.fit.parameters(of.x)[1, price.NAMES.index("matmul")] < 0.8 < of.priced[1].value(two) / 989  # with its own it is drawn to them


def test_a_fit_without_some_is_near_the_fit_of_all():
    """Steps from there, against a fit that starts at the prior."""
    cases = cases_of(dataclasses.replace(roofline.parameters(hardware.find("A100"))[0], products=0.87, contention=0.3))
    cases[0].measured /= 1.3
    of, out = study.Study(cases), np.array([True, False, False])
    anew = of.fit.errors(of.fit.solve(out))
    assert of.near.without(out) == pytest.approx(anew, abs=0.02)
    assert abs(anew[0] - of.fit.errors(of.x)[0]) > 0.02


def test_a_source_of_many_points_does_not_rule_the_others():
    """Nor does a cell of many rows."""
    cases = [Case(point(batch=i), "g", "many", "m", 1.0) for i in range(100)] + [Case(point(), "g", "few", "m", 1.0)] * 4
    weights = study.weights_of(cases)
    assert weights[:100].sum() == pytest.approx(10 * weights[100:].sum())


def test_as_many_as_wanted_lie_within_the_interval_that_they_make():
    def case(i: int, software: str, source: str) -> Case:
        work = Work([Op("memory", "x", "bf16", "forward", 0.0, 1.0)], [], [], software=software)
        return Case({}, "g", source, str(i), 1.0, work, Cluster(hardware.find("A100"), 1))

    class Made:
        priced = [case(i, "one", f"s{i % 3}") for i in range(100)] + [case(0, "few", "t")]

        def without(self, labels):
            return np.log([0.5 + 0.01 * i for i in range(100)] + [0.5])

    found = study.intervals(Made())
    low, high = found["one"]
    assert sum(low <= 1 / (0.5 + 0.01 * i) <= high for i in range(100)) == pytest.approx(100 * (1 - 2 * study.OUTSIDE), abs=1)
    assert found["few"][0] == pytest.approx(low, rel=0.02)  # of all
    assert found["gradus"][0] < low < high < found["gradus"][1]


def test_a_time_and_a_rate_of_the_same_run_mean_the_same_seconds():
    seconds, rate = study.case(point(**MULTI)), study.case(point(**MULTI))
    rate.value, rate.measured = (lambda t: 100 / t), 100 / seconds.measured
    assert seconds.seconds == pytest.approx(rate.seconds)
    assert study.entry(seconds, 2 * seconds.measured).error == pytest.approx(study.entry(rate, rate.measured / 2).error)


def test_a_data_sheet_is_peaks_and_bandwidth_and_each_layer_takes_longer():
    """Of the largest product in closed form; of steps in order."""
    steps = cases_of(roofline.parameters(hardware.find("A100"))[0])
    product = study.case(point(**PRODUCT, hardware="A100 SXM", value=250.0))
    of = study.Study([product, *steps])
    sheet, kernels, features = (np.exp(errors) * of.fit.measured for errors in study.layers(of).values())
    (op,) = product.work.micro
    assert sheet[0] == pytest.approx(roofline.together(op.flops / 312e12, op.bytes / product.cluster.device.bandwidth))
    assert kernels[0] == pytest.approx(roofline.op_seconds(op, product.cluster.device, Parameters(**roofline.of_chip("A100", {}))))
    assert (sheet < kernels).all() and (kernels[1:] < features[1:]).all()
    assert "mean" not in "".join(lines := list(study.ablation(of, {}))) and len(lines) == 6


# ---------------------------------------------------------------- what is kept


def test_the_kept_table_is_printed_and_a_file_is_the_benchmarks():
    text = "\n".join(kept.lines())
    assert roofline.fitted()["date"] in text
    for group in ("vtrain-multi", "vtrain-single", "mosaic h100_80gb", "GPU-hours of whole runs", "parameters (exact)", "mean of", "not predicted"):
        assert group in text
    with pytest.raises(UserError, match=r"benchmarks/groundtruth\.py points\.json"):
        list(kept.lines("points.json"))


def test_the_page_has_the_kept_tables():
    page = groundtruth.PAGE.read_text(encoding="utf-8")
    assert f"<!-- tables -->\n{groundtruth.tables()}<!-- end of tables -->\n" in page, "python benchmarks/groundtruth.py POINTS.json ... --fit"


def test_no_constant_for_a_paper():
    file = roofline.fitted()
    assert {name.partition("@")[0] for name in file["software"]} == {"gradus", *software.table()} - {"any"}
    assert {name.partition("@")[2] for name in file["software"]} <= {"", *roofline.fitted(roofline.KERNELS)["chips"]}
    assert len(roofline.FITTED.read_text().splitlines()) <= 240
    fields = {f.name for f in dataclasses.fields(Parameters)}
    for table in ("chips", "software"):
        for name, entry in file[table].items():
            assert set(entry) <= fields, name
    assert file["network"].keys() <= fields


@pytest.mark.parametrize(("left_out", "which", "bar"), [
    ("each model left out", "old", 0.08), ("each group left out, if another has its chip and program", "new", 0.12),
    ("each chip's runs left out, its kernels kept", "new", 0.18),
])  # fmt: skip
def test_the_bars_of_the_kept_table(left_out, which, bar):
    """Medians of a group's errors, and of groups their mean."""
    table = roofline.fitted()[left_out]
    (row,) = (dict(zip(table["columns"], row)) for name, row in table.items() if name.startswith(f"{which}: mean of"))
    assert row["median"] <= bar and row["covered"] >= 0.95
    assert 0.7 <= row["inside"] <= 0.9


@pytest.mark.slow
def test_the_script_scores_any_file(tmp_path):
    file, rows = tmp_path / "points.json", tmp_path / "rows.jsonl"
    file.write_text(json.dumps([point(**MULTI), point(metric="loss"), {"metric": "nothing else"}]))
    run = subprocess.run([sys.executable, SCRIPT, file, "--to", rows], capture_output=True, text=True, timeout=120, check=True)
    assert "3 points, 1 predicted, 2 not" in run.stdout
    first, *rest = map(json.loads, rows.read_text().splitlines())
    assert first["group"] == "vtrain-multi"
    assert [row["metric"] for row in rest] == ["loss", "nothing else"]
    assert all(row["not_predicted"] for row in rest)


# ---------------------------------------------------------------- with the calibration points


@pytest.mark.shared_data
def test_all_26_counts_are_exact(points):
    results, reasons = study.score([p for p in points if p["metric"] == "parameter_count"])
    assert len(results) == 26
    assert not reasons
    assert all(e.value == e.case.measured and e.case.kind == "identity" for e in results)


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.parametrize("part", range(4))
def test_no_anchor_that_was_right_goes_wrong_and_the_kept_tables_are_this_codes(part, shared_data):
    """A mean hides one error under another: 40 runs are looked at one by one. Where one is planned otherwise than when the tables were made, these
    are to be made anew with --fit."""
    kept = yaml.safe_load(study.ANCHORS.read_text())
    assert len(kept) == 40
    fitted = dict(zip(kept, roofline.fitted()["anchors"], strict=True))
    mine = dict(list(kept.items())[part::4])
    found = [p for name in ("calibration", "training-2026") for p in load(shared_data.parent / "groundtruth" / f"{name}.json")]
    now = study.anchors(found, mine)
    assert now == pytest.approx({name: fitted[name] for name in mine}, abs=0.003)
    lines = list(study.drift(mine, now))
    print("\n".join(lines))
    assert len(lines) == 10 and not [line for line in lines if line.endswith("LOST")]


def test_an_anchor_that_was_right_and_is_not_any_more_is_lost():
    then = {"right": 0.02, "wrong": 0.4, "gone": -0.1, "near": 0.14}
    lines = list(study.drift(then, {"right": 0.2, "wrong": 0.9, "near": -0.15}))
    assert [line.split()[0] for line in lines if line.endswith("LOST")] == ["right", "gone"]
