"""The memory picture against sizes known beforehand, and the files that a profile leaves."""

from __future__ import annotations

import json
import re

import pytest
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.measure.profile import memory_picture, profile
from gradus.train.loop import Trainer
from gradus.train.session import open_session

TINY = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 60, "data.n_valid": 5, "batch.samples": 16,
        "layout.device": "cpu"}  # fmt: skip


def tiny(**more):
    return recipes.load("copy-task", **{**TINY, **more})


def picture(tmp_path, **more):
    session = open_session(tiny(**more))
    trainer, _, lines, rows = memory_picture(session, tmp_path)
    return session, trainer, lines, {(r.name, r.step): r.value for r in rows}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "new" / "folder"
    return folder, list(profile(tiny(), folder, repeat=2))


@pytest.mark.slow
def test_files(profiled):
    folder, lines = profiled
    assert sorted(p.name for p in folder.iterdir()) == ["memory.jsonl", "top.txt", "trace-2.json", "trace.json"]
    trace = json.loads((folder / "trace.json").read_text())
    steps = [e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep") and e.get("cat") == "user_annotation"]
    assert len(steps) == 3, "three steps are recorded, after one to wait and one to warm up"
    assert any("Input Dims" in e.get("args", {}) for e in trace["traceEvents"]), "shapes are recorded"
    top = (folder / "top.txt").read_text().splitlines()
    assert "Self CPU" in top[2] and "top 10 operations" in top[0]
    assert all(line in lines for line in top)


def test_top_operations_are_in_order_and_the_trace_holds_the_matrix_products(profiled):
    ruled = re.split(r"\n[- ]+\n", (profiled[0] / "top.txt").read_text())  # the head, the names of columns, the operations, the totals
    rows = [re.split(r"\s{2,}", line.strip()) for line in ruled[2].splitlines()]
    times = [float(row[2].rstrip("mus")) * {"us": 1e-6, "ms": 1e-3}.get(row[2][-2:], 1) for row in rows]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert len(rows) == 10 and any(row[0].startswith("aten::") for row in rows)
    trace = (profiled[0] / "trace.json").read_text()  # whether they are among the top of so small a model is a matter of the machine
    assert '"aten::addmm"' in trace or '"aten::mm"' in trace


def test_components_are_what_they_must_be(tmp_path):
    session, trainer, _, rows = picture(tmp_path)
    n = models.count(session.recipe.model)["total"]
    n_tensors = len(list(trainer.model.parameters()))
    assert rows["memory/weights", None] == 4 * n
    assert rows["memory/gradients", None] == 4 * n
    assert rows["memory/optimizer", None] == 8 * n + 4 * n_tensors  # Adam's two moments, and its count of steps a tensor
    n_embeddings = 1 if session.recipe.model.share_embeddings else 2
    tables = n_embeddings * 4 * session.recipe.model.seq_len * 32  # sinusoidal positions, which are no weights
    assert rows["memory/building/allocated", None] == 4 * n + tables
    # step by step: the first leaves the optimizer's state, which the second finds
    assert rows["memory/step/allocated", 1] - rows["memory/building/allocated", None] == pytest.approx(4 * n + 8 * n, rel=0.03)
    assert rows["memory/forward/allocated", 2] - rows["memory/forward/allocated", 1] == pytest.approx(8 * n, rel=0.03)
    peaks = [value for (name, _), value in rows.items() if name.endswith("/peak")]
    assert rows["memory/peak", None] == max(peaks) >= 16 * n
    assert rows["memory/forward/peak", 2] >= rows["memory/forward/allocated", 2]


def test_activations_are_what_autograd_keeps(tmp_path):
    session, _, _, rows = picture(tmp_path)
    model = session.build().train()
    trainer = Trainer(session, model, tmp_path)
    steps = trainer.loader.steps(0)
    next(steps)
    batch = next(steps).micro_batches[0]
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sums = session.task.losses(model, batch)
    not_made = {t.untyped_storage()._cdata for t in [*model.parameters(), *(v for v in batch.values() if isinstance(v, torch.Tensor))]}
    expected = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in not_made)
    assert sums and expected > 100_000
    assert rows["memory/activations", None] == pytest.approx(expected, rel=0.05)


def test_checkpointing_and_smaller_micro_batches_keep_less(tmp_path):
    plain = picture(tmp_path)[3]["memory/activations", None]
    assert picture(tmp_path, **{"layout.checkpointing": "full"})[3]["memory/activations", None] < 0.4 * plain
    assert picture(tmp_path, **{"layout.micro_batch": 4})[3]["memory/activations", None] == pytest.approx(plain / 4, rel=0.1)


def test_profiling_takes_the_same_steps_as_training(tmp_path):
    session, profiled, _, _ = picture(tmp_path)
    model = session.build().train()
    trainer = Trainer(session, model, tmp_path)
    assert profiled.progress.step == 2
    from gradus.measure.profile import endless

    steps = endless(trainer.loader)
    for _ in range(2):
        trainer.take(next(steps))
    for a, b in zip(profiled.model.parameters(), trainer.model.parameters()):
        assert torch.equal(a, b), "marking places changes nothing"
    assert "losses" not in vars(session.task) and "step" not in vars(session.precision), "the marks are taken off again"


@pytest.mark.slow
def test_background_workers(tmp_path):
    assert any("wrote" in line for line in profile(tiny(**{"data.workers": 1}), tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--to="):
        next(profile(tiny(), tmp_path / "file" / "below"))
