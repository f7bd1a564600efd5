"""The table of a study."""

from __future__ import annotations

from gradus.proof import results
from gradus.rows import Row


def test_a_table_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"torch {p} · batch {n} · 128 tokens · 64 new" for p in ("fp32", "bf16") for n in (1, 32)]
    figures = {"latency/median": 0.0123, "latency/p90": 0.0145, "latency/first_token": 0.01, "decode/tokens_per_s": 4321.0, "samples_per_s": 81.3,
               "ratio": 2.4, "memory/process": 4e8, "size/weights": 1e8, "time/load": 0.3, "time/first_call": 0.2, "roof": 0.4}  # fmt: skip
    unit = {"latency/median": "s", "latency/p90": "s", "latency/first_token": "s", "memory/process": "bytes", "size/weights": "bytes", "time/load": "s"}
    rows = [Row(n, v, unit.get(n, ""), None, {"configuration": c, "kind": "measured"}).known() for c in names for n, v in figures.items()]
    lines = list(results.lines(rows))
    assert max(map(len, lines)) <= 80 and sum(line.startswith("torch bf16 · batch 32  ") for line in lines) > 1, "each part has the names"
    assert lines[0].startswith("configuration (128 tokens · 64 new)")
    monkeypatch.delenv("COLUMNS")
    assert len(list(results.lines(rows))) == 5, "a file has one table"
