"""Each name of prices.txt is a test's or a fixture's that is there; and what takes more than its price fails the run and is tried once more."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def ours(pytestconfig):
    """tests/conftest.py, as pytest has it."""
    return next(p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", None) == str(HERE / "conftest.py"))


def test_what_may_take_more_is_there(ours):
    for line in ours.excepted():
        file, _, name = line.partition("::")
        assert re.search(rf"\ndef {name}\(", (HERE / file).read_text()), f"tests/prices.txt: {line}: no such test or fixture"


@pytest.mark.parametrize(("ended", "failed", "more"), [(0, 1, ["tests/a.py::b[c]"]), (1, 1, ["tests/a.py::b[c]"]), (2, 2, [])])
def test_what_takes_more_fails_the_run_and_is_tried_once_more(ours, monkeypatch, ended, failed, more):
    for name in ("GRADUS_PLANTED", "COVERAGE_PROCESS_START", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    limit = ours.NOISE * ours.PRICES["quick"]
    took = {"tests/a.py::b[c]": (limit + 0.1, False), "tests/a.py::d": (limit - 0.1, False), "tests/a.py::e": (limit + 0.1, True), f"tests/{ours.excepted()[0]}[f]": (99.0, False)}
    monkeypatch.setattr(ours, "_took", {test: (*values, test) for test, values in took.items()})
    kept = {"cache/lastfailed": {"tests/g.py::h": True}}
    plugins, cache = SimpleNamespace(hasplugin=lambda name: True), SimpleNamespace(get=kept.get, set=kept.__setitem__)
    session = SimpleNamespace(exitstatus=ended, config=SimpleNamespace(pluginmanager=plugins, cache=cache))
    ours.pytest_sessionfinish(session, ended)
    assert ours.pytest_sessionfinish.pytest_impl["trylast"], "what failed is kept before"
    assert session.exitstatus == kept["gradus/exit"] == failed
    assert list(kept["cache/lastfailed"]) == ["tests/g.py::h", *more]
