from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the *_parts.py; workers get this process's path
from tokenizer_parts import texts  # noqa: F401


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GRADUS_CACHE", str(folder))
    return folder
