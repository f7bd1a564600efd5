"""What to try next: only what is off and works here."""

from __future__ import annotations

import torch
from profile_parts import tiny

from gradus.measure.hints import hints
from gradus.train import machine


def test_hints_only_of_what_is_off_and_works_here(monkeypatch):
    from gradus.measure import hints as module

    def keys(shares, **more):
        return [h.key for h in hints(tiny(**more), torch.device("cpu"), shares, 1)]

    monkeypatch.setattr(module, "has_compiler", lambda: True)
    monkeypatch.setattr(machine, "cpu_flags", lambda: ["amx_bf16"])
    every = {"attention": 0.3, "element-wise": 0.35, "matrix products": 0.4, "optimizer": 0.25}
    naive = {"layout.attention": "naive", "model.dropout": 0.0}
    assert keys(every) == ["layout.precision=bf16", "layout.compile=default", "batch.samples=32"], "the largest share first"
    assert "layout.attention=sdpa" in keys(every, **naive)
    assert "layout.attention=sdpa" in keys(every, **naive, **{"layout.precision": "bf16", "model.seq_len": 257})
    for slow in ({"model.dropout": 0.1}, {"layout.precision": "bf16"}):
        assert "layout.attention=sdpa" not in keys(every, **naive | slow), "no fast kernel on a CPU"
    assert not [key for key in keys(every, **{"layout.precision": "bf16"}) if "precision" in key]
    assert "layout.compile=default" not in keys(every, **{"layout.compile": "default"})
    monkeypatch.setattr(module, "has_compiler", lambda: False)
    monkeypatch.setattr(machine, "cpu_flags", lambda: ["avx2"])
    assert keys(every) == ["batch.samples=32"] and keys({}) == []
    assert keys(every, **{"layout.precision": "bf16"})[0] == "layout.precision=fp32", "no instructions for bf16"
    assert keys({"recomputation": 0.2}, **{"layout.checkpointing": "full"}) == ["layout.checkpointing=none"]
