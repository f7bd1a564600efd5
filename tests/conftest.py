"""What every test shares: a seed, one thread, no file of the user's, the folder of real data, and a price."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # here and in all that is started, a thread that waits leaves its processor to the other workers

import gradus  # noqa: F401  (before torch, as in every process of ours)

# isort: split
import pytest
import torch

with contextlib.suppress(ImportError):  # a machine with a GPU may have pytest alone
    from hypothesis import HealthCheck, settings

    # As its own profile for CI: how long an example takes is a matter of the machine. What that one has beside it (CI=true) stays.
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:  # which has this process's environment
        no_files_of_the_user(config)
    os.environ["GRADUS_FAULTS"] = f"{os.environ['XDG_CONFIG_HOME']}/faults-{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with Ctrl-C ignored, and so would what tests start
    torch.set_num_threads(1)  # of fixtures that come before the first test too
    gc.unfreeze = lambda: None  # as a trace ends: what was there before a test stays frozen (pytest_runtest_setup)
    os.environ["GRADUS_NO_CALIBRATE"] = "1"  # no run that a test starts measures this machine first


def no_files_of_the_user(config):
    """No hardware, prices or grid of whoever runs the tests, and nothing that earlier runs kept."""
    folder = tempfile.TemporaryDirectory(prefix="gradus-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ.update(XDG_CONFIG_HOME=folder.name, GRADUS_CACHE=f"{folder.name}/cache", HF_HOME=f"{folder.name}/hf")
    for kind in ("HARDWARE", "PRICES", "GRID"):
        os.environ.pop(f"GRADUS_{kind}", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Before the fixtures of a module too, which would draw another model after other tests."""
    gc.collect()
    gc.freeze()  # so that the collections that a test causes go through its own objects alone
    os.environ.pop("PYTHONSAFEPATH", None)  # which the command line sets for what it starts
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """What a test takes is counted from here. `make coverage`: the lines that it runs, and those of processes that it starts, are kept under its name."""
    if "COVERAGE_PROCESS_START" in os.environ:
        from coverage import Coverage

        os.environ["GRADUS_TEST"] = item.nodeid
        Coverage.current().switch_context(item.nodeid)
    item.stash[BEGAN] = processor_seconds()
    yield


@pytest.fixture(scope="module")
def chromium():
    """Headless Chromium. Skips where there is none, unless it must be there (CI)."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        why = "no Chromium or no playwright package here (Debian: apt-get install chromium; pip install playwright)"
        pytest.fail(why) if os.environ.get("GRADUS_REQUIRE_BROWSER") else pytest.skip(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else [], timeout=120_000)
        yield browser
        browser.close()


# ---------------------------------------------------------------- the price of a test


PRICES = {"quick": 2.0, "slow": 30.0}  # processor seconds; tests/prices.txt names what may take more, and why
NOISE = 2.0  # where others use its memory and caches, a machine takes up to so many times the processor seconds for the same test
# processor seconds when a test began, and when it ended, before what it shares (a browser) is put away
BEGAN, ENDED = pytest.StashKey[float](), pytest.StashKey[float]()
_took: dict[str, tuple[float, bool, str]] = {}  # test or shared fixture → processor seconds, whether it is slow, and the test that ran it
LOOP = 0.055  # processor seconds of the loop below on a Xeon with AMX, for which the prices are
_imports = [0, 0.0]  # how deep in imports this process is, and the processor seconds that all took
_shared: list = [0, 0.0, {}]  # the same of fixtures that several tests share; and those of each


def _timed(load):
    """Modules are imported once a worker, by whatever test comes first: not that one's price."""

    def exec_module(self, module):
        start = time.process_time()
        _imports[0] += 1
        try:
            load(self, module)
        finally:
            _imports[0] -= 1
            if not _imports[0]:
                _imports[1] += time.process_time() - start

    return exec_module


SourceFileLoader.exec_module = _timed(SourceFileLoader.exec_module)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share has a price of its own, whichever of them comes first."""
    if fixturedef.scope == "function":
        yield
        return
    start = processor_seconds()
    _shared[0] += 1
    yield
    _shared[0] -= 1
    if not _shared[0]:
        took = processor_seconds() - start
        _shared[1] += took
        _shared[2][f"{request.node.nodeid}::{fixturedef.argname}"] = took / slowness()


def processor_seconds() -> float:
    """Of this process, without its imports and shared fixtures, and of all that tests started and waited for."""
    return sum(os.times()[:4]) - _imports[1] - _shared[1] + getattr(sys.modules.get("distributed"), "spent", 0.0)


@functools.cache
def slowness() -> float:
    """How many times slower this processor, busy as it is, runs a loop of Python than the one of the prices; at least 1."""
    start = time.process_time()
    sum(i * i for i in range(1_000_000))
    return max(1.0, (time.process_time() - start) / LOOP)


def excepted() -> list[str]:
    """What prices.txt names."""
    return [line for line in Path(__file__).with_name("prices.txt").read_text().splitlines() if line and line[0] != "#"]


def over_price(seconds: dict[str, tuple[float, bool, str]]) -> list[tuple[str, str]]:
    """Of `_took`: (the test that ran it, a line) for each that takes more than it may, the dearest first."""
    if {"COVERAGE_PROCESS_START", "GRADUS_PLANTED"} & set(os.environ):  # what takes longer, or is no test's own fault
        return []
    named = excepted()
    dear = [(took, name, "slow" if slow else "quick", test) for name, (took, slow, test) in seconds.items()]
    says = "{}: {:.1f} processor seconds, and a {} test may take {:g}: make it cheaper, or name it with its reason in tests/prices.txt"
    return [
        (test, says.format(name, took, kind, PRICES[kind]))
        for took, name, kind, test in sorted(dear, reverse=True)
        if took > NOISE * PRICES[kind] and name.partition("[")[0].removeprefix("tests/") not in named
    ]


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
    if report.when != "teardown":
        item.stash[ENDED] = processor_seconds()
    else:
        report.processor_seconds = {item.nodeid: (item.stash[ENDED] - item.stash[BEGAN]) / slowness(), **_shared[2]}
        _shared[2].clear()
    needed = os.environ.get("GRADUS_REQUIRE_SHARED_DATA") and "shared_data" in item.fixturenames
    if report.skipped and needed:
        report.outcome, report.longrepr = "failed", f"skipped, though the real data must be there: {report.longrepr}"


def pytest_runtest_logreport(report):
    """Keeps what each test took; and, in GRADUS_TESTED=FILE, the names of those that passed."""
    if (path := os.environ.get("GRADUS_TESTED")) and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(f"{report.nodeid}\n")
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
        slow = not {"slow", "docs"}.isdisjoint(report.keywords)
        _took.update({name: (seconds, slow, report.nodeid) for name, seconds in report.processor_seconds.items()})


@pytest.hookimpl(trylast=True)  # after the plugin that keeps what failed
def pytest_sessionfinish(session, exitstatus):
    """A test over its price fails the run; .ci/again runs it once more, as any that failed. Kept for that: 1 where tests failed, more where the run came
    to no end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    dear = over_price(_took) if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else []
    if dear:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.config.pluginmanager.hasplugin("cacheprovider"):
        cache = session.config.cache
        cache.set("cache/lastfailed", cache.get("cache/lastfailed", {}) | {test: True for test, _ in dear})
        cache.set("gradus/exit", int(session.exitstatus))
        cache.set("gradus/seconds", dict(sorted(_took.items(), key=lambda item: -item[1][0])))


def pytest_terminal_summary(terminalreporter):
    """How much the tests of the pages looked at: the sums of what they recorded; and which tests took more than they may."""
    for _, line in over_price(_took):
        terminalreporter.write_line(line)
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            counts[name] = counts.get(name, 0) + value
    if counts:
        terminalreporter.write_line(", ".join(f"{name}: {value:,}" for name, value in counts.items()))


def pytest_collection_modifyitems(config, items):
    """GRADUS_BUT=FILE, as .ci/run sets it for its second run: the tests named there are left out."""
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
