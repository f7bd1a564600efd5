"""docs/your-data.md, docs/train.md, docs/adapters.md and docs/chats.md: the pages run from top to bottom in an empty folder, their trainings cut short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli import main

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "your-data.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:-1]  # the last has no commands
DOOR = (DOCS / "train.md").read_text(encoding="utf-8")
ADAPTERS, CHATS = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("adapters", "chats"))


def commands(section: str) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))


def test_every_section_goes_from_nothing_to_an_answer():
    assert len(SECTIONS) == 4
    for section in SECTIONS:
        verbs = re.findall(r"^gradus (\w+)", commands(section), flags=re.MULTILINE)
        assert [v for v in verbs if v not in ("predict", "generate")] == ["new", "check", "train", "evaluate", "export"]
        assert {"predict", "generate"} & {*verbs}


@pytest.mark.docs
@pytest.mark.parametrize("section", [*SECTIONS, DOOR, ADAPTERS, CHATS], ids=lambda s: s.partition("\n")[0])
def test_the_page_runs(tmp_path, monkeypatch, capsys, section):
    """Lines that call gradus in this process, all else by a shell."""
    if "transformers" in section:
        pytest.importorskip("transformers")
    if "PIL" in section:
        pytest.importorskip("PIL")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tools / "python").chmod(0o755)
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("gradus.proof.check.WAIT", 1.0)  # whether this machine loads data fast enough is no matter of the page
    # a page's own training takes minutes
    short = re.sub(r"^(gradus train \S+)(.*?)( train\.steps=\d+|$)", r"\1 train.steps=4\2", commands(section), flags=re.MULTILINE).replace("llama3.1-8b", "gpt2-small")
    for part in re.split(r"^(gradus .*)$", short, flags=re.MULTILINE):
        if part.startswith("gradus "):
            assert main(shlex.split(part)[1:]) == 0, part
        elif part.strip():
            subprocess.run(["sh", "-e", "-c", part], check=True, timeout=300)
    if "predict" in section and "model=" in section:
        assert re.search(r"^(good|bad) 0\.\d+, (good|bad) ", capsys.readouterr().out, re.MULTILINE)
