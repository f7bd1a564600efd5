"""Studies and ladders that several files of this folder test with."""

from __future__ import annotations

from pathlib import Path

import torch

from gradus import recipe as recipes
from gradus.proof.optimizations import LadderContext, Optimization
from gradus.proof.study_store import StudyStore

TINY = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=4",
        "batch.samples=8", "train.steps=8", "evaluate.samples=0", "layout.device=cpu", "layout.threads=1"]  # fmt: skip
SLEEPER = """
import time
from gradus.proof.timing import Subject

def sleeper(recipe, options):
    seen = [0]
    def step(batch):
        seen[0] += 2
        time.sleep(options["seconds"])
        return 1.0 / seen[0]
    return Subject(lambda: None, step, lambda: seen[0])
"""


def written(folder: Path, text: str) -> Path:
    (folder / "own.py").write_text(SLEEPER)
    (folder / "some.yaml").write_text(text)
    return folder / "some.yaml"


OWN = """
runner: own.py:sleeper
steps: 3
warm_up: 1
rounds: 2
configurations:
  slow: {options: {seconds: 0.1}}
  fast: {options: {seconds: 0.005}}
"""


def of_samples(study, samples) -> StudyStore:
    """As if these had been measured: configuration → samples."""
    store = StudyStore.__new__(StudyStore)
    store.study, store.samples, store.common = study, samples, {}
    return store


COPY = ["copy-task", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8",
        "schedule.warmup_steps=2", "batch.samples=16", "train.steps=4", "layout.device=cpu", "layout.threads=1"]  # fmt: skip
NAIVE = recipes.load("copy-task", [*COPY[1:], "layout.attention=naive"])
KERNEL = Optimization("kernel", lambda *_: [{"layout.attention": "sdpa"}, {"layout.attention": "chunked"}])


def context(goal: str = "speed", original=NAIVE) -> LadderContext:
    return LadderContext(goal, torch.device("cpu"), original, None, 16)
