"""gradus bench on tiny models: its rows, what is measured once, what is refused, and what --engine auto takes."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from gradus import hardware, models
from gradus.cli import main
from gradus.errors import UserError
from gradus.infer import engines, find
from gradus.parallel.world import World
from gradus.proof import bench, engine_runner, harness, study, study_store
from gradus.proof.timing import Timed
from gradus.recipe.schema import BertConfig, GPTConfig, LlamaConfig, ViTConfig
from gradus.rows import read_rows

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import of_samples  # noqa: E402

BANDWIDTH, PRODUCT_RATE = engine_runner.roofs.bandwidth, engine_runner.roofs.product_rate  # where most tests have others
SHORT = ["--runs", "2", "--seconds", "0.2", "--warmup", "1", "--rounds", "1"]
LLAMA = LlamaConfig(vocab_size=64, n_layers=1, d_model=32, n_heads=2, d_ff=48, seq_len=40)


@pytest.fixture(scope="module")
def in_process():
    """What is measured, measured here: quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "run_group", lambda n, function, *args, log: [function(*args, World())])
        for name in ("bandwidth", "product_rate"):
            patch.setattr(engine_runner.roofs, name, lambda *_: 1e10)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory, in_process):
    """A llama, measured in two precisions of PyTorch; with the folder of the study and its rows."""
    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    models.save(models.build(LLAMA), folder / "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADUS_CACHE", str(folder / "cache"))
        words = ["--engines", "torch,tensorrt", "--precisions", "fp32,bf16,int8", "--batch", "1,2", "--length", "8", "--new", "5"]
        command = ["bench", str(folder / "llama"), *words, *SHORT, "--to", str(folder / "out")]
        assert main(command) == 0
    return folder, command, read_rows(folder / "out/rows.jsonl")


def test_rows_of_a_model_that_writes(made):
    _, _, rows = made
    of = {(r["name"], r["configuration"]): r for r in rows if r.get("kind") == "measured"}
    cell = "torch bf16 · batch 2 · 8 tokens · 5 new"
    names = {name for name, c in of if c == cell}
    assert names >= {"latency/median", "latency/p90", "latency/first_token", "latency/per_token", "decode/tokens_per_s", "samples_per_s", "ratio",
                     "memory/process", "size/weights", "time/load", "time/first_call", "roof"}  # fmt: skip
    assert "latency/p99" not in names, "too few runs"
    assert of["decode/tokens_per_s", cell]["value"] == pytest.approx(2 / of["latency/per_token", cell]["value"])
    assert of["latency/median", cell]["value"] > of["latency/first_token", cell]["value"]
    total = models.count(LLAMA)["total"]
    assert of["size/weights", cell]["value"] == pytest.approx(2 * total, rel=0.2)
    assert of["latency/median", cell]["n"] >= 2 and of["samples_per_s", cell]["computes"] == "bf16"
    assert of["ratio", cell]["against"] == "torch fp32 · batch 2 · 8 tokens · 5 new"
    first = "torch bf16 · batch 1 · 8 tokens · 5 new"
    assert of["check/cosine", first]["value"] > 0.9 and ("check/cosine", cell) not in of, "checked once"
    planned = {r["name"] for r in rows if r.get("kind") == "predicted" and r["configuration"] == cell}
    assert "size/weights" in planned


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_in_integers_are_planned_as_they_are_stored(tied, precision, bits, tmp_path, monkeypatch):
    monkeypatch.setattr("gradus.infer.compiled.has_compiler", lambda: True)  # nothing is compiled here
    config = GPTConfig(vocab_size=640, n_layers=1, d_model=128, n_heads=2, seq_len=16, tie_output=tied)
    models.save(models.build(config), tmp_path / "gpt")
    engine = engines.open(find(str(tmp_path / "gpt")), "compiled", precision)
    rest, stored = 4 if engine.device.type == "cpu" else 2, engine.weight_bytes()
    assert bench.in_integers(config, bits, rest) == pytest.approx(stored, rel=0.12), "scales are not counted"


def test_weights_are_planned_where_a_peak_is_not_known(tmp_path, monkeypatch):
    """A processor without bf16, as it was calibrated: no times, and the bytes all the same."""
    models.save(models.build(LLAMA), tmp_path / "llama")
    monkeypatch.setattr(bench, "device_of", lambda *_: dataclasses.replace(hardware.find("A100"), peaks={"fp32": 1e13}))

    def names(precision: str) -> set[str]:
        options = {"engine": "torch", "batch": 2, "new": 5, "length": 8, "precision": precision, "threads": 1}
        return {row.name for row in bench.planned_rows(find(str(tmp_path / "llama")), study.Configuration("x", None, options=options))}

    assert names("bf16") == {"size/weights"} < names("fp32")


def test_roofs_are_measured(monkeypatch):
    monkeypatch.setattr(engine_runner.roofs, "REPEAT", 1)
    assert 1e7 < BANDWIDTH(torch.device("cpu")) < 1e13 and 1e7 < PRODUCT_RATE(torch.device("cpu"), torch.float32) < 1e15


def test_what_cannot_be_is_listed(made):
    failed = {r["configuration"]: r["value"] for r in made[2] if r["name"] == "failed"}
    assert "Use --precision fp32" in failed["torch int8"] and "tensorrt" in failed["tensorrt fp32"]


def test_tokens_are_per_run_and_time_per_token_is_after_the_first(tmp_path):
    """By the formula (end - first) / (new - 1), from the raw samples that are kept."""
    raw = {"latency": [1.0, 1.2, 1.1], "first_token": [0.2, 0.4, 0.3]}
    samples = [study_store.Sample(1, [Timed([], 1.0, [[0, 1, 0, 0]], 1, [], {}, None, 0, raw=raw, facts={"computes": "fp32", "cache_bytes": 0},
                                      values={"roof/bandwidth": [1e9, ""], "roof/rate": [1e9, ""]})])]  # fmt: skip
    models.save(models.build(LLAMA), tmp_path / "llama")
    options = {"batch": 2, "new": 5, "length": 8, "precision": "fp32", "threads": 1}
    found = {r.name: r.value for r in bench.measured_rows(find(str(tmp_path / "llama")), study.Configuration("x", None, options=options), samples)}
    assert found["latency/per_token"] == pytest.approx(0.2) and found["decode/tokens_per_s"] == pytest.approx(10.0)
    weights = 4 * (32 * 32 * 4 + 3 * 32 * 48 + 64 * 32 + 3 * 32)  # bytes of the products' weights, and of norms
    assert found["roof"] == pytest.approx((weights + 2 * (8 + 2) * 2 * 32 * 4) / 1e9 / 0.2), "and keys and values of two rows"


def test_a_bench_goes_on_where_it_stood(made, in_process, monkeypatch, capsys, tmp_path):
    folder, command, rows = made
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    out = folder / "out"
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    cut = "".join(lines[:-1]) + lines[-1][:40]  # a kill while the last sample was written
    (out / "samples.jsonl").write_text(cut)
    taken = []
    measure = harness.measure
    monkeypatch.setattr(harness, "measure", lambda s, c, *rest: (taken.append(c.name), measure(s, c, *rest))[1])
    assert main([*command, "--json"]) == 0
    assert taken == [json.loads(lines[-1])["configuration"]]
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names, before = ({r["name"] for r in some if not r["name"].endswith("/undisturbed")} for some in (found, rows))  # only of a round that was long enough to tell
    assert names == before
    assert all(raw for line in lines for raw in json.loads(line)["ranks"][0]["raw"].values()), "every raw sample is kept"


def test_auto_takes_what_was_remembered(made, monkeypatch, capsys, tmp_path):
    folder, _, rows = made
    monkeypatch.setenv("GRADUS_CACHE", str(folder / "cache"))
    best = next(r for r in rows if r["name"] == "best")["of"]
    place = find(str(folder / "llama"))
    found = engines.open(place, "auto")
    assert [found.name, found.precision] == best["any"]
    assert f"--engine auto: torch {best['any'][1]} (the fastest of gradus bench" in capsys.readouterr().err
    assert engines.open(find(str(folder / "llama")), "auto", "bf16").precision == "bf16"
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    assert engines.open(find(str(folder / "llama")), "auto").precision == "fp32"
    assert "no gradus bench of" in capsys.readouterr().err


def test_it_is_drawn(made, tmp_path, capsys):
    folder, _, _ = made
    assert main(["report", str(folder / "out"), "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    page = next(tmp_path.glob("*.html")).read_text()
    assert "<svg" in page and "tokens/s" in page
    assert "latency by the number of samples at a time" not in page, "a line of two points is no plot"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engines", "compild"], "Did you mean compiled"),
        (["--precisions", "int7"], "no such name. Did you mean int"),
        (["--engines", "torch", "--precisions", "int8"], "Use --precision fp32"),
        (["--batch", "0"], "--batch"),
        (["--length", "40"], "Set --length 21 or fewer"),
        (["--new", "60", "--length", "2"], "the model has 40 positions"),
        (["--accuracy"], "belongs to no run"),
    ],
)
def test_refusals(made, words, said, capsys, tmp_path):
    assert main(["bench", str(made[0] / "llama"), *words, "--to", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1, error


def test_encoders_and_images(in_process, tmp_path, capsys):
    bert = BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)
    models.save(models.build(bert), tmp_path / "bert")
    assert main(["bench", str(tmp_path / "bert"), "--new", "4"]) == 2 and "Leave it out" in capsys.readouterr().err
    words = ["--engines", "torch", "--precisions", "fp32", "--batch", "2", *SHORT, "--json"]
    assert main(["bench", str(tmp_path / "bert"), *words, "--to", str(tmp_path / "a")]) == 0
    found = {r["name"]: r for r in map(json.loads, capsys.readouterr().out.splitlines()) if r.get("kind") == "measured"}
    assert found["latency/median"]["configuration"] == "torch fp32 · batch 2 · 8 tokens" and "decode/tokens_per_s" not in found
    assert found["roof"]["limit"] in ("operations", "bandwidth") and "best" not in found, "no cell of batch 1"
    vit = ViTConfig(image_size=8, patch_size=4, n_channels=1, n_classes=3, n_layers=1, d_model=16, n_heads=2, d_ff=32)
    models.save(models.build(vit), tmp_path / "vit")
    assert main(["bench", str(tmp_path / "vit"), "--length", "4"]) == 2 and "patches" in capsys.readouterr().err
    assert main(["bench", str(tmp_path / "vit"), *words, "--to", str(tmp_path / "b")]) == 0
    assert re.search(r'"torch fp32 · batch 2"|"torch fp32 \\u00b7 batch 2"', capsys.readouterr().out)


@pytest.mark.parametrize(("loss", "named", "right"), [(0.009, set(), True), (0.02, set(), False), (0.02, {"int8"}, True), (None, set(), False)])
def test_int8_counts_where_accuracy_was_measured_or_it_was_named(loss, named, right):
    def sample(**values):
        near = {"check/max_abs_delta": [0.1, ""], "check/largest": [3.0, ""]}
        timed = Timed([], 1.0, [[0, 1, 0, 0]], 1, [], {}, None, 0, facts={"computes": "fp32 from int8 weights"}, values=near)
        timed.values |= {f"valid/{name}": [value, ""] for name, value in values.items() if value is not None}
        return study_store.Sample(1, [timed])

    own = sample(accuracy=None if loss is None else 0.9 - loss)
    assert bench.is_accurate(bench.EnginePair("compiled", "int8"), own, sample(accuracy=0.9), named) is right
    own.values["check/max_abs_delta"] = (9.0, "")
    assert not bench.is_accurate(bench.EnginePair("compiled", "int8"), own, sample(accuracy=0.9), named), "too far off"


def rounds(*latencies: list[float]) -> list[study_store.Sample]:
    """Samples of a batch of 1 as a process keeps them: of each round its runs."""
    near = {"check/max_abs_delta": [0.0, ""], "check/largest": [3.0, ""]}
    more = {"roof/bandwidth": [1e9, ""], "roof/rate": [1e9, ""], **near}
    return [
        study_store.Sample(k, [Timed([], sum(runs), [[0, x, 0, 0] for x in runs], len(runs), [], {}, None, 0, raw={"latency": runs}, facts={"computes": "fp32", "cache_bytes": 0},
                               values={"samples_per_s": [1 / statistics.median(runs), "samples/s"], **more})])
        for k, runs in enumerate(latencies, 1)
    ]  # fmt: skip


def test_best_and_rates_are_by_the_medians_that_are_shown(tmp_path):
    """One run in ten of the faster engine took a hundred times as long: by the mean it would be the slower one."""
    models.save(models.build(BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)), tmp_path / "bert")
    place = find(str(tmp_path / "bert"))
    made = [
        study.Configuration(name, None, {"engine": f"{name} fp32", "batch": "1"}, "engine", options={
            "engine": name, "precision": "fp32", "batch": 1, "length": 8, "new": None, "check": True, "threads": 1})
        for name in ("torch", "onnx")
    ]  # fmt: skip
    samples = {"torch": rounds([0.2] * 10, [0.24] * 10), "onnx": rounds([0.1] * 9 + [10.0], [0.1] * 10)}
    both = study.Study("x", made, against="torch fp32")
    store = of_samples(both, samples)
    of = {(r.name, r.conditions["configuration"]): r for r in [*store.rows([], {}), *bench.BenchPlan(place, both, {}, set()).rows(store)]}
    speed, ratio = of["samples_per_s", "torch"], of["ratio", "onnx"]
    assert speed.value == pytest.approx(statistics.median(speed.conditions["samples"])) and speed.conditions["samples"] == pytest.approx([5.0, 1 / 0.24])
    assert ratio.value == pytest.approx(2.2), "the median of what its range is of"
    assert ratio.conditions["samples"] == pytest.approx([2.0, 2.4]) and ratio.conditions["against"] == "torch"
    assert of["best", "onnx"].conditions["of"]["any"] == ("onnx", "fp32") and ("best", "torch") not in of


def test_a_folder_that_was_made_for_an_engine_is_measured_in_it(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    bert = BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)
    models.save(models.build(bert), tmp_path / "bert")
    assert main(["export", str(tmp_path / "bert"), "--to", str(tmp_path / "made"), "--as", "torchscript"]) == 0
    words = ["bench", str(tmp_path / "made"), "--batch", "1", *SHORT, "--to", str(tmp_path / "out")]
    assert main(words) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "best at batch 1: torchscript fp32\n" in out and "auto" not in out
    rows = read_rows(tmp_path / "out/rows.jsonl")
    assert {r["at"]["engine"] for r in rows if "at" in r} == {"torchscript fp32"} and not any(r["name"] == "failed" for r in rows)
    assert main([*words[:-1], str(tmp_path / "other"), "--engines", "torch"]) == 2
    assert "made for --engines torchscript --precisions fp32. Use that" in capsys.readouterr().err


def test_it_fails_where_every_engine_did(tmp_path, monkeypatch, capsys):
    models.save(models.build(BertConfig(vocab_size=30, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=8)), tmp_path / "bert")

    def fail(*args, log):
        raise UserError("does not run here")

    monkeypatch.setattr(harness, "run_group", fail)
    words = ["bench", str(tmp_path / "bert"), "--engines", "torch", "--precisions", "fp32,bf16", "--batch", "1", *SHORT, "--to", str(tmp_path / "out")]
    assert main(words) == 1 and "best at batch 1: not known" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[]", "5", "null", "{", '{"any": ["torch", "fp32"]}', '{"any": ["torch"], "when": "x"}', '{"any": "torch", "when": "x"}', '{"any": ["zzz", "fp32"], "when": "x"}'])
def test_auto_does_without_a_damaged_memory(content, made, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    place = find(str(made[0] / "llama"))
    engines.best_at(place).parent.mkdir(parents=True)
    engines.best_at(place).write_text(content)
    assert engines.best(place, None) == ("torch", "fp32")
    assert "no gradus bench of" in capsys.readouterr().err
