from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "r.yaml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write
