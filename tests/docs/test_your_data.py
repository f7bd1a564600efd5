"""docs/your-data.md: the page runs from top to bottom in an empty folder, its trainings cut short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your-data.md"
SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:-1]  # the last has no commands


def commands(section: str) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))


def test_every_section_goes_from_nothing_to_an_answer():
    assert len(SECTIONS) == 4
    for section in SECTIONS:
        verbs = re.findall(r"^gradus (\w+)", commands(section), flags=re.MULTILINE)
        assert [v for v in verbs if v not in ("predict", "generate")] == [
            "new",
            "check",
            "train",
            "evaluate",
            "export",
        ] and len(verbs) == 6


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.partition("\n")[0])
def test_the_page_runs(tmp_path, section):
    if "transformers" in section:
        pytest.importorskip("transformers")
    if "PIL" in section:
        pytest.importorskip("PIL")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (("gradus", [sys.executable, "-m", "gradus"]), ("python", [sys.executable])):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (tools / name).chmod(0o755)
    (work := tmp_path / "work").mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "GRADUS_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    # a page's own training takes minutes
    short = re.sub(r"^(gradus train \S+)( train\.steps=\d+)?", r"\1 train.steps=4", commands(section), flags=re.MULTILINE)
    done = subprocess.run(["sh", "-e", "-c", short], cwd=work, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "predict" in section and "model=" in section:
        assert re.search(r"^(good|bad) 0\.\d+, (good|bad) ", done.stdout, re.MULTILINE)
