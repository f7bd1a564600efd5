"""The plots of a study: what there are rows for."""

from __future__ import annotations

from study_parts import captions, folder_of, row

from gradus.report import studies, study_plots


def test_the_plots_of_several_processes(harness):
    found = captions(harness)
    assert [caption.partition(".")[0] for caption in found] == ["The speed of each configuration"]  # two numbers of processes are no line
    study = studies.read([str(harness)])[0]
    assert study_plots._lines(study, study.values("samples_per_s")) == {
        p: [f"{p} · {n} of them" for n in (1, 2)] for p in ("fp32", "bf16")
    }


def test_quality_against_speed_and_many_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(study_plots, "MOST", 3)
    rows = []
    for i in range(5):
        c = f"$x_{i}$ <b>"
        rows += [row("samples_per_s", 10.0 + i, c, "samples/s", std=1.0), row("valid/accuracy", i / 40, c, std=0.1), row("valid/loss", float("nan"), c)]
    folder = folder_of(tmp_path / "many", rows)
    found = captions(folder)
    assert "The plot shows the 3 largest of 5." in found[0] and found[-1].startswith("The quality and the speed of each")
    rows += [row("latency/p50", i / 100, f"$x_{i}$ <b>", "s") for i in range(4)]
    assert captions(folder_of(tmp_path / "bench", rows))[-1].startswith("The quality and the latency of each")
