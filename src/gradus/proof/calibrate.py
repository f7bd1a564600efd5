"""A few minutes of measuring this machine make a device that no table lists: what `roofline` prices operations by.

Operations are timed as a training step finds them, not as a loop over one of them would: other operands every time (out
of a pool larger than the inner caches), the operand that the step has just written fresh in the caches, results kept so
that memory is not the same again. A loop over the same operands is up to a third too fast. All points are measured in
turns, over and over until the time is up, and the median counts; the spread is the quartiles' distance over it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import os
import re
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradus import files, hardware, limits, models, torch_private
from gradus.errors import UserError
from gradus.hardware import Device, Link
from gradus.hardware.files import user_file
from gradus.measure import collectives
from gradus.parallel import status
from gradus.parallel import world as worlds
from gradus.parallel.apply import apply
from gradus.parallel.device import pick_device
from gradus.parallel.mesh import Mesh
from gradus.parallel.observe import Observer
from gradus.parallel.precision import Precision
from gradus.parallel.processes import run_program
from gradus.plan import batches, roofline
from gradus.plan.trace import Recorder, trace_recipe
from gradus.plan.work import Op, op_of
from gradus.proof.calibration_points import Point, Pool, attentions, memory_bound, products
from gradus.proof.memory_budget import coarse_name, device_of
from gradus.proof.timing import BUSY, OtherPrograms, taken
from gradus.recipe import presets, schema
from gradus.text import say
from gradus.train import machine
from gradus.train.session import Session
from gradus.train.step import Stepper

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLICE = 0.004  # s that a point gets in a round
KEPT = 2**25  # bytes of results that stay alive
LEAST = 10  # s of a calibration
FINE = 30  # s from which a calibration is not coarse
FIRST = 15  # s of the calibration before a machine's first run
FEW = (2**10, 2**16, 2**22)  # bytes that a coarse calibration sends
LOOK = 3  # s between two looks, during it, whether other programs have the processors
REMEMBERED = 3600  # s that a calibration which came to nothing is not tried again
OTHERS = "other programs use the processors; run gradus calibrate when they do not"
clock: Callable[[], float] = time.perf_counter


# ---------------------------------------------------------------- the clock


class Timer:
    """Times calls one by one, on the CPU's clock or between a GPU's events, with the results of earlier ones still
    alive."""

    def __init__(self, device: torch.device):
        self.device = device
        self.alive: collections.deque[tuple[Any, int]] = collections.deque()
        self.alive_bytes = 0

    def time(self, point: Point) -> float:
        """Seconds of one call."""
        operands = point.make_operands()
        if point.fresh is not None:
            operands[point.fresh].mul_(1.0)
        if self.device.type == "cpu":
            start = clock()
            out = point.call(*operands)
            seconds = clock() - start
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch_private.keep_gpu_busy(200_000)  # the device is behind, so the kernel is measured, not its launch
            begin.record()
            out = point.call(*operands)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        results = out if isinstance(out, tuple | list) else (out,)
        n_bytes = sum(t.nbytes for t in results if isinstance(t, Tensor))
        self.alive.append((out, n_bytes))
        self.alive_bytes += n_bytes
        while self.alive_bytes > KEPT and len(self.alive) > 1:
            self.alive_bytes -= self.alive.popleft()[1]
        return seconds

    def round(self, point: Point) -> None:
        """A few more times of a point. Its first call after other operations is slower and does not count: a step calls
        each of its operations layer after layer."""
        seconds = self.time(point)
        for _ in range(int(min(12, max(2, SLICE / seconds)))):
            point.times.append(self.time(point))


def traced(point: Point) -> Op:
    """The operation as the trace has it."""
    recorder = Recorder(Mesh.single(), {})
    recorder.counting, recorder.scope = True, "micro"
    operands = point.make_operands()
    with recorder:
        point.call(*operands)
    return max((op_of(key, 1) for key in recorder.ops), key=lambda op: (op.flops, op.bytes))


def usable_rates(pool: Pool, timer: Timer) -> dict[str, float]:
    """dtype → operations/s of a square product. A half precision that is slower than fp32 by half or more is left out:
    nobody uses it."""
    rates = {}
    for name, dtype in DTYPES.items():
        with contextlib.suppress(RuntimeError):
            point = Point(functools.partial(pool.take, 2, 512, 512, dtype=dtype), torch.mm)
            rates[name] = 2 * 512**3 / min(timer.time(point) for _ in range(5))
    return {name: rate for name, rate in rates.items() if rate > 0.5 * rates["fp32"]}


def measure(device: torch.device, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What `Device.measured` holds, but for dispatch and collectives, and the device's own peaks and bandwidth."""
    start = time.perf_counter()
    with torch.no_grad():
        pool, timer = Pool(device), Timer(device)
        if device.type == "cpu":
            machine.tune_memory()  # as in a run
        rates = usable_rates(pool, timer)
        points = [p for d in rates for of in (products, attentions, memory_bound) for p in of(pool, DTYPES[d])]
        rounds = measure_rounds(points, timer, (start, seconds), say)
        for p in points:
            p.op = traced(p)
    of_fit: dict[str, list[Point]] = {}
    for p in points:
        of_fit.setdefault(roofline.fit_key(p.op.kind, p.op.dtype), []).append(p)
    return {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "spread": round(statistics.median(p.spread for p in points), 4),
        "peaks": {
            dtype: max(p.op.flops / p.median for p in of_fit[roofline.fit_key("matmul", dtype)]) for dtype in rates
        },
        "bandwidth": bandwidth([p for p in points if p.op.kind == "memory"]),
        "points": dict(collections.Counter(p.op.kind for p in points)),
        "fits": {name: fit(of) for name, of in of_fit.items()},
    }


def measure_rounds(
    points: list[Point], timer: Timer, time_limit: tuple[float, float], say: Callable[[str], None]
) -> int:
    """Rounds over all points until the time is up. Returns how many. time_limit: (since when, for how many seconds)."""
    (start, seconds), rounds = time_limit, 0
    while not rounds or (time.perf_counter() - start) * (rounds + 1) / rounds < seconds:
        for p in points:
            timer.round(p)
        if not rounds:
            say(f"{len(points)} points, the first round took {time.perf_counter() - start:.0f} s")
        rounds += 1
    return rounds


def bandwidth(memory: list[Point]) -> float:
    """Bytes/s, read and written, of the fastest operation on the largest operands."""
    largest = max(p.op.bytes for p in memory)
    return max(p.op.bytes / p.median for p in memory if p.op.bytes > largest / 4)


def fit(points: list[Point]) -> list[float]:
    """The numbers of `roofline.kernel_seconds` that give these points of one kind back with the least error, of which
    longer ones count somewhat more: one number after the other is made larger or smaller, by less and less."""
    fastest = max((p.op.flops or p.op.bytes) / p.median for p in points)
    numbers = [4e-6, fastest, *([16.0] * 3 if points[0].op.kind == "matmul" else [])]

    def error(numbers: list[float]) -> float:
        factors = (roofline.kernel_seconds(p.op, numbers) / p.median for p in points)
        return sum(abs(math.log(factor)) * p.median**0.25 for factor, p in zip(factors, points))

    factor = 2.0
    while factor > 1.01:
        changes = itertools.product(range(len(numbers)), (factor, 1 / factor))
        best = min(([*numbers[:i], numbers[i] * by, *numbers[i + 1 :]] for i, by in changes), key=error)
        if error(best) < error(numbers):
            numbers = best
        else:
            factor = math.sqrt(factor)
    return [float(f"{number:.4g}") for number in numbers]


# ---------------------------------------------------------------- around operations


class TinyStep(NamedTuple):
    """A step of a model so small that nearly all of it is the framework's."""

    recipe: schema.Recipe
    stepper: Stepper
    micro_batches: list[dict]
    counts: dict[str, int]


TINY_MODEL = {"vocab_size": 32, "n_layers": 4, "d_model": 16, "n_heads": 2, "seq_len": 8, "d_ff": 32}
TINY_REST = {
    "name": "tiny", "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 2},
    "train": {"steps": 10, "clip_norm": 1.0},
}  # fmt: skip


def tiny_steps(device: torch.device) -> Iterator[TinyStep]:
    for tiny in presets.TINY:
        for precision in ("fp32", "bf16"):
            layout = {"precision": precision, "device": device.type}
            sections = {**TINY_REST, **tiny, "model": tiny["model"] | TINY_MODEL, "layout": layout}
            recipe = batches.complete(schema.Recipe.model_validate(sections))
            micro_batches = batches.micro_batches(recipe)
            parallel = apply(models.build(recipe.model).to(device), recipe.layout)
            parallel.bare.train()
            task_of = batches.task_without_data(recipe)
            stepper = Stepper(recipe, task_of, parallel, device, Precision(precision, device))
            counts = {kind: sum(b["counts"][kind] for b in micro_batches) for kind in micro_batches[0]["counts"]}
            yield TinyStep(recipe, stepper, micro_batches, counts)


PHASES = ("forward", "backward", "optimizer")


def dispatch(device: Device, on: torch.device, fine: bool) -> dict[str, float]:
    """Phase → seconds that the framework spends around one operation: what steps of tiny models take beyond their
    operations.

    The forward pass has modules and autograd's bookkeeping, the backward pass autograd's nodes, the optimizer its lists
    of parameters.
    """
    overhead = dict.fromkeys(PHASES, 0.0)
    launches = dict(overhead)
    for step in itertools.islice(tiny_steps(on), 0, None, 1 if fine else 2):
        target = "cuda" if on.type == "cuda" else "cpu"
        work = trace_recipe(step.recipe, micro_batches=step.micro_batches, target=target).work
        operations = dict.fromkeys(PHASES, 0.0)
        for op in [*work.micro, *work.step]:
            operations[op.phase] += roofline.op_seconds(op, device) * op.count if device.kind == "cpu" else 0.0
            launches[op.phase] += op.launches * op.count
        times = [phase_seconds(step) for _ in range((30 if fine else 6) + 3)][3:]
        for phase in PHASES:
            overhead[phase] += statistics.median(t[phase] for t in times) - operations[phase]
    around = {phase: max(0.0, overhead[phase] / launches[phase]) for phase in PHASES}
    return {**around, "recompute": around["forward"]}


def phase_seconds(step: TinyStep) -> dict[str, float]:
    """Seconds of one step by phase; of the host's alone where there is a GPU, for which nothing waits."""
    marks = []

    class BackwardPass(Observer):
        def edge(self, unit: str, name: str) -> None:
            if name in ("backward", "idle"):
                marks.append(clock())

    with step.stepper.parallel.observed(BackwardPass()):
        marks.append(clock())
        step.stepper.step(step.micro_batches, step.counts)
        marks.append(clock())
    return {phase: end - begin for phase, (begin, end) in zip(PHASES, itertools.pairwise(marks))}


# ---------------------------------------------------------------- the device


def this_device(on: torch.device, measured: dict[str, Any]) -> Device:
    """The entry of this machine, without dispatch and links."""
    measured, threads = dict(measured), measured["threads"]
    peaks, bandwidth = measured.pop("peaks"), measured.pop("bandwidth")
    if on.type == "cuda":
        properties = torch.cuda.get_device_properties(on)
        name, memory, node = properties.name, properties.total_memory, torch.cuda.device_count()
    else:
        host = machine.describe()
        name = coarse_name(threads) if measured.get("coarse") else host["cpu"]
        memory = host.get("memory_limit_bytes", host["memory_bytes"])
        node = max(1, host.get("cpus_allowed", host["cpus"]) // threads)
    how = f"gradus calibrate, torch {measured['torch']}, {threads} threads"
    return Device(
        name=name, peaks=peaks, memory=float(memory), bandwidth=bandwidth, kind="cpu" if on.type == "cpu" else "gpu",
        node=node, aliases=("this", "here", *(("cpu",) if on.type == "cpu" else ())),
        driver=re.escape(name) if on.type == "cuda" else None, date=measured["date"], measured=measured,
        source=f"{how}: rates reached, not the vendor's peaks",
    )  # fmt: skip


def this_link(on: torch.device, fine: bool) -> tuple[Link, dict[str, Any]]:
    """The link between two processes of this machine, and the fit of each collective: seconds of latency, bytes/s."""
    backend = "nccl" if on.type == "cuda" else "gloo"
    fits: dict[str, dict[str, float]] = {}
    for row in collectives.run(backend, 2, collectives.SIZES if fine else FEW) or []:
        _, name, figure = row.name.split("/")
        fit = fits.setdefault(name, {})
        if figure == "algorithm_bandwidth":  # the fastest, where no time grows with the size, as on a busy machine
            fit["bandwidth"] = max(fit.get("bandwidth", 0.0), float(f"{row.value:.4g}"))
        elif figure in ("latency", "bandwidth"):
            fit[figure] = float(f"{row.value:.4g}")
            fit["largest_error"] = float(round(row.conditions["largest_error"], 3))
    reduce = fits["all_reduce"]  # two ranks: the bytes of a call cross the link once, in two hops
    name = f"{backend} between 2 processes"
    return Link(name, reduce["bandwidth"], 1.0, reduce["latency"] / 2, source="gradus calibrate"), fits


def calibrate(seconds: float, on: torch.device, say: Callable[[str], None]) -> Device:
    """The device entry of this machine, in about so many seconds; of these links take 20, and what surrounds
    operations 10. Below FINE, coarse: links take 5 s and what surrounds operations 2."""
    start, fine = time.perf_counter(), seconds >= FINE
    several = torch.cuda.device_count() > 1 if on.type == "cuda" else limits.processors() > 1
    if fine:
        budget = max(10.0, seconds - (30 if several else 10))
    else:
        budget = seconds - (7 if several else 2)
    measured = measure(on, budget, say)
    elapsed = time.perf_counter() - start
    say(f"{measured['rounds']} rounds in {elapsed:.0f} s; median spread {measured['spread']:.1%}")
    device = this_device(on, measured | ({} if fine else {"coarse": True}))
    around = dispatch(device, on, fine)
    device.measured["dispatch"] = {phase: float(f"{value:.3g}") for phase, value in around.items()}
    if several:
        link, device.measured["collectives"] = this_link(on, fine)
        device = dataclasses.replace(device, link=link)
    device.measured["seconds"] = round(time.perf_counter() - start)
    return device


def lines(device: Device) -> Iterator[str]:
    """The device in a few lines."""
    m = device.measured
    yield f"{device.name}: {device.memory / 2**30:.1f} GiB, {m['threads']} threads, torch {m['torch']}, {m['date']}"
    yield "best matrix product  " + ", ".join(f"{k} {v / 1e9:,.0f} GFLOP/s" for k, v in device.peaks.items())
    yield f"memory               {device.bandwidth / 1e9:.1f} GB/s, read and written, beyond the caches"
    yield "around an operation  " + ", ".join(f"{phase} {value * 1e6:.1f} us" for phase, value in m["dispatch"].items())
    if device.link:
        speed = f"{device.link.bandwidth / 1e9:.2f} GB/s, {device.link.latency * 1e6:.0f} us per hop"
        yield f"all-reduce           {speed} ({device.link.name})"
    points = ", ".join(f"{n} {kind}" for kind, n in m["points"].items())
    yield f"points               {points}; {m['rounds']} rounds, median spread {m['spread']:.1%}, {m['seconds']} s"


def run(args: Any) -> list[str]:
    """The verb. Returns what is printed at the end."""
    on = pick_device("auto")
    least = LEAST if on.type == "cpu" else FINE
    if args.seconds < least:
        raise UserError(f"--seconds {args.seconds:g}: too short to measure every point twice; give at least {least}.")
    files.writable(Path(args.to or user_file("hardware")))  # before the work
    if args.threads:
        limits.start_threads(args.threads, f"--threads={args.threads}")
        torch.set_num_threads(args.threads)
    others = OtherPrograms()
    device = calibrate(args.seconds, on, say)
    if on.type == "cpu" and (share := others.share() or 0.0) > BUSY:
        use = taken(share, torch.get_num_threads(), key="--threads ") or f"other programs used {share:.1f} processors"
        say(f"note: {use}: this machine is faster than measured. Calibrate when they do not.")
    if "coarse" in device.measured:
        with contextlib.suppress(UserError):  # there is none
            if "coarse" not in (hardware.find("this", args.to).measured or {}):
                device = dataclasses.replace(device, aliases=())
    file = hardware.add_device(device, args.to)
    name = "this" if device.aliases else shlex.quote(device.name)
    return [*lines(device), f"written to {file}; use it with --on {name}"]


def calibrate_once(session: Session, busy: bool = False) -> str | None:
    """Before a run on a CPU of which no step time is known with so many threads: a coarse calibration, in a process of
    its own, which leaves nothing in this one's memory. Nothing where other processes wait too short for it, and where
    CI or GRADUS_NO_CALIBRATE is set. busy: other programs have the processors, so none is begun. Returns why there is
    none; a reason that took time to find is remembered for an hour."""
    layout, several, threads = session.recipe.layout, session.mesh.world.size > 1, torch.get_num_threads()
    off = os.environ.get("CI") or os.environ.get("GRADUS_NO_CALIBRATE") or (several and layout.timeout < 4 * FIRST)
    if off or session.device.type != "cpu" or pick_device("auto").type == "mps" or device_of(session.device, threads):
        return None
    memo = files.cache_dir() / f"not-measured-{socket.gethostname()}-{threads}.txt"
    with contextlib.suppress(OSError):
        if time.time() - memo.stat().st_mtime < REMEMBERED:
            return memo.read_text(encoding="utf-8")
    if busy:
        return OTHERS
    start = f"first run here with {threads} thread{'s' * (threads > 1)}: measuring this machine for the time of a step"
    say(f"{start} (skip it with GRADUS_NO_CALIBRATE=1) ...")
    began, others = time.perf_counter(), OtherPrograms()
    problem = calibrate_in_process(threads, others)
    if problem:
        with contextlib.suppress(OSError):  # only a convenience
            memo.parent.mkdir(parents=True, exist_ok=True)
            memo.write_text(problem, encoding="utf-8")
    end = f": {problem}" if problem else f"; {OTHERS}" if (others.share() or 0) > BUSY else ""
    say(f"{'given up after' if problem else 'measured in'} {time.perf_counter() - began:.0f} s{end}")
    return problem


def calibrate_in_process(threads: int, others: OtherPrograms) -> str | None:
    """A coarse calibration by a program of its own, which is none of this run's processes; why it failed, if it did. It
    is given up once others are seen to have the processors."""
    command = [sys.executable, "-m", "gradus", "calibrate", "--seconds", str(FIRST), "--threads", str(threads)]
    launchers = {name for launcher in worlds.LAUNCHERS for name in launcher[1:]}
    environment = {name: value for name, value in os.environ.items() if name not in launchers}
    environment |= {status.PARENT: str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
    look = LOOK

    def hopeless() -> bool:
        nonlocal look
        if others.elapsed() < look:
            return False
        look += LOOK
        return taken(others.share(), threads) is not None

    try:
        code, errors = run_program(command, environment, capture=True, seconds=4 * FIRST, hopeless=hopeless)
    except TimeoutError:
        return OTHERS if taken(others.share(), threads) else f"it took more than {4 * FIRST} s; run gradus calibrate"
    except OSError as e:
        return f"it failed: {e}"
    return f"it failed: {(errors.strip().splitlines() or ['no error message'])[-1]}" if code else None
