"""The list of planted mistakes holds: each still stands where it says, and has a test. `python tests/mutations.py` tries them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import LAYOUTS, LIST, REPOSITORY, ROOMS, room


def test_every_room_and_layout_has_one():
    assert len(LIST) >= 40 and {room(m) for m in LIST} == set(ROOMS) and {m.layout for m in LIST} == {*LAYOUTS, ""}
    here = {path.stem for path in (REPOSITORY / "src/gradus").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert here <= set(ROOMS)


def test_each_stands_once_in_its_file_and_has_a_test():
    for m in LIST:
        text = (REPOSITORY / "src/gradus" / m.file).read_text(encoding="utf-8")
        assert text.count(m.old) == 1, f"{m.file}: {m.old!r} stands {text.count(m.old)} times: change tests/mutations.py with it"
        file, _, name = m.test.partition("::")
        assert not name or f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), m.test
