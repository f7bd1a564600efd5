"""What every test shares: a seed, one thread, and the folder of real data."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import tempfile
import time
from pathlib import Path

import gradus  # noqa: F401  (before torch, as in every process of ours)

# isort: split
import pytest
import torch

with contextlib.suppress(ImportError):  # a machine with a GPU may have pytest alone
    from hypothesis import HealthCheck, settings

    # As its own profile for CI: how long an example takes is a matter of the machine. What that one has beside it (CI=true) stays.
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")

NO_TIME = "no time left for it"
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:  # which has this process's environment
        no_files_of_the_user(config)
    os.environ["GRADUS_FAULTS"] = f"{os.environ['XDG_CONFIG_HOME']}/faults-{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with Ctrl-C ignored, and so would what tests start
    torch.set_num_threads(1)  # of fixtures that come before the first test too
    os.environ["GRADUS_NO_CALIBRATE"] = "1"  # no run that a test starts measures this machine first


def no_files_of_the_user(config):
    """No hardware, prices or grid of whoever runs the tests."""
    folder = tempfile.TemporaryDirectory(prefix="gradus-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CONFIG_HOME"] = folder.name
    for kind in ("HARDWARE", "PRICES", "GRID"):
        os.environ.pop(f"GRADUS_{kind}", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Before the fixtures of a module too, which would draw another model after other tests. GRADUS_UNTIL=SECONDS of the clock, as .ci/run sets it for
    the second of its runs: no test begins later."""
    if time.time() > float(os.environ.get("GRADUS_UNTIL", "inf")):
        pytest.skip(NO_TIME)
    os.environ.pop("PYTHONSAFEPATH", None)  # which the command line sets for what it starts
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_faults_of_the_planner():
    """A run whose plan fails goes on, with one line that nobody may read: whatever a test starts, it fails the test."""
    yield
    faults = Path(os.environ["GRADUS_FAULTS"])
    if faults.exists():
        text = faults.read_text()
        faults.unlink()
        pytest.fail(f"no plan ({text.strip()})")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout. Skips where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return SHARED_DATA


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Where the real data must be there (CI), a test that needs them and was skipped has failed."""
    outcome = yield
    report = outcome.get_result()
    needed = os.environ.get("GRADUS_REQUIRE_SHARED_DATA") and "shared_data" in item.fixturenames
    if report.skipped and needed and NO_TIME not in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"skipped, though the real data must be there: {report.longrepr}"


def pytest_runtest_logreport(report):
    """GRADUS_TESTED=FILE, as .ci/run sets it for the first of its two runs: the names of what passed."""
    if (path := os.environ.get("GRADUS_TESTED")) and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(f"{report.nodeid}\n")


def pytest_sessionfinish(session, exitstatus):
    """For .ci/run, which runs once more what failed: 1 if tests failed, more if the run did not end."""
    if "PYTEST_XDIST_WORKER" not in os.environ and session.config.pluginmanager.hasplugin("cacheprovider"):
        session.config.cache.set("gradus/exit", int(exitstatus))


def pytest_terminal_summary(terminalreporter):
    """How much the tests of the pages looked at: the sums of what they recorded; and how many tests there was no time for."""
    late = sum(NO_TIME in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if late:
        terminalreporter.write_line(f"tests not begun, {NO_TIME}: {late}")
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            counts[name] = counts.get(name, 0) + value
    if counts:
        terminalreporter.write_line(", ".join(f"{name}: {value:,}" for name, value in counts.items()))


def pytest_collection_modifyitems(config, items):
    """GRADUS_BUT=FILE: those are left out, as in the second; its files come in an order of GRADUS_ORDER's, so that what a slow machine has no time for
    is not always the same."""
    if order := os.environ.get("GRADUS_ORDER"):
        items.sort(key=lambda item: hashlib.sha256(f"{order} {item.nodeid.partition('::')[0]}".encode()).digest())
    if path := os.environ.get("GRADUS_BUT"):
        passed = set(Path(path).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


@pytest.fixture(scope="module")
def no_plan():
    """Trainings that a test starts here begin without a plan, which takes a process longer than a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradus.proof.prove.Planner", None)
        yield


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """A folder for them of this test alone."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
