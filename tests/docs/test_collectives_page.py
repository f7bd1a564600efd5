"""docs/message-passing.md, docs/collectives.md and docs/sampler.md: the programs they show are the files, and print what the pages say they print."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus import cli
from gradus.measure import collectives

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = DOCS / "programs"
HELLO = "learn/10-many-devices-data.md"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {  # unbuffered, lines of several processes mix
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def said(page: str, command: str) -> list[str]:
    """The lines that the page shows after this command."""
    (block,) = [b for b in blocks(page, "text") if b.startswith(f"$ {command}\n")]
    return block.splitlines()[1:]


def ran(*command: str | Path, folder: Path = PROGRAMS) -> list[str]:
    done = subprocess.run(list(map(str, command)), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "page, kind, file",
    [
        ("message-passing.md", "python", "scatter_mean_torch.py"),
        ("message-passing.md", "python", "scatter_mean_mpi.py"),
        ("message-passing.md", "c", "scatter_mean.c"),
        ("sampler.md", "python", "sampler_order.py"),
        (HELLO, "c", "hello.c"),
        (HELLO, "python", "hello_mpi.py"),
        (HELLO, "python", "hello_torch.py"),
    ],
)
def test_the_page_shows_the_file(page, kind, file):
    assert (PROGRAMS / file).read_text() in blocks(page, kind)


def test_every_program_is_on_a_page():
    shown = [text for page in ("message-passing.md", "sampler.md") for kind in ("python", "c") for text in blocks(page, kind)]
    shown += blocks(HELLO, "c") + blocks(HELLO, "python")[:2]
    assert sorted(shown) == sorted(f.read_text() for f in PROGRAMS.iterdir() if f.suffix in (".py", ".c"))


@pytest.mark.docs
def test_hello(tmp_path):
    def hello(*command: str | Path) -> list[str]:
        """What the processes say, in order of rank: torchrun starts them unbuffered, so that lines may run together."""
        return sorted(re.findall(r"hello from process \d of \d", "".join(ran(*command))))

    expected = said(HELLO, "torchrun --nproc-per-node 2 hello_torch.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    assert hello(*torchrun, "hello_torch.py") == expected
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
        assert hello("mpirun", "-n", 2, sys.executable, "hello_mpi.py") == expected
    if shutil.which("mpirun") and shutil.which("mpicc"):
        assert ran("mpicc", "-Wall", "-Werror", "-o", tmp_path / "hello", "hello.c") == []
        assert hello("mpirun", "-n", 2, tmp_path / "hello") == expected


@pytest.mark.docs
def test_torch():
    assert sorted(ran(sys.executable, "scatter_mean_torch.py")) == sorted(said("message-passing.md", "python scatter_mean_torch.py"))


@pytest.mark.docs
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun on PATH")
def test_mpi():
    lines = ran("mpirun", "-n", 4, sys.executable, "scatter_mean_mpi.py")
    assert sorted(lines) == sorted(said("message-passing.md", "mpirun -n 4 python scatter_mean_mpi.py"))


@pytest.mark.docs
@pytest.mark.skipif(not shutil.which("mpicc"), reason="no mpicc on PATH")
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun on PATH")
def test_c(tmp_path):
    assert ran("mpicc", "-Wall", "-Werror", "-o", tmp_path / "scatter_mean", "scatter_mean.c") == []
    lines = ran("mpirun", "-n", 4, tmp_path / "scatter_mean")
    assert sorted(lines) == sorted(said("message-passing.md", "mpicc -o scatter_mean scatter_mean.c && mpirun -n 4 ./scatter_mean"))


@pytest.mark.docs
def test_sampler_order():
    assert ran(sys.executable, "sampler_order.py") == "".join(blocks("sampler.md", "text")).splitlines()


def test_the_measured_tables_are_of_the_commands_shown():
    text = (DOCS / "collectives.md").read_text()
    commands = [line.strip().removeprefix("$ ") for line in text.splitlines() if line.strip().removeprefix("$ ").startswith("gradus collectives")]
    assert len(commands) >= 2
    for command in commands:
        args = cli.parse(shlex.split(command)[1:])
        assert args.verb == "collectives" and args.backend in collectives.BACKENDS
        assert collectives.parse_sizes(args.sizes)
    tables = [b for b in blocks("collectives.md", "text") if b.startswith("$ gradus collectives")]
    assert len(tables) == 2
    for table in tables:
        for name in collectives.COLLECTIVES:
            assert len(re.findall(rf"^{name} ", table, re.M)) == 4 + 1  # a line a size, and the fit
