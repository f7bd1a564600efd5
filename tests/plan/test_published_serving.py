"""Published measurements of serving are read by their fields, and what is planned of them is what `gradus plan --serve` says."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

from published import serving  # noqa: E402

from gradus.hardware import cluster  # noqa: E402
from gradus.plan import serving as planned  # noqa: E402

SIZES = {"hidden": 4096, "layers": 2, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}


def row(metric, **more):
    config = {**SIZES, "isl": 4096, "osl": 128, "engine": "vLLM", "tp": 1, "precision": "bf16", "mode": "agg", "concurrency": 1, **more}
    group = "llm-inference-bench" if metric == "batch_latency_s" else "aiconfigurator-runs"
    return {"id": metric, "model": "a dense one", "params": 1e9, "config": config, "hardware": "h100_sxm", "n_devices": config["tp"], "batch": config["concurrency"],
            "seq": config["isl"], "metric": metric, "value": 2.0, "unit": "s", "kind": "measured", "source": "s", "group": group}  # fmt: skip


def plan_of(*rows) -> list[float]:
    """Seconds: the value by the error."""
    entries, reasons = serving.score(rows)
    assert not reasons
    return [row["value"] / math.exp(e.error) for row, e in zip(rows, entries, strict=True)]


def test_three_rows_by_hand():
    """A new token reads all matrices and the cache at 86.6 % of 3.35 TB/s, and starts seven products and one attention a layer, and the head; a
    prompt takes its operations at no more than 86.1 % of the peak, and no less than 70 %; a batch takes its prompts and its tokens."""
    token, first, batch = plan_of(row("itl_s"), row("ttft_s"), row("batch_latency_s"))
    h = 4096
    matrices = 2 * (2 * h * h + 2 * h * 1024 + 3 * h * 14336)
    cache = 2 * 2 * 1024 * (4096 + 64)  # of both layers, up to the middle of the answer
    reading = 2 * (matrices + 32000 * h + cache) / (3.35e12 * 0.866)
    assert token == pytest.approx(reading + (2 * 7 + 1) * 2.716e-6 + 2 * 1.305e-5, rel=0.01)
    prompt = first - token  # alone, it waits for no other's
    operations = 2 * matrices * h + 2 * 32000 * h + 2 * 2 * h * 4096**2
    assert operations / (0.861 * 989.4e12) < prompt < operations / (0.7 * 989.4e12)
    assert batch == pytest.approx(prompt + 128 * token)


def test_precision_degree_and_requests_count():
    """Half the bytes and a faster product in fp8; two devices' share and their all-reduces; a batch that starts at once waits for half of it."""
    token, eight, split, first, third = plan_of(
        row("itl_s"), row("itl_s", precision="fp8"), row("itl_s", tp=2), row("ttft_s"), row("ttft_s", concurrency=5)
    )
    assert 0.5 < eight / token < 0.65 and 0.5 < split / token < 0.75
    assert third - token == pytest.approx(3 * (first - token), rel=0.02)
    (between,) = plan_of(row("itl_s", concurrency=5))
    keys = 4 * 2 * 2 * 2 * 1024 * (4096 + 64) / (3.35e12 * 0.866)  # and values, of four other rows
    assert between == pytest.approx(token + keys + 4 * (first - token) / 128, rel=0.02)  # and their prompts


def test_it_is_what_the_plan_prints():
    point = row("itl_s", concurrency=4)
    use = serving.use_of(serving.cleaned(point))
    rows = planned.serving(use.config, batch=4, seq_len=4096 + 128, on=cluster("H100"), new=128)
    assert plan_of(point) == [pytest.approx(next(r.value for r in rows if r.name == "serving/itl"))]


def test_what_is_refused_is_listed_and_what_is_out_of_scope_is_not():
    rows = [row("itl_s", mode="disagg"), row("ttft_s", concurrency=64), row("itl_s", max_batch=1, concurrency=2), row("itl_s", kv_heads=None),
            {**row("itl_s"), "hardware": "abacus"}, {**row("itl_s"), "group": "another"}, row("itl_s", osl=None)]  # fmt: skip
    entries, reasons = serving.score(rows)
    assert [e.error for e in entries] == [None] * 5 and sum(map(len, reasons.values())) == 5
    assert [why.split(":")[0] for why in reasons][:4] == ["prompts and tokens on separate machines", "more requests at once than rows", "model a dense one", "device abacus"]
    text = "\n".join(serving.tables(serving.score([*rows, row("itl_s")])[0]))
    assert "time between tokens, by tensor degree" in text and "aiconfigurator-runs" in text and "a static batch" not in text
