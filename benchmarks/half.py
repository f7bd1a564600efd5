"""The step at which training in fp16 alone (`.half()`, layout.precision=pure_fp16) stops with AdamW's own eps of 1e-8, which Gradus refuses:

    python benchmarks/half.py data.path=FOLDER            CIFAR-10 with the keys of experiments/half-precision.yaml: a minute a seed
    python benchmarks/half.py data.path=FOLDER --write    rows to benchmarks/results/half-cpu.jsonl

A row a seed: the first step whose loss is not a number, or 625 (two epochs) where none was.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path

import yaml

from gradus import recipe as recipes
from gradus.measure.machine import conditions
from gradus.measure.profile import endless
from gradus.rows import Row, as_lines
from gradus.train.loop import Trainer
from gradus.train.session import open_session


def main(words: list[str]) -> None:
    write, overrides = "--write" in words, [word for word in words if word != "--write"]
    study = yaml.safe_load(Path("experiments/half-precision.yaml").read_text())
    rows = []
    for seed in study["seeds"]:
        keys = [*study["set"], "layout.precision=pure_fp16", f"train.seed={seed}", *overrides]
        session = open_session(recipes.load(study["recipe"], keys))
        trainer = Trainer(session, session.lay_out(), Path(os.devnull), [])
        losses = (float(trainer.take(step).loss) for step in itertools.islice(endless(trainer.loader), 624))
        stops = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), 625)
        rows.append(Row("stops/step", stops, "", None, {"seed": seed, "eps": 1e-8, **conditions()}))
        print(rows[-1].json(), flush=True)
    if write:
        Path("benchmarks/results/half-cpu.jsonl").write_text(as_lines(rows))


main(sys.argv[1:])
