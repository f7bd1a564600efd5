"""What the tests of a report share: some small runs, and changed copies of one."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from html.parser import HTMLParser

import pytest
import yaml

from gradus import cli

TINY = "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 data.n_train=64 data.n_valid=16 batch.samples=16 evaluate.samples=0"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two finished runs and one that is not finished."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        for name, more in (("short", "train.steps=4"), ("long", "train.steps=8 layout.precision=bf16")):
            words = ["copy-task", *TINY.split(), *more.split(), "schedule.warmup_steps=2", "log.every=2", "evaluate.every=3"]
            with contextlib.redirect_stdout(io.StringIO()) as screen:
                assert cli.run(["train", *words, f"log.dir={folder / name}"]) == 0
            (folder / f"{name}.txt").write_text(screen.getvalue())
            patch.setattr("gradus.proof.prove.Planner", None)  # one of them has a plan
    shutil.copytree(folder / "long", folder / "stopped")
    (folder / "stopped" / "summary.json").unlink()
    (folder / "short" / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    return folder


class Tags(HTMLParser):
    """Which tags are open at the end, and what any of them would load."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.loads = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for key, value in attributes if key in ("src", "href", "xlink:href") and not value.startswith("#")]
        if tag in ("script", "link", "iframe", "object"):
            self.loads.append(tag)
        if tag not in ("meta", "br", "hr", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def variant(source, target, recipe=None, rows=None, **summary):
    """A copy of a run with other keys of the recipe, other rows, other entries of the summary."""
    shutil.copytree(source, target)
    if recipe:
        held = yaml.safe_load((target / "recipe.yaml").read_text())
        for key, value in recipe.items():
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, held)[last] = value
        (target / "recipe.yaml").write_text(yaml.safe_dump(held, allow_unicode=True))
    if rows is not None:
        (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        held = json.loads((target / "summary.json").read_text())
        (target / "summary.json").write_text(json.dumps(held | summary))
    return target


def rows_of(name, values, **more):
    return [{"name": name, "value": value, "step": step, "tokens": step * 100, "seconds": step / 10, **more} for step, value in values]
