"""A study of sleeping runners, measured once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus.cli import main
from gradus.errors import UserError
from gradus.proof import harness
from gradus.rows import read_rows

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import OWN, written  # noqa: E402


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    file = written(folder, OWN)
    assert main(["study", str(file), "--to", str(folder / "out")]) == 0
    return file, folder / "out", {(r["name"], r["configuration"]): r for r in read_rows(folder / "out/rows.jsonl")}


@pytest.fixture
def unmeasured(monkeypatch):
    """Starts no process: what would be measured fails."""

    def fail(*args, log):
        raise UserError("nothing is measured here")

    monkeypatch.setattr(harness, "run_group", fail)
