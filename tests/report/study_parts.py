"""What the tests of a study's report share: rows, and folders of them."""

from __future__ import annotations

import json

import pytest

from gradus import recipe as recipes
from gradus.proof.study import Configuration, Study
from gradus.proof.study_store import Sample, StudyStore, claimed
from gradus.proof.timing import Timed
from gradus.report import studies, study_plots

COMMON = {"kind": "measured", "cpu": "a processor", "cpus": 8, "versions": {"torch": "2"}}


def row(name, value, c, unit="", **more):
    samples = {"low": min(more["samples"]), "high": max(more["samples"])} if "samples" in more else {}
    return {"name": name, "value": value, "unit": unit, "configuration": c, **COMMON, **samples, **more}


def folder_of(folder, rows, **about):
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": folder.name, "digest": "0", **about}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def captions(folder):
    return [figure.caption for figure in study_plots.of_study(studies.read([str(folder)])[0])]


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    """A folder as the harness leaves it, of samples that nobody took."""
    folder, made = tmp_path_factory.mktemp("studies") / "pair", []
    for precision in ("fp32", "bf16"):
        for n in (1, 2):
            at = {"precision": precision, "processes": f"{n} of them"}
            made.append(Configuration(" · ".join(at.values()), recipes.load("copy-task", [f"layout.precision={precision}"]), at, processes=n))
    study = Study("pair", made, steps=2, rounds=2, against="fp32")
    with claimed(folder, "study", {"study": "pair"}, {"configurations": {c.name: c.identity() for c in made}}):
        store = StudyStore(study, folder)
        for k in (1, 2):
            for i, c in enumerate(made):
                memory = {"process": 300_000_000, "allocated": 9_000_000, "weights": 2_000_000, "gradients": 2_000_000}
                timed = Timed([0.2], (1 + i) * k / 10, [[0.0, 0.1, 0.0, 0.0]] * 2, 100, [3.0, 2.0 + i / 100], memory, None, 0, facts={"device": "cpu", "threads": 1})
                store.add(c, Sample(k, [timed] * c.processes, elapsed=1.0))
        store.add(made[-1], Sample(3, failed="the <memory> is full"))
        store.file.close()
    planned = [row("memory/allocated", 8_000_000, c.name, "bytes", kind="predicted") for c in made]
    lines = [json.dumps(r) for r in planned] + [r.json() for r in store.rows([], {})]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder
