"""docs/your-data.md, docs/train.md, docs/adapters.md, docs/chats.md and docs/llama-cpp.md: the pages run from top to bottom in an empty folder, their
trainings cut short."""

from __future__ import annotations

import importlib.util
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
ADAPTERS, CHATS, LLAMA_CPP = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("adapters", "chats", "llama-cpp"))
PEERS = os.environ.get("GRADUS_PEERS", "")  # where llama-cpp-python is, if not beside Gradus (tests/infer/test_llama_cpp.py)
SMALLER = [  # of what a page makes or trains itself
    (r"^(gradus train \S+)(.*?)( train\.steps=\d+|$)", r"\1 train.steps=4\2"),
    ("llama3.1-8b", "gpt2-small"),
    (r"rglob\(\"\*", 'glob("a*'),  # of Python's standard library the files with an a
    ("n_layers: 4", "n_layers: 1"), ("d_model: 256", "d_model: 64"), ("d_ff: 768", "d_ff: 96"), ("vocab_size: 4096", "vocab_size: 512"),
    (r"warmup_steps: 100", "warmup_steps: 1"),
    (r"^gradus calibrate\n", ""), (" --on this", " --on H100"),  # test_commands.py measures this machine
]  # fmt: skip


def commands(section: str) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))


def test_every_section_goes_from_nothing_to_an_answer():
    assert len(SECTIONS) == 4
    for section in SECTIONS:
        verbs = re.findall(r"^gradus (\w+)", commands(section), flags=re.MULTILINE)
        assert [v for v in verbs if v not in ("predict", "generate")] == ["new", "check", "train", "evaluate", "export"]
        assert {"predict", "generate"} & {*verbs}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A page's commands: those that call gradus in this process, all else by a shell. Returns what is printed by what the shell runs."""
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

    def run(commands: str) -> str:
        for pattern, smaller in SMALLER:  # a page's own training takes minutes
            commands = re.sub(pattern, smaller, commands, flags=re.MULTILINE)
        printed = ""
        for part in re.split(r"^(gradus .*)$", commands, flags=re.MULTILINE):
            if part.startswith("gradus "):
                assert main(shlex.split(part)[1:]) == 0, part
            elif part.strip():
                printed += subprocess.run(["sh", "-e", "-c", part], check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout
        return printed

    return run


@pytest.mark.docs
@pytest.mark.parametrize("section", [*SECTIONS, DOOR, ADAPTERS, CHATS], ids=lambda s: s.partition("\n")[0])
def test_the_page_runs(run, capsys, section):
    if "transformers" in section:
        pytest.importorskip("transformers")
    if "PIL" in section:
        pytest.importorskip("PIL")
    run(commands(section))
    if "predict" in section and "model=" in section:
        assert re.search(r"^(good|bad) 0\.\d+, (good|bad) ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.docs
def test_from_a_text_to_llama_cpp(run, capsys, monkeypatch):
    """What llama.cpp writes is what Gradus writes; where llama-cpp-python is not installed, the page without its last command."""
    pytest.importorskip("gguf", reason="the extra gguf brings it")
    *others, last = re.split(r"^(?=python .*\nfrom llama_cpp)", commands(LLAMA_CPP), flags=re.MULTILINE)
    assert len(others) == 1 and last.startswith("python")
    run(others[0])
    printed = capsys.readouterr().out
    assert printed.count("checked against PyTorch in fp32") == 2
    if PEERS:
        monkeypatch.setenv("PYTHONPATH", PEERS)
        monkeypatch.syspath_prepend(PEERS)
    if importlib.util.find_spec("llama_cpp"):
        written = run(last).rstrip("\n")
        assert len(written) > 40 and written in printed
