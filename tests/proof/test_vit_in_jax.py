"""The ViT of experiments/vit_jax.py against Gradus's: the same logits, the same losses, on one device and on eight virtual ones."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.cli import main
from gradus.errors import UserError
from gradus.proof import study_file
from gradus.recipe.schema import ViTConfig
from gradus.rows import read_rows

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
STUDY = FOLDER / "vit-in-jax.yaml"
SMALL = ["data.path=null", "data.source=digits", "data.mean=null", "data.std=null", "data.limit=1280", "model.n_channels=1", "model.image_size=8", "model.patch_size=4",
         "model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "optimizer.lr=0.05", "layout.threads=1"]  # fmt: skip


@pytest.fixture
def jax(monkeypatch):
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
        why = "no jax and optax here: pip install -c constraints.txt -e '.[jax]'"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    import jax

    monkeypatch.setenv("PJRT_NPROC", "1")
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)  # of this process, which has other tests
    return jax


def recipe_of(name: str, *words: str):
    study, _ = study_file.load(STUDY, [*SMALL, *words])
    return next(c for c in study.configurations if c.name == name).recipe


@pytest.mark.slow  # XLA compiles
def test_logits_and_20_losses_are_ours(jax, tmp_path):
    """Every tensor drawn anew, since a new model's biases and classifier are 0; PyTorch's own SGD and cross entropy."""
    import optax

    model = models.build(ViTConfig(image_size=12, patch_size=4, n_layers=1, d_model=24, n_heads=3, d_ff=40, n_classes=5), seed=0)
    images, labels = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        wanted = model(images)
    models.save(model, tmp_path)
    made = runpy.run_path(str(FOLDER / "vit_jax.py"))
    params, config = made["load"](tmp_path)
    found = torch.tensor(jax.jit(lambda *given: made["vit"](*given, config))(params, images.numpy()).tolist())
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()

    theirs, ours = optax.sgd(0.02, 0.9), torch.optim.SGD(model.parameters(), 0.02, 0.9)
    step, state, losses = jax.jit(made["step_of"](config, theirs), donate_argnums=(0, 1)), theirs.init(params), []
    for _ in range(20):
        ours.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        ours.step()
        params, state, value = step(params, state, images.numpy(), labels.numpy())
        assert float(value) == pytest.approx(loss.item(), rel=1e-4)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    made["save"](params, tmp_path)
    for name, tensor in models.load(tmp_path).state_dict().items():
        assert torch.allclose(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5), name


def test_a_step_that_is_another_is_refused():
    with pytest.raises(UserError, match=r"Set train.clip_norm=null layout.compile=none\."):
        runpy.run_path(str(FOLDER / "runners.py"))["in_jax"](recipe_of("JAX, jit", "train.clip_norm=1", "layout.compile=default"), {})


def test_without_jax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(UserError, match=r"experiments/vit_jax.py needs the package jax .*extra jax: pip install"):
        runpy.run_path(str(FOLDER / "runners.py"))["in_jax"](recipe_of("JAX, jit"), {})


def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(UserError, match=r"^8 devices cannot share a batch of 12\. Set batch.samples to a multiple of 8"):
        runpy.run_path(str(FOLDER / "runners.py"))["in_jax"](recipe_of("JAX, jit", "batch.samples=12"), {"devices": 8})


@pytest.mark.slow
def test_the_study_small(jax, tmp_path):
    """The recipe's own steps by Gradus and by JAX on one device and on eight, each in a process of its own."""
    assert main(["study", str(STUDY), *SMALL, "--rounds", "1", "--only", "PyTorch eager,8 virtual", "--to", str(tmp_path / "out")]) == 0
    rows = {(r["configuration"], r["name"]): r for r in read_rows(tmp_path / "out/rows.jsonl") if r["kind"] == "measured"}
    losses = {r["configuration"]: r["ranks"][0]["losses"] for r in read_rows(tmp_path / "out/samples.jsonl")}
    ours = losses.pop("PyTorch eager")
    assert len(ours) == 20 and min(ours) < 0.96 * ours[0] and len(losses) == 2
    for name, found in losses.items():
        assert found == pytest.approx(ours, rel=1e-4) and rows[name, "check/logits"]["value"] <= 1e-5
        assert rows[name, "time/step"]["devices"] == (8 if "8" in name else 1)
