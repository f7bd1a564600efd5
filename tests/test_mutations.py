"""The list of planted mistakes holds: each still stands where it says, and has a test. `python tests/mutations.py` tries them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import REPOSITORY, room
from planted import LAYOUTS, LIST

from gradus.recipe.schema import MODELS, TASKS

OTHERS = {"errors", "files", "rows", "text"}  # what holds a room's work in one file


def test_every_room_layout_family_and_task_has_one():
    assert len(LIST) >= 120 and {m.layout for m in LIST} == {*LAYOUTS, ""}
    rooms = {path.name for path in (REPOSITORY / "src/gradus").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms | {"cli", "api", "completion", "demo"} | OTHERS == {room(m) for m in LIST}
    named = {word for m in LIST for word in m.of.split()}
    assert {*MODELS, *TASKS} - {"copy"} <= named


def test_each_stands_once_in_its_file_and_has_a_test():
    for m in LIST:
        text = (REPOSITORY / "src/gradus" / m.file).read_text(encoding="utf-8")
        assert text.count(m.old) == 1, f"{m.file}: {m.old!r} stands {text.count(m.old)} times: change tests/planted.py with it"
        file, _, name = m.test.partition("::")
        assert m.test and (not name or f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")), f"{m.file}: {m.test}"
