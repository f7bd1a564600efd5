"""What the distribution says of itself, and what messages and pages say of installing it. The wheel itself: `make dist`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import gradus
from gradus import errors
from gradus.cli import main

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
FILES += [path for folder in ("src", "docs", "benchmarks", "experiments") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".html", ".ipynb")]


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def test_nothing_installs_another_project():
    """PyPI's `gradus` is a stranger's."""
    wrong = re.compile(r"pip3? install[^\n`]*[\s'\"]gradus(?![\w./-])|(?<![\w/])gradus\[(?=\w)")
    assert wrong.search("pip install gradus") and wrong.search("pip install 'gradus[hf]'") and not wrong.search("pip install './gradus_ml-0.1.0.whl[hf]'")
    found = {str(path.relative_to(ROOT)): match[0] for path in FILES if (match := wrong.search(path.read_text(encoding="utf-8")))}
    assert not found


def test_every_extra_that_the_code_names_is_one():
    named = {extra for path in (ROOT / "src").rglob("*.py") for extra in re.findall(r'(?:need\([^,()]+, |how_to_install\(["\'])"?(\w+)["\']', path.read_text(encoding="utf-8"))}
    assert {"hf", "vision", "track", "mpi", "gpu", "onnx", "report"} <= named and named - {"extra"} <= EXTRAS.keys()


def test_every_dependency_has_its_line():
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip().strip("`"): row for row in text.splitlines() if row.startswith("| ")}
    assert all(name_of(requirement) in rows for requirement in PROJECT["dependencies"])
    for extra, packages in EXTRAS.items():
        missing = [name for name in map(name_of, packages) if name not in rows[extra].lower() and name not in ("gradus-ml", "tensorboard")]
        assert not missing, f"{extra}: {missing}"


def test_every_dependency_is_pinned():
    pinned = {name_of(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = {name_of(requirement) for packages in (PROJECT["dependencies"], *EXTRAS.values()) for requirement in packages}
    assert {name.replace("-", "_") for name in wanted} - {name.replace("-", "_") for name in pinned} <= {"gradus_ml", "wandb"}


def test_the_installed_metadata_are_the_files():
    """Of whatever installed this: an editable checkout, or a wheel."""
    try:
        told = metadata.metadata("gradus-ml")
    except metadata.PackageNotFoundError:
        pytest.skip("gradus-ml is not installed here; these are sources on a path")
    assert told["Version"] == gradus.__version__ and told["License-Expression"] == "Apache-2.0"
    assert [name_of(line) for line in errors.requirements("vision")] == [name_of(line) for line in EXTRAS["vision"]]


def test_one_version_everywhere(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gradus {gradus.__version__}\n"
    assert re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == gradus.__version__
    assert f"gradus_ml-{gradus.__version__}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text()


def test_the_citation_is_one():
    """The fields that the format 1.2.0 asks for, and those whose values can drift."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and cited["title"] and cited["message"]
    assert cited["authors"] == [{"name": "The Gradus contributors"}]
    assert cited["version"] == gradus.__version__ and cited["license"] == PROJECT["license"]


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Copyright 2026 The Gradus contributors" in text and "[yyyy]" not in text
    assert re.findall(r"^   (\d)\. ", text, re.M) == [*"123456789"] and "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize(("user", "blocktime"), [({}, "1"), ({"KMP_BLOCKTIME": "9"}, "9"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_threads_of_intels_library_spin_shortly_where_the_user_set_nothing(user, blocktime):
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")} | user
    code = "import gradus, os; print(os.environ.get('KMP_BLOCKTIME'))"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == blocktime
