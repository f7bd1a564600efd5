"""Every collective does what its name says over gloo and over MPI; the rows follow nccl-tests' definitions; the fit finds what was put in."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # also in the processes that a test starts
import distributed

from gradus import cli
from gradus.errors import UserError
from gradus.measure import collectives
from gradus.parallel import world as worlds
from gradus.rows import read_rows

no_mpi = "mpi4py is not installed" if importlib.util.find_spec("mpi4py") is None else "no mpirun on PATH" if not shutil.which("mpirun") else ""
needs_mpi = pytest.mark.skipif(bool(no_mpi), reason=no_mpi)
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1"}


def check(maker, world) -> None:
    """Each collective on arrays that tell rank and place: whole = 100 rank + (0, 1, 2, ...), part = 100 rank + 1000 + (0, 1, ...)."""
    n, p, rank = 3, world.size, world.rank
    all_ranks = range(p)

    def whole(r: int) -> np.ndarray:
        return 100.0 * r + np.arange(n * p)

    def part(r: int) -> np.ndarray:
        return 100.0 * r + 1000 + np.arange(n)

    summed = sum(whole(r) for r in all_ranks)
    mine = slice(rank * n, (rank + 1) * n)
    root_only = {"gather", "reduce"}
    expected = {
        "broadcast": ("whole", whole(0)),
        "scatter": ("part", whole(0)[mine]),
        "gather": ("whole", np.concatenate([part(r) for r in all_ranks])),
        "reduce": ("whole", summed),
        "all_reduce": ("whole", summed),
        "reduce_scatter": ("part", summed[mine]),
        "all_gather": ("whole", np.concatenate([part(r) for r in all_ranks])),
        "all_to_all": ("other", np.concatenate([whole(r)[mine] for r in all_ranks])),
    }
    assert tuple(expected) == collectives.COLLECTIVES
    for name, (where, value) in expected.items():
        made = maker(world, n)
        made.whole[:] = torch.from_numpy(whole(rank)).float() if isinstance(made.whole, torch.Tensor) else whole(rank)
        made.part[:] = torch.from_numpy(part(rank)).float() if isinstance(made.part, torch.Tensor) else part(rank)
        made.calls[name]()
        made.wait()
        if rank == 0 or name not in root_only:
            np.testing.assert_array_equal(np.asarray(getattr(made, where)), value, err_msg=f"{name} on rank {rank}")
    made.barrier()
    np.testing.assert_array_equal(made.slowest([rank + 1.0, p - rank]), [p, p])


def on_gloo(world) -> list:
    check(collectives.TorchCollectives, world)
    rows = collectives.measure(world, (5000, 1000, 20000), collectives=("all_reduce", "scatter"))
    return [(r.name, r.value, r.conditions) for r in rows]


def test_gloo():
    per_rank = distributed.run(3, on_gloo)
    assert per_rank[0] == per_rank[1] == per_rank[2]  # times are of the slowest
    found = {(name, c.get("bytes")): (value, c) for name, value, c in per_rank[0]}
    assert {b for _, b in found} == {1008, 5004, 20004, None}  # whole float32 for each of 3
    for name, factor in (("all_reduce", 2 * 2 / 3), ("scatter", 2 / 3)):
        for n_bytes in (1008, 5004):
            t, c = found[f"collective/{name}/time", n_bytes]
            low, high = c["quartiles"]
            assert 0 < low <= t <= high and collectives.LEAST <= c["calls"] <= collectives.MOST
            assert found[f"collective/{name}/algorithm_bandwidth", n_bytes][0] == pytest.approx(n_bytes / t)
            assert found[f"collective/{name}/bus_bandwidth", n_bytes][0] == pytest.approx(n_bytes / t * factor)
        assert found[f"collective/{name}/latency", None][0] >= 0
        assert c["backend"] == "gloo" and c["processes"] == 3 and c["versions"]["torch"] == torch.__version__


@pytest.mark.slow
@needs_mpi
def test_under_mpirun():
    done = subprocess.run(
        ["mpirun", "-n", "3", sys.executable, __file__], env=os.environ | AS_ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 3
    for backend in ("mpi", "gloo"):
        assert done.stdout.count(f"{backend}, 3 processes") == 1  # the first speaks for all
    assert done.stderr.count("error: --processes 4: Open MPI has started 3.") == 3


def under_mpirun() -> None:
    check(collectives.MpiCollectives, worlds.find())
    print("right", flush=True)
    assert cli.main(["collectives", "--processes", "4", "--sizes", "1KiB"]) == 2
    assert cli.main(["collectives", "--backend", "mpi", "--sizes", "1KiB"]) == 0
    from mpi4py import MPI

    MPI.Finalize()  # a process that has begun with MPI must end with it
    cli.main(["collectives", "--backend", "gloo", "--sizes", "1KiB"])  # ends this process
    raise AssertionError("still here")


def test_fit():
    sizes = [2**k for k in range(10, 25, 2)]
    alpha, beta, error = collectives.fit(sizes, [50e-6 + n / 2e9 for n in sizes])
    assert alpha == pytest.approx(50e-6) and beta == pytest.approx(2e9) and error < 1e-9
    # every size weighs alike: all 10 % off in turn leaves both near
    wavy = [(50e-6 + n / 2e9) * (1.1 if i % 2 else 0.9) for i, n in enumerate(sizes)]
    alpha, beta, error = collectives.fit(sizes, wavy)
    assert alpha == pytest.approx(50e-6, rel=0.1) and beta == pytest.approx(2e9, rel=0.1) and 0.05 < error < 0.2
    assert collectives.fit([1e3, 1e6], [1e-6, 2e-3])[0] == 0.0  # never a negative latency
    assert collectives.fit([1e3, 1e6], [2e-3, 1e-3])[1] == float("inf")  # nor a negative bandwidth
    # against the general solver
    rng = np.random.default_rng(0)
    t = np.array([1e-4 + n / 1e9 for n in sizes]) * rng.uniform(0.8, 1.2, len(sizes))
    design = np.stack([1 / t, np.array(sizes) / t / 1e6], axis=1)
    best = np.linalg.solve(design.T @ design, design.T @ np.ones(len(t)))
    assert collectives.fit(sizes, t)[:2] == pytest.approx((best[0], 1e6 / best[1]))


def test_bus_factors():
    at_4 = {name: factor(4) for name, factor in collectives.BUS_FACTOR.items()}
    three_quarters = dict.fromkeys(("scatter", "gather", "reduce_scatter", "all_gather", "all_to_all"), 0.75)
    assert at_4 == {"broadcast": 1.0, "reduce": 1.0, "all_reduce": 1.5} | three_quarters


@pytest.mark.slow
def test_the_verb_starts_its_workers(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    for times in (1, 2):  # rows are added
        assert cli.main(["collectives", "--processes", "2", "--sizes", "1KiB,2KiB,16KiB", "--to", str(file)]) == 0
        assert sum(r["name"].endswith("/time") for r in read_rows(file)) == times * 8 * 3
    said = capsys.readouterr().out
    rows = read_rows(file)
    assert {r["collective"] for r in rows} == set(collectives.COLLECTIVES) and {r.get("bytes") for r in rows} == {1024, 2048, 16384, None}
    assert all(f"\n{name} " in said for name in collectives.COLLECTIVES) and "2 processes" in said and "fitted" in said


@needs_mpi
def test_the_verb_starts_mpirun(tmp_path, capfd):
    assert cli.main(["collectives", "--processes", "2", "--backend", "mpi", "--sizes", "1000", "--to", str(tmp_path / "rows.jsonl")]) == 0
    said = capfd.readouterr().out
    assert said.startswith("mpi, 2 processes") and "mpi4py 4" in said and "fitted" not in said  # one size fits no line
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 8 * 3 and rows[0]["bytes"] == 1000 and rows[0]["backend"] == "mpi"


def test_sizes():
    assert collectives.parse_sizes("1KiB, 2MiB,1kB,7,1KiB") == (7, 1000, 1024, 2 * 2**20)
    for text, named in (("", "''"), ("1KiB,,2KiB", "''"), ("x", "'x'"), ("-1", "'-1'"), ("١٢", "'١٢'"), ("0", "at least 1 byte"), ("3XB", "'XB' is not a unit of bytes")):
        with pytest.raises(UserError, match=named):
            collectives.parse_sizes(text)


def test_what_cannot_be(monkeypatch, capsys, tmp_path):
    def told(*args: str) -> str:
        assert cli.main(["collectives", *args]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "Did you mean gloo?" in told("--backend", "glo")
    assert "''" in told("--sizes", "")
    assert "at least 2 processes" in told("--processes", "1")
    assert "1KiB;2KiB" in told("--sizes", "1KiB;2KiB")
    assert "No such file" in told("--to", str(tmp_path / "none" / "rows.jsonl"))
    if not torch.cuda.is_available():
        assert "here: 0 GPUs" in told("--backend", "nccl")
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("mpi4py"):
        assert "mpirun -n 4 gradus collectives --backend mpi" in told("--backend", "mpi")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert "of the extra mpi: pip install" in told("--backend", "mpi")


if __name__ == "__main__":
    under_mpirun()
