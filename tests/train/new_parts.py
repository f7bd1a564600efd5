"""Small data of every kind, and a recipe for them."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import yaml

from gradus.train import resolve

TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16}


def table(path, rows, header=("id", "review", "sentiment")):
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def reviews(n=60, classes=("bad", "good", "fair")):
    return [(i, f"film {i % 7} was {classes[i % len(classes)]} !", classes[i % len(classes)]) for i in range(n)]


def pictures(folder, classes=("ant", "bee", "cat"), n=12, size=8):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def recipe_of(tmp_path, path, **more):
    model = {"family": "bert", **TINY, "seq_len": 32}
    sections = {
        "task": {"name": "classification"}, "model": model, "data": {"kind": "labelled", "path": str(path)},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 1},
    }  # fmt: skip
    for section, keys in more.items():
        sections[section] = (
            keys
            if keys is None or (section == "model" and {"preset", "init"} & set(keys))
            else sections[section] | keys
        )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(sections))
    return resolve.load(str(tmp_path / "r.yaml"), [])[0]
