"""How long the eight collectives take between these processes, and the two numbers that sum it up: latency and
bandwidth.

Sizes and bandwidths are defined as in NVIDIA's nccl-tests (doc/PERFORMANCE.md there), so that the figures can be laid
beside theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradus import files, limits
from gradus.errors import UserError, did_you_mean, need
from gradus.hardware.units import quantity
from gradus.measure import machine
from gradus.parallel import world as worlds
from gradus.parallel.processes import run_group, run_program
from gradus.parallel.world import World
from gradus.rows import Row, RowFile
from gradus.signals import ended_by_sigterm
from gradus.text import duration, in_unit, say, width
from gradus.text import table as columns

# Bus bandwidth = algorithm bandwidth × this, for n processes: what the busiest link carried, whatever n is (nccl-
# tests).
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1.0,
    **dict.fromkeys(("scatter", "gather"), lambda n: (n - 1) / n),
    "reduce": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), lambda n: (n - 1) / n),
}
COLLECTIVES = tuple(BUS_FACTOR)
BACKENDS = ("gloo", "mpi", "nccl")
SIZES = tuple(2**k for k in range(10, 25, 2))  # 1 KiB to 16 MiB
WARM_UP, LEAST, MOST = 3, 7, 100  # calls before the clock runs; fewest and most calls that are timed
AIM = 0.1  # seconds for each collective and size

# torch 2.13 calls it so; its older name warns there
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives:
    """The eight collectives of torch.distributed on float32, root 0.

    whole: (n_processes * n,) and part: (n,) are this process's input or output as the collective has it; other:
    (n_processes * n,) is the second whole array of all_to_all.
    """

    def __init__(self, world: World, n: int, device: str = "cpu"):
        # filled, not zeros(): untouched zero pages would not come from memory
        self.whole, self.part, self.other = whole, part, other = [
            torch.empty(k, device=device).fill_(0) for k in (world.size * n, n, world.size * n)
        ]
        parts = list(whole.chunk(world.size)) if world.first else None  # views
        self.calls: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: dist.broadcast(whole, src=0),
            "scatter": lambda: dist.scatter(part, parts, src=0),
            "gather": lambda: dist.gather(part, parts, dst=0),
            "reduce": lambda: dist.reduce(whole, dst=0),
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: _torch_reduce_scatter(part, whole),
            "all_gather": lambda: _torch_all_gather(whole, part),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
        }
        # until the device has done it
        self.wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize

    @staticmethod
    def barrier() -> None:
        dist.all_reduce(torch.zeros(1))  # on the host, over gloo, with every backend

    @staticmethod
    def slowest(seconds: list[float]) -> np.ndarray:
        """(calls,) on every process: each call's time on the process where it took longest."""
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.numpy()


class MpiCollectives:
    """The same of MPI through mpi4py, on buffers: the methods with a capital letter, which pickle nothing."""

    def __init__(self, world: World, n: int):
        self.MPI = MPI = worlds.load_mpi("--backend mpi")
        self.all = everyone = MPI.COMM_WORLD
        self.whole, self.part, self.other = whole, part, other = [
            np.full(k, 0, np.float32) for k in (world.size * n, n, world.size * n)
        ]
        self.calls: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: everyone.Bcast(whole, root=0),
            "scatter": lambda: everyone.Scatter(whole, part, root=0),
            "gather": lambda: everyone.Gather(part, whole, root=0),
            "reduce": lambda: everyone.Reduce(MPI.IN_PLACE if world.first else whole, whole, root=0),
            "all_reduce": lambda: everyone.Allreduce(MPI.IN_PLACE, whole),
            "reduce_scatter": lambda: everyone.Reduce_scatter_block(whole, part),
            "all_gather": lambda: everyone.Allgather(part, whole),
            "all_to_all": lambda: everyone.Alltoall(whole, other),
        }
        self.wait, self.barrier = (lambda: None), everyone.Barrier

    def slowest(self, seconds: list[float]) -> np.ndarray:
        times = np.array(seconds)
        self.all.Allreduce(self.MPI.IN_PLACE, times, self.MPI.MAX)
        return times


def measure(
    world: World, sizes: tuple[int, ...], backend: str = "gloo", collectives: tuple[str, ...] = COLLECTIVES
) -> list[Row]:
    """Times each collective at each size between the processes of `world`, which have met. Every process calls it;
    every one gets the rows.

    sizes: bytes of the whole array, S in nccl-tests (a process's part is S / n_processes; rounded up to whole float32 a
    part, and the row has the bytes that went). backend: `gloo`, `nccl` (between GPUs) or `mpi` (MPI.COMM_WORLD).

    A call's time: after a barrier, each process takes the time until the call returns; the longest of these. The rows
    of a collective are `collective/NAME/time` (s: the median; conditions: quartiles, calls), `/algorithm_bandwidth` and
    `/bus_bandwidth` (bytes/s) for each size, then `/latency` (s) and `/bandwidth` (bytes/s; none where time does not
    grow with size) of the fit, from 3 sizes on: see `fit`.
    """
    assert world.size > 1, "a collective needs another process"
    common = conditions(world, backend)
    rows: list[Row] = []
    for name in collectives:
        points = []
        for size in sorted(sizes):
            n = -(-size // (4 * world.size))  # float32 a process
            n_bytes = 4 * n * world.size
            torch_device = "cuda" if backend == "nccl" else "cpu"
            group = MpiCollectives(world, n) if backend == "mpi" else TorchCollectives(world, n, torch_device)
            times = _time(group, name)
            low, median, high = (float(q) for q in np.percentile(times, (25, 50, 75)))
            points.append((n_bytes, median))
            of_size = {"collective": name, "bytes": n_bytes, **common}
            path, speed = f"collective/{name}", n_bytes / median
            rows += [
                Row(f"{path}/time", median, "s", conditions={**of_size, "quartiles": [low, high], "calls": len(times)}),
                Row(f"{path}/algorithm_bandwidth", speed, "bytes/s", conditions=of_size),
                Row(f"{path}/bus_bandwidth", speed * BUS_FACTOR[name](world.size), "bytes/s", conditions=of_size),
            ]
        if len({b for b, _ in points}) > 2:  # two points lie on a line whatever they are
            alpha, beta, error = fit(*zip(*points))
            how = "t = latency + bytes / bandwidth, least squares on relative errors"
            of_fit = {"collective": name, "fit": how, "largest_error": error, "sizes": [b for b, _ in points], **common}
            rows.append(Row(f"collective/{name}/latency", alpha, "s", conditions=of_fit))
            if np.isfinite(beta):
                rows.append(Row(f"collective/{name}/bandwidth", beta, "bytes/s", conditions=of_fit))
    return rows


def _time(group: TorchCollectives | MpiCollectives, name: str) -> np.ndarray:
    """(calls,) seconds of each call on the process where it took longest."""

    def once() -> float:
        group.barrier()
        start = time.perf_counter()
        group.calls[name]()
        group.wait()
        return time.perf_counter() - start

    # the same on every process, so that all agree on the number of calls
    warm = group.slowest([once() for _ in range(WARM_UP)])
    calls = int(min(MOST, max(LEAST, AIM / max(float(warm[-1]), 1e-9))))
    return group.slowest([once() for _ in range(calls)])


def fit(n_bytes: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """Latency α (s), bandwidth β (bytes/s) and the largest relative error of t = α + n/β (the alpha-beta model; Hockney
    1994).

    Least squares on relative errors, Σ((α + n/β - t)/t)², so that small and large sizes weigh alike; α and 1/β are not
    negative, hence β = inf where time does not grow with size.
    """
    n, t = np.asarray(n_bytes, float), np.asarray(seconds, float)
    # (sizes, 2): what α and 1/β add to the predicted over the measured time, which is to be 1
    columns = np.stack([1 / t, n / t], axis=1)
    scale = np.abs(columns).max(axis=0)  # else one column is 10⁶ times the other
    alpha, slope = np.linalg.lstsq(columns / scale, np.ones(len(t)), rcond=None)[0] / scale
    if alpha < 0:
        alpha, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    elif slope < 0:
        alpha, slope = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
    error = np.abs((alpha + n * slope) / t - 1).max()
    return float(alpha), float(1 / slope) if slope > 0 else float("inf"), float(error)


def conditions(world: World, backend: str) -> dict:
    """Under what the times were taken."""
    environment = machine.conditions()
    versions = environment["versions"]
    if backend == "mpi":
        mpi4py, library = sys.modules["mpi4py"], worlds.load_mpi("--backend mpi")
        versions |= {"mpi4py": mpi4py.__version__, "mpi": library.Get_library_version().split(",")[0].strip("\0 \n")}
    if backend == "nccl":
        versions |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cuda": torch.version.cuda}
        environment["gpu"] = torch.cuda.get_device_name()
    counts = {"processes": world.size, "processes_on_this_host": world.local_size, "threads": torch.get_num_threads()}
    return {"backend": backend, **counts, "dtype": "float32", **environment}


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1KiB,64KiB,1MB` → bytes. KiB, MiB, GiB are powers of 1024; kB, MB, GB of 1000; a bare number is bytes. Raises
    UserError."""
    try:
        sizes = {int(w if w.isascii() and w.strip().isdecimal() else quantity(w, "bytes")) for w in text.split(",")}
    except ValueError as e:
        raise UserError(f"--sizes: {e} Write for example --sizes 1KiB,64KiB,1MiB") from None
    if 0 in sizes:
        raise UserError("--sizes: a size must be at least 1 byte.")
    return tuple(sorted(sizes))


def run(backend: str, processes: int | None = None, sizes: tuple[int, ...] = SIZES) -> list[Row] | None:
    """Measures between `processes` processes. They are started here (2 by default), unless a launcher (torchrun,
    mpirun, srun) has started this one; then they are its, and every one but the first gets None.

    Raises UserError when the backend is not available here, when processes contradicts the launcher, or when there is
    only one process.
    """
    world = worlds.find()
    launched = world.launcher != "none"
    n = world.size if launched else processes or 2
    if processes not in (None, n):
        raise UserError(f"--processes {processes}: {world.launcher} has started {n}. Leave --processes out.")
    possible(n, world.local_size if launched else n, max(sizes))
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend == "nccl" and gpus < (1 if launched else n):  # a launcher may show each process its own GPU only
        raise UserError(
            f"--backend nccl needs a GPU for each of {n} processes, and NCCL; here: {gpus} GPUs. Use --backend gloo."
        )
    if launched:
        return _take_part(backend, sizes, world)
    folder = Path(tempfile.mkdtemp(prefix="gradus-collectives-"))  # what they print stays where one of them fails
    rows = run_group(n, _take_part, backend, sizes, log=folder / "workers.log")[0]
    shutil.rmtree(folder)
    return rows


def possible(n: int, local_size: int, size: int) -> None:
    """Raises UserError for n processes, of them `local_size` on this machine, that cannot send so many bytes."""
    if n < 2:
        raise UserError(f"--processes {n}: a collective needs at least 2 processes.")
    most = limits.memory() / 4 / local_size  # each process holds what it sends and what it gets, twice over at times
    if size > most:
        asked, possible = (in_unit(n, "binary") for n in (size, most))
        raise UserError(f"--sizes {asked}: {local_size} processes hold {possible} at most.")


def _take_part(backend: str, sizes: tuple[int, ...], world: World) -> list[Row] | None:
    """The rows on the first process, None on the others."""
    torch.set_num_threads(1)
    if backend != "mpi":
        worlds.join(world, "cuda" if backend == "nccl" else "cpu")
    elif (seen := worlds.load_mpi("--backend mpi").COMM_WORLD.size) != world.size:
        started = f"{world.launcher} started {world.size} processes, but MPI sees {seen}"
        raise UserError(f"{started}: mpi4py uses another MPI. {MPI_HELP}")
    rows = measure(world, sizes, backend)
    return rows if world.first else None


MPI_HELP = "Start it with: mpirun -n 4 gradus collectives --backend mpi"


def _under_mpirun(n: int, words: list[str]) -> int:
    """The exit code of this verb with these words, in n processes of MPI."""
    need("mpi4py", "mpi", "--backend mpi")
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    if mpirun is None:
        raise UserError(f"--backend mpi: there is no mpirun on PATH (Debian: apt-get install openmpi-bin). {MPI_HELP}")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # as root, and more processes than cores: Open MPI asks for a word on each
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [mpirun, "-n", str(n), sys.executable, "-m", "gradus", "collectives", "--backend", "mpi", *words]
    return run_program(command, environment)[0]


def collectives(args) -> int:
    """The verb: measure, print a table, keep the rows."""
    if args.backend not in BACKENDS:
        raise UserError(f"--backend {args.backend}: no such backend.{did_you_mean(args.backend, BACKENDS)}")
    sizes = SIZES if args.sizes is None else parse_sizes(args.sizes)
    if args.to:
        open(files.writable(Path(args.to)), "a", encoding="utf-8").close()  # before the work: may it be written?
    with ended_by_sigterm():
        if args.backend == "mpi" and worlds.find().launcher == "none":
            n, to = args.processes or 2, ["--to", args.to] if args.to else []
            possible(n, n, max(sizes))
            return _under_mpirun(n, ["--sizes", ",".join(map(str, sizes)), *to])
        rows = run(args.backend, args.processes, sizes)
    if rows is not None:
        say("\n".join(table(rows)))
        if args.to:
            with contextlib.closing(RowFile(Path(args.to))) as out:
                out.write(rows)
            say(f"{len(rows)} rows added to {args.to}")
    return 0


def table(rows: list[Row]) -> Iterator[str]:
    """What a run prints: its conditions, a line for each collective and size, a line for each fit."""
    c = rows[0].conditions
    versions = ", ".join(f"{k} {v}" for k, v in c["versions"].items())
    where = f"{c['processes']} processes on {c['host']} ({c['cpus']} CPUs, load {c['load']})"
    yield f"{c['backend']}, {where}, float32, {versions}"
    times = "size: bytes of the whole array; time: on the slowest process, median over calls"
    yield f"{times}; algorithm bandwidth: size / time; bus: as in nccl-tests\n"
    value = {(r.name, r.conditions.get("bytes")): r.value for r in rows}
    lines, fits = [], []
    for r in rows:
        name, c = r.conditions["collective"], r.conditions
        if r.name.endswith("/time"):
            speeds = [value[f"collective/{name}/{which}_bandwidth", c["bytes"]] for which in ("algorithm", "bus")]
            times = duration(r.value), " .. ".join(map(duration, c["quartiles"]))
            speeds = [f"{in_unit(speed, 'bytes')}/s" for speed in speeds]
            lines.append([name, in_unit(c["bytes"], "binary"), *times, str(c["calls"]), *speeds])
        if r.name.endswith("/latency"):
            slope = value.get((f"collective/{name}/bandwidth", None))
            speed = f"{in_unit(slope, 'bytes')}/s" if slope else "no growth"
            fits.append([name, duration(r.value), speed, f"{c['largest_error']:.0%}"])
    head = ["collective", "size", "time", "quartiles", "calls", "algorithm", "bus"]
    yield from columns(head, lines, range(1, 7), width())
    if fits:
        yield "\nfitted: time = latency + size / bandwidth (least squares on relative errors)"
        yield from columns(["collective", "latency", "bandwidth", "largest error"], fits, range(1, 4))
