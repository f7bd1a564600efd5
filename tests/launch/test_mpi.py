"""Trainings under mpirun, with the gradients summed by torch.distributed or by MPI itself."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli import main
from gradus.errors import UserError
from gradus.parallel.world import load_mpi

sys.path[:0] = [str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402

TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.dropout=0.0", "data.n_train=64", "data.n_valid=16",
    "batch.samples=16", "train.steps=6", "optimizer.eps=1e-4", "layout.device=cpu", "layout.threads=1", "log.every=1",
]  # fmt: skip


def losses(folder) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r["value"] for r in rows if r["name"] == "train/loss"]


EACH = """
import contextlib, json, sys
from gradus import cli
from gradus.parallel import world
from gradus.proof import prove
planner = prove.Planner()  # of both, as it begins before MPI does
prove.Planner = lambda: contextlib.nullcontext(planner)
world.leave(max([cli.run(words) for words in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_mpirun_trains_as_one_process_does(no_plan, tmp_path):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    assert main(["train", "copy-task", *TINY, f"log.dir={tmp_path / 'one'}"]) == 0
    layouts = {"ddp": [], "mpi": ["layout.replicate=manual", "layout.transport=mpi"]}
    trainings = [["train", "copy-task", *TINY, *layout, f"log.dir={tmp_path / name}"] for name, layout in layouts.items()]
    done = subprocess.run([*mpirun, sys.executable, "-c", EACH, json.dumps(trainings)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder") == 2 and "Traceback" not in done.stderr
    assert done.stdout.count("plan: tensors") == 1 and "no plan (layout.replicate=manual, transport=mpi: it cannot be traced" in done.stdout
    assert len(losses(tmp_path / "one")) == 6
    for name in ("ddp", "mpi"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


ON_MPI = ["train", "copy-task", *TINY, "layout.replicate=manual", "layout.transport=mpi"]


def under_torchrun(folder) -> str:
    """What a run with MPI's transport says on standard error when torchrun starts it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradus"]
    command = [*torchrun, *ON_MPI, f"log.dir={folder}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180).stderr


def test_processes_are_not_for_mpi(tmp_path, capsys):
    assert main([*ON_MPI, f"log.dir={tmp_path / 'run'}", "--processes", "2"]) == 2  # before anything is started
    assert "mpirun -n 2 gradus train" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_mpi_without_its_library_says_what_to_install(tmp_path):
    """mpi4py's wheel installs without an MPI library, and looks for one when it is imported."""
    (said,) = run(1, _what_is_said_without_it, environment={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert "layout.transport=mpi: mpi4py is installed, but no MPI library (cannot load MPI library). Install one" in said


def _what_is_said_without_it(world) -> str:
    with pytest.raises(UserError) as told:
        load_mpi("layout.transport=mpi")
    return str(told.value)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_mpi_without_mpirun_says_how_to_start(tmp_path):
    said = under_torchrun(tmp_path / "run")
    assert "MPI sees 1 process(es), the layout 2. Start with mpirun: mpirun -n 2 gradus train" in said
